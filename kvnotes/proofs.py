"""What a model proves at load and every pair at its measurement: names, bounds, and the values that a record's own
numbers give again. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvnotes import effects, select
from kvnotes.records import Bounded, Instance, Model

# Largest logit error that the arithmetic of a dtype explains; a skipped cache or a wrong mask is off by far more.
TOLERANCE = {"float32": 2e-3, "float16": 0.25, "bfloat16": 1.0}

PREFIX = "prefix deviation"
DECODE = "cached decode equals full forward"
EMPTY = "empty edit equals base"
WHOLE = "full-downstream equals target"
IDENTITIES = (PREFIX, DECODE, EMPTY, WHOLE)  # of every pair, whatever the study

BRIDGE = "bridge equals plain transformers"
MASKS = "explicit masks equal the model's own"
ROW = "an edited row equals the copied cache"  # where the fast engine has the architecture; not in the oldest records
EDIT = "a cache edit moves the logits"
HOOK = "a hook moves the logits"
SAME = "a forward leaves its state unchanged"
STABLE = "a prefix does not depend on what follows"
ERRORS = (BRIDGE, MASKS, DECODE, ROW)
REACH = (EDIT, HOOK)  # effects, which must stand above their bound
ALWAYS = (BRIDGE, MASKS, DECODE, EDIT, HOOK, STABLE, SAME)  # of every model's self-check


def least_effect(errors: Mapping[str, float]) -> float:
    """What an effect must be above in a self-check with these errors: well above the model's own."""
    return 10 * max(*errors.values(), 1e-5)


def self_check_faults(model: Model) -> Iterator[str]:
    """What a record's self-check lacks, or what does not hold in it."""
    found = model.self_check
    yield from (f"the model's self-check {name!r} is missing" for name in ALWAYS if name not in found)
    for name, own in found.items():
        if not (own.passed and _holds(name, own)):
            said = "passed" if own.passed else "failed"
            yield f"the model's self-check {name!r} is {own.value} (bound {own.bound}), and said to have {said}"
    errors = {name: float(found[name].value or 0.0) for name in ERRORS if name in found}
    tolerance = TOLERANCE.get(model.dtype)
    for name, own in found.items():
        wanted = _bounds(name, tolerance, errors)
        if wanted and own.bound not in wanted:
            yield f"the bound of the model's self-check {name!r} is {own.bound}, {wanted[0]} is wanted"


def _holds(name: str, own: Bounded) -> bool:
    if own.value is None or own.bound is None:
        return False
    return own.value > own.bound if name in REACH else own.value <= own.bound


def _bounds(name: str, tolerance: float | None, errors: Mapping[str, float]) -> list[float]:
    """What a self-check's bound may be; none where that is not known."""
    if name in REACH:
        return [least_effect(errors)] if errors else []
    if name == SAME:
        return [0.0]
    if tolerance is None:
        return []
    exact = [0.0] if name == STABLE else []  # a model whose tokens share expert batches is held to the tolerance
    return [*exact, tolerance] if name in (*ERRORS, STABLE) else []


# --- identities -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unedited:
    """The unedited arms' margins, as a record keeps them."""

    base: float
    target: float

    @property
    def gap(self) -> float:
        """Target's margin minus base's."""
        return self.target - self.base


@dataclass(frozen=True)
class Places:
    """Of a measured instance's pair, what a study's identities ask for."""

    downstream: tuple[int, ...]


@dataclass(frozen=True)
class Kept:
    """A measured instance in the place of its trial. Identities that ask for more raise AttributeError."""

    unedited: Unedited
    pair: Places

    @classmethod
    def of(cls, one: Instance) -> Kept:
        """Raises KeyError for an instance without unedited margins."""
        margins = one.measures["unedited"]
        return cls(Unedited(margins["base"], margins["target"]), Places(select.downstream(one)))


Identities = Callable[[Any, Mapping[str, Any]], Mapping[str, float]]


def identities(instances: Sequence[Instance], own: Identities | None) -> dict[str, float]:
    """By identity its largest value over the measured instances, of those that their measures give: the margins of the
    cached decode, and the study's own. Raises AttributeError where the study's ask for what no record keeps."""
    found: dict[str, list[float]] = {}
    for one in instances:
        values = {DECODE: decode_error(one), **({} if own is None else own(Kept.of(one), one.measures))}
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return {name: effects.worst(values) for name, values in found.items()}


def decode_error(one: Instance) -> float:
    """How far a measured instance's cached decode is off its full forward, in logits."""
    unedited, full = (one.measures[name] for name in ("unedited", "full"))
    return max(abs(unedited[arm] - full[arm]) for arm in ("base", "target"))


def bound(identity: str, *, tolerance: float, floor: float, identities: float, exact: bool) -> float:
    """How far from 0 an identity may be: `identities`, as the settings say. In half precision (not `exact`) the
    model's own noise is the bound, where it is larger."""
    if identity == PREFIX:
        return 0.0
    if identity == DECODE:
        return tolerance
    return identities if exact else max(identities, floor)

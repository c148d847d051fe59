"""Every number of a record's instances: its path, whether it is a margin, and the place it is about. No torch.

A study says which of its measures are margins in MARGINS: by path, `*` standing for any name, what the levels below are
("margins": "state"; "map": "layer slot"). All else that it measures is a number, never a margin. Of the levels' names
these are known as places, by position in a list or by name in a mapping:

    slot       a downstream position, in their order
    layer      counted from 0
    head       a query head, in the order of the layers; by name `layer.head`
    kv_head    the same of KV heads
    below      a layer up to which an edit reaches, itself not edited: the place is the last layer that is

A path that is more exact than another (`places.*.margins.alone` than `places.*.margins`) takes its place. A path that
ends in `?` may be missing from all instances of a run: `mean?` needs a model whose keys can be moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvnotes import discover, effects, runner, select
from kvnotes.records import Instance, Model

Key = str | int
Place = Mapping[str, Any]
Levels = tuple[str, ...]
Declared = Mapping[int, Mapping[tuple[str, ...], Levels]]  # the levels below each path, paths by their length
NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number at a path of an instance's measures, lists by position in `keys` and by place in `name`.

    `place` holds what is known of position, slot, layer, head and kv_head.
    """

    keys: tuple[Key, ...]
    name: str
    value: float
    is_margin: bool
    place: Place = field(default_factory=dict)


def declared(study: str) -> Declared:
    """A study's margins and the runner's. Raises UnknownName for an unknown study."""
    found: dict[int, dict[tuple[str, ...], Levels]] = {}
    for text, levels in _margins(study).items():
        path = tuple(text.removesuffix("?").split("."))
        found.setdefault(len(path), {})[path] = tuple(levels.split())
    return found


def expected(study: str) -> set[str]:
    """The measures that hold margins in every run of a study. Raises UnknownName for an unknown study."""
    return {text.partition(".")[0] for text in _margins(study) if not text.endswith("?")}


def _margins(study: str) -> Mapping[str, str]:
    return {**runner.MARGINS, **getattr(discover.study(study), "MARGINS", NOTHING)}


def numbers(one: Instance, margins: Declared, model: Model) -> Iterator[Number]:
    """An instance's numbers in the record's order; text and what is missing are left out. `margins` as `declared`."""
    yield from _walk(dict(one.measures), _At((), (), None, {}), _Places(one, model), margins)


def recovery(one: Instance, margin: float) -> float | None:
    """How far a margin lies from base's to target's; None where the two are equal."""
    gap = effects.gap(one)
    return effects.moved(one, margin) / gap if gap else None


def misshapen(one: Instance, margins: Declared, model: Model) -> Iterator[str]:
    """Lists over slots, layers or heads that do not have as many members as the instance and the model have."""
    places = _Places(one, model)

    def look(value: Any, keys: tuple[Key, ...], levels: Levels | None) -> Iterator[str]:
        levels = _levels(margins, keys, levels)
        if not isinstance(value, list | dict):
            return
        level = levels[0] if levels else ""
        wanted = places.count(level) if isinstance(value, list) else None
        if wanted is not None and value and len(value) != wanted:  # a map is measured of some instances only
            yield f"{'.'.join(map(str, keys))} has {len(value)} values, one for each of {wanted} {level}s are wanted"
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from look(item, (*keys, key), levels[1:] if levels is not None else None)

    yield from look(dict(one.measures), (), None)


@dataclass(frozen=True)
class _At:
    """How far the walk has come; `levels` are those that are left below a declared path, None outside of any."""

    keys: tuple[Key, ...]
    names: tuple[str, ...]
    levels: Levels | None
    place: Place


def _walk(value: Any, at: _At, places: _Places, margins: Declared) -> Iterator[Number]:
    levels = _levels(margins, at.keys, at.levels)
    if isinstance(value, list | dict):
        level = levels[0] if levels else ""
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            name, place = places.of(level, key)
            below = _At(
                (*at.keys, key), (*at.names, name), None if levels is None else levels[1:], {**at.place, **place}
            )
            yield from _walk(item, below, places, margins)
    elif isinstance(value, int | float):
        yield Number(
            keys=at.keys, name=".".join(at.names), value=float(value), is_margin=levels is not None, place=at.place
        )


def _levels(margins: Declared, keys: tuple[Key, ...], left: Levels | None) -> Levels | None:
    """What the levels below a path are: those that it is declared with, else those that are left of a path above."""
    for path, levels in margins.get(len(keys), {}).items():
        if all(part in ("*", key) for part, key in zip(path, keys, strict=True)):
            return levels
    return left


class _Places:
    """What the members of a level are, in one instance."""

    def __init__(self, one: Instance, model: Model) -> None:
        self.one, self.model = one, model

    @cached_property
    def names(self) -> tuple[str, ...]:
        return select.instance_slots(self.one)

    @cached_property
    def downstream(self) -> tuple[int, ...]:
        return select.downstream(self.one)

    def count(self, level: str) -> int | None:
        """How many members a list over a level has; None where that is not fixed."""
        model = self.model
        counts: dict[str, Callable[[], int]] = {
            "slot": lambda: len(self.downstream),
            "layer": lambda: model.layers,
            "head": lambda: model.layers * model.heads,
            "kv_head": lambda: model.layers * model.kv_heads,
        }
        return counts[level]() if level in counts else None

    def of(self, level: str, key: Key) -> tuple[str, Place]:
        """A member's name, and the place that it is."""
        if level == "slot" and isinstance(key, int):
            position = self.downstream[key]
            return self.names[position], {"position": position, "slot": self.names[position]}
        if level == "layer" and str(key).isdigit():
            return str(key), {"layer": int(key)}
        if level == "below" and str(key).isdigit():
            return str(key), {"layer": int(key) - 1}
        if level in ("head", "kv_head"):
            each = self.model.heads if level == "head" else self.model.kv_heads
            layer, head = divmod(key, each) if isinstance(key, int) else map(int, key.split("."))
            return f"{layer}.{head}", {"layer": layer, level: head}
        return str(key), {}

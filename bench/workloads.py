"""The three workloads on one pair, and the pair itself: the first that the model decides right in both arms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.costs import Costs
from bench.measure import timed
from kvnotes import plan, runner
from kvnotes.config import MEGABYTE, RunConfig
from kvnotes.errors import KVNotesError
from kvnotes.instance import TokenPair
from kvnotes.interventions import ActivationPatch, CacheEdit
from kvnotes.sweep import Trial

NAMES = ("W1", "W2", "W3")
TRIES = 8  # pairs looked at before the one with the widest gap is taken


class BenchError(KVNotesError):
    """A benchmark that cannot be run, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Stride:
    """Which (layer, position) cells W3 patches: every n-th layer from the first, every n-th position from the first
    changed one, and the decision."""

    layers: int = 1
    positions: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """Interventions on a trial, and the FLOPs that they need."""

    name: str
    what: str
    interventions: tuple[CacheEdit | ActivationPatch, ...]
    flops: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Chosen:
    """The pair of one prompt length, with both arms run, which took `seconds`."""

    trial: Trial
    seconds: float
    competent: bool
    tried: int


def choose(model: Any, config: RunConfig) -> Chosen:
    """The first pair that the model is competent on; of the first few, the one with the widest gap where it is on none.

    Raises BenchError where no pair fits the model's tokenizer.
    """
    found: list[Chosen] = []
    for number, pair in enumerate(pairs_of(model, config)[:TRIES]):
        seconds, trial = timed(lambda pair=pair: run(model, pair, config), model.device)
        competent = trial.unedited.passes(config.gate_gap)
        found.append(Chosen(trial=trial, seconds=seconds, competent=competent, tried=number + 1))
        if competent:
            return found[-1]
    widest = max(found, key=lambda one: abs(one.trial.unedited.gap))
    return replace(widest, tried=len(found))


def pairs_of(model: Any, config: RunConfig) -> list[TokenPair]:
    """The config's pairs that fit the model. Raises BenchError where none does."""
    tokenised = runner.tokenise(model, runner.generate(config), query=config.query)
    pairs = [one for one in tokenised if isinstance(one, TokenPair)]
    if not pairs:
        raise BenchError(f"no {config.task} pair fits {config.model}: its tokenizer splits their values")
    return pairs


def build(name: str, trial: Trial, costs: Costs, stride: Stride) -> Workload:
    """A workload by name; the stride is W3's."""
    if name == "W3":
        return _residuals(trial, costs, stride)
    return {"W1": _positions, "W2": _heads}[name](trial, costs)


def edits(pair: TokenPair, positions: Sequence[int]) -> tuple[CacheEdit, ...]:
    """The cells of single positions, all layers, from the target into the base."""
    return tuple(CacheEdit(name=f"position {p}", positions=(p,), into="base", donor="target") for p in positions)


def spread(count: int, of: int) -> tuple[int, ...]:
    """`count` of the numbers below `of`, evenly spaced; all of them where there are no more."""
    return tuple(range(of)) if count >= of else tuple((2 * i + 1) * of // (2 * count) for i in range(count))


def run(model: Any, pair: TokenPair, config: RunConfig) -> Trial:
    """A trial from nothing: both arms run, which are the two traces."""
    return Trial.run(model, pair, engine="rows", budget=config.memory * MEGABYTE)


def fresh(trial: Trial, progress: Callable[[int, int], None] = lambda *_: None) -> Trial:
    """The trial as it was when its two arms had been run: nothing captured since."""
    return replace(trial, traces=dict(trial.traces), crops={}, echoes=[], fired={}, progress=progress)


def capture(trial: Trial, workload: Workload) -> None:
    """Capture what the interventions take from the unedited runs, so that it is not timed with them."""
    planned = [plan.make(one, trial.pair) for one in workload.interventions]
    for (point, arm), start in plan.wanted(planned).items():
        trial.capture(arm, point, [start])


def _positions(trial: Trial, costs: Costs) -> Workload:
    asked = edits(trial.pair, trial.pair.downstream)
    return Workload(
        name="W1",
        what="each downstream position, all layers, frozen cache",
        interventions=asked,
        flops=len(asked) * costs.cache_edit(len(trial.pair.base_ids)),
    )


def _heads(trial: Trial, costs: Costs) -> Workload:
    shape, tokens = trial.model.shape, len(trial.pair.base_ids)
    asked = tuple(
        _patch("z", layer, trial.pair.query[-1], head=head)
        for layer in range(shape["layers"])
        for head in range(shape["heads"])
    )
    return Workload(
        name="W2",
        what="each head's z at the decision",
        interventions=asked,
        flops=sum(costs.head_patch(one.layer, tokens) for one in asked),
    )


def _residuals(trial: Trial, costs: Costs, stride: Stride) -> Workload:
    pair = trial.pair
    places = [*range(pair.changed[0], pair.query[-1], stride.positions), pair.query[-1]]
    layers = range(0, trial.model.shape["layers"], stride.layers)
    asked = tuple(_patch("resid_pre", layer, place) for layer in layers for place in places)
    part = "" if stride == Stride() else f"; every {stride.layers}. layer, every {stride.positions}. position"
    return Workload(
        name="W3",
        what=f"residual at each (layer, position) from the changed one to the decision, recomputed{part}",
        interventions=asked,
        flops=sum(_residual_flops(costs, pair, one) for one in asked),
    )


def _residual_flops(costs: Costs, pair: TokenPair, one: ActivationPatch) -> int:
    same = one.layer == 0 and pair.base_ids[one.position] == pair.target_ids[one.position]
    return 0 if same else costs.residual_patch(one.layer, one.position, len(pair.base_ids))


def _patch(point: Any, layer: int, position: int, *, head: int | None = None) -> ActivationPatch:
    name = f"{point} {layer}{'' if head is None else f'.{head}'} at {position}"
    return ActivationPatch(
        name=name, point=point, layer=layer, position=position, head=head, into="base", donor="target"
    )

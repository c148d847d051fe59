"""From interventions to rows: which tokens each makes us run, over which cells, from which layer on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from kvnotes.cache import CacheError
from kvnotes.instance import TokenPair
from kvnotes.interventions import (
    ActivationPatch,
    AttentionBlock,
    CacheEdit,
    Intervention,
    Part,
    Point,
    Recompute,
    State,
    parts,
    run_of,
)
from kvnotes.rows import Block, Edit, Patch, Row

if TYPE_CHECKING:
    from kvnotes.sweep import Trial


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The tokens `ids` at `positions` are run, over the cells before `first` but those of `absent`, which some of the
    tokens replace. `traced`: the unedited run of the same tokens is known, so a row may enter above layer 0."""

    name: str
    parts: Sequence[Part]
    into: State
    first: int
    positions: tuple[int, ...]
    ids: tuple[int, ...]
    absent: tuple[int, ...]
    traced: bool

    @property
    def key(self) -> tuple[object, ...]:
        """What the rows of one group share."""
        return self.into, self.first, self.positions, self.ids


def make(one: Intervention, pair: TokenPair) -> Plan:
    """All tokens from an intervention's first changed activation or query on are run, and those recomputed."""
    first, anew = pair.query[0], {}
    for part in parts(one):
        if isinstance(part, ActivationPatch):
            first = min(first, part.position)
        elif isinstance(part, AttentionBlock) and part.queries is not None:
            first = min(first, *part.queries)
        elif isinstance(part, Recompute):
            anew |= {p: pair.ids(part.tokens)[p] for p in part.positions}
    if first < 1:
        raise CacheError(f"{one.name}: position {first} cannot be changed, a run needs a cached token before it")
    ids = pair.ids(run_of(one))
    positions = tuple(sorted({*range(first, len(ids)), *anew}))
    return Plan(
        name=one.name,
        parts=parts(one),
        into=run_of(one),
        first=first,
        positions=positions,
        ids=tuple(anew.get(p, ids[p]) for p in positions),
        absent=tuple(p for p in sorted(anew) if p < first),
        traced=not anew,
    )


def unedited(pair: TokenPair, into: State) -> Plan:
    """The query block of an unedited run."""
    start = pair.query[0]
    return Plan(
        name="unedited",
        parts=(),
        into=into,
        first=start,
        positions=pair.query,
        ids=pair.ids(into)[start:],
        absent=(),
        traced=True,
    )


def wanted(plans: Sequence[Plan]) -> dict[tuple[Point, State], int]:
    """The activations that the plans' rows start from and are given: by point and run, the earliest position."""
    found: dict[tuple[Point, State], int] = {}
    for plan in plans:
        patches = [part for part in plan.parts if isinstance(part, ActivationPatch)]
        asked: list[tuple[Point, State, int]] = []
        if plan.traced:
            asked.append(("resid_pre", plan.into, plan.first))
        asked += [(patch.point, patch.donor, patch.position) for patch in patches if isinstance(patch.donor, str)]
        for point, run, start in asked:
            found[point, run] = min(start, found.get((point, run), start))
    return found


def rows(plans: Sequence[Plan], trial: Trial) -> list[tuple[Plan, Row]]:
    """The plans with their rows. One that gives the run what it has already (the embedding of a token that both arms
    share) is the unedited run, bit for bit, and runs no more of it than the decision's last layer."""
    last, listed = Row(since=trial.model.shape["layers"] - 1), []
    for plan in plans:
        made = row(plan, trial)
        idle = plan.traced and _idle(made, plan, trial)
        listed.append((replace(unedited(trial.pair, plan.into), name=plan.name), last) if idle else (plan, made))
    return listed


def _idle(made: Row, plan: Plan, trial: Trial) -> bool:
    if made.edits or made.blocks or any(p.point != "resid_pre" or p.mix is not None for p in made.patches):
        return False
    own = trial.capture(plan.into, "resid_pre", plan.positions)
    return all(p.value is not None and torch.equal(own[p.layer, p.index], p.value.to(own)) for p in made.patches)


def row(plan: Plan, trial: Trial) -> Row:
    """The plan's parts, with what they take from the trial's arms. Raises CacheError for edits of one cell."""
    edits = [part for part in plan.parts if isinstance(part, CacheEdit)]
    for one, other in combinations(edits, 2):
        if one.cells.meet(other.cells):
            raise CacheError(f"{plan.name}: {one.name} and {other.name} edit the same cell")
    return Row(
        edits=tuple(_edit(part, plan, trial) for part in edits),
        patches=tuple(_patch(part, plan, trial) for part in plan.parts if isinstance(part, ActivationPatch)),
        blocks=tuple(b for part in plan.parts if isinstance(part, AttentionBlock) for b in _block(part, plan, trial)),
    )


def _edit(edit: CacheEdit, plan: Plan, trial: Trial) -> Edit:
    lost = [p for p in edit.positions if p >= plan.first or p in plan.absent]
    if lost and max(lost) < trial.pair.query[0]:
        raise CacheError(f"{plan.name}: cells {lost} are computed anew after the edit, which would change nothing")
    donor = trial.states[edit.donor] if isinstance(edit.donor, str) else edit.donor
    return Edit(cells=edit.cells, donor=None if donor is None else trial.cropped(donor, plan.first))


def _patch(patch: ActivationPatch, plan: Plan, trial: Trial) -> Patch:
    sizes, value = trial.model.shape, patch.donor
    if isinstance(value, str):
        value = trial.capture(value, patch.point, [patch.position])[patch.layer, 0]
        value = value if patch.head is None else value.unflatten(0, (sizes["heads"], -1))[patch.head]
    elif value is None and patch.mix is None:
        width = sizes["heads"] * sizes["d_head"] if patch.point == "z" else sizes["d_model"]
        value = torch.zeros(width if patch.head is None else sizes["d_head"], device=trial.model.device)
    index = plan.positions.index(patch.position)
    return Patch(point=patch.point, layer=patch.layer, index=index, value=value, head=patch.head, mix=patch.mix)


def _block(block: AttentionBlock, plan: Plan, trial: Trial) -> list[Block]:
    tokens = tuple(plan.positions.index(p) for p in queries(block, trial.pair))
    own = {p: plan.first + i for i, p in enumerate(plan.positions)}  # keys: the cells, then the run's own tokens
    keys = tuple(own.get(p, p) for p in block.positions)
    heads = tuple(range(trial.model.shape["heads"])) if block.heads is None else block.heads
    layers = range(trial.model.shape["layers"]) if block.layers is None else block.layers
    return [Block(layer=layer, heads=heads, tokens=tokens, keys=keys) for layer in layers]


def queries(block: AttentionBlock, pair: TokenPair) -> tuple[int, ...]:
    """The positions whose attention is blocked."""
    return pair.query if block.queries is None else block.queries


def changes(part: Part, trial: Trial) -> int:
    """How many cells, activations or attention weights an intervention changes. Raises CacheError where none."""
    sizes, stop = trial.model.shape, trial.pair.query[0]
    if isinstance(part, CacheEdit):
        count = part.cells.count(trial.states[part.into])
    elif isinstance(part, ActivationPatch):
        _check_axis(part.name, "position", [part.position], stop=len(trial.pair.base_ids))
        _check_axis(part.name, "layer", [part.layer], stop=sizes["layers"])
        count = 1
    elif isinstance(part, Recompute):
        _check_axis(part.name, "position", part.positions, stop=stop)
        count = len(part.positions) * sizes["layers"] * sizes["kv_heads"]
    else:
        asked = queries(part, trial.pair)
        _check_axis(part.name, "query", asked, stop=len(trial.pair.base_ids))
        _check_axis(part.name, "position", part.positions, stop=max(asked, default=-1) + 1)
        layers = range(sizes["layers"]) if part.layers is None else part.layers
        heads = range(sizes["heads"]) if part.heads is None else part.heads
        _check_axis(part.name, "layer", layers, stop=sizes["layers"])
        _check_axis(part.name, "query head", heads, stop=sizes["heads"])
        count = len(part.positions) * len(asked) * len(layers) * len(heads)
    if count == 0:
        raise CacheError(f"{part.name} names no cell; an intervention that changes nothing is a mistake")
    return count


def _check_axis(name: str, axis: str, chosen: Sequence[int], *, stop: int) -> None:
    if len(set(chosen)) != len(chosen) or not all(0 <= i < stop for i in chosen):
        raise CacheError(f"{name}: each {axis} of {tuple(chosen)} must be named once and lie within 0..{stop - 1}")

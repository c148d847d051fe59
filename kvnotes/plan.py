"""From interventions to rows: which tokens each makes us run, over which cells, from which layer on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvnotes import checks
from kvnotes.instance import TokenPair
from kvnotes.interventions import (
    ActivationPatch,
    AttentionBlock,
    CacheEdit,
    Intervention,
    Part,
    Point,
    State,
    columns,
    parts,
    run_of,
    width_of,
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
    first, ids = checks.first(one, pair), pair.ids(run_of(one))
    anew = checks.recomputed(one, pair)
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
        for patch in patches:
            if isinstance(patch.donor, str):
                asked.append((patch.point, patch.donor, patch.position))
        for point, run, start in asked:
            found[point, run] = min(start, found.get((point, run), start))
    return found


def rows(plans: Sequence[Plan], trial: Trial) -> list[tuple[Plan, Row]]:
    """The plans with their rows. One that gives the run what it has already (the embedding of a token that both arms
    share, or its cells in layer 0) is the unedited run, bit for bit, and runs no more of it than the last layer."""
    last, listed = Row(since=trial.model.shape["layers"] - 1), []
    for plan in plans:
        made = row(plan, trial)
        idle = plan.traced and _idle(made, plan, trial)
        listed.append((replace(unedited(trial.pair, plan.into), name=plan.name), last) if idle else (plan, made))
    return listed


def _idle(made: Row, plan: Plan, trial: Trial) -> bool:
    layers = trial.model.shape["layers"]
    if (
        any(edit.since < layers for edit in made.edits)
        or made.blocks
        or any(p.point != "resid_pre" or p.mix is not None for p in made.patches)
    ):
        return False
    own = trial.held(plan.into, "resid_pre", plan.first, len(trial.pair.base_ids))
    return all(p.value is not None and torch.equal(own[p.layer, p.index], p.value.to(own)) for p in made.patches)


def row(plan: Plan, trial: Trial) -> Row:
    """The plan's parts, with what they take from the trial's arms."""
    return Row(
        edits=tuple(_edit(part, plan, trial) for part in plan.parts if isinstance(part, CacheEdit)),
        patches=tuple(_patch(part, plan, trial) for part in plan.parts if isinstance(part, ActivationPatch)),
        blocks=tuple(b for part in plan.parts if isinstance(part, AttentionBlock) for b in _block(part, plan, trial)),
    )


def _edit(edit: CacheEdit, plan: Plan, trial: Trial) -> Edit:
    donor = trial.states[edit.donor] if isinstance(edit.donor, str) else edit.donor
    if donor is not None:
        donor = trial.cropped(donor, plan.first)
    if not plan.traced:  # such rows run every layer
        return Edit(cells=edit.cells, donor=donor)
    differs = trial.differs(plan.into, donor, plan.first)
    layers = range(len(differs)) if edit.layers is None else sorted(edit.layers)
    since = (layer for layer in layers if differs[layer, list(edit.positions)].any())
    return Edit(cells=edit.cells, donor=donor, since=next(since, len(differs)))


def _patch(patch: ActivationPatch, plan: Plan, trial: Trial) -> Patch:
    sizes, value = trial.model.shape, patch.donor
    if isinstance(value, str):
        value = trial.held(value, patch.point, patch.position, patch.position + 1)[patch.layer, 0]
        value = value[columns(patch.head, sizes["d_head"])]
    elif value is None and patch.mix is None:
        value = torch.zeros(width_of(patch.point, patch.head, sizes), device=trial.model.device)
    index = plan.positions.index(patch.position)
    return Patch(point=patch.point, layer=patch.layer, index=index, value=value, head=patch.head, mix=patch.mix)


def _block(block: AttentionBlock, plan: Plan, trial: Trial) -> list[Block]:
    tokens = tuple(plan.positions.index(p) for p in checks.queries(block, trial.pair))
    own = {p: plan.first + i for i, p in enumerate(plan.positions)}  # keys: the cells, then the run's own tokens
    keys = tuple(own.get(p, p) for p in block.positions)
    heads = tuple(range(trial.model.shape["heads"])) if block.heads is None else block.heads
    layers = range(trial.model.shape["layers"]) if block.layers is None else block.layers
    return [Block(layer=layer, heads=heads, tokens=tokens, keys=keys) for layer in layers]

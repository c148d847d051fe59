"""How much an intervention changes, and which are refused: the same for every engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from kvnotes.cache import CacheError, KVState
from kvnotes.instance import TokenPair
from kvnotes.interventions import (
    ActivationPatch,
    AttentionBlock,
    CacheEdit,
    Intervention,
    Part,
    Recompute,
    parts,
    run_of,
    width_of,
)

if TYPE_CHECKING:
    from kvnotes.sweep import Trial


def names(interventions: Sequence[Intervention]) -> list[str]:
    """The interventions' names. Raises CacheError where one is another's."""
    found: set[str] = set()
    for one in interventions:
        if one.name in found:
            raise CacheError(f"interventions need names of their own, {one.name!r} occurs more than once")
        found.add(one.name)
    return [one.name for one in interventions]


def changes(one: Intervention, trial: Trial) -> int:
    """How many cells, activations or attention weights an intervention changes.

    Raises CacheError for one that changes nothing, that names what is not there, or whose parts undo one another.
    """
    run_of(one)
    given = parts(one)
    count = sum(_count(part, trial) for part in given)
    if first(one, trial.pair) < 1:
        raise CacheError(f"{one.name}: position 0 cannot be changed, a run needs a cached token before it")
    if len(given) > 1:
        _check_edits(one, trial.pair)
        _check_patches(one)
    blocks = [part for part in given if isinstance(part, AttentionBlock)]
    if blocks:
        _check_sight(one.name, blocks, trial)
    return count


def first(one: Intervention, pair: TokenPair) -> int:
    """The first position from which on everything is computed anew: the query block's, or that of an earlier patched
    activation or blocked query."""
    patched = [part.position for part in parts(one) if isinstance(part, ActivationPatch)]
    blocked = [p for part in parts(one) if isinstance(part, AttentionBlock) for p in queries(part, pair)]
    return min([pair.query[0], *patched, *blocked])


def queries(block: AttentionBlock, pair: TokenPair) -> tuple[int, ...]:
    """The positions whose attention is blocked."""
    return pair.query if block.queries is None else block.queries


def recomputed(one: Intervention, pair: TokenPair) -> dict[int, int]:
    """The positions that selective recompute computes anew, each with the token that it is computed as."""
    anew = [part for part in parts(one) if isinstance(part, Recompute)]
    return {p: pair.ids(part.tokens)[p] for part in anew for p in part.positions}


def _count(part: Part, trial: Trial) -> int:
    sizes = trial.model.shape
    if isinstance(part, CacheEdit):
        count = _edited(part, trial)
    elif isinstance(part, ActivationPatch):
        _check_patch(part, trial)
        count = 1
    elif isinstance(part, Recompute):
        _check_axis(part.name, "position", part.positions, stop=trial.pair.query[0])
        count = len(part.positions) * sizes["layers"] * sizes["kv_heads"]
    else:
        count = _blocked(part, trial)
    if count == 0:
        raise CacheError(f"{part.name} names no cell; an intervention that changes nothing is a mistake")
    return count


def _edited(edit: CacheEdit, trial: Trial) -> int:
    if edit.donor == edit.into:
        raise CacheError(f"{edit.name}: the donor is the state that is edited, so nothing would change")
    if isinstance(edit.donor, KVState):
        trial.states[edit.into].fits(edit.donor)
    return edit.cells.count(trial.states[edit.into])


def _check_patch(patch: ActivationPatch, trial: Trial) -> None:
    sizes = trial.model.shape
    _check_axis(patch.name, "position", [patch.position], stop=len(trial.pair.base_ids))
    _check_axis(patch.name, "layer", [patch.layer], stop=sizes["layers"])
    if patch.point == "z":
        _check_axis(patch.name, "query head", [] if patch.head is None else [patch.head], stop=sizes["heads"])
    elif patch.head is not None:
        raise CacheError(f"{patch.name}: only z has heads, {patch.point} has none")
    width = width_of(patch.point, patch.head, sizes)
    if not isinstance(patch.donor, str | None) and tuple(patch.donor.shape) != (width,):
        raise CacheError(f"{patch.name}: its donor must be {width} numbers, it is {tuple(patch.donor.shape)}")


def _blocked(block: AttentionBlock, trial: Trial) -> int:
    sizes, asked = trial.model.shape, queries(block, trial.pair)
    _check_axis(block.name, "query", asked, stop=len(trial.pair.base_ids))
    _check_axis(block.name, "position", block.positions, stop=max(asked, default=-1) + 1)
    layers = range(sizes["layers"]) if block.layers is None else block.layers
    heads = range(sizes["heads"]) if block.heads is None else block.heads
    _check_axis(block.name, "layer", layers, stop=sizes["layers"])
    _check_axis(block.name, "query head", heads, stop=sizes["heads"])
    return sum(p <= q for p in block.positions for q in asked) * len(layers) * len(heads)


def _check_axis(name: str, axis: str, chosen: Sequence[int], *, stop: int) -> None:
    if len(set(chosen)) != len(chosen) or not all(0 <= i < stop for i in chosen):
        raise CacheError(f"{name}: each {axis} of {tuple(chosen)} must be named once and lie within 0..{stop - 1}")


def _check_edits(one: Intervention, pair: TokenPair) -> None:
    """Every cell is edited once, and none is computed anew afterwards."""
    edits = [part for part in parts(one) if isinstance(part, CacheEdit)]
    for a, b in combinations(edits, 2):
        if a.cells.meet(b.cells):
            raise CacheError(f"{one.name}: {a.name} and {b.name} edit the same cell")
    anew = recomputed(one, pair)
    lost = [p for edit in edits for p in edit.positions if p >= first(one, pair) or p in anew]
    if lost:
        raise CacheError(f"{one.name}: cells {sorted(lost)} are computed anew after their edit, which would be lost")


def _check_patches(one: Intervention) -> None:
    """No activation is patched twice: which came first would decide."""
    patches = [part for part in parts(one) if isinstance(part, ActivationPatch)]
    for a, b in combinations(patches, 2):
        same = (a.point, a.layer, a.position) == (b.point, b.layer, b.position)
        if same and (a.head is None or b.head is None or a.head == b.head):
            raise CacheError(f"{one.name}: {a.name} and {b.name} patch the same activation")


def _check_sight(name: str, blocks: Sequence[AttentionBlock], trial: Trial) -> None:
    """Every query keeps something to attend to: a softmax over nothing is whatever the code makes of it."""
    heads = range(trial.model.shape["heads"])
    for layer, window in enumerate(trial.model.windows.per_layer):
        here = [block for block in blocks if block.layers is None or layer in block.layers]
        for query in {q for block in here for q in queries(block, trial.pair)}:
            sight = range(0 if window is None else max(0, query + 1 - window), query + 1)
            mine = [block for block in here if query in queries(block, trial.pair)]
            if sum(len(block.positions) for block in mine) < len(sight):
                continue
            for head in heads:
                hidden = {p for b in mine if b.heads is None or head in b.heads for p in b.positions}
                if hidden.issuperset(sight):
                    raise CacheError(f"{name}: position {query} would see nothing in layer {layer}, head {head}")


def vocabulary(ids: Iterable[int], size: int) -> list[int]:
    """Token ids that are read. Raises CacheError for one that the vocabulary lacks."""
    found = list(ids)
    _check_axis("vocab", "token id", sorted(set(found)), stop=size)
    return found

"""Cells from another instance: which instances a study wants, their states, and their notes moved to one's own slots.

A study that needs them has `donors(pair, pairs, plan) -> Sequence[TokenPair]`, where `pairs` are all usable pairs of
the run by id and `plan` is what its `prepare` made (empty without one). The runner prefills those that it names and
passes them on, in the order named: `measure(..., donors=[Donor, ...])`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvnotes.cache import CacheError, KVState, Rotation
from kvnotes.forward import forward, prefill
from kvnotes.instance import TokenPair
from kvnotes.interventions import State


@dataclass(frozen=True, kw_only=True, eq=False)
class Donor:
    """Another instance of the run and both its arms' states, of the tokens before its query block."""

    pair: TokenPair
    states: Mapping[State, KVState]


def fill(model: Any, pair: TokenPair) -> Donor:
    """Both arms of a pair; the target goes on from the base's prefix, as a trial's does."""
    end, start = pair.query[0], pair.changed[0]
    base = prefill(model, pair.base_ids[:end], start=0)[1]
    rest, positions = torch.tensor([pair.target_ids[start:end]]), torch.arange(start, end)
    past = [base.crop(start)] if start else None
    target = forward(model, rest, positions=positions, past=past, over=None, read=[0], keep=True).states[0]
    return Donor(pair=pair, states={"base": base, "target": target})


def shared_slots(own: TokenPair, other: TokenPair, positions: Sequence[int]) -> dict[int, int]:
    """Those of one's own `positions` whose slot the other has before its query block, each with its position there."""
    there = {slot: p for p, slot in enumerate(other.slots) if p < other.query[0]}
    return {p: there[own.slots[p]] for p in positions if own.slots[p] in there}


def aligned(own: KVState, other: KVState, places: Mapping[int, int], rotation: Rotation | None) -> KVState:
    """One's own state with the cells at `places` (own position -> the other's) from the other: keys turned by RoPE
    (Su et al. 2021) to the position where they come to stand, values as they are.

    Raises CacheError for no place, for states of different models, and where a cell must move but the model's
    rotation is not known.
    """
    here, there = list(places), list(places.values())
    if not here:
        raise CacheError("the two instances share no slot, so there is nothing to align")
    offset = own.positions[0, here] - other.positions[0, there]
    if rotation is None and bool(offset.any()):
        raise CacheError("how this model turns its keys is not known, so its cells cannot be moved")
    layers = []
    for i, (mine, theirs) in enumerate(zip(own.layers, other.layers, strict=True)):
        made = {}
        for name, tensor in mine.items():
            cells = theirs[name][:, there]
            if name == "k" and rotation is not None:
                cells = rotation.turn(cells, layer=i, offset=offset)
            made[name] = tensor.clone()
            made[name][:, here] = cells
        layers.append(made)
    return KVState(tuple(layers), own.positions)

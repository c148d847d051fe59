"""Cells from other instances: which instances a study wants, their states, their notes moved to one's own slots, and
the mean cells of token classes.

A study that needs them has `donors(pair, pairs, plan) -> Sequence[TokenPair]`, where `pairs` are all usable pairs of
the run by id and `plan` is what its `prepare` made (empty without one). The runner prefills those that it names and
passes them on, in the order named: `measure(..., donors=[Donor, ...])`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvnotes import select
from kvnotes.cache import CacheError, KVState, Rotation
from kvnotes.forward import arms
from kvnotes.instance import TokenPair
from kvnotes.interventions import State
from kvnotes.sweep import Trial

Source = tuple[KVState, list[int], list[int]]  # a state, positions in it, and the class of each
Turn = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Donor:
    """Another instance of the run and both its arms' states, of the tokens before its query block."""

    pair: TokenPair
    states: Mapping[State, KVState]


def fill(model: Any, pair: TokenPair) -> Donor:
    """Both arms of a pair, run as a trial's are."""
    states: dict[State, KVState] = {name: state for name, (_, state) in arms(model, pair, stop=pair.query[0]).items()}
    return Donor(pair=pair, states=states)


class Lender:
    """Prefills the instances that are asked for, and keeps the last `KEPT` of them: pairs of one fold ask for the
    same ones."""

    KEPT = 16

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: dict[str, Donor] = {}  # in the order of use

    def lend(self, pairs: Sequence[TokenPair]) -> list[Donor]:
        """The pairs' states, in their order."""
        return [self._one(pair) for pair in pairs]

    def _one(self, pair: TokenPair) -> Donor:
        name = pair.pair.id
        self._kept[name] = found = self._kept.pop(name, None) or fill(self._model, pair)
        if len(self._kept) > self.KEPT:
            del self._kept[next(iter(self._kept))]
        return found


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
    turn = None if rotation is None else rotation.turn

    def cells(layer: int, name: str) -> Tensor:
        theirs = other.layers[layer][name][:, there]
        return theirs if turn is None or name != "k" else turn(theirs, layer=layer, offset=offset)

    return _filled(own, here, cells)


def _filled(own: KVState, here: list[int], cells: Callable[[int, str], Tensor]) -> KVState:
    """One's own state with other cells at some positions: `cells` gives those of a layer and a tensor's name."""
    layers = []
    for layer, mine in enumerate(own.layers):
        made = {name: tensor.clone() for name, tensor in mine.items()}
        for name, tensor in made.items():
            tensor[:, here] = cells(layer, name)
        layers.append(made)
    return KVState(tuple(layers), own.positions)


def class_mean(trial: Trial, lent: Sequence[Donor]) -> KVState | None:
    """The target's state with every downstream cell at the mean of its token class.

    The mean is over the class's downstream positions in both arms of this pair and of those lent, so that neither
    conclusion leads it; keys are turned back to position 0, averaged, and turned to where they come to stand (RoPE,
    Su et al. 2021). None where the model's rotation is not known.
    """
    if trial.model.rotation is None:
        return None
    rotate, own = trial.model.rotation.turn, trial.states["target"]
    classes = sorted({_classes(trial.pair)[p] for p in trial.pair.downstream})
    sources = [(state, *_members(one.pair, classes)) for one in (trial, *lent) for state in one.states.values()]
    here, members = _members(trial.pair, classes)

    def cells(layer: int, name: str) -> Tensor:
        turn = partial(rotate, layer=layer) if name == "k" else None
        means = _means(sources, len(classes), layer, name, turn)[:, members]
        return means if turn is None else turn(means, offset=own.positions[0, here])

    return _filled(own, here, cells)


def _classes(pair: TokenPair) -> list[str]:
    return [select.slot_class(slot) for slot in select.slot_names(pair)]


def _members(pair: TokenPair, classes: Sequence[str]) -> tuple[list[int], list[int]]:
    """The downstream positions that are of one of the classes, and which."""
    labels = _classes(pair)
    places = [p for p in pair.downstream if labels[p] in classes]
    return places, [classes.index(labels[p]) for p in places]


def _means(sources: Sequence[Source], classes: int, layer: int, name: str, turn: Turn | None) -> Tensor:
    """The classes' mean cells of one layer, [kv_head, class, d_head], keys as they would be at position 0."""
    gathered = []
    for state, places, _ in sources:
        cells = state.layers[layer][name][:, places]
        gathered.append(cells if turn is None else turn(cells, offset=-state.positions[0, places]))
    cells = torch.cat(gathered, dim=1)
    member = torch.tensor([index for _, _, own in sources for index in own], device=cells.device)
    summed = cells.new_zeros(cells.shape[0], classes, cells.shape[2]).index_add_(1, member, cells)
    return summed / member.bincount(minlength=classes).to(cells)[:, None]

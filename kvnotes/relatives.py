"""Prompts of one scenario, as donors of one another's cells: the four of a 2x2 of field and rule, and each of them with
other neutral rules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvnotes import discover, forward, probing, prompts, readout
from kvnotes.cache import KVState
from kvnotes.config import RunConfig
from kvnotes.donors import Donor, Lender, aligned, shared_slots
from kvnotes.hypothesis import RUNS, Lent
from kvnotes.instance import TokenPair
from kvnotes.interventions import CacheEdit, Intervention, State, Together
from kvnotes.sweep import Trial


@dataclass(frozen=True, kw_only=True, eq=False)
class Relative:
    """An arm of a pair of the same scenario. `places`: its position for each of one's own; `competent`: its pair passes
    the gate, so that what it concludes is known."""

    pair: TokenPair
    arm: State
    state: KVState
    places: Mapping[int, int]
    refilled: bool
    competent: bool

    def lent(self, own: KVState, rotation: Any) -> KVState:
        """One's own state with this prompt's cells at all places, keys turned to where they come to stand."""
        return aligned(own, self.state, self.places, rotation)


def relatives(
    trial: Trial, others: Sequence[Donor], lender: Lender, config: RunConfig, *, positions: Sequence[int], fillers: int
) -> list[Relative]:
    """Both arms of the pair itself, of `others` (which stand at the same positions, as `instance.partners` has it)
    and of all of them with `fillers` further sets of neutral rules. One whose slots are not one's own at some of the
    `positions` lends there nothing."""
    own = Donor(pair=trial.pair, states=trial.states)
    found = []
    for one in (own, *others):
        passed = trial.unedited.passes(config.gate_gap) if one is own else _passes(trial.model, one, config)
        found += _arms(one, {p: p for p in positions}, refilled=False, competent=passed)
    for one in (own, *others):
        for more in lender.lend(refills(trial.model, one.pair, config, count=fillers)):
            places = shared_slots(one.pair, more.pair, positions)
            if trial.model.rotation is None:
                places = {p: q for p, q in places.items() if p == q}
            if places:
                found += _arms(more, places, refilled=True, competent=_passes(trial.model, more, config))
    return found


def _arms(one: Donor, places: Mapping[int, int], **more: Any) -> list[Relative]:
    return [Relative(pair=one.pair, arm=arm, state=one.states[arm], places=places, **more) for arm in RUNS]


def _passes(model: Any, one: Donor, config: RunConfig) -> bool:
    """The competence gate of another pair, decoded over its states."""
    query = [one.pair.base_ids[p] for p in one.pair.query]
    states = [one.states[arm] for arm in RUNS]
    logits = forward.decode(model, states, query, start=one.pair.query[0], read=[len(query) - 1])
    return readout.arms(logits[0, 0], logits[1, 0], one.pair).passes(config.gate_gap)


def refills(model: Any, pair: TokenPair, config: RunConfig, *, count: int) -> list[TokenPair]:
    """The pair with the neutral rules of other seeds, each under an id of its own; none where it has no such rules, and
    without those that do not fit the tokenizer."""
    task, own = discover.task(config.task), pair.pair
    if not any(piece.role == "filler" for piece in own.base.user):
        return []
    asked = {"layout": own.layout, "pair": config.pair, "n": 2, "length": config.length, "wording": config.wording}
    made = []
    for more in range(1, count + 1):
        lender = task.generate(seed=config.seed + more, **asked)[0]
        text = replace(probing.refilled(own, lender), id=f"{own.id}~{more}")
        tokens = prompts.tokenise(text, tokenizer=model.tokenizer, template=model.template, query=config.query)
        made += [tokens] if isinstance(tokens, TokenPair) else []
    return made


class Resampler:
    """The cache edits that give parts of a run's positions another prompt's cells, each made once.

    Donors are numbered as in `lent`; 0 and 1 are the pair's own arms.
    """

    def __init__(self, trial: Trial, lent: Sequence[Relative], places: Sequence[int]) -> None:
        self.lent = lent
        self._trial, self._places = trial, tuple(places)
        self._states: dict[tuple[State, int], KVState] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self.edits: dict[str, Intervention] = {}

    def edit(self, note: Collection[int], donors: Lent, into: State) -> str:
        """The name of the edit that gives the note's positions one donor's cells and the rest another's, or leaves
        either as it is. Raises CacheError where no position would be edited."""
        parts = [
            ([p for p in self._places if (p in note) == inside], donor)
            for inside, donor in zip((True, False), donors, strict=True)
        ]
        by_donor: dict[int, list[int]] = {}
        for positions, donor in parts:
            if donor is not None:
                by_donor[donor] = sorted([*by_donor.get(donor, []), *positions])
        key = (into, *((donor, tuple(positions)) for donor, positions in sorted(by_donor.items()) if positions))
        if key not in self._names:
            self._names[key] = name = f"resampled:{len(self._names)}"
            self.edits[name] = self._made(name, into, dict(key[1:]))
        return self._names[key]

    def _made(self, name: str, into: State, cells: Mapping[int, tuple[int, ...]]) -> Intervention:
        edits = [
            CacheEdit(name=f"{name}, {donor}", positions=positions, into=into, donor=self._state(into, donor))
            for donor, positions in cells.items()
        ]
        return replace(edits[0], name=name) if len(edits) == 1 else Together(name=name, parts=edits)

    def _state(self, into: State, donor: int) -> KVState:
        key = (into, donor)
        if key not in self._states:
            self._states[key] = self.lent[donor].lent(self._trial.states[into], self._trial.model.rotation)
        return self._states[key]

    def mirror(self) -> CacheEdit:
        """The whole of the places from the target into the base, read backwards: all that is not resampled from the
        base into the target."""
        pair = self._trial.pair
        kept = tuple(p for p in (*pair.changed, *pair.downstream) if p not in self._places)
        return CacheEdit(name="mirror", positions=kept, into="target", donor="base")

"""Interventions as frozen data, and the trial that answers them in as few forwards as they have starting points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes import hooks, readout
from kvnotes.cache import Cells, KVState
from kvnotes.forward import decode, forward, prefill
from kvnotes.instance import TokenPair
from kvnotes.interventions import ActivationPatch, AttentionBlock, CacheEdit, Intervention, Point, State
from kvnotes.rows import Block, Edit, Patch, Query, Row, run_rows

Engine = Literal["rows", "hooks"]
ROWS = 256  # interventions of one forward; a row holds its activations, not a copy of the cache


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """One pair on one model: both arms prefilled, their unedited margins, and the answers to any edits.

    `full` holds the arms' margins from the full forward, `unedited` from the cached decode that edits go through;
    `floor` is the larger of their difference and the model's own noise floor, in logits.
    """

    model: Any
    engine: Engine
    pair: TokenPair
    states: Mapping[str, KVState]
    unedited: readout.Margins
    full: Mapping[str, float]
    floor: float
    full_downstream: float  # the margin of the full-downstream edit, which must be the target's
    echoes: list[tuple[State, float]] = field(default_factory=list)  # unedited margins that rode along with edits
    fired: dict[str, int] = field(default_factory=dict)  # what each intervention changed, for the record
    captured: dict[tuple[Point, State], Mapping[tuple[Point, int], Tensor]] = field(default_factory=dict)

    @classmethod
    def run(cls, model: Any, pair: TokenPair, *, engine: Engine) -> Trial:
        """Prefill both arms and read the decision."""
        filled = _arms(model, pair)
        states = {name: state.crop(pair.query[0]) for name, (_, state) in filled.items()}
        full = {name: float(readout.margin(logits, pair)) for name, (logits, _) in filled.items()}
        whole = Cells(positions=(*pair.changed, *pair.downstream))
        edited = states["base"].replace(whole, states["target"])
        logits = _decode(model, pair, [states["base"], states["target"], edited])
        unedited = readout.arms(logits[0], logits[1], pair)
        return cls(
            model=model,
            engine=engine,
            pair=pair,
            states=states,
            unedited=unedited,
            full=full,
            floor=max(_decode_error(full, unedited), model.noise_floor),
            full_downstream=float(readout.margin(logits[2], pair)),
        )

    def margins(self, interventions: Sequence[Intervention]) -> dict[str, float]:
        """Each intervention's margin, by its name; those that start at one position share a forward.

        The unedited run rides along with every batch, so that a row that reached another is seen.
        """
        self.fired.update({one.name: self._changes(one) for one in interventions})
        if self.engine == "hooks":
            return {one.name: self._by_hooks(one) for one in interventions}
        found: dict[str, float] = {}
        starts: dict[str, tuple[State, int]] = {one.name: (one.into, self._start(one)) for one in interventions}
        for into, start in dict.fromkeys(starts.values()):
            group = [one for one in interventions if starts[one.name] == (into, start)]
            for first in range(0, len(group), ROWS):
                found |= self._chunk(group[first : first + ROWS], into=into, start=start)
        return {one.name: found[one.name] for one in interventions}

    def _by_hooks(self, one: Intervention) -> float:
        """One intervention by the bridge's hooks, on a whole forward."""
        state = self.states[one.into]
        if isinstance(one, CacheEdit):
            logits = hooks.edited(self.model, state.replace(one.cells, self._donor(one)), self._ids(one.into))
        elif isinstance(one, AttentionBlock):
            logits = hooks.blinded(self.model, one, self._ids(one.into), queries=self.pair.query)
        else:
            logits = hooks.patched(self.model, one, self._ids(one.into), donor=self._ids(one.donor))
        return float(readout.margin(logits, self.pair))

    def _donor(self, edit: CacheEdit) -> KVState | None:
        return None if edit.donor is None else self.states[edit.donor]

    def _start(self, one: Intervention) -> int:
        """The first token that an intervention makes us run: a patched position, else the query block's first."""
        return min(one.position, self.pair.query[0]) if isinstance(one, ActivationPatch) else self.pair.query[0]

    def _changes(self, one: Intervention) -> int:
        """How many cells, activations or attention weights an intervention changes."""
        if isinstance(one, CacheEdit):
            return one.cells.count(self.states[one.into])
        return 1 if isinstance(one, ActivationPatch) else len(one.positions) * len(one.layers) * len(one.heads)

    def _chunk(self, group: Sequence[Intervention], *, into: State, start: int) -> dict[str, float]:
        ids = self._ids(into)[start:]
        vocab = [self.pair.base_action, self.pair.target_action]
        query = Query(tokens=ids, start=start, read=[len(ids) - 1], vocab=vocab)
        logits = run_rows(self.model, self._before(into, start), query, [self._row(one, start) for one in group])
        self.echoes.append((into, float(logits.unedited[0, 1] - logits.unedited[0, 0])))
        margins = (logits.rows[:, 0, 1] - logits.rows[:, 0, 0]).tolist()
        return {one.name: margin for one, margin in zip(group, margins, strict=True)}

    def _row(self, one: Intervention, start: int) -> Row:
        if isinstance(one, CacheEdit):
            return Row(edits=(Edit(cells=one.cells, donor=self._donor(one)),))
        if isinstance(one, AttentionBlock):
            places = product(one.layers, one.heads)
            return Row(blocks=tuple(Block(layer=i, head=h, positions=one.positions) for i, h in places))
        value = self.activation(one.point, one.layer, position=one.position, run=one.donor)
        if one.head is not None:
            value = value.unflatten(0, (self.model.shape["heads"], -1))[one.head]
        patch = Patch(point=one.point, layer=one.layer, index=one.position - start, value=value, head=one.head)
        return Row(patches=(patch,))

    def activation(self, point: Point, layer: int, *, position: int, run: State) -> Float[Tensor, "width"]:
        """An activation of an unedited run, at or after the first changed token; captured once for all layers."""
        start = self.pair.changed[0]
        if (point, run) not in self.captured:
            ids = self._ids(run)[start:]
            query = Query(tokens=ids, start=start, read=[0], vocab=[0], capture=frozenset({point}))
            self.captured[point, run] = run_rows(self.model, self._before(run, start), query, []).captured
        return self.captured[point, run][point, layer][position - start]

    def _ids(self, run: State) -> tuple[int, ...]:
        return self.pair.base_ids if run == "base" else self.pair.target_ids

    def _before(self, run: State, start: int) -> KVState:
        """The run's state of the tokens before `start`."""
        state = self.states[run]
        return state if start == state.length else state.crop(start)

    def recovery(self, margin: float) -> float | None:
        """Recovery of a margin; None where the arms' gap is not above this trial's noise floor."""
        return readout.recovery(margin, self.unedited, floor=self.floor)

    def identities(self) -> dict[str, float]:
        """Numbers that must be 0: the shared prefix's deviation between the arms (absolute), the cached decode's
        margins against the full forward's (in logits, within the dtype's tolerance), and those of the empty edits
        against base and of the full-downstream edit against target (in units of the gap, at least 1)."""
        start, scale = self.pair.changed[0], max(1.0, abs(self.unedited.gap))
        echoes = self.echoes or [("base", _decode_margins(self, [self.states["base"]])[0])]
        return {
            "prefix deviation": self.states["base"].deviation(self.states["target"], start=0, stop=start),
            "cached decode equals full forward": _decode_error(self.full, self.unedited),
            "empty edit equals base": max(abs(echo - getattr(self.unedited, into)) for into, echo in echoes) / scale,
            "full-downstream equals target": abs(self.full_downstream - self.unedited.target) / scale,
        }


def _arms(model: Any, pair: TokenPair) -> dict[str, tuple[Tensor, KVState]]:
    """Each arm's last logits and state. The base is one whole forward; the target goes on from its prefix, since the
    tokens before the changed span are the same and know nothing of it (a check at load holds the model to that)."""
    base = prefill(model, pair.base_ids, start=0)
    start = pair.changed[0]
    rest = torch.tensor([pair.target_ids[start:]])
    positions, past = torch.arange(start, len(pair.target_ids)), [base[1].crop(start)]
    out = forward(model, rest, positions=positions, past=past, over=None, read=[rest.shape[1] - 1], keep=True)
    return {"base": base, "target": (out.logits[0, 0], out.states[0])}


def _decode_error(full: Mapping[str, float], unedited: readout.Margins) -> float:
    """The larger difference of the two arms' margins, in logits."""
    return max(abs(full["base"] - unedited.base), abs(full["target"] - unedited.target))


def _decode_margins(trial: Trial, states: Sequence[KVState]) -> list[float]:
    return readout.margin(_decode(trial.model, trial.pair, states), trial.pair).tolist()


def _decode(model: Any, pair: TokenPair, states: Sequence[KVState]) -> Float[Tensor, "batch vocab"]:
    query = [pair.base_ids[p] for p in pair.query]
    logits = decode(model, states, query, start=pair.query[0], read=[len(query) - 1])
    return torch.squeeze(logits, dim=1)

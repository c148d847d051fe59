"""Interventions as frozen data, and the trial that answers them: many cache edits, one batched decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes import readout
from kvnotes.cache import Cells, KVState
from kvnotes.forward import decode, forward, prefill
from kvnotes.instance import TokenPair

State = Literal["base", "target"]
ROWS = 16  # edits of one batched decode; each row holds its own copy of the cache


@dataclass(frozen=True, kw_only=True)
class CacheEdit:
    """Replace cells of the state `into` by those of `donor` (None zeroes them), then recompute the query block.

    `positions` are token positions of the pair; layers and kv_heads of None mean all.
    """

    name: str
    positions: tuple[int, ...]
    into: State
    donor: State | None
    layers: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None

    @property
    def cells(self) -> Cells:
        """The cells that the edit replaces."""
        return Cells(positions=self.positions, layers=self.layers, kv_heads=self.kv_heads)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """One pair on one model: both arms prefilled, their unedited margins, and the answers to any edits.

    `full` holds the arms' margins from the full forward, `unedited` from the cached decode that edits go through;
    `floor` is the larger of their difference and the model's own noise floor, in logits.
    """

    model: Any
    pair: TokenPair
    states: Mapping[str, KVState]
    unedited: readout.Margins
    full: Mapping[str, float]
    floor: float
    full_downstream: float  # the margin of the full-downstream edit, which must be the target's
    echoes: list[float] = field(default_factory=list)  # the base's margin again, as a row of every batch of edits
    fired: dict[str, int] = field(default_factory=dict)  # cells that each edit changed, for the record

    @classmethod
    def run(cls, model: Any, pair: TokenPair) -> Trial:
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
            pair=pair,
            states=states,
            unedited=unedited,
            full=full,
            floor=max(_decode_error(full, unedited), model.noise_floor),
            full_downstream=float(readout.margin(logits[2], pair)),
        )

    def edit(self, edit: CacheEdit) -> KVState:
        """The state an edit makes. Raises CacheError where it names no cell."""
        donor = None if edit.donor is None else self.states[edit.donor]
        return self.states[edit.into].replace(edit.cells, donor)

    def margins(self, edits: Sequence[CacheEdit]) -> dict[str, float]:
        """Each edit's margin, by its name. The base rides along unedited: a row that reached another is seen."""
        found: dict[str, float] = {}
        for start in range(0, len(edits), ROWS):
            batch = edits[start : start + ROWS]
            self.fired.update({edit.name: edit.cells.count(self.states[edit.into]) for edit in batch})
            logits = _decode(self.model, self.pair, [*(self.edit(edit) for edit in batch), self.states["base"]])
            *margins, echo = readout.margin(logits, self.pair).tolist()
            found |= {edit.name: margin for edit, margin in zip(batch, margins, strict=True)}
            self.echoes.append(echo)
        return found

    def recovery(self, margin: float) -> float | None:
        """Recovery of a margin; None where the arms' gap is not above this trial's noise floor."""
        return readout.recovery(margin, self.unedited, floor=self.floor)

    def identities(self) -> dict[str, float]:
        """Numbers that must be 0: the shared prefix's deviation between the arms (absolute), the cached decode's
        margins against the full forward's (in logits, within the dtype's tolerance), and those of the empty edits
        against base and of the full-downstream edit against target (in units of the gap, at least 1)."""
        start, scale = self.pair.changed[0], max(1.0, abs(self.unedited.gap))
        echoes = self.echoes or _decode_margins(self, [self.states["base"]])
        return {
            "prefix deviation": self.states["base"].deviation(self.states["target"], start=0, stop=start),
            "cached decode equals full forward": _decode_error(self.full, self.unedited),
            "empty edit equals base": max(abs(echo - self.unedited.base) for echo in echoes) / scale,
            "full-downstream equals target": abs(self.full_downstream - self.unedited.target) / scale,
        }


def _arms(model: Any, pair: TokenPair) -> dict[str, tuple[Tensor, KVState]]:
    """Each arm's last logits and state. Both are whole forwards of one shape, so that equal prefixes give bit-equal
    cells; where experts batch tokens together that does not hold, and the target goes on from the base's prefix."""
    base = prefill(model, pair.base_ids, start=0)
    if not model.mixes_experts:
        return {"base": base, "target": prefill(model, pair.target_ids, start=0)}
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

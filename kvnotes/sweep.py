"""The trial: one pair on one model, and the answers to any interventions in as few token-forwards as it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes import attribution, checks, hooks, memory, plan, proofs, readout, rows
from kvnotes.cache import CacheError, Cells, KVState
from kvnotes.forward import arms, decode, forward
from kvnotes.instance import TokenPair
from kvnotes.interventions import ActivationPatch, Intervention, Point, State
from kvnotes.plan import Plan
from kvnotes.points import patterns, tree_of, visited

Engine = Literal["rows", "hooks"]
Progress = Callable[[int, int], None]  # interventions answered, of how many
ENTRIES = 4  # layers over which the rows of one forward may enter: fewer run alone, more make small products
Seen = dict[tuple[Point, int], Float[Tensor, "row pos width"]]


@dataclass(frozen=True, eq=False)
class Trace:
    """Activations of one point and run, at every layer and at the positions from `start` on."""

    start: int
    values: Float[Tensor, "layer pos width"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """One pair on one model: both arms prefilled, their unedited margins, and the answers to any edits.

    `full` holds the arms' margins from the full forward, `unedited` from the cached decode that edits go through;
    `floor` is the larger of their difference and the model's own noise floor, in logits. `budget` is what the
    activations of one forward may take, in bytes.
    """

    model: Any
    engine: Engine
    budget: int
    pair: TokenPair
    states: Mapping[State, KVState]
    unedited: readout.Margins
    full: Mapping[State, float]
    floor: float
    full_downstream: float  # the margin of the full-downstream edit, which must be the target's
    progress: Progress
    echoes: list[tuple[State, float]] = field(default_factory=list)  # unedited margins that rode along with edits
    fired: dict[str, int] = field(default_factory=dict)  # what each intervention changed, for the record
    traces: dict[tuple[Point, State], Trace] = field(default_factory=dict)
    crops: dict[tuple[int, int], tuple[KVState, KVState]] = field(default_factory=dict)
    known_differences: dict[tuple[State, int], tuple[KVState, np.ndarray]] = field(default_factory=dict)

    @classmethod
    def run(
        cls, model: Any, pair: TokenPair, *, engine: Engine, budget: int, progress: Progress = lambda *_: None
    ) -> Trial:
        """Prefill both arms and read the decision. Raises CacheError where the first token is changed: a run needs
        one before it."""
        if pair.changed[0] == 0:
            raise CacheError(f"{pair.pair.id}: the first token is changed; the changed span needs a token before it")
        filled = arms(model, pair, stop=len(pair.base_ids))
        states: dict[State, KVState] = {name: state.crop(pair.query[0]) for name, (_, state) in filled.items()}
        full: dict[State, float] = {name: float(readout.margin(x, pair)) for name, (x, _) in filled.items()}
        whole = Cells(positions=(*pair.changed, *pair.downstream))
        edited = states["base"].replace(whole, states["target"])
        seen: Seen = {}
        # a model whose layers cannot be seen has no traces, and the hooks engine asks for none
        with nullcontext() if model.twin is None else _watched(model.twin, rows.POINTS, seen):
            logits = _decode(model, pair, [states["base"], states["target"], edited])
        unedited = readout.arms(logits[0], logits[1], pair)
        return cls(
            model=model,
            engine=engine,
            budget=budget,
            pair=pair,
            states=states,
            unedited=unedited,
            full=full,
            floor=max(_decode_error(full, unedited), model.noise_floor),
            full_downstream=float(readout.margin(logits[2], pair)),
            progress=progress,
            traces=_traces(seen, pair.query[0], runs=("base", "target")),
        )

    # --- answers --------------------------------------------------------------------------------------------

    def margins(self, interventions: Sequence[Intervention]) -> dict[str, float]:
        """Each intervention's margin, by its name, in as few forwards as the memory budget allows.

        The unedited run rides along with every batch, so that a row that reached another is seen.
        """
        vocab = [self.pair.base_action, self.pair.target_action]
        answers = self.logits(interventions, vocab=vocab)
        both = torch.stack([*answers.values(), torch.zeros(2, device=self.model.device)])
        return dict(zip(answers, (both[:, 1] - both[:, 0]).tolist(), strict=False))

    def screened(self, patches: Sequence[ActivationPatch], *, least: float) -> dict[str, float]:
        """The exact margins of those patches whose effect is, to first order, more than `least` of the arms' gap.

        The screen can miss: a patch that is left out may have an effect that its gradient does not show.
        """
        sizes = attribution.effects(self, patches)
        return self.margins([patch for patch in patches if sizes[patch.name] > least * abs(self.unedited.gap)])

    def logits(self, interventions: Sequence[Intervention], *, vocab: Sequence[int] | None) -> dict[str, Tensor]:
        """Each intervention's float32 logits at the decision, by its name, for some token ids or (None) for all.

        Raises CacheError for an intervention that changes nothing, that names what is not there, or whose name is
        another's.
        """
        names = checks.names(interventions)
        self.fired.update({one.name: checks.changes(one, self) for one in interventions})
        read = None if vocab is None else [*self._ids(vocab), self.pair.base_action, self.pair.target_action]
        found: dict[str, Tensor] = {}
        for batch in (
            self._by_hooks(interventions, read) if self.engine == "hooks" else self._by_rows(interventions, read)
        ):
            found |= batch
            self.progress(len(found), len(names))
        return {name: found[name] if vocab is None else found[name][: len(vocab)] for name in names}

    def _ids(self, vocab: Sequence[int]) -> list[int]:
        return checks.vocabulary(vocab, self.model.hf.config.vocab_size)

    def _by_hooks(self, interventions: Sequence[Intervention], read: list[int] | None) -> Iterator[dict[str, Tensor]]:
        """Each by the bridge's hooks, on a whole forward of its own."""
        for one in interventions:
            logits = hooks.answer(self.model, one, pair=self.pair, states=self.states)
            yield {one.name: logits if read is None else logits[read]}

    def _by_rows(self, interventions: Sequence[Intervention], read: list[int] | None) -> Iterator[dict[str, Tensor]]:
        """Many in a forward, cut where its activations would outgrow the memory budget."""
        plans = [plan.make(one, self.pair) for one in interventions]
        for (point, run), start in plan.wanted(plans).items():
            self._trace(point, run, start=start)
        # rows that enter within a few layers of one another, those of one group side by side
        listed = plan.rows(plans, self)
        listed.sort(key=lambda planned: (_enters(*planned) // ENTRIES, planned[0].key))
        size = self.model.hf.config.vocab_size if read is None else len(read)
        costs = [memory.row(self.model, tokens=len(x.ids), row=row, cells=x.first, read=size) for x, row in listed]
        for part in memory.batches(costs, self.budget):
            yield self._forward(listed[part], read)

    def _forward(self, batch: list[tuple[Plan, rows.Row]], read: list[int] | None) -> dict[str, Tensor]:
        """One forward of a batch's rows, group by group, and of the unedited run beside them."""
        echo = plan.unedited(self.pair, batch[0][0].into)
        since = min(_enters(*planned) for planned in batch)
        grouped: dict[object, list[tuple[Plan, rows.Row]]] = {}
        for one, row in [(echo, rows.Row(since=since)), *batch]:
            grouped.setdefault(one.key, []).append((one, row))
        answers = rows.run(self.model, [self._group(members) for members in grouped.values()], vocab=read)
        planned = [one for members in grouped.values() for one, _ in members]
        found = dict(zip(planned, torch.cat(answers), strict=True))
        self.echoes.append((echo.into, self._margin(found.pop(echo), read)))
        return {one.name: logits for one, logits in found.items()}

    def _group(self, members: Sequence[tuple[Plan, rows.Row]]) -> rows.Group:
        one = members[0][0]
        return rows.Group(
            shared=self.cropped(self.states[one.into], one.first),
            ids=one.ids,
            positions=one.positions,
            rows=tuple(row for _, row in members),
            absent=one.absent,
            trace=self.held(one.into, "resid_pre", one.first, len(self.pair.base_ids)) if one.traced else None,
        )

    def _margin(self, logits: Float[Tensor, "read"], read: list[int] | None) -> float:
        """The margin of logits that end with the two actions', or that are of the whole vocabulary."""
        base, target = (self.pair.base_action, self.pair.target_action) if read is None else (-2, -1)
        return float(logits[target] - logits[base])

    def recovery(self, margin: float) -> float | None:
        """Recovery of a margin; None where the arms' gap is not above this trial's noise floor."""
        return readout.recovery(margin, self.unedited, floor=self.floor)

    def identities(self) -> dict[str, float]:
        """Numbers that must be 0: the shared prefix's deviation between the arms (absolute), the cached decode's
        margins against the full forward's (in logits, within the dtype's tolerance), and those of the empty edits
        against base and of the full-downstream edit against target (in units of the gap, at least 1)."""
        start, scale = self.pair.changed[0], max(1.0, abs(self.unedited.gap))
        echoes = self.echoes or [("base", _decode_margins(self, [self.states["base"]])[0])]
        errors = [abs(echo - getattr(self.unedited, into)) for into, echo in echoes]
        return {
            proofs.PREFIX: self.states["base"].deviation(self.states["target"], start=0, stop=start),
            proofs.DECODE: _decode_error(self.full, self.unedited),
            proofs.EMPTY: float(torch.tensor(errors).max()) / scale,  # which keeps a NaN, max may lose it
            proofs.WHOLE: abs(self.full_downstream - self.unedited.target) / scale,
        }

    # --- what an unedited run holds -----------------------------------------------------------------------------

    def capture(self, run: State, point: Point, positions: Sequence[int]) -> Float[Tensor, "layer pos width"]:
        """An activation of an unedited run at every layer and at some positions; z has its heads side by side.

        Raises CacheError for no position, or one that is not there.
        """
        places = list(positions)
        if not places or not all(0 <= p < len(self.pair.base_ids) for p in places):
            raise CacheError(f"positions {places} must be at least one, within 0..{len(self.pair.base_ids) - 1}")
        start = min(places)
        whole = self.held(run, point, start, len(self.pair.base_ids))
        return whole[:, [p - start for p in places]]  # a copy, which the caller may change

    def held(self, run: State, point: Point, start: int, stop: int) -> Float[Tensor, "layer pos width"]:
        """The same at the positions start..stop-1, as a view that must not be changed."""
        trace = self._trace(point, run, start=start)
        return trace.values[:, start - trace.start : stop - trace.start]

    def patterns(self, run: State) -> Float[Tensor, "layer head query key"]:
        """The attention of the query block in an unedited run, over every position."""
        seen: dict[int, Tensor] = {}
        with patterns(tree_of(self.model), lambda layer, pattern: seen.update({layer: pattern[0]})):
            _decode(self.model, self.pair, [self.states[run]])
        return torch.stack([seen[layer] for layer in sorted(seen)])

    def cropped(self, state: KVState, length: int) -> KVState:
        """A state's first cells; the same object for the same state, so that edits from one donor are made together."""
        if length == state.length:
            return state
        key = (id(state), length)
        if key not in self.crops:
            self.crops[key] = (state, state.crop(length))  # the state is held, so that its id stays its own
        return self.crops[key][1]

    def differs(self, into: State, donor: KVState | None, length: int) -> np.ndarray:
        """Which of a state's first cells a donor's are not bit for bit, by layer and position, in any KV head; all,
        where there is no donor."""
        own = self.cropped(self.states[into], length)
        if donor is None:
            return np.ones((own.n_layers, length), dtype=bool)
        key = (into, id(donor))
        if key not in self.known_differences:
            own.fits(donor)
            pairs = zip(own.layers, donor.layers, strict=True)
            each = [torch.stack([(a[n] != b[n]).any(dim=(0, 2)) for n in a]).any(dim=0) for a, b in pairs]
            # the donor is held, so that its id stays its own
            self.known_differences[key] = (donor, torch.stack(each).cpu().numpy())
        return self.known_differences[key][1]

    def _trace(self, point: Point, run: State, *, start: int) -> Trace:
        """A point's activations from `start` on, captured where they are not there yet."""
        held = self.traces.get((point, run))
        if held is None or held.start > start:
            ids = torch.tensor([self.pair.ids(run)[start:]])
            past = [self.states[run].crop(start)] if start else None
            positions, seen = torch.arange(start, start + ids.shape[1]), {}
            with _watched(tree_of(self.model), (point,), seen):
                forward(self.model, ids, positions=positions, past=past, over=None, read=[0], keep=False)
            held = self.traces[point, run] = _traces(seen, start, runs=(run,))[point, run]
        return held


def _enters(one: Plan, row: rows.Row) -> int:
    return row.first if one.traced else 0


def _watched(tree: Any, points: Sequence[Point], seen: Seen) -> AbstractContextManager[None]:
    """Keep these points of every layer of the forwards that follow."""

    def keep(point: Point, layer: int, tensor: Tensor) -> Tensor:
        seen[point, layer] = tensor.detach().clone()
        return tensor

    return visited(tree, keep, points)


def _traces(seen: Seen, start: int, *, runs: Sequence[State]) -> dict[tuple[Point, State], Trace]:
    """What was seen, by point and run: the runs are the first rows of the batch that was run."""
    layers = 1 + max((layer for _, layer in seen), default=-1)
    points: list[Point] = list(dict.fromkeys(point for point, _ in seen))
    return {
        (point, run): Trace(start, torch.stack([seen[point, layer][row] for layer in range(layers)]))
        for point in points
        for row, run in enumerate(runs)
    }


def _decode_error(full: Mapping[State, float], unedited: readout.Margins) -> float:
    """The larger difference of the two arms' margins, in logits."""
    return max(abs(full["base"] - unedited.base), abs(full["target"] - unedited.target))


def _decode_margins(trial: Trial, states: Sequence[KVState]) -> list[float]:
    return readout.margin(_decode(trial.model, trial.pair, states), trial.pair).tolist()


def _decode(model: Any, pair: TokenPair, states: Sequence[KVState]) -> Float[Tensor, "batch vocab"]:
    query = [pair.base_ids[p] for p in pair.query]
    logits = decode(model, states, query, start=pair.query[0], read=[len(query) - 1])
    return torch.squeeze(logits, dim=1)

"""One workload at one length: ours and every peer in turns, and the screened W3 against the exact one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bench import workloads
from bench.costs import Costs
from bench.measure import MemoryWatch, Timing, timed
from bench.peers import PEERS, Ask, Peer, Setup
from bench.plan import Plan
from bench.results import LEAST, MISSED, Length, PeerResult, Result, Screened
from bench.workloads import Chosen, Workload
from kvnotes import models
from kvnotes.config import RunConfig
from kvnotes.interventions import ActivationPatch

DECODE_COST = 8  # one token's decode waits for the weights: about as long as this many tokens of a whole forward
TOOL_ERRORS = (AssertionError, LookupError, AttributeError, ImportError, RuntimeError, TypeError, ValueError)


WATCHED = 4  # of a sweep that is timed once, every fourth intervention is run again to see its memory


@dataclass(frozen=True, kw_only=True, eq=False)
class Bench:
    """A loaded model and what is timed on it. `tick` takes the FLOPs that were done, for the progress bar."""

    model: models.Model
    config: RunConfig
    plan: Plan
    costs: Costs
    plain: Any | None
    tick: Callable[[float], None]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """One workload at one length. `traces` are the seconds of running both arms."""

    workload: Workload
    length: Length
    chosen: Chosen
    traces: Timing

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.chosen.trial.pair.base_ids)

    def recovery(self, margin: float) -> float:
        """Recovery of a margin, whatever the gap is."""
        unedited = self.chosen.trial.unedited
        return (margin - unedited.base) / unedited.gap


@dataclass(kw_only=True, eq=False)
class Rival:
    """A peer in one job: the interventions that it is timed on, and what it took and answered so far."""

    peer: Peer
    chosen: tuple[Any, ...]
    ask: Ask | None = None
    skipped: str | None = None
    repeats: list[float] = field(default_factory=list)
    margins: dict[str, float] = field(default_factory=dict)

    def attempt(self, act: Callable[[], None]) -> None:
        """Run a tool. One that is not ours to install may fail on a model or a version: it is left out, with why."""
        try:
            act()
        except TOOL_ERRORS as err:
            if self.peer.package is None:
                raise
            self.ask, self.skipped = None, f"{self.peer.package} failed: {type(err).__name__}: {str(err)[:200]}"
            self.repeats.clear()

    def prepare(self, setup: Setup, *, warm: bool) -> None:
        """The peer's own traces, and one intervention that is not timed."""
        self.ask = self.peer.prepare(setup)
        if warm:
            self.ask(self.chosen[:1])

    def run(self, device: torch.device) -> None:
        """Time the peer once."""
        ask = self.ask
        if ask is not None:
            seconds, self.margins = timed(lambda: ask(self.chosen), device)
            self.repeats.append(seconds)


def run(bench: Bench, job: Job) -> tuple[Result, dict[str, float]]:
    """Ours and each peer in turns, so that a machine that changes its speed does so for all; and our margins."""
    setup = Setup(trial=workloads.fresh(job.chosen.trial), plain=bench.plain)
    rivals = [_rival(bench, job, peer, setup) for peer in PEERS if peer.workload == job.workload.name]
    ours, captures, margins = [], [], {}
    trial = workloads.fresh(job.chosen.trial)
    for number in range(bench.plan.rounds[job.workload.name, job.length]):
        trial = workloads.fresh(job.chosen.trial, _ticker(bench, job.workload.flops))
        captures.append(timed(lambda trial=trial: workloads.capture(trial, job.workload), bench.device)[0])
        seconds, margins = timed(lambda trial=trial: trial.margins(job.workload.interventions), bench.device)
        ours.append(seconds)
        for rival in rivals if number < bench.plan.peer_rounds else ():
            rival.attempt(lambda rival=rival: rival.run(bench.device))
            bench.tick(_rival_cost(bench, job, rival))
    # on its own, since watching costs time; a part of a long sweep fills its forwards as the whole does
    with MemoryWatch(bench.device) as watch:
        trial.margins(job.workload.interventions[:: 1 if len(ours) > 1 else WATCHED])
    result = Result(
        workload=job.workload.name,
        what=job.workload.what,
        length=job.length,
        tokens=job.tokens,
        interventions=len(job.workload.interventions),
        timing=Timing(repeats=tuple(ours)),
        capture=Timing(repeats=tuple(captures)),
        traces=job.traces,
        flops=job.workload.flops,
        memory=watch.peak,
        peers=tuple(_peer_result(job, rival, margins) for rival in rivals),
    )
    return result, margins


def screen(bench: Bench, job: Job, result: Result, exact: Mapping[str, float]) -> Screened:
    """The screened W3, gradients included: `Trial.screened` answers the cells that it keeps, by name."""
    trial, asked = workloads.fresh(job.chosen.trial), job.workload.interventions
    patches = [one for one in asked if isinstance(one, ActivationPatch)]
    workloads.capture(trial, job.workload)
    runs = [timed(lambda: trial.screened(patches, least=LEAST), bench.device) for _ in range(bench.plan.peer_rounds)]
    kept: Mapping[str, float] = runs[-1][1]
    left = [abs(job.recovery(margin)) for name, margin in exact.items() if name not in kept]
    repeats = tuple(seconds for seconds, _ in runs)
    peer = next(one for one in result.peers if one.name == "TransformerLens patching")
    return Screened(
        length=job.length,
        tokens=job.tokens,
        least=LEAST,
        interventions=len(exact),
        kept=len(kept),
        repeats=repeats,
        ratio=None if peer.seconds is None else peer.seconds / min(repeats),
        missed=sum(one > MISSED for one in left),
        largest_missed=max(left, default=0.0),
        largest_difference=_largest_difference(job, kept, exact),
    )


def cost(bench: Bench, job: Job) -> float:
    """About how many FLOPs a job runs, for the progress bar."""
    rounds = bench.plan.rounds[job.workload.name, job.length]
    rivals = [
        Rival(peer=peer, chosen=_subset(bench, job, peer)) for peer in PEERS if peer.workload == job.workload.name
    ]
    theirs = sum(_rival_cost(bench, job, rival) for rival in rivals)
    return rounds * job.workload.flops + min(rounds, bench.plan.peer_rounds) * theirs


def _rival(bench: Bench, job: Job, peer: Peer, setup: Setup) -> Rival:
    rival = Rival(peer=peer, chosen=_subset(bench, job, peer))
    rival.skipped = peer.missing(setup)
    if rival.skipped is None:
        rival.attempt(lambda: rival.prepare(setup, warm=job.length == "short"))
    return rival


def _subset(bench: Bench, job: Job, peer: Peer) -> tuple[Any, ...]:
    asked = job.workload.interventions
    chosen = workloads.spread(bench.plan.subset(peer.workload, peer.name, job.length), len(asked))
    return tuple(asked[i] for i in chosen)


def _rival_cost(bench: Bench, job: Job, rival: Rival) -> float:
    each = DECODE_COST * bench.costs.forward(1) if rival.peer.decodes else bench.costs.forward(job.tokens)
    return len(rival.chosen) * each


def _peer_result(job: Job, rival: Rival, ours: Mapping[str, float]) -> PeerResult:
    return PeerResult(
        name=rival.peer.name,
        timed=len(rival.chosen),
        of=len(job.workload.interventions),
        repeats=tuple(rival.repeats),
        largest_difference=_largest_difference(job, rival.margins, ours) if rival.repeats else None,
        skipped=rival.skipped,
    )


def _largest_difference(job: Job, one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Of the recoveries of what both answered."""
    return max((abs(job.recovery(margin) - job.recovery(other[name])) for name, margin in one.items()), default=0.0)


def _ticker(bench: Bench, flops: int) -> Callable[[int, int], None]:
    """Progress of a trial, as FLOPs of the whole."""
    before = 0

    def progress(done: int, total: int) -> None:
        nonlocal before
        bench.tick(flops * (done - before) / total)
        before = done

    return progress

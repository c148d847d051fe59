"""The benchmark's one way through: load, choose the pairs, time every workload with its peers, fit, bound, write."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench import contest, costs, peers, results, tables, workloads
from bench.contest import Bench, Job
from bench.measure import MemoryWatch, Timing, fit, machine, matmul_peak, timed
from bench.plan import Plan
from bench.results import Curve, Length, Result, Screened
from bench.workloads import BenchError, Chosen
from kvnotes import models, provenance
from kvnotes.config import RunConfig
from kvnotes.records import require_writable, safe_name
from kvnotes.sweep import Trial

CURVE_EDITS = 64  # of the curve against the prompt's length
OWN_LENGTH = 107  # about how long a layout's own prompt is


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """All that was measured."""

    jobs: tuple[Job, ...]
    results: tuple[Result, ...]
    screened: tuple[Screened, ...]
    curves: tuple[Curve, ...]


def execute(config: RunConfig, plan: Plan, out: Path, console: Console) -> Path:
    """Run the benchmark and leave its record in the folder `out`. Raises KVNotesError where it cannot be run."""
    with console.status(f"loading {config.model}"):
        model = models.load(config.model, device=config.device, dtype=config.dtype)
    if model.twin is None:
        raise BenchError(f"{config.model}'s layers are not of the kind that rows know: there is nothing to time")
    path = out / f"{safe_name(model.name)}{plan.suffix}.json"
    require_writable(path)
    before = matmul_peak(model.device, model.dtype)
    found = _measure(model, config, plan, console, before)
    peaks = {"before": before, "after": matmul_peak(model.device, model.dtype)}
    record = _record(model, config, plan, found, peaks)
    results.write(record, path)
    tables.show(record, console)
    console.print(f"record: {path}", soft_wrap=True)
    return path


def _measure(model: models.Model, config: RunConfig, plan: Plan, console: Console, peak: float) -> Found:
    """Every job, printed as it is done, then the curves."""
    shapes = costs.Costs.of(model)
    with console.status("choosing the pairs"):
        jobs = _jobs(model, config, plan, shapes)
    for length, chosen in {job.length: job.chosen for job in jobs}.items():
        if not chosen.competent:
            console.print(
                f"{length}: none of {chosen.tried} pairs is decided right; the one of the widest gap is taken"
            )
    measured: list[Result] = []
    screened: list[Screened] = []
    with peers.plain_copy(model) as plain, _progress(console) as (bar, task):

        def tick(flops: float) -> None:
            bar.advance(task, flops)

        bench = Bench(model=model, config=config, plan=plan, costs=shapes, plain=plain, tick=tick)
        ahead = sum(contest.cost(bench, job) for job in jobs) + sum(_curve_cost(bench, n) for n in plan.curve_lengths)
        bar.update(task, total=ahead)
        for job in jobs:
            bar.update(task, description=f"{job.workload.name}, {job.tokens} tokens")
            result, margins = contest.run(bench, job)
            measured.append(result)
            console.print(tables.result(results.described(result, peak)))
            if job.workload.name == "W3" and job.length in plan.screens:
                screened.append(contest.screen(bench, job, result, margins))
                console.print(tables.screened([asdict(screened[-1])]))
        bar.update(task, description="cost against length and edits")
        curves = _curves(bench, {job.length: job.chosen.trial for job in jobs})
    return Found(jobs=tuple(jobs), results=tuple(measured), screened=tuple(screened), curves=tuple(curves))


def _jobs(model: models.Model, config: RunConfig, plan: Plan, shapes: costs.Costs) -> list[Job]:
    """Every workload at every length. nnsight wraps the plain copy's modules in W2, so all of W1 comes first."""
    chosen: dict[Length, tuple[Chosen, Timing]] = {}
    for length, tokens in plan.lengths.items():
        one = workloads.choose(model, _at(config, tokens))
        pair, seconds = one.trial.pair, [one.seconds]
        for _ in range(plan.peer_rounds - 1):
            seconds.append(timed(lambda pair=pair: workloads.run(model, pair, config), model.device)[0])
        chosen[length] = one, Timing(repeats=tuple(seconds))
    return [
        Job(
            workload=workloads.build(name, one.trial, shapes, plan.strides[length]),
            length=length,
            chosen=one,
            traces=traces,
        )
        for name in workloads.NAMES
        for length, (one, traces) in chosen.items()
    ]


def _at(config: RunConfig, tokens: int) -> RunConfig:
    return config.model_copy(update={"length": tokens})


@contextmanager
def _progress(console: Console) -> Iterator[tuple[Progress, TaskID]]:
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as bar:
        yield bar, bar.add_task("starting", total=None)


# --- curves -----------------------------------------------------------------------------------------------------


def _curves(bench: Bench, trials: Mapping[Length, Trial]) -> list[Curve]:
    """Cost against the prompt's length for a fixed number of edits, and against their number at each length."""
    asked = {tokens: trials[length] for length, tokens in bench.plan.lengths.items()}
    points = []
    for tokens in bench.plan.curve_lengths:
        trial = asked.get(tokens) or _any_trial(bench, tokens)
        points.append((len(trial.pair.base_ids), _seconds_of_edits(bench, trial, CURVE_EDITS)))
        bench.tick(_curve_cost(bench, tokens))
    curves = [_curve(f"{CURVE_EDITS} single-position edits, against tokens of the prompt", points)]
    for trial in trials.values():
        most = len(trial.pair.downstream)
        counts = sorted({min(count, most) for count in bench.plan.curve_edits})
        points = [(count, _seconds_of_edits(bench, trial, count)) for count in counts]
        curves.append(_curve(f"at {len(trial.pair.base_ids)} tokens, against single-position edits", points))
    return curves


def _any_trial(bench: Bench, tokens: int) -> Trial:
    """The first pair of a length: what an edit costs does not depend on what the model decides."""
    pair = workloads.pairs_of(bench.model, _at(bench.config, tokens))[0]
    return workloads.run(bench.model, pair, bench.config)


def _seconds_of_edits(bench: Bench, trial: Trial, count: int) -> float:
    places = trial.pair.downstream
    asked = workloads.edits(trial.pair, [places[i] for i in workloads.spread(count, len(places))])
    ready = workloads.fresh(trial)
    runs = [timed(lambda: ready.margins(asked), bench.device)[0] for _ in range(bench.plan.curve_rounds)]
    return min(runs)


def _curve(what: str, points: Sequence[tuple[int, float]]) -> Curve:
    x, seconds = (tuple(axis) for axis in zip(*points, strict=True))
    return Curve(what=what, x=x, seconds=seconds, fit=fit(x, seconds))


def _curve_cost(bench: Bench, tokens: int) -> float:
    return 2 * bench.costs.forward(tokens or OWN_LENGTH)


# --- the record -------------------------------------------------------------------------------------------------


def _record(
    model: models.Model, config: RunConfig, plan: Plan, found: Found, peaks: Mapping[str, float]
) -> dict[str, Any]:
    peak = max(peaks.values())
    made = provenance.collect(config, module="bench")
    if plan.suffix:
        made = made.model_copy(update={"command": shlex.join([*shlex.split(made.command), f"--{plan.name}"])})
    return {
        "schema": results.SCHEMA,
        "plan": plan.name,
        "model": {
            "name": model.name,
            "weights_sha256": model.prepared.weights_sha256,
            "precision": model.prepared.precision,
            "dtype": str(model.dtype).removeprefix("torch."),
            **model.shape,
        },
        "machine": machine(model.device) | {"matmul_peak_flops": dict(peaks)},
        "how": {"flops": costs.__doc__, "memory": MemoryWatch.how(model.device), "seconds": "the best repeat"},
        "pairs": [_pair(job) for job in found.jobs if job.workload.name == "W1"],
        "results": [results.described(one, peak) for one in found.results],
        "screened": [asdict(one) for one in found.screened],
        "curves": [asdict(one) for one in found.curves],
        "bounds": [asdict(one) for one in results.bounds(found.results, found.screened, peak)],
        "provenance": made.model_dump(mode="json"),
    }


def _pair(job: Job) -> dict[str, Any]:
    pair, chosen = job.chosen.trial.pair, job.chosen
    return {
        "length": job.length,
        "id": pair.pair.id,
        "tokens": job.tokens,
        "changed": list(pair.changed),
        "gap": chosen.trial.unedited.gap,
        "competent": chosen.competent,
        "tried": chosen.tried,
    }

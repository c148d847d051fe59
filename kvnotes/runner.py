"""The loop every study shares: settings, pairs, trials, checks, statistics, record, figure.

A study is a module with TITLE, `measure(trial, config)`, `summarise(instances, config, floor)` and, where it has
any of its own, `identities(trial, measures)` and a `Settings` class; it is found by its file's stem. Which of its
measures are margins it says in MARGINS (see `kvnotes.measures`): without it none is exported as one.

A study that chooses on some instances what it tests on others makes two passes over the pairs:
`survey(trial, config)`, then once `prepare(instances, config)`, whose plan (plain JSON values) goes into the record,
then `measure(trial, config, plan)`. An instance's measures are those of both passes; `identities` sees all of them.

A study of two passes that fits something on large arrays of other instances adds `gather(trial, config, measures)`,
called with what `survey` measured: numpy arrays by name, of any shapes. They stand on the disk until the record is
written; `prepare` gets all of them as a third argument and `measure` as `gathered=` (see `kvnotes.resume.Gathered`).

A study that needs large arrays of every instance adds `collect(trial, config)` (with the plan, where there is one),
which gives numpy arrays by name, of the same shapes for every pair. They stand in a file beside the record, stacked
over the instances that were measured, in the record's order; its `summarise` takes them as a fourth argument. Where
they are larger than what is made of them, `condense(arrays, instances, config)` gives those that are kept instead.

A study that borrows cells from other instances adds `donors(pair, pairs, plan)` (see `kvnotes.donors`); the runner
prefills the pairs that it names, and its `measure` takes them as `donors=`.

A study that needs something of the whole model first, such as a trained dictionary, adds
`equip(model, config, pairs, plan)`, called once, just before the pairs are measured, with all usable pairs by id and
the plan (empty without one). Its `measure` takes what that returns as `equipment=`; the `record` of it (plain JSON
values: where it came from, what it chose) enters the plan as `equipment`. What takes long it keeps in a folder of its
own and finds again there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvnotes import commandline, discover, effects, proofs, provenance, records, report, vocabulary, weights
from kvnotes import config as configs
from kvnotes.config import RunConfig
from kvnotes.errors import IdentityFailed, KVNotesError, UnknownName
from kvnotes.instance import Pair, Skipped, TokenPair
from kvnotes.records import Check, Gate, Instance, Record, Summary, Timings, Tokens
from kvnotes.resume import Finished, Gathered, ResumeFile

if TYPE_CHECKING:
    import numpy as np

    from kvnotes.donors import Lender
    from kvnotes.models import Model
    from kvnotes.sweep import Trial

console = Console(stderr=True, highlight=False)

Inside = Callable[[int, int], None]
# what the runner itself measures of every pair: margins by arm, from the cached decode and from the full forward
MARGINS = {"unedited": "arm", "full": "arm"}
RECOMPUTED = "the summary was recomputed from the instances at commit "
UNITS = {
    proofs.PREFIX: "largest difference of any cell",
    proofs.DECODE: "margin error in logits, over all pairs",
    "other": "margin error, in units of the gap",
}


class RunError(KVNotesError):
    """A run that cannot start: no pair, not enough memory."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study's module and its name, with its settings validated."""

    module: ModuleType
    config: RunConfig

    @property
    def path(self) -> Path:
        """Where the record goes."""
        c = self.config
        return records.record_path(
            c.results,
            model=weights.run_name(c.model),
            study=c.study,
            layout=c.layout,
            config_hash=c.hash(),
            default=configs.is_default(c),
        )

    def asks(self, function: str) -> bool:
        """Whether the study has a function that only some have."""
        return hasattr(self.module, function)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One round over the pairs: the study's function, what it gets beside trial and config, and what came before."""

    function: str
    file: ResumeFile
    pairs: Mapping[str, TokenPair]
    arguments: tuple[Any, ...] = ()
    before: Mapping[str, Finished] = field(default_factory=dict)
    lender: Lender | None = None  # of a study that borrows cells
    given: Mapping[str, Any] = field(default_factory=dict)  # by keyword: what the study gathered, and its equipment

    @property
    def is_last(self) -> bool:
        """Whether the study's own identities and arrays are taken in this pass."""
        return self.function == "measure"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All that a run measured: its instances, what was chosen between the passes, arrays stacked over instances; and
    the files that it can be resumed from until its record is written."""

    finished: list[Finished]
    plan: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    files: tuple[ResumeFile, ...]


def main(file: str) -> None:
    """Entry of `python -m <package>.<study>`: flags to settings, then the run; a known failure is one line."""
    module = discover.study(Path(file).stem)
    settings = getattr(module, "Settings", RunConfig)
    commandline.run(settings, study=Path(file).stem, title=module.TITLE, action=lambda c: execute(module, c))


def execute(module: ModuleType, config: RunConfig) -> Record:
    """Run a study and leave its record, figure and printed summary."""
    study = Study(module=module, config=config)
    pairs = generate(config)
    records.require_writable(study.path)
    started = time.perf_counter()
    from kvnotes import models  # torch and transformer-lens take seconds to import: only when a run needs them

    with console.status(f"loading {config.model}"):
        model = models.load(config.model, device=config.device, dtype=config.dtype)
    loaded = time.perf_counter() - started
    measured = measure_all(study, model, pairs)
    seconds = _mean_seconds(measured.finished)
    clock = Timings(total_s=time.perf_counter() - started, per_instance_s=seconds, load_s=loaded)
    record = records.write(build(study, model, measured, clock), study.path)
    for file in measured.files:
        file.remove()
    report.show(record, report.console())
    console.print(f"record: {study.path}", soft_wrap=True)
    for path in _draw(study, record):
        console.print(f"figure: {path}", soft_wrap=True)
    return record


def generate(config: RunConfig) -> list[Pair]:
    """The run's pairs: n a layout, for one layout or all. Raises UnknownName for a layout the task lacks."""
    task = discover.task(config.task)
    if config.layout != "all" and config.layout not in task.LAYOUTS:
        raise UnknownName(kind="layout", name=config.layout, known=[*task.LAYOUTS, "all"])
    wanted = list(task.LAYOUTS) if config.layout == "all" else [config.layout]
    return [
        pair
        for layout in wanted
        for pair in task.generate(
            layout=layout, pair=config.pair, n=config.n, seed=config.seed, length=config.length, wording=config.wording
        )
    ]


def measure_all(study: Study, model: Model, pairs: list[Pair]) -> Measured:
    """Every pair measured or skipped, in order, in the study's one or two passes."""
    tokenised = tokenise(model, pairs, query=study.config.query)
    _require_some(tokenised, study.config)
    usable = {one.pair.id: one for one in tokenised if isinstance(one, TokenPair)}
    lender = _lender(study, model)
    kept = 0 if lender is None else min(lender.KEPT, len(usable))
    _require_memory(model, list(usable.values()), budget=study.config.memory * configs.MEGABYTE, lent=kept)
    passes: tuple[Pass, ...] = ()
    plan: dict[str, Any] = {}
    given: dict[str, Any] = {}
    before: dict[str, Finished] = {}
    if study.asks("prepare"):
        passes = (Pass(function="survey", file=resume_file(study, model, name="survey"), pairs=usable),)
        surveyed = run_pass(study, model, tokenised, passes[0])
        before = {done.instance.id: done for done in surveyed}
        if study.asks("gather"):
            given["gathered"] = Gathered.of(passes[0].file, surveyed)
        plan = prepare(study, surveyed, **given)
    if study.asks("equip"):
        given["equipment"], plan = equip(study, model, usable, plan)
    arguments = (plan,) if study.asks("prepare") else ()
    file = resume_file(study, model, plan=plan or None)
    last = Pass(
        function="measure", file=file, pairs=usable, arguments=arguments, before=before, lender=lender, given=given
    )
    passes = (*passes, last)
    finished = run_pass(study, model, tokenised, last)
    files = tuple(one.file for one in passes)
    return Measured(finished=finished, plan=plan, arrays=_arrays(study, finished, last.file), files=files)


def _arrays(study: Study, finished: list[Finished], file: ResumeFile) -> Mapping[str, np.ndarray]:
    """The collected arrays, stacked over the instances that have any, and condensed where the study does so."""
    rows = [done.instance for done in finished if done.arrays is not None]
    stacked = file.stacked([one.id for one in rows])
    return study.module.condense(stacked, rows, study.config) if rows and study.asks("condense") else stacked


def prepare(study: Study, surveyed: list[Finished], gathered: Gathered | None = None) -> dict[str, Any]:
    """The study's plan, from the instances that were surveyed, as a record keeps it: plain JSON values."""
    measured = tuple(done.instance for done in surveyed if done.instance.status != "skipped")
    return replan(study, measured, gathered)


def replan(study: Study, measured: tuple[Instance, ...], gathered: Gathered | None = None) -> dict[str, Any]:
    """The same from instances, such as a record's, of which none was skipped."""
    plan = study.module.prepare(measured, study.config, *([] if gathered is None else [gathered]))
    return json.loads(json.dumps(records.plain(plan), allow_nan=False))


def equip(
    study: Study, model: Model, pairs: Mapping[str, TokenPair], plan: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """What the study makes once of the model, and the plan with its record."""
    made = study.module.equip(model, study.config, pairs, plan)
    return made, {**plan, "equipment": json.loads(json.dumps(records.plain(made.record), allow_nan=False))}


def run_pass(study: Study, model: Model, pairs: list[TokenPair | Skipped], this: Pass) -> list[Finished]:
    """One pass over the pairs, with progress; finished ones of an earlier run are taken over."""
    wanted = {one.pair.id for one in pairs}
    known = {k: v for k, v in this.file.read().items() if k in wanted}
    this.file.start(known)
    title = study.config.study if this.is_last else f"{study.config.study}, {this.function}"
    if known:
        console.print(f"resuming: {len(known)} of {len(pairs)} pairs were measured before")
    finished = []
    try:
        with _progress(title, len(pairs)) as bar:
            for one in pairs:
                done = known.get(one.pair.id) or _one(study, model, one, this=this, inside=bar.inside)
                if one.pair.id not in known:
                    this.file.add(done)
                finished.append(done)
                bar.next()
    except KeyboardInterrupt:
        console.print(f"stopped: {len(finished)} of {len(pairs)} pairs are kept; run the same command to go on")
        raise
    return finished


def tokenise(model: Model, pairs: list[Pair], *, query: int) -> list[TokenPair | Skipped]:
    """The pairs as the model's tokens, in its chat template; unfit ones as Skipped, with the reason."""
    from kvnotes import prompts

    return [prompts.tokenise(pair, tokenizer=model.tokenizer, template=model.template, query=query) for pair in pairs]


def resume_file(study: Study, model: Model, *, name: str = "", plan: Mapping[str, Any] | None = None) -> ResumeFile:
    """A pass's resume file; it only fits the same settings, code, libraries, weights, prompts and plan."""
    from kvnotes import models

    key = {
        "config": study.config.hash(),
        "code": provenance.code_hash(),
        "weights": model.prepared.weights_sha256,
        "files": models.files_sha256(model.prepared.folder),
        "chat": model.entry.chat.model_dump(),
        "attention": model.entry.attention,
        "versions": provenance.versions(),
        "plan": plan,
    }
    return ResumeFile(study.path, key=key, name=name)


def _one(study: Study, model: Model, pair: TokenPair | Skipped, *, this: Pass, inside: Inside) -> Finished:
    """Measure one pair and hold it to its identities. Raises IdentityFailed where one does not hold."""
    from kvnotes.sweep import Trial

    if isinstance(pair, Skipped):
        return Finished(instance=_skipped(pair), identities={}, noise=0.0)
    started = time.perf_counter()
    budget = study.config.memory * configs.MEGABYTE
    trial = Trial.run(model, pair, engine=study.config.engine, budget=budget, progress=inside)
    before = this.before.get(pair.pair.id)
    measures = _measures(study, trial, this, before)
    identities = trial.identities()
    if this.is_last and study.asks("identities"):
        identities |= study.module.identities(trial, measures)
    _hold(identities, pair=pair, model=model, config=study.config)
    arrays = _collect(study, trial, this, measures)
    seconds = time.perf_counter() - started
    done = Finished(
        instance=_instance(trial, measures, study.config, seconds),
        identities=identities,
        noise=trial.floor,
        arrays=arrays,
    )
    return done if before is None else _both(before, done)


def _measures(study: Study, trial: Trial, this: Pass, before: Finished | None) -> dict[str, Any]:
    """What the pass measures, with what the pass before it did. Raises RunError where it measures the same again."""
    earlier = {} if before is None else {k: v for k, v in before.instance.measures.items() if k not in MARGINS}
    lent = _donors(study, trial, this, this.lender) if this.lender is not None else {}
    made = getattr(study.module, this.function)(trial, study.config, *this.arguments, **lent, **this.given)
    if twice := sorted(set(earlier) & set(made)):
        raise RunError(
            f"{study.config.study}: survey and measure both return {', '.join(twice)}; give them other names"
        )
    return {**earlier, **made}


def _lender(study: Study, model: Model) -> Lender | None:
    """What prefills other instances, for a study that borrows from them."""
    from kvnotes.donors import Lender

    return Lender(model) if study.asks("donors") else None


def _donors(study: Study, trial: Trial, this: Pass, lender: Lender) -> dict[str, Any]:
    """The other instances that the study borrows from, prefilled, as the keyword that its `measure` takes."""
    plan = this.arguments[0] if this.arguments else {}
    return {"donors": lender.lend(study.module.donors(trial.pair, this.pairs, plan))}


def _collect(study: Study, trial: Trial, this: Pass, measures: Mapping[str, Any]) -> str | None:
    """The instance's large arrays, put on the disk: of `gather` in the survey, of `collect` in the last pass."""
    if not study.asks(function := "collect" if this.is_last else "gather"):
        return None
    arguments = this.arguments if this.is_last else (measures,)
    return this.file.keep_arrays(trial.pair.pair.id, getattr(study.module, function)(trial, study.config, *arguments))


def _hold(identities: Mapping[str, float], *, pair: TokenPair, model: Model, config: RunConfig) -> None:
    for name, value in identities.items():
        bound = _bound(name, model, config)
        if not value <= bound:
            raise IdentityFailed(
                f"{pair.pair.id}: {name!r} is off by {value:.3g} (bound {bound:.3g}); nothing this run measures can be "
                "trusted. Report it with the model, the layout and this message"
            )


def _both(first: Finished, last: Finished) -> Finished:
    """An instance of two passes: the later holds all measures; counts and clocks add up, errors are the larger."""
    names = dict.fromkeys([*first.identities, *last.identities])
    worst = {name: max(one.identities[name] for one in (first, last) if name in one.identities) for name in names}
    instance = last.instance.model_copy(
        update={
            "hooks": {**first.instance.hooks, **last.instance.hooks},
            "seconds": first.instance.seconds + last.instance.seconds,
        }
    )
    return Finished(instance=instance, identities=worst, noise=max(first.noise, last.noise), arrays=last.arrays)


def _bound(identity: str, model: Model, config: RunConfig) -> float:
    exact = config.dtype == "float32"
    return proofs.bound(
        identity, tolerance=model.tolerance, floor=model.noise_floor, identities=config.identity, exact=exact
    )


def _instance(trial: Trial, measures: Mapping[str, Any], config: RunConfig, seconds: float) -> Instance:
    pair, unedited = trial.pair, trial.unedited
    passed = unedited.passes(config.gate_gap)
    gate = Gate(
        base_margin=unedited.base,
        target_margin=unedited.target,
        gap=unedited.gap,
        base_correct=unedited.base < 0,
        target_correct=unedited.target > 0,
        base_argmax_correct=unedited.base_argmax,
        target_argmax_correct=unedited.target_argmax,
        passed=passed,
    )
    tokens = Tokens(
        base=pair.base_ids,
        target=pair.target_ids,
        changed=pair.changed,
        query=pair.query,
        base_action=pair.base_action,
        target_action=pair.target_action,
    )
    return Instance(
        **labels(pair.pair),
        status="included" if passed else "incompetent",
        reason=None if passed else gate_reason(unedited.base, unedited.target, config),
        tokens=tokens,
        spans=_spans(pair),
        gate=gate,
        measures={"unedited": {"base": unedited.base, "target": unedited.target}, "full": dict(trial.full), **measures},
        hooks=_fired(trial.fired),
        seconds=seconds,
    )


def _fired(counts: Mapping[str, int]) -> dict[str, int]:
    """What the interventions changed, by name; those named `family:member` count together, as their family."""
    found: dict[str, int] = {}
    for name, count in counts.items():
        family = name.partition(":")[0]
        found[family] = found.get(family, 0) + count
    return found


def gate_reason(base: float, target: float, config: RunConfig) -> str:
    """Why a pair with these unedited margins does not pass the gate."""
    wrong = [arm for arm, ok in (("base", base < 0), ("target", target > 0)) if not ok]
    if wrong:
        return f"gate: the unedited model's margin has the wrong sign in {' and '.join(wrong)}"
    return f"gate: the margins of the arms differ by less than {config.gate_gap:g} logits"


def _skipped(skipped: Skipped) -> Instance:
    return Instance(
        **labels(skipped.pair),
        status="skipped",
        reason=skipped.reason,
        tokens=None,
        spans={},
        gate=None,
        measures={},
        hooks={},
        seconds=0.0,
    )


def labels(pair: Pair) -> dict[str, Any]:
    """What a record says of an instance before anything is measured."""
    names = ("id", "scenario", "domain", "layout", "kind", "group", "seed")
    return {**{name: getattr(pair, name) for name in names}, "balance": dict(pair.balance)}


def is_of(one: Instance, pair: Pair) -> bool:
    """Whether an instance is of this pair, by all that a record says of it but its measurement."""
    return all(getattr(one, name) == value for name, value in labels(pair).items())


def _spans(pair: TokenPair) -> dict[str, tuple[tuple[int, int], ...]]:
    """Half-open token ranges by span name."""
    found: dict[str, list[tuple[int, int]]] = {}
    for at, slot in enumerate(pair.slots):
        ranges = found.setdefault(slot.span, [])
        if ranges and ranges[-1][1] == at:
            ranges[-1] = (ranges[-1][0], at + 1)
        else:
            ranges.append((at, at + 1))
    return {span: tuple(ranges) for span, ranges in found.items()}


def build(study: Study, model: Model, measured: Measured, clock: Timings) -> Record:
    """The record of a finished run, its arrays written beside it; its summary is made from instances and arrays."""
    config, finished = study.config, measured.finished
    instances = tuple(done.instance for done in finished)
    floor = max(done.noise for done in finished)
    module = discover.studies()[config.study]
    return Record(
        study=config.study,
        layout=config.layout,
        task=config.task,
        title=study.module.TITLE,
        provenance=provenance.collect(config, module=module),
        model=_model(model, floor),
        inclusion=records.count_inclusion(instances),
        instances=instances,
        plan=measured.plan,
        summary=summarise(study, instances, floor, measured.arrays),
        checks=tuple(_checks(finished, model, config)),
        arrays=(records.write_arrays(measured.arrays, study.path),) if measured.arrays else (),
        timings=clock,
        vocabulary=vocabulary.of(instances, model.tokenizer),
    )


def summarise(study: Study, instances: tuple[Instance, ...], floor: float, arrays: Mapping[str, np.ndarray]) -> Summary:
    """The study's summary and the unedited model's competence, from the instances, and arrays where it has any."""
    made = study.module.summarise(instances, study.config, floor, *([arrays] if study.asks("collect") else []))
    tables = {"competence of the unedited model": effects.competence(instances), **made.tables}
    return made.model_copy(update={"tables": tables})


def resummarise(path: Path) -> Record:
    """Recompute a record's summary from its own instances and arrays with the code of now, and say so in its notes; add
    its tokens' texts where it has none and its tokenizer is in the cache.

    Raises RecordError for a file that is no record or lacks its arrays, UnknownName for a study that no longer exists.
    """
    record = records.read(path)
    study = study_of(record)
    made = summary_of(study, record, path)
    here = provenance.collect(study.config, module=discover.studies()[record.study])
    made = made.model_copy(update={"notes": (*made.notes, f"{RECOMPUTED}{here.git_commit}")})
    words = record.vocabulary or _vocabulary(record)
    return records.write(record.model_copy(update={"summary": made, "vocabulary": words}), path)


def study_of(record: Record) -> Study:
    """A record's study with its settings, as the code of now has them: a setting that came later had its default's
    effect when the record was made.

    Raises UnknownName for a study that no longer exists, pydantic's ValidationError for settings that it does not take.
    """
    module = discover.study(record.study)
    settings = getattr(module, "Settings", RunConfig)
    config = settings.model_validate(configs.defaults(record.study) | record.provenance.config)
    return Study(module=module, config=config)


def summary_of(study: Study, record: Record, path: Path) -> Summary:
    """The summary that the instances and arrays of the record read from `path` give with the code of now.

    Raises RecordError where its arrays are missing or others.
    """
    arrays = records.read_arrays(record, path)
    return summarise(study, record.instances, float(record.model.noise_floor or 0.0), arrays)


def _vocabulary(record: Record) -> dict[str, str]:
    try:
        return vocabulary.of_record(record)
    except vocabulary.NoTokenizer as missing:
        console.print(str(missing), soft_wrap=True)
        return {}


def _checks(finished: list[Finished], model: Model, config: RunConfig) -> Iterable[Check]:
    """Each identity's largest value over the instances; all passed, or the run would have stopped."""
    for name in dict.fromkeys(name for done in finished for name in done.identities):
        value = max(done.identities[name] for done in finished if name in done.identities)
        bound = _bound(name, model, config)
        yield Check(name=name, value=value, bound=bound, passed=value <= bound, what=UNITS.get(name, UNITS["other"]))


def _model(model: Model, floor: float) -> records.Model:
    from kvnotes import models

    return records.Model(
        name=model.name,
        source=model.prepared.source,
        weights_sha256=model.prepared.weights_sha256,
        tokenizer_sha256=model.prepared.tokenizer_sha256,
        files_sha256=models.files_sha256(model.prepared.folder),
        chat=model.entry.chat.options,
        template=(model.template.before, model.template.after),
        precision=model.prepared.precision,
        architecture=type(model.hf).__name__,
        **model.shape,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        attention=model.entry.attention,
        noise_floor=floor,
        self_check=model.checks,
    )


def _require_some(tokenised: list[TokenPair | Skipped], config: RunConfig) -> None:
    if any(isinstance(one, TokenPair) for one in tokenised):
        return
    if not tokenised:
        raise RunError(f"LAYOUT={config.layout} has no {config.pair} pairs: it has no rule to invert; use PAIR=field")
    reasons = sorted({one.reason for one in tokenised if isinstance(one, Skipped)})
    raise RunError(
        f"none of the {len(tokenised)} {config.task} pairs fits {config.model}: {'; '.join(reasons)}. Planted models "
        "need TASK=planted, and only they know its words; for another tokenizer see the scenarios in tasks/"
    )


def _require_memory(model: Model, pairs: list[TokenPair], *, budget: int, lent: int) -> None:
    """Say what the run will hold at most, and stop before it starts where that is more than there is."""
    from kvnotes import memory

    longest = max(len(pair.base_ids) for pair in pairs)
    need, free = memory.estimate(model, longest, budget=budget, lent=lent), memory.available(model.device)
    console.print(f"{len(pairs)} pairs of at most {longest} tokens; at most {need / 1e9:.1f} GB beside the weights")
    if need > free:
        raise RunError(
            f"{longest} tokens need about {need / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; use a smaller LENGTH= "
            "or MODEL="
        )


@dataclass(frozen=True)
class Bar:
    """Progress over the pairs, and under it, where one pair takes several forwards, over its interventions."""

    bar: Progress
    pairs: TaskID
    interventions: TaskID

    def next(self) -> None:
        """A pair is done."""
        self.bar.advance(self.pairs)
        self.bar.update(self.interventions, visible=False)

    def inside(self, done: int, total: int) -> None:
        """So many of a pair's interventions are answered."""
        self.bar.update(self.interventions, completed=done, total=total, visible=done < total)


@contextmanager
def _progress(title: str, pairs: int) -> Iterator[Bar]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console) as bar:
        yield Bar(bar, bar.add_task(title, total=pairs), bar.add_task("  interventions", visible=False))


def _mean_seconds(finished: list[Finished]) -> float | None:
    seconds = [done.instance.seconds for done in finished if done.instance.status != "skipped"]
    return sum(seconds) / len(seconds) if seconds else None


def _draw(study: Study, record: Record) -> list[Path]:
    """The study's figure: figures/out/ for records under results/, else beside the record."""
    from figures import build as figures  # matplotlib is slow to import

    usual = study.config.results == Path("results")
    return figures.draw_record(record, study.path, *([] if usual else [study.config.results / "figures"]))

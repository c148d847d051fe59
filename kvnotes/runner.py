"""The loop every study shares: settings, pairs, trials, checks, statistics, record, figure.

A study is a module with TITLE, `measure(trial, config)`, `summarise(instances, config, floor)` and, where it has
any of its own, `identities(trial, measures)` and a `Settings` class; it is found by its file's stem.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvnotes import commandline, discover, effects, provenance, records, report, weights
from kvnotes import config as configs
from kvnotes.config import RunConfig
from kvnotes.errors import IdentityFailed, KVNotesError, UnknownName
from kvnotes.instance import Pair, Skipped, TokenPair
from kvnotes.records import Check, Gate, Instance, Record, Summary, Timings, Tokens
from kvnotes.resume import Finished, ResumeFile

if TYPE_CHECKING:
    from kvnotes.models import Model
    from kvnotes.prompts import Template
    from kvnotes.sweep import Trial

console = Console(stderr=True, highlight=False)

UNITS = {
    "prefix deviation": "largest difference of any cell",
    "cached decode equals full forward": "margin error in logits, over all pairs",
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
    finished = measure_all(study, model, pairs)
    clock = Timings(total_s=time.perf_counter() - started, per_instance_s=_mean_seconds(finished), load_s=loaded)
    record = records.write(build(study, model, finished, clock), study.path)
    resume_file(study, model).remove()
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


def measure_all(study: Study, model: Model, pairs: list[Pair]) -> list[Finished]:
    """Every pair measured or skipped, in order, with progress; finished ones of an earlier run are taken over."""
    tokenised = tokenise(model, pairs, query=study.config.query)
    _require_some(tokenised, study.config)
    usable = [one for one in tokenised if isinstance(one, TokenPair)]
    _require_memory(model, usable, budget=study.config.memory * configs.MEGABYTE)
    file = resume_file(study, model)
    known = {k: v for k, v in file.read().items() if k in {pair.id for pair in pairs}}
    file.start(known)
    if known:
        console.print(f"resuming: {len(known)} of {len(pairs)} pairs were measured before")
    finished = []
    try:
        for one in _progress(tokenised, study.config.study):
            done = known.get(one.pair.id) or _one(study, model, one)
            if one.pair.id not in known:
                file.add(done)
            finished.append(done)
    except KeyboardInterrupt:
        console.print(f"stopped: {len(finished)} of {len(pairs)} pairs are kept; run the same command to go on")
        raise
    return finished


def tokenise(model: Model, pairs: list[Pair], *, query: int) -> list[TokenPair | Skipped]:
    """The pairs as the model's tokens, in its chat template; unfit ones as Skipped, with the reason."""
    from kvnotes import prompts

    template = _template(model)
    return [prompts.tokenise(pair, tokenizer=model.tokenizer, template=template, query=query) for pair in pairs]


def _template(model: Model) -> Template:
    from kvnotes import prompts

    return prompts.read_template(model.tokenizer, use=model.entry.chat.use, options=model.entry.chat.options)


def resume_file(study: Study, model: Model) -> ResumeFile:
    """The run's resume file; it only fits the same settings, code, libraries, weights and prompts."""
    from kvnotes import models

    key = {
        "config": study.config.hash(),
        "code": provenance.code_hash(),
        "weights": model.prepared.weights_sha256,
        "files": models.files_sha256(model.prepared.folder),
        "chat": model.entry.chat.model_dump(),
        "attention": model.entry.attention,
        "versions": provenance.versions(),
    }
    return ResumeFile(study.path, key=key)


def _one(study: Study, model: Model, pair: TokenPair | Skipped) -> Finished:
    """Measure one pair and hold it to its identities. Raises IdentityFailed where one does not hold."""
    from kvnotes.sweep import Trial

    if isinstance(pair, Skipped):
        return Finished(instance=_skipped(pair), identities={}, noise=0.0)
    started = time.perf_counter()
    trial = Trial.run(model, pair, engine=study.config.engine, budget=study.config.memory * configs.MEGABYTE)
    measures = study.module.measure(trial, study.config)
    own = getattr(study.module, "identities", None)
    identities = trial.identities() | (own(trial, measures) if own else {})
    for name, value in identities.items():
        bound = _bound(name, model, study.config)
        if not value <= bound:
            raise IdentityFailed(
                f"{pair.pair.id}: {name!r} is off by {value:.3g} (bound {bound:.3g}); nothing this run measures can be "
                "trusted. Report it with the model, the layout and this message"
            )
    seconds = time.perf_counter() - started
    return Finished(
        instance=_instance(trial, measures, study.config, seconds), identities=identities, noise=trial.floor
    )


def _bound(identity: str, model: Model, config: RunConfig) -> float:
    """How far from 0 an identity may be. In half precision the margins' own noise is the bound, where it is larger."""
    if identity == "prefix deviation":
        return 0.0
    if identity == "cached decode equals full forward":
        return model.tolerance
    return config.identity if config.dtype == "float32" else max(config.identity, model.noise_floor)


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
        **_labels(pair.pair),
        status="included" if passed else "incompetent",
        reason=None if passed else _gate_reason(trial, config),
        tokens=tokens,
        spans=_spans(pair),
        gate=gate,
        measures={"unedited": {"base": unedited.base, "target": unedited.target}, "full": dict(trial.full), **measures},
        hooks=trial.fired,
        seconds=seconds,
    )


def _gate_reason(trial: Trial, config: RunConfig) -> str:
    wrong = [arm for arm, ok in (("base", trial.unedited.base < 0), ("target", trial.unedited.target > 0)) if not ok]
    if wrong:
        return f"gate: the unedited model's margin has the wrong sign in {' and '.join(wrong)}"
    return f"gate: the margins of the arms differ by less than {config.gate_gap:g} logits"


def _skipped(skipped: Skipped) -> Instance:
    return Instance(
        **_labels(skipped.pair),
        status="skipped",
        reason=skipped.reason,
        tokens=None,
        spans={},
        gate=None,
        measures={},
        hooks={},
        seconds=0.0,
    )


def _labels(pair: Pair) -> dict[str, Any]:
    names = ("id", "scenario", "domain", "layout", "kind", "group", "seed")
    return {**{name: getattr(pair, name) for name in names}, "balance": dict(pair.balance)}


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


def build(study: Study, model: Model, finished: list[Finished], clock: Timings) -> Record:
    """The record of a finished run; its summary is made from the instances alone."""
    config, instances = study.config, tuple(done.instance for done in finished)
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
        summary=summarise(study, instances, floor),
        checks=tuple(_checks(finished, model, config)),
        arrays=(),
        timings=clock,
    )


def summarise(study: Study, instances: tuple[Instance, ...], floor: float) -> Summary:
    """The study's summary and the unedited model's competence, from the instances alone."""
    made = study.module.summarise(instances, study.config, floor)
    tables = {"competence of the unedited model": effects.competence(instances), **made.tables}
    return made.model_copy(update={"tables": tables})


def resummarise(path: Path) -> Record:
    """Recompute a record's summary from its own instances with the code of now, and say so in its notes.

    Raises RecordError for a file that is no record, UnknownName for a study that no longer exists.
    """
    record = records.read(path)
    module = discover.study(record.study)
    settings = getattr(module, "Settings", RunConfig)
    # a setting that came later had its default's effect when the record was made
    config = settings.model_validate(configs.defaults(record.study) | record.provenance.config)
    study = Study(module=module, config=config)
    made = summarise(study, record.instances, float(record.model.noise_floor or 0.0))
    here = provenance.collect(study.config, module=discover.studies()[record.study])
    note = f"the summary was recomputed from the instances at commit {here.git_commit}"
    return records.write(record.model_copy(update={"summary": made.model_copy(update={"notes": (note,)})}), path)


def _checks(finished: list[Finished], model: Model, config: RunConfig) -> Iterable[Check]:
    """Each identity's largest value over the instances; all passed, or the run would have stopped."""
    for name in dict.fromkeys(name for done in finished for name in done.identities):
        value = max(done.identities[name] for done in finished if name in done.identities)
        bound = _bound(name, model, config)
        yield Check(name=name, value=value, bound=bound, passed=value <= bound, what=UNITS.get(name, UNITS["other"]))


def _model(model: Model, floor: float) -> records.Model:
    from kvnotes import models

    template = _template(model)
    return records.Model(
        name=model.name,
        source=model.prepared.source,
        weights_sha256=model.prepared.weights_sha256,
        tokenizer_sha256=model.prepared.tokenizer_sha256,
        files_sha256=models.files_sha256(model.prepared.folder),
        chat=model.entry.chat.options,
        template=(template.before, template.after),
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


def _require_memory(model: Model, pairs: list[TokenPair], *, budget: int) -> None:
    """Say what the run will hold at most, and stop before it starts where that is more than there is."""
    from kvnotes import memory

    longest = max(len(pair.base_ids) for pair in pairs)
    need, free = memory.estimate(model, longest, budget=budget), memory.available(model.device)
    console.print(f"{len(pairs)} pairs of at most {longest} tokens; at most {need / 1e9:.1f} GB beside the weights")
    if need > free:
        raise RunError(
            f"{longest} tokens need about {need / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; use a smaller LENGTH= "
            "or MODEL="
        )


def _progress(items: list[TokenPair | Skipped], title: str) -> Iterable[TokenPair | Skipped]:
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        yield from bar.track(items)


def _mean_seconds(finished: list[Finished]) -> float | None:
    seconds = [done.instance.seconds for done in finished if done.instance.status != "skipped"]
    return sum(seconds) / len(seconds) if seconds else None


def _draw(study: Study, record: Record) -> list[Path]:
    """The study's figure: figures/out/ for records under results/, else beside the record."""
    from figures import build as figures  # matplotlib is slow to import

    usual = study.config.results == Path("results")
    return figures.draw_record(record, study.path, *([] if usual else [study.config.results / "figures"]))

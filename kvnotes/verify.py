"""Does a record follow from itself? Every summary, hash, count, seed and id is made again and compared. No torch.

What needs no model is recomputed: the summary and, where no large arrays went into it, the plan, from the instances;
the instances' ids, seeds and choices, from the task's generator; gates, recoveries, hashes. What is wrong is said part
by part. That the margins were measured at all is beyond this: a record that was invented whole, with every number in
agreement, passes.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from kvnotes import config as configs
from kvnotes import discover, measures, records, runner, weights
from kvnotes.errors import KVNotesError
from kvnotes.instance import Arm, Pair
from kvnotes.provenance import SOURCES
from kvnotes.records import Gate, Instance, Record, RecordError, Tokens
from kvnotes.runner import Study

State = Literal["wrong", "unchecked", "unreadable"]
CLOSE, TINY = 1e-6, 1e-9  # how far a recomputed number may be off, relative and absolute: last digits, and no more
MOST = 5  # differences of one part that are told one by one
COMMIT = re.compile(r"[0-9a-f]{7,40}")
IDENTITY = ("weights_sha256", "tokenizer_sha256", "files_sha256")
Prompt = tuple[str, str]  # the tokenizer and the text
Spoken = Mapping[Prompt, tuple[int, ...]]  # the tokens of each


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is wrong with a part of a record; or why it could not be checked, which fails only where it is `fatal`."""

    part: str
    what: str
    state: State = "wrong"
    fatal: bool = True


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found of one record file; `record` is None where it cannot be read at all."""

    path: Path
    record: Record | None
    findings: tuple[Finding, ...]
    checked: int = 0  # parts that were looked at
    spoken: Spoken = field(default_factory=dict)


class Unchecked(KVNotesError):
    """A part that cannot be checked here, and why."""

    def __init__(self, why: str, *, fatal: bool = False) -> None:
        super().__init__(why)
        self.fatal = fatal


def verify(path: Path) -> Verdict:
    """Everything about one record file that can be checked without another."""
    try:
        record = records.read_untrusted(path)
    except RecordError as error:
        what = str(error).removeprefix(f"{path}: ")
        return Verdict(path=path, record=None, findings=(Finding(part="file", what=what, state="unreadable"),))
    subject = Subject(record, path)
    found = [one for part, check in CHECKS.items() for one in _findings(part, check, subject)]
    if {one.part for one in found if one.state == "wrong"} == {"summary"} and (commit := _older(record)):
        what = (
            f"the summary is of older code: it was made at commit {commit[:12]}, and the code has changed since. "
            f"If nobody changed its numbers, `kvnotes summarise {path}` makes it anew."
        )
        found.append(Finding(part="summary", what=what))
    spoken = {} if any(one.part in ("instances", "tokens") for one in found) else subject.spoken
    return Verdict(path=path, record=record, findings=tuple(found), checked=len(CHECKS), spoken=spoken)


def between(verdicts: Sequence[Verdict]) -> list[tuple[Path, Finding]]:
    """What several records contradict each other in: one model's hashes, one prompt's tokens."""
    models: defaultdict[str, dict[tuple[str | None, ...], Path]] = defaultdict(dict)
    prompts: dict[Prompt, tuple[tuple[int, ...], Path]] = {}
    found: list[tuple[Path, Finding]] = []
    for one in verdicts:
        if one.record is None:
            continue
        model = one.record.model
        own = tuple(getattr(model, name) for name in IDENTITY)
        for other, where in models[model.name].items():
            named = [name for name, x, y in zip(IDENTITY, own, other, strict=True) if x != y]
            what = (
                f"{', '.join(named)} of {model.name} differ from those in {where}: not the same model" if named else ""
            )
            found += [(one.path, Finding(part="model", what=what))] if what else []
        models[model.name].setdefault(own, one.path)
        other = [prompts[key][1] for key, ids in one.spoken.items() if key in prompts and prompts[key][0] != ids]
        if other:
            what = f"{len(other)} prompts have other tokens than the same texts in {other[0]}"
            found.append((one.path, Finding(part="tokens", what=what)))
        prompts |= {key: (ids, one.path) for key, ids in one.spoken.items() if key not in prompts}
    return found


def code(findings: Iterable[Finding]) -> int:
    """The exit code: 0 where all holds, 1 where something does not, 2 where a file or a part cannot be read."""
    wanted = [one for one in findings if one.state != "unchecked" or one.fatal]
    return 2 if any(one.state != "wrong" for one in wanted) else 1 if wanted else 0


# --- a record and what it is held beside ------------------------------------------------------------------


class Subject:
    """A record, its study and settings as the code of now has them, and its pairs made again."""

    def __init__(self, record: Record, path: Path) -> None:
        self.record, self.path = record, path

    @cached_property
    def study(self) -> Study:
        """Raises Unchecked where study or settings are none: `settings` says why."""
        try:
            return runner.study_of(self.record)
        except (KVNotesError, ValidationError) as error:
            raise Unchecked("its study or settings are unknown to this code") from error

    @cached_property
    def pairs(self) -> Mapping[str, Pair]:
        """By id, in the generator's order."""
        return {pair.id: pair for pair in runner.generate(self.study.config)}

    @cached_property
    def measured(self) -> tuple[Instance, ...]:
        """The instances with numbers."""
        return tuple(one for one in self.record.instances if one.status != "skipped")

    @cached_property
    def spoken(self) -> Spoken:
        """Every prompt's tokens."""
        return {key: ids for _, key, ids in self.prompts() if key is not None}

    def prompts(self) -> Iterator[tuple[Instance, Prompt | None, tuple[int, ...]]]:
        """Each measured arm: its text, None where the pair is unknown, and its tokens."""
        model = self.record.model
        for one in self.measured:
            for name in ("base", "target"):
                if one.tokens is not None:
                    pair = self.pairs.get(one.id)
                    text = None if pair is None else _text(getattr(pair, name), model.template)
                    key = None if text is None else (str(model.tokenizer_sha256), text)
                    yield one, key, getattr(one.tokens, name)


def _text(arm: Arm, template: tuple[str, str]) -> str:
    before, after = template
    return before + arm.user_text + after + arm.answer_text


def _findings(part: str, check: Callable[[Subject], Iterable[str]], subject: Subject) -> list[Finding]:
    try:
        found = list(check(subject))
    except Unchecked as why:
        return [Finding(part=part, what=str(why), state="unchecked", fatal=why.fatal)]
    except ModuleNotFoundError as error:
        what = f"{error.name} is not installed: this needs the models extra, `make setup`"
        return [Finding(part=part, what=what, state="unchecked")]
    except Exception as error:  # a study's code may fail in any way on measures that are not its own
        return [Finding(part=part, what=f"cannot be recomputed: {type(error).__name__}: {error}")]
    more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
    return [Finding(part=part, what=what) for what in [*found[:MOST], *more]]


# --- one part each ----------------------------------------------------------------------------------------


def _content(subject: Subject) -> Iterator[str]:
    said, actual = subject.record.content_hash, records.content_hash(subject.record)
    if said != actual:
        yield f"the file says {said[:12] or 'nothing'}, its content gives {actual[:12]}"


def _inclusion(subject: Subject) -> Iterator[str]:
    counted = records.count_inclusion(subject.record.instances)
    yield from _differences(subject.record.inclusion.model_dump(), counted.model_dump())


def _settings(subject: Subject) -> Iterator[str]:
    """Settings that are none, are not those of the record's own head, or have another hash."""
    record, made = subject.record, subject.record.provenance
    head = {"study": record.study, "layout": record.layout, "task": record.task, "model": record.model.name}
    for name, value in {**head, "seed": made.seed}.items():
        if made.config.get(name) != value:
            yield f"{name} is {value!r}, and in the settings {made.config.get(name)!r}"
    if (actual := configs.hash_of(made.config)) != made.config_hash:
        yield f"config_hash is {made.config_hash[:12]}, the settings give {actual[:12]}"
    try:
        runner.study_of(record)
    except ValidationError as error:
        fault = error.errors()[0]
        yield f"{'.'.join(map(str, fault['loc'])) or 'settings'}: {fault['msg']}"
    except KVNotesError as error:
        yield str(error)


def _arrays(subject: Subject) -> Iterator[str]:
    """Files that are missing or others, and tensors of other shapes than the record says."""
    try:
        arrays = records.read_arrays(subject.record, subject.path)
    except RecordError as error:
        yield str(error)
        return
    said = {name: shape for entry in subject.record.arrays for name, shape in entry.tensors.items()}
    yield from _differences(said, {name: tuple(array.shape) for name, array in arrays.items()})


def _model(subject: Subject) -> Iterator[str]:
    """Weights or precision other than the registry's of that name."""
    model = subject.record.model
    if model.name not in weights.known_models():
        raise Unchecked(f"{model.name} is no model of the registry, so what its hashes must be is not known")
    entry = weights.load_entry(model.name)
    if entry.gguf is None:
        raise Unchecked(f"the registry has no hash of {model.name}: it comes from the hub")
    if model.weights_sha256 != entry.gguf.sha256:
        said = (model.weights_sha256 or "nothing")[:12]
        yield f"weights_sha256 is {said}, that of {model.name} in the registry {entry.gguf.sha256[:12]}"
    if model.precision != entry.precision:
        yield f"precision is {model.precision!r}, in the registry {entry.precision!r}"


def _instances(subject: Subject) -> Iterator[str]:
    """Instances other than the task makes of the record's settings: one by one, and in their order."""
    here = {one.id: one for one in subject.record.instances}
    wanted = subject.pairs
    yield from (f"{name} is missing: the settings give it" for name in wanted if name not in here)
    yield from (f"{name} is not among those that the settings give" for name in here if name not in wanted)
    for name in here.keys() & wanted.keys():
        made = runner.labels(wanted[name])
        yield from _differences({key: _json(getattr(here[name], key)) for key in made}, _json(made), name)
    if here.keys() == wanted.keys() and [*here] != [*wanted]:
        yield "their order is not the generator's"


def _gates(subject: Subject) -> Iterator[str]:
    """Gates, statuses and reasons that do not follow from the unedited margins."""
    config = subject.study.config
    for one in subject.record.instances:
        if one.status == "skipped":
            if one.gate is not None or one.tokens is not None or one.measures:
                yield f"{one.id} was skipped, and has numbers"
            continue
        unedited = one.measures.get("unedited", {})
        base, target = unedited.get("base"), unedited.get("target")
        if one.gate is None or base is None or target is None:
            yield f"{one.id} has no unedited margins"
            continue
        passed = base < 0 < target and target - base >= config.gate_gap
        made = Gate(
            base_margin=base,
            target_margin=target,
            gap=target - base,
            base_correct=base < 0,
            target_correct=target > 0,
            base_argmax_correct=one.gate.base_argmax_correct,
            target_argmax_correct=one.gate.target_argmax_correct,
            passed=passed,
        )
        said = {"gate": one.gate.model_dump(), "status": one.status, "reason": one.reason}
        yield from _differences(
            said,
            {
                "gate": made.model_dump(),
                "status": "included" if passed else "incompetent",
                "reason": None if passed else runner.gate_reason(base, target, config),
            },
            one.id,
        )


def _tokens(subject: Subject) -> Iterator[str]:
    """Tokens that cannot be a pair's, and words or prompts that are not always the same tokens."""
    query = subject.study.config.query
    for one in subject.measured:
        if one.tokens is None:
            yield f"{one.id} was measured, and has no tokens"
        else:
            yield from (f"{one.id}: {what}" for what in _pair_faults(one, one.tokens, query))
    said: dict[Any, tuple[int, ...]] = {}
    for one, key, ids in subject.prompts():
        if key is not None and said.setdefault(key, ids) != ids:
            yield f"{one.id}: its prompt has other tokens than the same text in another instance"
    first: dict[tuple[str, str], int] = {}
    for one in subject.measured:
        pair = subject.pairs.get(one.id)
        if pair is None or one.tokens is None:
            continue
        for arm, token in ((pair.base, one.tokens.base_action), (pair.target, one.tokens.target_action)):
            if first.setdefault((arm.answer_text, arm.action), token) != token:
                yield f"{one.id}: {arm.action!r} begins with token {token}, in another instance with another one"


def _pair_faults(one: Instance, tokens: Tokens, query: int) -> Iterator[str]:
    length = len(tokens.base)
    if len(tokens.target) != length:
        yield f"its arms have {length} and {len(tokens.target)} tokens"
        return
    differ = {p for p, (a, b) in enumerate(zip(tokens.base, tokens.target, strict=True)) if a != b}
    if not differ or not differ <= set(tokens.changed):
        yield "its arms do not differ in the changed span alone"
    if tokens.query != tuple(range(length - query, length)):
        yield f"its query block is not the last {query} tokens"
    if tokens.base_action == tokens.target_action:
        yield "both its actions begin with the same token"
    places = sorted(p for ranges in one.spans.values() for low, high in ranges for p in range(low, high))
    if places != list(range(length)):
        yield "its spans do not hold every token once"


def _measures(subject: Subject) -> Iterator[str]:
    """Lists of the wrong length, and recoveries and probabilities that are not those of their margins."""
    margins = measures.declared(subject.record.study)
    for one in subject.measured:
        yield from (f"{one.id}: {what}" for what in measures.misshapen(one, margins, subject.record.model))
        known = one.measures.get("margins", {})
        made = {"recovery": lambda m, one=one: measures.recovery(one, m), "p_two": _p_two}
        for name, derive in made.items():
            said = one.measures.get(name)
            if isinstance(said, Mapping):
                wanted = {key: None if said[key] is None else derive(known[key]) for key in said if key in known}
                yield from _differences({key: said[key] for key in wanted}, wanted, f"{one.id}: {name}")


def _p_two(margin: float) -> float:
    return 0.5 * (1 + math.tanh(margin / 2))


def _checks(subject: Subject) -> Iterator[str]:
    """Identities that did not hold, and a noise floor below the noise that the instances show."""
    for check in subject.record.checks:
        holds = check.value is not None and check.bound is not None and check.value <= check.bound
        if not (holds and check.passed):
            yield f"{check.name!r} is {check.value} (bound {check.bound}), and said to have {_verb(check.passed)}"
    for name, own in subject.record.model.self_check.items():
        if not own.passed:
            yield f"the model's self-check {name!r} failed"
    floor = float(subject.record.model.noise_floor or 0.0)
    for one in subject.measured:
        both = [one.measures.get(name, {}) for name in runner.MARGINS]
        worst = max((abs(both[0][arm] - both[1][arm]) for arm in both[0] if arm in both[1]), default=0.0)
        if worst > floor * (1 + CLOSE):
            yield f"{one.id}: the cached decode is {worst:.3g} off the full forward, above the noise floor {floor:.3g}"


def _verb(passed: bool) -> str:
    return "passed" if passed else "failed"


def _plan(subject: Subject) -> Iterator[str]:
    """A plan that the instances do not give. What is made with the model, or of arrays that are not kept, is left."""
    study, said = subject.study, _json(subject.record.plan)
    if study.asks("gather"):
        raise Unchecked("it was made of arrays that are not kept")
    made = runner.replan(study, subject.measured) if study.asks("prepare") else {}
    if study.asks("equip"):
        said.pop("equipment", None)
    yield from _differences(said, made)


def _summary(subject: Subject) -> Iterator[str]:
    """Numbers and words other than the instances and arrays give."""
    try:
        made = runner.summary_of(subject.study, subject.record, subject.path)
    except RecordError as error:
        raise Unchecked(f"its arrays cannot be read: {error}") from error
    yield from _differences(_by_name(subject.record.summary), _by_name(made))


def _by_name(summary: records.Summary) -> dict[str, Any]:
    """A summary with its effects by what they are, less the note that says when it was recomputed."""
    made = summary.model_dump(mode="json")
    made["notes"] = [note for note in made["notes"] if not note.startswith(runner.RECOMPUTED)]
    made["effects"] = {
        f"{one['name']} ({one['layout']}, {'gated' if one['gated'] else 'ungated'})": one for one in made["effects"]
    }
    return made


CHECKS: Mapping[str, Callable[[Subject], Iterable[str]]] = {
    "content hash": _content,
    "inclusion": _inclusion,
    "settings": _settings,
    "arrays": _arrays,
    "model": _model,
    "instances": _instances,
    "gate": _gates,
    "tokens": _tokens,
    "measures": _measures,
    "checks": _checks,
    "plan": _plan,
    "summary": _summary,
}


# --- helpers ----------------------------------------------------------------------------------------------


def _json(value: Any) -> Any:
    """A value as it comes back from a file."""
    return json.loads(json.dumps(records.plain(value)))


def _differences(said: Any, made: Any, where: str = "") -> Iterator[str]:
    """Where a record's value and the recomputed one differ, by path; numbers to `CLOSE`."""
    if isinstance(said, Mapping) and isinstance(made, Mapping):
        for key in dict.fromkeys((*said, *made)):
            place = f"{where}: {key}" if where else str(key)
            if key not in made or key not in said:
                yield f"{place} is only in the record" if key in said else f"{place} is missing in the record"
            else:
                yield from _differences(said[key], made[key], place)
    elif isinstance(said, list | tuple) and isinstance(made, list | tuple) and len(said) == len(made):
        for at, (x, y) in enumerate(zip(said, made, strict=True)):
            yield from _differences(x, y, f"{where}[{at}]")
    elif not _same(said, made):
        yield f"{where} is {_short(said)} in the record, {_short(made)} recomputed"


def _same(said: Any, made: Any) -> bool:
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (said, made))
    return math.isclose(said, made, rel_tol=CLOSE, abs_tol=TINY) if numbers else said == made


def _short(value: Any) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _older(record: Record) -> str | None:
    """The commit that made the summary, where the code that makes summaries has changed since; None where it has not,
    or where that is not known."""
    notes = [note for note in record.summary.notes if note.startswith(runner.RECOMPUTED)]
    commit = notes[-1].removeprefix(runner.RECOMPUTED) if notes else record.provenance.git_commit
    if commit is None or not COMMIT.fullmatch(commit):
        return None
    command = ["git", "diff", "--quiet", commit, "--", *SOURCES]
    try:
        done = subprocess.run(command, cwd=discover.ROOT, capture_output=True, timeout=30, check=False)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return commit if done.returncode == 1 else None

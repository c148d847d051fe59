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
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from kvnotes import config as configs
from kvnotes import discover, effects, measures, proofs, records, runner, vocabulary, weights
from kvnotes.errors import KVNotesError
from kvnotes.instance import Arm, Pair, Piece
from kvnotes.provenance import SOURCES
from kvnotes.records import Gate, Instance, Record, RecordError, Tokens
from kvnotes.runner import Study

State = Literal["wrong", "unchecked", "unreadable", "hint"]
CLOSE, TINY = 1e-6, 1e-9  # how far a recomputed number may be off, relative and absolute: last digits, and no more
MOST = 5  # differences of one part that are told one by one
COMMIT = re.compile(r"[0-9a-f]{7,40}")
RECOMPUTED = re.compile(re.escape(runner.RECOMPUTED) + rf"({COMMIT.pattern}|None)")  # None: outside of a checkout
FATAL = {"summary"}  # a record of which these were not checked is verified in part only
# the parts that the code of now makes again, and of what code: where that has changed, they may be older code's
MADE_BY = {
    **dict.fromkeys(("instances", "tokens", "vocabulary"), ("tasks",)),
    **dict.fromkeys(("title", "checks", "plan"), SOURCES),
}
IDENTITY = ("weights_sha256", "tokenizer_sha256", "files_sha256")
TEMPLATE = "template.before"
TEMPLATE_END = Piece(text="", role="template", key="after")
Prompt = tuple[str, str]  # the tokenizer and the text
Spoken = Mapping[Prompt, tuple[int, ...]]  # the tokens of each


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is wrong with a part of a record; or why it could not be checked, which fails only where it is `fatal`; or a
    hint at the cause of what is wrong."""

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
    """What of a part cannot be checked here, and why. A check yields it and goes on, or raises it."""


Check = Callable[["Subject"], Iterable[str | Unchecked]]


def verify(path: Path) -> Verdict:
    """Everything about one record file that can be checked without another."""
    try:
        record = records.read_untrusted(path)
    except RecordError as error:
        what = str(error).removeprefix(f"{path}: ")
        return Verdict(path=path, record=None, findings=(Finding(part="file", what=what, state="unreadable"),))
    subject = Subject(record, path)
    found = [one for part, check in CHECKS.items() for one in _findings(part, check, subject)]
    found += _hints(record, path, {one.part: None for one in found if one.state == "wrong"})
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
    """The exit code: 0 where all holds, 1 where something does not, 2 where a file cannot be read, or where all that
    could be checked holds and a summary was not."""
    states = {one.state for one in findings if one.state != "unchecked" or one.fatal}
    return 2 if "unreadable" in states else 1 if "wrong" in states else 2 if "unchecked" in states else 0


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
    def known(self) -> Mapping[str, Pair]:
        """The pairs made again that instances of the record are of, by id: not those that bear such an id only."""
        given = ((one, self.pairs.get(one.id)) for one in self.record.instances)
        return {one.id: pair for one, pair in given if pair is not None and runner.is_of(one, pair)}

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
                    pair = self.known.get(one.id)
                    text = None if pair is None else _text(getattr(pair, name), model.template)
                    key = None if text is None else (str(model.tokenizer_sha256), text)
                    yield one, key, getattr(one.tokens, name)


def _text(arm: Arm, template: tuple[str, str]) -> str:
    before, after = template
    return before + arm.user_text + after + arm.answer_text


def _findings(part: str, check: Check, subject: Subject) -> list[Finding]:
    wrong: list[str] = []
    unchecked: list[Finding] = []
    try:
        for what in check(subject):
            if isinstance(what, str):
                wrong.append(what)
            else:
                unchecked.append(_unchecked(part, str(what)))
    except Unchecked as why:
        unchecked.append(_unchecked(part, str(why)))
    except ModuleNotFoundError as error:
        what = f"{error.name} is not installed: this needs the models extra, `make setup`"
        unchecked.append(Finding(part=part, what=what, state="unchecked"))
    except Exception as error:  # a study's code may fail in any way on measures that are not its own
        wrong.append(f"cannot be recomputed: {type(error).__name__}: {error}")
    more = [f"and {len(wrong) - MOST} more"] if len(wrong) > MOST else []
    return [*(Finding(part=part, what=what) for what in [*wrong[:MOST], *more]), *unchecked]


def _unchecked(part: str, why: str) -> Finding:
    return Finding(part=part, what=why, state="unchecked", fatal=part in FATAL)


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


def _title(subject: Subject) -> Iterator[str]:
    said, wanted = subject.record.title, subject.study.module.TITLE
    if said != wanted:
        yield f"it is {said!r}, the study's is {wanted!r}"


def _model(subject: Subject) -> Iterator[str | Unchecked]:
    """Weights or precision other than the registry's of that name."""
    model = subject.record.model
    if model.name not in weights.known_models():
        raise Unchecked(f"{', '.join(IDENTITY)}: {model.name} is no model of the registry")
    entry = weights.load_entry(model.name)
    if entry.gguf is None:
        raise Unchecked(f"{', '.join(IDENTITY)}: the registry has none of {model.name}, which comes from the hub")
    yield Unchecked(f"{', '.join(IDENTITY[1:])}: the registry has none; records of a model are held to each other's")
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
    for name in (name for name in here if name in wanted):
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
        pair = subject.known.get(one.id)
        if pair is None or one.tokens is None:
            continue
        yield from (f"{one.id}: {what}" for what in _span_faults(one, pair))
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


def _span_faults(one: Instance, pair: Pair) -> Iterator[str]:
    """Spans that the prompt does not have, or not in this order. A piece may have no token of its own; a token of no
    piece is called the template's."""
    pieces = iter([piece.span for piece in (*pair.base.user, TEMPLATE_END, *pair.base.answer)])
    starts = sorted((low, span) for span, ranges in one.spans.items() for low, _ in ranges if span != TEMPLATE)
    for span, _ in groupby(span for _, span in starts):
        if span not in pieces:  # the search goes on from where the one before was found
            yield f"its prompt has no span {span!r} there"
            return


def _vocabulary(subject: Subject) -> Iterator[str | Unchecked]:
    """Texts of tokens that do not make the prompts' texts, nor begin the actions."""
    texts, loose = subject.record.vocabulary, False
    if not texts:
        return
    for one, key, ids in subject.prompts():
        spelt = key is None or vocabulary.spell([texts[str(i)] for i in ids], key[1])
        loose |= spelt is None
        if spelt is False:
            yield f"{one.id}: the texts of its tokens are not its prompt"
    for one in subject.measured:
        pair = subject.known.get(one.id)
        if pair is not None and one.tokens is not None:
            for arm, token in ((pair.base, one.tokens.base_action), (pair.target, one.tokens.target_action)):
                if not vocabulary.begins(texts[str(token)], arm.action):
                    yield f"{one.id}: {arm.action!r} does not begin with {texts[str(token)]!r}, its first token's text"
    if loose:
        yield Unchecked("white space, letter case or the form of characters, which differ from the prompts'")


def _measures(subject: Subject) -> Iterator[str]:
    """Lists of the wrong length, and recoveries and probabilities that are not those of their margins."""
    margins = measures.declared(subject.record.study)
    floor = _loaded_floor(subject.record)
    for one in subject.measured:
        yield from (f"{one.id}: {what}" for what in measures.misshapen(one, margins, subject.record.model))
        known = _numbers(one.measures.get("margins"))
        noise = max(floor, proofs.decode_error(one))
        made = {"recovery": lambda m, one=one, noise=noise: _recovery(one, m, noise), "p_two": _p_two}
        for name, derive in made.items():
            said = one.measures.get(name, 0.0)
            if known and (said is None or isinstance(said, Mapping)):
                kept = said if said is None else {key: value for key, value in said.items() if key in known}
                wanted = {key: derive(margin) for key, margin in known.items()}
                yield from _differences(kept, wanted, f"{one.id}: {name}")


def _numbers(value: Any) -> dict[str, float]:
    """The numbers of a mapping; nothing of anything else."""
    given = value.items() if isinstance(value, Mapping) else ()
    return {key: one for key, one in given if isinstance(one, int | float) and not isinstance(one, bool)}


def _recovery(one: Instance, margin: float, noise: float) -> float | None:
    """As a trial gives it: none where the gap is not above the noise."""
    return measures.recovery(one, margin) if abs(effects.gap(one)) > noise else None


def _p_two(margin: float) -> float:
    return 0.5 * (1 + math.tanh(margin / 2))


def _checks(subject: Subject) -> Iterator[str | Unchecked]:
    """Proofs that are missing, did not hold, have another bound, or another value than the instances give; and a noise
    floor that is not theirs."""
    record, config = subject.record, subject.study.config
    yield from proofs.self_check_faults(record.model)
    found = {check.name: check for check in record.checks}
    yield from (f"{name!r} is missing" for name in proofs.IDENTITIES if name not in found)
    if len(found) < len(record.checks):
        yield "a check stands twice"
    floor, exact = _loaded_floor(record), record.model.dtype == "float32"
    tolerance = record.model.self_check.get(proofs.DECODE)
    for name, check in found.items():
        if not (check.passed and check.value is not None and check.bound is not None and check.value <= check.bound):
            said = "passed" if check.passed else "failed"
            yield f"{name!r} is {check.value} (bound {check.bound}), and said to have {said}"
        bound = proofs.bound(
            name,
            tolerance=proofs.TOLERANCE.get(record.model.dtype, float((tolerance and tolerance.bound) or 0.0)),
            floor=floor,
            identities=config.identity,
            exact=exact,
        )
        if check.bound != bound:
            yield f"the bound of {name!r} is {check.bound}, {bound} is wanted"
    yield from _recomputed_checks(subject, {name: check.value for name, check in found.items()})
    worst = float((proofs.DECODE in found and found[proofs.DECODE].value) or 0.0)
    yield from _differences(record.model.noise_floor, max(floor, worst), "noise floor")


def _recomputed_checks(subject: Subject, said: Mapping[str, float | None]) -> Iterator[str | Unchecked]:
    """The identities' values beside those that the instances' own measures give."""
    study = subject.study
    own = study.module.identities if study.asks("identities") else None
    try:
        made = proofs.identities(subject.measured, own)
    except AttributeError as error:
        yield Unchecked(f"the study's own identities, which are not of its measures alone: {error}")
        made = proofs.identities(subject.measured, None)
    for name, wanted in made.items():
        value = said.get(name)
        if value is None:
            yield f"{name!r} has no value: the instances give {wanted:.3g}"
        elif name == proofs.DECODE and study.asks("prepare") and value > wanted and not _same(value, wanted):
            yield Unchecked(f"{name!r} of the first of two passes, {value:.3g}: the margins kept are the second's")
        elif not _same(value, wanted):
            yield f"{name!r} is {_short(value)} in the record, {_short(wanted)} recomputed"


def _loaded_floor(record: Record) -> float:
    """The model's own noise floor, as its self-check measured it."""
    own = record.model.self_check.get(proofs.DECODE)
    return float((own and own.value) or 0.0)


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
    said, wanted = _by_name(subject.record.summary), _by_name(made)
    yield from _differences(said, wanted)
    if said["effects"].keys() == wanted["effects"].keys() and [*said["effects"]] != [*wanted["effects"]]:
        yield "effects: they stand in another order than recomputed"


def _by_name(summary: records.Summary) -> dict[str, Any]:
    """A summary with its effects by what they are, less the last note where it says when it was recomputed and no
    more."""
    made = summary.model_dump(mode="json")
    if made["notes"] and RECOMPUTED.fullmatch(made["notes"][-1]):
        del made["notes"][-1]
    made["effects"] = {
        f"{one['name']} ({one['layout']}, {'gated' if one['gated'] else 'ungated'})": one for one in made["effects"]
    }
    return made


CHECKS: Mapping[str, Check] = {
    "content hash": _content,
    "inclusion": _inclusion,
    "settings": _settings,
    "title": _title,
    "arrays": _arrays,
    "model": _model,
    "instances": _instances,
    "gate": _gates,
    "tokens": _tokens,
    "vocabulary": _vocabulary,
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


# --- older code -------------------------------------------------------------------------------------------


def _hints(record: Record, path: Path, wrong: Iterable[str]) -> Iterator[Finding]:
    """Of the parts that are wrong, those that code made which has changed since. Nothing tells what older code made
    from what somebody changed: they stay wrong."""
    parts = [*wrong]
    commit = record.provenance.git_commit
    for part in (part for part in parts if part in MADE_BY):
        sources = MADE_BY[part]
        if commit is not None and changed_since(commit, sources):
            whose = "the task's code" if sources == ("tasks",) else "the code"
            what = (
                f"{whose} has changed since the record's commit {commit[:12]}: if nobody changed the record, it stays "
                "valid, but the code of now cannot make it again"
            )
            yield Finding(part=part, what=what, state="hint")
    notes = [note for note in record.summary.notes if RECOMPUTED.fullmatch(note)]
    made = notes[-1].removeprefix(runner.RECOMPUTED) if notes else commit
    if parts == ["summary"] and made is not None and changed_since(made, SOURCES):
        what = (
            f"the summary is of older code: it was made at commit {made[:12]}, and the code has changed since. "
            f"If nobody changed its numbers, `kvnotes summarise {path}` makes it anew."
        )
        yield Finding(part="summary", what=what, state="hint")


def changed_since(commit: str, sources: Sequence[str], *, root: Path = discover.ROOT) -> bool | None:
    """Whether these folders of a checkout are others than at a commit; None where that is not known."""
    if not COMMIT.fullmatch(commit):
        return None
    command = ["git", "diff", "--quiet", commit, "--", *sources]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, timeout=30, check=False)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return {0: False, 1: True}.get(done.returncode)

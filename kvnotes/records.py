"""JSON records: what a run measured, on what, and how it was made. No torch.

A record is validated when it is built, when it is written and when it is read. Its content hash covers all
but the clock and the command line: a run that was killed and resumed has the hash of an uninterrupted one,
and a file that was edited or damaged is refused. `record.schema.json` is their published schema.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from typing_extensions import TypeAliasType

from kvnotes.errors import KVNotesError

if TYPE_CHECKING:
    import numpy as np

SCHEMA_VERSION = 1
ARRAY_LIMIT_BYTES = 5_000_000  # a larger array belongs in a safetensors file beside the record
CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u00(?:0[0-8bcef]|1[0-9a-f]|7f|[89][0-9a-f])", re.IGNORECASE)
UNTRUSTED = "untrusted"  # the validation context of a record whose counts are not held to its instances
_LINE = 110  # characters up to which a nested value stays on one line of the file


class RecordError(KVNotesError):
    """A record that cannot be written, read or trusted."""


class OtherSchema(RecordError):
    """A record of an older or newer schema than this kvnotes reads."""


# --- values -----------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Arrays and array scalars as lists and numbers; NaN and the infinities, which JSON lacks, as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


Number = Annotated[float | None, BeforeValidator(plain)]
Scalar = bool | int | float | str | None
if TYPE_CHECKING:
    Measure = Any  # a reader knows what a study's measures hold, a type checker does not
else:
    Measure = TypeAliasType("Measure", "Scalar | list[Measure] | dict[str, Measure]")
Measures = Annotated[Mapping[str, Measure], BeforeValidator(plain)]


class _Frozen(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


# --- the record -------------------------------------------------------------------------------------------


class Provenance(_Frozen):
    """How to make the record again."""

    created: str
    """UTC, ISO 8601."""
    command: str
    git_commit: str | None
    git_dirty: bool | None
    kvnotes_version: str
    python: str
    platform: str
    versions: dict[str, str]
    """Installed version by package."""
    seed: int
    config: Annotated[dict[str, Scalar | list[Scalar]], BeforeValidator(plain)]
    """Every setting of the run, flat."""
    config_hash: str


class Bounded(_Frozen):
    """A measured number and the bound it was held to: from above for an error, from below for an effect."""

    value: Number
    bound: Number
    passed: bool


class Model(_Frozen):
    """The weights and the tokenizer that the numbers belong to."""

    name: str
    source: str
    weights_sha256: str | None
    tokenizer_sha256: str | None
    files_sha256: str
    """Of config, tokenizer, chat template and all else in the model's folder but the weights."""
    chat: dict[str, bool | int | str]
    """Options the chat template was given."""
    template: tuple[str, str]
    """What the template puts before and after the user's turn; empty without one."""
    precision: str
    """Such as "Q4_K_M, dequantised" or "bf16"."""
    architecture: str
    layers: int
    heads: int
    kv_heads: int
    d_model: int
    d_head: int
    dtype: str
    device: str
    attention: str
    noise_floor: Number
    """Cached decode against the full forward, largest difference in logits."""
    self_check: dict[str, Bounded]


class Inclusion(_Frozen):
    """How many pairs were generated, tokenised (used) and passed the competence gate (included)."""

    generated: int
    used: int
    included: int
    scenarios: int
    """Scenarios among the included pairs."""
    excluded: dict[str, int]
    """Pairs that are not included, counted by reason."""


class Tokens(_Frozen):
    """Token ids of both arms, and the positions that changed and that are recomputed."""

    base: tuple[int, ...]
    target: tuple[int, ...]
    changed: tuple[int, ...]
    query: tuple[int, ...]
    base_action: int
    target_action: int


class Gate(_Frozen):
    """Competence of the unedited model; margins in logits, positive for the target's action."""

    base_margin: Number
    target_margin: Number
    gap: Number
    base_correct: bool
    target_correct: bool
    base_argmax_correct: bool
    target_argmax_correct: bool
    passed: bool


class Instance(_Frozen):
    """One pair and every number that was measured on it."""

    id: str
    scenario: str
    domain: str
    layout: str
    kind: str
    group: str
    seed: int
    balance: dict[str, str]
    """Counterbalanced choices, by name."""
    status: Literal["included", "incompetent", "skipped"]
    """included: passed the competence gate; incompetent: measured, but did not; skipped: not measured."""
    reason: str | None
    """Why the pair is not included."""
    tokens: Tokens | None
    spans: dict[str, tuple[tuple[int, int], ...]]
    """Half-open token ranges by span name."""
    gate: Gate | None
    measures: Measures
    hooks: dict[str, int]
    """How often each hook fired."""
    seconds: float

    @model_validator(mode="after")
    def _reason_where_due(self) -> Instance:
        if (self.status == "included") != (self.reason is None):
            raise ValueError(f"{self.id}: an instance has a reason if and only if it is not included")
        return self


class HypothesisTest(_Frozen):
    """A hypothesis test and its conclusion in words."""

    name: str
    statistic: Number
    p: Number
    margin: Number
    """Equivalence margin, where the test has one."""
    conclusion: str


class Effect(_Frozen):
    """One estimate with its interval, over the included pairs (gated) or over all used ones."""

    name: str
    label: str
    layout: str
    gated: bool
    estimate: Number
    low: Number
    high: Number
    level: float
    method: str
    n: int
    clusters: int
    mean_of_ratios: Number
    unresolved: bool
    """Smaller than the noise floor."""
    warning: str | None
    test: HypothesisTest | None
    control: bool

    @model_validator(mode="after")
    def _interval_in_order(self) -> Effect:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"{self.name} ({self.layout}): the interval's low end is above its high end")
        return self


class Table(_Frozen):
    """A table of the summary."""

    columns: tuple[str, ...]
    rows: Annotated[list[list[Scalar]], BeforeValidator(plain)]

    @model_validator(mode="after")
    def _rectangular(self) -> Table:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"every row must have {len(self.columns)} cells, as many as there are columns")
        return self


class Summary(_Frozen):
    """What the instances say together; always recomputable from them."""

    effects: tuple[Effect, ...]
    tables: dict[str, Table]
    notes: tuple[str, ...]
    headline: str

    @model_validator(mode="after")
    def _effects_differ(self) -> Summary:
        counted = Counter((one.name, one.layout, one.gated) for one in self.effects)
        if repeated := [key for key, n in counted.items() if n > 1]:
            name, layout, gated = repeated[0]
            gate = "gated" if gated else "ungated"
            raise ValueError(f"the effect {name!r} ({layout}, {gate}) occurs more than once")
        return self


class Check(_Frozen):
    """An identity or control that a run had to keep."""

    name: str
    value: Number
    bound: Number
    passed: bool
    what: str


class ArrayFile(_Frozen):
    """A safetensors file beside the record."""

    file: Annotated[str, Field(pattern=r"^[^/\\]+\.safetensors$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tensors: dict[str, tuple[int, ...]]
    """Shape by tensor name."""


class Timings(_Frozen):
    """Wall-clock seconds; not part of the content hash."""

    total_s: float
    per_instance_s: Number
    load_s: float


class Record(_Frozen):
    """A finished run. `content_hash` may be left empty: `write` fills it."""

    schema_version: Literal[1] = SCHEMA_VERSION
    content_hash: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    study: str
    layout: str
    task: str
    title: str
    provenance: Provenance
    model: Model
    inclusion: Inclusion
    instances: tuple[Instance, ...]
    plan: Measures = Field(default_factory=dict)
    """What a study of two passes chose between them, such as slots ranked on each fold of the scenarios."""
    summary: Summary
    checks: tuple[Check, ...]
    arrays: tuple[ArrayFile, ...]
    timings: Timings
    vocabulary: dict[str, str] = Field(default_factory=dict)
    """Text by token id, of exactly the ids that occur in the instances; empty where the record has no texts."""

    @model_validator(mode="after")
    def _vocabulary_fits(self) -> Record:
        if self.vocabulary and set(self.vocabulary) != set(map(str, token_ids(self.instances))):
            raise ValueError("the vocabulary must hold exactly the token ids of the instances")
        return self

    @model_validator(mode="after")
    def _counts_agree(self, info: ValidationInfo) -> Record:
        repeated = [name for name, n in Counter(one.id for one in self.instances).items() if n > 1]
        if repeated:
            raise ValueError(f"instance ids must differ, but {repeated[0]!r} occurs more than once")
        counted = count_inclusion(self.instances)
        if self.inclusion != counted and info.context != UNTRUSTED:
            raise ValueError(f"inclusion says {self.inclusion}, the instances say {counted}")
        return self


def count_inclusion(instances: Sequence[Instance]) -> Inclusion:
    """The inclusion that the instances give; reasons by falling count, then by name."""
    kept = [one for one in instances if one.status == "included"]
    reasons = Counter(one.reason for one in instances if one.reason is not None)
    return Inclusion(
        generated=len(instances),
        used=sum(one.status != "skipped" for one in instances),
        included=len(kept),
        scenarios=len({one.scenario for one in kept}),
        excluded=dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
    )


def token_ids(instances: Sequence[Instance]) -> list[int]:
    """Every token id that occurs in the instances' prompts or is the first of an action, sorted."""
    held = [one.tokens for one in instances if one.tokens is not None]
    return sorted({i for own in held for i in (*own.base, *own.target, own.base_action, own.target_action)})


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a record file, as published in `kvnotes/record.schema.json`."""
    schema = Record.model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def content_hash(record: Record) -> str:
    """SHA-256 (hex) of the record's canonical JSON.

    What a clock, a restart or another folder changes is left out: the hash itself, the timings, each
    instance's seconds, and when, by which command and into which results folder the record was made.
    """
    content = record.model_dump(mode="json", exclude={"content_hash", "timings"})
    for instance in content["instances"]:
        del instance["seconds"]
    made = content["provenance"]
    del made["created"], made["command"]
    made["config"].pop("results", None)
    for later in ("plan", "vocabulary"):
        if not content[later]:
            del content[later]  # as in the records that were written before there was such a thing
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


# --- files ------------------------------------------------------------------------------------------------


def record_path(results: Path, *, model: str, study: str, layout: str, config_hash: str, default: bool) -> Path:
    """`results/<model>/<study>/<layout>.json`; other settings add `-<8 digits of their hash>`.

    Raises:
        RecordError: if nothing of the model's name can stand in a file name.
    """
    name = f"{layout}.json" if default else f"{layout}-{config_hash[:8]}.json"
    return results / safe_name(model) / study / name


def safe_name(model: str) -> str:
    """A model's name as one folder name: `org/name` becomes `org--name`.

    Raises:
        RecordError: if nothing of the name is left.
    """
    name = re.sub(r"[^\w.-]+", "-", model.replace("/", "--"), flags=re.ASCII).strip(".-")
    if not name:
        raise RecordError(f"the model name {model!r} has no letter or digit to name a folder by; rename the model.")
    return name


def write(record: Record, path: Path) -> Record:
    """Validate a record, fill in its content hash and put it at `path` in one step.

    A reader sees the old file or the whole new one, never a part. Returns the record as written.

    Raises:
        RecordError: if the record is not valid, holds an array over 5 MB, or cannot be written there.
    """
    try:
        checked = Record.model_validate(record.model_dump(warnings=False))
    except ValidationError as error:
        raise RecordError(f"{path}: not written, the record is not valid: {_first_fault(error)}.") from error
    _refuse_large_arrays(checked, path)
    final = checked.model_copy(update={"content_hash": content_hash(checked)})
    write_atomically(f"{_format(final.model_dump(mode='json'))}\n".encode(), path)
    return final


def require_writable(path: Path) -> None:
    """Find out before a long run whether its record can be written at `path`; leaves no file.

    Raises:
        RecordError: if it cannot.
    """
    probe = path.with_name(f".{path.name}.writable")
    write_atomically(b"", probe)
    probe.unlink(missing_ok=True)


def read(path: Path) -> Record:
    """Read a record and check its syntax, schema version, schema and content hash, in this order.

    Raises:
        RecordError: naming the file, what is wrong with it and what to do.
    """
    record = _load(path)
    actual = content_hash(record)
    if record.content_hash != actual:
        raise RecordError(
            f"{path}: the content hash does not match (the file says {record.content_hash[:12] or 'nothing'}"
            f", its content gives {actual[:12]}): it was edited or damaged after it was written. "
            "Restore the file or run its study again."
        )
    return record


def read_untrusted(path: Path) -> Record:
    """A record as it stands, for whoever looks into what is wrong with it: neither its content hash nor its inclusion
    is held to its content.

    Raises:
        RecordError: if it is not a record at all.
    """
    return _load(path, context=UNTRUSTED)


def _load(path: Path, *, context: str | None = None) -> Record:
    text = _read_text(path)
    _check_version(_parse(text, path), path)
    try:
        return Record.model_validate_json(text, strict=True, context=context)
    except ValidationError as error:
        raise RecordError(
            f"{path}: not a valid record: {_first_fault(error)}. Restore the file or run its study again."
        ) from error


def find(results: Path, *, study: str | None = None) -> dict[str, Record]:
    """Every record under `results`, of one study where it is named, by `<model>/<study>/<file stem>`, sorted.

    Raises:
        RecordError: if the folder does not exist or a record in it cannot be read.
    """
    return {record_name(path): read(path) for path in record_files(results, study=study)}


def find_readable(results: Path, *, study: str | None = None) -> tuple[dict[str, Record], dict[Path, str]]:
    """As `find`, but a record that cannot be read stops nothing: the records, and by file why another is none.

    Raises:
        RecordError: if the folder does not exist.
    """
    records: dict[str, Record] = {}
    unreadable: dict[Path, str] = {}
    for path in record_files(results, study=study):
        try:
            records[record_name(path)] = read(path)
        except RecordError as error:
            unreadable[path] = str(error).removeprefix(f"{path}: ")
    return records, unreadable


def record_files(results: Path, *, study: str | None = None) -> list[Path]:
    """The files under `results` that stand where records do, sorted; of one study where it is named.

    Raises:
        RecordError: if the folder does not exist.
    """
    if not results.is_dir():
        raise RecordError(f"{results}: no such results folder; `make probe-locality` makes one.")
    return sorted(path for path in results.glob(f"*/{study or '*'}/*.json") if path.is_file() and path.name[0] != ".")


def record_name(path: Path) -> str:
    """`<model>/<study>/<file stem>` of a record's file."""
    return "/".join(path.with_suffix("").parts[-3:])


def write_arrays(tensors: Mapping[str, np.ndarray], path: Path) -> ArrayFile:
    """Write arrays into the safetensors file beside the record `path`; the result goes into `Record.arrays`.

    Raises:
        RecordError: if the file cannot be written.
    """
    from safetensors.numpy import save  # few records have arrays; `show` must start at once

    beside = path.with_suffix(".safetensors")
    data = save(dict(tensors))
    write_atomically(data, beside)
    shapes = {name: tuple(array.shape) for name, array in tensors.items()}
    return ArrayFile(file=beside.name, sha256=hashlib.sha256(data).hexdigest(), tensors=shapes)


def read_arrays(record: Record, path: Path) -> dict[str, np.ndarray]:
    """The arrays of the record read from `path`, by tensor name; each file's SHA-256 is checked first.

    Raises:
        RecordError: if a file is missing or is not the one that the record was written with.
    """
    from safetensors.numpy import load  # as above

    arrays: dict[str, np.ndarray] = {}
    for entry in record.arrays:
        beside = path.with_name(entry.file)
        try:
            data = beside.read_bytes()
        except OSError as error:
            raise RecordError(
                f"{beside}: cannot be read ({error.strerror}), but {path} needs it. Restore it."
            ) from error
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise RecordError(f"{beside}: its SHA-256 is not the one in {path}. Restore it or run the study again.")
        arrays |= load(data)
    return arrays


def write_atomically(data: bytes, path: Path) -> None:
    """Write bytes to a temporary file in the same folder, flush them to the disk, then rename it to `path`.

    Raises:
        RecordError: if the folder or the disk does not take it; what stood at `path` before still stands.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        cannot_write(path, error)


def cannot_write(path: Path, error: OSError) -> NoReturn:
    """Raise the RecordError of a file that the disk or the folder does not take, with cause and fix."""
    cause = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = f"Free at least the size of the file on the disk of {path.parent}, then run again."
    else:
        fix = "Choose a folder that you can write to with RESULTS=<folder>."
    raise RecordError(f"{path}: cannot be written ({cause}). {fix}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RecordError(f"{path}: no such record; `make probe-<study>` writes one.") from error
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror}); name a record file.") from error
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: not a record: it is not UTF-8 text ({error.reason}).") from error


def _parse(text: str, path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> NoReturn:
        raise RecordError(f"{path}: not a record: {constant} is not JSON; an undefined number must be null.")

    try:
        data = json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise RecordError(
            f"{path}: not JSON (line {error.lineno}, column {error.colno}: {error.msg}); the file is cut off "
            "or was edited. Restore it or run its study again."
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise RecordError(f"{path}: not a record: {type(error).__name__} while reading it.") from error
    if CONTROL.search(text):
        raise RecordError(f"{path}: not a record: it holds control characters, which could hide text in a terminal.")
    if not isinstance(data, dict):
        raise RecordError(f"{path}: not a record: a JSON object is wanted, this is a {type(data).__name__}.")
    return data


def _check_version(data: Mapping[str, Any], path: Path) -> None:
    version = data.get("schema_version")
    if version == SCHEMA_VERSION and type(version) is int:
        return
    if type(version) is not int:
        raise RecordError(f"{path}: not a record: it has no whole number as its schema_version.")
    if version > SCHEMA_VERSION:
        raise OtherSchema(
            f"{path}: schema_version {version} is newer than {SCHEMA_VERSION}, the newest that this kvnotes "
            "reads. Upgrade kvnotes."
        )
    study = data.get("study", "<study>")
    raise OtherSchema(
        f"{path}: schema_version {version} is older than {SCHEMA_VERSION}, which this kvnotes reads. Run "
        f"`make probe-{study}` again, or read it with the kvnotes version named in its provenance."
    )


def _first_fault(error: ValidationError) -> str:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    where = ".".join(str(part) for part in faults[0]["loc"]) or "record"
    what = "unknown key" if faults[0]["type"] == "extra_forbidden" else faults[0]["msg"]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{where}: {what}{more}"


def _refuse_large_arrays(record: Record, path: Path) -> None:
    for instance in record.instances:
        for name, value in instance.measures.items():
            if isinstance(value, list | dict) and len(json.dumps(value)) > ARRAY_LIMIT_BYTES:
                raise RecordError(
                    f"{path}: not written: {name} of instance {instance.id} takes over {ARRAY_LIMIT_BYTES} "
                    "bytes. Put it into a file beside the record with write_arrays."
                )


def _format(value: Any, indent: int = 0) -> str:
    """JSON that people and `diff` can read: what fits on a line, and a list of plain values, stays on one."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    is_list = isinstance(value, list)
    if not value or not isinstance(value, list | dict) or len(line) + indent <= _LINE:
        return line
    if is_list and not any(isinstance(item, list | dict) for item in value):
        return line
    inner = " " * (indent + 1)
    if is_list:
        parts = [f"{inner}{_format(item, indent + 1)}" for item in value]
    else:
        parts = [f"{inner}{json.dumps(key)}: {_format(item, indent + 1)}" for key, item in value.items()]
    opening, closing = "[]" if is_list else "{}"
    return f"{opening}\n" + ",\n".join(parts) + f"\n{' ' * indent}{closing}"

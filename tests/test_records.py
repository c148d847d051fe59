"""Records: what is written is what is read, and nothing that was tampered with is."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from pydantic import ValidationError
from sample_record import make_record

from kvnotes import records
from kvnotes.records import Record, RecordError

PUBLISHED = Path(records.__file__).with_name("record.schema.json")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-model" / "locality" / "table_field_first.json"
    records.write(make_record(), path)
    return path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def update(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- round trip ---------------------------------------------------------------------------------------------


def test_what_is_written_is_read(written: Path) -> None:
    record = records.read(written)
    assert record == make_record().model_copy(update={"content_hash": record.content_hash})
    assert re.fullmatch("[0-9a-f]{64}", record.content_hash)
    assert record.instances[0].measures["field_only"] == 8 * 0.05 - 4


def test_the_same_record_gives_the_same_bytes(written: Path) -> None:
    again = written.with_name("again.json")
    records.write(records.read(written), again)
    assert again.read_bytes() == written.read_bytes()


def test_lists_of_tokens_stay_on_one_line(written: Path) -> None:
    assert '"base": [1, 5, 10, 7, 13, 8, 13, 9],' in written.read_text()


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    record = make_record()
    measures = {"nan": float("nan"), "grid": np.array([[1.5, np.inf], [0.0, 2.0]]), "n": np.int64(3)}
    first = records.Instance(**{**dict(record.instances[0]), "measures": measures})
    record = record.model_copy(update={"instances": (first, *record.instances[1:])})
    records.write(record, tmp_path / "r.json")
    assert "NaN" not in (tmp_path / "r.json").read_text()
    read = records.read(tmp_path / "r.json")
    assert read.instances[0].measures == {"nan": None, "grid": [[1.5, None], [0.0, 2.0]], "n": 3}


def test_a_mean_of_nan_is_null() -> None:
    effect = make_record().summary.effects[0]
    assert records.Effect(**{**dict(effect), "estimate": float("nan")}).estimate is None


# --- schema -------------------------------------------------------------------------------------------------


def test_the_published_schema_is_that_of_the_models() -> None:
    assert json.loads(PUBLISHED.read_text()) == records.json_schema(), (
        "run: python -m kvnotes.cli schema > kvnotes/record.schema.json"
    )


def test_the_published_schema_accepts_a_record_and_refuses_an_unknown_key(written: Path) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(PUBLISHED.read_text()))
    data = json.loads(written.read_text())
    validator.validate(data)
    assert not validator.is_valid(data | {"extra": 1})
    del data["model"]["noise_floor"]
    assert not validator.is_valid(data)


def test_counts_must_be_those_of_the_instances() -> None:
    record = make_record(included=4, gated=2, skipped=1)
    assert record.inclusion == records.Inclusion(
        generated=7,
        used=6,
        included=4,
        scenarios=2,
        excluded={"gap under 1 logit": 2, "values of unequal token count": 1},
    )
    wrong = record.inclusion.model_copy(update={"included": 5})
    with pytest.raises(ValidationError, match="inclusion says"):
        Record(**{**dict(record), "inclusion": wrong})


def test_ids_are_unique() -> None:
    record = make_record()
    with pytest.raises(ValidationError, match="more than once"):
        Record(**{**dict(record), "instances": (*record.instances, record.instances[0])})


def test_an_excluded_instance_needs_a_reason() -> None:
    with pytest.raises(ValidationError, match="reason"):
        records.Instance(**{**dict(make_record().instances[0]), "status": "incompetent"})


def test_records_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        make_record().study = "other"


# --- tampering ----------------------------------------------------------------------------------------------


def test_a_changed_mean_is_refused(written: Path) -> None:
    edit(written, '"estimate": 0.05', '"estimate": 0.04')
    with pytest.raises(RecordError, match=r"table_field_first\.json: the content hash does not match"):
        records.read(written)


def test_a_changed_weights_hash_is_refused(written: Path) -> None:
    edit(written, "0" * 64, "2" * 64)
    with pytest.raises(RecordError, match="content hash"):
        records.read(written)


def test_a_removed_hash_is_refused(written: Path) -> None:
    update(written, content_hash="")
    with pytest.raises(RecordError, match="the file says nothing"):
        records.read(written)


def test_a_dropped_instance_is_refused(written: Path) -> None:
    update(written, instances=json.loads(written.read_text())["instances"][1:])
    with pytest.raises(RecordError, match=r"not a valid record: .*the instances say"):
        records.read(written)


def test_a_dropped_instance_with_matching_counts_is_refused(written: Path) -> None:
    instances = json.loads(written.read_text())["instances"][:-1]
    excluded = {"gap under 1 logit": 2}
    counts = {"generated": 6, "used": 6, "included": 4, "scenarios": 2, "excluded": excluded}
    update(written, instances=instances, inclusion=counts)
    with pytest.raises(RecordError, match="content hash"):
        records.read(written)


@pytest.mark.parametrize("keep", [0, 1, 500, -3])
def test_a_truncated_file_is_refused(written: Path, keep: int) -> None:
    written.write_text(written.read_text()[:keep])
    with pytest.raises(RecordError, match=r"table_field_first\.json: not JSON \(line"):
        records.read(written)


def test_an_unknown_key_is_refused_by_name(written: Path) -> None:
    update(written, colour="red")
    with pytest.raises(RecordError, match="colour: unknown key"):
        records.read(written)


def test_a_wrong_type_is_refused_and_not_coerced(written: Path) -> None:
    edit(written, '"layers": 2', '"layers": "2"')
    with pytest.raises(RecordError, match=r"model\.layers"):
        records.read(written)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (0, "older than 1.*make probe-locality"),
        (2, "newer than 1.*Upgrade"),
        ("1", "no whole"),
        (True, "no whole"),
    ],
)
def test_another_schema_version_says_what_to_do(written: Path, version: object, message: str) -> None:
    update(written, schema_version=version)
    with pytest.raises(RecordError, match=message):
        records.read(written)


def test_nan_in_a_file_is_refused(written: Path) -> None:
    edit(written, '"estimate": 0.05', '"estimate": NaN')
    with pytest.raises(RecordError, match="NaN is not JSON"):
        records.read(written)


@pytest.mark.parametrize("content", [b"[]", b"3", b"\xff\xfe\x00"])
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r.json").write_bytes(content)
    with pytest.raises(RecordError, match="not a record"):
        records.read(tmp_path / "r.json")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no such record"):
        records.read(tmp_path / "none.json")
    with pytest.raises(RecordError, match="cannot be read"):
        records.read(tmp_path)


# --- content hash -------------------------------------------------------------------------------------------


def test_the_hash_ignores_clock_command_and_folder() -> None:
    record = make_record()
    slower = tuple(one.model_copy(update={"seconds": one.seconds + 1}) for one in record.instances)
    config = {**record.provenance.config, "results": "/elsewhere"}
    made = {"created": "2027-01-01T00:00:00Z", "command": "make probe-locality", "config": config}
    other = record.model_copy(
        update={
            "instances": slower,
            "timings": record.timings.model_copy(update={"total_s": 1.0}),
            "provenance": record.provenance.model_copy(update=made),
            "content_hash": "0" * 64,
        }
    )
    assert records.content_hash(other) == records.content_hash(record)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: {"layout": "paper"},
        lambda r: {"provenance": r.provenance.model_copy(update={"seed": 1})},
        lambda r: {"provenance": r.provenance.model_copy(update={"git_commit": None})},
        lambda r: {"model": r.model.model_copy(update={"noise_floor": 2.2e-5})},
        lambda r: {"instances": r.instances[::-1]},
        lambda r: {"checks": r.checks[1:]},
    ],
)
def test_the_hash_covers_everything_else(change) -> None:
    record = make_record()
    assert records.content_hash(record.model_copy(update=change(record))) != records.content_hash(record)


# --- writing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_file_and_nothing_else(
    written: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = written.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(RecordError, match=r"No space left on device.*Free at least"):
        records.write(make_record(seed=1), written)
    assert written.read_bytes() == before
    assert [path.name for path in written.parent.iterdir()] == [written.name]


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = written.read_bytes()

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        records.write(make_record(seed=1), written)
    assert written.read_bytes() == before
    assert [path.name for path in written.parent.iterdir()] == [written.name]


def test_a_read_only_folder_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", denied)
    with pytest.raises(RecordError, match=r"r\.json: cannot be written \(Permission denied\).*RESULTS="):
        records.write(make_record(), tmp_path / "r.json")


def test_a_folder_that_is_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("")
    target = tmp_path / "results" / "m" / "r.json"
    for attempt in (lambda: records.write(make_record(), target), lambda: records.require_writable(target)):
        with pytest.raises(RecordError, match=r"cannot be written.*RESULTS="):
            attempt()


def test_require_writable_leaves_no_file(tmp_path: Path) -> None:
    records.require_writable(tmp_path / "m" / "r.json")
    assert list((tmp_path / "m").iterdir()) == []


def test_an_invalid_record_is_not_written(tmp_path: Path) -> None:
    broken = make_record().model_copy(update={"layout": 3})
    with pytest.raises(RecordError, match="not written, the record is not valid: layout"):
        records.write(broken, tmp_path / "r.json")
    assert not (tmp_path / "r.json").exists()


def test_an_effect_that_stands_twice_is_not_written(tmp_path: Path) -> None:
    """Of one name, layout and gate there is one: a figure takes the first, a reader by name the last."""
    record = make_record()
    first = record.summary.effects[0]
    twice = record.summary.model_copy(update={"effects": (*record.summary.effects, first)})
    with pytest.raises(RecordError, match=r"field_only.*\(table_field_first, gated\) occurs more than once"):
        records.write(record.model_copy(update={"summary": twice}), tmp_path / "r.json")
    other = record.summary.model_copy(
        update={"effects": (*record.summary.effects, first.model_copy(update={"layout": "paper"}))}
    )
    assert records.write(record.model_copy(update={"summary": other}), tmp_path / "r.json").content_hash


def test_a_large_measure_belongs_in_a_file_beside(tmp_path: Path) -> None:
    record = make_record()
    first = record.instances[0].model_copy(update={"measures": {"map": [0.123456] * 700_000}})
    record = record.model_copy(update={"instances": (first, *record.instances[1:])})
    with pytest.raises(RecordError, match=r"map of instance table_field_first/000.*write_arrays"):
        records.write(record, tmp_path / "r.json")


# --- arrays beside ------------------------------------------------------------------------------------------


def test_arrays_round_trip_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    tensors = {"map": np.arange(6, dtype=np.float32).reshape(2, 3)}
    entry = records.write_arrays(tensors, path)
    assert entry.tensors == {"map": (2, 3)}
    records.write(make_record().model_copy(update={"arrays": (entry,)}), path)
    np.testing.assert_array_equal(records.read_arrays(records.read(path), path)["map"], tensors["map"])

    beside = tmp_path / "r.safetensors"
    beside.write_bytes(beside.read_bytes()[:-1] + b"\x01")
    with pytest.raises(RecordError, match=r"r\.safetensors: its SHA-256 is not the one in"):
        records.read_arrays(records.read(path), path)
    beside.unlink()
    with pytest.raises(RecordError, match=r"r\.safetensors: cannot be read"):
        records.read_arrays(records.read(path), path)


def test_an_array_file_cannot_lie_elsewhere() -> None:
    with pytest.raises(ValidationError, match="pattern"):
        records.ArrayFile(file="../r.safetensors", sha256="0" * 64, tensors={})


# --- paths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "default", "expected"),
    [
        ("qwen2.5-coder-0.5b", True, "qwen2.5-coder-0.5b/locality/paper.json"),
        ("qwen2.5-coder-0.5b", False, "qwen2.5-coder-0.5b/locality/paper-a1b2c3d4.json"),
        ("Qwen/Qwen3-8B", True, "Qwen--Qwen3-8B/locality/paper.json"),
        ("../up", True, "up/locality/paper.json"),
        ("a b:c", True, "a-b-c/locality/paper.json"),
    ],
)
def test_where_a_record_goes(model: str, default: bool, expected: str) -> None:
    options = {"study": "locality", "layout": "paper", "config_hash": "a1b2c3d4e5", "default": default}
    assert records.record_path(Path("results"), model=model, **options) == Path("results") / expected


def test_a_model_without_a_name_is_refused() -> None:
    with pytest.raises(RecordError, match="no letter or digit"):
        records.safe_name("../..")


def test_records_are_found_by_name_and_study(written: Path) -> None:
    results = written.parents[2]
    written.with_name(".table_field_first.resume.jsonl").write_text("{}")
    written.with_name(".hidden.json").write_text("{}")
    assert list(records.find(results)) == ["tiny-model/locality/table_field_first"]
    assert records.find(results, study="suffix") == {}
    with pytest.raises(RecordError, match="no such results folder"):
        records.find(results / "none")


def test_what_cannot_be_read_stops_no_other(written: Path) -> None:
    results = written.parents[2]
    old = written.with_name("old.json")
    old.write_text(written.read_text().replace('"schema_version": 1', '"schema_version": 0'))
    found, unreadable = records.find_readable(results)
    assert list(found) == [records.record_name(written)]
    assert list(unreadable) == [old]
    assert unreadable[old].startswith("schema_version 0 is older than 1")


def test_records_need_no_torch() -> None:
    code = "import sys, kvnotes.records, kvnotes.report, kvnotes.cli, figures.build, figures.locality; "
    heavy = "[m for m in ('torch', 'transformers', 'transformer_lens') if m in sys.modules]"
    done = subprocess.run([sys.executable, "-c", f"{code}print({heavy})"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_hostile_json_is_one_clear_error(tmp_path):
    path = tmp_path / "hostile.json"
    for text in ("[" * 200_000, "1" * 10_000, '{"title": "\\u001b]0;owned"}'):
        path.write_text(text)
        with pytest.raises(RecordError, match=r"hostile\.json"):
            records.read(path)


def test_a_plan_is_part_of_the_content_and_no_plan_leaves_the_hash_as_it_was():
    plain = make_record()
    planned = plain.model_copy(update={"plan": {"l": {"folds": {"a": 0}}}})
    assert records.content_hash(planned) != records.content_hash(plain)
    older = plain.model_dump(mode="json", exclude={"plan"})  # a record that was written before there were plans
    assert records.content_hash(records.Record.model_validate(older)) == records.content_hash(plain)


def test_records_made_before_there_were_plans_can_be_read(tmp_path):
    data = json.loads(records.write(make_record(), tmp_path / "a.json").model_dump_json(exclude={"plan"}))
    (tmp_path / "b.json").write_text(json.dumps(data), encoding="utf-8")
    assert records.read(tmp_path / "b.json").plan == {}

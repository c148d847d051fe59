"""`kvnotes show` and `kvnotes diff`: the numbers on the screen are those of the record."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sample_record import make_record
from typer.testing import CliRunner

from kvnotes import records, report
from kvnotes.cli import app
from kvnotes.records import Record


@pytest.fixture
def save(tmp_path: Path):
    def to(name: str, record: Record) -> str:
        records.write(record, tmp_path / name)
        return str(tmp_path / name)

    return to


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def line(output: str, *parts: str) -> str:
    """The one line of the output that holds all parts, with single spaces."""
    found = [" ".join(one.split()) for one in output.splitlines() if all(part in one for part in parts)]
    assert len(found) == 1, (parts, found, output)
    return found[0]


# --- show ---------------------------------------------------------------------------------------------------


def test_show_prints_what_was_measured(save) -> None:
    code, output = run("show", save("r.json", make_record()))
    assert code == 0
    assert (
        line(output, "LlamaForCausalLM")
        == "model tiny-model (LlamaForCausalLM), Q4_K_M, dequantised, from made by hand"
    )
    assert "2.1e-05 logits" in line(output, "noise floor")
    assert line(output, "pairs ", "generated").endswith("7 generated, 6 used, 4 included in 2 scenarios")
    assert "gap under 1 logit (2), values of unequal token count (1)" in line(output, "excluded")
    # layout, effect, gate, pairs (scenarios), estimate [interval], mean of ratios
    assert line(output, "field-only", "0.060") == (
        "table_field_first field-only gated 4 (2) 0.050 [-0.030, 0.130] 0.060"
    )
    assert line(output, "ungated", "0.930 [") == "ungated 6 (3) 0.930 [0.850, 1.010] 0.940"
    assert "0.950 [0.870, 1.030]" in line(output, "notes-only", "gated")
    assert "0.050 [-0.030, 0.130]" in line(output, "field share")
    assert "0.000 [-0.080, 0.080]" in line(output, "interaction")
    assert "1.000 [1.000, 1.000]" in line(output, "full-downstream", "gated")
    assert "0.100 0.003 equivalent to 0 within 0.1" in line(output, "equivalence (TOST)")
    assert line(output, "identity", "equals target").endswith("3e-06 0.0001 pass")
    assert output.count("intervals: 95% t, G-1 degrees of freedom") == 2
    assert "seed 0 | commit 0123456789ab | config a1b2c3d4" in line(output, "seed 0")
    assert "torch 2.13.0" in output
    assert "61.0 s in all" in line(output, "time ")


def test_show_says_what_failed_and_what_is_under_the_noise(save) -> None:
    record = make_record(warning="only 2 clusters [scenarios]")
    effects = (record.summary.effects[0].model_copy(update={"unresolved": True}), *record.summary.effects[1:])
    failed = record.checks[0].model_copy(update={"passed": False, "value": 0.5})
    record = record.model_copy(
        update={"checks": (failed,), "summary": record.summary.model_copy(update={"effects": effects})}
    )
    _, output = run("show", save("r.json", record))
    assert line(output, "empty_edit").endswith("0.5 0.0001 FAIL")
    assert output.count("unresolved: under") == 1
    assert "warning: only 2 clusters [scenarios]" in output


def test_show_names_the_layout_of_every_block(save) -> None:
    layouts = {"table_field_first": (0.05, 0.95), "prose_rules_first": (0.8, 0.25)}
    _, output = run("show", save("r.json", make_record(recoveries=layouts)))
    assert "0.800 [0.720, 0.880]" in line(output, "prose_rules_first", "field-only", "0.810")
    assert "0.050 [-0.030, 0.130]" in line(output, "table_field_first", "field-only", "0.060")


def test_show_without_an_included_pair_shows_no_number(save) -> None:
    code, output = run("show", save("r.json", make_record(included=0, gated=5)))
    assert code == 0
    assert "6 generated, 5 used, 0 included in 0 scenarios" in output
    assert line(output, "field-only", ["gated", "0", "(0)"][0], "0 (0)").endswith("gated 0 (0) - -")


# --- diff ---------------------------------------------------------------------------------------------------


def test_equal_records_differ_in_nothing_but_the_clock(save) -> None:
    slower = make_record().timings.model_copy(update={"total_s": 1.0})
    other = make_record().model_copy(update={"timings": slower})
    code, output = run("diff", save("a.json", make_record()), save("b.json", other))
    assert (code, output) == (0, "equal: the same content, timings aside\n")


def test_diff_prints_what_differs(save) -> None:
    first = save("a.json", make_record())
    second = make_record(recoveries={"table_field_first": (0.30, 0.95)}, included=5, gated=1, seed=3)
    code, output = run("diff", first, save("b.json", second))
    assert code == 1
    assert line(output, "config.seed") == "config.seed 0 3"
    assert line(output, "inclusion.included") == "inclusion.included 4 5"
    row = "0.050 [-0.030, 0.130] 0.300 [0.220, 0.380] +0.250 do not overlap"
    assert line(output, "field-only ", "0.300 [") == f"table_field_first field-only {row}"
    assert line(output, "field share ", "0.175 [").endswith("+0.125 overlap")
    assert "7 in both, 0 only in A, 0 only in B, 1 with another status" in output
    assert "table_field_first/004: incompetent -> included" in output
    assert "largest change of a measure: table_field_first/000.field_only: -3.600 -> -1.600" in output


def test_diff_matches_instances_by_id() -> None:
    a, b = make_record(included=4, gated=0, skipped=0), make_record(included=6, gated=0, skipped=0)
    difference = report.compare(a, b)
    assert difference.only_a == ()
    assert difference.only_b == ("table_field_first/004", "table_field_first/005")
    assert difference.common == 4
    assert difference.largest is None


def test_diff_finds_the_largest_change_inside_nested_measures() -> None:
    record = make_record()

    def with_margins(value: float) -> Record:
        measures = {"margins": {"base": [1.0, value]}, "R_field_only": 0.05}
        first = record.instances[0].model_copy(update={"measures": measures})
        return record.model_copy(update={"instances": (first, *record.instances[1:])})

    largest = report.compare(with_margins(2.0), with_margins(5.0)).largest
    assert largest == report.Change(name="table_field_first/000.margins.base.1", a=2.0, b=5.0)


def test_diff_names_parts_that_no_table_shows(save) -> None:
    record = make_record()
    other = record.model_copy(update={"checks": record.checks[:1]})
    code, output = run("diff", save("a.json", record), save("b.json", other))
    assert code == 1
    assert "also different: checks" in output


def test_diff_names_another_plan_and_other_token_texts(save) -> None:
    record = make_record()
    texts = {str(i): "x" for i in records.token_ids(record.instances)}
    first = save("a.json", record.model_copy(update={"plan": {"l": {"folds": {}}}}))
    other = save("b.json", record.model_copy(update={"plan": {"l": {"folds": {"a": 1}}}, "vocabulary": texts}))
    code, output = run("diff", first, other)
    assert code == 1
    assert "also different: plan, vocabulary" in output


# --- errors and speed ---------------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvnotes.cli", *arguments], capture_output=True, text=True, check=False
    )


def test_a_bad_file_is_one_line_and_exit_code_2(tmp_path: Path, save) -> None:
    good, bad = save("good.json", make_record()), tmp_path / "bad.json"
    bad.write_text(Path(good).read_text().replace('"estimate": 0.05', '"estimate": 0.06', 1))
    for arguments in (("show", str(bad)), ("diff", good, str(bad)), ("show", str(tmp_path / "none.json"))):
        done = command(*arguments)
        assert done.returncode == 2
        assert re.fullmatch(r"error: .*\.json: [^\n]*\n", done.stderr)


def test_an_unknown_command_suggests_the_nearest() -> None:
    done = command("shwo")
    assert done.returncode == 2
    assert "Did you mean" in done.stderr
    assert "show" in done.stderr


def test_help_answers_within_a_second() -> None:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        assert command("--help").returncode == 0
        times.append(time.perf_counter() - started)
    assert min(times) < 1


# --- overview -----------------------------------------------------------------------------------------------


def test_an_overview_has_the_newest_record_of_each_study_and_model(tmp_path: Path) -> None:
    def put(model: str, study: str, stem: str, *, created: str, headline: str) -> None:
        made = make_record()
        made = made.model_copy(
            update={
                "study": study,
                "model": made.model.model_copy(update={"name": model}),
                "provenance": made.provenance.model_copy(update={"created": created}),
                "summary": made.summary.model_copy(update={"headline": headline}),
            }
        )
        records.write(made, tmp_path / model / study / f"{stem}.json")

    put("one", "suffix", "table", created="2026-01-01T00:00:00+00:00", headline="older")
    put("one", "suffix", "prose", created="2026-01-02T00:00:00+00:00", headline="newer")
    put("one", "timing", "table", created="2026-01-01T00:00:00+00:00", headline="another study")
    put("two", "suffix", "table", created="2026-01-03T00:00:00+00:00", headline="another model")
    code, output = run("overview", "--results", str(tmp_path))
    assert code == 0
    assert line(output, "one/suffix").startswith("one/suffix/prose 4 of 7 2 ")
    assert "newer" in output
    assert "older" not in output
    assert "another study" in output
    assert "another model" in output
    code, output = run("overview", "--results", str(tmp_path), "--model", "two")
    assert "another model" in output
    assert "newer" not in output

"""Models side by side: which record stands for a model, its numbers, and that page and figures show all of them."""

from __future__ import annotations

import pytest
from sample_record import make_record
from typer.testing import CliRunner

from figures import families, style
from figures.families import Measure
from kvnotes import records
from kvnotes.records import Record, RecordError

LAYOUT = "table_field_first"
FIELD = Measure(study="locality", effect="field_only", label="field-only")


def record(model: str, study: str = "locality", *, created: str = "2026-01-01T00:00:00+00:00", **effects) -> Record:
    """A record by hand; `effects` name estimates that replace the sample's."""
    made = make_record(model=model, included=8, gated=1)
    kept = [one for one in made.summary.effects if not effects]
    kept += [
        one.model_copy(update={"name": name, "estimate": value, "low": value - 0.1, "high": value + 0.1})
        for one in made.summary.effects
        if one.name == "field_only" and one.gated
        for name, value in effects.items()
    ]
    summary = made.summary.model_copy(update={"effects": tuple(kept)})
    provenance = made.provenance.model_copy(update={"created": created})
    return made.model_copy(update={"study": study, "summary": summary, "provenance": provenance})


def named(*found: Record, stem: str = LAYOUT) -> dict[str, Record]:
    return {f"{one.model.name}/{one.study}/{stem}": one for one in found}


def test_the_newest_record_stands_for_a_model_whatever_its_settings():
    usual, old, new = (
        record("m", field_only=value, created=f"2026-01-0{day}T00:00:00+00:00")
        for value, day in ((0.1, 1), (0.2, 2), (0.3, 3))
    )
    later = {f"m/locality/{LAYOUT}-{name}": one for name, one in (("aa", new), ("bb", old))}

    def value(found: dict[str, Record]) -> float | None:
        return families.cell(FIELD, families.by_model(found, layout=LAYOUT)["m"]).value

    assert value({**later, **named(usual)}) == value({**named(usual), **later}) == pytest.approx(0.3)
    assert families.by_model(later, layout="prose_field_first") == {}


def test_a_depth_is_a_share_of_the_layers():
    made = record("m", "timing", write_depth=0.0)  # after the first of the sample's two layers
    measure = Measure(study="timing", effect="write_depth", label="write depth", depth=True)
    assert families.cell(measure, {"timing": made}).value == pytest.approx(0.5)
    assert families.cell(measure, {"timing": made}).high == pytest.approx(0.55)


def test_what_there_is_no_number_for_says_why():
    made = record("m", notes=0.5)
    assert families.cell(FIELD, {}).why == "not run"
    assert families.cell(FIELD, {"locality": made}).why == "not measured"
    effect = made.summary.effects[0].model_copy(update={"name": "field_only", "estimate": None})
    none = made.model_copy(update={"summary": made.summary.model_copy(update={"effects": (effect,)})})
    assert families.cell(FIELD, {"locality": none}).why == "8 of 9 pairs pass the gate"


def two_models() -> dict[str, Record]:
    return named(
        record("one", field_only=0.11, full_downstream=1.0),
        record("one", "dissociation", trigger_only=0.02, notes=0.97, same_conclusion=0.13),
        record("one", "specificity", top_1=0.31, top_8=0.83, random_1=0.01, random_8=0.04),
        record("two", field_only=0.22),
        record("two", "injection", full_notes=0.94, follow_rate=0.88),
    )


def test_figures_and_page_hold_every_number_and_the_papers():
    text = families.page(two_models(), layout=LAYOUT)
    for value in ("0.11 [0.01, 0.21], n=8", "0.97", "0.13", "0.31", "0.83", "0.22", "0.94", "0.88", "0.04"):
        assert value in text
    assert "| field-only | 0.11 [0.01, 0.21], n=8 | 0.22 [0.12, 0.32], n=8 | Llama-3.1-8B: \N{MINUS SIGN}0.03;" in text
    # table 3: injection and timing of one, dissociation, specificity and timing of two; table 4: dissociation and 15
    # counts of two
    assert text.count("not run") == 4 + (3 + 3 + 2) + (3 + 15)
    assert "Llama-3.1-8B: at most 0.04" in text  # of 0.035, to two digits
    with style.styled():
        drawn = families.draw(two_models(), layout=LAYOUT)
    assert set(drawn) == {"families/table3", "families/table4"}
    written = [label.get_text() for axes in drawn["families/table3"].axes for label in axes.texts]
    assert "0.94 [0.84, 1.04]" in written
    assert "not run" in written
    lines = [line for axes in drawn["families/table4"].axes for line in axes.lines]
    assert any(list(line.get_xdata()) == [0.0, 3.0] and list(line.get_ydata()) == [0.31, 0.83] for line in lines)


def test_every_measure_of_the_tables_is_one_of_the_studies_it_names():
    assert {one.study for one in families.TABLE3} == set(families.STUDIES)
    assert families.draw({}) == {}


def test_the_papers_values_are_read_in_every_form_they_are_written_in():
    def values(study: str, effect: str) -> dict[str, tuple[float, float]]:
        return families.paper_values(Measure(study=study, effect=effect, label=""))

    assert values("locality", "field_only")["Mistral-7B"] == (0.137, 0.137)
    assert values("injection", "full_notes")["Gemma-2-9B, Mistral-7B"] == (0.98, 1.0)
    assert values("timing", "write_depth")["Gemma-2-9B, Mistral-7B"] == (0.19, 0.26)
    assert values("specificity", "random_8")["Qwen3-8B, Qwen3-4B, Llama-3.1-8B"] == (families.AT_MOST, 0.035)
    assert values("injection", "top_8") == values("locality", "no such effect") == {}


def test_the_command_writes_both_figures_and_the_page(tmp_path):
    for name, one in two_models().items():
        records.write(one, tmp_path / "results" / f"{name}.json")
    asked = [str(tmp_path / "results"), "--model", "two", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(families.app, asked)
    assert done.exit_code == 0
    folder = tmp_path / "out" / "families"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*(f"table{n}.{kind}" for n in (3, 4) for kind in ("png", "pdf")), "page.md"]
    )
    text = (folder / "page.md").read_text(encoding="utf-8")
    assert "0.22" in text
    assert "| one" not in text
    for models in (["three"], ["two", "three"]):
        asked = [part for model in models for part in ("--model", model)]
        missing = CliRunner().invoke(families.app, [str(tmp_path / "results"), *asked])
        assert isinstance(missing.exception, RecordError)
        assert "no record of three" in str(missing.exception)

"""Figures: the marks stand where the record's numbers are, and the same record gives the same bytes."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from sample_record import make_record
from typer.testing import CliRunner

from figures import build, forest, locality, style
from kvnotes import records
from kvnotes.errors import UnknownName
from kvnotes.records import HypothesisTest, Record

ALL = {
    "table_field_first": (0.04, 1.02),
    "table_rules_first": (0.55, 0.45),
    "prose_field_first": (0.19, 0.86),
    "prose_rules_first": (0.84, 0.25),
    "code_field_first": (0.10, 0.90),
    "code_rules_first": (0.80, 0.25),
    "paper": (0.02, 0.97),
    "two_hop": (0.01, 0.99),
    "conversational": (0.03, 0.95),
    "attribute_lookup": (0.45, 0.50),
}


@pytest.fixture(autouse=True)
def _styled() -> Iterator[None]:
    with style.styled():
        yield


def draw(record: Record) -> Figure:
    return locality.draw({"m/locality/r": record})["m/locality/r"]


def marks(ax: Axes, marker: str, colour: object) -> list[float]:
    """Where a panel has markers of a kind and colour, from top to bottom."""
    points = [line for line in ax.lines if line.get_marker() == marker and len(line.get_xdata()) == 1]
    edge = [line for line in points if to_hex(line.get_markeredgecolor()) == to_hex(colour)]
    return [round(float(line.get_xdata()[0]), 6) for line in sorted(edge, key=lambda one: one.get_ydata()[0])]


def whiskers(ax: Axes, colour: object) -> list[tuple[float, float]]:
    lines = [line for line in ax.lines if line.get_linewidth() == 1.6 and to_hex(line.get_color()) == to_hex(colour)]
    return [tuple(round(float(x), 6) for x in line.get_xdata()) for line in lines]


def texts(figure: Figure) -> str:
    parts = [text.get_text() for ax in figure.axes for text in (*ax.texts, *ax.get_yticklabels(), ax.title)]
    return "\n".join([*parts, *(text.get_text() for text in figure.texts)])


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


# --- one layout ---------------------------------------------------------------------------------------------


def test_states_stand_at_their_recoveries() -> None:
    states, _ = draw(make_record()).axes
    assert [label.get_text() for label in states.get_yticklabels()] == [
        "base",
        "field-only",
        "notes-only",
        "full-downstream\n(identity)",
        "target",
    ]
    assert marks(states, "o", style.INK) == [0, 1]
    assert marks(states, "o", style.VERMILLION) == [0.05]
    assert marks(states, "o", style.lighter(style.VERMILLION)) == [0.03]
    assert marks(states, "o", style.BLUE) == [0.95]
    assert whiskers(states, style.VERMILLION) == [(-0.03, 0.13)]
    assert whiskers(states, style.BLUE) == [(0.87, 1.03)]
    assert "0.05  [\N{MINUS SIGN}0.03, 0.13]" in [text.get_text() for text in states.texts]


def test_the_papers_values_are_open_markers_named_as_the_papers() -> None:
    figure = draw(make_record())
    states, share = figure.axes
    for model, marker in (("Llama-3.1-8B", "D"), ("Gemma-2-9B", "s"), ("Mistral-7B", "^")):
        value = {"Llama-3.1-8B": -0.028, "Gemma-2-9B": 0.005, "Mistral-7B": 0.137}[model]
        assert marks(states, marker, style.VERMILLION) == [value]
        assert marks(states, marker, style.GREY) == [1]
        assert f"paper: {model}" in legend(figure)
    assert marks(share, "D", style.VERMILLION) == [0.01]
    open_ones = [line for line in states.lines if line.get_marker() in {"D", "s", "^"}]
    assert {to_hex(line.get_markerfacecolor()) for line in open_ones} == {"#ffffff"}
    assert "arXiv 2606.17107" in texts(figure)


def test_the_share_of_the_notes_is_what_the_field_leaves() -> None:
    record = make_record(recoveries={"table_field_first": (0.2, 0.6)})  # share (0.2 + 1 - 0.6) / 2 = 0.3
    share = draw(record).axes[1]
    widths = [round(bar.get_width(), 6) for bar in share.patches if to_hex(bar.get_facecolor()) != "#f5f5f5"]
    assert widths == [0.7, 0.72, 0.3, 0.28]  # notes gated, ungated; field gated, ungated
    assert whiskers(share, style.INK) == [(0.62, 0.78), (0.22, 0.38)]


def test_the_caption_names_what_a_reader_needs() -> None:
    text = " ".join(texts(draw(make_record())).split())
    for part in (
        "tiny-model, Q4_K_M, dequantised, float32 on cpu",
        "4 pairs included of 6 used of 7 generated, in 2 scenarios",
        "gap under 1 logit (2), values of unequal token count (1)",
        "Intervals: 95% t, G-1 degrees of freedom",
        "Noise floor: 2e-05 logits",
    ):
        assert part in text


def test_an_estimate_without_an_interval_says_so() -> None:
    record = make_record()
    effects = tuple(one.model_copy(update={"low": None, "high": None}) for one in record.summary.effects)
    figure = draw(record.model_copy(update={"summary": record.summary.model_copy(update={"effects": effects})}))
    assert whiskers(figure.axes[0], style.VERMILLION) == []
    assert "0.05  no interval" in texts(figure)


def test_an_interval_off_the_axis_ends_in_arrows() -> None:
    record = make_record()
    wide = record.summary.effects[0].model_copy(update={"low": -9.0, "high": 9.0})
    summary = record.summary.model_copy(update={"effects": (wide, *record.summary.effects[1:])})
    states = draw(record.model_copy(update={"summary": summary})).axes[0]
    low, high = states.get_xlim()
    assert low > -2
    assert high < 3
    assert marks(states, "<", style.VERMILLION) == [pytest.approx(low)]
    assert marks(states, ">", style.VERMILLION) == [pytest.approx(high)]


def test_no_included_pair_is_said_with_its_counts() -> None:
    figure = draw(make_record(included=0, gated=5, skipped=2))
    (ax,) = figure.axes
    assert ax.get_title(loc="left") == (
        "No recovery to report: none of 5 used pairs passes the competence gate (7 generated)"
    )
    assert [bar.get_width() for bar in ax.patches if to_hex(bar.get_facecolor()) != "#f5f5f5"] == [0, 5, 2]
    assert [text.get_text() for text in ax.texts] == ["0", "5", "2"]


# --- several layouts, several models ------------------------------------------------------------------------


def test_layouts_stand_side_by_side() -> None:
    figure = draw(make_record(recoveries=ALL))
    field, rules, off = figure.axes[:3]
    assert marks(field, "o", style.VERMILLION) == [0.04, 0.19, 0.10, 0.02]  # table, prose, code, paper
    assert marks(field, "o", style.BLUE) == [1.02, 0.86, 0.90, 0.97]
    assert marks(rules, "o", style.VERMILLION) == [0.55, 0.84, 0.80]
    assert marks(off, "o", style.VERMILLION) == [0.01, 0.03, 0.45]
    assert [ax.get_xlim() for ax in (rules, off)] == [field.get_xlim()] * 2
    labels = [label.get_text() for label in off.get_yticklabels()]
    assert [label.split("\n")[0] for label in labels] == ["two-hop", "conversational", "attribute lookup"]
    assert labels[0].endswith("4 pairs, 2 scenarios")


def test_the_papers_ranges_stand_beside_the_off_template_forms() -> None:
    figure = draw(make_record(recoveries=ALL))
    field, _, off = figure.axes[:3]
    boxes = [box for box in off.patches if to_hex(box.get_edgecolor()) == to_hex(style.VERMILLION)]
    ranges = [(round(box.get_x(), 3), round(box.get_x() + box.get_width(), 3)) for box in boxes]
    assert ranges == [(-0.012, 0.006), (-0.012, 0.054), (0.25, 0.63)]
    assert marks(field, "D", style.VERMILLION) == [-0.028, 0.005, 0.137]  # once, beside the paper's prompt
    assert "range over the paper's models" in legend(figure)


def test_a_layout_without_an_included_pair_says_so() -> None:
    record = make_record(recoveries={"table_field_first": (0.05, 0.95), "table_rules_first": (0.5, 0.5)})
    instances = tuple(
        one.model_copy(update={"status": "incompetent", "reason": "weak"})
        if one.layout == "table_rules_first" and one.status == "included"
        else one
        for one in record.instances
    )
    counts = records.count_inclusion(instances)
    figure = draw(record.model_copy(update={"instances": instances, "inclusion": counts}))
    field, rules = figure.axes[:2]
    assert marks(field, "o", style.VERMILLION) == [0.05]
    assert marks(rules, "o", style.VERMILLION) == []
    assert [text.get_text() for text in rules.texts] == ["none of 6 pairs passes the gate"]


def test_models_that_share_a_layout_are_compared() -> None:
    name = "{}/locality/table_field_first"
    pair = {
        name.format("a"): make_record(model="a"),
        name.format("b"): make_record(model="b", recoveries={"table_field_first": (0.13, 0.88)}),
    }
    drawn = locality.draw(pair)
    assert set(drawn) == {*pair, "locality/table_field_first"}
    top = drawn["locality/table_field_first"].axes[0]
    assert marks(top, "o", style.VERMILLION) == [0.05, 0.13]
    assert [label.get_text().split("\n")[0] for label in top.get_yticklabels()] == [
        "a",
        "b",
        "the paper's models",
    ]
    assert marks(top, "D", style.VERMILLION) == [-0.028, 0.005, 0.137]


def test_other_settings_are_not_compared() -> None:
    pair = {f"{model}/locality/table_field_first-a1b2c3d4": make_record(model=model) for model in ("a", "b")}
    assert set(locality.draw(pair)) == set(pair)


@pytest.mark.parametrize("recoveries", [{"table_field_first": (0.05, 0.95)}, ALL])
def test_no_text_overlaps_another(recoveries: dict[str, tuple[float, float]]) -> None:
    figure = draw(make_record(recoveries=recoveries, model="qwen2.5-coder-0.5b"))
    figure.draw_without_rendering()
    found = [*figure.texts, *figure.legends[0].get_texts()]
    for ax in figure.axes:
        found += [*ax.texts, *ax.get_yticklabels(), ax.xaxis.label]
        found += [
            label for label in ax.get_xticklabels() if ax.get_xlim()[0] <= label.get_position()[0] <= ax.get_xlim()[1]
        ]
    boxes = [text.get_window_extent() for text in found if text.get_text()]
    size = figure.bbox
    for index, box in enumerate(boxes):
        assert size.x0 <= box.x0, found[index]
        assert box.x1 <= size.x1, found[index]
        assert not [found[other] for other in range(index) if _overlap(box, boxes[other])]


def _overlap(a, b) -> bool:
    return a.x0 < b.x1 and b.x0 < a.x1 and a.y0 < b.y1 and b.y0 < a.y1


# --- files --------------------------------------------------------------------------------------------------


def test_the_same_record_gives_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    path = tmp_path / "results" / "m" / "locality" / "all.json"
    records.write(make_record(recoveries=ALL), path)
    digests = []
    for seed in ("1", "2"):
        out = tmp_path / seed
        subprocess.run(
            [sys.executable, "-m", "figures.build", str(tmp_path / "results"), "--out", str(out), "--only", "locality"],
            env={**os.environ, "PYTHONHASHSEED": seed, "MPLBACKEND": "svg"},
            check=True,
            capture_output=True,
        )
        files = sorted(path for path in out.rglob("*") if path.is_file())
        assert [file.relative_to(out).as_posix() for file in files] == [
            "m/locality/all.pdf",
            "m/locality/all.png",
        ]
        digests.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])
    assert digests[0] == digests[1]


def test_a_pdf_holds_text_and_no_date(tmp_path: Path) -> None:
    png, pdf = build.draw_record(make_record(), tmp_path / "m" / "locality" / "paper.json", tmp_path / "out")
    assert png == tmp_path / "out" / "m" / "locality" / "paper.png"
    assert b"CreationDate" not in pdf.read_bytes()
    assert b"/Subtype /Type3" not in pdf.read_bytes()
    assert b"Matplotlib" not in png.read_bytes()


def test_a_pdfs_fonts_hold_glyphs_and_no_tables_for_setting_text(tmp_path: Path) -> None:
    """A TrueType file opens with the number of its tables, then 16 bytes a table, its name first."""
    _, pdf = build.draw_record(make_record(), tmp_path / "m" / "locality" / "paper.json", tmp_path / "out")
    streams = re.findall(rb"/Length1 \d+.*?stream\r?\n(.*?)endstream", pdf.read_bytes(), re.DOTALL)
    fonts = [zlib.decompress(one) for one in streams]
    assert fonts
    for font in fonts:
        held = {font[12 + 16 * at : 16 + 16 * at] for at in range(int.from_bytes(font[4:6]))}
        assert b"glyf" in held
        assert not held & {b"GSUB", b"GPOS", b"GDEF"}


def test_build_draws_what_it_is_asked_for(tmp_path: Path) -> None:
    records.write(make_record(), tmp_path / "r" / "m" / "locality" / "table_field_first.json")
    arguments = [str(tmp_path / "r"), "--out", str(tmp_path / "out"), "--only", "locality"]
    result = CliRunner().invoke(build.app, arguments)
    assert result.exit_code == 0
    assert (tmp_path / "out" / "m" / "locality" / "table_field_first.png").exists()
    result = CliRunner().invoke(build.app, [*arguments[:-1], "localty"])
    assert isinstance(result.exception, UnknownName)
    assert "did you mean 'locality'?" in str(result.exception)


def test_a_study_without_a_figure_is_named() -> None:
    with pytest.raises(UnknownName, match="unknown figure 'nothing'"):
        build.draw("nothing", {})


@pytest.mark.parametrize(
    ("name", "margin", "words"),
    [
        ("TOST about 1", 0.1, "\N{NOT EQUAL TO} 1"),
        ("the own components of 40 random directions, BH over 4", None, "\N{NOT EQUAL TO} random"),
        ("slots permuted within their classes, 2000 times, BH over 5", None, "\N{NOT EQUAL TO} random"),
        ("sign flips by scenario, BH over 12", None, "\N{NOT EQUAL TO} 0"),
    ],
)
def test_a_row_says_what_its_test_held_the_effect_against(name: str, margin: float | None, words: str) -> None:
    test = HypothesisTest(name=name, statistic=None, p=0.01, margin=margin, conclusion="different")
    effect = make_record().summary.effects[0].model_copy(update={"name": "x", "gated": True, "test": test})
    ax = Figure().subplots()
    forest.panel(ax, [forest.Row(effect="x", label="x")], {("x", True): effect}, markers={})
    assert [text.get_text().split("]  ")[-1] for text in ax.texts] == [words, "not measured"]

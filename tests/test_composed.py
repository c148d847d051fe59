"""The composed pages: every record set renders, up to eight models, with no text over another; tables for LaTeX."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sample_record import make_record
from test_circuit import record
from typer.testing import CliRunner

from figures import build, composed, side, style
from kvnotes import records
from kvnotes.errors import UnknownName
from kvnotes.records import Record, Table

LAYOUT = "table_field_first"
EIGHT = (
    "qwen2.5-coder-0.5b",
    "qwen2.5-coder-1.5b",
    "smollm2-135m",
    "llama-3.1-8b-instruct",
    "Qwen/Qwen3-8B",
    "google/gemma-2-9b-it",
    "mistralai/Mistral-7B-Instruct",
    "local-folder-1a2b3c4d",
)


# five heads that a fold named, each strong enough to be named in panel f
FIVE = {
    "read heads": Table(columns=("head", "alone R"), rows=[[f"2{i}.1{i}", 0.11] for i in range(5)]),
    "attention of the read heads": Table(
        columns=("head", "pairs", "itself", "aggregator"), rows=[[f"2{i}.1{i}", 8, 0.1, 0.3] for i in range(5)]
    ),
}


def full(page: composed.Page, models: tuple[str, ...]) -> side.Models:
    """Models with the same number for everything that the page shows."""
    found: dict[str, dict[str, Record | str]] = {}
    for model in models:
        for study in page.studies:
            wanted = {one.effect: 0.75 for one in page.measures if one.study == study}
            tables = FIVE if study == "heads" else {}
            made = record(model, study, tables, **wanted)
            # every number is below the noise floor and has a warning: as many words as it can have
            limits = {"unresolved": True, "warning": "only 8 clusters: true coverage can lie below 0.95"}
            effects = tuple(one.model_copy(update=limits) for one in made.summary.effects)
            summary = made.summary.model_copy(update={"effects": effects})
            found.setdefault(model, {})[study] = made.model_copy(update={"summary": summary})
    return found


def drawn(page: composed.Page, models: side.Models) -> Figure:
    with style.styled():
        figure = composed.figure(page, models)
        figure.draw_without_rendering()
    return figure


def texts(figure: Figure) -> list:
    found = [*figure.texts, *figure.legends[0].get_texts()]
    for ax in figure.axes:
        found += [*ax.texts, ax.xaxis.label, ax.yaxis.label, ax._left_title]
        # a tick beyond the axis has a label that is not drawn
        for at, limits, labels in ((0, ax.get_xlim(), ax.get_xticklabels()), (1, ax.get_ylim(), ax.get_yticklabels())):
            found += [label for label in labels if min(limits) <= label.get_position()[at] <= max(limits)]
    return [text for text in found if text.get_text()]


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("name", ["fig3", "fig15", "table3", "table4", "table5", "fig15f", "table5sae"])
def test_no_text_overlaps_another(name: str, count: int) -> None:
    page = composed.get(name)
    figure = drawn(page, full(page, EIGHT[:count]))
    boxes = [(text, text.get_window_extent()) for text in texts(figure)]
    assert len(boxes) > 3 * count
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        # a pixel of the line's height is no ink
        over = a.x0 < b.x1 and b.x0 < a.x1 and a.y0 + 1 < b.y1 and b.y0 + 1 < a.y1
        assert not over, f"{one.get_text()!r} lies over {other.get_text()!r}"
    for text, box in boxes:
        assert figure.bbox.x0 <= box.x0, text
        assert box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0, text
        assert box.y1 <= figure.bbox.y1, text


def test_every_letter_is_six_points_high_on_a_printed_page() -> None:
    for name in composed.pages():
        figure = drawn(composed.get(name), full(composed.get(name), EIGHT[:2]))
        smallest = min(texts(figure), key=lambda text: text.get_fontsize())
        assert smallest.get_fontsize() * 7 / figure.get_figwidth() >= 6, (name, smallest)  # 7 inches are printed


def test_panel_f_names_five_heads_of_every_model_in_full() -> None:
    figure = drawn(composed.get("fig15"), full(composed.get("fig15"), EIGHT))
    lines = [text.get_text() for text in panel(figure, "f").texts][::-1]  # from the top down
    words = " ".join(" ".join(lines).split())
    for model in EIGHT:
        heads = "20.10 0.11, 21.11 0.11, 22.12 0.11, 23.13 0.11, 24.14 0.11"
        limits = "0.75 [0.65, 0.85]\N{DAGGER} unresolved"
        assert f"{model}: strongest {heads}; rank correlation {limits}" in words


def test_models_have_a_colour_and_a_marker_each() -> None:
    looks = [style.model_look(index) for index in range(24)]
    assert len(set(looks)) == 24
    assert len({colour for colour, _ in looks[:8]}) == len({marker for _, marker in looks[:8]}) == 8


# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB
SIGHT = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))


def lab(colour: str, sight: str) -> tuple[float, float, float]:
    """CIE L*a*b* of a colour as it is seen."""

    def times(matrix, vector):
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    seen = [min(1.0, max(0.0, part)) for part in times(SIGHT[sight], linear)]
    whites = (0.9505, 1.0, 1.089)
    scaled = [part / white for part, white in zip(times(XYZ, seen), whites, strict=True)]
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in scaled)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_are_told_apart_by_everyone(sight: str) -> None:
    for one, other in itertools.combinations(style.MODEL_COLOURS, 2):
        assert math.dist(lab(one, sight), lab(other, sight)) > 15, (one, other)  # 2.3 is just noticeable


# --- records of every kind ----------------------------------------------------------------------------------


def said(figure: Figure) -> str:
    parts = [text.get_text() for ax in figure.axes for text in ax.texts] + [text.get_text() for text in figure.texts]
    return " ".join(" ".join(parts).split())


def panel(figure: Figure, letter: str) -> Axes:
    return next(ax for ax in figure.axes if ax.get_title(loc="left") == letter)


def test_figure_3_of_records_with_a_missing_probe_an_unreadable_one_and_none_included() -> None:
    page = composed.get("fig3")
    found = full(page, ("one", "two"))
    del found["one"]["suffix"], found["two"]["suffix"]
    found["two"]["wording"] = "schema_version 0 is older than 1, which this kvnotes reads. Run it again"
    found["smollm2-135m"] = {"locality": make_record(model="smollm2-135m", included=0, gated=5)}
    figure = drawn(page, found)
    assert panel(figure, "b").texts[0].get_text() == "no record of suffix: run `make probe-suffix`"
    assert "schema_version 0 is older than 1" in [text.get_text() for text in panel(figure, "d").texts]
    words = said(figure)
    assert "two, wording: not drawn, schema_version 0 is older than 1, which this kvnotes reads. Run it again." in words
    assert "0 of 5 pairs pass the gate" in words
    assert "locality, n 24: 0 of 5 used of 6, 0 scenarios, excluded: gap under 1 logit (5)" in words
    text = composed.markdown(page, found, layout=LAYOUT)
    assert "| - (0 of 5 pairs pass the gate) |" in text
    assert "- two, wording: not drawn, schema_version 0" in text
    assert "- smollm2-135m: no record of suffix, wording" in text


def test_a_page_without_any_model_says_what_to_run() -> None:
    for name in composed.whole():
        page = composed.get(name)
        figure = drawn(page, {})
        for study in page.studies:
            assert f"no record of {study}: run `make probe-{study}`" in said(figure)
        composed.latex(page, {}, layout=LAYOUT)


def test_a_panel_of_unreadable_records_alone_names_them() -> None:
    figure = drawn(composed.get("fig15c"), {"m": {"attribution": "not JSON (line 1, column 1: x); it is cut off"}})
    assert figure.axes[0].texts[0].get_text() == "attribution of m is not drawn: not JSON"


def without_tables(page: composed.Page, model: str) -> dict[str, Record | str]:
    """The model's records, of which the one of heads lacks the tables that panel f shows."""
    found = dict(full(page, (model,))[model])
    heads = found["heads"]
    assert isinstance(heads, Record)
    found["heads"] = heads.model_copy(update={"summary": heads.summary.model_copy(update={"tables": {}})})
    return found


def test_a_record_without_a_table_is_left_out_of_its_panel_and_named() -> None:
    page = composed.get("fig15")
    found = {**full(page, ("whole",)), "odd": without_tables(page, "odd")}
    figure = drawn(page, found)
    words = [text.get_text() for text in panel(figure, "f").texts]
    assert "odd: KeyError while drawing it" in words
    assert any(one.startswith("whole: strongest 20.10 0.11") for one in words)
    (points,) = [line for line in panel(figure, "f").lines if line.get_marker() == "o"]
    assert list(points.get_xdata()) == [0.3] * 5
    text = composed.markdown(page, found, layout=LAYOUT)
    row = "| read head 1: z alone, attention | 20.10: R 0.11, attention 0.30 | - (KeyError while drawing it) |"
    assert row in text
    composed.latex(page, found, layout=LAYOUT)


def test_a_panel_that_cannot_be_drawn_at_all_says_why_and_stops_no_other() -> None:
    page = composed.get("fig15")
    figure = drawn(page, {"odd": without_tables(page, "odd")})
    assert panel(figure, "f").texts[0].get_text() == "heads of odd is not drawn: KeyError while drawing it"
    assert "0.75 [0.65, 0.85]" in " ".join(text.get_text() for text in panel(figure, "d").texts)

    def broken(ax: Axes, models: side.Models) -> side.Said:
        ax.plot([0, 1], [0, 1])
        raise StopIteration("no such row") if len(models) > 1 else RuntimeError("alone it is drawn elsewhere")

    one = composed.Panel(
        title="t", measures=page.panels["b"].measures, draw=broken, height=lambda models: 2.0, xlabel="x"
    )
    figure = drawn(composed.Page(name="p", heading="h", panels={"": one}), full(page, ("one", "two")))
    assert figure.axes[0].texts[0].get_text().splitlines() == [
        "direction of one is not drawn: RuntimeError while drawing it",
        "direction of two is not drawn: RuntimeError while drawing it",
    ]
    assert list(figure.axes[0].lines) == []  # nothing of what was begun stays


# --- LaTeX --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fig3", "fig15", "table3", "table4", "table5"])
@pytest.mark.parametrize("count", [0, 1, 8])
def test_a_table_for_latex_is_well_formed(name: str, count: int) -> None:
    page = composed.get(name)
    odd = ("a_b & 50%", "{x}^2 #1 $y ~z\\w", *EIGHT)[:count]
    text = composed.latex(page, full(page, odd), layout=LAYOUT)
    code = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    opened, closed = re.findall(r"\\begin\{(\w+)\}", code), re.findall(r"\\end\{(\w+)\}", code)
    assert opened == ["table", "tabular"] == closed[::-1]
    bare = re.sub(r"\\[\\{}&%$#_]", "", code)
    assert bare.count("{") == bare.count("}")
    assert all(code.count(rule) == 1 for rule in ("\\toprule", "\\bottomrule"))
    rows = [line for line in code.splitlines() if line.endswith("\\\\") and "multicolumn" not in line]
    heads = 5 if name == "fig15" else 0  # of panel f, which are no measures
    assert len(rows) == 1 + len(page.measures) + heads
    for row in rows:
        assert len(re.findall(r"(?<!\\)&", row)) == count + 1  # the label, a cell a model, the paper's
    (columns,) = re.findall(r"\\begin\{tabular\}\{@\{\}(\w+)@\{\}\}", code)
    assert columns == f"l{'c' * count}l"
    assert code.isascii()
    notes = code.partition("\\end{tabular}")[2]
    assert "other models, approximate values, no interval given" in notes
    assert ("excluded: gap under 1 logit (1)" in notes) == bool(count)
    assert not re.search(r"(?<!\\)[#_]", code)
    if count:
        assert "a\\_b \\& 50\\%" in rows[0]


# --- the command --------------------------------------------------------------------------------------------


def test_pages_and_panels_are_asked_for_by_name(tmp_path) -> None:
    records.write(make_record(model="m"), tmp_path / "r" / "m" / "locality" / f"{LAYOUT}.json")
    asked = [str(tmp_path / "r"), "--out", str(tmp_path / "out"), "--jobs", "1"]
    done = CliRunner().invoke(build.app, [*asked, "--only", "fig3a", "--only", "locality"])
    assert done.exit_code == 0, done.output
    made = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*"))
    assert made == [
        *(f"m/locality/{LAYOUT}.{kind}" for kind in ("pdf", "png")),
        *(f"paper/fig3a.{kind}" for kind in ("md", "pdf", "png", "tex")),
    ]
    wrong = CliRunner().invoke(build.app, [*asked, "--only", "fig3e"])
    assert isinstance(wrong.exception, UnknownName)
    assert "fig3a, fig3b, fig3c, fig3d" in str(wrong.exception)
    assert "suffix" in str(wrong.exception)

"""The circuit's pages: six panels and table 5 from the records there are, and words where there is none."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure
from sample_record import make_record
from typer.testing import CliRunner

from figures import build, circuit, composed, side, style
from kvnotes import discover, records
from kvnotes.errors import UnknownName
from kvnotes.records import Record, Table

LAYOUT = "table_field_first"


def record(model: str, study: str, tables: dict[str, Table] | None = None, **effects: float) -> Record:
    """A record by hand; `effects` name its gated estimates."""
    made = make_record(model=model, included=8, gated=1)
    first = next(one for one in made.summary.effects if one.name == "field_only" and one.gated)
    kept = [
        first.model_copy(update={"name": name, "estimate": value, "low": value - 0.1, "high": value + 0.1})
        for name, value in effects.items()
    ]
    summary = made.summary.model_copy(update={"effects": tuple(kept), "tables": tables or {}})
    return made.model_copy(update={"study": study, "summary": summary})


HEADS = {
    "read heads": Table(columns=("head", "alone R"), rows=[["1.0", 0.33], ["0.1", -0.02], ["1.3", 0.005]]),
    "attention of the read heads": Table(
        columns=("head", "pairs", "itself", "aggregator"),
        rows=[["1.0", 8, 0.1, 0.61], ["0.1", 8, 0.1, 0.02], ["1.2", 8, 0.1, 0.5], ["at random", 8, 0.1, 0.04]],
    ),
}


def two_models() -> dict[str, Record]:
    reads = {f"read_{k}": 0.2 + k / 50 for k in circuit.HEADS.ks}
    found = (
        record("one", "heads", HEADS, **reads, read_random_12=0.01, write_12=0.07, write_in_sample_12=0.09),
        record("one", "scrubbing", note_swap=0.13, rest_swap=0.93, drift_size=0.21),
        record("two", "scrubbing", note_swap=0.15, rest_swap=0.94),
        record("two", "direction", along=0.05, full=0.11),
    )
    return {f"{one.model.name}/{one.study}/{LAYOUT}": one for one in found}


def models() -> side.Models:
    return side.by_model(two_models(), layout=LAYOUT, studies=circuit.PAGES[0].studies)


def test_table_5_holds_the_papers_values_and_what_is_missing():
    text = composed.markdown(circuit.PAGES[1], models(), layout=LAYOUT)
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert "0.44 [0.34, 0.54], n=8 | - (not run) | -" in lines["Read: 12 read heads"]
    assert "Llama-3.1-8B: 0.78" in lines["Read: 12 read heads, in-sample"]  # as the paper ranked them
    assert "0.09" in lines["Write: 12 heads at one aggregator, in-sample"]
    assert "Mistral-7B: 0.11" in lines["Write: 12 heads at one aggregator, in-sample"]
    assert "0.13 [0.03, 0.23], n=8 | 0.15 [0.05, 0.25], n=8 | Llama-3.1-8B: 0.79" in lines["Scrub: note of aggregators"]
    assert "drift, two models: 0.02 to 0.04" in lines["Scrub: size of the drift"]
    assert "Gemma-2-9B: 0.82 to 0.92" in lines["Attn: share of the write"]
    assert "- one: no record of attribution, direction, sae" in text
    assert "- two: no record of heads, attribution, sae" in text
    text = composed.markdown(circuit.PAGES[0], models(), layout=LAYOUT)
    assert "| read heads, 5 |" in text
    assert "| a random direction's own (control) |" in text  # in one line


def test_a_panel_without_any_record_says_so_and_the_others_show_their_numbers():
    with style.styled():
        figure = composed.figure(circuit.PAGES[0], models())
    a, b, c, d, e, f = figure.axes
    said = {ax: " ".join(text.get_text() for text in ax.texts) for ax in figure.axes}
    assert "no record of attribution: run `make probe-attribution`" in said[c]
    assert "no record of sae" in said[e]
    assert "0.05 [" in said[b]
    assert "not run" in said[b]  # one has no direction
    assert "0.94 [" in said[d]
    assert "two: not run" in said[a]
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in a.lines]
    at = [k - 0.03 for k in range(5)]  # beside the other model
    assert (pytest.approx(at), pytest.approx([0.22, 0.26, 0.3, 0.36, 0.44])) in drawn
    assert ([pytest.approx(0.85)], [0.45]) in drawn  # the paper's, at three heads
    assert ([0.61, 0.02], [0.33, -0.02]) in [(list(line.get_xdata()), list(line.get_ydata())) for line in f.lines]
    assert "one: strongest 1.0 0.33; rank correlation not measured" in said[f]  # 0.1 moves nothing
    assert "two: not run" in said[f]
    assert "no head" not in said[f]


def test_a_record_of_heads_that_reports_nothing_says_why_and_not_that_no_head_moves_anything():
    made = record("few", "heads", {}, read_12=0.4, attention_follows=0.2)
    none = {"estimate": None, "low": None, "high": None, "warning": "3 pair(s) in 3 scenario(s) pass the gate"}
    effects = tuple(one.model_copy(update=none) for one in made.summary.effects)
    few = made.model_copy(update={"summary": made.summary.model_copy(update={"effects": effects})})
    ax = Figure().subplots()
    still = record("still", "heads", HEADS | {"read heads": Table(columns=("head", "alone R"), rows=[["1.0", 0.0]])})
    still = still.model_copy(update={"summary": still.summary.model_copy(update={"effects": made.summary.effects})})
    found: side.Models = {
        "few": {"heads": few},
        "absent": {"direction": record("absent", "direction", along=0.1)},
        "faulty": {"heads": "not JSON (line 1)"},
        "still": {"heads": still},
    }
    assert [words for words, _ in circuit.panel_attention(ax, found)] == [
        "few: 3 pair(s) in 3 scenario(s) pass the gate",
        "absent: not run",
        "faulty: not JSON",
        "still: no head moves it alone; rank correlation 0.20 [0.10, 0.30]",  # measured, and none does
    ]


def test_the_papers_attention_is_a_tick_at_the_axis_without_a_height():
    with style.styled():
        figure = composed.figure(composed.get("fig15f"), models())
    (ax,) = figure.axes
    ticks = {line.get_xdata()[0] for line in ax.lines if list(line.get_ydata()) == [0, circuit.TICK]}
    assert ticks == {0.46, 0.43, 0.47, 0.31}
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [
        "one",
        "two",
        "lighter: control or identity",
        "published, f: attention of the strongest read heads",
    ]


def test_the_tables_hold_what_the_figure_draws_of_the_paper():
    text = composed.markdown(circuit.PAGES[0], models(), layout=LAYOUT)
    for k, value in ((1, "0.19"), (3, "0.45"), (5, "0.59"), (8, "0.70")):
        assert f"| read heads, in-sample, {k} | - (not measured) | - (not run) | Llama-3.1-8B: {value} |" in text
    assert "| random heads (control), 12 | 0.01 [" in text
    assert text.count("models not named: 0.00 |") == 1
    assert "| random features (control), 30 | - (not run) | - (not run) | Llama-3.1-8B: 0.00 |" in text
    rows = [line for line in text.splitlines() if line.startswith("| read head ")]
    assert len(rows) == 5
    paper = "Llama-3.1-8B: 26.3, attention 0.46; Qwen3-8B: 26.25, attention 0.43; Gemma-2-9B: 26.9, attention 0.47; "
    assert f"| 1.0: R 0.33, attention 0.61 | - (not run) | {paper}Mistral-7B: 20.21, attention 0.31 |" in rows[0]
    assert rows[1].endswith("| 0.1: R \N{MINUS SIGN}0.02, attention 0.02 | - (not run) | - |")
    assert rows[2].endswith("| - | - (not run) | - |")  # one named two heads with both numbers
    tex = composed.latex(circuit.PAGES[0], models(), layout=LAYOUT)
    assert "1.0: R 0.33, attention 0.61" in tex
    assert "read heads, in-sample, 5 & - (not measured) & - (not run) & Llama-3.1-8B: 0.59" in tex


def test_it_is_a_page_and_no_study():
    assert "circuit" not in build.studies()
    assert {*circuit.PAGES[0].studies} <= {*discover.studies()}


def test_the_papers_values_by_number_of_heads():
    reads, writes = circuit.HEADS.curves[1], circuit.HEADS.curves[4]
    assert circuit.HEADS.papers(reads) >= {(0, 0.19), (1, 0.45), (2, 0.59), (3, 0.7), (4, 0.78), (4, 0.72)}
    assert circuit.HEADS.papers(writes) == {(4, 0.28), (4, 0.08), (4, 0.24), (4, 0.11)}
    assert circuit.HEADS.papers(circuit.HEADS.curves[0]) == set()
    assert circuit.HEADS.papers(circuit.HEADS.curves[5]) == {(4, 0.0)}
    assert circuit.FEATURES.papers(circuit.FEATURES.curves[3]) == {(3, 0.0)}
    features = circuit.FEATURES.curves[1]
    assert circuit.FEATURES.papers(features) == {(0, 0.0), (1, 0.3), (2, 0.5), (3, 0.54)}


def test_the_command_writes_figure_and_tables_of_the_models_asked_for(tmp_path):
    for name, one in two_models().items():
        records.write(one, tmp_path / "results" / f"{name}.json")
    asked = [str(tmp_path / "results"), "--model", "two", "--only", "table5", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(build.app, asked)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "out" / "paper"
    assert sorted(path.name for path in folder.iterdir()) == [f"table5.{kind}" for kind in ("md", "pdf", "png", "tex")]
    assert "one |" not in (folder / "table5.md").read_text(encoding="utf-8")
    missing = CliRunner().invoke(build.app, [*asked, "--model", "tow"])
    assert isinstance(missing.exception, UnknownName)
    assert "did you mean 'two'? Known: one, two" in str(missing.exception)

"""Models side by side: which record stands for a model, its numbers, and that pages show all of them."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from sample_record import make_record

from figures import claims, composed, families, side, style
from figures.side import Measure
from kvnotes.records import Record, Table

LAYOUT = "table_field_first"
FIELD = Measure(study="locality", effect="field_only", label="field-only")
STUDIES = ("locality", "dissociation", "specificity", "injection", "timing")


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


def by_model(found: dict[str, Record], layout: str = LAYOUT, **faults: str) -> side.Models:
    return side.by_model(found, layout=layout, studies=STUDIES, faults=faults)


def test_the_record_with_the_studys_own_settings_stands_for_a_model_else_the_newest():
    usual, old, new = (
        record("m", field_only=value, created=f"2026-01-0{day}T00:00:00+00:00")
        for value, day in ((0.1, 1), (0.2, 2), (0.3, 3))
    )
    later = {f"m/locality/{LAYOUT}-{name}": one for name, one in (("aa", new), ("bb", old))}

    def value(found: dict[str, Record]) -> float | None:
        return side.cell(FIELD, by_model(found)["m"]).value

    assert value({**later, **named(usual)}) == value({**named(usual), **later}) == pytest.approx(0.1)
    assert value(later) == pytest.approx(0.3)
    assert by_model(later, "prose_field_first") == {}


def test_the_page_of_claims_reads_the_record_that_the_pages_show():
    part = claims.Part(study="locality", effect="field_only", at_most=0.5)
    usual, old, new = (
        record("m", field_only=value, created=f"2026-01-0{day}T00:00:00+00:00")
        for value, day in ((0.1, 1), (0.2, 2), (0.3, 3))
    )
    later = {f"locality/{LAYOUT}-aa": new, f"locality/{LAYOUT}-bb": old}
    default = {f"locality/{LAYOUT}": usual}
    assert claims.judge(part, later | default).words == "0.10 [0.00, 0.20], n=8"
    assert claims.judge(part, later).words == "0.30 [0.20, 0.40], n=8, n 24"  # and its setting is named
    assert claims.judge(part, {"locality/all": two_layouts()}).words == "0.10 [0.02, 0.18], n=4"


# --- a record of all layouts --------------------------------------------------------------------------------


def two_layouts() -> Record:
    made = make_record(model="m", recoveries={"prose_field_first": (0.6, 0.4), LAYOUT: (0.1, 0.9)})
    tables = {f"by slot, {one}": Table(columns=("slot",), rows=[[one]]) for one in ("prose_field_first", LAYOUT)}
    config = made.provenance.config | {"layout": "all"}
    return made.model_copy(
        update={
            "summary": made.summary.model_copy(update={"tables": tables}),
            "provenance": made.provenance.model_copy(update={"config": config}),
        }
    )


def test_a_layout_is_read_out_of_a_record_of_all_where_there_is_none_of_it_alone():
    every = {"m/locality/all": two_layouts()}
    found = {layout: by_model(every, layout)["m"]["locality"] for layout in (LAYOUT, "prose_field_first")}
    values = {layout: side.cell(FIELD, {"locality": one}).value for layout, one in found.items()}
    assert values == {LAYOUT: pytest.approx(0.1), "prose_field_first": pytest.approx(0.6)}
    part = found[LAYOUT]
    assert isinstance(part, Record)
    assert (part.inclusion.included, part.inclusion.used, part.inclusion.generated) == (4, 6, 7)  # of 8, 12 and 14
    assert {one.layout for one in part.instances} == {LAYOUT}
    assert part.summary.tables["by slot"].rows == [[LAYOUT]]
    (text,) = side.captions("m", {"locality": part}, STUDIES)
    assert "locality, of a record of all layouts, n 24: 4 of 6 used of 7, 2 scenarios" in text
    assert by_model(every, "code_field_first") == by_model(every, "paper") == {}


def test_a_record_of_the_layout_alone_comes_before_one_of_all():
    alone = named(record("m", field_only=0.3, created="2025-01-01T00:00:00+00:00"))
    every = {"m/locality/all": two_layouts()}
    for found in (alone | every, every | alone):
        assert side.cell(FIELD, by_model(found)["m"]).value == pytest.approx(0.3)


def test_a_number_is_of_the_records_layout():
    every = two_layouts()  # its first effect is of another layout
    assert side.cell(FIELD, {"locality": every.model_copy(update={"layout": LAYOUT})}).value == pytest.approx(0.1)


# --- limits -------------------------------------------------------------------------------------------------


def limited(**changes) -> Record:
    made = record("m", field_only=0.1, notes_only=0.9)
    first, second = made.summary.effects
    effects = (first.model_copy(update=changes), second)
    return made.model_copy(update={"summary": made.summary.model_copy(update={"effects": effects})})


def test_a_number_below_the_noise_floor_or_with_a_warning_is_marked():
    assert side.cell(FIELD, {"locality": limited()}).words == "0.10 [0.00, 0.20], n=8"
    below = side.cell(FIELD, {"locality": limited(unresolved=True)})
    assert below.words == "0.10 [0.00, 0.20] unresolved, n=8"
    warned = limited(warning="only 8 clusters: true coverage can lie below 0.95")
    assert side.cell(FIELD, {"locality": warned}).words == "0.10 [0.00, 0.20]\N{DAGGER}, n=8"
    found: side.Models = {"m": {"locality": warned}, "n": {"locality": limited()}}
    page = composed.get("fig3")
    said = "\N{DAGGER} only 8 clusters: true coverage can lie below 0.95: m, locality."
    assert f"- {said}" in composed.markdown(page, found, layout=LAYOUT)
    assert said.replace("\N{DAGGER}", r"\dag{}") in composed.latex(page, found, layout=LAYOUT)
    with style.styled():
        figure = composed.figure(page, found)
    words = " ".join(" ".join(text.get_text() for text in figure.texts).split())
    assert said in words
    assert "unresolved" not in words


def test_a_number_below_the_noise_floor_is_grey_and_the_legend_says_so():
    with style.styled():
        figure = composed.figure(composed.get("fig3a"), {"m": {"locality": limited(unresolved=True)}})
    marks = {round(line.get_xdata()[0], 6): line for line in figure.axes[0].lines if line.get_marker() == "o"}
    assert to_hex(marks[0.1].get_markerfacecolor()) == to_hex(style.PALE)
    assert to_hex(marks[0.1].get_color()) == to_hex(style.BLUE)  # its model's
    assert to_hex(marks[0.9].get_markerfacecolor()) == to_hex(style.BLUE)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "grey: unresolved, below the noise floor" in legend


def test_what_the_paper_only_bounds_is_drawn_as_a_bound():
    """Its random eight recover at most 0.035 in three models, and 0.48 to 0.53 in two."""
    page = composed.get("table4specificity")
    random = families.BEST.curves[2]
    assert families.BEST.bounds(random) == {(3, 0.035)}
    assert families.BEST.papers(random) == {(3, 0.48), (3, 0.53)}
    found: side.Models = {"m": {"specificity": record("m", "specificity", top_8=0.8)}}
    with style.styled():
        figure = composed.figure(page, found)
    drawn = {
        (line.get_marker(), value)
        for line in figure.axes[0].lines
        for value in line.get_ydata()
        if len(line.get_ydata()) == 1
    }
    assert {("v", 0.035), ("s", 0.48), ("s", 0.53)} <= drawn
    assert not {("s", 0.035), ("D", 0.035)} & drawn
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "published, specificity: k at random (control), at most" in legend
    assert composed._marks(page)["published, specificity: k at random (control), at most"] == "v"


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.035, "0.035"), (-0.028, "\N{MINUS SIGN}0.028"), (1.0, "1.00"), (0.1, "0.10"), (0.137, "0.137"), (0.0, "0.00")],
)
def test_the_papers_values_keep_their_digits(value, words):
    assert style.as_published(value) == words


def test_a_record_that_is_not_drawn_stands_where_no_other_does():
    found = named(record("org/m", "locality", field_only=0.1))
    found = {name.replace("org/m", "org--m"): one for name, one in found.items()}
    faults = {
        f"org--m/timing/{LAYOUT}": "schema_version 0 is older than 1, which this kvnotes reads. Run it again.",
        f"org--m/locality/{LAYOUT}-a1b2c3d4": "not JSON (line 1)",
        f"n/timing/{LAYOUT}": "not JSON (line 1, column 2: x); the file is cut off",
        "n/timing/prose_field_first": "of another layout",
    }
    models = side.by_model(found, layout=LAYOUT, studies=STUDIES, faults=faults)
    assert list(models) == ["org/m", "n"]
    assert isinstance(models["org/m"]["locality"], Record)
    depth = Measure(study="timing", effect="write_depth", label="")
    assert side.cell(depth, models["org/m"]).why == "schema_version 0 is older than 1"
    assert side.cell(depth, models["n"]).why == "not JSON"
    text = " ".join(side.captions("org/m", models["org/m"], STUDIES))
    assert "org/m, timing: not drawn, schema_version 0 is older than 1, which this kvnotes reads." in text


def test_a_depth_is_a_share_of_the_layers_and_the_rest_is_what_is_left():
    made = record("m", "timing", write_depth=0.0)  # after the first of the sample's two layers
    measure = Measure(study="timing", effect="write_depth", label="write depth", depth=True)
    assert side.cell(measure, {"timing": made}).value == pytest.approx(0.5)
    assert side.cell(measure, {"timing": made}).high == pytest.approx(0.55)
    share = side.cell(
        Measure(study="locality", effect="field_share", label="", rest=True), {"locality": record("m", field_share=0.3)}
    )
    assert (share.low, share.value, share.high) == pytest.approx((0.6, 0.7, 0.8))


def test_what_there_is_no_number_for_says_why():
    made = record("m", notes=0.5)
    assert side.cell(FIELD, {}).why == "not run"
    assert side.cell(FIELD, {"locality": made}).why == "not measured"
    effect = made.summary.effects[0].model_copy(update={"name": "field_only", "estimate": None})
    none = made.model_copy(update={"summary": made.summary.model_copy(update={"effects": (effect,)})})
    assert side.cell(FIELD, {"locality": none}).why == "8 of 9 pairs pass the gate"


def test_the_caption_counts_what_is_excluded():
    (text,) = side.captions("m", {"locality": record("m"), "timing": record("m", "timing")}, STUDIES)
    assert text == (
        "m, Q4_K_M, dequantised, float32 on cpu. Pairs included: "
        "locality, n 24, timing, n 24: 8 of 9 used of 10, 4 scenarios, "
        "excluded: gap under 1 logit (1), values of unequal token count (1)."
    )


def two_models() -> dict[str, Record]:
    return named(
        record("one", field_only=0.11, full_downstream=1.0),
        record("one", "dissociation", trigger_only=0.02, notes=0.97, same_conclusion=0.13),
        record("one", "specificity", top_1=0.31, top_8=0.83, random_1=0.01, random_8=0.04),
        record("two", field_only=0.22),
        record("two", "injection", full_notes=0.94, follow_rate=0.88),
    )


def test_figures_and_tables_hold_every_number_and_the_papers():
    table3, table4 = families.PAGES
    models = composed.models_of(table3, two_models(), layout=LAYOUT, faults={})
    text = composed.markdown(table3, models, layout=LAYOUT)
    for value in ("0.11 [0.01, 0.21], n=8", "0.97", "0.13", "0.83", "0.22", "0.94", "0.88", "0.04"):
        assert value in text
    assert "| field-only | 0.11 [0.01, 0.21], n=8 | 0.22 [0.12, 0.32], n=8 | Llama-3.1-8B: \N{MINUS SIGN}0.028;" in text
    assert text.count("not run") == 4 + (3 + 3 + 2)  # injection and timing of one; dissociation, specificity and timing
    assert "Llama-3.1-8B: at most 0.035" in text
    controls = composed.models_of(table4, two_models(), layout=LAYOUT, faults={})
    assert list(controls) == ["one"]  # two has no record of its studies
    with style.styled():
        third, fourth = composed.figure(table3, models), composed.figure(table4, controls)
    written = [label.get_text() for axes in third.axes for label in axes.texts]
    assert "0.94 [0.84, 1.04]" in written
    assert "not run" in written
    assert "published \N{MINUS SIGN}0.028 to 0.137" in written
    lines = [line for axes in fourth.axes for line in axes.lines]
    assert any(list(line.get_xdata()) == [0.0, 3.0] and list(line.get_ydata()) == [0.31, 0.83] for line in lines)


def test_every_measure_of_the_tables_is_one_of_the_studies_it_names():
    assert {one.study for one in families.TABLE3} == set(STUDIES)


def test_the_papers_values_are_read_in_every_form_they_are_written_in():
    def values(study: str, effect: str, paper: str = "") -> dict[str, tuple[float, float]]:
        return side.paper_values(Measure(study=study, effect=effect, label="", paper=paper))

    assert values("locality", "field_only")["Mistral-7B"] == (0.137, 0.137)
    assert values("injection", "full_notes")["Gemma-2-9B, Mistral-7B"] == (0.98, 1.0)
    assert values("timing", "write_depth")["Gemma-2-9B, Mistral-7B"] == (0.19, 0.26)
    assert values("specificity", "random_8")["Qwen3-8B, Qwen3-4B, Llama-3.1-8B"] == (side.AT_MOST, 0.035)
    assert values("locality", "field_share") == {"models not named": (side.AT_MOST, 0.01)}
    assert values("wording", "p_two_reevaluate", "wording.p_safe.reevaluate") == {"models not named": (0.81, 0.81)}
    assert values("suffix", "in_sample_8", "specificity.top_8") == values("specificity", "top_8")
    assert values("injection", "top_8") == values("locality", "no such effect") == {}

"""Dissociation: recovery of trigger and notes with the field held identical (the paper's table 4, left), and flips."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import forest, page, style
from figures.forest import Row
from kvnotes.records import Effect, Record

RECOVERIES = (
    ("trigger_only", "the trigger's cells", style.VERMILLION),
    ("notes", "notes after it", style.BLUE),
    ("other_field", "notes of the opposite\nconclusion, other field", style.BLUE),
    ("same_conclusion", "notes of the same conclusion,\nother field (control)", style.GREY),
    ("both", "trigger and notes\n(identity)", style.GREY),
)
FLIPS = (
    ("flips_trigger", "trigger's cells alone,\nbase decides as target", style.VERMILLION),
    ("flips_notes", "target's notes in base,\ndecides as target", style.BLUE),
    ("flips_notes_back", "base's notes in target,\ndecides as base", style.BLUE),
    ("flips_both_ways", "both ways", style.BLUE),
)


def draw(records: Mapping[str, Record]) -> dict[str, Figure]:
    """A figure for each record, by its name: a line of panels a layout."""
    return {name: _draw_one(record) for name, record in records.items()}


def _draw_one(record: Record) -> Figure:
    heading = f"Conclusion or content, field held identical: {record.model.name}, {page.layout_name(record.layout)}"
    layouts = list(dict.fromkeys(effect.layout for effect in record.summary.effects))
    reported = {one.layout for one in record.summary.effects if one.gated and one.estimate is not None}
    if not reported:
        return page.exclusions(record, heading=heading)
    figure = Figure(figsize=(13.0, 4.3 * len(layouts) + 0.4), dpi=style.DPI)
    grid = figure.subplots(len(layouts), 2, squeeze=False, width_ratios=(1.2, 1))
    for (left, right), layout in zip(grid, layouts, strict=True):
        effects = forest.by_name(record.summary.effects, layout)
        title = f"{page.layout_name(layout)}: recovery" if len(layouts) > 1 else "recovery by transplanted cells"
        panel_recovery(left, effects, title=title)
        panel_flips(right, effects)
    return page.finish(
        figure, [record], heading=heading, lines=_lines(), handles=forest.handles(recovery_rows()), columns=4
    )


def _lines() -> list[str]:
    """What the caption says beside the record's own."""
    return [
        "Polarity pairs: the rule inverts, the field's tokens are the same in both arms. = 0, = 1: equivalent "
        "within the margin; \N{NOT EQUAL TO}: different by more than it. The 2x2 design's other pair lends notes "
        "about the other field.",
        f"Open markers: {style.published()['source']}; other models, approximate values, no interval given.",
    ]


def panel_recovery(ax: Axes, effects: Mapping[tuple[str, bool], Effect], *, title: str) -> None:
    """The paper's table 4, left, with the notes of the 2x2 design's other pair."""
    rows = recovery_rows()
    forest.panel(ax, rows, effects, markers=forest.markers(rows))
    style.panel_title(ax, "a", title)


def panel_flips(ax: Axes, effects: Mapping[tuple[str, bool], Effect]) -> None:
    """Shares of pairs whose decision follows."""
    rows = [Row(effect=name, label=label, colour=colour) for name, label, colour in FLIPS]
    forest.panel(ax, rows, effects, markers={}, xlabel="share of pairs")
    style.panel_title(ax, "b", "whose decision follows")


def recovery_rows() -> list[Row]:
    """Panel a's rows, with the paper's values where it has any."""
    paper = style.published()["dissociation"]
    return [Row(effect=name, label=label, colour=colour, **paper.get(name, {})) for name, label, colour in RECOVERIES]

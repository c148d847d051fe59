"""Wording: the probability of the right action after each correction (the paper's figure 3d), and recovery."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures import forest, page, style
from figures.forest import Row
from kvnotes.records import Effect, Record

Effects = Mapping[tuple[str, bool], Effect]

WORDINGS = {
    "uncorrected": ("no correction", style.GREY),
    "bare_value": ("bare value", style.BLUE),
    "tagged_update": ("tagged update", style.BLUE),
    "explicit_override": ("explicit override", style.BLUE),
    "state_update": ("state update", style.BLUE),
    "reevaluate": ("disregard and\nre-evaluate", style.VERMILLION),
    "old_value": ("state update,\nold value (control)", style.GREY),
    "target": ("target run,\nno correction", style.GREY),
}
PAPER = "P(safe), models not named"


def draw(records: Mapping[str, Record]) -> dict[str, Figure]:
    """A figure for each record, by its name: a line of panels a layout."""
    return {name: _draw_one(record) for name, record in records.items()}


def _draw_one(record: Record) -> Figure:
    heading = f"What a correction over a stale cache must say: {record.model.name}, {page.layout_name(record.layout)}"
    layouts = page.reported(record)
    if not layouts:
        return page.exclusions(record, heading=heading)
    figure = Figure(figsize=(15.5, 5.2 * len(layouts) + 0.4), dpi=style.DPI)
    grid = figure.subplots(len(layouts), 3, squeeze=False)
    for (left, middle, right), layout in zip(grid, layouts, strict=True):
        effects = forest.by_name(record.summary.effects, layout)
        title = f"{page.layout_name(layout)}: of the two actions" if len(layouts) > 1 else "right action, of the two"
        panel_probability(left, effects, measure="p_two", letter="a", title=title)
        panel_probability(middle, effects, measure="p_full", letter="b", title="right action, of all tokens")
        panel_recovery(right, effects)
    return page.finish(figure, [record], heading=heading, lines=_lines(), handles=_handles(), columns=7)


def _lines() -> list[str]:
    """What the caption says beside the record's own."""
    return [
        "The right action is the target's; everything before the correction is the base run's own cache. = 0: "
        "equivalent within the margin.",
        f"Open markers: {style.published()['source']}; its P(safe), where the right action is always the safe one; "
        "other models and prompts, approximate values, no interval given.",
    ]


def panel_probability(ax: Axes, effects: Effects, *, measure: str, letter: str, title: str) -> None:
    """Mean probability of the right action by wording, with the paper's values."""
    rows = probability_rows(measure)
    forest.panel(ax, rows, effects, markers=forest.markers(rows), xlabel="probability")
    style.panel_title(ax, letter, title)


def probability_rows(measure: str) -> list[Row]:
    """The rows of panel a or b; the paper does not say over which tokens its probability is."""
    paper = style.published()["wording"]["p_safe"]
    return [
        Row(
            effect=f"{measure}_{name}",
            label=label,
            colour=colour,
            points={PAPER: paper[name]} if name in paper else {},
        )
        for name, (label, colour) in WORDINGS.items()
    ]


def panel_recovery(ax: Axes, effects: Effects) -> None:
    """Recovery by wording; a correction may move the decision past the target's own."""
    rows = [
        Row(effect=f"recovery_{name}", label=label, colour=colour)
        for name, (label, colour) in WORDINGS.items()
        if (f"recovery_{name}", True) in effects
    ]
    forest.panel(ax, rows, effects, markers={})
    style.panel_title(ax, "c", "recovery")


def _handles() -> list[Artist]:
    made = forest.handles(probability_rows("p_two"))
    line = Line2D([], [], color=style.VERMILLION, marker="o", markersize=6.5, linewidth=1.6)
    line.set_label("asks to re-evaluate")
    return [*made, line]

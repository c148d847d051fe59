"""Injection: what notes of the opposite conclusion do in a consistent cache, and how few of them flip the decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures import forest, page, style
from figures.forest import Row
from kvnotes.records import Effect, Record

COUNTS = (1, 2, 4, 8, 16, 32)
ALL = "all"
RECOVERIES = (
    ("full_notes", "all notes", style.BLUE),
    ("top_8", "best 8 by the\nother fold", style.BLUE),
    ("in_sample_8", "best 8, in-sample\n(as the paper's)", style.BLUE),
    ("random_8", "8 random others\n(control)", style.GREY),
    ("foreign_opposite", "another scenario's notes,\nopposite conclusion", style.VERMILLION),
    ("foreign_same", "another scenario's notes,\nsame conclusion (control)", style.GREY),
    ("foreign_conclusion", "their difference", style.VERMILLION),
)
LENT = (
    ("flips_foreign_opposite", "opposite conclusion's notes:\ndecides as target", style.VERMILLION),
    ("says_lender", "... says the lender's word\nfor that conclusion", style.VERMILLION),
    ("flips_foreign_same", "same conclusion's notes:\ndecides as target (control)", style.GREY),
    ("says_lender_same", "... says the lender's word\nfor that conclusion", style.GREY),
)
CURVES: tuple[tuple[str, str, str, Any, str], ...] = (  # effect's stem, label, colour, line, marker
    ("flips_top_", "best k by the other fold", style.BLUE, "-", "o"),
    ("flips_in_sample_", "best k, in-sample", style.VERMILLION, "--", "o"),
    ("flips_random_", "k random others (control)", style.GREY, ":", "s"),
)


def draw(records: Mapping[str, Record]) -> dict[str, Figure]:
    """A figure for each record, by its name: three panels a layout."""
    return {name: _draw_one(record) for name, record in records.items()}


def _draw_one(record: Record) -> Figure:
    heading = f"Writing the other conclusion's notes: {record.model.name}, {page.layout_name(record.layout)}"
    layouts = list(dict.fromkeys(effect.layout for effect in record.summary.effects))
    if not any(one.gated and one.estimate is not None for one in record.summary.effects):
        return page.exclusions(record, heading=heading)
    figure = Figure(figsize=(13.0, 7.2 * len(layouts) + 0.4), dpi=style.DPI)
    outer = figure.add_gridspec(len(layouts), 1)
    for at, layout in enumerate(layouts):
        effects = forest.by_name(record.summary.effects, layout)
        title = f"{page.layout_name(layout)}: recovery" if len(layouts) > 1 else "recovery by injected notes"
        grid = outer[at, 0].subgridspec(2, 2, width_ratios=(1, 1), height_ratios=(len(RECOVERIES), len(LENT)))
        panel_recovery(figure.add_subplot(grid[0, 0]), effects, title=title)
        panel_flips(figure.add_subplot(grid[:, 1]), effects)
        panel_lent(figure.add_subplot(grid[1, 0]), effects)
    return page.finish(
        figure,
        [record],
        heading=heading,
        lines=_lines(),
        handles=[*forest.handles(recovery_rows()), *_handles()],
        columns=5,
    )


def _lines() -> list[str]:
    """What the caption says beside the record's own."""
    return [
        "The target's notes go into the base's cache, whose own field still implies the base's action. Slots were "
        "ranked by their single effects on the scenarios of the other fold; in-sample is each pair's own ranking. "
        "Random notes are drawn from outside the best k. Another scenario's notes, of a pair with other action "
        "words, were moved to the same slots, keys turned by RoPE; a word is said where its logit is the largest "
        "of the pair's own two and the lender's two. = 0, = 1: equivalent within the margin; \N{NOT EQUAL TO}: "
        "different by more than it.",
        f"Open markers: {style.published()['source']}; other models, approximate values, no interval given.",
    ]


def panel_recovery(ax: Axes, effects: Mapping[tuple[str, bool], Effect], *, title: str) -> None:
    """Recovery with all notes, the best eight and another scenario's, each beside its control."""
    rows = recovery_rows()
    forest.panel(ax, rows, effects, markers=forest.markers(rows))
    style.panel_title(ax, "a", title)


def panel_lent(ax: Axes, effects: Mapping[tuple[str, bool], Effect]) -> None:
    """What another scenario's notes make the model decide between its own two actions, and whose word leads."""
    rows = [Row(effect=name, label=label, colour=colour) for name, label, colour in LENT]
    forest.panel(ax, rows, effects, markers={}, xlabel="share of pairs")
    style.panel_title(ax, "c", "another scenario's notes: what is decided and said")


def panel_flips(ax: Axes, effects: Mapping[tuple[str, bool], Effect]) -> None:
    """Share of gated pairs whose decision is the injected one, by how many notes were injected."""
    places = {count: x for x, count in enumerate([*COUNTS, ALL])}
    for shift, (stem, _, colour, line, marker) in zip((-0.08, 0.08, 0.0), CURVES, strict=True):
        found = [(places[k] + shift, effects.get((f"{stem}{k}", True))) for k in COUNTS]
        if stem != "flips_random_":
            found.append((places[ALL] + shift, effects.get(("follow_rate", True))))
        _curve(ax, found, colour=colour, line=line, marker=marker)
    back = effects.get(("follow_rate_back", True))
    _curve(ax, [(places[ALL] + 0.24, back)], colour=style.INK, line="none", marker="o")
    _papers(ax, places)
    ax.axhline(0.5, color=style.PALE, linewidth=0.8, zorder=1)
    ax.set_xticks(list(places.values()), [str(count) for count in places])
    ax.set_ylim(-0.03, 1.06)
    ax.set_xlabel("notes injected (k)")
    ax.set_ylabel("share of pairs that decide as injected")
    style.panel_title(ax, "b", "how many notes flip the decision (pairs that pass the gate)")


def _curve(ax: Axes, found: Sequence[tuple[float, Effect | None]], *, colour: str, line: Any, marker: str) -> None:
    known = [(x, one) for x, one in found if one is not None and one.estimate is not None]
    xs, ys = [x for x, _ in known], [one.estimate or 0.0 for _, one in known]
    ax.plot(xs, ys, color=colour, linestyle=line, marker=marker, markersize=5, linewidth=1.4, zorder=4)
    for x, one in known:
        if one.low is not None and one.high is not None:
            ax.plot([x, x], [one.low, one.high], color=colour, linewidth=1.2, zorder=3, solid_capstyle="butt")


def _papers(ax: Axes, places: Mapping[int | str, int]) -> None:
    """The paper's words on 8 notes, as a bracket from half of the instances up, and its follow rate."""
    paper = style.published()["injection"]
    x = places[8] + 0.3
    ax.plot([x, x], [0.5, 1.0], color=style.INK, linewidth=1, linestyle=(0, (2, 2)))
    ax.annotate(f"paper, best 8:\n{paper['top_8']}", (x, 0.53), (5, 0), textcoords="offset points", fontsize=7.5)
    for low, _ in paper["follow_rate"]["ranges"].values():
        (mark,) = ax.plot(places[ALL] + 0.36, low, "D", markersize=5, markeredgewidth=1, zorder=5, clip_on=False)
        mark.set(markerfacecolor="white", markeredgecolor=style.INK)


def recovery_rows() -> list[Row]:
    """Panel a's rows, with the paper's values where it has any."""
    paper = style.published()["injection"]["full_notes"]
    return [
        Row(effect=name, label=label, colour=colour, points=paper["points"], ranges=paper["ranges"])
        if name == "full_notes"
        else Row(effect=name, label=label, colour=colour)
        for name, label, colour in RECOVERIES
    ]


def _handles() -> list[Line2D]:
    made = [
        Line2D([], [], color=colour, linestyle=line, marker=marker, markersize=5, label=f"b: {label}")
        for _, label, colour, line, marker in CURVES
    ]
    made.append(
        Line2D([], [], color=style.INK, linestyle="none", marker="o", markersize=5, label="b: base's in target")
    )
    paper = Line2D(
        [], [], linestyle="none", marker="D", markersize=5, label="b: paper's follow rate, Gemma-2 and Mistral"
    )
    paper.set(markerfacecolor="white", markeredgecolor=style.INK)
    return [*made, paper]

"""Specificity: the best positions against others at random (the paper's table 4, right), and which they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from figures import forest, page, style
from figures.forest import Row
from figures.suffix import curve_handles, panel_numbers
from kvnotes import effects
from kvnotes.records import Effect, Instance, Record, Table

CURVES = {
    "top": ("best k, chosen on other scenarios", style.BLUE, "-", "o"),
    "in_sample": ("best k of the pair itself (in-sample)", style.VERMILLION, ":", "^"),
    "random": ("k others at random", style.GREY, "-", "s"),
    "near": ("k others, matched on class as far as they go", style.GREEN, "--", "s"),
}
DRAWS = {"random": style.GREY, "near": style.GREEN}
CLASSES = {"cross-fitted": style.BLUE, "in-sample": style.VERMILLION, "8 at random": style.GREY}


def draw(records: Mapping[str, Record]) -> dict[str, Figure]:
    """A figure for each record, by its name; one a layout where it measured several."""
    return page.by_layout(records, _draw_one)


def _draw_one(record: Record, layout: str) -> Figure:
    found = forest.by_name(record.summary.effects, layout)
    gated = {name: one for (name, passed), one in found.items() if passed}
    heading = f"Are the best positions special? {record.model.name}, {page.layout_name(layout)}"
    if "notes_only" not in gated or gated["notes_only"].estimate is None:
        return page.exclusions(record, heading=heading)
    figure = Figure(figsize=(13.0, 8.6), dpi=style.DPI, layout="constrained")
    (eight, numbers), (draws, classes) = figure.subplots(2, 2, width_ratios=(1.15, 1))
    panel_eight(eight, found)
    panel_numbers(numbers, gated, CURVES, letter="b")
    panel_draws(draws, [o for o in record.instances if o.layout == layout and o.status == "included"], gated)
    panel_classes(classes, page.table(record, "classes of the best 8", layout))
    return page.finish(figure, [record], heading=heading, lines=_lines(), handles=_handles(), columns=4)


def _lines() -> list[str]:
    """What the caption says beside the record's own."""
    return [
        "Target's cells copied into base. Random positions are never among the cross-fitted best k. As far as they "
        "go: where a class has too few others, all of them and then positions of classes that the best k lack. "
        "= 0, = 1: equivalent within the margin; \N{NOT EQUAL TO}: different by more than it. Random sets of slots "
        "are drawn once a fold, as the best are chosen, of the slots that every pair has. p: the best eight's slots "
        "permuted, alike in both folds, among all or within their classes.",
        f"Open marks: {style.published()['source']}; other models, in-sample, approximate, no interval given.",
    ]


# --- panels -------------------------------------------------------------------------------------------------


def panel_eight(ax: Axes, found: Mapping[tuple[str, bool], Effect]) -> None:
    """Eight positions by how they were chosen, with the paper's values."""
    rows = eight_rows()
    forest.panel(ax, rows, found, markers=forest.markers(rows))
    style.panel_title(ax, "a", "eight positions")


def eight_rows() -> list[Row]:
    """Panel a's rows; the paper's own choice is in-sample."""
    paper = style.published()["specificity"]
    best, others = paper["top_8"], paper["random_8"]
    most = {group: (0.0, value) for group, value in others["at_most"].items()}
    ranges = {group: (low, high) for group, (low, high) in best["ranges"].items()}
    random = most | {group: (low, high) for group, (low, high) in others["ranges"].items()}
    return [
        Row(effect="top_8", label="best 8, chosen on\nother scenarios", colour=style.BLUE),
        Row(
            effect="in_sample_8",
            label="best 8 of the pair\nitself (in-sample)",
            colour=style.VERMILLION,
            points=best["points"],
            ranges=ranges,
        ),
        Row(effect="random_8", label="8 others at random\n(control)", colour=style.GREY, ranges=random),
        Row(effect="near_8", label="8 others, on class as\nfar as they go (control)", colour=style.GREEN),
        Row(effect="matched_8", label="8 others, matched on\nclass (control)", colour=style.GREEN),
        Row(effect="notes_only", label="all notes", colour=style.INK),
    ]


def panel_draws(ax: Axes, rows: Sequence[Instance], gated: Mapping[str, Effect]) -> None:
    """Where the best eight stand among the draws, each of which is a set of eight in every pair."""
    drawn = {kind: pooled(rows, kind, 8) for kind in DRAWS}
    values = [value for some in drawn.values() for value in some]
    ends = min([-0.1, *values]), max([1.1, *values])
    for kind, colour in DRAWS.items():
        ax.hist(drawn[kind], bins=40, range=ends, color=colour, alpha=0.6)
    if "top_8" in gated and gated["top_8"].estimate is not None:
        ax.axvline(gated["top_8"].estimate, color=style.BLUE, linewidth=2)
    words = [_verdict(gated, kind, label) for kind, label in (("random", "any others"), ("near", "matched, as far"))]
    text = "\n".join(["best 8 less", *(word for word in words if word)])
    ax.text(0.5, 0.55, text, transform=ax.transAxes, va="center", ha="center", fontsize=8)
    for x in (0, 1):
        ax.axvline(x, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    ax.set_xlabel(forest.RECOVERY)
    ax.set_ylabel("draws")
    style.panel_title(ax, "c", "eight at random, by draw, and the best eight (line)")


def pooled(rows: Sequence[Instance], kind: str, k: int) -> list[float]:
    """Recovery over all pairs by draw: the first draw of each fold, the second of each, and so on; a fold with fewer
    begins again with its first. Pairs without draws are left out."""
    drawn: list[tuple[Instance, list[float]]] = []
    for one in rows:
        margins = one.measures["drawn"][kind].get(str(k), [])
        if margins:
            drawn.append((one, [effects.moved(one, margin) for margin in margins]))
    gaps = sum(effects.gap(one) for one, _ in drawn)
    longest = max((len(moved) for _, moved in drawn), default=0)
    return [sum(moved[i % len(moved)] for _, moved in drawn) / gaps for i in range(longest)]


def _verdict(gated: Mapping[str, Effect], kind: str, label: str) -> str:
    gain = gated.get(f"gain_{kind}_8")
    if gain is None or gain.estimate is None or gain.test is None or gain.test.p is None:
        return ""
    return f"{label}: {forest.numbers(gain)}, p = {gain.test.p:.1g}"


def panel_classes(ax: Axes, table: Table) -> None:
    """How many of the best eight are of each token class, beside what chance would give."""
    for y, row in enumerate(table.rows):
        if y % 2 == 0:
            ax.axhspan(y - 0.5, y + 0.5, color=style.BAND, zorder=0, linewidth=0)
        for lane, (value, colour) in enumerate(zip(row[1:], CLASSES.values(), strict=True)):
            ax.barh(y - 0.25 + 0.25 * lane, float(value or 0.0), height=0.22, color=colour, zorder=2)
    ax.set_yticks(range(len(table.rows)), [str(row[0]).replace("_", " ") for row in table.rows])
    ax.set_ylim(len(table.rows) - 0.5, -0.5)
    ax.set_xlabel("of eight positions, mean over pairs")
    style.panel_title(ax, "d", "which classes the best eight are")


def _handles() -> list[Artist]:
    made: list[Any] = [*forest.handles(eight_rows()), *curve_handles(CURVES, letter="b")]
    made += [Patch(color=colour, label=f"d: {label}") for label, colour in CLASSES.items()]
    return made

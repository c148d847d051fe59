"""Causal scrubbing: what resampling note and rest does to the decision (the paper's figure 15d), and pair by pair."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from figures import forest, page, style
from figures.forest import Row
from kvnotes.records import Effect, Record, Table

# effect, label, colour; the controls of both notes are at the end
ROWS = (
    ("drift", "whole downstream,\nsame conclusion: drift", style.GREEN),
    ("drift_size", "the same,\nsize of the drift", style.GREEN),
    ("swap", "whole downstream,\nother conclusion", style.GREEN),
    ("note_swap", "note of aggregators,\nother conclusion", style.BLUE),
    ("rest_swap", "all but it,\nother conclusion", style.VERMILLION),
    ("scrubbed", "all but it other conclusion,\nit of the same", style.VERMILLION),
    ("note_swap_any_slot", "note of any slots,\nother conclusion", style.BLUE),
    ("rest_swap_any_slot", "all but it,\nother conclusion", style.VERMILLION),
    ("scrubbed_any_slot", "all but it other conclusion,\nit of the same", style.VERMILLION),
    ("note_swap_wrong", "other aggregators as note\n(control)", style.GREY),
    ("note_swap_wrong_any_slot", "others of the any slots'\nclasses (control)", style.GREY),
    ("note_swap_random", "random slots, as many as\naggregators (control)", style.GREY),
    ("note_swap_random_any_slot", "random slots, as many as\nany slots (control)", style.GREY),
    ("drift_field", "whole downstream, same field,\nany conclusion (control)", style.GREY),
    ("drift_coin", "whole downstream, a coin's\nside (control)", style.GREY),
)
COSINES = (
    ("cosine", "logits, same conclusion", style.GREEN),
    ("cosine_arms", "logits, base and target\n(control)", style.GREY),
    ("cosine_centred", "about their mean,\nsame conclusion", style.GREEN),
    ("cosine_centred_arms", "about their mean,\nbase and target (control)", style.GREY),
)
NOTES = ("aggregators", "any slots")


def draw(records: Mapping[str, Record]) -> dict[str, Figure]:
    """A figure for each record, by its name; one a layout where it measured several."""
    return page.by_layout(records, _draw_one)


def _draw_one(record: Record, layout: str) -> Figure:
    heading = f"Causal scrubbing: {record.model.name}, {page.layout_name(layout)}"
    if layout not in page.reported(record):
        return page.exclusions(record, heading=heading)
    figure = Figure(figsize=(14.0, 9.6), dpi=style.DPI)
    grid = figure.add_gridspec(3, 2, width_ratios=(1.15, 1), height_ratios=(1, 1, 0.8))
    left = figure.add_subplot(grid[:, 0])
    effects = forest.by_name(record.summary.effects, layout)
    panel_tests(left, effects)
    for at, (letter, note) in enumerate(zip("bc", NOTES, strict=True)):
        panel_pairs(figure.add_subplot(grid[at, 1]), page.table(record, "by instance", layout), note, letter=letter)
    panel_cosines(figure.add_subplot(grid[2, 1]), effects)
    return page.finish(
        figure,
        [record],
        heading=heading,
        lines=_lines(record, layout),
        handles=[*forest.handles(rows()), *_pair_handles()],
        columns=4,
    )


def panel_tests(ax: Axes, effects: Mapping[tuple[str, bool], Effect]) -> None:
    """The paper's figure 15d, with a note of any slots beside the aggregators, and the controls."""
    made = rows()
    forest.panel(ax, made, effects, markers=forest.markers(made), references=(0.0, 0.5, 1.0))
    style.panel_title(ax, "a", "the decision when cells of another prompt of the scenario stand in")


def panel_pairs(ax: Axes, table: Table, note: str, *, letter: str) -> None:
    """Each pair's recovery with the note swapped and with the rest swapped, sorted by their difference."""
    at = [table.columns.index(f"{part}, {note}") for part in ("note", "rest", "difference")]
    rows = [[row[i] for i in at] for row in table.rows]
    found = [[float(value) for value in row if value is not None] for row in rows if None not in row]
    found.sort(key=lambda values: -values[2])
    for y in (0, 1):
        ax.axhline(y, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    for x, (swap, rest, _) in enumerate(found):
        low, high = (min(max(value, -0.5), 1.5) for value in (rest, swap))
        ax.plot([x, x], [low, high], color=style.PALE, linewidth=1.6, zorder=2)
        ax.plot(x, high, "o", color=style.BLUE, markersize=5, markeredgewidth=0, zorder=4)
        ax.plot(x, low, "o", color=style.VERMILLION, markersize=5, markeredgewidth=0, zorder=3)
    governed = sum(values[2] > 0 for values in found)
    ax.set_xticks([])
    ax.set_ylim(-0.58, 1.58)
    ax.set_xlabel(f"{len(found)} pairs that pass the gate, sorted; the note moves more in {governed}")
    ax.set_ylabel("recovery R")
    style.panel_title(ax, letter, f"note of {note} and rest, pair by pair")


def panel_cosines(ax: Axes, effects: Mapping[tuple[str, bool], Effect]) -> None:
    """Logits over the whole vocabulary, against the base's own; gated pairs, on an axis that ends at 1."""
    paper = style.published()["scrubbing"]["cosine"]["ranges"]
    found = [effects.get((name, True)) for name, *_ in COSINES]
    ends = [end for one in found if one for end in (one.estimate, one.low) if end is not None]
    ends += [low for low, _ in paper.values()]
    limits = min(ends) - 0.1 * (1 - min(ends)), 1 + 0.05 * (1 - min(ends))
    ax.axvline(1.0, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    for y, (one, (_, _, colour)) in enumerate(zip(found, COSINES, strict=True)):
        if one is None or one.estimate is None:
            continue
        forest.whisker(ax, y, one, limits=limits, colour=colour)
        ax.plot(one.estimate, y, "s" if one.control else "o", color=colour, markersize=6.5, markeredgewidth=0, zorder=4)
        ax.text(1.02, y, f"{one.estimate:.4f}", transform=ax.get_yaxis_transform(), va="center", fontsize=8.5)
    for low, high in paper.values():
        box = Rectangle((low, 0.2), high - low, 0.14, facecolor="white", edgecolor=style.GREEN, linewidth=1, zorder=5)
        ax.add_patch(box)
    page.rows(ax, [label for _, label, _ in COSINES], depth=len(COSINES), limits=limits)
    ax.ticklabel_format(axis="x", useOffset=False)
    ax.set_xlabel("cosine to the base's logits")
    style.panel_title(ax, "d", "logits over the whole vocabulary (box: the paper's)")


def rows() -> list[Row]:
    """Panel a's rows, with the paper's values where it has any."""
    paper = style.published()["scrubbing"]
    return [Row(effect=name, label=label, colour=colour, **paper.get(name, {})) for name, label, colour in ROWS]


def _pair_handles() -> list[Line2D]:
    return [
        Line2D([], [], linestyle="none", marker="o", markersize=5, color=colour, label=f"panels b, c: {words} swapped")
        for colour, words in ((style.BLUE, "note"), (style.VERMILLION, "rest"))
    ]


def _lines(record: Record, layout: str) -> list[str]:
    """What the caption says beside the record's own."""
    drawn = page.table(record, "against drawn notes", layout)
    p = [f"{row[0]} p = {row[6]:.2g}" for row in drawn.rows if row[6] is not None]
    slots = record.provenance.config.get("slots")
    return [
        f"The note is {slots} slots, chosen on the other fold of the scenarios; field and changed span are never "
        "resampled. Lenders: the other prompts of the scenario's 2x2 and all four with other neutral rules. = 0, = 1: "
        "equivalent within the margin; \N{NOT EQUAL TO}: different by more than it. Panels b and c end at "
        "\N{MINUS SIGN}0.5 and 1.5.",
        f"Note against its slots permuted, alike in both folds: {'; '.join(p) or 'not tested'}.",
        f"Open markers: {style.published()['source']}; other models, approximate values, no interval given.",
    ]

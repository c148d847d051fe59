"""Suffix concentration: recovery by number of positions, by token class, by slot and by layer (figure 3b).

Everything is over the pairs that pass the gate. The paper gives no numbers for its figure 3b; what it says of eight
positions (its specificity control) stands at 8 as open boxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from figures import page, style
from kvnotes import effects, select
from kvnotes.records import Effect, Instance, Record, Table

CURVES = {
    "top": ("best k, chosen on other scenarios", style.BLUE, "-", "o"),
    "both": ("the same, chosen with leave-one-out", style.GREEN, "--", "v"),
    "in_sample": ("best k of the pair itself (in-sample)", style.VERMILLION, ":", "^"),
    "random": ("k at random, none of the best k", style.GREY, "-", "s"),
}
KINDS = {"alone": ("these cells alone", style.BLUE, "o"), "lost": ("lost without them", style.VERMILLION, "D")}
LAYERS = {
    "alone": ("one layer alone", style.BLUE, "o"),
    "up to": ("all layers up to it", style.GREY, "<"),
    "from": ("all layers from it on", style.VERMILLION, ">"),
}
TABLES = ("by slot", "by class", "by layer")
SLOTS = 12
RECOVERY = "recovery R"


def draw(records: Mapping[str, Record]) -> dict[str, Figure]:
    """A figure for each record, by its name; one a layout where it measured several."""
    return page.by_layout(records, _draw_one)


def _draw_one(record: Record, layout: str) -> Figure:
    found = {one.name: one for one in record.summary.effects if one.gated and one.layout == layout}
    heading = f"Where the notes are: {record.model.name}, {page.layout_name(layout)}"
    if "notes_only" not in found or found["notes_only"].estimate is None:
        return page.exclusions(record, heading=heading)
    tables = {name: page.table(record, name, layout) for name in TABLES}
    figure = Figure(figsize=(12.6, 9.6), dpi=style.DPI, layout="constrained")
    grid = figure.add_gridspec(2, 6, height_ratios=(1, 1.15))
    panel_numbers(figure.add_subplot(grid[0, :3]), found, CURVES, letter="a")
    panel_layers(figure.add_subplot(grid[0, 3:]), tables["by layer"], notes=found["notes_only"], centroid=found)
    panel_places(figure.add_subplot(grid[1, :2]), tables["by class"], title="by token class", letter="c")
    slots = figure.add_subplot(grid[1, 2:4])
    rows = tables["by slot"].rows[:SLOTS]
    shown = Table(columns=tables["by slot"].columns, rows=rows)
    panel_places(slots, shown, title=f"the {len(rows)} strongest slots", letter="d")
    panel_map(figure.add_subplot(grid[1, 4:], sharey=slots), record, layout=layout, slots=[str(row[0]) for row in rows])
    return page.finish(figure, [record], heading=heading, lines=_lines(), handles=_handles(), columns=5)


def _lines() -> list[str]:
    """What the caption says beside the record's own."""
    return [
        "Target's cells copied into base, over the pairs that pass the gate. A slot is a span and an index in it. "
        "Lost: what notes-only loses when these cells stay base's. Choices are cross-fitted unless in-sample. "
        "Panel d: the strongest of these same pairs (in-sample), so that the largest are too large. "
        "Panel e: single (layer, slot) cells, which are few of a slot's and need not sum to it.",
        f"Open boxes: {style.published()['source']}; other models, eight positions, in-sample, no interval given.",
    ]


# --- panels -------------------------------------------------------------------------------------------------


def panel_numbers(
    ax: Axes, found: Mapping[str, Effect], curves: Mapping[str, tuple[str, str, str, str]], *, letter: str
) -> None:
    """Recovery against the number of positions edited: a curve a ranking, by the name of its effects, and the paper's
    boxes at 8. A curve has label, colour, line and marker."""
    levels(ax, found["notes_only"].estimate)
    drawn = {name: curve(found, name) for name in curves}
    for lane, (name, (_, colour, line, marker)) in enumerate(curves.items()):
        shift = 1.035 ** (lane - (len(curves) - 1) / 2)  # side by side, so that intervals do not hide one another
        x = [k * shift for k in drawn[name]]
        y = [float(one.estimate or 0.0) for one in drawn[name].values()]
        ax.plot(x, y, line, color=colour, marker=marker, markersize=4.5, linewidth=1.3, zorder=4)
        whiskers(ax, x, [(one.low, one.high) for one in drawn[name].values()], colour=colour)
    _paper_boxes(ax)
    ax.set_xscale("log", base=2)
    ks = sorted({k for one in drawn.values() for k in one})
    ax.set_xticks(ks, [str(k) for k in ks])
    ax.minorticks_off()
    values = [float(one.estimate or 0.0) for effects_ in drawn.values() for one in effects_.values()]
    ax.set_ylim(min([-0.15, *(value - 0.1 for value in values)]), max([1.15, *(value + 0.1 for value in values)]))
    ax.set_xlabel("positions edited, k")
    ax.set_ylabel(RECOVERY)
    style.panel_title(ax, letter, "by number of positions, best first")


def _paper_boxes(ax: Axes) -> None:
    """What the paper's models recover from their best eight, and at most from eight at random."""
    paper = style.published()["specificity"]
    ranges = [*paper["top_8"]["ranges"].values(), *((0, most) for most in paper["random_8"]["at_most"].values())]
    for low, high in ranges:
        box = Rectangle((6.6, low), 2.9, high - low, facecolor="none", edgecolor=style.INK, linewidth=1, zorder=5)
        ax.add_patch(box)


def panel_layers(ax: Axes, table: Table, *, notes: Effect, centroid: Mapping[str, Effect]) -> None:
    """Recovery of all notes' cells in one layer, in all up to it and in all from it on."""
    levels(ax, notes.estimate)
    rows = _rows(table)
    for kind, (_, colour, marker) in LAYERS.items():
        x, y = [int(row[table.columns[0]]) for row in rows], [row[f"{kind} R"] for row in rows]
        ax.plot(x, y, "-", color=colour, marker=marker, markersize=4, linewidth=1.2, zorder=4)
        ends = [(row[f"{kind} low"], row[f"{kind} high"]) for row in rows]
        whiskers(ax, x, ends, colour=colour)
    depth = centroid["depth_centroid"]
    if depth.estimate is not None and len(rows) > 1:
        at = depth.estimate * (len(rows) - 1)
        ax.axvline(at, color=style.INK, linewidth=0.9, linestyle=":", zorder=2)
        ax.annotate(
            f"centroid {style.number(depth.estimate)}",
            (at, 1),
            (3, -9),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=7.5,
        )
    values = [row[f"{kind} R"] for row in rows for kind in LAYERS]
    ax.set_ylim(min([-0.15, *(v - 0.1 for v in values)]), max([1.15, *(v + 0.1 for v in values)]))
    ax.set_xlabel("layer")
    style.panel_title(ax, "b", "by layer, all notes' positions")


def panel_places(ax: Axes, table: Table, *, title: str, letter: str) -> None:
    """Rows of places: their cells alone and what is lost without them, each with its interval."""
    rows = _rows(table)
    for y, row in enumerate(rows):
        if y % 2 == 0:
            ax.axhspan(y - 0.5, y + 0.5, color=style.BAND, zorder=0, linewidth=0)
        for lane, (kind, (_, colour, marker)) in zip((y - 0.16, y + 0.16), KINDS.items(), strict=True):
            low, high = (min(max(row[f"{kind} {end}"], -0.3), 1.3) for end in ("low", "high"))
            ax.plot([low, high], [lane, lane], color=colour, linewidth=1.4, zorder=3)
            (mark,) = ax.plot(row[f"{kind} R"], lane, marker, color=colour, markersize=4.5, zorder=4)
            if row[f"{kind} p"] > effects.FALSE_DISCOVERIES:
                mark.set_markerfacecolor("white")
    for x in (0, 1):
        ax.axvline(x, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    ax.set_yticks(range(len(rows)), [str(row[table.columns[0]]).replace("_", " ") for row in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(-0.3, 1.3)
    ax.set_xlabel(RECOVERY)
    style.panel_title(ax, letter, title)


def panel_map(ax: Axes, record: Record, *, layout: str, slots: Sequence[str]) -> None:
    """Mean effect of single (layer, slot) cells over the mapped pairs: ratio of sums."""
    mapped = [one for one in record.instances if one.layout == layout and one.measures.get("map")]
    style.panel_title(ax, "e", f"layer by slot, mean of {len(mapped)} pairs")
    ax.tick_params(axis="y", labelleft=False)
    ax.set_xlabel("layer")
    if not mapped:
        ax.text(0.5, 0.5, "no pair was mapped", transform=ax.transAxes, ha="center", color=style.GREY)
        return
    values = np.stack([_map_row(mapped, slot) for slot in slots])
    bound = max(0.05, float(np.nanmax(np.abs(values))))
    image = ax.imshow(values, aspect="auto", cmap="RdBu", vmin=-bound, vmax=bound, interpolation="nearest")
    ax.set_ylim(len(slots) - 0.5, -0.5)
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02, aspect=30)
    bar.set_label(RECOVERY)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]


def _map_row(mapped: Sequence[Instance], slot: str) -> np.ndarray:
    """A slot's effect by layer over the pairs that have it; without one, nothing."""
    having = [one for one in mapped if slot in _slots(one)]
    layers = len(mapped[0].measures["map"])
    if not having:
        return np.full(layers, np.nan)
    moved = [
        [effects.moved(one, margins[_slots(one).index(slot)]) for margins in one.measures["map"]] for one in having
    ]
    return np.sum(moved, axis=0) / sum(effects.gap(one) for one in having)


def _slots(one: Instance) -> list[str]:
    names = select.instance_slots(one)
    return [names[p] for p in select.downstream(one)]


# --- marks --------------------------------------------------------------------------------------------------


def curve(found: Mapping[str, Effect], name: str) -> dict[int, Effect]:
    """A ranking's effects by the number of positions, which ends their name."""
    split = {key: key.rpartition("_") for key in found}
    numbered = {int(k): found[key] for key, (stem, _, k) in split.items() if stem == name and k.isdigit()}
    return {k: one for k, one in sorted(numbered.items()) if one.estimate is not None}


def _rows(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def levels(ax: Axes, notes: float | None) -> None:
    """Base, target, and all notes between them."""
    for y in (0, 1):
        ax.axhline(y, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    if notes is not None:
        ax.axhline(notes, color=style.INK, linewidth=0.9, zorder=1)


def whiskers(ax: Axes, x: Sequence[float], ends: Sequence[tuple[float | None, float | None]], *, colour: str) -> None:
    """Vertical intervals; they may go on beyond the axis."""
    for at, (low, high) in zip(x, ends, strict=True):
        if low is not None and high is not None:
            ax.plot([at, at], [low, high], color=style.lighter(colour, 0.35), linewidth=1.4, zorder=3)


def curve_handles(curves: Mapping[str, tuple[str, str, str, str]], *, letter: str) -> list[Any]:
    """The legend of `panel_numbers`."""
    made: list[Any] = [
        Line2D(
            [], [], color=colour, linestyle=cast("Any", line), marker=marker, markersize=4.5, label=f"{letter}: {label}"
        )
        for label, colour, line, marker in curves.values()
    ]
    return [*made, Patch(facecolor="none", edgecolor=style.INK, label=f"{letter}: the paper's, best 8 and random 8")]


def _handles() -> list[Artist]:
    made = curve_handles(CURVES, letter="a")
    made += [
        Line2D([], [], color=colour, marker=marker, markersize=4.5, label=f"b: {label}")
        for label, colour, marker in LAYERS.values()
    ]
    made.append(Line2D([], [], color=style.INK, linewidth=0.9, label="a, b: all notes, all layers"))
    made += [
        Line2D([], [], color=colour, marker=marker, markersize=4.5, label=f"c, d: {label}")
        for label, colour, marker in KINDS.values()
    ]
    hollow = Line2D([], [], color=style.GREY, marker="o", markersize=4.5, linestyle="none", label="c, d: p > 0.05 (BH)")
    hollow.set_markerfacecolor("white")
    return [*made, hollow]

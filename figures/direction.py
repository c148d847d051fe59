"""Direction: what the component along one shared direction recovers, beside the whole residual and random ones, at the
best aggregator and at the best slot of any kind; the paper's figure 15b.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from figures import forest, page, style
from figures.forest import Row
from kvnotes import effects
from kvnotes.conclusion import KINDS
from kvnotes.records import Record, Table

CURVES = {
    "full": ("full residual patch", style.INK, "o"),
    "along": ("along permit less restrict", style.BLUE, "s"),
    "along_rule": ("along first rule less second", style.GREEN, "^"),
    "along_row": ("along target's rule less base's", style.VERMILLION, "v"),
}
CODES = {"conclusion": style.BLUE, "rule": style.GREEN, "row": style.VERMILLION}
COSINE = "cosine between the folds' directions"
LABELS = {
    "full": ("full residual patch", style.INK),
    "along": ("along permit less restrict", style.BLUE),
    "share": ("... as a share of the full", style.BLUE),
    "in_sample": ("... best layer, in-sample", style.BLUE),
    "random_norm": ("random direction, at\nits norm (control)", style.GREY),
    "orthogonal": ("rest of the difference,\nat its norm (control)", style.GREY),
    "along_shared": ("along the shared direction", style.GREEN),
    "share_shared": ("... as a share of the full", style.GREEN),
    "random_shared": ("random direction, at\nits norm (control)", style.GREY),
    "random_own": ("random direction's own\ncomponent (control)", style.GREY),
    "logistic": ("along a logistic probe", style.VERMILLION),
    "logistic_norm": ("probe's direction, at the\nnorm of permit less restrict", style.VERMILLION),
    "projected": ("lost: permit less restrict\ntaken out of the target", style.BLUE),
    "centred": ("lost: ... set halfway", style.BLUE),
    "projected_shared": ("lost: shared direction\ntaken out of the target", style.GREEN),
    "centred_shared": ("lost: ... set halfway", style.GREEN),
    "random_lost": ("lost: random direction\ntaken out (control)", style.GREY),
}
JOINT = {
    "full_all": ("all aggregators, in full", style.INK),
    "along_all": ("all aggregators, along\npermit less restrict", style.BLUE),
    "along_shared_all": ("all aggregators, along\nthe shared direction", style.GREEN),
}


def draw(records: Mapping[str, Record]) -> dict[str, Figure]:
    """A figure for each record, by its name; one a layout where it measured several."""
    return page.by_layout(records, _draw_one)


def _draw_one(record: Record, layout: str) -> Figure:
    heading = f"A direction that carries the conclusion: {record.model.name}, {page.layout_name(layout)}"
    if layout not in page.reported(record):
        return page.exclusions(record, heading=heading)
    found = forest.by_name(record.summary.effects, layout)
    figure = Figure(figsize=(15.0, 17.0), dpi=style.DPI, layout="constrained")
    axes = figure.subplots(3, 2, height_ratios=(2.6, 1, 0.8))
    for at, (kind, where) in enumerate(KINDS.items()):
        above, middle, below = axes[:, at]
        forest.panel(above, site_rows(kind), found, markers=forest.markers(site_rows("aggregator")))
        style.panel_title(above, "ab"[at], f"{where}, causal layer")
        curves = {name: page.table(record, f"{name} by layer, {where}", layout) for name in CURVES}
        chosen = page.table(record, f"chosen, {where}", layout)
        panel_layers(middle, curves, chosen)
        style.panel_title(middle, "cd"[at], f"{where}, by layer")
        panel_cosines(below, page.table(record, f"{COSINE}, {where}", layout), chosen)
        style.panel_title(below, "ef"[at], f"{where}: {COSINE}")
    return page.finish(figure, [record], heading=heading, lines=_lines(), handles=_handles(), columns=4)


def suffix(kind: str) -> str:
    """How the names of a site's effects end."""
    return "" if kind == "aggregator" else f"_{kind}"


def site_rows(kind: str) -> list[Row]:
    """A site's rows; the paper's sites are aggregators."""
    paper: Mapping[str, Any] = style.published()["direction"] if kind == "aggregator" else {}
    made = [
        Row(
            effect=f"{name}{suffix(kind)}",
            label=label,
            colour=colour,
            points=paper.get(name, {}).get("points", {}),
            ranges={group: (low, high) for group, (low, high) in paper.get(name, {}).get("ranges", {}).items()},
        )
        for name, (label, colour) in LABELS.items()
    ]
    joint = JOINT if kind == "aggregator" else {}
    return [*made, *(Row(effect=name, label=label, colour=colour) for name, (label, colour) in joint.items())]


def panel_layers(ax: Axes, curves: Mapping[str, Table], chosen: Table) -> None:
    """Recovery of the components and of the whole residual by layer, with intervals; filled where p < 0.05 (sign flips,
    BH over layers); ticks at the top where pairs were tested."""
    ends: list[float] = []
    for name, (_, colour, marker) in CURVES.items():
        rows: list[dict[str, Any]] = [dict(zip(curves[name].columns, row, strict=True)) for row in curves[name].rows]
        layers, values = [int(row["layer"]) for row in rows], [row["recovery R"] for row in rows]
        low, high = ([row[f"recovery {end}"] for row in rows] for end in ("low", "high"))
        ax.plot(layers, values, color=colour, linewidth=1.2, zorder=3)
        for x, y, row in zip(layers, values, rows, strict=True):
            face = colour if row["recovery p"] <= effects.FALSE_DISCOVERIES else "white"
            ax.plot(x, y, marker, markersize=4, color=colour, markerfacecolor=face, zorder=4)
        if all(x is not None for x in (*low, *high)):
            ax.fill_between(layers, low, high, color=style.lighter(colour, 0.75), linewidth=0, zorder=1)
        ends += values
    _ticks(ax, chosen)
    for y in (0, 1):
        ax.axhline(y, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    ax.set_ylim(min([-0.15, *(x - 0.1 for x in ends)]), max([1.12, *(x + 0.1 for x in ends)]))
    ax.set_ylabel("recovery R")


def panel_cosines(ax: Axes, cosines: Table, chosen: Table) -> None:
    """By layer and code, the cosine between what either fold learned, at each slot that a fold was tested at."""
    for at, column in enumerate(cosines.columns[1:], start=1):
        values: list[Any] = [row[at] for row in cosines.rows]
        ax.plot(range(len(values)), values, color=CODES[column.partition(",")[0]], linewidth=1.4)
    _ticks(ax, chosen)
    ax.axhline(0, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    ax.set_ylim(-1.05, 1.05)
    ax.set_ylabel("cosine")


def _ticks(ax: Axes, chosen: Table) -> None:
    for layer in {row[1] for row in chosen.rows}:
        ax.axvline(float(layer or 0), ymin=0.93, color=style.INK, linewidth=2)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("layer")


def _lines() -> Sequence[str]:
    return [
        "The component of (target - base) along a difference of means of all other scenarios goes into base at one "
        "position and layer, all after it recomputed; site and layer chosen on the scenarios of the other fold. The "
        "paper's direction is permit less restrict; the shared one is, of that, first rule less second and target's "
        "rule less base's, the longest on the other fold. Random directions are orthogonal to both; "
        "\N{NOT EQUAL TO} random: 95% of random directions' own components recover less, corrected over four "
        "tests. Lost: of the target's margin, in units of the gap.",
        f"Open marks: {style.published()['source']}; other models, approximate, no interval given.",
    ]


def _handles() -> list[Artist]:
    made = forest.handles(site_rows("aggregator"))
    made += [
        Line2D(
            [],
            [],
            color=colour,
            marker=marker,
            markersize=4,
            label=f"c to f: {label}" if name != "full" else f"c, d: {label}",
        )
        for name, (label, colour, marker) in CURVES.items()
    ]
    hollow = Line2D([], [], color=style.GREY, marker="o", markersize=4, linestyle="none", label="c, d: p > 0.05 (BH)")
    hollow.set_markerfacecolor("white")
    ticks = Line2D([], [], color=style.INK, marker="|", markersize=7, markeredgewidth=2, linestyle="none")
    ticks.set_label("c to f: causal layer (one a fold)")
    return [*made, hollow, ticks]

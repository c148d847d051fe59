"""Linear decodability: a small panel a slot class, by layer, with the same on randomised weights; and what is read
within a scenario. Everything is over the pairs that pass the gate.

The paper gives no number for its linear probe; the layer from which it reads the conclusion at the aggregator is in
its timing control, and stands here as open markers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from figures import forest, page, style
from kvnotes import effects
from kvnotes.records import Effect, Record, Table

ACROSS = 4  # panels beside one another
TABLES = {
    "area": "AUC on held-out scenarios",
    "low": "AUC, lower end",
    "high": "AUC, upper end",
    "q": "p of the permutation test, BH over layers and classes",
    "bare": "AUC on randomised weights",
}
LABELS = {
    "conclusion": ("permit or restrict", style.BLUE, style.lighter(style.BLUE)),
    "rule": ("first or second rule", style.GREEN, style.lighter(style.GREEN)),
}
INSIDE = {
    "field": ("the field's value", style.VERMILLION, "o"),
    "conclusion": ("the conclusion", style.BLUE, "o"),
    "control": ("random labels, neutral rules not seen (control)", style.GREY, "s"),
    "memorised": ("random labels, neutral rules seen (control)", style.lighter(style.GREY, 0.4), "s"),
}
MARKERS = ("D", "s", "^")


def draw(records: Mapping[str, Record]) -> dict[str, Figure]:
    """A figure for each record, by its name; one a layout where it measured several."""
    return page.by_layout(records, _draw_one)


def _draw_one(record: Record, layout: str) -> Figure:
    heading = f"Where the conclusion can be read: {record.model.name}, {page.layout_name(layout)}"
    tables = {
        label: {key: record.summary.tables.get(f"{layout}, {label}: {title}") for key, title in TABLES.items()}
        for label in LABELS
    }
    if tables["conclusion"]["area"] is None:
        return page.exclusions(record, heading=heading)
    found = forest.by_name(record.summary.effects, layout)
    names = list(tables["conclusion"]["area"].columns[1:])
    rows = math.ceil(len(names) / ACROSS)
    figure = Figure(figsize=(12.0, 2.15 * rows + 2.9), dpi=style.DPI, layout="constrained")
    grid = figure.add_gridspec(rows + 1, ACROSS, height_ratios=[1.0] * rows + [1.25])
    first: Axes | None = None
    for at, name in enumerate(names):
        ax = figure.add_subplot(grid[at // ACROSS, at % ACROSS], sharex=first, sharey=first)
        first = first or ax
        for label, own in tables.items():
            curve(ax, label, {key: _column(table, name) for key, table in own.items()})
        _frame(ax, name, found)
        if name == "aggregator":
            _papers(ax, record.model.layers)
        ax.set_ylabel("" if at % ACROSS else "AUC, held-out scenarios")
        ax.set_xlabel("after layer" if at + ACROSS >= len(names) else "")
    panel_inside(figure.add_subplot(grid[rows, :]), names, found)
    return page.finish(figure, [record], heading=heading, lines=_lines(found), handles=_handles(), columns=4)


def _lines(found: Mapping[tuple[str, bool], Effect]) -> list[str]:
    """What the caption says beside the record's own."""
    return [
        page.designs(found, "auc_decision")
        + "One vector a prompt: the last token of each class. Titles: AUC at the layer that the other fold chose, of "
        "permit or restrict / of the first or second rule. "
        "The majority label is right in half of the prompts by design. Bands are each layer's intervals.",
        f"Open markers: {style.published()['source']}; other models, as a share of the layers, approximate.",
    ]


# --- panels -------------------------------------------------------------------------------------------------


def curve(ax: Axes, label: str, columns: Mapping[str, list[Any] | None]) -> None:
    """One slot class by layer, for one label: AUC with its intervals, filled where its corrected p is at most 0.05, and
    the AUC on randomised weights."""
    _, colour, light = LABELS[label]
    area, low, high, q = (columns[key] or [] for key in ("area", "low", "high", "q"))
    layers = range(len(area))
    known = [(x, a, b) for x, a, b in zip(layers, low, high, strict=True) if a is not None and b is not None]
    if known:
        x, bottom, top = zip(*known, strict=True)
        ax.fill_between(x, bottom, top, color=colour, alpha=0.13, linewidth=0)
    if columns["bare"] is not None:
        ax.plot(layers, columns["bare"], color=light, linewidth=1.0, marker="s", markersize=2.2, markeredgewidth=0)
    ax.plot(layers, area, color=colour, linewidth=1.2, zorder=3)
    for x, y, p in zip(layers, area, q, strict=True):
        (dot,) = ax.plot(x, y, "o", markersize=3.4, markeredgewidth=0.9, zorder=4)
        dot.set(markerfacecolor=colour if p <= effects.FALSE_DISCOVERIES else "white", markeredgecolor=colour)


def _frame(ax: Axes, name: str, found: Mapping[tuple[str, bool], Effect]) -> None:
    """Axes and title of a class's panel: the AUCs at the layers that the other fold chose."""
    ax.axhline(0.5, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    ax.set_ylim(-0.03, 1.06)
    ax.spines["left"].set_visible(True)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    chosen = [found.get((f"{prefix}auc_{name}", True)) for prefix in ("", "rule_")]
    numbers = " / ".join(
        "none" if one is None or one.estimate is None else style.number(one.estimate) for one in chosen
    )
    ax.set_title(f"{name.replace('_', ' ')}   {numbers}", fontsize=9)


def panel_inside(ax: Axes, names: Sequence[str], found: Mapping[tuple[str, bool], Effect]) -> None:
    """Accuracy within scenarios of the field's value, the conclusion and both control tasks, by slot class."""
    ax.axhline(0.5, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    for at, name in enumerate(names):
        if at % 2 == 0:
            ax.axvspan(at - 0.5, at + 0.5, color=style.BAND, zorder=0, linewidth=0)
        for lane, (task, (_, colour, marker)) in enumerate(INSIDE.items()):
            one = found.get((f"{task}_{name}", True))
            if one is None or one.estimate is None:
                continue
            x = at + 0.17 * (lane - 1.5)
            if one.low is not None and one.high is not None:
                ax.plot([x, x], [one.low, one.high], color=colour, linewidth=1.6, zorder=3)
            ax.plot(x, one.estimate, marker, color=colour, markersize=5.5, markeredgewidth=0, zorder=4)
    ax.set_xticks(range(len(names)), [name.replace("_", " ") for name in names])
    ax.set_xlim(-0.5, len(names) - 0.5)
    ax.set_ylim(-0.03, 1.06)
    ax.spines["left"].set_visible(True)
    ax.set_ylabel("accuracy within scenarios")
    ax.set_title("within a scenario, at the layer that the other fold chose")


# --- marks and data -----------------------------------------------------------------------------------------


def _papers(ax: Axes, layers: int) -> None:
    """The paper's write depths, at the layer of the same share of the layers."""
    points = [value for value in _published().values() if not isinstance(value, list)]
    for lane, (value, marker) in enumerate(zip(points, MARKERS, strict=False)):
        (mark,) = ax.plot(value * layers - 1, 0.04 + 0.07 * lane, marker, markersize=4.6, markeredgewidth=1, zorder=5)
        mark.set(markerfacecolor="white", markeredgecolor=style.VERMILLION)


def _published() -> Mapping[str, Any]:
    return style.published().get("timing", {}).get("write_depth", {})


def _column(table: Table | None, name: str) -> list[Any] | None:
    if table is None:
        return None
    at = table.columns.index(name)
    return [row[at] for row in table.rows]


def _handles() -> list[Artist]:
    made: list[Artist] = []
    for label, colour, light in LABELS.values():
        text = f"AUC, {label}; filled: p (BH) <= 0.05"
        made.append(Line2D([], [], color=colour, marker="o", markersize=4, linewidth=1.3, label=text))
        text = "the same on randomised weights (control)"
        made.append(Line2D([], [], color=light, marker="s", markersize=3, linewidth=1, label=text))
    made += [
        Line2D([], [], linestyle="none", color=colour, marker=marker, markersize=5.5, label=label)
        for label, colour, marker in INSIDE.values()
    ]
    models = [name for name, value in _published().items() if not isinstance(value, list)]
    for name, marker in zip(models, MARKERS, strict=False):
        line = Line2D([], [], linestyle="none", marker=marker, markersize=5, label=f"paper: readable from, {name}")
        line.set(markerfacecolor="white", markeredgecolor=style.VERMILLION)
        made.append(line)
    return made

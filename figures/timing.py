"""Timing: by layer, what probes read at the aggregator and at the decision, what the logit lens says of the decision,
and how much of it the notes' cells give up to, from and after each layer.

Everything is over the pairs that pass the gate; depths of all used pairs stand under them, lighter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from figures import forest, page, style
from kvnotes.records import Effect, Record, Table

PLACES = {"aggregator": ("at the aggregator", style.VERMILLION), "decision": ("at the decision", style.BLUE)}
CURVES = {
    "notes up to": ("notes transplanted up to it", style.BLUE, "<"),
    "notes from": ("notes transplanted from it on", style.VERMILLION, ">"),
    "kept, notes blocked from": ("gap kept, notes blocked from it on", style.GREEN, "o"),
}
DEPTHS = {
    "write_depth": ("conclusion, aggregator", style.VERMILLION),
    "read_depth": ("conclusion, decision", style.BLUE),
    "rule_write_onset": ("rule, aggregator: onset", style.VERMILLION),
    "rule_read_onset": ("rule, decision: onset", style.BLUE),
    "commit_depth": ("commit: lens, decision", style.INK),
    "transplant_depth": ("half of the notes given up to", style.BLUE),
    "block_depth": ("half of the notes seen up to", style.GREEN),
}
LABELS = {"conclusion": "a probe for permit or restrict", "rule": "a probe for the first or second rule"}
MARKERS = ("D", "s", "^")


def draw(records: Mapping[str, Record]) -> dict[str, Figure]:
    """A figure for each record, by its name; one a layout where it measured several."""
    return page.by_layout(records, _draw_one)


def _draw_one(record: Record, layout: str) -> Figure:
    heading = f"When it is written and when it is read: {record.model.name}, {page.layout_name(layout)}"
    tables = record.summary.tables
    if f"{layout}: notes up to" not in tables:
        return page.exclusions(record, heading=heading)
    found = forest.by_name(record.summary.effects, layout)
    figure = Figure(figsize=(13.2, 7.6), dpi=style.DPI, layout="constrained")
    above, below = figure.add_gridspec(2, 1)
    top, bottom = above.subgridspec(1, 3), below.subgridspec(1, 2)
    for at, (label, title) in enumerate(LABELS.items()):
        ax = figure.add_subplot(top[at])
        panel_probes(ax, {place: tables.get(f"{layout}: {label} at the {place}") for place in PLACES})
        style.panel_title(ax, "ab"[at], title)
    panel_lens(figure.add_subplot(top[2]), tables[f"{layout}: lens, share of the gap"])
    panel_twins(figure.add_subplot(bottom[0]), {name: tables[f"{layout}: {name}"] for name in CURVES})
    panel_depths(figure.add_subplot(bottom[1]), found, layers=record.model.layers)
    return page.finish(figure, [record], heading=heading, lines=_lines(found), handles=_handles(), columns=5)


def _lines(found: Mapping[tuple[str, bool], Effect]) -> list[str]:
    """What the caption says beside the record's own."""
    return [
        page.designs(found, "read_depth")
        + "a, b: filled where a ridge probe's AUC is above its permutation null (whole scenarios change labels). "
        "Bands are each layer's intervals. e: in numbers, the layer after which it holds to the last.",
        f"Open markers: {style.published()['source']}; other models, approximate, no interval given.",
    ]


# --- panels -------------------------------------------------------------------------------------------------


def panel_probes(ax: Axes, tables: Mapping[str, Table | None]) -> None:
    """AUC on held-out scenarios by layer, at both places; filled where it is above its permutation null, and the null
    as a dashed line of the same colour."""
    ax.axhline(0.5, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    for place, (_, colour) in PLACES.items():
        table = tables[place]
        if table is None:
            ax.text(0.5, 0.5, f"no probe at the {place}", transform=ax.transAxes, ha="center", color=style.GREY)
            continue
        layer, area, low, high, ridge, bound, _ = _columns(table)
        _band(ax, layer, low, high, colour)
        ax.plot(layer, area, color=colour, linewidth=1.4)
        ax.plot(layer, bound, color=style.lighter(colour, 0.3), linewidth=0.9, linestyle=":")
        above = [r > b + 1e-9 for r, b in zip(ridge, bound, strict=True)]
        _dots(ax, layer, area, above, colour)
    _layer_axis(ax, "AUC on held-out scenarios")
    ax.set_ylim(-0.03, 1.06)


def panel_lens(ax: Axes, table: Table) -> None:
    """The logit lens at the decision: its margin's difference between the arms, in units of the gap."""
    _curve(ax, table, style.INK, "o")
    _references(ax)
    _layer_axis(ax, "lens margin, share of the gap")
    style.panel_title(ax, "c", "the decision so far: logit lens")


def panel_twins(ax: Axes, tables: Mapping[str, Table]) -> None:
    """Notes transplanted up to and from each layer, and the gap that is left when they are blocked from it on."""
    for name, (_, colour, marker) in CURVES.items():
        _curve(ax, tables[name], colour, marker)
    _references(ax)
    _layer_axis(ax, "share of the gap  (0: like base, 1: like target)")
    style.panel_title(ax, "d", "by causes: the notes, layer by layer")


def panel_depths(ax: Axes, found: Mapping[tuple[str, bool], Effect], *, layers: int) -> None:
    """The depths as shares of the layers, so that the paper's models can stand beside them."""
    published = style.published().get("timing", {})
    for y, (name, (_, colour)) in enumerate(DEPTHS.items()):
        if y % 2 == 0:
            ax.axhspan(y - 0.5, y + 0.5, color=style.BAND, zorder=0, linewidth=0)
        for gated, lane, size in ((True, y - 0.26, 6.5), (False, y + 0.02, 4.5)):
            one = found.get((name, gated))
            ink = style.INK if gated else style.GREY
            text = ax.text(1.02, lane, _words(one), transform=ax.get_yaxis_transform(), va="center", color=ink)
            text.set_fontsize(8 if gated else 7)
            if one is not None and one.estimate is not None:
                shade = colour if gated else style.lighter(colour)
                if one.low is not None and one.high is not None:
                    ends = [min(1.0, _share(end, layers)) for end in (one.low, one.high)]
                    ax.plot(ends, [lane, lane], color=shade, linewidth=1.6)
                ax.plot(_share(one.estimate, layers), lane, "o", color=shade, markersize=size, markeredgewidth=0)
        _paper(ax, published.get(name, {}), y=y + 0.24, colour=colour)
    ax.set_yticks(range(len(DEPTHS)), [label for label, _ in DEPTHS.values()])
    ax.set_ylim(len(DEPTHS) - 0.5, -0.5)
    ax.set_xlim(0, 1.02)
    ax.set_xlabel("depth: layers run, of all")
    style.panel_title(ax, "e", "depths (in numbers: the layer)")


# --- marks --------------------------------------------------------------------------------------------------


def _curve(ax: Axes, table: Table, colour: str, marker: str) -> None:
    layer, value, low, high = _columns(table)
    _band(ax, layer, low, high, colour)
    ax.plot(layer, value, color=colour, linewidth=1.4, marker=marker, markersize=4, markeredgewidth=0)


def _band(ax: Axes, layer: Sequence[Any], low: Sequence[Any], high: Sequence[Any], colour: str) -> None:
    known = [(x, a, b) for x, a, b in zip(layer, low, high, strict=True) if a is not None and b is not None]
    if known:
        x, bottom, top = zip(*known, strict=True)
        ax.fill_between(x, bottom, top, color=colour, alpha=0.14, linewidth=0)


def _dots(ax: Axes, layer: Sequence[Any], value: Sequence[Any], filled: Sequence[bool], colour: str) -> None:
    for x, y, full in zip(layer, value, filled, strict=True):
        (dot,) = ax.plot(x, y, "o", markersize=4.5, markeredgewidth=1, zorder=4)
        dot.set(markerfacecolor=colour if full else "white", markeredgecolor=colour)


def _references(ax: Axes) -> None:
    for y in (0, 1):
        ax.axhline(y, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)


def _layer_axis(ax: Axes, ylabel: str) -> None:
    ax.set_xlabel("after layer")
    ax.set_ylabel(ylabel)
    ax.spines["left"].set_visible(True)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _paper(ax: Axes, values: Mapping[str, Any], *, y: float, colour: str) -> None:
    """The paper's depths: points as open markers, a range as an open box."""
    points = {name: value for name, value in values.items() if not isinstance(value, list)}
    for lane, (value, marker) in enumerate(zip(points.values(), MARKERS, strict=False)):
        (mark,) = ax.plot(value, y - 0.06 + 0.1 * lane, marker, markersize=4.8, markeredgewidth=1, zorder=5)
        mark.set(markerfacecolor="white", markeredgecolor=colour)
    for value in values.values():
        if isinstance(value, list):
            box = Rectangle((value[0], y - 0.05), value[1] - value[0], 0.1, facecolor="white", edgecolor=colour)
            box.set(linewidth=1, zorder=5)
            ax.add_patch(box)


# --- data ---------------------------------------------------------------------------------------------------


def _columns(table: Table) -> list[list[Any]]:
    return [list(column) for column in zip(*table.rows, strict=True)]


def _share(layer: float, layers: int) -> float:
    """Layers run, of all: after layer 0 one has run."""
    return (layer + 1) / layers


def _words(one: Effect | None) -> str:
    if one is None or one.estimate is None:
        return (
            "at no layer" if one is not None and one.warning and "permutation null" in one.warning else "not reported"
        )
    if one.low is None or one.high is None:
        return f"{one.estimate:.3g}"
    return f"{one.estimate:.3g}  [{one.low:.3g}, {one.high:.3g}]"


def _handles() -> list[Artist]:
    made: list[Artist] = [
        Line2D([], [], color=colour, marker="o", markersize=5, linewidth=1.4, label=label)
        for label, colour in PLACES.values()
    ]
    made.append(
        Line2D([], [], color=style.GREY, linewidth=0.9, linestyle=":", label="permutation null, 95th percentile")
    )
    made += [
        Line2D([], [], color=colour, marker=marker, markersize=4, linewidth=1.4, label=label)
        for label, colour, marker in CURVES.values()
    ]
    made += [Line2D([], [], color=style.lighter(style.GREY), marker="o", markersize=4.5, label="all used pairs (e)")]
    models = [name for name, value in _published_models() if not isinstance(value, list)]
    for name, marker in zip(models, MARKERS, strict=False):
        line = Line2D([], [], linestyle="none", marker=marker, markersize=5, label=f"paper: {name}")
        line.set(markerfacecolor="white", markeredgecolor=style.INK)
        made.append(line)
    made += [
        Rectangle((0, 0), 1, 1, facecolor="white", edgecolor=style.INK, label=f"paper: {name}")
        for name, value in _published_models()
        if isinstance(value, list)
    ]
    return made


def _published_models() -> list[tuple[str, Any]]:
    return list(style.published().get("timing", {}).get("write_depth", {}).items())

"""Heads: how many of them read and write the decision, what the readers attend to, and which they are (figure 15a, f).

Everything is over the pairs that pass the gate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures import page, style
from figures.suffix import curve, levels, whiskers
from kvnotes import effects
from kvnotes.records import Effect, Instance, Record

PINK, ORANGE, SKY = "#CC79A7", "#E69F00", "#56B4E9"  # Okabe and Ito's
CURVES = {  # stem of the effects: label, colour, line, marker
    "read": ("read heads by direct attribution, chosen on other scenarios", style.BLUE, "-", "o"),
    "read_patched": ("the same, by their z alone", style.GREEN, "--", "v"),
    "read_in_sample": ("read heads, in-sample (as the paper's)", style.VERMILLION, ":", "^"),
    "read_random": ("random heads, same layers, at the decision", style.GREY, "-", "s"),
    "write": ("write heads at the best aggregator", PINK, "-", "o"),
    "write_all": ("write heads at all aggregators", ORANGE, "-", "o"),
    "write_all_slots": ("write heads at all downstream slots", SKY, "-", "o"),
}
RANDOM = {"write": PINK, "write_all": ORANGE, "write_all_slots": SKY}  # control at twelve heads
ATTENDED = {"aggregator": ("aggregators", style.BLUE), "action": ("action words", style.VERMILLION)}
KV_NAME = "KV heads"
ROWS = 14  # of panels d and e
LABELS = 6  # heads that panel b names
PAPER_MARKERS = ("D", "s", "^", "v")


def draw(records: Mapping[str, Record]) -> dict[str, Figure]:
    """A figure for each record, by its name; one a layout where it measured several."""
    return page.by_layout(records, _draw_one)


def _draw_one(record: Record, layout: str) -> Figure:
    found = {one.name: one for one in record.summary.effects if one.gated and one.layout == layout}
    heading = f"Which heads read and write the decision: {record.model.name}, {page.layout_name(layout)}"
    if "read_1" not in found or found["read_1"].estimate is None:
        return page.exclusions(record, heading=heading)
    rows = [one for one in record.instances if one.layout == layout and one.status == "included"]
    figure = Figure(figsize=(13.4, 9.8), dpi=style.DPI, layout="constrained")
    grid = figure.add_gridspec(2, 6, height_ratios=(1, 1.05))
    panel_numbers(figure.add_subplot(grid[0, :3]), found)
    first = figure.add_subplot(grid[0, 3:5])
    panel_attention(first, rows)
    panel_map(figure.add_subplot(grid[0, 5]), rows, "heads", title="z alone, by layer", letter="c")
    panel_named(figure.add_subplot(grid[1, :3]), record, layout, found)
    panel_writers(figure.add_subplot(grid[1, 3:5]), found)
    panel_map(figure.add_subplot(grid[1, 5]), rows, "kv_heads", title="KV head's cells", letter="f")
    return page.finish(figure, [record], heading=heading, lines=_lines(), handles=_handles(), columns=4)


def _lines() -> list[str]:
    """What the caption says beside the record's own."""
    return [
        "The target's z of some heads put into base, all that follows recomputed; at the decision, or downstream. Read "
        "heads are ranked by what their z adds to the margin directly (d: direct), write heads by gradient. "
        "Named heads (d, e) were chosen on the scenarios of the other fold. A head is layer.head; KV heads are not "
        "query heads. c, f: one head, or the downstream cells of one KV head in one layer.",
        f"Open markers: {style.published()['source']}; other models, in-sample, approximate, no interval given. Of the "
        "paper's attention only Llama's comes with the head's own recovery; the others stand at the bottom.",
    ]


# --- panels -------------------------------------------------------------------------------------------------


def panel_numbers(ax: Axes, found: Mapping[str, Effect]) -> None:
    """Recovery by the number of heads, read heads at the decision and write heads downstream (the paper's 15a)."""
    levels(ax, None)
    values = []
    for lane, (name, (_, colour, line, marker)) in enumerate(CURVES.items()):
        drawn = curve(found, name)
        x = [k + 0.09 * (lane - 3) for k in drawn]
        y = [float(one.estimate or 0.0) for one in drawn.values()]
        values += y
        ax.plot(x, y, line, color=colour, marker=marker, markersize=4.5, linewidth=1.3, zorder=4)
        whiskers(ax, x, [(one.low, one.high) for one in drawn.values()], colour=colour)
    for lane, (name, colour) in enumerate(RANDOM.items()):
        for k, one in curve(found, f"{name}_random").items():
            at = k + 0.45 + 0.15 * lane
            ax.plot(at, float(one.estimate or 0.0), "s", color=colour, markersize=4, zorder=4)
            whiskers(ax, [at], [(one.low, one.high)], colour=colour)
    _papers_numbers(ax)
    ax.set_xticks([1, 3, 5, 8, 12])
    ax.set_ylim(min([-0.15, *(value - 0.08 for value in values)]), max([1.12, *(value + 0.08 for value in values)]))
    ax.set_xlabel("heads patched together, k")
    ax.set_ylabel("recovery R")
    style.panel_title(ax, "a", "by number of heads, best first")


def _papers_numbers(ax: Axes) -> None:
    """The paper's read heads of one model by k, of all four at 12, and its write heads at one aggregator."""
    paper = style.published()["heads"]
    for values in paper["read"].values():
        (line,) = ax.plot(
            paper["ks"], values, ":", color=style.INK, marker="D", markersize=4.5, linewidth=0.9, zorder=5
        )
        line.set_markerfacecolor("white")
    for which, colour in (("read_12", style.INK), ("write", PINK)):
        for (model, value), marker in zip(paper[which].items(), PAPER_MARKERS, strict=True):
            (mark,) = ax.plot(13.1 + (which == "write") * 0.35, value, marker, markersize=4.6, zorder=5, label=model)
            mark.set(markerfacecolor="white", markeredgecolor=colour)


def _labelled_left(at: int, named: Sequence[int], x: np.ndarray, y: np.ndarray) -> bool:
    """Whether a point lies left of the named one that is nearest in height: their labels go to opposite sides, but
    for a point beside the axis, which has no room on its left."""
    others = [other for other in named if other != at]
    room = x[at] > 0.1 * x.max()
    return bool(others) and bool(room and x[at] < x[min(others, key=lambda other: abs(y[other] - y[at]))])


def panel_attention(ax: Axes, rows: Sequence[Instance]) -> None:
    """Each head's attention from the decision against what its z alone moves (the paper's 15f)."""
    alone = _mean_recovery(rows, [one.measures["alone"] for one in rows])
    to = {name: _mean_attention(rows, name) for name in ATTENDED}
    for name, (_, colour) in ATTENDED.items():
        ax.plot(to[name], alone, "o", color=colour, markersize=3.4, alpha=0.55, markeredgewidth=0, zorder=3)
    most = np.max(np.stack(list(to.values())), axis=0)
    per_layer = rows[0].measures["per_layer"]["heads"]
    named = [at for at in np.argsort(-alone)[:LABELS] if alone[at] > 0.1 * alone.max()]
    for at in named:
        words = f"{at // per_layer}.{at % per_layer}"
        side, offset = ("right", -4) if _labelled_left(at, named, most, alone) else ("left", 4)
        place = (most[at], alone[at])
        ax.annotate(words, place, (offset, 1), textcoords="offset points", ha=side, fontsize=7)
    ax.axhline(0, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    paper = style.published()["heads"]
    for (model, one), marker in zip(paper["strongest"].items(), PAPER_MARKERS, strict=True):
        known = paper["read"].get(model)
        y = known[0] if known else 0.03
        (mark,) = ax.plot(
            one["attention"],
            y,
            marker,
            markersize=5,
            zorder=5,
            transform=ax.transData if known else ax.get_xaxis_transform(),
        )
        mark.set(markerfacecolor="white", markeredgecolor=style.INK)
    ax.set_xlabel("attention from the decision")
    ax.set_ylabel("recovery R, z alone")
    style.panel_title(ax, "b", "what each head attends to and moves")


def panel_map(ax: Axes, rows: Sequence[Instance], kind: str, *, title: str, letter: str) -> None:
    """Recovery of single heads' z at the decision, or of single KV heads' cells downstream, layer by head."""
    key = "alone" if kind == "heads" else "kv"
    values = _mean_recovery(rows, [one.measures[key] for one in rows]).reshape(-1, rows[0].measures["per_layer"][kind])
    bound = max(0.05, float(np.abs(values).max()))
    image = ax.imshow(
        values, aspect="auto", cmap="RdBu", vmin=-bound, vmax=bound, interpolation="nearest", origin="lower"
    )
    ax.set_xlabel("head" if kind == "heads" else "KV head")
    ax.set_ylabel("layer")
    step = math.ceil(values.shape[1] / 8)
    ax.set_xticks(range(0, values.shape[1], step))
    bar = ax.figure.colorbar(image, ax=ax, pad=0.03, aspect=30)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    style.panel_title(ax, letter, title)


def panel_named(ax: Axes, record: Record, layout: str, found: Mapping[str, Effect]) -> None:
    """The named read heads: what each moves alone, what it adds directly, and what it attends to most."""
    names = _strongest(found, "head")
    table = page.table(record, "read heads", layout)
    at = table.columns.index("direct R")
    direct = {str(row[0]): cast("float", row[at]) for row in table.rows}
    attended = page.table(record, "attention of the read heads", layout)
    shares = {str(row[0]): dict(zip(attended.columns[2:], row[2:], strict=True)) for row in attended.rows}
    for y, name in enumerate(names):
        _lane(ax, y, found[f"head_{name}"], colour=style.BLUE, marker="o")
        if name in direct:
            ax.plot(direct[name], y + 0.22, "|", color=style.VERMILLION, markersize=8, markeredgewidth=1.6, zorder=4)
        words = ", ".join(
            f"{key.replace('_', ' ')} {style.number(value)}" for key, value in _most(shares.get(name, {}))
        )
        ax.text(1.02, y, words, transform=ax.get_yaxis_transform(), va="center", fontsize=7)
    _named_rows(ax, names, note="attends to")
    style.panel_title(ax, "d", "named read heads, each alone")


def panel_writers(ax: Axes, found: Mapping[str, Effect]) -> None:
    """The named write heads at all aggregators, and at the best one; the mean of random heads."""
    names = _strongest(found, "write_all_head")
    for y, name in enumerate(names):
        _lane(ax, y - 0.13, found[f"write_all_head_{name}"], colour=ORANGE, marker="o")
        if f"write_head_{name}" in found:
            _lane(ax, y + 0.17, found[f"write_head_{name}"], colour=PINK, marker="o")
    random = {place: found[f"{place}_random_1"] for place in ("write_all", "write")}
    for shift, colour, one in zip((-0.13, 0.17), (ORANGE, PINK), random.values(), strict=True):
        _lane(ax, len(names) + shift, one, colour=colour, marker="s")
    known = any(one.estimate is not None for one in random.values())
    _named_rows(ax, [*names, *(["random"] if known else [])])
    style.panel_title(ax, "e", "named write heads, each alone")


def _strongest(found: Mapping[str, Effect], prefix: str) -> list[str]:
    """The named heads of a kind that have an estimate, the strongest first."""
    known = {
        name.removeprefix(f"{prefix}_"): one.estimate
        for name, one in found.items()
        if name.startswith(f"{prefix}_") and one.estimate is not None
    }
    return sorted(known, key=lambda name: -known[name])[:ROWS]


def _lane(ax: Axes, y: float, one: Effect, *, colour: str, marker: str) -> None:
    """An effect in a row; its marker is hollow where the corrected test does not tell it from 0."""
    if one.estimate is None:
        return
    if one.low is not None and one.high is not None:
        ax.plot([one.low, one.high], [y, y], color=style.lighter(colour, 0.35), linewidth=1.5, zorder=3)
    (mark,) = ax.plot(one.estimate, y, marker, color=colour, markersize=5, zorder=4)
    if marker == "o" and (one.test is None or one.test.conclusion != "different"):
        mark.set_markerfacecolor("white")


def _most(shares: Mapping[str, Any], n: int = 3) -> list[tuple[str, float]]:
    """The classes with the largest shares."""
    return sorted(((key, float(value)) for key, value in shares.items()), key=lambda pair: -pair[1])[:n]


def _named_rows(ax: Axes, names: Sequence[str], note: str = "") -> None:
    for y in range(0, len(names), 2):
        ax.axhspan(y - 0.5, y + 0.5, color=style.BAND, zorder=0, linewidth=0)
    ax.axvline(0, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlabel("recovery R")
    if note:
        ax.text(1.02, 1.01, note, transform=ax.transAxes, fontsize=7.5, color=style.GREY)


def _mean_attention(rows: Sequence[Instance], name: str) -> np.ndarray:
    return np.mean(np.array([one.measures["attention"]["heads"][name] for one in rows]), axis=0)


def _mean_recovery(rows: Sequence[Instance], margins: Sequence[Sequence[float]]) -> np.ndarray:
    """The ratio of sums over pairs, a number a head."""
    moved = [[effects.moved(one, margin) for margin in own] for one, own in zip(rows, margins, strict=True)]
    return np.sum(moved, axis=0) / sum(effects.gap(one) for one in rows)


def _handles() -> list[Artist]:
    made: list[Any] = [
        Line2D([], [], color=colour, linestyle=cast("Any", line), marker=marker, markersize=4.5, label=f"a: {label}")
        for label, colour, line, marker in CURVES.values()
    ]
    made.append(_mark("a: 12 random write heads, same place and layers; e: one", "s", ORANGE))
    for model, marker in zip(style.published()["heads"]["read_12"], PAPER_MARKERS, strict=True):
        line = _mark(f"a, b: the paper's {model}", marker, style.INK)
        line.set_markerfacecolor("white")
        made.append(line)
    pink = _mark("a: the paper's write heads, one aggregator", "D", PINK)
    pink.set_markerfacecolor("white")
    made.append(pink)
    made += [_mark(f"b: attention to {label}", "o", colour) for label, colour in ATTENDED.values()]
    made.append(_mark("d: z alone; hollow: p > 0.05 (BH)", "o", style.BLUE))
    made.append(_mark("d: added to the margin directly", "|", style.VERMILLION))
    made.append(_mark("e: at all aggregators", "o", ORANGE))
    made.append(_mark("e: at the best aggregator", "o", PINK))
    return made


def _mark(label: str, marker: str, colour: str) -> Line2D:
    return Line2D([], [], linestyle="none", color=colour, marker=marker, markersize=5, label=label)

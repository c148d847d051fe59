"""SAE features: recovery by number of features clamped (a; the paper's figure 15e), which read the conclusion, against
permuted labels (b), and how good the dictionary is (c)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures import forest, page, style
from kvnotes.features import failed, silent
from kvnotes.records import Effect, Record

Effects = Mapping[tuple[str, bool], Effect]

COUNTS = ("1", "3", "10", "30")
SITES = {"": "best aggregator", "_any_slot": "best slot of any kind"}
LINES = {  # family -> label, colour, marker, line
    "clamp": ("best, clamped to the mean", style.BLUE, "o", "-"),
    "own": ("best, at the target's own values", style.GREEN, "^", "--"),
    "random": ("random, as often active (control)", style.GREY, "s", ":"),
    "ablate": ("lost when ablated in the target", style.VERMILLION, "v", "-"),
    "clamp_in_sample": ("best, in-sample, clamped", style.lighter(style.BLUE, 0.4), "x", "--"),
}
WHOLE = {"full": ("whole residual", style.INK), "features": ("all features", style.GREEN)}
CHOSEN = "best feature of the other fold, held-out"
READINGS = {
    CHOSEN: "best of the other\nfold, held-out",
    "largest of all features, held-out": "largest of all,\nheld-out",
    "largest of all features, in-sample": "largest of all,\nin-sample",
}
FVU = {
    "fvu": "usual tokens",
    "fvu of prompts": "usual tokens\nof prompts",
    "fvu of the corpus": "usual tokens\nof the corpus",
    "fvu with massive tokens": "with massive-norm\ntokens",
    "fvu with first and massive tokens": "with first tokens too",
}
DEAD, SILENT = "dead features", "features silent on\nheld-out text"
SMALL = 1e-4  # where the logarithmic axis begins


def draw(records: Mapping[str, Record]) -> dict[str, Figure]:
    """A figure for each record, by its name: a line of panels a layout."""
    return {name: _draw_one(record) for name, record in records.items()}


def _draw_one(record: Record) -> Figure:
    heading = f"SAE features and the decision: {record.model.name}, {page.layout_name(record.layout)}"
    quality = record.plan.get("equipment", {}).get("dictionary", {})
    if quality and failed(quality):
        heading += " \N{EM DASH} FAILED TRAINING"
    layouts = page.reported(record)
    if not layouts:
        return page.exclusions(record, heading=heading)
    figure = Figure(figsize=(17.5, 4.8 * len(layouts) + 0.5), dpi=style.DPI)
    grid = figure.subplots(len(layouts), 4, squeeze=False, width_ratios=(1.15, 1.15, 1, 0.75))
    for axes, layout in zip(grid, layouts, strict=True):
        effects = forest.by_name(record.summary.effects, layout)
        named = f"{page.layout_name(layout)}: " if len(layouts) > 1 else ""
        for ax, letter, suffix in zip(axes, "ab", SITES, strict=False):
            panel_clamps(ax, effects, suffix=suffix, letter=letter, title=f"{named}{SITES[suffix]}")
        panel_readings(axes[2], page.table(record, "reading a label", layout).rows, effects)
        panel_quality(axes[3], quality)
    return page.finish(figure, [record], heading=heading, lines=_lines(quality), handles=_handles(), columns=5)


def _lines(quality: Mapping[str, Any]) -> list[str]:
    """What the caption says beside the record's own."""
    told = "trained here"
    if quality and not quality["trained here"]:
        told = f"loaded ({silent(quality)})"
    return [
        f"A TopK SAE, {told}: {quality.get('features')} features, {quality.get('k')} active a token, on the residual "
        f"after layer {quality.get('layer')}. A third of the scenarios chose its layer and are among its text; none of "
        "these is evaluated. Features are ranked by AUC on one fold of the others and clamped on the other.",
        f"Open markers: {style.published()['source']}; Llama-3.1-8B, approximate values, no interval given; its AUC "
        "and choice are in-sample, and which tokens its FVU is over is not said.",
    ]


# --- panels -------------------------------------------------------------------------------------------------


def panel_clamps(ax: Axes, effects: Effects, *, suffix: str, letter: str, title: str) -> None:
    """Recovery by number of features; the whole residual and all its features as lines across."""
    paper, shown = style.published()["sae"], [0.0, 1.0]
    for x in (0.0, 1.0):
        ax.axhline(x, color=style.PALE, linewidth=0.8, zorder=0)
    for name, (_, colour) in WHOLE.items():
        one = effects.get((f"{name}{suffix}", True))
        if one is not None and one.estimate is not None:
            ax.axhline(one.estimate, color=colour, linewidth=1.2, linestyle=(0, (6, 3)), zorder=2)
            shown.append(one.estimate)
    for at, (family, (_, colour, marker, line)) in enumerate(LINES.items()):
        found = [(x, effects.get((f"{family}_{k}{suffix}", True))) for x, k in enumerate(COUNTS)]
        known = [(x + 0.07 * (at - 2), one) for x, one in found if one is not None and one.estimate is not None]
        ax.plot([x for x, _ in known], [one.estimate for _, one in known], line, color=colour, marker=marker, zorder=4)  # pyright: ignore[reportArgumentType]
        for x, one in known:
            if one.low is not None and one.high is not None:
                ax.plot([x, x], [one.low, one.high], color=colour, linewidth=1.2, zorder=3)  # pyright: ignore[reportArgumentType]
            shown += [value for value in (one.estimate, one.low, one.high) if value is not None]
    for x, k in enumerate(COUNTS):
        for value, colour in ((paper[f"clamp_{k}"], style.BLUE), (paper["random"], style.GREY)):
            for y in value["points"].values():
                ax.plot(x + 0.3, y, "D", markersize=5, markerfacecolor="white", markeredgecolor=colour, zorder=5)
    ((low, high),) = paper["ablate"]["ranges"].values()
    ax.plot([3.38, 3.38], [low, high], color=style.VERMILLION, linewidth=4, alpha=0.5, zorder=5)
    ax.set_xticks(range(len(COUNTS)), COUNTS)
    ax.set_xlim(-0.4, len(COUNTS) - 0.4)
    margin = 0.05 * (min(max(shown), 2.0) - max(min(shown), -1.0))
    ax.set_ylim(max(min(shown), -1.0) - margin, min(max(shown), 2.0) + margin)
    ax.set_xlabel("features")
    ax.set_ylabel("recovery R, or drop")
    style.panel_title(ax, letter, title)


def panel_readings(ax: Axes, rows: Sequence[Sequence[Any]], effects: Effects) -> None:
    """AUCs for the conclusion, each over the range of its null from the mean to what one permutation in 20 exceeds; an
    interval by scenario where the feature was chosen on others."""
    shown = [row for row in rows if row[1] == "conclusion" and row[2] in READINGS]
    for y, (site, _, reading, value, mean, bound, p, *_) in enumerate(shown):
        colour = style.BLUE if site == "aggregator" else style.GREEN
        ax.plot([mean, bound], [y, y], color=style.PALE, linewidth=7, solid_capstyle="butt", zorder=2)
        ax.plot(value, y, "o", color=colour, markersize=6.5, zorder=4)
        one = effects.get((f"auc{'' if site == 'aggregator' else '_any_slot'}", True))
        if reading == CHOSEN and one is not None and one.low is not None and one.high is not None:
            ax.plot([one.low, one.high], [y, y], color=colour, linewidth=1.6, zorder=3)
        ax.text(1.02, y, f"{value:.2f}  p {p:.3f}", transform=ax.get_yaxis_transform(), va="center", fontsize=8)
    labels = [f"{READINGS[row[2]]},\n{row[0]}" for row in shown]
    page.rows(ax, labels, depth=max(1, len(shown)), limits=(0.1, 1.03))
    ax.axvline(0.5, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    (paper,) = style.published()["sae"]["auc"]["points"].values()
    for y, row in enumerate(shown):
        if row[2].endswith("in-sample"):
            ax.plot(paper, y + 0.25, "D", markersize=5, markerfacecolor="white", markeredgecolor=style.BLUE, zorder=5)
    ax.set_xlabel("AUC for the conclusion (bar: permuted labels, mean to .95)")
    style.panel_title(ax, "c", "which features read it")


def panel_quality(ax: Axes, quality: Mapping[str, Any]) -> None:
    """Held-out FVU over kinds of tokens, and the share of dead features; of a given dictionary, which may know other
    text, of those that this text does not need."""
    known = {label: quality[name] for name, label in FVU.items() if quality.get(name) is not None}
    known[DEAD if quality.get("trained here") else SILENT] = quality.get("dead", 0.0)
    for y, (label, value) in enumerate(known.items()):
        share = label in {DEAD, SILENT}
        colour, bad = style.GREY if share else style.BLUE, share and bool(quality) and failed(quality)
        ax.barh(y, max(value, SMALL), left=0, height=0.55, color=style.VERMILLION if bad else colour, zorder=3)
        ax.text(1.02, y, f"{value:.3f}", transform=ax.get_yaxis_transform(), va="center", fontsize=8)
    page.rows(ax, list(known), depth=len(known), limits=(SMALL, 1.2))
    ax.set_xscale("log")
    ax.set_xticks([0.001, 0.01, 0.1, 1.0], ["0.001", "0.01", "0.1", "1"])
    ax.minorticks_off()
    (paper,) = style.published()["sae"]["fvu"]["points"].values()
    ax.axvline(paper, color=style.INK, linewidth=0.8, linestyle=":", zorder=4)
    ax.plot(paper, -0.4, "D", markersize=5, markerfacecolor="white", markeredgecolor=style.INK, zorder=5)
    ax.set_xlabel("share (log)")
    style.panel_title(ax, "d", textwrap.fill("unexplained variance, dead", 30))


def _handles() -> list[Artist]:
    made: list[Artist] = [
        Line2D([], [], color=colour, marker=marker, linestyle=line, label=label)  # pyright: ignore[reportArgumentType]
        for label, colour, marker, line in LINES.values()
    ]
    made += [
        Line2D([], [], color=c, linestyle=(0, (6, 3)), label=f"{label} of the target") for label, c in WHOLE.values()
    ]
    paper = Line2D([], [], linestyle="none", marker="D", markersize=5, label="paper: Llama-3.1-8B")
    paper.set(markerfacecolor="white", markeredgecolor=style.INK)
    necessity = Line2D([], [], color=style.VERMILLION, linewidth=4, alpha=0.5, label="paper: lost when ablated")
    return [*made, paper, necessity]

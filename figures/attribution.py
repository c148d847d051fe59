"""Attribution: attention's share of what is written at the site, over depth and by causes; the paper's figure 15c."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from figures import forest, page, style
from figures.forest import Row
from kvnotes.conclusion import KINDS
from kvnotes.records import Record, Table

WRITERS = {"attention": ("attention", style.BLUE), "MLPs": ("MLPs", style.VERMILLION)}
AXIS = "the shared direction"
SHARES = {
    "attention": "along permit\nless restrict",
    "attention_shared": "along the\nshared direction",
    "attention_own": "along the pair's\nown difference",
    "attention_norm": "by norm, up to\nthe causal layer",
    "attention_layer_norm": "by norm, the\ncausal layer alone",
}
PATCHED = {
    "full": ("full residual patch", style.INK),
    "attention_patched": ("attention's part alone", style.BLUE),
    "mlp_patched": ("MLPs' part alone", style.VERMILLION),
    "attention_live": ("attention's outputs alone,\nMLPs recomputed", style.BLUE),
    "mlp_live": ("MLPs' outputs alone,\nattention recomputed", style.VERMILLION),
    "random_attention": ("random, as large as\nattention's (control)", style.GREY),
    "random_mlp": ("random, as large as\nthe MLPs' (control)", style.GREY),
}
JOINT = {
    "full_all_patched": ("all aggregators, full", style.INK),
    "attention_all_patched": ("all aggregators, attention's", style.BLUE),
    "mlp_all_patched": ("all aggregators, MLPs'", style.VERMILLION),
}


def draw(records: Mapping[str, Record]) -> dict[str, Figure]:
    """A figure for each record, by its name; one a layout where it measured several."""
    return page.by_layout(records, _draw_one)


def _draw_one(record: Record, layout: str) -> Figure:
    heading = f"Who writes the conclusion: {record.model.name}, {page.layout_name(layout)}"
    if layout not in page.reported(record):
        return page.exclusions(record, heading=heading)
    found = forest.by_name(record.summary.effects, layout)
    figure = Figure(figsize=(14.5, 13.0), dpi=style.DPI, layout="constrained")
    axes = figure.subplots(3, 2, height_ratios=(1.15, 0.9, 1.5))
    for at, (kind, where) in enumerate(KINDS.items()):
        share, depth, patched = axes[:, at]
        shares = share_rows(kind)
        forest.panel(share, shares, found, markers={}, xlabel="attention's share")
        name_ranges(share, shares)
        style.panel_title(share, "ab"[at], f"{where}: attention's share at the causal layer")
        panel_depth(depth, page.table(record, f"by layer along {AXIS}, {where}", layout))
        style.panel_title(depth, "cd"[at], f"{where}: along {AXIS} at the causal layer")
        forest.panel(patched, patch_rows(kind), found, markers={})
        style.panel_title(patched, "ef"[at], f"{where}: one writer's parts patched")
    return page.finish(figure, [record], heading=heading, lines=_lines(), handles=_handles(), columns=4)


def suffix(kind: str) -> str:
    """How the names of a site's effects end."""
    return "" if kind == "aggregator" else f"_{kind}"


def share_rows(kind: str) -> list[Row]:
    """The rows of attention's shares; the paper does not say which it means, so its values stand at the first."""
    paper = style.published()["attribution"]["attention"]["ranges"] if kind == "aggregator" else {}
    ranges = {group: (low, high) for group, (low, high) in paper.items()}
    made = [
        Row(effect=f"{name}{suffix(kind)}", label=label, ranges=ranges if name == "attention" else {})
        for name, label in SHARES.items()
    ]
    joint = [Row(effect="attention_all", label="all aggregators, along\ntheir own difference")]
    return [*made, *joint] if kind == "aggregator" else made


def name_ranges(ax: Axes, rows: Sequence[Row]) -> None:
    """The paper's models beside their ranges, which look alike."""
    for y, row in enumerate(rows):
        for index, (group, (low, high)) in enumerate(row.ranges.items()):
            at, side = (high + 0.01, "left") if index % 2 else (low - 0.01, "right")  # the next one has the other side
            ax.text(at, y + 0.17 + 0.09 * index, group, fontsize=6, ha=side, va="center", zorder=7)


def patch_rows(kind: str) -> list[Row]:
    """The rows of what one writer's parts recover."""
    rows = {f"{name}{suffix(kind)}": row for name, row in PATCHED.items()}
    rows |= JOINT if kind == "aggregator" else {}
    return [Row(effect=name, label=label, colour=colour) for name, (label, colour) in rows.items()]


def panel_depth(ax: Axes, table: Table) -> None:
    """Each layer's parts as shares of the whole component at the causal layer (bars), and summed so far (lines)."""
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    layers = [int(row["layer"]) for row in rows]  # pyright: ignore[reportArgumentType]
    for side, (name, (_, colour)) in zip((-0.2, 0.2), WRITERS.items(), strict=True):
        ax.bar([x + side for x in layers], [row[name] for row in rows], width=0.4, color=style.lighter(colour, 0.45))  # pyright: ignore[reportArgumentType]
        ax.plot(layers, [row[f"{name} so far"] for row in rows], color=colour, linewidth=1.5)  # pyright: ignore[reportArgumentType]
    for y in (0, 1):
        ax.axhline(y, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    if not rows:
        ax.text(0.5, 0.5, "nothing is written here", transform=ax.transAxes, ha="center", color=style.GREY)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("layer")
    ax.set_ylabel("share of the component")


def _lines() -> Sequence[str]:
    return [
        "The residual's (target - base) at the site is the sum of what each layer's attention and MLP add. Site and "
        "layer chosen on the scenarios of the other fold; a direction is a difference of means over all other "
        "scenarios: the paper's permit less restrict; shared: of three codes the longest on the other fold (see the "
        "direction study). Parts alone: added to base's residual at the causal layer, all after it recomputed; outputs "
        "alone: the target's at every layer up to it. Random vectors are as large as a writer's part.",
        f"Boxes in a: {style.published()['source']}; other models, approximate, no interval given; it does not say how "
        "its share is taken.",
    ]


def _handles() -> list[Artist]:
    made = forest.handles([])
    made.append(Patch(facecolor="white", edgecolor=style.INK, label="a: the paper's models"))
    for label, colour in WRITERS.values():
        made.append(Patch(color=style.lighter(colour, 0.45), label=f"c, d: {label}, this layer"))
        made.append(Line2D([], [], color=colour, linewidth=1.5, label=f"c, d: {label}, all layers so far"))
    return made

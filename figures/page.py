"""The page around a study's panels: heading, footer, what became of the pairs where nothing can be drawn, names."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import style
from kvnotes import effects
from kvnotes.records import Effect, Record, Table

FORMS = {
    "table": "routing table",
    "prose": "prose rules",
    "code": "Python code",
    "paper": "paper's prompt",
    "two_hop": "two-hop",
}


def by_layout(records: Mapping[str, Record], draw: Callable[[Record, str], Figure]) -> dict[str, Figure]:
    """A figure for each record, by its name; one a layout where it measured several."""
    drawn: dict[str, Figure] = {}
    for name, record in records.items():
        layouts = effects.layouts(record.instances) or [record.layout]
        for layout in layouts:
            drawn[name if len(layouts) == 1 else f"{name}-{layout}"] = draw(record, layout)
    return drawn


def reported(record: Record) -> list[str]:
    """The layouts for which enough pairs passed the gate, in the order of the instances."""
    found = {one.layout for one in record.summary.effects if one.gated and one.estimate is not None}
    return [layout for layout in effects.layouts(record.instances) if layout in found]


def table(record: Record, name: str, layout: str) -> Table:
    """A layout's table: its name says the layout where the record measured several."""
    several = len(effects.layouts(record.instances)) > 1
    return record.summary.tables[f"{name}, {layout}" if several else name]


def finish(
    figure: Figure,
    records: Sequence[Record],
    *,
    heading: str,
    lines: Sequence[str] = (),
    handles: Sequence[Artist] = (),
    columns: int = 1,
) -> Figure:
    """The heading above the panels; the legend, each record's caption and further lines under them."""
    head(figure, heading)
    captions = [style.caption(record) for record in records]
    style.add_footer(figure, handles=handles, columns=columns, lines=[*captions, *lines])
    return figure


def head(figure: Figure, heading: str) -> None:
    """The heading above the panels."""
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11.5, fontweight="bold")


def designs(found: Mapping[tuple[str, bool], Effect], effect: str) -> str:
    """What the caption says of an effect that only whole 2x2 designs have, which are fewer than the included pairs."""
    one = found.get((effect, True))
    return "" if one is None else f"Probes: the {one.n} included pairs of whole 2x2 designs, {one.clusters} scenarios. "


def exclusions(record: Record, *, heading: str) -> Figure:
    """What became of the pairs, where too few passed the gate and there is no recovery to draw."""
    figure = Figure(figsize=(9.0, 1.6 + 0.36 * len(record.inclusion.excluded)), dpi=style.DPI)
    panel_exclusions(figure.subplots(), record)
    return finish(figure, [record], heading=heading)


def notice(heading: str, reason: str) -> Figure:
    """A figure in place of one that cannot be drawn: why, and what to do."""
    text = textwrap.fill(reason, 100)
    figure = Figure(figsize=(9.0, 1.2 + 0.18 * text.count("\n")), dpi=style.DPI)
    head(figure, heading)
    figure.text(0.02, 0.55, text, va="center", color=style.VERMILLION)
    return figure


def panel_exclusions(ax: Axes, record: Record) -> None:
    """Counts of pairs by what became of them; says that there is no recovery to report."""
    counts = record.inclusion
    bars = {"included": counts.included, **counts.excluded}
    for y, count in enumerate(bars.values()):
        ax.barh(y, count, height=0.6, color=style.BLUE if y == 0 else style.PALE)
        ax.annotate(str(count), (count, y), (5, 0), textcoords="offset points", va="center")
    rows(
        ax,
        [textwrap.fill(reason, 44) for reason in bars],
        depth=len(bars),
        limits=(0, max(1, counts.generated) * 1.04),
    )
    ax.set_xlabel("pairs")
    ax.set_title(
        f"No recovery to report: {counts.included or 'none'} of {counts.used} used pairs passes the competence gate "
        f"({counts.generated} generated)"
    )


def rows(ax: Axes, labels: Sequence[str], *, depth: int, limits: tuple[float, float]) -> None:
    """Name the rows from the top down, with a band behind every other one."""
    for y in range(0, len(labels), 2):
        ax.axhspan(y - 0.5, y + 0.5, color=style.BAND, zorder=0, linewidth=0)
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(depth - 0.5, -0.5)
    ax.set_xlim(*limits)


def layout_name(layout: str) -> str:
    """A layout's name in words, such as "routing table, field first"."""
    for order in ("field_first", "rules_first"):
        if layout.endswith(f"_{order}"):
            return f"{form(layout)}, {order.replace('_', ' ')}"
    return "all layouts" if layout == "all" else form(layout)


def form(layout: str) -> str:
    """A layout's form in words, without its order."""
    stem = layout.removesuffix("_field_first").removesuffix("_rules_first")
    return FORMS.get(stem, stem.replace("_", " "))

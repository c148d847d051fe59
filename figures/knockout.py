"""Knockout: dose curves of removed notes against random positions (a), by depth (b), areas and flips back (c)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.typing import ColorType

from figures import forest, page, style
from figures.forest import Row
from kvnotes.records import Effect, Record

Effects = Mapping[tuple[str, bool], Effect]
Line = Literal["-", "--", ":"]

WAYS = {"resample": style.BLUE, "mean": style.GREEN, "block": style.VERMILLION}
LABELS = {"resample": "the base's cells", "mean": "the class mean", "block": "attention blocked"}
DOSES = ("1", "2", "4", "8", "16", "32", "all")
DROP = "drop  (0: like target, 1: like base)"
_WIDEST = (-0.6, 2.0)  # an interval that goes on beyond the axis is cut at its edge; an estimate is an arrow there


def draw(records: Mapping[str, Record]) -> dict[str, Figure]:
    """A figure for each record, by its name: a line of panels a layout."""
    return {name: _draw_one(record) for name, record in records.items()}


def _draw_one(record: Record) -> Figure:
    heading = f"Notes removed from the target run: {record.model.name}, {page.layout_name(record.layout)}"
    layouts = page.reported(record)
    if not layouts:
        return page.exclusions(record, heading=heading)
    figure = Figure(figsize=(15.5, 4.6 * len(layouts) + 0.4), dpi=style.DPI)
    grid = figure.subplots(len(layouts), 3, squeeze=False, width_ratios=(1.25, 1, 1))
    for (left, middle, right), layout in zip(grid, layouts, strict=True):
        effects = forest.by_name(record.summary.effects, layout)
        title = f"{page.layout_name(layout)}: dose response" if len(layouts) > 1 else "dose response"
        panel_doses(left, effects, title=title)
        panel_depths(middle, effects, layers=record.model.layers)
        panel_areas(right, effects)
    return page.finish(figure, [record], heading=heading, lines=_lines(), handles=_handles(), columns=9)


def _lines() -> list[str]:
    """What the caption says beside the record's own."""
    return [
        "Slots are ranked on one fold of the scenarios and removed on the other; in-sample: by each pair's own. "
        "A class mean and blocking leave no conclusion in a note's place: a drop of 0.5 is undecided.",
        "The paper (section 3, 4) says that the decision flips back and that the effect grows with the number of "
        "positions; it gives no numbers to draw.",
    ]


# --- panels -------------------------------------------------------------------------------------------------


def panel_doses(ax: Axes, effects: Effects, *, title: str) -> None:
    """Drop against the number of positions removed, by way, with random positions and the in-sample ranking."""
    for shift, (way, colour) in enumerate(WAYS.items()):
        _curve(ax, effects, [f"{way}_{dose}" for dose in DOSES], colour=colour, shift=0.07 * (shift - 1))
        names = [f"random_{way}_{dose}" for dose in DOSES]
        _curve(ax, effects, names, colour=style.lighter(colour, 0.45), shift=0.07 * (shift - 1), marker="s", line=":")
    _curve(ax, effects, [f"own_{dose}" for dose in DOSES], colour=style.GREY, shift=0.18, marker="x", line="--")
    ax.set_xticks(range(len(DOSES)), DOSES)
    ax.set_xlabel("positions removed")
    _drop_axis(ax, [f"{kind}{way}_{dose}" for kind in ("", "random_") for way in WAYS for dose in DOSES], effects)
    style.panel_title(ax, "a", title)


def panel_depths(ax: Axes, effects: Effects, *, layers: int) -> None:
    """Drop where only the cells from a layer on, or only those below it, are the base's."""
    names = []
    lines: dict[str, Line] = {"all": "-", "8": "--"}
    for dose, line in lines.items():
        for direction, colour in (("from", style.BLUE), ("up_to", style.VERMILLION)):
            cuts = _cuts(effects, direction, dose)
            ends = {"from": {0: f"resample_{dose}"}, "up_to": {layers: f"resample_{dose}"}}[direction]
            known = {**{cut: f"{direction}_{cut}_{dose}" for cut in cuts}, **ends}
            at = sorted(known)
            wanted = [known[cut] for cut in at]
            _curve(ax, effects, wanted, colour=colour, line=line, at=at, marker="o" if dose == "all" else "^")
            names += wanted
    ax.set_xlabel("layer of the cut")
    _drop_axis(ax, names, effects)
    style.panel_title(ax, "b", "by depth, base's cells")


def panel_areas(ax: Axes, effects: Effects) -> None:
    """Areas under the dose curves, those of random positions, and shares of decisions that flip back."""
    rows = []
    for way, colour in WAYS.items():
        rows.append(Row(effect=f"area_{way}", label=f"area, {LABELS[way]}", colour=colour))
        rows.append(Row(effect=f"random_area_{way}", label="at random (control)", colour=colour))
    rows += [
        Row(effect=f"flips_{way}_8", label=f"decides as base,\ntop 8: {LABELS[way]}", colour=colour)
        for way, colour in WAYS.items()
    ]
    forest.panel(ax, [row for row in rows if (row.effect, True) in effects], effects, markers={}, xlabel="area, share")
    style.panel_title(ax, "c", "area under the dose curve; flips back")


# --- marks --------------------------------------------------------------------------------------------------


def _cuts(effects: Effects, direction: str, dose: str) -> list[int]:
    """The layers at which a depth curve was read."""
    found = (name.removeprefix(f"{direction}_").removesuffix(f"_{dose}") for name, gated in effects if gated)
    return sorted({int(cut) for cut in found if cut.isdigit() and (f"{direction}_{cut}_{dose}", True) in effects})


def _curve(
    ax: Axes,
    effects: Effects,
    names: Sequence[str],
    *,
    colour: ColorType,
    line: Line = "-",
    marker: str = "o",
    shift: float = 0.0,
    at: Sequence[int] | None = None,
) -> None:
    """The gated estimates that there are, joined, each with its interval."""
    places = range(len(names)) if at is None else at
    found = [(x + shift, effects.get((name, True))) for x, name in zip(places, names, strict=True)]
    known = [(x, one) for x, one in found if one is not None and one.estimate is not None]
    for x, one in known:
        if one.low is not None and one.high is not None:
            low, high = max(one.low, _WIDEST[0]), min(one.high, _WIDEST[1])
            ax.plot([x, x], [low, high], color=colour, linewidth=1.3, solid_capstyle="butt", zorder=3)
    xs, ys = [x for x, _ in known], [min(max(one.estimate or 0.0, _WIDEST[0]), _WIDEST[1]) for _, one in known]
    ax.plot(xs, ys, line, color=colour, linewidth=1.1, marker=marker, markersize=4.5, zorder=4)
    for x, y, (_, one) in zip(xs, ys, known, strict=True):
        if one.estimate is not None and one.estimate != y:
            _off_the_axis(ax, x, y, one.estimate, colour=colour)


def _off_the_axis(ax: Axes, x: float, edge: float, value: float, *, colour: ColorType) -> None:
    """An arrow at the edge and the number beside it, the second of two at one place further down."""
    ax.plot(x, edge, "^" if value > edge else "v", color=colour, markersize=7, zorder=5)
    others = sum(text.get_position()[0] == 12 and abs(text.xy[0] - x) < 0.5 for text in ax.texts)  # pyright: ignore
    where = (12, -4 - 11 * others)
    ax.annotate(style.number(value), (x, edge), where, textcoords="offset points", color=colour, fontsize=8)


def _drop_axis(ax: Axes, names: Sequence[str], effects: Effects) -> None:
    shown = [one for name in names if (one := effects.get((name, True))) is not None]
    ends = [end for one in shown for end in (one.low, one.estimate, one.high) if end is not None]
    ax.set_ylim(max(_WIDEST[0], min([-0.1, *ends])) - 0.03, min(_WIDEST[1], max([1.1, *ends])) + 0.03)
    for y in (0, 1):
        ax.axhline(y, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    ax.set_ylabel(DROP)


def _handles() -> list[Artist]:
    def handle(label: str, colour: ColorType, marker: str, line: Line) -> Line2D:
        return Line2D([], [], color=colour, marker=marker, linestyle=line, markersize=4.5, linewidth=1.2, label=label)

    return [
        *(handle(LABELS[way], colour, "o", "-") for way, colour in WAYS.items()),
        handle("at random (control)", style.lighter(style.GREY, 0.3), "s", ":"),
        handle("base's cells, in-sample", style.GREY, "x", "--"),
        handle("b: from the layer on", style.BLUE, "", "-"),
        handle("b: below the layer", style.VERMILLION, "", "-"),
        handle("b: all notes", style.INK, "o", "-"),
        handle("b: top 8", style.INK, "^", "--"),
    ]

"""Rows of effects with their intervals, shared by figures: pairs that pass the gate filled, all used pairs lighter
under them, controls as squares, the paper's values as open markers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from figures import style
from kvnotes.records import Effect, HypothesisTest

RECOVERY = "recovery R  (0: like base, 1: like target)"
WIDEST = (-1.0, 2.0)  # an interval that goes on beyond the axis ends in an arrow
PAPER_MARKERS = ("D", "s", "^", "v", "P")


class Interval(Protocol):
    """What has an interval, or None at both ends."""

    @property
    def low(self) -> float | None: ...  # noqa: D102
    @property
    def high(self) -> float | None: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class Row:
    """One effect's row: its label, and the paper's values by model or, as (low, high), by group of models."""

    effect: str
    label: str
    colour: str = style.BLUE
    points: Mapping[str, float] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def by_name(effects: Sequence[Effect], layout: str) -> dict[tuple[str, bool], Effect]:
    """A layout's effects by name and gating."""
    return {(one.name, one.gated): one for one in effects if one.layout == layout}


def panel(
    ax: Axes,
    rows: Sequence[Row],
    effects: Mapping[tuple[str, bool], Effect],
    *,
    markers: Mapping[str, str],
    xlabel: str = RECOVERY,
    references: Sequence[float] = (0.0, 1.0),
) -> None:
    """Draw the rows from the top down; numbers of the gated estimates stand to the right."""
    limits = _limits(rows, effects)
    for x in references:
        ax.axvline(x, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    for y, row in enumerate(rows):
        if y % 2 == 0:
            ax.axhspan(y - 0.5, y + 0.5, color=style.BAND, zorder=0, linewidth=0)
        _row(ax, row, effects, y=y, limits=limits, markers=markers)
    ax.set_yticks(range(len(rows)), [row.label for row in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(*limits)
    ax.set_xlabel(xlabel)


def _row(
    ax: Axes,
    row: Row,
    effects: Mapping[tuple[str, bool], Effect],
    *,
    y: float,
    limits: tuple[float, float],
    markers: Mapping[str, str],
) -> None:
    for gated, lane, size in ((True, y - 0.24, 6.5), (False, y - 0.02, 4.5)):
        one = effects.get((row.effect, gated))
        words = "not measured" if one is None else _words(one)
        ink, points = (style.INK, 8.5) if gated else (style.GREY, 7.0)
        ax.text(1.02, lane, words, transform=ax.get_yaxis_transform(), va="center", color=ink, fontsize=points)
        if one is None or one.estimate is None:
            continue
        colour = row.colour if gated else style.lighter(row.colour)
        whisker(ax, lane, one, limits=limits, colour=colour)
        shown = min(max(one.estimate, limits[0]), limits[1])
        marker = "s" if one.control else "o"
        ax.plot(shown, lane, marker, color=colour, markersize=size, markeredgewidth=0, zorder=4, clip_on=False)
    for index, (model, value) in enumerate(row.points.items()):
        (mark,) = ax.plot(value, y + 0.14 + 0.09 * index, markers[model], markersize=4.6, markeredgewidth=1, zorder=6)
        mark.set(markerfacecolor="white", markeredgecolor=row.colour)
    for index, (low, high) in enumerate(row.ranges.values()):
        at = y + 0.17 + 0.09 * (len(row.points) + index)
        box = Rectangle((low, at - 0.05), max(high - low, 0.006), 0.1, facecolor="white", edgecolor=row.colour)
        box.set(linewidth=1, zorder=5)
        ax.add_patch(box)


def whisker(ax: Axes, y: float, one: Interval, *, limits: tuple[float, float], colour: object) -> None:
    """An effect's interval, where it has one; an end outside the axis is an arrow at its edge."""
    if one.low is None or one.high is None:
        return
    left, right = max(one.low, limits[0]), min(one.high, limits[1])
    ax.plot([left, right], [y, y], color=colour, linewidth=1.6, solid_capstyle="butt", zorder=3)  # pyright: ignore[reportArgumentType]
    for end, edge, marker in ((one.low, left, "<"), (one.high, right, ">")):
        if end != edge:
            ax.plot(edge, y, marker, color=colour, markersize=5, clip_on=False, zorder=3)  # pyright: ignore[reportArgumentType]


def numbers(one: Effect) -> str:
    """An estimate with its interval, in words where there is none."""
    if one.estimate is None:
        return "not reported"
    value = style.number(one.estimate)
    if one.low is None or one.high is None:
        return f"{value}  no interval"
    return f"{value}  [{style.number(one.low)}, {style.number(one.high)}]"


def _words(one: Effect) -> str:
    verdict = one.test.conclusion.split(":")[0] if one.test is not None else ""
    about = {"equivalent": "=", "different": "\N{NOT EQUAL TO}"}.get(verdict, "")
    return f"{numbers(one)}  {about} {_goal(one.test)}" if about and one.test is not None else numbers(one)


def _goal(test: HypothesisTest) -> str:
    """What a test holds the effect against: the value of an equivalence test, or what was drawn."""
    if test.margin is not None:
        return test.name.rsplit(" ", 1)[-1]  # "TOST about 0"
    return "0" if test.name.startswith("sign flips") else "random"


def _limits(rows: Sequence[Row], effects: Mapping[tuple[str, bool], Effect]) -> tuple[float, float]:
    """An axis that shows 0, 1, every estimate and its interval, to WIDEST or 0.5 from the estimate."""
    values = [-0.1, 1.1, *(value for row in rows for value in row.points.values())]
    for row in rows:
        for gated in (True, False):
            one = effects.get((row.effect, gated))
            if one is None or one.estimate is None:
                continue
            least, most = min(WIDEST[0], one.estimate - 0.5), max(WIDEST[1], one.estimate + 0.5)
            values += [min(max(end, least), most) for end in (one.estimate, one.low, one.high) if end is not None]
    margin = 0.03 * (max(values) - min(values))
    return min(values) - margin, max(values) + margin


def markers(rows: Sequence[Row]) -> dict[str, str]:
    """An open marker for each of the paper's models that the rows name."""
    models = dict.fromkeys(model for row in rows for model in row.points)
    return dict(zip(models, PAPER_MARKERS, strict=False))


def handles(rows: Sequence[Row]) -> list[Artist]:
    """The legend of a panel of rows."""
    made: list[Artist] = [
        _handle("pairs that pass the gate", marker="o", colour=style.GREY),
        _handle("all used pairs", marker="o", colour=style.lighter(style.GREY), size=4.5),
        _handle("control or identity", marker="s", colour=style.GREY),
    ]
    for model, marker in markers(rows).items():
        line = Line2D([], [], linestyle="none", marker=marker, markersize=5, label=f"paper: {model}")
        line.set(markerfacecolor="white", markeredgecolor=style.INK)
        made.append(line)
    for group in dict.fromkeys(group for row in rows for group in row.ranges):
        made.append(Patch(facecolor="white", edgecolor=style.INK, label=f"paper: {group}"))
    return made


def _handle(label: str, *, marker: str, colour: object, size: float = 6.5) -> Line2D:
    return Line2D([], [], color=colour, marker=marker, markersize=size, linewidth=1.6, label=label)  # pyright: ignore[reportArgumentType]

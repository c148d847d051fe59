"""Locality: how far each cache state moves the decision (3a) and where the decision is read from (3c).

One layout gets a row a cache state; several layouts, or several models, get a row each. What the gate lets
through is filled, all used pairs are lighter, and the paper's values are open markers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.typing import ColorType

from figures import page, style
from kvnotes.records import Effect, Inclusion, Record, count_inclusion

COLUMNS = ("field first", "rules first", "off the template")
STATES = {
    "field_only": "field-only",
    "notes_only": "notes-only",
    "full_downstream": "full-downstream\n(identity)",
}
COLOURS = {
    "field_only": style.VERMILLION,
    "notes_only": style.BLUE,
    "full_downstream": style.GREY,
    "field_share": style.VERMILLION,
}
PAPER_MARKERS = {"Llama-3.1-8B": "D", "Gemma-2-9B": "s", "Mistral-7B": "^"}
RECOVERY = "recovery R  (0: like base, 1: like target)"
SHARE = "field share  (0: all notes, 1: all field)"
_WIDEST = (-1.0, 2.0)  # an interval that goes on beyond the axis ends in an arrow


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout of one model: effects by (name, gated), the pairs behind them, and the paper's values by
    effect name: points by the paper's model, or one (low, high) range. The paper's row has no pairs."""

    label: str
    effects: Mapping[tuple[str, bool], Effect] = field(default_factory=dict)
    inclusion: Inclusion | None = None
    points: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def draw(records: Mapping[str, Record]) -> dict[str, Figure]:
    """A figure for each record, by its name, and `locality/<layout>` for a layout that several models share.

    A record's name is `<model>/locality/<file stem>`, as `kvnotes.records.find` gives it.
    """
    drawn = {name: _draw_one(record) for name, record in records.items()}
    for layout, same in _shared_layouts(records).items():
        drawn[f"locality/{layout}"] = _draw_models(same)
    return drawn


def _draw_one(record: Record) -> Figure:
    if not any(effect.gated and effect.estimate is not None for effect in record.summary.effects):
        return page.exclusions(record, heading=_heading(f"{record.model.name}, {page.layout_name(record.layout)}"))
    return _draw_layouts(record) if len(_layouts(record)) > 1 else _draw_states(record)


def _shared_layouts(records: Mapping[str, Record]) -> dict[str, list[Record]]:
    """Records with default settings, by the one layout they measured, where there are at least two."""
    groups: dict[str, list[Record]] = {}
    for name, record in records.items():
        if name.rsplit("/", 1)[-1] == record.layout and len(_layouts(record)) == 1:
            groups.setdefault(record.layout, []).append(record)
    return {layout: group for layout, group in groups.items() if len(group) > 1}


# --- figures ------------------------------------------------------------------------------------------------


def _draw_states(record: Record) -> Figure:
    """Panels 3a and 3c of one layout."""
    layout = _layouts(record)[0]
    row = _row(record, layout)
    figure = Figure(figsize=(10.5, 4.4), dpi=style.DPI)
    left, right = figure.subplots(1, 2, width_ratios=(1.55, 1))
    panel_states(left, row)
    panel_share(right, row)
    title = f"{record.model.name}, {page.layout_name(layout)}"
    _finish(figure, title=title, records=[record], handles=[*_gate_handles(), *_paper_handles([row])])
    return figure


def _draw_layouts(record: Record) -> Figure:
    """Field first, rules first and off the template side by side, 3a above 3c."""
    columns: dict[str, list[Row]] = {}
    for layout in _layouts(record):
        row = _row(record, layout)
        # The paper's values stand beside its own prompt; further rows of that column would only repeat them.
        own = layout == "paper" or column_of(layout) != "field first"
        columns.setdefault(column_of(layout), []).append(row if own else replace(row, points={}))
    columns = {name: columns[name] for name in COLUMNS if name in columns}
    return _draw_columns(columns, title=f"{record.model.name}, by layout", records=[record])


def _draw_models(records: Sequence[Record]) -> Figure:
    """One layout on several models, a row each, with the paper's models in the last row."""
    layout = _layouts(records[0])[0]
    rows = [replace(_row(record, layout, label=record.model.name), points={}) for record in records]
    if column_of(layout) == "field first":
        rows.append(Row(label="the paper's models", points=_paper_points()))
    return _draw_columns({"": rows}, title=f"{page.layout_name(layout)}, by model", records=records)


def _draw_columns(columns: Mapping[str, Sequence[Row]], *, title: str, records: Sequence[Record]) -> Figure:
    depth = max(len(rows) for rows in columns.values())
    everything = [row for rows in columns.values() for row in rows]
    wide, narrow = _limits(everything, STATES), _limits(everything, ["field_share"])
    size = (9.0 if len(columns) == 1 else 4.1 * len(columns), 1.8 + 1.05 * depth)
    figure = Figure(figsize=size, dpi=style.DPI)
    grid = figure.subplots(2, len(columns), squeeze=False, height_ratios=(1.8, 1), sharex="row")
    for index, (name, rows) in enumerate(columns.items()):
        above, below = grid[:, index]
        panel_recoveries(above, rows, limits=wide, depth=depth)
        panel_shares(below, rows, limits=narrow, depth=depth)
        style.panel_title(above, "" if index else "3a", name or "recovery by cache state")
        style.panel_title(below, "" if index else "3c", name or "where the decision is read from")
        above.set_xlabel(RECOVERY)
        below.set_xlabel(SHARE)
    _finish(figure, title=title, records=records, handles=[*_state_handles(), *_paper_handles(everything)])
    return figure


def _finish(figure: Figure, *, title: str, records: Sequence[Record], handles: Sequence[Artist]) -> None:
    source, lines = style.published()["source"], []
    if any("paper" in str(handle.get_label()) for handle in handles):
        lines.append(f"Open markers: {source}; other models, approximate values, no interval given.")
    page.finish(figure, records, heading=_heading(title), lines=lines, handles=handles, columns=7)


def _heading(title: str) -> str:
    return f"Where the decision is stored: {title}"


# --- panels -------------------------------------------------------------------------------------------------


def panel_states(ax: Axes, row: Row) -> None:
    """Panel 3a of one layout: recovery of each cache state between base, 0, and target, 1, by definition."""
    limits = _limits([row], STATES)
    labels = ["base", *STATES.values(), "target"]
    _reference_lines(ax)
    for y, value in ((0, 0), (len(labels) - 1, 1)):
        ax.plot(value, y, "o", color=style.INK, markersize=7)
        _beside(ax, y, f"{value}  by definition")
    for y, name in enumerate(STATES, start=1):
        lanes = (y - 0.29, y - 0.08)
        _estimates(ax, row, name, y=lanes, limits=limits)
        for lane, gated in zip(lanes, (True, False), strict=True):
            _beside(ax, lane, _with_interval(row.effects.get((name, gated))), gated=gated)
        for index, (model, value) in enumerate(row.points.get(name, {}).items()):
            marker = PAPER_MARKERS.get(model, "D")
            _open_marker(ax, value, y + 0.11 + 0.13 * index, marker=marker, colour=COLOURS[name])
        _open_range(ax, row, name, y=y + 0.24)
    page.rows(ax, labels, depth=len(labels), limits=limits)
    ax.set_xlabel(RECOVERY)
    style.panel_title(ax, "3a", "recovery by cache state")


def panel_share(ax: Axes, row: Row) -> None:
    """Panel 3c of one layout: the part of the decision read from the notes and from the field token."""
    low, high = _limits([row], ["field_share"])
    limits = min(low, 1 - high), max(high, 1 - low)  # the notes' part is the field's, mirrored
    _reference_lines(ax)
    for y, of_field in enumerate((False, True)):
        for gated, lane, height in ((True, y - 0.18, 0.28), (False, y + 0.11, 0.16)):
            effect = row.effects.get(("field_share", gated))
            if effect is not None and effect.estimate is not None:
                _share_bar(ax, _Share.of(effect, of_field=of_field), y=lane, height=height, limits=limits)
        for bound in row.points.get("field_share", {}).values():
            colour = style.VERMILLION if of_field else style.BLUE
            _open_marker(ax, bound if of_field else 1 - bound, y + 0.34, marker="D", colour=colour)
            words = f"under {bound:.0%}" if of_field else f"over {1 - bound:.0%}"
            _beside(ax, y + 0.34, f"paper: {words}", gated=False)
    page.rows(ax, ["read from\nthe notes", "read from\nthe field token"], depth=2, limits=limits)
    ax.set_xlabel("share of the decision")
    style.panel_title(ax, "3c", "where the decision is read from")


def panel_recoveries(ax: Axes, rows: Sequence[Row], *, limits: tuple[float, float], depth: int) -> None:
    """Panel 3a with a row a layout or model: field-only above notes-only above the identity."""
    _reference_lines(ax)
    for y, row in enumerate(rows):
        if _says_nothing_passed(ax, row, y):
            continue
        for lane, name in enumerate(STATES):
            top = y - 0.36 + 0.25 * lane
            _estimates(ax, row, name, y=(top, top + 0.12), limits=limits)
        _papers(ax, row, STATES, y=y + 0.4 if row.inclusion else y)
    page.rows(ax, [_with_count(row) for row in rows], depth=depth, limits=limits)


def panel_shares(ax: Axes, rows: Sequence[Row], *, limits: tuple[float, float], depth: int) -> None:
    """Panel 3c with a row a layout or model: the field share."""
    _reference_lines(ax)
    for y, row in enumerate(rows):
        if _says_nothing_passed(ax, row, y):
            continue
        _estimates(ax, row, "field_share", y=(y - 0.24, y + 0.01), limits=limits)
        _papers(ax, row, ["field_share"], y=y + 0.3 if row.inclusion else y)
    page.rows(ax, [row.label for row in rows], depth=depth, limits=limits)


# --- marks --------------------------------------------------------------------------------------------------


def _estimates(ax: Axes, row: Row, name: str, *, y: tuple[float, float], limits: tuple[float, float]) -> None:
    """The gated estimate, filled, and under it the ungated one, lighter; each with its interval."""
    for gated, at, size in ((True, y[0], 6.5), (False, y[1], 4.5)):
        effect = row.effects.get((name, gated))
        if effect is None or effect.estimate is None:
            continue
        colour = COLOURS[name] if gated else style.lighter(COLOURS[name])
        _whisker(ax, at, (effect.low, effect.high), limits=limits, colour=colour)
        ax.plot(effect.estimate, at, "o", color=colour, markersize=size, markeredgewidth=0, zorder=4)


@dataclass(frozen=True, kw_only=True)
class _Share:
    """A part of the decision with its interval."""

    value: float
    low: float | None
    high: float | None
    gated: bool
    colour: str

    @classmethod
    def of(cls, effect: Effect, *, of_field: bool) -> _Share:
        """The field share, or what it leaves of the decision for the notes."""
        value, low, high = effect.estimate or 0.0, effect.low, effect.high
        if of_field:
            return cls(value=value, low=low, high=high, gated=effect.gated, colour=style.VERMILLION)
        low, high = (None if end is None else 1 - end for end in (high, low))
        return cls(value=1 - value, low=low, high=high, gated=effect.gated, colour=style.BLUE)


def _share_bar(ax: Axes, share: _Share, *, y: float, height: float, limits: tuple[float, float]) -> None:
    colour = share.colour if share.gated else style.lighter(share.colour)
    ax.barh(y, share.value, height=height, color=colour, zorder=2)
    ink = style.INK if share.gated else style.GREY
    _whisker(ax, y, (share.low, share.high), limits=limits, colour=ink)
    _beside(ax, y, _numbers(share.value, share.low, share.high), gated=share.gated)


def _whisker(
    ax: Axes,
    y: float,
    ends: tuple[float | None, float | None],
    *,
    limits: tuple[float, float],
    colour: ColorType,
) -> None:
    """An interval, where there is one; an end outside the axis is an arrow at its edge."""
    low, high = ends
    if low is None or high is None:
        return
    left, right = max(low, limits[0]), min(high, limits[1])
    ax.plot([left, right], [y, y], color=colour, linewidth=1.6, solid_capstyle="butt", zorder=3)
    for end, edge, marker in ((low, left, "<"), (high, right, ">")):
        if end != edge:
            ax.plot(edge, y, marker, color=colour, markersize=5, clip_on=False, zorder=3)


def _papers(ax: Axes, row: Row, names: Iterable[str], *, y: float) -> None:
    """The paper's values of some effects: points as open markers, ranges as open boxes."""
    for name in names:
        for value in sorted(set(row.points.get(name, {}).values())):
            _open_marker(ax, value, y, marker="D", colour=COLOURS[name])
        _open_range(ax, row, name, y=y)


def _open_range(ax: Axes, row: Row, name: str, *, y: float) -> None:
    if name in row.ranges:
        low, high = row.ranges[name]
        box = Rectangle((low, y - 0.06), high - low, 0.12, facecolor="white", edgecolor=COLOURS[name])
        box.set(linewidth=1, zorder=5)
        ax.add_patch(box)


def _open_marker(ax: Axes, x: float, y: float, *, marker: str, colour: str) -> None:
    (point,) = ax.plot(x, y, marker, markersize=4.8, markeredgewidth=1, zorder=5)
    point.set(markerfacecolor="white", markeredgecolor=colour)


def _reference_lines(ax: Axes) -> None:
    for x in (0, 1):
        ax.axvline(x, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)


def _beside(ax: Axes, y: float, text: str, *, gated: bool = True) -> None:
    """Text in the margin to the right of a row."""
    where = ax.get_yaxis_transform()
    colour, size = (style.INK, 9.0) if gated else (style.GREY, 7.5)
    ax.text(1.03, y, text, transform=where, va="center", color=colour, fontsize=size)


def _says_nothing_passed(ax: Axes, row: Row, y: float) -> bool:
    """Words in place of a recovery where a row has pairs but too few of them passed the gate."""
    if row.inclusion is None:
        return False
    estimates = [effect.estimate for (_, gated), effect in row.effects.items() if gated]
    if row.inclusion.included and any(estimate is not None for estimate in estimates):
        return False
    passing = f"{row.inclusion.included or 'none'} of {row.inclusion.used} pairs passes the gate"
    text = ax.text(0.5, y, passing, ha="center", va="center")
    text.set(fontsize=8, color=style.GREY, style="italic", zorder=6)
    return True


# --- data ---------------------------------------------------------------------------------------------------


def column_of(layout: str) -> str:
    """Where a layout stands in the figure by layout; the paper's prompt has its field before its rules."""
    if layout.endswith("_field_first") or layout == "paper":
        return "field first"
    return "rules first" if layout.endswith("_rules_first") else "off the template"


def _layouts(record: Record) -> list[str]:
    """The layouts that a record measured, in the order of its instances."""
    return list(dict.fromkeys(one.layout for one in record.instances)) or [record.layout]


def _row(record: Record, layout: str, *, label: str | None = None) -> Row:
    points, ranges = _published(layout)
    return Row(
        label=label or page.form(layout),
        effects={(one.name, one.gated): one for one in record.summary.effects if one.layout == layout},
        inclusion=count_inclusion([one for one in record.instances if one.layout == layout]),
        points=points,
        ranges=ranges,
    )


def _published(layout: str) -> tuple[dict[str, dict[str, float]], dict[str, tuple[float, float]]]:
    """The paper's points and ranges for a layout: of its field-first prompt, or of an off-template form."""
    form = style.published()["off_template"].get(layout)
    if form is None:
        return (_paper_points() if column_of(layout) == "field first" else {}), {}
    low, high = form["field_only"]
    identity = {"full_downstream": {"": form["full_downstream"]}} if "full_downstream" in form else {}
    return identity, {"field_only": (low, high)}


def _paper_points() -> dict[str, dict[str, float]]:
    """The paper's values by effect and model; of the field share it gives one bound for all models."""
    facts = style.published()["locality"]
    (most,) = facts["field_share"]["at_most"].values()
    shares = {"field_share": {"": most}}
    return {name: facts[name] for name in ("field_only", "full_downstream")} | shares


def _limits(rows: Iterable[Row], names: Iterable[str]) -> tuple[float, float]:
    """An axis that shows 0, 1, every estimate and its interval, to `_WIDEST` or 0.5 from the estimate."""
    values = [-0.1, 1.1]
    wanted = set(names)
    for row in rows:
        for (name, _), effect in row.effects.items():
            if name in wanted and effect.estimate is not None:
                least, most = min(_WIDEST[0], effect.estimate - 0.5), max(_WIDEST[1], effect.estimate + 0.5)
                ends = [end for end in (effect.low, effect.high) if end is not None]
                values += [effect.estimate, *(min(max(end, least), most) for end in ends)]
    margin = 0.03 * (max(values) - min(values))
    return min(values) - margin, max(values) + margin


def _with_interval(effect: Effect | None) -> str:
    if effect is None or effect.estimate is None:
        return "not measured"
    text = _numbers(effect.estimate, effect.low, effect.high)
    return f"{text}  unresolved" if effect.unresolved else text


def _numbers(value: float, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return f"{style.number(value)}  no interval"
    return f"{style.number(value)}  [{style.number(low)}, {style.number(high)}]"


def _with_count(row: Row) -> str:
    if row.inclusion is None:
        return row.label
    return f"{row.label}\n{row.inclusion.included} pairs, {row.inclusion.scenarios} scenarios"


def _handle(label: str, *, colour: ColorType, size: float = 6.5) -> Line2D:
    return Line2D([], [], color=colour, marker="o", markersize=size, linewidth=1.6, label=label)


def _open_handle(label: str, *, marker: str) -> Line2D:
    line = Line2D([], [], linestyle="none", marker=marker, markersize=5, label=label)
    line.set(markerfacecolor="white", markeredgecolor=style.INK)
    return line


def _gate_handles() -> list[Artist]:
    filled = _handle("pairs that pass the gate", colour=style.GREY)
    return [filled, _handle("all used pairs", colour=style.lighter(style.GREY), size=4.5)]


def _state_handles() -> list[Artist]:
    states = [_handle(label.replace("\n", " "), colour=COLOURS[name]) for name, label in STATES.items()]
    light = _handle("lighter: all used pairs", colour=style.lighter(style.GREY), size=4.5)
    return [*states, light]


def _paper_handles(rows: Sequence[Row]) -> list[Artist]:
    """What the paper's marks mean: one a model where a single layout is drawn, else one for all."""
    marks: dict[str, str] = {}
    if len(rows) == 1 and rows[0].points.get("field_only"):
        marks = {f"paper: {model}": PAPER_MARKERS[model] for model in rows[0].points["field_only"]}
    elif any(row.points for row in rows):
        marks = {"the paper's models": "D"}
    handles: list[Artist] = [_open_handle(label, marker=marker) for label, marker in marks.items()]
    if any(row.ranges for row in rows):
        handles.append(Patch(facecolor="white", edgecolor=style.INK, label="range over the paper's models"))
    return handles

"""Several models side by side: which record stands for a model, its numbers, and the panels that show them.

A page's models are a mapping from a model's name to its studies; a study is its record, or words that say why none
can be drawn.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvnotes import effects
from kvnotes.config import NOT_IN_NAME, defaults
from kvnotes.records import Record, count_inclusion

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST = 56  # letters of why there is no number, in a panel; the table has all
LINE = 92  # letters of a line of words above a panel
LANE = 0.125  # inches of a line of a panel of rows, enough for its number
LEFT, DOWN = "<", "v"  # markers of a value that the paper only bounds from above, along the axis that it stands on
AT_MOST = -math.inf  # the lower end of a value that the paper only bounds from above
UNNAMED = "models not named"
NOT_RUN = "not run"
ALL = "all"  # the layout of a record that measured every one
WARNED = "\N{DAGGER}"  # stands after a number that a warning limits
_NARROWEST, _WIDEST = (-0.1, 1.1), (-1.0, 2.0)

Found = Mapping[str, Record | str]
Models = Mapping[str, Found]
Said = list[tuple[str, str]]  # lines of words above a panel, with their colours
Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A row: an effect of a study. A depth is a layer, shown as a share of the model's layers; `rest` is 1 less it."""

    study: str
    effect: str
    label: str
    depth: bool = False
    rest: bool = False
    paper: str = ""  # where the paper's values stand in published.yaml, where not under the study and the effect's name
    listed: str = ""  # the study's published lists by model, of which the value at `at` is one of the measure's
    at: int = 0


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of a table, with its interval, or the reason why there is none."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    control: bool = False
    unresolved: bool = False
    """Below the noise floor."""
    warning: str = ""
    """What limits the number."""
    why: str = ""

    @property
    def words(self) -> str:
        """As the page has it."""
        return f"- ({self.why})" if self.value is None else f"{self.numbers}, n={self.n}"

    @property
    def numbers(self) -> str:
        """The value with its interval and what a reader must know of it, or why there is none."""
        from figures import style

        if self.value is None:
            return self.why
        known = self.low is not None and self.high is not None
        ends = f"[{style.number(self.low or 0.0)}, {style.number(self.high or 0.0)}]" if known else "no interval"
        marks = f"{WARNED if self.warning else ''}{' unresolved' if self.unresolved else ''}"
        return f"{style.number(self.value)} {ends}{marks}"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line of a panel of counts: effects by how many things are patched at once, named with `k` in braces.

    In published.yaml the paper's values stand by `k` (`paper`), by model as a list over all k (`listed`), or once, for
    the largest number (`last`). They are drawn with the open `marker`.
    """

    effects: str
    words: str
    line: Any  # a line style of matplotlib's
    marker: str = "D"
    paper: str = "none"
    listed: str = ""
    last: str = ""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """A panel of lines over the number of things that are patched at once."""

    study: str
    of: str
    ks: tuple[int, ...]
    curves: tuple[Curve, ...]

    def measures(self, curve: Curve) -> list[Measure]:
        """A line's effects, by k."""
        return [
            Measure(
                study=self.study,
                effect=curve.effects.format(k=k),
                label=f"{curve.words}, {k}",
                paper=curve.last if curve.last and k == self.ks[-1] else curve.paper.format(k=k),
                listed=curve.listed,
                at=at,
            )
            for at, k in enumerate(self.ks)
        ]

    @property
    def all(self) -> list[Measure]:
        """Every line's effects."""
        return [one for curve in self.curves for one in self.measures(curve)]

    def papers(self, curve: Curve) -> set[tuple[int, float]]:
        """The paper's values for a line, each with its place among the numbers of things; of a range both ends."""
        return {(at, value) for at, ends in self._published(curve) if AT_MOST not in ends for value in ends}

    def bounds(self, curve: Curve) -> set[tuple[int, float]]:
        """What the paper only bounds from above: the bounds, each with its place."""
        return {(at, ends[1]) for at, ends in self._published(curve) if AT_MOST in ends}

    def _published(self, curve: Curve) -> Iterator[tuple[int, tuple[float, float]]]:
        for at, measure in enumerate(self.measures(curve)):
            yield from ((at, ends) for ends in paper_values(measure).values())


# --- records ----------------------------------------------------------------------------------------------


def by_model(
    records: Mapping[str, Record],
    *,
    layout: str,
    studies: Collection[str],
    faults: Mapping[str, str] | None = None,
) -> dict[str, dict[str, Record | str]]:
    """Records of one layout by model and study, in the order given: of each study the one that `stands_for` it.

    `faults` says by the record's name why it is not among them; it stands for the study where no other record does.
    """
    own: dict[str, dict[str, Record]] = {}
    for name, record in records.items():
        own.setdefault(record.model.name, {})[name] = record
    chosen: dict[str, dict[str, Record | str]] = {}
    for model, held in own.items():
        for study in studies:
            if one := stands_for(held, study=study, layout=layout):
                chosen.setdefault(model, {})[study] = one[1]
    names = {name.split("/", maxsplit=1)[0]: record.model.name for name, record in records.items()}
    for name, reason in (faults or {}).items():
        folder, study, stem = name.split("/")
        if study in studies and (stem in (layout, ALL) or stem.startswith(f"{layout}-")):
            chosen.setdefault(names.get(folder, folder), {}).setdefault(study, reason)
    return chosen


def stands_for(records: Mapping[str, Record], *, study: str, layout: str) -> tuple[str, Record] | None:
    """Which of one model's records stands for a study in a layout, with its name: a record of that layout alone, else
    the layout's part of one of all; of several the one with the study's own settings, else the newest, whatever its
    settings but the kind of pair."""
    found = [
        (name, record, part)
        for name, record in records.items()
        if record.study == study and "pair" not in unusual(record) and (part := in_layout(record, layout))
    ]
    if not found:
        return None
    name, _, part = max(found, key=lambda one: (one[1].layout == layout, *_preferred(*one[:2])))
    return name, part


def _preferred(name: str, record: Record) -> tuple[bool, str]:
    return own_settings(name, record), record.provenance.created


def own_settings(name: str, record: Record) -> bool:
    """Whether a record's name says that it has the study's own settings; others add a hash to the layout."""
    return name.rsplit("/", maxsplit=1)[-1] in (record.layout, ALL)


def in_layout(record: Record, layout: str) -> Record | None:
    """A record as if it were of one layout alone: the pairs, effects and tables of one of all layouts that are of this
    one. None for a record without any pair of it."""
    if record.layout == layout:
        return record
    instances = tuple(one for one in record.instances if one.layout == layout)
    if record.layout != ALL or not instances:
        return None
    tables, ending = record.summary.tables, f", {layout}"
    if len(effects.layouts(record.instances)) > 1:
        tables = {name.removesuffix(ending): one for name, one in tables.items() if name.endswith(ending)}
    mine = tuple(one for one in record.summary.effects if one.layout == layout)
    changed = {
        "layout": layout,
        "instances": instances,
        "inclusion": count_inclusion(instances),
        "summary": record.summary.model_copy(update={"effects": mine, "tables": tables}),
    }
    return record.model_copy(update=changed)


def attempt(make: Callable[[], Made], *, again: str) -> tuple[Made | None, str]:
    """What is made, or why it cannot be, with the command that helps: a record of another version may lack any table
    or effect, and all else is drawn without it."""
    try:
        return make(), ""
    except Exception as error:
        return None, f"{type(error).__name__} while drawing it: {error}. Run `{again}` again"


def readable(found: Found) -> dict[str, Record]:
    """A model's records, without the studies that have none."""
    return {study: record for study, record in found.items() if isinstance(record, Record)}


def unusual(record: Record) -> dict[str, object]:
    """The settings that are not the study's own, but for those that a record's path says."""
    usual = defaults(record.study)
    settings = record.provenance.config.items()
    return {key: value for key, value in settings if key in usual and key not in NOT_IN_NAME and value != usual[key]}


def cell(measure: Measure, found: Found) -> Cell:
    """A model's number for a row, of the pairs that pass the gate."""
    record = found.get(measure.study)
    if not isinstance(record, Record):
        return Cell(why=NOT_RUN if record is None else in_short(record))
    effect = next(
        (
            one
            for one in record.summary.effects
            if one.gated and one.name == measure.effect and one.layout == record.layout
        ),
        None,
    )
    if effect is None:
        return Cell(why="not measured")
    if effect.estimate is None:
        gate = f"{record.inclusion.included} of {record.inclusion.used} pairs pass the gate"
        return Cell(why=effect.warning or gate, n=effect.n)
    ends = (effect.high, effect.low) if measure.rest else (effect.low, effect.high)
    value, low, high = (_scaled(x, measure, record) for x in (effect.estimate, *ends))
    return Cell(
        value=value,
        low=low,
        high=high,
        n=effect.n,
        control=effect.control,
        unresolved=effect.unresolved,
        warning=effect.warning or "",
    )


def _scaled(value: float | None, measure: Measure, record: Record) -> float | None:
    """A depth says the layer, from 0, after which something holds: of L layers, layer l is (l + 1) / L deep."""
    if value is None:
        return None
    value = (value + 1) / record.model.layers if measure.depth else value
    return 1 - value if measure.rest else value


def in_short(reason: str) -> str:
    """The first words of why a record is not drawn, such as "schema_version 0 is older than 1"."""
    return re.split(r"[:;,(]|\. ", reason)[0].strip(" .")


def paper_values(measure: Measure) -> dict[str, tuple[float, float]]:
    """The paper's values for a measure, as (low, high), by the model or the models that they are of; low is `AT_MOST`
    where the paper only bounds a value from above."""
    from figures import style

    listed = style.published().get(measure.study, {}).get(measure.listed, {})
    ends = {models: (float(values[measure.at]),) * 2 for models, values in listed.items()}
    return {models: (low, high) for models, (low, high) in (ends | _under(measure)).items()}


def _under(measure: Measure) -> dict[str, Any]:
    """The paper's values where the measure says that they stand."""
    from figures import style

    path = measure.paper or measure.effect
    known: Any = style.published()
    for part in (path if "." in path else f"{measure.study}.{path}").split("."):
        known = known.get(part, {}) if isinstance(known, dict) else {}
    if isinstance(known, int | float):
        return {UNNAMED: (float(known), float(known))}
    if not isinstance(known, dict):
        return {}
    kinds = {"points", "ranges", "at_most"}
    flat = known if not kinds & set(known) else {**known.get("points", {}), **known.get("ranges", {})}
    flat = flat | {models: [AT_MOST, value] for models, value in known.get("at_most", {}).items()}
    return {models: value if isinstance(value, list) else [value, value] for models, value in flat.items()}


def paper_words(measure: Measure) -> str:
    """The paper's values with their models, in a line."""
    return "; ".join(f"{models}: {_span(*ends)}" for models, ends in paper_values(measure).items())


def _span(low: float, high: float) -> str:
    from figures import style

    if low == AT_MOST:
        return f"at most {style.as_published(high)}"
    return style.as_published(low) if low == high else f"{style.as_published(low)} to {style.as_published(high)}"


def _paper_span(measure: Measure) -> str:
    """The paper's values of all its models as one range."""
    ends = list(paper_values(measure).values())
    lows, highs = [low for low, _ in ends if low != AT_MOST], [high for low, high in ends if low != AT_MOST]
    most = [high for low, high in ends if low == AT_MOST]
    parts = [_span(min(lows), max(highs))] if lows else []
    return " or ".join([*parts, *([_span(AT_MOST, max(most))] if most else [])])


# --- rows -------------------------------------------------------------------------------------------------


def rows_height(measures: Sequence[Measure], models: int) -> float:
    """Inches of a panel of rows with that many models: a line each and one for the paper's."""
    return 0.6 + len(measures) * (LANE * (models + 1) + 0.1)


def panel_measures(ax: Axes, measures: Sequence[Measure], models: Models) -> Said:
    """A row a measure, in it a line a model, and the paper's values under them as open markers."""
    from figures import style

    cells = {measure: [cell(measure, found) for found in models.values()] for measure in measures}
    limits = _limits(cells)
    for x in (0, 1):
        ax.axvline(x, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    step = 0.84 / (len(models) + 1)
    for y, measure in enumerate(measures):
        if y % 2 == 0:
            ax.axhspan(y - 0.5, y + 0.5, color=style.BAND, zorder=0, linewidth=0)
        for index, one in enumerate(cells[measure]):
            _line(ax, one, index, y=y - 0.42 + step * (index + 0.5), limits=limits)
        _papers(ax, measure, y=y - 0.42 + step * (len(models) + 0.5), limits=limits)
    ax.set_yticks(range(len(measures)), [measure.label for measure in measures])
    ax.set_ylim(len(measures) - 0.5, -0.5)
    ax.set_xlim(*limits)
    return []


def _limits(cells: Mapping[Measure, Sequence[Cell]]) -> tuple[float, float]:
    """An axis that shows 0, 1, every estimate and the paper's values; an interval goes on in an arrow beyond it."""
    values = [*_NARROWEST, *(x for one in cells for ends in paper_values(one).values() for x in ends if x != AT_MOST)]
    for one in (one for row in cells.values() for one in row):
        if one.value is not None:
            least, most = min(_WIDEST[0], one.value), max(_WIDEST[1], one.value)
            values += [min(max(end, least), most) for end in (one.value, one.low, one.high) if end is not None]
    margin = 0.03 * (max(values) - min(values))
    return min(values) - margin, max(values) + margin


def _line(ax: Axes, one: Cell, index: int, *, y: float, limits: tuple[float, float]) -> None:
    from figures import forest, style

    colour, marker = style.model_look(index)
    if one.value is None:
        ax.text(
            0.5,
            y,
            textwrap.shorten(one.why, LONGEST, placeholder=" \N{HORIZONTAL ELLIPSIS}"),
            ha="center",
            va="center",
            fontsize=7,
            color=style.GREY,
            style="italic",
        )
        return
    shade = style.lighter(colour, 0.45) if one.control else colour
    forest.whisker(ax, y, one, limits=limits, colour=shade)
    ax.plot(one.value, y, marker, color=shade, markersize=5, zorder=4, **_face(one))
    _beside(ax, one.numbers, y=y, colour=style.darker(colour))


def _face(one: Cell) -> dict[str, Any]:
    """A marker's face: what is below the noise floor is grey within its model's colour."""
    from figures import style

    return {"markerfacecolor": style.PALE, "markeredgewidth": 1} if one.unresolved else {"markeredgewidth": 0}


def _beside(ax: Axes, words: str, *, y: float, colour: Any) -> None:
    ax.text(1.02, y, words, transform=ax.get_yaxis_transform(), va="center", fontsize=7, color=colour)


def _papers(ax: Axes, measure: Measure, *, y: float, limits: tuple[float, float]) -> None:
    from figures import style

    values = paper_values(measure)
    for low, high in values.values():
        if high > low:
            ax.plot([limits[0] if low == AT_MOST else low, high], [y, y], color=style.INK, linewidth=1, zorder=4)
        for value in {low, high} - {AT_MOST}:
            open_marker(ax, value, y, marker=LEFT if low == AT_MOST else "D")
    if values:
        _beside(ax, f"published {_paper_span(measure)}", y=y, colour=style.GREY)


def open_marker(ax: Axes, x: float, y: float, *, marker: str, **look: Any) -> None:
    """One of the paper's values."""
    from figures import style

    (mark,) = ax.plot(x, y, marker, markersize=4.4, markeredgewidth=1, zorder=5, **look)
    mark.set(markerfacecolor="white", markeredgecolor=style.INK)


# --- counts -----------------------------------------------------------------------------------------------


def panel_counts(ax: Axes, models: Models, counts: Counts) -> Said:
    """Recovery by how many things are patched at once; a colour and marker a model, a line a family of effects."""
    from figures import style

    said: Said = []
    shift = min(0.06, 0.5 / max(1, len(models)))
    for index, (model, found) in enumerate(models.items()):
        colour, _ = style.model_look(index)
        drawn = [
            _curve(ax, cells, curve.line, index, shift=shift * (index - (len(models) - 1) / 2))
            for curve in counts.curves
            if (cells := [cell(measure, found) for measure in counts.measures(curve)])
        ]
        if not any(drawn):
            said += words(f"{model}: {cell(counts.measures(counts.curves[0])[0], found).why}", colour)
    left = -0.5 * shift * (len(models) - 1) - 0.12
    for curve in counts.curves:
        for at, value in counts.papers(curve):
            open_marker(ax, at + left, value, marker=curve.marker)
    for y in (0, 1):
        ax.axhline(y, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    ax.set_xticks(range(len(counts.ks)), [str(k) for k in counts.ks])
    ax.set_xlabel(f"{counts.of} at once")
    ax.set_ylabel("recovery R")
    low, high = ax.get_ylim()
    ax.set_ylim(max(low, _WIDEST[0]), min(high, _WIDEST[1]))
    for at, value in {bound for curve in counts.curves for bound in counts.bounds(curve)}:
        ax.plot([at + left] * 2, [ax.get_ylim()[0], value], color=style.INK, linewidth=1, zorder=4)
        open_marker(ax, at + left, value, marker=DOWN)
    return said


def words(text: str, colour: Any) -> Said:
    """What is said above a panel, in lines that fit it."""
    return [(line, colour) for line in textwrap.wrap(text, LINE, subsequent_indent="      ")]


def _curve(ax: Axes, cells: Sequence[Cell], line: Any, index: int, *, shift: float) -> bool:
    """One line of a model, with its intervals; whether there was anything to draw."""
    from figures import style

    colour, marker = style.model_look(index)
    known = [(at + shift, one) for at, one in enumerate(cells) if one.value is not None]
    look: dict[str, Any] = {"linestyle": line, "marker": marker, "markersize": 4, "markeredgewidth": 0}
    shade = style.lighter(colour, 0.3) if any(one.control for _, one in known) else colour
    ax.plot([x for x, _ in known], [one.value or 0.0 for _, one in known], color=shade, linewidth=1.2, **look)
    for x, one in known:
        if one.unresolved and one.value is not None:
            ax.plot(x, one.value, marker, color=shade, markersize=4, zorder=3, **_face(one))
        if one.low is not None and one.high is not None:
            ax.plot([x, x], [one.low, one.high], color=shade, linewidth=1, alpha=0.6)
    return bool(known)


# --- words ------------------------------------------------------------------------------------------------


def captions(model: str, found: Found, studies: Iterable[str]) -> Iterator[str]:
    """What a reader must know of a model's records: precision, pairs, exclusions, other settings; what is not drawn."""
    wanted = [study for study in studies if study in found]
    kept = {study: record for study, record in readable(found).items() if study in wanted}
    if kept:
        first = next(iter(kept.values())).model
        groups: dict[str, list[str]] = {}
        for study in wanted:
            if study in kept:
                others = ", of a record of all layouts" * (kept[study].provenance.config.get("layout") == ALL)
                others += "".join(f", {key} {value}" for key, value in unusual(kept[study]).items())
                groups.setdefault(_pairs(kept[study]), []).append(f"{study}{others}")
        pairs = "; ".join(f"{', '.join(named)}: {words}" for words, named in groups.items())
        yield f"{model}, {first.precision}, {first.dtype} on {first.device}. Pairs included: {pairs}."
    for study in wanted:
        if study not in kept:
            yield f"{model}, {study}: not drawn, {str(found[study]).rstrip('.')}."


def _pairs(record: Record) -> str:
    counts = record.inclusion
    reasons = ", ".join(f"{_reason(reason)} ({count})" for reason, count in counts.excluded.items())
    return (
        f"{counts.included} of {counts.used} used of {counts.generated}, {counts.scenarios} scenarios, "
        f"excluded: {reasons or 'none'}"
    )


def _reason(reason: str) -> str:
    # the caption of a page names many; each study's own figure has them in full
    return reason.replace("gate: the unedited model's margin has the wrong sign in", "wrong sign in").replace(
        "gate: the margins of the arms differ by less than", "gap under"
    )


def intervals(measures: Iterable[Measure], models: Models) -> str:
    """How the intervals of what is shown were made."""
    wanted = {(one.study, one.effect) for one in measures}
    kinds = dict.fromkeys(
        re.sub(r"\(\d+\)| of \d+ clusters", "", f"{one.level:.0%} {one.method}")
        for found in models.values()
        for record in readable(found).values()
        for one in record.summary.effects
        if one.gated and one.low is not None and (record.study, one.name) in wanted
    )
    return f"Intervals: {'; '.join(kinds) or 'none'}."


def origins(models: Models) -> Iterator[str]:
    """How each record was made: command, commit and content hash; and what there is no record of."""
    for model, found in models.items():
        for study, record in found.items():
            if isinstance(record, str):
                yield f"{model}, {study}: not drawn, {record}"
                continue
            made = record.provenance
            commit = (made.git_commit or "unknown")[:8]
            yield f"{model}, {study}: `{made.command}`, commit {commit}, content {record.content_hash[:12]}"


def warnings(measures: Iterable[Measure], models: Models) -> Iterator[str]:
    """What the mark after a number says: each warning with the models and studies that it is about."""
    about: dict[str, dict[str, None]] = {}
    for measure in measures:
        for model, found in models.items():
            one = cell(measure, found)
            if one.value is not None and one.warning:
                about.setdefault(one.warning, {})[f"{model}, {measure.study}"] = None
    for warning, named in about.items():
        yield f"{WARNED} {warning.rstrip('.')}: {'; '.join(named)}."


def unresolved(measures: Iterable[Measure], models: Models) -> bool:
    """Whether any number that is shown is below the noise floor."""
    return any(cell(measure, found).unresolved for measure in measures for found in models.values())

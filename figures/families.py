"""Several models side by side: the paper's table 3 (five probes by model) and table 4 (dissociation, specificity).

`python -m figures.families RESULTS --model A --model B` draws both from the records under RESULTS and writes a page
beside them, with the numbers in full and the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvnotes.commandline import guard
from kvnotes.config import NOT_IN_NAME, defaults
from kvnotes.records import Record, RecordError, find, safe_name, write_atomically

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OUT = Path("figures/out")
STUDIES = ("locality", "dissociation", "specificity", "injection", "timing")
COUNTS = (1, 2, 4, 8, 16)
LIMITS = (-0.25, 1.3)
AT_MOST = -math.inf  # the lower end of a value that the paper only bounds from above
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A line of table 3: an effect of a study; a depth is a layer, shown as a share of the model's layers."""

    study: str
    effect: str
    label: str
    depth: bool = False
    paper: str = ""  # under which name the paper's values stand, where not under the effect's


TABLE3 = (
    Measure(study="locality", effect="field_only", label="field-only"),
    Measure(study="locality", effect="full_downstream", label="full-downstream (identity)"),
    Measure(study="dissociation", effect="trigger_only", label="dissociation: trigger"),
    Measure(study="dissociation", effect="notes", label="dissociation: notes"),
    Measure(study="dissociation", effect="same_conclusion", label="same conclusion's notes (control)"),
    Measure(study="specificity", effect="top_8", label="best 8 notes, by other scenarios", paper="none"),
    Measure(study="specificity", effect="in_sample_8", label="best 8, by the pair itself", paper="top_8"),
    Measure(study="specificity", effect="random_8", label="8 random others (control)"),
    Measure(study="injection", effect="full_notes", label="injection: all notes"),
    Measure(study="injection", effect="follow_rate", label="injection: follow rate"),
    Measure(study="timing", effect="write_depth", label="write depth / layers", depth=True),
    Measure(study="timing", effect="commit_depth", label="commit depth / layers", depth=True),
)
TABLE4 = TABLE3[2:5]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of a table, with its interval, or the reason why there is none."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    control: bool = False
    why: str = ""

    @property
    def words(self) -> str:
        """As the page has it."""
        from figures import style

        if self.value is None:
            return f"- ({self.why})"
        ends = (
            "no interval"
            if self.low is None or self.high is None
            else (f"[{style.number(self.low)}, {style.number(self.high)}]")
        )
        return f"{style.number(self.value)} {ends}, n={self.n}"


# --- records ----------------------------------------------------------------------------------------------


def by_model(
    records: Mapping[str, Record], *, layout: str, studies: Collection[str] = STUDIES
) -> dict[str, dict[str, Record]]:
    """Records of one layout by model and study, in the order given; of several with the study's own kind of pair the
    newest, whatever its other settings, which the caption names."""
    chosen: dict[str, dict[str, Record]] = {}
    for record in records.values():
        if record.study not in studies or record.layout != layout or "pair" in _unusual(record):
            continue
        here = chosen.setdefault(record.model.name, {})
        known = here.get(record.study)
        if known is None or record.provenance.created > known.provenance.created:
            here[record.study] = record
    return chosen


def _unusual(record: Record) -> dict[str, object]:
    """The settings that are not the study's own, but for those that a record's path says."""
    usual = defaults(record.study)
    settings = record.provenance.config.items()
    return {key: value for key, value in settings if key in usual and key not in NOT_IN_NAME and value != usual[key]}


def cell(measure: Measure, found: Mapping[str, Record]) -> Cell:
    """A model's number for a line of the table, of the pairs that pass the gate."""
    record = found.get(measure.study)
    if record is None:
        return Cell(why="not run")
    effect = next((one for one in record.summary.effects if one.gated and one.name == measure.effect), None)
    if effect is None:
        return Cell(why="not measured")
    if effect.estimate is None:
        gate = f"{record.inclusion.included} of {record.inclusion.used} pairs pass the gate"
        return Cell(why=effect.warning or gate, n=effect.n)
    value, low, high = (_scaled(x, measure, record) for x in (effect.estimate, effect.low, effect.high))
    return Cell(value=value, low=low, high=high, n=effect.n, control=effect.control)


def _scaled(value: float | None, measure: Measure, record: Record) -> float | None:
    """A depth says the layer, from 0, after which something holds: of L layers, layer l is (l + 1) / L deep."""
    return value if value is None or not measure.depth else (value + 1) / record.model.layers


# --- figures ----------------------------------------------------------------------------------------------


def draw(records: Mapping[str, Record], *, layout: str = "table_field_first") -> dict[str, Figure]:
    """Tables 3 and 4 of all models that have a record of that layout; none where there are none."""
    models = by_model(records, layout=layout)
    return {"families/table3": _table3(models), "families/table4": _table4(models)} if models else {}


def _table3(models: Mapping[str, Mapping[str, Record]]) -> Figure:
    from matplotlib.figure import Figure

    from figures import style

    height = 1.2 + (0.34 + 0.13 * len(models)) * len(TABLE3)
    figure = Figure(figsize=(10.5, height), dpi=style.DPI)
    axes = figure.subplots()
    panel_measures(axes, TABLE3, models)
    axes.set_xlabel("recovery, share of pairs, or depth as a share of the layers")
    _finish(figure, models, heading="Five probes by model (the paper's table 3)", measures=TABLE3)
    return figure


def _table4(models: Mapping[str, Mapping[str, Record]]) -> Figure:
    from matplotlib.figure import Figure

    from figures import style

    figure = Figure(figsize=(12.5, 1.6 + max(2.6, (0.5 + 0.17 * len(models)) * len(TABLE4))), dpi=style.DPI)
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    panel_measures(left, TABLE4, models)
    left.set_xlabel("recovery R  (0: like base, 1: like target)")
    style.panel_title(left, "left", "   dissociation, the field held identical")
    panel_counts(right, models)
    style.panel_title(right, "right", "   specificity: best k against k random notes")
    _finish(figure, models, heading="Controls by model (the paper's table 4)", measures=TABLE4)
    return figure


def panel_measures(ax: Axes, measures: Sequence[Measure], models: Mapping[str, Mapping[str, Record]]) -> None:
    """A row a measure, in it a line a model, and the paper's values under them."""
    from figures import style

    for x in (0, 1):
        ax.axvline(x, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    step = 0.7 / (len(models) + 1)
    for y, measure in enumerate(measures):
        if y % 2 == 0:
            ax.axhspan(y - 0.5, y + 0.5, color=style.BAND, zorder=0, linewidth=0)
        for index, found in enumerate(models.values()):
            _line(ax, cell(measure, found), y=y - 0.35 + step * (index + 0.5), colour=COLOURS[index % len(COLOURS)])
        _papers(ax, measure, y=y - 0.35 + step * (len(models) + 0.5))
    ax.set_yticks(range(len(measures)), [measure.label for measure in measures])
    ax.set_ylim(len(measures) - 0.5, -0.5)
    ax.set_xlim(*LIMITS)


def _line(ax: Axes, one: Cell, *, y: float, colour: str) -> None:
    from figures import style

    if one.value is None:
        ax.text(0.5, y, one.why, ha="center", va="center", fontsize=7, color=style.GREY, style="italic")
        return
    low, high = LIMITS
    if one.low is not None and one.high is not None:
        ends = max(one.low, low), min(one.high, high)
        ax.plot(ends, [y, y], color=colour, linewidth=1.5, solid_capstyle="butt", zorder=3)
    marker = "s" if one.control else "o"
    ax.plot(min(max(one.value, low), high), y, marker, color=colour, markersize=5, markeredgewidth=0, zorder=4)
    words = one.words.rsplit(", n=", 1)[0]
    ax.text(1.02, y, words, transform=ax.get_yaxis_transform(), va="center", fontsize=7, color=colour)


def _papers(ax: Axes, measure: Measure, *, y: float) -> None:
    for values in paper_values(measure).values():
        low, high = values
        if high > low:
            ax.plot([0.0 if low == AT_MOST else low, high], [y, y], color="#222222", linewidth=1, zorder=4)
        for value in {low, high} - {AT_MOST}:
            (mark,) = ax.plot(value, y, "<" if low == AT_MOST else "D", markersize=4.2, markeredgewidth=1, zorder=5)
            mark.set(markerfacecolor="white", markeredgecolor="#222222")


def panel_counts(ax: Axes, models: Mapping[str, Mapping[str, Record]]) -> None:
    """Recovery of the best k notes, by other scenarios and by the pair itself, and of as many random ones, k = 1 to 16,
    a colour a model; the paper's are by the pair itself."""
    from figures import style

    reported = False
    for index, found in enumerate(models.values()):
        colour = COLOURS[index % len(COLOURS)]
        for stem, line, marker in (("top", "-", "o"), ("in_sample", "--", "^"), ("random", ":", "s")):
            cells = [cell(Measure(study="specificity", effect=f"{stem}_{k}", label=""), found) for k in COUNTS]
            known = [(x + 0.05 * index, one) for x, one in enumerate(cells) if one.value is not None]
            reported |= bool(known)
            ax.plot([x for x, _ in known], [one.value or 0.0 for _, one in known], line, marker=marker, color=colour)
            for x, one in known:
                if one.low is not None and one.high is not None:
                    ax.plot([x, x], [one.low, one.high], color=colour, linewidth=1.2)
    if not reported:
        ax.text(0.5, 0.5, "not reported", transform=ax.transAxes, ha="center", style="italic", color=style.GREY)
    at = COUNTS.index(8) - 0.12
    for name in ("top_8", "random_8"):
        for low, high in paper_values(Measure(study="specificity", effect=name, label="")).values():
            ends, marker = ([high], "v") if low == AT_MOST else ([low, high], "D-")
            (mark,) = ax.plot([at] * len(ends), ends, marker, color=style.INK, markersize=4.2, linewidth=1, zorder=5)
            mark.set(markerfacecolor="white", markeredgecolor=style.INK)
    ax.set_xticks(range(len(COUNTS)), [str(k) for k in COUNTS])
    ax.set_xlabel("notes transplanted (k)")
    ax.set_ylabel("recovery")
    ax.axhline(0, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)))


def paper_values(measure: Measure) -> dict[str, tuple[float, float]]:
    """The paper's values for a measure, as (low, high), by the model or the models that they are of; low is `AT_MOST`
    where the paper only bounds a value from above."""
    from figures import style

    known = style.published().get(measure.study, {}).get(measure.paper or measure.effect, {})
    if not isinstance(known, dict):
        return {}
    kinds = {"points", "ranges", "at_most"}
    flat = known if not kinds & set(known) else {**known.get("points", {}), **known.get("ranges", {})}
    flat = flat | {models: [AT_MOST, value] for models, value in known.get("at_most", {}).items()}
    ends = {models: value if isinstance(value, list) else [value, value] for models, value in flat.items()}
    return {models: (low, high) for models, (low, high) in ends.items()}


def _finish(
    figure: Figure,
    models: Mapping[str, Mapping[str, Record]],
    *,
    heading: str,
    measures: Sequence[Measure],
) -> None:
    from figures import page, style

    page.head(figure, heading)
    wanted = {measure.study for measure in measures} | ({"specificity"} if measures is TABLE4 else set())
    lines = [caption(model, found, wanted) for model, found in models.items()]
    lines += [
        "Pairs that pass the gate; intervals by scenario as in each study's own figure. A depth is (l + 1) / L for the "
        "layer l, from 0, after which something holds.",
        f"Open markers: {style.published()['source']}; other models, approximate values, no interval given.",
    ]
    shown = handles(models, counts=measures is TABLE4)
    style.add_footer(figure, handles=shown, columns=6, lines=lines)


def caption(model: str, found: Mapping[str, Record], studies: Iterable[str]) -> str:
    """A model, its precision, and how many pairs each of some studies includes."""
    counts = [
        f"{study} {record.inclusion.included} of {record.inclusion.used} in {record.inclusion.scenarios} scenarios"
        + "".join(f", {key} {value}" for key, value in _unusual(record).items())
        for study, record in found.items()
        if study in studies
    ]
    first = next(iter(found.values())).model
    included = f"pairs included: {', '.join(counts)}" if counts else "no record of these studies"
    return f"{model}, {first.precision}, {first.dtype} on {first.device}: {included}."


def handles(models: Iterable[str], *, counts: bool = False) -> list[Artist]:
    """The legend: a colour a model, controls, the paper's values; with `counts` who ranked the best k."""
    from matplotlib.lines import Line2D

    made: list[Artist] = [
        Line2D([], [], color=COLOURS[index % len(COLOURS)], marker="o", markersize=5, label=model)
        for index, model in enumerate(models)
    ]
    made.append(Line2D([], [], color="#6B6B6B", marker="s", linestyle=":", markersize=5, label="control or identity"))
    if counts:
        own = Line2D([], [], color="#6B6B6B", marker="^", linestyle="--", label="best k, by the pair itself")
        others = Line2D([], [], color="#6B6B6B", marker="o", linestyle="-", label="best k, by other scenarios")
        made += [others, own]
    paper = Line2D([], [], linestyle="none", marker="D", markersize=4.5, label="the paper's models")
    most = Line2D([], [], linestyle="none", marker="<", markersize=4.5, label="the paper's: at most")
    for mark in (paper, most):
        mark.set(markerfacecolor="white", markeredgecolor="#222222")
    return [*made, paper, most]


# --- page -------------------------------------------------------------------------------------------------


def page(records: Mapping[str, Record], *, layout: str) -> str:
    """Both tables in Markdown, the paper's values in the last column, and what each record was made of."""
    from figures import style

    models = by_model(records, layout=layout)
    lines = [
        "# Five probes by model",
        "",
        f"Layout `{layout}`; pairs that pass the gate, with intervals clustered by scenario. Made by `make families`.",
        "",
        "![table 3](table3.png)",
        "",
        *markdown("Table 3", TABLE3, models),
        "",
        "![table 4](table4.png)",
        "",
        *markdown("Table 4", [*TABLE4, *_counts()], models),
        "",
        "## Records",
        "",
        *(f"- {line}" for line in origins(models)),
        "",
        f"The paper's values are of {style.published()['source']}: other models, approximate, without intervals. A "
        "depth is (l + 1) / L for the layer l, from 0, after which something holds, of L layers.",
        "",
    ]
    return "\n".join(lines)


def _counts() -> list[Measure]:
    return [
        Measure(study="specificity", effect=f"{stem}_{k}", label=f"{words} {k}", paper=paper if k == 8 else "none")
        for stem, words, paper in (
            ("top", "best, by other scenarios,", "none"),
            ("in_sample", "best, by the pair itself,", "top_8"),
            ("random", "random", "random_8"),
        )
        for k in COUNTS
    ]


def markdown(title: str, measures: Sequence[Measure], models: Mapping[str, Mapping[str, Record]]) -> list[str]:
    """A table's lines: a row a measure, a column a model, and the paper's values."""
    rows = [f"| {title} | {' | '.join(models)} | the paper |", f"|---|{'---|' * (len(models) + 1)}"]
    for measure in measures:
        cells = [cell(measure, found).words for found in models.values()]
        rows.append(f"| {measure.label} | {' | '.join(cells)} | {_paper_words(measure) or '-'} |")
    return rows


def _paper_words(measure: Measure) -> str:
    from figures import style

    parts = []
    for models, (low, high) in paper_values(measure).items():
        value = style.number(low) if low == high else f"{style.number(low)} to {style.number(high)}"
        value = f"at most {style.number(high)}" if low == AT_MOST else value
        parts.append(f"{models}: {value}")
    return "; ".join(parts)


def origins(models: Mapping[str, Mapping[str, Record]]) -> Iterable[str]:
    """How each record was made: command, commit and content hash."""
    for model, found in models.items():
        for study, record in found.items():
            made = record.provenance
            commit = (made.git_commit or "unknown")[:8]
            yield f"{model}, {study}: `{made.command}`, commit {commit}, content {record.content_hash[:12]}"


# --- command ----------------------------------------------------------------------------------------------


@app.command()
def build(
    results: Annotated[Path, typer.Argument(help="Folder of records.")] = Path("results"),
    model: Annotated[list[str] | None, typer.Option(help="A model to show, in this order; all where none.")] = None,
    layout: Annotated[str, typer.Option(help="The layout whose records are shown.")] = "table_field_first",
    out: Annotated[Path, typer.Option(help="Folder for figures and page.")] = OUT,
) -> None:
    """Draw tables 3 and 4 and write their page.

    Raises RecordError where none of the models has a record of one of the studies.
    """
    records = wanted(find(results), model or [])
    if layout == "all":
        raise RecordError("the tables are of one layout: name it, such as LAYOUT=table_field_first.")
    if not by_model(records, layout=layout):
        raise RecordError(f"{results}: no record of {', '.join(STUDIES)} with layout {layout}; run `make families`.")
    publish("families", partial(draw, records, layout=layout), page(records, layout=layout), out=out)


def publish(name: str, drawn: Callable[[], Mapping[str, Figure]], text: str, *, out: Path) -> None:
    """Draw and save the figures, write their page beside them, and say where they are."""
    from figures import style

    with style.styled():
        for file in (file for title, figure in drawn().items() for file in style.save(figure, out / title)):
            typer.echo(file)
    target = out / name / "page.md"
    write_atomically(text.encode(), target)
    typer.echo(target)


def wanted(records: Mapping[str, Record], models: Sequence[str]) -> dict[str, Record]:
    """Records of the models asked for, in their order; a model may be asked for as a run would be, by a hub's name or a
    folder. Raises RecordError for a model without any."""
    from kvnotes.weights import run_name

    if not models:
        return dict(records)
    found: dict[str, Record] = {}
    for model in models:
        folder = safe_name(run_name(model))
        here = {name: one for name, one in records.items() if name.split("/", maxsplit=1)[0] == folder}
        if not here:
            raise RecordError(f"there is no record of {model}; run `make families MODELS={model}`.")
        found |= here
    return found


def main() -> None:
    """Run the command; a known failure is one line and exit code 2, never a traceback."""
    guard(app)


if __name__ == "__main__":
    main()

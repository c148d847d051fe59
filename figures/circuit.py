"""The circuit of several models: the six panels of the paper's figure 15 and its table 5.

`python -m figures.circuit RESULTS --model A --model B` draws them from the records of the five circuit studies under
RESULTS and writes a page beside them. A study without a record leaves a panel that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from figures import families
from figures.families import COLOURS, Cell, Measure
from kvnotes.commandline import guard
from kvnotes.records import Record, RecordError, find

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OUT = Path("figures/out")
STUDIES = ("heads", "direction", "attribution", "scrubbing", "sae")
AGGREGATOR = "aggregator"  # a column of the attention table
NAMED, LEAST = 5, 0.01  # heads of a model that are named in panel f, where they move so much
Models = Mapping[str, Mapping[str, Record]]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line of panels a and e: effects by how many heads or features are patched at once, named with `k` in braces.

    In published.yaml the paper's values stand by `k` (`paper`), by model as a list over all k (`listed`), or once, for
    the largest number (`last`).
    """

    effects: str
    words: str
    line: str
    marker: str
    paper: str = "none"
    listed: str = ""
    last: str = ""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Panel a or e."""

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
            )
            for k in self.ks
        ]

    def papers(self, curve: Curve) -> set[tuple[int, float]]:
        """The paper's values for a line, each with its place among the numbers of heads or features."""
        from figures import style

        listed = style.published()[self.study].get(curve.listed, {})
        found = {(at, float(value)) for values in listed.values() for at, value in enumerate(values)}
        for at, measure in enumerate(self.measures(curve)):
            found |= {(at, value) for ends in families.paper_values(measure).values() for value in ends}
        return {(at, value) for at, value in found if value != families.AT_MOST}


# the paper's heads and features were ranked on the pairs that they are tested on
HEADS = Counts(
    study="heads",
    of="heads",
    ks=(1, 3, 5, 8, 12),
    curves=(
        Curve(effects="read_{k}", words="read heads", line="-", marker="o"),
        Curve(
            effects="read_in_sample_{k}",
            words="read heads, in-sample",
            line="--",
            marker="D",
            listed="read",
            last="read_12",
        ),
        Curve(effects="write_all_{k}", words="write heads, all aggregators", line="-", marker="^"),
        Curve(effects="write_{k}", words="write heads, one aggregator", line="-", marker="v"),
        Curve(effects="write_in_sample_{k}", words="the same, in-sample", line="--", marker="<", last="write"),
        Curve(effects="read_random_{k}", words="random heads (control)", line=":", marker="s"),
    ),
)
FEATURES = Counts(
    study="sae",
    of="features",
    ks=(1, 3, 10, 30),
    curves=(
        Curve(effects="clamp_{k}", words="best features", line="-", marker="o"),
        Curve(effects="clamp_in_sample_{k}", words="the same, in-sample", line="--", marker="D", paper="clamp_{k}"),
        Curve(effects="clamp_{k}_any_slot", words="best features, best slot", line="-", marker="^"),
        Curve(effects="random_{k}", words="random features (control)", line=":", marker="s"),
    ),
)


def _measures(study: str, rows: Sequence[tuple[str, ...]]) -> tuple[Measure, ...]:
    """Rows of effect, label and, where the paper's values stand under another name, that name."""
    return tuple(
        Measure(study=study, effect=effect, label=label, paper=paper[0] if paper else "")
        for effect, label, *paper in rows
    )


DIRECTION = _measures(
    "direction",
    (
        ("along", "along the direction"),
        ("full", "full residual patch"),
        ("logistic", "along a logistic probe's"),
        ("projected", "lost without it"),
        ("random_own", "a random direction's own\n(control)"),
        ("random_norm", "a random one, same norm\n(control)"),
        ("along_any_slot", "along it, best slot"),
        ("full_any_slot", "full patch, best slot"),
    ),
)
ATTRIBUTION = _measures(
    "attribution",
    (
        ("attention", "attention's share"),
        ("mlp", "MLPs' share"),
        ("attention_any_slot", "attention's share, best slot"),
        ("attention_patched", "attention's part patched"),
        ("mlp_patched", "MLPs' part patched"),
        ("attention_patched_any_slot", "attention's part patched,\nbest slot"),
        ("mlp_patched_any_slot", "MLPs' part patched,\nbest slot"),
    ),
)
SCRUBBING = _measures(
    "scrubbing",
    (
        ("drift", "same conclusion: drift"),
        ("drift_size", "size of the drift"),
        ("note_swap", "note of aggregators swapped"),
        ("rest_swap", "all but the aggregators'"),
        ("note_swap_any_slot", "note of any slots swapped"),
        ("rest_swap_any_slot", "all but the any slots'"),
        ("note_swap_wrong", "other aggregators (control)"),
        ("note_swap_random", "random slots (control)"),
    ),
)
TABLE5 = (
    *_measures(
        "heads",
        (
            ("read_12", "Read: 12 read heads", "none"),
            ("read_in_sample_12", "Read: 12 read heads, in-sample", "read_12"),
            ("read_random_12", "Read: 12 random heads (control)", "random"),
            ("write_12", "Write: 12 heads at one aggregator", "none"),
            ("write_in_sample_12", "Write: 12 heads at one aggregator, in-sample", "write"),
            ("write_all_12", "Write: 12 heads at all aggregators"),
            ("attention_1", "Read: the best head's attention to aggregators"),
        ),
    ),
    *_measures(
        "scrubbing",
        (
            ("drift", "Scrub: drift"),
            ("drift_size", "Scrub: size of the drift"),
            ("note_swap", "Scrub: note of aggregators"),
            ("rest_swap", "Scrub: all but it"),
            ("note_swap_any_slot", "Scrub: note of any slots"),
            ("rest_swap_any_slot", "Scrub: all but those"),
        ),
    ),
    *_measures(
        "attribution",
        (("attention", "Attn: share of the write"), ("attention_any_slot", "Attn: share, best slot of any kind")),
    ),
    *_measures(
        "direction",
        (
            ("along", "Dir: along the direction"),
            ("random_own", "Dir: random (control)"),
            ("full", "Dir: full patch"),
            ("along_any_slot", "Dir: along it, best slot of any kind"),
        ),
    ),
    *_measures(
        "sae",
        (
            ("auc", "SAE: held-out AUC of the best feature (the paper's: in-sample)"),
            ("ablate_30", "SAE: lost without the best 30", "ablate"),
        ),
    ),
)


# --- figure -----------------------------------------------------------------------------------------------


def by_model(records: Mapping[str, Record], *, layout: str) -> Models:
    """The circuit's records of one layout by model and study."""
    return families.by_model(records, layout=layout, studies=STUDIES)


def draw(records: Mapping[str, Record], *, layout: str = "table_field_first") -> dict[str, Figure]:
    """The six panels, of all models that have a record of that layout; none where there are none."""
    models = by_model(records, layout=layout)
    return {"circuit/figure15": _figure(models)} if models else {}


def _figure(models: Models) -> Figure:
    from matplotlib.figure import Figure

    from figures import page, style

    figure = Figure(figsize=(15.0, 14.0 + 1.2 * max(0, len(models) - 2)), dpi=style.DPI)
    axes = figure.subplots(3, 2)
    panels: dict[str, tuple[str, str, Callable[[Axes], None]]] = {
        "a": (
            "heads",
            "read and write heads, jointly patched",
            lambda ax: panel_counts(ax, models, HEADS),
        ),
        "b": ("direction", "one direction of the residual", lambda ax: families.panel_measures(ax, DIRECTION, models)),
        "c": ("attribution", "who writes the note", lambda ax: families.panel_measures(ax, ATTRIBUTION, models)),
        "d": ("scrubbing", "causal scrubbing", lambda ax: families.panel_measures(ax, SCRUBBING, models)),
        "e": ("sae", "SAE features: decode and cause", lambda ax: panel_features(ax, models)),
        "f": ("heads", "read heads: effect and attention", lambda ax: panel_attention(ax, models)),
    }
    for ax, (letter, (study, title, panel)) in zip(axes.ravel(), panels.items(), strict=True):
        if any(study in found for found in models.values()):
            panel(ax)
        else:
            _nothing(ax, f"no record of {study}: run `make probe-{study}`")
        style.panel_title(ax, letter, f"   {title}")
    page.head(figure, "The circuit by model (the paper's figure 15)")
    lines = [families.caption(model, found, STUDIES) for model, found in models.items()]
    lines += [
        "Pairs that pass the gate; what is chosen was chosen on the other fold of the scenarios; intervals by scenario "
        "as in each study's own figure.",
        f"Open markers: {style.published()['source']}; other models, approximate values, no interval given.",
    ]
    style.add_footer(figure, handles=[*families.handles(models), *_line_handles()], columns=5, lines=lines)
    return figure


def _nothing(ax: Axes, words: str) -> None:
    from figures import style

    ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", style="italic", color=style.GREY)
    ax.set_xticks([])
    ax.set_yticks([])


def panel_counts(ax: Axes, models: Models, counts: Counts) -> None:
    """Recovery by how many heads or features are patched at once; a colour a model, a line a family of effects."""
    from figures import style

    reported = False
    for index, found in enumerate(models.values()):
        for curve in counts.curves:
            cells = [families.cell(measure, found) for measure in counts.measures(curve)]
            reported |= _curve(ax, cells, curve, colour=COLOURS[index % len(COLOURS)], shift=0.06 * index)
    for curve in counts.curves:
        for at, value in counts.papers(curve):
            (mark,) = ax.plot(at - 0.12, value, curve.marker, markersize=4.5, markeredgewidth=1, zorder=5)
            mark.set(markerfacecolor="white", markeredgecolor=style.INK)
    if not reported:
        ax.text(0.5, 0.5, "not reported", transform=ax.transAxes, ha="center", style="italic", color=style.GREY)
    ax.axhline(0, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    ax.set_xticks(range(len(counts.ks)), [str(k) for k in counts.ks])
    ax.set_xlabel(f"{counts.of} at once")
    ax.set_ylabel("recovery R")


def _curve(ax: Axes, cells: Sequence[Cell], curve: Curve, *, colour: str, shift: float) -> bool:
    """One line of a model, with its intervals; whether there was anything to draw."""
    known = [(at + shift, one) for at, one in enumerate(cells) if one.value is not None]
    look: dict[str, Any] = {"linestyle": curve.line, "marker": curve.marker, "markersize": 4.5, "linewidth": 1.3}
    ax.plot([x for x, _ in known], [one.value or 0.0 for _, one in known], color=colour, **look)
    for x, one in known:
        if one.low is not None and one.high is not None:
            ax.plot([x, x], [one.low, one.high], color=colour, linewidth=1.1, alpha=0.6)
    return bool(known)


def panel_features(ax: Axes, models: Models) -> None:
    """Recovery by features clamped; in words, how well the best one reads the conclusion on held-out scenarios."""
    panel_counts(ax, models, FEATURES)
    _headroom(ax, len(models))
    for index, (model, found) in enumerate(models.items()):
        auc, best = (
            families.cell(Measure(study="sae", effect=name, label=""), found).words for name in ("auc", "auc_any_slot")
        )
        _said(ax, f"{model}: held-out AUC of its best feature {auc}; best slot {best}", index)


def _headroom(ax: Axes, lines: int) -> None:
    """Room above what is drawn, for a line of words a model."""
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + (0.03 + 0.055 * lines) / (1 - 0.055 * lines) * (high - low))


def _said(ax: Axes, words: str, line: int) -> None:
    """A model's line of words, at the top of a panel."""
    colour = COLOURS[line % len(COLOURS)]
    ax.text(0.02, 0.99 - 0.055 * line, words, transform=ax.transAxes, va="top", fontsize=7, color=colour)


def panel_attention(ax: Axes, models: Models) -> None:
    """Every read head that a fold named: its attention from the decision to aggregators, and what its z alone moves; in
    words, the rank correlation of the two over all heads."""
    from figures import style

    shown = False
    for index, (model, found) in enumerate(models.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = read_heads(found["heads"]) if "heads" in found else {}
        shown |= bool(points)
        ax.plot([x for x, _ in points.values()], [y for _, y in points.values()], "o", color=colour, markersize=4.5)
        for name in sorted(points, key=lambda head: -points[head][1])[:NAMED]:
            if points[name][1] > LEAST:
                ax.annotate(name, points[name], (4, 3), textcoords="offset points", fontsize=7, color=colour)
        follows = families.cell(Measure(study="heads", effect="attention_follows", label=""), found)
        _said(ax, f"{model}: rank correlation over all heads {follows.words}", index)
    _headroom(ax, len(models))
    if not shown:
        ax.text(0.5, 0.5, "not reported", transform=ax.transAxes, ha="center", style="italic", color=style.GREY)
    for one in style.published()["heads"]["strongest"].values():
        ax.axvline(one["attention"], ymax=0.85, color=style.INK, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    ax.axhline(0, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    ax.set_xlabel("attention from the decision to aggregators  (dotted: the paper's strongest read heads)")
    ax.set_ylabel("recovery, z alone")


def read_heads(record: Record) -> dict[str, tuple[float, float]]:
    """Of each read head that a fold named: its attention to aggregators and what it recovers alone."""
    from figures import page

    found: dict[str, tuple[float, float]] = {}
    for layout in page.reported(record):
        attention, effects = (
            page.table(record, name, layout) for name in ("attention of the read heads", "read heads")
        )
        if AGGREGATOR not in attention.columns or "alone R" not in effects.columns:
            continue
        to, alone = attention.columns.index(AGGREGATOR), effects.columns.index("alone R")
        recovery = {str(row[0]): row[alone] for row in effects.rows}
        pairs = {str(row[0]): (row[to], recovery.get(str(row[0]))) for row in attention.rows}
        found |= {head: (float(x), float(y)) for head, (x, y) in pairs.items() if x is not None and y is not None}
    return found


def _line_handles() -> Iterator[Artist]:
    from matplotlib.lines import Line2D

    for letter, counts in (("a", HEADS), ("e", FEATURES)):
        for curve in counts.curves:
            look: dict[str, Any] = {"linestyle": curve.line, "marker": curve.marker, "markersize": 4.5}
            yield Line2D([], [], color="#6B6B6B", label=f"{letter}: {curve.words}", **look)


# --- page -------------------------------------------------------------------------------------------------


def page(records: Mapping[str, Record], *, layout: str) -> str:
    """Table 5 and the panels' numbers in Markdown, the paper's values in the last column, and how each record was
    made."""
    from figures import style

    models = by_model(records, layout=layout)
    counted = [one for counts in (HEADS, FEATURES) for curve in counts.curves for one in counts.measures(curve)]
    panels = [_in_line(one) for one in (*counted, *DIRECTION, *ATTRIBUTION, *SCRUBBING)]
    lines = [
        "# The circuit by model",
        "",
        f"Layout `{layout}`; pairs that pass the gate, with intervals clustered by scenario. Made by `make circuit`.",
        "",
        "![figure 15](figure15.png)",
        "",
        *families.markdown("Table 5", TABLE5, models),
        "",
        "Read and Write: heads patched together. Scrub: cells resampled from other prompts of the scenario; the drift "
        "with the same conclusion, all else with the other one. Attn: at the causal layer. The paper's note is of "
        "aggregators (delimiters); beside it the best slots of any kind.",
        "",
        *families.markdown("Figure 15", panels, models),
        "",
        "## Records",
        "",
        *(f"- {line}" for line in families.origins(models)),
        *(f"- {model}: no record of {', '.join(missing)}" for model, missing in _missing(models)),
        "",
        f"The paper's values are of {style.published()['source']}: other models, approximate, without intervals.",
        "",
    ]
    return "\n".join(lines)


def _in_line(measure: Measure) -> Measure:
    """With a label of one line, that names the study."""
    words = measure.label.replace("\n", " ")
    return replace(measure, label=f"{measure.study}: {words}")


def _missing(models: Models) -> Iterator[tuple[str, list[str]]]:
    for model, found in models.items():
        if missing := [study for study in STUDIES if study not in found]:
            yield model, missing


# --- command ----------------------------------------------------------------------------------------------


@app.command()
def build(
    results: Annotated[Path, typer.Argument(help="Folder of records.")] = Path("results"),
    model: Annotated[list[str] | None, typer.Option(help="A model to show, in this order; all where none.")] = None,
    layout: Annotated[str, typer.Option(help="The layout whose records are shown.")] = "table_field_first",
    out: Annotated[Path, typer.Option(help="Folder for figure and page.")] = OUT,
) -> None:
    """Draw figure 15 and write its page with table 5.

    Raises RecordError where none of the models has a record of one of the studies.
    """
    records = families.wanted(find(results), model or [])
    if not by_model(records, layout=layout):
        raise RecordError(f"{results}: no record of {', '.join(STUDIES)} with layout {layout}; run `make circuit`.")
    families.publish("circuit", partial(draw, records, layout=layout), page(records, layout=layout), out=out)


def main() -> None:
    """Run the command; a known failure is one line and exit code 2, never a traceback."""
    guard(app)


if __name__ == "__main__":
    main()

"""The circuit of several models: the six panels of the paper's figure 15, and its table 5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from figures import composed, side
from figures.composed import Page, Panel
from figures.side import Counts, Curve, Found, Measure, Models, Said
from kvnotes.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AGGREGATOR = "aggregator"  # a column of the attention table
DASH_DOT, LONG, SPARSE_DASH = (0, (6, 2, 1, 2)), (0, (10, 2)), (0, (3, 4))
NAMED, LEAST = 5, 0.01  # heads of a model that are named in panel f, where they move so much
TICK = 0.06  # height of the paper's attention on panel f's axis, whose recovery it does not give

# the paper's heads and features were ranked on the pairs that they are tested on
HEADS = Counts(
    study="heads",
    of="heads",
    ks=(1, 3, 5, 8, 12),
    curves=(
        Curve(effects="read_{k}", words="read heads", line="-"),
        Curve(
            effects="read_in_sample_{k}",
            words="read heads, in-sample",
            line="--",
            listed="read",
            last="read_12",
        ),
        Curve(effects="write_all_{k}", words="write heads, all aggregators", line=DASH_DOT),
        Curve(effects="write_{k}", words="write heads, one aggregator", line=LONG),
        Curve(
            effects="write_in_sample_{k}",
            words="write heads, one aggregator, in-sample",
            line=SPARSE_DASH,
            marker="^",
            last="write",
        ),
        Curve(effects="read_random_{k}", words="random heads (control)", line=":", marker="s", last="random"),
    ),
)
FEATURES = Counts(
    study="sae",
    of="features",
    ks=(1, 3, 10, 30),
    curves=(
        Curve(effects="clamp_{k}", words="best features", line="-"),
        Curve(effects="clamp_in_sample_{k}", words="best features, in-sample", line="--", paper="clamp_{k}"),
        Curve(effects="clamp_{k}_any_slot", words="best features, best slot", line=DASH_DOT),
        Curve(effects="random_{k}", words="random features (control)", line=":", marker="s", last="random"),
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
READ = _measures(
    "heads",
    (
        ("read_12", "Read: 12 read heads", "none"),
        ("read_in_sample_12", "Read: 12 read heads,\nin-sample", "read_12"),
        ("read_random_12", "Read: 12 random heads\n(control)", "random"),
        ("write_12", "Write: 12 heads at one\naggregator", "none"),
        ("write_in_sample_12", "Write: 12 heads at one\naggregator, in-sample", "write"),
        ("write_all_12", "Write: 12 heads at all\naggregators"),
        ("attention_1", "Read: the best head's\nattention to aggregators"),
    ),
)
NOTE = _measures(
    "scrubbing",
    (
        ("drift", "Scrub: drift"),
        ("drift_size", "Scrub: size of the drift"),
        ("note_swap", "Scrub: note of aggregators"),
        ("rest_swap", "Scrub: all but it"),
        ("note_swap_any_slot", "Scrub: note of any slots"),
        ("rest_swap_any_slot", "Scrub: all but those"),
    ),
)
SHARE = _measures(
    "attribution",
    (("attention", "Attn: share of the write"), ("attention_any_slot", "Attn: share, best slot\nof any kind")),
)
ALONG = _measures(
    "direction",
    (
        ("along", "Dir: along the direction"),
        ("random_own", "Dir: random (control)"),
        ("full", "Dir: full patch"),
        ("along_any_slot", "Dir: along it, best slot\nof any kind"),
    ),
)
SPARSE = _measures(
    "sae",
    (
        ("auc", "SAE: held-out AUC of the best\nfeature (the paper's: in-sample)"),
        ("ablate_30", "SAE: lost without the best 30", "ablate"),
    ),
)
FOLLOWS = Measure(study="heads", effect="attention_follows", label="rank correlation of attention and effect")
AUC = Measure(study="sae", effect="auc", label="held-out AUC of the best feature")
AUC_ANY = Measure(study="sae", effect="auc_any_slot", label="held-out AUC of the best feature, best slot", paper="none")
CHOSEN = "What is chosen was chosen on the other fold of the scenarios, but where it says in-sample, as in the paper."


# --- panels -----------------------------------------------------------------------------------------------


def panel_features(ax: Axes, models: Models) -> Said:
    """Recovery by features clamped; in words, how well the best one reads the conclusion on held-out scenarios."""
    from figures import style

    said = side.panel_counts(ax, models, FEATURES)
    for index, (model, found) in enumerate(models.items()):
        auc, best = side.cell(AUC, found), side.cell(AUC_ANY, found)
        if auc.value is not None or best.value is not None:
            words = f"{model}: {AUC.label} {auc.numbers}; best slot {best.numbers}"
            said += side.words(words, style.model_look(index)[0])
    return said


def panel_attention(ax: Axes, models: Models) -> Said:
    """Every read head that a fold named: its attention from the decision to aggregators, and what its z alone moves; in
    words, the strongest, and the rank correlation of the two over all heads."""
    from figures import style

    said: Said = []
    for index, (model, found) in enumerate(models.items()):
        colour, marker = style.model_look(index)
        points = _points(found)
        follows = side.cell(FOLLOWS, found)
        if points is None:
            said += side.words(f"{model}: {follows.why}", colour)
            continue
        x, y = [x for x, _ in points.values()], [y for _, y in points.values()]
        ax.plot(x, y, marker, color=colour, markersize=5, markeredgewidth=0)
        said += side.words(f"{model}: {_strongest(points)}; rank correlation {follows.numbers}", colour)
    for one in style.published()["heads"]["strongest"].values():
        ax.axvline(one["attention"], ymax=TICK, color=style.INK, linewidth=1.2)
    ax.axhline(0, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    ax.set_ylabel("recovery, z alone")
    return said


def _points(found: Found) -> dict[str, tuple[float, float]] | None:
    """A model's read heads; None where it has no record of them, or one that reports nothing."""
    from figures import page

    record = side.readable(found).get("heads")
    return None if record is None or not page.reported(record) else read_heads(record)


def _ranked(points: Mapping[str, tuple[float, float]]) -> list[str]:
    return sorted(points, key=lambda head: -points[head][1])[:NAMED]


def _strongest(points: Mapping[str, tuple[float, float]]) -> str:
    """The heads that move most, with what they move."""
    from figures import style

    named = [f"{head} {style.number(points[head][1])}" for head in _ranked(points) if points[head][1] > LEAST]
    return f"strongest {', '.join(named)}" if named else "no head moves it alone"


def rows_of_heads(models: Models) -> Iterator[list[str]]:
    """Each model's strongest read heads, a row a rank; in the first the paper's, whose attention alone is known."""
    from figures import style

    columns = [_cells(found) for found in models.values()]
    known = style.published()["heads"]["strongest"].items()
    words = [f"{model}: {one['head']}, attention {style.as_published(one['attention'])}" for model, one in known]
    for rank in range(NAMED):
        published = "; ".join(words) if rank == 0 else "-"
        yield [f"read head {rank + 1}: z alone, attention", *(column[rank] for column in columns), published]


def _cells(found: Found) -> list[str]:
    """The strongest heads of a model as cells of a table, as many as are named."""
    from figures import style

    points, why = side.attempt(lambda: _points(found), again="make probe-heads")
    if points is None:
        return [f"- ({side.in_short(why) or side.cell(FOLLOWS, found).why})"] * NAMED
    named = [
        f"{head}: R {style.number(points[head][1])}, attention {style.number(points[head][0])}"
        for head in _ranked(points)
    ]
    return [*named, *["-"] * NAMED][:NAMED]


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


PAGES = (
    Page(
        name="fig15",
        heading="The circuit by model (the paper's figure 15)",
        panels={
            "a": composed.lines("read and write heads, jointly patched", HEADS),
            "b": composed.rows("one direction of the residual", DIRECTION),
            "c": composed.rows("who writes the note", ATTRIBUTION, xlabel="share of the write, or recovery R"),
            "d": composed.rows("causal scrubbing", SCRUBBING),
            "e": composed.lines("SAE features: decode and cause", FEATURES, panel_features, said=(AUC, AUC_ANY)),
            "f": Panel(
                title="read heads: effect and attention",
                measures=(FOLLOWS,),
                draw=panel_attention,
                height=lambda models: composed.LINES,
                xlabel="attention from the decision to aggregators  (ticks: published)",
                listed=rows_of_heads,
                marks={"published, f: attention of the strongest read heads": "|"},
            ),
        },
        notes=(
            CHOSEN,
            "a: the paper's write heads are the top ones, of a number that it does not give; they stand at 12, as its "
            "read heads and the random ones do. e: its random features, without a number too, stand at 30. f: of its "
            "strongest read heads it gives the attention, not what each moves.",
        ),
    ),
    Page(
        name="table5",
        heading="The circuit in numbers (the paper's table 5)",
        panels={
            "heads": composed.rows("read and write heads", READ),
            "scrubbing": composed.rows("causal scrubbing", NOTE),
            "attribution": composed.rows("attention writes the note", SHARE, xlabel="share of the write"),
            "direction": composed.rows("one direction of the residual", ALONG),
            "sae": composed.rows("SAE features", SPARSE, xlabel="AUC, or recovery R"),
        },
        notes=(
            CHOSEN,
            "Read and Write: heads patched together. Scrub: cells resampled from other prompts of the scenario; the "
            "drift with the same conclusion, all else with the other one. Attn: at the causal layer. The paper's note "
            "is of aggregators (delimiters); beside it the best slots of any kind.",
        ),
    ),
)

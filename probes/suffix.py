"""Suffix concentration: which positions after the field, and which layers, hold what the decision reads.

Section 3 (2) of "Models Take Notes at Prefill" (arXiv 2606.17107), figure 3b. Every edit copies the target's cells into
base. First pass: each downstream position alone and all but it, each token class, each layer alone and from either
end. Second pass: the first k positions of a ranking, which scenarios of the other fold made (cross-fitted) or the
instance itself (in-sample, as the paper does), k at random from outside the first ranking's k, and, on a few
instances, every (layer, position) alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvnotes import effects, select, sites
from kvnotes.config import RunConfig
from kvnotes.instance import ROLES
from kvnotes.records import Effect, Instance, Measures, Summary, Table
from kvnotes.runner import main

if TYPE_CHECKING:
    from kvnotes.instance import TokenPair
    from kvnotes.interventions import CacheEdit
    from kvnotes.sweep import Trial

TITLE = "Suffix concentration: which positions and layers carry the decision"
MARGINS = {
    "notes": "",
    **dict.fromkeys(("single", "without"), "slot"),
    **dict.fromkeys(("layer", "up_to", "from"), "layer"),
    **dict.fromkeys(("group", "rest"), "class"),
    "ranked": "ranking count",
    "random": "count draw",
    "map": "layer slot",
}
PARTS = (0.5, 0.8, 0.95)  # of the effect, whose share of the positions is asked for
LAYERS = {"alone": "layer", "up to": "up_to", "from": "from"}
RANKINGS = {"top": "cross-fitted rank", "both": "cross-fitted rank with leave-one-out", "in_sample": "in-sample rank"}


class Settings(RunConfig):
    """The run's settings and the study's own."""

    draws: int = Field(ge=1, le=1000, description="random sets of positions for each number of positions")
    maps: int = Field(ge=0, description="instances a layout whose every (layer, position) is edited alone")


# --- measuring --------------------------------------------------------------------------------------------


def survey(trial: Trial, config: Settings) -> Measures:
    """Margins by position (in the order of the downstream), by class and by layer; all from the base."""
    pair, layers = trial.pair, range(trial.model.shape["layers"])
    notes = pair.downstream
    groups = _groups(pair)
    margins = _ask(
        trial,
        [_edit("notes", notes)]
        + [_edit(f"single:{p}", [p]) for p in notes]
        + [_edit(f"without:{p}", [q for q in notes if q != p]) for p in notes]
        + [_edit(f"group:{name}", positions) for name, positions in groups.items()]
        + [_edit(f"rest:{name}", [p for p in notes if p not in group]) for name, group in groups.items()]
        + [_edit(f"layer:{i}", notes, [i]) for i in layers]
        + [_edit(f"up_to:{i}", notes, layers[: i + 1]) for i in layers]
        + [_edit(f"from:{i}", notes, layers[i:]) for i in layers],
    )
    each = {name: [margins[f"{name}:{p}"] for p in notes] for name in ("single", "without")}
    depth = {name: [margins[f"{name}:{i}"] for i in layers] for name in ("layer", "up_to", "from")}
    by_group = {kind: {name: margins[f"{kind}:{name}"] for name in groups} for kind in ("group", "rest")}
    return {"notes": margins["notes"], **each, **depth, **by_group}


def prepare(instances: Sequence[Instance], config: Settings) -> dict[str, Any]:
    """Slots ranked on either fold, each instance's own ranking, and the instances to map."""
    return {
        "top": select.crossfit(instances, config.seed, lambda rows: select.rank(rows, sites.moved)),
        "both": select.crossfit(instances, config.seed, lambda rows: select.rank(rows, sites.either)),
        "in_sample": {one.id: _own_order(one) for one in instances},
        "maps": [one.id for layout in effects.layouts(instances) for one in _mapped(instances, layout, config.maps)],
    }


def measure(trial: Trial, config: Settings, plan: Mapping[str, Any]) -> Measures:
    """Margins by the number of positions, for each ranking and at random, and the map of a chosen instance."""
    pair, names = trial.pair.pair, select.slot_names(trial.pair)
    notes = trial.pair.downstream
    where = {"layout": pair.layout, "scenario": pair.scenario}
    rankings = {name: select.choice(plan[name], **where) for name in ("top", "both")}
    orders = {
        # a fold whose other has no pair that passes the gate has no ranking
        **{name: select.in_order(made, notes, lambda p: names[p]) for name, made in rankings.items() if made},
        "in_sample": plan["in_sample"][pair.id],
    }
    counts, best = _counts(len(notes)), orders.get("top", [])
    draws = {
        k: select.unmatched(notes, best[:k], n=config.draws, rng=select.generator(config.seed, pair.id, f"{k}"))
        for k in counts
    }
    mapped = range(trial.model.shape["layers"]) if pair.id in plan["maps"] else ()
    margins = _ask(
        trial,
        [_edit(f"{name}:{k}", order[:k]) for name, order in orders.items() for k in counts]
        + [_edit(f"random:{k}:{i}", one) for k, made in draws.items() for i, one in enumerate(made.sets)]
        + [_edit(f"map:{layer}:{p}", [p], [layer]) for layer in mapped for p in notes],
    )
    return {
        "counts": counts,
        "ranked": {name: [margins[f"{name}:{k}"] for k in counts] for name in orders},
        "random": [[margins[f"random:{k}:{i}"] for i in range(len(made.sets))] for k, made in draws.items()],
        "possible": [float(made.possible) for made in draws.values()],
        "map": [[margins[f"map:{layer}:{p}"] for p in notes] for layer in mapped],
    }


def identities(trial: Trial, measures: Measures) -> dict[str, float]:
    """All layers, counted from either end, and all positions of any ranking, are notes-only."""
    notes, scale = measures["notes"], max(1.0, abs(trial.unedited.gap))
    layers = (measures["up_to"][-1], measures["from"][0])
    ranks = [margins[-1] for margins in measures["ranked"].values()]
    return {
        "all layers equal notes-only": effects.worst(abs(margin - notes) for margin in layers) / scale,
        "all positions equal notes-only": effects.worst(abs(margin - notes) for margin in ranks) / scale,
    }


def _edit(name: str, positions: Sequence[int], layers: Sequence[int] | None = None) -> CacheEdit:
    from kvnotes.interventions import CacheEdit

    where = None if layers is None else tuple(layers)
    return CacheEdit(name=name, positions=tuple(positions), into="base", donor="target", layers=where)


def _ask(trial: Trial, edits: Sequence[CacheEdit]) -> dict[str, float]:
    """Margins by name, to 1e-6 logits, which is under any noise floor and keeps records small; one that edits nothing,
    such as all notes but the only one, is base's."""
    found = trial.margins([one for one in edits if one.positions])
    return {one.name: round(found.get(one.name, trial.unedited.base), 6) for one in edits}


def _groups(pair: TokenPair) -> dict[str, tuple[int, ...]]:
    """Downstream positions by token class, and by the key of a delimiter that has one (planted prompts name the
    delimiters that may hold a note by it); `other_positions` are those without such a key."""
    found: dict[str, list[int]] = {}
    for p in pair.downstream:
        span = pair.slots[p].span
        role, _, key = span.partition(".")
        for name in (role, *([key] if role == "delimiter" and key else [])):
            found.setdefault(name, []).append(p)
    keyed = {p for name, positions in found.items() if name not in ROLES for p in positions}
    if keyed:
        found["other_positions"] = [p for p in pair.downstream if p not in keyed]
    return {name: tuple(positions) for name, positions in found.items()}


def _mapped(instances: Sequence[Instance], layout: str, n: int) -> list[Instance]:
    """The first gated instances of a layout, one a scenario."""
    firsts: dict[str, Instance] = {}
    for one in instances:
        if one.status == "included" and one.layout == layout:
            firsts.setdefault(one.scenario, one)
    return list(firsts.values())[:n]


def _own_order(one: Instance) -> list[int]:
    return select.best(dict(zip(select.downstream(one), _moved(one, one.measures["single"]), strict=True)))


def _counts(n: int) -> list[int]:
    """How many positions are edited: powers of two, what lies halfway between them, and all."""
    steps = {k for i in range(n.bit_length()) for k in (2**i, 3 * 2**i)}
    return sorted({k for k in steps if k < n} | {n})


# --- an instance's numbers, from the record ---------------------------------------------------------------


def _moved(one: Instance, margins: Sequence[float]) -> list[float]:
    return [effects.moved(one, margin) for margin in margins]


def _ranked(one: Instance, ranking: str, k: int) -> float | None:
    """What the first k of a ranking move; None where the other fold ranked nothing."""
    margins = one.measures["ranked"].get(ranking)
    return None if margins is None else effects.moved(one, margins[one.measures["counts"].index(k)])


def _drawn(one: Instance, k: int) -> float | None:
    """The mean over the draws; None where there are none."""
    margins = one.measures["random"][one.measures["counts"].index(k)]
    return effects.moved(one, sum(margins) / len(margins)) if margins else None


def _carry(one: Instance, part: float) -> float | None:
    """The fewest positions, of the numbers tried, whose joint effect reaches a part of all notes'; as a share."""
    whole, counts = effects.moved(one, one.measures["notes"]), one.measures["counts"]
    reached = [(k, _ranked(one, "top", k)) for k in counts]
    enough = (k for k, moved in reached if k == counts[-1] or (moved is not None and moved >= part * whole))
    return None if whole <= 0 or None in dict(reached).values() else next(enough) / counts[-1]


def _sum_to(one: Instance, part: float) -> float | None:
    """The fewest positions whose single effects sum to a part of all positive ones; as a share."""
    values = sorted((max(0.0, value) for value in _moved(one, one.measures["single"])), reverse=True)
    enough = part * sum(values) * (1 - 1e-12)
    reached = (k for k in range(1, len(values) + 1) if sum(values[:k]) >= enough)
    return next(reached) / len(values) if enough else None


def _centroid(one: Instance) -> float | None:
    """The mean depth of the notes' effect: what each layer adds to those below it, and to those above it."""
    base, notes = effects.gate(one).base_margin, one.measures["notes"]
    up, down = [base, *one.measures["up_to"]], [*one.measures["from"], base]
    layers = len(up) - 1
    if layers < 2 or notes <= base:
        return None
    adds = [(up[i + 1] - up[i] + down[i] - down[i + 1]) / 2 for i in range(layers)]
    return sum(i * value for i, value in enumerate(adds)) / sum(adds) / (layers - 1)


# --- all instances ----------------------------------------------------------------------------------------

NOTES = (
    "Alone: these cells are the target's, all else is base's. Lost: what notes-only loses when they are base's.",
    "Cross-fitted positions were ranked on the scenarios of the other fold, in-sample ones on the pair itself, as the "
    "paper's are.",
    "Random positions come from outside the cross-fitted ranking's first k; above half of the positions none exist.",
    "p in tables: sign flips by scenario, corrected over the column; places in too few scenarios have no row.",
)


HEADLINE = {
    "notes_only": "all notes",
    "top_1": "best position",
    "top_8": "best 8",
    "random_8": "8 at random",
    "carry_80": "share of the positions that carries 80%",
}


def summarise(instances: Sequence[Instance], config: Settings, floor: float) -> Summary:
    """Recovery by number of positions and by part, gated and ungated; tables by slot, class, layer and draws."""
    return effects.summary(instances, config, floor, find=_effects, tables=_tables, headline=HEADLINE, notes=NOTES)


def _effects(scope: effects.Scope) -> Iterator[Effect]:
    yield scope.recovery("notes_only", "notes-only", lambda one: effects.moved(one, one.measures["notes"]), about=1.0)
    yield from _parts(scope)
    shared = set.intersection(*(set(one.measures["counts"]) for one in scope.rows)) if scope.rows else set()
    for k in sorted(k for k in shared if k.bit_count() == 1):
        yield from _at_k(scope, k)
    for part in PARTS:
        label = f"share of positions that carries {part:.0%}"
        yield scope.mean(f"carry_{part * 100:.0f}", f"{label}, cross-fitted", partial(_carry, part=part))
        label = f"{label} of the single effects, in-sample"
        yield scope.mean(f"single_{part * 100:.0f}", label, partial(_sum_to, part=part))
    yield scope.mean("depth_centroid", "depth centroid (0: first layer, 1: last)", _centroid)


def _parts(scope: effects.Scope) -> Iterator[Effect]:
    """The delimiters that have a name: alone, and all notes without them."""
    for name in dict.fromkeys(name for one in scope.rows for name in one.measures["group"] if name not in ROLES):
        for kind, key, label in (("group", name, "alone"), ("rest", f"without_{name}", "taken from all notes")):

            def value(one: Instance, kind: str = kind, name: str = name) -> float | None:
                return effects.moved(one, one.measures[kind][name]) if name in one.measures[kind] else None

            yield scope.recovery(key, f"{name.replace('_', ' ')} {label}", value)


def _at_k(scope: effects.Scope, k: int) -> Iterator[Effect]:
    """Recovery of k positions, by each ranking and at random."""
    for name, label in RANKINGS.items():
        yield scope.recovery(f"{name}_{k}", f"{k} by {label}", partial(_ranked, ranking=name, k=k))
    drawn = partial(_drawn, k=k)
    if scope.having(drawn).rows:
        yield scope.recovery(f"random_{k}", f"{k} at random", drawn, about=0.0, control=True)


def _tables(gated: effects.Scope, ungated: effects.Scope) -> dict[str, Table]:
    def group(one: Instance) -> dict[str, float]:
        return {n: effects.moved(one, margin) for n, margin in one.measures["group"].items() if n in ROLES}

    def rest(one: Instance) -> dict[str, float]:
        return {n: one.measures["notes"] - margin for n, margin in one.measures["rest"].items() if n in ROLES}

    def depth(one: Instance, key: str) -> dict[str, float]:
        return {str(i): value for i, value in enumerate(_moved(one, one.measures[key]))}

    layers = {name: partial(depth, key=key) for name, key in LAYERS.items()}
    return {
        "by slot": effects.places(
            "slot", {"alone": sites.moved, "lost": sites.lost}, largest_first=True, gated=gated, ungated=ungated
        ),
        "by class": effects.places(
            "class", {"alone": group, "lost": rest}, largest_first=True, gated=gated, ungated=ungated
        ),
        "by layer": effects.places("layer", layers, gated=gated, ungated=ungated),
        "random draws": _draws(ungated),
    }


def _draws(scope: effects.Scope) -> Table:
    """How many sets of positions could be drawn, by their size, over all used pairs."""
    found: dict[int, list[float]] = {}
    for one in scope.rows:
        for k, possible in zip(one.measures["counts"], one.measures["possible"], strict=True):
            found.setdefault(k, []).append(possible)
    rows = [[k, len(n), sum(x > 0 for x in n), min(n), max(n)] for k, n in sorted(found.items())]
    return Table(columns=("positions", "pairs", "pairs with draws", "fewest possible", "most possible"), rows=rows)


if __name__ == "__main__":
    main(__file__)

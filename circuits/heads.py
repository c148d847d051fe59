"""Heads: which attention heads read the conclusion at the decision, and which write it at the aggregators.

Appendix D (1) of "Models Take Notes at Prefill" (arXiv 2606.17107), figure 15a and f. First pass: what each head's z
adds to the margin directly, each head's z alone patched at the decision, each KV head's cells alone, and what the
gradient says of each head's z at the aggregators. Second pass: the best k heads of the other fold together, beside
random heads of the same layers; write heads at one aggregator and at all, with everything after them recomputed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvnotes import effects, heads, select, sites
from kvnotes.config import RunConfig
from kvnotes.heads import KS, NAMED, PLACES, READ, Place
from kvnotes.records import Effect, HypothesisTest, Instance, Measures, Summary, Table
from kvnotes.runner import main

if TYPE_CHECKING:
    from kvnotes.instance import TokenPair
    from kvnotes.sweep import Trial

TITLE = "Heads: which heads read the note, and which write it"
MARGINS = {
    "single": "slot",
    "notes": "",
    "alone": "head",
    "kv": "kv_head",
    "places.*.margins": "choice key draw",
    **dict.fromkeys(("places.*.margins.alone", "places.*.margins.others"), "head"),
}
MOST = 64  # heads that a ranking keeps
ATTENDED = {heads.AGGREGATOR: "aggregators", "action": "action words"}  # classes: every head's attention is kept
KEPT = 4  # aggregators of a pair, and slots of any class, at which the gradient is kept
RANKINGS = {
    "top": "cross-fitted",
    "patched": "cross-fitted on their z alone",
    "in_sample": "in-sample",
    "random": "others at random, of the same layers",
}
CONFIRMED = [place for place in PLACES.values() if place.confirmed]
CHOICES = {  # how heads are chosen at each place
    place: ("top", *(("patched",) if place == READ else ()), *(("in_sample",) if own.in_sample else ()), "random")
    for place, own in PLACES.items()
}


class Settings(RunConfig):
    """The run's settings and the study's own."""

    draws: int = Field(
        ge=1, le=1000, description="random sets of read heads for each number of heads, a fold, and permutations"
    )
    confirmed: int = Field(ge=NAMED, le=MOST, description="write heads kept by the gradient, and as many random ones")
    write_draws: int = Field(ge=1, le=1000, description="random sets of twelve write heads, a fold")


# --- measuring --------------------------------------------------------------------------------------------


def survey(trial: Trial, config: Settings) -> Measures:
    """By head: direct attribution in both arms, the margin with its z alone patched at the decision, first-order
    effects of its z downstream; by KV head, the margin with its downstream cells alone."""
    from kvnotes import direct

    shape, pair = trial.model.shape, trial.pair
    slots = sites.survey(trial)
    parts = {run: direct.attribute(trial, run) for run in ("base", "target")}
    reads = [heads.patched(f"z:{name}", [name], pair.query[-1:]) for name in heads.names(shape)]
    cells = [heads.cells(f"kv:{name}", name, pair.downstream) for name in heads.names(shape, "kv_heads")]
    margins = trial.margins([*reads, *cells])
    return {
        **slots,
        "per_layer": {"heads": shape["heads"], "kv_heads": shape["kv_heads"]},
        "attributed": {run: _kept(own) for run, own in parts.items()},
        "alone": [round(margins[one.name], 6) for one in reads],
        "kv": [round(margins[one.name], 6) for one in cells],
        "estimates": _estimates(trial, slots["single"]),
    }


def _kept(parts: Any) -> dict[str, Any]:
    rest = float(parts.biases.sum()) + parts.embedding + parts.unembedding
    return {"heads": heads.flat(parts.heads, 6), "mlps": heads.flat(parts.mlps, 6), "rest": rest, "sum": parts.total}


def _estimates(trial: Trial, single: Sequence[float]) -> dict[str, list[float]]:
    """First-order effects of each head's z, to 1e-4 logits, since they only rank: by slot, at the pair's own best
    aggregators and slots; at all aggregators, and at all downstream slots."""
    from kvnotes import direct

    pair, names, aggregators = trial.pair, select.slot_names(trial.pair), sites.aggregators(trial.pair)
    own = select.best(dict(zip(pair.downstream, single, strict=True)))
    kept = {*[p for p in own if p in aggregators][:KEPT], *own[:KEPT]}
    places = {names[p]: (p,) for p in sorted(kept)} | {"write_all": aggregators, "write_all_slots": pair.downstream}
    found = direct.first_order(trial, {name: where for name, where in places.items() if where})
    return {name: heads.flat(values, 4) for name, values in found.items()}


def prepare(instances: Sequence[Instance], config: Settings) -> dict[str, Any]:
    """Slots and heads ranked on each fold's gated instances, and (in-sample) heads on all of a layout."""
    rankings: dict[str, Callable[[Sequence[Instance]], list[str]]] = {
        READ: partial(_ranked, moved=_attributed),
        **{name: partial(_writers, place=place) for name, place in PLACES.items() if name != READ},
    }
    others = {"patched": partial(_ranked, moved=_alone), "kv": partial(_ranked, moved=_kv)}
    gated = [one for one in instances if one.status == "included"]
    pooled = {layout: [one for one in gated if one.layout == layout] for layout in effects.layouts(instances)}
    return {
        "slots": sites.prepare(instances, config),
        "crossfit": {name: select.crossfit(instances, config.seed, rank) for name, rank in (rankings | others).items()},
        "in_sample": {
            name: {layout: rankings[name](rows) for layout, rows in pooled.items()}
            for name, place in PLACES.items()
            if place.in_sample
        },
    }


def _ranked(rows: Sequence[Instance], moved: Callable[[Instance], Mapping[str, float]]) -> list[str]:
    return select.rank(rows, moved)[:MOST]


def _writers(rows: Sequence[Instance], place: Place) -> list[str]:
    """Heads by their first-order effect; a single slot is the best of these instances' own that a pair has."""
    slots = [s for s in select.rank(rows, sites.moved) if place.any_slot or select.slot_class(s) == sites.AGGREGATOR]
    order = slots if place.single else [place.name]

    def moved(one: Instance) -> dict[str, float]:
        known = one.measures["estimates"]
        where = next((name for name in order if name in known), None)
        return {} if where is None else _by_head(one, known[where])

    return _ranked(rows, moved)


def measure(trial: Trial, config: Settings, plan: Mapping[str, Any]) -> Measures:
    """Margins by place: of the best k heads, as each ranking has them, of random ones, and of single write heads; what
    the read heads attend to."""
    pair, every = trial.pair, heads.names(trial.model.shape)
    found = {name: _asked(pair, config, plan, place, every) for name, place in PLACES.items()}
    asked = {f"{place} {name}": one for place, here in found.items() for name, one in here.sets.items()}
    margins = trial.margins([heads.patched(name, some, where) for name, (some, where) in asked.items()])
    return {
        "fold": plan["crossfit"][READ][pair.pair.layout]["folds"][pair.pair.scenario],
        "places": {
            place: {**here.about, "margins": heads.nested({n: round(margins[f"{place} {n}"], 6) for n in here.sets})}
            for place, here in found.items()
            if here.sets
        },
        "kv_best": heads.order(plan, pair, "kv", heads.names(trial.model.shape, "kv_heads"))[0],
        "attention": _attention(trial, found[READ], every),
    }


def _asked(
    pair: TokenPair, config: Settings, plan: Mapping[str, Any], place: Place, every: Sequence[str]
) -> heads.Asked:
    """The sets of heads that are patched at a place: more of them where heads are confirmed, and at the decision."""
    n = config.draws if place.name == READ else config.write_draws
    made = heads.ask(pair, plan, place, every, draws=n, confirmed=config.confirmed, seed=config.seed)
    if place.name != READ:
        return made
    at, patched, rest = pair.query[-1:], heads.order(plan, pair, "patched", every), made.order[NAMED:]
    more = {f"patched:{k}": (patched[:k], at) for k in KS} | {"all:heads": (list(every), at)}
    return replace(made, sets={**made.sets, **more, **({"all:rest": (rest, at)} if rest else {})})


def _attention(trial: Trial, reads: heads.Asked, every: Sequence[str]) -> dict[str, Any]:
    """Shares of the attention from the decision: of every head to some classes; to all classes, of each named read head
    and of random ones, on average."""
    shares = heads.attention(trial)
    at = {name: i for i, name in enumerate(every)}
    drawn = [at[head] for one in reads.drawn for head in one]
    return {
        "heads": {name: shares.get(name, [0.0] * len(every)) for name in ATTENDED},
        "named": {head: {name: values[at[head]] for name, values in shares.items()} for head in reads.about["named"]},
        "random": {name: round(statistics.fmean(values[i] for i in drawn), 6) for name, values in shares.items()}
        if drawn
        else {},
    }


def identities(trial: Trial, measures: Measures) -> dict[str, float]:
    """The parts of either arm sum to its margin; all heads' z at the decision are all that the arms differ in there."""
    scale, both = max(1.0, abs(trial.unedited.gap)), measures["attributed"]
    errors = [abs(both[run]["sum"] - getattr(trial.unedited, run)) for run in ("base", "target")]
    whole = measures["places"][READ]["margins"]["all"]["heads"]
    return {
        "attributed parts sum to the margin": effects.worst(errors) / scale,
        "all heads' z equal target": abs(whole - trial.unedited.target) / scale,
    }


# --- an instance's numbers, from the record ---------------------------------------------------------------


def _moved(one: Instance, margin: float) -> float:
    """How far a margin lies from base's, to 1e-5 logits: what does nothing is 0, and not another rounding."""
    return round(effects.moved(one, margin), 5) + 0.0


def _by_head(one: Instance, values: Sequence[float], kind: str = "heads") -> dict[str, float]:
    return heads.named(values, one.measures["per_layer"][kind])


def _attributed(one: Instance) -> dict[str, float]:
    """What each head adds to the target's margin more than to the base's."""
    base, target = (one.measures["attributed"][run]["heads"] for run in ("base", "target"))
    return _by_head(one, [b - a for a, b in zip(base, target, strict=True)])


def _alone(one: Instance) -> dict[str, float]:
    return _by_head(one, [_moved(one, margin) for margin in one.measures["alone"]])


def _kv(one: Instance) -> dict[str, float]:
    return _by_head(one, [_moved(one, margin) for margin in one.measures["kv"]], "kv_heads")


def _direct(one: Instance, part: str) -> float:
    """What all heads, all MLPs or the rest add to the target's margin more than to the base's."""
    base, target = (one.measures["attributed"][run][part] for run in ("base", "target"))
    return target - base if part == "rest" else sum(target) - sum(base)


def _margins(one: Instance, place: str, kind: str) -> Mapping[str, Any]:
    return one.measures["places"].get(place, {}).get("margins", {}).get(kind, {})


def _at(one: Instance, place: str, kind: str, key: str) -> float | None:
    """What a set of heads moves; the mean over the draws of random ones."""
    margin = _margins(one, place, kind).get(key)
    if isinstance(margin, list):
        margin = statistics.fmean(margin)
    return None if margin is None else _moved(one, margin)


def _drawn(one: Instance, place: str, kind: str, key: str) -> list[float]:
    return [_moved(one, margin) for margin in _margins(one, place, kind).get(key, [])]


def _singles(one: Instance, place: str, kinds: Sequence[str] = ("alone", "others")) -> dict[str, float]:
    """What each confirmed write head moves alone; where it is one that was screened, or a random one."""
    return {head: _moved(one, margin) for kind in kinds for head, margin in _margins(one, place, kind).items()}


def _sum(one: Instance, place: str, kind: str) -> float | None:
    """What confirmed heads move alone, added up; None where there are none."""
    found = _singles(one, place, (kind,))
    return sum(found.values()) if found else None


def _named(one: Instance, place: str, head: str) -> float | None:
    """What a head moves alone, where the other fold names it."""
    if head not in one.measures["places"].get(place, {}).get("named", ()):
        return None
    return (_alone(one) if place == READ else _singles(one, place))[head]


def _attends(one: Instance, which: str, name: str) -> float | None:
    """The attention of the first, or all, named read heads, or of random ones, to a class."""
    found = one.measures["attention"]
    if which == "random":
        return found["random"].get(name, 0.0) if found["random"] else None
    shares = [own.get(name, 0.0) for own in found["named"].values()]
    return shares[0] if which == "first" else statistics.fmean(shares)


def _follows(one: Instance, name: str) -> float | None:
    """The rank correlation over heads of attention to a class with what the z alone moves."""
    return _correlation(one.measures["attention"]["heads"][name], list(_alone(one).values()), ranks=True)


def _foretold(one: Instance, place: str) -> float | None:
    """The correlation over confirmed heads of the gradient's estimate with what the z alone moves."""
    here = one.measures["places"].get(place)
    if here is None:
        return None
    slot = place if place == "write_all" else select.instance_slots(one)[here["positions"][0]]
    if slot not in one.measures["estimates"]:
        return None
    exact, guessed = _singles(one, place), _by_head(one, one.measures["estimates"][slot])
    return _correlation([guessed[head] for head in exact], list(exact.values()), ranks=False)


def _correlation(x: Sequence[float], y: Sequence[float], *, ranks: bool) -> float | None:
    """None where there is no spread."""
    from scipy.stats import rankdata

    if len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return statistics.correlation(*(rankdata(values).tolist() if ranks else values for values in (x, y)))


# --- all instances ----------------------------------------------------------------------------------------

NOTES = (
    "Top heads were ranked on the scenarios of the other fold: read heads by the difference between the arms of what "
    "their z adds to the margin directly, write heads by the gradient. In-sample: ranked on all pairs that pass the "
    "gate, as the paper's are; their single aggregator is the pair's own best.",
    "Random heads are of the same layers as the best, none of them; where a layer has too few, of others. Drawn once a "
    "fold.",
    "p of the best k read heads: how often they recover as much with the heads' names permuted within their layers, "
    "alike in both folds; corrected over the numbers of heads. Write heads are not tested: too few sets.",
    "Query heads and KV heads are not the same: with grouped queries several heads read one KV head's cells.",
    "A named head is tested on the scenarios of the fold that did not name it.",
)
HEADLINE = {
    "read_12": "12 read heads",
    "read_in_sample_12": "in-sample",
    "read_random_12": "12 at random",
    "write_12": "12 write heads at one aggregator",
    "write_all_12": "at all aggregators",
    "write_all_slots_12": "at all slots",
}


def summarise(instances: Sequence[Instance], config: Settings, floor: float) -> Summary:
    """Recovery by number of heads and place, of named heads and of KV heads; attention; tables by head."""
    return effects.summary(instances, config, floor, find=_effects, tables=_tables, headline=HEADLINE, notes=NOTES)


def _effects(scope: effects.Scope) -> Iterator[Effect]:
    for place in PLACES.values():
        tests = _tests(scope, place)
        for kind in CHOICES[place.name]:
            for k in place.drawn if kind == "random" else KS:
                one = _joint(scope, place, kind, k)
                tested = kind == "top" and k in tests and one.estimate is not None
                yield one.model_copy(update={"test": tests[k]}) if tested else one
    yield _recovery(scope, "all_heads", "all heads at the decision (identity)", (READ, "all", "heads"), about=1.0)
    yield _recovery(scope, "read_rest", f"all heads but the best {NAMED}", (READ, "all", "rest"))
    for part in ("heads", "mlps", "rest"):
        label = {"heads": "all heads", "mlps": "all MLPs", "rest": "embedding and biases"}[part]
        yield scope.recovery(f"direct_{part}", f"attributed directly to {label}", partial(_direct, part=part))
    for place in CONFIRMED:
        yield from _named_heads(scope, place)
        yield from _screened(scope, place) if place.name != READ else ()
    yield from _kv_heads(scope)
    yield from _attending(scope)


def _recovery(scope: effects.Scope, name: str, label: str, where: tuple[str, str, str], **more: Any) -> Effect:
    return scope.recovery(name, label, lambda one: _at(one, *where), **more)


def _joint(scope: effects.Scope, place: Place, kind: str, k: int) -> Effect:
    """Recovery of k heads at once."""
    name = f"{place.name}_{k}" if kind == "top" else f"{place.name}_{kind}_{k}"
    more: dict[str, Any] = {"about": 0.0, "control": True} if kind == "random" else {}
    return _recovery(scope, name, f"{k} {place.label}, {RANKINGS[kind]}", (place.name, kind, f"{k}"), **more)


def _tests(scope: effects.Scope, place: Place) -> dict[int, HypothesisTest]:
    """Whether the best k move more than they do with the heads' names permuted, corrected over k; none where none were
    permuted, as in records that were made before."""
    at, drawn = partial(_at, place=place.name, kind="top"), partial(_drawn, place=place.name, kind="permuted")
    found = scope.permutation_ps({k: (partial(at, key=f"{k}"), partial(drawn, key=f"{k}")) for k in KS})
    words = "heads permuted within their layers, {} times, BH over {}"
    return {k: effects.different(words.format(n, len(found)), p) for k, (p, n) in found.items()}


def _named_heads(scope: effects.Scope, place: Place) -> Iterator[Effect]:
    """Heads that a fold names, each alone, on the scenarios of the other."""
    prefix = "head" if place.name == READ else f"{place.name}_head"
    about = [one.measures["places"].get(place.name, {}) for one in scope.rows]
    known = dict.fromkeys(head for own in about for head in own.get("named", ()))
    members = {f"{prefix}_{head}": partial(_named, place=place.name, head=head) for head in known}
    yield from scope.family(members, label=lambda name: f"{name.rpartition('_')[2]} alone, of the {place.label}")


def _screened(scope: effects.Scope, place: Place) -> Iterator[Effect]:
    """What the confirmed heads move one by one, added up, beside as many random ones; one random head, on average; how
    well the gradient knew."""
    name, label = place.name, f"sum of single {place.label}"
    kept, others = (partial(_sum, place=name, kind=kind) for kind in ("alone", "others"))
    yield scope.recovery(f"{name}_sum", f"{label}, kept by the gradient", kept)
    label = f"{label}, at random, of the same layers"
    yield scope.recovery(f"{name}_sum_random", label, others, about=0.0, control=True)

    def each(one: Instance) -> float | None:
        found = _singles(one, name, ("others",))
        return statistics.fmean(found.values()) if found else None

    yield scope.recovery(f"{name}_random_1", f"1 of the {place.label}, at random", each, about=0.0, control=True)
    yield scope.mean(f"{name}_foretold", f"{place.label}: gradient against patch, r", partial(_foretold, place=name))


def _kv_heads(scope: effects.Scope) -> Iterator[Effect]:
    """The best KV head's downstream cells in one layer, and the mean of all others."""

    def best(one: Instance) -> float:
        return _kv(one)[one.measures["kv_best"]]

    def others(one: Instance) -> float:
        values = _kv(one)
        return (sum(values.values()) - values[one.measures["kv_best"]]) / max(1, len(values) - 1)

    yield scope.recovery("kv_1", "best KV head's cells, cross-fitted", best)
    yield scope.recovery("kv_in_sample_1", "best KV head's cells, in-sample", lambda one: max(_kv(one).values()))
    yield scope.recovery("kv_others", "any other KV head's cells", others, about=0.0, control=True)


def _attending(scope: effects.Scope) -> Iterator[Effect]:
    """What the read heads attend to from the decision, as shares of 1, and whether heads that do so move it."""
    for name, words in ATTENDED.items():
        to, stem = (
            f"attention from the decision to {words}",
            "attention" if name == heads.AGGREGATOR else f"attention_{name}",
        )
        for which, key, label in (
            ("first", "1", "best read head's"),
            ("all", f"{NAMED}", f"best {NAMED} read heads'"),
            ("random", f"random_{NAMED}", f"{NAMED} random heads'"),
        ):
            value = partial(_attends, which=which, name=name)
            yield scope.mean(f"{stem}_{key}", f"{label} {to}", value, control=which == "random")
        label = f"rank correlation over heads: {to}, z alone"
        yield scope.mean(f"{stem}_follows", label, partial(_follows, name=name))


# --- tables ----------------------------------------------------------------------------------------------


def _tables(gated: effects.Scope, ungated: effects.Scope) -> dict[str, Table]:
    reads = {"direct": _attributed, "alone": _alone}
    places = partial(effects.places, gated=gated, ungated=ungated, largest_first=True)
    return {
        "read heads": places("head", reads),
        **{
            place.label: places("head", {"alone": partial(_singles, place=place.name)})
            for place in CONFIRMED
            if place.name != READ
        },
        "KV heads": places("KV head", {"alone": _kv}),
        "attention of the read heads": _attention_table(gated),
        "random draws": _draw_table(ungated),
    }


def _attention_table(scope: effects.Scope) -> Table:
    """Mean shares of the attention from the decision by token class: each named head over the pairs it is tested on,
    and random heads."""
    rows = scope.rows
    attended = [one.measures["attention"] for one in rows]
    classes = list(dict.fromkeys(name for own in attended for some in own["named"].values() for name in some))
    shares: dict[str, list[Mapping[str, float]]] = {}
    for own in attended:
        for name, found in (*own["named"].items(), *([("at random", own["random"])] if own["random"] else [])):
            shares.setdefault(name, []).append(found)
    made: list[list[Any]] = [
        [name, len(some), *(round(statistics.fmean(own.get(key, 0.0) for own in some), 4) for key in classes)]
        for name, some in shares.items()
    ]
    made.sort(key=lambda row: (row[0] == "at random", -row[1]))
    return Table(columns=("head", "pairs", *classes), rows=made)


def _draw_table(scope: effects.Scope) -> Table:
    """How many sets of heads could be drawn, by place and number, and in how many pairs all were of the same layers."""
    columns = ("heads", "k", "pairs", "pairs with the same layers", "fewest possible", "most possible")
    made: list[list[Any]] = []
    for name, place in PLACES.items():
        about = [one.measures["places"][name] for one in scope.rows if name in one.measures["places"]]
        for k in place.drawn if about else ():
            possible, exact = ([own[key][f"{k}"] for own in about] for key in ("possible", "exact"))
            made.append([place.label, k, len(about), sum(exact), min(possible), max(possible)])
    return Table(columns=columns, rows=made)


if __name__ == "__main__":
    main(__file__)

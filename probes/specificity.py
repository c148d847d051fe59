"""Specificity: do a few positions carry the decision, or would any others do?

Section 3 (iii) and appendix C (iii) of "Models Take Notes at Prefill" (arXiv 2606.17107), table 4. The k slots with the
highest single effect, ranked on the other fold's scenarios (cross-fitted) or on the pair itself (in-sample, as the
paper does), against k others at random: any, or matched on token class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvnotes import effects, select, sites
from kvnotes.config import RunConfig
from kvnotes.records import Effect, HypothesisTest, Instance, Measures, Summary, Table
from kvnotes.runner import main

if TYPE_CHECKING:
    from kvnotes.sweep import Trial

TITLE = "Specificity: the best positions against others at random"
MARGINS = {"notes": "", "single": "slot", "best": "choice count", "drawn": "kind count draw"}
KS = (1, 2, 4, 8, 16)
K = 8  # the paper's number
CHOSEN = {"top": "cross-fitted", "in_sample": "in-sample"}
DRAWN = ("random", "near")
PERMUTED = {"any": "random", "class": "near"}  # the draws beside which each test stands
WITHIN = {"any": "among all", "class": "within their classes"}
CONTROLS = {
    "random": "any others",
    "near": "others, matched on class as far as they go",
    "matched": "others, matched on class",
}


class Settings(RunConfig):
    """The run's settings and the study's own."""

    draws: int = Field(ge=1, le=1000, description="random sets of eight positions, and as many matched on class")
    fewer: int = Field(ge=1, le=1000, description="random sets of any other number of positions")


# --- measuring --------------------------------------------------------------------------------------------


def survey(trial: Trial, config: Settings) -> Measures:
    """The margin of all notes, and of each downstream position alone, in their order."""
    return sites.survey(trial)


def prepare(instances: Sequence[Instance], config: Settings) -> dict[str, Any]:
    """What either fold is tested with: the other's best slots, of those that every pair has, and random sets of the
    remaining ones; and each instance's own best positions."""
    layouts = effects.layouts(instances)
    shared = {layout: _shared([one for one in instances if one.layout == layout]) for layout in layouts}

    def choose(rows: Sequence[Instance]) -> dict[str, Any]:
        if not rows:
            return {}
        slots = shared[rows[0].layout]
        best = [slot for slot in select.rank(rows, sites.moved) if slot in slots][: max(KS)]
        return {"top": best, "sets": {str(k): _sets(slots, best[:k], config) for k in KS if k <= len(best)}}

    return {
        "tested": select.crossfit(instances, config.seed, choose),
        "in_sample": {one.id: _own(one)[: max(KS)] for one in instances},
    }


def _shared(instances: Sequence[Instance]) -> list[str]:
    """The downstream slots that all instances have, in the first one's order."""
    named = [select.by_slot(one, one.measures["single"]) for one in instances]
    return [slot for slot in named[0] if all(slot in one for one in named)]


def _sets(slots: Sequence[str], best: Sequence[str], config: Settings) -> dict[str, Any]:
    """Random sets of as many other slots, once for all scenarios of a fold, as the best are: of any class, and of the
    best's classes as far as they go."""
    k, chosen = len(best), [slots.index(slot) for slot in best]
    n = config.draws if k == K else config.fewer

    def rng(kind: str) -> Random:
        return select.generator(config.seed, *best, f"{kind} {k}")

    made = {
        "random": select.unmatched(range(len(slots)), chosen, n=n, rng=rng("random")),
        "near": select.near(
            range(len(slots)), chosen, classes=lambda at: select.slot_class(slots[at]), n=n, rng=rng("near")
        ),
    }
    sets = {
        kind: {"sets": [[slots[at] for at in one] for one in draws.sets], "possible": draws.possible}
        for kind, draws in made.items()
    }
    permuted = {kind: {"sets": _permuted(slots, best, config, kind=kind)} for kind in PERMUTED if k == K}
    return {**sets, **permuted, "exact": made["near"].exact}


def _permuted(slots: Sequence[str], best: Sequence[str], config: Settings, *, kind: str) -> list[list[str]]:
    """The best slots after permutations of all slots, or of each class's. The permutations are the same whatever is
    best: two folds that choose the same slots are tested with one choice, not with two."""
    classes = select.slot_class if kind == "class" else lambda _: ""
    images = select.permutations(slots, classes=classes, n=config.draws, seed=config.seed, words=[kind])
    return [[image[slot] for slot in best] for image in images]


def measure(trial: Trial, config: Settings, plan: Mapping[str, Any]) -> Measures:
    """Margins of the best k, and of random sets that have none of the cross-fitted best k, by k. A fold whose other
    has no pair that passes the gate has no cross-fitted best."""
    pair, notes, names = trial.pair.pair, trial.pair.downstream, select.slot_names(trial.pair)
    at = {names[p]: p for p in notes}
    tested = select.choice(plan["tested"], layout=pair.layout, scenario=pair.scenario)
    sets = tested.get("sets", {})
    chosen = {"top": [at[slot] for slot in tested.get("top", ())], "in_sample": plan["in_sample"][pair.id]}
    best = {f"{name}:{k}": order[:k] for name, order in chosen.items() for k in KS if k <= len(order)}
    drawn = {
        f"{kind}:{k}:{i}": [at[slot] for slot in one]
        for k, made in sets.items()
        for kind in (*DRAWN, *PERMUTED)
        for i, one in enumerate(made.get(kind, {}).get("sets", ()))
    }
    margins = _ask(trial, {**best, **drawn})
    return {
        "fold": plan["tested"][pair.layout]["folds"][pair.scenario],
        "chosen": chosen,
        "best": {
            name: {str(k): margins[f"{name}:{k}"] for k in KS if k <= len(order)} for name, order in chosen.items()
        },
        "drawn": {
            kind: {
                k: [margins[f"{kind}:{k}:{i}"] for i in range(len(made[kind]["sets"]))]
                for k, made in sets.items()
                if kind in made
            }
            for kind in (*DRAWN, *PERMUTED)
        },
        "possible": {kind: {k: float(made[kind]["possible"]) for k, made in sets.items()} for kind in DRAWN},
        "exact": {k: made["exact"] for k, made in sets.items()},
    }


def identities(trial: Trial, measures: Measures) -> dict[str, float]:
    """The best single position, edited again in the second pass, is what it was in the first."""
    best = trial.pair.downstream.index(measures["chosen"]["in_sample"][0])
    difference = measures["best"]["in_sample"]["1"] - measures["single"][best]
    return {"both passes agree": abs(difference) / max(1.0, abs(trial.unedited.gap))}


def _ask(trial: Trial, positions: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Base's margins with the target's cells at these positions, to 1e-6 logits, which keeps records small."""
    from kvnotes.interventions import CacheEdit

    edits = [CacheEdit(name=name, positions=tuple(at), into="base", donor="target") for name, at in positions.items()]
    return {name: round(margin, 6) for name, margin in trial.margins(edits).items()}


# --- an instance's numbers, from the record ---------------------------------------------------------------


def _own(one: Instance) -> list[int]:
    return select.best(dict(zip(select.downstream(one), one.measures["single"], strict=True)))


def _best(one: Instance, name: str, k: int) -> float | None:
    """What the best k move; None where the prompt is too short for them, or nothing was ranked."""
    margin = one.measures["best"][name].get(str(k))
    return None if margin is None else effects.moved(one, margin)


def _drawn(one: Instance, kind: str, k: int) -> list[float]:
    """What each draw moves; none where there are none. "matched" are the draws that match every class."""
    if kind == "matched" and not one.measures["exact"].get(str(k)):
        return []
    margins = one.measures["drawn"]["near" if kind == "matched" else kind].get(str(k), [])
    return [effects.moved(one, margin) for margin in margins]


def _mean(one: Instance, kind: str, k: int) -> float | None:
    drawn = _drawn(one, kind, k)
    return sum(drawn) / len(drawn) if drawn else None


def _gain(one: Instance, kind: str, k: int) -> float | None:
    best, mean = _best(one, "top", k), _mean(one, kind, k)
    return None if best is None or mean is None else best - mean


def _classes(one: Instance, name: str) -> Counter[str]:
    """How many of the best eight are of each class."""
    names = select.instance_slots(one)
    return Counter(select.slot_class(names[p]) for p in one.measures["chosen"][name][:K])


def _delimiters(one: Instance, name: str) -> float | None:
    """Their share of the best eight; None where there are no such eight."""
    chosen = one.measures["chosen"][name][:K]
    return _classes(one, name)["delimiter"] / len(chosen) if chosen else None


def _shares(one: Instance) -> dict[str, float]:
    """Each class's share of the downstream positions."""
    names, notes = select.instance_slots(one), select.downstream(one)
    counted = Counter(select.slot_class(names[p]) for p in notes)
    return {role: count / len(notes) for role, count in counted.items()}


# --- all instances ----------------------------------------------------------------------------------------

NOTES = (
    "Best: highest single effect, ranked on the scenarios of the other fold (cross-fitted, of the slots that every "
    "pair has) or on the pair itself (in-sample, as the paper's are). No random slot is among the cross-fitted best k.",
    "Random sets of slots are drawn once a fold, as the best are chosen once: the same for all its scenarios.",
    "Matched draws have as many positions of each token class as the best k. Where a class has too few others, the "
    "draws 'as far as they go' take all of them and fill up with classes that the best k lack.",
    "p of a gain: how often the best eight recover as much with their slots permuted, alike in both folds: among all, "
    "or within their classes, where a class of which all members are chosen stays as it is.",
    "Slots are those that every used pair has; the in-sample best are of all of a pair's positions.",
)


HEADLINE = {
    "notes_only": "all notes",
    "top_8": "best 8",
    "in_sample_8": "in-sample",
    "random_8": "any 8 others",
    "near_8": "8 matched as far as they go",
}


def summarise(instances: Sequence[Instance], config: Settings, floor: float) -> Summary:
    """Recovery of the best k and of random ones, gains, and the classes of the best eight."""
    return effects.summary(instances, config, floor, find=_effects, tables=_tables, headline=HEADLINE, notes=NOTES)


def _effects(scope: effects.Scope) -> Iterator[Effect]:
    yield scope.recovery("notes_only", "notes-only", lambda one: effects.moved(one, one.measures["notes"]), about=1.0)
    for (name, label), k in product(CHOSEN.items(), KS):
        yield scope.recovery(f"{name}_{k}", f"best {k}, {label}", partial(_best, name=name, k=k))
    for (kind, label), k in product(CONTROLS.items(), KS):
        yield scope.recovery(f"{kind}_{k}", f"{k} {label}", partial(_mean, kind=kind, k=k), about=0.0, control=True)
    yield from _gains(scope)
    yield scope.share("beats_8", "best 8 above every random 8", _beats)
    yield scope.mean("delimiters_8", "delimiters among the best 8, cross-fitted", partial(_delimiters, name="top"))
    label = "delimiters among the best 8, in-sample"
    yield scope.mean("delimiters_in_sample_8", label, partial(_delimiters, name="in_sample"))
    yield scope.mean("delimiters_all", "delimiters among all positions", _all_delimiters, control=True)


def _all_delimiters(one: Instance) -> float:
    return _shares(one).get("delimiter", 0.0)


def _beats(one: Instance) -> bool | None:
    drawn, best = _drawn(one, "random", K), _best(one, "top", K)
    return best > max(drawn) if drawn and best is not None else None


def _gains(scope: effects.Scope) -> Iterator[Effect]:
    """What the best k recover more than random ones; of eight with the p-values of permuted slots."""
    tests = _tests(scope)
    for (kind, label), k in product(CONTROLS.items(), KS):
        moved = partial(_gain, kind=kind, k=k)
        gain = scope.recovery(f"gain_{kind}_{k}", f"best {k} less {k} {label}", moved)
        test = tests.get(kind) if k == K and gain.estimate is not None else None
        yield gain.model_copy(update={"test": test})


def _tests(scope: effects.Scope) -> dict[str, HypothesisTest]:
    """By the draws that it stands beside: of eight slots permuted among all, and within their classes."""
    best = partial(_best, name="top", k=K)
    found = scope.permutation_ps({kind: (best, partial(_drawn, kind=kind, k=K)) for kind in PERMUTED})
    words = "slots permuted {}, {} times, BH over {}"
    return {
        PERMUTED[kind]: effects.different(words.format(WITHIN[kind], n, len(found)), p)
        for kind, (p, n) in found.items()
    }


# --- tables ----------------------------------------------------------------------------------------------


def _tables(gated: effects.Scope, ungated: effects.Scope) -> dict[str, Table]:
    return {
        "classes of the best 8": _class_table(gated.rows),
        "slots of the best 8": _slot_table(gated.rows),
        "random draws": _count_table(ungated.rows),
    }


def _class_table(rows: Sequence[Instance]) -> Table:
    """Mean number of each class among the best eight, and among eight of the downstream at random."""
    counts = {name: [_classes(one, name) for one in rows] for name in CHOSEN}
    shares = [_shares(one) for one in rows]
    roles = dict.fromkeys(role for one in shares for role in one)
    found = [
        (
            role,
            *(round(sum(one[role] for one in counts[name]) / len(rows), 3) for name in CHOSEN),
            round(K * sum(one.get(role, 0.0) for one in shares) / len(rows), 3),
        )
        for role in roles
    ]
    rows_: list[list[Any]] = [list(row) for row in sorted(found, key=lambda row: -float(row[1]))]
    return Table(columns=("class", *CHOSEN.values(), "8 at random"), rows=rows_)


def _slot_table(rows: Sequence[Instance]) -> Table:
    """In what share of the gated pairs a slot is among the best eight."""
    counted = {name: Counter[str]() for name in CHOSEN}
    for one in rows:
        names = select.instance_slots(one)
        for name in CHOSEN:
            counted[name].update(names[p] for p in one.measures["chosen"][name][:K])
    slots = counted["top"] | counted["in_sample"]
    order = sorted(slots, key=lambda slot: (*(-counted[name][slot] for name in CHOSEN), slot))
    found = [[slot, *(round(counted[name][slot] / len(rows), 3) for name in CHOSEN)] for slot in order]
    return Table(columns=("slot", *CHOSEN.values()), rows=found)


def _count_table(rows: Sequence[Instance]) -> Table:
    """How many random sets of slots there were, over all used pairs."""
    found: list[list[Any]] = []
    for k in KS:
        here = [one.measures for one in rows if str(k) in one.measures["exact"]]
        if not here:
            continue
        free, near = ([m["possible"][kind][str(k)] for m in here] for kind in DRAWN)
        exact = [count for m, count in zip(here, near, strict=True) if m["exact"][str(k)] and count]
        ends = (end for counts in (free, near, exact) for end in (min(counts, default=0), max(counts, default=0)))
        found.append([k, len(here), len(exact), *ends])
    kinds = ("any", "as far as they go", "matched")
    ends = (f"{which} {kind}" for kind in kinds for which in ("fewest", "most"))
    return Table(columns=("k", "pairs", "pairs with matched", *ends), rows=found)


if __name__ == "__main__":
    main(__file__)

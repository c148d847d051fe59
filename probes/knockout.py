"""Knockout and dose-response: which notes must be taken from the target run for its decision to fall back?

Section 3 (4) of "Models Take Notes at Prefill" (arXiv 2606.17107). In the target run the top-k notes are removed: by
the base run's cells (resample), by the mean cell of their token class, or by hiding them from the query block (block).
Slots are ranked by their single effects on one fold of the scenarios and removed on the other.
A drop is 1 - R: 0 still decides like the target, 1 like the base. Replacing notes by the base's is the complement of
an edit from the base's side, so that such a pair of edits is an identity, not a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvnotes import effects, select
from kvnotes.config import RunConfig
from kvnotes.records import Effect, Instance, Measures, Summary, Table
from kvnotes.runner import main

if TYPE_CHECKING:
    from kvnotes.cache import KVState
    from kvnotes.donors import Donor
    from kvnotes.instance import TokenPair
    from kvnotes.interventions import Intervention
    from kvnotes.sweep import Trial

TITLE = "Knockout: the notes that must go for the decision to fall back"
MARGINS = {
    "single": "slot",
    **dict.fromkeys(("resample", "block", "own"), "dose"),
    "mean?": "dose",  # a model whose keys cannot be moved has no class means
    "random": "way dose draw",
    "from": "dose layer",
    "up_to": "dose below",
    "mirror": "",
}
DOSES = (1, 2, 4, 8, 16, 32)
ALL, RANDOM, OWN = "all", "random", "own"
IN_SAMPLE = "base's cells, ranked in-sample"
MOST = 8  # the dose with the many draws, and of the depth curves
WAYS = {"resample": "base's cells", "mean": "class mean", "block": "attention blocked"}


class Settings(RunConfig):
    """Settings of the knockout study."""

    draws: int = Field(ge=1, le=10_000, description=f"random sets of {MOST} positions, replaced by the base's cells")
    draws_elsewhere: int = Field(ge=1, le=10_000, description="random sets of each other number of positions and way")
    mean_over: int = Field(ge=0, le=100, description="further pairs whose cells the class means are over")
    depths: int = Field(ge=2, le=100, description="parts of the model's layers that the depth curves are read at")


# --- measuring --------------------------------------------------------------------------------------------


def survey(trial: Trial, config: Settings) -> Measures:
    """The target run's margin with one downstream position's cells from the base, position by position."""
    from kvnotes.interventions import CacheEdit

    edits = [CacheEdit(name=str(p), positions=(p,), into="target", donor="base") for p in trial.pair.downstream]
    return {"single": list(trial.margins(edits).values())}


def prepare(instances: Sequence[Instance], config: Settings) -> Measures:
    """By layout: each fold's ranking of slots and its pairs for the class means, and every pair's own ranking."""

    def choose(some: Sequence[Instance]) -> Measures:
        lent = [one.id for one in some[: config.mean_over]]
        return {"ranking": select.rank(some, _single_drops), "lent": lent}

    plan = select.crossfit(instances, config.seed, choose)
    for layout, here in plan.items():
        here["own"] = {one.id: _own_ranking(one)[: DOSES[-1]] for one in instances if one.layout == layout}
    return plan


def _singles(one: Instance) -> list[float]:
    """How far each downstream position alone moves the target's margin towards the base, in logits."""
    return [float(effects.gate(one).target_margin or 0.0) - margin for margin in one.measures["single"]]


def _own_ranking(one: Instance) -> list[int]:
    return select.best(dict(zip(select.downstream(one), _singles(one), strict=True)))


def _single_drops(one: Instance) -> dict[str, float]:
    return select.by_slot(one, _singles(one))


def donors(pair: TokenPair, pairs: Mapping[str, TokenPair], plan: Measures) -> list[TokenPair]:
    """Pairs of the other fold whose cells the class means are over, beside this pair's own."""
    chosen = select.choice(plan, layout=pair.pair.layout, scenario=pair.pair.scenario)
    return [pairs[name] for name in chosen["lent"]]


def measure(trial: Trial, config: Settings, plan: Measures, *, donors: Sequence[Donor]) -> Measures:
    """The target run's margin with notes removed: by way and dose, ranked on the other fold, at random and in-sample;
    by depth; and how many random sets there were to draw from."""
    from kvnotes.donors import class_mean
    from kvnotes.interventions import CacheEdit

    made = Removals(trial, config, plan, mean=class_mean(trial, donors))
    asked: list[tuple[tuple[str, ...], Intervention]] = [*made.ranked(), *made.drawn(), *made.by_depth()]
    kept = {*trial.pair.changed, *trial.pair.downstream} - set(made.top(MOST if made.ranking else ALL))
    mirror = CacheEdit(name="mirror", positions=tuple(sorted(kept)), into="base", donor="target")
    margins = trial.margins([*(one for _, one in asked), mirror])
    return {
        **_nested((path, margins[one.name]) for path, one in asked),
        "mirror": margins["mirror"],
        "possible": {str(k): made.draws(k).possible for k in made.doses},
        "removed": list(made.ranking[: DOSES[-1]]),
    }


class Removals:
    """The interventions on one pair, each with its path into the measures."""

    def __init__(self, trial: Trial, config: Settings, plan: Mapping[str, Any], *, mean: KVState | None) -> None:
        self.pair, self.config, self.mean = trial.pair, config, mean
        self.layers = trial.model.shape["layers"]
        names, one = select.slot_names(self.pair), self.pair.pair
        chosen = select.choice(plan, layout=one.layout, scenario=one.scenario)
        notes, ranked = self.pair.downstream, chosen["ranking"]
        # a fold whose other has no pair that passes the gate has no ranking: all notes are left
        self.ranking = select.in_order(ranked, notes, lambda p: names[p]) if ranked else []
        self.own = plan[one.layout]["own"][one.id]
        self.doses = [k for k in DOSES if k < len(notes)]
        self.ways = [way for way in WAYS if way != "mean" or mean is not None]

    def top(self, dose: int | str) -> tuple[int, ...]:
        """The positions of a dose, ranked on the other fold."""
        return self.pair.downstream if dose == ALL else tuple(self.ranking[: int(dose)])

    def draws(self, k: int) -> select.Draws:
        """Random sets of `k` positions outside the top k."""
        rng = select.generator(self.config.seed, self.pair.pair.id, f"knockout {k}")
        n = self.config.draws if k == MOST else self.config.draws_elsewhere
        return select.unmatched(self.pair.downstream, self.top(k), n=n, rng=rng)

    def ranked(self) -> Iterator[tuple[tuple[str, ...], Intervention]]:
        """Each way and dose, ranked on the other fold; and on the pair itself, by the base's cells."""
        for dose in (*(self.doses if self.ranking else ()), ALL):
            for way in self.ways:
                yield (way, str(dose)), self._remove(way, f"{way} {dose}", self.top(dose))
        for k in self.doses:
            yield (OWN, str(k)), self._remove("resample", f"own {k}", self.own[:k])

    def drawn(self) -> Iterator[tuple[tuple[str, ...], Intervention]]:
        """The same random sets for every way, but for the further ones by the base's cells."""
        for k in self.doses:
            for at, positions in enumerate(self.draws(k).sets):
                for way in self.ways if at < self.config.draws_elsewhere else ("resample",):
                    name = f"random {way} {k} {at}"
                    yield (RANDOM, way, str(k)), self._remove(way, name, positions)

    def by_depth(self) -> Iterator[tuple[tuple[str, ...], Intervention]]:
        """The top 8, and all, replaced by the base's cells from a layer on, or up to it."""
        from kvnotes.interventions import CacheEdit

        for edge in edges(self.layers, self.config.depths):
            for name, layers in (("from", range(edge, self.layers)), ("up_to", range(edge))):
                for dose in (str(MOST), ALL) if self.ranking else (ALL,):
                    edit = CacheEdit(
                        name=f"{name} {edge} {dose}",
                        positions=self.top(dose),
                        into="target",
                        donor="base",
                        layers=tuple(layers),
                    )
                    yield (name, dose, str(edge)), edit

    def _remove(self, way: str, name: str, positions: Sequence[int]) -> Intervention:
        from kvnotes.interventions import AttentionBlock, CacheEdit

        if way == "block":
            return AttentionBlock(name=name, positions=tuple(positions), into="target")
        donor = self.mean if way == "mean" else "base"
        return CacheEdit(name=name, positions=tuple(positions), into="target", donor=donor)


def edges(layers: int, depths: int) -> list[int]:
    """The layers at which the depth curves are cut: `depths` parts of about equal size, none empty."""
    return sorted({round(layers * part / depths) for part in range(1, depths)} - {0, layers})


def _nested(found: Iterable[tuple[tuple[str, ...], float]]) -> dict[str, Any]:
    """Lists of values by path, as nested mappings; a path that comes once has its value alone."""
    made: dict[str, Any] = {}
    for path, value in found:
        place = made
        for key in path[:-1]:
            place = place.setdefault(key, {})
        if path[0] == RANDOM:
            place.setdefault(path[-1], []).append(value)
        else:
            place[path[-1]] = value
    return made


def identities(trial: Trial, measures: Measures) -> dict[str, float]:
    """Resampling notes away from the target is the complement's edit into the base."""
    resampled, scale = measures["resample"], max(1.0, abs(trial.unedited.gap))
    dose = str(MOST) if str(MOST) in resampled else ALL
    return {"resample equals its mirror image": abs(resampled[dose] - measures["mirror"]) / scale}


# --- summary ----------------------------------------------------------------------------------------------


def summarise(instances: Sequence[Instance], config: Settings, floor: float) -> Summary:
    """Drops by way and dose, random controls and what is above them, areas under the dose curves, flips back, and
    drops by depth."""
    found: list[Effect] = []
    tables: dict[str, Table] = {}
    for scope in effects.scopes(instances, config, floor):
        found += [*_doses(scope), *_areas(scope), *_flips(scope)]
        if scope.gated and scope.rows:
            found += [*_above_random(scope), *_depths(scope)]
            tables[f"pairs by the smallest dose that flips the decision back, {scope.layout}"] = _flipping(scope)
            tables[f"random sets a pair, {scope.layout}"] = _sets(scope)
    return Summary(effects=tuple(found), tables=tables, notes=(), headline=_headline(found))


def drop(one: Instance, *path: str) -> float | None:
    """How far the margins at a path of the measures lie below the target's, in logits, on average: the numerator of a
    drop. None where the instance has none: its prompt is too short for the dose, or its model has no class means."""
    at: Any = one.measures
    for key in path:
        at = at.get(key) if isinstance(at, Mapping) else None
    if at is None:
        return None
    return float(effects.gate(one).target_margin or 0.0) - (sum(at) / len(at) if isinstance(at, list) else at)


def doses(one: Instance) -> list[int]:
    """The doses for which an instance has random sets: the areas under both curves are over these."""
    return [k for k in DOSES if drop(one, RANDOM, "resample", str(k)) is not None]


def area(one: Instance, *path: str) -> float | None:
    """Area under a dose curve, in logits: by trapezoids over log2 of the dose, divided by its range, so that it is the
    whole gap where the first note carries everything. None without a curve."""
    curve = [(math.log2(k), height) for k in doses(one) if (height := drop(one, *path, str(k))) is not None]
    if len(curve) < 2:
        return curve[0][1] if curve else None
    steps = sum((right - left) * (one_ + two) / 2 for (left, one_), (right, two) in pairwise(curve))
    return steps / (curve[-1][0] - curve[0][0])


def _recovery(
    scope: effects.Scope, name: str, label: str, moved: Callable[[Instance], float | None], **more: Any
) -> Iterator[Effect]:
    """The effect over the instances that have it, where any has."""
    if scope.having(moved).rows:
        yield scope.recovery(name, label, moved, **more)


def _doses(scope: effects.Scope) -> Iterator[Effect]:
    for way, words in {**WAYS, OWN: IN_SAMPLE}.items():
        for dose in map(str, (*DOSES, ALL)):
            about = 1.0 if (way, dose) == ("resample", ALL) else None  # the other ways leave nothing in its place
            label = f"drop, top {dose}: {words}"
            yield from _recovery(scope, f"{way}_{dose}", label, partial(_at, (way, dose)), about=about)
    for way, words in WAYS.items():
        for dose in map(str, DOSES):
            label, at = f"drop, {dose} at random: {words}", partial(_at, (RANDOM, way, dose))
            yield from _recovery(scope, f"{RANDOM}_{way}_{dose}", label, at, about=0.0, control=True)


def _at(path: tuple[str, ...], one: Instance) -> float | None:
    return drop(one, *path)


def _flipped(path: tuple[str, str], one: Instance) -> bool | None:
    margin = one.measures.get(path[0], {}).get(path[1])
    return None if margin is None else margin < 0


def _areas(scope: effects.Scope) -> Iterator[Effect]:
    for way, words in WAYS.items():
        top, drawn = partial(_area_at, (way,)), partial(_area_at, (RANDOM, way))
        yield from _recovery(scope, f"area_{way}", f"area under the dose curve: {words}", top)
        label = f"area, at random: {words}"
        yield from _recovery(scope, f"{RANDOM}_area_{way}", label, drawn, about=0.0, control=True)
        yield from _recovery(
            scope, f"area_over_{RANDOM}_{way}", f"area above random: {words}", partial(_less, top, drawn)
        )


def _area_at(path: tuple[str, ...], one: Instance) -> float | None:
    return area(one, *path)


def _less(
    first: Callable[[Instance], float | None], second: Callable[[Instance], float | None], one: Instance
) -> float | None:
    left, right = first(one), second(one)
    return None if left is None or right is None else left - right


def _above_random(scope: effects.Scope) -> list[Effect]:
    """By way and dose, the drop above that of random sets: a family of tests."""
    members = {
        f"{way}_{dose}_over_{RANDOM}": partial(_less, partial(_at, (way, dose)), partial(_at, (RANDOM, way, dose)))
        for way in WAYS
        for dose in map(str, DOSES)
    }
    had = {name: moved for name, moved in members.items() if scope.having(moved).rows}
    return scope.family(had, label=lambda name: f"drop above random: {name.removesuffix(f'_over_{RANDOM}')}")


def _flips(scope: effects.Scope) -> Iterator[Effect]:
    for way, words in WAYS.items():
        for dose in (str(MOST), ALL):
            if scope.having(partial(_at, (way, dose))).rows:
                label = f"decides as base, top {dose} gone: {words}"
                yield scope.share(f"flips_{way}_{dose}", label, partial(_flipped, (way, dose)))


def _depths(scope: effects.Scope) -> Iterator[Effect]:
    for name, words in {"from": "from layer {} on", "up_to": "below layer {}"}.items():
        for dose in (str(MOST), ALL):
            for cut in sorted({cut for one in scope.rows for cut in one.measures[name].get(dose, ())}, key=int):
                label = f"drop, top {dose}, base's cells {words.format(cut)}"
                yield from _recovery(scope, f"{name}_{cut}_{dose}", label, partial(_at, (name, dose, cut)))


def _sets(scope: effects.Scope) -> Table:
    """By dose, how many random sets the pairs had and how many there were to draw from, of the pair with the fewest."""
    lines = []
    for dose in map(str, DOSES):
        rows = [one for one in scope.rows if dose in one.measures["possible"]]
        if rows:
            drawn = [len(one.measures[RANDOM]["resample"].get(dose, ())) for one in rows]
            possible = min(one.measures["possible"][dose] for one in rows)
            lines.append([int(dose), len(rows), min(drawn), possible])
    return Table(columns=("positions", "pairs", "sets, at least", "possible, at least"), rows=lines)


def _flipping(scope: effects.Scope) -> Table:
    """How many pairs first decide like the base at each dose."""
    lines = []
    for way, words in {**WAYS, OWN: IN_SAMPLE}.items():
        rows = [one for one in scope.rows if way in one.measures]
        steps = [*map(str, DOSES), *([] if way == OWN else [ALL])]
        first = [next((d for d in steps if one.measures[way].get(d, math.inf) < 0), "never") for one in rows]
        lines.append([words, *(first.count(dose) for dose in (*map(str, DOSES), ALL, "never"))])
    return Table(columns=("way", *map(str, DOSES), ALL, "never"), rows=lines)


def _headline(found: Sequence[Effect]) -> str:
    def words(layout: str) -> str:
        read = {e.name: e for e in found if e.gated and e.layout == layout}
        top = read.get(f"resample_{MOST}", read.get(f"resample_{ALL}"))
        if top is None or top.estimate is None:
            return f"{layout}: no drop ({'no pair passes the gate' if top is None else top.warning})"
        drawn, whole = read.get(f"random_resample_{MOST}"), read["area_resample"]
        at_random = "" if drawn is None else f", {drawn.estimate:.2f} at random"
        return (
            f"{layout}: without its top {MOST} notes the target falls back by {top.estimate:.2f}{at_random}; "
            f"area under the dose curve {whole.estimate:.2f} (n={top.n})"
        )

    return "; ".join(words(layout) for layout in dict.fromkeys(effect.layout for effect in found))


if __name__ == "__main__":
    main(__file__)

"""Instances -> effects: the sums, intervals and tests that every study's summary is made of. No torch.

An effect is a ratio of sums over instances, numerator and denominator in logits: recovery is
sum(margin - margin_base) / sum(margin_target - margin_base).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvnotes.config import RunConfig
from kvnotes.records import Effect, Gate, HypothesisTest, Instance, Summary, Table

Key = TypeVar("Key")
LEAST_SCENARIOS = 6
FALSE_DISCOVERIES = 0.05  # of a family of tests, the rate that is allowed

# kvnotes.stats is imported where it is used: scipy and statsmodels take seconds, and `--help` must not wait.


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The instances that a summary's effects are over: one layout, and those that passed the gate or all used.

    `floor` is the run's noise in logits; a mean effect below it is marked unresolved.
    """

    instances: Sequence[Instance]
    layout: str
    gated: bool
    config: RunConfig
    floor: float
    partial: bool = False  # whether instances that lack a number were left out

    @property
    def rows(self) -> list[Instance]:
        """The instances with numbers."""
        wanted = {"included"} if self.gated else {"included", "incompetent"}
        return [one for one in self.instances if one.layout == self.layout and one.status in wanted]

    def recovery(
        self,
        name: str,
        label: str,
        moved: Callable[[Instance], float | None],
        *,
        about: float | None = None,
        control: bool = False,
    ) -> Effect:
        """An effect in units of the gap: `moved` gives an instance's numerator in logits, None for one that has none
        and is left out.

        `about` asks for an equivalence test against that value, within config.equivalence. With too few scenarios, or
        where the gaps sum to nothing, the estimate is None and the warning says why.
        """
        return self.having(moved)._recovery(name, label, _number(moved), about=about, control=control)

    def _recovery(
        self, name: str, label: str, moved: Callable[[Instance], float], *, about: float | None, control: bool
    ) -> Effect:
        from kvnotes import stats

        rows = self.rows
        if why := self.too_few():
            return self._none(name, label, why, control=control)
        tops, gaps, scenarios = [moved(one) for one in rows], [gap(one) for one in rows], _scenarios(rows)
        c = self.config
        try:
            found = stats.interval(
                tops, scenarios, denominators=gaps, level=c.level, resamples=c.resamples, seed=c.seed
            )
            both = stats.ratio_of_sums(tops, gaps)
        except stats.StatsError as err:
            return self._none(name, label, str(err), control=control)
        return self._effect(
            name,
            label,
            found,
            control=control,
            # one gap within the noise makes the mean of ratios say anything
            mean_of_ratios=both.mean_of_ratios if min(map(abs, gaps)) > self.floor else None,
            unresolved=abs(sum(tops)) / len(tops) < self.floor,
            test=None if about is None else self._equivalence(tops, gaps, scenarios, about=about),
        )

    def family(
        self, members: Mapping[str, Callable[[Instance], float | None]], *, label: Callable[[str], str] = str
    ) -> list[Effect]:
        """Recoveries of many places of one kind (slots, layers, heads), each over the instances that have it: `moved`
        gives None for one that does not. Each is tested against 0 by sign flips of scenarios, and the p-values are
        corrected over the family (Benjamini and Hochberg). A place in too few scenarios has no estimate and no test.
        """
        from kvnotes import stats

        found = [self.recovery(name, label(name), moved) for name, moved in members.items()]
        tested = [one.name for one in found if one.estimate is not None]
        p = {name: self.having(members[name])._sign_flips(_number(members[name])) for name in tested}
        adjusted = dict(zip(tested, stats.benjamini_hochberg(list(p.values())), strict=True)) if p else {}
        words = f"sign flips by scenario, BH over {len(tested)}"
        tests = {name: different(words, float(value)) for name, value in adjusted.items()}
        return [one.model_copy(update={"test": tests.get(one.name)}) for one in found]

    def having(self, value: Callable[[Instance], float | None]) -> Scope:
        """The same over the instances that have a value."""
        found = [one for one in self.rows if value(one) is not None]
        return self if len(found) == len(self.rows) else replace(self, instances=found, partial=True)

    def mean(
        self, name: str, label: str, value: Callable[[Instance], float | None], *, control: bool = False
    ) -> Effect:
        """The mean of a number that is no recovery, such as a depth or a count, over the instances that have it, each
        scenario a cluster."""
        from kvnotes import stats

        here, c = self.having(value), self.config
        if why := here.too_few():
            return here._none(name, label, why, control=control)
        values = [_number(value)(one) for one in here.rows]
        found = stats.interval(values, _scenarios(here.rows), level=c.level, resamples=c.resamples, seed=c.seed)
        return here._effect(name, label, found, control=control, mean_of_ratios=None, unresolved=False, test=None)

    def permutation_p(
        self, chosen: Callable[[Instance], float | None], permuted: Callable[[Instance], Sequence[float]]
    ) -> float | None:
        """How often what was chosen, its names permuted, moves as much as it does itself: the one-sided p-value of
        "which names were chosen says nothing", (b + 1) / (permutations + 1).

        The i-th number of every instance must be of the i-th permutation, whichever fold it is tested on, so that
        choices that both folds share are permuted as one. Instances without numbers are left out; None without any.
        Raises ValueError where two instances have different numbers of permutations.
        """
        import numpy as np

        value = _number(chosen)
        rows = self.having(lambda one: chosen(one) if len(permuted(one)) else None).rows
        if not rows:
            return None
        whole, *others = np.sum([[value(one), *permuted(one)] for one in rows], axis=0).tolist()
        return rank_p(whole, others)

    def permutation_ps(
        self, members: Mapping[Key, tuple[Callable[[Instance], float | None], Callable[[Instance], Sequence[float]]]]
    ) -> dict[Key, tuple[float, int]]:
        """`permutation_p` of a family of choices, each with its permutations: p, corrected over the family (Benjamini
        and Hochberg), and how many permutations there were. A member without any is left out."""
        from kvnotes import stats

        p = {key: self.permutation_p(*member) for key, member in members.items()}
        known = {key: value for key, value in p.items() if value is not None}
        adjusted = stats.benjamini_hochberg([*known.values()]).tolist() if known else []
        counts = [max(len(members[key][1](one)) for one in self.rows) for key in known]
        return dict(zip(known, zip(adjusted, counts, strict=True), strict=True))

    def _sign_flips(self, moved: Callable[[Instance], float]) -> float:
        from kvnotes import stats

        rows, c = self.rows, self.config
        values = [moved(one) for one in rows]
        return stats.sign_flip_test(values, _scenarios(rows), resamples=c.resamples, seed=c.seed).p

    def share(
        self, name: str, label: str, holds: Callable[[Instance], bool | None], *, control: bool = False
    ) -> Effect:
        """The share of instances for which something holds, of those for which it is known, with an interval clustered
        by scenario."""
        from kvnotes import stats

        here, c = self.having(holds), self.config
        rows = here.rows
        if why := here.too_few():
            return here._none(name, label, why, control=control)
        hits = [float(bool(holds(one))) for one in rows]
        if len(set(hits)) == 1:  # no spread to resample: exact limits for as many trials as there are scenarios
            scenarios = len(set(_scenarios(rows)))
            exact = stats.clopper_pearson(int(hits[0]) * scenarios, scenarios, level=c.level)
            found = replace(exact, n=len(rows), method=f"{exact.method} over scenarios")
        else:
            found = stats.interval(hits, _scenarios(rows), level=c.level, resamples=c.resamples, seed=c.seed)
        within = replace(found, low=clip(found.low), high=clip(found.high))  # t knows no bounds, a share has them
        return here._effect(name, label, within, control=control, mean_of_ratios=None, unresolved=False, test=None)

    def too_few(self) -> str | None:
        """Why nothing can be said of these instances, or None. The intervals are tested down to six scenarios."""
        rows = self.rows
        if enough(rows):
            return None
        found = len(set(_scenarios(rows)))
        which = "pass the gate" if self.gated else "can be used"
        which += " and have this number" if self.partial else ""
        return (
            f"{len(rows)} pair(s) in {found} scenario(s) {which}; nothing is reported below {LEAST_SCENARIOS} scenarios"
        )

    def _equivalence(
        self, tops: list[float], gaps: list[float], scenarios: list[str], *, about: float
    ) -> HypothesisTest:
        from kvnotes import stats

        outcome = stats.equivalence(
            [top - about * gap_ for top, gap_ in zip(tops, gaps, strict=True)],
            scenarios,
            margin=self.config.equivalence,
            denominators=gaps,
            resamples=self.config.resamples,
            seed=self.config.seed,
        )
        noise = self.floor / (abs(sum(gaps)) / len(gaps))  # in recovery
        drowned = noise >= self.config.equivalence
        return HypothesisTest(
            name=f"TOST about {about:g}",
            statistic=outcome.statistic,
            p=outcome.p,
            margin=outcome.margin,
            conclusion=f"inconclusive: the noise floor is {noise:.2g} of recovery" if drowned else outcome.conclusion,
        )

    def _effect(self, name: str, label: str, found: Any, *, control: bool = False, **more: Any) -> Effect:
        return Effect(
            name=name,
            label=label,
            layout=self.layout,
            gated=self.gated,
            control=control,
            estimate=found.estimate,
            low=found.low,
            high=found.high,
            level=found.level,
            method=found.method,
            n=found.n,
            clusters=len(set(_scenarios(self.rows))),
            warning=found.warning,
            **more,
        )

    def _none(self, name: str, label: str, why: str, *, control: bool = False) -> Effect:
        from kvnotes import stats

        nothing = stats.Interval(
            estimate=math.nan,
            low=None,
            high=None,
            level=self.config.level,
            method="none",
            n=len(self.rows),
            clusters=0,
            warning=why,
        )
        more = {"mean_of_ratios": None, "unresolved": False, "test": None}
        return self._effect(name, label, nothing, control=control, **more)


def scopes(instances: Sequence[Instance], config: RunConfig, floor: float) -> Iterator[Scope]:
    """What a summary goes over: each layout, the pairs that passed its gate and then all used ones."""
    for layout in layouts(instances):
        for gated in (True, False):
            yield Scope(instances=instances, layout=layout, gated=gated, config=config, floor=floor)


def summary(
    instances: Sequence[Instance],
    config: RunConfig,
    floor: float,
    *,
    find: Callable[[Scope], Iterable[Effect]],
    tables: Callable[[Scope, Scope], Mapping[str, Table]],
    headline: Mapping[str, str],
    unreported: str = "",
    notes: Sequence[str] = (),
) -> Summary:
    """A study's summary: the effects that `find` yields for each layout, gated and ungated, and its tables, which get
    both scopes; where there are several layouts a table's name ends with its layout. `headline` names the gated
    effects that the headline gives, and their words; without the first of them it says why. One of the others that has
    no estimate is left out, or said to be `unreported`, in that word."""
    found: list[Effect] = []
    made: dict[str, Table] = {}
    named = layouts(instances)
    both = scopes(instances, config, floor)
    for gated, ungated in zip(both, both, strict=True):
        found += [*find(gated), *find(ungated)]
        suffix = f", {gated.layout}" if len(named) > 1 else ""
        made |= {f"{name}{suffix}": table for name, table in tables(gated, ungated).items()}
    said = "; ".join(_headline(found, layout, headline, unreported) for layout in named)
    return Summary(effects=tuple(found), tables=made, notes=tuple(notes), headline=said)


def _headline(found: Sequence[Effect], layout: str, words: Mapping[str, str], unreported: str) -> str:
    here = {effect.name: effect for effect in found if effect.layout == layout and effect.gated}
    first = here[next(iter(words))]
    if first.estimate is None:
        return f"{layout}: no recovery ({first.warning})"
    known = {word: here[name].estimate for name, word in words.items() if name in here}
    values = {word: unreported if value is None else f"{value:.2f}" for word, value in known.items()}
    said = ", ".join(f"{word} {value}" for word, value in values.items() if value)
    return f"{layout}: {said} (n={first.n})"


def competence(instances: Sequence[Instance]) -> Table:
    """The unedited model by layout: pairs that pass the gate and arms that are right, by the two actions and over the
    whole vocabulary. In a polarity design the two pairs of a group are the four cells of its 2x2."""
    columns = ("layout", "pairs", "pass the gate", "base right", "target right", "argmax right, of arms", "2x2 designs")
    rows: list[list[Any]] = []
    for layout in layouts(instances):
        gates = [(one.group, gate(one)) for one in instances if one.layout == layout and one.gate is not None]
        groups = [[g for name, g in gates if name == group] for group in dict.fromkeys(name for name, _ in gates)]
        squares = [group for group in groups if len(group) == 2]
        whole = sum(all(g.base_correct and g.target_correct for g in square) for square in squares)
        rows.append(
            [
                layout,
                len(gates),
                sum(g.passed for _, g in gates),
                sum(g.base_correct for _, g in gates),
                sum(g.target_correct for _, g in gates),
                f"{sum(g.base_argmax_correct + g.target_argmax_correct for _, g in gates)} of {2 * len(gates)}",
                f"{whole} of {len(squares)} right in all four cells" if squares else "none",
            ]
        )
    return Table(columns=columns, rows=rows)


_CELLS = ("R", "low", "high", "p", "ungated")


def places(
    place: str,
    kinds: Mapping[str, Callable[[Instance], Mapping[str, float]]],
    *,
    gated: Scope,
    ungated: Scope,
    largest_first: bool = False,
) -> Table:
    """A table with a row a place (a slot, a class, a layer), by what was done there, such as "alone" and "without".

    `kinds` gives an instance's numbers in logits by place; a place that an instance lacks is not among them. Each
    kind has its recovery over the gated instances with interval and p (`Scope.family`), and the recovery over all used
    pairs beside it. Places in too few scenarios have no row.
    """
    found: dict[str, list[Any]] = {}
    for value in kinds.values():
        numbers = {one.id: value(one) for one in ungated.rows}
        names = dict.fromkeys(name for one in gated.rows for name in numbers[one.id])
        members = {name: _of(numbers, name) for name in names}
        for one in gated.family(members):
            if one.estimate is not None and one.test is not None:
                beside = ungated.recovery(one.name, one.label, members[one.name])
                found.setdefault(one.name, []).extend([one.estimate, one.low, one.high, one.test.p, beside.estimate])
    width = len(kinds) * len(_CELLS)
    whole = {name: cells for name, cells in found.items() if len(cells) == width}
    rows: list[list[Any]] = [[name, *(_short(cell) for cell in cells)] for name, cells in whole.items()]
    if largest_first:
        rows.sort(key=lambda row: -row[1])
    return Table(columns=(place, *(f"{kind} {cell}" for kind in kinds for cell in _CELLS)), rows=rows)


def _short(number: float | None) -> float | None:
    return None if number is None else round(number, 4)


def _of(numbers: Mapping[str, Mapping[str, float]], name: str) -> Callable[[Instance], float | None]:
    return lambda one: numbers[one.id].get(name)


def layouts(instances: Sequence[Instance]) -> list[str]:
    """Layouts in the order they were run."""
    return list(dict.fromkeys(one.layout for one in instances))


def gate(one: Instance) -> Gate:
    """The gate of a measured instance. Raises ValueError for one that was skipped."""
    if one.gate is None:
        raise ValueError(f"{one.id} was skipped ({one.reason}), it has no margins")
    return one.gate


def rank_p(chosen: float, others: Sequence[float]) -> float:
    """How often others are as large as what was chosen, (b + 1) / (others + 1): one-sided. What differs by rounding is
    as large."""
    least = chosen - 1e-9 * max(1.0, abs(chosen))
    return (1 + sum(other >= least for other in others)) / (1 + len(others))


def fold_p(chosen: Mapping[int, float], drawn: Mapping[int, Sequence[float]]) -> float | None:
    """`rank_p` of chosen sets against random ones. `chosen` and `drawn` are sums over a fold's instances. Draw i of one
    fold goes with draw i of the other, not with all of them: two folds that choose alike make one choice, not two."""
    if not chosen or any(not drawn[fold] for fold in chosen):
        return None
    sums = [sum(some) for some in zip(*(drawn[fold] for fold in chosen), strict=False)]  # as many as the fewest
    return rank_p(sum(chosen.values()), sums)


def worst(errors: Iterable[float]) -> float:
    """The largest of an identity's errors; NaN where one of them is, which `max` may lose."""
    return max(errors, key=lambda error: (math.isnan(error), error))


def gap(one: Instance) -> float:
    """Target's margin minus base's, in logits."""
    return float(gate(one).gap or 0.0)


def moved(one: Instance, margin: float) -> float:
    """How far a margin lies from base's, in logits."""
    return margin - float(gate(one).base_margin or 0.0)


def _number(value: Callable[[Instance], float | None]) -> Callable[[Instance], float]:
    """The same function, for instances that are known to have the number."""

    def found(one: Instance) -> float:
        number = value(one)
        if number is None:
            raise ValueError(f"{one.id} has no such number")
        return number

    return found


def different(name: str, p: float, *, statistic: float | None = None, sets: int | None = None) -> HypothesisTest:
    """The test of a difference, by its p-value, corrected where it is one of a family. `sets` is how many random sets
    it was held against, where that may be too few to make p small whatever was chosen."""
    conclusion = "different" if p <= FALSE_DISCOVERIES else "inconclusive"
    if sets is not None and 1 / (1 + sets) > FALSE_DISCOVERIES:
        conclusion = f"inconclusive: only {sets} random sets"
    return HypothesisTest(name=name, statistic=statistic, p=p, margin=None, conclusion=conclusion)


def clip(limit: float | None) -> float | None:
    """An interval's end, within 0 and 1: what bounds a share or a probability."""
    return None if limit is None else min(1.0, max(0.0, limit))


def enough(rows: Sequence[Instance]) -> bool:
    """Whether these instances are of as many scenarios as anything is reported of."""
    return len(set(_scenarios(rows))) >= LEAST_SCENARIOS


def _scenarios(rows: Sequence[Instance]) -> list[str]:
    return [one.scenario for one in rows]

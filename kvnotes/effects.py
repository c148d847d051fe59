"""Instances -> effects: the sums, intervals and tests that every study's summary is made of. No torch.

An effect is a ratio of sums over instances, numerator and denominator in logits: recovery is
sum(margin - margin_base) / sum(margin_target - margin_base).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvnotes.config import RunConfig
from kvnotes.records import Effect, Gate, HypothesisTest, Instance, Table

LEAST_SCENARIOS = 6

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

    @property
    def rows(self) -> list[Instance]:
        """The instances with numbers."""
        wanted = {"included"} if self.gated else {"included", "incompetent"}
        return [one for one in self.instances if one.layout == self.layout and one.status in wanted]

    def recovery(
        self,
        name: str,
        label: str,
        moved: Callable[[Instance], float],
        *,
        about: float | None = None,
        control: bool = False,
    ) -> Effect:
        """An effect in units of the gap: `moved` gives an instance's numerator in logits.

        `about` asks for an equivalence test against that value, within config.equivalence. With too few scenarios, or
        where the gaps sum to nothing, the estimate is None and the warning says why.
        """
        from kvnotes import stats

        rows = self.rows
        if why := self._too_few():
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

    def share(self, name: str, label: str, holds: Callable[[Instance], bool]) -> Effect:
        """The share of instances for which something holds, with an interval clustered by scenario."""
        from kvnotes import stats

        rows, c = self.rows, self.config
        if why := self._too_few():
            return self._none(name, label, why)
        hits = [float(holds(one)) for one in rows]
        if len(set(hits)) == 1:  # no spread to resample: exact limits for as many trials as there are scenarios
            scenarios = len(set(_scenarios(rows)))
            exact = stats.clopper_pearson(int(hits[0]) * scenarios, scenarios, level=c.level)
            found = replace(exact, n=len(rows), method=f"{exact.method} over scenarios")
        else:
            found = stats.interval(hits, _scenarios(rows), level=c.level, resamples=c.resamples, seed=c.seed)
        within = replace(found, low=_clip(found.low), high=_clip(found.high))  # t knows no bounds, a share has them
        return self._effect(name, label, within, mean_of_ratios=None, unresolved=False, test=None)

    def _too_few(self) -> str | None:
        """Why nothing can be said of these instances, or None. The intervals are tested down to six scenarios."""
        rows = self.rows
        found = len(set(_scenarios(rows)))
        if found >= LEAST_SCENARIOS:
            return None
        which = "pass the gate" if self.gated else "can be used"
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


def layouts(instances: Sequence[Instance]) -> list[str]:
    """Layouts in the order they were run."""
    return list(dict.fromkeys(one.layout for one in instances))


def gate(one: Instance) -> Gate:
    """The gate of a measured instance. Raises ValueError for one that was skipped."""
    if one.gate is None:
        raise ValueError(f"{one.id} was skipped ({one.reason}), it has no margins")
    return one.gate


def gap(one: Instance) -> float:
    """Target's margin minus base's, in logits."""
    return float(gate(one).gap or 0.0)


def moved(one: Instance, margin: float) -> float:
    """How far a margin lies from base's, in logits."""
    return margin - float(gate(one).base_margin or 0.0)


def _clip(limit: float | None) -> float | None:
    return None if limit is None else min(1.0, max(0.0, limit))


def _scenarios(rows: Sequence[Instance]) -> list[str]:
    return [one.scenario for one in rows]

"""Instances -> effects: the sums, intervals and tests that every study's summary is made of. No torch.

An effect is a ratio of sums over instances, numerator and denominator in logits: recovery is
sum(margin - margin_base) / sum(margin_target - margin_base).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvnotes import stats
from kvnotes.config import RunConfig
from kvnotes.records import Effect, HypothesisTest, Instance

Logits = Callable[[Instance], float]  # an instance's numerator


def measured(instances: Sequence[Instance], *, layout: str, gated: bool) -> list[Instance]:
    """The instances of a layout with numbers: those that passed the gate, or all that were used."""
    wanted = {"included"} if gated else {"included", "gated"}
    return [one for one in instances if one.layout == layout and one.status in wanted]


def layouts(instances: Sequence[Instance]) -> list[str]:
    """Layouts in the order they were run."""
    return list(dict.fromkeys(one.layout for one in instances))


def recovery_effect(
    instances: Sequence[Instance],
    numerator: Logits,
    *,
    name: str,
    label: str,
    layout: str,
    gated: bool,
    config: RunConfig,
    floor: float,
    about: float | None = None,
    control: bool = False,
) -> Effect:
    """One effect in units of the gap, with an interval clustered by scenario.

    `floor` in logits: a mean effect below it is marked unresolved. `about` asks for an equivalence test against
    that value, within config.equivalence. Without instances, or where the gaps sum to nothing, the estimate is
    None and the warning says why.
    """
    rows = measured(instances, layout=layout, gated=gated)
    tops, gaps = [numerator(one) for one in rows], [gap(one) for one in rows]
    scenarios = [one.scenario for one in rows]
    frame = {"name": name, "label": label, "layout": layout, "gated": gated, "control": control}
    if not rows:
        return _none(frame, config, rows, "no instance to measure it on")
    try:
        found = stats.interval(
            tops, scenarios, denominators=gaps, level=config.level, resamples=config.resamples, seed=config.seed
        )
        both = stats.ratio_of_sums(tops, gaps)
    except stats.StatsError as err:
        return _none(frame, config, rows, str(err))
    return Effect(
        **frame,
        estimate=found.estimate,
        low=found.low,
        high=found.high,
        level=found.level,
        method=found.method,
        n=found.n,
        clusters=found.clusters,
        mean_of_ratios=both.mean_of_ratios,
        unresolved=abs(sum(tops)) / len(tops) < floor,
        warning=found.warning,
        test=None if about is None else _equivalence(tops, gaps, scenarios, about=about, config=config),
    )


def share_effect(
    instances: Sequence[Instance],
    holds: Callable[[Instance], bool],
    *,
    name: str,
    label: str,
    layout: str,
    gated: bool,
    config: RunConfig,
) -> Effect:
    """The share of instances for which something holds, with an interval clustered by scenario."""
    rows = measured(instances, layout=layout, gated=gated)
    frame = {"name": name, "label": label, "layout": layout, "gated": gated, "control": False}
    if not rows:
        return _none(frame, config, rows, "no instance to measure it on")
    hits = [float(holds(one)) for one in rows]
    if len(set(hits)) == 1:  # no spread to resample: the binomial's own limits, which know no clusters
        found = stats.clopper_pearson(int(sum(hits)), len(hits), level=config.level)
    else:
        scenarios = [one.scenario for one in rows]
        found = stats.interval(hits, scenarios, level=config.level, resamples=config.resamples, seed=config.seed)
    return Effect(
        **frame,
        estimate=found.estimate,
        low=found.low,
        high=found.high,
        level=found.level,
        method=found.method,
        n=len(rows),
        clusters=len({one.scenario for one in rows}),
        mean_of_ratios=None,
        unresolved=False,
        warning=found.warning,
        test=None,
    )


def gap(one: Instance) -> float:
    """Target's margin minus base's, in logits."""
    assert one.gate is not None
    assert one.gate.gap is not None
    return one.gate.gap


def _equivalence(
    tops: list[float], gaps: list[float], scenarios: list[str], *, about: float, config: RunConfig
) -> HypothesisTest:
    shifted = [top - about * gap_ for top, gap_ in zip(tops, gaps, strict=True)]
    outcome = stats.equivalence(
        shifted,
        scenarios,
        margin=config.equivalence,
        denominators=gaps,
        resamples=config.resamples,
        seed=config.seed,
    )
    return HypothesisTest(
        name=f"TOST about {about:g}",
        statistic=outcome.statistic,
        p=outcome.p,
        margin=outcome.margin,
        conclusion=outcome.conclusion,
    )


def _none(frame: dict[str, object], config: RunConfig, rows: Sequence[Instance], why: str) -> Effect:
    return Effect(
        **frame,  # pyright: ignore[reportArgumentType]
        estimate=None,
        low=None,
        high=None,
        level=config.level,
        method="none",
        n=len(rows),
        clusters=len({one.scenario for one in rows}),
        mean_of_ratios=None,
        unresolved=True,
        warning=why,
        test=None,
    )

"""Tests whose unit is the cluster, the exact test for paired yes/no answers, corrections for many tests."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import special, stats
from statsmodels.stats.multitest import multipletests

from kvnotes.stats.clusters import ClusterSums, Floats, StatsError, cluster_sums, finite, paired, resample
from kvnotes.stats.intervals import Interval, check_settings, interval_of, pivot_limits

Conclusion = Literal["equivalent", "different", "inconclusive"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a test found. `conclusion`: "different" (from the null or, with a margin, by more than it),
    "equivalent" (within the margin), or "inconclusive", which is never evidence of no difference."""

    name: str
    statistic: float | None
    p: float
    conclusion: Conclusion
    n: int
    clusters: int
    margin: float | None = None
    interval: Interval | None = None
    warning: str | None = None


def equivalence(
    values: ArrayLike,
    clusters: Sequence[Hashable],
    *,
    margin: float,
    denominators: ArrayLike | None = None,
    alpha: float = 0.05,
    resamples: int,
    seed: int,
    method: Literal["auto", "t"] = "auto",
) -> Outcome:
    """Two one-sided tests (Schuirmann, 1987) of "the mean, or ratio of sums, lies within ± margin".

    "equivalent": p <= alpha, which is to say that the 1 - 2 alpha interval lies within ± margin; "different":
    that interval lies wholly outside; else "inconclusive". With method "t" both tests are t with G-1 degrees
    of freedom; "auto" takes the larger of t's and bootstrap-t's p, as `interval` takes the wider limit,
    because t alone finds equivalence too easily in skewed values (simulated with 12 exponential clusters
    whose true mean is the margin, at alpha 0.05: t in 10%, auto in 7%). `statistic` is t on the weaker side.
    Where no interval exists p is 1 and the warning says why. For a ratio about 1 pass values - denominators.

    Raises StatsError as `interval` does, for a margin <= 0 and for alpha outside (0, 0.5).
    """
    if not (np.isfinite(margin) and margin > 0):
        raise StatsError(f"equivalence margin {margin} must be a number above 0, in the units of the estimate")
    _check_alpha(alpha, below=0.5)
    check_settings(level=1 - 2 * alpha, resamples=resamples)
    sums = cluster_sums(values, clusters, denominators=denominators)
    found = interval_of(sums, level=1 - 2 * alpha, resamples=resamples, seed=seed, method=method)
    statistic, p = None, 1.0
    if found.low is not None and not sums.residuals.any():
        p = 0.0 if abs(sums.estimate) < margin else 1.0
    elif found.low is not None:
        pivots = resample(sums, resamples=resamples, seed=seed).pivots if method == "auto" else None
        above = _one_sided(sums, margin + sums.estimate, pivots=pivots, alpha=alpha)
        below = _one_sided(sums, margin - sums.estimate, pivots=None if pivots is None else -pivots, alpha=alpha)
        statistic, p = max(above, (-below[0], below[1]), key=lambda side: side[1])
    return Outcome(
        name=f"TOST, {found.method}",
        statistic=statistic,
        p=p,
        conclusion=_place(found, p=p, alpha=alpha, margin=margin),
        n=sums.n,
        clusters=sums.clusters,
        margin=margin,
        interval=found,
        warning=found.warning,
    )


def sign_flip_test(
    differences: ArrayLike,
    clusters: Sequence[Hashable],
    *,
    resamples: int,
    seed: int,
    alpha: float = 0.05,
) -> Outcome:
    """Two-sided permutation test that paired differences are symmetric about 0, whole clusters changing sign.

    Exact, over all 2^G sign patterns, where they are no more than `resamples`; else seeded draws with
    p = (b + 1) / (resamples + 1) a side; p is twice the smaller side. `statistic` is the mean difference.

    Raises StatsError for non-finite rows, alpha outside (0, 1) and too few resamples.
    """
    _check_alpha(alpha, below=1)
    check_settings(level=1 - alpha, resamples=resamples)
    name = "sign flips of clusters"
    sums = cluster_sums(differences, clusters)
    if sums.clusters == 1:  # scipy wants two; a single cluster's two signs are equally far out
        return _permuted(name, (sums.estimate, 1.0), sums, ways=2, resamples=resamples, alpha=alpha)
    # One sample permuted as "samples" is scipy's name for changing its signs.
    found = stats.permutation_test(
        (sums.numerators,),
        lambda x, axis: x.sum(axis=axis) / sums.n,
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        rng=np.random.default_rng(seed),
    )
    return _permuted(
        name,
        (float(found.statistic), float(found.pvalue)),
        sums,
        ways=2**sums.clusters,
        resamples=resamples,
        alpha=alpha,
    )


def label_permutation_test(
    values: ArrayLike,
    clusters: Sequence[Hashable],
    groups: Sequence[Hashable],
    *,
    denominators: ArrayLike | None = None,
    resamples: int,
    seed: int,
    alpha: float = 0.05,
) -> Outcome:
    """Two-sided permutation test that two groups of clusters have one distribution: whole clusters are dealt
    anew to the groups.

    `groups` has one label a row. `statistic` is the mean, or ratio of sums, of the first group in sorted
    order minus the second's. Exact where the deals number no more than `resamples`, else seeded, with p as in
    `sign_flip_test`.

    Raises StatsError for non-finite rows, alpha outside (0, 1), too few resamples, a cluster whose
    denominators do not sum to more than 0, unless there are two groups of at least 2 clusters, and for a
    cluster in both of them: its rows are pairs, and their differences belong in `sign_flip_test`.
    """
    _check_alpha(alpha, below=1)
    check_settings(level=1 - alpha, resamples=resamples)
    sums = cluster_sums(values, clusters, denominators=denominators)
    if sums.denominators.min() <= 0:
        raise StatsError("a cluster's denominators do not sum to more than 0: permute gated instances only")
    first, second = _sides(clusters, groups)
    if min(len(first), len(second)) < 2:
        raise StatsError("label permutation needs 2 clusters in either group: add scenarios to the smaller one")

    def difference(one: Floats, other: Floats, axis: int) -> Floats:
        sides = (side.astype(int) for side in (one, other))
        left, right = (sums.numerators[i].sum(axis) / sums.denominators[i].sum(axis) for i in sides)
        return left - right

    found = stats.permutation_test(
        (first, second),
        difference,
        permutation_type="independent",
        vectorized=True,
        n_resamples=resamples,
        rng=np.random.default_rng(seed),
    )
    return _permuted(
        "group labels of clusters",
        (float(found.statistic), float(found.pvalue)),
        sums,
        ways=comb(sums.clusters, len(first)),
        resamples=resamples,
        alpha=alpha,
    )


def mcnemar(first: ArrayLike, second: ArrayLike, *, alpha: float = 0.05) -> Outcome:
    """Exact McNemar test that two yes/no answers (booleans, or 1 and 0) about the same instances are yes
    equally often.

    `statistic` is the smaller count of disagreements. It takes instances as independent; where scenarios
    repeat, `sign_flip_test` on the differences respects them. Raises StatsError for answers other than yes
    and no.
    """
    _check_alpha(alpha, below=1)
    left, right = paired(("first", "second"), first, second)
    if not np.isin([left, right], (0, 1)).all():
        raise StatsError("McNemar compares yes/no answers: pass booleans, or 0 and 1")
    only_first, only_second = int((left > right).sum()), int((left < right).sum())
    fewer = min(only_first, only_second)
    p = float(stats.binomtest(fewer, only_first + only_second).pvalue) if only_first + only_second else 1.0
    return Outcome(
        name="McNemar, exact",
        statistic=float(fewer),
        p=p,
        conclusion="different" if p <= alpha else "inconclusive",
        n=len(left),
        clusters=len(left),
    )


def benjamini_hochberg(p: ArrayLike) -> Floats:
    """p-values adjusted to the false discovery rate, in the order given; for independent or positively
    dependent tests (Benjamini and Hochberg, 1995). Raises StatsError for values outside [0, 1].
    """
    return _adjusted(p, "fdr_bh")


def holm(p: ArrayLike) -> Floats:
    """p-values adjusted to the family-wise error rate (Holm, 1979), in the order given; for any dependence.

    Raises StatsError for values outside [0, 1].
    """
    return _adjusted(p, "holm")


def _check_alpha(alpha: float, *, below: float) -> None:
    if not 0 < alpha < below:
        raise StatsError(f"alpha {alpha} must lie between 0 and {below:g}: pass 0.05 for the usual error rate")


def _one_sided(sums: ClusterSums, inside: float, *, pivots: Floats | None, alpha: float) -> tuple[float, float]:
    """t and p against a bound that the estimate lies `inside` of by so much; with pivots, the larger p."""
    t = inside / sums.jackknife_error
    p = float(special.stdtr(sums.clusters - 1, -t))
    if pivots is not None and np.isfinite(pivot_limits(pivots, alpha)[1]):
        beyond = int((pivots >= inside / sums.linear_error).sum())
        p = max(p, (beyond + 1) / (len(pivots) + 1))
    return t, p


def _place(found: Interval, *, p: float, alpha: float, margin: float) -> Conclusion:
    if found.low is None or found.high is None:
        return "inconclusive"
    if p <= alpha:
        return "equivalent"
    return "different" if found.low > margin or found.high < -margin else "inconclusive"


def _permuted(
    name: str,
    found: tuple[float, float],
    sums: ClusterSums,
    *,
    ways: int,
    resamples: int,
    alpha: float,
) -> Outcome:
    statistic, p = found
    lowest = 2 / min(ways, resamples + 1)
    return Outcome(
        name=f"permutation of {name}, " + (f"all {ways}" if ways <= resamples else f"{resamples} draws"),
        statistic=statistic,
        p=p,
        conclusion="different" if p <= alpha else "inconclusive",
        n=sums.n,
        clusters=sums.clusters,
        warning=f"p cannot be below {lowest:g} with {sums.clusters} clusters" if lowest > alpha else None,
    )


def _sides(clusters: Sequence[Hashable], groups: Sequence[Hashable]) -> tuple[Floats, Floats]:
    """Indices, in the order of `cluster_sums`, of the clusters in the first and in the second group."""
    if len(groups) != len(clusters):
        raise StatsError(f"{len(clusters)} cluster labels but {len(groups)} groups: pass one of each a row")
    names = sorted(set(groups), key=repr)
    if len(names) != 2:
        raise StatsError(f"label permutation compares two groups, got {len(names)}: {names[:5]}")
    members = [{c for c, g in zip(clusters, groups, strict=True) if g == name} for name in names]
    both = sorted(members[0] & members[1], key=repr)
    if both:
        raise StatsError(
            f"cluster {both[0]!r} is in both groups: pair its rows, pass their differences to sign_flip_test"
        )
    labels = sorted(set(clusters), key=repr)
    first, second = ([float(i) for i, label in enumerate(labels) if label in side] for side in members)
    return np.array(first), np.array(second)


def _adjusted(p: ArrayLike, method: Literal["fdr_bh", "holm"]) -> Floats:
    array = finite("p", p)
    outside = np.flatnonzero((array < 0) | (array > 1))
    if outside.size:
        raise StatsError(f"p[{outside[0]}] is {array[outside[0]]}, which is no probability: pass p-values")
    return np.asarray(multipletests(array, method=method)[1], dtype=np.float64)

"""Per-cluster sums, and what resampling whole clusters does to a ratio of them.

Every statistic here is a sum of numerators over a sum of denominators: a mean has denominators of 1, a paired
difference has differences as numerators, and two ratios with the same denominators differ by the ratio of
their numerators' difference. One sum of each a cluster is therefore all that resampling needs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import fsum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvnotes.errors import KVNotesError

Floats = NDArray[np.float64]
ROUNDING = 1e-12  # relative size below which a sum of a few thousand float64 terms is rounding, not data


class StatsError(KVNotesError):
    """Values that no statistic can be computed from."""


@dataclass(frozen=True, kw_only=True)
class RatioOfSums:
    """The headline ratio and, beside it, the mean of the rows' own ratios (None where a denominator is 0)."""

    ratio: float
    mean_of_ratios: float | None


@dataclass(frozen=True, kw_only=True)
class ClusterSums:
    """Sums a cluster, clusters in the order of their labels; `n` rows in all."""

    numerators: Floats
    denominators: Floats
    n: int

    @property
    def clusters(self) -> int:
        """How many clusters there are (G)."""
        return len(self.numerators)

    @property
    def estimate(self) -> float:
        """Sum of the numerators over sum of the denominators."""
        return float(self.numerators.sum() / self.denominators.sum())

    @property
    def residuals(self) -> Floats:
        """numerator - estimate * denominator, a cluster; exact zeros where only rounding is left."""
        fitted = self.estimate * self.denominators
        residuals = self.numerators - fitted
        size = max(np.abs(self.numerators).max(), np.abs(fitted).max())
        return np.where(np.abs(residuals) <= ROUNDING * size, 0.0, residuals)

    @property
    def influence(self) -> Floats:
        """How much the estimate falls when a cluster is left out; infinite or NaN where nothing is left."""
        others = self.denominators.sum() - self.denominators
        others[np.abs(others) <= ROUNDING * np.abs(self.denominators).sum()] = 0.0
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.residuals / others

    @property
    def jackknife_error(self) -> float:
        """Standard error by leaving out one cluster at a time (CR3); needs 2 clusters. MacKinnon, Nielsen and
        Webb (2023) recommend it for few or unequal clusters; with equal denominators it is s / sqrt(G)."""
        return float(np.sqrt((1 - 1 / self.clusters) * np.square(self.influence).sum()))

    @property
    def linear_error(self) -> float:
        """Standard error from the residuals (CR1), quick to recompute in a resample; needs 2 clusters."""
        scale = self.clusters / (self.clusters - 1)
        return float(np.sqrt(scale * np.square(self.residuals).sum()) / abs(self.denominators.sum()))


@dataclass(frozen=True, kw_only=True)
class Resampled:
    """How far each resample moves the estimate: plain, and in that resample's own standard errors (the pivot
    of bootstrap-t, infinite where a resample has no spread). `dropped` ones had a denominator of 0."""

    shifts: Floats
    pivots: Floats
    dropped: int


def finite(name: str, values: ArrayLike) -> Floats:
    """`values` as a non-empty 1-D float64 array.

    Raises StatsError where it has another shape, is empty, or holds a NaN or an infinity (named by index).
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size:
        raise StatsError(f"{name} must be a non-empty 1-D sequence, got shape {array.shape}: pass one number a row")
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise StatsError(
            f"{name}[{bad[0]}] is {array[bad[0]]}, and {bad.size} of {array.size} are not finite: "
            "leave such rows out and count them, or find what made them"
        )
    return array


def paired(names: tuple[str, str], first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats]:
    """Two finite arrays of one length; StatsError where the lengths differ."""
    left, right = finite(names[0], first), finite(names[1], second)
    if len(left) != len(right):
        raise StatsError(
            f"{len(left)} {names[0]} but {len(right)} {names[1]}: pass one of each a row, in the same order"
        )
    return left, right


def ratio_of_sums(numerators: ArrayLike, denominators: ArrayLike) -> RatioOfSums:
    """Headline recovery, sum(margin - margin_base) / sum(margin_target - margin_base), and the rows' mean.

    Raises StatsError for non-finite rows, unequal lengths, or denominators that sum to 0.
    """
    top, bottom = paired(("numerators", "denominators"), numerators, denominators)
    _check_denominators(bottom)
    mean = fsum(top / bottom) / len(top) if bottom.all() else None
    return RatioOfSums(ratio=fsum(top) / fsum(bottom), mean_of_ratios=mean)


def cluster_sums(
    values: ArrayLike, clusters: Sequence[Hashable], *, denominators: ArrayLike | None = None
) -> ClusterSums:
    """Sum the rows of each cluster; without denominators each row counts 1, so the estimate is the mean.

    The result does not depend on the order of the rows, to the last bit.
    """
    ones = np.ones(len(np.atleast_1d(np.asarray(values))))
    top, bottom = paired(("values", "denominators"), values, ones if denominators is None else denominators)
    if len(clusters) != len(top):
        raise StatsError(f"{len(top)} values but {len(clusters)} cluster labels: pass one label a row")
    _check_denominators(bottom)
    rank = {label: i for i, label in enumerate(sorted(set(clusters), key=repr))}
    codes = np.array([rank[label] for label in clusters])
    # Floating sums depend on their order, so the rows of a cluster are put into an order of their own.
    order = np.lexsort((bottom, top, codes))
    starts = np.searchsorted(codes[order], np.arange(len(rank)))
    return ClusterSums(
        numerators=np.add.reduceat(top[order], starts),
        denominators=np.add.reduceat(bottom[order], starts),
        n=len(top),
    )


def resample(sums: ClusterSums, *, resamples: int, seed: int) -> Resampled:
    """Draw G whole clusters with replacement, `resamples` times; recompute the estimate and its CR1 error.

    Works on residuals, not on raw sums, so that nearly equal clusters lose no digits.
    """
    counts = _draws(sums.clusters, resamples, seed)
    residuals, denominators = sums.residuals, sums.denominators
    totals = counts @ denominators
    kept = np.abs(totals) > ROUNDING * np.abs(denominators).sum()
    counts, totals = (counts, totals) if kept.all() else (counts[kept], totals[kept])

    shifts = (counts @ residuals) / totals
    shifts[np.abs(shifts) <= ROUNDING * np.abs(residuals).sum() / np.abs(totals)] = 0.0
    squares = counts @ residuals**2
    spread = squares - 2 * shifts * (counts @ (residuals * denominators)) + shifts**2 * (counts @ denominators**2)
    spread[spread <= ROUNDING * squares] = 0.0
    errors = np.sqrt(spread * sums.clusters / (sums.clusters - 1)) / np.abs(totals)
    with np.errstate(divide="ignore", invalid="ignore"):
        pivots = np.where(shifts == 0.0, 0.0, shifts / errors)
    return Resampled(shifts=shifts, pivots=pivots, dropped=int((~kept).sum()))


@lru_cache(maxsize=4)
def _draws(clusters: int, resamples: int, seed: int) -> Floats:
    """How often each cluster is drawn: [resamples, clusters]. A study asks for the same ones many times."""
    even = np.full(clusters, 1 / clusters)
    counts = np.random.default_rng(seed).multinomial(clusters, even, size=resamples).astype(np.float64)
    counts.setflags(write=False)
    return counts


def _check_denominators(denominators: Floats) -> None:
    if abs(denominators.sum()) <= ROUNDING * np.abs(denominators).sum():
        raise StatsError(
            f"the {denominators.size} denominators sum to 0, so no ratio exists: use gated instances, "
            "whose target and base margins differ"
        )

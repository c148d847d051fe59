"""Statistics for values that come in clusters (scenarios): intervals, tests and corrections. No torch."""

from kvnotes.stats.clusters import RatioOfSums, StatsError, ratio_of_sums
from kvnotes.stats.intervals import Interval, clopper_pearson, interval, paired_difference
from kvnotes.stats.significance import (
    Outcome,
    benjamini_hochberg,
    equivalence,
    holm,
    label_permutation_test,
    mcnemar,
    sign_flip_test,
)

__all__ = [
    "Interval",
    "Outcome",
    "RatioOfSums",
    "StatsError",
    "benjamini_hochberg",
    "clopper_pearson",
    "equivalence",
    "holm",
    "interval",
    "label_permutation_test",
    "mcnemar",
    "paired_difference",
    "ratio_of_sums",
    "sign_flip_test",
]

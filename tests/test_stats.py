"""Statistics against hand-worked cases, against scipy and statsmodels, and for what they refuse."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import time
import warnings
from typing import TypedDict, get_args

import numpy as np
import pytest
from scipy import stats as scipy_stats
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar
from statsmodels.stats.proportion import proportion_confint
from statsmodels.stats.weightstats import DescrStatsW

from kvnotes.stats import (
    Interval,
    StatsError,
    benjamini_hochberg,
    clopper_pearson,
    equivalence,
    holm,
    interval,
    label_permutation_test,
    mcnemar,
    paired_difference,
    ratio_of_sums,
    sign_flip_test,
)
from kvnotes.stats.intervals import Method


class Draws(TypedDict):
    resamples: int
    seed: int


DRAWS: Draws = {"resamples": 10_000, "seed": 7}
NAN, INF = math.nan, math.inf


def skewed(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).exponential(size=n)


def limits(found: Interval) -> tuple[float, float]:
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


class TestHandWorked:
    def test_ratio_of_sums_and_mean_of_ratios(self) -> None:
        # (1 + 3) / (1 + 6) = 4/7; (1/1 + 3/6) / 2 = 3/4
        both = ratio_of_sums([1, 3], [1, 6])
        assert both.ratio == pytest.approx(4 / 7)
        assert both.mean_of_ratios == pytest.approx(0.75)

    def test_a_zero_denominator_leaves_the_ratio_and_no_mean_of_ratios(self) -> None:
        both = ratio_of_sums([1, 3], [0, 2])
        assert both.ratio == 2.0
        assert both.mean_of_ratios is None

    def test_t_interval_of_a_clustered_mean(self) -> None:
        # Cluster means 2, 6, 7: mean 5, variance (9 + 1 + 4) / 2 = 7, error sqrt(7 / 3); t(2) .975: 4.302653.
        found = interval([1, 3, 5, 7, 6, 8], ["a", "a", "b", "b", "c", "c"], method="t", **DRAWS)
        reach = 4.302653 * math.sqrt(7 / 3)
        assert limits(found) == pytest.approx((5 - reach, 5 + reach), abs=1e-5)
        assert (found.estimate, found.n, found.clusters) == (5.0, 6, 3)
        assert found.method == "t(2) on the cluster jackknife"

    def test_t_interval_of_a_ratio(self) -> None:
        # 6 / 4 = 1.5. Without one: 5/3, 4/3, 3/2, off by 1/6, -1/6, 0: error sqrt(2/3 * 2/36), sqrt(1/27).
        found = interval([1, 2, 3], [0, 1, 2], denominators=[1, 1, 2], method="t", **DRAWS)
        reach = 4.302653 * math.sqrt(1 / 27)
        assert limits(found) == pytest.approx((1.5 - reach, 1.5 + reach), abs=1e-5)

    def test_percentile_interval_of_two_clusters(self) -> None:
        # The resampled mean is 0, 1/2, 1 with chance 1/4, 1/2, 1/4: the 2.5th percentile is 0, the 97.5th 1.
        assert limits(interval([0, 1], [0, 1], method="percentile", **DRAWS)) == (0.0, 1.0)

    def test_bootstrap_t_against_all_resamples(self) -> None:
        # All 5^5 resamples by the textbook: t* = (mean* - mean) / (sd* / sqrt 5).
        values = np.array([0.1, 0.4, 1.0, 2.5, 3.1])
        every = values[np.array(list(itertools.product(range(5), repeat=5)))]
        spread = every.std(axis=1, ddof=1)
        kept = spread > 1e-12
        pivots = (every.mean(axis=1)[kept] - values.mean()) / (spread[kept] / math.sqrt(5))
        error = values.std(ddof=1) / math.sqrt(5)
        low, high = limits(interval(values, range(5), method="bootstrap-t", resamples=50_000, seed=1))
        # A limit leaves 2.5% of the pivots beyond it, up to the draws' noise (sd 0.0007) and ties at it.
        for implied, side in (((values.mean() - low) / error, 1), ((values.mean() - high) / error, -1)):
            assert (side * pivots > side * implied + 1e-9).mean() <= 0.028
            assert (side * pivots >= side * implied - 1e-9).mean() >= 0.022

    def test_the_picked_interval_is_the_wider_at_either_end(self) -> None:
        values = skewed(12)
        methods: tuple[Method, ...] = ("auto", "t", "bootstrap-t")
        found = {m: limits(interval(values, range(12), method=m, **DRAWS)) for m in methods}
        low, high = zip(found["t"], found["bootstrap-t"], strict=True)
        assert found["auto"] == (min(low), max(high))
        assert found["auto"] != found["t"]
        assert found["auto"] != found["bootstrap-t"]

    def test_clopper_pearson_of_none_in_ten(self) -> None:
        # (1 - p)^10 = 0.025 at the upper limit.
        found = clopper_pearson(0, 10)
        assert limits(found) == pytest.approx((0.0, 1 - 0.025**0.1))

    def test_sign_flips_of_three(self) -> None:
        # Sums of ±3 ±1 ±1 are 5 3 3 1 -1 -3 -3 -5; six of eight are at least as far out as 3 + 1 - 1 = 3.
        found = sign_flip_test([3, 1, -1], [0, 1, 2], **DRAWS)
        assert found.p == pytest.approx(6 / 8)
        assert found.statistic == pytest.approx(1.0)
        assert found.name == "permutation of sign flips of clusters, all 8"

    def test_sign_flips_turn_whole_clusters(self) -> None:
        # Two clusters of sums 6 and 2: ±6 ±2 gives 8 4 -4 -8, two of four as far out. Rows alone: 2 of 64.
        assert sign_flip_test([2, 2, 2, 1, 0.5, 0.5], list("aaabbb"), **DRAWS).p == pytest.approx(0.5)
        assert sign_flip_test([2, 2, 2, 1, 0.5, 0.5], range(6), **DRAWS).p == pytest.approx(2 / 64)

    def test_label_permutation_of_two_against_two(self) -> None:
        # Means 1.5 and 5.5; of the 6 deals only this one and its mirror are as far out.
        found = label_permutation_test([1, 2, 5, 6], list("abcd"), ["x", "x", "y", "y"], **DRAWS)
        assert found.statistic == pytest.approx(-4.0)
        assert found.p == pytest.approx(2 / 6)

    def test_mcnemar_of_one_against_six(self) -> None:
        # Seven disagreements, one of them one way: 2 (1 + 7) / 2^7 = 0.125.
        first, second = [1, 0, 0, 0, 0, 0, 0, 1, 0], [0, 1, 1, 1, 1, 1, 1, 1, 0]
        found = mcnemar(first, second)
        assert (found.p, found.statistic, found.n) == (pytest.approx(0.125), 1.0, 9)
        assert found.conclusion == "inconclusive"

    def test_mcnemar_of_equal_answers(self) -> None:
        assert mcnemar([True, False], [True, False]).p == 1.0

    def test_bh_and_holm_of_four(self) -> None:
        # Sorted .005 .01 .03 .04. BH: x4/1 .02, x4/2 .02, x4/3 .04, x4/4 .04.
        # Holm: x4 .02, x3 .03, x2 .06, and x1 .04 raised to .06, for it may not fall.
        p = [0.01, 0.04, 0.03, 0.005]
        assert benjamini_hochberg(p) == pytest.approx([0.02, 0.04, 0.04, 0.02])
        assert holm(p) == pytest.approx([0.03, 0.06, 0.06, 0.02])

    @pytest.mark.parametrize(
        ("values", "conclusion"),
        [
            ([0.00, 0.01, -0.01, 0.02], "equivalent"),  # 0.005 ± 2.353 * 0.0065
            ([0.30, 0.31, 0.29, 0.32], "different"),  # all of it above 0.1
            ([0.00, 0.20, -0.20, 0.10], "inconclusive"),  # about 0.2 either way
            ([0.09, 0.10, 0.10, 0.11], "inconclusive"),  # on the margin itself
        ],
    )
    def test_equivalence_places_the_interval(self, values: list[float], conclusion: str) -> None:
        assert equivalence(values, range(4), margin=0.1, **DRAWS).conclusion == conclusion

    def test_equivalence_of_a_ratio_about_one(self) -> None:
        gaps = np.array([4.0, 5.0, 6.0, 7.0, 5.0, 6.0])
        recovered = gaps * np.array([0.99, 1.01, 1.0, 0.98, 1.02, 1.01])
        found = equivalence(recovered - gaps, range(6), denominators=gaps, margin=0.1, **DRAWS)
        assert found.conclusion == "equivalent"
        assert found.statistic is not None
        assert found.interval is not None
        assert found.interval.level == pytest.approx(0.9)


class TestPairedDifference:
    def test_equals_the_interval_of_the_differences(self) -> None:
        first, second, gaps = skewed(24, 1), skewed(24, 2), 1 + skewed(24, 3)
        labels = np.repeat(range(12), 2).tolist()
        found = paired_difference(first, second, labels, denominators=gaps, **DRAWS)
        assert found.estimate == pytest.approx(first.sum() / gaps.sum() - second.sum() / gaps.sum())
        assert found == interval(first - second, labels, denominators=gaps, **DRAWS)

    def test_is_narrower_than_unpaired_where_scenarios_share_their_level(self) -> None:
        level = 10 * skewed(12)
        first, second = level + 0.1 * skewed(12, 1), level
        low, high = limits(paired_difference(first, second, range(12), **DRAWS))
        alone = limits(interval(first, range(12), **DRAWS))
        assert high - low < 0.1 * (alone[1] - alone[0])


class TestAgainstLibraries:
    """Two seeded bootstraps of 10,000 agree within their noise, about 2% of the interval's width a limit."""

    @pytest.mark.parametrize(("ours", "theirs"), [("percentile", "percentile"), ("bca", "BCa")])
    @pytest.mark.parametrize("ratio", [False, True])
    def test_scipy_bootstrap_on_unclustered_rows(self, ours: Method, theirs: str, ratio: bool) -> None:
        top, bottom = skewed(30, 4), 1 + skewed(30, 5)
        data = (top, bottom) if ratio else (top,)

        def statistic(*arrays: np.ndarray, axis: int) -> np.ndarray:
            return arrays[0].sum(axis) / (arrays[1].sum(axis) if ratio else 30)

        expected = scipy_stats.bootstrap(
            data, statistic, paired=True, n_resamples=10_000, method=theirs, rng=np.random.default_rng(3)
        ).confidence_interval
        found = interval(top, range(30), denominators=bottom if ratio else None, method=ours, **DRAWS)
        width = expected.high - expected.low
        assert limits(found) == pytest.approx((expected.low, expected.high), abs=0.04 * width)

    def test_bca_moves_towards_the_long_tail_as_scipys_does(self) -> None:
        values = skewed(30, 4)
        low, high = limits(interval(values, range(30), method="bca", **DRAWS))
        plain = limits(interval(values, range(30), method="percentile", **DRAWS))
        assert low > plain[0]
        assert high > plain[1]

    def test_degenerate_bca_has_no_width_where_scipy_has_no_number(self) -> None:
        constant = np.full(10, 0.5)  # a binary fraction, so that no rounding stands in for spread
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = scipy_stats.bootstrap((constant,), np.mean, rng=np.random.default_rng(0)).confidence_interval
        assert math.isnan(theirs.low)
        found = interval(constant, range(10), method="bca", **DRAWS)
        assert limits(found) == (0.5, 0.5)
        assert found.warning is not None
        assert "do not differ" in found.warning

    def test_scipy_t_on_unclustered_rows(self) -> None:
        values = skewed(15)
        expected = scipy_stats.ttest_1samp(values, 0).confidence_interval(0.9)
        found = interval(values, range(15), level=0.9, method="t", **DRAWS)
        assert limits(found) == pytest.approx((expected.low, expected.high))

    @pytest.mark.parametrize("shift", [-0.3, 0.0, 0.05, 0.2])
    def test_statsmodels_tost_on_unclustered_rows(self, shift: float) -> None:
        values = 0.1 * np.random.default_rng(2).normal(size=20) + shift
        expected = DescrStatsW(values).ttost_mean(-0.1, 0.1)[0]
        found = equivalence(values, range(20), margin=0.1, method="t", **DRAWS)
        assert found.p == pytest.approx(expected)
        assert (found.conclusion == "equivalent") == (expected <= 0.05)

    def test_scipy_sign_flips(self) -> None:
        values = skewed(12) - 0.5

        def mean(x: np.ndarray, axis: int) -> np.ndarray:
            return x.mean(axis=axis)

        expected = scipy_stats.permutation_test((values,), mean, permutation_type="samples", n_resamples=2**12)
        assert sign_flip_test(values, range(12), **DRAWS).p == pytest.approx(expected.pvalue)

    def test_sign_flips_by_draws_come_near_the_exact_p(self) -> None:
        values = skewed(14) - 0.6
        exact = sign_flip_test(values, range(14), resamples=2**14, seed=0)
        drawn = sign_flip_test(values, range(14), resamples=4000, seed=0)
        assert exact.name.endswith("all 16384")
        assert drawn.name.endswith("4000 draws")
        # Twice a share of 4,000 draws: its standard deviation is at most 2 sqrt(.25 / 4000) = 0.016.
        assert drawn.p == pytest.approx(exact.p, abs=0.05)

    def test_label_permutation_by_brute_force_with_unequal_clusters(self) -> None:
        rows = [
            ("a", 0.1),
            ("a", 0.4),
            ("b", 1.2),
            ("c", 0.3),
            ("c", 0.2),
            ("c", 0.9),
            ("d", 2.0),
            ("e", 1.4),
        ]
        group = {"a": "x", "b": "x", "c": "x", "d": "y", "e": "y"}

        def difference(chosen: tuple[str, ...]) -> float:
            inside = [v for label, v in rows if label in chosen]
            outside = [v for label, v in rows if label not in chosen]
            return sum(inside) / len(inside) - sum(outside) / len(outside)

        dealt = np.array([difference(chosen) for chosen in itertools.combinations("abcde", 3)])
        observed = difference(("a", "b", "c"))
        expected = 2 * min((dealt <= observed + 1e-12).mean(), (dealt >= observed - 1e-12).mean())
        labels, values = zip(*rows, strict=True)
        found = label_permutation_test(values, labels, [group[label] for label in labels], **DRAWS)
        assert found.statistic == pytest.approx(observed)
        assert found.p == pytest.approx(expected)

    def test_label_permutation_of_ratios(self) -> None:
        # Recoveries 0, 0 and 1, 1 whatever the gaps: the ratio of sums tells them apart by exactly 1.
        found = label_permutation_test(
            [0, 0, 5, 9], list("abcd"), ["x", "x", "y", "y"], denominators=[4, 2, 5, 9], **DRAWS
        )
        assert found.statistic == pytest.approx(-1.0)
        assert found.p == pytest.approx(2 / 6)

    def test_statsmodels_mcnemar(self) -> None:
        rng = np.random.default_rng(0)
        for _ in range(20):
            first, second = rng.random(25) < 0.5, rng.random(25) < 0.7
            table = [[(first & second).sum(), (first & ~second).sum()], [(~first & second).sum(), 0]]
            expected = statsmodels_mcnemar(np.array(table), exact=True)
            p = min(1.0, expected.pvalue)  # pyright: ignore[reportAttributeAccessIssue]
            assert mcnemar(first.tolist(), second.tolist()).p == pytest.approx(p)

    @pytest.mark.parametrize("successes", [0, 1, 7, 20])
    def test_statsmodels_clopper_pearson(self, successes: int) -> None:
        expected = proportion_confint(successes, 20, alpha=0.1, method="beta")
        found = limits(clopper_pearson(successes, 20, level=0.9))
        assert found == pytest.approx(np.nan_to_num(np.array(expected)))

    def test_scipy_false_discovery_control(self) -> None:
        p = np.random.default_rng(0).random(40) ** 2
        assert benjamini_hochberg(p) == pytest.approx(scipy_stats.false_discovery_control(p))


class TestInvariance:
    labels = np.repeat(range(8), 12)
    values = skewed(96, 1)
    gaps = 1 + skewed(96, 2)

    @pytest.mark.parametrize("method", get_args(Method))
    def test_row_order_changes_nothing(self, method: Method) -> None:
        order = np.random.default_rng(0).permutation(96)
        found = interval(self.values, self.labels.tolist(), denominators=self.gaps, method=method, **DRAWS)
        shuffled = interval(
            self.values[order],
            self.labels[order].tolist(),
            denominators=self.gaps[order],
            method=method,
            **DRAWS,
        )
        assert shuffled == found

    def test_row_order_changes_no_test(self) -> None:
        order = np.random.default_rng(0).permutation(96)
        side = (self.labels % 2).tolist()
        labels, values = self.labels.tolist(), self.values - 0.8
        moved, values_moved = self.labels[order].tolist(), (self.values - 0.8)[order]
        assert sign_flip_test(values_moved, moved, **DRAWS) == sign_flip_test(values, labels, **DRAWS)
        assert label_permutation_test(
            values_moved, moved, [label % 2 for label in moved], **DRAWS
        ) == label_permutation_test(values, labels, side, **DRAWS)
        assert equivalence(values_moved, moved, margin=0.5, **DRAWS) == equivalence(values, labels, margin=0.5, **DRAWS)

    def test_a_seed_fixes_the_numbers_and_another_moves_them(self) -> None:
        labels = self.labels.tolist()
        first, again = (interval(self.values, labels, method="bootstrap-t", **DRAWS) for _ in range(2))
        other = interval(self.values, labels, method="bootstrap-t", resamples=10_000, seed=8)
        assert first == again
        assert limits(other) != limits(first)
        assert limits(other) == pytest.approx(limits(first), rel=0.2)

    def test_repeating_a_scenarios_rows_adds_no_certainty(self) -> None:
        once = interval(self.values, self.labels.tolist(), **DRAWS)
        tenfold = interval(np.tile(self.values, 10), np.tile(self.labels, 10).tolist(), **DRAWS)
        assert limits(tenfold) == pytest.approx(limits(once))
        assert (tenfold.n, tenfold.clusters) == (960, 8)

    def test_units_of_the_values_carry_over(self) -> None:
        low, high = limits(interval(self.values, self.labels.tolist(), **DRAWS))
        moved = limits(interval(100 - 10 * self.values, self.labels.tolist(), **DRAWS))
        assert moved == pytest.approx((100 - 10 * high, 100 - 10 * low))


class TestWarnings:
    @pytest.mark.parametrize(("clusters", "warns"), [(2, True), (6, True), (8, True), (9, False), (30, False)])
    def test_few_clusters_warn(self, clusters: int, warns: bool) -> None:
        found = interval(skewed(clusters), range(clusters), **DRAWS)
        assert (found.warning is not None) == warns
        assert f"t({clusters - 1})" in found.method

    def test_one_cluster_has_an_estimate_and_no_interval(self) -> None:
        found = interval([1, 2, 3], ["a"] * 3, **DRAWS)
        assert (found.estimate, found.low, found.high, found.method) == (2.0, None, None, "none")
        assert found.warning == "one cluster: nothing shows how clusters differ"

    def test_one_cluster_tests_nothing(self) -> None:
        same = equivalence([0.0, 0.01], ["a", "a"], margin=0.1, **DRAWS)
        assert (same.p, same.conclusion, same.statistic) == (1.0, "inconclusive", None)
        flipped = sign_flip_test([5.0, 6.0], ["a", "a"], **DRAWS)
        assert (flipped.p, flipped.conclusion) == (1.0, "inconclusive")

    def test_a_binary_value_falls_back_to_t_and_says_so(self) -> None:
        # A third of the resamples miss the one success and have no spread, so bootstrap-t has no lower pivot.
        found = interval([0, 0, 0, 0, 0, 1], range(6), **DRAWS)
        assert limits(found) == pytest.approx(limits(interval([0, 0, 0, 0, 0, 1], range(6), method="t", **DRAWS)))
        assert found.warning is not None
        assert "t stands in" in found.warning

    def test_denominators_that_may_sum_to_zero_give_no_interval(self) -> None:
        # Ungated gaps 3, -2, 1, -1.5: mean 0.125, error about 1.2.
        found = interval([1, 2, 1, 1], range(4), denominators=[3, -2, 1, -1.5], **DRAWS)
        assert found.estimate == pytest.approx(10.0)
        assert (found.low, found.high) == (None, None)
        assert found.warning is not None
        assert "cannot be told from 0" in found.warning

    def test_one_negative_gap_among_many_large_ones_is_no_obstacle(self) -> None:
        gaps = np.array([6, 5, 7, -0.5, 6, 5, 8, 6, 7, 5.0])
        low, high = limits(interval(0.3 * gaps + 0.1 * skewed(10), range(10), denominators=gaps, **DRAWS))
        assert 0.25 < low < high < 0.4

    def test_resamples_whose_denominators_sum_to_zero_are_counted(self) -> None:
        # The gap -1 drawn six times in twelve: a chance of 924 (1/12)^6 (11/12)^6, nine in 50,000.
        gaps = [1] * 11 + [-1]
        found = interval(skewed(12), range(12), denominators=gaps, resamples=50_000, seed=0)
        assert found.warning is not None
        count, rest = found.warning.split(" ", 1)
        assert 1 <= int(count) <= 25
        assert rest == "resamples had denominators summing to 0"

    @pytest.mark.parametrize("gaps", [[0, 0, 5], [0.1 + 0.2, -0.3, 5]])
    def test_an_estimate_that_rests_on_one_cluster_has_no_interval(self, gaps: list[float]) -> None:
        found = interval([1, 2, 3], range(3), denominators=gaps, **DRAWS)
        assert found.low is None
        assert found.warning is not None
        assert "rests on that cluster" in found.warning

    def test_identities_have_no_width_whatever_their_rounding(self) -> None:
        gaps = 1 + skewed(24)
        found = interval(gaps * (1 + 1e-16), np.repeat(range(12), 2).tolist(), denominators=gaps, **DRAWS)
        assert limits(found) == pytest.approx((1.0, 1.0))
        same = equivalence(np.zeros(12), range(12), margin=0.1, **DRAWS)
        assert (same.p, same.conclusion) == (0.0, "equivalent")

    def test_too_few_clusters_for_a_small_p_are_named(self) -> None:
        found = sign_flip_test([5, 6, 7, 8], range(4), **DRAWS)
        assert found.p == pytest.approx(2 / 16)
        assert found.warning == "p cannot be below 0.125 with 4 clusters"


class TestErrors:
    @pytest.mark.parametrize(
        ("values", "message"),
        [([1, NAN, 2], r"values\[1\] is nan"), ([1, 2, INF], r"values\[2\] is inf"), ([], "non-empty")],
    )
    def test_values_that_are_no_numbers_are_named(self, values: list[float], message: str) -> None:
        with pytest.raises(StatsError, match=message):
            interval(values, range(len(values)), **DRAWS)
        with pytest.raises(StatsError, match=message):
            equivalence(values, range(len(values)), margin=0.1, **DRAWS)
        with pytest.raises(StatsError, match=message):
            sign_flip_test(values, range(len(values)), resamples=1000, seed=0)

    def test_a_bad_denominator_is_named(self) -> None:
        with pytest.raises(StatsError, match=r"denominators\[2\] is nan"):
            interval([1, 2, 3], range(3), denominators=[1, 2, NAN], **DRAWS)

    def test_denominators_that_sum_to_zero(self) -> None:
        with pytest.raises(StatsError, match="sum to 0"):
            interval([1, 2], range(2), denominators=[0.1, -0.1], **DRAWS)
        with pytest.raises(StatsError, match="sum to 0"):
            ratio_of_sums([1.0], [0.0])

    def test_lengths_that_differ(self) -> None:
        with pytest.raises(StatsError, match="3 values but 2 cluster labels"):
            interval([1, 2, 3], range(2), **DRAWS)
        with pytest.raises(StatsError, match="3 first but 2 second"):
            paired_difference([1, 2, 3], [1, 2], range(3), **DRAWS)
        with pytest.raises(StatsError, match="4 cluster labels but 3 groups"):
            label_permutation_test([1, 2, 3, 4], range(4), [0, 0, 1], **DRAWS)

    def test_settings_that_cannot_work(self) -> None:
        with pytest.raises(StatsError, match="level 95"):
            interval([1, 2], range(2), level=95, **DRAWS)
        with pytest.raises(StatsError, match="use at least 200"):
            interval([1, 2], range(2), resamples=50, seed=0)
        with pytest.raises(StatsError, match="unknown interval method 'bootstrap'"):
            interval([1, 2], range(2), method="bootstrap", **DRAWS)  # pyright: ignore[reportArgumentType]
        with pytest.raises(StatsError, match="margin 0"):
            equivalence([1, 2], range(2), margin=0, **DRAWS)
        with pytest.raises(StatsError, match=r"alpha 0\.5"):
            equivalence([1, 2], range(2), margin=1, alpha=0.5, **DRAWS)

    def test_groups_that_cannot_be_permuted(self) -> None:
        with pytest.raises(StatsError, match="cluster 'a' is in both groups"):
            label_permutation_test([1, 2, 3, 4], list("aabc"), [0, 1, 0, 1], **DRAWS)
        with pytest.raises(StatsError, match="two groups, got 3"):
            label_permutation_test([1, 2, 3], range(3), [0, 1, 2], **DRAWS)
        with pytest.raises(StatsError, match="2 clusters in either group"):
            label_permutation_test([1, 2, 3], range(3), [0, 1, 1], **DRAWS)

    def test_answers_and_probabilities_out_of_range(self) -> None:
        with pytest.raises(StatsError, match="yes/no"):
            mcnemar([0, 2], [1, 1])
        with pytest.raises(StatsError, match=r"p\[1\] is 1\.2"):
            holm([0.1, 1.2])
        with pytest.raises(StatsError, match="3 successes of 2"):
            clopper_pearson(3, 2)


def test_ten_thousand_resamples_of_thirty_clusters_are_quick() -> None:
    values, labels = skewed(120), np.repeat(range(30), 4).tolist()

    def seconds(seed: int) -> float:  # a new seed each time: nothing is cached
        start = time.perf_counter()
        interval(values, labels, resamples=10_000, seed=seed)
        return time.perf_counter() - start

    assert min(seconds(seed) for seed in range(100, 103)) < 0.3


def test_statistics_need_no_torch() -> None:
    code = "import sys, kvnotes.stats; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Probe machinery: what is read, fits and nulls against scikit-learn's own, depths and intervals by hand."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, PredefinedSplit

from kvnotes import probing, prompts, select
from kvnotes.instance import TokenPair
from kvnotes.planted_weights import tokenizer
from kvnotes.probing import Prompts, Rewritten
from tasks import gated, planted
from tasks.scenarios import SCENARIOS


def planted_pairs(layout: str = "words_field_first", n: int = 4) -> list[TokenPair]:
    words = tokenizer()
    template = prompts.read_template(words, use=None, options={})
    made = planted.generate(layout=layout, pair="polarity", n=n, seed=0)
    pairs = [prompts.tokenise(one, tokenizer=words, template=template, query=1) for one in made]
    assert all(isinstance(one, TokenPair) for one in pairs)
    return pairs


def design(scenarios: int = 16) -> Prompts:
    """Four prompts a scenario: both fields, both rules."""
    names = [f"s{i:02}" for i in range(scenarios) for _ in range(4)]
    return Prompts.of([True, False, False, True] * scenarios, names, select.folds(names, 0))


def coded(prompts_: Prompts, *, strength: float, width: int = 6, seed: int = 0) -> np.ndarray:
    """Noise, the label along one axis, and offsets of the scenarios."""
    rng = np.random.default_rng(seed)
    x = (
        rng.normal(size=(len(prompts_.labels), width))
        + 2 * rng.normal(size=(1 + max(prompts_.codes), width))[prompts_.codes]
    )
    x[:, 0] += strength * np.where(prompts_.labels, 1, -1)
    return x


# --- what is read -----------------------------------------------------------------------------------------


def test_slot_classes_by_hand():
    # 9 ship 10 when 11 OPEN 12 ; 13 wait 14 when 15 PACKED 16 ; 17 --- ... 45 today 46 . 47 order:
    classes = probing.slot_classes(planted_pairs()[0])
    assert classes == {
        "trigger": 15,
        "last_action": 13,  # the first one stands before the first changed token, where both arms are the same
        "aggregator": 17,
        "request": 45,
        "delimiter": 46,
        "decision": 47,
    }


def test_the_aggregator_follows_the_field_where_the_rules_come_first():
    pair = planted_pairs("words_rules_first")[0]
    classes = probing.slot_classes(pair)
    assert pair.slots[classes["field"]].span == "field"
    assert pair.slots[classes["aggregator"]].span == "delimiter.first_note"
    assert classes["aggregator"] > classes["field"] > classes["trigger"]


def test_positions_tell_nothing_of_the_conclusion():
    """Both pairs of a design, and so all four of its prompts, are read at the same positions."""
    one, other, *_ = planted_pairs()
    assert one.pair.group == other.pair.group
    assert probing.slot_classes(one) == probing.slot_classes(other)


@pytest.mark.parametrize("wording", ["swap", "trigger"])
def test_permits_agrees_with_the_scenarios_words(wording):
    words = {one.id: one for one in SCENARIOS}
    for pair in gated.generate(layout="prose_rules_first", pair="polarity", n=72, seed=3, wording=wording):
        found = probing.permits(pair)
        for name in ("base", "target"):
            assert (getattr(pair, name).action.strip() == words[pair.scenario].permit) == found[name]


def test_permits_agrees_with_the_planted_words():
    signs = {one.name: one for one in planted.SCENARIOS}
    for pair in planted.generate(layout="words_field_first", pair="polarity", n=24, seed=0):
        assert probing.permits(pair)["base"] == (pair.base.action == signs[pair.scenario].permit)
        assert probing.permits(pair)["target"] == (pair.target.action == signs[pair.scenario].permit)


def test_the_rule_that_applies_is_the_one_with_the_right_action():
    for pair in planted_pairs(n=24):
        found = probing.labels(pair)
        assert found["conclusion"] == probing.permits(pair.pair)
        for arm in ("base", "target"):
            actions = [p.text.strip() for p in getattr(pair.pair, arm).user if p.role == "action"]
            right = getattr(pair.pair, arm).action.strip()
            assert found["rule"][arm] == (actions[0] == right)
            assert sorted(actions)[0] != sorted(actions)[1]


@pytest.mark.parametrize("task", [gated, planted])
def test_refilled_changes_the_neutral_rules_alone(task):
    asked = {"layout": task.DEFAULT_LAYOUT, "pair": "polarity", "n": 2}
    pair, donor = (task.generate(seed=seed, **asked)[0] for seed in (0, 1))
    made = probing.refilled(pair, donor)

    def others(one):
        return [(p.text, p.role) for p in one.base.user if p.role not in {"filler", "delimiter"}]

    def rules(one):
        return [p.text for p in one.base.user if p.role == "filler"]

    assert others(made) == others(pair)
    assert rules(made) == rules(donor) != rules(pair)
    assert (made.base.action, made.target.action) == (pair.base.action, pair.target.action)
    assert probing.refilled(pair, pair) == pair


# --- fits -------------------------------------------------------------------------------------------------


def test_rotation_is_exact_for_a_probe():
    rows = design(8)
    x = coded(rows, strength=1.0, width=300)
    turned = probing.rotate(x)
    assert turned.shape == (32, 32)
    assert turned @ turned.T == pytest.approx(x @ x.T, abs=1e-8)
    assert probing.cross_fit(turned, rows).scores == pytest.approx(probing.cross_fit(x, rows).scores, abs=2e-3)


def test_cross_fit_equals_scikit_learns_grid_search():
    rows = design()
    x = coded(rows, strength=0.7)
    found = probing.cross_fit(x, rows)
    for tested, (train, test) in enumerate(rows.sides()):
        assert not {rows.scenarios[i] for i in train} & {rows.scenarios[i] for i in test}
        middle = x[train].mean(axis=0)
        size = np.sqrt(((x[train] - middle) ** 2).sum(axis=1).mean())
        search = GridSearchCV(
            LogisticRegression(max_iter=2000),
            {"C": list(probing.COSTS)},
            scoring="neg_log_loss",
            cv=PredefinedSplit(rows.inner(train)),
        ).fit((x[train] - middle) / size, rows.labels[train])
        expected = search.decision_function((x[test] - middle) / size)
        assert found.scores[test] == pytest.approx(expected, abs=1e-4)
        assert found.costs[tested] == search.best_params_["C"]
        assert found.losses[tested] == pytest.approx(-search.best_score_, abs=1e-6)


def test_vectors_that_differ_by_rounding_alone_decide_nothing():
    rows = design(8)
    x = np.full((32, 5), 256.0) + 1e-6 * coded(rows, strength=3.0, width=5)
    scores = probing.cross_fit(x, rows).scores
    assert probing.auc(scores, rows) == 0.5
    assert probing.correct(scores, rows.labels).tolist() == [0.5] * 32
    assert probing.majority(rows).tolist() == [0.5] * 32


def test_auc_equals_scikit_learns_by_fold():
    rows = design()
    scores = coded(rows, strength=0.5)[:, 0]
    folds = [roc_auc_score(rows.labels[rows.folds == f], scores[rows.folds == f]) for f in (0, 1)]
    assert probing.auc(scores, rows) == pytest.approx(np.mean(folds), abs=1e-12)
    swapped = Prompts(labels=~rows.labels, scenarios=rows.scenarios, folds=rows.folds)
    assert probing.auc(-scores, swapped) == pytest.approx(probing.auc(scores, rows), abs=1e-12)


def test_the_spread_of_placements_is_the_spread_of_the_auc():
    """Over many samples: the standard error from one sample's placements against the AUC's own deviation."""
    rows = design(24)
    areas, errors = [], []
    for seed in range(300):
        scores = coded(rows, strength=0.6, width=1, seed=seed)[:, 0]
        by_scenario = probing.placements(scores, rows).reshape(24, 4).mean(axis=1)
        areas.append(by_scenario.mean())
        errors.append(by_scenario.std(ddof=1) / np.sqrt(24))
    assert np.mean(errors) == pytest.approx(np.std(areas), rel=0.15)


# --- null -------------------------------------------------------------------------------------------------


def test_permutations_keep_the_field_independent_of_the_label():
    rows = design()
    field = np.tile([1, 1, -1, -1], 16)
    flips = probing.signs(rows, draws=50, seed=0)
    for flip in flips:
        label = np.where(rows.labels, 1, -1) * flip[rows.codes]
        assert (label * field).reshape(16, 4).sum(axis=1).tolist() == [0] * 16
        assert label.reshape(16, 4).sum(axis=1).tolist() == [0] * 16
    assert len({tuple(flip) for flip in flips}) == 50
    assert (flips[:, 0] == 1).all()
    assert (flips.sum(axis=1) < 16).all()


def test_few_scenarios_have_every_permutation_once():
    flips = probing.signs(design(6), draws=1000, seed=0)
    assert flips.shape == (31, 6)
    assert len({tuple(flip) for flip in flips}) == 31
    assert probing.signs(design(30), draws=99, seed=0).shape == (99, 30)


def test_the_ridge_null_equals_a_loop_over_permutations():
    """Each draw relabelled, its penalty chosen and its probe fitted by scikit-learn, one at a time."""
    rows = design(8)
    x = coded(rows, strength=0.6)
    flips = probing.signs(rows, draws=4, seed=1)
    found = probing.null(x, rows, flips)
    labels = [np.where(rows.labels, 1.0, -1.0) * flip[rows.codes] for flip in np.vstack([np.ones(8), flips])]
    expected = [by_hand(x, rows, own) for own in labels]
    assert [found.observed, *found.drawn] == pytest.approx(expected, abs=1e-12)
    assert probing.auc(found.scores, rows) == pytest.approx(found.observed, abs=1e-12)


def by_hand(x, rows, own) -> float:
    areas = []
    for train, test in rows.sides():
        near, inner = probing.scaled(x[train], x), rows.inner(train)
        losses = {}
        for penalty in probing.RIDGES:
            errors = []
            for group in set(inner):
                kept, out = train[inner != group], train[inner == group]
                fit = Ridge(alpha=penalty * len(kept), fit_intercept=False).fit(near[kept], own[kept])
                errors += list((fit.predict(near[out]) - own[out]) ** 2)
            losses[penalty] = np.mean(errors)
        best = min(losses, key=lambda penalty: losses[penalty])
        fit = Ridge(alpha=best * len(train), fit_intercept=False).fit(near[train], own[train])
        areas.append(roc_auc_score(own[test] > 0, fit.predict(near[test])))
    return float(np.mean(areas))


def test_the_test_keeps_its_level_and_finds_what_is_there():
    rows = design(10)
    flips = probing.signs(rows, draws=99, seed=0)
    p = [probing.null(coded(rows, strength=0.0, seed=seed), rows, flips).p for seed in range(60)]
    assert 1 <= sum(one <= 0.1 for one in p) <= 13  # 6 expected
    assert probing.null(coded(rows, strength=3.0), rows, flips).p == 0.01
    assert min(p) >= 0.01


def test_largest_corrects_for_the_layers():
    one = probing.Null(observed=0.7, drawn=np.array([0.4, 0.6, 0.5]), scores=np.zeros(2))
    two = probing.Null(observed=0.6, drawn=np.array([0.8, 0.3, 0.5]), scores=np.zeros(2))
    found = probing.largest([one, two])
    assert (found.observed, found.drawn.tolist(), found.p) == (0.7, [0.8, 0.6, 0.5], 0.5)


def test_verdicts_are_corrected_over_the_places():
    """Two layers with p = 1/4 after the largest, and one with 3/4: BH over two places gives 2/4 and 3/4."""
    high = [probing.Null(observed=0.9, drawn=np.array([0.4, 0.6, 0.5]), scores=np.zeros(2))] * 2
    low = [probing.Null(observed=0.5, drawn=np.array([0.4, 0.6, 0.5]), scores=np.zeros(2))]
    found = probing.verdicts({"a": high, "b": low})
    assert [found[name].p for name in "ab"] == [0.5, 0.75]
    assert found["a"].name == "largest ridge AUC of any layer, 3 permutations by scenario, BH over 2"
    assert found["a"].conclusion == "inconclusive"
    assert probing.verdicts({}) == {}


# --- depths, scenarios, arrays ----------------------------------------------------------------------------


def test_depths_by_hand():
    assert probing.first_from([False, True, False, True, True]) == 3
    assert probing.first_from([True, True]) == 0
    assert probing.first_from([True, False]) is None
    assert probing.onset([False, True, True, True, False]) == 1
    assert probing.onset([True, True, False, True]) is None  # one layer is no run
    assert probing.onset([True, False, False, True, True]) == 3  # the last two
    assert probing.onset([True, False, False]) is None
    assert probing.onsets(np.array([[0, 1, 1, 1, 0], [1, 0, 0, 0, 0]], dtype=bool)).tolist() == [1, 5]
    holds = np.array([[0, 1, 0, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]], dtype=bool)
    assert probing.depths(holds).tolist() == [3, 0, 5]


def test_resampled_aucs_by_hand():
    rows = design(8)
    scores = coded(rows, strength=0.5)[:, 0]
    counts = np.ones((2, 8))
    counts[1, 0], counts[1, 1] = 2, 0  # one scenario twice, another not at all
    found = probing.resampled_aucs(scores, rows, counts)
    assert found[0] == pytest.approx(probing.auc(scores, rows), abs=1e-12)
    weight = counts[1][rows.codes]
    areas = [
        roc_auc_score(rows.labels[at], scores[at], sample_weight=weight[at])
        for at in (rows.folds == 0, rows.folds == 1)
    ]
    sizes = [weight[rows.folds == fold].sum() for fold in (0, 1)]
    assert found[1] == pytest.approx(np.average(areas, weights=sizes), abs=1e-12)


def test_within_a_scenario_only_what_is_there_is_found():
    field, seed, arm = (grid.ravel() for grid in np.indices((2, 4, 2)))
    rows = Rewritten(seeds=seed, fields=field == 1, labels=(field + arm) % 2 == 1)
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(16, 8)) * 0.05
    only_field, only_seed = noise.copy(), noise.copy()
    only_field[:, 0] += field
    only_seed[:, :4] += np.eye(4)[seed]
    found = probing.within(probing.rotate(np.stack([only_field, only_seed])), rows, np.random.default_rng(1))
    assert found["field"][0] == 1.0
    assert found["memorised"][1] == 1.0  # the seeds are there to be known again
    assert found["control"][0] == pytest.approx(0.5, abs=0.5)
    assert found["conclusion"].max() < 1.0


def test_condensed_keeps_inner_products_and_says_what_is_missing():
    x = np.random.default_rng(0).normal(size=(4, 2, 5, 50)).astype(np.float32)
    x[1, :, 2] = np.nan
    found = probing.condensed(x, [[0, 1, 3], [2]])
    assert found.shape == (4, 2, 5, 6)
    rows, small = x[[0, 1, 3], :, 4].reshape(6, 50), found[[0, 1, 3], :, 4].reshape(6, 6)
    assert small @ small.T == pytest.approx(rows @ rows.T, abs=1e-3)
    assert np.isnan(found[[0, 1, 3], :, 2]).all()
    assert np.isfinite(found[2]).all()
    assert (found[2, ..., 2:] == 0).all()  # two rows span two columns

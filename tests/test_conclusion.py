"""Site, causal layer and direction: balanced means by hand, nothing of the tested scenario, probes and random draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from kvnotes import conclusion, effects, probing
from kvnotes import config as configs
from kvnotes.conclusion import Learned
from kvnotes.config import RunConfig
from kvnotes.effects import Scope
from tests.sample_record import measured
from tests.test_prompts import tokens

CONFIG = configs.make(RunConfig, study="locality", flags={"resamples": 500})


class Shelf:
    """Gathered arrays, by instance and slot."""

    def __init__(self, arrays: dict[str, dict[str, np.ndarray]]) -> None:
        self.arrays = arrays

    def array(self, instance: str, name: str) -> np.ndarray | None:
        return self.arrays[instance].get(name)


def about(scenario: str, field: str, *, permits: int = -1) -> dict[str, Any]:
    """`permits`: 1 where the target does."""
    return {"layout": "l", "scenario": scenario, "field": field, "signs": {"conclusion": permits, "row": 1}}


def arms(base: float, target: float) -> np.ndarray:
    """[arm, layer, d_model] of one layer and one number."""
    return np.array([[[base]], [[target]]], dtype=np.float32)


def test_fields_and_scenarios_weigh_the_same():
    """Scenario a: open twice, shut once; b: open alone."""
    found = conclusion.balanced([("a", "open"), ("a", "open"), ("a", "shut"), ("b", "open")])
    assert found.tolist() == pytest.approx([1 / 8, 1 / 8, 1 / 4, 1 / 2])


def test_difference_of_means_by_hand():
    """Permit less restrict: 4 and 2 in scenario a (its base restricts the second time), 8 in b; c lacks the slot.
    Target less base: -4, 2 and -8."""
    plan = {
        "learned": {
            "a1": about("a", "open"),
            "a2": about("a", "shut", permits=1),
            "b1": about("b", "open"),
            "c1": about("c", "open"),
        }
    }
    shelf: Any = Shelf(
        {"a1": {"s": arms(5, 1)}, "a2": {"s": arms(1, 3)}, "b1": {"s": arms(10, 2)}, "c1": {"t": arms(9, 0)}}
    )
    learned = Learned.of(plan, shelf, list(plan["learned"]), "s")
    assert learned is not None
    assert learned.scenarios == ("a", "a", "b")
    assert learned.direction("conclusion").tolist() == [[pytest.approx((4 / 2 + 2 / 2) / 2 + 8 / 2)]]
    assert learned.direction("row").tolist() == [[pytest.approx((-4 / 2 + 2 / 2) / 2 - 8 / 2)]]
    assert conclusion.longest(learned, 0) == "conclusion"
    assert learned.middle.tolist() == [[pytest.approx((3 / 2 + 2 / 2) / 2 + 6 / 2)]]
    assert Learned.of(plan, shelf, ["a1", "a2", "c1"], "s") is None  # one scenario teaches nothing
    assert Learned.of(plan, shelf, ["a1", "b1"], "none") is None


def test_a_pair_learns_from_other_scenarios_of_its_layout():
    pair = tokens()
    own = pair.pair
    plan = {
        "learned": {
            "x": {"layout": own.layout, "scenario": own.scenario},
            "y": {"layout": own.layout, "scenario": "another"},
            "z": {"layout": "another", "scenario": "third"},
        }
    }
    assert conclusion.others(plan, pair) == ["y"]


def test_the_causal_layer_is_the_first_of_the_best():
    rows = [
        measured("a", base=0.0, target=4.0, measures={"own full": {"k": {"0": 0.0, "2": 3.0, "4": 3.001, "6": 1.0}}}),
        measured("b", base=1.0, target=5.0, measures={"own full": {"k": {"0": 1.0, "2": 2.0, "4": 2.0, "6": 1.0}}}),
        measured("c", base=1.0, target=5.0, measures={"own full": {"k": {}}}),  # it has no such site
    ]
    assert conclusion.causal_layer(rows, "k") == 2
    assert conclusion.causal_layer(rows[2:], "k") is None


def test_the_probe_is_sklearn_on_the_vectors_themselves():
    rng = np.random.default_rng(0)
    shift = np.array([1.0, 0, 0, 0, 0])
    up = np.arange(24) % 3 == 0  # whose target permits
    labels = np.stack([~up, up], axis=1)
    both = rng.standard_normal((24, 2, 1, 5)) + np.where(labels, 0.5, -0.5)[:, :, None, None] * shift
    names = tuple(f"s{i // 2}" for i in range(24))
    signs = {"conclusion": np.where(up, 1, -1)}
    learned = Learned(arms=both.astype(np.float32), signs=signs, weights=np.full(24, 1 / 24), scenarios=names)
    x, labels = both[:, :, 0].reshape(-1, 5), labels.ravel()
    plain = [
        conclusion.unit(LogisticRegression(C=cost).fit(probing.scaled(x, x), labels).coef_[0]) for cost in probing.COSTS
    ]
    found = conclusion.logistic(learned, 0)
    assert max(float(found @ one) for one in plain) == pytest.approx(1, abs=1e-4)
    assert np.linalg.norm(found) == pytest.approx(1)
    assert found[0] > 0.5  # it points to permit
    assert not conclusion.logistic(replace(learned, arms=np.ones((24, 2, 1, 5), dtype=np.float32)), 0).any()


def test_random_directions_lie_outside_and_are_one_a_fold():
    pair = tokens()
    own = pair.pair
    trial: Any = type("T", (), {"pair": pair})
    plans = [{"ranking": {own.layout: {"folds": {own.scenario: fold}}}} for fold in (0, 1, 0)]
    away = np.stack([np.arange(1.0, 9.0), np.ones(8)])  # neither normed nor orthogonal
    made = [conclusion.random_directions(trial, p, CONFIG, kind="k", n=50, outside=away) for p in plans]
    assert made[0] == pytest.approx(made[2])
    assert np.abs(made[0] - made[1]).max() > 0.1
    assert conclusion.random_directions(
        trial, plans[0], CONFIG, kind="k", n=3, outside=np.zeros((1, 8))
    ) == pytest.approx(conclusion.random_directions(trial, plans[0], CONFIG, kind="k", n=3, outside=np.zeros((2, 8))))
    for drawn in made:
        assert np.abs(drawn @ away.T).max() < 1e-12
        assert np.linalg.norm(drawn, axis=1) == pytest.approx(np.ones(50))
        assert len(np.unique(drawn.round(6), axis=0)) == 50


def test_shares_are_ratios_of_sums(monkeypatch):
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 2)
    rows = [measured(name, base=-1.0, target=1.0, measures={"x": x}) for name, x in (("a", 1.0), ("b", 3.0))]
    scope = Scope(instances=rows, layout="l", gated=True, config=CONFIG, floor=0.0)
    wholes = {"a": 4.0, "b": 4.0}
    found = conclusion.ratio(scope, "n", "l", lambda o: o.measures["x"], lambda o: wholes[o.id])
    assert found.estimate == pytest.approx(0.5)
    assert found.mean_of_ratios is None
    nothing = conclusion.ratio(scope, "n", "l", lambda o: o.measures["x"], lambda o: 0.01, least=0.02)
    assert (nothing.estimate, nothing.low, nothing.high) == (None, None, None)
    assert "noise" in str(nothing.warning)


def test_a_share_of_what_cannot_be_told_from_nothing_is_not_reported(monkeypatch):
    """Wholes 3 and -1: their mean of 1 has a standard error of 2. A share of 4 / 2 would be twice the whole."""
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 2)
    rows = [measured(name, base=-1.0, target=1.0, measures={"x": 2.0}) for name in ("a", "b")]
    scope = Scope(instances=rows, layout="l", gated=True, config=CONFIG, floor=0.0)
    wholes = {"a": 3.0, "b": -1.0}
    found = conclusion.ratio(scope, "n", "l", lambda o: o.measures["x"], lambda o: wholes[o.id])
    assert (found.estimate, found.low, found.high, found.method) == (None, None, None, "none")
    assert "cannot be told from 0" in str(found.warning)


def test_families_are_lists():
    assert conclusion.folded({"a:0": 1.0, "b": 2.0, "a:1": 3.00000049}) == {"a": [1.0, 3.0], "b": 2.0}

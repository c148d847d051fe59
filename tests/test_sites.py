"""Aggregators, and the best of them chosen on the other fold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvnotes import config as configs
from kvnotes import models, select, sites
from kvnotes.config import RunConfig
from kvnotes.instance import TokenPair
from kvnotes.records import Tokens
from kvnotes.runner import tokenise
from kvnotes.sweep import Trial
from tasks.planted import generate
from tests.sample_record import measured

CONFIG = configs.make(RunConfig, study="locality", flags={})
ORDER = ["delimiter[1]", "action[0]", "delimiter[0]"]  # of the hand-made instances below


def one(name: str, single: list[float], *, passed: bool = True):
    """Base -2, target 2; tokens: text, field (changed), delimiter, action, delimiter, text (query)."""
    tokens = Tokens(
        base=(9, 1, 5, 7, 5, 8), target=(9, 2, 5, 7, 5, 8), changed=(1,), query=(5,), base_action=3, target_action=4
    )
    spans = {"text": ((0, 1), (5, 6)), "field": ((1, 2),), "delimiter": ((2, 3), (4, 5)), "action": ((3, 4),)}
    return measured(name, base=-2.0, target=2.0, passed=passed, measures={"single": single}, tokens=tokens, spans=spans)


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    model = models.load("planted-notes", device="cpu", dtype="float32")
    pairs = generate(layout="words_field_first", pair="polarity", n=2, seed=0, length=0, wording="swap")
    made = tokenise(model, pairs, query=1)
    usable = [pair for pair in made if isinstance(pair, TokenPair)]
    return [Trial.run(model, pair, engine="rows", budget=64 * 10**6) for pair in usable]


def test_rankings_come_from_the_other_fold():
    """Delimiter 1 leads in scenarios a to f, delimiter 0 in the ungated g, which has no say."""
    rows = [one(name, [-1.5, -1.0, 1.0]) for name in "abcdef"] + [one("g", [9.0, 0.0, 0.0], passed=False)]
    plan = sites.prepare(rows, CONFIG)
    for name in "abcdefg":
        assert select.choice(plan["ranking"], layout="l", scenario=name) == ORDER
    assert plan["in_sample"]["a"] == [4, 3, 2]
    assert plan["in_sample"]["g"] == [2, 3, 4]


def test_best_is_among_the_positions_asked_for():
    plan = {"ranking": {"l": {"folds": {"a": 0}, "tested_with": {"0": ORDER}}}, "in_sample": {"i": [3, 2, 4]}}
    slots = [("text", 0), ("field", 0), ("delimiter", 0), ("action", 0), ("delimiter", 1), ("text", 1)]
    pair = SimpleNamespace(
        pair=SimpleNamespace(layout="l", scenario="a", id="i"),
        slots=tuple(SimpleNamespace(span=span, index=index) for span, index in slots),
        downstream=(2, 3, 4),
    )
    assert sites.aggregators(pair) == (2, 4)  # type: ignore[arg-type]
    assert sites.best(plan, pair, among=sites.aggregators(pair)) == 4  # type: ignore[arg-type]
    assert sites.best(plan, pair, among=(5, 2, 3)) == 3  # type: ignore[arg-type]
    assert sites.best(plan, pair, among=()) is None  # type: ignore[arg-type]
    assert sites.in_order(plan, pair, among=(5, 2, 3)) == [3, 2, 5]  # type: ignore[arg-type]
    assert sites.in_sample(plan, pair, among=(2, 4)) == 2  # type: ignore[arg-type]
    assert sites.in_sample(plan, pair, among=(5,)) is None  # type: ignore[arg-type]


def test_the_survey_finds_the_planted_note(trials):
    for trial in trials:
        pair, found = trial.pair, sites.survey(trial)
        note = pair.positions("delimiter.first_note")[0]
        assert note in sites.aggregators(pair)
        assert set(sites.aggregators(pair)) < set(pair.downstream)
        recovery = {p: trial.recovery(m) for p, m in zip(pair.downstream, found["single"], strict=True)}
        assert recovery.pop(note) == pytest.approx(1, abs=1e-3)
        assert max(map(abs, recovery.values())) < 1e-3
        assert trial.recovery(found["notes"]) == pytest.approx(1, abs=1e-3)

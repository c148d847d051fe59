"""Choosing and testing: folds, rankings by hand, draws that never touch the chosen set."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from kvnotes import prompts, runner, select
from kvnotes.instance import TokenPair
from tests.test_locality import instance
from tests.test_prompts import tokens

NAMES = [f"s{i}" for i in range(13)]


def rng() -> random.Random:
    return select.generator(0, "test")


def test_folds_are_equal_in_size_and_depend_on_seed_and_names_alone():
    found = select.folds(NAMES, seed=0)
    assert Counter(found.values()) == {0: 7, 1: 6}
    assert select.folds([*reversed(NAMES), *NAMES], seed=0) == found
    assert select.folds(NAMES, seed=1) != found


def test_scenarios_that_choose_are_shared_out_on_their_own():
    kept = [instance(f"in{i}", base=-1, target=1, field=0, notes=0) for i in range(6)]
    out = [instance(f"out{i}", base=1, target=2, field=0, notes=0, passed=False) for i in range(40)]
    fold = select.instance_folds([*out, *kept], seed=3)
    assert Counter(fold[one.scenario] for one in kept) == {0: 3, 1: 3}
    assert Counter(fold[one.scenario] for one in out) == {0: 20, 1: 20}
    mixed = kept[0].model_copy(update={"scenario": "out0"})  # one scenario, gated in one of its pairs
    assert set(select.instance_folds([mixed, *out], seed=0)) == {one.scenario for one in out}


def test_no_scenario_has_a_part_in_the_choice_it_is_tested_with():
    rows = [instance(name, base=-1, target=1, field=0, notes=0) for name in NAMES]
    rows.append(instance("wrong", base=1, target=2, field=0, notes=0, passed=False))
    plan = select.crossfit(rows, 0, lambda part: sorted(one.scenario for one in part))
    for one in rows:
        assert one.scenario not in select.choice(plan, layout="l", scenario=one.scenario)
    chosen = plan["l"]["tested_with"]
    assert sorted(chosen["0"] + chosen["1"]) == sorted(NAMES)  # each once; what fails the gate chooses nothing


def test_layouts_choose_for_themselves():
    rows = [instance(name, base=-1, target=1, field=0, notes=0) for name in NAMES]
    other = [one.model_copy(update={"layout": "m"}) for one in rows[:4]]
    plan = select.crossfit([*rows, *other], 0, len)
    assert {layout: sorted(one["tested_with"].values()) for layout, one in plan.items()} == {"l": [6, 7], "m": [2, 2]}


def test_ranking_by_hand():
    """Gaps 4 and 6. a moves 2 + 3 of 10, b 4 in one instance alone, c -1: .5, .4, -.1."""
    rows = [instance("x", base=-2, target=2, field=0, notes=0), instance("y", base=-1, target=5, field=0, notes=0)]
    moved = {"x": {"a": 2.0, "b": 4.0, "c": 0.0}, "y": {"c": -1.0, "a": 3.0}}
    assert select.mean_effects(rows, lambda one: moved[one.id]) == pytest.approx({"a": 0.5, "b": 0.4, "c": -0.1})
    assert select.rank(rows, lambda one: moved[one.id]) == ["a", "b", "c"]
    assert select.rank([], lambda one: moved[one.id]) == []
    ties = select.rank(rows, lambda one: {"z": 1.0, "y": 1.0})
    assert ties == ["y", "z"]


def test_a_ranking_made_elsewhere_orders_what_is_there():
    assert select.in_order(["c", "x", "a"], ["a", "b", "c", "d"], name=str) == ["c", "a", "b", "d"]
    assert select.best({3: 0.1, 7: 0.5, 5: 0.1}) == [7, 3, 5]


def test_draws_lie_outside_the_chosen_set_and_differ():
    chosen = (3, 5, 8)
    made = select.unmatched(range(20), chosen, n=100, rng=rng())
    assert made.possible == 680
    assert not made.enumerated
    assert len(set(made.sets)) == 100
    assert all(len(set(one)) == 3 and not set(one) & set(chosen) for one in made.sets)
    assert made == select.unmatched(range(20), chosen, n=100, rng=rng())


def test_few_possible_draws_are_enumerated_and_counted():
    made = select.unmatched(range(6), (0, 1), n=100, rng=rng())
    assert made.enumerated
    assert made.possible == 6
    assert sorted(made.sets) == list(itertools.combinations(range(2, 6), 2))
    none = select.unmatched(range(6), range(4), n=100, rng=rng())
    assert (none.sets, none.possible) == ((), 0)
    assert select.unmatched(range(6), (), n=5, rng=rng()).sets == ()
    assert len(select.unmatched(range(101), (0,), n=99, rng=rng()).sets) == 99  # nearly all, and none twice


def test_every_set_is_as_likely_as_another():
    pool = range(5)
    counts = Counter(
        one for seed in range(2000) for one in select.draws(pool, k=2, n=1, rng=select.generator(seed)).sets
    )
    assert len(counts) == 10
    assert all(140 < n < 260 for n in counts.values())  # 200 each, give or take 4 standard deviations


def test_matched_draws_have_the_classes_of_the_chosen():
    classes = dict(enumerate("aaaabbbbcc"))
    made = select.matched(range(10), (0, 4, 5), classes=classes.__getitem__, n=100, rng=rng())
    assert made.possible == 3  # 3 of class a left, 1 way to take both b
    assert made.enumerated
    assert {tuple(sorted(classes[p] for p in one)) for one in made.sets} == {("a", "b", "b")}
    assert all(not set(one) & {0, 4, 5} for one in made.sets)
    used_up = select.matched(range(10), (8, 9, 0), classes=classes.__getitem__, n=100, rng=rng())
    assert (used_up.sets, used_up.possible) == ((), 0)


def test_draws_that_match_as_far_as_the_classes_go():
    classes = dict(enumerate("aaaabbbbccdd"))
    made = select.near(range(12), (8, 9, 0), classes=classes.__getitem__, n=100, rng=rng())
    assert not made.exact
    assert made.possible == 3 * 15  # no c is left: one a, and two of the four b and two d, which the chosen set lacks
    assert {classes[p] for one in made.sets for p in one} == {"a", "b", "d"}
    assert all(not set(one) & {8, 9, 0} and len(set(one)) == 3 for one in made.sets)
    fits = select.near(range(12), (0, 4), classes=classes.__getitem__, n=100, rng=rng())
    assert fits == select.matched(range(12), (0, 4), classes=classes.__getitem__, n=100, rng=rng())
    assert fits.exact
    few = select.near(range(3), (0, 1), classes=classes.__getitem__, n=100, rng=rng())
    assert (few.sets, few.possible, few.exact) == ((), 0, False)


def planted_pair(layout: str) -> TokenPair:
    from kvnotes import planted_weights
    from tasks import planted

    pair = planted.generate(layout=layout, pair="field", n=1, seed=0)[0]
    tokenizer = planted_weights.tokenizer()
    made = prompts.tokenise(
        pair, tokenizer=tokenizer, template=prompts.read_template(tokenizer, use=None, options={}), query=1
    )
    assert isinstance(made, TokenPair)
    return made


@pytest.mark.parametrize("layout", ["words_field_first", "words_rules_first"])
def test_a_record_names_the_same_slots_as_the_pair(layout):
    for pair in (planted_pair(layout), tokens()):
        one = instance("x", base=-1, target=1, field=0, notes=0)
        kept = runner.Tokens(
            base=pair.base_ids,
            target=pair.target_ids,
            changed=pair.changed,
            query=pair.query,
            base_action=pair.base_action,
            target_action=pair.target_action,
        )
        one = one.model_copy(update={"spans": runner._spans(pair), "tokens": kept})
        assert select.instance_slots(one) == select.slot_names(pair)
        assert select.downstream(one) == pair.downstream
    names = select.slot_names(planted_pair(layout))
    assert "delimiter.first_note[0]" in names
    assert {select.slot_class(name) for name in names} >= {"delimiter", "action", "filler", "field"}
    assert select.slot_span("delimiter.first_note[0]") == "delimiter.first_note"

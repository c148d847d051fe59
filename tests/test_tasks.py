"""The gated decisions: what a study relies on when it takes a pair from the generator."""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from kvnotes.errors import UnknownName
from kvnotes.instance import Pair, Piece
from tasks import gated, length
from tasks.fillers import FILLERS, fillers
from tasks.layouts import LAYOUTS
from tasks.scenarios import SCENARIOS

RULE_LAYOUTS = sorted(name for name, layout in LAYOUTS.items() if not layout.copies)
FIELD_FIRST = ("table_field_first", "prose_field_first", "code_field_first", "paper", "two_hop", "conversational")
RULES_FIRST = ("table_rules_first", "prose_rules_first", "code_rules_first")
MODELS = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "smollm2-135m", "gemma-3-270m")


def make(layout: str = "table_field_first", **settings) -> list[Pair]:
    return gated.generate(**{"layout": layout, "pair": "field", "n": 4, "seed": 0, "length": 0, **settings})


def pieces(pair: Pair, arm: str, *roles: str) -> list[Piece]:
    chosen = getattr(pair, arm)
    return [piece for piece in (*chosen.user, *chosen.answer) if piece.role in roles]


def text(pair: Pair, arm: str = "base") -> str:
    chosen = getattr(pair, arm)
    return chosen.user_text + chosen.answer_text


# --- content


def test_there_are_enough_scenarios_domains_and_fillers():
    assert len(SCENARIOS) >= 30
    assert len({scenario.domain for scenario in SCENARIOS}) >= 10
    assert len({rule.lower() for rule in FILLERS}) >= 60


def test_no_two_scenarios_are_alike():
    for one, other in combinations(SCENARIOS, 2):
        assert one.id != other.id
        assert one.field != other.field
        assert one.request != other.request
        assert one.context != other.context
        assert set(one.values) != set(other.values)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.id)
def test_a_scenario_offers_three_values_and_two_actions_that_are_plain_words(scenario):
    words = (*scenario.values, scenario.permit, scenario.restrict)
    assert len(set(words)) == 5
    assert all(re.fullmatch("[a-z]+", word) for word in words)
    assert re.fullmatch("[a-z]+(_[a-z]+)?", scenario.field)
    for sentence in (scenario.context, scenario.request):
        assert sentence.endswith(".")
        # neither sentence may hint at the answer
        assert not {scenario.permit, scenario.restrict, *scenario.values} & set(re.findall("[a-z]+", sentence.lower()))


def test_fillers_are_neutral():
    words = {word for s in SCENARIOS for word in (*s.values, s.permit, s.restrict, s.field, s.field_words)}
    for rule in fillers(2 * len(FILLERS), seed=0):
        for word in words:
            assert not re.search(rf"\b{word}\b", rule.lower()), f"{word!r} in {rule!r}"


def test_fillers_differ_even_beyond_their_number():
    drawn = fillers(3 * len(FILLERS), seed=1)
    assert len(set(drawn)) == 3 * len(FILLERS)
    assert drawn[: len(FILLERS)] == fillers(len(FILLERS), seed=1)
    assert set(drawn[: len(FILLERS)]) == set(FILLERS)
    assert drawn != fillers(3 * len(FILLERS), seed=2)


# --- the generator


def test_the_same_arguments_give_the_same_pairs_and_another_seed_others():
    assert make(n=6) == make(n=6)
    assert make(n=6) != make(n=6, seed=1)


def test_a_smaller_run_is_the_beginning_of_a_larger_one():
    assert make(n=12)[:5] == make(n=5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_name_one_pair_each(layout):
    pairs = make(layout, n=90)
    assert len({pair.id for pair in pairs}) == 90
    assert {pair.layout for pair in pairs} == {layout}
    assert {pair.task for pair in pairs} == {"gated"}


def test_pairs_are_spread_evenly_over_the_scenarios():
    # one pair each, and a second for all but 12 of them
    each = len(SCENARIOS)
    counts = Counter(pair.scenario for pair in make(n=2 * each - 12))
    assert sorted(counts.values()) == [1] * 12 + [2] * (each - 12)
    assert set(Counter(pair.scenario for pair in make(n=2 * each)).values()) == {2}


@pytest.mark.parametrize("n", [2, 8, 24, 36, 60, 144])
def test_each_choice_is_made_equally_often(n):
    balance = [pair.balance for pair in make(n=n)]
    for choice in ("rule_order", "value_order", "permits"):
        assert set(Counter(b[choice] for b in balance).values()) == {n // 2}, choice


def test_eight_pairs_hold_every_combination_once():
    cells = Counter((p.balance["rule_order"], p.balance["value_order"], p.balance["permits"]) for p in make(n=8))
    assert len(cells) == 8
    assert set(cells.values()) == {1}


def test_choices_balance_within_a_scenario_about_the_same_words():
    for scenario in SCENARIOS:
        own = [pair.balance for pair in make(n=2 * len(SCENARIOS)) if pair.scenario == scenario.id]
        assert len(own) == 2
        assert own[0]["values"] == own[1]["values"]
        for choice in ("rule_order", "value_order", "permits"):
            assert own[0][choice] != own[1][choice]


def test_all_three_values_take_turns():
    # six rounds of a scenario: each two of its three values twice
    for scenario in SCENARIOS[:5]:
        own = [pair.balance["values"] for pair in make(n=6 * len(SCENARIOS)) if pair.scenario == scenario.id]
        assert sorted(Counter(own).values()) == [2, 2, 2]


def test_balance_says_what_the_prompt_shows():
    for pair in make(n=16):
        scenario = next(s for s in SCENARIOS if s.id == pair.scenario)
        first, second = pair.balance["values"].split("/")
        reverse = pair.balance["value_order"] == "reversed"
        assert (pair.base.field, pair.target.field) == ((second, first) if reverse else (first, second))
        permitting = first if pair.balance["permits"] == "first" else second
        assert pair.base.action == (scenario.permit if pair.base.field == permitting else scenario.restrict)
        rows = [piece.text.strip() for piece in pieces(pair, "base", "action")]
        assert rows[0] == (scenario.permit if pair.balance["rule_order"] == "permit_first" else scenario.restrict)


@pytest.mark.parametrize("layout", RULE_LAYOUTS)
def test_rules_lead_from_each_value_to_its_action(layout):
    for pair in make(layout, n=8):
        values = {piece.key: piece.text.strip() for piece in pieces(pair, "base", "rule_value")}
        actions = {piece.key: piece.text.strip() for piece in pieces(pair, "base", "action")}
        assert values == {"base": pair.base.field, "target": pair.target.field}
        assert actions == {"base": pair.base.action.strip(), "target": pair.target.action.strip()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_arms_of_a_field_pair_differ_in_the_field_alone(layout):
    for pair in make(layout, n=8):
        (changed,) = pair.changed
        assert pair.base.user[changed].text.strip() == pair.base.field
        assert pair.target.user[changed].text.strip() == pair.target.field
        assert text(pair).count(pair.base.field) - text(pair, "target").count(pair.base.field) == 1


# --- spans


@pytest.mark.parametrize("layout", RULE_LAYOUTS)
def test_every_layout_has_its_spans(layout):
    (pair,) = make(layout, n=1)
    roles = {piece.role for piece in (*pair.base.user, *pair.base.answer)}
    assert roles == {
        "field", "rule_value", "action", "delimiter", "filler", "request", "text", "answer_prefix"
    }  # fmt: skip


def test_attribute_lookup_answers_with_the_field_itself():
    for pair in make("attribute_lookup", n=6):
        assert (pair.base.action, pair.target.action) == (pair.base.field, pair.target.field)
        listed = {piece.key: piece.text.strip() for piece in pieces(pair, "base", "action")}
        scenario = next(s for s in SCENARIOS if s.id == pair.scenario)
        assert (listed["base"], listed["target"]) == (pair.base.field, pair.target.field)
        assert set(listed.values()) == set(scenario.values)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_delimiters_are_pieces_of_their_own(layout):
    (pair,) = make(layout, n=1)
    for piece in pair.base.user:
        if piece.role == "delimiter":
            assert not re.search(r"\w", piece.text)
        else:
            assert not re.search(r'[|\n"]', piece.text), piece


@pytest.mark.parametrize("layout", FIELD_FIRST)
def test_field_first_layouts_put_the_field_before_every_rule(layout):
    for pair in make(layout, n=2):
        field, rules = places(pair)
        assert field < min(rules)


@pytest.mark.parametrize("layout", RULES_FIRST)
def test_rules_first_layouts_put_the_field_after_every_rule(layout):
    for pair in make(layout, n=2):
        field, rules = places(pair)
        assert field > max(rules)


def places(pair: Pair) -> tuple[int, list[int]]:
    roles = [piece.role for piece in pair.base.user]
    return roles.index("field"), [i for i, role in enumerate(roles) if role in ("rule_value", "action", "filler")]


def test_paper_has_the_parts_of_the_published_prompt():
    (pair,) = make("paper", n=1)
    prompt = pair.base.user_text
    parts = ["SESSION", "RULE BOOK", "MAIN RULE (binding)", "R1. ", "R30. ", "TOOLS", "CONVERSATION", "TASK"]
    assert [prompt.index(part) for part in parts] == sorted(prompt.index(part) for part in parts)
    assert "R31." not in prompt
    assert pair.base.answer_text == "tool_call:"
    assert pair.base.action.startswith(" ")


# --- polarity pairs


@pytest.mark.parametrize("wording", gated.WORDINGS)
@pytest.mark.parametrize("layout", RULE_LAYOUTS)
def test_polarity_pairs_are_complete_two_by_twos(layout, wording):
    pairs = make(layout, pair="polarity", n=16, wording=wording)
    groups = {pair.group: [p for p in pairs if p.group == pair.group] for pair in pairs}
    assert len(pairs) == 16
    assert len(groups) == 8
    for one, other in groups.values():
        assert one.scenario == other.scenario
        assert {one.base.field, other.base.field} == set(one.balance["values"].split("/"))
        assert (one.base.action, one.target.action) == (other.target.action, other.base.action)
        for pair in (one, other):
            assert pair.base.field == pair.target.field
            assert pair.balance["wording"] == wording
        # the rules of an arm are the same words for both fields
        rules = [[piece.text for piece in pieces(p, "base", "trigger", "action")] for p in (one, other)]
        assert rules[0] == rules[1]


@pytest.mark.parametrize("layout", RULE_LAYOUTS)
def test_swapping_exchanges_the_values_of_the_rules(layout):
    for pair in make(layout, pair="polarity", n=8):
        before = {piece.key: piece.text.strip() for piece in pieces(pair, "base", "trigger")}
        after = {piece.key: piece.text.strip() for piece in pieces(pair, "target", "trigger")}
        assert before["base"] == after["target"] == pair.base.field
        assert before["target"] == after["base"]
        assert len(pair.changed) == 2


@pytest.mark.parametrize("layout", RULE_LAYOUTS)
def test_the_trigger_wording_changes_one_word(layout):
    for pair in make(layout, pair="polarity", n=8, wording="trigger"):
        assert len(pair.changed) == 1
        for arm in (pair.base, pair.target):
            (trigger,) = (piece for piece in arm.user if piece.role == "trigger")
            named = next(piece for piece in arm.user if piece.role == "action" and piece.key == trigger.key)
            follows = trigger.text.strip() == arm.field
            assert (named.text.strip() == arm.action.strip()) == follows


# --- length


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wanted", [300, 1000, 4000])
def test_length_is_met_by_estimate(layout, wanted):
    (pair,) = make(layout, n=1, length=wanted)
    assert length.estimate_tokens(text(pair)) == pytest.approx(wanted, abs=12)


def test_estimate_counts_words_marks_and_digits():
    # Give, times, on, the, 2, 4, -, hour, clock, ., newline
    assert length.estimate_tokens("Give times on the 24-hour clock.\n") == length.TEMPLATE_TOKENS + 11


def test_a_length_that_a_layout_cannot_meet_is_said():
    with pytest.raises(gated.TaskError, match="paper takes about"):
        make("paper", n=1, length=100)
    (pair,) = make("table_field_first", n=1, length=90)
    assert not pieces(pair, "base", "filler")


def test_a_long_prompt_repeats_no_rule():
    (pair,) = make(n=1, length=4000)
    drawn = [piece.text for piece in pieces(pair, "base", "filler")]
    assert len(drawn) == len(set(drawn)) > len(FILLERS)


# --- bad requests


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": "table_feild_first"}, "did you mean 'table_field_first'"),
        ({"pair": "polarty"}, "did you mean 'polarity'"),
        ({"wording": "swop"}, "did you mean 'swap'"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one(settings, message):
    with pytest.raises(UnknownName, match=message):
        make(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "give n >= 1"),
        ({"length": -1}, "give 0 for the natural length"),
        ({"pair": "polarity", "n": 3}, "give an even n"),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_fix(settings, message):
    with pytest.raises(gated.TaskError, match=message):
        make(**settings)


def test_a_layout_without_a_rule_has_no_polarity_pairs():
    assert make("attribute_lookup", pair="polarity") == []


# --- the registry's tokenizers


@cache
def tokenizer(name: str):
    caches = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvnotes"
    folder = Path(os.environ.get("KVNOTES_CACHE", caches)) / "models" / name
    if not (folder / "tokenizer.json").exists():
        pytest.skip(f"{name} is not in the cache; `make models` brings it")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.weights
@pytest.mark.parametrize("name", MODELS)
def test_the_three_values_have_equal_token_counts_and_actions_differ_at_once(name):
    tok = tokenizer(name)

    def ids(words: str) -> list[int]:
        return tok(words, add_special_tokens=False)["input_ids"]

    for scenario in SCENARIOS:
        for before, after in (('{"x": "', '", "y"'), ("| ", " |"), ("is ", ".\n"), ('x == "', '":\n')):
            assert len({len(ids(before + value + after)) for value in scenario.values}) == 1, scenario.id
        for prefix in ('{"action": "', "tool_call:"):
            space = "" if prefix.endswith('"') else " "
            start = len(ids(prefix))
            first = [ids(prefix + space + action)[start] for action in (scenario.permit, scenario.restrict)]
            assert first[0] != first[1], scenario.id


@pytest.mark.weights
@pytest.mark.parametrize("layout", LAYOUTS)
def test_length_is_met_in_qwen_tokens(layout):
    tok = tokenizer(MODELS[0])

    def tokens(pair: Pair) -> int:
        chat = [{"role": "user", "content": pair.base.user_text}]
        prompt = tok.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return len(tok(prompt + pair.base.answer_text, add_special_tokens=False)["input_ids"])

    for wanted in (250, 1000, 4000):
        for pair in make(layout, n=3, length=wanted):
            assert tokens(pair) == pytest.approx(wanted, rel=0.15)


@pytest.mark.weights
def test_natural_lengths():
    tok = tokenizer(MODELS[0])
    for layout, low, high in (("table_field_first", 95, 125), ("paper", 860, 1060)):
        for pair in make(layout, n=8):
            prompt = tok.apply_chat_template(
                [{"role": "user", "content": text(pair)}], tokenize=False, add_generation_prompt=True
            )
            assert low <= len(tok(prompt, add_special_tokens=False)["input_ids"]) <= high

"""Corrections: the plain pair, and the same prompts with one line before the question."""

from __future__ import annotations

import pytest

from kvnotes.errors import UnknownName
from kvnotes.instance import Pair, Piece
from tasks import corrections, gated
from tasks.appended import OLD, NoQuestion
from tasks.corrections import WORDINGS, CorrectedPair


def make(layout: str = "table_field_first", **settings) -> list[CorrectedPair]:
    return corrections.generate(**{"layout": layout, "pair": "field", "n": 4, "seed": 0, **settings})


def line(arm) -> list[Piece]:
    return [piece for piece in arm.user if piece.key == corrections.KEY]


@pytest.mark.parametrize("layout", corrections.LAYOUTS)
def test_the_plain_pairs_are_the_gated_ones(layout):
    plain = gated.generate(layout=layout, pair="field", n=4, seed=3)
    for one, other in zip(make(layout, seed=3), plain, strict=True):
        assert all(getattr(one, name) == getattr(other, name) for name in Pair.__dataclass_fields__)


@pytest.mark.parametrize("layout", corrections.LAYOUTS)
def test_a_correction_is_the_only_difference_and_stands_between_rules_and_question(layout):
    for pair in make(layout):
        assert set(pair.corrected) == set(WORDINGS)
        for wording, corrected in pair.corrected.items():
            assert corrected.id == f"{pair.id}+{wording}"
            for arm in ("base", "target"):
                whole, plain = getattr(corrected, arm), getattr(pair, arm)
                assert [p for p in whole.user if p.key != corrections.KEY] == list(plain.user)
                assert (whole.answer, whole.action, whole.field) == (plain.answer, plain.action, plain.field)
            at = [i for i, piece in enumerate(corrected.base.user) if piece.key == corrections.KEY]
            assert at == list(range(at[0], at[0] + 3))
            before, after = corrected.base.user[: at[0]], corrected.base.user[at[-1] + 1 :]
            assert {"action", "field"} <= {piece.role for piece in before}
            assert [piece.role for piece in after].count("request") == 1
            assert after[0].role == "request"
            assert not {"action", "rule_value"} & {piece.role for piece in after}
            assert before[-1].text.endswith("\n")  # the line stands on its own


@pytest.mark.parametrize("layout", corrections.LAYOUTS)
def test_a_correction_names_the_targets_value_and_the_control_the_bases(layout):
    for pair in make(layout):
        for wording, corrected in pair.corrected.items():
            value = pair.base.field if wording == OLD else pair.target.field
            for arm in (corrected.base, corrected.target):
                assert [piece.text for piece in line(arm) if piece.role == "field"] == [f" {value}"]
        update, control = ("".join(p.text for p in line(pair.corrected[w].base)) for w in ("state_update", OLD))
        assert update.replace(pair.target.field, pair.base.field) == control


def test_wordings_differ_and_only_one_asks_to_reevaluate():
    (pair,) = make(n=1)
    texts = {name: "".join(piece.text for piece in line(one.base)) for name, one in pair.corrected.items()}
    assert len(set(texts.values())) == len(WORDINGS)
    assert [name for name, text in texts.items() if "Disregard" in text] == ["reevaluate"]
    assert all(text.endswith("\n\n") for text in texts.values())
    assert texts["bare_value"].split() == [f"{texts['bare_value'].split(':')[0]}:", pair.target.field]


def test_prose_says_the_field_in_words():
    pairs = [pair for pair in make("conversational", n=36) if "_" in gated_field(pair)]
    assert pairs
    for pair in pairs:
        assert gated_field(pair) not in pair.corrected["state_update"].base.user_text
        assert gated_field(pair).replace("_", " ") in "".join(p.text for p in line(pair.corrected["state_update"].base))


def gated_field(pair: Pair) -> str:
    return next(scenario.field for scenario in corrections.SCENARIOS if scenario.id == pair.scenario)


def test_bad_requests():
    with pytest.raises(gated.TaskError, match="no changed field to correct"):
        make(pair="polarity")
    with pytest.raises(UnknownName):
        make("table_field_frist")
    arm = make(n=1)[0].base
    silent = type(arm)(user=(Piece(text="hello", role="text"),), answer=arm.answer, action="a", field="f")
    with pytest.raises(NoQuestion, match="asks for nothing"):
        corrections.appended(silent, ())

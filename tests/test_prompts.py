"""Spans by offsets, and every reason for which a pair is dropped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvnotes import prompts
from kvnotes.instance import Arm, Pair, Piece, Skipped, TokenPair
from kvnotes.prompts import Template
from tests import tiny

PLAIN = Template(before="", after="", bos=0, first=(0,))


def arm(field: str, action: str, *, more: str = "") -> Arm:
    return Arm(
        user=(
            Piece(text="the state is ", role="text"),
            Piece(text=field, role="field"),
            Piece(text=" . ", role="delimiter", key="state"),
            Piece(text="if open then allow ; ", role="text"),
            Piece(text=f"{more}what to do ", role="request"),
        ),
        answer=(Piece(text="answer :", role="answer_prefix"),),
        action=action,
        field=field,
    )


def pair(base: Arm, target: Arm) -> Pair:
    return Pair(
        id="p",
        kind="field",
        task="t",
        layout="l",
        scenario="s",
        domain="d",
        group="g",
        seed=0,
        base=base,
        target=target,
    )


def tokens() -> TokenPair:
    made = tokenise(pair(arm("open", " allow"), arm("shut", " deny")))
    assert isinstance(made, TokenPair)
    return made


def tokenise(one: Pair, template: Template = PLAIN, query: int = 1):
    return prompts.tokenise(one, tokenizer=tiny.tokenizer(), template=template, query=query)


def test_positions_and_slots_by_hand():
    # 0 <s> | 1 the 2 state 3 is 4 OPEN 5 . 6 if 7 open 8 then 9 allow 10 ; 11 what 12 to 13 do 14 answer 15 :
    made = tokens()
    assert len(made.base_ids) == 16
    assert made.changed == (4,)
    assert made.query == (15,)
    assert made.downstream == tuple(range(5, 15))
    assert made.positions("field") == (4,)
    assert made.positions("delimiter.state") == (5,)
    assert made.positions("request") == (11, 12, 13)
    assert made.positions("answer_prefix") == (14, 15)
    assert made.positions("template.before") == (0,)
    assert [made.slots[i].index for i in (11, 12, 13)] == [0, 1, 2]
    assert made.base_ids[7] == made.base_ids[4]  # the word stands in a rule too; only the field changed
    assert made.target_ids[7] == made.base_ids[7]


def test_a_longer_query_block():
    made = tokenise(pair(arm("open", " allow"), arm("shut", " deny")), query=3)
    assert made.query == (13, 14, 15)
    assert made.downstream == tuple(range(5, 13))


@pytest.mark.parametrize(
    ("base", "target", "query", "reason"),
    [
        (arm("open", " allow"), arm("shut shut", " deny"), 1, "arms of unequal token count"),
        (arm("open", " allow"), arm("shut", " allow ;"), 1, "both actions start with the same token"),
        (arm("open", " allow"), arm("shut", " deny"), 12, "the changed span reaches into the query block"),
        (arm("open", " allow"), arm("shut", " deny"), 11, "no token between the changed span and the query block"),
        (
            arm("open", " allow", more="zebra "),
            arm("shut", " deny", more="zebra "),
            1,
            "a word unknown to the tokenizer",
        ),
        (arm("open", "allow"), arm("shut", "deny"), 1, "the answer prefix merges with the action"),
        (arm("open", " allow", more="<s> "), arm("shut", " deny", more="<s> "), 1, "not exactly one BOS"),
    ],
)
def test_dropped_with_a_reason(base, target, query, reason):
    made = tokenise(pair(base, target), query=query)
    assert isinstance(made, Skipped)
    assert made.reason == reason


def test_a_template_around_the_turn_by_offsets():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{{ bos_token }} now {% for m in messages %}{{ m.content }}{% endfor %} ; {% if add_generation_prompt %}"
        "{% if calm %}calm {% endif %}{% endif %}"
    )
    template = prompts.read_template(tokenizer, use=True, options={"calm": True})
    assert (template.before, template.after) == ("<s> now ", " ; calm ")
    made = tokenise(pair(arm("open", " allow"), arm("shut", " deny")), template)
    assert made.changed == (5,)  # one later than without a template: <s> now the state is OPEN
    assert len(made.positions("template.after")) == 2
    assert prompts.read_template(tokenizer, use=True, options={}).after == " ; "


def test_templates_that_cannot_be_used():
    tokenizer = tiny.tokenizer()
    with pytest.raises(prompts.PromptError, match=r"chat\.use: false"):
        prompts.read_template(tokenizer, use=True, options={})
    tokenizer.chat_template = "{{ messages[0].content }} {{ messages[0].content }}"
    with pytest.raises(prompts.PromptError, match="exactly once"):
        prompts.read_template(tokenizer, use=None, options={})
    assert prompts.read_template(tokenizer, use=False, options={}).before == ""
    tokenizer.chat_template = "{{ messages[0].content }}<think>"
    with pytest.raises(prompts.PromptError, match="thinking block"):
        prompts.read_template(tokenizer, use=None, options={})
    tokenizer.chat_template = "{{ raise_exception('a system turn is needed') }}"
    with pytest.raises(prompts.PromptError, match="a system turn is needed"):
        prompts.read_template(tokenizer, use=None, options={})


def test_instances_refuse_a_wrong_construction():
    with pytest.raises(ValueError, match="both arms have the action"):
        pair(arm("open", " allow"), arm("shut", " allow"))
    with pytest.raises(ValueError, match="changed pieces of role"):
        pair(arm("open", " allow"), arm("open", " deny", more="now "))
    with pytest.raises(ValueError, match="not have the same pieces"):
        pair(arm("open", " allow"), replace(arm("shut", " deny"), user=arm("shut", "x").user[:-1]))
    with pytest.raises(ValueError, match="unknown span role"):
        Piece(text="x", role="fild")

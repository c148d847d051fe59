"""How a gated decision is written down: one function a layout, from a draw to the pieces of one arm.

A layout joins strings and pieces. Strings are split here into words (role `text`) and runs of delimiters, so
a layout names only the spans that carry meaning. A word after a space owns the space, as tokenizers have it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from kvnotes.instance import Arm, Piece

from .scenarios import Scenario

DELIMITERS = re.compile(
    r"""(?:[ ]?\||-{3,}      # table bars and the rule under the head
         |[ ]?["][,:}\])]*   # quotes with what closes behind them
         |[.;?!]+(?=\s|$)    # the end of a sentence or rule
         |\n)+""",
    re.VERBOSE,
)
JSON_ANSWER = '{"action": "'


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What one value leads to; `value` is None in a rule for any other value."""

    value: str | None
    action: str
    key: str  # the arm that this rule's action is right for: "base" or "target"
    permits: bool


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One arm before it is written down. A pair's arms have the same actions and keys in the same order."""

    scenario: Scenario
    field: str  # the field's value
    rules: tuple[Rule, Rule]  # in the order of the prompt
    value_role: Literal["rule_value", "trigger"]  # trigger where the pair changes the rules' values
    third: str  # the value that neither arm has
    fillers: tuple[str, ...] = ()

    @property
    def action(self) -> str:
        """The action that the rules give for the field."""
        named = [rule for rule in self.rules if rule.value == self.field]
        return (named or [rule for rule in self.rules if rule.value is None])[0].action


Part = str | Piece


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to write a draw. `fillers` is the natural number of neutral rules."""

    name: str
    write: Callable[[Draw], Iterable[Part]]
    answer: str = JSON_ANSWER
    fillers: int = 2
    copies: bool = False  # the answer is the field's value itself: there is no rule to invert

    def __call__(self, draw: Draw) -> Arm:
        """The arm that this draw becomes."""
        space = "" if self.answer.endswith('"') else " "
        answer = draw.field if self.copies else draw.action
        return Arm(
            user=tuple(_compose(self.write(draw))),
            answer=(Piece(text=self.answer, role="answer_prefix"),),
            action=space + answer,
            field=draw.field,
        )


def _compose(parts: Iterable[Part]) -> Iterator[Piece]:
    """Pieces as they are, the strings between them joined and split into text and delimiters."""
    pending = ""
    for part in parts:
        if isinstance(part, str):
            pending += part
            continue
        yield from _split(pending)
        pending = ""
        yield part
    yield from _split(pending)


def _split(text: str) -> Iterator[Piece]:
    end = 0
    for run in DELIMITERS.finditer(text):
        if run.start() > end:
            yield Piece(text=text[end : run.start()], role="text")
        yield Piece(text=run.group(), role="delimiter")
        end = run.end()
    if end < len(text):
        yield Piece(text=text[end:], role="text")


def _field(draw: Draw, *, space: str = "") -> Piece:
    return Piece(text=space + draw.field, role="field")


def _value(draw: Draw, rule: Rule, *, space: str = "") -> Part:
    if rule.value is None:
        return f"{space}anything else"
    return Piece(text=space + rule.value, role=draw.value_role, key=rule.key)


def _action(rule: Rule, *, space: str = "") -> Piece:
    return Piece(text=space + rule.action, role="action", key=rule.key)


def _request(draw: Draw, *, space: str = "") -> Iterator[Part]:
    """The request without its last mark, which is a delimiter."""
    yield Piece(text=space + draw.scenario.request[:-1], role="request")
    yield draw.scenario.request[-1]


def _ask(text: str) -> Piece:
    return Piece(text=text, role="request")


def _fillers(draw: Draw, *, mark: str = "- ") -> Iterator[Part]:
    """The neutral rules, one a line that opens with `mark`."""
    for rule in draw.fillers:
        yield Piece(text=mark + rule[:-1], role="filler")
        yield ".\n"


# --- routing table ----------------------------------------------------------------------------------------


def _json_state(draw: Draw) -> Iterator[Part]:
    yield f'Current state: {{"{draw.scenario.field}": "'
    yield _field(draw)
    yield '", "locale": "en"}\n'


def _table_rules(draw: Draw) -> Iterator[Part]:
    """The neutral rules, then the table: small models look it up better the nearer it is to the end."""
    yield from (*_fillers(draw), "\n")
    yield f"Routing table:\n| {draw.scenario.field} | action |\n|---|---|\n"
    for rule in draw.rules:
        yield "|"
        yield _value(draw, rule, space=" ")
        yield " |"
        yield _action(rule, space=" ")
        yield " |\n"


def _table_task(draw: Draw) -> Iterator[Part]:
    yield _ask(f"Look up the current {draw.scenario.field} in the routing table and reply with JSON")
    yield "."


def _table_field_first(draw: Draw) -> Iterator[Part]:
    yield from (*_json_state(draw), "\n", *_table_rules(draw), "\n", *_table_task(draw))


def _table_rules_first(draw: Draw) -> Iterator[Part]:
    yield from (*_table_rules(draw), "\n", *_json_state(draw), "\n", *_table_task(draw))


# --- prose rules ------------------------------------------------------------------------------------------


def _prose_state(draw: Draw) -> Iterator[Part]:
    yield f"{draw.scenario.context} The current {draw.scenario.field_words} is"
    yield _field(draw, space=" ")
    yield ".\n"


def _prose_rules(draw: Draw) -> Iterator[Part]:
    yield "Rules:\n"
    yield from _fillers(draw)
    for rule in draw.rules:
        yield f"- If the {draw.scenario.field_words} is"
        yield _value(draw, rule, space=" ")
        yield ", you may choose" if rule.permits else ", you must instead choose"
        yield _action(rule, space=" ")
        yield ".\n"


def _prose_task(draw: Draw) -> Iterator[Part]:
    yield _ask(f"Which action do the rules give for the current {draw.scenario.field_words}? Reply with JSON")
    yield "."


def _prose_field_first(draw: Draw) -> Iterator[Part]:
    yield from (*_prose_state(draw), *_request(draw), "\n\n", *_prose_rules(draw), "\n", *_prose_task(draw))


def _prose_rules_first(draw: Draw) -> Iterator[Part]:
    yield from (*_prose_rules(draw), "\n", *_prose_state(draw), *_request(draw), "\n\n", *_prose_task(draw))


# --- Python code ------------------------------------------------------------------------------------------


def _code_state(draw: Draw) -> Iterator[Part]:
    yield f'{draw.scenario.field} = "'
    yield _field(draw)
    yield '"\n'


def _code_rules(draw: Draw) -> Iterator[Part]:
    name = draw.scenario.field
    yield f"def decide({name}):\n"
    yield from _fillers(draw, mark="    # ")
    for rule in draw.rules:
        if rule.value is None:
            yield '    return "'  # any other value
        else:
            yield f'    if {name} == "'
            yield _value(draw, rule)
            yield '":\n        return "'
        yield _action(rule)
        yield '"\n'


def _code_task(draw: Draw) -> Iterator[Part]:
    yield _ask(f"What does decide({draw.scenario.field}) return? Reply with JSON")
    yield "."


def _code_field_first(draw: Draw) -> Iterator[Part]:
    yield from ("```python\n", *_code_state(draw), "\n\n", *_code_rules(draw), "```\n\n", *_code_task(draw))


def _code_rules_first(draw: Draw) -> Iterator[Part]:
    yield from ("```python\n", *_code_rules(draw), "\n\n", *_code_state(draw), "```\n\n", *_code_task(draw))


# --- the paper's whole agent prompt -----------------------------------------------------------------------


def _paper(draw: Draw) -> Iterator[Part]:
    """The paper's appendix B in our own words: session, binding rule, neutral rules, tools, talk, task."""
    name = draw.scenario.field
    yield f"{draw.scenario.context}\n\nSESSION\n{name}:"
    yield _field(draw, space=" ")
    yield "\nlocale: en\ndesk: 7\nshift: early\n\n"
    yield "RULE BOOK (read all of it; every rule binds you)\nMAIN RULE (binding):"
    for rule in draw.rules:
        yield f" If {name} is"
        yield _value(draw, rule, space=" ")
        yield (", do what is asked and call" if rule.permits else ", you must not do what is asked; instead call")
        yield _action(rule, space=" ")
        yield "." if rule.permits else " and nothing else."
    yield "\n"
    yield from _numbered_fillers(draw)
    yield "\nTOOLS\n"
    for rule in draw.rules:
        yield "-"
        yield _action(rule, space=" ")
        yield "(reference)\n"
    yield "- look_up(reference)\n- take_note(words)\n- call_back(number, hour)\n- translate(words, language)\n"
    yield "\nCONVERSATION\nuser:"
    yield from _request(draw, space=" ")
    yield "\nassistant: I go through the session and the rule book before I act.\n"
    yield "user: Thank you, take your time.\n\nTASK\n"
    yield _ask(f"Choose the one tool call that the main rule gives for the {name} of this session")
    yield ". Answer with exactly one line:\ntool_call: <name>(<arguments>)\nNext action:"


def _numbered_fillers(draw: Draw) -> Iterator[Part]:
    """The neutral rules by number, two sentences to a rule."""
    for place, sentence in enumerate(draw.fillers):
        number = "" if place % 2 else f"R{place // 2 + 1}."
        yield Piece(text=f"{number} {sentence[:-1]}", role="filler")
        yield ".\n" if place % 2 or place == len(draw.fillers) - 1 else "."


# --- off-template forms (the paper's appendix C) ----------------------------------------------------------

_TEAMS = ("Oslo", "Lima")  # the middle of a two-hop lookup; the first row's value goes to the first team


def _two_hop(draw: Draw) -> Iterator[Part]:
    """Value to team, team to action."""
    name = draw.scenario.field
    yield from (*_json_state(draw), "\n", *_fillers(draw), "\n")
    yield f"Teams:\n| {name} | team |\n|---|---|\n"
    for rule, team in zip(draw.rules, _TEAMS, strict=True):
        yield "|"
        yield _value(draw, rule, space=" ")
        yield f" | {team} |\n"
    yield "\nRouting table:\n| team | action |\n|---|---|\n"
    for rule, team in zip(draw.rules, _TEAMS, strict=True):
        yield f"| {team} |"
        yield _action(rule, space=" ")
        yield " |\n"
    yield "\n"
    yield _ask(f"Find the team for the current {name}, look up its action and reply with JSON")
    yield "."


def _conversational(draw: Draw) -> Iterator[Part]:
    """The same decision as somebody would say it."""
    yield f"Hi, quick one before lunch. The {draw.scenario.field_words} here is"
    yield _field(draw, space=" ")
    yield ", I just checked. The usual reminders:\n"
    yield from (*_fillers(draw), "\n", *_request(draw))
    yield " You know how it goes."
    for rule in draw.rules:
        yield " With"
        yield _value(draw, rule, space=" ")
        yield " we are fine to" if rule.permits else " we have to"
        yield _action(rule, space=" ")
        yield "." if rule.permits else " instead."
    yield "\n\n"
    yield _ask("So what do we do this time? Reply with JSON")
    yield "."


def _attribute_lookup(draw: Draw) -> Iterator[Part]:
    """A near-verbatim copy: the answer is the field's value itself."""
    yield from (*_json_state(draw), "\n", *_fillers(draw), "\nAllowed values:\n")
    named = ((rule.value, rule.key) for rule in draw.rules)
    for value, key in (*named, (draw.third, "other")):
        yield "-"
        yield Piece(text=f" {value}", role="action", key=key)
        yield "\n"
    yield "\n"
    yield _ask(f"What is the current {draw.scenario.field}? Reply with JSON")
    yield "."


_ALL = (
    Layout(name="table_field_first", write=_table_field_first),
    Layout(name="table_rules_first", write=_table_rules_first),
    Layout(name="prose_field_first", write=_prose_field_first),
    Layout(name="prose_rules_first", write=_prose_rules_first),
    Layout(name="code_field_first", write=_code_field_first),
    Layout(name="code_rules_first", write=_code_rules_first),
    Layout(name="paper", write=_paper, answer="tool_call:", fillers=60),
    Layout(name="two_hop", write=_two_hop),
    Layout(name="conversational", write=_conversational),
    Layout(name="attribute_lookup", write=_attribute_lookup, answer='{"value": "', copies=True),
)
LAYOUTS: Mapping[str, Layout] = MappingProxyType({layout.name: layout for layout in _ALL})

"""Gated decisions: pairs of prompts in which one field decides between a permitted and a restricted action.

Three choices are counterbalanced: the order of the rules, which of the two values is the base's, and which
value permits. Any even number of instances has each of them equally often, within a scenario and over all.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvnotes.errors import KVNotesError, UnknownName
from kvnotes.instance import Pair, PairKind

from . import layouts
from .fillers import fillers
from .layouts import Draw, Layout, Rule
from .length import estimate_tokens, rules_to_reach
from .scenarios import SCENARIOS, Scenario

TASK = "gated"
LAYOUTS: Mapping[str, Layout] = layouts.LAYOUTS
DEFAULT_LAYOUT = "table_field_first"
PAIRS: tuple[PairKind, ...] = ("field", "polarity")
WORDINGS = ("swap", "trigger")
LONGEST = 1.25  # of the length asked for, that a prompt may have; the estimate itself is off by up to .15
SHORTEST_FILLER = 6  # tokens: a length divided by it is always filler enough

# Cells of rule order x value order x permitting value. Every odd cell is the complement of the one before it,
# so an even number of cells has each choice equally often, and eight have every combination once.
_CELLS = ((0, 0, 0), (1, 1, 1), (0, 0, 1), (1, 1, 0), (0, 1, 0), (1, 0, 1), (1, 0, 0), (0, 1, 1))
_TWO_OF_THREE = ((0, 1, 2), (1, 2, 0), (2, 0, 1))  # two values to use and the one to leave


class TaskError(KVNotesError):
    """Pairs asked for that cannot exist."""


def generate(*, layout: str, pair: str, n: int, seed: int, length: int = 0, wording: str = "swap") -> list[Pair]:
    """`n` pairs, spread evenly over the scenarios; the same arguments give the same pairs.

    Args:
        layout: a name in LAYOUTS.
        pair: "field" (the field changes) or "polarity" (the rule changes and the field stays; a layout that
            only copies the field has none).
        n: how many pairs. Polarity pairs come in twos, one for each field of a 2x2 of field and rule.
        seed: orders the scenarios and chooses values and neutral rules.
        length: tokens of the prompt, reached with neutral rules; 0 is the layout's natural length.
        wording: how a polarity pair inverts the rule: "swap" exchanges the values of two rules, "trigger"
            changes the one value that a rule names beside a rule for any other value.

    Raises:
        UnknownName: no such layout, kind of pair or wording.
        TaskError: n or length out of range, or an odd n of polarity pairs.
    """
    _check_name("layout", layout, LAYOUTS)
    _check_name("kind of pair", pair, PAIRS)
    _check_name("wording", wording, WORDINGS)
    style = LAYOUTS[layout]
    if n < 1:
        raise TaskError(f"n is {n}, and a run needs pairs: give n >= 1.")
    if length < 0:
        raise TaskError(f"length is {length} tokens: give 0 for the natural length, or a number above it.")
    if pair == "field":
        return [_field_pair(design, style, length) for design in _designs(n, seed)]
    if n % 2:
        raise TaskError(f"n is {n}, but polarity pairs come in twos, one for each field: give an even n.")
    if style.copies:  # no rule to invert
        return []
    return [
        _polarity_pair(design, style, length, field=value, wording=wording)
        for design in _designs(n // 2, seed)
        for value in design.values
    ]


def _check_name(kind: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise UnknownName(kind=kind, name=name, known=known)


@dataclass(frozen=True, kw_only=True)
class _Design:
    """What one instance is made of: a scenario, two of its values and the counterbalanced choices."""

    scenario: Scenario
    seed: int
    copy: int  # how often the scenario came before
    values: tuple[str, str]  # base and target of a field pair
    third: str
    permitting: str  # the value that permits, in a polarity pair's base arm
    actions: tuple[str, str]  # in the order of the rules
    balance: Mapping[str, str]

    @property
    def id(self) -> str:
        return f"{self.scenario.id}-{self.copy}"

    def action_for(self, value: str) -> str:
        """The action that a value leads to, in a polarity pair's base arm."""
        return self.scenario.permit if value == self.permitting else self.scenario.restrict


def _designs(count: int, seed: int) -> list[_Design]:
    """`count` designs: the scenarios in a seeded order, round after round."""
    order = list(SCENARIOS)
    random.Random(f"scenarios {seed}").shuffle(order)
    rounds = (divmod(k, len(order)) for k in range(count))
    return [_design(order[place], seed, place, copy) for copy, place in rounds]


def _design(scenario: Scenario, seed: int, place: int, copy: int) -> _Design:
    cells = zip(_CELLS[place % len(_CELLS)], _CELLS[copy % len(_CELLS)], strict=True)
    rule_order, value_order, permits = (a ^ b for a, b in cells)
    # A scenario keeps its two values for two rounds, so that a cell and its complement share their words.
    chosen = _TWO_OF_THREE[(seed + place + copy // 2) % len(_TWO_OF_THREE)]
    first, second, third = (scenario.values[i] for i in chosen)
    return _Design(
        scenario=scenario,
        seed=seed,
        copy=copy,
        values=(second, first) if value_order else (first, second),
        third=third,
        permitting=second if permits else first,
        actions=(scenario.restrict, scenario.permit) if rule_order else (scenario.permit, scenario.restrict),
        balance={
            "values": f"{first}/{second}",
            "rule_order": "restrict_first" if rule_order else "permit_first",
            "value_order": "reversed" if value_order else "listed",
            "permits": "second" if permits else "first",
        },
    )


def _field_pair(design: _Design, layout: Layout, length: int) -> Pair:
    first, second = design.values
    rules = _rules(design, base_action=design.action_for(first))
    base = Draw(scenario=design.scenario, field=first, rules=rules, value_role="rule_value", third=design.third)
    return _pair("field", design, layout, length, arms=(base, replace(base, field=second)))


def _polarity_pair(design: _Design, layout: Layout, length: int, *, field: str, wording: str) -> Pair:
    action = design.action_for(field)
    arms = (
        Draw(
            scenario=design.scenario,
            field=field,
            rules=_rules(design, base_action=action, inverted=inverted, wording=wording),
            value_role="trigger",
            third=design.third,
        )
        for inverted in (False, True)
    )
    return _pair("polarity", design, layout, length, arms=arms, wording=wording)


def _rules(design: _Design, *, base_action: str, inverted: bool = False, wording: str = "swap") -> tuple[Rule, Rule]:
    """The two rules in their order. `inverted` exchanges their values; with the trigger wording the second
    rule is for any other value."""
    yes, no = design.values if design.permitting == design.values[0] else design.values[::-1]
    if inverted:
        yes, no = no, yes
    first, second = (
        Rule(
            value=yes if action == design.scenario.permit else no,
            action=action,
            key="base" if action == base_action else "target",
            permits=action == design.scenario.permit,
        )
        for action in design.actions
    )
    return (first, replace(second, value=None)) if wording == "trigger" else (first, second)


def _pair(
    kind: PairKind, design: _Design, layout: Layout, length: int, *, arms: Iterable[Draw], wording: str = ""
) -> Pair:
    """Both draws written down with the same neutral rules."""
    base, target = (layout(draw) for draw in _fill(arms, layout, length, seed=f"{design.seed} {design.id}"))
    identity = f"{layout.name}-{kind}-{design.id}"
    return Pair(
        id=f"{identity}-{base.field}" if kind == "polarity" else identity,
        kind=kind,
        task=TASK,
        layout=layout.name,
        scenario=design.scenario.id,
        domain=design.scenario.domain,
        group=identity,
        seed=design.seed,
        base=base,
        target=target,
        balance={**design.balance, "wording": wording} if wording else design.balance,
    )


def _fill(arms: Iterable[Draw], layout: Layout, length: int, *, seed: str) -> tuple[Draw, ...]:
    """The draws with the layout's own number of neutral rules, or as many as bring the prompt to `length`."""
    base, target = arms
    supply = fillers(length // SHORTEST_FILLER if length else layout.fillers, seed=seed)

    def prompt(count: int) -> str:
        arm = layout(replace(base, fillers=supply[:count]))
        return arm.user_text + arm.answer_text

    least = estimate_tokens(prompt(0))
    if length and least > LONGEST * length:
        raise TaskError(f"{layout.name} takes about {least} tokens without any neutral rule: give a length above that.")
    count = rules_to_reach(length, most=len(supply), prompt=prompt) if length else len(supply)
    return tuple(replace(draw, fillers=supply[:count]) for draw in (base, target))

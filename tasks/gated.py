"""Gated decisions: pairs of prompts in which one field decides between a permitted and a restricted action.

Three choices are counterbalanced: the order of the rules, which of the two values is the base's, and which value
permits. Any even number of instances has each of them equally often, within a scenario and over all.
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
from .length import fillers_to_reach
from .scenarios import SCENARIOS, Scenario

TASK = "gated"
LAYOUTS: Mapping[str, Layout] = layouts.LAYOUTS
DEFAULT_LAYOUT = "table_field_first"
PAIRS: tuple[PairKind, ...] = ("field", "polarity")
WORDINGS = ("swap", "trigger")

# Cells of rule order x value order x permitting value. Every odd cell is the complement of the one before it, so
# an even number of cells has each choice equally often, and eight have every combination once.
_CELLS = ((0, 0, 0), (1, 1, 1), (0, 0, 1), (1, 1, 0), (0, 1, 0), (1, 0, 1), (1, 0, 0), (0, 1, 1))
_TWO_OF_THREE = ((0, 1, 2), (1, 2, 0), (2, 0, 1))  # two values to use and the one to leave


class BadRequest(KVNotesError):
    """Pairs asked for that cannot exist."""


def generate(
    *, layout: str, pair: str, n: int, seed: int, length: int = 0, wording: str = "swap"
) -> list[Pair]:
    """`n` pairs, spread evenly over the scenarios; the same arguments give the same pairs.

    Args:
        layout: a name in LAYOUTS.
        pair: "field" (the field changes) or "polarity" (the rule changes and the field stays).
        n: how many pairs. Polarity pairs come in twos, one for each field of a 2x2 of field and rule.
        seed: orders the scenarios and chooses values and neutral rules.
        length: tokens of the prompt, reached with neutral rules; 0 is the layout's natural length.
        wording: how a polarity pair inverts the rule: "swap" exchanges the values of two rules, "trigger"
            changes the one value that a rule names beside a rule for any other value.

    Raises:
        UnknownName: no such layout, kind of pair or wording.
        BadRequest: n or length out of range, an odd n of polarity pairs, or a layout without a rule to invert.
    """
    _check_name("layout", layout, LAYOUTS)
    _check_name("kind of pair", pair, PAIRS)
    _check_name("wording", wording, WORDINGS)
    style = LAYOUTS[layout]
    if n < 1:
        raise BadRequest(f"n is {n}, and a run needs pairs: give n >= 1.")
    if length < 0:
        raise BadRequest(f"length is {length} tokens: give 0 for the natural length, or a number above it.")
    if pair == "field":
        return [_field_pair(design, style, length) for design in _designs(n, seed)]
    if n % 2:
        raise BadRequest(f"n is {n}, but polarity pairs come in twos, one for each field: give an even n.")
    if style.copies:
        raise BadRequest(f"layout {layout!r} copies the field and has no rule to invert: use pair='field'.")
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
    """What one instance is made of: a scenario, two of its values and a cell of the counterbalanced choices."""

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

    def values_by_action(self, *, inverted: bool = False) -> dict[str, str]:
        """The value that leads to each action, in the order of the rules."""
        refusing = next(value for value in self.values if value != self.permitting)
        yes, no = (refusing, self.permitting) if inverted else (self.permitting, refusing)
        return {action: yes if action == self.scenario.permit else no for action in self.actions}


def _designs(count: int, seed: int) -> list[_Design]:
    """`count` designs: the scenarios in a seeded order, round after round."""
    order = list(SCENARIOS)
    random.Random(f"scenarios {seed}").shuffle(order)
    rounds = (divmod(k, len(order)) for k in range(count))
    return [_design(order[place], seed, place, copy) for copy, place in rounds]


def _design(scenario: Scenario, seed: int, place: int, copy: int) -> _Design:
    cells = zip(_CELLS[place % len(_CELLS)], _CELLS[copy % len(_CELLS)], strict=True)
    rule_order, value_order, permits = (a ^ b for a, b in cells)
    # A scenario keeps its two values for two rounds, so that both cells of a complement are about the same words.
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
    base, target = design.values
    rules = _rules(design, design.values_by_action(), decided_by=base)
    draw = Draw(
        scenario=design.scenario, field=base, rules=rules, value_role="rule_value", third=design.third
    )
    return _pair(
        design, layout, length, identity="", base=draw, target=replace(draw, field=target), balance={}
    )


def _polarity_pair(design: _Design, layout: Layout, length: int, *, field: str, wording: str) -> Pair:
    base, target = (
        _polarity_draw(design, field=field, wording=wording, inverted=inverted) for inverted in (False, True)
    )
    # The rule that an arm follows is known from the base: the other rule is the target's.
    keys = {rule.action: "base" if rule.action == base.action else "target" for rule in base.rules}
    base, target = (
        replace(draw, rules=tuple(replace(rule, key=keys[rule.action]) for rule in draw.rules))
        for draw in (base, target)
    )
    return _pair(
        design, layout, length, identity=f"-{field}", base=base, target=target, balance={"wording": wording}
    )

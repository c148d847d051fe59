"""Gated decisions in the vocabulary of the planted models (`kvnotes.planted`).

A prompt reads `state : order = open . rules : ship when open ; wait when sold ; --- note : ... *** note : ...
request : ... .` and the answer opens with `order:`. Every word is one token and one piece, which ends with a
space. `---` and `***` are the two delimiters on which a planted model may leave its note.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from kvnotes.errors import KVNotesError, UnknownName
from kvnotes.instance import Arm, Pair, PairKind, Piece, Role
from kvnotes.planted_words import (
    FILLERS,
    FIRST_NOTE,
    IS,
    SCENARIOS,
    SECOND_NOTE,
    WHEN,
    PlantedScenario,
)

from .appended import OLD, appended

DEFAULT_LAYOUT = "words_field_first"
OWN_LENGTH = 2  # neutral rules in a prompt whose length is the layout's own


class PlantedTaskError(KVNotesError):
    """A task setting that no planted prompt can have."""


@dataclass(frozen=True, kw_only=True)
class PlantedPair(Pair):
    """A pair that carries the same prompts with a line before the request that says what the field is now: by name,
    in the target's value and, as a control, in the base's."""

    @cached_property
    def corrected(self) -> Mapping[str, Pair]:
        """None for a polarity pair, whose field does not change."""
        said = {"bare_value": self.target.field, OLD: self.base.field} if self.kind == "field" else {}
        return {name: self._corrected(name, value) for name, value in said.items()}

    def _corrected(self, name: str, value: str) -> Pair:
        line = (*_words(f"state : {IS}"), *_words(value, "field", "correction"), *_words(".", "delimiter"))
        own: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(Pair)}
        said = {"base": appended(self.base, line), "target": appended(self.target, line)}
        return Pair(**{**own, **said, "id": f"{self.id}+{name}"})


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """One prompt of a 2x2 design: the field holds `values[state]`, and `values[permits]` permits."""

    scenario: PlantedScenario
    values: tuple[str, str]
    state: int
    permits: int
    permit_row_first: bool
    fillers: tuple[str, ...]

    @property
    def action(self) -> str:
        return self.scenario.permit if self.state == self.permits else self.scenario.restrict


def _words(text: str, role: Role = "text", key: str = "") -> list[Piece]:
    return [Piece(text=f"{word} ", role=role, key=key) for word in text.split()]


def _state(cell: _Cell) -> list[Piece]:
    value = _words(cell.values[cell.state], "field")
    return [*_words(f"state : {cell.scenario.name} {IS}"), *value, *_words(".", "delimiter")]


def _rules(cell: _Cell, *, base: _Cell, kind: PairKind) -> list[Piece]:
    """The two rows, keyed by the arm that follows them; the row order is the base's in both arms."""
    role: Role = "trigger" if kind == "polarity" else "rule_value"
    pieces = _words("rules :")
    for permits in (True, False) if cell.permit_row_first else (False, True):
        value = cell.values[cell.permits if permits else 1 - cell.permits]
        key = "base" if permits == (base.state == base.permits) else "target"
        pieces += _words(cell.scenario.permit if permits else cell.scenario.restrict, "action", key)
        pieces += [*_words(WHEN), *_words(value, role, key), *_words(";", "delimiter")]
    return pieces


def _close(cell: _Cell) -> list[Piece]:
    """What follows state and rules: the first note delimiter, neutral rules, the second, the request."""
    half = (len(cell.fillers) + 1) // 2
    pieces = _words(FIRST_NOTE, "delimiter", "first_note")
    for number, filler in enumerate(cell.fillers):
        if number == half:
            pieces += _words(SECOND_NOTE, "delimiter", "second_note")
        pieces += [*_words(f"note : {filler}", "filler"), *_words(".", "delimiter")]
    if half == len(cell.fillers):
        pieces += _words(SECOND_NOTE, "delimiter", "second_note")
    return [*pieces, *_words(f"request : {cell.scenario.request}", "request"), *_words(".", "delimiter")]


def _field_first(cell: _Cell, base: _Cell, kind: PairKind) -> list[Piece]:
    return [*_state(cell), *_rules(cell, base=base, kind=kind), *_close(cell)]


def _rules_first(cell: _Cell, base: _Cell, kind: PairKind) -> list[Piece]:
    return [*_rules(cell, base=base, kind=kind), *_state(cell), *_close(cell)]


_WRITERS: dict[str, Callable[[_Cell, _Cell, PairKind], list[Piece]]] = {
    "words_field_first": _field_first,
    "words_rules_first": _rules_first,
}
LAYOUTS: tuple[str, ...] = tuple(_WRITERS)


def _arm(cell: _Cell, *, base: _Cell, kind: PairKind, layout: str) -> Arm:
    return Arm(
        user=tuple(_WRITERS[layout](cell, base, kind)),
        answer=tuple(_words(cell.scenario.answer, "answer_prefix")),
        action=cell.action,
        field=cell.values[cell.state],
    )


def _fillers(rng: random.Random, cell: _Cell, *, layout: str, length: int) -> tuple[str, ...]:
    """Neutral rules, drawn in shuffled rounds, until the prompt has `length` words; a fixed few at 0."""
    rounds = itertools.chain.from_iterable(rng.sample(FILLERS, len(FILLERS)) for _ in itertools.count())
    if length == 0:
        return tuple(itertools.islice(rounds, OWN_LENGTH))
    words = 1 + len(_arm(cell, base=cell, kind="field", layout=layout).user) + 1  # BOS and the answer's word
    chosen: list[str] = []
    while words < length:
        chosen.append(next(rounds))
        words += 3 + len(chosen[-1].split())  # `note : ... .`
    return tuple(chosen)


def _designs(*, layout: str, seed: int, length: int) -> Iterator[tuple[str, _Cell]]:
    """2x2 designs without end, a scenario at a time; each is given by one of its cells.

    A scenario meets its six ordered pairs of values in turn, and the row order alternates over scenarios and
    rounds. Which value permits and which conclusion the base has are balanced within each design.
    """
    rng = random.Random(f"planted/{layout}/{seed}")
    orders = list(itertools.permutations(range(3), 2))
    for number in itertools.count():
        round_, index = divmod(number, len(SCENARIOS))
        scenario = SCENARIOS[index]
        first, second = orders[(round_ + index) % len(orders)]
        cell = _Cell(
            scenario=scenario,
            values=(scenario.values[first], scenario.values[second]),
            state=0,
            permits=0,
            permit_row_first=(index + round_) % 2 == 0,
            fillers=(),
        )
        fillers = _fillers(rng, cell, layout=layout, length=length)
        yield f"{scenario.name}-{round_}", replace(cell, fillers=fillers)


def _pairs(cell: _Cell, *, group: str, kind: PairKind, layout: str, seed: int) -> Iterator[PlantedPair]:
    """The two pairs of a design that differ in what the kind keeps fixed: the rule, or the field's value."""
    for variant in (0, 1):
        if kind == "field":
            base = replace(cell, permits=variant)
            target = replace(base, state=1 - base.state)
        else:
            base = replace(cell, state=variant)
            target = replace(base, permits=1 - base.permits)
        yield PlantedPair(
            id=f"planted-{layout}-{kind}-{group}-{variant}",
            kind=kind,
            task="planted",
            layout=layout,
            scenario=cell.scenario.name,
            domain=cell.scenario.domain,
            group=f"{layout}-{group}",
            seed=seed,
            base=_arm(base, base=base, kind=kind, layout=layout),
            target=_arm(target, base=base, kind=kind, layout=layout),
            balance={
                "first_row": "permit" if base.permit_row_first else "restrict",
                "base_conclusion": "permit" if base.state == base.permits else "restrict",
                "field_value": base.values[base.state],
            },
        )


def generate(
    *, layout: str, pair: PairKind, n: int, seed: int, length: int = 0, wording: str = "swap"
) -> list[PlantedPair]:
    """`n` pairs; pairs 2i and 2i + 1 share a group, whose arms are the four cells of its 2x2.

    Scenarios take turns, so 24 pairs cover each of the 12 once. `length` is the prompt's length in tokens,
    met within a neutral rule; 0 gives two neutral rules. A polarity pair swaps the values of the two rules, the
    only wording there is. Raises UnknownName for a layout or wording that does not exist, PlantedTaskError for
    `n` under 1 or a negative length.
    """
    if layout not in _WRITERS:
        raise UnknownName(kind="layout", name=layout, known=LAYOUTS)
    if wording != "swap":
        raise UnknownName(kind="wording", name=wording, known=["swap"])
    if n < 1:
        raise PlantedTaskError(f"n is {n}: ask for at least 1 pair")
    if length < 0:
        raise PlantedTaskError(f"length is {length}: give a number of tokens, or 0 for the layout's own length")
    designs = _designs(layout=layout, seed=seed, length=length)
    found = (each for group, cell in designs for each in _pairs(cell, group=group, kind=pair, layout=layout, seed=seed))
    return list(itertools.islice(found, n))

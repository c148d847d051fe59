"""Frozen task instances: what each arm's prompt says and which part of it is which. No torch.

A layout writes a prompt as a sequence of pieces, so every named span is known by its offsets from the moment
the text exists and nothing ever has to be searched for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Role = Literal[
    "field",  # the field's value in the state line
    "trigger",  # the rule's value(s) that a polarity pair changes
    "rule_value",  # a value named by a rule that does not change
    "action",  # an action word in a rule
    "delimiter",  # newline, end-of-rule punctuation, table bar, quote
    "filler",  # a neutral rule
    "request",  # what is asked for
    "text",  # other words of the state line, the rules and the context
    "template",  # the chat template's own tokens
    "answer_prefix",  # how the assistant's turn opens
]
ROLES: tuple[str, ...] = get_args(Role)
PairKind = Literal["field", "polarity"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of text with one role. `key` tells equal roles apart: "base" and "target" name the rule that an
    arm follows, "other" any further one."""

    text: str
    role: Role
    key: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"unknown span role {self.role!r}; known: {', '.join(ROLES)}")

    @property
    def span(self) -> str:
        """The span's name: `role`, or `role.key` where a key tells equal roles apart."""
        return f"{self.role}.{self.key}" if self.key else self.role


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One prompt: the user's turn, how the assistant's turn opens, and the action that is right."""

    user: tuple[Piece, ...]
    answer: tuple[Piece, ...]
    action: str
    field: str

    @property
    def user_text(self) -> str:
        """The user's turn as plain text."""
        return "".join(piece.text for piece in self.user)

    @property
    def answer_text(self) -> str:
        """The opening of the assistant's turn as plain text; the decision is the next token."""
        return "".join(piece.text for piece in self.answer)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Base and target: the same pieces but for the changed span (the field's value, or the rule's trigger)."""

    id: str
    kind: PairKind
    task: str
    layout: str
    scenario: str
    domain: str
    group: str  # pairs of one 2x2 design share it
    seed: int
    base: Arm
    target: Arm
    balance: Mapping[str, str] = field(default_factory=dict)  # counterbalanced choices, by name

    def __post_init__(self) -> None:
        shapes = [[(p.role, p.key) for p in (*arm.user, *arm.answer)] for arm in (self.base, self.target)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"pair {self.id}: the arms do not have the same pieces")
        roles = {self.base.user[i].role for i in self.changed}
        wanted = {"field"} if self.kind == "field" else {"trigger"}
        if roles != wanted:
            raise ValueError(f"pair {self.id}: a {self.kind} pair changed pieces of role {sorted(roles)}")
        if self.base.answer != self.target.answer:
            raise ValueError(f"pair {self.id}: the answer prefix differs between the arms")
        if self.base.action == self.target.action:
            raise ValueError(f"pair {self.id}: both arms have the action {self.base.action!r}")

    @property
    def changed(self) -> tuple[int, ...]:
        """Indices into `user` of the pieces whose text differs between the arms."""
        pieces = zip(self.base.user, self.target.user, strict=True)
        return tuple(i for i, (old, new) in enumerate(pieces) if old.text != new.text)


def permits(pair: Pair) -> dict[str, bool]:
    """Whether each arm's right action is the permitted one, from the pair's counterbalanced choices.

    Raises KeyError for a task whose pairs do not say which of their values permits.
    """
    if "base_conclusion" in pair.balance:
        base = pair.balance["base_conclusion"] == "permit"
    else:
        values = pair.balance["values"].split("/")
        base = pair.base.field == values[pair.balance["permits"] == "second"]
    return {"base": base, "target": not base}


@dataclass(frozen=True, kw_only=True)
class Slot:
    """How a position is matched across scenarios: the span it lies in and its index there."""

    span: str
    index: int


@dataclass(frozen=True, kw_only=True)
class TokenPair:
    """A pair as token ids, with every position's slot. Positions are token indices in the prompt, and the
    downstream is every position from the first changed token on that is neither changed nor in the query block."""

    pair: Pair
    base_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    slots: tuple[Slot, ...]  # one a position
    changed: tuple[int, ...]
    query: tuple[int, ...]  # the last m >= 1 positions
    base_action: int  # first token id of the base's action
    target_action: int

    @property
    def downstream(self) -> tuple[int, ...]:
        """Positions after the start of the changed span that are neither changed nor in the query block."""
        skip = set(self.changed) | set(self.query)
        return tuple(p for p in range(self.changed[0], len(self.base_ids)) if p not in skip)

    def ids(self, arm: Literal["base", "target"]) -> tuple[int, ...]:
        """An arm's token ids."""
        return self.base_ids if arm == "base" else self.target_ids

    def positions(self, span: str) -> tuple[int, ...]:
        """Positions of a span, by its name; empty where the prompt has none."""
        return tuple(i for i, slot in enumerate(self.slots) if slot.span == span)


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A pair that was not used, and why. `reason` is a short fixed phrase, counted in the record."""

    pair: Pair
    reason: str
    detail: str


def partners(pair: TokenPair, pairs: Mapping[str, TokenPair]) -> list[TokenPair]:
    """The other pair of a 2x2 of field and rule: same rules and words, the other field. None where it could not be used
    or is tokenised differently, so that positions do not match."""
    others = [one for one in pairs.values() if one.pair.group == pair.pair.group and one is not pair]
    return [one for one in others if _same_design(pair, one)]


def _same_design(pair: TokenPair, other: TokenPair) -> bool:
    """Whether both have the same positions and the same two actions, and differ in field and changed span alone."""
    if len(pair.base_ids) != len(other.base_ids) or pair.changed != other.changed:
        return False
    differ = {p for p, (a, b) in enumerate(zip(pair.base_ids, other.base_ids, strict=True)) if a != b}
    actions = {pair.base_action, pair.target_action} == {other.base_action, other.target_action}
    return actions and differ <= {*pair.positions("field"), *pair.changed}

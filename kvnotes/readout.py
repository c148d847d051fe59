"""What is read at the decision: margin, p_two, p_full, recovery, field share, gate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes.instance import TokenPair


@dataclass(frozen=True, kw_only=True)
class Margins:
    """The unedited arms' margins in logits, and whether each arm's argmax over the vocabulary is its action."""

    base: float
    target: float
    base_argmax: bool
    target_argmax: bool

    @property
    def gap(self) -> float:
        """Target's margin minus base's: the denominator of recovery."""
        return self.target - self.base

    def passes(self, gate_gap: float) -> bool:
        """The competence gate: the right sign in both arms and a gap of at least `gate_gap` logits."""
        return self.base < 0 < self.target and self.gap >= gate_gap


def margin(logits: Float[Tensor, "*batch vocab"], pair: TokenPair) -> Float[Tensor, "*batch"]:
    """logit(first token of the target's action) - logit(first token of the base's action), in float32 or wider."""
    wide = logits.float()
    return wide[..., pair.target_action] - wide[..., pair.base_action]


def p_two(margin_: float) -> float:
    """Probability of the target's action among the two actions: sigmoid of the margin, safe for any size."""
    return 1 / (1 + math.exp(-margin_)) if margin_ >= 0 else math.exp(margin_) / (1 + math.exp(margin_))


def p_full(logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
    """The full distribution over the vocabulary."""
    return torch.softmax(logits.float(), dim=-1)


def arms(base: Float[Tensor, "vocab"], target: Float[Tensor, "vocab"], pair: TokenPair) -> Margins:
    """Both unedited arms, read once."""
    return Margins(
        base=float(margin(base, pair)),
        target=float(margin(target, pair)),
        base_argmax=int(base.argmax()) == pair.base_action,
        target_argmax=int(target.argmax()) == pair.target_action,
    )


def recovery(margin_: float, unedited: Margins, *, floor: float) -> float | None:
    """(margin - base) / (target - base); None where the gap is not above `floor` and the ratio means nothing."""
    return (margin_ - unedited.base) / unedited.gap if abs(unedited.gap) > floor else None


def field_share(field_only: float, notes_only: float) -> float:
    """(R(field-only) + 1 - R(notes-only)) / 2: the part of the decision that the field's own cells carry."""
    return (field_only + 1 - notes_only) / 2


def interaction(field_only: float, notes_only: float) -> float:
    """1 - R(field-only) - R(notes-only): what the two carry only together."""
    return 1 - field_only - notes_only

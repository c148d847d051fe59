"""A line appended before a prompt's question, over all that was said before it."""

from __future__ import annotations

from dataclasses import replace

from kvnotes.errors import KVNotesError
from kvnotes.instance import Arm, Piece

OLD = "old_value"  # the name of the control: a correction that restates the base's value


class NoQuestion(KVNotesError):
    """A prompt that asks for nothing."""


def appended(arm: Arm, line: tuple[Piece, ...]) -> Arm:
    """The arm with a line before its question, which is the last request in the user's turn.

    Raises NoQuestion for a prompt without any.
    """
    asks = [at for at, piece in enumerate(arm.user) if piece.role == "request"]
    if not asks:
        raise NoQuestion("the prompt asks for nothing, so no line can stand before its question.")
    return replace(arm, user=(*arm.user[: asks[-1]], *line, *arm.user[asks[-1] :]))

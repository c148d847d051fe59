"""Every error a user can cause, with the nearest right name where a name was wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KVNotesError(Exception):
    """A failure with a known cause; its message names the cause and the fix."""


class UnknownName(KVNotesError):
    """A model, study, layout, task or key that does not exist; the message suggests the nearest that does."""

    def __init__(self, *, kind: str, name: str, known: Iterable[str]) -> None:
        options = sorted(known)
        near = difflib.get_close_matches(name, options, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else "there is no name like it."
        super().__init__(f"unknown {kind} {name!r}: {hint} Known: {', '.join(options)}")


class IdentityFailed(KVNotesError):
    """A number that must hold exactly did not; no result of the run can be trusted."""

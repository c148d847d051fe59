"""How many neutral rules bring a prompt to a wished length, without a tokenizer."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable

TEMPLATE_TOKENS = 30  # a chat template's own, Qwen's default system line among them
# Byte-level BPE gives a common word one token, each digit one, a run of marks about one.
_UNITS = re.compile(r"[^\W\d_]+|\d|[^\w\s]+|_|\n+")


def estimate_tokens(text: str) -> int:
    """About how many tokens a byte-level BPE makes of English text, tables and code, the template included."""
    return TEMPLATE_TOKENS + len(_UNITS.findall(text))


def rules_to_reach(length: int, *, most: int, prompt: Callable[[int], str]) -> int:
    """How many neutral rules, up to `most`, bring `prompt(count)` nearest to `length` tokens."""

    def tokens(count: int) -> int:
        return estimate_tokens(prompt(count))

    above = bisect_left(range(most), length, key=tokens)
    below = max(above - 1, 0)
    return min((below, above), key=lambda count: abs(tokens(count) - length))

"""Gated decisions with a correction of the field appended before the question.

A pair of this family is a pair of `tasks.gated`, word for word and with the same id, and carries further ones: the
same two prompts with a line before the question that says what the field is now (the paper's section 3, "What the
note contains", and the erratum of its appendix B). The line stands in both arms and names the target's value, in the
control the base's. Everything before it is the plain prompt, so that its cache can be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvnotes.instance import Pair, Piece

from . import gated
from .appended import OLD, appended
from .scenarios import SCENARIOS

LAYOUTS = gated.LAYOUTS
DEFAULT_LAYOUT = gated.DEFAULT_LAYOUT
KEY = "correction"  # of every piece of the appended line

_FIELDS = {scenario.id: (scenario.field, scenario.field_words) for scenario in SCENARIOS}


@dataclass(frozen=True, kw_only=True)
class CorrectedPair(Pair):
    """A pair and, by the correction's name, the pair whose prompts carry it."""

    corrected: Mapping[str, Pair]


# What a line says before the value and after it; the field's name is put in.
Wording = Callable[[str], tuple[str, str]]
WORDINGS: Mapping[str, Wording] = MappingProxyType(
    {
        "bare_value": lambda name: (f"{name}:", ""),
        "tagged_update": lambda name: (f"[UPDATE] {name}:", ""),
        "explicit_override": lambda name: (
            f"{name} has changed to",
            ". This overrides any earlier value. Apply the current value.",
        ),
        "state_update": lambda name: (
            f"[STATE UPDATE] {name} ->",
            "; this overrides any earlier value and any conclusion drawn from it.",
        ),
        "reevaluate": lambda name: (
            f"{name}:",
            ". Disregard your earlier conclusion and re-evaluate.",
        ),
        OLD: lambda name: (
            f"[STATE UPDATE] {name} ->",
            "; this overrides any earlier value and any conclusion drawn from it.",
        ),
    }
)


def generate(
    *, layout: str, pair: str, n: int, seed: int, length: int = 0, wording: str = "swap"
) -> list[CorrectedPair]:
    """The pairs of `tasks.gated`, each with every correction. Arguments and errors are those of `gated.generate`.

    Raises TaskError for polarity pairs: their field does not change, so there is nothing to correct.
    """
    if pair != "field":
        raise gated.TaskError(f"{pair} pairs have no changed field to correct: use pair field.")
    plain = gated.generate(layout=layout, pair=pair, n=n, seed=seed, length=length, wording=wording)
    return [correct(one, name=_name(one)) for one in plain]


def correct(pair: Pair, *, name: str) -> CorrectedPair:
    """A field pair with every correction of its field, which the lines call `name`."""
    corrected = {}
    for wording, words in WORDINGS.items():
        before, after = words(name)
        value = pair.base.field if wording == OLD else pair.target.field
        line = (
            Piece(text=before, role="text", key=KEY),
            Piece(text=f" {value}", role="field", key=KEY),
            Piece(text=f"{after}\n\n", role="text", key=KEY),
        )
        arms = {arm: appended(getattr(pair, arm), line) for arm in ("base", "target")}
        corrected[wording] = replace(pair, id=f"{pair.id}+{wording}", **arms)
    own = {name: getattr(pair, name) for name in Pair.__dataclass_fields__}
    return CorrectedPair(**own, corrected=MappingProxyType(corrected))


def _name(pair: Pair) -> str:
    """The field as the pair's layout calls it: an identifier, or words."""
    identifier, words = _FIELDS[pair.scenario]
    return identifier if identifier in pair.base.user_text else words

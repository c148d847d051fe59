"""Dissociation: with the field byte-identical and the rule inverted, do the notes carry the conclusion, or the trigger?

Section 3 (i) and appendix C (i) of "Models Take Notes at Prefill" (arXiv 2606.17107). Polarity pairs: the trigger's
cells alone, the notes after it, both (an identity). The other pair of the same 2x2 design of field and rule, where
the rules give the other field's action, lends notes of the same conclusion about another field (a control: nothing
may move) and of the opposite one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvnotes import effects, probing
from kvnotes.config import RunConfig
from kvnotes.instance import partners
from kvnotes.records import Effect, Instance, Measures, Summary
from kvnotes.runner import main

if TYPE_CHECKING:
    from kvnotes.donors import Donor
    from kvnotes.instance import TokenPair
    from kvnotes.interventions import CacheEdit, State
    from kvnotes.sweep import Trial

TITLE = "Dissociation: the trigger's cells against the notes, the field held identical"
MARGINS = {"margins": "state"}


def donors(pair: TokenPair, pairs: Mapping[str, TokenPair], plan: Measures) -> list[TokenPair]:
    """The other pair of the 2x2 design: same rules and words, the other field. None where it could not be used or
    is tokenised differently, so that positions do not match."""
    return partners(pair, pairs)


def interventions(pair: TokenPair, donors: Sequence[Donor]) -> list[CacheEdit]:
    """The cache states, their mirror images, and the notes of the design's other pair, without its field's cells."""
    from kvnotes.interventions import CacheEdit

    trigger, notes = pair.changed, pair.downstream
    made = [
        CacheEdit(name="trigger_only", positions=trigger, into="base", donor="target"),
        CacheEdit(name="notes", positions=notes, into="base", donor="target"),
        CacheEdit(name="both", positions=(*trigger, *notes), into="base", donor="target"),
        CacheEdit(name="target_trigger_from_base", positions=trigger, into="target", donor="base"),
        CacheEdit(name="target_notes_from_base", positions=notes, into="target", donor="base"),
    ]
    rest = tuple(p for p in notes if p not in pair.positions("field"))
    for other in donors:
        agrees = other.pair.base_action == pair.base_action
        lent: dict[str, State] = {
            "same_conclusion": "base" if agrees else "target",
            "other_field": "target" if agrees else "base",
        }
        for name, arm in lent.items():
            made.append(CacheEdit(name=name, positions=rest, into="base", donor=other.states[arm]))
    return made


def measure(trial: Trial, config: RunConfig, *, donors: Sequence[Donor]) -> Measures:
    """One pair's margins, recoveries and probabilities of the target's action, by cache state."""
    from kvnotes.readout import p_two

    margins = trial.margins(interventions(trial.pair, donors))
    recovery = {name: trial.recovery(margin) for name, margin in margins.items()}
    return {"margins": margins, "recovery": recovery, "p_two": {name: p_two(m) for name, m in margins.items()}}


def identities(trial: Trial, measures: Measures) -> dict[str, float]:
    """The transplant of both is the target, and mirror images are equal by construction."""
    margins, scale = measures["margins"], max(1.0, abs(trial.unedited.gap))
    return {
        "trigger and notes equal target": abs(margins["both"] - trial.unedited.target) / scale,
        "notes equal their mirror image": abs(margins["notes"] - margins["target_trigger_from_base"]) / scale,
        "trigger-only equals its mirror image": abs(margins["trigger_only"] - margins["target_notes_from_base"])
        / scale,
    }


def summarise(instances: Sequence[Instance], config: RunConfig, floor: float) -> Summary:
    """Recovery of each state and both flips, by layout, gated and ungated."""
    found = [effect for scope in effects.scopes(instances, config, floor) for effect in _effects(scope)]
    return Summary(effects=tuple(found), tables={}, notes=(), headline=_headline(found))


def _effects(scope: effects.Scope) -> list[Effect]:
    trigger, notes, both, same, other = map(_moved, ("trigger_only", "notes", "both", "same_conclusion", "other_field"))
    gap, whole = effects.gap, {one.id for one in (probing.complete(scope.rows) if scope.gated else scope.rows)}
    # what a pair that fails the gate lends is not known to hold that conclusion
    squares = scope.having(lambda o: o.measures["margins"].get("same_conclusion") if o.id in whole else None)
    return [
        scope.recovery("trigger_only", "trigger-only recovery", trigger, about=0.0),
        scope.recovery("notes", "notes recovery", notes, about=1.0),
        scope.recovery("trigger_share", "trigger share", lambda o: (trigger(o) + gap(o) - notes(o)) / 2, about=0.0),
        scope.recovery("interaction", "interaction", lambda o: gap(o) - trigger(o) - notes(o), about=0.0),
        scope.share(
            "flips_trigger", "decides as target, trigger's cells alone", lambda o: _margin(o, "trigger_only") > 0
        ),
        scope.share("flips_notes", "decides as target, target's notes in base", lambda o: _margin(o, "notes") > 0),
        scope.share(
            "flips_notes_back",
            "decides as base, base's notes in target",
            lambda o: _margin(o, "target_notes_from_base") < 0,
        ),
        scope.share(
            "flips_both_ways",
            "follows the notes both ways",
            lambda o: _margin(o, "notes") > 0 > _margin(o, "target_notes_from_base"),
        ),
        squares.recovery("other_field", "notes of the opposite conclusion, same rule, other field", other, about=1.0),
        squares.recovery(
            "same_conclusion", "notes of the same conclusion, other field (control)", same, about=0.0, control=True
        ),
        scope.recovery("both", "trigger and notes recovery (identity)", both, control=True),
    ]


def _moved(name: str) -> Callable[[Instance], float]:
    return lambda one: effects.moved(one, _margin(one, name))


def _margin(one: Instance, name: str) -> float:
    return float(one.measures["margins"][name])


def _headline(found: Sequence[Effect]) -> str:
    parts = []
    for layout in dict.fromkeys(effect.layout for effect in found):
        trigger, notes = (
            next(e for e in found if e.layout == layout and e.gated and e.name == name)
            for name in ("trigger_only", "notes")
        )
        if trigger.estimate is None or notes.estimate is None:
            parts.append(f"{layout}: no recovery ({trigger.warning or notes.warning})")
        else:
            numbers = f"trigger-only {trigger.estimate:.2f}, notes {notes.estimate:.2f} (n={trigger.n})"
            parts.append(f"{layout}: {numbers}")
    return "; ".join(parts)


if __name__ == "__main__":
    main(__file__)

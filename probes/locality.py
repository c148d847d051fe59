"""Locality: does the decision follow the field's own K/V or the notes written after it?

Section 3 (1) of "Models Take Notes at Prefill" (arXiv 2606.17107), and the off-template forms of its appendix C.
Cache states at the decision: base, field-only, notes-only, full-downstream (an identity), target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvnotes import effects
from kvnotes.config import RunConfig
from kvnotes.records import Effect, Instance, Measures, Summary
from kvnotes.runner import main

if TYPE_CHECKING:
    from kvnotes.instance import TokenPair
    from kvnotes.interventions import CacheEdit
    from kvnotes.sweep import Trial

TITLE = "Locality: field-only against notes-only"
MARGINS = {"margins": "state"}


def interventions(pair: TokenPair) -> list[CacheEdit]:
    """The cache states, and the two mirror images that must equal them."""
    from kvnotes.interventions import CacheEdit

    field, notes = pair.changed, pair.downstream
    return [
        CacheEdit(name="field_only", positions=field, into="base", donor="target"),
        CacheEdit(name="notes_only", positions=notes, into="base", donor="target"),
        CacheEdit(name="full_downstream", positions=(*field, *notes), into="base", donor="target"),
        CacheEdit(name="target_field_from_base", positions=field, into="target", donor="base"),
        CacheEdit(name="target_notes_from_base", positions=notes, into="target", donor="base"),
    ]


def measure(trial: Trial, config: RunConfig) -> Measures:
    """One pair's margins, recoveries and probabilities of the target's action, by cache state."""
    from kvnotes.readout import p_two

    margins = trial.margins(interventions(trial.pair))
    recovery = {name: trial.recovery(margin) for name, margin in margins.items()}
    return {"margins": margins, "recovery": recovery, "p_two": {name: p_two(m) for name, m in margins.items()}}


def identities(trial: Trial, measures: Measures) -> dict[str, float]:
    """Mirror images, equal by construction: the target with its field from base is the base with its notes from
    the target, and the other way round."""
    margins, scale = measures["margins"], max(1.0, abs(trial.unedited.gap))
    return {
        "notes-only equals its mirror image": abs(margins["notes_only"] - margins["target_field_from_base"]) / scale,
        "field-only equals its mirror image": abs(margins["field_only"] - margins["target_notes_from_base"]) / scale,
    }


def summarise(instances: Sequence[Instance], config: RunConfig, floor: float) -> Summary:
    """Recovery of each state, field share and interaction, by layout, gated and ungated."""
    found = [effect for scope in effects.scopes(instances, config, floor) for effect in _effects(scope)]
    return Summary(effects=tuple(found), tables={}, notes=(), headline=_headline(found))


def _effects(scope: effects.Scope) -> list[Effect]:
    def field(one: Instance) -> float:
        return effects.moved(one, _margins(one)["field_only"])

    def notes(one: Instance) -> float:
        return effects.moved(one, _margins(one)["notes_only"])

    def full(one: Instance) -> float:
        return effects.moved(one, _margins(one)["full_downstream"])

    gap = effects.gap
    return [
        scope.recovery("field_only", "field-only recovery", field, about=0.0),
        scope.recovery("notes_only", "notes-only recovery", notes, about=1.0),
        scope.recovery("field_share", "field share", lambda one: (field(one) + gap(one) - notes(one)) / 2, about=0.0),
        scope.recovery("interaction", "interaction", lambda one: gap(one) - field(one) - notes(one), about=0.0),
        scope.share("flips_field_only", "decides as target, field-only", lambda one: _margins(one)["field_only"] > 0),
        scope.share("flips_notes_only", "decides as target, notes-only", lambda one: _margins(one)["notes_only"] > 0),
        scope.recovery("full_downstream", "full-downstream recovery (identity)", full, control=True),
    ]


def _margins(one: Instance) -> dict[str, float]:
    margins = one.measures["margins"]
    assert isinstance(margins, dict)  # noqa: S101 (measure put it there)
    return margins  # pyright: ignore[reportReturnType]


def _headline(found: Sequence[Effect]) -> str:
    parts = []
    for layout in dict.fromkeys(effect.layout for effect in found):
        field, notes = (
            next(e for e in found if e.layout == layout and e.gated and e.name == name)
            for name in ("field_only", "notes_only")
        )
        if field.estimate is None or notes.estimate is None:
            parts.append(f"{layout}: no recovery ({field.warning or notes.warning})")
        else:
            parts.append(f"{layout}: field-only {field.estimate:.2f}, notes-only {notes.estimate:.2f} (n={field.n})")
    return "; ".join(parts)


if __name__ == "__main__":
    main(__file__)

"""A scrubbed instance's numbers, from its record: what each test of a hypothesis moves, and by which lenders. No torch.

An instance's measures hold `donors`, each with its labels and whether its pair passes the gate, by number, and `tests`:
by hypothesis and test who lent (`by`, the donors of note and rest) and the margins, [note, lenders].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvnotes import effects
from kvnotes.hypothesis import Hypothesis, Resampling
from kvnotes.records import Instance

if TYPE_CHECKING:
    from kvnotes.interventions import State


def start(one: Instance, run: State) -> float:
    """The unedited margin of an arm."""
    gate = effects.gate(one)
    return float((gate.base_margin if run == "base" else gate.target_margin) or 0.0)


def fit(one: Instance, *, of: Hypothesis, test: Resampling, known: bool, refills: bool = True) -> list[bool]:
    """Which lenders of a test count. `known`: only those whose pair passes the gate, so that what they conclude is
    known; without `refills` those alone whose neutral rules are the instance's own."""
    donors = one.measures["donors"]

    def good(at: int | None) -> bool:
        return at is None or ((donors[at]["competent"] or not known) and (refills or not donors[at]["refilled"]))

    return [all(map(good, who)) for who in _found(one, of, test)["by"]]


def moved(
    one: Instance, *, of: Hypothesis, test: Resampling, known: bool, refills: bool = True
) -> list[list[float]] | None:
    """How far the margin goes from the run's towards the other arm's, in logits, [note, lenders that count]; None where
    nothing counts."""
    kept = fit(one, of=of, test=test, known=known, refills=refills)
    if not any(kept):
        return None
    origin, sign = start(one, test.into), 1.0 if test.into == "base" else -1.0
    rows = _found(one, of, test)["margins"]
    return [[sign * (margin - origin) for margin, ok in zip(row, kept, strict=True) if ok] for row in rows]


def mean(one: Instance, *, of: Hypothesis, test: Resampling, known: bool) -> float | None:
    """The mean over notes and lenders."""
    rows = moved(one, of=of, test=test, known=known)
    return None if rows is None else _mean([_mean(row) for row in rows])


def size(one: Instance, *, of: Hypothesis, test: Resampling, known: bool) -> float | None:
    """The mean over notes and lenders of what is moved either way, which cannot cancel."""
    rows = moved(one, of=of, test=test, known=known)
    return None if rows is None else _mean([_mean([abs(value) for value in row]) for row in rows])


def by_lender(one: Instance, *, of: Hypothesis, tests: Sequence[Resampling]) -> dict[str, float]:
    """What the first note moves, in logits, by what the lender has otherwise than the base; lenders of known conclusion
    alone. For tests in which one donor lends all."""
    donors: Sequence[Mapping[str, Any]] = one.measures["donors"]
    found: dict[str, list[float]] = {}
    for test in tests:
        kept = fit(one, of=of, test=test, known=True)
        lenders = [who for who, ok in zip(_found(one, of, test)["by"], kept, strict=True) if ok]
        for who, value in zip(lenders, (moved(one, of=of, test=test, known=True) or [[]])[0], strict=True):
            donor = donors[next(at for at in who if at is not None)]
            found.setdefault(_kind(donor, donors[0]), []).append(value)
    return {kind: _mean(values) for kind, values in found.items()}


def _kind(donor: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    other = [name for name in ("field", "rules") if donor[name] != base[name]]
    other += ["neutral rules"] if donor["refilled"] else []
    conclusion = "same" if donor["conclusion"] == base["conclusion"] else "other"
    return f"{conclusion} conclusion, other {' and '.join(other)}"


def by_note(one: Instance, *, of: Hypothesis, test: Resampling) -> list[float]:
    """What each note moves, the mean over lenders of the 2x2 whose conclusion is known; empty where nothing counts."""
    return [_mean(row) for row in moved(one, of=of, test=test, known=True, refills=False) or ()]


def _found(one: Instance, of: Hypothesis, test: Resampling) -> Mapping[str, Any]:
    return one.measures["tests"].get(of.name, {}).get(test.name, {"by": [], "margins": []})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

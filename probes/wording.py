"""Wording: what must a correction say, appended before the question over a stale cache, to move the decision?

Section 3, "What the note contains", of "Models Take Notes at Prefill" (arXiv 2606.17107), figure 3d. Everything before
the correction is the base run's own cache, field and notes stale; the correction and what follows it are computed over
it. The action that is right after a correction is the target's. The control restates the old value in the words of the
state update: there it is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvnotes import effects
from kvnotes.config import RunConfig
from kvnotes.errors import KVNotesError
from kvnotes.records import Effect, HypothesisTest, Instance, Measures, Summary, Table
from kvnotes.runner import main

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from kvnotes.instance import Pair
    from kvnotes.interventions import State
    from kvnotes.sweep import Trial

TITLE = "Wording: what a correction before the question must say"
MARGINS = {"margins": "correction"}
WORDINGS = {
    "bare_value": "bare value",
    "tagged_update": "tagged update",
    "explicit_override": "explicit override",
    "state_update": "state update",
    "reevaluate": "disregard and re-evaluate",
}
OLD = "old_value"
NONE, TARGET = "uncorrected", "target"  # the unedited arms, read on the same way as the corrections
LABELS = {NONE: "no correction", **WORDINGS, OLD: "state update with the old value", TARGET: "target, no correction"}
REFERENCE = "explicit_override"  # the others are compared with it


class WordingError(KVNotesError):
    """Pairs that carry no corrections."""


@runtime_checkable
class Corrected(Protocol):
    """A pair that carries, by name, the same prompts with a correction appended before the question."""

    corrected: Mapping[str, Pair]


def measure(trial: Trial, config: RunConfig) -> Measures:
    """By correction: the margin, the probability of the target's action among the two and among all tokens, whether
    it is the argmax, and what the line says. A correction that the tokenizer joins with the prompt is left out."""
    from kvnotes.readout import margin, p_full, p_two

    logits = decisions(trial, config)
    margins = {name: float(margin(read, trial.pair)) for name, read in logits.items()}
    action = trial.pair.target_action
    return {
        "margins": margins,
        "recovery": {name: trial.recovery(value) for name, value in margins.items()},
        "p_two": {name: p_two(value) for name, value in margins.items()},
        "p_full": {name: float(p_full(read)[action]) for name, read in logits.items()},
        "argmax_right": {name: int(read.argmax()) == action for name, read in logits.items()},
        "line": {name: _line(trial.pair.pair, one) for name, one in _corrected(trial).items()},
    }


def decisions(trial: Trial, config: RunConfig) -> dict[str, Float[Tensor, "vocab"]]:
    """The decision's logits after each correction over the base's cache, and of both arms without any.

    Each run starts at the first token in which it differs from the plain prompt. Raises WordingError for pairs
    without corrections.
    """
    from kvnotes.instance import TokenPair
    from kvnotes.runner import tokenise

    corrected, read, starts = _corrected(trial), {}, []
    tokenised = tokenise(trial.model, list(corrected.values()), query=config.query)
    for name, made in zip(corrected, tokenised, strict=True):
        if isinstance(made, TokenPair):
            starts.append(_shared(trial, made.base_ids))
            read[name] = _answers(trial, made.base_ids, start=starts[-1], arms=("base",))[0]
    plain = _answers(
        trial, trial.pair.base_ids, start=min(starts, default=trial.pair.query[0]), arms=("base", "target")
    )
    return {NONE: plain[0], **read, TARGET: plain[1]}


def _corrected(trial: Trial) -> Mapping[str, Pair]:
    pair = trial.pair.pair
    if not isinstance(pair, Corrected):
        raise WordingError(f"{pair.task} pairs carry no corrections: use TASK=corrections")
    return pair.corrected


def _line(plain: Pair, corrected: Pair) -> str:
    """What a corrected prompt says beyond the plain one, on a line of its own."""
    whole, more = corrected.base.user, len(corrected.base.user) - len(plain.base.user)
    at = next(i for i, (one, other) in enumerate(zip(whole, plain.base.user, strict=False)) if one != other)
    return "".join(piece.text for piece in whole[at : at + more]).strip()


def _shared(trial: Trial, ids: Sequence[int]) -> int:
    """How many first tokens a prompt shares with the plain base prompt, at most as many as are cached."""
    cached = trial.pair.base_ids[: trial.states["base"].length]
    return next((at for at, (a, b) in enumerate(zip(cached, ids, strict=False)) if a != b), len(cached))


def _answers(trial: Trial, ids: Sequence[int], *, start: int, arms: Sequence[State]) -> Float[Tensor, "arm vocab"]:
    """Logits after the last of `ids`, whose tokens before `start` are each arm's cached ones."""
    from kvnotes.forward import decode

    states = [trial.states[arm].crop(start) for arm in arms]
    tail = ids[start:]
    return decode(trial.model, states, tail, start=start, read=[len(tail) - 1])[:, 0]


def identities(trial: Trial, measures: Measures) -> dict[str, float]:
    """Both arms read on the way that corrections are, by a longer query block, equal the unedited margins."""
    margins, scale = measures["margins"], max(1.0, abs(trial.unedited.gap))
    return {
        "no correction equals base": abs(margins[NONE] - trial.unedited.base) / scale,
        "no correction in the target equals target": abs(margins[TARGET] - trial.unedited.target) / scale,
    }


def summarise(instances: Sequence[Instance], config: RunConfig, floor: float) -> Summary:
    """By correction: probability of the right action, recovery and flips; and each wording against the override."""
    found: list[Effect] = []
    tables = {"what the corrections say, in the first pair": _lines(instances)}
    for scope in effects.scopes(instances, config, floor):
        found += [effect for name in _known(instances) for effect in _effects(scope, name)]
        compared, table = _differences(scope)
        found += compared
        if scope.gated and table.rows:
            tables[f"p_two against the {LABELS[REFERENCE]}, {scope.layout}"] = table
    return Summary(effects=tuple(found), tables=tables, notes=(), headline=_headline(found))


def _lines(instances: Sequence[Instance]) -> Table:
    said = next((one.measures["line"] for one in instances if "line" in one.measures), {})
    return Table(columns=("correction", "line"), rows=[[LABELS[name], said[name]] for name in LABELS if name in said])


def _known(instances: Sequence[Instance]) -> list[str]:
    """The corrections that some pair carries: a task need not have all of them."""
    return [name for name in LABELS if any(name in one.measures.get("margins", ()) for one in instances)] or [*LABELS]


def _effects(scope: effects.Scope, name: str) -> list[Effect]:
    label, control = LABELS[name], name in (NONE, TARGET, OLD)
    two, full, margin = (_value(measure, name) for measure in ("p_two", "p_full", "margins"))
    read = [
        _probability(scope.mean(f"p_two_{name}", f"p_two of the target's action: {label}", two, control=control)),
        _probability(scope.mean(f"p_full_{name}", f"p_full of the target's action: {label}", full, control=control)),
    ]
    if name in (NONE, TARGET):  # their recovery is 0 and 1 by definition
        return read
    about = 0.0 if name == OLD else None

    def moved(one: Instance) -> float | None:
        value = margin(one)
        return None if value is None else effects.moved(one, value)

    def flips(one: Instance) -> bool | None:
        value = margin(one)
        return None if value is None else value > 0

    return [
        *read,
        scope.recovery(f"recovery_{name}", f"recovery: {label}", moved, about=about, control=control),
        scope.share(f"flips_{name}", f"decides as target: {label}", flips, control=control),
    ]


def _probability(mean: Effect) -> Effect:
    """A mean whose interval ends where probabilities do: t and bootstrap know no bounds."""
    return mean.model_copy(update={"low": effects.clip(mean.low), "high": effects.clip(mean.high)})


def _value(measure_: str, name: str) -> Callable[[Instance], float | None]:
    """Reads a number of an instance; None where the correction could not be tokenised."""
    return lambda one: one.measures[measure_].get(name)


def _differences(scope: effects.Scope) -> tuple[list[Effect], Table]:
    """p_two of each wording minus that of the explicit override, paired: an equivalence test each, and in the table
    sign flips of scenarios, BH-corrected over the wordings."""
    from kvnotes import stats

    found, lines, flips = [], [], []
    known = {*_known(scope.instances)}
    for name in (name for name in WORDINGS if name != REFERENCE and {name, REFERENCE} <= known):

        def difference(one: Instance, name: str = name) -> float | None:
            here, there = (one.measures["p_two"].get(which) for which in (name, REFERENCE))
            return None if here is None or there is None else here - there

        label = f"p_two: {LABELS[name]} minus {LABELS[REFERENCE]}"
        effect = scope.mean(f"{name}_minus_override", label, difference)
        if effect.estimate is not None:
            rows = scope.having(difference).rows
            test, p = _tested([difference(one) or 0.0 for one in rows], [one.scenario for one in rows], scope.config)
            effect = effect.model_copy(update={"test": test})
            flips.append(p)
            lines.append([LABELS[name], effect.estimate, effect.low, effect.high, test.p, test.conclusion, p])
        found.append(effect)
    adjusted = stats.benjamini_hochberg(flips).tolist() if flips else []
    columns = ("wording", "difference", "low", "high", "TOST p", "TOST", "sign-flip p", "BH p")
    return found, Table(columns=columns, rows=[[*line, p] for line, p in zip(lines, adjusted, strict=True)])


def _tested(differences: list[float], scenarios: list[str], c: RunConfig) -> tuple[HypothesisTest, float]:
    """The equivalence test of paired differences, and their sign-flip p."""
    from kvnotes import stats

    same = stats.equivalence(differences, scenarios, margin=c.equivalence, resamples=c.resamples, seed=c.seed)
    flipped = stats.sign_flip_test(differences, scenarios, resamples=c.resamples, seed=c.seed)
    test = HypothesisTest(
        name="TOST about 0", statistic=same.statistic, p=same.p, margin=same.margin, conclusion=same.conclusion
    )
    return test, flipped.p


def _headline(found: Sequence[Effect]) -> str:
    def words(layout: str) -> str:
        read = {e.name: e for e in found if e.gated and e.layout == layout}
        first = read[f"p_two_{NONE}"]
        if first.estimate is None:
            return f"{layout}: no probability ({first.warning})"
        named = {LABELS[name]: read.get(f"p_two_{name}") for name in (NONE, *WORDINGS, OLD)}
        values = {label: one.estimate for label, one in named.items() if one is not None}
        shown = ", ".join(f"{label} {value:.2f}" for label, value in values.items() if value is not None)
        return f"{layout}: p_two of the right action: {shown} (n={first.n})"

    return "; ".join(words(layout) for layout in dict.fromkeys(effect.layout for effect in found))


if __name__ == "__main__":
    main(__file__)

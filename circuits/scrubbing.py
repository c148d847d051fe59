"""Causal scrubbing: is the decision a function of the conclusion that the note carries, and of nothing else downstream?

Appendix D (4) of "Models Take Notes at Prefill" (arXiv 2606.17107) and its figure 15d, after Chan et al. 2022. Donors
are prompts of the same scenario: the four of the 2x2 of field and rule, and each with other neutral rules. What is
claimed stands in `HYPOTHESES`; another claim is another value there. The whole downstream from the polarity partner is
notes-only, and so the mirror of the trigger alone: an identity here, not a result.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvnotes import effects, hypothesis, scrubs, select
from kvnotes.config import RunConfig
from kvnotes.effects import Scope
from kvnotes.hypothesis import RUNS, Hypothesis, Resampling
from kvnotes.instance import partners
from kvnotes.records import Effect, Instance, Measures, Summary, Table
from kvnotes.runner import main

if TYPE_CHECKING:
    from kvnotes.donors import Donor, Lender
    from kvnotes.instance import TokenPair
    from kvnotes.interventions import Intervention
    from kvnotes.relatives import Resampler
    from kvnotes.sweep import Trial

TITLE = "Causal scrubbing: the note's conclusion decides, all else downstream is interchangeable"
MARGINS = {"single": "slot", "notes": "", "without": "slot", "tests.*.*.margins": "note lender", "equal": "name"}

DRIFT = Resampling(name="drift", words="whole downstream, same {}", note="agrees", rest="agrees")
DRIFT_TARGET = Resampling(
    name="drift_target", words="whole downstream, same {}, target's run", note="agrees", rest="agrees", into="target"
)
SWAP = Resampling(name="swap", words="whole downstream, other {}", note="differs", rest="differs")
NOTE_SWAP = Resampling(name="note_swap", words="note, other {}", note="differs")
REST_SWAP = Resampling(name="rest_swap", words="rest, other {}", rest="differs")
NOTE_DRIFT = Resampling(name="note_drift", words="note, same {}", note="agrees")
REST_DRIFT = Resampling(name="rest_drift", words="rest, same {}", rest="agrees")
SCRUBBED = Resampling(name="scrubbed", words="note, same {}; rest, other", note="agrees", rest="differs")
CROSSED = Resampling(name="crossed", words="note, other {}; rest, same", note="differs", rest="agrees")
SWAPS = (NOTE_SWAP, REST_SWAP)
PARTS = (*SWAPS, NOTE_DRIFT, REST_DRIFT, SCRUBBED, CROSSED)

NOTE = Hypothesis(
    name="aggregators", words="aggregators", among="aggregators", tests=(DRIFT, DRIFT_TARGET, SWAP, *PARTS)
)
ANY_SLOT = Hypothesis(name="any slot", words="any slots", suffix="any_slot", tests=PARTS)
IN_SAMPLE = replace(
    NOTE, name="in-sample", words="aggregators, in-sample", suffix="in_sample", chosen="in_sample", tests=SWAPS
)
ANY_SLOT_IN_SAMPLE = replace(
    IN_SAMPLE, name="any slot, in-sample", words="any slots, in-sample", suffix="any_slot_in_sample", among="any"
)
WRONG = Hypothesis(
    name="wrong",
    words="other aggregators",
    suffix="wrong",
    among="aggregators",
    chosen="classmates",
    tests=SWAPS,
    control=True,
    refills=False,
)
WRONG_ANY_SLOT = replace(
    WRONG, name="wrong, any slot", words="others of the any slots' classes", suffix="wrong_any_slot", among="any"
)
RANDOM = replace(WRONG, name="permuted", words="random slots", suffix="random", chosen="permuted")
RANDOM_ANY_SLOT = replace(
    RANDOM, name="permuted, any slot", words="random slots, as many as any slots", suffix="random_any_slot", among="any"
)
FIELD = replace(ANY_SLOT, name="field", suffix="field", variable="field", control=True, tests=(DRIFT, *SWAPS))
COIN = replace(FIELD, name="coin", suffix="coin", variable="coin")
HYPOTHESES = (
    NOTE,
    ANY_SLOT,
    IN_SAMPLE,
    ANY_SLOT_IN_SAMPLE,
    WRONG,
    WRONG_ANY_SLOT,
    RANDOM,
    RANDOM_ANY_SLOT,
    FIELD,
    COIN,
)
COSINES = (
    ("cosine", "cosine", "cosine of logits"),
    ("cosine_centred", "centred", "cosine of logits about their mean"),
    ("argmax_kept", "argmax kept", "same first token"),
)
Value = Callable[[Instance], float | None]


class Settings(RunConfig):
    """Scrubbing's own settings."""

    slots: int = Field(ge=1, description="slots of the note, the best of the other fold")
    fillers: int = Field(ge=0, le=8, description="further sets of neutral rules that every donor prompt lends with")
    draws: int = Field(ge=1, le=1000, description="permutations of the slots: random notes")
    wrong: int = Field(ge=1, le=1000, description="notes of the same classes but other positions a fold")


# --- measuring --------------------------------------------------------------------------------------------


def survey(trial: Trial, config: Settings) -> Measures:
    """What the slots are ranked by."""
    return hypothesis.survey(trial)


def prepare(instances: Sequence[Instance], config: Settings) -> dict[str, Any]:
    """The slots of every hypothesis' notes, chosen by each fold; and those that each instance would choose itself."""
    slots = {
        layout: hypothesis.shared([one for one in instances if one.layout == layout])
        for layout in effects.layouts(instances)
    }

    def chosen(rows: Sequence[Instance], *, alone: bool = False) -> dict[str, Any]:
        found = {}
        for one in HYPOTHESES if rows else ():
            if (one.chosen == "in_sample") == alone:
                draws = config.wrong if one.chosen == "classmates" else config.draws
                asked = {"size": config.slots, "draws": draws, "seed": config.seed}
                found[one.name] = hypothesis.notes(one, rows, slots[rows[0].layout], **asked)
        return found

    return {
        "notes": select.crossfit(instances, config.seed, chosen),
        "in-sample": {one.id: chosen([one], alone=True) for one in instances},
    }


def donors(pair: TokenPair, pairs: Mapping[str, TokenPair], plan: Measures) -> list[TokenPair]:
    """The other pair of the 2x2 design, where there is one that stands at the same positions."""
    return partners(pair, pairs)


def measure(trial: Trial, config: Settings, plan: Measures, *, donors: Sequence[Donor]) -> Measures:
    """Margins by hypothesis, test, note and donors, all of them of one batch; the whole vocabulary's logits where the
    whole downstream is resampled; and what must be equal by construction."""
    from kvnotes.relatives import Resampler, relatives

    places = hypothesis.free(trial.pair)
    lent = relatives(trial, donors, _lender(trial.model), config, positions=places, fillers=config.fillers)
    values = [hypothesis.labels(one.pair.pair, one.arm) for one in lent]
    asked = Resampler(trial, lent, places)
    tests = {one.name: _tests(asked, one, _notes(trial.pair, one, plan), values) for one in HYPOTHESES}
    own = {arm: asked.edit((), (None, at), arm) for at, arm in enumerate(RUNS)}
    partner = asked.edit((), (None, 1), "base")
    margins = trial.margins([*asked.edits.values(), asked.mirror()])
    drift = tests["aggregators"].get("drift", {"edits": [[]]})["edits"][0]
    return {
        "fold": plan["notes"][trial.pair.pair.layout]["folds"][trial.pair.pair.scenario],
        "donors": [
            {"refilled": one.refilled, "competent": one.competent, "places": len(one.places), **labels}
            for one, labels in zip(lent, values, strict=True)
        ],
        "tests": {
            name: {
                test: {"by": found["by"], "margins": [[round(margins[e], 6) for e in row] for row in found["edits"]]}
                for test, found in each.items()
            }
            for name, each in tests.items()
        },
        "equal": {
            **{f"own {arm}": margins[e] for arm, e in own.items()},
            "partner": margins[partner],
            "mirror": margins["mirror"],
        },
        "logits": _compared(trial, [asked.edits[e] for e in (own["base"], own["target"], *drift)]),
    }


@lru_cache(maxsize=1)
def _lender(model: Any) -> Lender:
    """Both pairs of a 2x2 design borrow from the same prompts, one after the other."""
    from kvnotes.donors import Lender

    return Lender(model)


def _tests(
    asked: Resampler, one: Hypothesis, notes: Sequence[set[int]], values: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """For each test who lends (`by`) and the edits' names, [note, lenders]."""
    found = {}
    for test in one.tests:
        run = RUNS.index(test.into)
        others = {at: labels[one.variable] for at, labels in enumerate(values) if at != run}
        if not one.refills:
            others = {at: value for at, value in others.items() if not asked.lent[at].refilled}
        by = hypothesis.lenders(test, values[run][one.variable], others)
        if by and notes:
            found[test.name] = {"by": by, "edits": [[asked.edit(note, who, test.into) for who in by] for note in notes]}
    return found


def _notes(pair: TokenPair, one: Hypothesis, plan: Measures) -> list[set[int]]:
    """The positions of each of a hypothesis' notes in this pair."""
    own, names = pair.pair, select.slot_names(pair)
    if one.chosen == "in_sample":
        chosen = plan["in-sample"][own.id]
    else:
        chosen = select.choice(plan["notes"], layout=own.layout, scenario=own.scenario)
    sets = chosen[one.name]["sets"] if chosen else []
    return [{p for p in pair.downstream if names[p] in note} for note in sets]


def _compared(trial: Trial, edits: Sequence[Intervention]) -> dict[str, Any]:
    """Logits over the whole vocabulary against the first edit's, the base's own: of the second one, the target's own,
    and of all others. `centred`: about their mean, which most of a plain cosine is of."""
    import torch

    logits = torch.stack([*trial.logits(edits, vocab=None).values()])
    cosine = torch.nn.functional.cosine_similarity
    plain = cosine(logits[1:], logits[:1]).tolist()
    about = logits - logits.mean(dim=1, keepdim=True)
    centred = cosine(about[1:], about[:1]).tolist()
    kept = (logits[1:].argmax(dim=1) == logits[0].argmax()).tolist()
    return {
        "arms": {"cosine": plain[0], "centred": centred[0], "argmax kept": kept[0]},
        "drift": {"cosine": plain[1:], "centred": centred[1:], "argmax kept": kept[1:]},
    }


def identities(trial: Trial, measures: Measures) -> dict[str, float]:
    """Cells lent by the run itself change nothing; the whole downstream from the polarity partner is the rest of the
    cache from base to target."""
    equal, scale = measures["equal"], max(1.0, abs(trial.unedited.gap))
    return {
        "own cells equal base": abs(equal["own base"] - trial.unedited.base) / scale,
        "own cells equal target": abs(equal["own target"] - trial.unedited.target) / scale,
        "the partner's downstream equals its mirror image": abs(equal["partner"] - equal["mirror"]) / scale,
    }


# --- all instances ----------------------------------------------------------------------------------------

HEADLINE = {
    "note_swap": "note of aggregators",
    "rest_swap": "all but it",
    "note_swap_any_slot": "note of any slots",
    "rest_swap_any_slot": "all but those",
    "drift": "drift",
}
NOTES = (
    "Into the base; recovery is the share of the way to the target's margin, so 0 is no change and 1 a flip. Of the "
    "pairs that pass the gate only lenders whose pair passes it too count.",
    "Field and changed span are never resampled. Lenders: the other three prompts of the scenario's 2x2, and all four "
    "with other neutral rules; cells are matched by slot, keys turned to where they come to stand.",
    "The whole downstream from the polarity partner is notes-only, the mirror of the trigger alone: an identity. And "
    "the base with the target's note is nearly the target with the base's rest: one lender's swaps are no two results.",
    "Random slots: the note's, the names of all that may be resampled permuted, alike in both folds, so that they may "
    "have some of the note; p: how often they move as much. Random and wrong notes: lenders of the 2x2 alone.",
    "field, coin: the variable is the field, which is independent of the conclusion, or a coin a prompt: a partition "
    "of the inputs that does not matter should drift.",
)


def summarise(instances: Sequence[Instance], config: Settings, floor: float) -> Summary:
    """Recovery of every test of every hypothesis, note minus rest, flips and cosines; gated and ungated."""
    return effects.summary(instances, config, floor, find=_effects, tables=_tables, headline=HEADLINE, notes=NOTES)


def _effects(scope: Scope) -> Iterator[Effect]:
    for one in HYPOTHESES:
        for test in one.tests:
            value = partial(scrubs.mean, of=one, test=test, known=scope.gated)
            yield scope.recovery(
                one.effect(test.name), _label(one, test), value, about=_about(one, test), control=one.control
            )
        if set(SWAPS) <= set(one.tests):
            value = partial(_difference, of=one, known=scope.gated)
            label = f"note minus rest: {one.words}"
            yield scope.recovery(one.effect("note_minus_rest"), label, value, control=one.control)
    size = partial(scrubs.size, of=NOTE, test=DRIFT, known=scope.gated)
    yield scope.recovery("drift_size", "size of the drift, same conclusion", size, about=0.0)
    for one in (NOTE, ANY_SLOT):
        yield from _shares(scope, one)
    yield from _cosines(scope)


def _label(one: Hypothesis, test: Resampling) -> str:
    words = test.words.format(one.variable)
    return words if test.note == test.rest else f"{words}: {one.words}"


def _about(one: Hypothesis, test: Resampling) -> float | None:
    """What a hypothesis predicts; a note that is not believed in is expected to do nothing, unless it may have some of
    the note."""
    if not one.control:
        return test.predicted
    if one.chosen == "permuted":
        return None
    return 0.0 if test.note == "differs" and one.variable == "conclusion" else None


def _difference(one: Instance, *, of: Hypothesis, known: bool) -> float | None:
    """Note minus rest, of one instance."""
    note, rest = (scrubs.mean(one, of=of, test=test, known=known) for test in SWAPS)
    return None if note is None or rest is None else note - rest


def _shares(scope: Scope, one: Hypothesis) -> Iterator[Effect]:
    """Of instances: whose decision is the target's, and whose note moves it more than the rest."""

    def share(name: str, label: str, value: Value, above: Callable[[Instance], float]) -> Effect:
        def holds(o: Instance) -> bool | None:
            moved = value(o)
            return None if moved is None else moved > above(o)

        return scope.share(one.effect(name), label, holds)

    for test in [test for test in (DRIFT, *SWAPS) if test in one.tests]:
        value = partial(scrubs.mean, of=one, test=test, known=scope.gated)
        label = f"decides as target, {_label(one, test)}"
        yield share(f"flips_{test.name}", label, value, lambda o: -scrubs.start(o, "base"))
    value = partial(_difference, of=one, known=scope.gated)
    yield share("note_over_rest", f"the note moves more than the rest: {one.words}", value, lambda _: 0.0)


def _cosines(scope: Scope) -> Iterator[Effect]:
    """Logits over the whole vocabulary: of drift's lenders and, as a control, of the target, to the base."""
    for name, key, words in COSINES:
        drift = scope.mean(name, f"{words}, same conclusion", partial(_logits, key=key, known=scope.gated))
        yield drift.model_copy(update={"low": effects.clip(drift.low), "high": effects.clip(drift.high)})
        yield scope.mean(
            f"{name}_arms",
            f"{words}, base and target",
            lambda o, key=key: o.measures["logits"]["arms"][key],
            control=True,
        )


def _logits(one: Instance, key: str, *, known: bool) -> float | None:
    """The mean over drift's lenders."""
    fit = scrubs.fit(one, of=NOTE, test=DRIFT, known=known)
    kept = [float(value) for value, ok in zip(one.measures["logits"]["drift"][key], fit, strict=True) if ok]
    return sum(kept) / len(kept) if kept else None


def _tables(gated: Scope, ungated: Scope) -> dict[str, Table]:
    return {"by lender": _lenders(gated), "by instance": _instances(gated), "against drawn notes": _drawn(gated)}


def _lenders(scope: Scope) -> Table:
    """Recovery by what the lender has otherwise than the base: conclusion, field, rules, neutral rules."""
    kinds = {
        "whole": (NOTE, (DRIFT, SWAP)),
        **{f"note, {one.words}": (one, (NOTE_DRIFT, NOTE_SWAP)) for one in (NOTE, ANY_SLOT)},
        **{f"rest, {one.words}": (one, (REST_DRIFT, REST_SWAP)) for one in (NOTE, ANY_SLOT)},
    }
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for one in scope.rows:
        for column, (of, tests) in kinds.items():
            for kind, value in scrubs.by_lender(one, of=of, tests=tests).items():
                found.setdefault(kind, {}).setdefault(column, []).append((value, effects.gap(one)))
    rows = [
        [kind, max(map(len, cells.values())), *(_ratio(cells.get(column, [])) for column in kinds)]
        for kind, cells in found.items()
    ]
    return Table(columns=("lender", "pairs", *kinds), rows=rows)


def _ratio(parts: Sequence[tuple[float, float]]) -> float | None:
    below = sum(gap for _, gap in parts)
    return round(sum(top for top, _ in parts) / below, 4) if below else None


def _instances(scope: Scope) -> Table:
    """In recovery: drift, and for either note what it and the rest move, and their difference."""
    columns = [f"{part}, {of.words}" for of in (NOTE, ANY_SLOT) for part in ("note", "rest", "difference")]
    rows: list[list[Any]] = []
    for one in scope.rows:
        found = [scrubs.mean(one, of=NOTE, test=DRIFT, known=True)]
        for of in (NOTE, ANY_SLOT):
            found += [scrubs.mean(one, of=of, test=test, known=True) for test in SWAPS]
            found.append(_difference(one, of=of, known=True))
        gap = effects.gap(one)
        rows.append([one.id, one.scenario, *(None if value is None else round(value / gap, 4) for value in found)])
    return Table(columns=("pair", "scenario", "drift", *columns), rows=rows)


def _drawn(scope: Scope) -> Table:
    """Each note's swap beside that of permuted slots and of other positions of its classes; lenders of the 2x2. Pairs
    need no other positions of the classes; a note in too few scenarios has no row."""
    columns = ("note", "pairs", "note swap", "random mean", "random largest", "random notes", "p", "wrong mean")
    found = [_against(scope, *each) for each in ((NOTE, RANDOM, WRONG), (ANY_SLOT, RANDOM_ANY_SLOT, WRONG_ANY_SLOT))]
    return Table(columns=columns, rows=[row for row in found if row])


def _against(scope: Scope, own: Hypothesis, random: Hypothesis, wrong: Hypothesis) -> list[Any]:
    """A note's row of that table."""
    own_, random_, wrong_ = (partial(scrubs.by_note, of=of, test=NOTE_SWAP) for of in (own, random, wrong))

    def swap(one: Instance) -> float | None:
        return own_(one)[0] if own_(one) and random_(one) else None

    here = scope.having(swap)
    if here.too_few():
        return []
    gaps = sum(map(effects.gap, here.rows))
    drawn = [sum(some) / gaps for some in zip(*map(random_, here.rows), strict=True)]
    swaps = sum(swap(one) or 0.0 for one in here.rows) / gaps
    others = [(statistics.fmean(wrong_(one)), effects.gap(one)) for one in here.rows if wrong_(one)]
    p = here.permutation_p(swap, random_)
    beside = sum(top for top, _ in others) / sum(gap for _, gap in others) if others else None
    return [own.words, len(here.rows), swaps, statistics.fmean(drawn), max(drawn), len(drawn), p, beside]


if __name__ == "__main__":
    main(__file__)

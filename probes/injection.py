"""Injection (writability): does the decision follow notes of the opposite conclusion, against its own live field?

Section 3 (iv) and appendix C (iv) of "Models Take Notes at Prefill" (arXiv 2606.17107). The target's notes are put into
the base's cache, all of them and then the best k of them: slots ranked by their single effects on the scenarios of the
other fold, beside the instance's own ranking (in-sample, as the paper's) and as many random notes. And notes of an
instance of ANOTHER scenario, moved to the same slots: of the opposite conclusion, and of the same one as a control.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvnotes import effects, select
from kvnotes.config import RunConfig
from kvnotes.instance import permits
from kvnotes.records import Effect, Instance, Measures, Summary, Table
from kvnotes.runner import main

if TYPE_CHECKING:
    from kvnotes.donors import Donor
    from kvnotes.instance import TokenPair
    from kvnotes.interventions import CacheEdit, State
    from kvnotes.sweep import Trial

TITLE = "Injection: the decision follows the opposite conclusion's notes"
MARGINS = {
    "singles": "slot",
    "own": "count",
    "margins": "state",
    "ranked": "count",
    "random": "count draw",
}
COUNTS = (1, 2, 4, 8, 16, 32)  # how many notes; 8 is the paper's
LENT = {"foreign_opposite": 2, "foreign_same": 3}  # where, of four logits, the lender's action of that arm stands
RANKED = {"top": ("ranked", " by the other fold"), "in_sample": ("own", ", in-sample")}
LENDERS_WORD = {
    "says_lender": ("foreign_opposite", "opposite conclusion's notes"),
    "says_lender_same": ("foreign_same", "same conclusion's notes (control)"),
    "says_lender_top_8": ("foreign_opposite_top_8", "its best 8 notes of the opposite conclusion"),
}
SMALLEST = "smallest number of notes that flips the decision"


class Settings(RunConfig):
    """Injection's own settings."""

    draws: int = Field(ge=1, le=1000, description="random sets of notes for each count")


def survey(trial: Trial, config: RunConfig) -> Measures:
    """Each note alone, and the best k by the instance's own ranking, k = 1, 2, ... all (in-sample)."""
    notes = trial.pair.downstream
    singles = trial.margins([_injected(f"single_{p}", (p,)) for p in notes])
    alone = {p: singles[f"single_{p}"] for p in notes}
    return {
        "base permits": permits(trial.pair.pair)["base"],
        "singles": list(alone.values()),
        "own": _cumulative(trial, select.best(alone), "own"),
    }


def prepare(instances: Sequence[Instance], config: RunConfig) -> dict[str, Any]:
    """The slots' ranking on each fold, by layout, and whose notes each instance is lent."""
    return {
        "rankings": select.crossfit(instances, config.seed, lambda rows: select.rank(rows, _singles)),
        "lenders": {one.id: _lender(one, instances, config) for one in instances},
    }


def _singles(one: Instance) -> dict[str, float]:
    return select.by_slot(one, [effects.moved(one, margin) for margin in one.measures["singles"]])


def _lender(one: Instance, instances: Sequence[Instance], config: RunConfig) -> str | None:
    """A gated instance of another scenario and other action words, as near to this one as there is in what is
    counterbalanced, so that the slots of its rules mean the same. With common words a copied word would look like a
    transferred conclusion."""
    words = _actions(one)
    able = [
        other
        for other in instances
        if other.status == "included"
        and other.layout == one.layout
        and other.scenario != one.scenario
        and not words & _actions(other)
    ]
    select.generator(config.seed, one.id, "lender").shuffle(able)
    return min(able, key=lambda other: _distance(one, other)).id if able else None


def _actions(one: Instance) -> set[int]:
    return {one.tokens.base_action, one.tokens.target_action} if one.tokens else set()


def _distance(one: Instance, other: Instance) -> int:
    choices = {**one.balance, "base permits": one.measures["base permits"]}
    theirs = {**other.balance, "base permits": other.measures["base permits"]}
    return sum(value != theirs.get(name) for name, value in choices.items())


def donors(pair: TokenPair, pairs: Mapping[str, TokenPair], plan: Measures) -> list[TokenPair]:
    """The instance whose notes this one is lent, if there is any."""
    lender = plan["lenders"][pair.pair.id]
    return [] if lender is None else [pairs[lender]]


def measure(trial: Trial, config: Settings, plan: Measures, *, donors: Sequence[Donor]) -> Measures:
    """All notes, both ways; the best k by the other fold's ranking; as many random ones; another scenario's."""
    pair, names = trial.pair, select.slot_names(trial.pair)
    ranking = select.choice(plan["rankings"], layout=pair.pair.layout, scenario=pair.pair.scenario)
    # a fold whose other has no pair that passes the gate has no ranking
    order = select.in_order(ranking, pair.downstream, lambda p: names[p]) if ranking else []
    rng = select.generator(config.seed, pair.pair.id, "random notes")
    drawn = {k: select.unmatched(pair.downstream, order[:k], n=config.draws, rng=rng) for k in COUNTS}
    asked = [
        _injected("full_notes", pair.downstream),
        _injected("full_notes_back", pair.downstream, back=True),
        *(_injected(f"random_{k}_{i}", chosen) for k, found in drawn.items() for i, chosen in enumerate(found.sets)),
    ]
    margins = trial.margins(asked)
    lent = _read_foreign(trial, donors[0], order) if donors else {}
    return {
        "margins": {
            "full_notes": margins["full_notes"],
            "full_notes_back": margins["full_notes_back"],
            **{name: target - base for name, (base, target, *_) in lent.items()},
        },
        "logits of both pairs' actions": lent,
        "ranked": _cumulative(trial, order, "ranked"),
        "random": {str(k): [margins[f"random_{k}_{i}"] for i in range(len(drawn[k].sets))] for k in COUNTS},
        "random sets possible": {str(k): found.possible for k, found in drawn.items()},
        "lender": donors[0].pair.pair.id if donors else None,
        "slots shared with the lender": len(_places(trial, donors[0])) if donors else 0,
    }


def _injected(name: str, positions: Sequence[int], *, back: bool = False) -> CacheEdit:
    """The other arm's notes in the base's cache, or the base's in the target's."""
    from kvnotes.interventions import CacheEdit

    into, donor = ("target", "base") if back else ("base", "target")
    return CacheEdit(name=name, positions=tuple(positions), into=into, donor=donor)


def _cumulative(trial: Trial, order: Sequence[int], name: str) -> list[float]:
    """Margins with the first 1, 2, ... all positions of an order injected."""
    edits = [_injected(f"{name}_{k}", order[:k]) for k in range(1, len(order) + 1)]
    return list(trial.margins(edits).values()) if edits else []


def _places(trial: Trial, other: Donor) -> dict[int, int]:
    from kvnotes.donors import shared_slots

    return shared_slots(trial.pair, other.pair, trial.pair.downstream)


def _read_foreign(trial: Trial, other: Donor, order: Sequence[int]) -> dict[str, list[float]]:
    """Logits of one's own base and target action and of the lender's two (of the conclusion opposite to one's base,
    and of the same), by what was lent: a note may say the word itself."""
    same, opposite = _arms(trial, other)
    words = {"base": other.pair.base_action, "target": other.pair.target_action}
    vocab = [trial.pair.base_action, trial.pair.target_action, words[opposite], words[same]]
    found = trial.logits(_foreign(trial, other, order), vocab=vocab)
    return {name: logits.tolist() for name, logits in found.items()}


def _arms(trial: Trial, other: Donor) -> tuple[State, State]:
    """The lender's arms of the same conclusion as one's base, and of the opposite one."""
    agrees = permits(other.pair.pair)["base"] == permits(trial.pair.pair)["base"]
    return ("base", "target") if agrees else ("target", "base")


def _foreign(trial: Trial, other: Donor, order: Sequence[int]) -> list[CacheEdit]:
    """The other instance's notes at one's own slots: all that both have, and those of the best eight."""
    from kvnotes.donors import aligned
    from kvnotes.interventions import CacheEdit

    places, (same, opposite) = _places(trial, other), _arms(trial, other)
    best = tuple(p for p in order[:8] if p in places)
    lent: dict[str, State] = {"foreign_opposite": opposite, "foreign_same": same}
    edits = []
    for name, arm in lent.items():
        state = aligned(trial.states["base"], other.states[arm], places, trial.model.rotation)
        for suffix, positions in (("", tuple(places)), ("_top_8", best)):
            edits.append(CacheEdit(name=f"{name}{suffix}", positions=positions, into="base", donor=state))
    return [edit for edit in edits if edit.positions]


# --- summary ----------------------------------------------------------------------------------------------


def summarise(instances: Sequence[Instance], config: RunConfig, floor: float) -> Summary:
    """Follow rates, recovery and flips by count, and what another scenario's notes do; gated and ungated."""
    found: list[Effect] = []
    tables: dict[str, Table] = {}
    for scope in effects.scopes(instances, config, floor):
        found += [*_own(scope), *_lent(scope)]
        if scope.gated:
            tables[f"{SMALLEST}, {scope.layout}"] = _smallest(scope.rows)
    return Summary(effects=tuple(found), tables=tables, notes=(), headline=_headline(found, tables))


def _own(scope: effects.Scope) -> Iterator[Effect]:
    yield scope.recovery("full_notes", "all notes", _moved("full_notes"), about=1.0)
    yield scope.share("follow_rate", "follows the target's notes in base", _says("full_notes", "target"))
    yield scope.share("follow_rate_back", "follows the base's notes in target", _says("full_notes_back", "base"))
    for k in COUNTS:
        for name, (key, words) in RANKED.items():
            margin = partial(_at, key=key, k=k)
            yield scope.recovery(f"{name}_{k}", f"best {k}{words}", partial(_from_base, margin=margin))
            label = f"decides as target, best {k}{words}"
            yield scope.share(f"flips_{name}_{k}", label, partial(_positive, margin=margin))
        yield from _random(scope, k)
    for name, (key, words) in RANKED.items():
        suffix = "" if name == "top" else f"_{name}"
        label = f"notes needed by the pairs that flip{words}"
        yield scope.mean(f"smallest{suffix}", label, lambda one, key=key: smallest(one.measures[key]))


def _random(scope: effects.Scope, k: int) -> Iterator[Effect]:
    """Means over an instance's random sets of k notes outside the best k, where it has so many."""

    def mean(one: Instance) -> float | None:
        margins = one.measures["random"][str(k)]
        return sum(margins) / len(margins) if margins else None

    def flips(one: Instance) -> float | None:
        margins = one.measures["random"][str(k)]
        return sum(margin > 0 for margin in margins) / len(margins) if margins else None

    yield scope.recovery(f"random_{k}", f"random {k} (control)", partial(_from_base, margin=mean), control=True)
    yield scope.mean(f"flips_random_{k}", f"decides as target, random {k} (control)", flips, control=True)


def _lent(scope: effects.Scope) -> Iterator[Effect]:
    """What another scenario's notes do, over the pairs that have a lender."""
    opposite, same = _moved("foreign_opposite"), _moved("foreign_same")

    def differ(one: Instance) -> float | None:
        with_, without = opposite(one), same(one)
        return None if with_ is None or without is None else with_ - without

    yield scope.recovery("foreign_opposite", "another scenario's notes, opposite conclusion", opposite, about=1.0)
    label = "another scenario's notes, same conclusion (control)"
    yield scope.recovery("foreign_same", label, same, about=0.0, control=True)
    yield scope.recovery("foreign_conclusion", "their difference: what the conclusion adds", differ, about=0.0)
    few = {kind: f"its best 8 notes, {kind} conclusion" for kind in ("opposite", "same")}
    yield scope.recovery("foreign_opposite_top_8", few["opposite"], _moved("foreign_opposite_top_8"))
    yield scope.recovery("foreign_same_top_8", f"{few['same']} (control)", _moved("foreign_same_top_8"), control=True)
    for kind, control in (("opposite", False), ("same", True)):
        label = f"decides as target, another scenario's {kind} notes{' (control)' * control}"
        yield scope.share(f"flips_foreign_{kind}", label, _says(f"foreign_{kind}", "target"), control=control)
    for name, (read, label) in LENDERS_WORD.items():
        here = partial(_lenders_word, name=read)
        yield scope.share(name, f"says the lender's word, {label}", here, control=name == "says_lender_same")


def smallest(margins: Sequence[float]) -> int | None:
    """The first k = 1, 2, ... at which the best k notes flip the decision; None where no k does."""
    return next((k for k, margin in enumerate(margins, start=1) if margin > 0), None)


def _smallest(rows: Sequence[Instance]) -> Table:
    columns = ("ranking", "pairs", "flipped by some k", "median k", "quartiles", "most", "flipped by k <= 8")
    made: list[list[Any]] = []
    for label, key in (("by the other fold", "ranked"), ("the instance's own (in-sample)", "own")):
        needed = sorted(smallest(one.measures[key]) or math.inf for one in rows if one.measures[key])
        found = [k for k in needed if k < math.inf]
        spread = f"{_quantile(needed, 0.25)} to {_quantile(needed, 0.75)}" if needed else ""
        few = sum(k <= 8 for k in found)
        most = int(found[-1]) if found else None
        made.append([label, len(needed), len(found), _quantile(needed, 0.5), spread, most, few])
    return Table(columns=columns, rows=made)


def _quantile(needed: Sequence[float], part: float) -> str:
    """A quantile (linear interpolation) of the notes needed, pairs that no number flips standing above all others."""
    if not needed:
        return ""
    place = part * (len(needed) - 1)
    low, high = needed[math.floor(place)], needed[math.ceil(place)]
    return "never" if high == math.inf else f"{low + (place - math.floor(place)) * (high - low):g}"


def _moved(name: str) -> Callable[[Instance], float | None]:
    return partial(_from_base, margin=partial(_margin, name=name))


def _from_base(one: Instance, margin: Callable[[Instance], float | None]) -> float | None:
    value = margin(one)
    return None if value is None else effects.moved(one, value)


def _positive(one: Instance, margin: Callable[[Instance], float | None]) -> bool | None:
    value = margin(one)
    return None if value is None else value > 0


def _says(name: str, arm: State) -> Callable[[Instance], bool | None]:
    """Whether an arm's action leads after an intervention; None where it was not made."""

    def found(one: Instance) -> bool | None:
        value = _margin(one, name)
        return None if value is None else (value > 0 if arm == "target" else value < 0)

    return found


def _margin(one: Instance, name: str) -> float | None:
    value = one.measures["margins"].get(name)
    return None if value is None else float(value)


def _lenders_word(one: Instance, name: str) -> bool | None:
    """Whether the lender's word for what was lent leads; None without a lender."""
    kind = name.removesuffix("_top_8")
    return _word(one, name) == LENT[kind] if name in one.measures["logits of both pairs' actions"] else None


def _word(one: Instance, name: str) -> int:
    """Which of the four action words has the largest logit: 0 and 1 are one's own, 2 and 3 the lender's."""
    logits = one.measures["logits of both pairs' actions"][name]
    return max(range(len(logits)), key=logits.__getitem__)


def _at(one: Instance, key: str, k: int) -> float | None:
    """The margin with k notes injected; None where there are fewer."""
    margins = one.measures[key]
    return float(margins[k - 1]) if k <= len(margins) else None


def _headline(found: Sequence[Effect], tables: Mapping[str, Table]) -> str:
    parts = []
    for layout in dict.fromkeys(effect.layout for effect in found):
        full, follow, top, other = (
            next(e for e in found if e.layout == layout and e.gated and e.name == name)
            for name in ("full_notes", "follow_rate", "flips_top_8", "foreign_conclusion")
        )
        if full.estimate is None or follow.estimate is None:
            parts.append(f"{layout}: no recovery ({full.warning or follow.warning})")
            continue
        median = tables[f"{SMALLEST}, {layout}"].rows[0][3]
        needed = "most pairs flip with no number of notes" if median == "never" else f"median {median} needed"
        few = "" if top.estimate is None else f"best 8 flip {top.estimate:.0%}, "
        foreign = "none" if other.estimate is None else f"{other.estimate:.2f}"
        parts.append(
            f"{layout}: all notes {full.estimate:.2f}, followed by {follow.estimate:.0%}; {few}{needed}; "
            f"another scenario's conclusion adds {foreign} (n={full.n})"
        )
    return "; ".join(parts)


if __name__ == "__main__":
    main(__file__)

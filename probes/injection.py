"""Injection (writability): does the decision follow notes of the opposite conclusion, against its own live field?

Section 3 (iv) and appendix C (iv) of "Models Take Notes at Prefill" (arXiv 2606.17107). The target's notes are put into
the base's cache, all of them and then the best k of them: slots ranked by their single effects on the scenarios of the
other fold, beside the instance's own ranking (in-sample, as the paper's) and as many random notes. And notes of an
instance of ANOTHER scenario, moved to the same slots: of the opposite conclusion, and of the same one as a control.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import quantiles
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
COUNTS = (1, 2, 4, 8, 16, 32)  # how many notes; 8 is the paper's
LENT = {"foreign_opposite": 2, "foreign_same": 3}  # where, of four logits, the lender's action of that arm stands
SMALLEST = "smallest number of notes that flips the decision"
FOREIGN = ("foreign_opposite", "foreign_same", "foreign_opposite_top_8", "foreign_same_top_8")


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
    order = select.in_order(ranking, pair.downstream, lambda p: names[p])
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
    return list(trial.margins(edits).values())


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
        found += [*_own(scope), *_lent(scope.having(lambda one: one.measures["margins"].get("foreign_same_top_8")))]
        if scope.gated:
            tables[f"{SMALLEST}, {scope.layout}"] = _smallest(scope.rows)
    return Summary(effects=tuple(found), tables=tables, notes=(), headline=_headline(found, tables))


def _own(scope: effects.Scope) -> list[Effect]:
    made = [
        scope.recovery("full_notes", "all notes", _moved("full_notes"), about=1.0),
        scope.share("follow_rate", "follows the target's notes in base", lambda o: _margin(o, "full_notes") > 0),
        scope.share(
            "follow_rate_back", "follows the base's notes in target", lambda o: _margin(o, "full_notes_back") < 0
        ),
    ]
    for k in COUNTS:
        made += [
            scope.recovery(
                f"top_{k}", f"best {k} by the other fold", lambda o, k=k: effects.moved(o, _at(o, "ranked", k))
            ),
            scope.recovery(f"in_sample_{k}", f"best {k}, in-sample", lambda o, k=k: effects.moved(o, _at(o, "own", k))),
            scope.share(f"flips_top_{k}", f"decides as target, best {k}", lambda o, k=k: _at(o, "ranked", k) > 0),
            scope.share(
                f"flips_in_sample_{k}", f"decides as target, best {k}, in-sample", lambda o, k=k: _at(o, "own", k) > 0
            ),
        ]
        made += _random(scope, k)
    return [
        *made,
        scope.mean(
            "smallest",
            "notes needed by the pairs that flip, ranked by the other fold",
            lambda o: smallest(o.measures["ranked"]),
        ),
        scope.mean(
            "smallest_in_sample",
            "notes needed by the pairs that flip, in-sample",
            lambda o: smallest(o.measures["own"]),
        ),
    ]


def _random(scope: effects.Scope, k: int) -> list[Effect]:
    """Means over an instance's random sets of k notes outside the best k, where it has so many."""

    def margins(one: Instance) -> list[float]:
        return one.measures["random"][str(k)]

    def moved(one: Instance) -> float:
        return effects.moved(one, sum(margins(one)) / len(margins(one)))

    def flips(one: Instance) -> float | None:
        return sum(margin > 0 for margin in margins(one)) / len(margins(one)) if margins(one) else None

    return [
        scope.having(flips).recovery(f"random_{k}", f"random {k} (control)", moved, control=True),
        scope.mean(f"flips_random_{k}", f"decides as target, random {k} (control)", flips, control=True),
    ]


def _lent(scope: effects.Scope) -> list[Effect]:
    opposite, same, few_opposite, few_same = (_moved(name) for name in FOREIGN)
    return [
        scope.recovery("foreign_opposite", "another scenario's notes, opposite conclusion", opposite, about=1.0),
        scope.recovery(
            "foreign_same", "another scenario's notes, same conclusion (control)", same, about=0.0, control=True
        ),
        scope.recovery(
            "foreign_conclusion",
            "their difference: what the conclusion adds",
            lambda o: opposite(o) - same(o),
            about=0.0,
        ),
        scope.recovery("foreign_opposite_top_8", "its best 8 notes, opposite conclusion", few_opposite),
        scope.recovery("foreign_same_top_8", "its best 8 notes, same conclusion (control)", few_same, control=True),
        scope.share(
            "flips_foreign_opposite",
            "decides as target, another scenario's opposite notes",
            lambda o: _margin(o, "foreign_opposite") > 0,
        ),
        scope.share(
            "says_lender",
            "says the lender's word, opposite conclusion's notes",
            lambda o: _word(o, "foreign_opposite") == LENT["foreign_opposite"],
        ),
        scope.share(
            "says_lender_same",
            "says the lender's word, same conclusion's notes",
            lambda o: _word(o, "foreign_same") == LENT["foreign_same"],
        ),
        scope.share(
            "says_lender_top_8",
            "says the lender's word, its best 8 notes of the opposite conclusion",
            lambda o: _word(o, "foreign_opposite_top_8") == LENT["foreign_opposite"],
        ),
        scope.share(
            "flips_foreign_same",
            "decides as target, another scenario's same notes (control)",
            lambda o: _margin(o, "foreign_same") > 0,
        ).model_copy(update={"control": True}),
    ]


def smallest(margins: Sequence[float]) -> int | None:
    """The first k = 1, 2, ... at which the best k notes flip the decision; None where no k does."""
    return next((k for k, margin in enumerate(margins, start=1) if margin > 0), None)


def _smallest(rows: Sequence[Instance]) -> Table:
    columns = ("ranking", "pairs", "flipped by some k", "median k", "quartiles", "most", "flipped by k <= 8")
    made: list[list[Any]] = []
    for label, key in (("by the other fold", "ranked"), ("the instance's own (in-sample)", "own")):
        found = sorted(k for one in rows if (k := smallest(one.measures[key])) is not None)
        low, middle, high = quantiles(found, n=4, method="inclusive") if len(found) > 1 else (None, None, None)
        spread = "" if low is None else f"{low:g} to {high:g}"
        few = sum(k <= 8 for k in found)
        made.append([label, len(rows), len(found), middle, spread, found[-1] if found else None, few])
    return Table(columns=columns, rows=made)


def _moved(name: str) -> Callable[[Instance], float]:
    return lambda one: effects.moved(one, _margin(one, name))


def _margin(one: Instance, name: str) -> float:
    return float(one.measures["margins"][name])


def _word(one: Instance, name: str) -> int:
    """Which of the four action words has the largest logit: 0 and 1 are one's own, 2 and 3 the lender's."""
    logits = one.measures["logits of both pairs' actions"][name]
    return max(range(len(logits)), key=logits.__getitem__)


def _at(one: Instance, key: str, k: int) -> float:
    """The margin with k notes injected, or all where there are fewer."""
    margins = one.measures[key]
    return float(margins[min(k, len(margins)) - 1])


def _headline(found: Sequence[Effect], tables: Mapping[str, Table]) -> str:
    parts = []
    for layout in dict.fromkeys(effect.layout for effect in found):
        full, follow, top, other = (
            next(e for e in found if e.layout == layout and e.gated and e.name == name)
            for name in ("full_notes", "follow_rate", "flips_top_8", "foreign_conclusion")
        )
        if full.estimate is None or follow.estimate is None or top.estimate is None:
            parts.append(f"{layout}: no recovery ({full.warning or follow.warning})")
            continue
        median = tables[f"{SMALLEST}, {layout}"].rows[0][3]
        needed = "no number of notes flips" if median is None else f"median {median:g} needed"
        foreign = "none" if other.estimate is None else f"{other.estimate:.2f}"
        parts.append(
            f"{layout}: all notes {full.estimate:.2f}, followed by {follow.estimate:.0%}; best 8 flip "
            f"{top.estimate:.0%}, {needed}; another scenario's conclusion adds {foreign} (n={full.n})"
        )
    return "; ".join(parts)


if __name__ == "__main__":
    main(__file__)

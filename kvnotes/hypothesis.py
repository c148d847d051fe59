"""Causal scrubbing: a hypothesis about what holds the decision, as data, and who lends what to whom. No torch.

A hypothesis names the positions that are the note, the variable of the input that it is said to carry, and tests:
which part of the cache takes the cells of a prompt that agrees with the run in the variable, which part those of one
that differs (Chan et al. 2022, "Causal Scrubbing"). Where it is true, the decision moves only if the note's value does.
Changed span and field are the input itself: they are never resampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from kvnotes import select, sites
from kvnotes.instance import Pair, TokenPair
from kvnotes.records import Instance, Measures

if TYPE_CHECKING:
    from kvnotes.interventions import State
    from kvnotes.sweep import Trial

Rule = Literal["agrees", "differs"]
Lent = tuple[int | None, int | None]  # the donor of the note and of the rest; None leaves the run's own cells
RUNS: tuple[State, State] = ("base", "target")  # their own prompts are the first two donors
INPUT = ("field",)  # roles that are never resampled, beside the changed span


@dataclass(frozen=True, kw_only=True)
class Resampling:
    """Where each part of the cache comes from: a donor that agrees with the run in the variable, one that differs, or
    None for the run itself. The same donor lends both parts where both follow the same rule."""

    name: str
    words: str
    note: Rule | None = None
    rest: Rule | None = None
    into: State = "base"

    @property
    def predicted(self) -> float:
        """What a true hypothesis lets happen, in recovery: 1 where the note's value differs, else 0."""
        return float(self.note == "differs")


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """Which positions are the note, what it carries, and how that is tested.

    `chosen`: the best slots by the other fold's ranking, the instance's own best (in-sample), other positions of the
    same classes as the ranked ones, or what becomes of the ranked ones where the names of all slots are permuted;
    `among`: aggregators only, or every downstream slot (permuted ones are of every slot). `control`: not believed, so
    that its note is expected to do nothing, but for permuted ones, which may have some of the note. `refills`: whether
    prompts with other neutral rules lend too.
    """

    name: str
    words: str
    tests: tuple[Resampling, ...]
    suffix: str = ""
    among: Literal["aggregators", "any"] = "any"
    chosen: Literal["ranked", "in_sample", "classmates", "permuted"] = "ranked"
    variable: str = "conclusion"
    control: bool = False
    refills: bool = True

    def effect(self, name: str) -> str:
        """The name of an effect of this hypothesis."""
        return f"{name}_{self.suffix}" if self.suffix else name


# --- what an input's variables are ------------------------------------------------------------------------


def _coin(pair: Pair, arm: State) -> str:
    return str(select.generator(pair.seed, pair.id, arm, "coin").random() < 0.5)


def _rules(pair: Pair, arm: State) -> str:
    return "|".join(piece.text for piece in getattr(pair, arm).user if piece.role in ("trigger", "rule_value"))


# the values are compared within a scenario only, where one action is one conclusion
VARIABLES: Mapping[str, Callable[[Pair, State], str]] = MappingProxyType(
    {
        "conclusion": lambda pair, arm: getattr(pair, arm).action,
        "field": lambda pair, arm: getattr(pair, arm).field,
        "rules": _rules,
        "coin": _coin,
    }
)


def labels(pair: Pair, arm: State) -> dict[str, str]:
    """A prompt's value of every variable."""
    return {name: value(pair, arm) for name, value in VARIABLES.items()}


def lenders(test: Resampling, own: str, others: Mapping[int, str]) -> list[Lent]:
    """Which donors lend to note and rest, by their value of the variable: every donor that follows a part's rule lends
    once, the shorter list begins again; none where a part has no donor."""
    pools = [None if rule is None else _following(rule, own, others) for rule in (test.note, test.rest)]
    if any(pool == [] for pool in pools):
        return []
    note, rest = pools
    count = max((len(pool) for pool in pools if pool is not None), default=0)
    return [
        (None if note is None else note[i % len(note)], None if rest is None else rest[i % len(rest)])
        for i in range(count)
    ]


def _following(rule: Rule, own: str, others: Mapping[int, str]) -> list[int]:
    return [donor for donor, value in others.items() if (value == own) == (rule == "agrees")]


# --- positions --------------------------------------------------------------------------------------------


def free(pair: TokenPair) -> tuple[int, ...]:
    """The downstream positions that may be resampled: all that are not the input's."""
    names = select.slot_names(pair)
    return tuple(p for p in pair.downstream if select.slot_class(names[p]) not in INPUT)


def shared(instances: Sequence[Instance]) -> list[str]:
    """The slots that every instance has free, in the first one's order."""
    each = [[slot for slot in sites.moved(one) if select.slot_class(slot) not in INPUT] for one in instances]
    return [slot for slot in each[0] if all(slot in other for other in each)] if each else []


def survey(trial: Trial) -> Measures:
    """What ranks the slots: `sites.survey`, and `without`: the margin with all of the target's notes but one, in the
    order of the downstream."""
    from kvnotes.interventions import CacheEdit

    found, places = sites.survey(trial), trial.pair.downstream
    others = {p: tuple(q for q in places if q != p) for p in places if len(places) > 1}
    left = trial.margins(
        [CacheEdit(name=f"without:{p}", positions=kept, into="base", donor="target") for p, kept in others.items()]
    )
    return {**found, "without": [round(left.get(f"without:{p}", trial.unedited.base), 6) for p in places]}


def notes(
    one: Hypothesis, rows: Sequence[Instance], slots: Sequence[str], *, size: int, draws: int, seed: int
) -> dict[str, Any]:
    """The note's slots that some instances choose among `slots`: one set, or `draws` where they are random. The
    i-th permutation of slots is the same whatever is chosen, in either fold. `possible` sets there were to draw;
    `exact` is false where classmates were too few and others fill up. The ranking is by `sites.either`. No rows choose
    no set."""
    wanted = [slot for slot in slots if one.among == "any" or select.slot_class(slot) == sites.AGGREGATOR]
    ranked = [slot for slot in select.rank(rows, sites.either) if slot in wanted][:size]
    if one.chosen in ("ranked", "in_sample") or not ranked:
        return {"sets": [ranked] if ranked else [], "possible": 1, "exact": True}
    if one.chosen == "permuted":
        words = (rows[0].layout, one.name)
        images = select.permutations(slots, classes=lambda _: "", n=draws, seed=seed, words=words)
        sets = [[image[slot] for slot in ranked] for image in images]
        return {"sets": sets, "possible": math.comb(len(slots), len(ranked)), "exact": True}
    best = [slots.index(slot) for slot in ranked]
    rng = select.generator(seed, rows[0].id, one.name)
    found = select.near(range(len(slots)), best, classes=lambda i: select.slot_class(slots[i]), n=draws, rng=rng)
    sets = [[slots[i] for i in chosen] for chosen in found.sets]
    return {"sets": sets, "possible": found.possible, "exact": found.exact}

"""Choosing on some scenarios what is tested on others: folds, rankings of slots, random draws. No torch.

A slot is a position's name across scenarios: `span[index]`, such as `delimiter[3]` or `action.target[0]`; its class is
the span's role, such as `delimiter`. A position that one prompt has and another lacks simply has no partner there.

Two-fold cross-fitting: the scenarios fall into two folds; what the instances of one fold choose is tested on those of
the other, so that no scenario is tested with a choice that it had a part in. The paper's own figures choose and test
on one instance; such numbers are "in-sample" here.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvnotes import effects
from kvnotes.instance import TokenPair
from kvnotes.records import Instance

T = TypeVar("T")


def slot_name(span: str, index: int) -> str:
    """How a plan and a record name a slot."""
    return f"{span}[{index}]"


def slot_class(slot: str) -> str:
    """The token class of a slot or a span: the role of its span."""
    return slot_span(slot).partition(".")[0]


def slot_span(slot: str) -> str:
    """The span of a slot."""
    return slot.partition("[")[0]


def slot_names(pair: TokenPair) -> tuple[str, ...]:
    """The slot of every position of a pair."""
    return tuple(slot_name(slot.span, slot.index) for slot in pair.slots)


def instance_slots(one: Instance) -> tuple[str, ...]:
    """The slot of every position of a measured instance, from its record: the same as the pair's."""
    found = [(p, span) for span, ranges in one.spans.items() for low, high in ranges for p in range(low, high)]
    counted: Counter[str] = Counter()
    names = []
    for _, span in sorted(found):
        names.append(slot_name(span, counted[span]))
        counted[span] += 1
    return tuple(names)


def downstream(one: Instance) -> tuple[int, ...]:
    """The downstream positions of a measured instance, as `TokenPair.downstream` has them.

    Raises ValueError for an instance that was skipped: it has no tokens.
    """
    if one.tokens is None:
        raise ValueError(f"{one.id} was skipped ({one.reason}), it has no tokens")
    skip = {*one.tokens.changed, *one.tokens.query}
    return tuple(p for p in range(one.tokens.changed[0], len(one.tokens.base)) if p not in skip)


def by_slot(one: Instance, values: Sequence[float]) -> dict[str, float]:
    """Values of the downstream positions, in their order, by slot."""
    names = instance_slots(one)
    return {names[p]: value for p, value in zip(downstream(one), values, strict=True)}


# --- folds ------------------------------------------------------------------------------------------------


def folds(scenarios: Iterable[str], seed: int) -> dict[str, int]:
    """Fold 0 or 1 of each scenario: shuffled by the seed, then in turns, so that the folds differ by one at most."""
    names = sorted(set(scenarios))
    random.Random(seed).shuffle(names)
    return {name: at % 2 for at, name in enumerate(names)}


def instance_folds(instances: Sequence[Instance], seed: int) -> dict[str, int]:
    """The fold of every instance's scenario. Scenarios that pass the gate are shared out first and on their own, since
    only they choose: of 6 of them each fold gets 3, however many others there are."""
    kept = {one.scenario for one in instances if one.status == "included"}
    others = {one.scenario for one in instances} - kept
    return folds(kept, seed) | folds(others, seed)


def crossfit(instances: Sequence[Instance], seed: int, choose: Callable[[Sequence[Instance]], Any]) -> dict[str, Any]:
    """A plan: by layout, every scenario's fold, and what it is tested with, which the other fold's instances chose.

    `choose` gets the gated instances of one fold, perhaps none, and gives plain JSON values. A study's `prepare` may
    return the plan as it is; `choice` reads it. Folds are numbered "0" and "1" since a plan is JSON.
    """
    plan: dict[str, Any] = {}
    for layout in effects.layouts(instances):
        here = [one for one in instances if one.layout == layout]
        fold = instance_folds(here, seed)
        sides = [[one for one in here if one.status == "included" and fold[one.scenario] == side] for side in (0, 1)]
        plan[layout] = {"folds": fold, "tested_with": {"0": choose(sides[1]), "1": choose(sides[0])}}
    return plan


def choice(plan: Mapping[str, Any], *, layout: str, scenario: str) -> Any:
    """What a scenario is tested with: the choice of the fold that it is not in."""
    here = plan[layout]
    return here["tested_with"][str(here["folds"][scenario])]


# --- rankings ---------------------------------------------------------------------------------------------


def rank(instances: Sequence[Instance], moved: Callable[[Instance], Mapping[str, float]]) -> list[str]:
    """Names by falling mean effect over the instances; ties by name.

    `moved` gives an instance's effects in logits by name (a slot, a head, a layer). The mean is the ratio of sums,
    sum(moved) / sum(gap), as everywhere, and a name that an instance lacks has moved it by 0: a slot that one prompt
    alone has cannot lead.
    """
    means = mean_effects(instances, moved)
    return sorted(means, key=lambda name: (-means[name], name))


def mean_effects(instances: Sequence[Instance], moved: Callable[[Instance], Mapping[str, float]]) -> dict[str, float]:
    """Each name's effect in recovery: its sum over the instances, in logits, over the sum of their gaps."""
    total: dict[str, float] = {}
    for one in instances:
        for name, value in moved(one).items():
            total[name] = total.get(name, 0.0) + value
    gaps = sum(effects.gap(one) for one in instances)
    return {name: value / gaps for name, value in total.items()} if gaps else {}


def in_order(ranking: Sequence[str], available: Sequence[T], name: Callable[[T], str]) -> list[T]:
    """The available items in the order of a ranking made elsewhere; unranked ones last, in their own order."""
    place = {key: at for at, key in enumerate(ranking)}
    return sorted(available, key=lambda one: place.get(name(one), len(place)))


def best(values: Mapping[T, float]) -> list[T]:
    """An instance's own ranking, in-sample: items by falling value, ties in their own order."""
    return sorted(values, key=lambda one: -values[one])


# --- random draws -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Random sets from outside a chosen one. `possible` counts the sets there are; where they are no more than were
    asked for, all of them are here, once each, and `enumerated` is true. `exact` is false where a matched set could
    not have as many of each class as the chosen one."""

    sets: tuple[tuple[int, ...], ...]
    possible: int
    enumerated: bool
    exact: bool = True


def draws(pool: Sequence[int], *, k: int, n: int, rng: random.Random) -> Draws:
    """`n` different sets of `k` of the pool, or all there are. A k of 0, or above the pool's size, gives none."""
    return from_pools([(tuple(pool), k)], n=n, rng=rng)


def unmatched(positions: Sequence[int], chosen: Sequence[int], *, n: int, rng: random.Random) -> Draws:
    """`n` different sets of as many positions as were chosen, none of them chosen."""
    return draws([p for p in positions if p not in set(chosen)], k=len(chosen), n=n, rng=rng)


def matched(
    positions: Sequence[int],
    chosen: Sequence[int],
    *,
    classes: Callable[[int], str],
    n: int,
    rng: random.Random,
) -> Draws:
    """`n` different sets, none of whose positions were chosen, with as many of each class as the chosen set has.

    None where a class has too few members outside the chosen set.
    """
    wanted = Counter(classes(p) for p in chosen)
    outside = [p for p in positions if p not in set(chosen)]
    pools = [(tuple(p for p in outside if classes(p) == name), k) for name, k in sorted(wanted.items())]
    return from_pools(pools, n=n, rng=rng)


def near(
    positions: Sequence[int],
    chosen: Sequence[int],
    *,
    classes: Callable[[int], str],
    n: int,
    rng: random.Random,
) -> Draws:
    """As `matched`, but where a class has too few others all of them are taken, and positions of classes that the
    chosen set lacks fill up; `exact` is then false. None where those are too few as well.
    """
    wanted = Counter(classes(p) for p in chosen)
    outside = [p for p in positions if p not in set(chosen)]
    members = {name: tuple(p for p in outside if classes(p) == name) for name in sorted(wanted)}
    taken = {name: min(k, len(members[name])) for name, k in wanted.items()}
    others = tuple(p for p in outside if classes(p) not in wanted)
    pools = [*((members[name], taken[name]) for name in members), (others, len(chosen) - sum(taken.values()))]
    return replace(from_pools(pools, n=n, rng=rng), exact=taken == wanted)


def permutations(
    names: Sequence[str], *, classes: Callable[[str], str], n: int, seed: int, words: Sequence[str]
) -> list[dict[str, str]]:
    """`n` permutations of names, each within its class: every name's image. They depend on the names, the seed and the
    words alone, not on what is chosen: a choice that two folds share is permuted as one, and not as two."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(classes(name), []).append(name)
    found = []
    for i in range(n):
        rng, image = generator(seed, *words, str(i)), {}
        for members in groups.values():
            image |= dict(zip(members, rng.sample(members, len(members)), strict=True))
        found.append(image)
    return found


def from_pools(pools: Sequence[tuple[Sequence[int], int]], *, n: int, rng: random.Random) -> Draws:
    """Sets of k from each pool. Every set is as likely as another; none comes twice."""
    if not sum(k for _, k in pools):
        return Draws(sets=(), possible=0, enumerated=True)
    possible = math.prod(math.comb(len(pool), k) for pool, k in pools)
    if possible <= n:
        every = itertools.product(*(itertools.combinations(pool, k) for pool, k in pools))
        return Draws(sets=tuple(_joined(one) for one in every), possible=possible, enumerated=True)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < n:
        found[_joined([rng.sample(pool, k) for pool, k in pools])] = None
    return Draws(sets=tuple(found), possible=possible, enumerated=False)


def _joined(parts: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(sorted(itertools.chain.from_iterable(parts)))


def generator(seed: int, *names: str) -> random.Random:
    """Random numbers that depend on the seed and the names (an instance's id, a draw's purpose) alone, so that an
    instance's draws are the same whatever else is measured before it."""
    return random.Random("/".join([str(seed), *names]))

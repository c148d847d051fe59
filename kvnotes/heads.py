"""Query heads by name: numbers by head as records keep them, patches of their z, matched random sets. No torch.

A head's name is `layer.head`, both counted from 0. Query heads are never KV heads: with grouped-query attention several
of them read one KV head's cells, which are named in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvnotes import select, sites
from kvnotes.select import Draws

if TYPE_CHECKING:
    from kvnotes.instance import TokenPair
    from kvnotes.interventions import CacheEdit, Together
    from kvnotes.sweep import Trial

ITSELF, AGGREGATOR = "itself", "aggregator"
KS = (1, 3, 5, 8, 12)  # heads patched together: the paper's
NAMED = 12  # heads that are named
READ = "read"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where heads' z is patched: the decision, one downstream slot or all; aggregators, or slots of any class.

    `drawn` are the numbers of heads that random sets are drawn for. `permuted`: as many sets of permuted names, which
    the test of the best heads needs, are patched beside them. `confirmed`: heads are patched one by one, too.
    `in_sample`: heads ranked on all pairs are patched beside those that the other fold ranks.
    """

    name: str
    label: str
    single: bool = True
    any_slot: bool = False
    drawn: tuple[int, ...] = (NAMED,)  # what is recomputed after a write head costs fifty times a read head
    permuted: bool = False
    confirmed: bool = False
    in_sample: bool = False

    def positions(self, pair: TokenPair, slots: Mapping[str, Any], best: Callable[..., int | None]) -> tuple[int, ...]:
        """The place in a pair; none where it lacks such slots. `best` picks one of some positions by a plan of
        `sites`: `sites.best` or `sites.in_sample`."""
        if self.name == READ:
            return pair.query[-1:]
        among = pair.downstream if self.any_slot else sites.aggregators(pair)
        if not self.single:
            return among
        found = best(slots, pair, among=among)
        return () if found is None else (found,)


_PLACES = (
    Place(name=READ, label="read heads", drawn=KS, permuted=True, confirmed=True, in_sample=True),
    Place(name="write", label="write heads at the best aggregator", confirmed=True, in_sample=True),
    Place(name="write_all", label="write heads at all aggregators", single=False, confirmed=True, in_sample=True),
    Place(name="write_any_slot", label="write heads at the best slot of any class", any_slot=True),
    Place(name="write_all_slots", label="write heads at all downstream slots", single=False, any_slot=True),
)
PLACES: Mapping[str, Place] = MappingProxyType({place.name: place for place in _PLACES})


def names(shape: Mapping[str, int], kind: str = "heads") -> list[str]:
    """Every head of a model, or, with `kind` of `kv_heads`, every KV head."""
    return [f"{layer}.{head}" for layer in range(shape["layers"]) for head in range(shape[kind])]


def site(name: str) -> tuple[int, int]:
    """A head's layer and its number there."""
    layer, _, head = name.partition(".")
    return int(layer), int(head)


def named(values: Sequence[float], per_layer: int) -> dict[str, float]:
    """Numbers of every head, in the order of `names`, by name."""
    return {f"{at // per_layer}.{at % per_layer}": value for at, value in enumerate(values)}


def flat(values: Any, digits: int) -> list[float]:
    """A tensor of [layer, head] as a record keeps it, in the order of `names`; what rounds to 0 has no sign."""
    return [round(value, digits) + 0.0 for value in values.flatten().tolist()]


def nested(margins: Mapping[str, float]) -> dict[str, Any]:
    """Margins named `kind:key` as {kind: {key: margin}}, those named `kind:key:number` as lists, in their order."""
    found: dict[str, Any] = {}
    for name, margin in margins.items():
        kind, key, *number = name.split(":")
        if number:
            found.setdefault(kind, {}).setdefault(key, []).append(margin)
        else:
            found.setdefault(kind, {})[key] = margin
    return found


def patched(name: str, chosen: Iterable[str], positions: Iterable[int]) -> Together:
    """The target's z of some query heads at some positions put into base, all that follows recomputed."""
    from kvnotes.interventions import ActivationPatch, Together

    where = [(*site(head), p) for head in chosen for p in positions]
    parts = [
        ActivationPatch(
            name=f"{name}, {layer}.{head} at {p}",
            point="z",
            layer=layer,
            head=head,
            position=p,
            into="base",
            donor="target",
        )
        for layer, head, p in where
    ]
    return Together(name=name, parts=parts)


def cells(name: str, kv_head: str, positions: tuple[int, ...]) -> CacheEdit:
    """The target's cells of one KV head at some positions put into base."""
    from kvnotes.interventions import CacheEdit

    layer, head = site(kv_head)
    return CacheEdit(name=name, positions=positions, into="base", donor="target", layers=(layer,), kv_heads=(head,))


def matched(every: Sequence[str], chosen: Sequence[str], *, n: int, seed: int, purpose: Sequence[str]) -> Draws:
    """`n` sets of other heads, as many of each layer as were chosen, as indices into `every`; where a layer has too few
    others, all of them and heads of layers that the chosen ones lack. They depend on the seed, the purpose and the
    chosen heads alone: all that are tested with one choice have the same sets."""
    at = {name: i for i, name in enumerate(every)}
    return select.near(
        range(len(every)),
        [at[name] for name in chosen],
        classes=lambda i: str(site(every[i])[0]),
        n=n,
        rng=select.generator(seed, *purpose, *chosen),
    )


def permuted(every: Sequence[str], *, n: int, seed: int, layout: str) -> list[dict[str, str]]:
    """`n` permutations of the heads within their layers: the i-th is the same whatever is chosen, in either fold."""
    return select.permutations(
        every, classes=lambda name: str(site(name)[0]), n=n, seed=seed, words=(layout, "permuted heads")
    )


# --- which heads are asked --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked at a place of a pair. `sets`: heads, and the positions where their z is patched, by `kind:key`;
    `about`: what a record keeps of the choice; `order`: all heads, the other fold's first ones first; `drawn`: the
    random sets of `NAMED` heads."""

    sets: Mapping[str, tuple[Sequence[str], tuple[int, ...]]]
    about: Mapping[str, Any]
    order: Sequence[str]
    drawn: Sequence[Sequence[str]]


def ask(
    pair: TokenPair,
    plan: Mapping[str, Any],
    place: Place,
    every: Sequence[str],
    *,
    draws: int,
    confirmed: int,
    seed: int,
) -> Asked:
    """The best k heads of the other fold (`top:k`), of all pairs (`in_sample:k`), random ones (`random:k:number`) and
    the best under permutations of the heads' names (`permuted:k:number`); to confirm them one by one, the first
    `confirmed` write heads (`alone:head`), and as many random (`others:head`).
    Empty where the pair has no such place.

    `plan` holds `slots` (of `sites.prepare`), `crossfit` (by place, a plan of rankings) and `in_sample` (by place and
    layout, a ranking).
    """
    where, ranked, layout = (
        place.positions(pair, plan["slots"], sites.best),
        order(plan, pair, place.name, every),
        pair.pair.layout,
    )
    if not where:
        return Asked(sets={}, about={}, order=ranked, drawn=())
    fold = plan["crossfit"][place.name][layout]["folds"][pair.pair.scenario]
    like = partial(matched, every, seed=seed, purpose=(layout, f"{fold}", place.name))
    made = {k: like(ranked[:k], n=draws) for k in place.drawn}
    drawn = {k: [[every[at] for at in one] for one in found.sets] for k, found in made.items()}
    sets = {f"top:{k}": (ranked[:k], where) for k in KS}
    sets |= {f"random:{k}:{i}": (one, where) for k, some in drawn.items() for i, one in enumerate(some)}
    for i, image in enumerate(permuted(every, n=draws, seed=seed, layout=layout) if place.permuted else ()):
        sets |= {f"permuted:{k}:{i}": ([image[head] for head in ranked[:k]], where) for k in KS}
    if place.in_sample:
        pooled = select.in_order(plan["in_sample"][place.name][layout], every, str)
        own = place.positions(pair, plan["slots"], sites.in_sample)
        sets |= {f"in_sample:{k}": (pooled[:k], own) for k in KS}
    if place.confirmed and place.name != READ:
        top = ranked[:confirmed]
        others = [every[at] for one in like(top, n=1).sets for at in one]
        sets |= {f"alone:{head}": ([head], where) for head in top}
        sets |= {f"others:{head}": ([head], where) for head in others}
    about = {
        "positions": list(where),
        "named": ranked[:NAMED],
        "possible": {f"{k}": float(found.possible) for k, found in made.items()},
        "exact": {f"{k}": found.exact for k, found in made.items()},
    }
    return Asked(sets=sets, about=about, order=ranked, drawn=drawn[NAMED])


def order(plan: Mapping[str, Any], pair: TokenPair, name: str, every: Sequence[str]) -> list[str]:
    """All heads, those first that the other fold ranks."""
    own = pair.pair
    ranking = select.choice(plan["crossfit"][name], layout=own.layout, scenario=own.scenario)
    return select.in_order(ranking, every, str)


# --- what they attend to ----------------------------------------------------------------------------------


def by_class(pair: TokenPair) -> dict[str, list[int]]:
    """Every position by its token class: the role of its span; aggregators (delimiters downstream) apart from other
    delimiters, and the decision itself."""
    aggregators, found = sites.aggregators(pair), {}
    for p, slot in enumerate(select.slot_names(pair)):
        own = ITSELF if p == pair.query[-1] else AGGREGATOR if p in aggregators else select.slot_class(slot)
        found.setdefault(own, []).append(p)
    return found


def attention(trial: Trial) -> dict[str, list[float]]:
    """How much each head attends from the decision to each token class, mean of both arms: shares of 1, by class, in
    the order of `names`."""
    arms = [trial.patterns(run)[:, :, -1] for run in ("base", "target")]
    mean = (arms[0] + arms[1]).float() / 2
    return {name: flat(mean[:, :, places].sum(dim=-1), 4) for name, places in by_class(trial.pair).items()}

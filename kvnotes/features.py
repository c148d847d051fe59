"""What a sparse autoencoder's features tell of a label, and which of them are chosen. No torch.

An instance's record holds, for both arms and each place that was read, the features that are active there. A feature's
AUC is the share of pairs of prompts, one of each label, that its activation puts in the right order. Held-out: its
direction (higher for which label), and which feature is best, are chosen on one fold of the scenarios and tested on the
other. With few prompts and many features a perfect one is found by chance: the null repeats all of it, choice included,
under labels that change places in whole scenarios (`probing.signs`), and takes the largest.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvnotes import probing, select, sites
from kvnotes.instance import TokenPair, permits

if TYPE_CHECKING:
    from kvnotes.interventions import State

Floats = NDArray[np.float64]

RESERVED = 3  # one scenario in three
RULE = f"SHA-256 of the scenario's name, modulo {RESERVED}, is 0"
ARMS: tuple[State, State] = ("base", "target")
FAILED = 0.5  # share of dead features above which a training that was done here has failed
HIGH = 0.95  # an AUC that counts as "reads the label"
DIGITS = 9  # AUCs that differ by less tie
TIE = 1e-7  # weight of a difference of means among equal AUCs
FREQUENCIES = (0.05, 0.15, 0.35, 0.65, 0.95)  # shares of prompts between which features count as equally frequent


def reserved(scenario: str) -> bool:
    """Whether a scenario is kept for the dictionary's text and for choosing its layer, and never evaluated."""
    return int(hashlib.sha256(scenario.encode()).hexdigest(), 16) % RESERVED == 0


# --- activations ------------------------------------------------------------------------------------------


def tabled(rows: Sequence[Mapping[int, float]], among: Sequence[int]) -> Floats:
    """[prompt, feature]: each prompt's activations of some features, 0 where it does not have one."""
    at = {feature: column for column, feature in enumerate(among)}
    values = np.zeros((len(rows), len(among)))
    for place, row_ in enumerate(rows):
        for feature, value in row_.items():
            if feature in at:
                values[place, at[feature]] = value
    return values


def known(*rows: Sequence[Mapping[int, float]]) -> tuple[int, ...]:
    """The features that any prompt has, in their order."""
    return tuple(sorted({feature for each in rows for one in each for feature in one}))


def active(values: NDArray[Any]) -> dict[str, list[Any]]:
    """A prompt's active features as a record keeps them."""
    places = np.flatnonzero(values)
    return {"features": places.tolist(), "values": [round(float(values[place]), 6) for place in places]}


def row(kept: Mapping[str, Sequence[Any]]) -> dict[int, float]:
    """The same, read."""
    return dict(zip(kept["features"], kept["values"], strict=True))


# --- AUC --------------------------------------------------------------------------------------------------


def aucs(values: Floats, labels: NDArray[np.bool_]) -> Floats:
    """[labelling, feature]: the AUC of each column of values [prompt, feature] for each row of labels
    [labelling, prompt], ties counting half (Mann and Whitney). 0.5 where a labelling has one label only."""
    from scipy.stats import rankdata

    ranks = rankdata(values, axis=0) if values.size else values
    ups = labels.sum(axis=1, keepdims=True).astype(float)
    downs = labels.shape[1] - ups
    wins = labels.astype(float) @ ranks - ups * (ups + 1) / 2
    found: Floats = np.where(ups * downs > 0, wins / np.maximum(ups * downs, 1), 0.5)
    return np.round(found, DIGITS)


def differences(values: Floats, labels: NDArray[np.bool_]) -> Floats:
    """[labelling, feature]: the mean of the prompts with the label, minus that of the others."""
    ups = labels.astype(float)
    downs = 1 - ups
    counts = [np.maximum(side.sum(axis=1, keepdims=True), 1) for side in (ups, downs)]
    return ups @ values / counts[0] - downs @ values / counts[1]


def merits(values: Floats, labels: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """AUCs, and what features are ranked by: how far the AUC is from a half, ties by the difference of the means."""
    found, apart = aucs(values, labels), np.abs(differences(values, labels))
    most = np.maximum(apart.max(axis=1, initial=0.0, keepdims=True), 1e-12)
    return found, np.abs(found - 0.5) + TIE * apart / most


@dataclass(frozen=True, kw_only=True, eq=False)
class Read:
    """How well features tell a label: with the labels as they are, first, and then under each permutation.

    `chosen`: the held-out AUC of the feature that the other fold finds best; `largest`: of any feature, its direction
    chosen by the other fold; `in_sample`: of any feature, direction and all chosen on the tested prompts, as the
    paper's; `high`: how many features have an in-sample AUC of 0.95 or more.
    """

    features: tuple[int, ...]
    chosen: Floats
    largest: Floats
    in_sample: Floats
    high: Floats
    held_out: Floats  # of every feature, with the labels as they are

    def p(self, name: str) -> float:
        """One-sided: how often a permutation gives as much, (b + 1) / (permutations + 1)."""
        values = getattr(self, name)
        return (int((values[1:] >= values[0] - 1e-9).sum()) + 1) / len(values)

    def bound(self, name: str) -> float:
        """What one permutation in twenty exceeds."""
        return float(np.quantile(getattr(self, name)[1:], 0.95))


def read(rows: Sequence[Sequence[Mapping[int, float]]], of: probing.Prompts, *, permutations: int, seed: int) -> Read:
    """AUCs and their null. `rows[t]` holds all prompts' active features at the place where fold t is tested; an
    in-sample AUC takes each prompt where it is tested."""
    flips = probing.signs(of, draws=permutations, seed=seed)
    own = np.where(of.labels, 1.0, -1.0)
    labels = np.concatenate([own[None], own * flips[:, of.codes]]) > 0
    features = known(*rows)
    tables = [tabled(each, features) for each in rows]
    held, chosen = np.zeros((len(labels), len(features))), np.zeros(len(labels))
    for (train, test), values in zip(of.sides(), tables, strict=True):
        learnt, merit = merits(values[train], labels[:, train])
        signed = 0.5 + np.sign(learnt - 0.5) * (aucs(values[test], labels[:, test]) - 0.5)
        weight = len(test) / len(of.labels)
        held += weight * signed
        best = np.argmax(merit, axis=1)[:, None] if features else None
        chosen += weight * (0.5 if best is None else np.take_along_axis(signed, best, axis=1)[:, 0])
    at_home = np.where(of.folds[:, None] == 0, *tables)
    inside = 0.5 + np.abs(aucs(at_home, labels) - 0.5)
    return Read(
        features=features,
        chosen=chosen,
        largest=held.max(axis=1, initial=0.0),
        in_sample=inside.max(axis=1, initial=0.5),
        high=(inside >= HIGH).sum(axis=1).astype(float),
        held_out=held[0],
    )


# --- choosing ---------------------------------------------------------------------------------------------


def choose(
    rows: Sequence[Mapping[int, float]],
    labels: Sequence[bool],
    *,
    counts: Sequence[int],
    draws: int,
    rng: random.Random,
) -> dict[str, Any]:
    """What the prompts of one fold choose, as plain values: the features ranked best first (as many as the largest
    count), their AUCs, random features of as many for every count, and the means of all of these by label.

    Random ones are active in as large a share of the prompts (`FREQUENCIES`), as far as there are others; `exact` says
    whether. Nothing is chosen from prompts of one label only.
    """
    marks = np.array(labels, dtype=bool)
    features = known(rows)
    if not features or marks.all() or not marks.any():
        return {}
    values = tabled(rows, features)
    found, merit = (each[0] for each in merits(values, marks[None]))
    order = sorted(range(len(features)), key=lambda at: (-merit[at], at))[: max(counts)]
    share = (values != 0).mean(axis=0)
    bins = [int(each) for each in np.searchsorted(FREQUENCIES, share)]
    drawn = {k: as_frequent(bins, order[:k], n=draws, rng=rng) for k in counts}
    sets = {k: [[features[at] for at in chosen] for chosen in one.sets] for k, one in drawn.items()}
    used = sorted({*(features[at] for at in order), *(f for each in sets.values() for chosen in each for f in chosen)})
    means = {side: values[marks == side].mean(axis=0) for side in (False, True)}
    return {
        "features": [features[at] for at in order],
        "aucs": [float(found[at]) for at in order],
        "active in": [round(float(share[at]), 4) for at in order],
        "known": len(features),
        "prompts": len(rows),
        "means": {str(f): [round(float(means[side][features.index(f)]), 6) for side in (False, True)] for f in used},
        "random": {
            str(k): {"sets": sets[k], "possible": min(one.possible, 10**15), "exact": one.exact}
            for k, one in drawn.items()
        },
    }


def as_frequent(bins: Sequence[int], chosen: Sequence[int], *, n: int, rng: random.Random) -> select.Draws:
    """`n` different sets of as many places as were chosen, none of them chosen, with as many of each bin; where a bin
    has too few others the nearest bins fill up, and `exact` is false. None where all others together are too few."""
    others: dict[int, list[int]] = {}
    for at, own in enumerate(bins):
        if at not in chosen:
            others.setdefault(own, []).append(at)
    taken = dict.fromkeys(others, 0)
    exact = True
    for wanted in sorted(bins[at] for at in chosen):
        free = [own for own in others if taken[own] < len(others[own])]
        if not free:
            return select.Draws(sets=(), possible=0, enumerated=True, exact=False)
        nearest = min(free, key=lambda own: (abs(own - wanted), own))
        taken[nearest] += 1
        exact = exact and nearest == wanted
    pools = [(others[own], k) for own, k in sorted(taken.items()) if k]
    return replace(select.from_pools(pools, n=n, rng=rng), exact=exact)


# --- places and labels ------------------------------------------------------------------------------------

KINDS = {"aggregator": "aggregator", "any_slot": "any slot"}
TESTED = ("0", "1")  # folds, as a plan names them
IN_SAMPLE = "in_sample"  # in their place: what all scenarios choose, and are tested with
LABELS = ("conclusion", "rule")


def site(plan: Mapping[str, Any], pair: TokenPair, *, kind: str, tested: str) -> int | None:
    """The position of the slot that the other fold than `tested` ranks highest, of the aggregators or of all downstream
    slots; None where there is none."""
    among = sites.aggregators(pair) if kind == "aggregator" else pair.downstream
    names, ranking = select.slot_names(pair), plan["ranking"][pair.pair.layout]["tested_with"][tested]
    return next(iter(select.in_order(ranking, list(among), lambda p: names[p])), None)


def fold(plan: Mapping[str, Any], pair: TokenPair) -> str:
    """The fold that a pair's scenario is in."""
    return str(plan["ranking"][pair.pair.layout]["folds"][pair.pair.scenario])


def labels(pair: TokenPair) -> dict[str, dict[str, bool]]:
    """What features may tell, by arm: the conclusion (permit or restrict) and, where a prompt has two rules, which of
    them applies (`probing.labels`)."""
    if pair.positions("action.base") and pair.positions("action.target"):
        return probing.labels(pair)
    return {"conclusion": permits(pair.pair)}


def failed(quality: Mapping[str, Any]) -> bool:
    """Whether a dictionary that was trained here has more than half of its features dead: then its training has failed.

    Of a given one that says nothing: it was trained on other text, and is judged on the held-out tokens alone.
    """
    return bool(quality.get("trained here", True)) and quality["dead"] > FAILED  # the first records did not say


def silent(quality: Mapping[str, Any]) -> str:
    """How many features are active in no token that the dictionary was judged on, in words."""
    return f"{quality['dead']:.1%} of its features are active in none of {quality['usual tokens']:,} tokens"


def both(of: probing.Prompts) -> bool:
    """Whether either fold has prompts of both labels."""
    return all(len(set(of.labels[of.folds == tested].tolist())) == len(ARMS) for tested in (0, 1))


def places(plan: Mapping[str, Any], pair: TokenPair) -> dict[str, dict[str, int]]:
    """Where a pair is read, by kind of site and tested fold."""
    found = {kind: {t: site(plan, pair, kind=kind, tested=t) for t in TESTED} for kind in KINDS}
    return {
        kind: {t: p for t, p in by.items() if p is not None} for kind, by in found.items() if None not in by.values()
    }


def choices(
    plan: Mapping[str, Any],
    pairs: Sequence[TokenPair],
    codes: Mapping[str, Mapping[str, Any]],
    *,
    counts: Sequence[int],
    draws: int,
    seed: int,
) -> dict[str, Any]:
    """By kind of site and label: what the pairs of the other fold choose for each fold to be tested with, and what all
    choose (`in_sample`). `codes`: each pair's active features by kind, tested fold and arm."""
    made: dict[str, Any] = {}
    for kind, label, tested in itertools.product(KINDS, LABELS, (*TESTED, IN_SAMPLE)):
        rows, marks = [], []
        for pair in pairs:
            own, told = fold(plan, pair), labels(pair)
            if own == tested or kind not in codes[pair.pair.id] or label not in told:
                continue
            here = codes[pair.pair.id][kind][own if tested == IN_SAMPLE else tested]  # each where it will be tested
            rows += [row(here[arm]) for arm in ARMS]
            marks += [told[label][arm] for arm in ARMS]
        rng = select.generator(seed, *{pair.pair.layout for pair in pairs}, kind, label, tested)
        found = choose(rows, marks, counts=counts, draws=draws, rng=rng)
        made.setdefault(kind, {}).setdefault(label, {})[tested] = found
    return made

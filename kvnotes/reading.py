"""Which label features read at a site, from the instances of a record: AUCs, their null, the best features. No torch.

An instance's measures hold its `labels`, its `fold`, the features `active` by kind of site, tested fold and arm, and
those that the other fold has `chosen`, best first, with their AUCs there. Beside that: what chosen features move
against random ones of the same fold.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvnotes import effects, features, probing
from kvnotes.effects import Scope
from kvnotes.features import ARMS, KINDS, LABELS, TESTED
from kvnotes.records import Instance, Table

SHOWN = 10  # features of a table
WORDS = {
    "chosen": "best feature of the other fold, held-out",
    "largest": "largest of all features, held-out",
    "in_sample": "largest of all features, in-sample",
    "high": f"features of {features.HIGH:g} or more, in-sample",
}


def placed(scope: Scope, kind: str, label: str) -> Callable[[Instance], float | None]:
    """An instance's mean placement (`probing.placements`): over all, that is the AUC of each fold's best feature."""
    rows = [one for one in scope.rows if _scores(one, kind, label) is not None]
    of = prompts(rows, label)
    if not features.both(of):
        return lambda _: None
    scores = [score for one in rows if (score := _scores(one, kind, label)) is not None]
    values = probing.placements(np.concatenate(scores), of).reshape(-1, len(ARMS))
    by = {one.id: float(value) for one, value in zip(rows, values.mean(axis=1), strict=True)}
    return lambda one: by.get(one.id)


def _scores(one: Instance, kind: str, label: str) -> NDArray[np.float64] | None:
    """Both arms' activations of the feature that the other fold finds best, higher for the label by what it saw."""
    best = one.measures.get("chosen", {}).get(kind, {}).get(label, {})
    if not best.get("features"):
        return None
    sign = 1.0 if best["aucs"][0] >= 0.5 else -1.0
    return np.array([sign * row.get(best["features"][0], 0.0) for row in _rows([one], kind, one.measures["fold"])])


def _rows(instances: Sequence[Instance], kind: str, tested: str) -> list[dict[int, float]]:
    """The prompts' active features, both arms of each instance in turn."""
    return [features.row(one.measures["active"][kind][tested][arm]) for one in instances for arm in ARMS]


def prompts(rows: Sequence[Instance], label: str) -> probing.Prompts:
    """Both arms of each instance as rows to be told apart."""
    return probing.Prompts.of(
        [one.measures["labels"][label][arm] for one in rows for arm in ARMS],
        [one.scenario for one in rows for _ in ARMS],
        {one.scenario: int(one.measures["fold"]) for one in rows},
    )


def aucs(scope: Scope, *, permutations: int) -> Table:
    """AUCs and counts beside their null: the same with the labels of whole scenarios changed over, choices and all.
    A site that too few scenarios have has no row."""
    rows: list[list[Any]] = []
    for kind, label in itertools.product(KINDS, LABELS):
        here = [one for one in scope.rows if _scores(one, kind, label) is not None]
        of = prompts(here, label)
        if not effects.enough(here) or not features.both(of):
            continue
        codes = [_rows(here, kind, tested) for tested in TESTED]
        found = features.read(codes, of, permutations=permutations, seed=scope.config.seed)
        for name, words in WORDS.items():
            value, null = float(getattr(found, name)[0]), getattr(found, name)[1:]
            numbers = [round(each, 4) for each in (value, float(null.mean()), found.bound(name), found.p(name))]
            rows.append([KINDS[kind], label, words, *numbers, len(found.features), len(of.labels)])
    columns = ("site", "label", "what", "value", "permuted mean", "permuted .95", "p", "features", "prompts")
    return Table(columns=columns, rows=rows)


def best(scope: Scope) -> Table:
    """Each fold's best features for the conclusion: what they stand for, their AUC for it where they were chosen and
    where they are tested."""
    rows: list[list[Any]] = []
    for kind, tested in itertools.product(KINDS, TESTED):
        known = [one for one in scope.rows if _scores(one, kind, "conclusion") is not None]
        here = [one for one in known if one.measures["fold"] == tested]
        if not effects.enough(known) or not here:
            continue
        chosen, slot = here[0].measures["chosen"][kind]["conclusion"], here[0].measures["sites"][kind][tested]
        codes = features.tabled(_rows(here, kind, tested), chosen["features"])
        held = features.aucs(codes, prompts(here, "conclusion").labels[None])[0]
        for rank, (feature, auc, out) in enumerate(zip(chosen["features"], chosen["aucs"], held, strict=True)):
            up = auc >= 0.5
            cells = [round(float(value if up else 1 - value), 4) for value in (auc, out)]
            rows.append([KINDS[kind], slot, int(tested), rank + 1, feature, "permit" if up else "restrict", *cells])
            if rank + 1 == SHOWN:
                break
    columns = ("site", "slot", "tested fold", "rank", "feature", "higher for", "AUC where chosen", "AUC held-out")
    return Table(columns=columns, rows=rows)


Each = Callable[[Instance, str, str, str], Sequence[float]]  # an instance, kind, family and number of features


def against(scope: Scope, counts: Sequence[int], each: Each) -> Table:
    """The best features beside random ones of the same fold, in recovery. `each` gives how far every set of a family
    moves an instance, in logits.

    There is no p: random sets are drawn from outside the choice, so that no chance draw is the choice itself, and a
    rank among them rejects too often.
    """
    found = [_against(scope, kind, k, each) for kind in KINDS for k in counts]
    columns = ("site", "features", "pairs", "clamped", "random mean", "random largest", "sets a fold")
    return Table(columns=columns, rows=[row for row in found if row is not None])


def _against(scope: Scope, kind: str, k: int, each: Each) -> list[Any] | None:
    here = [one for one in scope.rows if each(one, kind, "clamp", str(k)) and each(one, kind, "random", str(k))]
    gaps = sum(effects.gap(one) for one in here)
    if not effects.enough(here) or not gaps:
        return None
    by_fold = {fold: [one for one in here if int(one.measures["fold"]) == fold] for fold in (0, 1)}
    clamped, drawn = (
        [_summed([each(one, kind, family, str(k)) for one in rows]) for rows in by_fold.values() if rows]
        for family in ("clamp", "random")
    )
    every = [sum(parts) / gaps for parts in zip(*drawn, strict=False)]  # as many as the fewest
    whole = sum(sums[0] for sums in clamped) / gaps
    return [KINDS[kind], k, len(here), whole, sum(every) / len(every), max(every), len(every)]


def _summed(rows: Sequence[Sequence[float]]) -> list[float]:
    """Each set's movement, summed over the instances of a fold, whose sets are the same."""
    return [sum(values) for values in zip(*rows, strict=True)]

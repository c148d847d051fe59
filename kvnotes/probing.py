"""Linear probes on held-out scenarios: what is read where, cross-fitted fits, their permutation null. No torch.

The design is a 2x2 a scenario: two values of the field, and a rule and its inversion, so that the conclusion (permit or
restrict) is independent of the field and of the rule. So is which of two rules applies, the first or the second. A
probe is an L2 logistic regression on one vector a prompt.

- Rotating the vectors into the space that they span is exact for any L2 probe and leaves n numbers of d_model.
- Two-fold cross-fit over scenarios: the probe of one fold scores the prompts of the other. Its regularisation is chosen
  inside the training fold, by the log-loss on scenarios left out of it in groups.
- The null changes the sign of a whole scenario's labels at random: permit and restrict change places in its 2x2, the
  only relabelling that keeps the conclusion independent of field and rule. Every draw is fitted anew, with its own
  regularisation, which logistic fits cannot afford. The test's probe is therefore a ridge classifier, whose scores are
  linear in the labels; its own AUC, not the logistic one's, is compared with its null.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvnotes import select
from kvnotes.config import RunConfig
from kvnotes.effects import FALSE_DISCOVERIES, LEAST_SCENARIOS, Scope, clip, scopes
from kvnotes.instance import Pair, Piece, TokenPair, permits
from kvnotes.records import Effect, HypothesisTest, Instance

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
K = TypeVar("K")
T = TypeVar("T")

ARMS = ("base", "target")
COSTS = (0.1, 1.0, 10.0, 100.0, 1000.0)  # logistic C, at vectors whose mean square distance from their mean is 1
RIDGES = (0.001, 0.01, 0.1, 1.0, 10.0)  # ridge penalties at the same scale, a training prompt
INNER = 4  # groups of training scenarios that the regularisation is chosen with
TIE = 1e-4  # of the largest score: closer scores are the same vector seen through rounding
RUN = 3  # layers in a row that make an onset
FEW = 20  # clusters, below which a percentile bootstrap covers less than it says
FLAT = 1e-6  # spread over size, below which vectors do not differ but by rounding
DECIDING = ("field", "trigger", "rule_value", "action")  # roles that settle the conclusion


# --- what is read -----------------------------------------------------------------------------------------


def slot_classes(pair: TokenPair) -> dict[str, int]:
    """One position a slot class, none before the first changed token: there both arms are the same.

    The last token of each role; `first_action` and `last_action` of the rules; the `aggregator`, which is the last
    token of the run of delimiters that closes the state and the rules (a newline, a section break); `delimiter`, the
    last one of all; and `decision`, where the next token is predicted. A class that a prompt lacks is left out. Nothing
    depends on which answer is right, so that a position tells nothing of the conclusion.
    """
    decision = pair.query[-1]
    roles = {p: pair.slots[p].span.partition(".")[0] for p in range(pair.changed[0], decision)}
    actions = [p for p, role in roles.items() if role == "action"]
    found: dict[str, int | None] = {
        "field": _last(roles, "field"),
        "trigger": pair.changed[-1],
        "rule_value": _last(roles, "rule_value"),
        "first_action": actions[0] if len(actions) > 1 else None,
        "last_action": actions[-1] if actions else None,
        "aggregator": _aggregator(roles),
        "request": _last(roles, "request"),
        "delimiter": _last(roles, "delimiter"),
        "template": _last(roles, "template"),
        "answer_prefix": _last(roles, "answer_prefix"),
        "decision": decision,
    }
    if found["delimiter"] == found["aggregator"]:
        found["delimiter"] = None
    return {name: p for name, p in found.items() if p is not None}


CLASSES = (
    "field",
    "trigger",
    "rule_value",
    "first_action",
    "last_action",
    "aggregator",
    "request",
    "delimiter",
    "template",
    "answer_prefix",
    "decision",
)


def _last(roles: Mapping[int, str], role: str) -> int | None:
    return max((p for p, own in roles.items() if own == role), default=None)


def _aggregator(roles: Mapping[int, str]) -> int | None:
    """The end of the first run of delimiters after the last token that settles the conclusion."""
    settled = max((p for p, role in roles.items() if role in DECIDING), default=min(roles, default=0))
    first = min((p for p, role in roles.items() if p > settled and role == "delimiter"), default=None)
    if first is None:
        return None
    while roles.get(first + 1) == "delimiter":
        first += 1
    return first


def labels(pair: TokenPair) -> dict[str, dict[str, bool]]:
    """What a probe may look for, by arm. `conclusion`: whether the right action is the permitted one. `rule`: whether
    it is the first rule's. Scenario by scenario one is the other or its opposite, since the order of the rules is
    counterbalanced over scenarios: a probe that holds in new ones reads the one or the other, not both."""
    places = {arm: pair.positions(f"action.{arm}") for arm in ("base", "target")}
    first = min(places["base"]) < min(places["target"])
    return {"conclusion": permits(pair.pair), "rule": {"base": first, "target": not first}}


def refilled(pair: Pair, donor: Pair) -> Pair:
    """The pair with the neutral rules of another pair of its layout, all else unchanged."""
    block = _fillers(donor.base.user)
    arms = {}
    for name in ("base", "target"):
        arm = getattr(pair, name)
        low, high = _span(arm.user)
        arms[name] = replace(arm, user=(*arm.user[:low], *block, *arm.user[high:]))
    return replace(pair, **arms)


def _fillers(pieces: Sequence[Piece]) -> Sequence[Piece]:
    low, high = _span(pieces)
    return pieces[low:high]


def _span(pieces: Sequence[Piece]) -> tuple[int, int]:
    """From the first neutral rule's piece to behind the last one's. Raises ValueError where there is none."""
    places = [i for i, piece in enumerate(pieces) if piece.role == "filler"]
    if not places:
        raise ValueError("the prompt has no neutral rules to exchange")
    return places[0], places[-1] + 1


# --- fits -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompts:
    """The rows that a probe is fitted and tested on: label (True permits), scenario and fold (0 or 1) of each."""

    labels: Bools
    scenarios: tuple[str, ...]
    folds: NDArray[np.int64]

    @classmethod
    def of(cls, labels: Sequence[bool], scenarios: Sequence[str], fold: Mapping[str, int]) -> Prompts:
        """Rows whose scenarios' folds are given by name."""
        return cls(
            labels=np.array(labels, dtype=bool),
            scenarios=tuple(scenarios),
            folds=np.array([fold[name] for name in scenarios]),
        )

    @property
    def codes(self) -> NDArray[np.int64]:
        """Each row's scenario as a number, in the order of their names."""
        order = {name: i for i, name in enumerate(sorted(set(self.scenarios)))}
        return np.array([order[name] for name in self.scenarios])

    def sides(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Training rows and tested rows, of fold 0 tested and of fold 1 tested."""
        return [(np.flatnonzero(self.folds != tested), np.flatnonzero(self.folds == tested)) for tested in (0, 1)]

    def inner(self, train: NDArray[np.int64]) -> NDArray[np.int64]:
        """The inner group of each training row: whole scenarios, dealt in turns."""
        names = sorted({self.scenarios[i] for i in train})
        group = {name: at % min(INNER, len(names)) for at, name in enumerate(names)}
        return np.array([group[self.scenarios[i]] for i in train])


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Held-out scores of a cross-fitted probe, a row each, positive for permit; `losses` are the inner log-losses of
    the chosen regularisation, by tested fold: what a layer may be chosen by without a look at what is tested."""

    scores: Floats
    losses: tuple[float, float]
    costs: tuple[float, float]


def rotate(x: NDArray[Any]) -> Floats:
    """[..., rows, width] in coordinates of the space that the rows span, at most as many as rows; all inner products
    stay. Exact for every probe whose penalty does not depend on the axes, such as L2: its weights lie in that space."""
    u, s, _ = np.linalg.svd(np.asarray(x, dtype=np.float64), full_matrices=False)
    return u * s[..., None, :]


def parts(names: Sequence[str]) -> list[list[int]]:
    """The places of each name, by first occurrence."""
    return [[at for at, own in enumerate(names) if own == name] for name in dict.fromkeys(names)]


def condensed(x: NDArray[Any], among: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """[pair, row, layer, width], rotated within each part of the pairs (`among`) at each layer: all that a probe fitted
    within a part can use, in a fraction of the numbers. What is not all finite becomes NaN; columns beyond a part's own
    are 0."""
    width = max((min(x.shape[-1], len(part) * x.shape[1]) for part in among), default=0)
    made = np.full((*x.shape[:-1], width), np.nan, dtype=np.float32)
    for part, layer in itertools.product(map(list, among), range(x.shape[2])):
        rows = x[part, :, layer].reshape(-1, x.shape[-1])
        if np.isfinite(rows).all():
            turned = rotate(rows)
            whole = np.zeros((len(rows), width))
            whole[:, : turned.shape[1]] = turned
            made[part, :, layer] = whole.reshape(len(part), -1, width)
    return made


def cross_fit(x: NDArray[Any], prompts: Prompts) -> Scores:
    """Logistic probes of either fold, tested on the other; x is [prompts, width]."""
    scores, losses, costs = np.zeros(len(x)), [], []
    for train, test in prompts.sides():
        rows = scaled(x[train], x)
        inner = prompts.inner(train)
        found = {cost: _inner_loss(rows[train], prompts.labels[train], inner, cost) for cost in COSTS}
        best = min(found, key=lambda cost: (found[cost], cost))
        scores[test] = _logistic(rows[train], prompts.labels[train], best).decision_function(rows[test])
        losses.append(found[best])
        costs.append(best)
    return Scores(scores=scores, losses=(losses[0], losses[1]), costs=(costs[0], costs[1]))


def scaled(train: Floats, x: Floats) -> Floats:
    """x about the training rows' mean, in units of their root mean square distance from it; zeros where they differ
    by rounding alone. One number for all axes, so a rotation does not matter. In double precision: in single, what a
    fit finds depends on how many threads multiply."""
    train, x = np.asarray(train, dtype=np.float64), np.asarray(x, dtype=np.float64)
    middle = train.mean(axis=0)
    spread = float(np.sqrt(((train - middle) ** 2).sum(axis=1).mean()))
    if spread <= FLAT * float(np.linalg.norm(middle)):
        return np.zeros_like(x)
    return (x - middle) / spread


def _logistic(x: Floats, labels: Bools, cost: float) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=cost, solver="lbfgs", max_iter=2000).fit(x, labels)


def _inner_loss(x: Floats, labels: Bools, inner: NDArray[np.int64], cost: float) -> float:
    """Mean log-loss of the training rows, each scored by a probe that was fitted without its group."""
    total = 0.0
    for group in range(inner.max() + 1):
        kept = inner != group
        scores = _logistic(x[kept], labels[kept], cost).decision_function(x[~kept])
        total += float(np.logaddexp(0.0, np.where(labels[~kept], -scores, scores)).sum())
    return total / len(x)


# --- accuracy and AUC -------------------------------------------------------------------------------------


def correct(scores: Floats, labels: Bools) -> Floats:
    """1 where the score's sign is the label's, 0 where not, 0.5 where the score is 0."""
    signs = np.sign(np.where(np.abs(scores) <= TIE * max(float(np.abs(scores).max()), 1e-12), 0.0, scores))
    return 0.5 + 0.5 * signs * np.where(labels, 1.0, -1.0)


def placements(scores: Floats, prompts: Prompts) -> Floats:
    """A value a row whose mean is the AUC and whose clustered spread is the AUC's.

    The AUC is the share of pairs (a permit row, a restrict row of the same fold) whose scores are in the right order,
    ties counting half; scores of different folds come from different probes and are not compared. Its structural
    components (DeLong, DeLong and Clarke-Pearson 1988, here for clusters as in Obuchowski 1997) carry half the AUC's
    deviation each, hence the factor 2. The probes themselves are taken as given.
    """
    values = np.zeros(len(scores))
    for fold in (0, 1):
        rows = np.flatnonzero(prompts.folds == fold)
        up, down = rows[prompts.labels[rows]], rows[~prompts.labels[rows]]
        wins = _wins(scores[rows], scores[up], scores[down])
        values[up], values[down] = wins.mean(axis=1), wins.mean(axis=0)
    return 2 * values - values.mean()


def majority(prompts: Prompts) -> Floats:
    """1 where the more frequent label of the training fold is a row's own, 0 where not, 0.5 where none is."""
    found = np.zeros(len(prompts.labels))
    for train, test in prompts.sides():
        found[test] = correct(np.full(len(test), float(prompts.labels[train].mean()) - 0.5), prompts.labels[test])
    return found


def auc(scores: Floats, prompts: Prompts) -> float:
    """Share of pairs of a permit and a restrict row, of one fold, that the scores put in the right order."""
    return float(placements(scores, prompts).mean())


def _wins(all_scores: Floats, up: Floats, down: Floats) -> Floats:
    """1 where a permit row scores above a restrict row, 0.5 where they tie; [permit, restrict]."""
    gap = up[:, None] - down[None, :]
    size = TIE * max(float(np.abs(all_scores).max()), 1e-12)
    return np.where(np.abs(gap) <= size, 0.5, gap > 0)


# --- the permutation null ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Null:
    """The ridge probe's AUC with the labels as they are, and with them permuted: one a draw. `scores` are its held-out
    scores with the labels as they are."""

    observed: float
    drawn: Floats
    scores: Floats

    @property
    def p(self) -> float:
        """One-sided: how often a draw is as high, (b + 1) / (draws + 1)."""
        return (int((self.drawn >= self.observed - 1e-12).sum()) + 1) / (len(self.drawn) + 1)

    def bound(self, alpha: float) -> float:
        """What a draw exceeds with probability alpha."""
        return float(np.quantile(self.drawn, 1 - alpha))


def signs(prompts: Prompts, *, draws: int, seed: int) -> Floats:
    """+1 or -1 a scenario, a row a permutation: whether its labels change places. The same for every layer and class.

    All signs changed at once give the same AUC, so the first is always +1. No row is all +1, and none comes twice where
    there are few; where there are no more than `draws` in all, each is there, which makes the test exact.
    """
    free = max(0, len(set(prompts.scenarios)) - 1)
    rng = np.random.default_rng(seed)
    if free > 20:  # a million and more: draws do not meet
        chosen = rng.integers(0, 2, size=(draws, free))
    else:
        number = 2**free - 1
        codes = 1 + (np.arange(number) if number <= draws else rng.choice(number, size=draws, replace=False))
        chosen = codes[:, None] >> np.arange(free) & 1
    found: Floats = np.concatenate([np.ones((len(chosen), 1)), 1.0 - 2.0 * chosen], axis=1, dtype=np.float64)
    return found


def null(x: NDArray[Any], prompts: Prompts, flips: Floats) -> Null:
    """The cross-fitted ridge probe's AUC on the labels as they are and on each permutation of them."""
    own = np.where(prompts.labels, 1.0, -1.0)
    targets = np.concatenate([own[None], own * flips[:, prompts.codes]])  # [1 + draws, prompts]
    total, scores = np.zeros(len(targets)), np.zeros(len(x))
    for train, test in prompts.sides():
        rows = scaled(x[train], x)
        found = _ridge(rows[train], rows[test], targets[:, train], prompts.inner(train))
        total += _many_aucs(found, targets[:, test] > 0) * len(test)
        scores[test] = found[0]
    values = total / len(x)
    return Null(observed=float(values[0]), drawn=values[1:], scores=scores)


def largest(nulls: Sequence[Null]) -> Null:
    """Of several layers, the largest AUC and its null under the same permutations: the price of looking at all."""
    best = max(nulls, key=lambda one: one.observed)
    return replace(best, drawn=np.max(np.stack([one.drawn for one in nulls]), axis=0))


def _ridge(train: Floats, test: Floats, targets: Floats, inner: NDArray[np.int64]) -> Floats:
    """Test scores of every row of targets, each with the penalty whose left-out squared error is least for it."""
    gram, across = train @ train.T, test @ train.T
    losses = []
    for penalty in RIDGES:
        left_out = np.zeros_like(gram)
        for group in range(inner.max() + 1):
            out, kept = np.flatnonzero(inner == group), np.flatnonzero(inner != group)
            left_out[np.ix_(out, kept)] = _smoother(gram[np.ix_(kept, kept)], gram[np.ix_(out, kept)], penalty)
        losses.append(((targets - targets @ left_out.T) ** 2).mean(axis=1))
    best = np.argmin(np.stack(losses), axis=0)
    scores = np.zeros((len(targets), len(test)))
    for at, penalty in enumerate(RIDGES):
        mine = best == at
        scores[mine] = targets[mine] @ _smoother(gram, across, penalty).T
    return scores


def _smoother(gram: Floats, across: Floats, penalty: float) -> Any:
    """The matrix that takes training targets to scores: kernel ridge regression."""
    return np.linalg.solve(gram + penalty * len(gram) * np.eye(len(gram)), across.T).T


def _many_aucs(scores: Floats, up: Bools) -> Floats:
    """The AUC of each row, by ranks (Mann and Whitney), ties counting half."""
    from scipy.stats import rankdata

    size = np.maximum(np.abs(scores).max(axis=1, keepdims=True), 1e-12)
    ranks = rankdata(np.round(scores / size / TIE), axis=1)
    ups = up.sum(axis=1)
    downs = up.shape[1] - ups
    wins: Floats = np.where(up, ranks, 0.0).sum(axis=1) - ups * (ups + 1) / 2
    return wins / (ups * downs)


# --- layers -----------------------------------------------------------------------------------------------


@contextmanager
def one_thread() -> Iterator[None]:
    """Small products on one thread: on a busy machine threads that wait for each other take five times as long."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1, user_api="blas"):
        yield


@one_thread()
def fit_layers(x: NDArray[Any], prompts: Prompts) -> list[Scores]:
    """A cross-fitted probe a layer; x is [prompts, layer, width]."""
    return [cross_fit(x[:, layer], prompts) for layer in range(x.shape[1])]


@one_thread()
def null_layers(x: NDArray[Any], prompts: Prompts, flips: Floats) -> list[Null]:
    """The permutation null of every layer, under the same permutations; x is [prompts, layer, width]."""
    return [null(x[:, layer], prompts, flips) for layer in range(x.shape[1])]


def chosen_layers(fits: Sequence[Scores]) -> tuple[int, int]:
    """The layer that tests fold 0, and the one that tests fold 1: least inner log-loss in the other fold."""
    first, second = (int(np.argmin([fit.losses[tested] for fit in fits])) for tested in (0, 1))
    return first, second


def at_layers(fits: Sequence[Scores], prompts: Prompts, layers: tuple[int, int]) -> Floats:
    """Held-out scores of each fold at its own layer."""
    return np.where(prompts.folds == 0, fits[layers[0]].scores, fits[layers[1]].scores)


# --- depths -----------------------------------------------------------------------------------------------


def first_from(holds: Sequence[bool] | Bools) -> int | None:
    """The first layer from which something holds to the last; None where it does not hold at the last."""
    found = None
    for layer in reversed(range(len(holds))):
        if not holds[layer]:
            break
        found = layer
    return found


def onset(holds: Sequence[bool] | Bools) -> int | None:
    """The first of `RUN` layers in a row at which something holds, or of the last two; None where there is none. Unlike
    `first_from`, it does not ask that it holds to the last: what is read may fade once it has been used."""
    return next((layer for layer in range(len(holds) - 1) if all(holds[layer : layer + RUN])), None)


def depths(holds: Bools) -> Floats:
    """`first_from` of each row of [draw, layer]; the number of layers where it does not hold at the last."""
    tail = np.cumprod(holds[:, ::-1], axis=1)
    return holds.shape[1] - tail.sum(axis=1).astype(np.float64)


def onsets(holds: Bools) -> Floats:
    """`onset` of each row of [draw, layer]; the number of layers where there is none."""
    layers = holds.shape[1]
    found = [onset(row) for row in holds]
    return np.array([layers if one is None else one for one in found], dtype=np.float64)


def resampled(scenarios: int, *, draws: int, seed: int) -> Floats:
    """How often each scenario is drawn, a row a bootstrap resample of whole scenarios."""
    even = np.full(scenarios, 1 / max(1, scenarios))
    return np.random.default_rng(seed).multinomial(scenarios, even, size=draws).astype(np.float64)


def resampled_aucs(scores: Floats, prompts: Prompts, counts: Floats) -> Floats:
    """The AUC of each resample of the scenarios, the probe taken as given; NaN where a fold is not drawn at all."""
    codes, scenarios = prompts.codes, counts.shape[1]
    total, weight = np.zeros(len(counts)), np.zeros(len(counts))
    for fold in (0, 1):
        rows = np.flatnonzero(prompts.folds == fold)
        up, down = rows[prompts.labels[rows]], rows[~prompts.labels[rows]]
        won, all_ = np.zeros((scenarios, scenarios)), np.zeros((scenarios, scenarios))
        at = (codes[up][:, None], codes[down][None, :])
        np.add.at(won, at, _wins(scores[rows], scores[up], scores[down]))
        np.add.at(all_, at, 1.0)
        drawn = counts @ np.bincount(codes[rows], minlength=scenarios)
        with np.errstate(invalid="ignore"):
            found = np.einsum("bi,ij,bj->b", counts, won, counts) / np.einsum("bi,ij,bj->b", counts, all_, counts)
        total, weight = total + np.where(drawn > 0, found * drawn, 0.0), weight + drawn
    return total / weight


# --- within a scenario ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewritten:
    """The prompts of one 2x2, each written with several sets of neutral rules (filler seeds)."""

    seeds: NDArray[np.int64]  # a row each, 0..n-1
    fields: Bools
    labels: Bools


def within(x: NDArray[Any], rows: Rewritten, rng: np.random.Generator) -> dict[str, Floats]:
    """Accuracies of ridge probes inside one scenario, a number a cell; x is [cells, rows, width].

    `field` and `conclusion` are tested on filler seeds that the probe has not seen. So is `control`: each seed has a
    random label, which nothing can predict, so what exceeds 0.5 is a leak between the halves. `memorised` is the
    control task of Hewitt and Liang (2019): the same random labels by seed, fitted on one field's prompts and tested on
    the other's, so that the seeds are known: how well any such vector can be told from any other.
    """
    count = int(rows.seeds.max()) + 1
    by_seed = [half[rows.seeds] for half in halves(count)]
    by_field = [rows.fields, ~rows.fields]
    dealt = np.zeros(count, dtype=bool)
    for half in halves(count):  # as many of either label in each half
        dealt[rng.permutation(np.flatnonzero(half))[: count // 4]] = True
    tasks = {
        "field": (rows.fields, by_seed),
        "conclusion": (rows.labels, by_seed),
        "control": (dealt[rows.seeds], by_seed),
        "memorised": (dealt[rows.seeds], by_field),
    }
    return {
        name: np.mean([held_out(x, labels, test) for test in tests], axis=0) for name, (labels, tests) in tasks.items()
    }


def held_out(x: Floats, labels: Bools, test: Bools) -> Floats:
    """Accuracy on the `test` rows of ridge probes (penalty 0.1) fitted on the others, a number a cell; x is [cells,
    rows, width]. For the few rows of one scenario, where no penalty can be chosen."""
    kept = ~test
    target = np.where(labels, 1.0, -1.0)
    middle = target[kept].mean()
    found = np.zeros(len(x))
    for cell, rows in enumerate(x):
        near = scaled(rows[kept], rows)
        weights = _smoother(near[kept] @ near[kept].T, near[test] @ near[kept].T, 0.1)
        found[cell] = correct(weights @ (target[kept] - middle) + middle, labels[test]).mean()
    return found


def halves(count: int) -> list[Bools]:
    """Both ways to test on one half of some things and fit on the other: the odd ones and the even ones."""
    odd = np.arange(count) % 2 == 1
    return [odd, ~odd]


@dataclass(frozen=True, kw_only=True, eq=False)
class Depth:
    """A layer from which something holds, and the same of each bootstrap resample of the scenarios; the number of
    layers stands for "at none"."""

    estimate: float | None
    drawn: Floats
    n: int
    clusters: int
    warning: str | None = None


# --- from scores to effects -------------------------------------------------------------------------------


def complete(instances: Sequence[Instance]) -> list[Instance]:
    """The instances whose whole 2x2 is among them: both pairs of their group."""
    count = Counter(one.group for one in instances)
    return [one for one in instances if count[one.group] == 2]


@dataclass(frozen=True, kw_only=True, eq=False)
class Fits:
    """All probes for one label on some whole 2x2 designs, by what they read (such as a slot class): a fit and, where
    asked for, a null a layer."""

    rows: Sequence[Instance]
    prompts: Prompts
    trained: Mapping[str, Sequence[Scores]]
    nulls: Mapping[str, Sequence[Null]]

    def area(self, scope: Scope, one: Scores, *, name: str = "auc", label: str = "AUC", **more: Any) -> Effect:
        """The AUC of held-out scores, with its interval."""
        return bounded(scope, name, label, by_pair(self.rows, placements(one.scores, self.prompts)), **more)

    def at_chosen(self, name: str) -> Scores | None:
        """Held-out scores, each fold at the layer that the other fold chose; None where nothing was fitted."""
        if name not in self.trained:
            return None
        layers = chosen_layers(self.trained[name])
        return replace(self.trained[name][0], scores=at_layers(self.trained[name], self.prompts, layers))


def fit_all(
    rows: Sequence[Instance], cells: Mapping[str, NDArray[Any]], *, label: str, permutations: int, seed: int
) -> Fits:
    """Probes for a label of `labels` (as the instances' measures hold it) on every [pair, arm, layer, width] of finite
    numbers; none where the rows are of fewer scenarios than are reported."""
    names = [one.scenario for one in rows for _ in ARMS]
    prompts = Prompts.of(
        [one.measures["labels"][label][arm] for one in rows for arm in ARMS], names, select.folds(names, seed)
    )
    enough = len(set(names)) >= LEAST_SCENARIOS
    flat = {name: x.reshape(len(names), *x.shape[2:]) for name, x in cells.items()} if enough else {}
    known = {name: x for name, x in flat.items() if np.isfinite(x).all()}
    flips = signs(prompts, draws=permutations, seed=seed) if permutations else None
    return Fits(
        rows=rows,
        prompts=prompts,
        trained={name: fit_layers(x, prompts) for name, x in known.items()},
        nulls={} if flips is None else {name: null_layers(x, prompts, flips) for name, x in known.items()},
    )


def fitted(
    instances: Sequence[Instance],
    config: RunConfig,
    floor: float,
    *,
    arrays: Mapping[str, NDArray[Any]],
    fit: Callable[[list[Instance], dict[str, NDArray[Any]]], T],
) -> Iterator[tuple[Scope, T]]:
    """What a summary goes over (see `effects.scopes`), each with what `fit` makes of its whole 2x2 designs and of their
    rows of the arrays, which stand in the order of the measured instances; once, where all pairs pass the gate."""
    places = {one.id: at for at, one in enumerate(one for one in instances if one.status != "skipped")}
    known: dict[tuple[int, ...], T] = {}
    for scope in scopes(instances, config, floor):
        rows = complete(scope.rows)
        at = tuple(places[one.id] for one in rows)
        if at not in known:
            known[at] = fit(rows, {name: x[list(at)] for name, x in arrays.items()})
        yield scope, known[at]


def by_pair(rows: Sequence[Instance], values: Floats) -> dict[str, float]:
    """The mean over each pair's two prompts, which stand next to one another, by instance id."""
    return {one.id: float(values[2 * i : 2 * i + 2].mean()) for i, one in enumerate(rows)}


def bounded(
    scope: Scope,
    name: str,
    label: str,
    values: Mapping[str, float],
    *,
    test: HypothesisTest | None = None,
    control: bool = False,
) -> Effect:
    """The mean over pairs of accuracies or AUC placements, by instance id, within 0 and 1; pairs without one are left
    out. Where all are right, or none is, the interval is the exact one for as many trials as there are scenarios."""
    from kvnotes import stats

    found = scope.mean(name, label, lambda one: values.get(one.id), control=control)
    if found.estimate is None:
        return found
    low, high, method, warning = found.low, found.high, found.method, found.warning
    if low == high and found.estimate in (0.0, 1.0):
        exact = stats.clopper_pearson(round(found.estimate) * found.clusters, found.clusters, level=found.level)
        low, high, method, warning = exact.low, exact.high, f"{exact.method} over scenarios", None
    changes = {"low": clip(low), "high": clip(high), "method": method, "warning": warning}
    return found.model_copy(update={**changes, "test": test})


def verdicts(nulls: Mapping[K, Sequence[Null]]) -> dict[K, HypothesisTest]:
    """For each place, by its layers' nulls, the test of the largest AUC of any layer against the largest of every
    permutation (see `largest`); p is corrected over the places (Benjamini and Hochberg)."""
    from kvnotes import stats

    found = {name: largest(own) for name, own in nulls.items()}
    adjusted = stats.benjamini_hochberg([one.p for one in found.values()]).tolist() if found else []
    return {
        name: HypothesisTest(
            name=f"largest ridge AUC of any layer, {len(one.drawn)} permutations by scenario, BH over {len(found)}",
            statistic=one.observed,
            p=p,
            margin=None,
            conclusion="decodable" if p <= FALSE_DISCOVERIES else "inconclusive",
        )
        for (name, one), p in zip(found.items(), adjusted, strict=True)
    }


def depth_effect(scope: Scope, name: str, label: str, found: Depth) -> Effect:
    """A depth, or a difference of two, with the percentiles of its bootstrap; None, with the reason, without one."""
    tail = (1 - scope.config.level) / 2
    low, high = (None, None) if found.estimate is None else np.quantile(found.drawn, [tail, 1 - tail]).tolist()
    warning = found.warning
    if found.estimate is not None and found.clusters < FEW:
        warning = f"percentiles over {found.clusters} clusters: true coverage can lie below {scope.config.level:g}"
    return Effect(
        name=name,
        label=label,
        layout=scope.layout,
        gated=scope.gated,
        estimate=found.estimate,
        low=low,
        high=high,
        level=scope.config.level,
        method="none" if found.estimate is None else f"percentiles of {len(found.drawn)} resamples of scenarios",
        n=found.n,
        clusters=found.clusters,
        mean_of_ratios=None,
        unresolved=False,
        warning=warning,
        test=None,
        control=False,
    )

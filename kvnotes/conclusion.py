"""The conclusion at a site's residual: which site and layer, and the directions that tell conclusions apart.

Appendix D (2) and (5) of "Models Take Notes at Prefill" (arXiv 2606.17107). The causal layer is the one whose residual,
patched at a pair's own best slot with all later positions and layers recomputed, moves the decision most; site and
layer are chosen on one fold of the scenarios and tested on the other. A direction is a difference of means over the
gated pairs of all OTHER scenarios (as the paper's: one scenario left out): the mean over the field's values within a
scenario first, so that the field is balanced, then over scenarios. What is told apart is a code: `conclusion` is the
paper's. Where scenarios share no action words, as here, a model may write the same thing in other terms: which of the
two rules applies (`rule`), or whether the one does that the slot is named after (`row`: the target's). The shared code
is the one whose difference of means is longest on the other fold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvnotes import effects, probing, select, sites
from kvnotes.config import RunConfig
from kvnotes.instance import TokenPair, permits
from kvnotes.records import Effect, Instance, Measures

if TYPE_CHECKING:
    from torch import Tensor

    from kvnotes.interventions import ActivationPatch, Together
    from kvnotes.resume import Gathered
    from kvnotes.sweep import Trial

Floats = NDArray[np.float64]

KINDS = {"aggregator": "best aggregator", "any_slot": "best slot of any kind"}
CODES = {
    "conclusion": "permit less restrict",
    "rule": "first rule less second",
    "row": "target's rule less base's",
}
JOINT = "joint"  # all aggregators at once
KEPT = 8  # slots of a pair beside its aggregators whose residuals are gathered: the best by single effect
TIE = 1e-3  # of recovery: layers closer than this to the best are as good, and the first of them is taken
LEAST = 2  # other scenarios that a direction needs
NOTHING = 1e-5  # a difference of residuals below this share of the residual is rounding


# --- the survey -------------------------------------------------------------------------------------------


def survey(trial: Trial, *, every: int) -> Measures:
    """What `sites.survey` measures, and at `every` so many layers the margins with the target's residual at the pair's
    own best slot of each kind, and at all aggregators together; everything after it recomputed."""
    pair, found = trial.pair, sites.survey(trial)
    order = select.best(dict(zip(pair.downstream, found["single"], strict=True)))
    places: dict[str, tuple[int, ...]] = {kind: first(order, candidates(pair, kind)) for kind in KINDS}
    places[JOINT] = sites.aggregators(pair)
    layers = range(0, trial.model.shape["layers"], every)
    wanted = {where: name for name, where in places.items() if where}
    margins = trial.margins([full(f"{name}:{i}", where, i) for where, name in wanted.items() for i in layers])
    return {
        **found,
        "signs": signs(pair),
        "permit field": getattr(pair.pair, "base" if permits(pair.pair)["base"] else "target").field,
        "own full": {
            name: {str(i): round(margins[f"{wanted[where]}:{i}"], 6) for i in layers} if where else {}
            for name, where in places.items()
        },
    }


def signs(pair: TokenPair) -> dict[str, int]:
    """By code, which way a pair goes from base to target: 1 where the target permits, or the first rule is its, or
    always; else -1. A layout without rules has no such code."""
    found = {"conclusion": permits(pair.pair)["target"], "row": True}
    if pair.positions("action.base") and pair.positions("action.target"):
        found["rule"] = probing.labels(pair)["rule"]["target"]
    return {code: 1 if found[code] else -1 for code in CODES if code in found}


def first(order: Sequence[int], among: Sequence[int]) -> tuple[int, ...]:
    """The first of an order that is among some positions, if any."""
    return tuple(p for p in order if p in set(among))[:1]


def candidates(pair: TokenPair, kind: str) -> tuple[int, ...]:
    """The positions that a kind of site may be."""
    return sites.aggregators(pair) if kind == "aggregator" else pair.downstream


def full(name: str, positions: Sequence[int], layer: int) -> Together:
    """The target's residual after a layer at some positions of base."""
    from kvnotes.interventions import Together

    return Together(name=name, parts=[patch(f"{name}@{p}", p, layer, donor="target") for p in positions])


def patch(name: str, position: int, layer: int, **how: Any) -> ActivationPatch:
    """A patch of the residual after a layer, into base unless said otherwise."""
    from kvnotes.interventions import ActivationPatch

    usual: dict[str, Any] = {"point": "resid_post", "into": "base", "layer": layer, "position": position}
    return ActivationPatch(name=name, **{**usual, **how})


def gather(trial: Trial, measures: Measures) -> dict[str, np.ndarray]:
    """The residual after each layer of both arms, [arm, layer, d_model], by slot: of all aggregators, and of the
    `KEPT` other slots that move this pair most."""
    pair, names = trial.pair, select.slot_names(trial.pair)
    order = select.best(dict(zip(pair.downstream, measures["single"], strict=True)))
    places = sorted({*sites.aggregators(pair), *order[:KEPT]})
    both = [trial.capture(arm, "resid_post", places).float().cpu().numpy() for arm in ("base", "target")]
    return {names[p]: np.stack([arm[:, at] for arm in both]) for at, p in enumerate(places)}


# --- between the passes -----------------------------------------------------------------------------------


def prepare(instances: Sequence[Instance], config: RunConfig, gathered: Gathered) -> dict[str, Any]:
    """The sites' rankings, the causal layers by kind, whose residuals may be learned from, and by kind and layer the
    cosine between the directions of the two folds, at the slot that either is tested at."""
    learned = {
        one.id: {
            "layout": one.layout,
            "scenario": one.scenario,
            "signs": one.measures["signs"],
            "field": one.measures["permit field"],
        }
        for one in instances
        if one.status == "included"
    }
    plan = sites.prepare(instances, config) | {
        "layers": {
            kind: select.crossfit(instances, config.seed, lambda rows, kind=kind: causal_layer(rows, kind))
            for kind in (*KINDS, JOINT)
        },
        "learned": learned,
    }
    found = {kind: _folds(plan, gathered, kind) for kind in KINDS}
    named = {name: {kind: _each(some, name) for kind, some in found.items()} for name in ("cosines", "shared")}
    return plan | named


def _each(found: Mapping[str, Mapping[str, Mapping[str, Any]]], name: str) -> dict[str, dict[str, Any]]:
    return {layout: {fold: one[name] for fold, one in folds.items()} for layout, folds in found.items()}


def causal_layer(rows: Sequence[Instance], kind: str) -> int | None:
    """The layer whose full patch at the pairs' own best sites recovers most; the first of those that are as good."""
    here = [one for one in rows if one.measures["own full"][kind]]
    means = select.mean_effects(here, lambda one: _by_layer(one, kind))
    best = max(means.values(), default=None)
    return None if best is None else next(int(name) for name, value in means.items() if value >= best - TIE)


def _by_layer(one: Instance, kind: str) -> dict[str, float]:
    return {layer: effects.moved(one, margin) for layer, margin in one.measures["own full"][kind].items()}


def _folds(plan: Mapping[str, Any], gathered: Gathered, kind: str) -> dict[str, dict[str, dict[str, Any]]]:
    """By layout and fold, at the slot that the fold is tested at: by code and layer the cosine of the direction learned
    on it and the one learned on the other; and the shared code at its causal layer, by the other fold alone."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for layout, halves in plan["ranking"].items():
        here = {name: one for name, one in plan["learned"].items() if one["layout"] == layout}
        found[layout] = {}
        for fold, ranking in halves["tested_with"].items():
            sides = [
                [key for key, one in here.items() if (str(halves["folds"][one["scenario"]]) == fold) == own]
                for own in (True, False)
            ]
            slot = next((slot for slot in ranking if kind != "aggregator" or is_aggregator(slot)), None)
            own, other = (None if slot is None else Learned.of(plan, gathered, ids, slot) for ids in sides)
            layer = plan["layers"][kind][layout]["tested_with"][fold]
            found[layout][fold] = {
                "cosines": {} if own is None or other is None else {c: _cosine(own, other, code=c) for c in own.signs},
                "shared": next(iter(CODES)) if other is None or layer is None else longest(other, layer),
            }
    return found


def longest(learned: Learned, layer: int) -> str:
    """The code whose difference of means at a layer is longest; the first of equals."""
    lengths = {c: float(np.linalg.norm(learned.direction(c)[layer])) for c in CODES if c in learned.signs}
    return max(lengths, key=lambda code: lengths[code])


def _cosine(one: Learned, other: Learned, *, code: str) -> list[float]:
    products = unit(one.direction(code)) * unit(other.direction(code))
    return [round(float(value), 4) for value in products.sum(axis=-1)]


def is_aggregator(slot: str) -> bool:
    """Whether a slot is of the aggregators' class."""
    return select.slot_class(slot) == sites.AGGREGATOR


# --- what is learned --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Learned:
    """What the residuals of some pairs at one slot say. `arms` is [pair, base or target, layer, d_model]; `signs`, by
    code, which way each pair goes; `weights`, a number a pair, balance the field within scenarios and the scenarios."""

    arms: NDArray[np.float32]
    signs: Mapping[str, NDArray[np.int64]]
    weights: Floats
    scenarios: tuple[str, ...]

    @classmethod
    def of(
        cls, plan: Mapping[str, Any], gathered: Gathered, ids: Sequence[str], slot: str, *, layer: int | None = None
    ) -> Learned | None:
        """Of those of the pairs that have the slot; None where they are of fewer than `LEAST` scenarios. With `layer`,
        of that layer alone."""
        known, arms = residuals(gathered, tuple(plan["learned"]), slot, layer)
        wanted = set(ids)
        rows = [at for at, name in enumerate(known) if name in wanted]
        about = [plan["learned"][known[at]] for at in rows]
        if len({one["scenario"] for one in about}) < LEAST:
            return None
        return cls(
            arms=arms[rows],
            signs={code: np.array([one["signs"][code] for one in about]) for code in about[0]["signs"]},
            weights=balanced([(one["scenario"], one["field"]) for one in about]),
            scenarios=tuple(one["scenario"] for one in about),
        )

    def direction(self, code: str) -> Floats:
        """A code's difference of means by layer."""
        changes = (self.arms[:, 1] - self.arms[:, 0]).astype(np.float64)
        return np.einsum("p,pld->ld", self.weights * self.signs[code], changes)

    @property
    def middle(self) -> Floats:
        """The mean of both arms, by layer."""
        return np.einsum("p,pald->ld", self.weights / 2, self.arms.astype(np.float64))


def balanced(cells: Sequence[tuple[str, str]]) -> Floats:
    """Weights of pairs, by (scenario, field): equal over scenarios, within one over its fields, then over pairs."""
    of_cell = {cell: cells.count(cell) for cell in cells}
    fields: dict[str, int] = {}
    for scenario, _ in of_cell:
        fields[scenario] = fields.get(scenario, 0) + 1
    return np.array([1 / (len(fields) * fields[cell[0]] * of_cell[cell]) for cell in cells])


@lru_cache(maxsize=64)
def residuals(
    gathered: Gathered, ids: tuple[str, ...], slot: str, layer: int | None
) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    """The pairs that have a slot, and its residuals, [pair, arm, layer, d_model]; of all layers or of one."""
    cut = slice(None) if layer is None else slice(layer, layer + 1)
    found = {name: array[:, cut] for name in ids if (array := gathered.array(name, slot)) is not None}
    return tuple(found), np.stack([*found.values()]) if found else np.zeros((0, 2, 0, 0), dtype=np.float32)


def unit(vectors: NDArray[Any]) -> Floats:
    """Each vector at length 1; zeros stay."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(lengths == 0, 1.0, lengths)


def logistic(learned: Learned, layer: int) -> Floats:
    """The direction of an L2 logistic probe for the conclusion at a layer, of length 1; zeros where nothing differs.
    Its penalty is chosen by the log-loss on scenarios left out in groups, as in the linear study."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GroupKFold, cross_val_predict

    x = learned.arms[:, :, layer].reshape(-1, learned.arms.shape[-1]).astype(np.float64)
    near = probing.scaled(x, x)
    if not near.any():
        return np.zeros(x.shape[1])
    turned, sizes, axes = np.linalg.svd(near, full_matrices=False)
    rows, up = turned * sizes, learned.signs["conclusion"] > 0
    labels = np.stack([~up, up], axis=1).ravel()  # of base and target
    groups = np.repeat(learned.scenarios, 2)
    parts = GroupKFold(min(probing.INNER, len(set(learned.scenarios))))

    def loss(cost: float) -> float:
        probe = LogisticRegression(C=cost, max_iter=2000)
        scores = cross_val_predict(probe, rows, labels, groups=groups, cv=parts, method="decision_function")
        wrong = np.where(labels, -1.0, 1.0) * np.asarray(scores, dtype=np.float64)
        return float(np.logaddexp(0.0, wrong).mean())

    best = min(probing.COSTS, key=loss)
    return unit(LogisticRegression(C=best, max_iter=2000).fit(rows, labels).coef_[0] @ axes)


# --- a pair's site ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """Where one pair is tested: the position, its slot, the causal layer (all three by the other fold's choice), the
    pair's own difference target - base by layer, and what other scenarios' residuals say there."""

    kind: str
    position: int
    slot: str
    layer: int
    difference: Floats  # [layer, d_model]
    size: float  # of the base's residual at the causal layer
    signs: Mapping[str, int]  # by code, which way the pair itself goes
    shared: str  # the code that scenarios of the other fold share most
    learned: Learned

    @property
    def codes(self) -> list[str]:
        """The codes that the pair's layout has."""
        return [code for code in CODES if code in self.signs and code in self.learned.signs]

    def directions(self, code: str = "conclusion") -> Floats:
        """A code's unit direction at each layer, which points from what the base says to what the target does."""
        return unit(self.signs[code] * self.learned.direction(code))

    @property
    def written(self) -> bool:
        """Whether the arms differ here by more than rounding."""
        return bool(np.linalg.norm(self.difference[self.layer]) > NOTHING * self.size)


def at(trial: Trial, plan: Mapping[str, Any], gathered: Gathered, kind: str) -> Site | None:
    """The pair's site of a kind; None where it has none, or where too few other scenarios have that slot."""
    pair = trial.pair
    position = sites.best(plan, pair, among=candidates(pair, kind))
    layer = chosen_layer(plan, pair, kind)
    if position is None or layer is None:
        return None
    slot = select.slot_names(pair)[position]
    learned = Learned.of(plan, gathered, others(plan, pair), slot)
    if learned is None:
        return None
    base, target = (trial.capture(arm, "resid_post", [position])[:, 0].double().cpu().numpy() for arm in _ARMS)
    return Site(
        kind=kind,
        position=position,
        slot=slot,
        layer=layer,
        difference=target - base,
        size=float(np.linalg.norm(base[layer])),
        signs=signs(pair),
        shared=shared(plan, pair, kind),
        learned=learned,
    )


_ARMS = ("base", "target")


def chosen_layer(plan: Mapping[str, Any], pair: TokenPair, kind: str) -> int | None:
    """The causal layer that a pair is tested at."""
    return select.choice(plan["layers"][kind], layout=pair.pair.layout, scenario=pair.pair.scenario)


def fold_of(plan: Mapping[str, Any], pair: TokenPair) -> str:
    """The fold that a pair's scenario is in."""
    return str(plan["ranking"][pair.pair.layout]["folds"][pair.pair.scenario])


def cosines(plan: Mapping[str, Any], pair: TokenPair, kind: str) -> dict[str, list[float]]:
    """By code and layer, the cosine between the folds' directions at the slot that the pair's fold is tested at."""
    return plan["cosines"][kind][pair.pair.layout].get(fold_of(plan, pair), {})


def shared(plan: Mapping[str, Any], pair: TokenPair, kind: str) -> str:
    """The shared code that a pair is tested with."""
    return plan["shared"][kind][pair.pair.layout][fold_of(plan, pair)]


def others(plan: Mapping[str, Any], pair: TokenPair) -> list[str]:
    """The gated pairs of the same layout and other scenarios."""
    own = pair.pair
    return [
        name for name, one in plan["learned"].items() if one["layout"] == own.layout and one["scenario"] != own.scenario
    ]


def random_directions(
    trial: Trial, plan: Mapping[str, Any], config: RunConfig, *, kind: str, n: int, outside: Floats
) -> Floats:
    """`n` random unit vectors orthogonal to those of `outside`, [vector, d_model]. They are drawn once a fold: two
    scenarios of one fold have the same draws, each less what lies along its own directions."""
    names = trial.pair.pair.layout, fold_of(plan, trial.pair), kind
    rng = np.random.default_rng(select.generator(config.seed, *names).getrandbits(64))
    drawn = rng.standard_normal((n, outside.shape[-1]))
    axes, sizes, _ = np.linalg.svd(outside.T, full_matrices=False)
    axes = axes[:, sizes > 1e-6 * max(1.0, float(sizes.max(initial=0.0)))]
    return unit(drawn - drawn @ axes @ axes.T)


def tensor(trial: Trial, vector: NDArray[Any]) -> Tensor:
    """A vector as the model's activations are."""
    import torch

    return torch.tensor(vector, dtype=trial.model.dtype, device=trial.model.device)


def folded(margins: Mapping[str, float]) -> dict[str, Any]:
    """Margins to 1e-6 logits, which is under any noise floor and keeps records small; those named `family:member` as
    the family's list, in order."""
    made: dict[str, Any] = {}
    for name, margin in margins.items():
        family, several, _ = name.partition(":")
        if several:
            made.setdefault(family, []).append(round(margin, 6))
        else:
            made[name] = round(margin, 6)
    return made


# --- effects ----------------------------------------------------------------------------------------------


def ratio(
    scope: effects.Scope,
    name: str,
    label: str,
    top: Callable[[Instance], float | None],
    whole: Callable[[Instance], float],
    *,
    least: float = 0.0,
) -> Effect:
    """A share that is no recovery: the sum of `top` over the sum of `whole`, each scenario a cluster, over the
    instances that have a `top`. None, with the reason, where the wholes' mean is not above `least`, and where it cannot
    be told from 0, which leaves no interval: a share of that is noise."""
    from kvnotes import stats

    here, c = scope.having(top), scope.config
    made = here.mean(name, label, top)
    if made.estimate is None:
        return made
    tops, wholes = [float(top(one) or 0.0) for one in here.rows], [whole(one) for one in here.rows]
    nothing = {"estimate": None, "low": None, "high": None, "method": "none"}
    if abs(sum(wholes)) <= least * len(wholes):
        return made.model_copy(update=nothing | {"warning": "what it would be a share of is within the noise"})
    try:
        found = stats.interval(
            tops,
            [one.scenario for one in here.rows],
            denominators=wholes,
            level=c.level,
            resamples=c.resamples,
            seed=c.seed,
        )
    except stats.StatsError as err:
        return made.model_copy(update=nothing | {"warning": str(err)})
    if found.low is None:
        return made.model_copy(update=nothing | {"warning": found.warning})
    said = {name: getattr(found, name) for name in ("estimate", "low", "high", "method", "warning")}
    return made.model_copy(update=said)

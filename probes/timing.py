"""Timing: from which layer on the conclusion is written, and from which layer on the decision is made.

Section 3 (ii) and appendix C (ii) of "Models Take Notes at Prefill" (arXiv 2606.17107), on polarity pairs. Write depth:
the first layer after which a probe reads the conclusion at the aggregator, to the last. Commit depth: the first after
which the decision's logit-lens margin has its final sign, to the last. A trained probe at the decision stands beside
it, since a probe against a lens favours "write first"; and two causal twins, which need neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from kvnotes import effects, probing
from kvnotes.config import RunConfig
from kvnotes.effects import Scope
from kvnotes.probing import ARMS, Depth, Fits
from kvnotes.records import Effect, HypothesisTest, Instance, Measures, Summary, Table
from kvnotes.runner import main

if TYPE_CHECKING:
    import numpy as np

    from kvnotes.interventions import AttentionBlock, CacheEdit, State
    from kvnotes.sweep import Trial

TITLE = "Timing: written before it is read"
MARGINS = {"margins": "curve layer"}  # those of the lens are no decision's
PLACES = ("aggregator", "decision")
LABELS = {"conclusion": "", "rule": "rule_"}  # what the probes look for, and how their effects' names begin
ALPHA = 0.05  # of a layer's permutation null
RESAMPLES = 2000  # of scenarios, for the depths
NOTES = (
    "conclusion: permit or restrict; rule: whether the first of the two rules applies or the second",
    "probe depths: only where the largest ridge AUC of any layer is above its null, corrected over places and labels",
    "a depth: the layer, from 0, after which something holds to the last layer; an onset: the first of three in a row",
    "write and read: the ridge probe's held-out AUC above the 95th percentile of its permutation null; their "
    "intervals resample scenarios with probes and null as given, and the number of layers stands for 'at no layer'",
    "transplant depth: the layer up to which the notes' cells give half of what all layers' give; block depth: the "
    "layer up to which the decision must see the notes to get half of what seeing them at all layers gives",
)


class Settings(RunConfig):
    """What this study alone is told."""

    pair: Literal["polarity"] = Field(description="polarity: only there is the conclusion independent of the field")
    permutations: int = Field(ge=99, le=100_000, description="permutations of the labels, for the null")


def interventions(trial: Trial) -> list[CacheEdit | AttentionBlock]:
    """Notes transplanted up to and from each layer, and blocked from the query block from each layer up."""
    from kvnotes.interventions import AttentionBlock, CacheEdit

    notes, depth = trial.pair.downstream, trial.model.shape["layers"]
    every: list[CacheEdit | AttentionBlock] = []
    for layer in range(depth):
        below, above = tuple(range(layer + 1)), tuple(range(layer, depth))
        every += [
            CacheEdit(name=f"up_to.{layer}", positions=notes, into="base", donor="target", layers=below),
            CacheEdit(name=f"from.{layer}", positions=notes, into="base", donor="target", layers=above),
            *(
                AttentionBlock(name=f"blocked_{into}.{layer}", positions=notes, into=into, layers=above)
                for into in ("base", "target")
            ),
        ]
    return every


def measure(trial: Trial, config: Settings) -> Measures:
    """Margins by intervention, and by arm the logit-lens margin after every layer."""
    margins = trial.margins(interventions(trial))
    curves: dict[str, list[float]] = {}
    for name, margin in margins.items():
        curves.setdefault(name.partition(".")[0], []).append(margin)
    return {
        "labels": probing.labels(trial.pair),
        "classes": probing.slot_classes(trial.pair),
        "margins": curves,
        "lens": {arm: _lens(trial, arm) for arm in ARMS},
    }


def collect(trial: Trial, config: Settings) -> dict[str, np.ndarray]:
    """Residuals after every layer: [arm, place, layer, d_model]; NaN at the aggregator of a prompt without one."""
    import numpy as np

    places = probing.slot_classes(trial.pair)
    found = np.full((2, len(PLACES), trial.model.shape["layers"], trial.model.shape["d_model"]), np.nan, np.float32)
    for (i, arm), (k, place) in product(enumerate(ARMS), enumerate(PLACES)):
        if place in places:
            found[i, k] = trial.capture(arm, "resid_post", [places[place]])[:, 0].float().cpu().numpy()
    return {"residuals": found}


def condense(
    arrays: Mapping[str, np.ndarray], instances: Sequence[Instance], config: Settings
) -> dict[str, np.ndarray]:
    """The residuals by place, in the space that all prompts of a layout span: [pair, arm, layer, column]."""
    among = probing.parts([one.layout for one in instances])
    return {place: probing.condensed(arrays["residuals"][:, :, k], among) for k, place in enumerate(PLACES)}


def _lens(trial: Trial, run: State) -> list[float]:
    """The decision's margin after each layer, through the model's own final norm, unembedding and cap (logit lens,
    nostalgebraist 2020)."""
    import torch

    from kvnotes.rows import unembed

    pair, model = trial.pair, trial.model
    with torch.no_grad():
        normed = model.twin.base_model.norm(trial.capture(run, "resid_post", [pair.query[-1]])[:, 0])
        logits = unembed(model, normed, [pair.base_action, pair.target_action])
    return (logits[:, 1] - logits[:, 0]).tolist()


def identities(trial: Trial, measures: Measures) -> dict[str, float]:
    """The lens after the last layer is the model's own margin; both curves of transplants end at notes-only."""
    scale, lens, margins = max(1.0, abs(trial.unedited.gap)), measures["lens"], measures["margins"]
    errors = [abs(lens[arm][-1] - getattr(trial.unedited, arm)) for arm in ARMS]
    return {
        "last lens margin equals the model's": effects.worst(errors) / scale,
        "all layers up to equal all layers from": abs(margins["up_to"][-1] - margins["from"][0]) / scale,
    }


# --- summary ----------------------------------------------------------------------------------------------


def summarise(
    instances: Sequence[Instance], config: Settings, floor: float, arrays: Mapping[str, np.ndarray]
) -> Summary:
    """Depths, gated and ungated, and every layer of the gated pairs; from arrays as `condense` gives them."""
    asked = {"permutations": config.permutations, "seed": config.seed}

    def fit(rows: list[Instance], cells: dict[str, np.ndarray]) -> dict[str, Fits]:
        return {label: probing.fit_all(rows, cells, label=label, **asked) for label in LABELS}

    found: list[Effect] = []
    tables: dict[str, Table] = {}
    for scope, fits in probing.fitted(instances, config, floor, arrays=arrays, fit=fit):
        found += _effects(scope, fits)
        tables |= _tables(scope, fits) if scope.gated else {}
    return Summary(effects=tuple(found), tables=tables, notes=NOTES, headline=_headline(found))


def _effects(scope: Scope, fits: Mapping[str, Fits]) -> list[Effect]:
    commit = {one.id: _commit(one, scope.floor) for one in scope.rows}
    found: list[Effect] = []
    tests = probing.verdicts({(name, place): own for name in LABELS for place, own in fits[name].nulls.items()})
    for label, prefix in LABELS.items():
        (written, write_onset), (read, read_onset) = (
            _probe_depths(scope, fits[label], place, test=tests.get((label, place))) for place in PLACES
        )
        depths = {
            ("write_depth", "write depth: probe at the aggregator"): written,
            ("read_depth", "read depth: probe at the decision"): read,
            ("write_onset", "write onset: probe at the aggregator"): write_onset,
            ("read_onset", "read onset: probe at the decision"): read_onset,
            ("read_minus_write", "read after write, onsets in layers"): _read_after(read_onset, write_onset),
            ("commit_minus_write", "commit after write onset, layers"): _commit_after(
                write_onset, fits[label], commit, scope.config.seed
            ),
        }
        words = "" if label == "conclusion" else f"{label}: "
        found += [
            probing.depth_effect(scope, prefix + name, words + text, depth) for (name, text), depth in depths.items()
        ]
    return [
        *found,
        scope.mean("commit_depth", "commit depth: logit lens at the decision", lambda one: commit[one.id]),
        probing.depth_effect(scope, "transplant_depth", "transplant depth: half given up to", _half(scope, _up_to)),
        probing.depth_effect(scope, "block_depth", "block depth: half seen up to", _half(scope, _seen)),
    ]


def _probe_depths(scope: Scope, fits: Fits, place: str, *, test: HypothesisTest | None) -> tuple[Depth, Depth]:
    """From where on the ridge probe's AUC stays above its null, and where it is so first for some layers in a row; none
    where the largest AUC of any layer is not above its own null: of many layers, one is above it by chance."""
    import numpy as np

    n, clusters, nulls = len(fits.rows), len({one.scenario for one in fits.rows}), fits.nulls.get(place, ())
    if not nulls or test is None:
        why = f"{n} pair(s) of whole 2x2 designs in {clusters} scenario(s), or a prompt without {place}: no probe"
        nothing = Depth(estimate=None, drawn=np.zeros(0), n=n, clusters=clusters, warning=why)
        return nothing, nothing
    if test.conclusion != "decodable":
        why = f"the AUC at the {place} is not above its permutation null: {test.name}, p = {test.p:.2g}"
        nothing = Depth(estimate=None, drawn=np.zeros(0), n=n, clusters=clusters, warning=why)
        return nothing, nothing
    bounds = np.array([one.bound(ALPHA) for one in nulls]) + 1e-9
    counts = probing.resampled(clusters, draws=RESAMPLES, seed=scope.config.seed)
    areas = np.stack([probing.resampled_aucs(one.scores, fits.prompts, counts) for one in nulls], axis=1)
    above = [one.observed > bound for one, bound in zip(nulls, bounds, strict=True)]
    found = (
        (probing.first_from(above), probing.depths(areas > bounds), "up to the last layer"),
        (probing.onset(above), probing.onsets(areas > bounds), f"for {probing.RUN} layers in a row"),
    )
    depths = []
    for layer, drawn, words in found:
        why = None if layer is not None else f"the AUC at the {place} is not above its permutation null {words}"
        depths.append(Depth(estimate=layer, drawn=drawn, n=n, clusters=clusters, warning=why))
    return depths[0], depths[1]


def _commit(one: Instance, floor: float) -> float | None:
    """The mean of both arms' commit depths; None where an arm's own margin is within the noise."""
    found: list[int] = []
    for arm in ARMS:
        lens = one.measures["lens"][arm]
        depth = probing.first_from([margin * (1 if lens[-1] > 0 else -1) > floor for margin in lens])
        if depth is None:
            return None
        found.append(depth)
    return sum(found) / len(found)


def _read_after(read: Depth, written: Depth) -> Depth:
    """How much later what is read is there, in the same resamples."""
    if read.estimate is None or written.estimate is None:
        return read if read.estimate is None else written
    return replace(read, estimate=read.estimate - written.estimate, drawn=read.drawn - written.drawn)


def _commit_after(written: Depth, fits: Fits, commit: Mapping[str, float | None], seed: int) -> Depth:
    """Mean commit depth minus the layer of writing, over the pairs of whole designs and in the same resamples."""
    rows = [one for one in fits.rows if commit[one.id] is not None]
    if written.estimate is None or not rows:
        return written
    sums = _by_scenario(rows, fits.rows, lambda one: [commit[one.id] or 0.0, 1.0])
    drawn, (top, count) = probing.resampled(len(sums), draws=RESAMPLES, seed=seed) @ sums, sums.sum(axis=0)
    kept = drawn[:, 1] > 0
    later = drawn[kept, 0] / drawn[kept, 1]
    return replace(written, estimate=top / count - written.estimate, drawn=later - written.drawn[kept], n=len(rows))


def _up_to(one: Instance) -> list[float]:
    """What the notes' cells up to and including each layer move, in logits."""
    return [effects.moved(one, margin) for margin in one.measures["margins"]["up_to"]]


def _kept(one: Instance) -> list[float]:
    """The gap that is left when the query block sees no notes from each layer up, in logits; at last the whole gap."""
    margins = one.measures["margins"]
    blocked = zip(margins["blocked_target"], margins["blocked_base"], strict=True)
    return [*(target - base for target, base in blocked), effects.gap(one)]


def _seen(one: Instance) -> list[float]:
    """What seeing the notes up to and including each layer gives, in logits."""
    kept = _kept(one)
    return [value - kept[0] for value in kept[1:]]


def _half(scope: Scope, curve: Callable[[Instance], list[float]]) -> Depth:
    """From where on a curve, pooled over pairs, stays at half of its end or more; None where the end is about 0."""
    import numpy as np

    rows, clusters = scope.rows, len({one.scenario for one in scope.rows})
    if clusters < effects.LEAST_SCENARIOS:
        return Depth(estimate=None, drawn=np.zeros(0), n=len(rows), clusters=clusters, warning="too few scenarios")
    sums = _by_scenario(rows, rows, curve)
    whole, all_gaps = sums.sum(axis=0), sum(effects.gap(one) for one in rows)
    drawn = probing.resampled(clusters, draws=RESAMPLES, seed=scope.config.seed) @ sums
    known = whole[-1] / all_gaps > scope.config.equivalence
    return Depth(
        estimate=probing.first_from(whole >= whole[-1] / 2) if known else None,
        drawn=probing.depths(drawn >= drawn[:, -1:] / 2),
        n=len(rows),
        clusters=clusters,
        warning=None if known else "the notes give nothing that could be halved",
    )


def _by_scenario(
    rows: Sequence[Instance], among: Sequence[Instance], values: Callable[[Instance], list[float]]
) -> np.ndarray:
    """Sums over the rows of each scenario, [scenario, value], in the order of the names among all rows."""
    import numpy as np

    names = sorted({one.scenario for one in among})
    sums = np.zeros((len(names), len(values(rows[0]))))
    for one in rows:
        sums[names.index(one.scenario)] += values(one)
    return sums


def _tables(scope: Scope, fits: Mapping[str, Fits]) -> dict[str, Table]:
    """Every layer: what the probes read, what the lens says, what the transplants give and what blocking leaves."""
    from kvnotes import stats

    if not effects.enough(scope.rows):
        return {}
    made: dict[str, Table] = {}
    for label, place in product(LABELS, PLACES):
        if place not in fits[label].trained:
            continue
        own, nulls = fits[label].trained[place], fits[label].nulls[place]
        q = stats.benjamini_hochberg([one.p for one in nulls])
        rows: list[list[Any]] = []
        for layer, (fit, null) in enumerate(zip(own, nulls, strict=True)):
            area = fits[label].area(scope, fit)
            rows.append([layer, area.estimate, area.low, area.high, null.observed, null.bound(ALPHA), q[layer]])
        columns = ("layer", "AUC", "low", "high", "AUC of ridge", "its null, 95%", "p, BH")
        made[f"{scope.layout}: {label} at the {place}"] = Table(columns=columns, rows=rows)
    curves: dict[str, Callable[[Instance, int], float]] = {
        "lens, share of the gap": lambda one, i: one.measures["lens"]["target"][i] - one.measures["lens"]["base"][i],
        "notes up to": lambda one, i: _up_to(one)[i],
        "notes from": lambda one, i: effects.moved(one, one.measures["margins"]["from"][i]),
        "kept, notes blocked from": lambda one, i: _kept(one)[i],
    }
    for name, curve in curves.items():
        depth = range(len(scope.rows[0].measures["lens"]["base"]))
        each = [scope.recovery(name, name, lambda one, i=i, curve=curve: curve(one, i)) for i in depth]
        rows = [[i, one.estimate, one.low, one.high] for i, one in enumerate(each)]
        made[f"{scope.layout}: {name}"] = Table(columns=("layer", "estimate", "low", "high"), rows=rows)
    return made


def _headline(found: Sequence[Effect]) -> str:
    by_name = {(one.layout, one.name): one for one in found if one.gated}
    names = ("write_depth", "read_depth", "rule_write_onset", "rule_read_onset", "commit_depth")
    parts = []
    for layout in dict.fromkeys(one.layout for one in found):
        known = [(name.replace("_", " "), by_name[layout, name].estimate) for name in names]
        words = [f"{name} {'none' if layer is None else format(layer, '.3g')}" for name, layer in known]
        probed, n = by_name[layout, "read_depth"].n, by_name[layout, "commit_depth"].n
        parts.append(f"{layout}: {', '.join(words)} (n={n}; probes: {probed}, of whole designs)")
    return "; ".join(parts)


if __name__ == "__main__":
    main(__file__)

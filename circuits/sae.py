"""SAE features: which read the conclusion at the aggregator, and does the decision follow when they are clamped?

Appendix D (3) of "Models Take Notes at Prefill" (arXiv 2606.17107) and its figure 15e. A third of the scenarios is the
dictionary's: their prompts are part of the text that a TopK SAE is trained on, and they choose its layer. On the others
features are ranked by AUC at the site, on one fold of the scenarios, and clamped on the other to the mean that they
have there in prompts of the other conclusion. Reconstruction errors stay as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvnotes import conclusion, effects, features, reading, select, sites
from kvnotes.config import RunConfig
from kvnotes.effects import Scope
from kvnotes.features import ARMS, IN_SAMPLE, KINDS
from kvnotes.records import Effect, Instance, Measures, Summary, Table, safe_name
from kvnotes.runner import main

if TYPE_CHECKING:
    from kvnotes.instance import TokenPair
    from kvnotes.interventions import ActivationPatch, State
    from kvnotes.models import Model
    from kvnotes.sae import Dictionary
    from kvnotes.sweep import Trial

TITLE = "SAE features: which read the conclusion, and which move the decision"
MARGINS = {
    "single": "slot",
    "notes": "",
    "profile?": "site layer",  # of pairs of reserved scenarios that pass the gate
    "margins": "site family count draw",
}
COUNTS = (1, 3, 10, 30)  # features clamped together, as the paper's
ALL = "all"  # of them
QUALITY = (
    "fvu", "fvu with massive tokens", "fvu with first and massive tokens", "fvu of prompts", "fvu of the corpus",
    "dead", "active features a token", "features", "k", "layer", "tokens", "usual tokens",
)  # fmt: skip
KEPT = (*QUALITY, "trained here", "sha256")  # with every instance


class Settings(RunConfig):
    """The run's settings and the study's own."""

    layer: int = Field(ge=-1, description="layer after which the residual is taken; -1: chosen on reserved scenarios")
    sae: str = Field(description="folder of a sae-lens SAE (safetensors); empty: one is trained")
    corpus: str = Field(description="folder of text to train on; empty: the Python standard library's sources")
    tokens: int = Field(ge=1000, description="tokens of text, a tenth of it held out")
    prompts: float = Field(ge=0, le=1, description="share of the text that are prompts of reserved scenarios")
    context: int = Field(ge=8, le=4096, description="tokens in a piece of the corpus")
    expansion: int = Field(ge=1, le=64, description="features, as a multiple of d_model")
    active: int = Field(ge=1, description="features active in a token")
    epochs: int = Field(ge=1, description="passes over the tokens")
    batch: int = Field(ge=1, description="tokens in a training step")
    rate: float = Field(gt=0, description="Adam's learning rate")
    permutations: int = Field(ge=19, le=100_000, description="permutations of the labels, whole scenarios at a time")
    draws: int = Field(ge=1, le=1000, description="random features for every number of features, a fold")


# --- before the pairs are measured ------------------------------------------------------------------------


def survey(trial: Trial, config: Settings) -> Measures:
    """Each downstream slot alone; in gated pairs of reserved scenarios also the residual patch at every layer, at the
    pair's own best slot of each kind."""
    found, pair = sites.survey(trial), trial.pair
    if not (features.reserved(pair.pair.scenario) and trial.unedited.passes(config.gate_gap)):
        return found
    order = select.best(dict(zip(pair.downstream, found["single"], strict=True)))
    first = {kind: next(iter(p for p in order if p in conclusion.candidates(pair, kind)), None) for kind in KINDS}
    layers = range(trial.model.shape["layers"])
    asked = {
        f"{kind}:{layer}": _patch(f"{kind}:{layer}", layer, p, donor="target")
        for kind, p in first.items()
        if p is not None
        for layer in layers
    }
    margins = trial.margins(list(asked.values()))
    kinds = [kind for kind, p in first.items() if p is not None]
    return {**found, "profile": {kind: [round(margins[f"{kind}:{layer}"], 6) for layer in layers] for kind in kinds}}


def _patch(name: str, layer: int, position: int, *, into: State = "base", **more: Any) -> ActivationPatch:
    return conclusion.patch(name, position, layer, into=into, **{"donor": None, **more})


def prepare(instances: Sequence[Instance], config: Settings) -> dict[str, Any]:
    """Of the evaluated scenarios: the slots' ranking on each fold, and which pairs pass the gate. Of the reserved ones:
    the recovery by layer, and the layer where it is largest at the aggregator."""
    evaluated = [one for one in instances if not features.reserved(one.scenario)]
    profiled = [one for one in instances if one.measures.get("profile")]
    profile = {kind: _profile(profiled, kind) for kind in KINDS}
    depth = {kind: max(range(len(by)), key=by.__getitem__) for kind, by in profile.items() if by}
    return {
        **sites.prepare(evaluated, config),
        "gated": [one.id for one in evaluated if one.status == "included"],
        "profile": profile,
        "profiled": [one.id for one in profiled],
        "layers": depth,
        "layer": config.layer if config.layer >= 0 else depth.get("aggregator", depth.get("any_slot")),
    }


def _profile(rows: Sequence[Instance], kind: str) -> list[float]:
    """Recovery by layer, the ratio of sums."""
    here = [one for one in rows if kind in one.measures["profile"]]
    gaps = sum(effects.gap(one) for one in here)
    by_layer = zip(
        *([effects.moved(one, margin) for margin in one.measures["profile"][kind]] for one in here), strict=True
    )
    return [round(sum(moved) / gaps, 6) for moved in by_layer]


@dataclass(frozen=True, kw_only=True, eq=False)
class Equipment:
    """The dictionary, and what the record says of it and of the features that each fold chooses."""

    dictionary: Dictionary
    record: Mapping[str, Any]


def equip(model: Model, config: Settings, pairs: Mapping[str, TokenPair], plan: Measures) -> Equipment:
    """The dictionary, trained or found, and the features that the gated pairs of each fold choose with it, by layout,
    kind of site and label; and those that all of them choose together, for numbers in-sample."""
    from kvnotes import sae

    own = {name: getattr(config, name) for name in sae.Recipe.__annotations__}
    dictionary, provenance = sae.obtain(
        model,
        sae.Recipe(**own),
        given=Path(config.sae) if config.sae else None,
        corpus=Path(config.corpus) if config.corpus else None,
        layer=None if config.sae and config.layer < 0 else plan["layer"],
        home=config.results / safe_name(model.name) / config.study,
    )
    gated = [pairs[name] for name in plan["gated"]]
    read = {pair.pair.id: sae.read(model, pair, features.places(plan, pair), dictionary) for pair in gated}
    found = {
        layout: features.choices(
            plan, [pair for pair in gated if pair.pair.layout == layout], read, counts=COUNTS, draws=config.draws,
            seed=config.seed,
        )
        for layout in plan["ranking"]
    }  # fmt: skip
    return Equipment(dictionary=dictionary, record={"dictionary": provenance, "features": found})


# --- measuring --------------------------------------------------------------------------------------------


def measure(trial: Trial, config: Settings, plan: Measures, *, equipment: Equipment) -> Measures:
    """At each site, in one batch: the whole residual, its features, and the chosen ones clamped, exchanged and ablated;
    random ones in pairs that pass the gate. And which features are active where. Nothing of reserved scenarios."""
    pair, own = trial.pair, plan["equipment"]
    if features.reserved(pair.pair.scenario):
        return {}
    places, tested = features.places(plan, pair), features.fold(plan, pair)
    chosen = {kind: own["features"][pair.pair.layout][kind] for kind in places}
    drawn = trial.unedited.passes(config.gate_gap)
    asked = {
        kind: _asked(trial, equipment.dictionary, chosen[kind], kind, by[tested], tested=tested, drawn=drawn)
        for kind, by in places.items()
    }
    flat = [one for each in asked.values() for by in each.values() for ones in by.values() for one in ones]
    margins = trial.margins(flat) if flat else {}
    names = select.slot_names(pair)
    return {
        "fold": tested,
        "labels": features.labels(pair),
        "dictionary": {name: own["dictionary"].get(name) for name in KEPT},
        "sites": {kind: {t: names[p] for t, p in by.items()} for kind, by in places.items()},
        "active": _active(trial, equipment.dictionary, places),
        "chosen": {
            kind: {label: {n: by[tested].get(n, []) for n in ("features", "aucs")} for label, by in here.items()}
            for kind, here in chosen.items()
        },
        "margins": {
            kind: {
                f: {k: [round(margins[one.name], 6) for one in ones] for k, ones in by.items()}
                for f, by in each.items()
            }
            for kind, each in asked.items()
        },
    }


def _active(trial: Trial, dictionary: Dictionary, places: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Active features by kind, tested fold and arm."""

    def one(arm: State, position: int) -> dict[str, list[Any]]:
        residual = trial.capture(arm, "resid_post", [position])[dictionary.layer, 0]
        return features.active(dictionary.encode(residual).cpu().numpy())

    return {kind: {t: {arm: one(arm, p) for arm in ARMS} for t, p in by.items()} for kind, by in places.items()}


def _asked(
    trial: Trial,
    dictionary: Dictionary,
    chosen: Mapping[str, Any],
    kind: str,
    position: int,
    *,
    tested: str,
    drawn: bool,
) -> dict[str, dict[str, list[ActivationPatch]]]:
    """All interventions at one site, by family and number of features; random ones where `drawn`."""
    from kvnotes.interventions import Features, Mix
    from kvnotes.sae import Clamp, ablated, clamp

    found: dict[str, dict[str, list[ActivationPatch]]] = {}

    def add(family: str, k: int | str, mix: Mix | None, *, into: State = "base", donor: State | None = None) -> None:
        ones = found.setdefault(family, {}).setdefault(str(k), [])
        name = f"{family}:{kind}:{k}:{len(ones)}"
        ones.append(_patch(name, dictionary.layer, position, into=into, donor=donor, mix=mix))

    every = tuple(range(len(dictionary.decoder)))
    add("full", ALL, None, donor="target")
    add("features", ALL, Features(dictionary.encode, dictionary.decoder, every), donor="target")
    add("empty", 0, Clamp(dictionary=dictionary, chosen=(), values=()))
    marks = features.labels(trial.pair)
    for (family, label, fold), k in itertools.product(_families(tested), COUNTS):
        if not (here := chosen[label].get(fold)):
            continue
        best, other = here["features"][:k], marks[label]["target"]
        add(family, k, clamp(dictionary, best, here["means"], other))
        if family != "clamp":
            continue
        add("own", k, Features(dictionary.encode, dictionary.decoder, tuple(best)), donor="target")
        add("ablate", k, ablated(dictionary, best), into="target")
        for others in here["random"][str(k)]["sets"] if drawn else []:
            add("random", k, clamp(dictionary, others, here["means"], other))
            if kind == "aggregator" and k == COUNTS[-1]:
                add("ablate_random", k, ablated(dictionary, others), into="target")
    return found


def _families(tested: str) -> list[tuple[str, str, str]]:
    """Families of clamps: the label that ranked the features, and who did."""
    return [
        ("clamp", "conclusion", tested),
        ("clamp_in_sample", "conclusion", IN_SAMPLE),
        ("clamp_rule", "rule", tested),
    ]


def identities(trial: Trial, measures: Measures) -> dict[str, float]:
    """A clamp of no feature leaves the base as it is."""
    empty = [by["empty"]["0"][0] for by in measures.get("margins", {}).values()]
    scale = max(1.0, abs(trial.unedited.gap))
    return {
        "a clamp of no feature equals base": effects.worst(
            [0.0, *(abs(m - trial.unedited.base) / scale for m in empty)]
        )
    }


# --- all instances ----------------------------------------------------------------------------------------

LOST = ("ablate", "ablate_random")  # into the target: how far its decision drops
FAMILIES = {  # name -> label, and whether it is a control
    "clamp": ("best {k} by the other fold, clamped to the other conclusion's mean", False),
    "own": ("best {k}, at the target's own values", False),
    "clamp_in_sample": ("best {k} by all scenarios (in-sample), clamped", False),
    "clamp_rule": ("best {k} for which rule applies, clamped", False),
    "random": ("{k} random features, as often active, clamped (control)", True),
    "ablate": ("lost without the best {k}", False),
    "ablate_random": ("lost without {k} random features (control)", True),
}
WHOLE = {"full": "the whole residual of the target", "features": "all its features, base's error kept"}
SUFFIXES = {"aggregator": "", "any_slot": "_any_slot"}
HEADLINE = {
    "full": "full patch",
    "features": "all features",
    "clamp_10": "best 10",
    "random_10": "10 random",
    "full_any_slot": "any slot: full patch",
    "clamp_10_any_slot": "best 10",
    "auc": "AUC held-out",
}


def summarise(instances: Sequence[Instance], config: Settings, floor: float) -> Summary:
    """Recovery by number of features and kind of site, what ablation loses, AUCs; gated and ungated."""
    rows = [one for one in instances if one.status == "skipped" or not features.reserved(one.scenario)]
    known = next((one.measures["dictionary"] for one in rows if one.measures.get("dictionary")), None)
    found = effects.summary(
        rows,
        config,
        floor,
        find=_effects,
        tables=partial(_tables, permutations=config.permutations),
        headline=HEADLINE,
        notes=_notes(instances, known),
    )
    if known is None or not features.failed(known):
        return found
    return found.model_copy(
        update={"headline": f"FAILED TRAINING ({known['dead']:.0%} dead features): {found.headline}"}
    )


def _notes(instances: Sequence[Instance], known: Mapping[str, Any] | None) -> list[str]:
    chose = [one for one in instances if one.measures.get("profile")]
    notes = [
        f"A third of the scenarios is the dictionary's ({features.RULE}): they are among its text, {len(chose)} of "
        "their pairs chose its layer, and none is evaluated.",
        "Random features: drawn once a fold from those that are active at the site in as many of its prompts, and "
        "clamped in pairs that pass the gate alone. They are drawn from outside the choice: a control beside it, which "
        "gives no p-value.",
    ]
    if known is None:
        return notes
    words = ", ".join(f"{name} {known[name]:.4g}" for name in QUALITY if known.get(name) is not None)
    state = "its training has FAILED: over half of its features are dead; " if features.failed(known) else ""
    if not known.get("trained here", True):
        state = f"loaded, and judged on held-out text alone: {features.silent(known)}; "
    return [f"The dictionary: {state}{words}; SHA-256 {known['sha256'][:16]}.", *notes]


def _moved(one: Instance, kind: str, family: str, k: str) -> float | None:
    """How far a family's interventions move the margin, in logits, the mean over its draws; for ablations how far the
    target's drops. None where there is none."""
    each = _each(one, kind, family, k)
    return sum(each) / len(each) if each else None


def _each(one: Instance, kind: str, family: str, k: str) -> list[float]:
    found = one.measures.get("margins", {}).get(kind, {}).get(family, {}).get(k, [])
    if family in LOST:
        return [effects.gap(one) - effects.moved(one, margin) for margin in found]
    return [effects.moved(one, margin) for margin in found]


def _effects(scope: Scope) -> Iterator[Effect]:
    for kind, suffix in SUFFIXES.items():
        at = f", {KINDS[kind]}"
        for name, label in WHOLE.items():
            yield scope.recovery(f"{name}{suffix}", label + at, partial(_moved, kind=kind, family=name, k=ALL))
        for family, (label, control) in FAMILIES.items():
            if family == "ablate_random" and kind != "aggregator":
                continue
            counts = COUNTS[-1:] if family == "ablate_random" else COUNTS
            for k in counts:
                value = partial(_moved, kind=kind, family=family, k=str(k))
                about = {"about": 0.0} if control else {}
                name = f"{family}_{k}{suffix}"
                yield scope.recovery(name, label.format(k=k) + at, value, control=control, **about)
        for label, name in (("conclusion", "auc"), ("rule", "auc_rule")):
            value = reading.placed(scope, kind, label)
            auc = scope.mean(f"{name}{suffix}", f"held-out AUC of the best feature for the {label}{at}", value)
            yield auc.model_copy(update={"low": effects.clip(auc.low), "high": effects.clip(auc.high)})


# --- tables -----------------------------------------------------------------------------------------------


def _tables(gated: Scope, ungated: Scope, permutations: int) -> dict[str, Table]:
    return {
        "reading a label": reading.aucs(gated, permutations=permutations),
        "best features": reading.best(gated),
        "against random features": reading.against(gated, COUNTS, _each),
    }


if __name__ == "__main__":
    main(__file__)

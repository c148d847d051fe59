"""Direction: does one direction of the residual, shared by all scenarios, carry the conclusion at the aggregator?

Appendix D (2) of "Models Take Notes at Prefill" (arXiv 2606.17107), figure 15b. The component of (target - base) along
a difference of means of all other scenarios goes into base at one site and layer, everything after it recomputed.
Beside it: the whole difference, a random direction's own component (the paper's control, small by construction), a
random direction and the rest of the difference at the injected norm, a logistic probe's direction; and what is lost
when the component is taken out of the target. The paper's direction tells permit from restrict, others which rule
applies.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvnotes import conclusion, effects, select, sites
from kvnotes.conclusion import JOINT, KINDS
from kvnotes.config import RunConfig
from kvnotes.records import Effect, HypothesisTest, Instance, Measures, Summary, Table
from kvnotes.runner import main

if TYPE_CHECKING:
    import numpy as np

    from kvnotes.conclusion import Site
    from kvnotes.interventions import Intervention
    from kvnotes.resume import Gathered
    from kvnotes.sweep import Trial

TITLE = "Direction: one direction of the aggregator's residual that carries the conclusion"
MARGINS = {"single": "slot", "notes": "", "own full": "site layer", "margins": "site family member", JOINT: "family"}
ONCE = {  # at the causal layer, of base unless said otherwise
    "orthogonal": "the rest of the difference, at the injected norm",
    "rest": "the rest of the difference, all of it",
    "logistic": "component along a logistic probe's direction",
    "logistic_norm": "logistic probe's direction, at the injected norm",
}
LOST = {
    "projected": "lost without the component",
    "centred": "lost with the component halfway",
    "projected_shared": "lost without the shared component",
    "centred_shared": "lost with the shared component halfway",
    "random_lost": "lost without a random direction's component",
}
DRAWN = {
    "random_own": "a random direction's own component",
    "random_norm": "a random direction, at the injected norm",
    "random_shared": "a random direction, at the shared one's norm",
    "random_lost": LOST["random_lost"],
}
CURVES = {
    "along": "conclusion",
    "along_rule": "rule",
    "along_row": "row",
}  # families of patches by layer, and their code
LEAST = 1e-3  # of recovery: a full patch below this is nothing to take a share of
# Against a random direction's own component, which is what the component along an uninformative direction would be:
# a given norm and sign are the direction's own, and a pair's component always points to the target.
TESTED, AGAINST = ("along", "along_shared"), "random_own"


class Settings(RunConfig):
    """The run's settings and the study's own."""

    draws: int = Field(ge=1, le=10_000, description="random directions at the direction's norm, best aggregator")
    fewer: int = Field(ge=1, le=10_000, description="random directions whose own component is injected, for p")
    fewest: int = Field(ge=1, le=10_000, description="random directions for every other control")
    every: int = Field(ge=1, description="layers from one to the next of the survey, which chooses the causal layer")
    steps: int = Field(ge=1, description="layers from one to the next of all curves but the two main ones")


# --- measuring --------------------------------------------------------------------------------------------


def survey(trial: Trial, config: Settings) -> Measures:
    """Each downstream slot alone, and the residual patch by layer at the pair's own best sites."""
    return conclusion.survey(trial, every=config.every)


def gather(trial: Trial, config: Settings, measures: Measures) -> dict[str, np.ndarray]:
    """The residuals that directions are learned from."""
    return conclusion.gather(trial, measures)


def prepare(instances: Sequence[Instance], config: Settings, gathered: Gathered) -> dict[str, Any]:
    """Site and causal layer, chosen on the other fold; the cosine between the folds' directions."""
    return conclusion.prepare(instances, config, gathered)


def measure(trial: Trial, config: Settings, plan: Measures, *, gathered: Gathered) -> Measures:
    """Margins by site: the full patch and the components by layer, and the controls at the causal layer."""
    found = [conclusion.at(trial, plan, gathered, kind) for kind in KINDS]
    known = [site for site in found if site is not None]
    asked = {site.kind: _asked(trial, config, plan, site) for site in known}
    joint = _joint(trial, plan, gathered)
    margins = trial.margins([one for some in [*asked.values(), joint] for one in some.values()])
    return {
        "sites": {site.kind: _about(trial, config, plan, site) for site in known},
        "margins": {
            kind: conclusion.folded({name: margins[one.name] for name, one in some.items()})
            for kind, some in asked.items()
        },
        JOINT: {name: round(margins[one.name], 6) for name, one in joint.items()},
    }


def _about(trial: Trial, config: Settings, plan: Measures, site: Site) -> dict[str, Any]:
    """Where the pair was tested, and at which layers; the norm of its difference and of its components at the causal
    layer, and the cosines between the directions of the two folds."""
    import numpy as np

    difference = site.difference[site.layer]
    return {
        "slot": site.slot,
        "position": site.position,
        "layer": site.layer,
        "layers": _layers(config, site),
        "shared": site.shared,
        "difference": round(float(np.linalg.norm(difference)), 6),
        "components": {c: round(float(site.directions(c)[site.layer] @ difference), 6) for c in site.codes},
        "pairs learned from": len(site.learned.arms),
        "cosines": conclusion.cosines(plan, trial.pair, site.kind),
    }


def _layers(config: Settings, site: Site) -> dict[str, list[int]]:
    """The layers of each family: all of them for the full patch and the paper's direction at the aggregator, else at
    steps, and always the causal one."""
    depth = len(site.difference)
    some = sorted({*range(0, depth, config.steps), site.layer})
    main = list(range(depth)) if site.kind == "aggregator" else some
    families = {family: some for family, code in CURVES.items() if code in site.codes}
    return families | {"full": main, "along": main}


def _asked(trial: Trial, config: Settings, plan: Measures, site: Site) -> dict[str, Intervention]:
    """All interventions at one site, by their short names."""
    import numpy as np

    layer = site.layer
    directions = {code: site.directions(code) for code in site.codes}
    own, shared = directions["conclusion"][layer], directions[site.shared][layer]
    n = max(config.draws, config.fewer, config.fewest)
    outside = np.stack([own, shared])
    drawn = conclusion.random_directions(trial, plan, config, kind=site.kind, n=n, outside=outside)
    few, fewest = drawn[: config.fewer], drawn[: config.fewest]
    many = drawn[: config.draws] if site.kind == "aggregator" else fewest
    patch = partial(_patch, trial, site)
    made: dict[str, Intervention] = {}
    for family, layers in _layers(config, site).items():
        for i in layers:
            vector = directions[CURVES[family]][i] if family in CURVES else None
            made[f"{family}:{i}"] = patch(f"{family}:{i}", i, donor="target", along=vector)
    added = _added(site, own=own, shared=shared, many=many, few=few, fewest=fewest)
    made |= {name: patch(name, layer, donor=vector) for name, vector in added.items()}
    taken = {"projected": own, "projected_shared": shared, **{f"random_lost:{i}": v for i, v in enumerate(fewest)}}
    made |= {name: patch(name, layer, into="target", donor=None, along=vector) for name, vector in taken.items()}
    halved, middle = {"centred": own, "centred_shared": shared}, site.learned.middle[layer]
    made |= {name: patch(name, layer, into="target", donor=middle, along=vector) for name, vector in halved.items()}
    return made


def _patch(
    trial: Trial,
    site: Site,
    name: str,
    layer: int,
    *,
    donor: str | np.ndarray | None,
    along: np.ndarray | None = None,
    into: str = "base",
) -> Intervention:
    """A patch at a site: of the component along a vector, else of the whole activation. A given vector is added to it,
    or with `along` the component becomes its."""
    from kvnotes.interventions import Added, Direction

    tensor = partial(conclusion.tensor, trial)
    given = None if donor is None else donor if isinstance(donor, str) else tensor(donor)
    whole = None if isinstance(donor, str) else Added()
    mix = whole if along is None else Direction(tensor(along)[None])
    return conclusion.patch(f"{site.kind}:{name}", site.position, layer, into=into, donor=given, mix=mix)


def _added(
    site: Site, *, own: np.ndarray, shared: np.ndarray, many: np.ndarray, few: np.ndarray, fewest: np.ndarray
) -> dict[str, np.ndarray]:
    """What is added to base's residual at the causal layer: components, and vectors of their lengths."""
    import numpy as np

    difference, probe = site.difference[site.layer], conclusion.logistic(site.learned, site.layer)
    along, other = float(own @ difference), float(shared @ difference)
    rest = difference - along * own
    return {
        "orthogonal": abs(along) * conclusion.unit(rest),
        "rest": rest,
        "logistic": (probe @ difference) * probe,
        "logistic_norm": abs(along) * np.sign(probe @ difference) * probe,
        "summed": along * own + rest,
        "along_shared": other * shared,
        **{f"random_own:{i}": (one @ difference) * one for i, one in enumerate(few)},
        **{f"random_norm:{i}": abs(along) * one for i, one in enumerate(many)},
        **{f"random_shared:{i}": abs(other) * one for i, one in enumerate(fewest)},
    }


def _joint(trial: Trial, plan: Measures, gathered: Gathered) -> dict[str, Intervention]:
    """All aggregators together, each along its own direction, or in full; those without a direction are left out."""
    from kvnotes.conclusion import Learned
    from kvnotes.interventions import Direction, Together

    pair, names = trial.pair, select.slot_names(trial.pair)
    layer = conclusion.chosen_layer(plan, pair, JOINT)
    if layer is None:
        return {}
    ids = conclusion.others(plan, pair)
    found = {p: Learned.of(plan, gathered, ids, names[p], layer=layer) for p in sites.aggregators(pair)}
    known = {p: one for p, one in found.items() if one is not None}
    if not known:
        return {}
    made: dict[str, Intervention] = {"full": conclusion.full(f"{JOINT}:full", list(known), layer)}
    for short, code in {"along": "conclusion", "along_shared": conclusion.shared(plan, pair, "aggregator")}.items():
        vectors = {p: conclusion.tensor(trial, conclusion.unit(one.direction(code)[0])) for p, one in known.items()}
        name = f"{JOINT}:{short}"
        parts = [
            conclusion.patch(f"{name}@{p}", p, layer, donor="target", mix=Direction(vector[None]))
            for p, vector in vectors.items()
        ]
        made[short] = Together(name=name, parts=parts)
    return made


def identities(trial: Trial, measures: Measures) -> dict[str, float]:
    """The component and the rest, added, are the full patch."""
    scale = max(1.0, abs(trial.unedited.gap))
    errors = [abs(some["summed"] - _causal(measures, kind, "full")) for kind, some in measures["margins"].items()]
    return {"component and rest are the full patch": effects.worst(errors) / scale} if errors else {}


# --- an instance's numbers, from the record ---------------------------------------------------------------


def _causal(measures: Measures, kind: str, family: str) -> float:
    """A family's margin at the causal layer."""
    about = measures["sites"][kind]
    return measures["margins"][kind][family][about["layers"][family].index(about["layer"])]


def _at(one: Instance, kind: str, name: str) -> float | None:
    """What a site's intervention moves in base, in logits; None where the pair has no such site or code. Families by
    layer are read at the causal one, draws are averaged."""
    margin = one.measures["margins"].get(kind, {}).get(name)
    if margin is None:
        return None
    if name in ("full", *CURVES):
        margin = _causal(one.measures, kind, name)
    elif name in DRAWN:
        margin = sum(margin) / len(margin)
    return effects.moved(one, margin)


def _lost(one: Instance, kind: str, name: str) -> float | None:
    """What the target's margin loses; draws are averaged."""
    moved = _at(one, kind, name)
    return None if moved is None else effects.gap(one) - moved


def _by_layer(one: Instance, kind: str, name: str) -> dict[str, float]:
    margins = one.measures["margins"].get(kind, {}).get(name, [])
    layers = one.measures["sites"][kind]["layers"][name] if margins else []
    return {str(i): effects.moved(one, margin) for i, margin in zip(layers, margins, strict=True)}


def _joined(one: Instance, name: str) -> float | None:
    margin = one.measures[JOINT].get(name)
    return None if margin is None else effects.moved(one, margin)


def _part(one: Instance, kind: str, code: str) -> float | None:
    """How much of the difference's square lies along a code's direction, at the causal layer."""
    about = one.measures["sites"].get(kind)
    if about is None or not about["difference"]:
        return None
    component = about["components"].get(about["shared"] if code == "shared" else code)
    return None if component is None else (component / about["difference"]) ** 2


# --- all instances ----------------------------------------------------------------------------------------

NOTES = (
    "Site and layer were chosen on the scenarios of the other fold: the aggregator (or any slot, where named so) whose "
    "cells alone move the decision most, and the layer whose full residual patch does.",
    "A direction is a difference of means over all other scenarios: permit less restrict (the paper's), the first rule "
    "less the second, or the target's rule less the base's. Shared: of these the longest on the other fold.",
    "Random directions are orthogonal to the direction and drawn once a fold. p: how many of their own components "
    "recover as much over all pairs, corrected over directions and sites; at a given norm they are no fair draws, "
    "since a pair's own component always points to the target.",
    "Taken out of the target: 'without the component' projects it out, mean and all, as the paper does; 'halfway' sets "
    "it to the mean of both arms.",
    "In-sample: the layer that is best over the very pairs it is reported for.",
)
HEADLINE = {
    "along": "along permit less restrict",
    "along_shared": "along the shared direction",
    "random_shared": "random at its norm",
    "full": "full patch",
    "along_shared_any_slot": "any slot: shared",
    "full_any_slot": "full",
}


def summarise(instances: Sequence[Instance], config: Settings, floor: float) -> Summary:
    """Recoveries at both sites, gated and ungated, what is lost, and every layer's."""
    return effects.summary(instances, config, floor, find=_effects, tables=_tables, headline=HEADLINE, notes=NOTES)


def _effects(scope: effects.Scope) -> Iterator[Effect]:
    tests = _tests(scope)
    for kind, where in KINDS.items():
        made = list(_at_site(scope, kind, where, tests))
        yield from (
            made if kind == "aggregator" else [one.model_copy(update={"name": f"{one.name}_{kind}"}) for one in made]
        )
    words = {"along": "each along its permit less restrict", "along_shared": "each along its shared", "full": "in full"}
    for name, label in words.items():
        yield scope.recovery(f"{name}_all", f"all aggregators together, {label}", partial(_joined, name=name))


def _at_site(
    scope: effects.Scope, kind: str, where: str, tests: Mapping[tuple[str, str], HypothesisTest]
) -> Iterator[Effect]:
    value, lost = partial(_at, kind=kind), partial(_lost, kind=kind)
    labels = {family: f"component along {conclusion.CODES[code]}" for family, code in CURVES.items()}
    labels |= {"along_shared": "component along the shared direction", "full": "full residual patch"}
    for name, label in labels.items():
        made = scope.recovery(name, f"{label}, {where}", partial(value, name=name))
        tested = made.estimate is not None and (kind, name) in tests
        yield made.model_copy(update={"test": tests[kind, name]}) if tested else made
    gaps = [abs(effects.gap(one)) for one in scope.rows]
    least = max(scope.floor, LEAST * sum(gaps) / max(1, len(gaps)))
    for name, label in {"along": "permit less restrict", "along_shared": "the shared direction"}.items():
        share, words = partial(value, name=name), f"{label}, as a share of the full patch, {where}"
        whole = partial(_number, value=partial(value, name="full"))
        yield conclusion.ratio(scope, name.replace("along", "share"), words, share, whole, least=least)
    for name, label in {**ONCE, **{name: DRAWN[name] for name in DRAWN if name not in LOST}}.items():
        more = {"about": 0.0, "control": True} if name in DRAWN else {"control": name == "orthogonal"}
        yield scope.recovery(name, f"{label}, {where}", partial(value, name=name), **more)
    for name, label in LOST.items():
        more = {"about": 0.0, "control": True} if name in DRAWN else {}
        yield scope.recovery(name, f"{label}, {where}", partial(lost, name=name), **more)
    yield _in_sample(scope, kind, "in_sample", f"along permit less restrict, best layer in-sample, {where}")
    for code, name in {"conclusion": "part", "shared": "part_shared"}.items():
        label = f"part of the difference's square along {conclusion.CODES.get(code, 'the shared direction')}, {where}"
        yield scope.mean(name, label, partial(_part, kind=kind, code=code))


def _number(one: Instance, value: Callable[[Instance], float | None]) -> float:
    return value(one) or 0.0


def _tests(scope: effects.Scope) -> dict[tuple[str, str], HypothesisTest]:
    """Whether a direction's component recovers more than that of random directions, by site and direction, corrected
    over all of them; draw i is one a fold, so its pairs go together. One-sided, p = (b + 1) / (draws + 1)."""
    members = {
        (kind, name): (partial(_at, kind=kind, name=name), partial(_drawn, kind=kind))
        for kind, name in itertools.product(KINDS, TESTED)
    }
    found = scope.permutation_ps(members)
    words = "the own components of {} random directions, BH over {}"
    return {key: effects.different(words.format(n, len(found)), p, sets=n) for key, (p, n) in found.items()}


def _drawn(one: Instance, kind: str) -> list[float]:
    margins = one.measures["margins"].get(kind, {}).get(AGAINST, [])
    return [effects.moved(one, margin) for margin in margins]


def _in_sample(scope: effects.Scope, kind: str, name: str, label: str) -> Effect:
    """The component at the layer that is best over these very pairs."""
    rows = [one for one in scope.rows if kind in one.measures["margins"]]
    means = select.mean_effects(rows, partial(_by_layer, kind=kind, name="along"))
    best = max(means, key=lambda layer: means[layer], default="")
    return scope.recovery(name, label, lambda one: _by_layer(one, kind, "along").get(best))


def _tables(gated: effects.Scope, ungated: effects.Scope) -> dict[str, Table]:
    made: dict[str, Table] = {}
    for kind, where in KINDS.items():
        for family in ("full", *CURVES):
            curve = {"recovery": partial(_by_layer, kind=kind, name=family)}
            made[f"{family} by layer, {where}"] = effects.places("layer", curve, gated=gated, ungated=ungated)
        made[f"cosine between the folds' directions, {where}"] = _cosines(gated, kind)
        made[f"chosen, {where}"] = _chosen(gated, kind)
    return made


def _cosines(scope: effects.Scope, kind: str) -> Table:
    """By layer and code, at the slot that either fold was tested at; one column a code where that is the same slot."""
    found: dict[str, list[float]] = {}
    for one in scope.rows:
        about = one.measures["sites"].get(kind, {"cosines": {}})
        found |= {f"{code}, {about['slot']}": values for code, values in about["cosines"].items()}
    rows: list[list[Any]] = [[layer, *values] for layer, values in enumerate(zip(*found.values(), strict=True))]
    return Table(columns=("layer", *found), rows=rows)


def _chosen(scope: effects.Scope, kind: str) -> Table:
    """How many gated pairs were tested at each slot and layer, and with which shared code."""
    keys = ("slot", "layer", "shared")
    counted = Counter(tuple(one.measures["sites"][kind][key] for key in keys) for one in scope.rows if _has(one, kind))
    return Table(columns=(*keys, "pairs"), rows=[[*found, n] for found, n in counted.most_common()])


def _has(one: Instance, kind: str) -> bool:
    return kind in one.measures["sites"]


if __name__ == "__main__":
    main(__file__)

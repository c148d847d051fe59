"""Attribution: who writes the conclusion onto the aggregator, attention or the MLPs?

Appendix D (5) of "Models Take Notes at Prefill" (arXiv 2606.17107), figure 15c. A site's residual (target - base) is
the sum of what each layer's attention and MLP add, exactly: shares of its component along the conclusion's direction
and by norm, up to the causal layer and over depth. And by causes: the attention's parts alone, or the MLPs', put into
base at the causal layer (frozen), or their outputs patched at every layer up to it, all else recomputed (live).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvnotes import conclusion, effects, sites
from kvnotes.conclusion import JOINT, KINDS
from kvnotes.config import RunConfig
from kvnotes.records import Effect, Instance, Measures, Summary, Table
from kvnotes.runner import main

if TYPE_CHECKING:
    import numpy as np

    from kvnotes.conclusion import Site
    from kvnotes.interventions import Intervention
    from kvnotes.resume import Gathered
    from kvnotes.sweep import Trial

TITLE = "Attribution: attention or the MLPs, which writes the conclusion"
WRITERS = {"attention": "attention", "mlp": "MLPs"}
MARGINS = {
    "single": "slot",
    "notes": "",
    "own full": "site layer",
    "margins": "site family member",
    **{f"{JOINT}.{name}": "" for name in ("full", *WRITERS)},  # the shares beside them are no margins
}
AXES = {  # along which the parts are summed, by how an effect's name ends
    "along": ("", "permit less restrict"),
    "shared": ("_shared", "the shared direction"),
    "own": ("_own", "the pair's own difference"),
}


class Settings(RunConfig):
    """The run's settings and the study's own."""

    draws: int = Field(ge=1, le=10_000, description="random vectors as large as a writer's part")
    every: int = Field(ge=1, description="steps between the layers that the survey patches")


# --- measuring --------------------------------------------------------------------------------------------


def survey(trial: Trial, config: Settings) -> Measures:
    """Each downstream slot alone, and the residual patch by layer at the pair's own best sites."""
    return conclusion.survey(trial, every=config.every)


def gather(trial: Trial, config: Settings, measures: Measures) -> dict[str, np.ndarray]:
    """The residuals that the direction is learned from."""
    return conclusion.gather(trial, measures)


def prepare(instances: Sequence[Instance], config: Settings, gathered: Gathered) -> dict[str, Any]:
    """Site and causal layer, chosen on the other fold."""
    return conclusion.prepare(instances, config, gathered)


def measure(trial: Trial, config: Settings, plan: Measures, *, gathered: Gathered) -> Measures:
    """By site, what each layer's writers add, and margins with one writer's part alone; of all aggregators together."""
    from kvnotes import writers

    found = [conclusion.at(trial, plan, gathered, kind) for kind in KINDS]
    known = [site for site in found if site is not None]
    parts = {site.kind: writers.differences(trial, site.position) for site in known}
    asked = {site.kind: _asked(trial, config, plan, site, parts[site.kind]) for site in known}
    joint, shares = _joint(trial, plan)
    margins = trial.margins([one for some in [*asked.values(), joint] for one in some.values()])
    return {
        "sites": {site.kind: _written(site, parts[site.kind]) for site in known},
        "margins": {
            kind: conclusion.folded({name: margins[one.name] for name, one in some.items()})
            for kind, some in asked.items()
        },
        JOINT: shares | {name: round(margins[one.name], 6) for name, one in joint.items()},
    }


def _written(site: Site, parts: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """By layer: each writer's part along the directions at the causal layer and along the pair's own difference there,
    its norm, and the norm of all its parts so far."""
    import numpy as np

    from kvnotes import writers

    axes = {
        "along": site.directions()[site.layer],
        "shared": site.directions(site.shared)[site.layer],
        "own": conclusion.unit(site.difference[site.layer]),
    }
    length = partial(np.linalg.norm, axis=-1)

    def short(values: np.ndarray) -> list[float]:
        return [round(float(x), 6) for x in values]

    return {
        "slot": site.slot,
        "position": site.position,
        "layer": site.layer,
        "written": site.written,
        "pairs learned from": len(site.learned.arms),
        "difference": short(length(site.difference)),
        "shared code": site.shared,
        **{axis: {name: short(part @ vector) for name, part in parts.items()} for axis, vector in axes.items()},
        "norm": {name: short(length(part)) for name, part in parts.items()},
        "norm so far": {name: short(length(np.cumsum(part, axis=0))) for name, part in parts.items()},
        "error": writers.error(parts, site.difference, size=site.size),
    }


def _asked(
    trial: Trial, config: Settings, plan: Measures, site: Site, parts: Mapping[str, np.ndarray]
) -> dict[str, Intervention]:
    """The interventions at one site, by their short names."""
    import numpy as np

    from kvnotes.interventions import Added, Together
    from kvnotes.writers import POINTS

    patch, layer = conclusion.patch, site.layer
    made: dict[str, Intervention] = {"full": patch(f"{site.kind}:full", site.position, layer, donor="target")}
    nowhere = np.zeros((1, site.difference.shape[-1]))
    drawn = conclusion.random_directions(trial, plan, config, kind=site.kind, n=config.draws, outside=nowhere)
    for name, part in parts.items():
        whole = part[: layer + 1].sum(axis=0)
        size = float(np.linalg.norm(whole))
        vectors = {name: whole, **{f"random_{name}:{i}": size * one for i, one in enumerate(drawn)}}
        for short, vector in vectors.items():
            donor = conclusion.tensor(trial, vector)
            made[short] = patch(f"{site.kind}:{short}", site.position, layer, donor=donor, mix=Added())
        live = [
            patch(f"{site.kind}:live {name} {i}", site.position, i, donor="target", point=POINTS[name])
            for i in range(layer + 1)
        ]
        made[f"{name}_live"] = Together(name=f"{site.kind}:{name}_live", parts=live)
    return made


def _joint(trial: Trial, plan: Measures) -> tuple[dict[str, Intervention], dict[str, float]]:
    """All aggregators together at their causal layer: one writer's parts alone; and the writers' shares of the squared
    difference, each aggregator's parts along its own difference."""
    from kvnotes import writers
    from kvnotes.interventions import Added, Together

    layer, positions = conclusion.chosen_layer(plan, trial.pair, JOINT), sites.aggregators(trial.pair)
    if layer is None or not positions:
        return {}, {}
    parts = {
        p: {name: part[: layer + 1].sum(axis=0) for name, part in writers.differences(trial, p).items()}
        for p in positions
    }
    made: dict[str, Intervention] = {"full": conclusion.full(f"{JOINT}:full", positions, layer)}
    shares: dict[str, float] = {}
    for name in WRITERS:
        donors = {p: conclusion.tensor(trial, own[name]) for p, own in parts.items()}
        together = [
            conclusion.patch(f"{JOINT}:{name}@{p}", p, layer, donor=donor, mix=Added()) for p, donor in donors.items()
        ]
        made[name] = Together(name=f"{JOINT}:{name}", parts=together)
        shares[f"{name} share"] = sum(float(own[name] @ (own["attention"] + own["mlp"])) for own in parts.values())
    return made, shares


def identities(trial: Trial, measures: Measures) -> dict[str, float]:
    """The parts sum to the difference at every layer of every site."""
    errors = [about["error"] for about in measures["sites"].values()]
    return {"parts sum to the difference": effects.worst(errors)} if errors else {}


# --- an instance's numbers, from the record ---------------------------------------------------------------


def _so_far(one: Instance, kind: str, what: str, writer: str) -> float | None:
    """A writer's parts up to the causal layer, summed; None where nothing is written at the site."""
    about = _site(one, kind)
    return None if about is None else sum(about[what][writer][: about["layer"] + 1])


def _site(one: Instance, kind: str) -> Mapping[str, Any] | None:
    about = one.measures["sites"].get(kind)
    return about if about is not None and about["written"] else None


def _whole(one: Instance, kind: str, what: str) -> float:
    return sum(_so_far(one, kind, what, writer) or 0.0 for writer in WRITERS)


def _norm_share(one: Instance, kind: str, what: str) -> float | None:
    """Attention's share of the two norms at the causal layer: of all parts so far, or of this layer's."""
    about = _site(one, kind)
    if about is None:
        return None
    attention, mlp = (about[what][writer][about["layer"]] for writer in WRITERS)
    return attention / (attention + mlp) if attention + mlp else None


def _moved(one: Instance, kind: str, name: str) -> float | None:
    """What an intervention moves, in logits; draws are averaged."""
    margin = one.measures["margins"].get(kind, {}).get(name)
    if isinstance(margin, list):
        margin = sum(margin) / len(margin)
    return None if margin is None else effects.moved(one, margin)


def _joined(one: Instance, name: str) -> float | None:
    margin = one.measures[JOINT].get(name)
    return None if margin is None else effects.moved(one, margin)


def _shared(one: Instance, writer: str) -> float | None:
    """A writer's share of the squared differences of all aggregators, before it is divided by them."""
    return one.measures[JOINT].get(f"{writer} share")


# --- all instances ----------------------------------------------------------------------------------------

NOTES = (
    "Site and layer were chosen on the scenarios of the other fold, directions were learned on all other scenarios: "
    "permit less restrict (the paper's), and the shared one, of three codes the longest on the other fold.",
    "Shares are of the sum over pairs, up to the causal layer; the MLPs' is one minus attention's and may be negative.",
    "By norm: the norm of attention's part over the sum of both norms, which counts what cancels.",
    "Frozen: one writer's parts are added to base's residual at the causal layer. Live: its outputs are the target's "
    "at every layer up to it, and the other writer answers to what it then sees.",
    "Random vectors are as large as the writer's part, drawn once a fold.",
)
HEADLINE = {
    "full": "full patch",
    "attention": "attention's share along permit less restrict",
    "attention_shared": "along the shared direction",
    "attention_norm": "by norm",
    "attention_patched": "attention's part patched",
    "mlp_patched": "MLPs' part patched",
}


def summarise(instances: Sequence[Instance], config: Settings, floor: float) -> Summary:
    """Shares and recoveries at both sites and at all aggregators, gated and ungated, and every layer's parts."""
    return effects.summary(
        instances,
        config,
        floor,
        find=_effects,
        tables=_tables,
        headline=HEADLINE,
        unreported="not reported",  # a share may be of next to nothing where a patch recovers
        notes=NOTES,
    )


def _effects(scope: effects.Scope) -> Iterator[Effect]:
    for kind, where in KINDS.items():
        suffix = "" if kind == "aggregator" else f"_{kind}"
        yield from _shares(scope, kind, suffix, where)
        yield from _patches(scope, kind, suffix, where)
    for writer, label in WRITERS.items():
        own, whole = partial(_shared, writer=writer), lambda o: sum(_shared(o, w) or 0.0 for w in WRITERS)
        name = f"share of the {label}, all aggregators along their own difference"
        yield conclusion.ratio(scope, f"{writer}_all", name, own, whole)
    for name in ("full", *WRITERS):
        label = f"{WRITERS.get(name, 'everything')}, all aggregators together"
        yield scope.recovery(f"{name}_all_patched", label, partial(_joined, name=name))


def _shares(scope: effects.Scope, kind: str, suffix: str, where: str) -> Iterator[Effect]:
    for what, (tail, words) in AXES.items():
        for writer, label in WRITERS.items():
            value = partial(_so_far, kind=kind, what=what, writer=writer)
            yield conclusion.ratio(
                scope,
                f"{writer}{tail}{suffix}",
                f"share of the {label} along {words}, {where}",
                value,
                partial(_whole, kind=kind, what=what),
            )
    for what, name, words in (("norm so far", "norm", "up to the layer"), ("norm", "layer_norm", "at the layer alone")):
        value = partial(_norm_share, kind=kind, what=what)
        yield scope.mean(f"attention_{name}{suffix}", f"attention's share by norm, {words}, {where}", value)


def _patches(scope: effects.Scope, kind: str, suffix: str, where: str) -> Iterator[Effect]:
    yield scope.recovery(f"full{suffix}", f"full residual patch, {where}", partial(_moved, kind=kind, name="full"))
    for writer, label in WRITERS.items():
        for name, tail, words in ((writer, "patched", "frozen"), (f"{writer}_live", "live", "live")):
            value = partial(_moved, kind=kind, name=name)
            yield scope.recovery(f"{writer}_{tail}{suffix}", f"{label} alone, {words}, {where}", value)
        value = partial(_moved, kind=kind, name=f"random_{writer}")
        words = f"random vector as large as the {label}' part, {where}".replace("attention' ", "attention's ")
        yield scope.recovery(f"random_{writer}{suffix}", words, value, about=0.0, control=True)


# --- tables -----------------------------------------------------------------------------------------------

COLUMNS = ("layer", "attention", "MLPs", "attention so far", "MLPs so far", "attention's norm share so far", "pairs")


def _tables(gated: effects.Scope, ungated: effects.Scope) -> dict[str, Table]:
    return {
        f"by layer along {words}, {where}": _by_layer(gated, kind, axis)
        for kind, where in KINDS.items()
        for axis, (_, words) in AXES.items()
    }


def _by_layer(scope: effects.Scope, kind: str, axis: str) -> Table:
    """Over depth: each layer's parts along an axis of the causal layer, as shares of the whole component there, alone
    and summed so far; and attention's share by norm. Pairs of the two folds may have other causal layers."""
    found = [about for one in scope.rows if (about := _site(one, kind)) is not None]
    whole = sum(_whole(one, kind, axis) for one in scope.rows)
    rows: list[list[Any]] = []
    layers = len(found[0]["difference"]) if found and whole else 0
    so_far = dict.fromkeys(WRITERS, 0.0)
    for layer in range(layers):
        here = {w: sum(about[axis][w][layer] for about in found) / whole for w in WRITERS}
        so_far = {w: so_far[w] + here[w] for w in WRITERS}
        norms = [[about["norm so far"][w][layer] for w in WRITERS] for about in found]
        shares = [a / (a + m) for a, m in norms if a + m]
        share = round(sum(shares) / len(shares), 4) if shares else None
        cells = [*here.values(), *so_far.values()]
        rows.append([layer, *(round(x, 4) for x in cells), share, len(found)])
    return Table(columns=COLUMNS, rows=rows)


if __name__ == "__main__":
    main(__file__)

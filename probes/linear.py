"""Linear decodability: where the conclusion can be read off the residual stream, by layer and slot class.

Section 3 (3) of "Models Take Notes at Prefill" (arXiv 2606.17107). Polarity pairs: the 2x2 of field and rule makes the
conclusion independent of both. That it can be decoded does not show that anything reads it; the causal studies do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from kvnotes import discover, effects, probing
from kvnotes.config import RunConfig
from kvnotes.effects import Scope
from kvnotes.probing import ARMS, CLASSES, Fits, Rewritten
from kvnotes.records import Effect, HypothesisTest, Instance, Measures, Summary, Table
from kvnotes.runner import main

if TYPE_CHECKING:
    import numpy as np

    from kvnotes.instance import TokenPair
    from kvnotes.sweep import Trial

TITLE = "Linear decodability of the conclusion"
MARGINS: dict[str, str] = {}  # nothing is edited
CONTROLS = {"control", "memorised"}
LABELS = {"conclusion": "", "rule": "rule_"}  # what the probes look for, and how their effects' names begin
TASKS = {
    "field": "field's value, new neutral rules",
    "conclusion": "conclusion, new neutral rules",
    "control": "random labels by neutral rules, new ones",
    "memorised": "random labels by neutral rules, known ones",
}
NOTES = (
    "conclusion: permit or restrict; rule: whether the first of the two rules applies or the second. Within a scenario "
    "the two are one",
    "AUC and accuracy: L2 logistic probes, two-fold cross-fit over scenarios; intervals take the probes as given",
    "tests: the same design with a ridge probe, which can be fitted anew for every permutation; labels change places "
    "in whole scenarios, so that field and conclusion stay independent. A class's test is of its largest ridge AUC of "
    "any layer, not of the AUC beside it, corrected over classes and labels",
    "a class's own numbers are at the layer that the other fold chose: by inner log-loss, and within scenarios, where "
    "the probes are ridge probes, by accuracy; the controls there are at the field's layer",
)


class Settings(RunConfig):
    """What this study alone is told."""

    pair: Literal["polarity"] = Field(description="polarity: only there is the conclusion independent of the field")
    permutations: int = Field(ge=99, le=100_000, description="permutations of the labels, for the null")
    filler_seeds: int = Field(ge=4, le=16, multiple_of=4, description="sets of neutral rules a prompt is written with")
    randomised: int = Field(ge=0, le=1, description="1: also on randomised weights, which takes their memory again")


def measure(trial: Trial, config: Settings) -> Measures:
    """What each arm concludes, and which position stands for each slot class."""
    return {"labels": probing.labels(trial.pair), "classes": probing.slot_classes(trial.pair)}


def collect(trial: Trial, config: Settings) -> dict[str, np.ndarray]:
    """Residuals after every layer at each slot class, NaN for a class that a prompt lacks: [seed, arm, class, layer,
    d_model], the first seed being the prompt itself; and [arm, class, layer, d_model] on randomised weights."""
    import numpy as np

    own = _read(trial.model, trial.pair, prefix=trial.states["base"].crop(trial.pair.changed[0]))
    others = [_read(trial.model, pair) for pair in _rewritten(trial, config)]
    found = {"residuals": np.stack([own, *others])}
    if config.randomised:
        found["randomised"] = _read(_untrained(trial.model, config.seed), trial.pair)
    return found


@lru_cache(maxsize=1)
def _untrained(model: Any, seed: int) -> Any:
    """One randomised copy a run: it takes seconds to draw."""
    from kvnotes.residuals import randomised

    return randomised(model, seed=seed)


def _read(model: Any, pair: TokenPair | None, **given: Any) -> np.ndarray:
    import numpy as np

    from kvnotes.residuals import residuals

    found = np.full((2, len(CLASSES), model.shape["layers"], model.shape["d_model"]), np.nan, dtype=np.float32)
    if pair is not None:
        places = probing.slot_classes(pair)
        read = residuals(model, pair, list(places.values()), **given)
        found[:, [CLASSES.index(name) for name in places]] = read.transpose(1, 2).numpy()
    return found


def _rewritten(trial: Trial, config: Settings) -> list[TokenPair | None]:
    """The same pair with the neutral rules of other seeds; None where one does not fit the tokenizer."""
    from kvnotes.instance import TokenPair
    from kvnotes.runner import tokenise

    pair, task = trial.pair.pair, discover.task(config.task)
    asked = {"layout": pair.layout, "pair": config.pair, "n": 2, "length": config.length, "wording": config.wording}
    donors = [task.generate(seed=config.seed + more, **asked)[0] for more in range(1, config.filler_seeds)]
    made = tokenise(trial.model, [probing.refilled(pair, donor) for donor in donors], query=config.query)
    return [one if isinstance(one, TokenPair) else None for one in made]


def condense(
    arrays: Mapping[str, np.ndarray], instances: Sequence[Instance], config: Settings
) -> dict[str, np.ndarray]:
    """The arrays by slot class, in the space that their rows span: of all prompts of a layout for `residuals.<class>`
    and `randomised.<class>`, [pair, arm, layer, column]; of all versions of a 2x2 for `inside.<class>`, [pair, seed *
    arm, layer, column]. In half precision, which no regularised probe feels and halves tens of megabytes."""
    layouts, groups = (probing.parts([getattr(one, name) for one in instances]) for name in ("layout", "group"))
    pairs, seeds, arms, *cells = arrays["residuals"].shape
    every = arrays["residuals"].reshape(pairs, seeds * arms, *cells)
    asked = {"residuals": (arrays["residuals"][:, 0], layouts), "inside": (every, groups)}
    if "randomised" in arrays:
        asked["randomised"] = (arrays["randomised"], layouts)
    present = [name for name in CLASSES if any(name in one.measures["classes"] for one in instances)]
    return {
        f"{what}.{name}": _half(probing.condensed(x[:, :, CLASSES.index(name)], among))
        for what, (x, among) in asked.items()
        for name in present
    }


def _half(x: np.ndarray) -> np.ndarray:
    """Half precision, where no number is too large for it."""
    import numpy as np

    return x.astype(np.float16) if np.nanmax(np.abs(x), initial=0.0) < np.finfo(np.float16).max else x


# --- summary ----------------------------------------------------------------------------------------------


Inside = Mapping[str, Mapping[str, Mapping[str, "np.ndarray"]]]  # class, group, task -> accuracy by layer


def summarise(
    instances: Sequence[Instance], config: Settings, floor: float, arrays: Mapping[str, np.ndarray]
) -> Summary:
    """Held-out accuracy and AUC by slot class at the layer that the other fold chose, their controls, and all layers,
    from arrays as `condense` gives them.

    Only whole 2x2 designs count: with one pair alone, the conclusion is the rule's wording.
    """
    import numpy as np

    wide = {name: array.astype(np.float32) for name, array in arrays.items()}

    def fit(rows: list[Instance], own: dict[str, np.ndarray]) -> tuple[dict[str, tuple[Fits, Fits]], Inside]:
        return {label: _fit(rows, own, label, config) for label in LABELS}, _inside(rows, own, config)

    measured = [one for one in instances if one.status != "skipped"]
    found: list[Effect] = []
    tables: dict[str, Table] = {}
    for scope, (fits, inside) in probing.fitted(instances, config, floor, arrays=wide, fit=fit):
        nulls = {(label, name): own for label in LABELS for name, own in fits[label][0].nulls.items()}
        tests = probing.verdicts(nulls)
        for name in _classes(measured):
            for label in LABELS:
                found += _effects(scope, fits[label], label, name, test=tests.get((label, name)))
            found += _inside_effects(scope, fits["conclusion"][0], inside.get(name, {}), name)
        found += [_baseline(scope, fits["conclusion"][0])]
        tables |= _tables(scope, fits, inside) if scope.gated else {}
    return Summary(effects=tuple(found), tables=tables, notes=NOTES, headline=_headline(found))


def _classes(rows: Sequence[Instance]) -> list[str]:
    """Slot classes that every prompt has, in the order of `CLASSES`."""
    return [name for name in CLASSES if rows and all(name in one.measures["classes"] for one in rows)]


def _fit(rows: Sequence[Instance], arrays: Mapping[str, np.ndarray], label: str, config: Settings) -> tuple[Fits, Fits]:
    """Probes of the model, with their nulls, and of the randomised weights."""

    def cells(name: str) -> dict[str, np.ndarray]:
        return {one: arrays[f"{name}.{one}"] for one in _classes(rows) if f"{name}.{one}" in arrays}

    asked = {"label": label, "seed": config.seed}
    return (
        probing.fit_all(rows, cells("residuals"), permutations=config.permutations, **asked),
        probing.fit_all(rows, cells("randomised"), permutations=0, **asked),
    )


def _inside(rows: Sequence[Instance], arrays: Mapping[str, np.ndarray], config: Settings) -> Inside:
    """Accuracies within each 2x2, whose two pairs differ in the field's value alone. A design with a prompt that could
    not be rewritten is left out."""
    import numpy as np

    enough = effects.enough(rows)
    found: dict[str, dict[str, dict[str, np.ndarray]]] = {name: {} for name in _classes(rows) if enough}
    field, seed, arm = (grid.ravel() for grid in np.indices((2, config.filler_seeds, 2)))
    for pairs in probing.parts([one.group for one in rows]):
        group = rows[pairs[0]].group
        labels = np.array([[rows[i].measures["labels"]["conclusion"][name] for name in ARMS] for i in pairs])
        for name, groups in found.items():
            x = arrays[f"inside.{name}"][pairs]
            if np.isfinite(x).all():
                versions = Rewritten(seeds=seed, fields=field == 1, labels=labels[field, arm])
                cells = np.moveaxis(x.reshape(len(field), *x.shape[2:]), 1, 0)
                groups[group] = probing.within(cells, versions, np.random.default_rng([config.seed, *group.encode()]))
    return found


def _effects(
    scope: Scope, fits: tuple[Fits, Fits], label: str, name: str, *, test: HypothesisTest | None
) -> list[Effect]:
    """A class's probes for one label, each fold at the layer that the other fold chose; None where too few designs are
    whole."""
    prefix, words, (own, bare) = LABELS[label], f"{label}, {name.replace('_', ' ')}", fits
    scores, untrained = own.at_chosen(name), bare.at_chosen(name)
    nothing = probing.bounded(scope, "", "", {})
    right = {} if scores is None else probing.by_pair(own.rows, probing.correct(scores.scores, own.prompts.labels))
    made = [
        nothing if scores is None else own.area(scope, scores, test=test),
        probing.bounded(scope, "", "", right),
        nothing if untrained is None else bare.area(scope, untrained),
    ]
    names = (
        (f"auc_{name}", "AUC"),
        (f"accuracy_{name}", "accuracy"),
        (f"randomised_{name}", "AUC, randomised weights"),
    )
    return [
        one.model_copy(
            update={"name": prefix + key, "label": f"{text}: {words}", "control": key.startswith("randomised")}
        )
        for one, (key, text) in zip(made, names, strict=True)
    ]


def _inside_effects(
    scope: Scope, fits: Fits, groups: Mapping[str, Mapping[str, np.ndarray]], name: str
) -> list[Effect]:
    """Accuracies within scenarios, each fold at the layer that is best for the task in the other one (the controls at
    the field's), and the field's selectivity."""
    words, values = name.replace("_", " "), {task: {} for task in TASKS}
    known = [one for one in fits.rows if one.group in groups]
    fold = dict(zip(fits.prompts.scenarios, fits.prompts.folds.tolist(), strict=True))
    for task, own in values.items():
        ruler = "field" if task in CONTROLS else task
        for tested in (0, 1):
            others = {one.group: groups[one.group][ruler] for one in known if fold[one.scenario] != tested}
            if others:
                mean = _mean([*others.values()])
                layer = mean.index(max(mean))
                here = [one for one in known if fold[one.scenario] == tested]
                own |= {one.id: float(groups[one.group][task][layer]) for one in here}
    gain = {key: value - values["control"][key] for key, value in values["field"].items()}
    found = [
        probing.bounded(scope, f"{task}_{name}", f"within: {label}, {words}", values[task], control=task in CONTROLS)
        for task, label in TASKS.items()
    ]
    label = f"within: field minus control, {words}"
    return [*found, scope.mean(f"selectivity_{name}", label, lambda one: gain.get(one.id))]


def _tables(scope: Scope, fits: Mapping[str, tuple[Fits, Fits]], inside: Inside) -> dict[str, Table]:
    """Every layer of every class: AUC with its interval, corrected p, accuracy, and the controls."""
    made: dict[str, Table] = {}
    for label, both in fits.items():
        for title, columns in _columns(scope, *both).items():
            made[f"{scope.layout}, {label}: {title}"] = _by_layer(columns)
    names = list(inside)
    for task in ("field", "conclusion") if any(inside.values()) else ():
        columns = {name: _mean([own[task] for own in inside[name].values()]) for name in names if inside[name]}
        made[f"{scope.layout}, within scenarios: accuracy, {task}"] = _by_layer(columns)
    return (
        made | {f"{scope.layout}: chosen layers": _chosen({label: own for label, (own, _) in fits.items()})}
        if made
        else made
    )


def _columns(scope: Scope, fits: Fits, bare: Fits) -> dict[str, dict[str, list[Any]]]:
    """Numbers by layer, by title and class."""
    from kvnotes import stats

    if not fits.trained:
        return {}
    depth = len(next(iter(fits.trained.values())))
    area = {name: [fits.area(scope, one) for one in found] for name, found in fits.trained.items()}
    p = stats.benjamini_hochberg([one.p for found in fits.nulls.values() for one in found]).reshape(-1, depth)
    found: dict[str, dict[str, list[Any]]] = {
        "AUC on held-out scenarios": {name: [one.estimate for one in own] for name, own in area.items()},
        "AUC, lower end": {name: [one.low for one in own] for name, own in area.items()},
        "AUC, upper end": {name: [one.high for one in own] for name, own in area.items()},
        "p of the permutation test, BH over layers and classes": dict(zip(fits.nulls, p.tolist(), strict=True)),
        "accuracy on held-out scenarios": {
            name: [float(probing.correct(one.scores, fits.prompts.labels).mean()) for one in own]
            for name, own in fits.trained.items()
        },
        "AUC on randomised weights": {
            name: [probing.auc(one.scores, bare.prompts) for one in own] for name, own in bare.trained.items()
        },
    }
    return {title: columns for title, columns in found.items() if columns}


def _mean(found: Sequence[np.ndarray]) -> list[float]:
    import numpy as np

    return np.mean(np.stack(found), axis=0).tolist()


def _by_layer(columns: Mapping[str, Sequence[Any]]) -> Table:
    rows = [[layer, *values] for layer, values in enumerate(zip(*columns.values(), strict=True))]
    return Table(columns=("layer", *columns), rows=rows)


def _chosen(fits: Mapping[str, Fits]) -> Table:
    """By class: the layer that tests either fold, and the layer with the largest held-out AUC, which is in-sample."""
    rows: list[list[Any]] = []
    for label, own in fits.items():
        for name, found in own.trained.items():
            areas = [probing.auc(one.scores, own.prompts) for one in found]
            best = max(range(len(areas)), key=areas.__getitem__)
            rows.append([label, name, *probing.chosen_layers(found), best, areas[best]])
    columns = ("label", "class", "tests fold 0", "tests fold 1", "best layer, in-sample", "its AUC")
    return Table(columns=columns, rows=rows)


def _baseline(scope: Scope, fits: Fits) -> Effect:
    right = probing.by_pair(fits.rows, probing.majority(fits.prompts)) if fits.trained else {}
    return probing.bounded(scope, "majority", "accuracy of the majority label", right, control=True)


def _headline(found: Sequence[Effect]) -> str:
    parts = []
    for label, prefix in LABELS.items():
        areas = [one for one in found if one.gated and one.name.startswith(f"{prefix}auc_")]
        known = {
            one.name.partition("auc_")[2].replace("_", " "): one.estimate for one in areas if one.estimate is not None
        }
        why = areas[0].warning if areas else "no class is in every prompt"
        numbers = ", ".join(f"{name} {value:.2f}" for name, value in known.items())
        n = next((one.n for one in areas if one.estimate is not None), 0)
        parts.append(f"{label}, AUC on held-out scenarios: {numbers or f'none ({why})'} (n={n}, of whole designs)")
    return "; ".join(parts)


if __name__ == "__main__":
    main(__file__)

"""Where a circuit study looks: the aggregators, and the best of them or of all slots by the other fold. No torch.

The paper finds the note at delimiters, its aggregators. Where a model keeps it elsewhere (small Qwen models: at the
rules' action words), the best of all downstream slots stands beside the best aggregator. A slot's rank is the recovery
of its cells alone, at all layers, over the gated instances of the fold that is not tested; the instance's own best slot
is the in-sample choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvnotes import effects, select
from kvnotes.config import RunConfig
from kvnotes.instance import TokenPair
from kvnotes.records import Instance, Measures

if TYPE_CHECKING:
    from kvnotes.sweep import Trial

AGGREGATOR = "delimiter"  # the slot class


def aggregators(pair: TokenPair) -> tuple[int, ...]:
    """The downstream positions whose slot is of the class `delimiter`."""
    names = select.slot_names(pair)
    return tuple(p for p in pair.downstream if select.slot_class(names[p]) == AGGREGATOR)


def survey(trial: Trial) -> Measures:
    """`single`: the margin with each downstream position's cells alone taken from the target, in the order of the
    downstream; `notes`: with all of them. To 1e-6 logits, so that what does nothing ranks equal."""
    from kvnotes.interventions import CacheEdit

    notes = trial.pair.downstream
    sets = {"notes": notes, **{f"single:{p}": (p,) for p in notes}}
    found = trial.margins(
        [CacheEdit(name=name, positions=where, into="base", donor="target") for name, where in sets.items()]
    )
    return {"single": [round(found[f"single:{p}"], 6) for p in notes], "notes": round(found["notes"], 6)}


def prepare(instances: Sequence[Instance], config: RunConfig) -> dict[str, Any]:
    """The slots' ranking on each fold (`select.crossfit`), and each instance's own order of its downstream positions,
    from what `survey` measured."""
    return {
        "ranking": select.crossfit(instances, config.seed, lambda rows: select.rank(rows, moved)),
        "in_sample": {one.id: select.best(_positions(one)) for one in instances},
    }


def moved(one: Instance) -> dict[str, float]:
    """How far each downstream slot's cells alone move the margin, in logits, by slot."""
    return select.by_slot(one, [effects.moved(one, margin) for margin in one.measures["single"]])


def lost(one: Instance) -> dict[str, float]:
    """What is lost, of all notes' effect, without each slot's cells (the margins `without` of a survey), in logits."""
    return select.by_slot(one, [one.measures["notes"] - margin for margin in one.measures["without"]])


def either(one: Instance) -> dict[str, float]:
    """A slot's first and last marginal effect, in logits: alone, and what is lost of all notes without it. One of them
    is 0 where notes work only together, the other where they are redundant."""
    missing = lost(one)
    return {slot: (value + missing[slot]) / 2 for slot, value in moved(one).items()}


def _positions(one: Instance) -> dict[int, float]:
    return dict(zip(select.downstream(one), one.measures["single"], strict=True))


def best(plan: Mapping[str, Any], pair: TokenPair, *, among: Iterable[int]) -> int | None:
    """Of some positions, the one whose slot the other fold ranks highest; None where there is none of them.

    A slot that no gated instance of that fold has ranks below all that one has.
    """
    order = in_order(plan, pair, among=among)
    return order[0] if order else None


def in_order(plan: Mapping[str, Any], pair: TokenPair, *, among: Iterable[int]) -> list[int]:
    """The positions by the other fold's ranking, the best first."""
    names, own = select.slot_names(pair), pair.pair
    ranking = select.choice(plan["ranking"], layout=own.layout, scenario=own.scenario)
    return select.in_order(ranking, list(among), lambda p: names[p])


def in_sample(plan: Mapping[str, Any], pair: TokenPair, *, among: Iterable[int]) -> int | None:
    """The position that moves this very instance most (chosen and tested on it, as the paper's); None without any."""
    wanted = set(among)
    return next((p for p in plan["in_sample"][pair.pair.id] if p in wanted), None)

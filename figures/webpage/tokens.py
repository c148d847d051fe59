"""The token view's data: each pair's tokens and what a record says of them, as recoveries in ten-thousandths. No torch.

Two studies measure single tokens. `suffix` has each downstream token's cells alone and all notes without them, and on
some pairs every (layer, token) alone. `heads` has each token's cells alone, the first-order effect of every head's z at
some tokens, every head's z alone at the decision, and every KV head's downstream cells alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from figures import style
from kvnotes import effects, select
from kvnotes.records import Instance, Record

STUDIES = ("suffix", "heads")
MOST = {"suffix": 48, "heads": 12}  # pairs of a record: one of `heads` has a number a head at each of its tokens
WHOLE = ("write_all", "write_all_slots")  # estimates that are of several tokens together
PLACES = 4  # decimals of a recovery; the page rounds to two or three
NOISE = 1e-6  # of the last place: a number that is so near to it stands there
_CELLS = ("R", "low", "high", "p")


def view(record: Record) -> dict[str, Any] | None:
    """A record as the page's script reads it; None for a study of no single tokens, or without an included pair.

    Raises:
        KeyError: if its instances lack what the study of now measures.
    """
    kept = _kept(record)
    if record.study not in STUDIES or not kept:
        return None
    pairs = [_pair(one) for one in kept]
    return {
        "study": record.study,
        "layers": record.model.layers,
        "heads": record.model.heads,
        "kvHeads": record.model.kv_heads,
        "included": _included(record),
        "spans": list(dict.fromkeys(span for one in kept for span in one.spans)),
        "words": _words(record, kept),
        "tables": {layout: _tables(record, layout) for layout in effects.layouts(kept)},
        "pairs": pairs,
    }


def _included(record: Record) -> dict[str, int]:
    """Included pairs by layout: a table is of one."""
    kept = [one.layout for one in record.instances if one.status == "included"]
    return {layout: kept.count(layout) for layout in dict.fromkeys(kept)}


def _kept(record: Record) -> list[Instance]:
    """The included instances that are shown; where they are too many, those with a layer map, then one a scenario."""
    held = [one for one in record.instances if one.status == "included" and one.tokens is not None]
    seen: dict[str, int] = {}
    rank: dict[str, tuple[bool, int]] = {}
    for one in held:
        rank[one.id] = (not one.measures.get("map"), seen.setdefault(one.scenario, 0))
        seen[one.scenario] += 1
    first = sorted(held, key=lambda one: rank[one.id])[: MOST.get(record.study, 0)]
    names = {one.id for one in first}
    return [one for one in held if one.id in names]


def _words(record: Record, kept: Iterable[Instance]) -> dict[str, str]:
    """The text of the shown pairs' tokens; empty where the record has none."""
    shown: dict[int, None] = {}
    for one in kept:
        if one.tokens is not None:
            own = one.tokens
            shown |= dict.fromkeys((*own.base, *own.target, own.base_action, own.target_action))
    return {str(i): record.vocabulary[str(i)] for i in sorted(shown)} if record.vocabulary else {}


def _pair(one: Instance) -> dict[str, Any]:
    """Everything of one pair; raises ValueError for one that was skipped."""
    if one.tokens is None:
        raise ValueError(f"{one.id} was skipped, it has no tokens")
    own, gate = one.tokens, effects.gate(one)
    owner = [span for _, span in sorted((p, s) for s, ranges in one.spans.items() for r in ranges for p in range(*r))]
    return {
        "id": one.id,
        "scenario": one.scenario,
        "layout": one.layout,
        "kind": one.kind,
        "base": list(own.base),
        "target": {p: own.target[p] for p in own.changed},
        "changed": list(own.changed),
        "query": list(own.query),
        "owner": owner,
        "actions": [own.base_action, own.target_action],
        "margins": [round(float(m or 0.0), 2) for m in (gate.base_margin, gate.target_margin)],
        "at": list(select.downstream(one)),
        "single": _recoveries(one, one.measures["single"]),
        **_of_suffix(one),
        **_of_heads(one),
    }


def _of_suffix(one: Instance) -> dict[str, Any]:
    """What notes-only loses without each token, and the recovery of every (layer, token) alone."""
    if "without" not in one.measures:
        return {}
    lost = [one.measures["notes"] - margin for margin in one.measures["without"]]
    found: dict[str, Any] = {"lost": _parts(one, lost)}
    if one.measures["map"]:
        found["map"] = [_recoveries(one, row) for row in one.measures["map"]]
    return found


def _of_heads(one: Instance) -> dict[str, Any]:
    """By head, in the order of `kvnotes.heads.names`: first-order effects by position, exact ones at the decision."""
    if "estimates" not in one.measures:
        return {}
    measured, slots = one.measures, {name: p for p, name in enumerate(select.instance_slots(one))}
    estimates = {name: values for name, values in measured["estimates"].items() if name not in WHOLE}
    both = (measured["attributed"][run]["heads"] for run in ("base", "target"))
    attention = measured["attention"]
    return {
        "estimates": {slots[name]: _parts(one, values) for name, values in estimates.items()},
        "layers": {slots[name]: _parts(one, _layers(one, values)) for name, values in estimates.items()},
        "alone": _recoveries(one, measured["alone"]),
        "kv": _recoveries(one, measured["kv"]),
        "direct": _parts(one, [b - a for a, b in zip(*both, strict=True)]),
        "attends": {name: list(map(part, shares)) for name, shares in attention["heads"].items()},
        "named": attention["named"],
        "random": attention["random"],
    }


def _recoveries(one: Instance, margins: Sequence[float]) -> list[int]:
    return _parts(one, [effects.moved(one, margin) for margin in margins])


def _layers(one: Instance, values: Sequence[float]) -> list[float]:
    """What a layer's heads add up to, by layer."""
    per = one.measures["per_layer"]["heads"]
    return [sum(values[at : at + per]) for at in range(0, len(values), per)]


def _parts(one: Instance, logits: Sequence[float]) -> list[int]:
    gap = effects.gap(one)
    return [part(value / gap) for value in logits]


def part(value: float) -> int:
    """A number in units of the last of `PLACES`, cut off; a 0 or 5 in that place that more follows goes one up. Rounded
    again to fewer places it gives what the number itself does (`ROUND_05UP` of decimal)."""
    exact = value * 10**PLACES
    if abs(exact - round(exact)) < NOISE:
        return round(exact)
    cut = math.trunc(exact)
    return cut if cut % 5 else cut + (1 if exact > 0 else -1)


def _tables(record: Record, layout: str) -> dict[str, Any]:
    """Estimates over all included pairs, with interval and p: by slot, layer, head and KV head, where there are any."""
    wanted = {
        "suffix": {"alone": ("by slot", "alone"), "lost": ("by slot", "lost"), "layers": ("by layer", "alone")},
        "heads": {"heads": ("read heads", "alone"), "direct": ("read heads", "direct"), "kv": ("KV heads", "alone")},
    }[record.study]
    return {key: dict(_column(record, layout, *where)) for key, where in wanted.items()}


def _column(record: Record, layout: str, name: str, kind: str) -> Iterator[tuple[str, list[float | None]]]:
    """By place, its estimate, interval and p of a kind."""
    tables: Mapping[str, Any] = record.summary.tables
    table = tables.get(f"{name}, {layout}", tables.get(name))
    columns = [] if table is None else [table.columns.index(f"{kind} {cell}") for cell in _CELLS]
    for row in table.rows if table is not None else ():
        values = [row[at] for at in columns]
        yield str(row[0]), [float(v) if isinstance(v, int | float) else None for v in values]


def attention(record: Record) -> list[tuple[str, list[str], list[list[tuple[str, float | None]]]]]:
    """The named read heads' mean attention from the decision by token class: each layout's name, classes and rows of
    cells, which are words and, where it is one, the share."""
    found = []
    for name, table in record.summary.tables.items():
        if name.startswith("attention of the read heads") and table.rows:
            rows = [[*((str(cell), None) for cell in row[:2]), *map(_share, row[2:])] for row in table.rows]
            found.append((name, list(table.columns), rows))
    return found


def _share(value: Any) -> tuple[str, float | None]:
    if isinstance(value, int | float):
        return style.number(value), float(value)
    return "" if value is None else str(value), None

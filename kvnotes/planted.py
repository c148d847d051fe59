"""Models whose mechanism is set by hand, so that every study's right answer is known.

Each is a small Llama checkpoint (6 layers, 4 heads, fp32) with a word-level tokenizer, in the format of
Hugging Face. Its gated decisions come from `tasks.planted`. What the kinds do, layer by layer:

| layer | what is written where | kinds |
|---|---|---|
| 0 | a value word learns that `=` precedes it, or which action stands two words before it | all |
| 1 | a note delimiter copies the field's value | all but direct |
| 2 | a note delimiter looks up the rule with this value and copies its action: the note | all but direct |
| 3 | the decision copies the field's value | direct, mixed, and |
| 4 | the decision reads the notes, looks the rule up itself, or both | all |

Layer 5 is idle, and so is every head not named: it attends at random and its output weights are zero. The
first note delimiter holds a note in every kind but `direct`; the second in `both` and `and`.

`and` is a majority of three: note, note, and the decision's own look-up. Two notes alone cannot make single
effects 0 for pairs of both directions: with f(note, note), f(-, +) would have to be the base's conclusion
whichever the base is. The look-up still says the base's when only downstream cells are edited, so that one
note alone loses to it and both together win.

This module is light; the weights are made by `kvnotes.planted_weights`, imported when a folder is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Literal, get_args

from kvnotes.errors import UnknownName

Kind = Literal["notes", "direct", "mixed", "both", "and"]
ALPHA = 0.7  # share of `mixed` that goes through the note

LAYERS = 6
HEADS = 4
GATHER_LAYER, WRITE_LAYER, DIRECT_GATHER_LAYER, READ_LAYER = 1, 2, 3, 4


@dataclass(frozen=True, kw_only=True, order=True)
class Site:
    """A query head of a layer, both counted from 0."""

    layer: int
    head: int


MARK_HEAD = Site(layer=0, head=1)
BIND_HEAD = Site(layer=0, head=3)
GATHER_HEAD = Site(layer=GATHER_LAYER, head=2)
WRITE_HEAD = Site(layer=WRITE_LAYER, head=1)
DIRECT_GATHER_HEAD = Site(layer=DIRECT_GATHER_LAYER, head=0)
READ_HEADS = (Site(layer=READ_LAYER, head=3), Site(layer=READ_LAYER, head=2))  # of the first and second note
DIRECT_HEAD = Site(layer=READ_LAYER, head=1)


@dataclass(frozen=True, kw_only=True)
class PlantedSpec:
    """What is known of a planted model.

    `notes` and `direct` say how much each note and the decision's own look-up add to it, as parts of 1; in
    `and` they are votes of 1 each. `expected` maps study -> measure -> value: recoveries, shares, and layers
    (the layer after which something first holds), fp32, exact to 1e-3 for pairs of `tasks.planted` in either
    layout.
    """

    kind: Kind
    kv_heads: int
    notes: tuple[float, ...]
    direct: float
    expected: Mapping[str, Mapping[str, float]]

    @property
    def name(self) -> str:
        """The name under which the model is asked for."""
        return f"planted-{self.kind}" + ("" if self.kv_heads == HEADS else "-gqa")

    @property
    def heads(self) -> int:
        """Query heads a layer."""
        return HEADS

    @property
    def alpha(self) -> float:
        """Share of the decision that goes through notes: the recovery of notes-only."""
        return self.expected["locality"]["notes_only"]

    @property
    def write_head(self) -> Site | None:
        """The head that writes the conclusion on every note delimiter; None where there is no note."""
        return WRITE_HEAD if self.notes else None

    @property
    def write_layer(self) -> int | None:
        """The layer of the write head: after it the note's residual holds the conclusion."""
        return WRITE_LAYER if self.notes else None

    @property
    def read_heads(self) -> tuple[Site, ...]:
        """The heads whose z at the decision carries the conclusion: one a note, then the direct one."""
        return READ_HEADS[: len(self.notes)] + ((DIRECT_HEAD,) if self.direct else ())

    @property
    def read_head(self) -> Site:
        """The first of the read heads; the only one in `notes` and `direct`."""
        return self.read_heads[0]

    @property
    def read_layer(self) -> int:
        """The layer of the read heads: after it the decision's logits hold the conclusion."""
        return READ_LAYER

    def kv_head(self, site: Site) -> int:
        """The KV head that a query head reads: query heads are grouped in blocks of equal size."""
        return site.head // (HEADS // self.kv_heads)


def _heads(
    *, single: tuple[float, float], direct: float, write: float, ranked: bool, shared: bool
) -> Mapping[str, float]:
    """What heads do. Where no head shows alone (`and`, whose MLP decides), which ones are best is chance."""
    note = sum(single) if shared else max(single)  # with shared KV heads both notes are read from one
    if not ranked:
        return {
            "all_heads": 1.0,
            "direct_heads": 0.0,
            "direct_mlps": 1.0,
            "read_1": 0.0,
            "write_1": 0.0,
            "kv_1": float(shared),
        }
    reads = zip((*READ_HEADS, DIRECT_HEAD), (*single, direct), strict=True)
    named = {f"head_{site.layer}.{site.head}": value for site, value in reads if value}
    writer = f"head_{WRITE_HEAD.layer}.{WRITE_HEAD.head}"
    return {
        "all_heads": 1.0,
        "direct_heads": 1.0,
        "direct_mlps": 0.0,
        "read_1": max(*single, direct),
        "read_12": 1.0,
        "read_in_sample_1": max(*single, direct),
        "read_random_8": 0.0,
        "read_rest": 0.0,
        **named,
        "write_1": max(single),
        "write_12": max(single),
        "write_sum": max(single),
        "write_random_12": 0.0,
        "write_any_slot_1": max(single),
        "write_all_1": write,
        "write_all_12": write,
        "write_all_sum": write,
        "write_all_random_12": 0.0,
        "write_all_slots_1": write,
        **({f"write_{writer}": max(single), f"write_all_{writer}": write} if write else {}),
        "kv_1": note,
    }


def _expected(
    *,
    field_only: float,
    single: tuple[float, float],
    rest: tuple[float, float],
    direct: float,
    write: float,
    shared: bool,
) -> Mapping[str, Mapping[str, float]]:
    """The table of one kind. `single[i]`: note i's cells alone; `rest[i]`: all other downstream cells.

    `direct`: its own look-up alone; `write`: the write head at all notes; `shared`: query heads share KV heads.
    """
    notes_only, best = 1 - field_only, max(single)
    written = {"write_depth": WRITE_LAYER} if notes_only else {}
    # where no note shows alone, single effects rank at random, and random sets may hold all notes
    ranked = math.isclose(sum(single), notes_only)
    eight = {"top_8": notes_only, "random_8": 0.0} if ranked else {}
    table = {
        "locality": {"field_only": field_only, "notes_only": notes_only, "full_downstream": 1.0},
        "suffix": {
            "first_note": single[0],
            "second_note": single[1],
            "other_positions": 0.0,
            "without_first_note": rest[0],
            "without_second_note": rest[1],
            "top_1": best,
            "both_2": notes_only,  # ranked by single effects and leave-one-out, which shows the notes of `and`
            **({"random_8": 0.0} if ranked else {}),
        },
        "specificity": eight,
        # a note's mean over both conclusions, or no note, leaves the decision half way
        "knockout": {
            "resample_1": best,
            "resample_all": notes_only,
            "mean_1": best / 2,
            "block_1": best / 2,
            **({"random_resample_8": 0.0} if ranked else {}),
        },
        "linear": {"auc_decision": 1.0, "auc_aggregator": 1.0 if notes_only else 0.5},
        # In a polarity pair the trigger's cells hold value and action, as the field's cells hold the value.
        "dissociation": {
            "trigger_only": field_only,
            "notes": notes_only,
            "same_conclusion": 0.0,
            "other_field": notes_only,
        },
        "injection": {"full_notes": notes_only, "follow_rate": float(notes_only > 0.5), **eight},
        "timing": {"commit_depth": READ_LAYER, "read_depth": READ_LAYER, **written},
        # a correction after the notes is read by the decision's own look-up alone, which then holds both values
        "wording": {"recovery_bare_value": field_only / 2, "recovery_old_value": 0.0},
        "heads": _heads(single=single, direct=direct, write=write, ranked=ranked, shared=shared),
        # drawn random directions are orthogonal to the note's; without its conclusion the decision is half way
        "direction": {
            "along": best,
            "full": best,
            "random_own": 0.0,
            "orthogonal": 0.0,
            "projected": best / 2,
            "along_all": write,
            "full_all": write,
        },
        "attribution": _attribution(best=best, write=write, ranked=ranked),
        "scrubbing": {
            "drift": 0.0,
            "swap": notes_only,
            "note_swap": notes_only,
            "rest_swap": 0.0,
            "note_minus_rest": notes_only,
            "scrubbed": 0.0,
            "note_swap_any_slot": notes_only,
            "rest_swap_any_slot": 0.0,
            "note_swap_wrong": 0.0,
            "rest_swap_wrong": notes_only,
            "drift_field": 0.6 * notes_only,  # 3 of the 5 lenders that share the field conclude otherwise
        },
    }
    return MappingProxyType({study: MappingProxyType(values) for study, values in table.items()})


def _attribution(*, best: float, write: float, ranked: bool) -> Mapping[str, float]:
    """What attention and the MLPs write onto the best aggregator and onto all; nothing is written in `direct`, and no
    single aggregator shows the notes of `and`."""
    patched = {"attention_patched": best, "mlp_patched": 0.0, "attention_all_patched": write, "mlp_all_patched": 0.0}
    if not write:
        return {"full": 0.0, **patched}
    alone = {"attention": 1.0, "mlp": 0.0, "attention_norm": 1.0} if ranked else {}
    joint = {name: value for name, value in patched.items() if ranked or "_all_" in name}
    return {**alone, "attention_all": 1.0, **joint}


def _spec(kind: Kind, kv_heads: int) -> PlantedSpec:
    shared = kv_heads < HEADS
    notes, direct, expected = {
        "notes": (
            (1.0,),
            0.0,
            _expected(field_only=0.0, single=(1.0, 0.0), rest=(0.0, 1.0), direct=0.0, write=1.0, shared=shared),
        ),
        "direct": (
            (),
            1.0,
            _expected(field_only=1.0, single=(0.0, 0.0), rest=(0.0, 0.0), direct=1.0, write=0.0, shared=shared),
        ),
        "mixed": (
            (ALPHA,),
            1 - ALPHA,
            _expected(
                field_only=1 - ALPHA,
                single=(ALPHA, 0.0),
                rest=(0.0, ALPHA),
                direct=1 - ALPHA,
                write=ALPHA,
                shared=shared,
            ),
        ),
        "both": (
            (0.5, 0.5),
            0.0,
            _expected(field_only=0.0, single=(0.5, 0.5), rest=(0.5, 0.5), direct=0.0, write=1.0, shared=shared),
        ),
        "and": (
            (1.0, 1.0),
            1.0,
            _expected(field_only=0.0, single=(0.0, 0.0), rest=(0.0, 0.0), direct=0.0, write=1.0, shared=shared),
        ),
    }[kind]
    return PlantedSpec(kind=kind, kv_heads=kv_heads, notes=notes, direct=direct, expected=expected)


_SPECS = tuple(_spec(kind, kv_heads) for kv_heads in (HEADS, HEADS // 2) for kind in get_args(Kind))
PLANTED: Mapping[str, PlantedSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})


def build(name: str, folder: Path) -> Path:
    """Write the planted model `name` and its tokenizer into `folder`, which is made, and return the folder.

    Each file is put in place whole, over an equal older one, so that runs beside each other read one or the
    other. The bytes depend on the name and the versions of torch, transformers and tokenizers only. Raises
    UnknownName for a model that is not in PLANTED.
    """
    if name not in PLANTED:
        raise UnknownName(kind="planted model", name=name, known=PLANTED)
    from transformers.utils import logging

    logging.disable_progress_bar()
    from kvnotes import planted_weights

    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as unfinished:
        planted_weights.model(PLANTED[name]).save_pretrained(unfinished)
        planted_weights.tokenizer().save_pretrained(unfinished)
        for file in Path(unfinished).iterdir():
            file.replace(folder / file.name)
    return folder

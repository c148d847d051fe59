"""How much is timed: the full benchmark and the quick one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.results import Length
from bench.workloads import Stride

ALL = 10**9


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Lengths, repeats and subsets. A length of 0 is the layout's own, about 107 tokens."""

    name: str
    lengths: Mapping[Length, int]
    rounds: Mapping[tuple[str, Length], int]  # repeats of ours, by workload
    peer_rounds: int
    strides: Mapping[Length, Stride]
    screens: tuple[Length, ...]  # where the screened W3 is run
    subsets: Mapping[tuple[str, str, Length], int]  # interventions that a peer is timed on
    optional: Mapping[Length, int]  # the same for the peers that are no bound
    curve_lengths: tuple[int, ...]
    curve_edits: tuple[int, ...]
    curve_rounds: int

    @property
    def suffix(self) -> str:
        """What the record's name has beside the model's."""
        return "" if self.name == "full" else f"-{self.name}"

    def subset(self, workload: str, peer: str, length: Length) -> int:
        """How many interventions a peer is timed on."""
        return self.subsets.get((workload, peer, length), self.optional[length])


LONG = 1040  # a setting that makes prompts of about 960 tokens with the default model's tokenizer
FROZEN, HF64, HF1 = "frozen-cache full forwards", "Hugging Face, batch of 64", "Hugging Face, one at a time"
TL, DECODE = "TransformerLens patching", "one head a cached bridge decode"

FULL = Plan(
    name="full",
    lengths={"short": 0, "long": LONG},
    rounds={
        ("W1", "short"): 3,
        ("W2", "short"): 3,
        ("W3", "short"): 1,
        ("W1", "long"): 3,
        ("W2", "long"): 3,
        ("W3", "long"): 1,
    },
    peer_rounds=3,
    strides={"short": Stride(), "long": Stride(layers=4, positions=64)},
    screens=("short", "long"),
    subsets={
        ("W1", FROZEN, "short"): 12,
        ("W1", FROZEN, "long"): 3,
        ("W1", HF64, "short"): ALL,
        ("W1", HF64, "long"): ALL,
        ("W1", HF1, "short"): ALL,
        ("W1", HF1, "long"): 32,
        ("W2", TL, "short"): 12,
        ("W2", TL, "long"): 3,
        ("W2", DECODE, "short"): 48,
        ("W2", DECODE, "long"): 32,
        ("W3", TL, "short"): 12,
        ("W3", TL, "long"): 3,
    },
    optional={"short": 6, "long": 2},
    curve_lengths=(0, 200, 500, LONG, 2000, 4000),
    curve_edits=(1, 4, 16, 64, 256, ALL),
    curve_rounds=2,
)

QUICK = Plan(
    name="quick",
    lengths={"short": 0, "long": LONG},
    rounds={
        ("W1", "short"): 3,
        ("W2", "short"): 2,
        ("W3", "short"): 1,
        ("W1", "long"): 1,
        ("W2", "long"): 2,
        ("W3", "long"): 1,
    },
    peer_rounds=1,
    strides={"short": Stride(layers=4, positions=8), "long": Stride(layers=12, positions=400)},
    screens=("short",),
    subsets={
        ("W1", FROZEN, "short"): 6,
        ("W1", FROZEN, "long"): 1,
        ("W1", HF64, "short"): ALL,
        ("W1", HF64, "long"): 128,
        ("W1", HF1, "short"): 16,
        ("W1", HF1, "long"): 8,
        ("W2", TL, "short"): 6,
        ("W2", TL, "long"): 1,
        ("W2", DECODE, "short"): 24,
        ("W2", DECODE, "long"): 12,
        ("W3", TL, "short"): 6,
        ("W3", TL, "long"): 1,
    },
    optional={"short": 4, "long": 1},
    curve_lengths=(0, 200, 500, LONG),
    curve_edits=(1, 4, 16, 64, 256),
    curve_rounds=2,
)

"""What a benchmark found, its bounds, and the JSON record of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bench.measure import Fit, Timing
from kvnotes.records import RecordError, write_atomically

SCHEMA = "kvnotes-bench-1"
SAME = 1e-4  # recoveries that differ by no more are equal
MISSED = 0.05  # a cell that a screen must not leave out
LEAST = 0.01  # what the screen keeps, in recovery to first order: well below MISSED, since gradients understate

Length = Literal["short", "long"]

# workload, peer, then the least ratio and the aimed one at the short and the long prompt
RATIOS = (
    ("W1", "frozen-cache full forwards", (130, 200), (1500, 2000)),
    ("W1", "Hugging Face, batch of 64", (2, 3), (4, 5)),
    ("W2", "TransformerLens patching", (300, 400), (2700, 3500)),
    ("W2", "one head a cached bridge decode", (50, 70), (60, 80)),
    ("W3", "TransformerLens patching", (9, 12), (7, 10)),
)
SHARES = (("W1", (0.5, 0.75), (0.55, 0.75)), ("W2", (0.6, 0.75), (0.6, 0.75)), ("W3", (0.6, 0.75), (0.55, 0.75)))
MEMORY = ((0.5, 0.2), (1.0, 0.5))  # GB at most
SCREENED = 50  # times the exact peer, aimed at with the short prompt


@dataclass(frozen=True, kw_only=True)
class PeerResult:
    """A peer's answers: what it was timed on, its seconds for all of them, and how far its recoveries are from ours."""

    name: str
    timed: int
    of: int
    repeats: tuple[float, ...]  # seconds of those that were timed
    largest_difference: float | None
    skipped: str | None  # why it was not run

    @property
    def scaled(self) -> bool:
        """Whether its seconds are scaled up from a subset."""
        return self.timed < self.of

    @property
    def seconds(self) -> float | None:
        """For all interventions: the best repeat, scaled where a subset was timed."""
        return min(self.repeats) * self.of / self.timed if self.repeats else None

    @property
    def subset(self) -> str:
        """Which interventions were timed."""
        return f"{self.timed} of {self.of}, evenly spaced" if self.scaled else "all"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One workload at one length: ours, and the peers beside it."""

    workload: str
    what: str
    length: Length
    tokens: int
    interventions: int
    timing: Timing  # the two traces and what is captured from them excluded
    capture: Timing
    traces: Timing
    flops: int
    memory: int | None
    peers: tuple[PeerResult, ...]

    @property
    def with_traces(self) -> float:
        """Seconds from nothing: both arms run, their activations captured, the interventions answered."""
        return self.traces.best + self.capture.best + self.timing.best

    def ratio(self, peer: PeerResult) -> float | None:
        """How many times our seconds a peer takes."""
        return None if peer.seconds is None else peer.seconds / self.timing.best


@dataclass(frozen=True, kw_only=True)
class Screened:
    """The screened W3 against the exact sweep: what it left out, and what that cost."""

    length: Length
    tokens: int
    least: float  # recovery to first order above which a cell is kept
    interventions: int
    kept: int
    repeats: tuple[float, ...]
    ratio: float | None  # against TransformerLens patching
    missed: int  # cells left out whose recovery is above 0.05
    largest_missed: float  # recovery
    largest_difference: float  # of the kept cells, in recovery


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Seconds against one quantity, and the fitted exponent."""

    what: str
    x: tuple[int, ...]
    seconds: tuple[float, ...]
    fit: Fit | None


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What issue 3 asks for, and what was measured. `met` and `aim_met` are None where nothing was measured."""

    name: str
    length: Length
    at_least: bool
    required: float | None
    aim: float
    measured: float | None
    met: bool | None
    aim_met: bool | None


def peak(record: Mapping[str, Any]) -> float:
    """The matmul peak that shares are of: the larger of those before and after."""
    return max(record["machine"]["matmul_peak_flops"].values())


def described(result: Result, matmul: float) -> dict[str, Any]:
    """A result as the record keeps it."""
    plain = asdict(result)
    peers = [
        asdict(peer)
        | {"scaled": peer.scaled, "subset": peer.subset, "seconds": peer.seconds, "ratio": result.ratio(peer)}
        for peer in result.peers
    ]
    best, share = result.timing.best, result.flops / result.timing.best / matmul
    return plain | {"peers": peers, "seconds": best, "with_traces": result.with_traces, "share_of_peak": share}


def bounds(results: Sequence[Result], screened: Sequence[Screened], matmul: float) -> list[Bound]:
    """Every bound of issue 3's table, with what was measured."""
    found = [*_ratios(results), *_shares(results, matmul), *_memory(results)]
    return [*found, *(_screened(one) for one in screened if one.length == "short")]


def write(record: Mapping[str, Any], path: Path) -> None:
    """Write the record whole or not at all."""
    text = json.dumps(record, indent=1, allow_nan=False, sort_keys=False)
    write_atomically((text + "\n").encode(), path)


def read(path: Path) -> dict[str, Any]:
    """A benchmark's record. Raises RecordError for another file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as err:
        raise RecordError(f"{path} is no JSON: {err}") from err
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise RecordError(f"{path} is no record of the benchmark")
    return record


def _ratios(results: Sequence[Result]) -> Iterable[Bound]:
    for workload, name, *per_length in RATIOS:
        for result, (required, aim) in _at(results, workload, per_length):
            peer = next(one for one in result.peers if one.name == name)
            equal = peer.largest_difference is not None and peer.largest_difference <= SAME
            yield _least(f"{workload} against {name}", result.length, required, aim, result.ratio(peer), equal=equal)


def _shares(results: Sequence[Result], matmul: float) -> Iterable[Bound]:
    for workload, *per_length in SHARES:
        for result, (required, aim) in _at(results, workload, per_length):
            share = result.flops / result.timing.best / matmul
            yield _least(f"{workload}, share of the matmul peak", result.length, required, aim, share)


def _memory(results: Sequence[Result]) -> Iterable[Bound]:
    for length, (required, aim) in zip(("short", "long"), MEMORY, strict=True):
        held = [one.memory for one in results if one.length == length]
        most = None if None in held or not held else max(x for x in held if x is not None) / 1e9
        if held:
            yield Bound(
                name="memory above weights and the two traces, GB",
                length=length,
                at_least=False,
                required=required,
                aim=aim,
                measured=most,
                met=None if most is None else most <= required,
                aim_met=None if most is None else most <= aim,
            )


def _screened(one: Screened) -> Bound:
    reached = None if one.ratio is None else one.ratio >= SCREENED and one.missed == 0
    return Bound(
        name="W3 screened against TransformerLens patching, no cell above 0.05 missed",
        length=one.length,
        at_least=True,
        required=None,
        aim=SCREENED,
        measured=one.ratio,
        met=None,
        aim_met=reached,
    )


def _at(results: Sequence[Result], workload: str, per_length: Sequence[Any]) -> Iterable[tuple[Result, Any]]:
    """The workload's results with the bounds of their length."""
    return [(one, per_length[0 if one.length == "short" else 1]) for one in results if one.workload == workload]


def _least(
    name: str, length: Length, required: float, aim: float, measured: float | None, *, equal: bool = True
) -> Bound:
    return Bound(
        name=name,
        length=length,
        at_least=True,
        required=required,
        aim=aim,
        measured=measured,
        met=None if measured is None else equal and measured >= required,
        aim_met=None if measured is None else equal and measured >= aim,
    )

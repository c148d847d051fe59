"""Seconds, bytes and FLOP/s: how the benchmark measures, on a CPU and on a GPU."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from scipy import stats

from kvnotes import products

SAMPLE_S = 0.005  # between two looks at the process's memory; a look takes some 10 microseconds
PEAK_SIDE = 2048
PEAK_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of each repeat; the best is what is reported."""

    repeats: tuple[float, ...]

    @property
    def best(self) -> float:
        """The fastest repeat: what is left of a loaded machine's noise."""
        return min(self.repeats)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """seconds = constant * x ** exponent, by least squares on logarithms."""

    exponent: float
    stderr: float
    points: int


def timed(act: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds of one call and what it returned; a GPU's queue is empty before and after."""
    _wait(device)
    started = time.perf_counter()
    result = act()
    _wait(device)
    return time.perf_counter() - started, result


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product, the best of a few, by torch's own product or by ours: the faster."""
    a, b = (torch.randn(PEAK_SIDE, PEAK_SIDE).to(device=device, dtype=dtype) for _ in range(2))
    kinds = (lambda: a @ b, lambda: products.linear(a, b))
    seconds = min(timed(kind, device)[0] for kind in kinds for _ in range(PEAK_REPEATS))
    return 2 * PEAK_SIDE**3 / seconds


def fit(x: Sequence[float], seconds: Sequence[float]) -> Fit | None:
    """The exponent of seconds against x with its standard error; None for fewer than three points."""
    if len(x) < 3:
        return None
    line = stats.linregress(np.log(x), np.log(seconds))
    return Fit(exponent=float(line.slope), stderr=float(line.stderr), points=len(x))  # pyright: ignore[reportAttributeAccessIssue]


class MemoryWatch:
    """The most memory that a block of code held above what was held when it began.

    On a GPU by its allocator's own count. On a CPU by the process's resident set, looked at every 5 ms by a thread
    after freed memory was given back to the system; shorter peaks can be missed. `peak` is None where neither is known.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak: int | None = None
        self._before = 0
        self._most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        _give_back()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        elif (resident := _resident()) is not None:
            self._before = self._most = resident
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak = torch.cuda.max_memory_allocated(self.device) - self._before
        elif self._thread.is_alive():
            self._stop.set()
            self._thread.join()
            self.peak = self._most - self._before

    def _sample(self) -> None:
        while True:
            self._most = max(self._most, _resident() or 0)
            if self._stop.wait(SAMPLE_S):
                self._most = max(self._most, _resident() or 0)
                return

    @staticmethod
    def how(device: torch.device) -> str:
        """How memory is measured on a device, for the record."""
        if device.type == "cuda":
            return "torch.cuda.max_memory_allocated, less what was allocated before"
        return f"resident set of the process, sampled every {SAMPLE_S * 1000:.0f} ms, less that before"


def machine(device: torch.device) -> dict[str, Any]:
    """The hardware that the numbers are of."""
    found = {"cpu": _cpu_name(), "cores": _cores(), "threads": torch.get_num_threads(), "device": str(device)}
    return {**found, "gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _resident() -> int | None:
    """Bytes of the process that are in memory; None where the system does not say (no /proc)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _give_back() -> None:
    """Give freed memory back to the system, so that it is not used again unseen."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()

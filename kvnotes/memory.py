"""How much memory a run will hold, estimated before it starts."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvnotes.rows import Row


def estimate(model: Any, tokens: int, *, budget: int, lent: int) -> int:
    """Bytes beside the weights that a pair of `tokens` tokens takes at most.

    Two states and one in the making, and two of each pair that is lent; one layer's attention and MLP of a whole
    forward; the logits of a row; and a batch of rows with the residuals that it starts from and is given.
    """
    size = torch.finfo(model.dtype).bits // 8
    states = (3 + 2 * lent) * model.bytes_per_token() * tokens
    # scores, softmax in float32, and its copy: of all heads at once where the attention is the model's own, else in
    # blocks, so that the masks are larger
    scores = 3 * (model.shape["heads"] if model.twin is None else 1) * tokens * tokens * max(size, 4)
    traces = 2 * model.shape["layers"] * model.shape["d_model"] * tokens * size
    return states + scores + tokens * model.widest_bytes + 4 * model.hf.config.vocab_size + traces + budget


def row(model: Any, *, tokens: int, row: Row, cells: int, read: int) -> int:
    """Bytes that one row of a batch takes while its layers run: its tokens' activations, its edited cells, and the
    logits that are read."""
    size = torch.finfo(model.dtype).bits // 8
    places = [cells if edit.cells.positions is None else len(edit.cells.positions) for edit in row.edits]
    lines = sum(places) * model.shape["kv_heads"]
    # of a cell k, v, both in the order of the rows, and where it is
    return tokens * model.widest_bytes + lines * (model.shape["d_head"] * 4 * size + 48) + read * 4


def batches(costs: Sequence[int], budget: int) -> Iterator[slice]:
    """The rows, in their order, in as few batches as the budget allows, about equally full: a small last one would
    make small products. A row that alone is more than the budget runs alone."""
    even = sum(costs) / max(1, math.ceil(sum(costs) / budget))
    start, held = 0, 0
    for at, cost in enumerate(costs):
        if at > start and (held + cost > budget or held >= even):
            yield slice(start, at)
            start, held = at, 0
        held += cost
    if costs:
        yield slice(start, len(costs))


def weights_bytes(files: Iterable[Path], *, stored: str, dtype: torch.dtype) -> int:
    """Bytes that weights stored as `stored` ("fp32", "bf16", ...) take in memory as `dtype`."""
    bits = {"fp32": 32, "fp16": 16, "bf16": 16}.get(stored, 32)  # a dequantised file is stored as fp32
    return sum(path.stat().st_size for path in files) * torch.finfo(dtype).bits // bits


def available(device: torch.device) -> int:
    """Bytes free on the device: the GPU's own count, or what the system can give without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except FileNotFoundError:  # no Linux: all there is, as a bound
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

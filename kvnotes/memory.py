"""How much memory a run will hold, estimated before it starts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from kvnotes.rows import Row


def estimate(model: Any, tokens: int, *, budget: int) -> int:
    """Bytes beside the weights that a pair of `tokens` tokens takes at most.

    Two states and one in the making; one layer's attention scores and MLP of a whole forward; the logits of a row; and
    a batch of rows with the residuals that it starts from and is given.
    """
    size = torch.finfo(model.dtype).bits // 8
    states = 3 * model.bytes_per_token() * tokens
    scores = 3 * model.shape["heads"] * tokens * tokens * max(size, 4)  # scores, softmax in float32, and its copy
    traces = 2 * model.shape["layers"] * model.shape["d_model"] * tokens * size
    return states + scores + tokens * _per_token(model) + 4 * model.hf.config.vocab_size + traces + budget


def row(model: Any, *, tokens: int, row: Row, cells: int) -> int:
    """Bytes that one row of a batch takes while its layers run: its tokens' activations and its edited cells."""
    size = torch.finfo(model.dtype).bits // 8
    places = [cells if edit.cells.positions is None else len(edit.cells.positions) for edit in row.edits]
    lines = sum(places) * model.shape["kv_heads"]
    return tokens * _per_token(model) + lines * model.shape["d_head"] * 5 * size  # k, v, in order, and the change


def _per_token(model: Any) -> int:
    """Bytes of a token's widest moment in a layer: residuals, queries and keys, the MLP's gate, up and product."""
    config, size = model.hf.config, torch.finfo(model.dtype).bits // 8
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return (6 * config.hidden_size + 3 * inner) * size


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

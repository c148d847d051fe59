"""How much memory a run will hold, estimated before it starts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from kvnotes.sweep import ROWS


def estimate(model: Any, tokens: int) -> int:
    """Bytes beside the weights that a pair of `tokens` tokens takes at most.

    Two states and one in the making; one layer's attention scores and MLP of a whole forward or of a batch of rows that
    each run one token, whichever is more; and the logits of a row.
    """
    config, size = model.hf.config, torch.finfo(model.dtype).bits // 8
    states = 3 * model.bytes_per_token() * tokens
    run = max(tokens, ROWS)  # tokens that one forward runs at most
    scores = 3 * model.shape["heads"] * tokens * run * max(size, 4)  # scores, softmax in float32, and its copy
    width = 6 * config.hidden_size + 3 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    return states + scores + run * width * size + 4 * config.vocab_size


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

"""`make bench`: what loading, prefill and decode cost on this machine, against its own matmul peak."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvnotes import models
from kvnotes.config import RunConfig
from kvnotes.forward import decode, prefill

LENGTHS = (107, 960)
ROWS = (1, 16)
REPEATS = 3


def run(config: RunConfig, console: Console) -> None:
    """Time a model and print seconds and the share of the matmul peak, the best of three each."""
    name = config.model
    resolve_seconds, _ = _timed(lambda: models.resolve(name))
    boot_seconds, booted = _timed(lambda: models.boot(name, device=config.device, dtype=config.dtype))
    check_seconds, _ = _timed(lambda: models.self_check(booted))
    model = booted.model
    peak = matmul_peak(model)
    decoder = sum(p.numel() for p in model.hf.model.parameters()) - model.hf.get_input_embeddings().weight.numel()
    unembedding = model.hf.get_output_embeddings().weight.numel()  # of the tokens that are read, one a row
    table = Table("what", "seconds", "share of the matmul peak", title=f"{name}: {peak / 1e9:.0f} GFLOP/s matmul peak")
    table.add_row("from the cache to a ready bridge", f"{boot_seconds:.2f}", "")
    table.add_row("  of it: hashes of the files", f"{resolve_seconds:.2f}", "")
    table.add_row("self-check", f"{check_seconds:.2f}", "")
    for length in LENGTHS:
        tokens = (models.check_tokens(model.tokenizer, model.windows) * length)[:length]
        seconds, (_, state) = _best(lambda tokens=tokens: prefill(model, tokens, start=0))
        table.add_row(
            f"prefill of {length} tokens",
            f"{seconds:.3f}",
            f"{2 * (decoder * length + unembedding) / seconds / peak:.2f}",
        )
        for rows in ROWS:
            states, query = [state.crop(length - 1)] * rows, tokens[-1:]
            seconds, _ = _best(
                lambda states=states, query=query, at=length - 1: decode(model, states, query, start=at, read=[0])
            )
            share = f"{2 * (decoder + unembedding) * rows / seconds / peak:.2f}"
            table.add_row(f"one token over {rows} states of {length}", f"{seconds:.3f}", share)
    console.print(table)


def matmul_peak(model: models.Model) -> float:
    """FLOP/s of a large matrix product of the model's dtype on its device, the best of a few."""
    side = 2048
    a = torch.randn(side, side).to(device=model.device, dtype=model.dtype)
    seconds, _ = _best(lambda: float((a @ a)[0, 0]))  # reading a number waits for a GPU
    return 2 * side**3 / seconds


def _best(act: Callable[[], Any]) -> tuple[float, Any]:
    runs = [_timed(act) for _ in range(REPEATS)]
    return min(seconds for seconds, _ in runs), runs[-1][1]


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = act()
    return time.perf_counter() - started, result

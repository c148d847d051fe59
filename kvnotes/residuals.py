"""Residual streams for probes: of a model, and of one of the same shapes that has learned nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes import rows
from kvnotes.cache import CacheError, KVState
from kvnotes.forward import forward, prefill
from kvnotes.instance import TokenPair
from kvnotes.interventions import Point
from kvnotes.points import tree_of, visited


def residuals(
    model: Any, pair: TokenPair, positions: Sequence[int], *, prefix: KVState | None = None
) -> Float[Tensor, "arm layer place d_model"]:
    """The residual after each layer at some positions, of base and target, in float32.

    `prefix` is the state of the tokens before the first changed one, computed here where it is not given; positions
    before it are alike in both arms and cannot be asked for. Raises CacheError for them.
    """
    start = pair.changed[0]
    if min(positions) < start:
        raise CacheError(f"position {min(positions)} lies before the first changed token, {start}")
    tree = tree_of(model)
    state = prefill(model, pair.base_ids[:start], start=0)[1] if prefix is None else prefix
    ids = torch.tensor([pair.ids(arm)[start:] for arm in ("base", "target")])
    places, kept = [p - start for p in positions], {}

    def keep(_: Point, layer: int, tensor: Tensor) -> Tensor:
        kept[layer] = tensor[:, places].float().cpu()
        return tensor

    with visited(tree, keep, ("resid_post",)):
        steps = torch.arange(start, start + ids.shape[1])
        forward(model, ids, positions=steps, past=[state, state], over=None, read=[0], keep=False)
    return torch.stack([kept[layer] for layer in sorted(kept)], dim=1)


@torch.no_grad()
def randomised(model: Any, *, seed: int) -> Any:
    """The model with every matrix drawn anew from a normal of its own mean and deviation, and every vector (norms,
    biases) permuted; the scale of each part of the network stays. Tied matrices stay tied.

    The original is untouched; the copy takes its weights' memory once more and runs forwards and rows, not bridge
    hooks. Raises CacheError for an architecture that rows do not know.
    """
    made = None if model.twin is None else rows.twin(model.twin)
    if made is None:
        raise CacheError(f"{model.name}'s layers are not of the kind that rows know: it has no randomised control")
    draw = torch.Generator(device=model.device).manual_seed(seed)
    drawn: dict[int, Tensor] = {}
    for name, weight in list(made.named_parameters(remove_duplicate=False)):
        if weight.data_ptr() not in drawn:
            drawn[weight.data_ptr()] = _like(weight, draw)
        owner, _, leaf = name.rpartition(".")
        fresh = torch.nn.Parameter(drawn[weight.data_ptr()], requires_grad=False)
        setattr(made.get_submodule(owner), leaf, fresh)
    return replace(model, twin=made, name=f"{model.name}, randomised weights, seed {seed}")


def _like(weight: Tensor, draw: torch.Generator) -> Tensor:
    if weight.ndim < 2:
        return weight[torch.randperm(weight.numel(), generator=draw, device=weight.device)]
    fresh = torch.empty_like(weight).normal_(generator=draw)
    return fresh.mul_(weight.float().std()).add_(weight.float().mean())

"""The reference engine: TransformerLens hooks on the bridge, one whole forward an intervention.

Slow and plain, to hold the fast one (`rows`) to; `ENGINE=hooks` runs any study through it. A cached decode's hooks see
new tokens only and fire before the cache is updated, so past cells are edited in a whole forward: every key and value
before the query block is set to the edited state's, and only the block's own are left to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes.cache import CacheError, KVState
from kvnotes.interventions import ActivationPatch, AttentionBlock, Point

Points = list[tuple[str, Callable[..., Tensor]]]
POINTS: dict[Point, str] = {
    "resid_pre": "blocks.{}.hook_in",
    "z": "blocks.{}.attn.hook_z",
    "attn_out": "blocks.{}.attn.hook_out",
    "mlp_out": "blocks.{}.mlp.hook_out",
    "resid_post": "blocks.{}.hook_out",
}


def edited(model: Any, state: KVState, tokens: Sequence[int]) -> Float[Tensor, "vocab"]:
    """Last logits of `tokens` whose keys and values of the first state.length positions are the state's.

    Raises CacheError for a state that does not hold positions 0, 1, 2, ...
    """
    if state.positions[0].tolist() != list(range(state.length)):
        raise CacheError("the hooks engine runs whole prompts: the state must hold positions 0, 1, 2, ...")

    def put(cells: Tensor) -> Callable[..., Tensor]:
        def hook(tensor: Float[Tensor, "batch pos kv_head d_head"], hook: Any) -> Tensor:
            tensor = tensor.clone()
            tensor[0, : cells.shape[1]] = cells.transpose(0, 1)
            return tensor

        return hook

    points = [
        (f"blocks.{layer}.attn.{point}", put(tensors[name]))
        for layer, tensors in enumerate(state.layers)
        for point, name in (("hook_rot_k", "k"), ("hook_v", "v"))
    ]
    return _run(model, tokens, points)


def patched(
    model: Any, patch: ActivationPatch, tokens: Sequence[int], *, donor: Sequence[int]
) -> Float[Tensor, "vocab"]:
    """Last logits of `tokens` with one activation replaced by that of a forward of `donor`."""
    seen: list[Tensor] = []
    point = POINTS[patch.point].format(patch.layer)

    def width(tensor: Tensor) -> slice:
        size = tensor.shape[-1] // model.shape["heads"]
        return slice(None) if patch.head is None else slice(patch.head * size, (patch.head + 1) * size)

    def read(tensor: Tensor, hook: Any) -> Tensor:
        seen.append(tensor[0, patch.position].flatten().clone())
        return tensor

    def write(tensor: Tensor, hook: Any) -> Tensor:
        flat = tensor.clone().flatten(2)
        flat[0, patch.position, width(flat)] = seen[0][width(flat)]
        return flat.view_as(tensor)

    _run(model, donor, [(point, read)])
    return _run(model, tokens, [(point, write)])


def blinded(
    model: Any, block: AttentionBlock, tokens: Sequence[int], *, queries: Sequence[int]
) -> Float[Tensor, "vocab"]:
    """Last logits of `tokens` whose `queries` may not attend to the block's positions, at its layers and heads."""
    heads, rows, columns = (torch.tensor(x) for x in (block.heads, tuple(queries), block.positions))

    def hide(scores: Float[Tensor, "batch head query key"], hook: Any) -> Tensor:
        scores = scores.clone()
        scores[0, heads[:, None, None], rows[None, :, None], columns[None, None, :]] = torch.finfo(scores.dtype).min
        return scores

    return _run(model, tokens, [(f"blocks.{layer}.attn.hook_attn_scores", hide) for layer in block.layers])


@torch.no_grad()
def _run(model: Any, tokens: Sequence[int], points: Points) -> Float[Tensor, "vocab"]:
    """Last logits with these hooks. Raises CacheError where not every one of them fired once."""
    fired: list[str] = []

    def counted(put: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def hook(tensor: Tensor, hook: Any) -> Tensor:
            fired.append(hook.name)  # the canonical name, which is not always the one asked for
            return put(tensor, hook)

        return hook

    ids = torch.tensor([list(tokens)], device=model.device)
    logits = model.bridge.run_with_hooks(
        ids, fwd_hooks=[(name, counted(put)) for name, put in points], logits_to_keep=1
    )
    if len(fired) != len(points):
        raise CacheError(f"{len(fired)} of {len(points)} hooks fired; their names do not fit this bridge")
    return logits[0, -1].float()

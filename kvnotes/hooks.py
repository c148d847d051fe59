"""The reference engine: TransformerLens hooks on the bridge, one whole forward an intervention.

Slow and plain, to hold the fast one (`rows`) to; `ENGINE=hooks` runs any study through it. A cached decode's hooks see
new tokens only and fire before the cache is updated, so past cells are edited in a whole forward: keys and values that
an edit leaves or makes as they are in a state are set to the state's, all others are left to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes import checks
from kvnotes.cache import CacheError, KVState
from kvnotes.instance import TokenPair
from kvnotes.interventions import (
    ActivationPatch,
    AttentionBlock,
    CacheEdit,
    Intervention,
    Point,
    State,
    columns,
    mixed,
    parts,
    run_of,
)

Hooks = list[tuple[str, Callable[..., Tensor]]]
POINTS: dict[Point, str] = {
    "resid_pre": "blocks.{}.hook_in",
    "z": "blocks.{}.attn.hook_z",
    "attn_out": "blocks.{}.attn.hook_out",
    "mlp_out": "blocks.{}.mlp.hook_out",
    "resid_post": "blocks.{}.hook_out",
}


def answer(
    model: Any, one: Intervention, *, pair: TokenPair, states: Mapping[State, KVState]
) -> Float[Tensor, "vocab"]:
    """The decision's logits under an intervention."""
    tokens, points = list(pair.ids(run_of(one))), []
    edits = [part for part in parts(one) if isinstance(part, CacheEdit)]
    anew = checks.recomputed(one, pair)
    for p, token in anew.items():
        tokens[p] = token
    if edits or anew:
        state = states[run_of(one)]
        for edit in edits:
            state = state.replace(edit.cells, states[edit.donor] if isinstance(edit.donor, str) else edit.donor)
        points += frozen(state, [p for p in range(checks.first(one, pair)) if p not in anew])
    for part in parts(one):
        if isinstance(part, ActivationPatch):
            points.append(_patch(model, part, pair))
        elif isinstance(part, AttentionBlock):
            points += _blind(model, part, pair)
    return run(model, tokens, points)


def frozen(state: KVState, positions: Sequence[int]) -> Hooks:
    """Hooks that set the keys and values of `positions` to a state's, whatever the model computes there.

    Raises CacheError for a state that does not hold positions 0, 1, 2, ...
    """
    if state.positions[0].tolist() != list(range(state.length)):
        raise CacheError("the hooks engine runs whole prompts: the state must hold positions 0, 1, 2, ...")
    places = list(positions)

    def put(cells: Tensor) -> Callable[..., Tensor]:
        def hook(tensor: Float[Tensor, "batch pos kv_head d_head"], hook: Any) -> Tensor:
            tensor = tensor.clone()
            tensor[0, places] = cells[:, places].transpose(0, 1)
            return tensor

        return hook

    return [
        (f"blocks.{layer}.attn.{point}", put(tensors[name]))
        for layer, tensors in enumerate(state.layers)
        for point, name in (("hook_rot_k", "k"), ("hook_v", "v"))
    ]


def _patch(model: Any, patch: ActivationPatch, pair: TokenPair) -> tuple[str, Callable[..., Tensor]]:
    point, mine = POINTS[patch.point].format(patch.layer), columns(patch.head, model.shape["d_head"])
    donor = patch.donor

    if isinstance(donor, str):
        seen: list[Tensor] = []

        def read(tensor: Tensor, hook: Any) -> Tensor:
            seen.append(tensor[0, patch.position].flatten().clone())
            return tensor

        run(model, pair.ids(donor), [(point, read)])
        donor = seen[0][mine]

    def write(tensor: Tensor, hook: Any) -> Tensor:
        flat = tensor.clone().flatten(2)
        own = flat[0, patch.position, mine].clone()
        given = None if donor is None else donor.to(own, copy=True)
        new = torch.zeros_like(own) if given is None else given
        flat[0, patch.position, mine] = new if patch.mix is None else mixed(patch.mix, own, given)
        return flat.view_as(tensor)

    return point, write


def _blind(model: Any, block: AttentionBlock, pair: TokenPair) -> Hooks:
    queries = torch.tensor(checks.queries(block, pair))
    heads = torch.tensor(range(model.shape["heads"]) if block.heads is None else block.heads)
    columns = torch.tensor(block.positions)

    def hide(scores: Float[Tensor, "batch head query key"], hook: Any) -> Tensor:
        scores = scores.clone()
        scores[0, heads[:, None, None], queries[None, :, None], columns[None, None, :]] = torch.finfo(scores.dtype).min
        return scores

    layers = range(model.shape["layers"]) if block.layers is None else block.layers
    return [(f"blocks.{layer}.attn.hook_attn_scores", hide) for layer in layers]


@torch.no_grad()
def run(model: Any, tokens: Sequence[int], points: Hooks) -> Float[Tensor, "vocab"]:
    """Last logits of a whole forward with these hooks. Raises CacheError where not every one of them fired once."""
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

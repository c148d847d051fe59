"""The one way a model is run: tokens at explicit positions over frozen states, with an explicit mask.

Plain Hugging Face calling conventions, so every architecture's norms, rotary code, soft-caps and experts are its own,
on modules that no bridge wraps where there are such (`rows.twin`). The mask is always given in full (4-D, per layer
kind where the model has several), computed from positions: windows hold for spliced and edited caches too. No cache is
ever grown in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from kvnotes.cache import CacheError, KVState, stack
from kvnotes.instance import TokenPair
from kvnotes.interventions import State


@dataclass(frozen=True, eq=False)
class Windows:
    """Sliding windows: per layer the number of visible positions, None where a layer sees everything; and how
    the model takes its masks (a dict by layer kind, or one tensor)."""

    per_layer: tuple[int | None, ...]
    by_kind: bool

    @property
    def smallest(self) -> int | None:
        """The narrowest window of any layer."""
        return min((w for w in self.per_layer if w is not None), default=None)


@dataclass(frozen=True, eq=False)
class Output:
    """Logits at the positions that were read, [batch, read, vocab] in float32, and, where kept, one state a row."""

    logits: Float[Tensor, "batch read vocab"]
    states: tuple[KVState, ...]


class _Frozen(Cache):
    """Gives each layer past and new K/V side by side, or new over past at chosen places. It owns the stacked past
    and frees each layer once it is used; the result is kept only where states are wanted."""

    def __init__(self, past: list[dict[str, Tensor]] | None, *, places: Tensor | None, keep: bool) -> None:
        self.past, self.places, self.keep = past, places, keep
        self.full: dict[int, dict[str, Tensor]] = {}
        self.used: list[int] = []
        self.layers = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Called by the attention of layer `layer_idx` with its new keys (after RoPE) and values."""
        new = {"k": key_states, "v": value_states}
        self.used.append(layer_idx)
        if self.past is not None:
            old, self.past[layer_idx] = self.past[layer_idx], {}
            new = {name: self._join(old[name], t) for name, t in new.items()}
        if self.keep:
            # a head's cells side by side, as products over them want: projections leave the heads of a token so
            self.full[layer_idx] = new = {name: t.contiguous() for name, t in new.items()}
        return new["k"], new["v"]

    def _join(self, old: Tensor, new: Tensor) -> Tensor:
        if self.places is None:
            return torch.cat([old, new], dim=2)
        joined = old.clone()
        joined[:, :, self.places] = new
        return joined

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Only a default for positions and masks, which are always given here."""
        return 0


def differentiable(
    model: Any,
    tokens: Int[Tensor, "batch new"],
    *,
    positions: Int[Tensor, "new"],
    past: Sequence[KVState] | None,
    over: Sequence[int] | None,
    read: Sequence[int],
    keep: bool,
) -> Output:
    """Run `tokens` at `positions` over one past state a row.

    `past=None` is a prefill. With `over=None` the new tokens follow the past; otherwise new token j replaces the
    cache cell `over[j]` (its position must be that cell's), the other cells staying frozen: selective recompute.
    `read` are indices into the new tokens whose logits are wanted; no others are computed. `keep` says whether the
    states after the forward are wanted; without, a layer's K/V are dropped once it has run. A token sees every cell
    whose position is at most its own and within the layer's window. Raises CacheError on mismatches. The graph of
    the logits is kept where the caller has gradients on; `forward` is the same without.
    """
    tokens, positions = tokens.to(model.device), positions.to(model.device)
    _check(tokens, positions, past, over)
    old = None if past is None else past[0].positions[0]
    keys = positions if old is None else torch.cat([old, positions]) if over is None else old
    frozen = _Frozen(
        None if past is None else stack(past),
        places=None if over is None else torch.tensor(list(over), device=model.device),
        keep=keep,
    )
    # Without a window the mask of a prefill may be large; it is one [new, keys] plane for all rows and heads.
    out = (model.hf if model.twin is None else model.twin)(
        input_ids=tokens,
        attention_mask=masks(model, positions, keys),
        position_ids=positions[None].expand(tokens.shape[0], -1),
        past_key_values=frozen,
        use_cache=True,
        logits_to_keep=torch.tensor(list(read), device=model.device),
    )
    if sorted(frozen.used) != list(range(len(model.windows.per_layer))):
        raise CacheError(f"layers {frozen.used} used the cache, each of {len(model.windows.per_layer)} must do so once")
    return Output(out.logits.float(), _states(frozen.full, keys, tokens.shape[0]) if keep else ())


forward = torch.no_grad()(differentiable)


def prefill(model: Any, tokens: Sequence[int], *, start: int) -> tuple[Float[Tensor, "vocab"], KVState]:
    """One sequence from position `start`: the logits after its last token, and its state."""
    ids = torch.tensor([list(tokens)])
    positions = torch.arange(start, start + len(tokens))
    out = forward(model, ids, positions=positions, past=None, over=None, read=[len(tokens) - 1], keep=True)
    return out.logits[0, 0], out.states[0]


def arms(model: Any, pair: TokenPair, *, stop: int) -> dict[State, tuple[Float[Tensor, "vocab"], KVState]]:
    """Each arm's first `stop` tokens: the logits after the last of them, and the state. The base is one forward; the
    target goes on from its prefix, since the tokens before the changed span are the same and know nothing of it (a
    check at load holds the model to that)."""
    base = prefill(model, pair.base_ids[:stop], start=0)
    start = pair.changed[0]
    rest = torch.tensor([pair.target_ids[start:stop]])
    positions, past = torch.arange(start, stop), [base[1].crop(start)]
    out = forward(model, rest, positions=positions, past=past, over=None, read=[rest.shape[1] - 1], keep=True)
    return {"base": base, "target": (out.logits[0, 0], out.states[0])}


def decode(
    model: Any, states: Sequence[KVState], query: Sequence[int], *, start: int, read: Sequence[int]
) -> Float[Tensor, "batch read vocab"]:
    """Logits of a query block at positions start.. over each state, at the block's indices `read`."""
    ids = torch.tensor([list(query)] * len(states))
    positions = torch.arange(start, start + len(query))
    return forward(model, ids, positions=positions, past=states, over=None, read=read, keep=False).logits


def recompute(
    model: Any, state: KVState, tokens: Sequence[int], cells: Sequence[int]
) -> tuple[Float[Tensor, "cells vocab"], KVState]:
    """Recompute the cache cells `cells` as `tokens`, every other cell frozen; their logits and the new state."""
    places = torch.tensor(list(cells), device=state.positions.device)
    out = forward(
        model,
        torch.tensor([list(tokens)]),
        positions=state.positions[0, places],
        past=[state],
        over=list(cells),
        read=range(len(cells)),
        keep=True,
    )
    return out.logits[0], out.states[0]


def greedy(
    model: Any, state: KVState, query: Sequence[int], *, start: int, limit: int, stop: frozenset[int]
) -> tuple[tuple[int, ...], KVState]:
    """Greedy continuation of a query block over a state: at most `limit` tokens, ending after one of `stop`.

    The state returned holds the query and every generated token but the last, which nothing has read yet.
    """
    made: list[int] = []
    block, at = list(query), start
    while len(made) < limit and not (made and made[-1] in stop):
        positions = torch.arange(at, at + len(block))
        out = forward(
            model, torch.tensor([block]), positions=positions, past=[state], over=None, read=[len(block) - 1], keep=True
        )
        state, at = out.states[0], at + len(block)
        block = [int(out.logits[0, 0].argmax())]
        made += block
    return tuple(made), state


def _check(tokens: Tensor, positions: Tensor, past: Sequence[KVState] | None, over: Sequence[int] | None) -> None:
    if tokens.shape[1] != positions.shape[0] or tokens.shape[1] == 0:
        raise CacheError(f"{tokens.shape[1]} tokens need as many positions (at least one), got {positions.shape[0]}")
    if past is None:
        if over is not None:
            raise CacheError("there is no past to recompute over")
        return
    if len(past) != tokens.shape[0]:
        raise CacheError(f"{tokens.shape[0]} rows need as many past states, got {len(past)}")
    if over is None:
        return
    if not all(0 <= place < past[0].length for place in over):
        raise CacheError(f"cells {list(over)} must lie within 0..{past[0].length - 1}")
    places = torch.tensor(list(over), device=past[0].positions.device)
    if len(set(over)) != tokens.shape[1] or not torch.equal(past[0].positions[0, places], positions.to(places.device)):
        raise CacheError("recomputed tokens must stand at the positions of the distinct cells they replace")


def masks(model: Any, queries: Int[Tensor, "new"], keys: Int[Tensor, "keys"]) -> Any:
    """Additive masks: one tensor, or one a layer kind where the model looks them up by kind."""
    seen = keys[None, :] <= queries[:, None]
    if not model.windows.by_kind:
        return _additive(model, _within(seen, queries, keys, model.windows.per_layer[0]))
    kinds = dict(zip(model.hf.config.layer_types, model.windows.per_layer, strict=True))
    return {kind: _additive(model, _within(seen, queries, keys, width)) for kind, width in kinds.items()}


def _within(seen: Bool[Tensor, "new keys"], queries: Tensor, keys: Tensor, width: int | None) -> Tensor:
    return seen if width is None else seen & (queries[:, None] - keys[None, :] < width)


def _additive(model: Any, seen: Bool[Tensor, "new keys"]) -> Float[Tensor, "1 1 new keys"]:
    blocked = torch.finfo(model.dtype).min
    return torch.zeros(seen.shape, dtype=model.dtype, device=seen.device).masked_fill(~seen, blocked)[None, None]


def _states(full: dict[int, dict[str, Tensor]], keys: Tensor, rows: int) -> tuple[KVState, ...]:
    # clones cut the rows apart, so that dropping one frees its memory
    return tuple(
        KVState(
            tuple({name: t[row] if rows == 1 else t[row].clone() for name, t in full[i].items()} for i in sorted(full)),
            keys[None],
        )
        for row in range(rows)
    )

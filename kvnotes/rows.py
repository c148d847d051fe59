"""Many interventions in one forward: rows over one shared prefix, each entering the batch where it diverges.

A query block is run over a shared state. Row 0 is the unedited run; every other row differs from it by cache edits
(cells of the shared state taken from a donor) and by patches (activations of the block's own tokens replaced), and is
copied from row 0 at the first layer where it differs. Attention over the shared keys and values is one matrix product
for all rows, so K and V are never copied: a row's scores are corrected where its cells come from a donor, and its
output by the difference of the donor's values. Exact: softmax is taken over the corrected scores.

The decoder is the model's own, run as a second tree of modules over the same weights (a bridge replaces the first
tree's modules); only the attention function between its projections is ours.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from kvnotes.cache import CacheError, Cells, KVState
from kvnotes.forward import masks
from kvnotes.interventions import Point

NAME = "kvnotes_rows"


@dataclass(frozen=True, kw_only=True, eq=False)
class Edit:
    """Cells of the shared state taken from a donor at the same indices; None zeroes them."""

    cells: Cells
    donor: KVState | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Patch:
    """An activation of the query block replaced: at a layer's point and the block's token `index`.

    `value` is [d_model], or [d_head] for the z of query head `head`.
    """

    point: Point
    layer: int
    index: int
    value: Float[Tensor, "width"]
    head: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """Every token of the query block may not attend to the shared cells `positions`, at one layer and query head."""

    layer: int
    head: int
    positions: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One intervention: any cache edits, patches and attention blocks, made together."""

    edits: tuple[Edit, ...] = ()
    patches: tuple[Patch, ...] = ()
    blocks: tuple[Block, ...] = ()

    def enters(self, layers: int) -> int:
        """The first layer at which the row differs from the unedited run."""
        first = [0 if edit.cells.layers is None else min(edit.cells.layers) for edit in self.edits]
        first += [change.layer for change in (*self.patches, *self.blocks)]
        if not first or not 0 <= min(first) < layers:
            raise CacheError(f"a row must change something within layers 0..{layers - 1}, it names layers {first}")
        return min(first)


def twin(plain: Any) -> Any | None:
    """A second tree of the model's modules over the same weights and buffers, with our attention function.

    None for an architecture whose layers are not of the kind that rows know (self_attn with o_proj, and mlp).
    """
    layers = getattr(plain.base_model, "layers", [])
    if not layers or not all(hasattr(x, "mlp") and hasattr(getattr(x, "self_attn", None), "o_proj") for x in layers):
        return None
    config = copy.deepcopy(plain.config)
    config._attn_implementation = NAME
    with torch.device("meta"):
        made = type(plain)(config)
    made.load_state_dict(plain.state_dict(), assign=True)
    for name, buffer in plain.named_buffers():  # rotary frequencies and scales are in no state dict
        owner, _, leaf = name.rpartition(".")
        setattr(made.get_submodule(owner), leaf, buffer)
    return made.eval()


@dataclass(frozen=True, kw_only=True, eq=False)
class Query:
    """The block that is run over the shared state, from position `start`, and what is read of it.

    `read` are the block's tokens whose logits are wanted, `vocab` the token ids they are wanted for (None: all), and
    `capture` the points of the unedited run whose activations are wanted, at every layer and token of the block.
    """

    tokens: Sequence[int]
    start: int
    read: Sequence[int]
    vocab: Sequence[int] | None
    capture: frozenset[Point] = frozenset()


@dataclass(frozen=True, eq=False)
class Read:
    """Float32 logits of the unedited run and of each row, in the order the rows were given."""

    unedited: Float[Tensor, "read vocab"]
    rows: Float[Tensor, "row read vocab"]
    captured: Mapping[tuple[Point, int], Float[Tensor, "new width"]]


@torch.no_grad()
def run_rows(model: Any, shared: KVState, query: Query, rows: Sequence[Row]) -> Read:
    """A query block over `shared`, one row an intervention, all in one forward.

    Raises CacheError for an intervention that changes nothing or names what is not there.
    """
    if model.twin is None:
        raise CacheError(f"{model.name}'s layers are not of the kind that rows know: use ENGINE=hooks")
    for row in rows:
        _check(model, shared, row, len(query.tokens))
    entry = [row.enters(shared.n_layers) for row in rows]
    order = sorted(range(len(rows)), key=entry.__getitem__)  # rows stand in the batch as they enter it
    batch = _Batch(shared, tuple(rows[i] for i in order), tuple(entry[i] for i in order), query.capture)
    positions = torch.arange(query.start, query.start + len(query.tokens), device=model.device)
    with _hooks(model.twin, batch):
        out = model.twin.base_model(
            input_ids=torch.tensor([list(query.tokens)], device=model.device),
            attention_mask=masks(model, positions, torch.cat([shared.positions[0], positions])),
            position_ids=positions[None],
            use_cache=False,
            kvnotes_batch=batch,
        )
    if batch.used != list(range(shared.n_layers)):
        raise CacheError(f"layers {batch.used} asked for keys and values, each of {shared.n_layers} must do so once")
    logits = unembed(model, out.last_hidden_state[:, list(query.read)], query.vocab)
    found = torch.empty_like(logits[1:])
    found[torch.tensor(order, dtype=torch.long, device=model.device)] = logits[1:]
    return Read(logits[0], found, batch.captured)


def unembed(
    model: Any, hidden: Float[Tensor, "row read d_model"], vocab: Sequence[int] | None
) -> Float[Tensor, "row read vocab"]:
    """Float32 logits of normed residuals, for the token ids that are read and no others."""
    head, cap = model.twin.get_output_embeddings(), getattr(model.twin.config, "final_logit_softcapping", None)
    ids = slice(None) if vocab is None else list(vocab)
    logits = torch.nn.functional.linear(hidden, head.weight[ids], None if head.bias is None else head.bias[ids])
    return (logits if cap is None else torch.tanh(logits / cap) * cap).float()


def _check(model: Any, shared: KVState, row: Row, length: int) -> None:
    for edit in row.edits:
        shared.check(edit.cells, edit.donor)
    for block in row.blocks:
        if not 0 <= block.head < model.shape["heads"]:
            raise CacheError(f"there is no query head {block.head} to block, only 0..{model.shape['heads'] - 1}")
        shared.check(Cells(positions=block.positions, layers=(block.layer,)), None)
    for patch in row.patches:
        width = model.shape["d_head" if patch.point == "z" else "d_model"]
        heads = range(model.shape["heads"]) if patch.point == "z" else (None,)
        if patch.head not in heads or patch.value.shape != (width,) or not 0 <= patch.index < length:
            raise CacheError(
                f"a {patch.point} patch takes a value of {width} numbers, one of the block's {length} tokens and "
                f"{'a query head' if patch.point == 'z' else 'no head'}; got {tuple(patch.value.shape)}, token "
                f"{patch.index}, head {patch.head}"
            )


@dataclass(frozen=True, eq=False)
class _Lines:
    """One layer's shared state and edits, a line an edited (row, kv head, position) cell."""

    k: Float[Tensor, "kv_head pos d_head"]
    v: Float[Tensor, "kv_head pos d_head"]
    where: Int[Tensor, "3 edits"]
    new_k: Float[Tensor, "edits d_head"]
    new_v: Float[Tensor, "edits d_head"]


@dataclass(frozen=True, eq=False)
class _Batch:
    """The rows of one forward in the order they enter; row i of them is row i + 1 of the batch."""

    shared: KVState
    rows: tuple[Row, ...]
    entry: tuple[int, ...]
    capture: frozenset[Point]
    captured: dict[tuple[Point, int], Tensor] = field(default_factory=dict)
    used: list[int] = field(default_factory=list)

    def entering(self, layer: int) -> int:
        """How many rows enter at a layer."""
        return self.entry.count(layer)

    def lines(self, layer: int) -> _Lines:
        """A layer's edits, gathered when it runs, so that only one layer's are held."""
        self.used.append(layer)
        shared = self.shared.layers[layer]
        where = [torch.empty(3, 0, dtype=torch.long, device=shared["k"].device)]
        new = {name: [tensor[0, :0]] for name, tensor in shared.items()}
        for i, row in enumerate(self.rows):
            for edit in row.edits:
                if edit.cells.layers is not None and layer not in edit.cells.layers:
                    continue
                head, place = _grid(edit.cells, shared["k"])
                where.append(torch.stack([torch.full_like(head, i + 1), head, place]))
                for name, lines in new.items():
                    source = None if edit.donor is None else edit.donor.layers[layer][name][head, place]
                    lines.append(torch.zeros_like(shared[name][head, place]) if source is None else source)
        return _Lines(shared["k"], shared["v"], torch.cat(where, dim=1), torch.cat(new["k"]), torch.cat(new["v"]))

    def blind(self, scores: Float[Tensor, "row kv_head group new keys"], layer: int) -> None:
        """Take from the scores, in place, what a row's blocks hide at this layer."""
        for i, row in enumerate(self.rows):
            for block in row.blocks:
                if block.layer == layer:
                    head, member = divmod(block.head, scores.shape[2])  # query heads of one KV head stand together
                    scores[i + 1, head, member][:, list(block.positions)] = torch.finfo(scores.dtype).min

    def patch(self, tensor: Tensor, *, point: Point, layer: int) -> Tensor:
        """`tensor` ([row, new, width]) with this point and layer's patches put in, as a copy where there are any."""
        here = (point, layer)
        if point in self.capture:
            self.captured[here] = tensor[0].clone()
        found = [(i + 1, p) for i, row in enumerate(self.rows) for p in row.patches if (p.point, p.layer) == here]
        if not found:
            return tensor
        patched = tensor.clone()
        for i, p in found:
            at = slice(None) if p.head is None else slice(p.head * len(p.value), (p.head + 1) * len(p.value))
            patched[i, p.index, at] = p.value.to(patched)
        return patched


def _grid(cells: Cells, k: Tensor) -> tuple[Tensor, Tensor]:
    """Each named (kv head, position), as two flat index tensors."""
    heads = range(k.shape[0]) if cells.kv_heads is None else cells.kv_heads
    places = range(k.shape[1]) if cells.positions is None else cells.positions
    grid = torch.meshgrid(torch.tensor(heads, device=k.device), torch.tensor(places, device=k.device), indexing="ij")
    return grid[0].flatten(), grid[1].flatten()


@contextmanager
def _hooks(tree: Any, batch: _Batch) -> Iterator[None]:
    """Put rows into the batch where they enter, and patches where they belong; no hook is left behind."""
    handles = []
    for index, layer in enumerate(tree.base_model.layers):
        handles += [
            layer.register_forward_pre_hook(_enter(batch, index)),
            layer.self_attn.o_proj.register_forward_pre_hook(_before(batch, "z", index)),
            layer.self_attn.register_forward_hook(_after(batch, "attn_out", index)),
            layer.mlp.register_forward_hook(_after(batch, "mlp_out", index)),
            layer.register_forward_hook(_after(batch, "resid_post", index)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _enter(batch: _Batch, layer: int) -> Callable[..., Any]:
    def hook(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *rest = args
        hidden = torch.cat([hidden, hidden[:1].expand(batch.entering(layer), -1, -1)])
        return batch.patch(hidden, point="resid_pre", layer=layer), *rest

    return hook


def _before(batch: _Batch, point: Point, layer: int) -> Callable[..., Any]:
    return lambda _, args: (batch.patch(args[0], point=point, layer=layer), *args[1:])


def _after(batch: _Batch, point: Point, layer: int) -> Callable[..., Any]:
    def hook(_: Any, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return batch.patch(output[0], point=point, layer=layer), *output[1:]
        return batch.patch(output, point=point, layer=layer)

    return hook


def attention(
    module: Any,
    query: Float[Tensor, "row head new d_head"],
    key: Float[Tensor, "row kv_head own d_head"],
    value: Float[Tensor, "row kv_head own d_head"],
    attention_mask: Float[Tensor, "1 1 new keys"],
    *,
    scaling: float,
    kvnotes_batch: _Batch | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "row new head d_head"], None]:
    """Attention of each row's new tokens over the shared cells, its own edited ones, and the new tokens themselves.

    Without a batch of rows it is plain attention over the keys and values that it is given, without repeating them.
    """
    if kvnotes_batch is None:
        return _plain(query, key, value, attention_mask, scaling=scaling, softcap=softcap), None
    lines = kvnotes_batch.lines(module.layer_idx)
    row, head, place = lines.where
    q = rearrange(query, "r (kv g) m d -> r kv g m d", kv=key.shape[1])
    past = torch.einsum("rhgmd,hpd->rhgmp", q, lines.k)
    past[row, head, :, :, place] = torch.einsum("egmd,ed->egm", q[row, head], lines.new_k)
    scores = torch.cat([past, torch.einsum("rhgmd,rhnd->rhgmn", q, key)], dim=-1) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + attention_mask[:, :, None]
    kvnotes_batch.blind(scores, module.layer_idx)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    old, new = weights.split([lines.k.shape[1], key.shape[2]], dim=-1)
    z = torch.einsum("rhgmp,hpd->rhgmd", old, lines.v) + torch.einsum("rhgmn,rhnd->rhgmd", new, value)
    change = lines.new_v - lines.v[head, place]
    z.index_put_((row, head), torch.einsum("egm,ed->egmd", old[row, head, :, :, place], change), accumulate=True)
    return rearrange(z, "r kv g m d -> r m (kv g) d"), None


def _plain(
    query: Float[Tensor, "row head new d_head"],
    key: Float[Tensor, "row kv_head keys d_head"],
    value: Float[Tensor, "row kv_head keys d_head"],
    attention_mask: Float[Tensor, "1 1 new keys"],
    *,
    scaling: float,
    softcap: float | None,
) -> Float[Tensor, "row new head d_head"]:
    q = rearrange(query, "r (kv g) m d -> r kv g m d", kv=key.shape[1])
    scores = torch.einsum("rhgmd,rhnd->rhgmn", q, key) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores + attention_mask[:, :, None], dim=-1, dtype=torch.float32).to(q.dtype)
    return rearrange(torch.einsum("rhgmn,rhnd->rhgmd", weights, value), "r kv g m d -> r m (kv g) d")


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)  # masks are always given in full

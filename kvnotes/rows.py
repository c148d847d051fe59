"""Many interventions in one forward: rows that run few tokens over a shared state, packed without padding.

A group of rows runs the same tokens over the same shared cells. A row differs from the unedited run by cache edits
(cells of the shared state taken from a donor), by patches (activations of its own tokens replaced) and by attention
blocks, and enters the batch at the first layer where it differs, with the unedited run's residuals from there. Rows of
any groups are packed side by side, each with as many tokens as it has. In the last layer only the decision's token is
run; the others give their keys and values.

The decoder is the model's own, run as a second tree of modules over the same weights (a bridge replaces the first
tree's modules); only the attention between its projections is ours (`kvnotes.attend`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from kvnotes import products
from kvnotes.attend import Hidden, Lines, Places, Segment, Shared, attend, plain
from kvnotes.cache import CacheError, Cells, KVState
from kvnotes.interventions import Mix, Point, columns, mixed, width_of
from kvnotes.points import visited

NAME = "kvnotes_rows"
POINTS: tuple[Point, ...] = ("resid_pre", "z", "attn_out", "mlp_out", "resid_post")


@dataclass(frozen=True, kw_only=True, eq=False)
class Edit:
    """Cells of the shared state taken from a donor at the same indices; None zeroes them. `since` is the first layer
    whose cells differ from the state's own: below it the edit changes nothing."""

    cells: Cells
    donor: KVState | None
    since: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Patch:
    """An activation of a row replaced, at a layer's point and the group's token `index`: by `value`, or by what `mix`
    makes of the row's own activation and the value. [d_model], or [d_head] for the z of a query head."""

    point: Point
    layer: int
    index: int
    value: Float[Tensor, "width"] | None
    head: int | None = None
    mix: Mix | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """The group's tokens `tokens` may not attend to the keys `keys` (the shared cells count first, then the group's
    own tokens), at one layer and some query heads."""

    layer: int
    heads: tuple[int, ...]
    tokens: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One intervention: any cache edits, patches and attention blocks, made together."""

    edits: tuple[Edit, ...] = ()
    patches: tuple[Patch, ...] = ()
    blocks: tuple[Block, ...] = ()
    since: int = 0  # where a row that changes nothing enters: the unedited run

    @property
    def first(self) -> int:
        """The first layer at which the row differs from the unedited run."""
        layers = [edit.since for edit in self.edits]
        return min([*layers, *(change.layer for change in (*self.patches, *self.blocks))], default=self.since)


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Rows that run the tokens `ids` at `positions` over the cells of `shared` but those of `absent`, whose place the
    tokens take. `trace` holds the unedited run's residuals before each layer; without it rows run every layer."""

    shared: KVState
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    rows: tuple[Row, ...]
    absent: tuple[int, ...] = ()
    trace: Float[Tensor, "layer new d_model"] | None = None

    def enters(self, row: Row) -> int:
        """The layer at which a row enters the batch."""
        return 0 if self.trace is None else row.first


def twin(plain_: Any) -> Any | None:
    """A second tree of the model's modules over the same weights and buffers, with our attention function.

    None for an architecture whose layers are not of the kind that rows know (self_attn with o_proj, and mlp).
    """
    layers = getattr(plain_.base_model, "layers", [])
    if not layers or not all(hasattr(x, "mlp") and hasattr(getattr(x, "self_attn", None), "o_proj") for x in layers):
        return None
    config = copy.deepcopy(plain_.config)
    config._attn_implementation = NAME
    with torch.device("meta"):
        made = type(plain_)(config)
    made.load_state_dict(plain_.state_dict(), assign=True)
    for name, buffer in plain_.named_buffers():  # rotary frequencies and scales are in no state dict
        owner, _, leaf = name.rpartition(".")
        setattr(made.get_submodule(owner), leaf, buffer)
    for module in made.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = products.Linear
    return made.eval().requires_grad_(False)


@torch.no_grad()
def run(model: Any, groups: Sequence[Group], *, vocab: Sequence[int] | None) -> list[Float[Tensor, "row vocab"]]:
    """Every row's float32 logits at its last token, for the token ids that are read (None: all), group by group.

    Raises CacheError for an intervention that names what is not there or changes nothing.
    """
    if model.twin is None:
        raise CacheError(f"{model.name}'s layers are not of the kind that rows know: use ENGINE=hooks")
    for group in groups:
        _check(model, group)
    batch = _Batch(model, tuple(groups))
    with _run_by(model.twin, batch):
        out = model.twin.base_model(
            input_ids=batch.ids[None],
            attention_mask=torch.zeros(1, 1, 1, 1, device=model.device),  # given, so that none is made; not used
            position_ids=batch.positions[None],
            use_cache=False,
            kvnotes_batch=batch,
        )
    wanted = list(range(batch.first, batch.layers))
    if batch.used != wanted:
        raise CacheError(f"layers {batch.used} asked for keys and values, each of {wanted} must do so once")
    logits = unembed(model, out.last_hidden_state[0], vocab)
    return [logits[torch.tensor(rows, device=model.device)] for rows in batch.places]


def unembed(
    model: Any, hidden: Float[Tensor, "*batch d_model"], vocab: Sequence[int] | None
) -> Float[Tensor, "*batch vocab"]:
    """Float32 logits of normed residuals, for the token ids that are read and no others."""
    head, cap = model.twin.get_output_embeddings(), getattr(model.twin.config, "final_logit_softcapping", None)
    ids = slice(None) if vocab is None else list(vocab)
    logits = products.linear(hidden, head.weight[ids], None if head.bias is None else head.bias[ids])
    return (logits if cap is None else torch.tanh(logits / cap) * cap).float()


def _check(model: Any, group: Group) -> None:
    layers, new = model.shape["layers"], len(group.ids)
    for donor in {id(e.donor): e.donor for row in group.rows for e in row.edits}.values():
        group.shared.fits(donor)
    for row in group.rows:
        for edit in row.edits:
            if edit.cells.count(group.shared) == 0:
                raise CacheError("the edit names no cell; an intervention that changes nothing is a mistake")
        for block in row.blocks:
            keys = group.shared.length + new
            if not (block.heads and block.tokens and block.keys):
                raise CacheError("an attention block names no head, query or key; it would change nothing")
            _within("query head to block", block.heads, model.shape["heads"])
            _within("query token to block", block.tokens, new)
            _within("key to block", block.keys, keys)
            _within("layer to block", (block.layer,), layers)
        for patch in row.patches:
            _within("layer to patch", (patch.layer,), layers)
            _check_patch(model, patch, new)


def _within(what: str, chosen: Sequence[int], size: int) -> None:
    wrong = [i for i in chosen if not 0 <= i < size]
    if wrong:
        raise CacheError(f"there is no {what} {wrong[0]}, only 0..{size - 1}")


def _check_patch(model: Any, patch: Patch, new: int) -> None:
    width = width_of(patch.point, patch.head, model.shape)
    heads = (None, *range(model.shape["heads"])) if patch.point == "z" else (None,)
    shape = None if patch.value is None else tuple(patch.value.shape)
    if patch.head not in heads or shape not in {None, (width,)} or not 0 <= patch.index < new:
        raise CacheError(
            f"a {patch.point} patch takes a value of {width} numbers, one of the {new} tokens and "
            f"{'a query head' if patch.point == 'z' else 'no head'}; got {shape}, token {patch.index}, "
            f"head {patch.head}"
        )


@dataclass(frozen=True, eq=False)
class _Put:
    """The patches of one point and layer: constant values by packed token (and head), and mixes."""

    tokens: Int[Tensor, "patch"]
    heads: Int[Tensor, "patch"] | None
    values: Float[Tensor, "patch width"]
    mixes: tuple[tuple[int, Patch], ...]


@dataclass(frozen=True, eq=False)
class _Alike:
    """Edits of a group that name the same layers, KV heads and donor: a line a (row, kv head, place)."""

    layers: tuple[int, ...] | None
    donor: KVState | None
    where: Int[Tensor, "3 line"]


@dataclass(eq=False)
class _Batch:
    """The rows of one forward, in the order they enter, and what is done to them layer by layer.

    `stage` says what the layer at hand runs: all of the rows' tokens, or, in the last layer, first all of them for
    their keys and values alone and then the rows' last tokens.
    """

    model: Any
    groups: tuple[Group, ...]
    used: list[int] = field(default_factory=list)
    stage: Literal["tokens", "keys", "decision"] = "tokens"
    kept: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        device = self.model.device
        listed = [(g.enters(row), i, j) for i, g in enumerate(self.groups) for j, row in enumerate(g.rows)]
        if not listed:
            raise CacheError("there is no intervention to run")
        self.order = sorted(listed)
        self.layers = self.model.shape["layers"]
        self.entry = [enters for enters, _, _ in self.order]
        self.first = self.entry[0]
        self.rows = [(self.groups[i], self.groups[i].rows[j]) for _, i, j in self.order]
        sizes = torch.tensor([len(group.ids) for group, _ in self.rows])
        self.ends = sizes.cumsum(0).tolist()
        self.offsets = [end - size for end, size in zip(self.ends, sizes.tolist(), strict=True)]
        self.ids = torch.tensor([t for group, _ in self.rows for t in group.ids], device=device)
        self.positions = torch.tensor([p for group, _ in self.rows for p in group.positions], device=device)
        where = {(i, j): at for at, (_, i, j) in enumerate(self.order)}
        self.places = [[where[i, j] for j in range(len(group.rows))] for i, group in enumerate(self.groups)]
        self.members = [sorted(places) for places in self.places]

    def active(self, layer: int) -> int:
        """How many rows a layer runs."""
        return sum(enters <= layer for enters in self.entry)

    @cached_property
    def one_token(self) -> bool:
        """Whether no row has a token beside the one that is read."""
        return len(self.ids) == len(self.rows)

    # --- residuals and patches ------------------------------------------------------------------------------

    def enter(self, hidden: Float[Tensor, "1 any d_model"], layer: int) -> Float[Tensor, "1 new d_model"]:
        """The layer's residuals: those that the layer below made, then the entering rows'."""
        rows, below = self.active(layer), self.active(layer - 1)
        made = [hidden[0, : self.ends[below - 1]]] if below else []
        for at in range(below, rows):
            trace = self.rows[at][0].trace
            own = slice(self.offsets[at], self.ends[at])
            # at the bottom the embedding is the model's own work, whatever it scales
            made.append(hidden[0, own] if layer == 0 or trace is None else trace[layer].to(hidden))
        return self.patch("resid_pre", layer, torch.cat(made)[None])

    def patch(self, point: Point, layer: int, tensor: Float[Tensor, "1 new width"]) -> Float[Tensor, "1 new width"]:
        """The activation with this point and layer's patches put in, in place: nothing else holds it."""
        put = self._puts.get((point, layer))
        if put is None or self.stage == "keys":
            return tensor
        if self.stage == "decision":
            put = self._at_the_end(put)
        if put.heads is None:
            tensor[0, put.tokens] = put.values.to(tensor)
        else:
            tensor[0].unflatten(-1, (self.model.shape["heads"], -1))[put.tokens, put.heads] = put.values.to(tensor)
        for token, p in put.mixes:
            at = columns(p.head, self.model.shape["d_head"])
            value = None if p.value is None else p.value.to(tensor, copy=True)
            assert p.mix is not None  # noqa: S101 (it is listed as a mix)
            tensor[0, token, at] = mixed(p.mix, tensor[0, token, at].clone(), value)
        return tensor

    def _at_the_end(self, put: _Put) -> _Put:
        """The patches at the rows' last tokens, which alone are run: others cannot reach the decision."""
        row_of = {end - 1: row for row, end in enumerate(self.ends)}
        kept = [i for i, token in enumerate(put.tokens.tolist()) if token in row_of]
        return _Put(
            torch.tensor([row_of[int(put.tokens[i])] for i in kept], dtype=torch.long, device=put.tokens.device),
            None if put.heads is None else put.heads[kept],
            put.values[kept],
            tuple((row_of[token], p) for token, p in put.mixes if token in row_of),
        )

    @cached_property
    def _puts(self) -> Mapping[tuple[Point, int], _Put]:
        found: dict[tuple[Point, int], list[tuple[int, Patch]]] = {}
        for at, (_, row) in enumerate(self.rows):
            for patch in row.patches:
                found.setdefault((patch.point, patch.layer), []).append((self.offsets[at] + patch.index, patch))
        return {key: self._put(patches) for key, patches in found.items()}

    def _put(self, patches: list[tuple[int, Patch]]) -> _Put:
        device, size = self.model.device, self.model.shape["d_head"]
        constant = [(token, patch) for token, patch in patches if patch.mix is None]
        by_head = any(patch.head is not None for _, patch in constant)
        lines: list[tuple[int, int, Tensor]] = []  # token, head, value
        for token, p in constant:
            assert p.value is not None  # noqa: S101 (the trial gives zeros for a donor of None)
            if not by_head or p.head is not None:
                lines.append((token, p.head or 0, p.value))
            else:  # all heads of one token beside single heads of others
                lines += [(token, head, value) for head, value in enumerate(p.value.split(size))]
        width = width_of(patches[0][1].point, 0 if by_head else None, self.model.shape)
        return _Put(
            torch.tensor([token for token, _, _ in lines], dtype=torch.long, device=device),
            torch.tensor([head for _, head, _ in lines], dtype=torch.long, device=device) if by_head else None,
            torch.stack([value.to(device) for _, _, value in lines]) if lines else torch.empty(0, width, device=device),
            tuple((token, patch) for token, patch in patches if patch.mix is not None),
        )

    # --- attention ------------------------------------------------------------------------------------------

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, *, softcap: float | None
    ) -> Float[Tensor, "1 query head d_head"]:
        """Head outputs of the tokens that this layer runs; `q` is scaled."""
        if self.stage == "keys":
            self.kept = (k, v)
            return q.new_zeros(1, q.shape[2], q.shape[1], q.shape[3])
        if self.stage == "decision":
            assert self.kept is not None  # noqa: S101 (the keys come first)
            (k, v), self.kept = self.kept, None
        layer = module.layer_idx
        self.used.append(layer)
        z = q.new_empty(q.shape[2], q.shape[1], q.shape[3])
        for at, members in enumerate(self.members):
            rows = [row for row in members if self.entry[row] <= layer]
            if not rows:
                continue
            own = torch.tensor([self.offsets[row] for row in rows])[:, None] + torch.arange(len(self.groups[at].ids))
            asked = torch.tensor(rows)[:, None] if self.stage == "decision" else own
            tokens, queries = self._index(own), self._index(asked)
            segment = self._segment(at, layer, q=q[0, :, queries], k=k[0, :, tokens], v=v[0, :, tokens], rows=rows)
            z[queries] = attend(replace(segment, softcap=softcap)).flatten(0, 1)
        return z[None]

    def _index(self, packed: Int[Tensor, "row token"]) -> slice | Int[Tensor, "packed"]:
        """Where tokens are packed: a slice where they stand side by side, which copies nothing."""
        first, size = int(packed[0, 0]), packed.numel()
        if int(packed[-1, -1]) - first + 1 == size:
            return slice(first, first + size)
        return packed.flatten().to(self.model.device)

    def _segment(self, at: int, layer: int, *, q: Tensor, k: Tensor, v: Tensor, rows: list[int]) -> Segment:
        """A group's rows as they stand at a layer."""
        count = len(rows)
        return Segment(
            q=rearrange(q, "(kv g) (r t) d -> kv r g t d", kv=k.shape[0], r=count),
            k=rearrange(k, "kv (r t) d -> kv r t d", r=count),
            v=rearrange(v, "kv (r t) d -> kv r t d", r=count),
            first=len(self.groups[at].ids) - 1 if self.stage == "decision" else 0,
            shared=self._shared(at, layer),
            lines=self._lines(at, layer),
            hidden=tuple(
                Hidden(i, block.heads, block.tokens, block.keys)
                for i, row in enumerate(rows)
                for block in self.rows[row][1].blocks
                if block.layer == layer
            ),
            softcap=None,
        )

    def _shared(self, at: int, layer: int) -> Shared:
        tensors, window = self.groups[at].shared.layers[layer], self.model.windows.per_layer[layer]
        return Shared(tensors["k"], tensors["v"], self._where[at], window)

    @cached_property
    def _where(self) -> list[Places]:
        return [self._places_of(group) for group in self.groups]

    def _places_of(self, group: Group) -> Places:
        absent = None
        if group.absent:
            absent = torch.zeros(group.shared.length, dtype=torch.bool, device=self.model.device)
            absent[list(group.absent)] = True
        return Places(group.shared.positions[0], torch.tensor(group.positions, device=self.model.device), absent)

    @cached_property
    def _edits(self) -> list[list[_Alike]]:
        """Each group's edits, those of equal layers, heads and donor together."""
        return [self._alike(self.groups[at], members) for at, members in enumerate(self.members)]

    def _alike(self, group: Group, members: list[int]) -> list[_Alike]:
        kinds: dict[tuple[Any, ...], tuple[Edit, list[int], list[int]]] = {}
        for i, row in enumerate(members):
            for edit in self.rows[row][1].edits:
                key = (edit.cells.layers, edit.cells.kv_heads, id(edit.donor))
                places = range(group.shared.length) if edit.cells.positions is None else edit.cells.positions
                _, rows, all_places = kinds.setdefault(key, (edit, [], []))
                rows += [i] * len(places)
                all_places += places
        made = []
        for edit, rows, places in kinds.values():
            heads = range(self.model.shape["kv_heads"]) if edit.cells.kv_heads is None else edit.cells.kv_heads
            row, place = torch.tensor([rows, places]).repeat_interleave(len(heads), dim=1)
            head = torch.tensor(heads).repeat(len(rows))
            made.append(_Alike(edit.cells.layers, edit.donor, torch.stack([row, head, place]).to(self.model.device)))
        return made

    def _lines(self, at: int, layer: int) -> Lines | None:
        """A layer's edited cells, gathered when it runs, so that only one layer's are held."""
        here = [alike for alike in self._edits[at] if alike.layers is None or layer in alike.layers]
        if not here:
            return None
        cells = [self._cells(alike, self.groups[at].shared, layer) for alike in here]
        if len(here) == 1:  # they are in the order of the rows
            (row, head, place), (k, v) = here[0].where, cells[0]
            return Lines(row, head, place, k, v)
        row, head, place = torch.cat([alike.where for alike in here], dim=1)
        k, v = (torch.cat([both[i] for both in cells]) for i in (0, 1))
        order = row.argsort(stable=True)
        return Lines(row[order], head[order], place[order], k[order], v[order])

    def _cells(self, alike: _Alike, shared: KVState, layer: int) -> tuple[Tensor, Tensor]:
        _, head, place = alike.where
        tensors = (shared if alike.donor is None else alike.donor).layers[layer]
        found = tensors["k"][head, place], tensors["v"][head, place]
        return found if alike.donor is not None else (torch.zeros_like(found[0]), torch.zeros_like(found[1]))


@contextmanager
def _run_by(tree: Any, batch: _Batch) -> Iterator[None]:
    """Put rows into the layers where they enter and patches where they belong; nothing is left behind."""
    layers = list(tree.base_model.layers)
    with ExitStack() as stack:
        for layer in layers[: batch.first]:
            stack.enter_context(_forward_of(layer, _skip))
        for index, layer in enumerate(layers):
            if index >= batch.first:
                hook = layer.register_forward_pre_hook(_enter(batch, index), with_kwargs=True)
                stack.callback(hook.remove)
        stack.enter_context(visited(tree, batch.patch, ("z", "attn_out", "mlp_out", "resid_post")))
        if not batch.one_token:
            stack.enter_context(_decision_only(layers[-1], batch))
        yield


@contextmanager
def _forward_of(module: Any, forward: Any) -> Iterator[None]:
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # the class's own shows again


def _skip(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden


def _enter(batch: _Batch, layer: int) -> Any:
    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden = batch.enter(args[0], layer)
        return (hidden, *args[1:]), _cut(kwargs, slice(0, hidden.shape[1]))

    return hook


def _cut(kwargs: Mapping[str, Any], tokens: Any) -> dict[str, Any]:
    """A layer's arguments with the rotary tables of these tokens only."""
    cos, sin = kwargs["position_embeddings"]
    return {**kwargs, "position_embeddings": (cos[:, tokens], sin[:, tokens])}


@contextmanager
def _decision_only(last: Any, batch: _Batch) -> Iterator[None]:
    """Run the last layer for the rows' last tokens only, over the keys and values of all their tokens."""
    whole = last.forward

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        batch.stage = "keys"
        whole(hidden, *args, **kwargs)
        batch.stage = "decision"
        ends = torch.tensor(batch.ends, device=hidden.device) - 1
        return whole(hidden[:, ends], *args, **_cut(kwargs, ends))

    def one_token(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        # what a layer does after its keys and values is wasted on tokens that nobody reads
        return (args[0][:, :1], *args[1:]) if batch.stage == "keys" else None

    hooks = [module.register_forward_pre_hook(one_token) for module in (last.self_attn.o_proj, last.mlp)]
    try:
        with _forward_of(last, forward):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def attention(
    module: Any,
    query: Float[Tensor, "row head new d_head"],
    key: Float[Tensor, "row kv_head keys d_head"],
    value: Float[Tensor, "row kv_head keys d_head"],
    attention_mask: Float[Tensor, "1 1 any keys_or_one"],
    *,
    scaling: float,
    kvnotes_batch: _Batch | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "row new head d_head"], Float[Tensor, "row head new keys"] | None]:
    """A batch of rows over their shared states, or plain attention over the keys and values given."""
    if kvnotes_batch is None:
        keep = getattr(module.config, "kvnotes_patterns", False)
        return plain(query, key, value, attention_mask, scaling=scaling, softcap=softcap, keep=keep)
    return kvnotes_batch.attend(module, query * scaling, key, value, softcap=softcap), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)  # masks are always given in full

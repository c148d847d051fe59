"""The attention of many rows over one shared state: one product for all, each row corrected at its own cells.

Rows of a segment run the same tokens over the same cells. Their scores over the shared keys are one matrix product,
so K and V are never copied; where a row's cell comes from a donor its score is set anew, and its output is corrected
by the difference of the donor's value. Exact: softmax is taken over the corrected scores. Rows and tokens are worked
off in blocks whose scores stay in a processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from kvnotes import products

SCORES = 2**20  # scores of one block, about


@dataclass(frozen=True, eq=False)
class Lines:
    """Edited cells of one layer, a line a (row, kv head, place), in the order of the rows."""

    row: Int[Tensor, "edits"]
    head: Int[Tensor, "edits"]
    place: Int[Tensor, "edits"]
    k: Float[Tensor, "edits d_head"]
    v: Float[Tensor, "edits d_head"]

    def of(self, start: int, stop: int) -> Lines | None:
        """The lines of the rows start..stop-1, which count from 0 again; None where there are none."""
        low, high = torch.searchsorted(self.row, torch.tensor([start, stop], device=self.row.device)).tolist()
        if low == high:
            return None
        found = self._cut(slice(low, high))
        return replace(found, row=found.row - start)

    def cut(self, size: int) -> list[Lines]:
        """The lines in pieces of at most about that many."""
        return [self._cut(piece) for piece in _spans(len(self.row), size)]

    def _cut(self, piece: slice) -> Lines:
        return Lines(self.row[piece], self.head[piece], self.place[piece], self.k[piece], self.v[piece])


@dataclass(frozen=True, eq=False)
class Hidden:
    """What one row's attention blocks hide at a layer: for some of its heads and tokens, some keys. The keys count
    the shared cells first, then the row's own tokens."""

    row: int
    heads: tuple[int, ...]
    tokens: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Places:
    """Where a group's shared cells and its rows' tokens stand, and what follows for who sees whom. `absent` cells are
    seen by no row, since its own tokens stand in their place."""

    cells: Int[Tensor, "cell"]  # positions
    tokens: Int[Tensor, "new"]
    absent: Bool[Tensor, "cell"] | None
    known: dict[tuple[int | None, int, int], tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)

    def unseen(self, start: int, stop: int, *, window: int | None) -> tuple[Tensor | None, Tensor | None]:
        """What the tokens start..stop-1 may not attend to, of the cells and of the tokens before `stop`: a mask each,
        None where they see everything."""
        if (window, start, stop) not in self.known:
            queries = self.tokens[start:stop, None]
            past, own = (_outside(queries, keys, window) for keys in (self.cells, self.tokens[:stop]))
            if self.absent is not None:
                past = past | self.absent
            masks = (past if bool(past.any()) else None), (own if bool(own.any()) else None)
            self.known[window, start, stop] = masks
        return self.known[window, start, stop]


def _outside(queries: Tensor, keys: Tensor, window: int | None) -> Bool[Tensor, "query key"]:
    later = keys[None, :] > queries
    return later if window is None else later | (queries - keys[None, :] >= window)


@dataclass(frozen=True, eq=False)
class Shared:
    """One layer's cells that every row of a segment sees, as far as the layer's window reaches."""

    k: Float[Tensor, "kv_head cell d_head"]
    v: Float[Tensor, "kv_head cell d_head"]
    places: Places
    window: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Rows side by side: their queries (of the tokens from `first` on), their own keys and values, and their edits."""

    q: Float[Tensor, "kv_head row group query d_head"]  # scaled
    k: Float[Tensor, "kv_head row new d_head"]
    v: Float[Tensor, "kv_head row new d_head"]
    first: int
    shared: Shared
    lines: Lines | None
    hidden: tuple[Hidden, ...]
    softcap: float | None


def attend(s: Segment) -> Float[Tensor, "row query head d_head"]:
    """Each row's head outputs z."""
    kv, rows, group, queries, width = s.q.shape
    z = s.q.new_empty(rows, queries, kv * group, width)
    for t in _spans(queries, SCORES // (kv * group * (s.shared.k.shape[1] + s.k.shape[2]))):
        start, stop = s.first + t.start, s.first + t.stop  # a block sees no token after its own last
        unseen = s.shared.places.unseen(start, stop, window=s.shared.window)
        keys = s.shared.k.shape[1] + stop
        # nothing for a row's own tokens, which come after: cutting their weights off would copy all others
        values = pad(s.shared.v, (0, 0, 0, stop))
        for r in _spans(rows, SCORES // (kv * group * keys * (t.stop - t.start))):
            block = Segment(
                q=s.q[:, r, :, t],
                k=s.k[:, r, :stop],
                v=s.v[:, r, :stop],
                first=start,
                shared=s.shared,
                lines=None if s.lines is None else s.lines.of(r.start, r.stop),
                hidden=tuple(one for one in s.hidden if r.start <= one.row < r.stop),
                softcap=s.softcap,
            )
            z[r, t] = rearrange(_block(block, values, unseen, r.start), "kv r g t d -> r t (kv g) d")
    return z


def _spans(total: int, size: int) -> Iterator[slice]:
    size = max(1, size)
    return (slice(i, min(total, i + size)) for i in range(0, total, size))


def _block(
    s: Segment, values: Float[Tensor, "kv key d"], unseen: tuple[Tensor | None, Tensor | None], row: int
) -> Float[Tensor, "kv row group query d"]:
    cells, lines = s.shared.k.shape[1], s.lines
    shape, new = s.q.shape[:4], s.k.shape[2]
    scores = s.q.new_empty(*shape, cells + new)
    past, own = scores[..., :cells], scores[..., cells:]
    products.into(past.flatten(1, 3), s.q.flatten(1, 3), s.shared.k)
    own.copy_((s.q.flatten(2, 3) @ s.k.mT).view(*shape, new))
    cuts = [] if lines is None else lines.cut(SCORES // s.q[0, 0].numel())  # a line's queries are gathered
    for one in cuts:
        past[one.head, one.row, :, :, one.place] = torch.einsum("egtd,ed->egt", s.q[one.head, one.row], one.k)
    if s.softcap is not None:
        scores = torch.tanh(scores / s.softcap) * s.softcap
    lowest = torch.finfo(scores.dtype).min
    for part, mask in zip((scores[..., :cells], scores[..., cells:]), unseen, strict=True):
        if mask is not None:
            part.masked_fill_(mask, lowest)
    for one in s.hidden:
        _hide(scores, one, row=one.row - row, first=s.first, lowest=lowest)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(s.q.dtype)
    old, new = weights[..., :cells], weights[..., cells:]
    z = s.q.new_empty(s.q.shape)
    products.into(z.flatten(1, 3), weights.flatten(1, 3), values.mT)
    z += (new.flatten(2, 3) @ s.v).view(s.q.shape)
    for one in cuts:
        change = one.v - s.shared.v[one.head, one.place]
        moved = torch.einsum("egt,ed->egtd", old[one.head, one.row, :, :, one.place], change)
        z.index_put_((one.head, one.row), moved, accumulate=True)
    return z


def _hide(scores: Float[Tensor, "kv row group query key"], one: Hidden, *, row: int, first: int, lowest: float) -> None:
    """Take from one row's scores, in place, the keys that some of its tokens may not attend to."""
    _, _, group, queries, keys = scores.shape
    tokens, columns, heads = (
        torch.tensor(chosen, dtype=torch.long, device=scores.device)
        for chosen in (
            [t - first for t in one.tokens if 0 <= t - first < queries],
            [key for key in one.keys if key < keys],
            one.heads,  # query heads of one KV head stand together
        )
    )
    index = (heads // group)[:, None, None], (heads % group)[:, None, None], tokens[:, None], columns[None, :]
    scores[:, row][index] = lowest


def plain(
    query: Float[Tensor, "row head new d_head"],
    key: Float[Tensor, "row kv_head keys d_head"],
    value: Float[Tensor, "row kv_head keys d_head"],
    mask: Float[Tensor, "1 1 new keys"],
    *,
    scaling: float,
    softcap: float | None,
    keep: bool,
) -> tuple[Float[Tensor, "row new head d_head"], Float[Tensor, "row head new keys"] | None]:
    """Attention over given keys and values, which are not repeated for their query heads, in blocks of queries; and
    the pattern, where it is to be kept."""
    rows, heads, new, _ = query.shape
    keys = key.shape[2]
    q = rearrange(query * scaling, "r (kv g) m d -> r kv g m d", kv=key.shape[1])
    made, patterns = [], []
    for t in _spans(new, SCORES // (rows * heads * keys)):
        seen = mask[0, 0, t]
        stop = 1 + int((seen > torch.finfo(seen.dtype).min).any(dim=0).nonzero().max())  # what follows, no query sees
        scores = (q[:, :, :, t].flatten(2, 3) @ key[:, :, :stop].mT).unflatten(2, (-1, t.stop - t.start))
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = torch.softmax(scores + seen[:, :stop], dim=-1, dtype=torch.float32).to(query.dtype)
        z = (weights.flatten(2, 3) @ value[:, :, :stop]).unflatten(2, (-1, t.stop - t.start))
        made.append(rearrange(z, "r kv g m d -> r m (kv g) d"))
        if keep:
            patterns.append(pad(weights.flatten(1, 2), (0, keys - stop)))
    return torch.cat(made, dim=1), torch.cat(patterns, dim=2) if keep else None

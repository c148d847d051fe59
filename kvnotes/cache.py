"""KVState: a frozen per-layer key/value cache with explicit positions, and the edits that make new ones.

A cache index is never taken for a position: every state carries its tokens' RoPE positions, and masks, windows
and shifts are computed from those. No method changes its state; edits copy only the layers that they touch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvnotes.errors import KVNotesError


class CacheError(KVNotesError):
    """An edit that cannot be made: cells out of range, states that do not match, nothing to change."""


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Which (layer, kv head, position) cells: the product of three axes, None meaning all of an axis.

    `positions` are cache indices of the state that is edited; `kv_heads` are KV heads, not query heads.
    """

    positions: tuple[int, ...] | None
    layers: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None

    def meet(self, other: Cells) -> bool:
        """Whether some cell is named by both."""
        axes = ((getattr(self, axis), getattr(other, axis)) for axis in ("positions", "layers", "kv_heads"))
        return all(one is None or two is None or not set(one).isdisjoint(two) for one, two in axes)

    def count(self, state: KVState) -> int:
        """How many cells these are in `state`. Raises CacheError where one is out of range or named twice."""
        sizes = {"layers": state.n_layers, "kv_heads": state.n_kv_heads, "positions": state.length}
        total = 1
        for axis, size in sizes.items():
            chosen = getattr(self, axis)
            if chosen is not None and (len(set(chosen)) != len(chosen) or not all(0 <= i < size for i in chosen)):
                raise CacheError(f"{axis} {chosen} must be distinct and within 0..{size - 1}")
            total *= size if chosen is None else len(chosen)
        return total


@dataclass(frozen=True, eq=False)
class Rotation:
    """How a model turns keys by position, so that a cached key can be moved: per layer, the inverse frequencies
    of the rotated pairs (i, i + rotary/2). Scaled RoPE (linear, yarn, llama3) only changes these; a constant
    attention factor multiplies cos and sin alike and so commutes with a further turn."""

    inv_freq: tuple[Float[Tensor, "pairs"], ...]

    def turn(self, k: Float[Tensor, "kv_head pos d_head"], *, layer: int, offset: Int[Tensor, "pos"]) -> Tensor:
        """Keys advanced by `offset` positions each, computed in float64."""
        pairs = self.inv_freq[layer].shape[0]
        angle = offset.to(k.device)[:, None].double() * self.inv_freq[layer].to(k.device).double()
        cos, sin = angle.cos(), angle.sin()
        one, two, rest = k[..., :pairs].double(), k[..., pairs : 2 * pairs].double(), k[..., 2 * pairs :]
        turned = torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1).to(k.dtype)
        return torch.cat([turned, rest], dim=-1)


@dataclass(frozen=True, eq=False)
class KVState:
    """One sequence's cache: per layer a dict of named tensors (k after RoPE, v; [kv_head, pos, d_head]) and the
    tokens' positions, one row an axis (text has one)."""

    layers: tuple[Mapping[str, Float[Tensor, "kv_head pos d_head"]], ...]
    positions: Int[Tensor, "axis pos"]

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return self.positions.shape[1]

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def n_kv_heads(self) -> int:
        """Number of KV heads."""
        return self.layers[0]["k"].shape[0]

    def slice(self, start: int, stop: int) -> KVState:
        """The cached tokens start..stop-1, with the positions they were computed at."""
        if not 0 <= start < stop <= self.length:
            raise CacheError(f"cannot slice {start}:{stop} of a state of {self.length} tokens")
        layers = tuple({name: t[:, start:stop] for name, t in layer.items()} for layer in self.layers)
        return KVState(layers, self.positions[:, start:stop])

    def crop(self, length: int) -> KVState:
        """The first `length` cached tokens."""
        return self.slice(0, length)

    def replace(self, cells: Cells, donor: KVState | None) -> KVState:
        """A new state with these cells taken from `donor` at the same indices; None zeroes them.

        Raises CacheError as `check` does.
        """
        self.check(cells, donor)
        chosen = range(self.n_layers) if cells.layers is None else cells.layers
        layers = list(self.layers)
        for i in chosen:
            layers[i] = {
                name: _put(t, cells, None if donor is None else donor.layers[i][name])
                for name, t in self.layers[i].items()
            }
        return KVState(tuple(layers), self.positions)

    def check(self, cells: Cells, donor: KVState | None) -> None:
        """Raise CacheError where an edit names no cell or one out of range, or where donor and state differ in shape
        or positions."""
        if cells.count(self) == 0:
            raise CacheError("the edit names no cell; an intervention that changes nothing is a mistake")
        self.fits(donor)

    def fits(self, donor: KVState | None) -> None:
        """Raise CacheError where a donor's cells cannot stand in this state: other shapes or positions."""
        if donor is not None and not torch.equal(self.positions, donor.positions):
            raise CacheError("donor and state hold tokens at different positions; shift or slice one of them first")
        if donor is not None and _shapes(donor) != _shapes(self):
            raise CacheError("donor and state have tensors of different shapes: they come from different models")

    def splice(self, *others: KVState) -> KVState:
        """This state followed by `others`, each at the positions it carries (shift first to move it)."""
        parts = (self, *others)
        layers = tuple(
            {name: torch.cat([part.layers[i][name] for part in parts], dim=1) for name in self.layers[i]}
            for i in range(self.n_layers)
        )
        return KVState(layers, torch.cat([part.positions for part in parts], dim=1))

    def shift(self, offset: int, rotation: Rotation) -> KVState:
        """The same tokens `offset` positions later (earlier where negative): keys turned, values as they are.

        Exact against a fresh prefill at the new positions, since RoPE attention depends on differences only
        (Su et al. 2021, RoFormer). Raises CacheError for more than one position axis or a negative position.
        """
        if self.positions.shape[0] != 1:
            raise CacheError(f"shift knows one position axis, this state has {self.positions.shape[0]}")
        if int(self.positions.min()) + offset < 0:
            raise CacheError(f"a shift by {offset} would move a token before position 0")
        by = torch.full_like(self.positions[0], offset)
        layers = tuple(
            {**layer, "k": rotation.turn(layer["k"], layer=i, offset=by)} for i, layer in enumerate(self.layers)
        )
        return KVState(layers, self.positions + offset)

    def fingerprint(self) -> str:
        """SHA-256 over every tensor and the positions: equal only for bit-equal states."""
        digest = hashlib.sha256(self.positions.cpu().numpy().tobytes())
        for layer in self.layers:
            for name in sorted(layer):
                raw = layer[name].detach().cpu().contiguous().view(torch.uint8)
                digest.update(name.encode() + str(tuple(layer[name].shape)).encode() + raw.numpy().tobytes())
        return digest.hexdigest()

    def deviation(self, other: KVState, *, start: int, stop: int) -> float:
        """Largest absolute difference of any cell of the tokens start..stop-1; 0.0 where that is no token."""
        if start == stop:
            return 0.0
        one, two = self.slice(start, stop), other.slice(start, stop)
        largest = [(a[n] - b[n]).abs().max() for a, b in zip(one.layers, two.layers, strict=True) for n in a]
        return float(torch.stack(largest).max())  # a tensor's max keeps a NaN, Python's may lose it

    @property
    def nbytes(self) -> int:
        """Bytes the tensors hold."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.values())


def mean(states: Sequence[KVState]) -> KVState:
    """The mean of states, cell by cell: a donor that carries what they have in common.

    Raises CacheError for no state, or for states of different shapes or positions (a mean of keys at different
    positions means nothing).
    """
    if not states:
        raise CacheError("a mean needs at least one state")
    first = states[0]
    for state in states[1:]:
        first.fits(state)
    layers = tuple(
        {name: torch.stack([state.layers[i][name] for state in states]).mean(dim=0) for name in first.layers[i]}
        for i in range(first.n_layers)
    )
    return KVState(layers, first.positions)


def _shapes(state: KVState) -> list[dict[str, tuple[int, ...]]]:
    return [{name: tuple(t.shape) for name, t in layer.items()} for layer in state.layers]


def _put(tensor: Tensor, cells: Cells, source: Tensor | None) -> Tensor:
    """`tensor` with the cells of one layer from `source` (or zeroed), as a copy."""
    heads = torch.arange(tensor.shape[0]) if cells.kv_heads is None else torch.tensor(cells.kv_heads)
    places = torch.arange(tensor.shape[1]) if cells.positions is None else torch.tensor(cells.positions)
    index = (heads[:, None], places[None, :])
    edited = tensor.clone()
    edited[index] = 0.0 if source is None else source[index]
    return edited


def stack(states: Sequence[KVState]) -> list[dict[str, Float[Tensor, "batch kv_head pos d_head"]]]:
    """States of equal length and positions as one batch a layer. Raises CacheError where they differ."""
    first = states[0]
    for state in states[1:]:
        if not torch.equal(state.positions, first.positions):
            raise CacheError("states of one batch must hold tokens at the same positions")
    return [
        {name: torch.stack([s.layers[i][name] for s in states]) for name in first.layers[i]}
        for i in range(first.n_layers)
    ]

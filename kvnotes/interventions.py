"""Interventions as frozen data: what a study asks of a trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes.cache import CacheError, Cells, KVState

State = Literal["base", "target"]
Point = Literal["resid_pre", "z", "attn_out", "mlp_out", "resid_post"]  # in the order a layer computes them


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheEdit:
    """Replace cells of the state `into` by the donor's, then recompute the query block.

    The donor is the other arm, any state with the same positions (such as `cache.mean` of several), or None, which
    zeroes. `positions` are token positions of the pair; layers and kv_heads of None mean all.
    """

    name: str
    positions: tuple[int, ...]
    into: State
    donor: State | KVState | None
    layers: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None

    @property
    def cells(self) -> Cells:
        """The cells that the edit replaces."""
        return Cells(positions=self.positions, layers=self.layers, kv_heads=self.kv_heads)


@runtime_checkable
class Mix(Protocol):
    """How a patch mixes the donor's activation into the run's: the whole of it where a patch has no mix."""

    def __call__(self, own: Float[Tensor, "width"], donor: Float[Tensor, "width"] | None) -> Float[Tensor, "width"]:
        """The patched activation; a donor of None takes the mixed part away."""
        ...


def mixed(mix: Mix, own: Float[Tensor, "width"], donor: Float[Tensor, "width"] | None) -> Float[Tensor, "width"]:
    """What a mix makes of two activations. Raises CacheError where it is not an activation's shape."""
    made = mix(own, donor)
    if made.shape != own.shape:
        raise CacheError(f"a mix gave numbers of shape {tuple(made.shape)} for an activation of {tuple(own.shape)}")
    return made


@dataclass(frozen=True, eq=False)
class Direction:
    """The component in the span of some directions is the donor's, all else the run's own. Without a donor the
    component is projected out. The directions need be neither normed nor orthogonal, only independent; one that is
    exactly zero spans nothing and changes nothing, as where both arms have the same token and no layer has run."""

    directions: Float[Tensor, "directions width"]

    def __call__(self, own: Float[Tensor, "width"], donor: Float[Tensor, "width"] | None) -> Float[Tensor, "width"]:
        """`own`, moved within the span."""
        wide = own.float()  # there is no QR in half precision
        some = self.directions[self.directions.any(dim=1)]  # QR would give a zero direction an axis of its own choice
        basis = torch.linalg.qr(some.to(wide).T).Q
        return own + (basis @ (basis.T @ ((0 if donor is None else donor) - wide))).to(own)


@dataclass(frozen=True, eq=False)
class Added:
    """The donor, a vector, is added to the run's own activation: steering."""

    def __call__(self, own: Float[Tensor, "width"], donor: Float[Tensor, "width"] | None) -> Float[Tensor, "width"]:
        """The sum. Raises CacheError without a vector."""
        if donor is None:
            raise CacheError("there is no vector to add: give the patch a tensor as its donor")
        return own + donor


@dataclass(frozen=True, eq=False)
class Features:
    """Chosen features of a sparse autoencoder are the donor's, or 0 without one; all else, the reconstruction error
    included, is the run's own, so that a feature that does not change leaves the activation as it is."""

    encode: Callable[[Float[Tensor, "width"]], Float[Tensor, "feature"]]
    decoder: Float[Tensor, "feature width"]
    chosen: tuple[int, ...]

    def __call__(self, own: Float[Tensor, "width"], donor: Float[Tensor, "width"] | None) -> Float[Tensor, "width"]:
        """`own`, moved along the chosen features' decoder rows by the change of their activations."""
        rows = list(self.chosen)
        change = (0 if donor is None else self.encode(donor)[rows]) - self.encode(own)[rows]
        return own + (change @ self.decoder[rows].to(change)).to(own)


@dataclass(frozen=True, kw_only=True, eq=False)
class ActivationPatch:
    """Replace an activation of the run `into` by the donor's, and recompute every later position and layer.

    The donor is the other arm's activation at the same place, a given vector, or None, which zeroes; `mix` replaces
    only a part of it. At the query block's own positions only the decision is recomputed. `head` is a query head, for
    z only.
    """

    name: str
    point: Point
    layer: int
    position: int
    into: State
    donor: State | Tensor | None
    head: int | None = None
    mix: Mix | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionBlock:
    """The `queries` of the run `into` (None: the query block) may not attend to `positions`, at the named layers and
    query heads (None: all). Earlier queries than the block's have everything after them recomputed."""

    name: str
    positions: tuple[int, ...]
    into: State
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    queries: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Recompute:
    """Selective recompute: the cells at `positions` are computed anew, as the tokens of the arm `tokens`, over the
    state `into` whose other cells stay frozen; then the query block over the result. They need not be contiguous."""

    name: str
    positions: tuple[int, ...]
    into: State
    tokens: State


def width_of(point: Point, head: int | None, sizes: Mapping[str, int]) -> int:
    """How many numbers a point's activation has: of one query head's z, or of all of them side by side."""
    if head is not None:
        return sizes["d_head"]
    return sizes["heads"] * sizes["d_head"] if point == "z" else sizes["d_model"]


def columns(head: int | None, d_head: int) -> slice:
    """Where a query head's numbers stand among those of all heads; everything, where no head is named."""
    return slice(None) if head is None else slice(head * d_head, (head + 1) * d_head)


Part = CacheEdit | ActivationPatch | AttentionBlock | Recompute


@dataclass(frozen=True, kw_only=True, eq=False)
class Together:
    """Several interventions into one run, made at once. Cells that a part recomputes cannot be edited by another."""

    name: str
    parts: Sequence[Part]


Intervention = Part | Together


def parts(one: Intervention) -> Sequence[Part]:
    """An intervention's parts: itself where it is no combination."""
    return [part for given in one.parts for part in parts(given)] if isinstance(one, Together) else [one]


def run_of(one: Intervention) -> State:
    """The run that an intervention changes. Raises CacheError for parts that name two, or where there is none."""
    runs: set[State] = {part.into for part in parts(one)}
    if len(runs) != 1:
        raise CacheError(f"{one.name}: its parts must change one run, they name {sorted(runs) or 'none'}")
    return next(iter(runs))

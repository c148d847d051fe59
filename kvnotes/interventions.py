"""Interventions as frozen data: what a study asks of a trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvnotes.cache import Cells

State = Literal["base", "target"]
Point = Literal["resid_pre", "z", "attn_out", "mlp_out", "resid_post"]  # in the order a layer computes them


@dataclass(frozen=True, kw_only=True)
class CacheEdit:
    """Replace cells of the state `into` by those of `donor` (None zeroes them), then recompute the query block.

    `positions` are token positions of the pair; layers and kv_heads of None mean all.
    """

    name: str
    positions: tuple[int, ...]
    into: State
    donor: State | None
    layers: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None

    @property
    def cells(self) -> Cells:
        """The cells that the edit replaces."""
        return Cells(positions=self.positions, layers=self.layers, kv_heads=self.kv_heads)


@dataclass(frozen=True, kw_only=True)
class ActivationPatch:
    """Replace an activation of the run `into` by that of `donor`, and recompute every later position and layer.

    At the query block's own positions only the decision is recomputed. `head` is a query head, for z only.
    """

    name: str
    point: Point
    layer: int
    position: int
    into: State
    donor: State
    head: int | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionBlock:
    """The query block of the run `into` may not attend to `positions`, at the named layers and query heads."""

    name: str
    positions: tuple[int, ...]
    into: State
    layers: tuple[int, ...]
    heads: tuple[int, ...]


Intervention = CacheEdit | ActivationPatch | AttentionBlock

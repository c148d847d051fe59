"""How many FLOPs the mathematics of an intervention needs: the least that answers it exactly.

FLOPs of a decoder layer for one token are 2 x its linear weights (of a mixture of experts, those that a token uses)
plus 4 x heads x d_head x visible keys for the two attention products; norms, rotary code, softmax and the read-out of
two logits are left out. What the workloads need:

    W1  one decision token an intervention through all layers but the first, whose cells depend on their token alone
        and so are the donor's already, and but for the second layer's projections, which are still the same for all.
    W2  one decision token from its own layer's output projection on (its z is patched) through the layers above.
    W3  the tokens from the patched position on. In the patched layer the patched token's projections, and every
        token's attention and MLP; in the layers above everything; but in the last layer only the keys and values of
        all tokens and the rest of the decision's. A cell that is the same in both arms (the first layer's input, at a
        token that did not change) needs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

PARTS = {"q_proj": "query", "k_proj": "key_value", "v_proj": "key_value", "o_proj": "output"}  # all else is MLP


@dataclass(frozen=True, kw_only=True)
class Costs:
    """A model's shapes: linear weights of one layer by what they compute. Layers differ in their windows only."""

    query: int
    key_value: int
    output: int
    mlp: int
    heads: int
    d_head: int
    windows: tuple[int | None, ...]  # visible positions, one a layer

    @classmethod
    def of(cls, model: Any) -> Costs:
        """The shapes of a loaded model."""
        layer = model.twin.base_model.layers[0]
        return cls(
            **_sizes(layer.named_parameters(), used=_used_experts(model.twin.config)),
            heads=model.shape["heads"],
            d_head=model.shape["d_head"],
            windows=model.windows.per_layer,
        )

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.windows)

    def cache_edit(self, tokens: int) -> int:
        """W1: the decision token of a prompt of `tokens` over a cache edited at a token that did not change."""
        read, first = range(tokens - 1, tokens), min(1, self.layers - 1)
        return self._mixed(first, read) + self._above(first, read)

    def head_patch(self, layer: int, tokens: int) -> int:
        """W2: the decision token from its z in `layer` on."""
        return 2 * (self.output + self.mlp) + self._above(layer, range(tokens - 1, tokens))

    def residual_patch(self, layer: int, position: int, tokens: int) -> int:
        """W3: every token from `position` on, from the input of `layer` up."""
        moved, last = range(position, tokens), layer == self.layers - 1
        asks = not last or position == tokens - 1  # in the last layer only the decision's query is used
        own = 2 * (self.key_value + (self.query if asks else 0))
        return own + self._mixed(layer, moved[-1:] if last else moved) + self._above(layer, moved)

    def forward(self, tokens: int) -> int:
        """A whole forward of a prompt, up to the logits."""
        every, last = range(tokens), self.layers == 1
        own = 2 * (self.key_value * tokens + self.query * (1 if last else tokens))
        return own + self._mixed(0, every[-1:] if last else every) + self._above(0, every)

    def _mixed(self, layer: int, tokens: range) -> int:
        """A layer whose queries, keys and values are there: attention, output projection and MLP."""
        attention = sum(self._visible(layer, position) for position in tokens) * 4 * self.heads * self.d_head
        return 2 * (self.output + self.mlp) * len(tokens) + attention

    def _above(self, layer: int, tokens: range) -> int:
        """All layers above `layer`, of which the last is read at the last token."""
        last = self.layers - 1
        if layer == last:
            return 0
        projections = 2 * (self.query + self.key_value) * len(tokens)
        between = sum(projections + self._mixed(i, tokens) for i in range(layer + 1, last))
        return between + 2 * (self.key_value * len(tokens) + self.query) + self._mixed(last, tokens[-1:])

    def _visible(self, layer: int, position: int) -> int:
        window = self.windows[layer]
        return position + 1 if window is None else min(position + 1, window)


def _sizes(weights: Iterable[tuple[str, Tensor]], *, used: float) -> dict[str, int]:
    """Linear weights by part. Experts are one tensor of three axes, of which a token uses the part `used`."""
    sizes = {"query": 0, "key_value": 0, "output": 0, "mlp": 0}
    for name, weight in weights:
        if weight.dim() >= 2:
            part = next((part for key, part in PARTS.items() if key in name), "mlp")
            sizes[part] += round(weight.numel() * (used if weight.dim() == 3 else 1))
    return sizes


def _used_experts(config: Any) -> float:
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    return config.num_experts_per_tok / experts if experts else 1.0

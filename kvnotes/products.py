"""Matrix products of float32 on a CPU, by oneDNN instead of the BLAS that torch calls by itself.

That BLAS (MKL) does not use the wide registers of every processor: on an AMD EPYC with AVX-512 oneDNN is 2.1 times as
fast at 75 rows and more, and 3 times at one to three. Both add in float32, in another order. torch has oneDNN's
product of plain, unpacked weights as an operator without a gradient, so that a product that is differentiated, another
type or device, and a build without oneDNN take the ordinary way.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def _operator() -> Any | None:
    """oneDNN's x @ weight.T + bias, where this build of torch has it."""
    here = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return torch.ops.mkldnn._linear_pointwise if here else None


_ONEDNN = _operator()
# Multiplications from which on a head's attention goes by oneDNN. It keeps code for every shape it has seen (a third
# of a megabyte each), and sweeps over positions see hundreds of small ones.
_LEAST = 2**23


def by_onednn(*tensors: Tensor | None) -> bool:
    """Whether a product of these is made by oneDNN."""
    given = [tensor for tensor in tensors if tensor is not None]
    return (
        _ONEDNN is not None
        and all(t.device.type == "cpu" and t.dtype == torch.float32 and t.numel() for t in given)
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in given))
    )


def linear(
    x: Float[Tensor, "*batch in_"], weight: Float[Tensor, "out in_"], bias: Float[Tensor, "out"] | None = None
) -> Float[Tensor, "*batch out"]:
    """x @ weight.T + bias."""
    if _ONEDNN is None or not by_onednn(x, weight, bias):
        return torch.nn.functional.linear(x, weight, bias)
    # rows with gaps between them take the operator a thousandfold time
    dense = weight.is_contiguous() or weight.T.is_contiguous()
    bias = None if bias is None else bias.contiguous()  # it reads a bias with gaps as if there were none
    return _ONEDNN(x, weight if dense else weight.contiguous(), bias, "none", [], "")


def into(out: Float[Tensor, "b m n"], x: Float[Tensor, "b m k"], weights: Float[Tensor, "b n k"]) -> None:
    """Each x @ weight.T, put into `out`, which may be a part of a larger tensor. No gradient."""
    for place, one, weight in zip(out, x, weights, strict=True):
        if one.numel() * len(weight) >= _LEAST and by_onednn(one, weight):
            place.copy_(linear(one, weight))
        else:
            torch.mm(one, weight.T, out=place)


class Linear(torch.nn.Linear):
    """A linear layer by these products. Existing layers become one: `layer.__class__ = Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """input @ weight.T + bias."""
        return linear(input, self.weight, self.bias)

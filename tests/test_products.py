"""oneDNN's products against float64, where they do not apply, and that the rows' tree uses them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvnotes import models, products
from tests import tiny

needs = pytest.mark.skipif(not products.by_onednn(torch.ones(1, 1)), reason="this torch has no oneDNN")


@pytest.mark.parametrize("rows", [1, 3, 75, 781])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_float64(rows: int, biased: bool) -> None:
    x, weight = torch.randn(2, rows, 96), torch.randn(40, 96)
    bias = torch.randn(40) if biased else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert (products.linear(x, weight, bias) - exact).abs().max() < 1e-4


def test_weights_with_gaps_between_their_rows() -> None:
    x, wide = torch.randn(5, 64), torch.randn(7, 2, 64)
    assert torch.allclose(products.linear(x, wide[:, 1]), x @ wide[:, 1].contiguous().T, atol=1e-4)
    assert torch.allclose(products.linear(wide[:, 1], x), wide[:, 1].contiguous() @ x.T, atol=1e-4)


def test_a_bias_with_gaps() -> None:
    x, weight, bias = torch.randn(5, 64), torch.randn(7, 64), torch.randn(14)[::2]
    assert torch.allclose(products.linear(x, weight, bias), x @ weight.T + bias, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_into_a_part_of_a_larger_tensor(dtype: torch.dtype) -> None:
    x, weights = torch.randn(2, 5, 8, dtype=dtype), torch.randn(2, 8, 3, dtype=dtype)
    whole = torch.full((2, 5, 4), 9.0, dtype=dtype)
    products.into(whole[..., :3], x, weights.mT)
    assert torch.allclose(whole[..., :3], x @ weights, atol=1e-5)
    assert (whole[..., 3] == 9).all()


@needs
def test_what_is_differentiated_goes_the_ordinary_way() -> None:
    x, weight = torch.randn(2, 4), torch.randn(3, 4, requires_grad=True)
    assert not products.by_onednn(x, weight)
    products.linear(x, weight).sum().backward()
    assert weight.grad is not None
    assert torch.allclose(weight.grad, x.sum(0).expand(3, 4))
    with torch.no_grad():
        assert products.by_onednn(x, weight)
    assert not products.by_onednn(x.bfloat16(), weight.detach().bfloat16())


def test_the_tree_of_the_rows_uses_them_and_the_bridge_does_not(tmp_path: Path) -> None:
    model = models.load(str(tiny.checkpoint("qwen2", tmp_path)), device="cpu", dtype="float32")
    assert model.twin is not None
    ours = [module for module in model.twin.modules() if isinstance(module, torch.nn.Linear)]
    theirs = [module for module in model.bridge.modules() if isinstance(module, torch.nn.Linear)]
    assert ours
    assert all(isinstance(module, products.Linear) for module in ours)
    assert theirs
    assert not any(isinstance(module, products.Linear) for module in theirs)

"""Direct attribution: what each head, MLP and bias at the decision adds to the margin itself.

The last residual is a sum: the embedding and, of every layer, the heads' z through the output projection, its bias and
the MLP. With the final norm's scale frozen at the run's own value the margin is linear in that sum, so that each part
has a share of it and the shares sum to the margin (direct logit attribution; Elhage et al. 2021, "A Mathematical
Framework for Transformer Circuits", and Wang et al. 2022, arXiv 2211.00593). Frozen in the same way: a norm between a
block and the residual (Gemma), and a soft-cap of the logits, as the factor by which it shrinks each of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes import attribution
from kvnotes.cache import CacheError
from kvnotes.instance import TokenPair
from kvnotes.interventions import Point, State
from kvnotes.points import post_norms, tree_of

SEEN: tuple[Point, ...] = ("resid_pre", "z", "attn_out", "mlp_out", "resid_post")
FINAL_NORMS = ("norm", "final_layernorm", "ln_f")  # what architectures call it
EXACT = 1e-3  # of a vector's norm, in float32; half precision rounds to more
HALF = 2e-2


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """What each part of an unedited run adds to its margin, in logits. `biases` are the output projections',
    `unembedding` is the bias of the logits; a head's value bias is part of its z."""

    heads: Float[Tensor, "layer head"]
    mlps: Float[Tensor, "layer"]
    biases: Float[Tensor, "layer"]
    embedding: float
    unembedding: float

    @property
    def total(self) -> float:
        """The sum of all parts: the run's margin."""
        sums = sum(float(part.sum()) for part in (self.heads, self.mlps, self.biases))
        return sums + self.embedding + self.unembedding


def attribute(trial: Any, run: State) -> Parts:
    """The parts of one arm's margin at the decision.

    Raises CacheError for a model whose residual is not the sum of its attentions' and MLPs' outputs, whose final norm
    does more than scale, or whose layers cannot be seen.
    """
    tree, at = tree_of(trial.model), trial.pair.query[-1]
    seen: dict[Point, Tensor] = {point: trial.capture(run, point, [at])[:, 0] for point in SEEN}
    reading, unembedding = _reading(trial.model, seen["resid_post"][-1], trial.pair)
    heads, mlps, biases = [], [], []
    for layer, block in enumerate(tree.base_model.layers):
        here: dict[Point, Tensor] = {point: seen[point][layer] for point in SEEN}
        after, last = post_norms(block)
        attention, mlp = _frozen(after, here["attn_out"]), _frozen(last, here["mlp_out"])
        _require_sum(trial.model, layer, here, attention * here["attn_out"] + mlp * here["mlp_out"])
        projection = block.self_attn.o_proj
        read = attention.double() * reading
        by_number = (read @ projection.weight.double()) * here["z"].double()
        heads.append(by_number.unflatten(0, (trial.model.shape["heads"], -1)).sum(dim=-1))
        biases.append(torch.zeros_like(heads[-1][0]) if projection.bias is None else read @ projection.bias.double())
        mlps.append((mlp.double() * reading) @ here["mlp_out"].double())
    return Parts(
        heads=torch.stack(heads).cpu(),
        mlps=torch.stack(mlps).cpu(),
        biases=torch.stack(biases).cpu(),
        embedding=float(reading @ seen["resid_pre"][0].double()),
        unembedding=unembedding,
    )


def _reading(model: Any, last: Float[Tensor, "d_model"], pair: TokenPair) -> tuple[Float[Tensor, "d_model"], float]:
    """The vector whose product with any part of the last residual is the part's share of the margin, and the share of
    the logits' own bias."""
    tree = tree_of(model)
    norm = next((found for name in FINAL_NORMS if (found := getattr(tree.base_model, name, None)) is not None), None)
    if norm is None:
        raise CacheError(f"{model.name} has no final norm by a known name: {', '.join(FINAL_NORMS)}")
    scale, ids = _frozen(norm, last), [pair.base_action, pair.target_action]
    out = tree.get_output_embeddings()
    rows = out.weight[ids].double()
    bias = torch.zeros_like(rows[:, 0]) if out.bias is None else out.bias[ids].double()
    logits = rows @ (scale.double() * last.double()) + bias
    signed = _shrunk(logits, getattr(tree.config, "final_logit_softcapping", None)) * torch.tensor([-1.0, 1.0]).to(rows)
    return (signed @ rows) * scale.double(), float(signed @ bias)


def _shrunk(logits: Float[Tensor, "two"], cap: float | None) -> Float[Tensor, "two"]:
    """The factor by which a soft-cap shrinks each logit; 1 where there is none, or nothing to shrink."""
    if cap is None:
        return torch.ones_like(logits)
    capped = torch.tanh(logits / cap) * cap
    return torch.where(logits == 0, torch.ones_like(logits), capped / logits)


@torch.no_grad()
def _frozen(norm: Any | None, x: Float[Tensor, "width"]) -> Float[Tensor, "width"]:
    """What a norm multiplies each number of `x` by; ones where there is none.

    The weights are read off the norm of a vector of ones, whatever an architecture adds to them. Raises CacheError for
    a norm that does more than scale, such as one that takes the mean away: its parts would have no shares.
    """
    if norm is None:
        return torch.ones_like(x)
    own, weights = norm(x).double(), norm(torch.ones_like(x)).double()
    whole = weights * x.double()
    scale = (own @ whole) / (whole @ whole)
    if not float((own - scale * whole).norm()) <= _bound(x) * float(own.norm()):
        raise CacheError(f"{type(norm).__name__} does more than scale: direct attribution is for RMS norms")
    return (scale * weights).to(x)


def _require_sum(model: Any, layer: int, here: Mapping[Point, Tensor], added: Float[Tensor, "d_model"]) -> None:
    error = float((here["resid_pre"] + added - here["resid_post"]).norm())
    if not error <= _bound(added) * float(here["resid_post"].norm()):
        raise CacheError(
            f"{model.name}: layer {layer} adds more to the residual than its attention and its MLP (a multiplier, or a "
            "norm of an unknown name): direct attribution does not know its parts"
        )


def _bound(x: Tensor) -> float:
    return EXACT if x.dtype in (torch.float32, torch.float64) else HALF


def first_order(trial: Any, places: Mapping[str, Sequence[int]]) -> dict[str, Float[Tensor, "layer head"]]:
    """The effect of base taking the target's z of one head at some positions, to first order, in logits, by name.

    Signed; of the two arms' gradients the one that says more, as in `kvnotes.attribution`.
    """
    if not places:
        return {}
    start, stop, heads = min(map(min, places.values())), len(trial.pair.base_ids), trial.model.shape["heads"]
    change = trial.held("target", "z", start, stop) - trial.held("base", "z", start, stop)
    slopes = [attribution.gradients(trial, run, points=("z",), start=start)["z"] for run in trial.states]
    each = [(change * slope).unflatten(-1, (heads, -1)).sum(dim=-1) for slope in slopes]  # [layer, pos, head]
    found = {}
    for name, positions in places.items():
        one, other = (effect[:, [p - start for p in positions]].sum(dim=1) for effect in each)
        found[name] = torch.where(one.abs() >= other.abs(), one, other).cpu()
    return found

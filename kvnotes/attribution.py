"""Gradient attribution of patches: every cell's effect to first order, from one forward and backward an arm.

Attribution patching (Nanda 2023; Syed et al. 2023, arXiv 2310.10348): the effect of giving a run the donor's activation
x' for its own x is about (x' - x) . gradient of the margin. The gradient is taken in both arms, since what is saturated
or switched off in one may act in the other: on qwen2.5-coder-0.5b, the mean of the two missed effects that the larger
of them finds. It screens; what it keeps is patched exactly (`Trial.screened`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes import readout
from kvnotes.cache import CacheError
from kvnotes.forward import differentiable
from kvnotes.interventions import ActivationPatch, Point, State
from kvnotes.points import tree_of, visited

if TYPE_CHECKING:
    from kvnotes.sweep import Trial


def effects(trial: Trial, patches: Sequence[ActivationPatch]) -> dict[str, float]:
    """The size of each patch's effect on the margin to first order, in logits, by its name: the larger one of the two
    arms' gradients.

    Raises CacheError for a patch that is not the whole activation of an arm, whose difference is not known in advance.
    """
    for patch in patches:
        if patch.mix is not None or not isinstance(patch.donor, str):
            raise CacheError(f"{patch.name}: only whole activations of the other arm can be screened by gradient")
    if not patches:
        return {}
    found: dict[str, float] = {}
    start = min(trial.pair.query[0], *(patch.position for patch in patches))
    points: list[Point] = list(dict.fromkeys(patch.point for patch in patches))
    slopes = [gradients(trial, run, points=points, start=start) for run in trial.states]
    for point in points:
        both = {run: trial.held(run, point, start, len(trial.pair.base_ids)) for run in trial.states}
        for patch in (patch for patch in patches if patch.point == point):
            assert isinstance(patch.donor, str)  # noqa: S101 (checked above)
            at = patch.layer, patch.position - start
            change = both[patch.donor][at] - both[patch.into][at]
            found[patch.name] = max(abs(_along(change, slope[point][at], patch, trial)) for slope in slopes)
    return found


def _along(change: Tensor, slope: Tensor, patch: ActivationPatch, trial: Trial) -> float:
    parts = change * slope
    return float(
        (parts if patch.head is None else parts.unflatten(0, (trial.model.shape["heads"], -1))[patch.head]).sum()
    )


def gradients(
    trial: Trial, run: State, *, points: Sequence[Point], start: int
) -> dict[Point, Float[Tensor, "layer pos width"]]:
    """The gradient of an unedited run's margin with respect to its activations from position `start` on."""
    model, ids = trial.model, trial.pair.ids(run)
    seen: dict[tuple[Point, int], Tensor] = {}

    def keep(point: Point, layer: int, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:  # the first residual: all that follows depends on it
            tensor = tensor.detach().requires_grad_()
        tensor.retain_grad()
        seen[point, layer] = tensor
        return tensor

    with torch.enable_grad(), visited(tree_of(model), keep, {"resid_pre", *points}):
        out = differentiable(
            model,
            torch.tensor([ids[start:]]),
            positions=torch.arange(start, len(ids)),
            past=[trial.cropped(trial.states[run], start)],
            over=None,
            read=[len(ids) - start - 1],
            keep=False,
        )
        readout.margin(out.logits[0, 0], trial.pair).backward()
    layers = range(model.shape["layers"])
    return {point: torch.stack([_slope(seen[point, layer]) for layer in layers]) for point in points}


def _slope(tensor: Tensor) -> Float[Tensor, "pos width"]:
    """A tensor's gradient; zero where the margin does not depend on it."""
    return (torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)[0]

"""Who wrote a residual: what each layer's attention and MLP add to it, exactly.

A decoder layer adds its attention's output and then its MLP's to the residual, each through a norm of its own where the
architecture has one there (Gemma 2 and 3, OLMo 2, GLM-4). The residual after a layer is the embedding and all parts up
to it; where both arms have the same token, the embeddings are the same, and the parts' differences sum to the
residuals' difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvnotes.interventions import Point, State
from kvnotes.points import post_norms, tree_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvnotes.sweep import Trial

Floats = NDArray[np.float64]

POINTS: Mapping[str, Point] = {"attention": "attn_out", "mlp": "mlp_out"}


def differences(trial: Trial, position: int) -> dict[str, Floats]:
    """Target's parts less base's at a position, [layer, d_model], of `attention` and of `mlp`."""
    return {
        writer: parts(trial, "target", position, writer) - parts(trial, "base", position, writer) for writer in POINTS
    }


def parts(trial: Trial, run: State, position: int, writer: str) -> Floats:
    """What a writer adds to an unedited run's residual at each layer, [layer, d_model]."""
    import torch

    outputs = trial.capture(run, POINTS[writer], [position])[:, 0]
    with torch.no_grad():
        added = [_through(block, writer)(out) for block, out in zip(_blocks(trial), outputs, strict=True)]
    return torch.stack(added).double().cpu().numpy()


def _blocks(trial: Trial) -> Any:
    return tree_of(trial.model).base_model.layers


def _through(block: Any, writer: str) -> Any:
    """The norm that a writer's output passes; where there is none it stays as it is."""
    norm = dict(zip(POINTS, post_norms(block), strict=True))[writer]
    return norm if norm is not None else lambda output: output


def error(found: Mapping[str, Floats], difference: Floats, *, size: float) -> float:
    """How far the parts' sum is from the residuals' difference, at the worst layer: as a share of the difference, or of
    a hundredth of the residual's `size` where the difference is smaller, since that is rounding."""
    summed = np.cumsum(found["attention"] + found["mlp"], axis=0)
    lengths = np.maximum(np.linalg.norm(difference, axis=-1), size / 100)
    return float((np.linalg.norm(summed - difference, axis=-1) / np.maximum(lengths, 1e-12)).max())

"""Where a decoder layer's activations are seen and replaced, on the tree of modules that no bridge wraps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from kvnotes.cache import CacheError
from kvnotes.interventions import Point

# Of attention and MLP on their way into the residual, where an architecture has both. Llama's layers have a
# post_attention_layernorm alone, and GLM-4's one beside these: theirs stands before the MLP.
POST_NORMS = (
    ("post_attention_layernorm", "post_feedforward_layernorm"),
    ("post_self_attn_layernorm", "post_mlp_layernorm"),
)

Visit = Callable[[Point, int, Tensor], Tensor]  # a point, its layer and the activation -> the one to go on with


def tree_of(model: Any) -> Any:
    """The modules whose activations can be seen. Raises CacheError for a model that has none."""
    if model.twin is None:
        raise CacheError(f"{model.name}'s layers are not of the kind that captures know")
    return model.twin


def post_norms(block: Any) -> tuple[Any | None, Any | None]:
    """The norms between a layer's attention, or its MLP, and the residual."""
    for after, last in POST_NORMS:
        if hasattr(block, last):
            return getattr(block, after), getattr(block, last)
    return None, None


@contextmanager
def visited(tree: Any, visit: Visit, points: Collection[Point]) -> Iterator[None]:
    """Show `visit` these points of every layer, in the order they are computed; no hook is left behind.

    Head outputs z come with their heads side by side, as o_proj takes them.
    """
    handles = []
    for layer, block in enumerate(tree.base_model.layers):
        attention = block.self_attn
        if "resid_pre" in points:
            handles.append(block.register_forward_pre_hook(_before(visit, "resid_pre", layer)))
        if "z" in points:
            handles.append(attention.o_proj.register_forward_pre_hook(_before(visit, "z", layer)))
        after: dict[Point, Any] = {"attn_out": attention, "mlp_out": block.mlp, "resid_post": block}
        handles += [m.register_forward_hook(_after(visit, p, layer)) for p, m in after.items() if p in points]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _before(visit: Visit, point: Point, layer: int) -> Callable[..., Any]:
    return lambda _, args: (visit(point, layer, args[0]), *args[1:])


def _after(visit: Visit, point: Point, layer: int) -> Callable[..., Any]:
    def hook(_: Any, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return visit(point, layer, output[0]), *output[1:]
        return visit(point, layer, output)

    return hook


@contextmanager
def patterns(tree: Any, visit: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Show `visit` each layer's attention pattern, [row, head, query, key]."""
    hooks = [
        block.self_attn.register_forward_hook(lambda _, __, output, layer=layer: visit(layer, output[1]))
        for layer, block in enumerate(tree.base_model.layers)
    ]
    tree.config.kvnotes_patterns = True  # read by rows.attention: patterns are not kept unless they are asked for
    try:
        yield
    finally:
        del tree.config.kvnotes_patterns
        for hook in hooks:
            hook.remove()

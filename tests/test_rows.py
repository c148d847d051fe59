"""Rows packed into one forward equal copied caches and hooks on whole forwards, on every architecture."""

import pytest
import torch

from kvnotes import models
from kvnotes.cache import CacheError, Cells
from kvnotes.forward import decode, prefill
from kvnotes.rows import Block, Edit, Group, Patch, Row, run
from tests import tiny
from tests.test_architectures import CHANGED, QUERY, TOKENS, arms

GROUPS = [(4, 4), (4, 2), (7, 1)]


@pytest.fixture(
    scope="module", params=[*((kind, 4, 2) for kind in sorted(tiny.KINDS)), *(("qwen2", *g) for g in GROUPS)]
)
def trial(request, tmp_path_factory):
    kind, heads, kv_heads = request.param
    folder = tiny.checkpoint(kind, tmp_path_factory.mktemp(kind), heads=heads, kv_heads=kv_heads)
    model = models.load(str(folder), device="cpu", dtype="float32")
    base, target = (prefill(model, arm, start=0)[1].crop(QUERY - 2) for arm in arms())
    return model, base, target


def group(state, rows, *, first=QUERY - 2, trace=None) -> Group:
    """Rows of a query block of several tokens."""
    ids, positions = tuple(TOKENS[first:]), tuple(range(first, len(TOKENS)))
    return Group(shared=state.crop(first), ids=ids, positions=positions, rows=tuple(rows), trace=trace)


def edits(base, target):
    last = base.n_kv_heads - 1
    return [
        *(Row(edits=(Edit(cells=Cells(positions=(p,)), donor=target),)) for p in range(CHANGED, base.length)),
        Row(edits=(Edit(cells=Cells(positions=tuple(range(CHANGED, base.length))), donor=target),)),
        Row(edits=(Edit(cells=Cells(positions=(CHANGED, 9, 20), layers=(1, 3), kv_heads=(last,)), donor=target),)),
        Row(edits=(Edit(cells=Cells(positions=(12,), layers=(2,)), donor=None),)),
        Row(edits=(Edit(cells=Cells(positions=None, layers=(0,)), donor=target),)),
    ]


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_rows_equal_copied_caches(trial, chunk):
    model, base, target = trial
    rows = edits(base, target)
    copied = [base.replace(row.edits[0].cells, row.edits[0].donor) for row in rows]
    query = TOKENS[QUERY - 2 :]
    expected = decode(model, copied, query, start=QUERY - 2, read=[len(query) - 1])[:, 0]
    chunks = [rows[i : i + chunk] for i in range(0, len(rows), chunk)]
    measured = torch.cat([run(model, [group(base, part)], vocab=None)[0] for part in chunks])
    torch.testing.assert_close(measured, expected, atol=1e-4, rtol=0)
    assert (measured - measured[:1]).abs().max() > 1e-2  # the rows do differ


def test_several_edits_of_one_row_are_made_together(trial):
    model, base, target = trial
    one, two = Cells(positions=(9,)), Cells(positions=(CHANGED, 14), layers=(1,))
    row = Row(edits=(Edit(cells=one, donor=target), Edit(cells=two, donor=None)))
    query = TOKENS[QUERY - 2 :]
    expected = decode(model, [base.replace(one, target).replace(two, None)], query, start=QUERY - 2, read=[2])[0]
    torch.testing.assert_close(run(model, [group(base, [row])], vocab=None)[0], expected, atol=1e-4, rtol=0)


def test_states_and_weights_stay_as_they_are(trial):
    model, base, target = trial
    before = base.fingerprint(), target.fingerprint()
    run(model, [group(base, edits(base, target))], vocab=None)
    assert (base.fingerprint(), target.fingerprint()) == before
    twin = dict(model.twin.named_parameters())
    shared = {p.data_ptr() for p in model.hf.parameters()}
    assert all(p.data_ptr() in shared for p in twin.values())  # one copy of the weights
    assert not any(p.is_meta for p in twin.values())
    assert not any(b.is_meta for b in model.twin.buffers())


def test_rows_that_change_nothing_or_what_is_not_there_are_errors(trial):
    model, base, target = trial
    block = {"layer": 0, "heads": (0,), "tokens": (0,), "keys": (1,)}
    for row, message in (
        (Row(edits=(Edit(cells=Cells(positions=()), donor=target),)), "names no cell"),
        (Row(edits=(Edit(cells=Cells(positions=(1,)), donor=target.crop(4)),)), "different positions"),
        (Row(blocks=(Block(**(block | {"keys": ()})),)), "names no head, query or key"),
        (Row(blocks=(Block(**(block | {"heads": (7,)})),)), "no query head to block"),
        (Row(blocks=(Block(**(block | {"layer": 4})),)), "no layer to block 4"),
        (Row(patches=(Patch(point="z", layer=0, index=0, value=torch.zeros(3), head=0),)), "takes a value of"),
        (Row(patches=(Patch(point="resid_pre", layer=9, index=0, value=torch.zeros(32)),)), "no layer to patch 9"),
    ):
        with pytest.raises(CacheError, match=message):
            run(model, [group(base, [row])], vocab=None)
    with pytest.raises(CacheError, match="no intervention to run"):
        run(model, [group(base, [])], vocab=None)


def by_hooks(model, tokens, patch, position):
    """The same patch by TransformerLens hooks on a whole forward of the bridge."""
    names = {
        "resid_pre": f"blocks.{patch.layer}.hook_in",
        "resid_post": f"blocks.{patch.layer}.hook_out",
        "z": f"blocks.{patch.layer}.attn.hook_z",
        "attn_out": f"blocks.{patch.layer}.attn.hook_out",
        "mlp_out": f"blocks.{patch.layer}.mlp.hook_out",
    }

    def put(tensor, hook):
        if patch.head is None:
            tensor[:, position] = patch.value
        elif tensor.ndim == 4:
            tensor[:, position, patch.head] = patch.value
        else:
            width = len(patch.value)
            tensor[:, position, patch.head * width : (patch.head + 1) * width] = patch.value
        return tensor

    with torch.no_grad():
        return model.bridge.run_with_hooks(torch.tensor([tokens]), fwd_hooks=[(names[patch.point], put)])[0, -1]


def residuals(model, first):
    """The residual stream of a whole forward from a position on, layer by layer."""
    seen = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0][0, first:].clone()))
        for layer in model.twin.base_model.layers
    ]
    prefill(model, TOKENS, start=0)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen)


@pytest.mark.parametrize("point", ["resid_pre", "z", "attn_out", "mlp_out", "resid_post"])
@pytest.mark.parametrize("traced", [True, False])
def test_patches_equal_bridge_hooks_on_whole_forwards(trial, point, traced):
    """Rows of two lengths packed side by side: at an earlier position everything after it is recomputed, at the last
    token only the decision changes; from their own layer on, or (without a trace) from the bottom."""
    model, _, _ = trial
    torch.manual_seed(1)
    width = model.shape["d_head" if point == "z" else "d_model"]
    state = prefill(model, TOKENS, start=0)[1]
    groups, expected = [], []
    for first in (20, 27, 29):
        rows = [
            Row(patches=(Patch(point=point, layer=layer, index=0, value=torch.randn(width), head=head),))
            for layer in range(4)
            for head in (range(model.shape["heads"]) if point == "z" else [None])
        ]
        groups.append(group(state, rows, first=first, trace=residuals(model, first) if traced else None))
        expected.append(torch.stack([by_hooks(model, TOKENS, row.patches[0], first) for row in rows]))
    for measured, wanted in zip(run(model, groups, vocab=None), expected, strict=True):
        torch.testing.assert_close(measured, wanted, atol=1e-4, rtol=0)


def test_no_hook_is_left_behind(trial):
    model = trial[0]
    forwards = {name: module.forward for name, module in model.twin.named_modules()}
    state = prefill(model, TOKENS, start=0)[1]
    late = Row(patches=(Patch(point="z", layer=3, index=0, value=torch.zeros(model.shape["d_head"]), head=0),))
    run(model, [group(state, [late], first=20, trace=residuals(model, 20))], vocab=None)
    broken = Row(patches=(Patch(point="resid_pre", layer=2, index=0, value=torch.zeros(32), mix=fails),))
    with pytest.raises(ZeroDivisionError):
        run(model, [group(state, [broken], first=20)], vocab=None)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.twin.modules())
    assert {name: module.forward for name, module in model.twin.named_modules()} == forwards


def fails(own, donor):
    raise ZeroDivisionError


def test_only_the_logits_that_are_read(trial):
    model, base, target = trial
    every = run(model, [group(base, edits(base, target))], vocab=None)[0]
    some = run(model, [group(base, edits(base, target))], vocab=[7, 3])[0]
    assert some.shape == (len(edits(base, target)), 2)
    torch.testing.assert_close(some, every[:, [7, 3]], atol=1e-5, rtol=0)

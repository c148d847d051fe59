"""Edited rows over a shared prefix equal copied, edited and decoded caches, for every architecture."""

import pytest
import torch

from kvnotes import models
from kvnotes.cache import CacheError, Cells
from kvnotes.forward import decode, prefill
from kvnotes.rows import Edit, Patch, Query, Row, run_rows
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


def block(read, vocab=None) -> Query:
    return Query(tokens=TOKENS[QUERY - 2 :], start=QUERY - 2, read=read, vocab=vocab)


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
    rows, query = edits(base, target), block([0, 2])
    copied = [base.replace(row.edits[0].cells, row.edits[0].donor) for row in rows]
    expected = decode(model, copied, query.tokens, start=query.start, read=query.read)
    measured = torch.cat([run_rows(model, base, query, rows[i : i + chunk]).rows for i in range(0, len(rows), chunk)])
    torch.testing.assert_close(measured, expected, atol=1e-4, rtol=0)
    assert (measured - measured[:1]).abs().max() > 1e-2  # the rows do differ


def test_states_and_weights_stay_as_they_are(trial):
    model, base, target = trial
    before = base.fingerprint(), target.fingerprint()
    run_rows(model, base, block([2]), edits(base, target))
    assert (base.fingerprint(), target.fingerprint()) == before
    twin = dict(model.twin.named_parameters())
    shared = {p.data_ptr() for p in model.hf.parameters()}
    assert all(p.data_ptr() in shared for p in twin.values())  # one copy of the weights
    assert not any(p.is_meta for p in twin.values())
    assert not any(b.is_meta for b in model.twin.buffers())


def test_rows_without_cells_are_an_error(trial):
    model, base, target = trial
    nothing = Row(edits=(Edit(cells=Cells(positions=()), donor=target),))
    with pytest.raises(CacheError, match="names no cell"):
        run_rows(model, base, block([2]), [nothing])
    with pytest.raises(CacheError, match="must change something"):
        run_rows(model, base, block([2]), [Row()])


def by_hooks(model, tokens, patch, position):
    """The same patch by plain module hooks on a whole forward of the twin's sister: the bridge's own model."""
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


@pytest.mark.parametrize("point", ["resid_pre", "z", "attn_out", "mlp_out", "resid_post"])
def test_patches_equal_bridge_hooks_on_whole_forwards(trial, point):
    """At an earlier position everything after it is recomputed; at the last token only the decision changes."""
    model, _, _ = trial
    torch.manual_seed(1)
    width = model.shape["d_head" if point == "z" else "d_model"]
    for first in (20, 29):
        rows = [
            Row(patches=(Patch(point=point, layer=layer, index=0, value=torch.randn(width), head=head),))
            for layer in range(4)
            for head in (range(model.shape["heads"]) if point == "z" else [None])
        ]
        whole = prefill(model, TOKENS, start=0)[1].crop(first)
        query = Query(tokens=TOKENS[first:], start=first, read=[29 - first], vocab=None)
        measured = run_rows(model, whole, query, rows).rows[:, 0]
        for row, logits in zip(rows, measured, strict=True):
            torch.testing.assert_close(logits, by_hooks(model, TOKENS, row.patches[0], first), atol=1e-4, rtol=0)


def test_no_hook_is_left_behind(trial):
    model, base, target = trial
    run_rows(model, base, block([2]), edits(base, target))
    bad = Row(patches=(Patch(point="z", layer=0, index=0, value=torch.zeros(3), head=0),))
    with pytest.raises(CacheError, match="takes a value of"):
        run_rows(model, base, block([2]), [bad])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.twin.modules())


def test_only_the_logits_that_are_read(trial):
    model, base, target = trial
    every = run_rows(model, base, block([0, 2]), edits(base, target))
    some = run_rows(model, base, block([2], vocab=[7, 3]), edits(base, target))
    assert some.rows.shape == (len(edits(base, target)), 1, 2)
    torch.testing.assert_close(some.rows[:, 0], every.rows[:, 1][:, [7, 3]], atol=1e-5, rtol=0)
    torch.testing.assert_close(some.unedited[0], every.unedited[1, [7, 3]], atol=1e-5, rtol=0)
    expected = decode(model, [base], TOKENS[QUERY - 2 :], start=QUERY - 2, read=[0, 2])[0]
    torch.testing.assert_close(every.unedited, expected, atol=1e-4, rtol=0)

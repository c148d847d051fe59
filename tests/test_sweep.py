"""The fast engine equals the plain one, intervention by intervention, on every architecture."""

from dataclasses import replace

import pytest

from kvnotes import models
from kvnotes.cache import CacheError
from kvnotes.interventions import ActivationPatch, AttentionBlock, CacheEdit
from kvnotes.sweep import Trial
from tests import tiny
from tests.test_prompts import tokens

POINTS = ("resid_pre", "z", "attn_out", "mlp_out", "resid_post")


@pytest.fixture(
    scope="module", params=[*((kind, 4, 2) for kind in sorted(tiny.KINDS)), ("qwen2", 4, 4), ("qwen2", 7, 1)]
)
def trial(request, tmp_path_factory) -> Trial:
    kind, heads, kv_heads = request.param
    folder = tiny.checkpoint(kind, tmp_path_factory.mktemp(kind), heads=heads, kv_heads=kv_heads)
    return Trial.run(models.load(str(folder), device="cpu", dtype="float32"), tokens(), engine="rows")


def interventions(trial: Trial) -> list:
    pair, last = trial.pair, trial.states["base"].n_kv_heads - 1
    edits = [CacheEdit(name=f"cell {p}", positions=(p,), into="base", donor="target") for p in pair.downstream]
    edits += [
        CacheEdit(name="notes", positions=pair.downstream, into="target", donor="base"),
        CacheEdit(name="one head", positions=(5, 9), into="base", donor="target", layers=(1, 3), kv_heads=(last,)),
        CacheEdit(name="zeroed", positions=(7,), into="base", donor=None, layers=(2,)),
    ]
    patches = [
        ActivationPatch(
            name=f"{point} {layer} at {position}",
            point=point,
            layer=layer,
            position=position,
            head=1 if point == "z" else None,
            into="base",
            donor="target",
        )
        for point in POINTS
        for layer in (0, 2, 3)
        for position in (pair.changed[0], 9, pair.query[0])
    ]
    blocks = [
        AttentionBlock(name="one", positions=(4, 6), into="base", layers=(1,), heads=(2,)),
        AttentionBlock(name="many", positions=tuple(range(12)), into="target", layers=(0, 2, 3), heads=(0, 1, 3)),
    ]
    return [*edits, *patches, *blocks]


def test_rows_equal_hooks(trial):
    asked = interventions(trial)
    before = trial.states["base"].fingerprint(), trial.states["target"].fingerprint()
    fast = trial.margins(asked)
    plain = replace(trial, engine="hooks").margins(asked)
    assert list(fast) == [one.name for one in asked]
    scale = max(1.0, abs(trial.unedited.gap))
    for name, margin in plain.items():
        assert abs(fast[name] - margin) / scale < 1e-4, name
    assert len({round(margin, 3) for margin in fast.values()}) > 10  # they do differ
    assert (trial.states["base"].fingerprint(), trial.states["target"].fingerprint()) == before
    assert trial.identities()["empty edit equals base"] < 1e-4


def test_each_intervention_says_how_much_it_changes(trial):
    pair = trial.pair
    trial.margins(interventions(trial))
    assert trial.fired["notes"] == len(pair.downstream) * 4 * trial.states["base"].n_kv_heads
    assert trial.fired["one head"] == 2 * 2
    assert trial.fired["z 2 at 9"] == 1
    assert trial.fired["many"] == 12 * 3 * 3


def test_no_hook_is_left_on_the_model(trial):
    trial.margins(interventions(trial))
    replace(trial, engine="hooks").margins(interventions(trial)[-3:])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in trial.model.twin.modules())
    assert not any(point.fwd_hooks for point in trial.model.bridge.hook_dict.values())


def test_interventions_that_change_nothing_are_errors(trial):
    for nothing in (
        CacheEdit(name="x", positions=(), into="base", donor="target"),
        CacheEdit(name="x", positions=(99,), into="base", donor="target"),
        AttentionBlock(name="x", positions=(1,), into="base", layers=(), heads=()),
        AttentionBlock(name="x", positions=(1,), into="base", layers=(0,), heads=(7,)),
    ):
        with pytest.raises(CacheError):
            trial.margins([nothing])

"""The heads study: planted heads are found and no others, TransformerLens' own patching, attribution by hand."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformer_lens import patching

from circuits import heads as study
from figures import heads as figure
from kvnotes import attribution, direct, effects, heads, models, readout, runner, select, sites
from kvnotes import config as configs
from kvnotes.cache import CacheError
from kvnotes.heads import KS, PLACES
from kvnotes.interventions import ActivationPatch, CacheEdit
from kvnotes.planted import PLANTED, READ_HEADS, WRITE_HEAD
from kvnotes.records import Instance
from kvnotes.sweep import Trial
from tests import tiny
from tests.sample_record import measured
from tests.test_prompts import tokens

SHAPE = {"layers": 4, "heads": 4, "kv_heads": 2}
EVERY = heads.names(SHAPE)


def config(tmp_path, **flags) -> Any:
    usual = {"results": tmp_path, "resamples": 500, "draws": 10, "write_draws": 2, "confirmed": 24}
    return configs.make(study.Settings, study="heads", flags={**usual, **flags})


def load(kind: str, folder) -> Trial:
    path = tiny.checkpoint(kind, folder)
    return Trial.run(models.load(str(path), device="cpu", dtype="float32"), tokens(), engine="rows", budget=10**7)


@pytest.fixture(scope="module", params=["qwen2", "gemma2", "gemma3"])
def trial(request, tmp_path_factory) -> Trial:
    return load(request.param, tmp_path_factory.mktemp(request.param))


# --- planted models ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["planted-notes", "planted-direct", "planted-both-gqa", "planted-and"])
def planted(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("heads")
    settings = config(path, model=request.param, task="planted", layout="words_field_first", n=12)
    return PLANTED[request.param], runner.execute(study, settings)


def test_planted_heads_are_found(planted):
    spec, record = planted
    found = {one.name: one.estimate for one in record.summary.effects if one.gated}
    for name, value in spec.expected["heads"].items():
        assert found[name] == pytest.approx(value, abs=1e-3), name
    assert all(check.passed for check in record.checks)
    assert {"attributed parts sum to the margin", "all heads' z equal target"} <= {one.name for one in record.checks}


def test_planted_heads_are_all_there_are(planted):
    """Every other head's z, at the decision and at the aggregators, and every other KV head's cells move nothing."""
    spec, record = planted
    wanted = {key.removeprefix("head_"): value for key, value in spec.expected["heads"].items() if key[:5] == "head_"}
    writer = f"{WRITE_HEAD.layer}.{WRITE_HEAD.head}"
    tables = {
        "read heads": wanted,
        "write heads at the best aggregator": {writer: spec.expected["heads"].get("write_1", 0.0)},
        "write heads at all aggregators": {writer: float(bool(spec.notes))},
        "KV heads": Counter(),
    }
    for site, key in zip(READ_HEADS, ("first_note", "second_note"), strict=True):
        tables["KV heads"][f"{site.layer}.{spec.kv_head(site)}"] += spec.expected["suffix"][key]
    for name, known in tables.items():
        table = record.summary.tables[name]
        at = table.columns.index("alone R")
        assert len(table.rows) == (6 * spec.kv_heads if name == "KV heads" else 24)
        for row in table.rows:
            assert row[at] == pytest.approx(known.get(row[0], 0.0), abs=1e-3), (name, row[0])


def test_the_figure_draws_a_planted_record(planted):
    _, record = planted
    drawn = figure.draw({"m/heads/l": record})
    assert list(drawn) == ["m/heads/l"]
    drawn["m/heads/l"].canvas.draw()


# --- independent computations -----------------------------------------------------------------------------


def test_z_patches_equal_transformer_lens(trial):
    """Every layer, position and query head, with grouped-query attention, by TransformerLens' own loop."""
    pair, bridge = trial.pair, trial.model.bridge
    base, target = (torch.tensor([ids]) for ids in (pair.base_ids, pair.target_ids))
    with torch.no_grad():
        _, cache = bridge.run_with_cache(target)
        theirs = patching.get_act_patch_attn_head_out_by_pos(
            bridge, base, cache, lambda logits: readout.margin(logits[0, -1], pair)
        )
    layers, positions, count = theirs.shape
    assert (layers, count, trial.model.shape["kv_heads"]) == (4, 4, 2)
    names = [(layer, p, head) for layer in range(layers) for p in range(1, positions) for head in range(count)]
    asked = [heads.patched(f"{layer}.{head}@{p}", [f"{layer}.{head}"], [p]) for layer, p, head in names]
    ours = list(trial.margins(asked).values())
    assert ours == pytest.approx([float(theirs[at]) for at in names], abs=1e-4)
    assert len({round(margin, 4) for margin in ours}) > 20


@pytest.mark.parametrize("run", ["base", "target"])
def test_attribution_equals_a_derivation_by_hand(trial, run):
    """Each architecture's own formulas, on what hooks of the plain modules see in a full forward."""
    pair, net = trial.pair, trial.model.twin
    layers, seen = net.model.layers, {}

    def keep(name, value):
        seen[name] = value[0, -1].double()

    hooks = [net.model.norm.register_forward_pre_hook(lambda _, args: keep("last", args[0]))]
    for i, layer in enumerate(layers):
        hooks.append(layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args, i=i: keep(("z", i), args[0])))
        hooks.append(layer.self_attn.o_proj.register_forward_hook(lambda *args, i=i: keep(("attn", i), args[2])))
        hooks.append(layer.mlp.register_forward_hook(lambda *args, i=i: keep(("mlp", i), args[2])))
    with torch.no_grad():
        model, ids = trial.model, torch.tensor([pair.ids(run)])
        logits = whole_forward(model, ids)
    for hook in hooks:
        hook.remove()
    gemma = "Gemma" in type(net).__name__
    eps, cap = net.config.rms_norm_eps, getattr(net.config, "final_logit_softcapping", None)

    def gain(norm, x):
        return (1.0 * gemma + norm.weight.double()) / torch.sqrt((x**2).mean() + eps)

    rows = net.lm_head.weight[[pair.base_action, pair.target_action]].double()
    g = gain(net.model.norm, seen["last"])
    if cap is not None:
        raw = rows @ (g * seen["last"])
        rows = rows * (cap * torch.tanh(raw / cap) / raw)[:, None]
    v = (rows[1] - rows[0]) * g
    expected = torch.zeros(4, 4, dtype=torch.float64)
    mlps = []
    for i, layer in enumerate(layers):
        after = gain(layer.post_attention_layernorm, seen["attn", i]) if gemma else 1.0
        last = gain(layer.post_feedforward_layernorm, seen["mlp", i]) if gemma else 1.0
        mlps.append(float((v * last) @ seen["mlp", i]))
        for head in range(4):
            z = torch.zeros(32, dtype=torch.float64)
            z[8 * head : 8 * head + 8] = seen["z", i][8 * head : 8 * head + 8]
            expected[i, head] = v @ (after * (layer.self_attn.o_proj.weight.double() @ z))
    parts = direct.attribute(trial, run)
    assert parts.heads.numpy() == pytest.approx(expected.numpy(), abs=1e-4)
    assert parts.mlps.tolist() == pytest.approx(mlps, abs=1e-4)
    assert parts.total == pytest.approx(float(readout.margin(logits, pair)), abs=1e-4)
    assert parts.total == pytest.approx(getattr(trial.unedited, run), abs=1e-4)
    assert float(parts.heads.abs().max()) > 1e-2


def whole_forward(model, ids):
    from kvnotes.forward import forward

    n = ids.shape[1]
    out = forward(model, ids, positions=torch.arange(n), past=None, over=None, read=[n - 1], keep=False)
    return out.logits[0, 0]


def test_first_order_effects_are_those_that_screen(trial):
    """By the module that screens, for single positions; over several positions a gradient's effects add up."""
    pair = trial.pair
    places = {str(p): (p,) for p in pair.downstream} | {"all": pair.downstream}
    found = direct.first_order(trial, places)
    asked = [
        ActivationPatch(
            name=f"{p}:{name}", point="z", layer=heads.site(name)[0], head=heads.site(name)[1], position=p, into="base",
            donor="target",
        )
        for p in pair.downstream
        for name in EVERY
    ]  # fmt: skip
    sizes = attribution.effects(trial, asked)
    for p in pair.downstream:
        own = [sizes[f"{p}:{name}"] for name in EVERY]
        assert found[str(p)].abs().flatten().tolist() == pytest.approx(own, abs=1e-5)
    bound = sum(found[str(p)].abs() for p in pair.downstream)
    assert bool((found["all"].abs() <= bound + 1e-5).all())
    assert direct.first_order(trial, {}) == {}


def test_what_direct_attribution_cannot_do_is_said(trial):
    with pytest.raises(CacheError, match="LayerNorm does more than scale"):
        direct._frozen(torch.nn.LayerNorm(8), torch.randn(8))
    ones = torch.ones(8)
    here: Any = {"resid_pre": ones, "resid_post": 3 * ones}
    direct._require_sum(SimpleNamespace(name="m"), 2, here, 2 * ones)
    with pytest.raises(CacheError, match="layer 2 adds more to the residual"):
        direct._require_sum(SimpleNamespace(name="m"), 2, here, ones)
    assert direct._frozen(None, ones).tolist() == ones.tolist()


# --- what is asked ----------------------------------------------------------------------------------------


def test_all_heads_downstream_are_all_notes_and_one_heads_is_no_kv_heads(trial):
    pair = trial.pair
    notes = CacheEdit(name="notes", positions=pair.downstream, into="base", donor="target")
    asked = [heads.patched("everywhere", EVERY, pair.downstream), heads.patched("decision", EVERY, pair.query), notes]
    asked += [heads.cells(f"kv {name}", name, pair.downstream) for name in heads.names(SHAPE, "kv_heads")]
    found = trial.margins(asked)
    assert found["everywhere"] == pytest.approx(found["notes"], abs=1e-4)
    assert found["decision"] == pytest.approx(trial.unedited.target, abs=1e-4)
    assert trial.fired["kv 3.1"] == len(pair.downstream)
    assert trial.fired["everywhere"] == len(pair.downstream) * 16


def plan(pair, ranking: list[str], *, slots: list[str]) -> dict[str, Any]:
    """One scenario, in fold 0, and what fold 1 ranks."""
    layout, scenario = pair.pair.layout, pair.pair.scenario

    def folded(choice):
        return {layout: {"folds": {scenario: 0}, "tested_with": {"0": choice}}}

    return {
        "slots": {"ranking": folded(slots), "in_sample": {pair.pair.id: list(pair.downstream)}},
        "crossfit": {name: folded(ranking) for name in (*PLACES, "patched", "kv")},
        "in_sample": {name: {layout: ranking[::-1]} for name, place in PLACES.items() if place.in_sample},
    }


def test_random_heads_are_never_chosen_ones_and_of_the_same_layers():
    pair, ranking = tokens(), ["3.1", "1.0", "3.2", "2.2", "0.1"]
    asked = heads.ask(pair, plan(pair, ranking, slots=[]), PLACES["read"], EVERY, draws=7, confirmed=12, seed=0)
    again = heads.ask(pair, plan(pair, ranking, slots=[]), PLACES["read"], EVERY, draws=7, confirmed=12, seed=0)
    assert asked == again
    for k in KS:
        top, where = asked.sets[f"top:{k}"]
        assert where == pair.query
        assert list(top) == [*ranking, *[name for name in EVERY if name not in ranking]][:k]
        assert list(asked.sets[f"in_sample:{k}"][0])[:1] == ["0.1"]
        drawn = [set(some) for name, (some, _) in asked.sets.items() if name.startswith(f"random:{k}:")]
        assert len(drawn) == min(7, asked.about["possible"][f"{k}"])
        for one in drawn:
            assert len(one) == k
            assert not one & set(top)
            if asked.about["exact"][f"{k}"]:
                assert Counter(map(heads.site, one)).keys().isdisjoint(map(heads.site, top))
                assert Counter(heads.site(h)[0] for h in one) == Counter(heads.site(h)[0] for h in top)
    assert asked.about["exact"]["3"]
    assert asked.about["possible"]["1"] == 3


def test_places_are_where_they_say():
    """The other fold's best slot, or its best delimiter; a place that a prompt lacks asks nothing."""
    pair = tokens()
    names = select.slot_names(pair)
    delimiters = sites.aggregators(pair)
    best = next(p for p in pair.downstream if p not in delimiters)
    made = plan(pair, EVERY, slots=[names[best], names[delimiters[-1]]])
    ask = {
        name: heads.ask(pair, made, place, EVERY, draws=2, confirmed=5, seed=0).about.get("positions")
        for name, place in PLACES.items()
    }
    assert ask == {
        "read": list(pair.query),
        "write": [delimiters[-1]],
        "write_all": list(delimiters),
        "write_any_slot": [best],
        "write_all_slots": list(pair.downstream),
    }
    asked = heads.ask(pair, made, PLACES["write"], EVERY, draws=2, confirmed=5, seed=0)
    assert asked.sets["in_sample:1"][1] == delimiters[:1]
    alone, others = (
        {name[len(kind) :] for name in asked.sets if name.startswith(kind)} for kind in ("alone:", "others:")
    )
    assert (len(alone), len(others), alone & others) == (5, 5, set())
    bare = SimpleNamespace(pair=pair.pair, slots=(), downstream=(), query=pair.query)
    empty: Any = bare
    assert heads.ask(empty, made, PLACES["write"], EVERY, draws=2, confirmed=5, seed=0).sets == {}


def test_margins_are_kept_by_kind_and_key():
    given = {"top:1": 1.0, "random:1:0": 2.0, "random:1:1": 3.0, "alone:2.10": 4.0}
    assert heads.nested(given) == {"top": {"1": 1.0}, "random": {"1": [2.0, 3.0]}, "alone": {"2.10": 4.0}}
    assert heads.flat(torch.tensor([[-1e-9, 0.12345], [2.0, -0.5]]), 3) == [0.0, 0.123, 2.0, -0.5]
    assert str(heads.flat(torch.tensor([-1e-9]), 3)[0]) == "0.0"
    assert heads.named([1.0, 2.0, 3.0, 4.0], 2) == {"0.0": 1.0, "0.1": 2.0, "1.0": 3.0, "1.1": 4.0}


def test_attention_is_shared_out_over_the_classes(trial):
    shares = heads.attention(trial)
    assert np.sum(list(shares.values()), axis=0) == pytest.approx(np.ones(16), abs=1e-3)
    every = [p for places in heads.by_class(trial.pair).values() for p in places]
    assert sorted(every) == list(range(len(trial.pair.base_ids)))
    assert heads.by_class(trial.pair)["itself"] == [trial.pair.query[-1]]


# --- the summary ------------------------------------------------------------------------------------------


def row(name: str, *, gap: float, fold: int, best: str = "0.1", status: str = "included") -> Instance:
    """Base at 0, two layers of two heads and one KV head. Heads move 0, 1, 2 and 0 alone, twice that together."""
    margins = {"top": {f"{k}": 2.0 for k in KS}, "in_sample": {f"{k}": 2.5 for k in KS}}
    drawn = {"random": {f"{k}": [0.5, 0.0] for k in KS}, "permuted": {f"{k}": [2.0 * fold, 0.5] for k in KS}}
    few = {"random": {"12": [0.5, 0.1]}}
    single = {"alone": {best: 2.0, "1.1": 1.0}, "others": {"0.0": 0.5}}
    about = {
        "positions": [1],
        "named": [best],
        "possible": {f"{k}": 2.0 for k in KS},
        "exact": {f"{k}": True for k in KS},
    }
    read = margins | drawn | {"patched": margins["top"], "all": {"heads": gap, "rest": 0.5}}
    parts = {"mlps": [1.0, 0.0], "rest": 0.5, "sum": 0.0}
    measures = {
        "single": [0.0, 1.0],
        "notes": gap,
        "per_layer": {"heads": 2, "kv_heads": 1},
        "attributed": {
            "base": {**parts, "heads": [0.0, -1.0, 0.0, 0.0]},
            "target": {**parts, "heads": [0.0, 2.0, 0.5, 0.0], "mlps": [1.0, -1.0]},
        },
        "alone": [0.0, 1.0, 2.0, 0.0],
        "kv": [1.0, 3.0],
        "kv_best": "0.0",
        "fold": fold,
        "estimates": {"delimiter[0]": [0.0, 2.0, 1.0, 1.0], "write_all": [0.0, 1.0, 1.0, 0.0]},
        "places": {
            "read": {**about, "margins": read},
            "write": {**about, "margins": margins | few | single},
            "write_all_slots": {**about, "margins": {"top": margins["top"], **few}},
        },
        "attention": {
            "heads": {"aggregator": [0.1, 0.2, 0.3, 0.1], "action": [0.0, 0.0, 0.0, 0.0]},
            "named": {best: {"aggregator": 0.2, "text": 0.8}},
            "random": {"aggregator": 0.1, "text": 0.9},
        },
    }
    made = measured(name, base=0.0, target=gap, measures=measures, passed=status == "included")
    return made.model_copy(update={"status": status, "spans": {"text": ((0, 1), (2, 4)), "delimiter": ((1, 2),)}})


def test_summary_by_hand(tmp_path, monkeypatch):
    """Gaps 4 and 6: the sums are over 10."""
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 2)
    rows = [row("a", gap=4.0, fold=0), row("b", gap=6.0, fold=1)]
    summary = study.summarise(rows, config(tmp_path), floor=1e-6)
    found = {one.name: one for one in summary.effects if one.gated}
    expected = {
        "read_1": 0.4,
        "read_in_sample_12": 0.5,
        "read_random_5": 0.05,  # the mean over the draws
        "read_rest": 0.1,
        "all_heads": 1.0,
        "direct_heads": 0.7,
        "direct_mlps": -0.2,
        "direct_rest": 0.0,
        "head_0.1": 0.2,
        "write_1": 0.4,
        "write_random_12": 0.06,
        "write_random_1": 0.1,
        "write_sum": 0.6,
        "write_sum_random": 0.1,
        "write_head_0.1": 0.4,
        "kv_1": 0.2,
        "kv_in_sample_1": 0.6,
        "kv_others": 0.6,
        "attention_1": 0.2,
        "attention_random_12": 0.1,
    }  # fmt: skip
    for name, value in expected.items():
        assert found[name].estimate == pytest.approx(value), name
    assert {one.control for name, one in found.items() if "random" in name} == {True}
    # ranks 1.5, 3, 4, 1.5 of both: the heads that attend to aggregators are those that move
    assert found["attention_follows"].estimate == pytest.approx(1.0)
    assert found["attention_action_follows"].estimate is None
    # estimates of 0.1, 1.1 and 0.0 are 2, 1 and 0; they move 2, 1 and 0.5
    assert found["write_foretold"].estimate == pytest.approx(float(np.corrcoef([2, 1, 0], [2, 1, 0.5])[0, 1]))
    test = found["read_1"].test
    assert test is not None
    assert test.p == pytest.approx(1 / 3)  # 4 in all; permutations 0 + 2 and 0.5 + 0.5, none as large
    assert test.conclusion == "inconclusive"
    assert test.name == "heads permuted within their layers, 2 times, BH over 5"
    assert {
        one.test for name, one in found.items() if name in {f"{w}_{k}" for w in ("write", "write_all") for k in KS}
    } == {None}
    assert found["write_all_1"].estimate is None
    assert "12 read heads 0.40" in summary.headline
    table = summary.tables["read heads"]
    assert table.rows[0][0] == "0.1"
    attention = summary.tables["attention of the read heads"]
    assert attention.columns == ("head", "pairs", "aggregator", "text")
    assert attention.rows == [["0.1", 2, 0.2, 0.8], ["at random", 2, 0.1, 0.9]]
    assert summary.tables["random draws"].rows[0] == ["read heads", 1, 2, 2, 2.0, 2.0]


def test_a_record_without_permuted_heads_has_no_test_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 2)
    rows = [row("a", gap=4.0, fold=0), row("b", gap=6.0, fold=1)]
    for one in rows:
        del one.measures["places"]["read"]["margins"]["permuted"]
    found = {one.name: one for one in study.summarise(rows, config(tmp_path), floor=1e-6).effects if one.gated}
    assert found["read_8"].estimate == pytest.approx(0.4)
    assert found["read_8"].test is None


def test_heads_are_permuted_alike_in_both_folds_and_within_their_layers():
    pair, folds = tokens(), (["3.1", "1.0", "3.2"], ["3.2", "0.0", "3.1"])
    asked = [
        heads.ask(pair, plan(pair, ranking, slots=[]), PLACES["read"], EVERY, draws=5, confirmed=12, seed=0).sets
        for ranking in folds
    ]
    for i in range(5):
        first, second = (own[f"permuted:3:{i}"][0] for own in asked)
        assert (first[0], first[2]) == (second[2], second[0])  # 3.1 and 3.2 have one image in both
        assert [heads.site(head)[0] for head in first] == [3, 1, 3]
        assert asked[0][f"permuted:1:{i}"] == ([first[0]], pair.query)
    assert len({tuple(asked[0][f"permuted:3:{i}"][0]) for i in range(5)}) > 1
    write = heads.ask(pair, plan(pair, EVERY, slots=[]), PLACES["write_all"], EVERY, draws=5, confirmed=12, seed=0)
    assert not any(name.startswith("permuted") for name in write.sets)


@pytest.mark.parametrize("alike", [True, False])
def test_a_random_ranking_with_a_dominant_head_is_rejected_as_often_as_it_should_be(alike, tmp_path):
    """Heads whose effects all scenarios share, one of them large; three at random are "best" in either fold. A
    twentieth of p-values may be .05 or less: sets from outside the choice would never have the large one."""
    rng, rows, p = np.random.default_rng(0), [row(f"{i}", gap=4.0, fold=i % 2) for i in range(6)], []
    scope = effects.Scope(instances=rows, layout="l", gated=True, config=config(tmp_path), floor=1e-6)
    for seed in range(200):
        effect = dict(zip(EVERY, rng.normal(size=16) + 9.0 * (rng.permutation(16) == 0), strict=True))
        first = rng.permutation(EVERY)[:3].tolist()
        best = (first, first if alike else rng.permutation(EVERY)[:3].tolist())
        images = heads.permuted(EVERY, n=39, seed=seed, layout="l")

        def whole(o, best=best, effect=effect) -> float:
            return sum(effect[head] for head in best[o.measures["fold"]])

        def permuted(o, best=best, effect=effect, images=images) -> list[float]:
            return [sum(effect[image[head]] for head in best[o.measures["fold"]]) for image in images]

        value = scope.permutation_p(whole, permuted)
        assert value is not None
        p.append(value)
    assert np.mean(np.array(p) <= 0.05) < 0.1


def test_a_head_named_by_one_fold_is_tested_on_the_other_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 2)
    rows = [row(f"{i}", gap=4.0, fold=i % 2, best="0.1" if i % 2 else "1.0") for i in range(4)]
    found = {one.name: one for one in study.summarise(rows, config(tmp_path), floor=1e-6).effects if one.gated}
    assert (found["head_0.1"].n, found["head_1.0"].n) == (2, 2)
    assert found["head_1.0"].estimate == pytest.approx(0.5)


def test_plans_choose_across_folds(tmp_path):
    rows = [row(f"s{i}", gap=4.0, fold=0) for i in range(4)]
    rows = [one.model_copy(update={"tokens": tokens_of_two()}) for one in rows]
    made = study.prepare(rows, config(tmp_path))
    assert made["in_sample"]["read"]["l"][:2] == ["0.1", "1.0"]
    for name, first in {"read": "0.1", "patched": "1.0", "kv": "1.0", "write": "0.1", "write_all": "0.1"}.items():
        assert {own[0] for own in made["crossfit"][name]["l"]["tested_with"].values()} == {first}, name


def tokens_of_two():
    from kvnotes.records import Tokens

    return Tokens(base=(1, 5, 6, 9), target=(2, 5, 6, 9), changed=(0,), query=(3,), base_action=1, target_action=2)


def test_no_included_pair_says_so(tmp_path):
    none = row("a", gap=4.0, fold=0, status="incompetent")
    summary = study.summarise([none], config(tmp_path), floor=1e-6)
    assert {one.estimate for one in summary.effects} == {None}
    assert {one.test for one in summary.effects} == {None}
    assert "no recovery" in summary.headline

"""The fast engine equals the plain one, intervention by intervention, on every architecture."""

from dataclasses import replace

import pytest
import torch

from kvnotes import attend, attribution, models, plan
from kvnotes.cache import CacheError, KVState, mean
from kvnotes.interventions import (
    ActivationPatch,
    Added,
    AttentionBlock,
    CacheEdit,
    Direction,
    Features,
    Recompute,
    Together,
)
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
    return Trial.run(models.load(str(folder), device="cpu", dtype="float32"), tokens(), engine="rows", budget=10**7)


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
    every = tuple(range(trial.model.shape["heads"]))
    blocks = [
        AttentionBlock(name="one", positions=(4, 6), into="base", layers=(1,), heads=(2,)),
        AttentionBlock(name="many", positions=tuple(range(12)), into="target", layers=(0, 2, 3), heads=(0, 1, 3)),
        AttentionBlock(name="all", positions=pair.downstream, into="base"),
        AttentionBlock(name="itself", positions=(pair.query[-1],), into="base", layers=(1,), heads=every),
        AttentionBlock(name="earlier", positions=(3, 8), into="base", layers=(1, 2), heads=(0, 1), queries=(9, 10, 12)),
        AttentionBlock(name="far apart", positions=pair.changed, into="target", queries=(7, 11)),
    ]
    return [*edits, *patches, *blocks, *mixed(trial), *recomputed(trial), *together(trial)]


def mixed(trial: Trial) -> list:
    """Parts of an activation: directions, features of a random autoencoder, a vector added, zeros."""
    torch.manual_seed(3)
    width = trial.model.shape["d_model"]
    encoder, decoder, vector = torch.randn(width, 20) / 8, torch.randn(20, width) / 4, torch.randn(width)
    directions = Direction(torch.randn(2, width))
    features = Features(lambda x: torch.relu(x @ encoder), decoder, tuple(range(12)))

    def patch(name, donor, *, mix=None, point="resid_post", head=None):
        return [
            ActivationPatch(
                name=f"{name} {layer} at {position}",
                point=point,
                layer=layer,
                position=position,
                into="base",
                donor=donor,
                mix=mix,
                head=head,
            )
            for layer in (0, 2, 3)
            for position in (9, trial.pair.query[0])
        ]

    return [
        *patch("direction", "target", mix=directions),
        *patch("projected out", None, mix=directions, point="resid_pre"),
        *patch("features", "target", mix=features),
        *patch("no features", None, mix=features),
        *patch("added", vector, mix=Added(), point="attn_out"),
        *patch("vector", vector),
        *patch("zero", None, point="mlp_out"),
        *patch("zero head", None, point="z", head=1),
        *patch("whole z", "target", point="z"),
    ]


def recomputed(trial: Trial) -> list:
    pair = trial.pair
    some = (pair.changed[0], 8, 12)
    return [
        Recompute(name="some anew", positions=some, into="base", tokens="target"),
        Recompute(name="one anew", positions=(9,), into="target", tokens="base"),
        Recompute(name="whole anew", positions=(*pair.changed, *pair.downstream), into="base", tokens="target"),
    ]


def together(trial: Trial) -> list:
    pair = trial.pair
    edit = CacheEdit(name="e", positions=pair.changed, into="base", donor="target")
    other = CacheEdit(name="o", positions=(8,), into="base", donor=None, layers=(0, 3))
    z = [
        ActivationPatch(name=f"z{i}", point="z", layer=i, position=p, head=h, into="base", donor="target")
        for i, p, h in ((1, 10, 0), (1, 12, 1), (3, pair.query[0], 0))
    ]
    block = AttentionBlock(name="b", positions=(5,), into="base", layers=(2,))
    anew = Recompute(name="r", positions=(6, 11), into="base", tokens="base")
    average = mean([trial.states["base"], trial.states["target"]])
    return [
        CacheEdit(name="from a mean", positions=pair.downstream, into="base", donor=average),
        Together(name="two edits", parts=(edit, other)),
        Together(name="heads", parts=z),
        Together(name="everything", parts=(edit, *z, block)),
        Together(name="field, then some anew", parts=(edit, anew)),
        Together(name="anew and patched", parts=(edit, anew, z[2], block)),
    ]


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
    assert trial.fired["earlier"] == 2 * 2 * 2 * 3
    assert trial.fired["one anew"] == 4 * trial.states["base"].n_kv_heads
    assert trial.fired["heads"] == 3


def test_no_hook_is_left_on_the_model(trial):
    trial.margins(interventions(trial))
    replace(trial, engine="hooks").margins(interventions(trial)[-30:])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in trial.model.twin.modules())
    assert not any(point.fwd_hooks for point in trial.model.bridge.hook_dict.values())


def test_interventions_that_change_nothing_are_errors(trial):
    for nothing in (
        CacheEdit(name="x", positions=(), into="base", donor="target"),
        CacheEdit(name="x", positions=(99,), into="base", donor="target"),
        AttentionBlock(name="x", positions=(1,), into="base", layers=(), heads=()),
        AttentionBlock(name="x", positions=(1,), into="base", layers=(0,), heads=(7,)),
        AttentionBlock(name="x", positions=(12,), into="base", queries=(9,)),
        ActivationPatch(name="x", point="z", layer=9, position=9, into="base", donor="target"),
        ActivationPatch(name="x", point="z", layer=1, position=0, into="base", donor="target"),
        Recompute(name="x", positions=(), into="base", tokens="base"),
        Recompute(name="x", positions=(trial.pair.query[0],), into="base", tokens="base"),
        Together(name="x", parts=()),
        Together(
            name="x",
            parts=(
                CacheEdit(name="y", positions=(7, 9), into="base", donor="target"),
                CacheEdit(name="z", positions=(9,), into="base", donor=None, layers=(2,)),
            ),
        ),
        Together(
            name="x",
            parts=(
                CacheEdit(name="y", positions=(9,), into="base", donor="target"),
                Recompute(name="z", positions=(9,), into="base", tokens="base"),
            ),
        ),
    ):
        with pytest.raises(CacheError):
            trial.margins([nothing])
    z = {"name": "x", "point": "z", "layer": 1, "position": 9, "into": "base"}
    resid = z | {"point": "resid_pre"}
    longer = trial.states["target"].splice(trial.states["target"].slice(0, 1))
    wide = KVState(tuple({n: t.double() for n, t in x.items()} for x in longer.layers), longer.positions)
    seen = tuple(range(trial.pair.query[0] + 1))
    for nothing in (
        ActivationPatch(**z, head=trial.model.shape["heads"], donor=None),
        ActivationPatch(**z, head=-1, donor="target"),
        ActivationPatch(**resid, head=1, donor="target"),
        ActivationPatch(**resid, donor=torch.ones(1)),
        ActivationPatch(**resid, donor="target", mix=lambda own, donor: own.sum()),
        CacheEdit(name="x", positions=(9,), into="base", donor="base"),
        CacheEdit(name="x", positions=(9,), into="base", donor=longer),
        CacheEdit(name="x", positions=(9,), into="base", donor=wide.crop(trial.pair.query[0])),
        AttentionBlock(name="x", positions=seen, into="base", layers=(1,)),
        AttentionBlock(name="x", positions=tuple(range(10)), into="base", queries=(9,), heads=(1,)),
        Together(name="x", parts=[ActivationPatch(**z, head=h, donor="target") for h in (1, None)]),
        Together(
            name="x",
            parts=(
                ActivationPatch(**(resid | {"position": 6}), donor="target"),
                CacheEdit(name="y", positions=(9,), into="base", donor="target"),
            ),
        ),
    ):
        for engine in ("rows", "hooks"):
            with pytest.raises(CacheError):
                replace(trial, engine=engine).margins([nothing])
    for ids in ([trial.model.hf.config.vocab_size], [-1]):
        with pytest.raises(CacheError, match="token id"):
            trial.logits([CacheEdit(name="x", positions=(9,), into="base", donor="target")], vocab=ids)
    for places in ([], [len(trial.pair.base_ids)]):
        with pytest.raises(CacheError, match="at least one"):
            trial.capture("base", "z", places)
    twice = [CacheEdit(name="x", positions=(p,), into="base", donor="target") for p in (7, 8)]
    with pytest.raises(CacheError, match="'x' occurs more than once"):
        trial.margins(twice)


def test_identities_of_interventions(trial):
    """Recomputing everything as the target's tokens is the target; an added zero vector, a patch from the run itself
    and features that are the run's own change nothing; a direction of full rank is the whole activation."""
    pair, width = trial.pair, trial.model.shape["d_model"]
    eye, zero = Direction(torch.eye(width)), torch.zeros(width)
    own = Features(torch.relu, torch.eye(width), (1, 2))
    place = {"point": "resid_pre", "layer": 1, "position": 9, "into": "base"}
    found = trial.margins(
        [
            Recompute(name="target", positions=(*pair.changed, *pair.downstream), into="base", tokens="target"),
            Recompute(name="base", positions=(7, 9), into="base", tokens="base"),
            ActivationPatch(name="added nothing", donor=zero, mix=Added(), **place),
            ActivationPatch(name="itself", donor="base", **place),
            ActivationPatch(name="its features", donor="base", mix=own, **place),
            ActivationPatch(name="all directions", donor="target", mix=eye, **place),
            ActivationPatch(name="whole", donor="target", **place),
        ]
    )
    unedited = trial.unedited
    for name in ("base", "added nothing", "itself", "its features"):
        assert found[name] == pytest.approx(unedited.base, abs=1e-4), name
    assert found["target"] == pytest.approx(unedited.target, abs=1e-4)
    assert found["all directions"] == pytest.approx(found["whole"], abs=1e-4)


@pytest.mark.parametrize("budget", [1, 10**5, 10**9])
def test_a_memory_budget_changes_no_number(trial, budget):
    asked = interventions(trial)
    steps = []
    small = replace(trial, budget=budget, progress=lambda done, total: steps.append((done, total)))
    assert small.margins(asked) == pytest.approx(trial.margins(asked), abs=1e-5)
    assert steps[-1] == (len(asked), len(asked))
    assert len(steps) == (len(asked) if budget == 1 else len(steps))  # a row a forward
    assert small.echoes
    assert trial.identities()["empty edit equals base"] < 1e-5


def test_captures_hold_named_positions_of_the_unedited_run(trial):
    pair = trial.pair
    whole = hook_run(trial, "blocks.2.hook_in")
    found = trial.capture("target", "resid_pre", [pair.query[0], 7])
    assert found.shape == (4, 2, trial.model.shape["d_model"])
    torch.testing.assert_close(found[2], whole[[pair.query[0], 7]], atol=1e-4, rtol=0)
    patterns = trial.patterns("target")
    assert patterns.shape == (4, trial.model.shape["heads"], 1, len(pair.base_ids))
    torch.testing.assert_close(
        patterns[1, :, 0], hook_run(trial, "blocks.1.attn.hook_pattern")[:, -1], atol=1e-4, rtol=0
    )


def hook_run(trial: Trial, point: str):
    seen = []
    with torch.no_grad():
        trial.model.bridge.run_with_hooks(
            torch.tensor([trial.pair.target_ids]), fwd_hooks=[(point, lambda t, hook: seen.append(t[0].clone()))]
        )
    return seen[0]


def test_all_logits_are_there_for_p_full(trial):
    edit = CacheEdit(name="notes", positions=trial.pair.downstream, into="base", donor="target")
    every = trial.logits([edit], vocab=None)["notes"]
    two = trial.logits([edit], vocab=[5, 2])["notes"]
    assert every.shape == (trial.model.hf.config.vocab_size,)
    torch.testing.assert_close(two, every[[5, 2]])
    margin = every[trial.pair.target_action] - every[trial.pair.base_action]
    assert trial.margins([edit])["notes"] == pytest.approx(float(margin), abs=1e-5)


def test_gradients_equal_finite_differences(trial):
    """A small step along an activation moves the margin by the gradient's share of it, at every layer."""
    generator = torch.Generator().manual_seed(5)
    for point in ("resid_pre", "z", "mlp_out"):
        slope = attribution.gradients(trial, "base", points=[point], start=7)[point]
        step = 3e-4 * torch.randn(slope.shape[2], generator=generator)
        steps = [
            ActivationPatch(
                name=f"{layer} {sign}",
                point=point,
                layer=layer,
                position=9,
                into="base",
                donor=sign * step,
                mix=Added(),
            )
            for layer in range(4)
            for sign in (1, -1)
        ]
        moved = trial.margins(steps)
        for layer in range(4):
            measured = (moved[f"{layer} 1"] - moved[f"{layer} -1"]) / 2
            assert measured == pytest.approx(float(step @ slope[layer, 2]), abs=2e-5, rel=0.01), (point, layer)


def test_a_screened_sweep_is_exact_where_it_answers(trial):
    patches = [
        ActivationPatch(name=f"{layer} {p}", point="resid_pre", layer=layer, position=p, into="base", donor="target")
        for layer in range(4)
        for p in range(trial.pair.changed[0], len(trial.pair.base_ids))
    ]
    exact, sizes = trial.margins(patches), attribution.effects(trial, patches)
    scale = abs(trial.unedited.gap)
    some = trial.screened(patches, least=0.05)
    assert some == pytest.approx({name: exact[name] for name in some}, abs=1e-4)
    assert set(some) == {name for name, size in sizes.items() if size > 0.05 * scale}
    assert trial.screened(patches, least=1e9) == {}
    own = ActivationPatch(name="x", point="z", layer=0, position=9, into="base", donor=None)
    with pytest.raises(CacheError, match="only whole activations of the other arm"):
        trial.screened([own], least=0.1)


def test_an_edit_enters_where_its_cells_first_differ(trial):
    """Layer 0's cells depend on their token alone, and downstream tokens are both arms': an edit of them is the
    unedited run, and one of all layers runs from layer 1 on."""
    pair = trial.pair
    one = CacheEdit(name="one", positions=(9,), into="base", donor="target")
    nothing = CacheEdit(name="nothing", positions=pair.downstream, into="base", donor="target", layers=(0,))
    field = CacheEdit(name="field", positions=pair.changed, into="base", donor="target", layers=(0, 2))
    entered = {p.name: r.first for p, r in plan.rows([plan.make(e, pair) for e in (one, nothing, field)], trial)}
    assert entered["field"] == 0
    if not trial.model.mixes_experts:  # whose rounding depends on the other tokens
        assert entered == {"one": 1, "nothing": 3, "field": 0}
        assert trial.margins([nothing])["nothing"] == pytest.approx(trial.unedited.base, abs=1e-5)


@pytest.fixture(params=[2, 3])
def long_query(trial, request) -> Trial:
    """The same pair with a query block of several tokens."""
    pair = trial.pair
    query = tuple(range(len(pair.base_ids) - request.param, len(pair.base_ids)))
    return Trial.run(trial.model, replace(pair, query=query), engine="rows", budget=10**7)


def test_query_blocks_of_several_tokens(long_query):
    asked = interventions(long_query)
    plain = replace(long_query, engine="hooks").margins(asked)
    assert long_query.margins(asked) == pytest.approx(plain, abs=1e-4 * max(1.0, abs(long_query.unedited.gap)))
    last = [
        ActivationPatch(
            name=str(layer),
            point="resid_pre",
            layer=layer,
            position=long_query.pair.query[-1],
            into="base",
            donor="target",
        )
        for layer in range(1, 4)
    ]
    early = replace(last[0], name="early", position=4)
    alone, beside = attribution.effects(long_query, last), attribution.effects(long_query, [*last, early])
    assert alone == pytest.approx({name: beside[name] for name in alone}, abs=1e-4)
    assert attribution.effects(long_query, []) == {}


def test_patterns_of_several_queries_in_several_blocks(long_query, monkeypatch):
    whole = long_query.patterns("base")
    monkeypatch.setattr(attend, "SCORES", 100)
    torch.testing.assert_close(long_query.patterns("base"), whole, atol=1e-5, rtol=0)
    assert whole.shape[2:] == (len(long_query.pair.query), len(long_query.pair.base_ids))
    torch.testing.assert_close(whole.sum(dim=-1), torch.ones(whole.shape[:3]))


@pytest.mark.parametrize("scores", [1, 200, 2000])
def test_blocks_of_scores_change_no_number(trial, scores, monkeypatch):
    asked = interventions(trial)
    whole = trial.margins(asked)
    monkeypatch.setattr(attend, "SCORES", scores)
    assert trial.margins(asked) == pytest.approx(whole, abs=1e-5)


def test_captures_and_donors_are_copies(trial):
    """What a caller or a mix does to the numbers it is given changes no later answer."""
    direction = Direction(torch.ones(1, trial.model.shape["d_model"]))
    place = {"point": "resid_pre", "layer": 1, "position": 9, "into": "base", "donor": "target"}

    def spoils(own, donor):
        made = own + 0.1 * donor
        donor *= 0
        own *= 0
        return made

    asked = [ActivationPatch(name="d", mix=direction, **place), ActivationPatch(name="s", mix=spoils, **place)]
    before = trial.margins(asked)
    trial.capture("target", "resid_pre", [9])[:] = 7.0
    trial.capture("base", "resid_pre", range(8, 12))[:] = 7.0
    assert trial.margins(asked) == before


def test_the_unedited_run_is_checked_whatever_is_read(trial):
    one = replace(trial, echoes=[])
    one.logits([CacheEdit(name="x", positions=(9,), into="target", donor="base")], vocab=[5])
    assert [run for run, _ in one.echoes] == ["target"]
    assert one.identities()["empty edit equals base"] < 1e-4
    one.echoes.append(("base", float("nan")))
    assert one.identities()["empty edit equals base"] != one.identities()["empty edit equals base"]  # NaN is seen


def test_a_first_token_that_changes_is_refused(trial):
    pair = replace(trial.pair, changed=(0,))
    with pytest.raises(CacheError, match="needs a token before it"):
        Trial.run(trial.model, pair, engine="rows", budget=10**7)

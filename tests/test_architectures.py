"""Every accepted architecture keeps the identities, against plain transformers too; others are refused by name."""

import pytest
import torch
import transformers

from kvnotes import forward as forward_module
from kvnotes import models
from kvnotes.cache import Cells
from kvnotes.forward import decode, forward, greedy, prefill, recompute
from kvnotes.sweep import Trial
from tests import tiny
from tests.test_prompts import tokens

TOKENS = [0, *(3 + (7 * i) % 20 for i in range(1, 30))]  # 30 tokens: more than three windows of 8
CHANGED, QUERY = 6, 29


@pytest.fixture(scope="module", params=sorted(tiny.KINDS))
def loaded(request, tmp_path_factory):
    folder = tiny.checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    return models.load(str(folder), device="cpu", dtype="float32"), plain(folder)


def plain(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def arms():
    target = list(TOKENS)
    target[CHANGED] = 4
    assert target[CHANGED] != TOKENS[CHANGED]
    return TOKENS, target


def last(model, state):
    return decode(model, [state], TOKENS[QUERY:], start=QUERY, read=[0])[0, 0]


def test_prefill_and_decode_equal_plain_transformers(loaded):
    model, reference = loaded
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0, -1]
    full, state = prefill(model, TOKENS, start=0)
    torch.testing.assert_close(full, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(last(model, state.crop(QUERY)), expected, atol=1e-4, rtol=0)
    assert state.n_kv_heads == 2  # KV heads, not the four query heads
    assert state.length == 30  # also where the window is 8: the mask enforces it, nothing is dropped


def test_identities(loaded):
    model, _ = loaded
    (base, base_state), (target, target_state) = (prefill(model, arm, start=0) for arm in arms())
    base_past, target_past = base_state.crop(QUERY), target_state.crop(QUERY)
    assert base_past.deviation(target_past, start=0, stop=CHANGED) == 0.0
    assert base_past.deviation(target_past, start=CHANGED, stop=QUERY) > 1e-3
    torch.testing.assert_close(last(model, base_past), base, atol=1e-4, rtol=0)  # an empty edit is base
    edited = base_past.replace(Cells(positions=tuple(range(CHANGED, QUERY))), target_past)
    torch.testing.assert_close(last(model, edited), target, atol=1e-4, rtol=0)  # full-downstream is target
    assert edited.fingerprint() == target_past.fingerprint()
    assert (base - target).abs().max() > 1e-2  # the two arms do differ, so the above says something


def test_one_kv_head_of_one_layer_equals_plain_transformers(loaded):
    """A cell edit against a copied Hugging Face cache, edited by hand and decoded by the plain model."""
    model, reference = loaded
    _, base_state = prefill(model, TOKENS, start=0)
    _, donor = prefill(model, arms()[1], start=0)
    where = (CHANGED + 1, QUERY - 1)  # one cell outside, one inside the last window
    edited = base_state.crop(QUERY).replace(Cells(positions=where, layers=(1,), kv_heads=(1,)), donor.crop(QUERY))
    mask = torch.ones(1, QUERY + 1, dtype=torch.long)
    with torch.no_grad():
        cache = transformers.DynamicCache()  # no config: it keeps every token, whatever the window
        reference(torch.tensor([TOKENS[:QUERY]]), past_key_values=cache)
        other = transformers.DynamicCache()
        reference(torch.tensor([arms()[1][:QUERY]]), past_key_values=other)
        for p in where:
            cache.layers[1].keys[0, 1, p] = other.layers[1].keys[0, 1, p]
            cache.layers[1].values[0, 1, p] = other.layers[1].values[0, 1, p]
        expected = reference(torch.tensor([TOKENS[QUERY:]]), past_key_values=cache, attention_mask=mask).logits[0, -1]
    torch.testing.assert_close(last(model, edited), expected, atol=1e-4, rtol=0)


def test_states_are_never_changed(loaded):
    model, _ = loaded
    _, state = prefill(model, TOKENS, start=0)
    past = state.crop(QUERY)
    before = past.fingerprint()
    last(model, past)
    past.replace(Cells(positions=(3,)), None)
    recompute(model, past, TOKENS[4:6], [4, 5])
    assert past.fingerprint() == before


def test_shift_equals_a_fresh_prefill(loaded):
    model, _ = loaded
    assert model.rotation is not None
    _, here = prefill(model, TOKENS, start=0)
    _, there = prefill(model, TOKENS, start=100)
    moved = here.shift(100, model.rotation)
    assert torch.equal(moved.positions, there.positions)
    assert moved.deviation(there, start=0, stop=30) < 1e-3
    assert moved.shift(-100, model.rotation).deviation(here, start=0, stop=30) < 1e-4
    wrong = here.shift(99, model.rotation)
    assert max(float((w["k"] - t["k"]).abs().max()) for w, t in zip(wrong.layers, there.layers, strict=True)) > 0.1


def test_recomputing_frozen_positions(loaded):
    """All downstream positions recomputed over the base's cache give the target; a block of new tokens reads alike."""
    model, _ = loaded
    base, target = arms()
    _, past = prefill(model, base, start=0)
    expected, whole = prefill(model, target, start=0)
    logits, state = recompute(model, past, target[CHANGED:], list(range(CHANGED, 30)))
    torch.testing.assert_close(logits[-1], expected, atol=1e-4, rtol=0)
    assert state.deviation(whole, start=0, stop=30) < 1e-4
    # chosen, non-contiguous positions: the others stay bit for bit
    _, partial = recompute(model, past, [target[CHANGED], target[20]], [CHANGED, 20])
    others = [i for i in range(30) if i not in (CHANGED, 20)]
    told = False  # whether a layer below let position 20 see the changed one; all that lies between is frozen
    for new, old, window in zip(partial.layers, past.layers, model.windows.per_layer, strict=True):
        assert torch.equal(new["k"][:, others], old["k"][:, others])
        moved = float((new["k"][:, 20] - old["k"][:, 20]).abs().max())
        assert moved > 1e-4 if told else moved < 1e-5
        told = told or window is None or window > 20 - CHANGED
    assert partial.slice(CHANGED, CHANGED + 1).deviation(whole.slice(CHANGED, CHANGED + 1), start=0, stop=1) < 1e-4


def test_query_block_and_greedy_equal_full_forwards(loaded):
    model, reference = loaded
    _, state = prefill(model, TOKENS[:20], start=0)
    block = TOKENS[20:]
    out = forward(
        model,
        torch.tensor([block]),
        positions=torch.arange(20, 30),
        past=[state],
        over=None,
        read=[0, 4, 9],
        keep=False,
    )
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0, [20, 24, 29]]
        torch.testing.assert_close(out.logits[0], expected, atol=1e-4, rtol=0)
        sequence = list(TOKENS)
        for _ in range(4):
            sequence.append(int(reference(torch.tensor([sequence])).logits[0, -1].argmax()))
    made, after = greedy(model, state, block, start=20, limit=4, stop=frozenset())
    assert list(made) == sequence[30:]
    assert after.length == 33  # 30 tokens and all but the last one that was made


@pytest.mark.parametrize("rope", ["llama3", "linear", "yarn"])
def test_shift_of_scaled_rope(rope, tmp_path):
    model = models.load(
        str(tiny.checkpoint("llama", tmp_path, rope_parameters=tiny.ROPE[rope])), device="cpu", dtype="float32"
    )
    _, here = prefill(model, TOKENS, start=0)
    _, there = prefill(model, TOKENS, start=77)
    assert here.shift(77, model.rotation).deviation(there, start=0, stop=30) < 1e-3


def test_rope_that_depends_on_length_has_no_fixed_turn(tmp_path):
    folder = tiny.checkpoint("llama", tmp_path, rope_parameters=tiny.ROPE["dynamic"])
    assert models.load(str(folder), device="cpu", dtype="float32").rotation is None


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (7, 1)])
def test_grouping_ratios(heads, kv_heads, tmp_path):
    model = models.load(
        str(tiny.checkpoint("qwen2", tmp_path, heads=heads, kv_heads=kv_heads)), device="cpu", dtype="float32"
    )
    assert model.shape["kv_heads"] == kv_heads
    _, state = prefill(model, TOKENS, start=0)
    assert state.n_kv_heads == kv_heads


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.MambaConfig, "recurrent state-space"),
        (transformers.DeepseekV2Config, "latent attention"),
        (transformers.RwkvConfig, "recurrent"),
        (transformers.JambaConfig, "hybrid"),
        (transformers.Qwen3NextConfig, "linear_attention"),
        (transformers.T5Config, "encoder-decoder"),
    ],
)
def test_refused_by_name_with_the_reason(config, reason, tmp_path):
    config().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(models.ModelError, match=f"{tmp_path.name}.*{reason}"):
        models.refuse(tmp_path.name, transformers.AutoConfig.from_pretrained(tmp_path))


def test_half_precision_keeps_the_rotary_frequencies(tmp_path):
    """Casting the whole model would round them, and logits at position 1,000 would be off by units."""
    folder = tiny.checkpoint("llama", tmp_path, max_position_embeddings=2048)
    model = models.load(str(folder), device="cpu", dtype="bfloat16")
    assert model.rotation is not None
    assert model.rotation.inv_freq[0].dtype == torch.float32
    tokens = [3 + (5 * i) % 20 for i in range(1000)]
    plain_half = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = plain_half(torch.tensor([tokens])).logits[0, -1].float()
    full, _ = prefill(model, tokens, start=0)
    assert (full - expected).abs().max() < 0.5
    assert full.dtype == torch.float32


def test_experts_that_batch_tokens_keep_an_exact_prefix(tmp_path):
    """At this width grouped expert products round differently by what comes later; the prefix must not."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 32}
    model = models.load(str(tiny.checkpoint("mixtral", tmp_path, **wide)), device="cpu", dtype="float32")
    assert model.mixes_experts
    trial = Trial.run(model, tokens(), engine="rows", budget=10**7)
    assert max(trial.identities().values()) < 1e-4
    assert trial.identities()["prefix deviation"] == 0.0
    dense = models.load(str(tiny.checkpoint("llama", tmp_path / "dense", **wide)), device="cpu", dtype="float32")
    assert dense.checks["a prefix does not depend on what follows"].value == 0.0
    assert dense.checks["a prefix does not depend on what follows"].bound == 0.0


@pytest.mark.parametrize(
    ("config", "loads"),
    [
        (transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=128), True),
        (transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64), False),
    ],
)
def test_other_causal_models_load_or_are_refused_in_one_line(config, loads, tmp_path):
    config.initializer_range = 0.35
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    if loads:
        model = models.load(str(tmp_path), device="cpu", dtype="float32")
        assert model.rotation is None  # learned positions: a key cannot be turned to another one
    else:
        with pytest.raises(models.ModelError, match="ALiBi"):
            models.load(str(tmp_path), device="cpu", dtype="float32")


def test_layers_without_rope_have_no_turn(tmp_path):
    """SmolLM3 leaves RoPE out of every fourth layer; turning those keys would be silently wrong."""
    settings = {**tiny.SHAPE, "num_attention_heads": 4, "num_key_value_heads": 2, "no_rope_layers": [1, 1, 1, 0]}
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(transformers.SmolLM3Config(**settings)).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    assert models.load(str(tmp_path), device="cpu", dtype="float32").rotation is None


def test_a_decode_that_differs_from_the_full_forward_is_an_identity_failure(loaded, monkeypatch):
    model, _ = loaded
    trial = Trial.run(model, tokens(), engine="rows", budget=10**7)
    assert trial.identities()["cached decode equals full forward"] < 1e-4
    honest = forward_module.masks

    def blind(model, queries, keys):
        """Hides three of the newest cached tokens from single-token decodes."""
        masks = honest(model, queries, keys)
        for mask in masks.values() if isinstance(masks, dict) else [masks]:
            if mask.shape[2] == 1:
                mask[..., -4:-1] = torch.finfo(model.dtype).min
        return masks

    monkeypatch.setattr(forward_module, "masks", blind)
    assert (
        Trial.run(model, tokens(), engine="rows", budget=10**7).identities()["cached decode equals full forward"]
        > model.tolerance
    )

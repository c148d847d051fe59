"""The timing study: planted layers, an independent loop in plain transformers, and its summary by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from figures import style
from figures import timing as figure
from kvnotes import config as configs
from kvnotes import models, runner
from kvnotes.effects import Scope
from kvnotes.planted import PLANTED
from kvnotes.sweep import Trial
from probes import timing
from tests import tiny
from tests.test_locality import instance
from tests.test_prompts import tokens


def config(tmp_path, **flags) -> timing.Settings:
    usual = {"results": tmp_path, "resamples": 500, "permutations": 199}
    made = configs.make(timing.Settings, study="timing", flags={**usual, **flags})
    assert isinstance(made, timing.Settings)
    return made


def run(tmp_path, model, **flags):
    asked = {"model": model, "task": "planted", "layout": "words_field_first", "n": 24, **flags}
    return runner.execute(timing, config(tmp_path, **asked))


@pytest.mark.parametrize("model", [name for name in PLANTED if not name.endswith("-gqa")])
def test_planted_models_give_the_planted_layers(model, tmp_path):
    record = run(tmp_path, model)
    assert record.inclusion.included == 24
    assert all(check.passed for check in record.checks)
    found = {one.name: one for one in record.summary.effects if one.gated}
    for name, value in PLANTED[model].expected["timing"].items():
        assert found[name].estimate == pytest.approx(value, abs=1e-3), name
    assert found["read_depth"].estimate == PLANTED[model].read_layer
    wrote = PLANTED[model].write_layer is not None
    assert (found["write_depth"].estimate is not None) == wrote
    assert (found["transplant_depth"].estimate == PLANTED[model].read_layer) == wrote
    assert found["commit_minus_write"].estimate == (2 if wrote else None)
    if model == "planted-notes":  # what reads at layer 4 must see the notes there, and nowhere else
        tables = {
            name.split(": ")[1]: [row[1] for row in t.rows] for name, t in record.summary.tables.items() if ": " in name
        }
        assert tables["notes up to"] == pytest.approx([0, 0, 0, 0, 1, 1], abs=1e-4)
        assert tables["notes from"] == pytest.approx([1, 1, 1, 1, 1, 0], abs=1e-4)
        assert tables["kept, notes blocked from"] == pytest.approx([0, 0, 0, 0, 0, 1], abs=1e-3)
        assert tables["conclusion at the aggregator"] == [0.5, 0.5, 1, 1, 1, 1]
        assert tables["conclusion at the decision"] == [0.5, 0.5, 0.5, 0.5, 1, 1]
        with style.styled():
            assert list(figure.draw({"a/timing/b": record})) == ["a/timing/b"]


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_margins_and_lens_equal_a_plain_transformers_loop(kind, tmp_path):
    """Cells copied by hand between two Hugging Face caches, masks changed by hand layer by layer, and the lens from the
    model's own hidden states, norm and head; all before any bridge."""
    folder = tiny.checkpoint(kind, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    pair = tokens()
    expected = {
        **{f"up_to.{i}": by_cells(plain, pair, range(i + 1)) for i in range(4)},
        **{f"from.{i}": by_cells(plain, pair, range(i, 4)) for i in range(4)},
        **{f"blocked_{arm}.{i}": by_mask(plain, pair, arm, i) for i in range(4) for arm in ("base", "target")},
    }
    lens = {arm: by_lens(plain, pair, arm) for arm in ("base", "target")}
    trial = Trial.run(models.load(str(folder), device="cpu", dtype="float32"), pair, engine="rows", budget=10**7)
    assert trial.margins(timing.interventions(trial)) == pytest.approx(expected, abs=1e-4)
    for arm in ("base", "target"):
        assert timing._lens(trial, arm) == pytest.approx(lens[arm], abs=1e-4)
    assert lens["base"][-1] == pytest.approx(trial.unedited.base, abs=1e-4)
    assert len({round(value, 4) for value in expected.values()}) > 8


def margin(logits, pair) -> float:
    return float(logits[pair.target_action] - logits[pair.base_action])


@torch.no_grad()
def by_cells(plain, pair, layers) -> float:
    caches = {}
    for arm in ("base", "target"):
        caches[arm] = transformers.DynamicCache()
        plain(torch.tensor([pair.ids(arm)[:-1]]), past_key_values=caches[arm])
    for layer in layers:
        mine, theirs = caches["base"].layers[layer], caches["target"].layers[layer]
        for p in pair.downstream:
            mine.keys[:, :, p], mine.values[:, :, p] = theirs.keys[:, :, p], theirs.values[:, :, p]
    mask = torch.ones(1, len(pair.base_ids), dtype=torch.long)
    last = torch.tensor([pair.base_ids[-1:]])
    return margin(plain(last, past_key_values=caches["base"], attention_mask=mask).logits[0, -1], pair)


@torch.no_grad()
def by_mask(plain, pair, arm, first) -> float:
    def hide(_, args, kwargs):
        mask = kwargs["attention_mask"].clone()
        mask[:, :, -1, list(pair.downstream)] = torch.finfo(mask.dtype).min
        return args, {**kwargs, "attention_mask": mask}

    hooks = [
        layer.self_attn.register_forward_pre_hook(hide, with_kwargs=True) for layer in plain.base_model.layers[first:]
    ]
    found = margin(plain(torch.tensor([pair.ids(arm)])).logits[0, -1], pair)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def by_lens(plain, pair, arm) -> list[float]:
    seen = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: seen.append(out[0] if isinstance(out, tuple) else out))
        for layer in plain.base_model.layers
    ]
    plain(torch.tensor([pair.ids(arm)]))
    for hook in hooks:
        hook.remove()
    cap = getattr(plain.config, "final_logit_softcapping", None)
    found = []
    for hidden in seen:
        logits = plain.lm_head(plain.model.norm(hidden.reshape(-1, hidden.shape[-1])[-1]))
        found.append(margin(logits if cap is None else torch.tanh(logits / cap) * cap, pair))
    return found


def test_a_wrong_lens_or_transplant_breaks_an_identity(tmp_path):
    folder = tiny.checkpoint("llama", tmp_path)
    trial = Trial.run(models.load(str(folder), device="cpu", dtype="float32"), tokens(), engine="rows", budget=10**7)
    curves = {"up_to": [0.0, 1.0], "from": [1.0, 0.0]}
    good = {"lens": {"base": [0.0, trial.unedited.base], "target": [0.0, trial.unedited.target]}, "margins": curves}
    assert max(timing.identities(trial, good).values()) == 0.0
    curves["from"][0] = 1.5
    assert timing.identities(trial, good)["all layers up to equal all layers from"] > 0.1


# --- summary by hand --------------------------------------------------------------------------------------


def pairs(scenarios: int = 8) -> list:
    """Two pairs a scenario; gaps of 2; notes count from layer 1 of 3, the lens is right from layer 2."""
    made = []
    for i in range(scenarios):
        for k in range(2):
            one = instance(f"s{i:02}-{k}", base=-1.0, target=1.0, field=0, notes=0)
            measures = {
                "labels": {
                    "conclusion": {"base": k == 0, "target": k == 1},
                    "rule": {"base": (k == 0) == (i % 2 == 0), "target": (k == 1) == (i % 2 == 0)},
                },
                "classes": {"aggregator": 3, "decision": 9},
                "lens": {"base": [0.5, 1e-9, -1.0], "target": [0.5, 0.5, 1.0]},
                "margins": {
                    "up_to": [-1.0, 0.6, 1.0],
                    "from": [1.0, 0.5, -1.0],
                    "blocked_target": [-0.5, -0.25, 1.0],
                    "blocked_base": [-0.5, -0.75, -1.0],
                },
            }
            changes = {"scenario": f"s{i:02}", "group": f"s{i:02}", "measures": measures, "kind": "polarity"}
            made.append(one.model_copy(update=changes))
    return made


def arrays(rows, *, layer: int) -> dict[str, np.ndarray]:
    """The conclusion stands on an axis of the aggregator from a layer on; the decision is always the same."""
    x = np.random.default_rng(0).normal(size=(len(rows), 2, 2, 3, 4)).astype(np.float32) * 0.1
    x[:, :, 1] = 1.0
    for i, one in enumerate(rows):
        for arm, name in enumerate(("base", "target")):
            x[i, arm, 0, layer:, 0] += 1.0 if one.measures["labels"]["conclusion"][name] else -1.0
    return {"aggregator": x[:, :, 0], "decision": x[:, :, 1]}


def test_summary_by_hand(tmp_path):
    rows = pairs()
    found = {
        e.name: e for e in timing.summarise(rows, config(tmp_path), 1e-6, arrays(rows, layer=1)).effects if e.gated
    }
    assert (found["write_depth"].estimate, found["write_onset"].estimate) == (1, 1)
    assert found["rule_write_depth"].estimate is None  # in half of the scenarios it is the conclusion's opposite
    assert found["read_depth"].estimate is None
    assert "not above its permutation null" in found["read_depth"].warning
    assert found["commit_depth"].estimate == pytest.approx((2 + 0) / 2)  # base from layer 2, target from the first
    assert found["commit_minus_write"].estimate == pytest.approx(0.0)
    assert found["transplant_depth"].estimate == 1  # 1.6 of 2
    assert found["block_depth"].estimate == 1  # what is seen up to layers 0, 1, 2 gives 0.5, 2, 2
    assert (found["block_depth"].low, found["block_depth"].high) == (1, 1)


def test_what_is_within_the_noise_is_no_commitment(tmp_path):
    one = pairs()[0]
    assert timing._commit(one, 1e-6) == 1.0
    assert timing._commit(one, 0.6) == 2.0  # the target's early 0.5 is noise now
    assert timing._commit(one, 1.0) is None


def test_without_whole_designs_there_is_no_probe(tmp_path):
    rows = pairs()[::2]
    summary = timing.summarise(rows, config(tmp_path), 1e-6, arrays(rows, layer=1))
    found = {one.name: one for one in summary.effects if one.gated}
    assert found["write_depth"].estimate is None
    assert found["commit_depth"].estimate is not None
    assert "no probe" in found["write_depth"].warning
    assert summary.headline == "l: write depth none, read depth none, rule write onset none, rule read onset none, " + (
        "commit depth 1 (n=8; probes: 0, of whole designs)"
    )


def test_too_few_scenarios_report_nothing(tmp_path):
    rows = pairs(5)
    summary = timing.summarise(rows, config(tmp_path), 1e-6, arrays(rows, layer=1))
    assert {one.estimate for one in summary.effects} == {None}
    assert not summary.tables


def test_a_summary_from_condensed_arrays_is_the_same(tmp_path):
    rows, settings = pairs(), config(tmp_path)
    raw = {name: np.pad(x, [(0, 0)] * 3 + [(0, 60)]) for name, x in arrays(rows, layer=1).items()}
    small = timing.condense({"residuals": np.stack(list(raw.values()), axis=2)}, rows, settings)
    assert {name: x.shape for name, x in small.items()} == dict.fromkeys(timing.PLACES, (16, 2, 3, 32))
    one, other = (timing.summarise(rows, settings, 1e-6, x).effects for x in (raw, small))
    assert [e.estimate for e in one] == [e.estimate for e in other]


def test_seen_and_kept_mirror_one_another(tmp_path):
    one = pairs()[0]
    assert timing._kept(one)[-1] == 2.0
    assert timing._seen(one)[-1] == timing._kept(one)[-1] - timing._kept(one)[0]
    scope = Scope(instances=pairs(), layout="l", gated=True, config=config(tmp_path), floor=1e-6)
    nothing = timing._half(scope, lambda one: [0.0, 0.0, 0.0])
    assert nothing.estimate is None
    assert nothing.warning == "the notes give nothing that could be halved"


def test_field_pairs_are_refused(tmp_path):
    with pytest.raises(configs.ConfigError, match="pair"):
        config(tmp_path, pair="field")

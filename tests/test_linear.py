"""The linear study: planted answers, an independent loop in plain transformers, controls, and its summary by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from figures import linear as figure
from figures import style
from kvnotes import config as configs
from kvnotes import models, probing, records, runner, select
from kvnotes.cache import CacheError
from kvnotes.residuals import randomised, residuals
from kvnotes.sweep import Trial
from probes import linear
from tests import tiny
from tests.test_locality import instance
from tests.test_prompts import tokens


def config(tmp_path, **flags) -> linear.Settings:
    usual = {"results": tmp_path, "resamples": 500, "permutations": 99}
    made = configs.make(linear.Settings, study="linear", flags={**usual, **flags})
    assert isinstance(made, linear.Settings)
    return made


@pytest.mark.parametrize("model", ["planted-notes", "planted-direct"])
def test_planted_models_are_read_where_they_write(model, tmp_path):
    asked = {"model": model, "task": "planted", "layout": "words_field_first", "n": 18, "permutations": 300}
    settings = config(tmp_path, **asked)
    record = runner.execute(linear, settings)
    found = {one.name: one for one in record.summary.effects if one.gated}
    wrote = model == "planted-notes"
    assert found["auc_aggregator"].estimate == found["accuracy_aggregator"].estimate == (1.0 if wrote else 0.5)
    assert found["auc_decision"].estimate == found["accuracy_decision"].estimate == 1.0
    assert found["auc_decision"].test.conclusion == "decodable"
    assert (found["auc_aggregator"].test.conclusion == "decodable") == wrote
    for name in ("trigger", "last_action", "request", "delimiter"):
        assert found[f"auc_{name}"].estimate == found[f"conclusion_{name}"].estimate == 0.5
    assert found["field_aggregator"].estimate == (1.0 if wrote else 0.5)  # the note's residual holds the value too
    assert found["selectivity_aggregator"].estimate == (0.5 if wrote else 0.0)
    assert found["field_decision"].estimate == (0.5 if wrote else 1.0)
    assert {found[f"{task}_aggregator"].estimate for task in ("control", "memorised")} == {0.5}
    assert found["majority"].estimate == 0.5
    assert all(
        one.control == (name.split("_")[0] in {"majority", "control", "memorised"} or "randomised" in name)
        for name, one in found.items()
    )
    assert all(0.1 < found[f"randomised_{name}"].estimate < 0.9 for name in ("aggregator", "decision"))
    area = record.summary.tables["words_field_first, conclusion: AUC on held-out scenarios"]
    at = area.columns.index("aggregator")
    assert [row[at] for row in area.rows] == [0.5, 0.5, 1, 1, 1, 1] if wrote else [0.5] * 6
    q = record.summary.tables["words_field_first, conclusion: p of the permutation test, BH over layers and classes"]
    p = [row[q.columns.index("decision")] for row in q.rows]
    assert max(p[4:]) < 0.1  # of 256 patterns; two or six of 36 cells are readable
    assert min(p[:4]) > 0.5
    assert record.arrays[0].tensors["residuals.aggregator"] == (18, 2, 6, 36)
    assert record.arrays[0].tensors["inside.decision"] == (18, 8, 6, 16)
    with style.styled():
        assert list(figure.draw({"a/linear/b": record})) == ["a/linear/b"]
    if wrote:
        check_by_hand(record, settings)


def check_by_hand(record, settings) -> None:
    """The same probe with one penalty, on hidden states from plain transformers: the same AUC after every layer."""
    folder = models.resolve(record.model.name)[1].folder
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    x, labels, names = [], [], []
    for one in record.instances:
        for arm in ("base", "target"):
            ids = torch.tensor([getattr(one.tokens, arm)])
            with torch.no_grad():
                states = plain(ids, output_hidden_states=True).hidden_states[1:-1]
            x.append([state[0, one.measures["classes"]["aggregator"]].numpy() for state in states])
            labels.append(one.measures["labels"]["conclusion"][arm])
            names.append(one.scenario)
    fold = select.folds(names, settings.seed)
    side, labels = np.array([fold[name] for name in names]), np.array(labels)
    for layer in range(5):
        rows, areas = np.array([one[layer] for one in x]), []
        for tested in (0, 1):
            fit = LogisticRegression(max_iter=5000).fit(rows[side != tested], labels[side != tested])
            scores = fit.decision_function(rows[side == tested])
            areas.append(roc_auc_score(labels[side == tested], np.round(scores, 2)))
        table = record.summary.tables["words_field_first, conclusion: AUC on held-out scenarios"]
        assert table.rows[layer][table.columns.index("aggregator")] == pytest.approx(np.mean(areas), abs=1e-4)


# --- residuals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_residuals_equal_plain_hidden_states(kind, tmp_path):
    folder = tiny.checkpoint(kind, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    pair, places, seen = tokens(), [5, 9, 15], []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: seen.append(out[0] if isinstance(out, tuple) else out))
        for layer in plain.base_model.layers
    ]
    with torch.no_grad():
        for arm in ("base", "target"):
            plain(torch.tensor([pair.ids(arm)]))
    for hook in hooks:
        hook.remove()
    expected = torch.stack([one.reshape(-1, one.shape[-1])[places] for one in seen]).unflatten(0, (2, 4)).clone()
    model = models.load(str(folder), device="cpu", dtype="float32")
    assert residuals(model, pair, places) == pytest.approx(expected.numpy(), abs=1e-4)
    trial = Trial.run(model, pair, engine="rows", budget=10**7)
    again = residuals(model, pair, places, prefix=trial.states["base"].crop(4))
    for i, arm in enumerate(("base", "target")):
        assert again[i] == pytest.approx(trial.capture(arm, "resid_post", places).numpy(), abs=1e-5)
    with pytest.raises(CacheError, match="before the first changed"):
        residuals(model, pair, [2])


def test_randomised_weights_keep_shapes_and_leave_the_model_alone(tmp_path):
    folder = tiny.checkpoint("qwen2", tmp_path, tie_word_embeddings=True)
    model = models.load(str(folder), device="cpu", dtype="float32")
    pair = tokens()
    before = residuals(model, pair, [5])
    one, again, other = (randomised(model, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(residuals(model, pair, [5]), before)
    first, second, third = (residuals(made, pair, [5]) for made in (one, again, other))
    assert first.shape == before.shape
    assert torch.equal(first, second)
    assert not torch.allclose(first, third)
    assert not torch.allclose(first, before)
    weights, fresh = (dict(made.twin.named_parameters(remove_duplicate=False)) for made in (model, one))
    assert {name: w.shape for name, w in weights.items()} == {name: w.shape for name, w in fresh.items()}
    for name, weight in weights.items():
        if weight.ndim == 1:
            assert sorted(weight.tolist()) == sorted(fresh[name].tolist())
        else:
            assert float(fresh[name].std()) == pytest.approx(float(weight.std()), rel=0.15)
    assert one.twin.lm_head.weight.data_ptr() == one.twin.model.embed_tokens.weight.data_ptr()


# --- summary by hand --------------------------------------------------------------------------------------


def pairs(scenarios: int = 8) -> list[records.Instance]:
    made = []
    for i in range(scenarios):
        for k in range(2):
            one = instance(f"s{i:02}-{k}", base=-1.0, target=1.0, field=0, notes=0)
            conclusion = {"base": k == 0, "target": k == 1}
            rule = {arm: value == (i % 2 == 0) for arm, value in conclusion.items()}
            measures = {
                "labels": {"conclusion": conclusion, "rule": rule},
                "classes": {"aggregator": 3, "decision": 9},
            }
            changes = {"scenario": f"s{i:02}", "group": f"s{i:02}", "measures": measures, "kind": "polarity"}
            made.append(one.model_copy(update=changes))
    return made


def collected(rows, *, wrong: str = "") -> dict[str, np.ndarray]:
    """The conclusion along an axis at the aggregator after layer 1, turned round in one scenario; the rule along
    another at the decision; the field along a third, everywhere; the same with every set of neutral rules."""
    k, d = (probing.CLASSES.index(name) for name in ("aggregator", "decision"))
    x = np.full((len(rows), 4, 2, len(probing.CLASSES), 2, 80), np.nan, dtype=np.float32)
    x[:, :, :, [k, d]] = np.random.default_rng(0).normal(size=(len(rows), 4, 2, 2, 2, 80)) * 0.02
    for i, one in enumerate(rows):
        x[i, :, :, [k, d], :, 2] += i % 2
        for arm, name in enumerate(("base", "target")):
            sign = -1.0 if one.scenario == wrong else 1.0
            x[i, :, arm, k, 1, 0] += sign if one.measures["labels"]["conclusion"][name] else -sign
            x[i, :, arm, d, :, 1] += 1.0 if one.measures["labels"]["rule"][name] else -1.0
    return {"residuals": x}


def summary_of(rows, settings, made) -> records.Summary:
    return linear.summarise(rows, settings, 1e-6, linear.condense(made, rows, settings))


def test_summary_by_hand(tmp_path):
    """All scenarios but one are right; that one is the wrong way round in all four prompts."""
    rows = pairs(16)
    summary = summary_of(rows, config(tmp_path), collected(rows, wrong="s03"))
    found = {one.name: one for one in summary.effects if one.gated}
    assert found["accuracy_aggregator"].estimate == pytest.approx(15 / 16)
    assert found["accuracy_aggregator"].n == 32
    assert found["rule_accuracy_decision"].estimate == 1.0
    assert found["rule_auc_decision"].test.conclusion == "decodable"
    assert found["auc_decision"].test.conclusion == "inconclusive"
    assert found["field_aggregator"].estimate == found["conclusion_aggregator"].estimate == 1.0
    assert found["randomised_aggregator"].estimate is None  # nothing was collected
    chosen = {(row[0], row[1]): row for row in summary.tables["l: chosen layers"].rows}
    assert chosen["conclusion", "aggregator"][2:5] == [1, 1, 1]
    assert "conclusion, AUC on held-out scenarios: aggregator 0." in summary.headline
    assert {one.name for one in summary.effects if one.gated} == {one.name for one in summary.effects if not one.gated}


def test_condensed_arrays_are_small_and_by_class(tmp_path):
    rows, settings = pairs(), config(tmp_path)
    raw = collected(rows)
    raw["randomised"] = raw["residuals"][:, 0].copy()
    small = linear.condense(raw, rows, settings)
    sizes = {"residuals": (16, 2, 2, 32), "randomised": (16, 2, 2, 32), "inside": (16, 8, 2, 16)}
    expected = {f"{what}.{name}": size for what, size in sizes.items() for name in ("aggregator", "decision")}
    assert {name: array.shape for name, array in small.items()} == expected
    same = {one.name: one.estimate for one in linear.summarise(rows, settings, 1e-6, small).effects if one.gated}
    assert same["randomised_aggregator"] == same["auc_aggregator"] == 1.0


def test_designs_with_a_pair_missing_are_left_out(tmp_path):
    rows = [one for one in pairs() if one.id != "s02-1"]
    summary = summary_of(rows, config(tmp_path), collected(rows))
    found = {one.name: one for one in summary.effects if one.gated}
    assert (found["accuracy_aggregator"].n, found["accuracy_aggregator"].clusters) == (14, 7)


def test_a_design_that_could_not_be_rewritten_has_no_numbers_within(tmp_path):
    rows = pairs()
    made = collected(rows)
    made["residuals"][4, 2] = np.nan
    summary = summary_of(rows, config(tmp_path), made)
    found = {one.name: one for one in summary.effects if one.gated}
    assert (found["field_aggregator"].n, found["accuracy_aggregator"].n) == (14, 16)


def test_too_few_scenarios_report_nothing_and_the_figure_says_so(tmp_path):
    rows = pairs(5)
    summary = summary_of(rows, config(tmp_path), collected(rows))
    assert {one.estimate for one in summary.effects} == {None}
    assert not summary.tables
    assert "below 6 scenarios" in summary.headline


def test_field_pairs_are_refused(tmp_path):
    with pytest.raises(configs.ConfigError, match="pair"):
        config(tmp_path, pair="field")

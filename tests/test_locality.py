"""The locality study: planted answers, an independent loop in plain transformers, and its summary by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from sample_record import measured

from kvnotes import config as configs
from kvnotes import effects, models, runner
from kvnotes.config import RunConfig
from kvnotes.planted import PLANTED
from kvnotes.records import Instance
from kvnotes.sweep import Trial
from probes import locality
from tests import tiny
from tests.test_prompts import tokens


def config(tmp_path, **flags) -> RunConfig:
    return configs.make(RunConfig, study="locality", flags={"results": tmp_path, "resamples": 500, **flags})


@pytest.mark.parametrize("model", sorted(PLANTED))
def test_planted_models_give_the_planted_shares(model, tmp_path):
    layout = "words_field_first"
    record = runner.execute(locality, config(tmp_path, model=model, task="planted", layout=layout, n=12))
    assert record.inclusion.included == 12
    measured = {effect.name: effect.estimate for effect in record.summary.effects if effect.gated}
    for name, value in PLANTED[model].expected["locality"].items():
        assert measured[name] == pytest.approx(value, abs=1e-3), name
    assert all(check.passed for check in record.checks)


@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_margins_equal_a_plain_transformers_loop(kind, tmp_path):
    """The same cells copied by hand between two Hugging Face caches, decoded by the model before any bridge."""
    folder = tiny.checkpoint(kind, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    pair = tokens()
    expected = {
        edit.name: by_hand(plain, pair, edit.into, edit.donor, edit.positions) for edit in locality.interventions(pair)
    }
    trial = Trial.run(models.load(str(folder), device="cpu", dtype="float32"), pair, engine="rows", budget=10**7)
    measured = locality.measure(trial, config(tmp_path))["margins"]
    assert measured == pytest.approx(expected, abs=1e-4)
    assert max(locality.identities(trial, {"margins": measured}).values()) < 1e-5
    assert trial.fired["field_only"] == 4 * 2 * 1  # four layers, two KV heads, one position
    assert len(set(map(float, expected.values()))) > 1


def by_hand(plain, pair, into, donor, positions) -> float:
    ids = {"base": pair.base_ids, "target": pair.target_ids}
    caches = {}
    with torch.no_grad():
        for arm in (into, donor):
            caches[arm] = transformers.DynamicCache()
            plain(torch.tensor([ids[arm][:-1]]), past_key_values=caches[arm])
        for mine, theirs in zip(caches[into].layers, caches[donor].layers, strict=True):
            for p in positions:
                mine.keys[:, :, p], mine.values[:, :, p] = theirs.keys[:, :, p], theirs.values[:, :, p]
        mask = torch.ones(1, len(pair.base_ids), dtype=torch.long)
        logits = plain(torch.tensor([pair.base_ids[-1:]]), past_key_values=caches[into], attention_mask=mask).logits
    return float(logits[0, -1, pair.target_action] - logits[0, -1, pair.base_action])


def instance(name: str, *, base: float, target: float, field: float, notes: float, passed: bool = True) -> Instance:
    margins = {"field_only": field, "notes_only": notes, "full_downstream": target}
    measures = {"unedited": {"base": base, "target": target}, "margins": margins}
    return measured(name, base=base, target=target, measures=measures, passed=passed)


def test_summary_by_hand(tmp_path, monkeypatch):
    """Gaps 4 and 6; field moves 0 and 1 of them, notes 4 and 4: ratios of sums 1/10 and 8/10."""
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 2)
    rows = [
        instance("a", base=-2, target=2, field=-2, notes=2),
        instance("b", base=-1, target=5, field=0, notes=3),
        instance("c", base=1, target=2, field=1, notes=1, passed=False),
    ]
    found = {(e.name, e.gated): e for e in locality.summarise(rows, config(tmp_path), floor=1e-6).effects}
    assert found["field_only", True].estimate == pytest.approx(0.1)
    assert found["field_only", True].mean_of_ratios == pytest.approx((0 + 1 / 6) / 2)
    assert found["notes_only", True].estimate == pytest.approx(0.8)
    assert found["field_share", True].estimate == pytest.approx((0.1 + 1 - 0.8) / 2)
    assert found["interaction", True].estimate == pytest.approx(0.1)
    assert found["flips_notes_only", True].estimate == 1.0
    assert found["flips_field_only", True].estimate == 0.0
    assert found["field_only", False].estimate == pytest.approx(1 / 11)  # the ungated number stands beside
    assert found["field_only", False].n == 3
    assert found["full_downstream", True].control


def test_no_included_instance_reports_no_recovery(tmp_path):
    rows = [instance("c", base=1, target=2, field=1, notes=1, passed=False)]
    summary = locality.summarise(rows, config(tmp_path), floor=1e-6)
    gated = [effect for effect in summary.effects if effect.gated]
    assert {effect.estimate for effect in gated} == {None}
    assert "no recovery (0 pair(s) in 0 scenario(s) pass the gate" in summary.headline


def test_a_lucky_pair_or_two_report_no_recovery(tmp_path):
    rows = [instance(f"s{i}", base=-1.0, target=1.0, field=-1.0, notes=1.0) for i in range(6)]
    few, enough = (locality.summarise(part, config(tmp_path), floor=1e-6) for part in (rows[:5], rows))
    assert {effect.estimate for effect in few.effects} == {None}
    assert "5 pair(s) in 5 scenario(s) pass the gate; nothing is reported below 6 scenarios" in few.headline
    assert "notes-only 1.00 (n=6)" in enough.headline


def test_an_identity_that_fails_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(locality, "identities", lambda trial, measures: {"made up": 0.5})
    settings = config(tmp_path, model="planted-notes", task="planted", layout="words_field_first", n=1)
    with pytest.raises(runner.IdentityFailed, match=r"'made up' is off by 0\.5"):
        runner.execute(locality, settings)
    assert not list(tmp_path.rglob("*.json"))


def test_interventions_cover_every_cell_before_the_query_but_the_prefix():
    pair = tokens()
    by_name = {edit.name: SimpleNamespace(p=set(edit.positions)) for edit in locality.interventions(pair)}
    assert by_name["field_only"].p & by_name["notes_only"].p == set()
    assert by_name["full_downstream"].p == set(range(pair.changed[0], pair.query[0]))

"""The specificity study: planted notes against random positions, a plain loop, its summary and draws by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from figures import specificity as figure
from kvnotes import config as configs
from kvnotes import effects, models, runner, select
from kvnotes.planted import PLANTED
from kvnotes.records import Instance, Tokens
from kvnotes.sweep import Trial
from probes import specificity
from tests import tiny
from tests.test_locality import instance
from tests.test_prompts import tokens


def config(tmp_path, **flags) -> Any:
    usual = {"results": tmp_path, "resamples": 500, "draws": 12, "fewer": 6}
    return configs.make(specificity.Settings, study="specificity", flags={**usual, **flags})


@pytest.mark.parametrize("model", ["planted-notes", "planted-direct", "planted-mixed", "planted-both-gqa"])
def test_planted_notes_are_special_and_random_positions_are_not(model, tmp_path):
    settings = config(tmp_path, model=model, task="planted", layout="words_field_first", n=12)
    record = runner.execute(specificity, settings)
    alpha, best = PLANTED[model].alpha, PLANTED[model].expected["suffix"]["first_note"]
    found = {one.name: one for one in record.summary.effects if one.gated}
    for name in ("top", "in_sample"):
        assert found[f"{name}_1"].estimate == pytest.approx(best, abs=1e-3)
        assert [found[f"{name}_{k}"].estimate for k in (2, 4, 8, 16)] == pytest.approx([alpha] * 4, abs=1e-3)
    for k in (2, 4, 8, 16):  # the second note is outside the best 1 of `both`
        for kind in ("random", "near") if k < 16 else ("random",):  # too few of a class are left beside 16
            assert found[f"{kind}_{k}"].estimate == pytest.approx(0.0, abs=1e-3)
            assert found[f"{kind}_{k}"].control
            assert found[f"gain_{kind}_{k}"].estimate == pytest.approx(alpha, abs=1e-3)
    assert found["beats_8"].estimate == (1.0 if alpha else 0.0)
    assert found["random_8"].test is not None
    assert found["random_8"].test.conclusion == "equivalent"
    if alpha:
        gain = found["gain_random_8"].test
        assert gain is not None
        assert gain.p is not None
        assert gain.p <= 5 / 501 + 1e-9
        slots = {row[0]: row[1:] for row in record.summary.tables["slots of the best 8"].rows}
        assert slots["delimiter.first_note[0]"] == [1.0, 1.0]
    for one in record.instances:
        check_draws(one)
    figure.draw({"m/specificity/l": record})["m/specificity/l"].canvas.draw()
    assert all(check.passed for check in record.checks)


def check_draws(one: Instance) -> None:
    """Draws as counted: enumerated where there are no more than asked for."""
    for kind, margins in one.measures["drawn"].items():
        for k, drawn, possible in zip(one.measures["ks"], margins, one.measures["possible"][kind], strict=True):
            assert len(drawn) == min(possible, 12 if k == 8 else 6)


@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_margins_equal_a_plain_transformers_loop(kind, tmp_path):
    """Cells copied by hand between two Hugging Face caches, for the best k and for the draws."""
    folder = tiny.checkpoint(kind, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    pair, settings = tokens(), config(tmp_path)
    trial = Trial.run(models.load(str(folder), device="cpu", dtype="float32"), pair, engine="rows", budget=10**7)
    first = specificity.survey(trial, settings)
    assert first["single"] == pytest.approx([by_hand(plain, pair, [p]) for p in pair.downstream], abs=1e-4)
    order = list(reversed(pair.downstream))
    plan = plan_of(pair, ranking=[], own=order)
    second = specificity.measure(trial, settings, plan)
    for name, chosen in (("top", pair.downstream), ("in_sample", order)):
        assert second["best"][name] == pytest.approx([by_hand(plain, pair, chosen[:k]) for k in second["ks"]], abs=1e-4)
    sets = specificity._draws(
        pair.downstream, pair.downstream[:2], select.slot_names(pair), config=settings, name=pair.pair.id
    )
    hand = [by_hand(plain, pair, one) for one in sets["random"].sets]
    assert second["drawn"]["random"][second["ks"].index(2)] == pytest.approx(hand, abs=1e-4)
    assert specificity.identities(trial, {**first, **second})["both passes agree"] < 1e-5


def by_hand(plain, pair, positions) -> float:
    """The base arm's margin with the target's cells at some positions."""
    with torch.no_grad():
        caches = []
        for ids in (pair.base_ids, pair.target_ids):
            caches.append(transformers.DynamicCache())
            plain(torch.tensor([ids[:-1]]), past_key_values=caches[-1])
        for mine, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
            for p in positions:
                mine.keys[:, :, p], mine.values[:, :, p] = theirs.keys[:, :, p], theirs.values[:, :, p]
        mask = torch.ones(1, len(pair.base_ids), dtype=torch.long)
        logits = plain(torch.tensor([pair.base_ids[-1:]]), past_key_values=caches[0], attention_mask=mask).logits
    return float(logits[0, -1, pair.target_action] - logits[0, -1, pair.base_action])


def plan_of(pair, *, ranking, own) -> dict[str, Any]:
    """A plan in which the other fold ranked the slots so."""
    here = {"folds": {pair.pair.scenario: 1}, "tested_with": {"0": [], "1": ranking}}
    return {"top": {pair.pair.layout: here}, "in_sample": {pair.pair.id: own}}


def test_draws_lie_outside_the_best_and_match_its_classes(tmp_path):
    pair = tokens()
    names = select.slot_names(pair)
    asked: dict[str, tuple[int, ...]] = {}

    def margins(edits):
        asked.update({one.name: one.positions for one in edits})
        return {one.name: 0.0 for one in edits}

    trial: Any = SimpleNamespace(pair=pair, margins=margins)
    ranking = [names[p] for p in reversed(pair.downstream)]
    made = specificity.measure(trial, config(tmp_path), plan_of(pair, ranking=ranking, own=[*pair.downstream]))
    assert asked["top:1"] == pair.downstream[-1:]
    for at, k in enumerate(made["ks"]):
        chosen = pair.downstream[-k:]
        for kind in ("random", "near"):
            drawn = [asked[f"{kind}:{k}:{i}"] for i in range(len(made["drawn"][kind][at]))]
            assert all(not set(one) & set(chosen) and len(set(one)) == k for one in drawn)
            if kind == "near" and made["exact"][at] and drawn:
                roles = sorted(select.slot_class(names[p]) for p in chosen)
                assert all(sorted(select.slot_class(names[p]) for p in one) == roles for one in drawn)


def row(name: str, *, gap: float, single: list[float]) -> Instance:
    """Base at 0, effects that add up; positions 1 to 4 downstream of the field at 0, query at 5."""
    made = instance(name, base=0.0, target=gap, field=0.0, notes=gap)
    ids = (7,) * 6
    kept = Tokens(base=ids, target=(8, *ids[1:]), changed=(0,), query=(5,), base_action=1, target_action=2)
    spans = {"field": ((0, 1),), "text": ((1, 3),), "delimiter": ((3, 5),), "answer_prefix": ((5, 6),)}
    order = sorted(range(4), key=lambda i: -single[i])
    top = [single[0], single[0] + single[1]]
    measures = {
        "notes": sum(single),
        "single": single,
        "ks": [1, 2],
        "chosen": {"top": [1, 2, 3, 4], "in_sample": [i + 1 for i in order]},
        "best": {"top": top, "in_sample": [single[order[0]], single[order[0]] + single[order[1]]]},
        "drawn": {"random": [single[1:], [sum(single[2:])]], "near": [[single[1]], [sum(single[2:])]]},
        "possible": {"random": [3.0, 1.0], "near": [1.0, 1.0]},
        "exact": [True, False],
    }
    return made.model_copy(update={"tokens": kept, "spans": spans, "measures": measures})


def test_summary_by_hand(tmp_path, monkeypatch):
    """Gaps 4 and 6, singles 3, 1, 0, 0 and 2, 0, 3, 1."""
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 2)
    rows = [row("a", gap=4.0, single=[3.0, 1.0, 0.0, 0.0]), row("b", gap=6.0, single=[2.0, 0.0, 3.0, 1.0])]
    summary = specificity.summarise(rows, config(tmp_path), floor=1e-6)
    found = {one.name: one for one in summary.effects if one.gated}
    assert found["top_1"].estimate == pytest.approx(0.5)
    assert found["top_2"].estimate == pytest.approx(0.6)
    assert found["in_sample_1"].estimate == pytest.approx(0.6)
    assert found["random_1"].estimate == pytest.approx((1 / 3 + 4 / 3) / 10)
    assert found["random_2"].estimate == pytest.approx(4 / 10)
    assert found["matched_1"].estimate == pytest.approx(1 / 10)
    assert found["matched_2"].estimate is None  # none of the draws match every class
    assert found["gain_random_1"].estimate == pytest.approx(0.5 - 1 / 6)
    assert found["delimiters_8"].estimate == pytest.approx(0.5)
    assert found["delimiters_all"].control
    classes = {cells[0]: cells[1:] for cells in summary.tables["classes of the best 8"].rows}
    assert classes == {"text": [2.0, 2.0, 4.0], "delimiter": [2.0, 2.0, 4.0]}
    assert summary.tables["random draws"].rows[0] == [1, 2, 2, 3.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    assert "n=2" in summary.headline


def test_draws_by_number_begin_again_where_one_has_fewer():
    rows = [row("a", gap=4.0, single=[3.0, 1.0, 0.0, 0.5]), row("b", gap=6.0, single=[2.0, 0.0, 3.0, 1.0])]
    assert figure.pooled(rows, "random", 1) == pytest.approx([0.1, 0.3, 0.15])
    mixed = [rows[0], rows[1].model_copy(update={"measures": {**rows[1].measures, "drawn": {"random": [[6.0], []]}}})]
    assert figure.pooled(mixed, "random", 1) == pytest.approx([0.7, 0.6, 0.65])


def test_the_draws_p_value_is_exact_for_one_scenario_and_uniform_under_the_null(tmp_path):
    """One scenario: the chosen is the best of 1 + 3 equally likely sets, p = 1/4. Exchangeable sets: p is uniform."""
    settings = config(tmp_path, resamples=20_000)
    rows = [row("a", gap=4.0, single=[3.0, 1.0, 0.0, 0.5])]
    scope = effects.Scope(instances=rows, layout="l", gated=True, config=settings, floor=0.0)
    assert scope.draws_test(lambda one: 3.0, lambda one: [1.0, 0.0, 0.5]) == pytest.approx(0.25, abs=0.02)
    rng, quick = np.random.default_rng(0), config(tmp_path, resamples=500)
    rows = [row(f"s{i}", gap=4.0, single=[3.0, 1.0, 0.0, 0.5]) for i in range(8)]
    scope = effects.Scope(instances=rows, layout="l", gated=True, config=quick, floor=0.0)
    p = []
    for _ in range(200):
        values = {one.id: rng.normal(size=11) for one in rows}
        p.append(
            scope.draws_test(lambda one, v=values: float(v[one.id][0]), lambda one, v=values: v[one.id][1:].tolist())
        )
    assert 0.4 < np.mean(p) < 0.6
    assert np.mean(np.array(p) < 0.1) < 0.17


def test_no_included_pair_says_so(tmp_path):
    none = row("a", gap=4.0, single=[1.0, 0.0, 0.0, 0.0]).model_copy(update={"status": "incompetent", "reason": "gate"})
    summary = specificity.summarise([none], config(tmp_path), floor=1e-6)
    assert {one.estimate for one in summary.effects} == {None}
    assert "no recovery" in summary.headline

"""The specificity study: planted notes against random positions, a plain loop, its summary and draws by hand."""

from __future__ import annotations

import math
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
        assert gain.p <= 0.5  # a note of two delimiters that may hold one: eight of its 36 slots often catch it
        slots = {row[0]: row[1:] for row in record.summary.tables["slots of the best 8"].rows}
        assert slots["delimiter.first_note[0]"] == [1.0, 1.0]
    for one in record.instances:
        check_draws(one)
    figure.draw({"m/specificity/l": record})["m/specificity/l"].canvas.draw()
    assert all(check.passed for check in record.checks)


def check_draws(one: Instance) -> None:
    """Draws as counted: enumerated where there are no more than asked for."""
    for kind, margins in one.measures["drawn"].items():
        if kind in specificity.PERMUTED:
            assert {k: len(drawn) for k, drawn in margins.items()} == {"8": 12}
            continue
        assert set(margins) == set(one.measures["possible"][kind]) == {"1", "2", "4", "8", "16"}
        for k, drawn in margins.items():
            assert len(drawn) == min(one.measures["possible"][kind][k], 12 if k == "8" else 6)


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
    best, sets = pair.downstream[:2], [pair.downstream[2:4], pair.downstream[3:5]]
    second = specificity.measure(trial, settings, plan_of(pair, best=best, sets=sets, own=order))
    for name, chosen in (("top", best), ("in_sample", order)):
        hand = {str(k): by_hand(plain, pair, chosen[:k]) for k in (1, 2, 4, 8, 16) if k <= len(chosen)}
        assert second["best"][name] == pytest.approx(hand, abs=1e-4)
    hand = [by_hand(plain, pair, one) for one in sets]
    assert second["drawn"]["random"]["2"] == pytest.approx(hand, abs=1e-4)
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


def plan_of(pair, *, best, sets, own) -> dict[str, Any]:
    """A plan in which the other fold chose these positions' slots, and drew these sets of two."""
    names = select.slot_names(pair)
    drawn = {"sets": [[names[p] for p in one] for one in sets], "possible": len(sets)}
    tested = {"top": [names[p] for p in best], "sets": {"2": {"random": drawn, "near": drawn, "exact": True}}}
    here = {"folds": {pair.pair.scenario: 1}, "tested_with": {"0": {}, "1": tested}}
    return {"tested": {pair.pair.layout: here}, "in_sample": {pair.pair.id: own}}


def test_a_fold_has_one_best_and_one_of_each_draw_for_all_its_scenarios(tmp_path):
    """Six pairs of one layout; the first slot of `text` moves most. Pair "f" lacks the second one."""
    rows = [row(name, gap=4.0, single=[3.0, 1.0, 0.0, 0.5]) for name in "abcdef"]
    assert rows[-1].tokens is not None
    spans = {**rows[-1].spans, "text": ((1, 2),), "request": ((2, 3),)}
    rows[-1] = rows[-1].model_copy(update={"spans": spans})
    plan = specificity.prepare(rows, config(tmp_path))
    for tested in plan["tested"]["l"]["tested_with"].values():
        assert tested["top"] == ["text[0]", "delimiter[1]", "delimiter[0]"]  # text[1] is not in every pair
        for k, made in tested["sets"].items():
            best, outside = tested["top"][: int(k)], tested["top"][int(k) :]
            assert all(len(set(one)) == int(k) and not set(one) & set(best) for one in made["random"]["sets"])
            assert made["random"]["possible"] == math.comb(len(outside), int(k))
        assert tested["sets"]["1"]["random"]["sets"] == [["delimiter[0]"], ["delimiter[1]"]]  # enumerated
        assert not tested["sets"]["1"]["exact"]  # there is no other text
    assert plan["in_sample"]["f"] == [1, 2, 4, 3]


def test_without_a_pair_that_passes_in_the_other_fold_nothing_is_cross_fitted(tmp_path):
    rows = [row(name, gap=4.0, single=[3.0, 1.0, 0.0, 0.5]) for name in "abcdefgh"]
    rows = [rows[0], *(one.model_copy(update={"status": "incompetent", "reason": "gate"}) for one in rows[1:])]
    plan = specificity.prepare(rows, config(tmp_path))["tested"]["l"]
    assert sorted(map(len, plan["tested_with"].values())) == [0, 2]
    unranked = {"fold": 0, "chosen": {"top": [], "in_sample": [1]}, "best": {"top": {}, "in_sample": {"1": 3.0}}}
    empty = {
        "drawn": {"random": {}, "near": {}, "any": {}, "class": {}},
        "possible": {"random": {}, "near": {}},
        "exact": {},
    }
    rows = [one.model_copy(update={"measures": {**one.measures, **unranked, **empty}}) for one in rows]
    found = {(one.name, one.gated): one for one in specificity.summarise(rows, config(tmp_path), floor=1e-6).effects}
    assert found["in_sample_1", False].estimate == pytest.approx(0.75)
    assert found["top_1", False].estimate is None
    assert "0 pair(s) in 0 scenario(s) can be used and have this number" in str(found["top_1", False].warning)
    assert found["gain_random_1", False].test is None


def row(name: str, *, gap: float, single: list[float]) -> Instance:
    """Base at 0, effects that add up; positions 1 to 4 downstream of the field at 0, query at 5."""
    made = instance(name, base=0.0, target=gap, field=0.0, notes=gap)
    ids = (7,) * 6
    kept = Tokens(base=ids, target=(8, *ids[1:]), changed=(0,), query=(5,), base_action=1, target_action=2)
    spans = {"field": ((0, 1),), "text": ((1, 3),), "delimiter": ((3, 5),), "answer_prefix": ((5, 6),)}
    order = sorted(range(4), key=lambda i: -single[i])
    measures = {
        "notes": sum(single),
        "single": single,
        "fold": 0,
        "chosen": {"top": [1, 2, 3, 4], "in_sample": [i + 1 for i in order]},
        "best": {
            "top": {"1": single[0], "2": single[0] + single[1]},
            "in_sample": {"1": single[order[0]], "2": single[order[0]] + single[order[1]]},
        },
        "drawn": {
            "random": {"1": single[1:], "2": [sum(single[2:])]},
            "near": {"1": [single[1]], "2": [sum(single[2:])]},
            "any": {},
            "class": {},
        },
        "possible": {"random": {"1": 3.0, "2": 1.0}, "near": {"1": 1.0, "2": 1.0}},
        "exact": {"1": True, "2": False},
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
    mixed = [rows[0], rows[1].model_copy(update={"measures": {**rows[1].measures, "drawn": {"random": {"1": [6.0]}}}})]
    assert figure.pooled(mixed, "random", 1) == pytest.approx([0.7, 0.6, 0.65])


def scoped(rows, tmp_path) -> effects.Scope:
    return effects.Scope(instances=rows, layout="l", gated=True, config=config(tmp_path), floor=0.0)


def test_the_permutation_p_by_hand(tmp_path):
    """Chosen 3, 3, 1, 1 = 8; permutations sum to 5, 8 and 9: of four, the chosen and two are 8 or more. A further pair
    has none and is left out."""
    rows = [row(name, gap=4.0, single=[3.0, 1.0, 0.0, 0.5]) for name in "abcde"]
    chosen = dict(zip("abcde", (3.0, 3.0, 1.0, 1.0, 9.0), strict=True))
    moved = {"a": [0.0, 4.0, 4.0], "b": [1.0, 0.0, 3.0], "c": [2.0, 4.0, 2.0], "d": [2.0, 0.0, 0.0], "e": []}
    scope = scoped(rows, tmp_path)
    assert scope.permutation_p(lambda o: chosen[o.id], lambda o: moved[o.id]) == pytest.approx(3 / 4)
    assert scope.permutation_p(lambda o: None, lambda o: moved[o.id]) is None
    with pytest.raises(ValueError, match="inhomogeneous"):
        scope.permutation_p(lambda o: 0.0, lambda o: [0.0] * (1 + (o.id == "a")))


@pytest.mark.parametrize("alike", [True, False])
def test_a_ranking_that_says_nothing_is_rejected_as_often_as_it_should_be(alike, tmp_path):
    """25 slots whose effects all scenarios share, one of them large; eight at random are "best" in either fold, the
    same in both or not. A twentieth of p-values may be .05 or less."""
    rng, rows = np.random.default_rng(0), [row(f"s{i}", gap=4.0, single=[3.0, 1.0, 0.0, 0.5]) for i in range(6)]
    slots = [f"{role}[{i}]" for role in ("text", "delimiter") for i in range(13)][:25]
    scope, settings, p = scoped(rows, tmp_path), config(tmp_path, draws=40), {"any": [], "class": []}
    for seed in range(150):
        effect = dict(zip(slots, rng.normal(size=25) + 5.0 * (rng.permutation(25) == 0), strict=True))
        first = rng.permutation(slots)[:8].tolist()
        best = {0: first, 1: first if alike else rng.permutation(slots)[:8].tolist()}
        own = settings.model_copy(update={"seed": seed})
        for kind, found in p.items():
            sets = {fold: specificity._permuted(slots, chosen, own, kind=kind) for fold, chosen in best.items()}
            assert all(len({*one}) == 8 for some in sets.values() for one in some)

            def whole(o, best=best, effect=effect) -> float:
                return sum(effect[slot] for slot in best[int(o.id[1:]) % 2])

            def permuted(o, sets=sets, effect=effect) -> list[float]:
                return [sum(effect[slot] for slot in one) for one in sets[int(o.id[1:]) % 2]]

            value = scope.permutation_p(whole, permuted)
            assert value is not None
            found.append(value)
    for found in p.values():
        assert 0.4 < np.mean(found) < 0.6
        assert np.mean(np.array(found) <= 0.05) < 0.1


def test_no_included_pair_says_so(tmp_path):
    none = row("a", gap=4.0, single=[1.0, 0.0, 0.0, 0.0]).model_copy(update={"status": "incompetent", "reason": "gate"})
    summary = specificity.summarise([none], config(tmp_path), floor=1e-6)
    assert {one.estimate for one in summary.effects} == {None}
    assert "no recovery" in summary.headline

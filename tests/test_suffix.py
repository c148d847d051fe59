"""The suffix study: planted notes are found and nothing else, a plain transformers loop, its summary by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from figures import suffix as figure
from kvnotes import config as configs
from kvnotes import effects, models, runner, select
from kvnotes.planted import LAYERS, PLANTED, READ_LAYER
from kvnotes.records import Instance, Tokens
from kvnotes.sweep import Trial
from probes import suffix
from tests import tiny
from tests.test_locality import instance
from tests.test_prompts import tokens

FIRST, SECOND = "delimiter.first_note[0]", "delimiter.second_note[0]"


def config(tmp_path, **flags) -> Any:
    usual = {"results": tmp_path, "resamples": 500, "draws": 10, "maps": 6}
    return configs.make(suffix.Settings, study="suffix", flags={**usual, **flags})


@pytest.fixture(scope="module", params=sorted(name for name in PLANTED if not name.endswith("gqa") or "both" in name))
def planted(request, tmp_path_factory):
    """Every kind on its record; one with grouped KV heads too."""
    path = tmp_path_factory.mktemp("suffix")
    settings = config(path, model=request.param, task="planted", layout="words_field_first", n=12)
    return PLANTED[request.param], runner.execute(suffix, settings)


def test_planted_notes_are_found_and_nothing_else(planted):
    spec, record = planted
    found = {one.name: one.estimate for one in record.summary.effects if one.gated}
    for name, value in spec.expected["suffix"].items():
        assert found[name] == pytest.approx(value, abs=1e-3), name
    table = record.summary.tables["by slot"]
    place = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    wanted = {FIRST: "first_note", SECOND: "second_note"}
    for slot, row in place.items():
        alone = spec.expected["suffix"].get(wanted.get(slot, ""), 0.0)
        rest = spec.expected["suffix"].get(f"without_{wanted.get(slot, '')}", spec.alpha)
        assert row["alone R"] == pytest.approx(alone, abs=1e-3), slot
        assert row["lost R"] == pytest.approx(spec.alpha - rest, abs=1e-3), slot  # which shows the notes of `and`
    kind = {"notes": (1.0, 1.0), "mixed": (0.7, 0.7), "direct": (0.0, 0.0), "both": (0.5, 1.0), "and": (0.0, 1.0)}
    best, two = kind[spec.kind]
    for name in ("both_1", "top_1", "in_sample_1"):
        assert found[name] == pytest.approx(best, abs=1e-3), name
    assert found["both_2"] == pytest.approx(two, abs=1e-3)  # leave-one-out finds the two notes of `and`
    if spec.kind != "and":
        assert [found["top_2"], found["in_sample_2"]] == pytest.approx([two, two], abs=1e-3)
        assert [found["random_2"], found["random_8"]] == pytest.approx([0.0, 0.0], abs=1e-3)
    else:
        assert found["top_2"] == pytest.approx(0.0, abs=1e-3)
    assert all(check.passed for check in record.checks)


def test_planted_layers_and_classes(planted):
    spec, record = planted
    found = {one.name: one.estimate for one in record.summary.effects if one.gated}
    layers = record.summary.tables["by layer"]
    for layer, row in enumerate(layers.rows):
        cells = dict(zip(layers.columns, row, strict=True))
        assert cells["layer"] == str(layer)
        assert cells["alone R"] == pytest.approx(spec.alpha * (layer == READ_LAYER), abs=1e-3)
        assert cells["up to R"] == pytest.approx(spec.alpha * (layer >= READ_LAYER), abs=1e-3)
        assert cells["from R"] == pytest.approx(spec.alpha * (layer <= READ_LAYER), abs=1e-3)
    classes = {row[0]: row[1] for row in record.summary.tables["by class"].rows}
    assert classes == pytest.approx({name: spec.alpha * (name == "delimiter") for name in classes}, abs=1e-3)
    if spec.alpha:
        assert found["depth_centroid"] == pytest.approx(READ_LAYER / (LAYERS - 1), abs=1e-3)
    mapped = [one for one in record.instances if one.measures["map"]]
    assert len(mapped) == len({one.scenario for one in mapped}) == 6
    for one in mapped:
        alone = [effects.moved(one, margin) for margin in one.measures["single"]]
        if spec.kind == "and":
            continue
        for layer, margins in enumerate(one.measures["map"]):
            here = [value * (layer == READ_LAYER) for value in alone]
            assert [effects.moved(one, margin) for margin in margins] == pytest.approx(here, abs=1e-3)


def test_the_figure_draws_a_planted_record(planted):
    _, record = planted
    drawn = figure.draw({"m/suffix/l": record})
    assert list(drawn) == ["m/suffix/l"]
    drawn["m/suffix/l"].canvas.draw()


@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_margins_equal_a_plain_transformers_loop(kind, tmp_path):
    """Cells copied by hand between two Hugging Face caches: single positions, single layers, ranks."""
    folder = tiny.checkpoint(kind, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    pair, settings = tokens(), config(tmp_path)
    trial = Trial.run(models.load(str(folder), device="cpu", dtype="float32"), pair, engine="rows", budget=10**7)
    first = suffix.survey(trial, settings)
    notes, layers = pair.downstream, range(trial.model.shape["layers"])
    everywhere = [by_hand(plain, pair, [p], layers) for p in notes]
    assert first["single"] == pytest.approx(everywhere, abs=1e-4)
    assert first["without"] == pytest.approx([by_hand(plain, pair, set(notes) - {p}, layers) for p in notes], abs=1e-4)
    assert first["layer"] == pytest.approx([by_hand(plain, pair, notes, [i]) for i in layers], abs=1e-4)
    assert first["up_to"] == pytest.approx([by_hand(plain, pair, notes, range(i + 1)) for i in layers], abs=1e-4)
    order = sorted(notes, key=lambda p: -everywhere[notes.index(p)])
    plan = {
        name: {pair.pair.layout: {"folds": {pair.pair.scenario: 0}, "tested_with": {"0": ranking, "1": []}}}
        for name, ranking in {"top": [select.slot_names(pair)[p] for p in reversed(notes)], "both": []}.items()
    }
    plan |= {"in_sample": {pair.pair.id: order}, "maps": [pair.pair.id]}
    second = suffix.measure(trial, settings, plan)
    assert second["counts"][-1] == len(notes)
    expected = {"top": notes[::-1], "in_sample": order}
    assert set(second["ranked"]) == set(expected)  # nothing was ranked for "both"
    for name, ranking in expected.items():
        hand = [by_hand(plain, pair, ranking[:k], layers) for k in second["counts"]]
        assert second["ranked"][name] == pytest.approx(hand, abs=1e-4)
    cells = [[by_hand(plain, pair, [p], [i]) for p in notes] for i in layers]
    assert torch.tensor(second["map"]).numpy() == pytest.approx(torch.tensor(cells).numpy(), abs=1e-4)
    assert max(suffix.identities(trial, {**first, **second}).values()) < 1e-5
    assert len(set(everywhere)) > 1


def by_hand(plain, pair, positions, layers) -> float:
    """The base arm's margin with the target's cells at some positions and layers."""
    with torch.no_grad():
        caches = []
        for ids in (pair.base_ids, pair.target_ids):
            caches.append(transformers.DynamicCache())
            plain(torch.tensor([ids[:-1]]), past_key_values=caches[-1])
        for i in layers:
            mine, theirs = caches[0].layers[i], caches[1].layers[i]
            for p in positions:
                mine.keys[:, :, p], mine.values[:, :, p] = theirs.keys[:, :, p], theirs.values[:, :, p]
        mask = torch.ones(1, len(pair.base_ids), dtype=torch.long)
        logits = plain(torch.tensor([pair.base_ids[-1:]]), past_key_values=caches[0], attention_mask=mask).logits
    return float(logits[0, -1, pair.target_action] - logits[0, -1, pair.base_action])


class Recorder:
    """A trial that answers every edit with the number of its positions, and remembers them."""

    def __init__(self, pair):
        self.pair, self.asked = pair, {}
        self.model = SimpleNamespace(shape={"layers": 2})
        self.unedited = SimpleNamespace(base=0.0, target=1.0, gap=1.0)

    def margins(self, edits):
        assert len({one.name for one in edits}) == len(edits)
        self.asked |= {one.name: one for one in edits}
        return {one.name: float(len(one.positions)) for one in edits}


def test_random_positions_are_never_among_the_chosen(tmp_path):
    pair = tokens()
    trial: Any = Recorder(pair)
    names = [f"{slot.span}[{slot.index}]" for slot in pair.slots]
    ranking = [names[p] for p in reversed(pair.downstream)]
    here = {pair.pair.layout: {"folds": {pair.pair.scenario: 1}, "tested_with": {"0": [], "1": ranking}}}
    plan = {"top": here, "both": here, "in_sample": {pair.pair.id: list(pair.downstream)}, "maps": []}
    made = suffix.measure(trial, config(tmp_path), plan)
    assert made["ranked"]["top"] == [float(k) for k in made["counts"]]
    assert trial.asked["top:1"].positions == pair.downstream[-1:]  # the other fold's choice
    for k, margins, possible in zip(made["counts"], made["random"], made["possible"], strict=True):
        chosen = set(pair.downstream[-k:])
        drawn = [trial.asked[f"random:{k}:{i}"].positions for i in range(len(margins))]
        assert all(set(one) <= set(pair.downstream) - chosen and len(set(one)) == k for one in drawn)
        assert len(set(drawn)) == min(10, possible)
    assert made["possible"][-1] == 0
    assert {(one.into, one.donor) for one in trial.asked.values()} == {("base", "target")}


def row(name: str, *, gap: float, single: list[float], **more: Any) -> Instance:
    """Base at 0; positions 1 to 4 downstream of the field at 0, query at 5."""
    made = instance(name, base=0.0, target=gap, field=0.0, notes=gap)
    ids = (7,) * 6
    kept = Tokens(base=ids, target=(8, *ids[1:]), changed=(0,), query=(5,), base_action=1, target_action=2)
    spans = {"field": ((0, 1),), "text": ((1, 3),), "delimiter": ((3, 5),), "answer_prefix": ((5, 6),)}
    whole = sum(single)
    measures = {
        "notes": whole,
        "single": single,
        "without": [whole - value for value in single],
        "layer": [0.0, whole],
        "up_to": [0.0, whole],
        "from": [whole, whole],
        "group": {"text": sum(single[:2]), "delimiter": sum(single[2:])},
        "rest": {"text": sum(single[2:]), "delimiter": sum(single[:2])},
        "counts": [1, 2, 3, 4],
        "ranked": {name: [single[0], sum(single[:2]), sum(single[:3]), whole] for name in suffix.RANKINGS},
        "random": [[single[1], single[2]], [single[3]], [], []],
        "possible": [3.0, 1.0, 0.0, 0.0],
        "map": [],
        **more,
    }
    return made.model_copy(update={"tokens": kept, "spans": spans, "measures": measures})


def test_summary_by_hand(tmp_path, monkeypatch):
    """Gaps 4 and 6. Singles 3, 1, 0, 0 and 2, 0, 3, 1: the first slot 5/10, the delimiters 4/10."""
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 2)
    rows = [row("a", gap=4.0, single=[3.0, 1.0, 0.0, 0.0]), row("b", gap=6.0, single=[2.0, 0.0, 3.0, 1.0])]
    summary = suffix.summarise(rows, config(tmp_path), floor=1e-6)
    found = {one.name: one for one in summary.effects if one.gated}
    assert found["notes_only"].estimate == pytest.approx(1.0)
    assert found["top_1"].estimate == pytest.approx(0.5)
    assert found["top_2"].estimate == pytest.approx(0.6)
    assert found["random_1"].estimate == pytest.approx((0.5 + 1.5) / 10)  # means of the draws
    assert found["random_1"].control
    assert found["random_2"].estimate == pytest.approx(1 / 10)
    assert "random_4" not in found
    assert found["carry_80"].estimate == pytest.approx((2 / 4 + 3 / 4) / 2)  # 4 of 4 at 2, 5 of 6 at 3
    assert found["single_50"].estimate == pytest.approx((1 / 4 + 1 / 4) / 2)  # 3 of 4, 3 of 6
    assert found["single_80"].estimate == pytest.approx((2 / 4 + 2 / 4) / 2)  # 4 of 4, 5 of 6
    assert found["depth_centroid"].estimate == pytest.approx(1.0)
    slots = {cells[0]: cells[1:] for cells in summary.tables["by slot"].rows}
    assert next(iter(slots)) == "text[0]"
    assert {name: cells[0] for name, cells in slots.items()} == pytest.approx(
        {"text[0]": 0.5, "text[1]": 0.1, "delimiter[0]": 0.3, "delimiter[1]": 0.1}
    )
    assert [slots[name][5] for name in slots] == [slots[name][0] for name in slots]  # additive: lost is alone
    classes = {cells[0]: cells[1] for cells in summary.tables["by class"].rows}
    assert classes == pytest.approx({"text": 0.6, "delimiter": 0.4})
    assert summary.tables["random draws"].rows[0] == [1, 2, 2, 3.0, 3.0]
    assert "all notes 1.00, best position 0.50" in summary.headline


def test_plans_choose_across_scenarios_and_map_one_pair_of_each(tmp_path):
    rows = [row(f"s{i}", gap=4.0, single=[float(i), 4.0 - i, 0.0, 0.0]) for i in range(4)]
    twin = rows[1].model_copy(update={"id": "twin", "scenario": "s0"})
    plan = suffix.prepare([*rows, twin], config(tmp_path, maps=2))
    assert plan["maps"] == ["s0", "s1"]
    assert plan["in_sample"]["s3"] == [1, 2, 3, 4]
    assert plan["in_sample"]["s0"] == [2, 1, 3, 4]
    assert {tuple(ranked) for ranked in plan["top"]["l"]["tested_with"].values()} <= {
        ("text[0]", "text[1]", "delimiter[0]", "delimiter[1]"),
        ("text[1]", "text[0]", "delimiter[0]", "delimiter[1]"),
    }


def test_no_included_pair_says_so(tmp_path):
    none = row("a", gap=4.0, single=[1.0, 0.0, 0.0, 0.0]).model_copy(update={"status": "incompetent", "reason": "gate"})
    summary = suffix.summarise([none], config(tmp_path), floor=1e-6)
    assert {one.estimate for one in summary.effects} == {None}
    assert "no recovery" in summary.headline
    assert summary.tables["by slot"].rows == []


def test_numbers_of_positions_end_with_all():
    assert suffix._counts(1) == [1]
    assert suffix._counts(8) == [1, 2, 3, 4, 6, 8]
    assert suffix._counts(21) == [1, 2, 3, 4, 6, 8, 12, 16, 21]

"""The knockout study: planted answers, an independent loop in plain transformers, traps, and its summary by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import transformers
from sample_record import measured

from figures import knockout as figure
from kvnotes import config as configs
from kvnotes import effects, models, runner, select
from kvnotes.donors import fill
from kvnotes.records import Instance
from kvnotes.sweep import Trial
from probes import knockout
from probes.knockout import Settings
from tests import tiny
from tests.test_prompts import tokens

# What each mechanism must give; resample is a transplant from the base, mean and block leave nothing in a note's place.
PLANTED = {
    "planted-notes": {
        "resample_1": 1.0,
        "resample_all": 1.0,
        "mean_1": 0.5,
        "block_8": 0.5,
        "own_1": 1.0,
        "area_resample": 1.0,
        "area_block": 0.5,
        "random_resample_8": 0.0,
        "random_mean_8": 0.0,
        "random_block_8": 0.0,
        "from_4_all": 1.0,  # the read layer's cells carry the note
        "from_5_all": 0.0,
        "up_to_4_8": 0.0,
        "up_to_5_8": 1.0,
    },
    "planted-direct-gqa": {"resample_1": 0.0, "resample_all": 0.0, "random_resample_8": 0.0, "area_resample": 0.0},
    "planted-mixed": {"resample_1": 0.7, "resample_all": 0.7, "mean_1": 0.35, "block_1": 0.35},
    "planted-both-gqa": {
        "resample_1": 0.5,
        "resample_2": 1.0,
        "mean_2": 0.5,
        "block_1": 0.25,
        "own_2": 1.0,
        "random_block_2": 0.0,
        "area_resample": (0.75 + 3) / 4,  # doses 1, 2, 4, 8, 16: the first of four equal steps is half way
    },
    "planted-and": {"resample_1": 0.0, "own_1": 0.0, "resample_all": 1.0},
}


def config(tmp_path, **flags) -> Settings:
    quick = {"draws": 4, "draws_elsewhere": 2, "mean_over": 1, "resamples": 500}
    return configs.make(Settings, study="knockout", flags={"results": tmp_path, **quick, **flags})


@pytest.fixture(scope="module", params=sorted(PLANTED))
def record(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    flags = {"model": request.param, "task": "planted", "layout": "words_field_first", "n": 12}
    return runner.execute(knockout, config(folder, **flags))


def test_planted_models_give_the_planted_drops(record):
    measured = {effect.name: effect.estimate for effect in record.summary.effects if effect.gated}
    for name, value in PLANTED[record.model.name].items():
        assert measured[name] == pytest.approx(value, abs=1e-3), name
    assert all(check.passed for check in record.checks)
    assert "resample equals its mirror image" in {check.name for check in record.checks}


def test_slots_are_ranked_on_the_other_fold(record):
    """Each pair's removed positions are those that the other fold's instances rank first, from the record alone."""
    (plan,) = record.plan.values()
    for one in record.instances:
        others = [x for x in record.instances if plan["folds"][x.scenario] != plan["folds"][one.scenario]]
        chosen = select.rank(others, knockout._single_drops)
        slots = select.instance_slots(one)
        expected = select.in_order(chosen, select.downstream(one), lambda p, names=slots: names[p])
        assert one.measures["removed"] == expected[:32]
        assert not {x.scenario for x in others} & {one.scenario}


def test_the_figure_draws_what_was_measured(record):
    (drawn,) = figure.draw({"planted/knockout/words_field_first": record}).values()
    assert len(drawn.axes) == 3


def setting(kind: str, tmp_path, **flags):
    """A tiny checkpoint's trial, its plan made by hand, and what the study measures."""
    model = models.load(str(tiny.checkpoint(kind, tmp_path)), device="cpu", dtype="float32")
    pair = tokens()
    trial = Trial.run(model, pair, engine="rows", budget=10**7)
    names = select.slot_names(pair)
    ranking = [names[p] for p in sorted(pair.downstream, reverse=True)]
    chosen = {"ranking": ranking, "lent": []}
    own = {pair.pair.id: list(pair.downstream)}
    plan = {"l": {"folds": {"s": 0}, "tested_with": {"0": chosen, "1": {"ranking": [], "lent": []}}, "own": own}}
    settings = config(tmp_path, **flags)
    return trial, settings, plan, knockout.measure(trial, settings, plan, donors=[fill(model, pair)])


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_margins_equal_a_plain_transformers_loop(kind, tmp_path):
    """The base's cells, the class means and the mask, by hand on Hugging Face caches before any bridge."""
    tiny.checkpoint(kind, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    pair = tokens()
    loop = ByHand(plain, pair)
    trial, _, _, measured = setting(kind, tmp_path)
    last = sorted(pair.downstream, reverse=True)
    for k in (1, 2, 4, 8):
        positions = last[:k]
        assert measured["resample"][str(k)] == pytest.approx(loop.resample(positions), abs=1e-4)
        assert measured["mean"][str(k)] == pytest.approx(loop.mean(positions), abs=1e-4)
        assert measured["block"][str(k)] == pytest.approx(loop.block(positions), abs=1e-4)
        assert measured["own"][str(k)] == pytest.approx(loop.resample(sorted(pair.downstream)[:k]), abs=1e-4)
    single = knockout.survey(trial, config(tmp_path))["single"]
    assert single == pytest.approx([loop.resample([p]) for p in pair.downstream], abs=1e-4)
    assert max(knockout.identities(trial, measured).values()) < 1e-5
    assert len({round(measured[way]["4"], 3) for way in knockout.WAYS}) == 3  # the ways do differ


class ByHand:
    """Cells of the target's Hugging Face cache replaced or hidden, and the last token run over it."""

    def __init__(self, plain, pair) -> None:
        self.plain, self.pair = plain, pair
        self.arms = {arm: self.prefill(ids) for arm, ids in (("base", pair.base_ids), ("target", pair.target_ids))}

    def prefill(self, ids):
        cache = transformers.DynamicCache()
        with torch.no_grad():
            self.plain(torch.tensor([ids[:-1]]), past_key_values=cache)
        return cache

    def resample(self, positions) -> float:
        return self.decode(self.edited(positions, lambda i, p: self.cells("base", i, p)))

    def mean(self, positions) -> float:
        return self.decode(self.edited(positions, self.class_mean))

    def block(self, positions) -> float:
        return self.decode(self.edited([], self.class_mean), hidden=positions)

    def cells(self, arm, layer, p):
        return self.arms[arm].layers[layer].keys[:, :, p], self.arms[arm].layers[layer].values[:, :, p]

    def class_mean(self, layer, p):
        """The mean over the class's downstream positions in both arms, each turned from its position to p."""
        role = self.pair.slots[p].span.split(".")[0]
        found = [
            (self.turned(k, layer, p - q), v)
            for q in self.pair.downstream
            if self.pair.slots[q].span.split(".")[0] == role
            for k, v in (self.cells(arm, layer, q) for arm in self.arms)
        ]
        return tuple(torch.stack(part).mean(dim=0) for part in zip(*found, strict=True))

    def turned(self, k, layer, by):
        size = k.shape[-1]
        angle = by * 10_000.0 ** (-torch.arange(0, size, 2).double() / size)
        cos, sin = angle.cos().repeat(2), angle.sin().repeat(2)
        half = torch.cat([-k[..., size // 2 :], k[..., : size // 2]], dim=-1)
        return (k.double() * cos + half.double() * sin).float()

    def edited(self, positions, cell):
        cache = self.prefill(self.pair.target_ids)
        for i, layer in enumerate(cache.layers):
            for p in positions:
                layer.keys[:, :, p], layer.values[:, :, p] = cell(i, p)
        return cache

    def decode(self, cache, hidden=()) -> float:
        ids = self.pair.target_ids
        masks = {}
        for kind, window in (("full_attention", None), ("sliding_attention", tiny.WINDOW)):
            seen = [p not in hidden and (window is None or len(ids) - 1 - p < window) for p in range(len(ids))]
            masks[kind] = torch.where(torch.tensor(seen), 0.0, torch.finfo(torch.float32).min)[None, None, None]
        by_kind = len(set(getattr(self.plain.config, "layer_types", None) or ["full_attention"])) > 1
        position = torch.tensor([[len(ids) - 1]])
        with torch.no_grad():
            logits = self.plain(
                torch.tensor([ids[-1:]]),
                past_key_values=cache,
                attention_mask=masks if by_kind else masks["full_attention"],
                position_ids=position,
            ).logits[0, -1]
        return float(logits[self.pair.target_action] - logits[self.pair.base_action])


def test_random_sets_hold_none_of_the_top_and_every_way_has_the_same(tmp_path):
    trial, settings, plan, measured = setting("qwen2", tmp_path, draws=50, draws_elsewhere=3)
    made = knockout.Removals(trial, settings, plan, mean=None)
    for k in made.doses:
        sets = made.draws(k).sets
        assert all(len(one) == k and not set(one) & set(made.top(k)) for one in sets)
    assert made.draws(8).sets == ()  # 10 downstream positions: outside the top 8 there are 2
    assert measured["possible"] == {"1": 9, "2": math.comb(8, 2), "4": math.comb(6, 4), "8": 0}
    assert {k: len(found) for k, found in measured["random"]["resample"].items()} == {"1": 3, "2": 3, "4": 3}
    names = {one.name: one for _, one in made.drawn()}
    assert names["random resample 2 1"].positions == names["random block 2 1"].positions


def test_lent_pairs_are_of_the_other_fold(record):
    pairs = {one.id: one for one in record.instances}
    (plan,) = record.plan.values()
    for side, chosen in plan["tested_with"].items():
        assert len(chosen["lent"]) == 1
        assert {str(plan["folds"][pairs[name].scenario]) for name in chosen["lent"]} == {str(1 - int(side))}


def test_a_model_of_unknown_rotation_has_no_class_means(tmp_path):
    trial, settings, plan, _ = setting("qwen2", tmp_path)
    unknown = replace(trial, model=replace(trial.model, rotation=None))
    measured = knockout.measure(unknown, settings, plan, donors=[])
    assert "mean" not in measured
    assert "mean" not in measured["random"]
    assert set(measured["block"]) == set(measured["resample"])


@pytest.mark.parametrize(
    ("layers", "depths", "expected"), [(6, 6, [1, 2, 3, 4, 5]), (24, 4, [6, 12, 18]), (3, 9, [1, 2])]
)
def test_depth_curves_are_cut_within_the_model(layers, depths, expected):
    assert knockout.edges(layers, depths) == expected


# --- the summary --------------------------------------------------------------------------------------------


def instance(name: str, *, base: float, target: float, passed: bool = True, **margins) -> Instance:
    return measured(name, base=base, target=target, measures=margins, passed=passed)


def measures(*, one: float, two: float, every: float, drawn: tuple[float, float]) -> dict:
    removed = {"1": one, "2": two, "all": every}
    return {
        "resample": removed,
        "block": removed,
        "own": {"1": one, "2": two},
        "random": {"resample": {"1": [drawn[0], drawn[1]], "2": [drawn[1]]}, "block": {"1": [drawn[0]]}},
        "from": {"8": {"1": every}, "all": {"1": every}},
        "up_to": {"8": {"1": one}, "all": {"1": one}},
        "possible": {"1": 9, "2": 36},
    }


def rows() -> list[Instance]:
    return [
        instance("a", base=-2, target=2, **measures(one=1, two=-1, every=-2, drawn=(2, 1))),
        instance("b", base=-3, target=3, **measures(one=3, two=1, every=-1, drawn=(3, 4))),
        instance("c", base=1, target=2, passed=False, **measures(one=2, two=2, every=2, drawn=(2, 2))),
    ]


def test_summary_by_hand(tmp_path, monkeypatch):
    """Gaps 4 and 6. Drops at 1: 1 and 0 of 10; at 2: 3 and 2; random at 1: means 0.5 and -0.5; at 2: 1 and -1."""
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 2)
    summary = knockout.summarise(rows(), config(tmp_path), floor=1e-6)
    found = {(e.name, e.gated): e for e in summary.effects}
    assert found["resample_1", True].estimate == pytest.approx(0.1)
    assert found["resample_2", True].estimate == pytest.approx(0.5)
    assert found["resample_all", True].estimate == pytest.approx((4 + 4) / 10)
    assert found["random_resample_1", True].estimate == pytest.approx(0.0)
    assert found["random_resample_1", True].control
    assert found["area_resample", True].estimate == pytest.approx(((1 + 3) / 2 + (0 + 2) / 2) / 10)
    assert found["random_area_resample", True].estimate == pytest.approx(((0.5 + 1) / 2 - (0.5 + 1) / 2) / 10)
    assert found["area_over_random_resample", True].estimate == pytest.approx(0.3)
    assert found["resample_2_over_random", True].estimate == pytest.approx((3 - 1 + 2 + 1) / 10)
    assert "BH over 3" in found["resample_2_over_random", True].test.name
    assert found["flips_resample_all", True].estimate == 1.0
    assert found["from_1_8", True].estimate == pytest.approx(0.8)
    assert found["resample_1", False].estimate == pytest.approx(1 / 11)
    assert ("mean_1", True) not in found
    flipped = summary.tables["pairs by the smallest dose that flips the decision back, l"]
    assert flipped.rows[0] == ["base's cells", 0, 1, 0, 0, 0, 0, 1, 0]


def test_too_few_scenarios_report_no_drop(tmp_path):
    summary = knockout.summarise(rows(), config(tmp_path), floor=1e-6)
    assert {effect.estimate for effect in summary.effects} == {None}
    assert "no drop (2 pair(s) in 2 scenario(s) pass the gate" in summary.headline


def test_without_a_ranking_all_notes_are_left(tmp_path):
    """No pair of the other fold passes the gate: nothing is called "top"."""
    folder = tiny.checkpoint("qwen2", tmp_path)
    trial = Trial.run(models.load(str(folder), device="cpu", dtype="float32"), tokens(), engine="rows", budget=10**7)
    pair, settings = trial.pair.pair, config(tmp_path)
    here = {"folds": {pair.scenario: 0}, "tested_with": {"0": {"ranking": [], "lent": []}, "1": {}}}
    plan = {pair.layout: {**here, "own": {pair.id: [*trial.pair.downstream]}}}
    found = knockout.measure(trial, settings, plan, donors=[])
    assert [*found["resample"]] == ["all"]
    assert {*found["from"]} == {"all"}
    assert "random" not in found
    assert found["removed"] == []
    assert knockout.identities(trial, found)["resample equals its mirror image"] < 1e-5

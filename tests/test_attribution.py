"""The attribution study: planted notes are attention's, parts from a second derivation, twins by hand, the summary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from circuits import attribution
from figures import attribution as figure
from figures import forest, style
from kvnotes import conclusion, effects, models, runner, writers
from kvnotes import config as configs
from kvnotes.conclusion import KINDS, Learned, Site
from kvnotes.interventions import State
from kvnotes.planted import PLANTED
from kvnotes.sweep import Trial
from tests import tiny
from tests.sample_record import measured
from tests.test_direction import ALL, BEST, first
from tests.test_prompts import tokens


def config(tmp_path, **flags) -> Any:
    usual = {"results": tmp_path, "resamples": 500, "draws": 3, "every": 1}
    return configs.make(attribution.Settings, study="attribution", flags={**usual, **flags})


@pytest.fixture(scope="module", params=["planted-notes-gqa", "planted-direct", "planted-both", "planted-and"])
def planted(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("attribution")
    settings = config(path, model=request.param, task="planted", layout="words_field_first", n=12)
    return PLANTED[request.param], runner.execute(attribution, settings)


def test_attention_writes_the_planted_notes(planted):
    spec, record = planted
    found = {one.name: one for one in record.summary.effects if one.gated}
    best, every = BEST[spec.kind], ALL[spec.kind]
    for kind in KINDS:
        end = figure.suffix(kind)
        for name in ("full", "attention_patched", "attention_live"):
            assert found[f"{name}{end}"].estimate == pytest.approx(best, abs=1e-3), name
        for name in ("mlp_patched", "mlp_live", "random_mlp"):
            assert found[f"{name}{end}"].estimate == pytest.approx(0, abs=1e-3), name
        for axis, _ in attribution.AXES.values():
            shares = [found[f"{writer}{axis}{end}"].estimate for writer in attribution.WRITERS]
            assert shares == ([None, None] if not best else [pytest.approx(1, abs=1e-3), pytest.approx(0, abs=1e-3)])
        norms = [found[f"attention_{name}{end}"].estimate for name in ("norm", "layer_norm")]
        assert norms == ([None, None] if not best else [pytest.approx(1, abs=1e-3)] * 2)
    assert found["attention_all"].estimate == (pytest.approx(1, abs=1e-3) if every else None)
    for name in ("full", "attention"):
        assert found[f"{name}_all_patched"].estimate == pytest.approx(every, abs=1e-3)
    assert found["mlp_all_patched"].estimate == pytest.approx(0, abs=1e-3)
    assert {check.name: check.value for check in record.checks}["parts sum to the difference"] < 1e-5


def test_planted_depth(planted):
    """All of the note is there from the write layer on."""
    spec, record = planted
    if not BEST[spec.kind]:
        return
    table = record.summary.tables[f"by layer along the shared direction, {KINDS['aggregator']}"]
    for row in table.rows:
        cells = dict(zip(table.columns, row, strict=True))
        written = float(cells["layer"] >= spec.write_layer)
        assert cells["attention so far"] == pytest.approx(written, abs=1e-3)
        assert cells["attention"] == pytest.approx(float(cells["layer"] == spec.write_layer), abs=1e-3)
        assert cells["MLPs so far"] == pytest.approx(0, abs=1e-3)
        assert cells["pairs"] == 12


def test_the_figure_draws_a_planted_record(planted):
    _, record = planted
    with style.styled():
        drawn = figure.draw({"m/attribution/l": record})
        assert list(drawn) == ["m/attribution/l"]
        drawn["m/attribution/l"].canvas.draw()


def test_a_record_without_included_pairs_says_so(planted, tmp_path):
    _, record = planted
    none = [
        one.model_copy(update={"status": "incompetent", "reason": "gate: wrong"}) if one.status == "included" else one
        for one in record.instances
    ]
    summary = attribution.summarise(none, config(tmp_path), floor=1e-6)
    assert {one.estimate for one in summary.effects if one.gated} == {None}
    assert "no recovery" in summary.headline
    with style.styled():
        bare = record.model_copy(update={"instances": tuple(none), "summary": summary})
        assert list(figure.draw({"m": bare})) == ["m"]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma3"])
def test_parts_equal_a_second_derivation(kind, tmp_path):
    """From the residual before, between and after: what stands at the input of the norm that precedes the MLP is the
    residual with attention's part. No module's output is looked at, only norms' inputs and the layers' own ends."""
    folder = tiny.checkpoint(kind, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    pair, place = tokens(), 9
    trial = Trial.run(models.load(str(folder), device="cpu", dtype="float32"), pair, engine="rows", budget=10**7)
    arms: list[State] = ["base", "target"]
    for arm in arms:
        hand = second_derivation(plain, pair.ids(arm), place)
        for writer in writers.POINTS:
            assert writers.parts(trial, arm, place, writer) == pytest.approx(hand[writer], abs=1e-4)
    found = writers.differences(trial, place)
    ends = {arm: trial.capture(arm, "resid_post", [place])[:, 0].double().numpy() for arm in ("base", "target")}
    change = ends["target"] - ends["base"]
    assert writers.error(found, change, size=float(np.linalg.norm(ends["base"][-1]))) < 1e-4
    assert min(np.abs(found[writer]).max() for writer in found) > 1e-2
    swapped = {"attention": found["attention"], "mlp": found["mlp"][::-1]}
    assert writers.error(swapped, change, size=1.0) > 1e-2  # which is not blind


def second_derivation(plain, ids, place: int) -> dict[str, np.ndarray]:
    before, between, after = [], [], []
    handles = []
    for block in plain.model.layers:
        norm = getattr(block, "pre_feedforward_layernorm", None) or block.post_attention_layernorm
        handles.append(block.register_forward_pre_hook(lambda _, args: before.append(args[0][0, place])))
        handles.append(norm.register_forward_pre_hook(lambda _, args: between.append(args[0][0, place])))
        handles.append(block.register_forward_hook(lambda _, __, out: after.append(first(out)[0, place])))
    with torch.no_grad():
        plain(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    low, middle, high = (torch.stack(some).double().numpy() for some in (before, between, after))
    return {"attention": middle - low, "mlp": high - middle}


def test_norms_after_a_block_are_known_by_either_name():
    """Attention writes (2, 0), the MLP (0, 3), and the norms double and treble them. Of a layer with GLM-4's names the
    post_attention_layernorm stands before the MLP; where there is no norm after the MLP neither output passes one."""

    def norm(factor: float) -> Any:
        return lambda output: factor * output

    gemma = {"post_attention_layernorm": norm(2), "post_feedforward_layernorm": norm(3)}
    glm = {
        "post_attention_layernorm": norm(100),
        "post_self_attn_layernorm": norm(2),
        "post_mlp_layernorm": norm(3),
    }
    llama = {"post_attention_layernorm": norm(100)}
    written = {"attn_out": [2.0, 0.0], "mlp_out": [0.0, 3.0]}
    for norms, attention, mlp in ((gemma, 4, 9), (glm, 4, 9), (llama, 2, 3)):
        layers = [SimpleNamespace(**norms)]
        twin = SimpleNamespace(base_model=SimpleNamespace(layers=layers))
        trial: Any = SimpleNamespace(
            model=SimpleNamespace(name="m", twin=twin), capture=lambda _, point, __: torch.tensor([[written[point]]])
        )
        assert writers.parts(trial, "base", 0, "attention").tolist() == [[attention, 0]]
        assert writers.parts(trial, "base", 0, "mlp").tolist() == [[0, mlp]]


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_twins_equal_a_plain_transformers_loop(kind, tmp_path):
    """Frozen: a writer's summed part added at the causal layer. Live: its modules' outputs replaced in hooks."""
    folder = tiny.checkpoint(kind, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    pair, place, layer = tokens(), 9, 2
    trial = Trial.run(models.load(str(folder), device="cpu", dtype="float32"), pair, engine="rows", budget=10**7)
    sides = [trial.capture(arm, "resid_post", [place])[:, 0].double().numpy() for arm in ("base", "target")]
    learned = Learned(
        arms=np.zeros((2, 2, *sides[0].shape), dtype=np.float32), signs={}, weights=np.ones(2), scenarios=("a", "b")
    )
    site = Site(
        kind="aggregator",
        position=place,
        slot="s",
        layer=layer,
        difference=sides[1] - sides[0],
        size=1.0,
        signs={},
        shared="conclusion",
        learned=learned,
    )
    plan = {"ranking": {pair.pair.layout: {"folds": {pair.pair.scenario: 0}}}}
    parts = writers.differences(trial, place)
    asked = attribution._asked(trial, config(tmp_path), plan, site, parts)
    found = trial.margins(list(asked.values()))
    named = {name: found[one.name] for name, one in asked.items()}
    hand = {
        "base": second_derivation(plain, pair.base_ids, place),
        "target": second_derivation(plain, pair.target_ids, place),
    }
    for writer, module in {"attention": "self_attn", "mlp": "mlp"}.items():
        change = (hand["target"][writer] - hand["base"][writer])[: layer + 1].sum(axis=0)
        frozen = patched(plain, pair, {(layer, ""): lambda own, change=change: own + torch.tensor(change)}, place)
        assert named[writer] == pytest.approx(frozen, abs=1e-4)
        theirs = outputs(plain, pair.target_ids, module, place)
        live = {(i, module): lambda _, value=theirs[i]: value for i in range(layer + 1)}
        assert named[f"{writer}_live"] == pytest.approx(patched(plain, pair, live, place), abs=1e-4)
    change = site.difference[layer]
    whole = patched(plain, pair, {(layer, ""): lambda own: own + torch.tensor(change)}, place)
    assert named["full"] == pytest.approx(whole, abs=1e-4)
    assert len({round(value, 3) for value in named.values()}) > 5


def module_of(plain, layer: int, name: str):
    block = plain.model.layers[layer]
    return getattr(block, name) if name else block


def outputs(plain, ids, name: str, place: int) -> list[torch.Tensor]:
    """A module's outputs at a place, by layer; of the last layer too."""
    seen = []
    handles = [
        module_of(plain, i, name).register_forward_hook(lambda _, __, out: seen.append(first(out)[0, place]))
        for i in range(len(plain.model.layers))
    ]
    with torch.no_grad():
        plain(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return seen


def patched(plain, pair, changes, place: int) -> float:
    """Base's margin with some modules' outputs changed at a place."""

    def hook(change):
        def run(_, __, out):
            made = first(out).clone()
            made[0, place] = change(made[0, place]).to(made)
            return (made, *out[1:]) if isinstance(out, tuple) else made

        return run

    handles = [module_of(plain, *at).register_forward_hook(hook(change)) for at, change in changes.items()]
    with torch.no_grad():
        logits = plain(torch.tensor([pair.base_ids])).logits[0, -1]
    for handle in handles:
        handle.remove()
    return float(logits[pair.target_action] - logits[pair.base_action])


def row(name: str, *, gap: float, attention: list[float], mlp: list[float], written: bool = True) -> Any:
    """Base at 0, layers 0 and 1, the second one causal; the same along every axis."""
    both = {"attention": attention, "mlp": mlp}
    about = {
        "slot": "s",
        "layer": 1,
        "written": written,
        "difference": [1.0, 1.0],
        **dict.fromkeys(attribution.AXES, both),
        "norm": {"attention": [1.0, 3.0], "mlp": [1.0, 1.0]},
        "norm so far": {"attention": [1.0, 1.0], "mlp": [1.0, 1.0]},
    }
    margins = {
        "full": gap,
        "attention": gap / 2,
        "mlp": gap / 4,
        "attention_live": gap,
        "mlp_live": 0.0,
        "random_attention": [0.0, 1.0],
        "random_mlp": [0.0, 0.0],
    }
    joint = {"attention share": 3.0, "mlp share": 1.0, "full": gap, "attention": gap, "mlp": 0.0}
    measures = {"sites": {"aggregator": about}, "margins": {"aggregator": margins}, "joint": joint}
    return measured(name, base=0.0, target=gap, measures=measures)


def test_summary_by_hand(tmp_path, monkeypatch):
    """Attention 1 + 2 and 2 + 2, MLPs 0 + 1 and -1 + 1: 7 of 8. The third pair has nothing written at its site."""
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 2)
    rows = [
        row("a", gap=4.0, attention=[1.0, 2.0], mlp=[0.0, 1.0]),
        row("b", gap=6.0, attention=[2.0, 2.0], mlp=[-1.0, 1.0]),
        row("c", gap=10.0, attention=[9.0, 9.0], mlp=[9.0, 9.0], written=False),
    ]
    summary = attribution.summarise(rows, config(tmp_path), floor=1e-6)
    found = {one.name: one for one in summary.effects if one.gated}
    wanted = {
        "attention": 7 / 8,
        "mlp": 1 / 8,
        "attention_own": 7 / 8,
        "attention_norm": 0.5,
        "attention_layer_norm": 0.75,
        "full": 1.0,
        "attention_patched": 0.5,
        "mlp_patched": 0.25,
        "attention_live": 1.0,
        "mlp_live": 0.0,
        "random_attention": 1.5 / 20,
        "random_mlp": 0.0,
        "attention_all": 0.75,
        "mlp_all": 0.25,
        "attention_all_patched": 1.0,
    }
    for name, value in wanted.items():
        assert found[name].estimate == pytest.approx(value), name
    assert found["attention"].n == 2
    assert found["full_any_slot"].estimate is None
    assert {name for name, one in found.items() if one.control} == {
        f"random_{writer}{figure.suffix(kind)}" for writer in attribution.WRITERS for kind in KINDS
    }
    table = summary.tables["by layer along permit less restrict, best aggregator"]
    assert table.rows == [
        [0, 3 / 8, -1 / 8, 3 / 8, -1 / 8, 0.5, 2],
        [1, 4 / 8, 2 / 8, 7 / 8, 1 / 8, 0.5, 2],
    ]


def test_a_share_of_noise_is_not_reported(tmp_path, monkeypatch):
    """Components of 3 and -1: 1 +- 2. The patches are reported all the same; the figure says the same in words."""
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 2)
    rows = [
        row("a", gap=4.0, attention=[1.0, 1.0], mlp=[0.0, 1.0]),
        row("b", gap=6.0, attention=[-1.0, 1.0], mlp=[-1.0, 0.0]),
    ]
    summary = attribution.summarise(rows, config(tmp_path), floor=1e-6)
    found = {one.name: one for one in summary.effects if one.gated}
    assert (found["attention"].estimate, found["mlp"].estimate) == (None, None)
    assert "cannot be told from 0" in str(found["attention"].warning)
    assert forest.numbers(found["attention"]) == "not reported"
    assert summary.headline == (
        "l: full patch 1.00, attention's share along permit less restrict not reported, along the shared direction "
        "not reported, by norm 0.50, attention's part patched 0.50, MLPs' part patched 0.25 (n=2)"
    )
    rest = attribution.summarise([row("a", gap=4.0, attention=[1.0, 1.0], mlp=[0.0, 1.0])], config(tmp_path), floor=0.0)
    assert rest.headline.startswith("l: no recovery (1 pair(s) in 1 scenario(s)")


def test_a_pair_without_a_site_measures_nothing_there(tmp_path, monkeypatch):
    monkeypatch.setattr(conclusion, "at", lambda *_: None)
    monkeypatch.setattr(attribution, "_joint", lambda *_: ({}, {}))
    trial: Any = SimpleNamespace(margins=lambda asked: {one.name: 0.0 for one in asked})
    made = attribution.measure(trial, config(tmp_path), {}, gathered=None)  # type: ignore[arg-type]
    assert made == {"sites": {}, "margins": {}, "joint": {}}
    assert attribution.identities(trial, made) == {}

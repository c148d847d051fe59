"""The direction study: planted notes lie along it, a plain transformers loop, controls, its summary by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from circuits import direction
from figures import direction as figure
from figures import style
from kvnotes import conclusion, effects, models, runner
from kvnotes import config as configs
from kvnotes.conclusion import KINDS, Learned, Site
from kvnotes.interventions import ActivationPatch, Added, mixed
from kvnotes.planted import ALPHA, PLANTED
from kvnotes.planted_words import SCENARIOS, vocabulary
from kvnotes.sweep import Trial
from tests import tiny
from tests.sample_record import measured
from tests.test_prompts import tokens

BEST = {"notes": 1.0, "direct": 0.0, "mixed": ALPHA, "both": 0.5, "and": 0.0}  # one note alone
ALL = {"notes": 1.0, "direct": 0.0, "mixed": ALPHA, "both": 1.0, "and": 1.0}


def config(tmp_path, **flags) -> Any:
    usual = {"results": tmp_path, "resamples": 500, "draws": 20, "fewer": 3, "fewest": 2, "every": 1, "steps": 1}
    return configs.make(direction.Settings, study="direction", flags={**usual, **flags})


@pytest.fixture(scope="module", params=["planted-notes", "planted-direct", "planted-both-gqa", "planted-and"])
def planted(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("direction")
    settings = config(path, model=request.param, task="planted", layout="words_field_first", n=12)
    return PLANTED[request.param], runner.execute(direction, settings)


def test_planted_notes_lie_along_the_direction(planted):
    spec, record = planted
    found = {one.name: one for one in record.summary.effects if one.gated}
    best = BEST[spec.kind]
    for kind in KINDS:
        end = figure.suffix(kind)
        names = (*direction.ONCE, *direction.DRAWN, *direction.LOST)
        value = {name: found[f"{name}{end}"].estimate for name in names}
        assert found[f"along{end}"].estimate == pytest.approx(best, abs=1e-3)
        assert found[f"full{end}"].estimate == pytest.approx(best, abs=1e-3)
        assert found[f"in_sample{end}"].estimate == pytest.approx(best, abs=1e-3)
        assert found[f"along_shared{end}"].estimate == pytest.approx(best, abs=1e-3)
        assert [value["rest"], value["orthogonal"], value["random_own"]] == pytest.approx([0, 0, 0], abs=1e-3)
        assert value["logistic"] == pytest.approx(best, abs=1e-3)
        assert value["projected"] == value["centred"] == pytest.approx(best / 2, abs=1e-3)  # no conclusion: half way
        if best:
            assert found[f"share{end}"].estimate == found[f"part{end}"].estimate == pytest.approx(1, abs=1e-3)
            assert found[f"along{end}"].test.p == pytest.approx(1 / 4)  # of three draws, corrected over four equal p
        else:
            assert found[f"share{end}"].estimate is None
    assert found["along_all"].estimate == found["full_all"].estimate == pytest.approx(ALL[spec.kind], abs=1e-3)
    assert {name for name, one in found.items() if one.control} == {
        f"{name}{figure.suffix(kind)}"
        for kind in KINDS
        for name in ("orthogonal", "random_own", "random_norm", "random_shared", "random_lost")
    }
    assert all(check.passed for check in record.checks)


def test_pairs_go_from_base_to_target(planted):
    """Planted words say what they are: the permitting action, and which rule stands first."""
    _, record = planted
    permitting = {scenario.name: scenario.permit for scenario in SCENARIOS}
    ids = {word: at for at, word in enumerate(vocabulary())}
    for one in record.instances:
        permits = one.tokens.target_action == ids[permitting[one.scenario]]
        first = one.spans["action.target"] < one.spans["action.base"]
        wanted = {"conclusion": 1 if permits else -1, "rule": 1 if first else -1, "row": 1}
        assert one.measures["signs"] == wanted


def test_planted_layers(planted):
    """The note is there from the write layer to the read layer, and the folds' directions agree."""
    spec, record = planted
    if not BEST[spec.kind]:
        return
    where = KINDS["aggregator"]
    for family in ("along", "full"):
        for row in record.summary.tables[f"{family} by layer, {where}"].rows:
            value = BEST[spec.kind] * (spec.write_layer <= int(row[0]) < spec.read_layer)
            assert row[1] == pytest.approx(value, abs=1e-3)
    cosines = record.summary.tables[f"cosine between the folds' directions, {where}"]
    at = [i for i, column in enumerate(cosines.columns) if column.startswith("conclusion")]
    assert [cosines.rows[spec.write_layer][i] for i in at] == pytest.approx([1.0] * len(at), abs=1e-3)
    chosen = record.summary.tables[f"chosen, {where}"].rows
    assert {row[1] for row in chosen} == {spec.write_layer}
    assert all("_note" in str(row[0]) for row in chosen)
    assert {row[2] for row in chosen} == {"conclusion"}
    assert sum(int(str(row[3])) for row in chosen) == 12


def test_the_figure_draws_a_planted_record(planted):
    _, record = planted
    with style.styled():
        drawn = figure.draw({"m/direction/l": record})
        assert list(drawn) == ["m/direction/l"]
        drawn["m/direction/l"].canvas.draw()


def test_a_record_without_included_pairs_says_so(planted, tmp_path):
    _, record = planted
    none = [
        one.model_copy(update={"status": "incompetent", "reason": "gate: wrong"}) if one.status == "included" else one
        for one in record.instances
    ]
    summary = direction.summarise(none, config(tmp_path), floor=1e-6)
    assert {one.estimate for one in summary.effects if one.gated} == {None}
    assert "no recovery" in summary.headline
    bare = record.model_copy(update={"instances": tuple(none), "summary": summary})
    with style.styled():
        assert list(figure.draw({"m": bare})) == ["m"]


@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_margins_equal_a_plain_transformers_loop(kind, tmp_path):
    """Residuals changed by hand in a forward hook of the Hugging Face model, all else recomputed."""
    folder = tiny.checkpoint(kind, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    pair, settings = tokens(), config(tmp_path)
    trial = Trial.run(models.load(str(folder), device="cpu", dtype="float32"), pair, engine="rows", budget=10**7)
    states = {"base": resids(plain, pair.base_ids), "target": resids(plain, pair.target_ids)}
    rng, place, layer = np.random.default_rng(0), 8, 2
    layers, width = states["base"].shape[0], states["base"].shape[2]
    learned = Learned(
        arms=rng.standard_normal((6, 2, layers, width)).astype(np.float32),
        signs={"conclusion": np.array([1, -1, 1, 1, -1, -1]), "row": np.ones(6, dtype=int)},
        weights=np.full(6, 1 / 6),
        scenarios=tuple("aabbcc"),
    )
    base, target = (states[arm][:, place].astype(np.float64) for arm in ("base", "target"))
    site = Site(
        kind="aggregator",
        position=place,
        slot="s",
        layer=layer,
        difference=target - base,
        size=1.0,
        signs={"conclusion": -1, "row": 1},
        shared="row",
        learned=learned,
    )
    plan = {"ranking": {pair.pair.layout: {"folds": {pair.pair.scenario: 0}}}}
    asked = direction._asked(trial, settings, plan, site)
    margins = trial.margins(list(asked.values()))
    found = conclusion.folded({name: margins[one.name] for name, one in asked.items()})
    changes = learned.arms[:, 1] - learned.arms[:, 0]
    units, rows = (
        mean / np.linalg.norm(mean, axis=1, keepdims=True)
        for mean in (np.einsum("p,pld->ld", learned.signs["conclusion"], changes), changes.mean(axis=0))
    )
    move = target - base
    along, along_row = ((axis * move).sum(axis=1, keepdims=True) * axis for axis in (units, rows))
    rest = move[layer] - along[layer]
    size = np.linalg.norm(along[layer])

    def by_hand(change: np.ndarray, at: int = layer, into: str = "base") -> float:
        return margin(plain, pair, pair.ids(into), at, place, change)

    hand = {
        "full": [by_hand(move[i], i) for i in range(layers)],
        "along": [by_hand(along[i], i) for i in range(layers)],
        "along_row": [by_hand(along_row[i], i) for i in range(layers)],
        "along_shared": by_hand(along_row[layer]),
        "projected_shared": by_hand(-(target[layer] @ rows[layer]) * rows[layer], into="target"),
        "rest": by_hand(rest),
        "orthogonal": by_hand(size * rest / np.linalg.norm(rest)),
        "projected": by_hand(-(target[layer] @ units[layer]) * units[layer], into="target"),
        "centred": by_hand(((learned.middle - target)[layer] @ units[layer]) * units[layer], into="target"),
        "summed": by_hand(move[layer]),
    }
    drawn = conclusion.random_directions(
        trial, plan, settings, kind="aggregator", n=20, outside=np.stack([units[layer], rows[layer]])
    )
    hand |= {
        "random_norm": [by_hand(size * one) for one in drawn],
        "random_shared": [by_hand(np.linalg.norm(along_row[layer]) * one) for one in drawn[:2]],
        "random_own": [by_hand((one @ move[layer]) * one) for one in drawn[:3]],
        "random_lost": [by_hand(-(target[layer] @ one) * one, into="target") for one in drawn[:2]],
    }
    for name, value in hand.items():
        assert found[name] == pytest.approx(value, abs=1e-4), name
    assert len({round(x, 3) for x in found["random_norm"]}) > 5
    about = {"layer": layer, "layers": {"full": list(range(layers))}}
    made = {"margins": {"aggregator": found}, "sites": {"aggregator": about}}
    assert direction.identities(trial, made) == {"component and rest are the full patch": pytest.approx(0, abs=1e-5)}


def resids(plain, ids) -> np.ndarray:
    """The residual after each layer, [layer, position, d_model]."""
    seen = []
    handles = [block.register_forward_hook(lambda _, __, out: seen.append(first(out))) for block in plain.model.layers]
    with torch.no_grad():
        plain(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return torch.stack(seen)[:, 0].numpy()


def first(out):
    return out[0] if isinstance(out, tuple) else out


def margin(plain, pair, ids, layer: int, place: int, change: np.ndarray) -> float:
    """The margin with a vector added to the residual after a layer at a position."""

    def hook(_, __, out):
        changed = first(out).clone()
        changed[0, place] += torch.tensor(change, dtype=changed.dtype)
        return (changed, *out[1:]) if isinstance(out, tuple) else changed

    handle = plain.model.layers[layer].register_forward_hook(hook)
    with torch.no_grad():
        logits = plain(torch.tensor([ids])).logits[0, -1]
    handle.remove()
    return float(logits[pair.target_action] - logits[pair.base_action])


def test_nothing_injected_is_an_exact_no_op(tmp_path):
    """A difference of 0 leaves the activation bit for bit, and base's margin to rounding."""
    folder = tiny.checkpoint("qwen2", tmp_path)
    pair, settings = tokens(), config(tmp_path)
    trial = Trial.run(models.load(str(folder), device="cpu", dtype="float32"), pair, engine="rows", budget=10**7)
    layers, width = trial.model.shape["layers"], trial.model.shape["d_model"]
    ones = np.random.default_rng(0).standard_normal((4, 2, layers, width)).astype(np.float32)
    signs = {code: np.array([1, -1, 1, 1]) for code in ("conclusion", "row")}
    learned = Learned(arms=ones, signs=signs, weights=np.full(4, 0.25), scenarios=("a", "a", "b", "b"))
    nothing = np.zeros((layers, width))
    site = Site(
        kind="aggregator",
        position=8,
        slot="s",
        layer=1,
        difference=nothing,
        size=1.0,
        signs=dict.fromkeys(signs, 1),
        shared="row",
        learned=learned,
    )
    plan = {"ranking": {pair.pair.layout: {"folds": {pair.pair.scenario: 0}}}}
    asked = direction._asked(trial, settings, plan, site)
    added = [
        one
        for name, one in asked.items()
        if name.partition(":")[0] in {"rest", "orthogonal", "random_norm", "random_shared"}
    ]
    assert list(trial.margins(added).values()) == pytest.approx([trial.unedited.base] * len(added), abs=1e-5)
    activation = torch.randn(width)
    for one in added:
        assert isinstance(one, ActivationPatch)
        assert isinstance(one.donor, torch.Tensor)
        assert torch.equal(mixed(Added(), activation, one.donor), activation)


def row(name: str, *, gap: float, along: list[float], full: list[float], norm: list[float], own: list[float]) -> Any:
    """Base at 0, one site, layers 0 and 3, the causal one."""
    some = {"along": along, "full": full, "random_norm": norm, "random_shared": [0.0, 0.2], "random_own": own}
    once = dict.fromkeys((*direction.ONCE, "summed"), 0.0) | {"along_shared": full[1] / 2, "along_row": [0.0]}
    lost = {"projected": gap - 1.0, "centred": gap, "projected_shared": 0.0, "centred_shared": gap / 2}
    about = {
        "slot": "s",
        "layer": 3,
        "layers": {"along": [0, 3], "full": [0, 3], "along_row": [3]},
        "shared": "row",
        "difference": 2.0,
        "components": {"conclusion": 1.0, "row": -1.6},
        "cosines": {"conclusion": [0.1, 0.9], "row": [0.5, 0.6]},
    }
    measures = {
        "sites": {"aggregator": about},
        "margins": {"aggregator": some | once | lost | {"random_lost": [gap, gap - 0.5]}},
        "joint": {"along": gap / 2, "full": gap, "along_shared": 0.0},
    }
    return measured(name, base=0.0, target=gap, measures=measures)


def test_summary_by_hand(tmp_path, monkeypatch):
    """Gaps 4 and 6; along 1 and 2 at the causal layer, 2 and 2 at the other; full 2 and 3."""
    monkeypatch.setattr(effects, "LEAST_SCENARIOS", 2)
    rows = [
        row("a", gap=4.0, along=[2.0, 1.0], full=[0.0, 2.0], norm=[0.0, 1.0, 2.0], own=[0.0, 1.0, 1.0]),
        row("b", gap=6.0, along=[2.0, 2.0], full=[0.0, 3.0], norm=[0.5, 3.0, 0.0], own=[0.5, 3.0, 1.8]),
    ]
    found = {one.name: one for one in direction.summarise(rows, config(tmp_path), floor=1e-6).effects if one.gated}
    wanted = {
        "along": 3 / 10,
        "full": 5 / 10,
        "share": 3 / 5,
        "along_shared": 2.5 / 10,
        "share_shared": 0.5,
        "along_row": 0.0,
        "random_shared": 0.2 / 10,
        "projected_shared": 1.0,
        "centred_shared": 0.5,
        "part_shared": 0.64,
        "in_sample": 4 / 10,
        "random_norm": (1 + 3.5 / 3) / 10,
        "random_own": 7.3 / 3 / 10,
        "projected": 2 / 10,
        "centred": 0.0,
        "random_lost": 0.5 / 10,
        "part": 0.25,
        "along_all": 0.5,
        "full_all": 1.0,
    }
    for name, value in wanted.items():
        assert found[name].estimate == pytest.approx(value), name
    p = {name: found[name].test.p for name in direction.TESTED}
    # the draws' own components move 0.5, 4 and 2.8: one as much as along's 3, two as much as shared's 2.5
    assert p == {"along": pytest.approx(min(2 * 2 / 4, 3 / 4)), "along_shared": pytest.approx(3 / 4)}
    assert found["along_any_slot"].estimate is None
    assert found["along_rule"].estimate is None  # no pair has that code
    tables = direction.summarise(rows, config(tmp_path), floor=1e-6).tables
    assert tables["chosen, best aggregator"].rows == [["s", 3, "row", 2]]
    cosines = tables["cosine between the folds' directions, best aggregator"]
    assert cosines.columns == ("layer", "conclusion, s", "row, s")
    assert cosines.rows == [[0, 0.1, 0.5], [1, 0.9, 0.6]]
    assert [cells[:2] for cells in tables["along by layer, best aggregator"].rows] == [["0", 0.4], ["3", 0.3]]


def test_a_pair_without_a_site_measures_nothing_there(tmp_path, monkeypatch):
    monkeypatch.setattr(conclusion, "at", lambda *_: None)
    monkeypatch.setattr(direction, "_joint", lambda *_: {})
    unedited = SimpleNamespace(gap=2.0)
    trial: Any = SimpleNamespace(margins=lambda asked: {one.name: 0.0 for one in asked}, unedited=unedited)
    made = direction.measure(trial, config(tmp_path), {}, gathered=None)  # type: ignore[arg-type]
    assert made == {"sites": {}, "margins": {}, "joint": {}}
    assert direction.identities(trial, made) == {}

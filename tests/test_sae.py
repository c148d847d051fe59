"""The SAE study: planted answers, sae-lens' own encode and decode, hand-worked numbers, and the runner's `equip`."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sample_record import make_record, measured

from circuits import sae as study
from kvnotes import activations, features, models, probing, runner, sae, select, sites
from kvnotes import config as configs
from kvnotes.cache import CacheError
from kvnotes.instance import TokenPair
from kvnotes.planted import WRITE_LAYER
from kvnotes.sweep import Trial
from tests import tiny
from tests.test_dissociation import square

WIDTH, FEATURES = 32, 48
SMALL = {  # a tiny dictionary, on prompts alone
    "tokens": 3000,
    "prompts": 1.0,
    "expansion": 1,
    "active": 8,
    "epochs": 20,
    "batch": 128,
    "permutations": 99,
    "draws": 5,
    "resamples": 500,
}


def config(tmp_path, **flags) -> study.Settings:
    made = configs.make(study.Settings, study="sae", flags={"results": tmp_path, **SMALL, **flags})
    assert isinstance(made, study.Settings)
    return made


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Four files a run, and one test draws its own."""
    monkeypatch.setattr(runner, "_draw", lambda *_: [])


def planted(tmp_path, model, **flags):
    usual = {"task": "planted", "layout": "words_field_first", "n": 24}
    settings = config(tmp_path, model=model, **{**usual, **flags})
    return runner.execute(study, settings)


def found(record):
    return {effect.name: effect for effect in record.summary.effects if effect.gated}


def saved(folder, *, width=WIDTH, k=4, hook: str | None = "blocks.1.hook_resid_post", kind="TopK", **more):
    """A random SAE, saved as sae-lens saves one for use; the training SAE is returned."""
    import sae_lens

    torch.manual_seed(0)
    options = {"k": k} if kind == "TopK" else {}
    settings = getattr(sae_lens, f"{kind}TrainingSAEConfig")(d_in=width, d_sae=FEATURES, **options, **more)
    made = getattr(sae_lens, f"{kind}TrainingSAE")(settings)
    with torch.no_grad():
        for name in ("b_dec", "b_enc"):
            getattr(made, name).normal_(std=0.1)
        made.W_dec *= torch.rand(FEATURES, 1) + 0.5  # rows of many lengths
    made.cfg.metadata.hook_name = hook
    made.save_inference_model(folder)
    return made.eval()


def shaped(width=WIDTH, layers=4):
    return SimpleNamespace(name="m", device=torch.device("cpu"), shape={"d_model": width, "layers": layers})


# --- a dictionary and its clamps --------------------------------------------------------------------------


def test_encode_and_decode_are_sae_lens_own(tmp_path):
    from sae_lens import SAE

    trained, x = saved(tmp_path), torch.randn(7, WIDTH)
    ours, theirs = sae.load(tmp_path, shaped()), SAE.load_from_disk(tmp_path)
    assert ours.layer == 1
    torch.testing.assert_close(ours.encode(x), theirs.encode(x), rtol=0, atol=0)
    torch.testing.assert_close(ours.rebuilt(x), theirs(x), rtol=0, atol=0)
    torch.testing.assert_close(ours.rebuilt(x), trained(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.encode(x)[3], ours.encode(x[3]))
    codes = ours.encode(x)
    assert (codes != 0).sum(dim=1).max() <= 4
    torch.testing.assert_close(codes @ ours.decoder + theirs.b_dec, theirs.decode(codes), rtol=1e-4, atol=1e-5)


def test_a_clamp_moves_by_the_decoder_row_times_the_change(tmp_path):
    saved(tmp_path)
    dictionary, x = sae.load(tmp_path, shaped()), torch.randn(WIDTH)
    codes = dictionary.encode(x)
    live, silent = int(codes.argmax()), int((codes == 0).nonzero()[0])
    moved = sae.Clamp(dictionary=dictionary, chosen=(live,), values=(2.5,))(x, None)
    torch.testing.assert_close(moved - x, (2.5 - codes[live]) * dictionary.decoder[live], rtol=1e-5, atol=1e-6)
    both = sae.Clamp(dictionary=dictionary, chosen=(live, silent), values=(float(codes[live]), 1.0))(x, None)
    torch.testing.assert_close(both - x, dictionary.decoder[silent], rtol=1e-5, atol=1e-6)
    gone = sae.ablated(dictionary, [live])(x, None)
    torch.testing.assert_close(gone - x, -codes[live] * dictionary.decoder[live], rtol=1e-5, atol=1e-6)
    assert torch.equal(sae.Clamp(dictionary=dictionary, chosen=(), values=())(x, None), x)
    assert torch.equal(sae.ablated(dictionary, [silent])(x, None), x)
    with pytest.raises(CacheError, match="values of its own"):
        sae.ablated(dictionary, [live])(x, x)


def test_clamped_margins_equal_a_plain_transformers_hook(tmp_path):
    """The same features clamped by hand, with sae-lens alone, in a whole forward of the plain model."""
    from sae_lens import SAE

    folder = tiny.checkpoint("qwen2", tmp_path / "model")
    saved(tmp_path / "sae")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    theirs = SAE.load_from_disk(tmp_path / "sae")
    pair, position = square("open"), 9

    def by_hand(ids, chosen, values) -> float:
        def change(_, __, output):
            x = (output[0] if isinstance(output, tuple) else output)[0, position]
            codes = theirs.encode(x.clone())
            new = codes.clone()
            new[chosen] = torch.tensor(values)
            x += theirs.decode(new) - theirs.decode(codes)

        handle = plain.model.layers[1].register_forward_hook(change)
        with torch.no_grad():
            logits = plain(torch.tensor([ids])).logits[0, -1]
        handle.remove()
        return float(logits[pair.target_action] - logits[pair.base_action])

    model = models.load(str(folder), device="cpu", dtype="float32")
    trial = Trial.run(model, pair, engine="rows", budget=10**7)
    dictionary = sae.load(tmp_path / "sae", model)
    live = dictionary.encode(trial.capture("base", "resid_post", [position])[1, 0]).nonzero()[:, 0].tolist()
    chosen, values = [*live[:2], 0, 7], [3.0, 0.0, 2.0, 5.0]
    clamp = sae.Clamp(dictionary=dictionary, chosen=tuple(chosen), values=tuple(values))
    asked = [
        study._patch("clamp", 1, position, mix=clamp),
        study._patch("ablate", 1, position, mix=sae.ablated(dictionary, live), into="target"),
        study._patch("empty", 1, position, mix=sae.Clamp(dictionary=dictionary, chosen=(), values=())),
    ]
    margins = trial.margins(asked)
    assert margins["clamp"] == pytest.approx(by_hand(pair.base_ids, chosen, values), abs=1e-4)
    assert margins["ablate"] == pytest.approx(by_hand(pair.target_ids, live, [0.0] * len(live)), abs=1e-4)
    assert margins["empty"] == pytest.approx(trial.unedited.base, abs=1e-5)
    assert len({round(value, 3) for value in (*margins.values(), trial.unedited.target)}) == 4


def test_other_architectures_load_and_what_cannot_be_clamped_is_refused(tmp_path):
    saved(tmp_path / "standard", kind="Standard", hook="blocks.2.hook_resid_pre", l1_coefficient=1.0)
    assert sae.load(tmp_path / "standard", shaped()).layer == 1  # what goes into layer 2 is what layer 1 gives
    saved(tmp_path / "norm", normalize_activations="layer_norm")
    with pytest.raises(sae.SAEError, match="not a sum of feature rows"):
        sae.load(tmp_path / "norm", shaped())
    saved(tmp_path / "mlp", hook="blocks.1.hook_mlp_out")
    with pytest.raises(sae.SAEError, match="a residual is wanted"):
        sae.load(tmp_path / "mlp", shaped())
    saved(tmp_path / "unnamed", hook=None)
    assert sae.load(tmp_path / "unnamed", shaped(), layer=2).layer == 2
    with pytest.raises(sae.SAEError, match="name its --layer"):
        sae.load(tmp_path / "unnamed", shaped())
    with pytest.raises(sae.SAEError, match="leave --layer out"):
        sae.load(tmp_path / "standard", shaped(), layer=3)
    with pytest.raises(sae.SAEError, match="of width 32, m of 64"):
        sae.load(tmp_path / "unnamed", shaped(width=64), layer=1)
    with pytest.raises(sae.SAEError, match="m has 1"):
        sae.load(tmp_path / "unnamed", shaped(layers=1), layer=1)


class Payload:
    """Unpickling it leaves a file."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_pickle_is_never_read(tmp_path):
    saved(tmp_path / "sae")
    trap = tmp_path / "ran"
    torch.save({"W_dec": Payload(trap)}, tmp_path / "sae" / sae.WEIGHTS)  # a pickle under the safe name
    with pytest.raises(sae.SAEError, match="not a safetensors file"):
        sae.load(tmp_path / "sae", shaped())
    (tmp_path / "sae" / sae.WEIGHTS).rename(tmp_path / "sae" / "sae_weights.pt")
    with pytest.raises(sae.SAEError, match=r"has no sae_weights\.safetensors"):
        sae.load(tmp_path / "sae", shaped())
    assert not trap.exists()


# --- quality ----------------------------------------------------------------------------------------------


def test_fvu_by_hand():
    x = torch.tensor([[0.0, 0.0], [2.0, 0.0], [4.0, 6.0]])  # mean (2, 2); squared distances 8, 4, 20
    rebuilt = torch.tensor([[0.0, 1.0], [2.0, 0.0], [4.0, 4.0]])  # squared errors 1, 0, 4
    assert sae.fvu(x, rebuilt) == pytest.approx(5 / 32)
    assert sae.fvu(x, x) == 0
    assert sae.fvu(x, x.mean(dim=0).expand(3, 2)) == pytest.approx(1)


def test_massive_norms_by_hand():
    norms = torch.tensor([900.0, 1.0, 2.0, 3.0, 20.0, 21.0, 2.0])  # sorted 1 2 2 3 20 21 900: the median is 3
    assert activations.massive(norms).tolist() == [True] + [False] * 6
    assert activations.massive(norms[1:]).tolist() == [
        False,
        False,
        False,
        False,
        True,
        False,
    ]  # lower median 2: 20 < 21


def test_one_massive_token_hides_a_bad_reconstruction(tmp_path):
    """What the FVU is given without: a token of massive norm that is rebuilt well has nearly all the variance."""
    saved(tmp_path)
    dictionary = sae.load(tmp_path, shaped())
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(60, WIDTH, generator=draw)
    values[::20] *= 1000
    first = torch.zeros(60, dtype=torch.bool)
    first[::20] = True
    fit = replace(dictionary, sae=_Copier(), decoder=torch.eye(WIDTH))
    of = activations.Residuals(values=values, first=first, prompt=first, held_out=torch.ones(60, dtype=torch.bool))
    judged: dict[str, Any] = sae.quality(fit, of)
    assert judged["fvu"] > 0.9
    assert judged["fvu with first and massive tokens"] < 1e-4
    assert judged["massive tokens"] == judged["massive first tokens"] == 3
    assert judged["fvu of prompts"] is None  # all of its tokens are first ones


class _Copier:
    """Rebuilds massive tokens exactly, and nothing else."""

    def encode(self, x):
        return x

    def decode(self, x):
        return torch.where(x.norm(dim=-1, keepdim=True) > 1000, x, torch.zeros_like(x))


def test_training_learns_a_sparse_code_and_keeps_every_token(tmp_path):
    draw = torch.Generator().manual_seed(0)
    basis = torch.nn.functional.normalize(torch.randn(16, 8, generator=draw), dim=1)
    codes = torch.rand(2000, 16, generator=draw) * (torch.rand(2000, 16, generator=draw) < 0.1)
    x = codes @ basis + 3.0
    recipe = sae.Recipe(
        expansion=4, active=3, tokens=0, prompts=0, context=8, epochs=30, batch=64, rate=3e-3, seed=0, task="planted"
    )
    state = torch.random.get_rng_state()
    made = sae.train(x, torch.arange(2000), recipe, device="cpu").eval()
    assert torch.equal(state, torch.random.get_rng_state())  # nobody else's draws move
    with torch.no_grad():
        assert sae.fvu(x, made(x)) < 0.1
    again = sae.train(x, torch.arange(2000), recipe, device="cpu")
    torch.testing.assert_close(again.W_dec, made.W_dec)
    tokens, chosen = torch.arange(20.0)[:, None], torch.arange(0, 20, 2)
    rows = list(zip(range(6), sae.batches(tokens, chosen, batch=5, seed=0), strict=False))
    epochs = [sorted([*rows[i][1][:, 0].tolist(), *rows[i + 1][1][:, 0].tolist()]) for i in (0, 2, 4)]
    assert epochs == [list(range(0, 20, 2))] * 3
    assert not torch.equal(rows[0][1], rows[2][1])


# --- text -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def notes():
    return models.load("planted-notes", device="cpu", dtype="float32")


def test_prompts_are_of_reserved_scenarios_and_a_source_is_held_out(notes):
    made = activations.texts(notes, task="planted", corpus=None, seed=0, tokens=2000, share=1, context=16)
    assert 2000 <= sum(len(text.ids) for text in made) < 2100
    assert all(features.reserved(text.source) for text in made)
    assert len({text.ids for text in made}) == len(made)
    held = {text.source for text in made if text.held_out}
    assert len(held) == 1
    assert {text.source for text in made if not text.held_out}.isdisjoint(held)
    assert activations.fingerprint(made) != activations.fingerprint(made[1:])


def test_a_folder_of_text_is_cut_into_pieces(notes, tmp_path):
    (tmp_path / "a.txt").write_text("order = open . " * 40, encoding="utf-8")  # 160 words
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\0open" * 100)
    (tmp_path / "c.txt").write_text("nothing that is known here " * 40, encoding="utf-8")
    made = list(activations.corpus_texts(notes, tmp_path, seed=0, context=16))
    assert {(text.source, len(text.ids), text.ids[0]) for text in made} == {("a.txt", 16, notes.template.bos)}
    assert len(made) == 10
    with pytest.raises(activations.TextError, match="only 160 of 4,000"):
        activations.texts(notes, task="planted", corpus=tmp_path, seed=0, tokens=4000, share=0, context=16)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(activations.TextError, match="tokenizer knows"):
        list(activations.corpus_texts(notes, tmp_path, seed=0, context=16))


def test_residuals_equal_plain_transformers_hidden_states(tmp_path):
    folder = tiny.checkpoint("qwen2", tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model = models.load(str(folder), device="cpu", dtype="float32")
    texts = [
        activations.Text(ids=(3, 4, 5), kind="prompt", source="s", held_out=True),
        activations.Text(ids=(6, 7), kind="corpus", source="s"),
        activations.Text(ids=(8, 9, 10), kind="corpus", source="s"),
    ]
    made = activations.residuals(model, texts, layer=1)
    with torch.no_grad():
        expected = [plain(torch.tensor([t.ids]), output_hidden_states=True).hidden_states[2][0] for t in texts]
    torch.testing.assert_close(made.values, torch.cat(expected), rtol=1e-4, atol=1e-5)
    assert made.first.tolist() == [True, False, False, True, False, True, False, False]
    assert made.prompt.tolist() == [True] * 3 + [False] * 5
    assert made.held_out.tolist() == [True] * 3 + [False] * 5


# --- choosing and reading features ------------------------------------------------------------------------


def test_aucs_by_hand():
    values = np.array([[1.0, 0.0, 5.0], [2.0, 0.0, 5.0], [3.0, 0.0, 1.0], [4.0, 0.0, 5.0]])
    labels = np.array([[False, False, True, True], [True, True, True, True]])
    assert features.aucs(values, labels).tolist() == [[1.0, 0.5, 0.25], [0.5, 0.5, 0.5]]
    assert features.differences(values, labels)[0].tolist() == [2.0, 0.0, -2.0]


def test_features_are_ranked_by_auc_and_drawn_from_others_as_often_active():
    rows = [{5: 1.0 + i, 9: (4 - i) / 2, 7: 0.5, 2: 1.0} if i < 4 else {5: 0.1, 2: 1.0, 7: 0.5} for i in range(8)]
    marks = [i < 4 for i in range(8)]
    made = features.choose(rows, marks, counts=(1, 2), draws=5, rng=random.Random(0))
    assert made["features"] == [5, 9]  # both tell all; the means of 5 lie further apart
    assert made["aucs"] == [1.0, 1.0]
    assert made["means"]["5"] == [0.1, 2.5]
    assert made["means"]["9"] == [0.0, 1.25]
    assert all(5 not in chosen for chosen in made["random"]["1"]["sets"])
    assert all(not {5, 9} & set(chosen) for chosen in made["random"]["2"]["sets"])
    assert {tuple(chosen) for chosen in made["random"]["1"]["sets"]} == {(2,), (7,)}  # active everywhere, as 5 is
    assert features.choose(rows, [True] * 8, counts=(1,), draws=5, rng=random.Random(0)) == {}
    assert features.choose([{}, {}], [True, False], counts=(1,), draws=5, rng=random.Random(0)) == {}


def test_random_features_come_from_the_nearest_bins():
    draw = random.Random(0)
    bins = [0, 0, 1, 1, 2, 2, 2]
    made = features.as_frequent(bins, [0, 4], n=9, rng=draw)  # of bin 0 there is one other, of bin 2 there are two
    assert made.sets == ((1, 5), (1, 6))
    assert (made.possible, made.enumerated, made.exact) == (2, True, True)
    filled = features.as_frequent(bins, [0, 1, 2], n=9, rng=draw)  # nothing else in bin 0: bins 1 and 2 fill up
    assert {tuple(bins[at] for at in one) for one in filled.sets} == {(1, 2, 2)}
    assert not filled.exact
    assert features.as_frequent(bins, [0, 1, 2, 3], n=9, rng=draw).sets == ()  # three others are too few
    many = features.as_frequent([0] * 60, range(25), n=9, rng=draw)
    assert len(set(many.sets)) == 9
    assert many.possible == math.comb(35, 25)


def test_a_feature_that_reads_the_label_beats_its_null_and_noise_does_not():
    rng = np.random.default_rng(0)
    scenarios = [f"s{i // 4}" for i in range(40)]
    marks = [i % 2 == 0 for i in range(40)]
    of = probing.Prompts.of(marks, scenarios, {f"s{i}": i % 2 for i in range(10)})
    noise = [{f: float(rng.random()) for f in range(60)} for _ in range(40)]
    told = [{**row, 99: 2.0 + mark} for row, mark in zip(noise, marks, strict=True)]
    for rows, reads in ((noise, False), (told, True)):
        found = features.read([rows, rows], of, permutations=199, seed=0)
        assert (found.p("chosen") < 0.05) == reads
        assert (found.p("largest") < 0.05) == reads
        assert (found.p("in_sample") < 0.05) == reads
        assert found.in_sample[0] > 0.65  # by chance alone, with 60 features: what the null is for
    assert found.chosen[0] == found.largest[0] == 1
    assert found.held_out[found.features.index(99)] == 1
    assert found.high[0] == 1


# --- the study --------------------------------------------------------------------------------------------


def by_hand(folder, *, d_model=128):
    """The planted note channel as two features, one a sign: the dictionary that is exactly right."""
    import sae_lens

    from kvnotes.planted_weights import AT

    made = sae_lens.TopKTrainingSAE(sae_lens.TopKTrainingSAEConfig(d_in=d_model, d_sae=8, k=2))
    with torch.no_grad():
        for weight in (made.W_enc, made.W_dec, made.b_dec, made.b_enc):
            weight.zero_()
        made.W_dec[2:, 0] = 1.0  # never active
        for feature, sign in ((0, 1.0), (1, -1.0)):
            made.W_enc[AT["note"], feature] = made.W_dec[feature, AT["note"]] = sign
    made.cfg.metadata.hook_name = f"blocks.{WRITE_LAYER}.hook_resid_post"
    made.save_inference_model(folder)
    return folder


def test_the_planted_note_as_features(tmp_path):
    folder = by_hand(tmp_path / "sae")
    record = planted(tmp_path, "planted-notes", sae=str(folder))
    effects = {name: one.estimate for name, one in found(record).items()}
    expected = {
        "full": 1,
        "features": 1,
        "clamp_1": 0.5,
        "clamp_3": 1,
        "clamp_30": 1,
        "own_3": 1,
        "clamp_in_sample_3": 1,
    }
    expected |= {
        "ablate_3": 0.5,
        "auc": 1,
        "clamp_3_any_slot": 1,
        "full_any_slot": 1,
    }  # without its note it is undecided
    assert {name: effects[name] for name in expected} == pytest.approx(expected, abs=1e-3)
    assert effects["random_1"] == pytest.approx(0.5, abs=1e-3)  # the only other feature is the note's other sign
    assert record.plan["layer"] == record.plan["equipment"]["dictionary"]["layer"] == WRITE_LAYER
    assert record.plan["equipment"]["dictionary"]["sha256"] == sae.sha256(folder)
    judged = record.plan["equipment"]["dictionary"]  # six of eight features never fire, but it was not trained here
    assert (judged["dead"], judged["trained here"]) == (0.75, False)
    assert 0 < judged["usual tokens"] <= judged["tokens"]
    assert "FAILED" not in record.summary.headline
    told = f"75.0% of its features are active in none of {judged['usual tokens']:,} tokens"
    assert told in record.summary.notes[0]
    assert "FAILED" not in record.summary.notes[0]


def test_only_a_training_that_was_done_here_can_have_failed(tmp_path):
    """Three of four features dead: of a dictionary from here, a failure; half of them is none yet."""
    quality = {"trained here": True, "dead": 0.75, "usual tokens": 24000}
    assert features.failed(quality)
    assert not features.failed({**quality, "dead": 0.5})
    assert not features.failed({**quality, "trained here": False})
    assert features.silent(quality) == "75.0% of its features are active in none of 24,000 tokens"
    for here, words in ((True, "its training has FAILED"), (False, features.silent(quality))):
        own = {**dict.fromkeys(study.QUALITY, 0.25), "sha256": "0" * 64, **quality, "trained here": here}
        row = instance("n", "scenario 1", "0", clamp=[0.0])
        row = row.model_copy(update={"measures": {**row.measures, "dictionary": own}})
        summary = study.summarise([row], config(tmp_path), floor=1e-6)
        assert words in summary.notes[0]
        assert summary.headline.startswith("FAILED TRAINING (75% dead features): ") == here


def test_a_trained_dictionary_is_kept_found_again_and_loads_like_any_other(tmp_path, monkeypatch):
    record = planted(tmp_path, "planted-notes", tokens=6000)
    effects = found(record)
    estimates: dict[str, Any] = {name: one.estimate for name, one in effects.items()}
    assert estimates["full"] == pytest.approx(1, abs=1e-3)
    assert estimates["clamp_30"] > 0.9
    assert estimates["auc"] == 1
    assert abs(estimates["random_3"]) < estimates["clamp_3"]
    assert all(check.passed for check in record.checks)
    told: dict[Any, list[Any]] = {
        row[2]: row for row in record.summary.tables["reading a label"].rows if row[:2] == ["aggregator", "conclusion"]
    }
    assert told["best feature of the other fold, held-out"][3] == 1
    assert told["best feature of the other fold, held-out"][6] <= 0.02
    folder = tmp_path / "planted-notes" / "sae" / record.plan["equipment"]["dictionary"]["folder"]
    assert {path.name for path in folder.iterdir()} == {sae.WEIGHTS, sae.SETTINGS, sae.QUALITY, ".gitignore"}

    monkeypatch.setattr(sae, "train", lambda *_, **__: pytest.fail("it is trained already"))
    again = planted(tmp_path, "planted-notes", tokens=6000)
    assert again.content_hash == record.content_hash
    given = planted(tmp_path, "planted-notes", tokens=6000, sae=str(folder))
    assert {name: one.estimate for name, one in found(given).items()} == {n: one.estimate for n, one in effects.items()}
    assert given.plan["equipment"]["dictionary"]["fvu"] == pytest.approx(
        record.plan["equipment"]["dictionary"]["fvu"], rel=1e-3
    )

    monkeypatch.setattr(sae, "train", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no")))
    with pytest.raises(RuntimeError):
        planted(tmp_path, "planted-notes", tokens=3500)
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]  # nothing half made


def test_a_dictionary_of_other_files_or_another_version_is_not_found_again(tmp_path, monkeypatch):
    """One folder each for the model as it is, with another file beside its weights, and with another sae-lens."""
    model = models.load("planted-notes", device="cpu", dtype="float32")
    files, version = models.files_sha256(model.prepared.folder), metadata.version("sae-lens")
    made = []

    def fake(folder, *_, **__):
        folder.mkdir(parents=True)
        (folder / sae.QUALITY).write_text("{}")
        made.append(folder.name)

    monkeypatch.setattr(sae, "_train_into", fake)
    monkeypatch.setattr(sae, "load", lambda *_: None)
    monkeypatch.setattr(sae, "_described", lambda _: {})
    recipe = sae.Recipe(
        **{name: getattr(config(tmp_path, task="planted"), name) for name in sae.Recipe.__annotations__}
    )

    def folder() -> str:
        return sae.obtain(model, recipe, given=None, corpus=None, layer=1, home=tmp_path)[1]["folder"]

    first = folder()
    assert folder() == first
    with monkeypatch.context() as other:
        other.setattr(models, "files_sha256", lambda at: files[::-1] if at == model.prepared.folder else files)
        second = folder()
    with monkeypatch.context() as other:
        other.setattr(metadata, "version", lambda _: f"{version}.1")
        third = folder()
    assert made == [first, second, third]
    assert len(set(made)) == 3
    assert folder() == first


def test_without_a_note_nothing_moves(tmp_path):
    effects = {name: one.estimate for name, one in found(planted(tmp_path, "planted-direct")).items()}
    assert effects["full"] == effects["features"] == pytest.approx(0, abs=1e-3)
    assert all(
        value == pytest.approx(0, abs=1e-3) for name, value in effects.items() if name.startswith("clamp") and value
    )


def test_scenarios_have_one_use_each(tmp_path):
    record = planted(tmp_path, "planted-mixed")
    for one in record.instances:
        used = bool(one.measures.get("margins"))
        assert used != features.reserved(one.scenario)
        assert ("profile" in one.measures) == features.reserved(one.scenario)
    assert set(record.plan["profiled"]) == {one.id for one in record.instances if features.reserved(one.scenario)}
    assert not any(features.reserved(name) for name in record.plan["ranking"]["words_field_first"]["folds"])
    text = record.plan["equipment"]["dictionary"]["text"]["scenarios"]
    assert text
    assert all(features.reserved(name) for name in text)
    for tested, chosen in record.plan["equipment"]["features"]["words_field_first"]["aggregator"]["conclusion"].items():
        folds = record.plan["ranking"]["words_field_first"]["folds"]
        count = sum(str(folds[one.scenario]) != tested for one in record.instances if one.scenario in folds)
        assert chosen["prompts"] == 2 * count
        for k, drawn in chosen["random"].items():
            assert all(not set(chosen["features"][: int(k)]) & set(one) for one in drawn["sets"])


def instance(name, scenario, fold, *, base=-2.0, target=2.0, clamp=(), random_=(), ablate=(), full=2.0, passed=True):
    labels = {"base": True, "target": False}
    code = {arm: {"features": [3], "values": [1.0 + labels[arm]]} for arm in labels}
    margins = {
        "full": {"all": [full]},
        "features": {"all": [full]},
        "empty": {"0": [base]},
        "clamp": {"1": list(clamp)},
    }
    measures = {
        "fold": fold,
        "labels": {"conclusion": labels},
        "dictionary": {**dict.fromkeys(study.QUALITY, 0.25), "trained here": True, "sha256": "0" * 64},
        "sites": {"aggregator": {"0": "delimiter[0]", "1": "delimiter[1]"}},
        "active": {"aggregator": {"0": code, "1": code}},
        "chosen": {"aggregator": {"conclusion": {"features": [3], "aucs": [1.0]}}},
        "margins": {"aggregator": {**margins, "random": {"1": list(random_)}, "ablate": {"1": list(ablate)}}},
    }
    return measured(name, base=base, target=target, passed=passed, measures=measures).model_copy(
        update={"scenario": scenario}
    )


def test_the_summary_is_the_sums_by_hand(tmp_path):
    names = [name for name in (f"scenario {i}" for i in range(40)) if not features.reserved(name)][:6]
    rows = [
        instance(n, n, str(i % 2), clamp=[0.0], random_=[-2.0, -1.0], ablate=[1.0]) for i, n in enumerate(names[:5])
    ]
    rows += [instance("f", names[5], "1", base=-4.0, target=4.0, clamp=[4.0], random_=[-4.0, -4.0], ablate=[4.0])]
    own = next(name for name in (f"other {i}" for i in range(40)) if features.reserved(name))
    chose = measured("r", base=-1.0, target=9.0, measures={"profile": {"aggregator": [1.0]}})
    rows.append(chose.model_copy(update={"scenario": own}))
    summary = study.summarise(rows, config(tmp_path), floor=1e-6)
    effects = {one.name: one for one in summary.effects if one.gated}
    assert effects["clamp_1"].estimate == pytest.approx((5 * 2 + 8) / (5 * 4 + 8))
    assert effects["random_1"].estimate == pytest.approx((5 * 0.5 + 0) / 28)
    assert effects["random_1"].control
    assert effects["ablate_1"].estimate == pytest.approx((5 * 1 + 0) / 28)
    assert effects["auc"].estimate == 1
    assert effects["full"].n == 6  # the reserved pair is not there
    assert effects["clamp_3"].estimate is None
    (row,) = summary.tables["against random features"].rows
    assert row[:4] == ["aggregator", 1, 6, pytest.approx(18 / 28)]
    assert row[4:] == [pytest.approx(2.5 / 28), pytest.approx(5 / 28), 2]  # no p: the draws are from outside the choice
    assert len(summary.tables["reading a label"].rows) == 4
    assert [row[2:5] for row in summary.tables["best features"].rows] == [[0, 1, 3], [1, 1, 3]]
    assert "FAILED" not in summary.headline
    few = study.summarise(rows[1:], config(tmp_path), floor=1e-6)  # five scenarios
    assert [table.rows for table in few.tables.values()] == [[], [], []]


def test_the_layer_is_where_reserved_pairs_move_most(tmp_path):
    own = [name for name in (f"other {i}" for i in range(40)) if features.reserved(name)][:2]
    profiles = ([0.0, 4.0, 1.0], [0.0, 0.0, 1.0])
    rows = [
        measured(name, base=0.0, target=gap, measures={"profile": {"aggregator": p, "any_slot": p[::-1]}}).model_copy(
            update={"scenario": name}
        )
        for name, gap, p in zip(own, (4.0, 1.0), profiles, strict=True)
    ]
    plan = study.prepare(rows, config(tmp_path))
    assert plan["profile"]["aggregator"] == [0.0, 0.8, 0.4]
    assert plan["layers"] == {"aggregator": 1, "any_slot": 1}
    assert plan["layer"] == 1
    assert study.prepare(rows, config(tmp_path, layer=2))["layer"] == 2
    assert study.prepare([], config(tmp_path))["layer"] is None


def test_a_layer_must_be_known_to_train(tmp_path):
    with pytest.raises(sae.SAEError, match="name one with --layer"):
        planted(tmp_path, "planted-notes", n=2, gate_gap=1000)


def test_the_place_is_the_other_folds(notes):
    pair = _pair()
    slots = select.slot_names(pair)
    first, second = pair.downstream[3], pair.downstream[5]
    folds = {"folds": {pair.pair.scenario: 1}, "tested_with": {"0": [slots[first]], "1": [slots[second], slots[first]]}}
    plan = {"ranking": {pair.pair.layout: folds}}
    assert features.fold(plan, pair) == "1"
    assert features.places(plan, pair)["any_slot"] == {"0": first, "1": second}
    assert set(features.places(plan, pair)["aggregator"].values()) <= set(sites.aggregators(pair))


def _pair() -> TokenPair:
    from kvnotes import prompts
    from tasks import planted as task

    model = models.load("planted-notes", device="cpu", dtype="float32")
    pair = task.generate(layout="words_field_first", pair="polarity", n=2, seed=0)[0]
    made = prompts.tokenise(pair, tokenizer=model.tokenizer, template=model.template, query=1)
    assert isinstance(made, TokenPair)
    return made


# --- the runner's hook ------------------------------------------------------------------------------------


def test_equipment_is_made_once_and_its_record_enters_the_plan(tmp_path, monkeypatch):
    """Any study, of one pass or two, may have equipment."""
    from probes import dissociation

    calls = []

    def equip(model, config, pairs, plan):
        calls.append((model.name, sorted(pairs), dict(plan)))
        return SimpleNamespace(record={"made": len(pairs), "of": np.float32(1.5)}, worth=3)

    def measure(trial, config, *, donors, equipment):
        return {**own(trial, config, donors=donors), "worth": equipment.worth}

    own = dissociation.measure
    monkeypatch.setattr(dissociation, "equip", equip, raising=False)
    monkeypatch.setattr(dissociation, "measure", measure)
    flags = {"results": tmp_path, "model": "planted-notes", "task": "planted", "layout": "words_field_first", "n": 4}
    settings = configs.make(configs.RunConfig, study="dissociation", flags=flags)
    record = runner.execute(dissociation, settings)
    assert len(calls) == 1
    assert calls[0][0] == "planted-notes"
    assert len(calls[0][1]) == 4
    assert calls[0][2] == {}
    assert record.plan == {"equipment": {"made": 4, "of": 1.5}}
    assert all(one.measures["worth"] == 3 for one in record.instances)
    assert json.loads(record.model_dump_json())["plan"] == record.plan


# --- the figure -------------------------------------------------------------------------------------------


def test_the_figure_shows_every_panel_and_says_where_there_is_nothing_to_show(tmp_path):
    from figures import sae as figures
    from figures import style

    record = planted(tmp_path, "planted-mixed", sae=str(by_hand(tmp_path / "sae")))
    none = make_record(included=0, gated=3).model_copy(update={"study": "sae"})
    dictionary = {**record.plan["equipment"]["dictionary"], "trained here": True}  # the same, had it been made here
    here = record.model_copy(update={"plan": {**record.plan, "equipment": {"dictionary": dictionary}}})
    with style.styled():
        drawn = figures.draw({"m/sae/a": record, "m/sae/b": none, "m/sae/c": here})
    left, right, read, quality = drawn["m/sae/a"].axes
    assert left.lines
    assert right.lines
    assert len(read.get_yticklabels()) == 6
    assert quality.get_yticklabels()[-1].get_text() == "features silent on\nheld-out text"
    assert "FAILED" not in drawn["m/sae/a"].get_suptitle()
    assert drawn["m/sae/c"].axes[-1].get_yticklabels()[-1].get_text() == "dead features"
    assert "FAILED TRAINING" in drawn["m/sae/c"].get_suptitle()
    assert "No recovery to report" in drawn["m/sae/b"].axes[0].get_title("left")

"""Runs as a user makes them: resumed after any kill, refused with one clear line, never half written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from kvnotes import config as configs
from kvnotes import discover, memory, models, planted_words, records, runner, weights
from kvnotes.config import RunConfig
from kvnotes.errors import UnknownName
from kvnotes.resume import Finished, ResumeFile
from probes import locality
from tests import tiny

RUN = ["--model", "planted-mixed", "--task", "planted", "--layout", "words_field_first", "--resamples", "500"]


def config(results: Path, **flags) -> RunConfig:
    usual = {"model": "planted-mixed", "task": "planted", "layout": "words_field_first", "n": 12, "resamples": 500}
    return configs.make(RunConfig, study="locality", flags={**usual, "results": results, **flags})


def start(results: Path, *arguments: str, **more) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "probes.locality", *RUN, "--results", str(results), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=_hears_ctrl_c, **more)  # noqa: PLW1509


def _hears_ctrl_c() -> None:
    """A shell that starts the tests in the background makes them, and all that they start, deaf to SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(results: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = start(results, *arguments)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def resume_lines(results: Path) -> int:
    files = list(results.rglob(".*.resume.jsonl"))
    return files[0].read_text().count("\n") - 1 if files else 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_a_killed_run_resumes_to_the_same_record(how, tmp_path):
    process = start(tmp_path, "--n", "200")
    deadline = time.monotonic() + 100
    while resume_lines(tmp_path) < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert 5 <= resume_lines(tmp_path) < 200
    assert not list(tmp_path.rglob("*.json"))
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "run the same command to go on" in err
    assert "Traceback" not in err
    resumed = runner.execute(locality, config(tmp_path, n=200))
    whole = runner.execute(locality, config(tmp_path / "whole", n=200))
    assert resumed.content_hash == whole.content_hash
    assert not list(tmp_path.rglob(".*.resume.jsonl"))
    assert resumed.provenance.seed == 0
    assert len(resumed.instances) == 200


def test_only_what_is_missing_is_measured_again(tmp_path, monkeypatch):
    measured = []
    honest = locality.measure

    def counting(trial, config):
        if len(measured) == 5 and stop:
            raise KeyboardInterrupt
        measured.append(trial.pair.pair.id)
        return honest(trial, config)

    stop = True
    monkeypatch.setattr(locality, "measure", counting)
    with pytest.raises(KeyboardInterrupt):
        runner.execute(locality, config(tmp_path))
    stop = False
    runner.execute(locality, config(tmp_path))
    assert len(measured) == 12
    assert len(set(measured)) == 12  # none twice


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (b'{"instance": {"id": "half', 2),  # a line cut short by a kill
        (b"\xff\xfe not text\n", 2),
        (b'{"an": "object"}\n', 2),
        (b"[]\n", 2),
        (b"\0\0\0\n", 2),
    ],
)
def test_a_damaged_resume_file_keeps_what_stands_before_the_damage(damage, kept, tmp_path):
    record = runner.execute(locality, config(tmp_path, n=4))
    done = {one.id: Finished(instance=one, identities={"a": 0.5}, noise=0.25) for one in record.instances[:2]}
    file = ResumeFile(tmp_path / "x.json", key={"config": "abc"})
    file.start(done)
    with file.path.open("ab") as stream:
        stream.write(damage)
    assert len(file.read()) == kept
    assert file.read() == done
    assert ResumeFile(tmp_path / "x.json", key={"config": "other"}).read() == {}
    file.path.write_bytes(damage)
    assert file.read() == {}
    file.path.write_bytes(b"")
    assert file.read() == {}


def test_other_prompts_or_libraries_do_not_resume(tmp_path, monkeypatch):
    folder = tiny.checkpoint("llama", tmp_path / "model")
    model = models.load(str(folder), device="cpu", dtype="float32")
    study = runner.Study(module=locality, config=config(tmp_path, model=str(folder)))
    before = runner.resume_file(study, model).key
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    after = runner.resume_file(study, model).key
    assert before != after
    monkeypatch.setattr(runner.provenance, "versions", lambda: {"torch": "0"})
    assert runner.resume_file(study, model).key != after


def test_folders_of_one_name_do_not_share_records(tmp_path):
    paths = {
        runner.Study(module=locality, config=config(tmp_path, model=str(model))).path
        for model in (
            "planted-mixed",
            tiny.checkpoint("llama", tmp_path / "a" / "planted-mixed"),
            tiny.checkpoint("llama", tmp_path / "b" / "planted-mixed", kv_heads=4),
        )
    }
    assert len(paths) == 3
    assert weights.run_name("Qwen/Qwen3-8B") == "qwen3-8b"  # the registry's entry of that repository


def test_too_little_memory_stops_before_it_starts(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(memory, "estimate", lambda model, tokens, budget, lent: 10**18)
        with pytest.raises(runner.RunError, match="are free; use a smaller LENGTH="):
            runner.execute(locality, config(tmp_path))
    monkeypatch.setattr(memory, "available", lambda device: 1000)
    with pytest.raises(models.ModelError, match="more than is free"):
        runner.execute(locality, config(tmp_path))


def test_a_long_query_block_skips_with_a_reason(tmp_path):
    """In the rules-first layout at most a few tokens lie between the field and a query of 29."""
    record = runner.execute(locality, config(tmp_path, layout="words_rules_first", query=29))
    assert "no token between the changed span and the query block" in record.inclusion.excluded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n", "0"], "setting 'n'"),
        (["--model", "planted-nots"], "did you mean"),
        (["--layout", "words_feld_first"], "did you mean 'words_field_first'"),
        (["--task", "plantd"], "did you mean 'planted'"),
        (["--device", "cuda"], "no CUDA GPU"),
        (["--task", "gated", "--layout", "table_field_first"], "need TASK=planted"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path):
    if "cuda" in arguments and __import__("torch").cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.json"))


def test_an_unknown_study_suggests_the_nearest():
    done = subprocess.run(["make", "probe-localty", "PYTHON=false"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    with pytest.raises(UnknownName, match="did you mean 'locality'"):
        discover.study("localty")


def test_a_results_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = run(tmp_path / "file")
    assert done.returncode == 2
    assert "error:" in done.stderr
    assert str(tmp_path / "file") in done.stderr
    assert "Traceback" not in done.stderr


def load(folder: Path):
    return models.load(str(folder), device="cpu", dtype="float32")


def edit(path: Path, **settings) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_remote_code_never_runs_even_if_the_user_would_say_yes(tmp_path):
    trap = tmp_path / "ran"
    evil = f"open({str(trap)!r}, 'w').close()\nraise SystemExit"
    model = tiny.checkpoint("llama", tmp_path / "model")
    (model / "evil.py").write_text(evil)
    edit(
        model / "config.json", model_type="made_up", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    )
    tokenizer = tiny.checkpoint("llama", tmp_path / "tokenizer")
    (tokenizer / "evil.py").write_text(evil)
    edit(tokenizer / "tokenizer_config.json", tokenizer_class="T", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]})
    for folder in (model, tokenizer):
        process = start(tmp_path / "r", "--model", str(folder), stdin=subprocess.PIPE)
        _, err = process.communicate("y\ny\n", timeout=120)
        assert process.returncode == 2
        assert "Traceback" not in err
    assert not trap.exists()


def test_only_whole_safetensors_are_read(tmp_path):
    folder = tiny.checkpoint("llama", tmp_path / "m")
    weights_file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    whole = weights_file.read_bytes()
    for broken in (b"", whole[: len(whole) // 2], (2**62).to_bytes(8, "little") + whole[8:]):
        weights_file.write_bytes(broken)
        with pytest.raises(weights.WeightsError, match="damaged or cut short"):
            load(folder)
    weights_file.rename(folder / "w.bin")
    with pytest.raises(weights.WeightsError, match="pickle"):
        load(folder)
    index.write_text(json.dumps({"weight_map": {"a": "w.bin"}}))
    with pytest.raises(weights.WeightsError, match=r"only \.safetensors files beside it"):
        load(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(weights.WeightsError, match=r"only \.safetensors files beside it"):
        load(folder)
    index.write_text("{}")
    with pytest.raises(weights.WeightsError, match="not an index"):
        load(folder)


def test_weights_that_lack_a_tensor_are_refused_not_made_up(tmp_path):
    folder = tiny.checkpoint("llama", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    dropped = {name: t for name, t in tensors.items() if "layers.2.self_attn" not in name}
    save_file(dropped, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(models.ModelError, match=r"missing keys: model\.layers\.2\.self_attn"):
        load(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", num_hidden_layers=3)
    with pytest.raises(models.ModelError, match="unexpected keys"):
        load(folder)


def test_a_results_folder_that_vanishes_is_one_line(tmp_path, monkeypatch):
    honest = locality.measure

    def vanishing(trial, config):
        shutil.rmtree(tmp_path / "r")
        return honest(trial, config)

    monkeypatch.setattr(locality, "measure", vanishing)
    with pytest.raises(records.RecordError, match="cannot be written"):
        runner.execute(locality, config(tmp_path / "r"))


def test_a_cache_that_is_no_folder_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVNOTES_CACHE", str(tmp_path / "file"))
    with pytest.raises(weights.WeightsError, match="KVNOTES_CACHE"):
        runner.execute(locality, config(tmp_path / "r"))


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    outer = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    return subprocess.run(
        ["make", *arguments], capture_output=True, text=True, check=False, cwd=discover.ROOT, env=outer
    )


def test_make_knows_its_settings_and_studies():
    misspelled = make("-n", "probe-locality", "LAYUOT=all")
    assert misspelled.returncode == 2
    assert "unknown setting LAYUOT" in misspelled.stderr
    quoted = make("-n", "probe-locality", "MODEL=it's $$(touch x)", "N=3", "PAIR=polarity")
    assert quoted.stdout.splitlines()[-1].endswith("--model 'it'\\''s $(touch x)' --pair 'polarity' --n '3'")
    for study in ("probe-localty", "probe-__init__", "probe-*"):
        recipe = make("-n", study).stdout
        assert "test -n ''" in recipe  # which fails, and says which studies there are


def test_a_record_says_all_that_is_needed_to_defend_it(tmp_path):
    record = runner.execute(locality, config(tmp_path))
    path = next(tmp_path.rglob("*.json"))
    assert records.read(path) == record
    assert record.model.weights_sha256
    assert record.model.tokenizer_sha256
    assert record.provenance.versions["torch"].startswith("2.")
    assert record.provenance.config["layout"] == "words_field_first"
    one = record.instances[0]
    assert one.tokens is not None
    assert len(one.tokens.base) == len(one.tokens.target)
    assert [i for i, (a, b) in enumerate(zip(one.tokens.base, one.tokens.target, strict=True)) if a != b] == list(
        one.tokens.changed
    )
    assert one.hooks["field_only"] > 0
    assert record.provenance.command == (
        "python -m probes.locality --model planted-mixed --task planted --layout words_field_first --n 12"
        " --resamples 500"
    )
    assert "results" not in record.provenance.config
    assert one.spans["field"] == ((one.tokens.changed[0], one.tokens.changed[0] + 1),)
    actions = {(scenario.permit, scenario.restrict) for scenario in planted_words.SCENARIOS}
    first, second = (record.vocabulary[str(i)] for i in (one.tokens.base_action, one.tokens.target_action))
    assert {(first, second), (second, first)} & actions
    assert path.name == f"words_field_first-{record.provenance.config_hash[:8]}.json"  # not the default settings
    assert os.path.basename(str(tmp_path)) not in json.dumps(record.model_dump(mode="json", exclude={"provenance"}))
    # a summary is recomputable from the instances alone
    again = locality.summarise(record.instances, config(tmp_path), record.model.noise_floor)
    assert again.effects == record.summary.effects
    competence = record.summary.tables["competence of the unedited model"]
    # layout, pairs, gate, base right, target right: a planted model is right in every arm
    assert competence.rows[0][:5] == ["words_field_first", 12, 12, 12, 12]
    assert competence.rows[0][6] == "6 of 6 right in all four cells"


def test_a_summary_is_recomputed_from_the_instances(tmp_path):
    record = runner.execute(locality, config(tmp_path))
    path = next(tmp_path.rglob("*.json"))
    emptied = record.model_copy(update={"summary": record.summary.model_copy(update={"effects": (), "headline": ""})})
    records.write(emptied, path)
    again = runner.resummarise(path)
    assert again.summary.effects == record.summary.effects
    assert again.summary.tables == record.summary.tables
    assert again.instances == record.instances
    assert "recomputed from the instances at commit" in again.summary.notes[0]
    assert records.read(path) == again
    # an older record has no token texts, and gets them where its tokenizer is in the cache
    records.write(record.model_copy(update={"vocabulary": {}}), path)
    assert runner.resummarise(path).vocabulary == record.vocabulary


# --- studies of two passes, and studies with arrays -------------------------------------------------------


class TwoPasses(SimpleNamespace):
    """A study that counts what it is asked, and can be stopped after some trials."""

    def __init__(self, **more):
        self.asked: list[tuple[str, str]] = []
        self.stop_after: int | None = None
        self.TITLE = "two passes"
        super().__init__(**more)

    def survey(self, trial, config):
        self._ask("survey", trial)
        return {"first": trial.unedited.base}

    def prepare(self, instances, config):
        assert all(one.status != "skipped" for one in instances)
        return {"sum": sum(one.measures["first"] for one in instances), "none": float("nan"), "pairs": (1, 2)}

    def measure(self, trial, config, plan):
        self._ask("measure", trial)
        return {"second": trial.unedited.target + plan["sum"], "pairs": plan["pairs"]}

    def identities(self, trial, measures):
        return {"both passes are seen": abs(measures["first"] - trial.unedited.base) + 0 * measures["second"]}

    def summarise(self, instances, config, floor):
        return records.Summary(effects=(), tables={}, notes=("a note",), headline="h")

    def _ask(self, what, trial):
        if self.stop_after == len(self.asked):
            raise KeyboardInterrupt
        self.asked.append((what, trial.pair.pair.id))


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(runner, "_draw", lambda study, record: [])


@pytest.mark.parametrize("stop", [2, 5, 8])
def test_a_study_of_two_passes_resumes_in_either(stop, undrawn, tmp_path):
    study: Any = TwoPasses(stop_after=stop)
    with pytest.raises(KeyboardInterrupt):
        runner.execute(study, config(tmp_path, n=6))
    study.stop_after = None
    resumed = runner.execute(study, config(tmp_path, n=6))
    ids = [one.id for one in resumed.instances]
    assert sorted(study.asked) == sorted((what, name) for what in ("survey", "measure") for name in ids)  # none twice
    total = sum(one.measures["first"] for one in resumed.instances)
    assert resumed.plan == {"sum": total, "none": None, "pairs": [1, 2]}
    for one in resumed.instances:
        assert one.measures["second"] == one.measures["unedited"]["target"] + total
        assert list(one.measures) == ["unedited", "full", "first", "second", "pairs"]
        assert one.hooks == {}
    assert {check.name for check in resumed.checks} >= {"both passes are seen", "prefix deviation"}
    assert not list(tmp_path.rglob(".*.resume*"))
    assert records.read(next(tmp_path.rglob("*.json"))) == resumed
    whole = runner.execute(cast("Any", TwoPasses()), config(tmp_path / "whole", n=6))
    assert whole.content_hash == resumed.content_hash


def test_the_second_pass_begins_anew_under_another_plan(undrawn, tmp_path):
    study: Any = TwoPasses(stop_after=5)
    with pytest.raises(KeyboardInterrupt):
        runner.execute(study, config(tmp_path, n=3))  # 3 surveyed, 2 measured
    study.stop_after, study.asked = None, []
    study.prepare = lambda instances, config: {"sum": 1.0, "pairs": []}
    runner.execute(study, config(tmp_path, n=3))
    assert [what for what, _ in study.asked] == ["measure"] * 3


def test_passes_that_return_the_same_are_refused(undrawn, tmp_path):
    study: Any = TwoPasses()
    study.measure = lambda trial, config, plan: {"first": 1.0}
    with pytest.raises(runner.RunError, match="survey and measure both return first"):
        runner.execute(study, config(tmp_path, n=2))


class WithArrays(TwoPasses):
    """One pass, an array a pair, whose row says which pair it is of."""

    def __init__(self, shape=(2, 3)):
        super().__init__(prepare=None, shape=shape)
        del self.prepare

    def __getattribute__(self, name):
        if name in ("prepare", "survey", "identities"):
            raise AttributeError(name)
        return super().__getattribute__(name)

    def measure(self, trial, config):
        self._ask("measure", trial)
        return {"base": trial.unedited.base}

    def collect(self, trial, config):
        return {"x": np.full(self.shape, trial.unedited.base, dtype="float32").T, "y": np.array(trial.unedited.target)}

    def summarise(self, instances, config, floor, arrays):
        rows = arrays["x"].mean(axis=(1, 2))
        assert [float(row) for row in rows] == pytest.approx([one.measures["base"] for one in instances])
        return records.Summary(effects=(), tables={}, notes=(), headline=f"sum {arrays['y'].sum():.6f}")


def test_arrays_stand_beside_the_record_and_survive_a_stop(undrawn, tmp_path, monkeypatch):
    study: Any = WithArrays()
    study.stop_after = 4
    with pytest.raises(KeyboardInterrupt):
        runner.execute(study, config(tmp_path, n=6))
    kept = sorted(tmp_path.rglob(".*.arrays/*.safetensors"))
    assert len(kept) == 4
    kept[0].write_bytes(b"damaged")
    study.stop_after = None
    record = runner.execute(study, config(tmp_path, n=6))
    assert len(study.asked) == 7  # the damaged one is measured again
    assert record.arrays[0].tensors == {"x": (6, 3, 2), "y": (6,)}
    path = next(tmp_path.rglob("*.json"))
    arrays = records.read_arrays(records.read(path), path)
    assert arrays["y"].tolist() == [one.measures["unedited"]["target"] for one in record.instances]
    assert not list(tmp_path.rglob(".*.resume*"))
    whole = runner.execute(cast("Any", WithArrays()), config(tmp_path / "whole", n=6))
    assert whole.content_hash == record.content_hash
    monkeypatch.setattr(discover, "study", lambda name: study)
    assert runner.resummarise(path).summary.headline == record.summary.headline
    path.with_name(record.arrays[0].file).unlink()
    with pytest.raises(records.RecordError, match="cannot be read"):
        runner.resummarise(path)


def test_condensed_arrays_are_the_ones_that_are_kept(undrawn, tmp_path):
    study: Any = WithArrays()
    study.condense = lambda arrays, instances, config: {"n": np.array([len(instances), *arrays["x"].shape])}
    study.summarise = lambda instances, config, floor, arrays: records.Summary(
        effects=(), tables={}, notes=(), headline=str(arrays["n"].tolist())
    )
    record = runner.execute(study, config(tmp_path, n=4))
    assert record.summary.headline == "[4, 4, 3, 2]"
    assert record.arrays[0].tensors == {"n": (4,)}


def test_arrays_of_unequal_shapes_are_refused(undrawn, tmp_path):
    study: Any = WithArrays()
    study.collect = lambda trial, config: {"x": np.zeros(len(study.asked))}
    with pytest.raises(records.RecordError, match="must collect the same arrays of every pair"):
        runner.execute(study, config(tmp_path, n=2))

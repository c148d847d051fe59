"""The model registry and the way from a model's name to a verified Hugging Face folder. No torch.

A registry model that comes as a GGUF file is dequantised once into `<cache>/models/<name>/`, with a manifest
of every file's SHA-256 that each later start checks before anything reads the files. Hub ids and local
folders go the same way, with safetensors weights only.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from rich.console import Console
from rich.progress import Progress

from kvnotes.errors import UnknownName
from kvnotes.gguf_source import CONVERTER_VERSION, convert
from kvnotes.sources import GGUFFile, Sha256, WeightsError, disk_errors, fetch, sha256_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Chat",
    "ModelEntry",
    "Prepared",
    "WeightsError",
    "cache_folder",
    "cached_folders",
    "entry_for",
    "known_models",
    "load_entry",
    "load_tokenizer",
    "prepare",
    "run_name",
    "tokenizer_sha256",
]

REGISTRY = Path(__file__).resolve().parents[1] / "configs" / "models"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"[^/\\]+\.safetensors")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Of a hub repository: never pickled weights, nor the second copy of the weights that some repositories carry.
HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.txt", "*.jinja"]
HUB_SECOND_COPIES = ["consolidated*", "original/*"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json")
PRECISIONS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
MIB = 1 << 20
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Chat(BaseModel):
    """Whether a prompt goes through the tokenizer's chat template, and with which template options.

    `use` None means: where the tokenizer has a template.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    use: bool | None = None
    options: dict[str, bool | int | str] = {}


# A template that knows no such option ignores it; one that does must not think before the decision.
UNREGISTERED = Chat(options={"enable_thinking": False})


class ModelEntry(BaseModel):
    """A model by name: exactly one of a GGUF file, a hub repository or a local folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    role: str = ""
    family: str | None = None
    license: str | None = None
    gguf: GGUFFile | None = None
    hub: str | None = None
    folder: Path | None = None
    precision: str | None = None  # None: read from the safetensors header
    chat: Chat = Chat()
    attention: Literal["eager", "sdpa"] = "eager"

    @model_validator(mode="after")
    def _one_source(self) -> ModelEntry:
        given = [kind for kind in ("gguf", "hub", "folder") if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"a model has exactly one of gguf, hub and folder; {self.name} has {given or 'none'}")
        if self.gguf is not None and self.precision is None:
            raise ValueError(f"{self.name}: a quantised file needs its precision named")
        return self


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A verified Hugging Face folder and its identity, as records keep it.

    `weights_sha256` is the GGUF file's for a dequantised model, else the safetensors file's (of several: the
    SHA-256 of their `sha256sum` lines). `tokenizer_sha256` is made the same way from the tokenizer's files.
    """

    folder: Path
    weights_sha256: str
    tokenizer_sha256: str
    precision: str
    source: str


class _FileIdentity(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    sha256: Sha256


class _Manifest(BaseModel):
    """What a converted folder holds; written last, so a folder without it is not whole."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    converter_version: int
    gguf_sha256: Sha256
    source: str
    files: dict[str, _FileIdentity] = Field(min_length=1)


# --- registry ----------------------------------------------------------------------------------------------


def known_models() -> tuple[str, ...]:
    """Names of the registry's models, sorted."""
    return tuple(sorted(path.stem for path in REGISTRY.glob("*.yaml")))


def load_entry(name: str) -> ModelEntry:
    """A registry model by its name. Raises `UnknownName` with the nearest name, or `WeightsError` where the
    model's file is not valid."""
    if name not in known_models():
        raise UnknownName(kind="model", name=name, known=known_models())
    path = REGISTRY / f"{name}.yaml"
    try:
        entry = ModelEntry.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (ValidationError, yaml.YAMLError) as error:
        raise WeightsError(f"{path} is not a valid model file; correct it:\n{error}") from error
    if entry.name != name:
        raise WeightsError(f"{path} names the model {entry.name!r}; the file's name and `name` must agree.")
    return entry


def entry_for(name: str) -> ModelEntry:
    """The entry of a registry name, a local folder or a hub id, looked up in this order.

    A hub id that the registry has under another name keeps the registry's settings. Raises `UnknownName` for
    a plain word that is none of them, `WeightsError` for a path that does not exist.
    """
    if name in known_models():
        return load_entry(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelEntry(name=path.resolve().name, folder=path.resolve(), chat=UNREGISTERED)
    if not HUB_ID.fullmatch(name) or name.startswith("."):
        if "/" in name or os.sep in name:
            raise WeightsError(f"there is no folder {name!r}; give an existing folder, a hub id or a model's name.")
        raise UnknownName(kind="model", name=name, known=known_models())
    registered = (load_entry(model) for model in known_models())
    unregistered = ModelEntry(name=name.replace("/", "--"), hub=name, chat=UNREGISTERED)
    return next((e for e in registered if e.hub == name), unregistered)


def run_name(name: str) -> str:
    """The name under which a model's records stand: the registry's or the hub's, and for a local folder its own with
    eight digits of a hash of its weights (each file's first and last MiB), so that no folder's records replace
    another model's.
    """
    path = Path(name).expanduser()
    if name in known_models() or not path.is_dir():
        known = {entry.hub: entry.name for entry in map(load_entry, known_models()) if entry.hub}
        return known.get(name, name)
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(stream.read(MIB))
            stream.seek(max(0, file.stat().st_size - MIB))
            digest.update(stream.read(MIB))
    return f"{path.resolve().name}-{digest.hexdigest()[:8]}"


def cache_folder() -> Path:
    """`$KVNOTES_CACHE`, else `$XDG_CACHE_HOME/kvnotes`, else `~/.cache/kvnotes`."""
    if own := os.environ.get("KVNOTES_CACHE"):
        return Path(own).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "kvnotes"


# --- prepare -----------------------------------------------------------------------------------------------


def prepare(entry: ModelEntry, *, progress: bool = True) -> Prepared:
    """Bring a model to a verified Hugging Face folder, from the cache where it is already there.

    Shows its progress on stderr unless `progress` is false. Raises `WeightsError`, with cause and fix, where
    the weights cannot be brought, verified or converted; no unfinished folder or file ever has its final
    name.
    """
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not progress) as bar:
        if entry.gguf is not None:
            return _prepare_gguf(entry, entry.gguf, bar)
        folder = entry.folder if entry.folder is not None else _snapshot(str(entry.hub))
        return _identify(entry, folder)


def load_tokenizer(folder: Path, *, converted: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a prepared folder; `converted` says whether it was made from a GGUF file. Raises WeightsError.

    A converted folder's tokenizer.json is taken as it stands. `AutoTokenizer` would replace Qwen2's with its
    own class, which composes Unicode characters first, so that ids and offsets of decomposed text would
    differ from the GGUF's.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # slow to import

    kind = PreTrainedTokenizerFast if converted else AutoTokenizer
    try:
        return kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"the tokenizer in {folder} cannot be loaded without running its own code: {error}"
        ) from error


def _prepare_gguf(entry: ModelEntry, gguf: GGUFFile, progress: Progress) -> Prepared:
    cache = cache_folder()
    folder = cache / "models" / entry.name
    with disk_errors(cache):
        manifest = _verified(folder, gguf)
        if manifest is None:
            (cache / "models").mkdir(parents=True, exist_ok=True)
            with _lock(cache / f"{entry.name}.lock", progress):
                manifest = _verified(folder, gguf) or _build(folder, gguf, progress)
    return Prepared(
        folder=folder,
        weights_sha256=gguf.sha256,
        tokenizer_sha256=manifest.files["tokenizer.json"].sha256,
        precision=str(entry.precision),
        source=manifest.source,
    )


def _lock(path: Path, progress: Progress) -> AbstractContextManager[object]:
    """The model's lock, so that two processes do not make one folder. The system frees a killed process's."""
    from filelock import FileLock, Timeout  # in the models extra

    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        progress.console.print(f"waiting for another process that holds {path} ...")
        return lock.acquire()


def _verified(folder: Path, gguf: GGUFFile) -> _Manifest | None:
    """The manifest of a converted folder whose files are all as it says; None where anything differs, also
    for a file that should not be there (a stray chat template would change every prompt)."""
    try:
        manifest = _Manifest.model_validate_json((folder / "manifest.json").read_bytes())
        current = (manifest.converter_version, manifest.gguf_sha256) == (CONVERTER_VERSION, gguf.sha256)
        present = {path.name for path in folder.iterdir()} - {"manifest.json"}
        whole = (
            current
            and present == set(manifest.files)
            and all(
                (folder / name).stat().st_size == file.bytes and sha256_of(folder / name) == file.sha256
                for name, file in manifest.files.items()
            )
        )
    except (FileNotFoundError, ValidationError):  # also where another process is just making the folder anew
        return None
    return manifest if whole else None


def _build(folder: Path, gguf: GGUFFile, progress: Progress) -> _Manifest:
    """Fetch, convert, and put the folder in place in one step. What was there before is removed."""
    if folder.exists():
        progress.console.print(f"{folder} has changed or is of another version; it is made anew.")
        shutil.rmtree(folder)
    fetched = fetch(gguf, folder=folder.parents[1] / "gguf", progress=progress)
    unfinished = folder.with_name(f"{folder.name}.part")
    if unfinished.exists():  # of a process that was killed
        shutil.rmtree(unfinished)
    unfinished.mkdir()
    try:
        convert(fetched.path, unfinished, progress=progress)
        files = {
            path.name: _FileIdentity(bytes=path.stat().st_size, sha256=sha256_of(path))
            for path in sorted(unfinished.iterdir())
        }
        manifest = _Manifest(
            converter_version=CONVERTER_VERSION,
            gguf_sha256=gguf.sha256,
            source=fetched.source,
            files=files,
        )
        text = manifest.model_dump_json(indent=2) + "\n"
        (unfinished / "manifest.json").write_text(text, encoding="utf-8")
        unfinished.replace(folder)
    finally:
        if unfinished.exists():
            shutil.rmtree(unfinished)
    return manifest


# --- hub ids and local folders -----------------------------------------------------------------------------


def _snapshot(repo: str) -> Path:
    """The hub repository's files in huggingface_hub's own cache, which resumes downloads and verifies them."""
    from huggingface_hub import snapshot_download  # in the models extra
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(repo, allow_patterns=HUB_FILES, ignore_patterns=HUB_SECOND_COPIES))
    except GatedRepoError as error:
        raise WeightsError(
            f"the hub repository {repo} is gated: accept its license on the hub, then log in with `hf auth login`."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise WeightsError(f"the hub has no repository {repo!r}, or it is private; check the id.") from error
    except LocalEntryNotFoundError as error:
        raise WeightsError(
            f"the hub cannot be reached and {repo} is not in the local cache. Check the network, or download "
            f"the repository elsewhere and give its folder (MODEL=<folder>). Without a hub these work: "
            f"{', '.join(name for name in known_models() if load_entry(name).gguf)}."
        ) from error
    except HfHubHTTPError as error:
        raise WeightsError(f"the hub did not serve {repo}: {error}. Try again later.") from error


def _identify(entry: ModelEntry, folder: Path) -> Prepared:
    weights = _safetensors(folder)
    tokenizer = tokenizer_sha256(folder)
    if tokenizer is None:
        raise WeightsError(f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES[:3])}); save it there too.")
    source = f"local folder {entry.name}"
    if entry.hub is not None:
        source = f"hub repository {entry.hub} at {folder.name}"  # a snapshot's folder is named by its commit
    return Prepared(
        folder=folder,
        weights_sha256=_digest(weights),
        tokenizer_sha256=tokenizer,
        precision=entry.precision or _stored_precision(weights),
        source=source,
    )


def tokenizer_sha256(folder: Path) -> str | None:
    """The SHA-256 of a model folder's tokenizer as records keep it: of tokenizer.json where there is one, else of the
    files that make one up. None where the folder has none."""
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]
    if not files:
        return None
    return _digest(files[:1] if files[0].name == "tokenizer.json" else files)


def cached_folders(name: str) -> list[Path]:
    """Where the files of a model of that name, as records give it, stand on this machine. Nothing is fetched."""
    cache = cache_folder()
    folders = [cache / kind / name for kind in ("models", "planted")] if "/" not in name else []
    try:
        hub = load_entry(name).hub if name in known_models() else name
    except WeightsError:
        hub = None
    if hub is not None and HUB_ID.fullmatch(hub):
        folders += _cached_snapshots(hub)
    return [folder for folder in folders if folder.is_dir()]


def _cached_snapshots(repo: str) -> list[Path]:
    """The hub repository's files in huggingface_hub's own cache, the newest version alone."""
    try:
        from huggingface_hub import snapshot_download  # in the models extra
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError:
        return []
    try:
        return [Path(snapshot_download(repo, local_files_only=True))]
    except (LocalEntryNotFoundError, HFValidationError):
        return []


def _safetensors(folder: Path) -> list[Path]:
    """The files that hold the weights: one file, or the shards that its index names."""
    if not (folder / "config.json").exists():
        raise WeightsError(f"{folder} has no config.json, so it is not a Hugging Face model folder.")
    names = ["model.safetensors"]
    if not (folder / names[0]).exists() and (folder / INDEX).exists():
        names = _shards(folder / INDEX)
    missing = [name for name in names if not (folder / name).exists()]
    if not missing:
        return [folder / name for name in names]
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    if pickled:
        raise WeightsError(
            f"{folder} has only pickled weights ({pickled[0]}): loading a pickle can run any code, so it is "
            "refused. Load it once where you trust it and save it with `save_pretrained(folder)`, which "
            "writes safetensors."
        )
    raise WeightsError(f"{folder} lacks {', '.join(missing)}; save or download the whole model again.")


def _shards(index: Path) -> list[str]:
    """The files that an index names: safetensors beside it and nothing else, so that no pickle comes in this way."""
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"{index} is not an index of safetensors files ({error!r}); save the model again."
        ) from error
    strange = [name for name in names if not SHARD.fullmatch(str(name))]
    if strange or not names:
        raise WeightsError(f"{index} names {strange or 'no file'}: only .safetensors files beside it are read.")
    return names


def _digest(files: Iterable[Path]) -> str:
    """The SHA-256 of one file; of several, that of their lines as `sha256sum` prints them."""
    sums = [(sha256_of(path), path.name) for path in files]
    if len(sums) == 1:
        return sums[0][0]
    return hashlib.sha256("".join(f"{digest}  {name}\n" for digest, name in sums).encode()).hexdigest()


def _stored_precision(files: Iterable[Path]) -> str:
    """The number format of the weights, such as "bf16": the one that most of the stored elements have.

    Opening a file checks its header against its length; raises WeightsError for one that is damaged or cut short.
    """
    from safetensors import SafetensorError, safe_open

    sizes: dict[str, int] = {}
    for path in files:
        try:
            with safe_open(path, framework="numpy") as stored:
                for name in stored.keys():  # noqa: SIM118 (not a mapping)
                    tensor = stored.get_slice(name)
                    sizes[tensor.get_dtype()] = sizes.get(tensor.get_dtype(), 0) + math.prod(tensor.get_shape())
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} is damaged or cut short ({error}); save or download it again.") from error
    if not sizes:
        raise WeightsError(f"{', '.join(map(str, files))} hold no tensor; save or download the model again.")
    most = max(sizes, key=lambda dtype: sizes[dtype])
    return PRECISIONS.get(most, most.lower())

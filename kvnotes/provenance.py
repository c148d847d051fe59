"""What a record must say about how it was made: code, versions, machine, settings. No torch."""

from __future__ import annotations

import hashlib
import platform
import shlex
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import kvnotes
from kvnotes import config as configs
from kvnotes import weights
from kvnotes.config import RunConfig
from kvnotes.discover import ROOT
from kvnotes.records import Provenance

PACKAGES = ("torch", "transformers", "transformer-lens", "tokenizers", "safetensors", "gguf", "numpy", "scipy")
SOURCES = ("kvnotes", "tasks", "probes", "circuits", "configs")


def collect(config: RunConfig, *, module: str) -> Provenance:
    """Provenance of a run of `module` with these settings, now."""
    status = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results", ":!figures/out")
    return Provenance(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command(config, module=module),
        git_commit=_git("rev-parse", "HEAD"),
        git_dirty=None if status is None else bool(status),
        kvnotes_version=kvnotes.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        versions=versions(),
        seed=config.seed,
        config=settings(config),
        config_hash=config.hash(),
    )


def settings(config: RunConfig) -> dict[str, Any]:
    """The settings as a record keeps them: the model by the name of its records, and no path of this machine."""
    return {**config.model_dump(mode="json", exclude={"results"}), "model": weights.run_name(config.model)}


def command(config: RunConfig, *, module: str) -> str:
    """The command that makes the record again: what differs from the config files, as flags."""
    usual = configs.make(type(config), study=config.study, flags={}).model_dump(mode="json")
    changed = {key: value for key, value in settings(config).items() if value != usual[key]}
    flags = [part for key, value in changed.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    return shlex.join(["python", "-m", module, *flags])


def versions() -> dict[str, str]:
    """Installed version by package, of those that decide a run's numbers."""
    return {name: _version(name) for name in PACKAGES}


def code_hash() -> str:
    """SHA-256 over the sources and configs that decide a run's numbers."""
    digest = hashlib.sha256()
    for package in SOURCES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in {".py", ".yaml"}:
                digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _git(*arguments: str) -> str | None:
    """Output of a git command in the repository; None without git or outside a checkout."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)  # noqa: S603, S607
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

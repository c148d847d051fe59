"""Studies, tasks and figures are found by their file's stem: adding one is adding a file, with no list to edit."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from kvnotes.errors import UnknownName

ROOT = Path(__file__).resolve().parent.parent
STUDY_PACKAGES = ("probes", "circuits")


def stems(package: str) -> list[str]:
    """The public modules of a top-level package, by file name, without importing any."""
    return sorted(path.stem for path in (ROOT / package).glob("*.py") if not path.stem.startswith("_"))


def studies() -> dict[str, str]:
    """Every study's name and its module."""
    return {stem: f"{package}.{stem}" for package in STUDY_PACKAGES for stem in stems(package)}


def study(name: str) -> ModuleType:
    """The study's module; raises UnknownName with the nearest one."""
    known = studies()
    if name not in known:
        raise UnknownName(kind="study", name=name, known=known)
    return importlib.import_module(known[name])


def task(name: str) -> ModuleType:
    """The task family's module: it offers LAYOUTS and `generate`. Raises UnknownName with the nearest one."""
    known = {stem for stem in stems("tasks") if _is_task(stem)}
    if name not in known:
        raise UnknownName(kind="task", name=name, known=known)
    return importlib.import_module(f"tasks.{name}")


def _is_task(stem: str) -> bool:
    # a task family is a module of tasks/ that defines `generate`; its helpers there do not
    return "\ndef generate(" in (ROOT / "tasks" / f"{stem}.py").read_text(encoding="utf-8")

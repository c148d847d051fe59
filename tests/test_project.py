"""The layout of the code holds: imports go one way, and every study has its four parts."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from kvnotes import discover
from kvnotes.discover import ROOT

STUDIES = ("probes", "circuits", "repair", "reuse")
NO_TORCH = {"torch", "transformers", "transformer_lens", "sae_lens", "safetensors.torch"}
MAY_IMPORT = {
    "kvnotes": set(),
    "tasks": {"kvnotes.instance", "kvnotes.errors", "kvnotes.config", "kvnotes.planted_words", "tasks"},
    "figures": {"kvnotes", "figures"},
    "probes": {"kvnotes"},
    "circuits": {"kvnotes"},
    "bench": {"kvnotes", "bench"},
}
OURS = {"kvnotes", "tasks", "figures", "bench", *STUDIES}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_go_one_way(package):
    allowed = MAY_IMPORT[package]
    for path in modules(package):
        for name in imported(path):
            if name.split(".")[0] not in OURS - {"kvnotes" if package == "kvnotes" else ""}:
                continue
            lazy_figure = path.name == "runner.py" and name.startswith("figures")
            assert lazy_figure or any(
                name == a or name.startswith(f"{a}.") or a.startswith(f"{name}.") for a in allowed
            ), f"{path.relative_to(ROOT)} may not import {name}"


def test_studies_never_import_one_another():
    for package in ("probes", "circuits"):
        for path in modules(package):
            assert not {n for n in imported(path) if n.split(".")[0] in STUDIES}, path


@pytest.mark.parametrize(
    "module",
    [
        "kvnotes.records",
        "kvnotes.stats",
        "kvnotes.instance",
        "kvnotes.config",
        "kvnotes.cli",
        "kvnotes.export",
        "kvnotes.listing",
        "kvnotes.verify",
        "figures.build",
        "figures.composed",
        "figures.webpage.page",
        *(f"tasks.{stem}" for stem in discover.stems("tasks")),
        *discover.studies().values(),
    ],
)
def test_no_torch_where_records_are_read_and_drawn(module):
    code = f"import sys, {module}; print(sorted(set(sys.modules) & {NO_TORCH!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("study", sorted(discover.studies()))
def test_every_study_has_config_figure_and_test(study):
    package = discover.studies()[study].split(".")[0]
    assert (ROOT / "configs" / f"{study}.yaml").is_file(), f"{study} has no configs/{study}.yaml"
    assert (ROOT / "figures" / f"{study}.py").is_file(), f"{study} has no figures/{study}.py"
    assert (ROOT / "tests" / f"test_{study}.py").is_file(), f"{study} has no tests/test_{study}.py"
    source = (ROOT / package / f"{study}.py").read_text(encoding="utf-8")
    assert "\nTITLE = " in source


PAIR, MANY = ["trial", "config"], ["instances", "config"]
ONE_PASS = ("measure", "summarise", "identities")


@pytest.mark.parametrize("study", sorted(discover.studies()))
def test_every_study_has_the_functions_of_one_pass_or_two(study):
    module = discover.study(study)
    found = {
        name: list(inspect.signature(getattr(module, name)).parameters)
        for name in (
            "survey",
            "prepare",
            "donors",
            "measure",
            "summarise",
            "collect",
            "condense",
            "identities",
            "gather",
            "equip",
        )
        if hasattr(module, name)
    }
    two = "prepare" in found
    wanted = {"measure": [*PAIR, "plan"] if two else PAIR, "summarise": [*MANY, "floor"]}
    if two:
        wanted |= {"survey": PAIR, "prepare": MANY}
    if "donors" in found:
        wanted |= {"donors": ["pair", "pairs", "plan"], "measure": [*wanted["measure"], "donors"]}
    if "gather" in found:
        wanted |= {"gather": [*PAIR, "measures"], "prepare": [*MANY, "gathered"]}
        wanted["measure"] = [*wanted["measure"], "gathered"]
    if "equip" in found:
        wanted |= {"equip": ["model", "config", "pairs", "plan"], "measure": [*wanted["measure"], "equipment"]}
    if "collect" in found:
        wanted |= {"collect": wanted["measure"], "summarise": [*MANY, "floor", "arrays"]}
    if "condense" in found:
        wanted["condense"] = ["arrays", *MANY]
    if "identities" in found:
        wanted["identities"] = ["trial", "measures"]
    assert found == wanted


def test_every_config_belongs_to_a_study():
    configs = {path.stem for path in (ROOT / "configs").glob("*.yaml")} - {"default"}
    assert configs == set(discover.studies())


def settings(study: str) -> type:
    from kvnotes.config import RunConfig

    return getattr(discover.study(study), "Settings", RunConfig)


def test_no_setting_is_parsed_and_never_used():
    """Each setting of any study occurs as `config.<name>`, `c.<name>` or `recipe.<name>` somewhere outside its
    declaration, or is what a property of the settings returns."""
    every = {name for study in discover.studies() for name in settings(study).model_fields}
    source = "".join(
        path.read_text(encoding="utf-8") for package in ("kvnotes", "probes", "circuits") for path in modules(package)
    )
    uses = ("config.{}", "c.{}", "recipe.{}", "return self.{}")
    assert [name for name in sorted(every) if not any(use.format(name) in source for use in uses)] == []

"""The pages under docs/ and the README hold: what they name exists, and what they tell a reader to do works."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from kvnotes import cli, config, discover, records, weights
from kvnotes.config import RunConfig
from kvnotes.discover import ROOT
from kvnotes.planted import PLANTED

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
# Named already and not there yet. Each is deleted from here once it exists: a test says so.
TO_COME: dict[str, set[str]] = {"targets": set(), "commands": set(), "settings": set(), "fields": set()}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
KNOWN = set(re.findall(r"^KNOWN := (.+)$", MAKEFILE, re.MULTILINE)[0].split())
COMMANDS = {one.name or one.callback.__name__ for one in cli.app.registered_commands if one.callback}
PUBLIC = ("kvnotes", "tasks", "probes", "circuits", "figures")


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def fenced(page: str, language: str = r"\w*") -> list[str]:
    """The contents of the page's fenced blocks."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """Every command line that a page gives: in fenced or indented blocks, and in `code` that begins like one."""
    whole = text(page)
    blocks = [line for block in fenced(whole) for line in block.splitlines()]
    outside = re.sub(r"^```.*?^```$", "", whole, flags=re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"^ {4}(\S.*)$", outside, re.MULTILINE)
    found = [line.strip() for line in (*blocks, *re.findall(r"`([^`\n]+)`", outside))]
    return [line for line in found if re.match(r"(make|(\.venv/bin/)?kvnotes|(\.venv/bin/)?python -m) ", line)]


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


# --- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert target.is_relative_to(ROOT), link
        if anchor:
            heads = [
                re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-")
                for h in re.findall(r"^#+ (.+)$", text(target), re.M)
            ]
            assert anchor in heads, f"{page.name} links to {link}"


def test_the_index_names_every_page():
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", text(DOCS / "README.md")))
    assert linked == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page):
    """`a/path.ext`, where its first folder is one of the repository's; not those that the page itself adds."""
    added = {path for _, path, _ in blocks(page)}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    for path in re.findall(r"`([\w.-]+/[\w./-]*)`", text(page)):
        if path.split("/")[0] in folders - {"build"} and path not in added and "planted-" not in path:
            assert (ROOT / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_names_what_exists(page):
    added = {Path(path).stem for _, path, _ in blocks(page) if path.startswith(discover.STUDY_PACKAGES)}
    studies = {*discover.studies(), *added}
    for line in commands(page):
        program, *rest = words(line)
        if program == "make":
            check_make(line, rest, studies)
        elif program.endswith("kvnotes"):
            assert rest[0] in COMMANDS | TO_COME["commands"], line
            check_flags(line, rest)
        elif rest[1].split(".")[0] in discover.STUDY_PACKAGES:
            study = rest[1].split(".")[1]
            assert study.startswith("<") or study in studies, line


def check_make(line: str, arguments: list[str], studies: set[str]) -> None:
    for argument in arguments:
        name, given, value = argument.partition("=")
        if given:
            assert name in KNOWN | TO_COME["settings"], line
            check_setting(name, value, line)
        elif argument.startswith("probe-"):
            assert argument[6:] in ({"", "<name>", "<study>"} | studies), line
        else:
            assert argument in TARGETS | TO_COME["targets"] | {"..."}, line


def check_setting(name: str, value: str, line: str) -> None:
    """A value that is written out is one that the setting takes."""
    if name == "MODEL" and re.fullmatch(r"[\w.-]+", value):
        assert value in {*weights.known_models(), *PLANTED}, line
    if name in ("ENGINE", "DTYPE", "PAIR") and "<" not in value:
        assert value in RunConfig.model_fields[name.lower()].annotation.__args__, line
    if name == "TASK" and "<" not in value:
        discover.task(value)
    if name == "LAYOUT" and "<" not in value:
        assert value in {"all", *(layout for task in ("gated", "planted") for layout in discover.task(task).LAYOUTS)}, (
            line
        )


def check_flags(line: str, arguments: list[str]) -> None:
    """A `kvnotes` command's flags are among those that it explains."""
    flags = [one.partition("=")[0] for one in arguments if one.startswith("--")]
    if flags and arguments[0] in COMMANDS:
        explained = CliRunner().invoke(cli.app, [arguments[0], "--help"], env={"COLUMNS": "200"}).output
        assert [flag for flag in flags if flag not in explained] == [], line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_is_a_setting(page):
    """`--flag` in running text: a setting of the runs or of a study, or one of the tools that the page calls."""
    settings = {name.replace("_", "-") for study in discover.studies() for name in settings_of(study).model_fields}
    settings |= {name.replace("_", "-") for block in fenced(text(page), "yaml") for name in yaml.safe_load(block) or ()}
    flags = set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", text(page)))
    assert flags - settings - {"help", "out"} == set()


def test_what_was_to_come_is_not_there_yet():
    """Delete from TO_COME what has come."""
    schema = records.json_schema()
    there = {"targets": TARGETS, "commands": COMMANDS, "settings": KNOWN, "fields": set(schema["properties"])}
    assert {kind: sorted(names & there[kind]) for kind, names in TO_COME.items()} == {kind: [] for kind in TO_COME}


def settings_of(study: str) -> type[RunConfig]:
    return getattr(discover.study(study), "Settings", RunConfig)


# --- reading a record ---------------------------------------------------------------------------------------


def test_every_field_of_a_record_is_explained():
    """Every field of the schema is named as `code` on the page, and the tables name no other field."""
    page = text(DOCS / "reading-a-record.md")
    named = set(re.findall(r"`(\w+)`", page))
    schema = json.loads((ROOT / "kvnotes" / "record.schema.json").read_text(encoding="utf-8"))
    fields = {f for part in (schema, *schema["$defs"].values()) for f in part.get("properties", ())}
    assert sorted(fields - named) == []
    listed = {
        f for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page, re.MULTILINE) for f in re.findall(r"\w+", row)
    }
    assert sorted(listed - fields - TO_COME["fields"]) == []


def test_the_pages_python_runs():
    """Python on the reading page runs as it stands, on the committed records."""
    for block in fenced(text(DOCS / "reading-a-record.md"), "python"):
        done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


# --- methods ------------------------------------------------------------------------------------------------


def sections(page: str) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


METHOD = ("Question", "Source", "Intervention", "Control", "Statistics", "Cross-fitting", "Settings", "Limits")


@pytest.mark.parametrize("study", sorted(discover.studies()))
def test_every_study_has_its_method(study):
    check_method(study, text(DOCS / "methods.md"), ROOT)


def check_method(study: str, page: str, root: Path) -> None:
    section = sections(page)[study]
    assert tuple(re.findall(r"^- \*\*([\w-]+)\*\*:", section, re.MULTILINE)) == METHOD
    line = section.split("**Settings**:")[1].split("- **Limits**")[0]
    said = {name: yaml.safe_load(value) for name, value in re.findall(r"`(\w+): ([^`]+)`", line)}
    assert said == config.read_yaml(root / "configs" / f"{study}.yaml")


def test_every_method_is_of_a_study():
    with_settings = {name for name, section in sections(text(DOCS / "methods.md")).items() if "**Settings**" in section}
    assert with_settings == set(discover.studies())


# --- models -------------------------------------------------------------------------------------------------


def test_what_is_refused_is_named():
    from kvnotes import models

    page = text(DOCS / "own-model.md")
    assert [kind for kind in (*models.STATEFUL, *models.ALIBI) if f"`{kind}`" not in page] == []
    assert [check for check in SELF_CHECKS if check not in page] == []


SELF_CHECKS = (
    "bridge equals plain transformers",
    "explicit masks equal the model's own",
    "cached decode equals full forward",
    "an edited row equals the copied cache",
    "a cache edit moves the logits",
    "a hook moves the logits",
    "a prefix does not depend on what follows",
    "a forward leaves its state unchanged",
)


def test_the_self_checks_are_those_of_the_records():
    found = [one.model.self_check for one in records.find(ROOT / "results", study="locality").values()]
    assert found
    assert {name for one in found for name in one} == set(SELF_CHECKS)


# --- pages that are followed --------------------------------------------------------------------------------


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(how, path, content) of each fenced block under a line that says where it belongs."""
    label = r"^(Add to the end of |Add to `SCENARIOS` in )?`([\w./-]+)`:\n\n```\w+\n(.*?)^```$"
    return re.findall(label, text(page), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The tracked files as they stand, but for records and drawn figures, and the environment of this test."""
    into = tmp_path_factory.mktemp("copy")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout: the pages are followed in a copy of the tracked files")
    for name in listed.stdout.split("\0"):
        if name and not name.startswith(("results/", "figures/out/")) and (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)
    (into / ".venv").symlink_to(sys.prefix)
    return into


def follow(page: Path, into: Path) -> list[str]:
    """Write the page's blocks to their paths and run the commands of its numbered steps; returns what they printed."""
    for how, path, content in blocks(page):
        (into / path).parent.mkdir(exist_ok=True)
        if how.startswith("Add to the end"):
            with (into / path).open("a", encoding="utf-8") as end:
                end.write(content)
        elif how:
            source = (into / path).read_text(encoding="utf-8")
            (into / path).write_text(
                source.replace("\n)  # fmt: skip\n", f"\n{content})  # fmt: skip\n"), encoding="utf-8"
            )
        else:
            (into / path).write_text(content, encoding="utf-8")
    steps = [section for name, section in sections(text(page)).items() if re.match(r"\d", name)]
    lines = [line for section in steps for block in fenced(section, "sh") for line in block.splitlines()]
    # the environment is this test's: `make` must not install into it
    return [shell(re.sub(r"^make ", "make -o .venv/.ready ", line), into) for line in lines]


def shell(line: str, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS")}
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_add_a_probe_can_be_followed(copy):
    page = DOCS / "add-a-probe.md"
    ran, shown, tested, parts = follow(page, copy)
    (path,) = (copy / "results" / "planted-both" / "nearest").glob("*.json")
    record = records.read(path)
    found = {effect.name: effect.estimate for effect in record.summary.effects if effect.gated}
    assert found["nearest"] == pytest.approx(0, abs=1e-3)
    assert found["notes_only"] == pytest.approx(1, abs=1e-3)
    assert record.summary.headline in ran
    assert record.summary.headline in shown
    drawn = {one.suffix for one in (copy / "figures" / "out" / "planted-both" / "nearest").iterdir()}
    assert drawn == {".pdf", ".png"}
    assert "4 passed" in tested
    found_parts = re.search(r"(\d+) passed", parts)
    assert found_parts
    assert int(found_parts[1]) >= 11  # 3 of this study, and imports and settings of all
    check_method("nearest", text(copy / "docs" / "methods.md"), copy)
    ours = [path for _, path, _ in blocks(page) if path.endswith(".py")]
    shell(f".venv/bin/ruff check {' '.join(ours)} && .venv/bin/ruff format --check {' '.join(ours)}", copy)


@pytest.mark.slow
def test_add_a_scenario_can_be_followed(copy):
    before = len(discover.task("gated").SCENARIOS)
    (tested,) = follow(DOCS / "add-a-scenario.md", copy)
    assert "passed" in tested
    count = shell('.venv/bin/python -c "from tasks.scenarios import SCENARIOS; print(len(SCENARIOS))"', copy)
    assert int(count) == before + 2
    shell(".venv/bin/ruff check tasks && .venv/bin/ruff format --check tasks", copy)


# --- API reference ------------------------------------------------------------------------------------------


def undocumented(path: Path) -> list[str]:
    """Public functions, classes and methods of a module without a docstring, and the module itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    inside = [(node, tree) for node in tree.body if isinstance(node, kinds)]
    inside += [
        (node, owner)
        for owner, _ in inside
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, kinds)
    ]
    public = [
        node for node, owner in inside if not (node.name.startswith("_") or getattr(owner, "name", "").startswith("_"))
    ]
    return [getattr(node, "name", path.stem) for node in (tree, *public) if not (ast.get_docstring(node) or stub(node))]


def stub(node: ast.AST) -> bool:
    """A protocol's member, whose body is `...` alone."""
    body = getattr(node, "body", [])
    return len(body) == 1 and isinstance(body[0], ast.Expr) and getattr(body[0].value, "value", None) is ...


@pytest.mark.parametrize("package", PUBLIC)
def test_everything_public_has_a_docstring(package):
    """Without torch: from the source alone."""
    found = {str(path.relative_to(ROOT)): undocumented(path) for path in sorted((ROOT / package).rglob("*.py"))}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_reference_is_made_without_torch(tmp_path):
    """`make docs` makes it of every package; here of modules that must not need torch, where torch cannot be found."""
    light = [
        "kvnotes.records",
        "kvnotes.config",
        "kvnotes.effects",
        "kvnotes.stats",
        "kvnotes.select",
        "probes.locality",
    ]
    code = (
        "import pathlib, sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name in ('torch', 'transformers', 'transformer_lens'): raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        f"import pdoc; pdoc.pdoc(*{light!r}, output_directory=pathlib.Path({str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "kvnotes" / "records.html").read_text(encoding="utf-8")
    assert "write_arrays" in page
    assert "validated when it is built" in page


def test_the_reference_is_of_every_package():
    (recipe,) = re.findall(r"^docs:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert set(PUBLIC) <= set(recipe.split())
    ignored = subprocess.run(["git", "check-ignore", "build/docs"], cwd=ROOT, capture_output=True, check=False)
    assert ignored.returncode in (0, 128)  # 128: not a git checkout

"""The commands beside the studies: registry, samples with competence, calibration, timing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvnotes import calibrate, cli, preview
from kvnotes import config as configs
from kvnotes.calibrate import Line
from kvnotes.config import RunConfig
from kvnotes.planted import PLANTED


def console() -> Console:
    return Console(file=io.StringIO(), width=200, force_terminal=False, highlight=False)


def text(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_models_lists_the_registry():
    listed = CliRunner().invoke(cli.app, ["models"])
    assert listed.exit_code == 0
    for name in ("qwen2.5-coder-0.5b", "smollm2-135m", "gemma-3-270m", "qwen3-8b"):
        assert name in listed.output


def test_a_sample_with_spans_and_competence():
    flags = {"model": "planted-notes", "task": "planted", "layout": "words_field_first", "n": 12}
    out = console()
    preview.show(configs.make(RunConfig, study="tasks", flags=flags), out)
    shown = text(out)
    assert "words_field_first" in shown
    assert "0 pairs dropped" in shown
    # the row of all pairs: 12 of them, 12 through the gate, both arms right, every argmax right
    row = next(line for line in shown.splitlines() if " all " in line)
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells == ["words_field_first", "all", "12", "12", "12", "12", "24 of 24", "8.00"]
    for span in ("field", "rule_value", "delimiter", "answer_prefix"):
        assert span in shown


def test_every_planted_model_is_calibrated_and_a_wrong_number_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "PLANTED", {"planted-mixed-gqa": PLANTED["planted-mixed-gqa"]})
    lines = calibrate.run(tmp_path, console())
    assert {line.measure for line in lines if line.study == "locality"} == {
        "field_only",
        "notes_only",
        "full_downstream",
    }
    assert all(line.holds for line in lines)
    wrong = Line(model="m", study="s", measure="x", expected=0.3, measured=0.302)
    assert not wrong.holds
    assert not Line(model="m", study="s", measure="x", expected=0.0, measured=None).holds
    out = console()
    out.print(calibrate.table([wrong]))
    assert "NO" in text(out)


@pytest.mark.parametrize("command", ["show", "diff", "summarise", "models", "tasks", "calibrate", "schema"])
def test_each_command_explains_itself(command):
    assert CliRunner().invoke(cli.app, [command, "--help"]).exit_code == 0

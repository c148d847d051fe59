"""`make calibrate`: every study on every planted model, the number its mechanism makes beside the measured one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvnotes import config as configs
from kvnotes import discover, runner
from kvnotes.config import RunConfig
from kvnotes.planted import PLANTED
from kvnotes.records import Record

TOLERANCE = 1e-3
PAIRS = 24


@dataclass(frozen=True, kw_only=True)
class Line:
    """One expected number and the measured one; `measured` is None where the study does not report it."""

    model: str
    study: str
    measure: str
    expected: float
    measured: float | None

    @property
    def holds(self) -> bool:
        """Whether the two agree to 1e-3."""
        return self.measured is not None and abs(self.measured - self.expected) <= TOLERANCE


def run(results: Path, console: Console) -> list[Line]:
    """Run every study that exists on every planted model that expects something of it; print and return the table."""
    lines = []
    for model, spec in PLANTED.items():
        for study in sorted(set(discover.studies()) & set(spec.expected)):
            record = runner.execute(discover.study(study), _config(study, model, results))
            lines += list(compare(record, spec.expected[study]))
    console.print(table(lines))
    return lines


def compare(record: Record, expected: Mapping[str, float]) -> Iterator[Line]:
    """Expected measures beside the record's gated effects of the same names."""
    measured = {effect.name: effect.estimate for effect in record.summary.effects if effect.gated}
    for name, value in expected.items():
        yield Line(
            model=record.model.name, study=record.study, measure=name, expected=value, measured=measured.get(name)
        )


def table(lines: list[Line]) -> Table:
    """The calibration table."""
    made = Table("model", "study", "measure", "expected", "measured", "agrees to 1e-3")
    for line in lines:
        got = "missing" if line.measured is None else f"{line.measured:.4f}"
        made.add_row(line.model, line.study, line.measure, f"{line.expected:g}", got, "yes" if line.holds else "NO")
    return made


def _config(study: str, model: str, results: Path) -> RunConfig:
    settings = getattr(discover.study(study), "Settings", RunConfig)
    layout = discover.task("planted").DEFAULT_LAYOUT
    flags = {"model": model, "task": "planted", "layout": layout, "n": PAIRS, "results": results}
    return configs.make(settings, study=study, flags=flags)

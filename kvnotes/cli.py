"""The command `kvnotes`: print a record, compare two, print their schema. No torch, so it starts at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvnotes import commandline, records, report

app = typer.Typer(
    help="Read the records of kvnotes studies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RecordFile = Annotated[
    Path, typer.Argument(metavar="RECORD", help="A record: results/<model>/<study>/<layout>.json")
]


@app.command()
def show(record: RecordFile) -> None:
    """Print a record: model, inclusion, effects with intervals, controls, tests, checks, provenance."""
    report.show(records.read(record), report.console())


@app.command()
def diff(a: RecordFile, b: RecordFile) -> None:
    """Compare two records. Exits with 0 if they are equal, timings aside, 1 if they differ, 2 on an error."""
    difference = report.compare(records.read(a), records.read(b))
    report.show_difference(difference, report.console())
    raise typer.Exit(0 if difference.equal else 1)


@app.command()
def schema() -> None:
    """Print the JSON Schema of records, as published in kvnotes/record.schema.json."""
    typer.echo(json.dumps(records.json_schema(), indent=2))


def main() -> None:
    """Run the command; a known failure is one line and exit code 2, never a traceback."""
    commandline.guard(app)


if __name__ == "__main__":
    main()

"""The command `kvnotes`: records, models, tasks, calibration. Torch is imported only by a command that needs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from kvnotes import commandline, records, report
from kvnotes.config import RunConfig

if TYPE_CHECKING:
    from kvnotes.sources import GGUFFile

app = typer.Typer(
    help="Read the records of kvnotes studies, and see what they would run on.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RecordFile = Annotated[Path, typer.Argument(metavar="RECORD", help="A record: results/<model>/<study>/<layout>.json")]
RecordFiles = Annotated[
    list[Path], typer.Argument(metavar="RECORD...", help="Records, or folders of them such as results")
]


@app.command()
def show(record: RecordFile) -> None:
    """Print a record: model, inclusion, effects with intervals, controls, tests, checks, provenance."""
    report.show(records.read(record), report.console())


@app.command()
def overview(
    results: Annotated[Path, typer.Option(help="folder of records")] = Path("results"),
    model: Annotated[str | None, typer.Option(help="of this model alone")] = None,
) -> None:
    """Print a line a study and model: the newest record, what it includes, took and says."""
    from kvnotes import weights

    found, only = records.find(results), None if model is None else weights.run_name(model)
    report.overview({name: one for name, one in found.items() if only in (None, one.model.name)}, report.console())


@app.command()
def ls(
    results: Annotated[Path, typer.Option(help="folder of records")] = Path("results"),
    model: Annotated[str | None, typer.Option(help="of this model alone")] = None,
) -> None:
    """Print a line a record: model, study, layout, date, pairs, result, and whether the code of now still fits it."""
    from kvnotes import listing, weights

    found, only = listing.listed(results), None if model is None else weights.run_name(model)
    report.listing([one for one in found if only in (None, one.model)], report.console())


@app.command()
def export(
    record: RecordFiles,
    out: Annotated[Path, typer.Option(help="the table to write: a .csv file, or .parquet (needs pyarrow)")],
) -> None:
    """Write records as one tidy table, a row for each instance and intervention, for pandas or R."""
    from kvnotes import export as exports
    from kvnotes import listing

    count = exports.write([records.read(path) for path in listing.collect(record)], out)
    report.console().print(f"{count} rows: {out}", soft_wrap=True)


@app.command()
def verify(record: RecordFiles) -> None:
    """Recompute every summary, hash, count, seed and id. Exits with 0 if all hold, 1 if not, 2 if a file cannot be read
    or a summary cannot be made again here."""
    from kvnotes import listing, verify

    out, found = report.console(), []
    for path in listing.collect(record):
        found.append(verify.verify(path))
        report.verdict(found[-1], out)
    crossed = verify.between(found)
    report.contradictions(crossed, out)
    raise typer.Exit(verify.code([*(one for each in found for one in each.findings), *(one for _, one in crossed)]))


@app.command()
def diff(a: RecordFile, b: RecordFile) -> None:
    """Compare two records. Exits with 0 if they are equal, timings aside, 1 if they differ, 2 on an error."""
    difference = report.compare(records.read(a), records.read(b))
    report.show_difference(difference, report.console())
    raise typer.Exit(0 if difference.equal else 1)


@app.command()
def summarise(record: RecordFile) -> None:
    """Recompute a record's summary from its own instances with the installed code; add its tokens' texts if it can."""
    from kvnotes import runner

    report.show(runner.resummarise(record), report.console())


@app.command()
def schema() -> None:
    """Print the JSON Schema of records, as published in kvnotes/record.schema.json."""
    typer.echo(json.dumps(records.json_schema(), indent=2))


@app.command()
def models(
    model: Annotated[str | None, typer.Option(help="fetch and verify this registry model now")] = None,
) -> None:
    """List the model registry and what is in the cache."""
    from kvnotes import weights

    if model is not None:
        weights.prepare(weights.entry_for(model))
    table = Table("model", "role", "weights", "source", "in the cache", box=box.SIMPLE_HEAD)
    for entry in map(weights.load_entry, weights.known_models()):
        source = entry.hub if entry.gguf is None else " or ".join(_places(entry.gguf))
        ready = (weights.cache_folder() / "models" / entry.name / "manifest.json").exists()
        held = "the hub's own cache" if entry.gguf is None else "yes" if ready else "no"
        table.add_row(entry.name, entry.role, entry.precision or "as published", source, held)
    report.console().print(table)


def _places(gguf: GGUFFile) -> list[str]:
    """Where a GGUF file can be fetched from, in order."""
    return [*([gguf.hub_repo] if gguf.hub_repo else []), f"{len(gguf.wheels)} wheels"]


def _preview(config: RunConfig) -> None:
    from kvnotes import preview

    preview.show(config, report.console())


# a preview measures nothing, so it has no use for these
UNUSED = frozenset({"results", "level", "resamples", "equivalence", "identity"})
app.command("tasks")(
    commandline.command(
        RunConfig,
        study="tasks",
        title="A sample prompt with its spans, and the model's competence",
        action=_preview,
        without=UNUSED,
    )
)


@app.command()
def calibrate(
    results: Annotated[Path, typer.Option(help="folder for the planted models' records")] = Path("results"),
) -> None:
    """Run every study on every planted model; exits with 1 if a number is not what its mechanism makes it."""
    from kvnotes import calibrate as calibration

    lines = calibration.run(results, report.console())
    raise typer.Exit(0 if all(line.holds for line in lines) else 1)


def main() -> None:
    """Run the command; a known failure is one line and exit code 2, never a traceback."""
    commandline.guard(app)


if __name__ == "__main__":
    main()

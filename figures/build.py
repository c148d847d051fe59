"""Draw records: `python -m figures.build RESULTS` draws every one, `draw_record` a single one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvnotes import discover
from kvnotes.commandline import guard
from kvnotes.errors import UnknownName
from kvnotes.records import Record, find

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OUT = Path("figures/out")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def studies() -> list[str]:
    """Studies that have a figure: the modules of this package that are called like one."""
    return sorted({*discover.stems("figures")} & {*discover.studies()})


def draw(study: str, records: Mapping[str, Record]) -> dict[str, Figure]:
    """The figures of one study's records, by figure name.

    Raises:
        UnknownName: if no module of this package draws that study.
    """
    if study not in studies():
        raise UnknownName(kind="figure", name=study, known=studies())
    return importlib.import_module(f"figures.{study}").draw(records)


def draw_record(record: Record, path: Path, out: Path = OUT) -> list[Path]:
    """Draw the record that stands at `path` into `out`, in the folders of the results; returns the files.

    Raises:
        UnknownName: if the record's study has no figure.
        RecordError: if a file cannot be written.
    """
    name = "/".join(path.with_suffix("").parts[-3:])
    return _draw_and_save(record.study, {name: record}, out)


def _draw_and_save(study: str, records: Mapping[str, Record], out: Path) -> list[Path]:
    from figures import style  # matplotlib takes half a second; `--help` must not wait for it

    with style.styled():
        drawn = draw(study, records)
        return [file for name, figure in drawn.items() for file in style.save(figure, out / name)]


@app.command()
def build(
    results: Annotated[Path, typer.Argument(help="Folder of records.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="Folder for PNG and PDF files.")] = OUT,
    only: Annotated[str | None, typer.Option(help="Draw this study alone.")] = None,
) -> None:
    """Draw every record under RESULTS."""
    if only is not None and only not in studies():
        raise UnknownName(kind="figure", name=only, known=studies())
    groups: dict[str, dict[str, Record]] = {}
    for name, record in find(results, study=only).items():
        groups.setdefault(record.study, {})[name] = record
    for study, records in groups.items():
        for file in _draw_and_save(study, records, out):
            typer.echo(file)


def main() -> None:
    """Run the command; a known failure is one line and exit code 2, never a traceback."""
    guard(app)


if __name__ == "__main__":
    main()

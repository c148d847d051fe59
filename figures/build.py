"""Draw records: `python -m figures.build RESULTS` draws every one and the composed pages, `draw_record` a single one.

A record that cannot be read, that failed a check, or that its figure cannot draw becomes a figure that says why; so
does what shows several models and cannot be drawn.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from figures import side
from kvnotes import discover
from kvnotes.commandline import guard
from kvnotes.errors import UnknownName
from kvnotes.records import Record, find_readable, record_files, record_name, safe_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OUT = Path("figures/out")
LAYOUT = "table_field_first"  # of the composed pages

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to draw from which folder into which; of some models alone, in their order, where any is named."""

    results: Path
    out: Path
    layout: str
    models: tuple[str, ...] = ()
    """Folders under `results`."""


# --- one study's figures ----------------------------------------------------------------------------------


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
    from figures import style  # matplotlib takes half a second; `--help` must not wait for it

    with style.styled():
        drawn = draw(record.study, {record_name(path): record})
        return [file for name, figure in drawn.items() for file in style.save(figure, out / name)]


def draw_safely(study: str, records: Mapping[str, Record]) -> tuple[dict[str, Figure], dict[str, str]]:
    """The figures of those records that can be drawn, and by name why others cannot; what shows several models has the
    name `side_by_side` of the study."""
    drawn, why = side.attempt(lambda: draw(study, records), again=f"make probe-{study}")
    if drawn is not None:
        return drawn, {}
    if len(records) == 1:
        return {}, dict.fromkeys(records, why)
    alone = {name: draw_safely(study, {name: record}) for name, record in records.items()}
    faults = {name: reason for _, found in alone.values() for name, reason in found.items()}
    kept = {name: record for name, record in records.items() if name not in faults}
    if faults and kept:
        drawn, others = draw_safely(study, kept)
        return drawn, faults | others
    own = {name: figure for figures, _ in alone.values() for name, figure in figures.items()}
    return own, faults or {side_by_side(study): why}


def side_by_side(study: str) -> str:
    """The name of what shows several models and cannot be drawn."""
    return f"{study}/side-by-side"


# --- records ----------------------------------------------------------------------------------------------


def drawable(results: Path, study: str) -> tuple[dict[str, Record], dict[str, str]]:
    """A study's records, and by a record's name why it is not drawn: it cannot be read, or it failed a check.

    Raises:
        RecordError: if the folder does not exist.
    """
    records, unreadable = find_readable(results, study=study)
    faults = {record_name(path): reason for path, reason in unreadable.items()} | all_failed(records)
    return {name: record for name, record in records.items() if name not in faults}, dict(sorted(faults.items()))


def all_failed(records: Mapping[str, Record]) -> dict[str, str]:
    """Of records by name, those that are not to be drawn, and why: a failed check, or another study's folder."""
    return {name: reason for name, record in records.items() if (reason := failed(record, name.split("/")[1]))}


def failed(record: Record, study: str) -> str:
    """Which check a record failed, in words; empty where it kept all."""
    if record.study != study:
        return f"it is a record of another study, {record.study}: move it to that study's folder"
    checks = {one.name: one for one in record.checks} | dict(record.model.self_check)
    missed = [
        f"{name} is {one.value:.2g}, bound {one.bound:.2g}" if one.value is not None and one.bound is not None else name
        for name, one in checks.items()
        if not one.passed
    ]
    return f"a check failed: {', '.join(missed)}. Run `make probe-{study}` again" if missed else ""


@cache
def _read(results: Path, study: str) -> tuple[dict[str, Record], dict[str, str]]:
    return drawable(results, study)  # a process draws a study's own figures and pages that show it too


def _of_models(order: Order, study: str) -> tuple[dict[str, Record], dict[str, str]]:
    """As `drawable`, of the models asked for, in their order."""
    records, faults = _read(order.results, study)
    if not order.models:
        return records, faults
    wanted = {model: [name for name in (*records, *faults) if name.split("/")[0] == model] for model in order.models}
    names = [name for found in wanted.values() for name in found]
    return ({name: records[name] for name in names if name in records}, {n: faults[n] for n in names if n in faults})


# --- jobs -------------------------------------------------------------------------------------------------


def run(name: str, order: Order) -> tuple[list[Path], list[str]]:
    """Draw one study or page; returns the files and warnings.

    Raises:
        RecordError: if a file cannot be written.
    """
    from figures import composed, style

    with style.styled():
        if name in studies():
            return _run_study(name, order)
        page = composed.get(name)
        records: dict[str, Record] = {}
        faults: dict[str, str] = {}
        for study in page.studies:
            found, bad = _of_models(order, study)
            records |= found
            faults |= bad
        ranks = {model: rank for rank, model in enumerate(order.models)}
        records = dict(sorted(records.items(), key=lambda item: _place(item[0], ranks)))
        models = composed.models_of(page, records, layout=order.layout, faults=faults)
        return composed.publish(page, models, layout=order.layout, out=order.out), []


def _place(name: str, ranks: Mapping[str, int]) -> tuple[int, str]:
    return ranks.get(name.split("/", maxsplit=1)[0], 0), name


def _run_study(study: str, order: Order) -> tuple[list[Path], list[str]]:
    from figures import page, style

    records, faults = _of_models(order, study)
    drawn, undrawn = draw_safely(study, records) if records else ({}, {})
    faults |= undrawn
    drawn |= {name: page.notice(f"Not drawn: {name}", reason) for name, reason in faults.items()}
    files = [file for name, figure in drawn.items() for file in style.save(figure, order.out / name)]
    missing = [] if records or faults else [f"no record of {study}: run `make probe-{study}`"]
    return files, [*missing, *(f"{name} is not drawn: {reason}" for name, reason in faults.items())]


def names(order: Order, only: Sequence[str]) -> list[str]:
    """The studies and pages to draw: those asked for, or all that there are records of and every whole page.

    Raises:
        UnknownName: for a name that is neither a study nor a page nor a panel.
    """
    from figures import composed

    known = [*studies(), *composed.pages()]
    for name in only:
        if name not in known:
            raise UnknownName(kind="figure", name=name, known=known)
    if only:
        return list(dict.fromkeys(only))
    held = {path.parent.name for path in record_files(order.results)}
    return [*composed.whole(), *(study for study in studies() if study in held)]


def model_folders(results: Path, models: Sequence[str]) -> tuple[str, ...]:
    """The folders of the models asked for; one may be asked for as a run would be, by a hub's name or a folder.

    Raises:
        UnknownName: for a model without any record.
    """
    from kvnotes.weights import run_name

    known = {path.parent.parent.name for path in record_files(results)}
    folders: dict[str, str] = {}
    for model in models:
        folders.setdefault(safe_name(run_name(model)), model)
    for folder, model in folders.items():
        if folder not in known:
            raise UnknownName(kind="model among the records", name=model, known=known)
    return tuple(folders)


def check_layout(results: Path, layout: str) -> None:
    """A page shows one layout, which a task or a record has.

    Raises:
        UnknownName: for another, and for `all`, which is the layout of no pair.
    """
    known = {re.sub(r"-[0-9a-f]{8}$", "", path.stem) for path in record_files(results)} - {side.ALL}
    for stem in discover.stems("tasks"):
        with contextlib.suppress(UnknownName):  # a task's helper
            known |= {*discover.task(stem).LAYOUTS}
    if layout not in known:
        raise UnknownName(kind="layout of a page", name=layout, known=known)


def draw_all(order: Order, wanted: Sequence[str], jobs: int) -> Iterator[tuple[list[Path], list[str]]]:
    """Draw several studies and pages, in so many processes; what each made, in the order asked for."""
    task = partial(run, order=order)
    if min(jobs, len(wanted)) < 2:
        yield from map(task, wanted)
        return
    # spawned, not forked: a process starts the same on every system, whatever this one has open
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(wanted)), mp_context=context) as pool:
        yield from pool.map(task, wanted)


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@app.command()
def build(
    results: Annotated[Path, typer.Argument(help="Folder of records.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="Folder for figures and tables.")] = OUT,
    only: Annotated[list[str] | None, typer.Option(help="A study, a page (fig3) or a panel (fig3a) to draw.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="A model to show, in this order; all where none.")] = None,
    layout: Annotated[str, typer.Option(help="The layout that the composed pages show.")] = LAYOUT,
    jobs: Annotated[int, typer.Option(help="Processes; 0 is one a processor.")] = 0,
) -> None:
    """Draw every record under RESULTS, and the paper's figures 3 and 15 and tables 3 to 5 from them."""
    check_layout(results, layout)
    order = Order(results=results, out=out, layout=layout, models=model_folders(results, model or []))
    for files, warnings in draw_all(order, names(order, only or []), jobs or processors()):
        for file in files:
            typer.echo(file)
        for warning in warnings:
            typer.echo(f"warning: {warning}", err=True)


def main() -> None:
    """Run the command; a known failure is one line and exit code 2, never a traceback."""
    guard(app)


if __name__ == "__main__":
    main()

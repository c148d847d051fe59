"""All records in a folder: what each says, and whether the code of now still fits it. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from kvnotes import discover, measures, records, runner
from kvnotes.errors import KVNotesError, UnknownName
from kvnotes.records import OtherSchema, Record, RecordError

CURRENT, STALE, DAMAGED = "current", "stale", "damaged"
UNKNOWN = "-"


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One record file. Of one that cannot be read, model, study and layout are its folders' and its file's names."""

    name: str
    model: str
    study: str
    layout: str
    date: str
    pairs: str
    headline: str
    state: str
    reasons: tuple[str, ...]


def listed(results: Path) -> list[Listed]:
    """Every record under a results folder, by name. Raises RecordError where there is no such folder."""
    return [_listed(path) for path in records.record_files(results)]


def collect(given: Sequence[Path]) -> list[Path]:
    """Record files, and those in the given folders: a results folder, a model's or a study's.

    Raises:
        RecordError: for a folder without any.
    """
    return [path for place in given for path in (_inside(place) if place.is_dir() else [place])]


def misfits(record: Record) -> Iterator[str]:
    """Why the code of now does not fit a record: its study, settings, task or measures are other ones."""
    try:
        runner.study_of(record)
        task = discover.task(record.task)
    except UnknownName as error:
        yield str(error)
        return
    except ValidationError as error:
        fault = error.errors()[0]
        yield f"the study no longer takes its setting {'.'.join(map(str, fault['loc']))}: {fault['msg']}"
        return
    if record.layout != "all" and record.layout not in task.LAYOUTS:
        yield f"task {record.task} no longer has the layout {record.layout}"
    wanted = {path[0] for paths in measures.declared(record.study).values() for path in paths}
    found = {name for one in record.instances for name in one.measures}
    if found and (gone := sorted(wanted - found)):
        yield f"no instance has {', '.join(gone)}, which the study now measures"


def _listed(path: Path) -> Listed:
    name = records.record_name(path)
    model, study, layout = name.split("/")
    try:
        record = records.read(path)
    except RecordError as error:
        return Listed(
            name=name,
            model=model,
            study=study,
            layout=layout,
            date=UNKNOWN,
            pairs=UNKNOWN,
            headline=UNKNOWN,
            state=STALE if isinstance(error, OtherSchema) else DAMAGED,
            reasons=(str(error).removeprefix(f"{path}: "),),
        )
    try:
        reasons = tuple(misfits(record))
    except KVNotesError as error:
        reasons = (str(error),)
    return Listed(
        name=name,
        model=record.model.name,
        study=record.study,
        layout=path.stem,  # with the digits of the settings' hash, where they are not the defaults
        date=record.provenance.created[:10],
        pairs=f"{record.inclusion.included} of {record.inclusion.generated}",
        headline=record.summary.headline,
        state=STALE if reasons else CURRENT,
        reasons=reasons,
    )


def _inside(folder: Path) -> list[Path]:
    known = discover.studies()
    found = sorted(p for p in folder.rglob("*.json") if p.resolve().parent.name in known and p.name[0] != ".")
    if not found:
        raise RecordError(f"{folder}: no record in this folder; they stand under results/<model>/<study>/.")
    return found

"""All records in a folder: what each says, and whether the code of now still fits it. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from kvnotes import discover, measures, records, runner
from kvnotes.errors import KVNotesError, UnknownName
from kvnotes.records import OtherSchema, Record, RecordError

CURRENT, STALE, DAMAGED = "current", "stale", "damaged"
UNKNOWN = "-"
BEGINS = re.compile(rb'\s*\{\s*"schema_version"\s*:')


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
        study = runner.study_of(record)
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
        return
    found = {name for one in record.instances for name in one.measures}
    if found and (gone := sorted(measures.expected(record.study) - found)):
        yield f"no instance has {', '.join(gone)}, which the study now measures"
    made = {pair.id: pair for pair in runner.generate(study.config)}
    kept = sum(one.id in made and runner.is_of(one, made[one.id]) for one in record.instances)
    if not kept == len(made) == len(record.instances):
        yield (
            f"the task makes other pairs of its settings now: {kept} of its {len(record.instances)} are among them. It "
            "stays valid, but cannot be made again or compared pair by pair"
        )


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
    files = (path for path in folder.rglob("*.json") if path.name[0] != "." and path.is_file())
    found = sorted(path for path in files if path.resolve().parent.name in known or _begins_as_record(path))
    if not found:
        raise RecordError(f"{folder}: no record in this folder; they stand under results/<model>/<study>/.")
    return found


def _begins_as_record(path: Path) -> bool:
    """Whether a file in no known study's folder is meant as a record, such as one of a study that is gone."""
    try:
        with path.open("rb") as file:
            return BEGINS.match(file.read(200)) is not None
    except OSError:
        return True  # whoever reads it will say why it cannot be read

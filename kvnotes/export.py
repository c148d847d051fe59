"""Records as one tidy table: a row for each instance and intervention, for pandas or R. No torch.

An instance that was not measured has one row, so that none is lost. `intervention` is the number's path in the record's
measures, with slots, layers and heads by name (`single.delimiter[3]`, `map.4.request[0]`). `value` is any number that a
study kept; `margin` and `recovery` are filled where it is a margin (see `kvnotes.measures`), in logits and in units of
the gap between the instance's own unedited arms.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvnotes import measures
from kvnotes.errors import KVNotesError
from kvnotes.records import Instance, Record

if TYPE_CHECKING:
    import pyarrow as pa

LABELS = ("instance", "group", "scenario", "domain", "layout", "kind", "status", "reason", "seed")
OF_RUN = ("model", "study", "task", "config")  # config: the first eight digits of the settings' hash
GATE = ("base_margin", "target_margin", "gap")
PLACES = ("position", "slot", "layer", "head", "kv_head")
NUMBERS = ("value", "margin", "recovery")
WHOLE = {"seed", "position", "layer", "head", "kv_head"}
Row = Mapping[str, Any]


class ExportError(KVNotesError):
    """A table that cannot be written."""


def write(records: Sequence[Record], path: Path) -> int:
    """Write the records' table to a CSV or Parquet file, by the file's ending, in one step; returns how many rows.

    Raises:
        ExportError: for another ending, for Parquet without pyarrow, or where the file cannot be written.
    """
    writer = _writer(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            count = writer(records, columns(records), temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ExportError(f"{path}: cannot be written ({error.strerror or error}); choose another --out.") from error
    return count


def columns(records: Iterable[Record]) -> tuple[str, ...]:
    """The table's columns: those of every record, and one for each counterbalanced choice that any of them made."""
    choices = dict.fromkeys(f"balance_{name}" for record in records for one in record.instances for name in one.balance)
    return (*OF_RUN, *LABELS, *choices, *GATE, "intervention", *PLACES, *NUMBERS)


def rows(record: Record) -> Iterator[Row]:
    """The record's rows; a column that a row lacks is empty. Raises UnknownName for a study that no longer exists."""
    margins = measures.declared(record.study)
    made = record.provenance
    run = {"model": record.model.name, "study": record.study, "task": record.task, "config": made.config_hash[:8]}
    for one in record.instances:
        about = run | _about(one)
        found = False
        for number in measures.numbers(one, margins, record.model):
            found = True
            yield about | {"intervention": number.name, **number.place, **_values(one, number)}
        if not found:
            yield about


def _about(one: Instance) -> dict[str, Any]:
    labels = {name: getattr(one, "id" if name == "instance" else name) for name in LABELS}
    choices = {f"balance_{name}": choice for name, choice in one.balance.items()}
    return labels | choices | {name: getattr(one.gate, name, None) for name in GATE}


def _values(one: Instance, number: measures.Number) -> dict[str, float | None]:
    if not number.is_margin:
        return {"value": number.value}
    return {"value": number.value, "margin": number.value, "recovery": measures.recovery(one, number.value)}


def _writer(path: Path) -> Callable[[Sequence[Record], Sequence[str], Path], int]:
    writers = {".csv": _csv, ".parquet": _parquet}
    if path.suffix not in writers:
        raise ExportError(f"{path}: a table is a .csv or a .parquet file; name --out so.")
    if path.suffix == ".parquet":
        _arrow()
    return writers[path.suffix]


def _csv(records: Sequence[Record], names: Sequence[str], path: Path) -> int:
    count = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, names, restval="", lineterminator="\n")
        table.writeheader()
        for record in records:
            for row in rows(record):
                table.writerow(row)
                count += 1
    return count


def _parquet(records: Sequence[Record], names: Sequence[str], path: Path) -> int:
    """A row group a record, so that one record at a time is in memory."""
    arrow, parquet = _arrow()
    kinds = {name: arrow.int64() for name in WHOLE} | {name: arrow.float64() for name in (*GATE, *NUMBERS)}
    schema: pa.Schema = arrow.schema([(name, kinds.get(name, arrow.string())) for name in names])
    count = 0
    with parquet.ParquetWriter(path, schema) as file:
        for record in records:
            table = arrow.Table.from_pylist(list(rows(record)), schema=schema)
            file.write_table(table)
            count += table.num_rows
    return count


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ExportError(
            "a .parquet file needs pyarrow: `pip install '.[export]'` brings it. A .csv file needs nothing."
        ) from error
    return pyarrow, pyarrow.parquet

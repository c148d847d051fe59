"""The resume file: finished instances, one a line, so that a killed run goes on where it was. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvnotes import records
from kvnotes.records import Instance


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One measured instance, and the numbers the runner keeps beside it."""

    instance: Instance
    identities: Mapping[str, float]
    noise: float

    def line(self) -> str:
        """The instance as one JSON line."""
        extra = {"identities": dict(self.identities), "noise": self.noise}
        return json.dumps({"instance": self.instance.model_dump(mode="json"), **extra})


class ResumeFile:
    """Finished instances of one run beside its record; its first line says which run they belong to."""

    def __init__(self, record: Path, *, key: Mapping[str, Any]) -> None:
        self.path = record.with_name(f".{record.stem}.resume.jsonl")
        self.key = dict(key)

    def read(self) -> dict[str, Finished]:
        """Instances by id, or none where there is no file, or where it belongs to other settings, code or weights.

        Reading stops at the first line that a kill or a failing disk left broken; what follows is measured again.
        """
        try:
            first, *lines = self.path.read_bytes().split(b"\n")[:-1] or [b""]  # whole lines end with a newline
        except FileNotFoundError:
            return {}
        except OSError as err:
            records.cannot_write(self.path, err)
        found: dict[str, Finished] = {}
        try:
            if json.loads(first) != self.key:
                return {}
            for line in lines:
                done = _parse(line)
                found[done.instance.id] = done
        except (ValueError, KeyError, TypeError):  # not JSON, not UTF-8, or JSON of another shape
            pass
        return found

    def start(self, finished: Mapping[str, Finished]) -> None:
        """Begin the file anew with what is finished. Raises RecordError where the folder cannot be written."""
        text = "".join(f"{line}\n" for line in [json.dumps(self.key), *(one.line() for one in finished.values())])
        records.write_atomically(text.encode(), self.path)

    def add(self, finished: Finished) -> None:
        """Append one instance and hand it to the disk, so that a kill loses none that was measured."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{finished.line()}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as err:
            records.cannot_write(self.path, err)

    def remove(self) -> None:
        """Drop the file: the record holds everything now."""
        self.path.unlink(missing_ok=True)


def _parse(line: bytes) -> Finished:
    data = json.loads(line)
    return Finished(
        instance=Instance.model_validate(data["instance"]), identities=data["identities"], noise=data["noise"]
    )

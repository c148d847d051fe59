"""The resume file: finished instances, one a line, so that a killed run goes on where it was. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvnotes import records
from kvnotes.records import Instance

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One measured instance, and the numbers the runner keeps beside it; `arrays` is the SHA-256 of its array file."""

    instance: Instance
    identities: Mapping[str, float]
    noise: float
    arrays: str | None = None

    def line(self) -> str:
        """The instance as one JSON line."""
        extra = {"identities": dict(self.identities), "noise": self.noise, "arrays": self.arrays}
        return json.dumps({"instance": self.instance.model_dump(mode="json"), **extra})


class ResumeFile:
    """Finished instances of one pass of a run, beside its record; its first line says which run they belong to.

    Arrays that a study collects stand in a folder beside it, a file an instance.
    """

    def __init__(self, record: Path, *, key: Mapping[str, Any], name: str = "") -> None:
        stem = f".{record.stem}.{name}.resume" if name else f".{record.stem}.resume"
        self.path = record.with_name(f"{stem}.jsonl")
        self.folder = record.with_name(f"{stem}.arrays")
        self.key = dict(key)

    def read(self) -> dict[str, Finished]:
        """Instances by id, or none where there is no file, or where it belongs to other settings, code or weights.

        Reading stops at the first line that a kill or a failing disk left broken; what follows is measured again, and
        so is an instance whose array file is gone or is another.
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
                if self._has_arrays(done):
                    found[done.instance.id] = done
        except (ValueError, KeyError, TypeError):  # not JSON, not UTF-8, or JSON of another shape
            pass
        return found

    def start(self, finished: Mapping[str, Finished]) -> None:
        """Begin the file anew with what is finished. Raises RecordError where the folder cannot be written."""
        text = "".join(f"{line}\n" for line in [json.dumps(self.key), *(one.line() for one in finished.values())])
        records.write_atomically(text.encode(), self.path)
        kept = {self._array_file(name) for name in finished}
        for stale in set(self.folder.glob("*")) - kept:
            stale.unlink(missing_ok=True)

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
        """Drop the file and the arrays: the record holds everything now."""
        self.path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def keep_arrays(self, name: str, arrays: Mapping[str, np.ndarray]) -> str:
        """Put an instance's arrays on the disk and return their file's SHA-256. Raises RecordError where it is full."""
        import numpy as np
        from safetensors.numpy import save

        data = save({key: np.asarray(array, order="C") for key, array in arrays.items()})
        records.write_atomically(data, self._array_file(name))
        return hashlib.sha256(data).hexdigest()

    def stacked(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """The arrays of the named instances, stacked on a new first axis in their order.

        Raises RecordError where two instances have other arrays, or arrays of other shapes.
        """
        import numpy as np
        from safetensors.numpy import load_file

        rows = [load_file(self._array_file(name)) for name in names]
        shapes = [{key: array.shape for key, array in row.items()} for row in rows]
        for name, shape in zip(names, shapes, strict=True):
            if shape != shapes[0]:
                raise records.RecordError(
                    f"the arrays of {name} ({_named(shape)}) cannot stand beside those of {names[0]} "
                    f"({_named(shapes[0])}): a study must collect the same arrays of every pair"
                )
        return {key: np.stack([row[key] for row in rows]) for key in (sorted(rows[0]) if rows else [])}

    def array(self, name: str, key: str) -> np.ndarray | None:
        """One array of the named instance; None where it has none of that name."""
        from safetensors import safe_open

        with safe_open(self._array_file(name), framework="np") as file:
            return file.get_tensor(key) if key in file.keys() else None  # noqa: SIM118 (no mapping)

    def _array_file(self, name: str) -> Path:
        return self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.safetensors"

    def _has_arrays(self, done: Finished) -> bool:
        if done.arrays is None:
            return True
        try:
            return hashlib.sha256(self._array_file(done.instance.id).read_bytes()).hexdigest() == done.arrays
        except OSError:
            return False


@dataclass(frozen=True, eq=False)
class Gathered:
    """The arrays that a study's `gather` gave of every instance that was not skipped, read from the disk one by one."""

    file: ResumeFile
    ids: tuple[str, ...]

    @classmethod
    def of(cls, file: ResumeFile, surveyed: Iterable[Finished]) -> Gathered:
        """Those of the instances that have any."""
        return cls(file, tuple(done.instance.id for done in surveyed if done.arrays is not None))

    def array(self, instance: str, name: str) -> np.ndarray | None:
        """One array of an instance, by their ids; None where the instance has none of that name."""
        return self.file.array(instance, name)


def _named(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items())


def _parse(line: bytes) -> Finished:
    data = json.loads(line)
    return Finished(
        instance=Instance.model_validate(data["instance"]),
        identities=data["identities"],
        noise=data["noise"],
        arrays=data["arrays"],
    )

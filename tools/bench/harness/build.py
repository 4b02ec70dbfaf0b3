"""Builds the two C programs of the bench into the user's cache, once per source version."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra")


class BuildError(Exception):
    """There is no C compiler, or it failed."""


def compiler() -> str | None:
    named = os.environ.get("CC")
    return shutil.which(named) if named else shutil.which("cc") or shutil.which("gcc")


def build(name: str) -> Path:
    cc = compiler()
    if cc is None:
        raise BuildError(
            "the bench's worker and load generator are C programs, but there is no C compiler "
            "(cc, gcc or $CC); on Debian: apt install gcc libc6-dev"
        )
    texts = [(SOURCES / file).read_bytes() for file in (f"{name}.c", "http_response.h")]
    digest = hashlib.sha256(b"\0".join([cc.encode(), *texts])).hexdigest()[:16]
    program = cache() / f"{name}-{digest}"
    if not program.exists():
        _compile(cc, name, program)
    return program


def cache() -> Path:
    """The bench's folder in the user's cache, created if missing."""
    above = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(above) / "omni-proxy" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compile(cc: str, name: str, program: Path) -> None:
    with tempfile.TemporaryDirectory(dir=program.parent) as folder:
        fresh = Path(folder) / name
        ran = subprocess.run(
            [cc, *FLAGS, str(SOURCES / f"{name}.c"), "-o", str(fresh)],
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            raise BuildError(f"{cc} could not build {name}.c:\n{ran.stderr.strip()}")
        fresh.replace(program)  # so that a concurrent bench never runs an incomplete program

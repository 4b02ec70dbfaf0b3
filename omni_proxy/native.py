"""Which build of the hot modules runs: compiled ones, or the Python text of the same files.

`use` is called before anything else is imported. The compiled modules are in one folder: that of
OMNI_PROXY_NATIVE, or `_native` beside this file, which tools/build-native fills. Its manifest names
the set: the modules, and size, time and SHA-256 of each file that they were made of. With
OMNI_PROXY_PURE=1, or without such a folder, the text runs.
Invariant: all of the compiled modules are used or none, and none where any text differs from what
was compiled. It must not import what is slow to import: every start waits for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

MANIFEST = "manifest.json"
SOURCES = Path(__file__).parents[1]
# Processes of one program say once why none of them uses the compiled modules.
_LOGGED = "OMNI_PROXY_NATIVE_REFUSED"


class NotUsable(Exception):
    """Why a set of compiled modules is not used."""


class NativeFinder:
    """Finds the compiled modules: for each its file."""

    def __init__(self, found: dict[str, str]) -> None:
        self._found = found

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._found.get(name)
        if file is None:
            return None
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, file))


def build() -> str:
    """`native` or `python`."""
    return "native" if any(isinstance(each, NativeFinder) for each in sys.meta_path) else "python"


def full_version(version: str) -> str:
    """As `--version` prints it."""
    return f"omni-proxy {version}" + (" (native build)" if build() == "native" else "")


def use() -> None:
    if os.environ.get("OMNI_PROXY_PURE") == "1":
        return
    folder = Path(os.environ.get("OMNI_PROXY_NATIVE") or Path(__file__).parent / "_native")
    try:
        found = usable_set(folder)
    except NotUsable as why:
        reason = f"{folder}: {why}"
        if os.environ.get(_LOGGED) != reason:
            os.environ[_LOGGED] = reason
            print(  # noqa: T201  there is no log yet
                f"omni-proxy: the native build in {reason}, so plain Python runs: "
                "tools/build-native makes a new one",
                file=sys.stderr,
            )
        return
    if found:
        sys.meta_path.insert(0, NativeFinder(found))


def usable_set(folder: Path) -> dict[str, str]:
    """The file of each compiled module; none where nothing was compiled. Raises NotUsable."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        suffix, modules = manifest["suffix"], folder / manifest["folder"]
        if suffix != EXTENSION_SUFFIXES[0]:
            raise NotUsable(f"is of another Python ({suffix})")
        files = {name: str(modules / f"{name}{suffix}") for name in manifest["modules"]}
        if getattr(sys, "frozen", False):
            return files  # a single file was put together as one, and has no text to compare with
        for path, (size, changed_at, digest) in manifest["sources"].items():
            if not is_unchanged(SOURCES / path, size, changed_at, digest):
                raise NotUsable(f"was made of another {path}")
        for name, size in manifest["modules"].items():
            if os.stat(files[name]).st_size != size:
                raise NotUsable(f"is damaged at {name}")
    except FileNotFoundError as error:
        if folder.is_dir() and any(path.name[0] != "." for path in folder.iterdir()):
            raise NotUsable(f"is not complete ({error.filename})") from None
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotUsable(f"can't be read ({error!r})") from None
    return files


def is_unchanged(path: Path, size: int, changed_at: int, digest: str) -> bool:
    """A look at the file suffices where its time is as it was; else its content decides."""
    try:
        seen = path.stat()
        if seen.st_size != size:
            return False
        if seen.st_mtime_ns == changed_at:
            return True
        from hashlib import sha256  # milliseconds, which a start in the folder of the build saves

        return sha256(path.read_bytes()).hexdigest() == digest
    except FileNotFoundError:
        return False

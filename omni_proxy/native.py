"""Selects the build of the hot modules: the native build, or the Python sources of the same files.

`use` is called before any other import. The compiled modules are in the folder OMNI_PROXY_NATIVE,
or `_native` next to this file, which tools/build-native fills. The folder's manifest lists the
modules, and size, time and SHA-256 of each source file. With OMNI_PROXY_PURE=1, or without such a
folder, the Python sources are used.
Invariant: either all compiled modules are used or none, and none if any source file differs from
the compiled one. Must not import slow modules, because every start waits for it.
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
# Set to the reason once it was printed, so that child processes don't print it again.
_LOGGED = "OMNI_PROXY_NATIVE_REFUSED"


class NotUsable(Exception):
    """The compiled modules can't be used. The message is a predicate, such as "is incomplete"."""


class NativeFinder:
    """Finds the compiled modules by their files."""

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
    """The version as printed by `--version`."""
    return f"omni-proxy {version}" + (" (native build)" if build() == "native" else "")


def use() -> None:
    if os.environ.get("OMNI_PROXY_PURE") == "1":
        return
    folder = Path(os.environ.get("OMNI_PROXY_NATIVE") or Path(__file__).parent / "_native")
    try:
        found = usable_set(folder)
    except NotUsable as why:
        reason = f"{folder}: it {why}"
        if os.environ.get(_LOGGED) != reason:
            os.environ[_LOGGED] = reason
            print(  # noqa: T201  the log isn't configured yet
                f"omni-proxy: not using the native build in {reason}; "
                "run tools/build-native to rebuild it",
                file=sys.stderr,
            )
        return
    if found:
        sys.meta_path.insert(0, NativeFinder(found))


def usable_set(folder: Path) -> dict[str, str]:
    """The file of each compiled module; empty if nothing was compiled. Raises NotUsable."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        suffix, modules = manifest["suffix"], folder / manifest["folder"]
        if suffix != EXTENSION_SUFFIXES[0]:
            raise NotUsable(f"was built for another Python ({suffix})")
        files = {name: str(modules / f"{name}{suffix}") for name in manifest["modules"]}
        if getattr(sys, "frozen", False):
            return files  # a frozen binary has no source files to compare with
        for path, (size, changed_at, digest) in manifest["sources"].items():
            if not is_unchanged(SOURCES / path, size, changed_at, digest):
                raise NotUsable(f"was built from a different {path}")
        for name, size in manifest["modules"].items():
            if os.stat(files[name]).st_size != size:
                raise NotUsable(f"has a damaged module {name}")
    except FileNotFoundError as error:
        if folder.is_dir() and any(path.name[0] != "." for path in folder.iterdir()):
            raise NotUsable(f"is incomplete ({error.filename} is missing)") from None
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotUsable(f"can't be read ({error!r})") from None
    return files


def is_unchanged(path: Path, size: int, changed_at: int, digest: str) -> bool:
    """Whether the file has this content. It is not read if its size and time are unchanged."""
    try:
        seen = path.stat()
        if seen.st_size != size:
            return False
        if seen.st_mtime_ns == changed_at:
            return True
        from hashlib import sha256  # slow to import, and rarely needed

        return sha256(path.read_bytes()).hexdigest() == digest
    except FileNotFoundError:
        return False

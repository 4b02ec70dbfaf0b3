"""Which build of the hot modules runs: compiled ones, or the Python text of the same files.

`use` is called before anything else is imported. The compiled modules are in one folder, each in a
file with its whole name: that of OMNI_PROXY_NATIVE, or `_native` beside this file, which
tools/build-native fills. With OMNI_PROXY_PURE=1, or without such a folder, the text runs.
Invariant: all of the compiled modules are used or none, and none where the text of one is newer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType


class NativeFinder:
    """Finds the compiled modules, all in one folder."""

    def __init__(self, folder: Path) -> None:
        suffix = EXTENSION_SUFFIXES[0]
        self.found = {
            path.name.removesuffix(suffix): str(path) for path in folder.glob(f"*{suffix}")
        }

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.found.get(name)
        if file is None:
            return None
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, file))


def build() -> str:
    """`native` or `python`."""
    return "native" if any(isinstance(each, NativeFinder) for each in sys.meta_path) else "python"


def full_version(version: str) -> str:
    """As `--version` prints it."""
    return f"omni-proxy {version}" + (" (native build)" if build() == "native" else "")


def newer_source(finder: NativeFinder) -> str:
    """A module whose text has changed since it was compiled; "" for none."""
    for name, file in finder.found.items():
        source, built_at = (
            Path(__file__).parents[1] / name.replace(".", "/"),
            os.stat(file).st_mtime,
        )
        for suffix in (".py", ".pxd", ".pyx"):
            path = source.with_suffix(suffix)
            if path.exists() and path.stat().st_mtime > built_at:
                return name
    return ""


def use() -> None:
    if os.environ.get("OMNI_PROXY_PURE") == "1":
        return
    folder = Path(os.environ.get("OMNI_PROXY_NATIVE") or Path(__file__).parent / "_native")
    finder = NativeFinder(folder)
    changed = newer_source(finder)
    if changed:
        print(  # noqa: T201  there is no log yet
            f"omni-proxy: the native build in {folder} is older than {changed}, so plain Python "
            "runs: tools/build-native makes a new one",
            file=sys.stderr,
        )
    elif finder.found:
        sys.meta_path.insert(0, finder)

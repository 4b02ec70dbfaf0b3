"""The entry point of dist/omni-proxy.pyz: unpacks the archive once, then runs the unpacked program.

Compiled modules can't be loaded from a zip file. Invariant: an unpacked folder is complete, because
it gets its name by an atomic rename. Uses only the standard library.
"""

from __future__ import annotations

import atexit
import os
import runpy
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

APP = "app/"  # the files to unpack
MADE_FOR = "made-for"  # Python's version and the content's hash, such as "3.11 1f0c..."
# Without a home folder: the folder of the parent process from the same archive, and its content.
UNPACKED = "_OMNI_PROXY_UNPACKED"


def main() -> None:
    archive = Path(sys.argv[0]).resolve()
    with zipfile.ZipFile(archive) as zipped:
        python, _, content = zipped.read(MADE_FOR).decode().partition(" ")
        if python != "{}.{}".format(*sys.version_info):
            sys.exit(
                f"{archive}: it needs Python {python}, but this is {sys.version.split()[0]}: run "
                f"python{python} {archive.name}"
            )
        folder = _folder(zipped, content)
    sys.path.insert(0, str(folder))
    runpy.run_module("omni_proxy", run_name="__main__", alter_sys=False)


def _folder(zipped: zipfile.ZipFile, content: str) -> Path:
    """The folder with this archive's unpacked content; unpacks it if it is missing."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omni-proxy"
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        private = base.stat().st_uid == os.getuid() and os.access(base, os.W_OK)
    except (OSError, RuntimeError):
        private = False
    if not private:
        return _for_this_run(zipped, content)
    there = base / content
    if not there.exists():
        made = _unpacked(zipped, Path(tempfile.mkdtemp(dir=base)))
        try:
            made.rename(there)
        except OSError:  # another process unpacked it first
            shutil.rmtree(made)
    return there


def _for_this_run(zipped: zipfile.ZipFile, content: str) -> Path:
    """Without a home folder, unpack at each start; child processes share the folder."""
    known, _, folder = os.environ.get(UNPACKED, "").partition(" ")
    if known == content and os.path.isdir(folder):
        return Path(folder)
    made = _unpacked(zipped, Path(tempfile.mkdtemp(prefix="omni-proxy-")))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    os.environ[UNPACKED] = f"{content} {made}"
    return made


def _unpacked(zipped: zipfile.ZipFile, folder: Path) -> Path:
    for name in zipped.namelist():
        if name.startswith(APP):
            zipped.extract(name, folder)
    app = folder / APP
    for each in app.iterdir():
        each.rename(folder / each.name)
    app.rmdir()
    return folder


if __name__ == "__main__":
    main()

"""The state file: where it is, what it held at the start, and what HTTP changed kept in it.

Invariant: after `keep` the disk has what it was given, or `error` says why not, and the next call
tries again. What somebody else has put there is set aside, never written over.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
from pathlib import Path

import trio

from omni_proxy.config.flags import Startup
from omni_proxy.config.parse import ConfigError, Problem
from omni_proxy.config.schema import Config
from omni_proxy.config.state import SavedState, read_state, render_state
from omni_proxy.system.tls_contexts import file_signature

_log = logging.getLogger(__name__)


def state_path(startup: Startup, config: Config) -> Path | None:
    """Where runtime changes are kept; None keeps them in memory only."""
    named = config.server.state_file
    if named == "off":
        return None
    if named != "auto":
        return Path(named)
    return startup.config_path.with_suffix(".state.toml") if startup.config_path else None


def state_at(path: Path | None) -> SavedState:
    """What is kept there; nothing where nothing is. Raises ConfigError."""
    if path is None:
        return SavedState()
    try:
        return read_state(path.read_bytes(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return SavedState()
    except OSError as error:
        problem = Problem("", None, f"cannot be read: {error.strerror}", file=str(path))
        raise ConfigError([_cure(path), problem], str(path)) from None
    except ConfigError as error:
        raise ConfigError([_cure(path), *error.problems], str(path)) from None


def _cure(path: Path) -> Problem:
    said = "holds what was set over HTTP"
    return Problem("", None, said, "mend it, or delete it to forget that", str(path))


class StateFile:
    """Whoever calls `keep` twice at once must see to the order himself."""

    def __init__(self, path: Path | None, state: SavedState) -> None:
        """`state` is what `state_at(path)` found."""
        self._path = path
        self._state: SavedState | None = state  # None: a write failed, who knows where
        self._seen = file_signature(path) if path else None  # how we left it, or found it
        self.error = ""
        if path is not None:
            sweep_leftovers(path)

    async def keep(self, path: Path | None, state: SavedState) -> None:
        """It runs whether or not it can be written: a full disk must not tie an operator's hands.

        To its end, though whoever asked for the change has left: what runs would be lost.
        """
        if (path, state) == (self._path, self._state):
            return
        if path is not None:
            try:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._write, path, state)
            except OSError as error:
                self._state, self.error = None, f"{path}: {error.strerror}"
                _log.error(
                    "the runtime state could not be saved: %s; it is tried again with the next "
                    "change, and at SIGHUP", self.error,
                )  # fmt: skip
                return
        self._path, self._state, self.error = path, state, ""

    def _write(self, path: Path, state: SavedState) -> None:
        found = file_signature(path)
        if found is None and path != self._path and state == SavedState():
            return  # nothing is there, and nothing is to be kept
        if found is not None and (path != self._path or found != self._seen):
            aside = path.with_name(f"{path.name}.old")
            path.replace(aside)
            _log.warning(
                "%s is not as this program left it, it is kept as %s: does another one use it?",
                path, aside,
            )  # fmt: skip
        write_atomically(path, render_state(state))
        self._seen = file_signature(path)


def sweep_leftovers(path: Path) -> None:
    """Remove what writers of `path` left beside it that were killed before the rename."""
    for aside in path.parent.glob(f".{glob.escape(path.name)}.*"):
        pid = aside.name.rpartition(".")[2]
        if pid.isascii() and pid.isdigit() and not _writes(int(pid)):
            with contextlib.suppress(OSError):
                aside.unlink()
                _log.info("%s was left by a write that was killed; it is removed", aside)


def _writes(pid: int) -> bool:
    """Whether another process of that number may be at work on its file."""
    return pid != os.getpid() and Path(f"/proc/{pid}").exists()


def write_atomically(path: Path, text: str) -> None:
    """Old or new, never half: written beside, synced, renamed. The file is 0600, its folder made
    0700."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

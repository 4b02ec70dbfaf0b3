"""The state file: where it is, what it held at the start, and what HTTP changed kept in it.

Invariant: after `keep` the disk has what it was given, or `error` says why not, and the next call
tries again. What somebody else has put there is set aside, never written over.
"""

from __future__ import annotations

import logging
from pathlib import Path

import trio

from omni_proxy.config.flags import Startup
from omni_proxy.config.parse import ConfigError, Problem
from omni_proxy.config.schema import Config
from omni_proxy.config.state import SavedState, read_state, render_state
from omni_proxy.system.files import file_signature, remove_stale_temporaries, write_atomically

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
            remove_stale_temporaries(path)

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

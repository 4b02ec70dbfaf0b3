"""The state file: stores changes that were made over HTTP.

Invariant: after `save` the file has the given state, or `error` has the reason why not and the next
call retries. A file that another program has written is renamed to `.old`, never overwritten.
"""

from __future__ import annotations

import logging
from pathlib import Path

import trio

from omni_proxy.config.configuration_flags import Startup
from omni_proxy.config.parse import ConfigError, Problem
from omni_proxy.config.schema import Config
from omni_proxy.config.state import SavedState, read_state, render_state
from omni_proxy.system.files import (
    file_signature,
    read_regular_file,
    remove_stale_temporaries,
    write_atomically,
)

_log = logging.getLogger(__name__)


def state_path(startup: Startup, config: Config) -> Path | None:
    """The path of the state file; None keeps the state in memory only."""
    setting = config.server.state_file
    if setting == "off":
        return None
    if setting != "auto":
        return Path(setting)
    return startup.config_path.with_suffix(".state.toml") if startup.config_path else None


def load_state(path: Path | None) -> SavedState:
    """The saved state; an empty one without a file. Raises ConfigError."""
    if path is None:
        return SavedState()
    try:
        return read_state(read_regular_file(path), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return SavedState()
    except OSError as error:
        problem = Problem("", None, f"cannot be read: {error.strerror}", file=str(path))
        raise ConfigError([_hint_problem(path), problem], str(path)) from None
    except ConfigError as error:
        raise ConfigError([_hint_problem(path), *error.problems], str(path)) from None


def _hint_problem(path: Path) -> Problem:
    reason = "holds what was set over HTTP"
    return Problem("", None, reason, "fix it, or delete it to discard that state", str(path))


class StateFile:
    """The state file of one program. Calls of `save` must not overlap."""

    def __init__(self, path: Path | None, state: SavedState) -> None:
        """`state` is what `load_state(path)` returned."""
        self._path = path
        self._state: SavedState | None = state  # None: the last write failed
        self._signature = file_signature(path) if path else None  # of our last write or read
        self.error = ""
        if path is not None:
            remove_stale_temporaries(path)

    async def save(self, path: Path | None, state: SavedState) -> None:
        """Write `state` to `path`. Never raises: a change must also apply with a full disk.

        Can't be cancelled: the caller may disconnect, but the change has already been applied.
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
                    "state_save_failed error=%s retry=at_next_change_or_sighup", self.error
                )  # fmt: skip
                return
        self._path, self._state, self.error = path, state, ""

    def _write(self, path: Path, state: SavedState) -> None:
        current = file_signature(path)
        if current is None and path != self._path and state == SavedState():
            return  # no file, and nothing to save
        if current is not None and (path != self._path or current != self._signature):
            backup = path.with_name(f"{path.name}.old")
            path.replace(backup)
            _log.warning(
                "state_file_replaced file=%s backup=%s reason=changed_by_another_program",
                path, backup,
            )  # fmt: skip
        write_atomically(path, render_state(state))
        self._signature = file_signature(path)

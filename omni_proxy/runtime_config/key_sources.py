"""Resolves the keys of one list of tables in the configuration, and follows changes of their files.

Invariant: `table` changes as a whole, and never to keys that could not be read: then a reload is
refused, and a changed file leaves the previous keys in place and logs one line. No key is logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Generic, TypeVar

import trio

from omni_proxy.api_keys.key_table import MAX_KEY_BYTES, KeyReader, KeyTable, resolve
from omni_proxy.config.problem import ConfigError, Path, Problem, format_path
from omni_proxy.config.schema import Config
from omni_proxy.config.tables.keys import KeySource
from omni_proxy.system.files import FileSignatures, file_signatures

_log = logging.getLogger(__name__)

POLL_SECS: Final = 1.0

Entry = TypeVar("Entry", bound=KeySource)


def read_key_file(path: str) -> bytes:
    """The content, truncated to a little more than the longest possible key. Blocking. Raises
    OSError."""
    with open(path, "rb") as file:
        return file.read(MAX_KEY_BYTES + 64)


def resolve_keys(
    entries: Sequence[Entry], path: Path, file: str, environ: Mapping[str, str] | None = None
) -> tuple[Entry, ...]:
    """`entries` with their SHA-256, from the current environment and files; `file`: the
    configuration file, for errors. Blocking. Raises ConfigError with all problems."""
    environ = os.environ if environ is None else environ
    resolved, findings = resolve(entries, path, KeyReader(environ, read_key_file))
    if findings:
        raise ConfigError(
            [Problem(format_path(place), None, why, hint, file) for place, why, hint in findings],
            file,
        )
    return resolved


def check_keys(config: Config, file: str) -> None:
    """Raises ConfigError for a key that can't be read, or that belongs to two callers. Blocking."""
    resolve_keys(config.keys, ("keys",), file)
    resolve_keys(config.admin.keys, ("admin", "keys"), file)


class KeySources(Generic[Entry]):
    """`path`: of the list in the configuration; `select`: returns the list."""

    def __init__(
        self, path: Path, select: Callable[[Config], Sequence[Entry]], file: str = ""
    ) -> None:
        self.table: KeyTable[Entry] = KeyTable()
        self.error = ""  # why the newest files could not be used
        self._path = path
        self._select = select
        self._file = file
        self._entries: Sequence[Entry] = ()  # as configured
        self._signatures: FileSignatures = ()  # of the files when they were last read
        self._watchers: list[Callable[[], None]] = []

    def prepare(self, new: Config) -> Callable[[], None]:
        """For `ConfigStore.add_prepare`. Raises ConfigError."""
        entries = self._select(new)
        signatures = _signatures(entries)
        table = KeyTable(resolve_keys(entries, self._path, self._file))
        return partial(self._apply, entries, table, signatures)

    def watch(self, callback: Callable[[], None]) -> None:
        """`callback()` runs after a file has changed `table`, but not after a configuration
        change."""
        self._watchers.append(callback)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Poll the files until cancelled."""
        task_status.started()
        while True:
            await trio.sleep(POLL_SECS)
            if any(entry.key_file for entry in self._entries):
                await self.poll()

    async def poll(self) -> None:
        """Read the files if they have changed and are complete, that is, no longer changing."""
        entries = self._entries
        signatures = await trio.to_thread.run_sync(_signatures, entries)
        while signatures != self._signatures and entries is self._entries:
            await trio.sleep(POLL_SECS / 4)
            before, signatures = signatures, await trio.to_thread.run_sync(_signatures, entries)
            if signatures == before:
                await self._reread(entries, signatures)

    async def _reread(self, entries: Sequence[Entry], signatures: FileSignatures) -> None:
        try:
            resolved = await trio.to_thread.run_sync(resolve_keys, entries, self._path, self._file)
        except ConfigError as error:
            if entries is self._entries:
                self._signatures, self.error = signatures, str(error)
                _log.error("keys_reread_failed error=%s", str(error))
            return
        if entries is not self._entries:
            return  # the configuration has changed in the meantime
        self._apply(entries, KeyTable(resolved), signatures)
        _log.info("keys_reread table=%s", format_path(self._path))
        for callback in self._watchers:
            callback()

    def _apply(
        self, entries: Sequence[Entry], table: KeyTable[Entry], signatures: FileSignatures
    ) -> None:
        self._entries, self.table, self._signatures = entries, table, signatures
        self.error = ""


def _signatures(entries: Sequence[KeySource]) -> FileSignatures:
    return file_signatures(entry.key_file for entry in entries if entry.key_file)

"""The files of the journal and the epoch, in a private folder (0700, files 0600).

Invariant: when `write` returns, the file and its folder entry are on the disk (fsync). A journal
that cannot be read is set aside, never overwritten.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from omni_proxy.config.schema import Config
from omni_proxy.system.files import remove_stale_temporaries, write_atomically
from omni_proxy.weight_sync.protocol.journal import (
    Journal,
    UnreadableJournal,
    decode,
    encode,
    readable_json,
)
from omni_proxy.weight_sync.protocol.published_version import PublishedVersion


def folder_for(state_file: Path | None, config: Config, environ: Mapping[str, str]) -> Path:
    """Beside the state file, or in the user's state folder, named after the listen address."""
    if state_file is not None:
        name = state_file.name.removesuffix(".toml").removesuffix(".state")
        return state_file.with_name(f"{name}.weights")
    home = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    name = f"{config.server.host}-{config.server.port}".replace("/", "_")
    return Path(home) / "omni-proxy" / name


class JournalFile:
    """Every method blocks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "journal.json"
        self._epoch_path = folder / "epoch.json"

    def read(self) -> Journal:
        """An empty journal if there is no file. Raises UnreadableJournal."""
        for path in (self.path, self._epoch_path):
            remove_stale_temporaries(path)
        try:
            return decode(self.path.read_bytes())
        except FileNotFoundError:
            return Journal()
        except OSError as error:
            raise UnreadableJournal(f"{self.path}: {error.strerror}") from None

    def set_aside(self) -> None:
        """Rename an unreadable journal, so that it can be inspected later. Raises OSError."""
        self.path.replace(self.path.with_suffix(".unreadable"))

    def write(self, journal: Journal) -> None:
        """Atomic: raises OSError, and the old record is intact then."""
        if journal:
            self._write_text(self.path, encode(journal).decode())
        elif self.path.exists():
            self.path.unlink()
            _fsync_folder(self.folder)

    def read_published(self) -> PublishedVersion:
        try:
            return msgspec.json.decode(self._epoch_path.read_bytes(), type=PublishedVersion)
        except FileNotFoundError:
            return PublishedVersion(0, None)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            # The epoch must never go back; the time in seconds is above any count of updates.
            return PublishedVersion(int(time.time()), None)

    def write_published(self, published: PublishedVersion) -> None:
        """Raises OSError."""
        self._write_text(self._epoch_path, readable_json(published).decode() + "\n")

    def _write_text(self, path: Path, text: str) -> None:
        is_new = not self.folder.exists()
        write_atomically(path, text)
        if is_new:
            _fsync_folder(self.folder.parent)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

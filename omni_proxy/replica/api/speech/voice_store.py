"""Uploaded voices on disk: one JSON file each, and beside it the uploaded sample.

Invariant: a voice exists exactly if its JSON file does, which is written last, atomically by a
rename: a crash leaves a complete voice or none. Names are lower-cased, so that they do not depend
on the file system. Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from pathlib import Path
from typing import Final

import msgspec

VOICE_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
RESERVED_NAMES: Final = ("default",)
FOLDER_VARIABLE: Final = "SPEAKER_SAMPLES_DIR"
MAX_VOICES_VARIABLE: Final = "SPEAKER_MAX_UPLOADED"


class StoredVoiceError(ValueError):
    """The voice cannot be stored; the text says why."""


class StoredVoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of one uploaded voice; also the response to its upload."""

    name: str
    consent: str
    created_at: int
    file_size: int
    mime_type: str
    ref_text: str | None = None
    speaker_description: str | None = None


def default_folder() -> Path:
    """Return the folder set in the environment, or one in the user's cache."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "omni-proxy" / "voices"


class VoiceStore:
    """The voices in one folder, which is created for the first voice."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._lock = threading.Lock()  # one change at a time, so that the limit holds

    def voices(self) -> list[StoredVoice]:
        """Return every voice, sorted by name. Other files are skipped."""
        try:
            paths = sorted(self._folder.glob("*.json"))
        except OSError:
            return []
        return [voice for path in paths if (voice := _read_voice(path)) is not None]

    def add(self, voice: StoredVoice, sample: bytes) -> None:
        """Store a voice, replacing one of the same name.

        Raises StoredVoiceError if the folder holds the maximum already.
        """
        with self._lock:
            names = {existing.name for existing in self.voices()}
            if voice.name not in names and len(names) >= self._limit:
                raise StoredVoiceError(
                    f"there are {len(names)} uploaded voices already, the most that are kept; "
                    "delete one first"
                )
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write(self._sample_path(voice.name), sample)
            self._write(self._json_path(voice.name), msgspec.json.encode(voice))

    def delete(self, name: str) -> bool:
        """Delete a voice; False if there is none."""
        with self._lock:
            try:
                self._json_path(name).unlink()
            except FileNotFoundError:
                return False
            self._sample_path(name).unlink(missing_ok=True)
            return True

    def _json_path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _sample_path(self, name: str) -> Path:
        return self._folder / f"{name}.audio"

    def _write(self, path: Path, data: bytes) -> None:
        new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
        try:
            with new.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


def folded_name(name: str) -> str:
    """Return the name under which a voice is stored. Raises StoredVoiceError for an invalid
    name."""
    folded = name.strip().lower()
    if not VOICE_NAME.fullmatch(folded):
        raise StoredVoiceError(
            "name must be 1 to 64 characters of A-Z, a-z, 0-9, '_', '.' and '-', "
            "and must not begin with '.'"
        )
    if folded in RESERVED_NAMES:
        raise StoredVoiceError(f"name must not be {folded!r}: that is the model's own voice")
    return folded


def _read_voice(path: Path) -> StoredVoice | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=StoredVoice)
    except (OSError, msgspec.MsgspecError):
        return None

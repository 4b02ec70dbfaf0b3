"""Uploaded voices on disk: one JSON file each, and beside it the sample that was uploaded.

Invariant: a voice exists exactly if its JSON file does, and that is written last, whole, by a
rename: a crash leaves a voice or no voice. Names are folded to lower case, so that the file system
has no say in which names are equal. Everything here blocks: call it in a thread.
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
    """The voice cannot be kept; the text says why."""


class StoredVoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of one uploaded voice; the answer to its upload."""

    name: str
    consent: str
    created_at: int
    file_size: int
    mime_type: str
    ref_text: str | None = None
    speaker_description: str | None = None


def default_folder() -> Path:
    """Return the folder that the environment names, or one in the user's cache."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "omni-proxy" / "voices"


class VoiceStore:
    """The voices in one folder, which is made when the first voice comes."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        self._most = most
        self._lock = threading.Lock()  # one change at a time, so that the cap holds

    def voices(self) -> list[StoredVoice]:
        """Return every voice by name. A file that is no voice is passed over."""
        try:
            paths = sorted(self._folder.glob("*.json"))
        except OSError:
            return []
        return [voice for path in paths if (voice := _read_voice(path)) is not None]

    def keep(self, voice: StoredVoice, sample: bytes) -> None:
        """Write a voice, in place of an older one of that name.

        Raises StoredVoiceError once the folder holds as many as it may.
        """
        with self._lock:
            names = {known.name for known in self.voices()}
            if voice.name not in names and len(names) >= self._most:
                raise StoredVoiceError(
                    f"there are {len(names)} uploaded voices already, the most that are kept; "
                    "delete one first"
                )
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write(self._sample(voice.name), sample)
            self._write(self._facts(voice.name), msgspec.json.encode(voice))

    def delete(self, name: str) -> bool:
        """Forget a voice; False where there is none."""
        with self._lock:
            try:
                self._facts(name).unlink()
            except FileNotFoundError:
                return False
            self._sample(name).unlink(missing_ok=True)
            return True

    def _facts(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _sample(self, name: str) -> Path:
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
    """Return the name under which a voice is kept. Raises StoredVoiceError for one that is no name."""
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

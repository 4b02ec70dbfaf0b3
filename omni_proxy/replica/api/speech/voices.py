"""/v1/audio/voices: voices that clients upload (note:api-server 1.7), stored on disk.

Upload, list and delete work with any model, since proxies use them for routing. A model with one
voice (hibari) cannot use an uploaded one: /v1/audio/speech refuses its name with 400. Invariant: a
voice exists if and only if its JSON file does, which is written last, by an atomic rename, so a
crash leaves a complete voice or none. A body above its limit is refused before it is parsed, a
sample that cannot be decoded is not stored. Names are lower-case, independently of the file system.
`VoiceStore` blocks: call it in a thread.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from pathlib import Path
from typing import Final

import msgspec
import trio
from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import SpeechError, json_response, upload_too_large
from omni_proxy.replica.api.common.media import (
    MultipartError,
    MultipartForm,
    UploadedFile,
    decode_audio_samples,
    read_form,
)
from omni_proxy.replica.api.route_context import MIB, RouteContext
from omni_proxy.shared.atomic_write import replace_file

VOICE_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
RESERVED_NAMES: Final = ("default",)
FOLDER_VARIABLE: Final = "SPEAKER_SAMPLES_DIR"
MAX_VOICES_VARIABLE: Final = "SPEAKER_MAX_UPLOADED"
MAX_SAMPLE_BYTES: Final = 10 * MIB
MAX_BODY_BYTES: Final = MAX_SAMPLE_BYTES + 64 * 1024
MAX_TEXT_CHARS: Final = 4096
MIN_SECS, MAX_SECS = 1.0, 30.0
SILENCE_PEAK: Final = 1e-3  # -60 dB
WAV_TYPES: Final = ("audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave")
# No decoded sample is cached, so every value of the cache statistics is 0.
NO_CACHE: Final = dict.fromkeys(
    (
        "entries",
        "memory_bytes",
        "max_bytes",
        "hit_count",
        "miss_count",
        "eviction_count",
        "delete_invalidation_counter",
    ),
    0,
)


class StoredVoiceError(ValueError):
    """The voice cannot be stored; the message is the reason."""


class StoredVoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One uploaded voice; also the response to its upload."""

    name: str
    consent: str
    created_at: int
    file_size: int
    mime_type: str
    ref_text: str | None = None
    speaker_description: str | None = None


def default_folder() -> Path:
    """Return the folder set in the environment, or one in the user's cache."""
    from_env = os.environ.get(FOLDER_VARIABLE)
    if from_env:
        return Path(from_env)
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

        Raises StoredVoiceError if the folder already has the maximum.
        """
        with self._lock:
            names = {existing.name for existing in self.voices()}
            if voice.name not in names and len(names) >= self._limit:
                raise StoredVoiceError(
                    f"there are already {len(names)} uploaded voices, which is the limit; "
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
        replace_file(path, data, new)


def folded_name(name: str) -> str:
    """Return the name that a voice is stored under. Raises StoredVoiceError if it is invalid."""
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


class _Routes:
    def __init__(self, store: VoiceStore) -> None:
        self._store = store

    async def list_voices(self) -> Response:
        """GET /v1/audio/voices."""
        uploaded = await trio.to_thread.run_sync(self._store.voices)
        names = [voice.name for voice in uploaded]
        if request.args.get("names_only", "").lower() in ("true", "1", "yes", "on"):
            return json_response({"uploaded_voice_names": names})
        body = {"voices": ["default", *names], "uploaded_voices": uploaded}
        return json_response(body | {"cache_stats": NO_CACHE})

    async def upload(self) -> Response:
        """POST /v1/audio/voices."""
        try:
            form = await read_form(request, MAX_BODY_BYTES)
        except MultipartError as error:
            if error.status == 413:
                raise upload_too_large(error.message, "audio_sample") from None
            raise SpeechError(error.message, status=error.status) from None
        sample = form.files.get("audio_sample")
        if sample is None or not sample.data:
            raise SpeechError("audio_sample must be an uploaded, non-empty file", "audio_sample")
        voice = _voice_of(form, sample)
        await trio.to_thread.run_sync(_check_sample, sample)
        try:
            await trio.to_thread.run_sync(self._store.add, voice, sample.data)
        except StoredVoiceError as error:
            raise SpeechError(str(error), "name") from None
        return json_response(voice)

    async def delete(self, name: str) -> Response:
        """DELETE /v1/audio/voices/{name}."""
        missing = {"success": False, "error": f"Voice '{name}' not found"}
        try:
            folded = folded_name(name)
        except StoredVoiceError:
            return json_response(missing, 404)
        if not await trio.to_thread.run_sync(self._store.delete, folded):
            return json_response(missing, 404)
        return json_response({"success": True, "message": f"Voice '{folded}' deleted"})


def _voice_of(form: MultipartForm, sample: UploadedFile) -> StoredVoice:
    """Return the voice that the form describes. Raises SpeechError."""
    try:
        name = folded_name(form.fields.get("name", ""))
    except StoredVoiceError as error:
        raise SpeechError(str(error), "name") from None
    texts = {}
    for field in ("consent", "ref_text", "speaker_description"):
        text = form.fields.get(field, "").strip()
        if len(text) > MAX_TEXT_CHARS:
            raise SpeechError(f"{field} has more than {MAX_TEXT_CHARS} characters", field)
        texts[field] = text
    if not texts["consent"]:
        raise SpeechError("consent must be a non-empty string", "consent")
    if sample.content_type not in WAV_TYPES:
        content_type = sample.content_type or "none"
        raise SpeechError(
            f"audio_sample must be a WAV file (audio/wav), its type is {content_type}",
            "audio_sample",
        )
    return StoredVoice(
        name=name,
        consent=texts["consent"],
        created_at=int(time.time()),
        file_size=len(sample.data),
        mime_type=sample.content_type,
        ref_text=texts["ref_text"] or None,
        speaker_description=texts["speaker_description"] or None,
    )


def _check_sample(sample: UploadedFile) -> None:
    """Raise SpeechError for a sample that is too long, too short, silent, or not audio."""
    if len(sample.data) > MAX_SAMPLE_BYTES:
        raise upload_too_large(
            f"audio_sample is larger than {MAX_SAMPLE_BYTES} bytes", "audio_sample"
        )
    try:
        samples, rate = decode_audio_samples(sample.data)
    except ValueError as error:
        raise SpeechError(f"audio_sample: {error}", "audio_sample") from None
    seconds = len(samples) / rate
    if not MIN_SECS <= seconds <= MAX_SECS:
        raise SpeechError(
            f"audio_sample lasts {seconds:.2f} seconds; it must last {MIN_SECS:g} to {MAX_SECS:g}",
            "audio_sample",
        )
    if float(abs(samples).max()) < SILENCE_PEAK:
        raise SpeechError("audio_sample is silent", "audio_sample")


def _store_of(context: RouteContext) -> VoiceStore:
    folder = Path(context.voices_dir) if context.voices_dir is not None else default_folder()
    from_env = os.environ.get(MAX_VOICES_VARIABLE, "")
    return VoiceStore(folder, int(from_env) if from_env.isdecimal() else context.max_voices)


def mount(app: QuartTrio, context: RouteContext) -> None:
    routes = _Routes(_store_of(context))
    path = "/v1/audio/voices"
    app.add_url_rule(path, "voices", routes.list_voices, methods=["GET"])
    app.add_url_rule(path, "voice_upload", routes.upload, methods=["POST"])
    app.add_url_rule(f"{path}/<name>", "voice_delete", routes.delete, methods=["DELETE"])

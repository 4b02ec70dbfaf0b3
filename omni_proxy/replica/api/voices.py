"""/v1/audio/voices: voices that callers have uploaded (api-server.md 1.7).

Uploading, listing and deleting work with any model, since a proxy routes by them. A model with one
voice (hibari) cannot speak in an uploaded one: /v1/audio/speech then refuses its name with a 400
that says so, rather than speak in a voice that was not asked for.
Invariant: a body beyond its limit is refused before it is parsed; what is kept has been decoded.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import trio
from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy.replica.api.audio_forms import (
    FilePart,
    Form,
    FormRefused,
    decode_samples,
    read_form,
)
from omni_proxy.replica.api.envelope import SpeechRefusal, too_large
from omni_proxy.replica.api.errors import reply
from omni_proxy.replica.api.served import MIB, Served
from omni_proxy.replica.api.speech import answer_refusals
from omni_proxy.replica.api.voice_store import (
    MOST_VARIABLE,
    Voice,
    VoiceRefused,
    VoiceStore,
    default_folder,
    folded_name,
)

MOST_SAMPLE_BYTES: Final = 10 * MIB
MOST_BODY_BYTES: Final = MOST_SAMPLE_BYTES + 64 * 1024
MOST_TEXT_CHARS: Final = 4096
SHORTEST_SECS, LONGEST_SECS = 1.0, 30.0
SILENCE_PEAK: Final = 1e-3  # -60 dB
WAV_TYPES: Final = ("audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave")
# Nothing decoded is kept in memory, so every number of that cache is 0.
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


class _Routes:
    def __init__(self, store: VoiceStore) -> None:
        self._store = store

    async def names(self) -> Response:
        """GET /v1/audio/voices."""
        uploaded = await trio.to_thread.run_sync(self._store.voices)
        names = [voice.name for voice in uploaded]
        if request.args.get("names_only", "").lower() in ("true", "1", "yes", "on"):
            return reply({"uploaded_voice_names": names})
        told = {"voices": ["default", *names], "uploaded_voices": uploaded}
        return reply(told | {"cache_stats": NO_CACHE})

    async def upload(self) -> Response:
        """POST /v1/audio/voices."""
        try:
            form = await read_form(request, MOST_BODY_BYTES)
        except FormRefused as refused:
            if refused.status == 413:
                raise too_large(refused.message, "audio_sample") from None
            raise SpeechRefusal(refused.message, status=refused.status) from None
        sample = form.files.get("audio_sample")
        if sample is None or not sample.data:
            raise SpeechRefusal("audio_sample must be an uploaded, non-empty file", "audio_sample")
        voice = _voice_of(form, sample)
        await trio.to_thread.run_sync(_check_sample, sample)
        try:
            await trio.to_thread.run_sync(self._store.keep, voice, sample.data)
        except VoiceRefused as refused:
            raise SpeechRefusal(str(refused), "name") from None
        return reply(voice)

    async def delete(self, name: str) -> Response:
        """DELETE /v1/audio/voices/{name}."""
        missing = {"success": False, "error": f"Voice '{name}' not found"}
        try:
            folded = folded_name(name)
        except VoiceRefused:
            return reply(missing, 404)
        if not await trio.to_thread.run_sync(self._store.delete, folded):
            return reply(missing, 404)
        return reply({"success": True, "message": f"Voice '{folded}' deleted"})


def _voice_of(form: Form, sample: FilePart) -> Voice:
    """Return what the form says of the voice. Raises SpeechRefusal."""
    try:
        name = folded_name(form.fields.get("name", ""))
    except VoiceRefused as refused:
        raise SpeechRefusal(str(refused), "name") from None
    texts = {}
    for field in ("consent", "ref_text", "speaker_description"):
        text = form.fields.get(field, "").strip()
        if len(text) > MOST_TEXT_CHARS:
            raise SpeechRefusal(f"{field} has more than {MOST_TEXT_CHARS} characters", field)
        texts[field] = text
    if not texts["consent"]:
        raise SpeechRefusal("consent must be a non-empty string", "consent")
    if sample.content_type not in WAV_TYPES:
        told = sample.content_type or "none"
        raise SpeechRefusal(
            f"audio_sample must be a WAV file (audio/wav), its type is {told}", "audio_sample"
        )
    return Voice(
        name=name,
        consent=texts["consent"],
        created_at=int(time.time()),
        file_size=len(sample.data),
        mime_type=sample.content_type,
        ref_text=texts["ref_text"] or None,
        speaker_description=texts["speaker_description"] or None,
    )


def _check_sample(sample: FilePart) -> None:
    """Refuse a sample that is too long, too short, silent, or no audio at all."""
    if len(sample.data) > MOST_SAMPLE_BYTES:
        raise too_large(f"audio_sample is larger than {MOST_SAMPLE_BYTES} bytes", "audio_sample")
    try:
        samples, rate = decode_samples(sample.data)
    except ValueError as fault:
        raise SpeechRefusal(f"audio_sample: {fault}", "audio_sample") from None
    seconds = len(samples) / rate
    if not SHORTEST_SECS <= seconds <= LONGEST_SECS:
        raise SpeechRefusal(
            f"audio_sample lasts {seconds:.2f} seconds; it must last "
            f"{SHORTEST_SECS:g} to {LONGEST_SECS:g}",
            "audio_sample",
        )
    if float(abs(samples).max()) < SILENCE_PEAK:
        raise SpeechRefusal("audio_sample is silent", "audio_sample")


def _store_of(served: Served) -> VoiceStore:
    folder = Path(served.voices_dir) if served.voices_dir is not None else default_folder()
    named = os.environ.get(MOST_VARIABLE, "")
    return VoiceStore(folder, int(named) if named.isdecimal() else served.max_voices)


def mount(app: QuartTrio, served: Served) -> None:
    answer_refusals(app)
    routes = _Routes(_store_of(served))
    path = "/v1/audio/voices"
    app.add_url_rule(path, "voices", routes.names, methods=["GET"])
    app.add_url_rule(path, "voice_upload", routes.upload, methods=["POST"])
    app.add_url_rule(f"{path}/<name>", "voice_delete", routes.delete, methods=["DELETE"])

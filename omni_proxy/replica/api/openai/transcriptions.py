"""POST /v1/audio/transcriptions, its response formats, and the refusal of related routes.

Transcripts are returned as JSON, text, subtitles or a stream of events; translations and
diarizations are refused. Invariant: an upload is decoded before it is submitted to the pipeline.
Errors are `{"detail"}`, except those of translations, which are OpenAI's. At most MAX_LONG_UPLOADS
long uploads are processed at a time. A key whose value is unknown is omitted, except in
verbose_json. Subtitles use the times of the segments, without interpolation. Source:
note:api-server 1.8.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
import trio
from msgspec import Meta, Struct
from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import (
    ClientError,
    DetailError,
    InvalidBody,
    SpeechError,
    json_response,
)
from omni_proxy.replica.api.common.lenient_decode import problem, validate
from omni_proxy.replica.api.common.media import (
    MultipartError,
    MultipartForm,
    UploadedFile,
    decode_audio_samples,
    read_form,
    to_stage_audio,
)
from omni_proxy.replica.api.common.sse import (
    CONTENT_TYPE,
    DeferredStream,
    close_streams_after_requests,
    deferred_response,
)
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.pipeline.client import (
    CompletionResult,
    GenerateChunk,
    GenerateRequest,
    SamplingParams,
)

DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class TranscriptResponse:
    """One transcript. `segments` have id, start and end in seconds, and text."""

    text: str
    duration_secs: float | None
    language: str | None = None
    segments: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, result: CompletionResult, duration_secs: float) -> TranscriptResponse:
        """`duration_secs` is the upload's duration, used if the pipeline reports none."""
        extra = result.extra
        return cls(
            text=result.text,
            duration_secs=extra.get("duration", duration_secs),
            language=extra.get("language"),
            segments=tuple(extra.get("segments") or ()),
        )

    def plain(self) -> dict[str, Any]:
        return {"text": self.text} | duration_usage(self.duration_secs)

    def verbose(self) -> dict[str, Any]:
        body = {
            "task": "transcribe",
            "language": self.language,
            "duration": self.duration_secs,
            "text": self.text,
            "segments": [_segment(index, segment) for index, segment in enumerate(self.segments)],
        }
        return body | duration_usage(self.duration_secs)

    def srt(self) -> str:
        return "\n".join(
            f"{number}\n{_clock(segment['start'], ',')} --> {_clock(segment['end'], ',')}\n"
            f"{str(segment['text']).strip()}\n"
            for number, segment in enumerate(self.segments, 1)
        )

    def vtt(self) -> str:
        cues = (
            f"{_clock(segment['start'], '.')} --> {_clock(segment['end'], '.')}\n"
            f"{str(segment['text']).strip()}\n"
            for segment in self.segments
        )
        return "\n".join(("WEBVTT\n", *cues))


def duration_usage(duration_secs: float | None) -> dict[str, Any]:
    """Return `{"usage": ...}`, or an empty dict if the duration is unknown."""
    if duration_secs is None:
        return {}
    return {"usage": {"type": "duration", "seconds": math.ceil(duration_secs)}}


class TranscriptEvents:
    """The stream's events: deltas, the complete text, `[DONE]`; no `[DONE]` after a failure."""

    def __init__(self, duration_secs: float) -> None:
        self._duration_secs = duration_secs
        self._texts: list[str] = []

    def feed(self, chunk: GenerateChunk) -> list[bytes]:
        events = []
        if chunk.text:
            self._texts.append(chunk.text)
            events.append(_event({"type": "transcript.text.delta", "delta": chunk.text}))
        if chunk.terminal:
            duration = chunk.extra.get("duration", self._duration_secs)
            done = {"type": "transcript.text.done", "text": "".join(self._texts)}
            events += [_event(done | duration_usage(duration)), DONE]
        return events

    def failed(self, error: ClientError | SpeechError) -> bytes:
        return _event({"type": "error", "error": {"message": str(error)}})


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(value)


def _segment(index: int, segment: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": index, "start": segment["start"], "end": segment["end"], "text": segment["text"]}


def _clock(seconds: float, separator: str) -> str:
    whole, millis = divmod(round(seconds * 1000), 1000)
    minutes, secs = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{secs:02}{separator}{millis:03}"


LONG_UPLOAD_SECS: Final = 60.0
MAX_LONG_UPLOADS: Final = 4
TIMESTAMPS: Final = "timestamps"  # the capability that subtitles need
PLAIN_TEXT: Final = "text/plain; charset=utf-8"


class TranscriptionFields(Struct, kw_only=True):
    """The plain fields of the form."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: Annotated[float, Meta(ge=0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    stream: bool = False


class LongUploadLimit:
    """Bounds how many long uploads are processed at a time."""

    def __init__(self, limit: int = MAX_LONG_UPLOADS) -> None:
        self._limit = limit
        self._in_use = 0

    def acquire(self, duration_secs: float) -> UploadSlot:
        """Return a slot to be released. Raises DetailError 503 if all slots are in use."""
        if duration_secs <= LONG_UPLOAD_SECS:
            return UploadSlot(None)
        if self._in_use >= self._limit:
            raise DetailError(
                503,
                f"{self._in_use} uploads of more than {LONG_UPLOAD_SECS:g} seconds are "
                "being transcribed; try again later",
            )
        self._in_use += 1
        return UploadSlot(self)

    def release(self) -> None:
        self._in_use -= 1


class UploadSlot:
    """The slot of one upload; released once, also if `release` is called again."""

    def __init__(self, owner: LongUploadLimit | None) -> None:
        self._owner = owner

    def release(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.release()


class _Routes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._long_uploads = LongUploadLimit()

    async def transcribe(self) -> Response:
        """POST /v1/audio/transcriptions."""
        if not self._context.can("audio_input"):
            raise DetailError(
                400, "this replica cannot transcribe; start it with --transcription whisper-tiny"
            )
        form = await self._form()
        fields, upload = self._checked(form)
        try:
            samples, rate = await trio.to_thread.run_sync(decode_audio_samples, upload.data)
        except ValueError as error:
            raise DetailError(400, str(error)) from None
        duration_secs = len(samples) / rate
        generate_request = _to_generate_request(fields, to_stage_audio(samples, rate))
        slot = self._long_uploads.acquire(duration_secs)
        if fields.stream:
            return await self._stream(generate_request, duration_secs, slot)
        try:
            return await self._respond(generate_request, fields, duration_secs)
        finally:
            slot.release()

    async def _form(self) -> MultipartForm:
        try:
            return await read_form(request, self._context.max_body_bytes)
        except MultipartError as error:
            raise DetailError(error.status, error.message) from None

    def _checked(self, form: MultipartForm) -> tuple[TranscriptionFields, UploadedFile]:
        """Return the fields and the file. Raises DetailError, InvalidBody for malformed fields."""
        upload = form.files.get("file")
        if upload is None:
            raise InvalidBody([problem("missing", ("body", "file"), "Field required", None)])
        if not upload.data:
            raise DetailError(400, "file must not be empty")
        fields = validate(
            TranscriptionFields, {name: text for name, text in form.fields.items() if text.strip()}
        )
        response_format = fields.response_format
        capabilities = self._context.capabilities
        if response_format in ("srt", "vtt") and (
            capabilities is None or TIMESTAMPS not in capabilities
        ):
            raise DetailError(
                400, f"response_format {response_format!r} needs a model with timestamps"
            )
        if fields.stream and response_format not in ("json", "text"):
            raise DetailError(400, f"{response_format!r} cannot be streamed: use json or text")
        return fields, upload

    async def _respond(
        self, generate_request: GenerateRequest, fields: TranscriptionFields, duration_secs: float
    ) -> Response:
        timing = self._context.meters.timed(self._context.model_name)
        with timing:
            result = await self._context.client.completion(generate_request, _new_id())
            timing.mark_first_output()
        transcript = TranscriptResponse.of(result, duration_secs)
        match fields.response_format:
            case "json":
                return json_response(transcript.plain())
            case "verbose_json":
                return json_response(transcript.verbose())
            case "text":
                return Response(transcript.text, content_type=PLAIN_TEXT)
            case "srt":
                return Response(transcript.srt(), content_type=PLAIN_TEXT)
            case "vtt":
                return Response(transcript.vtt(), content_type="text/vtt; charset=utf-8")

    async def _stream(
        self, generate_request: GenerateRequest, duration_secs: float, slot: UploadSlot
    ) -> Response:
        request_id = _new_id()
        body = DeferredStream(
            self._context.client.generate(generate_request, request_id),
            TranscriptEvents(duration_secs),
            self._context.meters.timed(self._context.model_name),
            slot.release,
        )
        await body.begin()
        return deferred_response(
            body,
            {
                "content-type": CONTENT_TYPE,
                "cache-control": "no-cache",
                "x-request-id": request_id,
            },
        )

    async def translate(self) -> Response:
        """POST /v1/audio/translations: always refused; an unknown model gets its own error."""
        try:
            form = await read_form(request, self._context.max_body_bytes)
        except MultipartError as error:
            raise SpeechError(
                error.message, status=error.status, kind="invalid_request_error", code=None
            ) from None
        model = form.fields.get("model")
        if model is not None and model != self._context.model_name:
            raise SpeechError(
                f"The model {model!r} does not exist; this server has {self._context.model_name!r}",
                "model",
                404,
                "invalid_request_error",
                "model_not_found",
            )
        raise SpeechError(
            "this server's model does not translate audio",
            "model",
            400,
            "invalid_request_error",
            None,
        )

    async def diarize(self) -> Response:
        """POST /v1/audio/diarizations: refused."""
        raise DetailError(400, "this server's model does not identify speakers")


def _new_id() -> str:
    return f"transcription-{uuid.uuid4()}"


def _to_generate_request(fields: TranscriptionFields, audio: dict[str, Any]) -> GenerateRequest:
    asr_params = {"language": fields.language, "prompt": fields.prompt}
    return GenerateRequest(
        prompt={},
        model=fields.model,
        sampling=SamplingParams(
            temperature=fields.temperature,
            repetition_penalty=fields.repetition_penalty,
            max_new_tokens=fields.max_new_tokens,
        ),
        stream=fields.stream,
        task="asr",
        metadata={
            "asr_params": {name: value for name, value in asr_params.items() if value is not None}
        },
        media={"audios": [audio]},
    )


def mount(app: QuartTrio, context: RouteContext) -> None:
    close_streams_after_requests(app)
    routes = _Routes(context)
    for path, route in (
        ("transcriptions", routes.transcribe),
        ("translations", routes.translate),
        ("diarizations", routes.diarize),
    ):
        app.add_url_rule(f"/v1/audio/{path}", path, route, methods=["POST"])

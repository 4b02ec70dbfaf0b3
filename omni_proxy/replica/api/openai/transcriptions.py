"""/v1/audio/transcriptions, and the refusals of translations and diarizations.

Invariant: an upload is decoded before the pipeline hears of it; errors are `{"detail"}`, but those
of translations, which are OpenAI's. At most `MAX_LONG_UPLOADS` long uploads are in work at once.
Source: api-server.md 1.8.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Final, Literal

import trio
from msgspec import Meta, Struct
from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.deferred_stream import (
    DeferredStream,
    close_streams_after_requests,
    deferred_response,
)
from omni_proxy.replica.api.common.errors import (
    DetailError,
    InvalidBody,
    SpeechError,
    json_response,
)
from omni_proxy.replica.api.common.fields import validate
from omni_proxy.replica.api.common.lenient_decode import problem
from omni_proxy.replica.api.common.media import decode_audio_samples, to_stage_audio
from omni_proxy.replica.api.common.multipart import (
    MultipartError,
    MultipartForm,
    UploadedFile,
    read_form,
)
from omni_proxy.replica.api.common.sse import CONTENT_TYPE
from omni_proxy.replica.api.openai.transcript_format import TranscriptEvents, TranscriptResponse
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.speech.speech_routes import register_speech_errors
from omni_proxy.replica.pipeline.client import GenerateRequest, SamplingParams

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
    """How many long uploads are in work."""

    def __init__(self, most: int = MAX_LONG_UPLOADS) -> None:
        self._most = most
        self._held = 0

    def hold(self, duration_secs: float) -> UploadSlot:
        """Return a place for an upload, to be given back. Raises DetailError 503 for one too many."""
        if duration_secs <= LONG_UPLOAD_SECS:
            return UploadSlot(None)
        if self._held >= self._most:
            raise DetailError(
                503,
                f"{self._held} uploads of more than {LONG_UPLOAD_SECS:g} seconds are being transcribed; "
                "try again later",
            )
        self._held += 1
        return UploadSlot(self)

    def give_back(self) -> None:
        self._held -= 1


class UploadSlot:
    """One upload's place; given back once, however often that is asked."""

    def __init__(self, among: LongUploadLimit | None) -> None:
        self._among = among

    def give_back(self) -> None:
        among, self._among = self._among, None
        if among is not None:
            among.give_back()


class _Routes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._long = LongUploadLimit()

    async def transcribe(self) -> Response:
        """POST /v1/audio/transcriptions."""
        if not self._context.can("audio_input"):
            raise DetailError(
                400, "this replica transcribes nothing; start it with --transcription whisper-tiny"
            )
        form = await self._form()
        asked, upload = self._checked(form)
        try:
            samples, rate = await trio.to_thread.run_sync(decode_audio_samples, upload.data)
        except ValueError as fault:
            raise DetailError(400, str(fault)) from None
        duration_secs = len(samples) / rate
        lowered = _to_generate_request(asked, to_stage_audio(samples, rate))
        hold = self._long.hold(duration_secs)
        if asked.stream:
            return await self._stream(lowered, duration_secs, hold)
        try:
            return await self._whole(lowered, asked, duration_secs)
        finally:
            hold.give_back()

    async def _form(self) -> MultipartForm:
        try:
            return await read_form(request, self._context.max_body_bytes)
        except MultipartError as refused:
            raise DetailError(refused.status, refused.message) from None

    def _checked(self, form: MultipartForm) -> tuple[TranscriptionFields, UploadedFile]:
        """Return the fields and the file. Raises DetailError, and InvalidBody for what is misformed."""
        upload = form.files.get("file")
        if upload is None:
            raise InvalidBody([problem("missing", ("body", "file"), "Field required", None)])
        if not upload.data:
            raise DetailError(400, "file must not be empty")
        asked = validate(
            TranscriptionFields, {name: text for name, text in form.fields.items() if text.strip()}
        )
        wanted = asked.response_format
        known = self._context.capabilities
        if wanted in ("srt", "vtt") and (known is None or TIMESTAMPS not in known):
            raise DetailError(
                400, f"response_format {wanted!r} needs a model that tells timestamps"
            )
        if asked.stream and wanted not in ("json", "text"):
            raise DetailError(400, f"a stream has no {wanted!r} form: use json or text")
        return asked, upload

    async def _whole(
        self, lowered: GenerateRequest, asked: TranscriptionFields, duration_secs: float
    ) -> Response:
        timing = self._context.meters.timed(self._context.model_name)
        try:
            result = await self._context.client.completion(lowered, _new_id())
            timing.first()
            timing.ended()
        finally:
            timing.left()
        heard = TranscriptResponse.of(result, duration_secs)
        match asked.response_format:
            case "json":
                return json_response(heard.plain())
            case "verbose_json":
                return json_response(heard.verbose())
            case "text":
                return Response(heard.text, content_type=PLAIN_TEXT)
            case "srt":
                return Response(heard.srt(), content_type=PLAIN_TEXT)
            case "vtt":
                return Response(heard.vtt(), content_type="text/vtt; charset=utf-8")

    async def _stream(
        self, lowered: GenerateRequest, duration_secs: float, hold: UploadSlot
    ) -> Response:
        request_id = _new_id()
        body = DeferredStream(
            self._context.client.generate(lowered, request_id),
            TranscriptEvents(duration_secs),
            self._context.meters.timed(self._context.model_name),
            hold.give_back,
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
        """POST /v1/audio/translations: refused; first for an unknown model, then for any."""
        try:
            form = await read_form(request, self._context.max_body_bytes)
        except MultipartError as refused:
            raise SpeechError(
                refused.message, status=refused.status, kind="invalid_request_error", code=None
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
        raise DetailError(400, "this server's model does not tell speakers apart")


def _new_id() -> str:
    return f"transcription-{uuid.uuid4()}"


def _to_generate_request(asked: TranscriptionFields, audio: dict[str, Any]) -> GenerateRequest:
    told = {"language": asked.language, "prompt": asked.prompt}
    return GenerateRequest(
        prompt={},
        model=asked.model,
        sampling=SamplingParams(
            temperature=asked.temperature,
            repetition_penalty=asked.repetition_penalty,
            max_new_tokens=asked.max_new_tokens,
        ),
        stream=asked.stream,
        task="asr",
        metadata={"asr_params": {name: value for name, value in told.items() if value is not None}},
        media={"audios": [audio]},
    )


def mount(app: QuartTrio, context: RouteContext) -> None:
    register_speech_errors(app)
    close_streams_after_requests(app)
    routes = _Routes(context)
    for path, route in (
        ("transcriptions", routes.transcribe),
        ("translations", routes.translate),
        ("diarizations", routes.diarize),
    ):
        app.add_url_rule(f"/v1/audio/{path}", path, route, methods=["POST"])

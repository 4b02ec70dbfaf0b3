"""/v1/audio/transcriptions, and the refusals of translations and diarizations.

Invariant: an upload is decoded before the pipeline hears of it; errors are `{"detail"}`, but those
of translations, which are OpenAI's. At most `MOST_LONG` long uploads are in work at once.
Source: api-server.md 1.8.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Final, Literal

import trio
from msgspec import Meta, Struct
from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy.replica.api.audio_forms import (
    FilePart,
    Form,
    FormRefused,
    as_media,
    decode_samples,
    read_form,
)
from omni_proxy.replica.api.envelope import SpeechRefusal
from omni_proxy.replica.api.errors import Invalid, Refused, reply
from omni_proxy.replica.api.fields import read
from omni_proxy.replica.api.lax import problem
from omni_proxy.replica.api.patient import PatientBody, leave_with, stream_of
from omni_proxy.replica.api.served import Served
from omni_proxy.replica.api.speech import answer_refusals
from omni_proxy.replica.api.sse import CONTENT_TYPE
from omni_proxy.replica.api.transcript_shape import Heard, TranscriptEvents
from omni_proxy.replica.pipeline.client import GenerateRequest, SamplingParams

LONG_SECS: Final = 60.0
MOST_LONG: Final = 4
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


class LongUploads:
    """How many long uploads are in work."""

    def __init__(self, most: int = MOST_LONG) -> None:
        self._most = most
        self._held = 0

    def hold(self, duration_secs: float) -> Hold:
        """Return a place for an upload, to be given back. Raises Refused 503 for one too many."""
        if duration_secs <= LONG_SECS:
            return Hold(None)
        if self._held >= self._most:
            raise Refused(
                503,
                f"{self._held} uploads of more than {LONG_SECS:g} seconds are being transcribed; "
                "try again later",
            )
        self._held += 1
        return Hold(self)

    def give_back(self) -> None:
        self._held -= 1


class Hold:
    """One upload's place; given back once, however often that is asked."""

    def __init__(self, among: LongUploads | None) -> None:
        self._among = among

    def give_back(self) -> None:
        among, self._among = self._among, None
        if among is not None:
            among.give_back()


class _Routes:
    def __init__(self, served: Served) -> None:
        self._served = served
        self._long = LongUploads()

    async def transcribe(self) -> Response:
        """POST /v1/audio/transcriptions."""
        if not self._served.can("audio_input"):
            raise Refused(
                400, "this replica transcribes nothing; start it with --transcription whisper-tiny"
            )
        form = await self._form()
        asked, upload = self._checked(form)
        try:
            samples, rate = await trio.to_thread.run_sync(decode_samples, upload.data)
        except ValueError as fault:
            raise Refused(400, str(fault)) from None
        duration_secs = len(samples) / rate
        lowered = _lowered(asked, as_media(samples, rate))
        hold = self._long.hold(duration_secs)
        if asked.stream:
            return await self._stream(lowered, duration_secs, hold)
        try:
            return await self._whole(lowered, asked, duration_secs)
        finally:
            hold.give_back()

    async def _form(self) -> Form:
        try:
            return await read_form(request, self._served.max_body_bytes)
        except FormRefused as refused:
            raise Refused(refused.status, refused.message) from None

    def _checked(self, form: Form) -> tuple[TranscriptionFields, FilePart]:
        """Return the fields and the file. Raises Refused, and Invalid for what is misformed."""
        upload = form.files.get("file")
        if upload is None:
            raise Invalid([problem("missing", ("body", "file"), "Field required", None)])
        if not upload.data:
            raise Refused(400, "file must not be empty")
        asked = read(
            TranscriptionFields, {name: text for name, text in form.fields.items() if text.strip()}
        )
        wanted = asked.response_format
        known = self._served.capabilities
        if wanted in ("srt", "vtt") and (known is None or TIMESTAMPS not in known):
            raise Refused(400, f"response_format {wanted!r} needs a model that tells timestamps")
        if asked.stream and wanted not in ("json", "text"):
            raise Refused(400, f"a stream has no {wanted!r} form: use json or text")
        return asked, upload

    async def _whole(
        self, lowered: GenerateRequest, asked: TranscriptionFields, duration_secs: float
    ) -> Response:
        timing = self._served.meters.timed(self._served.model_name)
        try:
            result = await self._served.client.completion(lowered, _new_id())
            timing.first()
            timing.ended()
        finally:
            timing.left()
        heard = Heard.of(result, duration_secs)
        match asked.response_format:
            case "json":
                return reply(heard.plain())
            case "verbose_json":
                return reply(heard.verbose())
            case "text":
                return Response(heard.text, content_type=PLAIN_TEXT)
            case "srt":
                return Response(heard.srt(), content_type=PLAIN_TEXT)
            case "vtt":
                return Response(heard.vtt(), content_type="text/vtt; charset=utf-8")

    async def _stream(self, lowered: GenerateRequest, duration_secs: float, hold: Hold) -> Response:
        request_id = _new_id()
        body = PatientBody(
            self._served.client.generate(lowered, request_id),
            TranscriptEvents(duration_secs),
            self._served.meters.timed(self._served.model_name),
            hold.give_back,
        )
        await body.begin()
        return stream_of(
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
            form = await read_form(request, self._served.max_body_bytes)
        except FormRefused as refused:
            raise SpeechRefusal(
                refused.message, status=refused.status, kind="invalid_request_error", code=None
            ) from None
        model = form.fields.get("model")
        if model is not None and model != self._served.model_name:
            raise SpeechRefusal(
                f"The model {model!r} does not exist; this server has {self._served.model_name!r}",
                "model",
                404,
                "invalid_request_error",
                "model_not_found",
            )
        raise SpeechRefusal(
            "this server's model does not translate audio",
            "model",
            400,
            "invalid_request_error",
            None,
        )

    async def diarize(self) -> Response:
        """POST /v1/audio/diarizations: refused."""
        raise Refused(400, "this server's model does not tell speakers apart")


def _new_id() -> str:
    return f"transcription-{uuid.uuid4()}"


def _lowered(asked: TranscriptionFields, audio: dict[str, Any]) -> GenerateRequest:
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


def mount(app: QuartTrio, served: Served) -> None:
    answer_refusals(app)
    leave_with(app)
    routes = _Routes(served)
    for path, route in (
        ("transcriptions", routes.transcribe),
        ("translations", routes.translate),
        ("diarizations", routes.diarize),
    ):
        app.add_url_rule(f"/v1/audio/{path}", path, route, methods=["POST"])

"""/v1/audio/speech: one text spoken, as one file or as a stream (api-server.md 1.4).

Invariant: the body is parsed here, by hand, and every refusal is OpenAI's envelope. An outcome can
be asked for only after a clean end, and only while it is among the last 1024.
"""

from __future__ import annotations

import uuid
from typing import Final

from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.deferred_stream import (
    DeferredStream,
    close_streams_after_requests,
    deferred_response,
)
from omni_proxy.replica.api.common.errors import (
    CLIENT_ERRORS,
    DetailError,
    SpeechError,
    json_response,
)
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.speech.speech_fields import (
    SpeechRequest,
    parse_object,
    parse_speech_request,
)
from omni_proxy.replica.api.speech.speech_service import (
    SpeechResult,
    SpeechService,
    engine_secs,
    to_speech_error,
)
from omni_proxy.replica.api.speech.speech_stream import (
    SpeechEncoder,
    SpeechOutcome,
    StreamFormat,
    choose_stream_format,
    writer_for,
)

MAX_OUTCOMES: Final = 1024


class OutcomeHistory:
    """How the last requests ended, first in, first out."""

    def __init__(self, most: int = MAX_OUTCOMES) -> None:
        self._most = most
        self._kept: dict[str, SpeechOutcome] = {}

    def keep(self, request_id: str, outcome: SpeechOutcome) -> None:
        self._kept[request_id] = outcome
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]

    def of(self, request_id: str) -> SpeechOutcome | None:
        return self._kept.get(request_id)


class _Routes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._speaking = SpeechService(context)
        self._outcomes = OutcomeHistory()

    async def create(self) -> Response:
        """POST /v1/audio/speech."""
        self._speaking.check_available()
        ask = parse_speech_request(
            parse_object(await request.get_data(cache=False, as_text=False, parse_form_data=False))
        )
        form = choose_stream_format(ask, self._context.stream_speech_as)
        self._speaking.check(ask)
        request_id = f"speech-{uuid.uuid4()}"
        if form is not None:
            return await self._stream(ask, form, request_id)
        timing = self._context.meters.timed(self._context.model_name)
        try:
            spoken = await self._speaking.speak(ask, request_id)
            timing.first()
            timing.ended()
        finally:
            timing.left()
        self._outcomes.keep(request_id, _outcome_of(spoken))
        return _whole_file(spoken, ask, request_id)

    async def _stream(self, ask: SpeechRequest, form: StreamFormat, request_id: str) -> Response:
        lowered = await self._speaking.lower(ask, stream=True)
        shape = SpeechEncoder(
            writer_for(form, ask, request_id),
            lambda outcome: self._outcomes.keep(request_id, outcome),
        )
        body = DeferredStream(
            self._context.client.generate(lowered, request_id),
            shape,
            self._context.meters.timed(self._context.model_name),
        )
        try:
            await body.begin()
        except CLIENT_ERRORS as fault:
            raise to_speech_error(fault) from None
        return deferred_response(body, shape.headers())

    async def outcome(self, request_id: str) -> Response:
        """GET /v1/audio/speech/{request_id}."""
        found = self._outcomes.of(request_id)
        if found is None:
            raise DetailError(404, f"no outcome is known for speech request {request_id!r}")
        told = {"request_id": request_id, "finish_reason": found.finish_reason}
        return json_response(told | {"usage": found.usage})


def _outcome_of(spoken: SpeechResult) -> SpeechOutcome:
    result = spoken.result
    return SpeechOutcome.of(result.finish_reason, result.usage, result.extra)


def _whole_file(spoken: SpeechResult, ask: SpeechRequest, request_id: str) -> Response:
    """Return the encoded bytes with everything that is known in the head."""
    result = spoken.result
    headers = {
        "content-disposition": f'attachment; filename="speech.{ask.response_format}"',
        "x-request-id": request_id,
        "x-finish-reason": result.finish_reason or "unknown",
    }
    counts = result.usage or {}
    for name, headed in (
        ("prompt_tokens", ("x-prompt-tokens", "x-sglang-omni-input-tokens")),
        ("completion_tokens", ("x-completion-tokens", "x-sglang-omni-output-tokens")),
        ("total_tokens", ("x-sglang-omni-total-tokens",)),
    ):
        if counts.get(name) is not None:
            headers |= dict.fromkeys(headed, str(counts[name]))
    engine = engine_secs(result.usage, result.extra)
    if engine is not None:
        headers["x-engine-time"] = str(engine)
    return Response(spoken.data, 200, headers, content_type=spoken.media_type)


async def _speech_error_response(refusal: SpeechError) -> Response:
    return refusal.response()


def register_speech_errors(app: QuartTrio) -> None:
    """Have every SpeechError that leaves a route answered as its envelope."""
    app.register_error_handler(SpeechError, _speech_error_response)


def mount(app: QuartTrio, context: RouteContext) -> None:
    routes = _Routes(context)
    register_speech_errors(app)
    close_streams_after_requests(app)
    app.add_url_rule("/v1/audio/speech", "speech", routes.create, methods=["POST"])
    app.add_url_rule(
        "/v1/audio/speech/<request_id>", "speech_outcome", routes.outcome, methods=["GET"]
    )

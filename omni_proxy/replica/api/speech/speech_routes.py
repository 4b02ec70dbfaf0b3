"""POST /v1/audio/speech (note:api-server 1.4) and /v1/audio/speech/batch (1.5).

One text is returned as a file or as a stream, a batch as one JSON body. Invariant: bodies are
parsed field by field, without a schema, and every error has OpenAI's format. The outcome of a
request can be queried only after a clean end, for the last MAX_OUTCOMES requests. Results of a
batch are in the order of its items, and one item's failure does not affect the others; the whole
batch is refused only for errors outside of the items.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping
from typing import Any, Final

import trio
from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import (
    CLIENT_ERRORS,
    DetailError,
    SpeechError,
    json_response,
)
from omni_proxy.replica.api.common.sse import (
    DeferredStream,
    close_streams_after_requests,
    deferred_response,
)
from omni_proxy.replica.api.route_context import RouteContext, SpeechStreamFormat
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
from omni_proxy.replica.api.speech.speech_writers import (
    SpeechEncoder,
    SpeechOutcome,
    choose_stream_format,
    writer_for,
)

MAX_OUTCOMES: Final = 1024


class OutcomeHistory:
    """Outcomes of the last requests; the oldest is dropped first."""

    def __init__(self, limit: int = MAX_OUTCOMES) -> None:
        self._limit = limit
        self._outcomes: dict[str, SpeechOutcome] = {}

    def add(self, request_id: str, outcome: SpeechOutcome) -> None:
        self._outcomes[request_id] = outcome
        if len(self._outcomes) > self._limit:
            del self._outcomes[next(iter(self._outcomes))]

    def get(self, request_id: str) -> SpeechOutcome | None:
        return self._outcomes.get(request_id)


class _Routes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._service = SpeechService(context)
        self._outcomes = OutcomeHistory()

    async def create(self) -> Response:
        """POST /v1/audio/speech."""
        self._service.check_available()
        speech_request = parse_speech_request(
            parse_object(await request.get_data(cache=False, as_text=False, parse_form_data=False))
        )
        stream_format = choose_stream_format(speech_request, self._context.stream_speech_as)
        self._service.check(speech_request)
        request_id = f"speech-{uuid.uuid4()}"
        if stream_format is not None:
            return await self._stream(speech_request, stream_format, request_id)
        timing = self._context.meters.timed(self._context.model_name)
        with timing:
            result = await self._service.synthesize(speech_request, request_id)
            timing.mark_first_output()
        self._outcomes.add(request_id, _outcome_of(result))
        return _whole_file(result, speech_request, request_id)

    async def _stream(
        self, speech_request: SpeechRequest, stream_format: SpeechStreamFormat, request_id: str
    ) -> Response:
        generate_request = await self._service.to_generate_request(speech_request, stream=True)
        encoder = SpeechEncoder(
            writer_for(stream_format, speech_request, request_id),
            lambda outcome: self._outcomes.add(request_id, outcome),
        )
        body = DeferredStream(
            self._context.client.generate(generate_request, request_id),
            encoder,
            self._context.meters.timed(self._context.model_name),
        )
        try:
            await body.begin()
        except CLIENT_ERRORS as error:
            raise to_speech_error(error) from None
        return deferred_response(body, encoder.headers())

    async def outcome(self, request_id: str) -> Response:
        """GET /v1/audio/speech/{request_id}."""
        outcome = self._outcomes.get(request_id)
        if outcome is None:
            raise DetailError(404, f"there is no outcome for speech request {request_id!r}")
        body = {"request_id": request_id, "finish_reason": outcome.finish_reason}
        return json_response(body | {"usage": outcome.usage})


def _outcome_of(speech: SpeechResult) -> SpeechOutcome:
    result = speech.result
    return SpeechOutcome.of(result.finish_reason, result.usage, result.extra)


def _whole_file(speech: SpeechResult, speech_request: SpeechRequest, request_id: str) -> Response:
    """Return the encoded bytes, with the usage and other known values in the headers."""
    result = speech.result
    headers = {
        "content-disposition": f'attachment; filename="speech.{speech_request.response_format}"',
        "x-request-id": request_id,
        "x-finish-reason": result.finish_reason or "unknown",
    }
    counts = result.usage or {}
    for name, header_names in (
        ("prompt_tokens", ("x-prompt-tokens", "x-sglang-omni-input-tokens")),
        ("completion_tokens", ("x-completion-tokens", "x-sglang-omni-output-tokens")),
        ("total_tokens", ("x-sglang-omni-total-tokens",)),
    ):
        if counts.get(name) is not None:
            headers |= dict.fromkeys(header_names, str(counts[name]))
    engine = engine_secs(result.usage, result.extra)
    if engine is not None:
        headers["x-engine-time"] = str(engine)
    return Response(speech.data, 200, headers, content_type=speech.media_type)


class _BatchRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._max_items = context.tts_batch_max_items
        self._service = SpeechService(context)

    async def create(self) -> Response:
        """POST /v1/audio/speech/batch."""
        self._service.check_available()
        body = parse_object(
            await request.get_data(cache=False, as_text=False, parse_form_data=False)
        )
        shared, items = self._split(body)
        batch_id = f"speech-batch-{uuid.uuid4()}"
        results: list[dict[str, Any]] = [{} for _ in items]

        async def fill(index: int, item: dict[str, Any]) -> None:
            results[index] = await self._result(index, shared | item, f"{batch_id}-{index}")

        async with trio.open_nursery() as nursery:
            for index, item in enumerate(items):
                nursery.start_soon(fill, index, item)
        succeeded = sum(result["status"] == "success" for result in results)
        body_start = {"id": batch_id, "results": results, "total": len(results)}
        return json_response(
            body_start | {"succeeded": succeeded, "failed": len(results) - succeeded}
        )

    def _split(self, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the shared fields and each item's own; null inherits. Raises SpeechError."""
        items = body.pop("items", None)
        if not isinstance(items, list) or not items:
            raise SpeechError("items must be a list of one speech request or more", "items")
        if len(items) > self._max_items:
            raise SpeechError(
                f"items has {len(items)} requests; the limit is {self._max_items}", "items"
            )
        _refuse_stream(body)
        item_fields = []
        for index, item in enumerate(items):
            if not isinstance(item, dict):
                raise SpeechError(f"items.{index} must be an object", f"items.{index}")
            try:
                _refuse_stream(item)
            except SpeechError as error:
                raise error.under(f"items.{index}") from None
            item_fields.append({name: value for name, value in item.items() if value is not None})
        return body, item_fields

    async def _result(
        self, index: int, fields: Mapping[str, Any], request_id: str
    ) -> dict[str, Any]:
        try:
            item_request = parse_speech_request(fields)
            self._service.check(item_request)
            speech = await self._service.synthesize(item_request, request_id)
        except SpeechError as error:
            fields_of_error = error.under(f"items.{index}").error()
            error_fields = {
                name: value for name, value in fields_of_error.items() if value is not None
            }
            return {"index": index, "status": "error", "error": error_fields}
        return {
            "index": index,
            "status": "success",
            "audio_data": base64.b64encode(speech.data).decode(),
            "format": item_request.response_format,
            "media_type": speech.media_type,
            "finish_reason": speech.result.finish_reason or "unknown",
        }


def _refuse_stream(fields: Mapping[str, Any]) -> None:
    """Raise SpeechError for fields that request a stream: a batch is one JSON response."""
    if fields.get("stream") not in (None, False):
        raise SpeechError("a batch cannot stream: stream must be absent or false", "stream")
    if fields.get("stream_format") == "sse":
        raise SpeechError("a batch cannot stream: stream_format must not be sse", "stream_format")


def mount(app: QuartTrio, context: RouteContext) -> None:
    routes = _Routes(context)
    close_streams_after_requests(app)
    app.add_url_rule("/v1/audio/speech", "speech", routes.create, methods=["POST"])
    app.add_url_rule(
        "/v1/audio/speech/<request_id>", "speech_outcome", routes.outcome, methods=["GET"]
    )
    batch = _BatchRoutes(context)
    app.add_url_rule("/v1/audio/speech/batch", "speech_batch", batch.create, methods=["POST"])

"""POST /v1/audio/speech/batch: many texts synthesized at once (api-server.md 1.5).

Invariant: results are in the order of the items, and one item's failure does not affect the others;
only errors in the body as a whole refuse all of it.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping
from typing import Any

import trio
from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import SpeechError, json_response
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.speech.speech_fields import parse_object, parse_speech_request
from omni_proxy.replica.api.speech.speech_routes import register_speech_errors
from omni_proxy.replica.api.speech.speech_service import SpeechService


class _Routes:
    def __init__(self, context: RouteContext) -> None:
        self._most_items = context.tts_batch_max_items
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
        if len(items) > self._most_items:
            raise SpeechError(
                f"items has {len(items)} requests; a batch takes up to {self._most_items}", "items"
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
            ask = parse_speech_request(fields)
            self._service.check(ask)
            spoken = await self._service.synthesize(ask, request_id)
        except SpeechError as refusal:
            error = refusal.under(f"items.{index}").error()
            error_fields = {name: value for name, value in error.items() if value is not None}
            return {"index": index, "status": "error", "error": error_fields}
        return {
            "index": index,
            "status": "success",
            "audio_data": base64.b64encode(spoken.data).decode(),
            "format": ask.response_format,
            "media_type": spoken.media_type,
            "finish_reason": spoken.result.finish_reason or "unknown",
        }


def _refuse_stream(fields: Mapping[str, Any]) -> None:
    """A batch is one JSON response: no part of it can be streamed."""
    if fields.get("stream") not in (None, False):
        raise SpeechError("a batch does not stream: stream must be absent or false", "stream")
    if fields.get("stream_format") == "sse":
        raise SpeechError("a batch does not stream: stream_format must not be sse", "stream_format")


def mount(app: QuartTrio, context: RouteContext) -> None:
    register_speech_errors(app)
    routes = _Routes(context)
    app.add_url_rule("/v1/audio/speech/batch", "speech_batch", routes.create, methods=["POST"])

"""Server-sent events over a running generation.

Invariant: nothing is submitted before the response head is sent. When the reader stops, the
generation is left, which aborts it. There is no `with` across a yield here: Quart enters and leaves
the body, in one task.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol, Self

from quart import Response
from quart.wrappers.response import ResponseBody

from omni_proxy.replica.api.common.errors import CLIENT_ERRORS, error_type, status_and_message
from omni_proxy.replica.api.common.request_metrics import RequestTimer
from omni_proxy.replica.pipeline.requests import GenerateChunk

DONE = b"data: [DONE]\n\n"
CONTENT_TYPE = "text/event-stream; charset=utf-8"
Event = dict[str, Any]


class EventFormatter(Protocol):
    """Turns chunks into the route's events; it holds the state of one response and does no I/O."""

    def feed(self, chunk: GenerateChunk) -> Iterable[Event]: ...


class ChunkSource(Protocol):
    """A generation, or several merged into one: entered, read and left by one task."""

    async def __aenter__(self) -> Self: ...

    async def __anext__(self) -> GenerateChunk: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def encode_event(payload: Event) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()


def error_event(message: str, status: int) -> Event:
    """The event for a failure after the stream has begun (api-server.md 1.3)."""
    return {"error": {"message": message, "type": error_type(status), "code": status}}


class EventStream(ResponseBody):
    """The body of a streamed response: the events of each chunk at once, then `[DONE]`.

    A failure is an error event before `[DONE]`; with `cut` it closes the connection instead.
    """

    def __init__(
        self,
        source: ChunkSource,
        formatter: EventFormatter,
        timing: RequestTimer,
        *,
        cut: bool = False,
    ) -> None:
        self._source = source
        self._formatter = formatter
        self._timing = timing
        self._cut = cut
        self._entered = False
        self._ended = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timing.close()
        if self._entered:
            await self._source.__aexit__(kind, error, trace)

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> bytes:
        while not self._ended:
            try:
                data = b"".join(map(encode_event, self._formatter.feed(await self._next())))
            except StopAsyncIteration:
                self._ended = True
                return DONE
            except CLIENT_ERRORS as error:
                self._ended = True
                if self._cut:
                    raise
                status, message = status_and_message(error)
                return encode_event(error_event(message, status)) + DONE
            if data:
                self._timing.mark_first_output()
                return data
        raise StopAsyncIteration

    async def _next(self) -> GenerateChunk:
        if not self._entered:
            await self._source.__aenter__()
            self._entered = True
        chunk = await self._source.__anext__()
        if chunk.terminal:
            self._timing.finish()
        return chunk


def stream_response(body: ResponseBody) -> Response:
    headers = {"cache-control": "no-cache"}
    return Response(body, 200, headers, content_type=CONTENT_TYPE)

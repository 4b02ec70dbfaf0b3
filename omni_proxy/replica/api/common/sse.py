"""Server-sent events over a running generation.

Invariant: nothing is submitted before the answer's head is on its way, and whoever stops reading
leaves the generation, which aborts it. There is no `with` across a yield here: Quart enters and
leaves the body, in one task.
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
    """What a route makes of chunks: it holds the state of one answer and does nothing else."""

    def feed(self, chunk: GenerateChunk) -> Iterable[Event]: ...


class ChunkSource(Protocol):
    """A generation, or several as one: entered, read and left by one task."""

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
    """What a stream that has begun says of its failure (api-server.md 1.3)."""
    return {"error": {"message": message, "type": error_type(status), "code": status}}


class EventStream(ResponseBody):
    """The body of a streamed answer: each chunk's events at once, then `[DONE]`.

    A failure is an error event before `[DONE]`; with `cut` it ends the connection instead.
    """

    def __init__(
        self, source: ChunkSource, shape: EventFormatter, timing: RequestTimer, *, cut: bool = False
    ) -> None:
        self._source = source
        self._shape = shape
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
        self._timing.left()
        if self._entered:
            await self._source.__aexit__(kind, error, trace)

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> bytes:
        while not self._ended:
            try:
                piece = b"".join(map(encode_event, self._shape.feed(await self._next())))
            except StopAsyncIteration:
                self._ended = True
                return DONE
            except CLIENT_ERRORS as error:
                self._ended = True
                if self._cut:
                    raise
                status, message = status_and_message(error)
                return encode_event(error_event(message, status)) + DONE
            if piece:
                self._timing.first()
                return piece
        raise StopAsyncIteration

    async def _next(self) -> GenerateChunk:
        if not self._entered:
            await self._source.__aenter__()
            self._entered = True
        chunk = await self._source.__anext__()
        if chunk.terminal:
            self._timing.ended()
        return chunk


def stream_response(body: ResponseBody) -> Response:
    headers = {"cache-control": "no-cache"}
    return Response(body, 200, headers, content_type=CONTENT_TYPE)

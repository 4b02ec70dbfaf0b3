"""Server-sent events over a running generation: immediate streams and deferred streams.

An `EventStream` sends the response head first and then submits the request. A `DeferredStream`
waits for the first output before it sends the head, so that earlier failures are plain HTTP errors.
Invariant: when the client disconnects, the generation is closed, which aborts it, even if Quart
never entered the response body. Quart enters and exits the body in one task; no `with` block spans
a yield.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Protocol, Self, cast

import msgspec
from quart import Response, request
from quart.wrappers.response import ResponseBody
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import (
    CLIENT_ERRORS,
    ClientError,
    SpeechError,
    error_type,
    status_and_message,
)
from omni_proxy.replica.api.route_context import RequestTimer
from omni_proxy.replica.pipeline.client import Generation
from omni_proxy.replica.pipeline.requests import GenerateChunk

DONE = b"data: [DONE]\n\n"
CONTENT_TYPE = "text/event-stream; charset=utf-8"
# Streams with named events: Anthropic's messages and OpenAI's responses.
EVENT_STREAM_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
}
Event = dict[str, Any]
_KEY: Final = "omni_proxy.deferred_stream"


class EventFormatter(Protocol):
    """Converts one response's chunks into the route's events; does no I/O."""

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


def named_event(name: str, payload: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(payload))


def error_event(message: str, status: int) -> Event:
    """The event that reports a failure after the stream has begun (note:api-server 1.3)."""
    return {"error": {"message": message, "type": error_type(status), "code": status}}


class EventStream(ResponseBody):
    """The body of a streamed response: the events of each chunk as it arrives, then `[DONE]`.

    A failure is an error event before `[DONE]`; with `cut`, it closes the connection instead.
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


class ChunkEncoder(Protocol):
    """A route's encoding of chunks.

    `failed` returns None to close the connection instead of sending an error.
    """

    def feed(self, chunk: GenerateChunk) -> Iterable[bytes]: ...

    def failed(self, error: ClientError | SpeechError) -> bytes | None: ...


class DeferredStream(ResponseBody):
    """The body of a streamed response; `begin` is awaited before the response is created."""

    def __init__(
        self,
        generation: Generation,
        encoder: ChunkEncoder,
        timing: RequestTimer,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_close` is called once, when the generation has been closed."""
        self._generation = generation
        self._encoder = encoder
        self._timing = timing
        self._on_close = on_close
        self._closed = False
        self._ended = False
        self._ready: deque[bytes] = deque()

    async def begin(self) -> None:
        """Wait for the first bytes. Raises what the client or the encoder raises."""
        cast("dict[str, Any]", request.scope)[_KEY] = self
        await self._generation.__aenter__()
        while not self._ready:
            self._encode(await self._generation.__anext__())

    async def aclose(self) -> None:
        """Abort the generation unless it has ended; repeated calls do nothing."""
        if not self._closed:
            self._closed = True
            self._timing.close()
            self._on_close()
            await self._generation.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._ready:
            if self._ended:
                raise StopAsyncIteration
            try:
                self._encode(await self._generation.__anext__())
            except (*CLIENT_ERRORS, SpeechError) as error:
                self._ended = True
                data = self._encoder.failed(error)
                if data is None:
                    raise
                self._ready.append(data)
        return self._ready.popleft()

    def _encode(self, chunk: GenerateChunk) -> None:
        # Quart would send empty data as an empty chunk, which ends the body in HTTP/1.1.
        self._ready.extend(data for data in self._encoder.feed(chunk) if data)
        if self._ready:
            self._timing.mark_first_output()
        if chunk.terminal:
            self._ended = True
            self._timing.finish()


def deferred_response(body: DeferredStream, headers: Mapping[str, str]) -> Response:
    """Return the response with a body that has begun; it has no time limit."""
    response = Response(body, headers=dict(headers))
    response.timeout = None
    return response


class _StreamCleanup:
    """ASGI wrapper: after each request, closes the stream that the request still holds."""

    def __init__(self, asgi: Any) -> None:
        self._asgi = asgi

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        try:
            await self._asgi(scope, receive, send)
        finally:
            if body := scope.pop(_KEY, None):
                await body.aclose()  # never waits, so a cancellation cannot interrupt it


def close_streams_after_requests(app: QuartTrio) -> None:
    """Install the cleanup in `app`; repeated calls have no effect."""
    if not isinstance(app.asgi_app, _StreamCleanup):
        app.asgi_app = _StreamCleanup(app.asgi_app)  # type: ignore[method-assign, assignment]

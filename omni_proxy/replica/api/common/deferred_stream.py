"""Streams that begin before their head does: what fails until then is a plain HTTP error.

Invariant: a generation that was begun is left when its request is over, even where the caller went
away between the handler's return and the first byte, so that nobody ever entered the body.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Protocol, Self, cast

from quart import Response, request
from quart.wrappers.response import ResponseBody
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import CLIENT_ERRORS, ClientError, SpeechError
from omni_proxy.replica.api.common.request_metrics import RequestTimer
from omni_proxy.replica.pipeline.client import GenerateChunk, Generation

_KEY: Final = "omni_proxy.patient_body"


class ChunkEncoder(Protocol):
    """What a route makes of chunks. `failed` None: the stream is cut, for it cannot tell."""

    def feed(self, chunk: GenerateChunk) -> Iterable[bytes]: ...

    def failed(self, fault: ClientError | SpeechError) -> bytes | None: ...


class DeferredStream(ResponseBody):
    """The body of a streamed answer; `begin` is awaited before its response is made."""

    def __init__(
        self,
        generation: Generation,
        shape: ChunkEncoder,
        timing: RequestTimer,
        left: Callable[[], None] = lambda: None,
    ) -> None:
        """`left` is called once, when the generation has been left."""
        self._generation = generation
        self._shape = shape
        self._timing = timing
        self._left = left
        self._gone = False
        self._over = False
        self._ready: deque[bytes] = deque()

    async def begin(self) -> None:
        """Wait for the first bytes. Raises what the client or the shape raises."""
        cast("dict[str, Any]", request.scope)[_KEY] = self
        await self._generation.__aenter__()
        while not self._ready:
            self._take(await self._generation.__anext__())

    async def leave(self) -> None:
        """Abort what has not ended. More than once is the same as once."""
        if not self._gone:
            self._gone = True
            self._timing.left()
            self._left()
            await self._generation.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._ready:
            if self._over:
                raise StopAsyncIteration
            try:
                self._take(await self._generation.__anext__())
            except (*CLIENT_ERRORS, SpeechError) as fault:
                self._over = True
                told = self._shape.failed(fault)
                if told is None:
                    raise
                self._ready.append(told)
        return self._ready.popleft()

    def _take(self, chunk: GenerateChunk) -> None:
        # Quart sends an empty piece as an empty chunk, which in HTTP/1.1 is the end of the body.
        self._ready.extend(piece for piece in self._shape.feed(chunk) if piece)
        if self._ready:
            self._timing.first()
        if chunk.terminal:
            self._over = True
            self._timing.ended()


def deferred_response(body: DeferredStream, headers: Mapping[str, str]) -> Response:
    """Return the response over a body that has begun; it may last as long as it takes."""
    response = Response(body, headers=dict(headers))
    response.timeout = None
    return response


class _StreamCleanup:
    """The app, and after each of its requests what that request still holds."""

    def __init__(self, asgi: Any) -> None:
        self._asgi = asgi

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        try:
            await self._asgi(scope, receive, send)
        finally:
            if body := scope.pop(_KEY, None):
                await body.leave()  # never waits, so that a cancellation cannot cut it short


def close_streams_after_requests(app: QuartTrio) -> None:
    """Give `app` the promise above, once however often it is asked for."""
    if not isinstance(app.asgi_app, _StreamCleanup):
        app.asgi_app = _StreamCleanup(app.asgi_app)  # type: ignore[method-assign, assignment]

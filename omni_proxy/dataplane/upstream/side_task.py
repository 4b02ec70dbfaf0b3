"""A request to a worker beside an exchange: a task of its own in the event loop, without a client.

Invariants: it closes its connection and releases what it holds however it ends; it never steps the
exchange that it belongs to in its own step, but wakes it. Must not write to a client.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from omni_proxy.dataplane.exchange.exchange_io import AttemptIO
from omni_proxy.dataplane.loop.event_loop import Steppable
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import Readable, pause
from omni_proxy.dataplane.services import ExchangeServices
from omni_proxy.dataplane.upstream.pool import ResponseStart
from omni_proxy.wire.request import RequestHead, drop_fields
from omni_proxy.wire.response import CHUNKED, CLOSE, LENGTH, Unchunker, UpstreamProtocolError

READ_BYTES: Final = 65536


class AnswerCut(UpstreamProtocolError):
    """The connection broke within an answer of which the client has got nothing."""


class SideTask(AttemptIO):
    """`readable`: it has ended. An exchange may wait for that as for a stream."""

    __slots__ = ("readable", "waiter")

    def __init__(self, services: ExchangeServices, waiter: Steppable | None = None) -> None:
        super().__init__(services)
        self.readable = False
        self.waiter = waiter  # which may wait for the end

    @abstractmethod
    async def run(self) -> None:
        """All of it. Raises nothing but bugs."""

    def ended(self) -> None:
        """Release what it holds; once."""

    def start(self) -> None:
        self.loop.side_tasks += 1
        super().start()

    async def serve(self) -> None:
        try:
            await self.run()
        finally:
            self.finish()

    def finish(self) -> None:
        """It is over, however it ended; whoever waits for that goes on in this iteration."""
        self.loop.side_tasks -= 1
        self.close_upstream()
        self.readable = True
        self.ended()
        waiter = self.waiter
        if waiter is not None and waiter.waiting_on is self:
            self.loop.wake(waiter)

    def cancel(self) -> None:
        """End it now; not from inside of it."""
        if not self.readable:
            self.close_coroutine()


async def wait_for(io: AttemptIO, source: Readable) -> None:
    """Until `source` is readable; meanwhile the client gets keep-alive comments, if configured."""
    while not source.readable:
        io.waiting_on = source
        if io.keepalive is None:
            await pause
        else:
            await io.keepalive.for_head(source)


async def wait_for_read(io: AttemptIO, stream: Stream) -> None:
    """Until `stream` may have something to read, and other connections have had their turn."""
    if io.must_wait_for(stream):
        if io.keepalive is None:
            await pause
        else:
            await io.keepalive.for_head(stream)


class HeldResponse(ResponseStart):
    """A response whose whole body is in `chunk`; its connection was given back."""

    def close(self) -> None:
        """There is nothing left to close."""

    def release(self) -> None:
        """There is nothing left to release."""


async def read_body(io: AttemptIO, start: ResponseStart, phase: str, most: int = 0) -> bytes:
    """Read a response to its end, its payload up to `most` bytes; 0 to drop it.

    Afterwards its connection was given back. Raises UpstreamProtocolError (broken, or longer than
    `most`), OSError, PhaseTimeout.
    """
    response, stream = start.response, start.stream
    unwrap = Unchunker().feed if response.framing is CHUNKED and most else bytes
    parts, size, chunk = [], 0, start.chunk
    while True:
        if most and chunk:
            parts.append(unwrap(chunk))
            size += len(parts[-1])
            if size > most:
                raise UpstreamProtocolError(f"a body of more than {most} bytes")
        if response.whole:
            break
        io.set_timeout(phase, io.settings.limits.idle)
        await wait_for_read(io, stream)
        received = stream.read(READ_BYTES)
        if received is None:
            chunk = b""
            continue
        if not received:
            if response.framing is CLOSE:
                break
            raise AnswerCut("the worker closed before the answer's end")
        chunk = response.feed(received)
    io.upstream = None
    start.release()
    return b"".join(parts)


def hold_response(start: ResponseStart, payload: bytes) -> HeldResponse:
    """The response with this body, which `read_body` has read, or which is made of that."""
    response = start.response
    response.framing, response.remaining, response.whole = LENGTH, 0, True
    lines = drop_fields(response.lines, frozenset((b"content-length",)))
    response.lines = b"%bcontent-length: %d\r\n" % (lines, len(payload))
    return HeldResponse(start.pool, start.stream, response, payload, not payload)


def head_for(method: bytes, target: bytes, lines: bytes = b"", *, length: int = 0) -> RequestHead:
    """The head of a request that the proxy itself makes."""
    return RequestHead(
        method=method,
        target=target,
        lines=b"%b %b HTTP/1.1\r\n%b" % (method, target, lines),
        keep_alive=True,
        http_1_0=False,
        length=length,
    )

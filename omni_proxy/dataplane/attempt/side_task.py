"""Side tasks: additional requests to workers, each in its own task of the event loop.

Invariants: a side task closes its connection and releases its resources however it ends; it never
steps its exchange directly, but wakes it. Must not write to a client.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from omni_proxy.dataplane.exchange_io import AttemptIO
from omni_proxy.dataplane.loop.event_loop import Steppable
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import Readable, pause
from omni_proxy.dataplane.services import ExchangeServices
from omni_proxy.dataplane.upstream.pool import ResponseStart
from omni_proxy.wire.request import RequestHead, drop_fields
from omni_proxy.wire.response import CHUNKED, CLOSE, LENGTH, Unchunker, UpstreamProtocolError

READ_BYTES: Final = 65536


class AnswerCut(UpstreamProtocolError):
    """The connection broke within a response of which nothing was sent to the client."""


class SideTask(AttemptIO):
    """`readable`: it has ended, so that an exchange can wait for it as for a stream."""

    __slots__ = ("readable", "waiter")

    def __init__(self, services: ExchangeServices, waiter: Steppable | None = None) -> None:
        super().__init__(services)
        self.readable = False
        self.waiter = waiter  # woken at the end, if it waits for this task

    @abstractmethod
    async def run(self) -> None:
        """Do the whole task. Must not raise, except for bugs."""

    def ended(self) -> None:
        """Release its resources; called once."""

    def start(self) -> None:
        self.loop.side_tasks += 1
        super().start()

    async def serve(self) -> None:
        try:
            await self.run()
        finally:
            self.finish()

    def finish(self) -> None:
        """End the task, whatever the result, and wake its waiter."""
        self.loop.side_tasks -= 1
        self.close_upstream()
        self.readable = True
        self.ended()
        waiter = self.waiter
        if waiter is not None and waiter.waiting_on is self:
            self.loop.wake(waiter)

    def cancel(self) -> None:
        """End the task now. Must not be called from the task itself."""
        if not self.readable:
            self.close_coroutine()


async def wait_for(io: AttemptIO, source: Readable) -> None:
    """Wait until `source` is readable; the client gets keep-alive comments, if configured."""
    while not source.readable:
        io.waiting_on = source
        if io.keepalive is None:
            await pause
        else:
            await io.keepalive.for_head(source)


async def wait_for_read(io: AttemptIO, stream: Stream) -> None:
    """Wait until `stream` may have bytes to read; also yields to other connections."""
    if io.must_wait_for(stream):
        if io.keepalive is None:
            await pause
        else:
            await io.keepalive.for_head(stream)


class HeldResponse(ResponseStart):
    """A response whose whole body is in `chunk`; its connection was already released."""

    def close(self) -> None:
        """Does nothing: the connection was already released."""

    def release(self) -> None:
        """Does nothing: the connection was already released."""


async def read_body(io: AttemptIO, start: ResponseStart, phase: str, max_bytes: int = 0) -> bytes:
    """Read a response to its end, and release its connection. Returns its payload.

    `max_bytes`: maximum size of the payload; 0 to drop it. Raises UpstreamProtocolError (broken, or
    longer than `max_bytes`), OSError, PhaseTimeout.
    """
    response, stream = start.response, start.stream
    unwrap = Unchunker().feed if response.framing is CHUNKED and max_bytes else bytes
    parts, size, chunk = [], 0, start.chunk
    while True:
        if max_bytes and chunk:
            parts.append(unwrap(chunk))
            size += len(parts[-1])
            if size > max_bytes:
                raise UpstreamProtocolError(f"a body of more than {max_bytes} bytes")
        if response.is_complete:
            break
        io.set_timeout(phase, io.settings.timeouts.idle)
        await wait_for_read(io, stream)
        received = stream.read(READ_BYTES)
        if received is None:
            chunk = b""
            continue
        if not received:
            if response.framing is CLOSE:
                break
            raise AnswerCut("the worker closed before the end of the response")
        chunk = response.feed(received)
    io.upstream = None
    start.release()
    return b"".join(parts)


def hold_response(start: ResponseStart, payload: bytes) -> HeldResponse:
    """The response with `payload` as its body: the result of `read_body`, or a changed copy."""
    response = start.response
    response.framing, response.remaining, response.is_complete = LENGTH, 0, True
    lines = drop_fields(response.lines, frozenset((b"content-length",)))
    response.lines = b"%bcontent-length: %d\r\n" % (lines, len(payload))
    return HeldResponse(start.pool, start.stream, response, payload, not payload)


def head_for(method: bytes, target: bytes, lines: bytes = b"", *, length: int = 0) -> RequestHead:
    """The head of a request that the proxy creates."""
    return RequestHead(
        method=method,
        target=target,
        lines=b"%b %b HTTP/1.1\r\n%b" % (method, target, lines),
        keep_alive=True,
        http_1_0=False,
        length=length,
    )

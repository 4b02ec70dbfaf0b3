"""Reads, writes and timeouts of a connection's coroutine.

Contract: `read`, `write` and `flush` wait for the peer until the timeout of the current phase, and
then raise PhaseTimeout. No phase outlasts `deadline`, which bounds the whole exchange.
"""

from __future__ import annotations

from math import inf

from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import ClientDisconnected, ConnectionTask, pause

READ_BYTES = 16384


class IoTask(ConnectionTask):
    """A connection task that serves the stream `client`."""

    __slots__ = ("deadline",)

    client: Stream

    def __init__(self, loop: EventLoop) -> None:
        super().__init__(loop)
        self.deadline = inf

    def check_client(self, *, half_close_aborts: bool) -> None:
        """Raise ClientDisconnected if the client has closed its side and that counts as a
        disconnect. For the moments before and after waits that do not watch the client."""
        if half_close_aborts and self.client.peer_closed:
            raise ClientDisconnected

    def set_timeout(self, phase: str, secs: float) -> None:
        """Enter a phase that may last `secs`; with `inf`, as long as the whole exchange."""
        self.phase = phase
        due = self.loop.now + secs
        # Not min(), because the call would double the cost of this method.
        self.phase_deadline = due if due < self.deadline else self.deadline  # noqa: FURB136

    def limit_phase(self, due: float) -> None:
        """End the current phase no later than `due`, in seconds of `EventLoop.now`."""
        if due < self.phase_deadline:
            self.phase_deadline = due

    def clear_timeout(self) -> None:
        """The current phase has no timeout any more."""
        self.phase_deadline = inf

    async def read(self, stream: Stream, size: int = READ_BYTES) -> bytes:
        """The next bytes; b"" at the peer's end. Raises OSError for a broken connection."""
        while True:
            if self.must_wait_for(stream):
                await pause
            chunk = stream.read(size)
            if chunk is not None:
                return chunk

    async def write(self, stream: Stream, chunk: bytes) -> None:
        """Send `chunk` after the pending bytes; waits for a peer that reads slowly."""
        if stream.pending:
            await self.flush(stream)
        try:
            sent = stream.send(chunk)
        except BlockingIOError:
            sent = 0
        view = memoryview(chunk)[sent:]
        while view:
            self.waiting_on = stream
            await pause
            try:
                view = view[stream.send(view) :]
            except BlockingIOError:
                continue

    async def flush(self, stream: Stream) -> None:
        """Send the pending bytes of `write_soon`."""
        while stream.pending:
            stream.flush()
            if stream.pending:
                self.waiting_on = stream
                await pause

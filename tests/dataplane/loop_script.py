"""A running event loop, and connection tasks that run a coroutine function of the test."""

import socket

import pytest
import trio

from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import ConnectionTask, pause


class Scripted(ConnectionTask):
    """Runs `script(self)`; `ended` is set when it has returned or raised."""

    def __init__(self, loop: EventLoop, script) -> None:
        super().__init__(loop)
        self.script = script
        self.ended = trio.Event()

    async def serve(self) -> None:
        try:
            await self.script(self)
        finally:
            self.ended.set()

    async def wait_for(self, awaited) -> None:
        """Wait until a stream is readable. Other events, such as writable ones, are ignored."""
        self.waiting_on = awaited
        await pause
        while isinstance(awaited, Stream) and not awaited.readable:
            await pause


class Wires:
    """Socket pairs: one end is a stream of the event loop, the test holds its peer."""

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        self._ends: list[tuple[Stream, socket.socket]] = []

    def stream(self, task: ConnectionTask | None) -> tuple[Stream, socket.socket]:
        near, peer = socket.socketpair()
        near.setblocking(False)
        self._ends.append((Stream(self.loop, near, task), peer))
        return self._ends[-1]

    def close(self) -> None:
        for stream, peer in self._ends:
            stream.close()
            peer.close()
        self.loop.flush()


async def _never_idle(task) -> None:
    """Sets `bell` in the batch with the number `rings_at`."""
    stream, peer = task.ends
    while not task.over:
        peer.send(b"x")
        await task.wait_for(stream)
        stream.read(1)
        task.batches += 1
        if task.batches == task.rings_at:
            task.bell.set()


@pytest.fixture
async def busy(loop, wires):
    """A task that keeps its event loop busy until the test ends."""
    task = Scripted(loop, _never_idle)
    task.over, task.batches, task.rings_at, task.bell = False, 0, 0, trio.Event()
    task.ends = wires.stream(task)
    task.start()
    yield task
    task.over = True


async def until(holds) -> None:
    with trio.fail_after(30):
        while not holds():  # noqa: ASYNC110  there is no event to wait for
            await trio.sleep(0.001)


@pytest.fixture
async def loop(nursery):
    event_loop = EventLoop()
    await nursery.start(event_loop.run)
    return event_loop


@pytest.fixture
def wires(loop):
    pairs = Wires(loop)
    yield pairs
    pairs.close()

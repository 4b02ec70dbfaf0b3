"""An event loop that runs, and tasks made of a plain coroutine function."""

import socket

import pytest
import trio

from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import ConnectionTask, pause


class Scripted(ConnectionTask):
    """Runs `script(self)`; counts as ended once its `finally` ran."""

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
        """Until there is something to read: that a socket is writable is an event, too."""
        self.waiting_on = awaited
        await pause
        while isinstance(awaited, Stream) and not awaited.readable:
            await pause


class Wires:
    """Socket pairs: our end in the event loop, the far end in the hands of the test."""

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        self._ends: list[tuple[Stream, socket.socket]] = []

    def stream(self, task: ConnectionTask | None) -> tuple[Stream, socket.socket]:
        near, far = socket.socketpair()
        near.setblocking(False)
        self._ends.append((Stream(self.loop, near, task), far))
        return self._ends[-1]

    def close(self) -> None:
        for stream, far in self._ends:
            stream.close()
            far.close()
        self.loop.flush()


async def _never_idle(task) -> None:
    """Its `bell` is set in the batch whose number it was given."""
    stream, far = task.ends
    while not task.over:
        far.send(b"x")
        await task.wait_for(stream)
        stream.read(1)
        task.batches += 1
        if task.batches == task.rings_at:
            task.bell.set()


@pytest.fixture
async def busy(loop, wires):
    """A task that gives its event loop no rest until the test ends."""
    task = Scripted(loop, _never_idle)
    task.over, task.batches, task.rings_at, task.bell = False, 0, 0, trio.Event()
    task.ends = wires.stream(task)
    task.start()
    yield task
    task.over = True


async def until(holds) -> None:
    with trio.fail_after(30):
        while not holds():  # noqa: ASYNC110  an epoll set rings no bell here
            await trio.sleep(0.001)


@pytest.fixture
async def loop(nursery):
    made = EventLoop()
    await nursery.start(made.run)
    return made


@pytest.fixture
def wires(loop):
    made = Wires(loop)
    yield made
    made.close()

"""Connection tasks: the coroutines that the event loop steps, one for each client connection.

A task sets `waiting_on` and then awaits `pause`; the event loop steps it when that stream has an
event. Invariant: a coroutine awaits only `pause` (in a generator under `await_direct` a bare
`yield` is equivalent); an await of trio raises an error, because trio could never resume it.
However a task ends, its `finally` blocks run, and no task outlives the event loop.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Awaitable, Coroutine, Generator
from math import inf
from typing import Any, Final, Protocol, TypeVar, cast

from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.wire.errors import DownstreamError

_log = logging.getLogger(__name__)

T = TypeVar("T")
Resumable = Coroutine[Any, Any, T] | Generator[Any, Any, T]

ANY_STREAM: Final = object()  # in `waiting_on`: an event of any stream of the task
READS_PER_STEP: Final = 16  # so that other connections are not delayed


class ClientDisconnected(DownstreamError):
    """The client closed its connection, so no response can be sent."""


class PhaseTimeout(Exception):
    """The task's `phase_deadline` has passed; the message is its `phase`."""


class _Pause:
    """Yields None once. A tuple's iterator does that without creating a frame."""

    __await__ = (None,).__iter__


# Suspends the task until the stream in `waiting_on` has an event.
pause: Final = cast("Awaitable[None]", _Pause())


@types.coroutine
def await_direct(inner: Resumable[T]) -> Generator[Any, Any, T]:
    """Await `inner` so that the event loop steps it directly.

    Otherwise every event resumes each frame between the event loop and `pause`, and a relay is
    about ten frames deep.
    """
    result: T = yield inner
    return result


class Readable(Protocol):
    """The part of a stream (`loop.stream.Stream`) that a task uses to wait for it."""

    readable: bool


class EventHandler:
    """Receives the events of streams: a connection task, or its fast path. `client`: the client's
    stream, if it has one."""

    __slots__ = ("client", "waiting_on")

    client: Readable | None

    def __init__(self) -> None:
        self.client = None
        self.waiting_on: object = None

    def step(self, error: BaseException | None = None) -> None:
        raise NotImplementedError

    def throw(self, error: BaseException) -> None:
        raise NotImplementedError

    def is_disconnect(self, mask: int) -> bool:
        raise NotImplementedError


class ConnectionTask(EventHandler):
    """A coroutine with its state.

    `phase`: its current activity. `phase_deadline`: when the phase times out, in seconds of
    `EventLoop.now`, `inf` for never.
    """

    __slots__ = (
        "_callers",
        "_coro",
        "loop",
        "phase",
        "phase_deadline",
        "reads_since_pause",
        "started_at",
    )  # fmt: skip

    def __init__(self, loop: EventLoop) -> None:
        super().__init__()
        self.loop = loop
        self.phase_deadline = inf
        self.phase = "start"
        self.started_at = loop.now
        self.reads_since_pause = 0  # units of work since the last `pause`, each about one read
        self._coro: Resumable[Any] | None = None
        self._callers: list[Resumable[Any]] = []  # coroutines that wait in `await_direct`

    async def serve(self) -> None:
        """Serve the connection until its end, and close its streams."""
        raise NotImplementedError

    def is_disconnect(self, mask: int) -> bool:
        """Whether this close or error event of the client's stream ends the task."""
        return True

    def start(self) -> None:
        self._coro = self.serve()
        self.loop.tasks.add(self)
        self.step()

    def must_wait_for(self, stream: Readable) -> bool:
        """Whether the task has to `pause` before the next read of `stream`.

        Also true after `READS_PER_STEP` reads, even if there is more to read: a peer that sends
        continuously must not delay other connections.
        """
        if not stream.readable:
            self.waiting_on = stream
            return True
        return self.count_read()

    def count_read(self) -> bool:
        """Count one unit of work. True if the task has to `pause` before the next one."""
        self.reads_since_pause += 1
        if self.reads_since_pause < READS_PER_STEP:
            return False
        self.loop.wake(self)  # the caller may be outside an iteration
        return True

    def throw(self, error: BaseException) -> None:
        self.step(error)

    def on_phase_timeout(self) -> None:
        self.phase_deadline = inf
        self.step(PhaseTimeout(self.phase))

    def step(self, error: BaseException | None = None) -> None:
        """Run until the next `pause` or the end. `error`: an exception to throw into it first."""
        if self._coro is None:
            return
        self.reads_since_pause = 0
        value: object = None
        while (coro := self._coro) is not None:
            try:
                yielded = coro.send(value) if error is None else coro.throw(error)
            except StopIteration as stop:
                self._coro = self._callers.pop() if self._callers else None
                value, error = stop.value, None
            except BaseException as failure:
                if not self._callers:
                    self._failed(failure)
                    return
                self._coro = self._callers.pop()
                error = failure
            else:
                if yielded is None:
                    return
                if isinstance(yielded, Coroutine | Generator):
                    self._callers.append(coro)
                    self._coro = yielded
                    value = error = None
                else:  # a value yielded by trio, which only trio could resume
                    error = RuntimeError("a connection task must not await trio")
        self.loop.remove_task(self)

    def _failed(self, failure: BaseException) -> None:
        self._coro = None
        self.loop.remove_task(self)
        if isinstance(failure, ClientDisconnected | PhaseTimeout):
            return
        if not isinstance(failure, Exception):
            raise failure
        _log.error("connection_failed phase=%s", self.phase, exc_info=failure)
        self.loop.failures += 1

    def close_coroutine(self) -> None:
        """Run the `finally` blocks, innermost first, because the event loop ends."""
        coro, self._coro = self._coro, None
        self.loop.remove_task(self)
        if coro is not None:
            coro.close()
        while self._callers:
            self._callers.pop().close()

"""The coroutines that the pump resumes, one per client connection.

Contract: a coroutine awaits `pause` only, after it has said in `waiting_on` whose event it wants; in a
generator that is `await_direct` a bare `yield` is the same. An await of trio from inside is refused, for
only trio could ever resume it. Whatever ends it, its own `finally` blocks run, and no task outlives
the pump.
"""

from __future__ import annotations

import logging
import types
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine, Generator
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from omni_proxy.dataplane.loop.event_loop import EventLoop
    from omni_proxy.dataplane.loop.stream import Stream

_log = logging.getLogger(__name__)

T = TypeVar("T")
Resumable = Coroutine[Any, Any, T] | Generator[Any, Any, T]

ANY_STREAM: Final = object()  # in `waiting_on`: an event of any socket of the task
READS_PER_STEP: Final = 16  # of one connection whose peer always has more


class ClientDisconnected(Exception):
    """The client has left; nobody is there to be answered."""


class PhaseTimeout(Exception):
    """The connection's `phase_deadline` has passed; its `phase` says which clock that was."""


class _Pause:
    """What waits in it is a tuple's iterator, not a frame: 50 ns less for each event."""

    __await__ = (None,).__iter__


# Back to the pump, until the socket in `waiting_on` has an event.
pause: Final = cast("Awaitable[None]", _Pause())


@types.coroutine
def await_direct(inner: Resumable[T]) -> Generator[Any, Any, T]:
    """Await `inner` so that the pump resumes it directly.

    Each frame between the pump and `pause` costs 0.25 us per event; a relay is ten deep without.
    """
    result: T = yield inner
    return result


class EventHandler(Protocol):
    """Whoever gets the events of a socket."""

    waiting_on: object

    @property
    def client(self) -> Stream | None: ...

    def step(self) -> None: ...

    def throw(self, error: BaseException) -> None: ...

    def is_disconnect(self, mask: int) -> bool: ...


class ConnectionTask(ABC):
    """One coroutine that the pump resumes. `phase_deadline` is its one clock, `phase` what it is doing."""

    __slots__ = (
        "_coro",
        "_outer",
        "client",
        "loop",
        "phase",
        "phase_deadline",
        "reads_since_pause",
        "started_at",
        "waiting_on",
    )  # fmt: skip

    client: Stream | None

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        self.client = None
        self.waiting_on: object = None
        self.phase_deadline = inf
        self.phase = "start"
        self.started_at = loop.now
        self.reads_since_pause = 0  # or work like it since it was last resumed, without a pause
        self._coro: Resumable[Any] | None = None
        self._outer: list[Resumable[Any]] = []  # those that wait in `await_direct`

    @abstractmethod
    async def serve(self) -> None:
        """The life of the connection; it closes its own sockets."""

    def is_disconnect(self, mask: int) -> bool:
        """Whether this event, which says that the client has closed or broken, ends it."""
        return True

    def start(self) -> None:
        self._coro = self.serve()
        self.loop.tasks.add(self)
        self.step()

    def must_wait_for(self, conn: Stream) -> bool:
        """Whether `pause` has to come before the next read of `conn`.

        Also true, now and then, where there is more to read: a peer that always has more must not
        keep the other connections waiting.
        """
        if not conn.readable:
            self.waiting_on = conn
            return True
        return self.count_read()

    def count_read(self) -> bool:
        """Count a piece of work, about a read's; whether `pause` has to come before the next."""
        self.reads_since_pause += 1
        if self.reads_since_pause < READS_PER_STEP:
            return False
        self.loop.wake(self)  # whoever steps us may be no part of a batch
        return True

    def throw(self, error: BaseException) -> None:
        self.step(error)

    def on_phase_timeout(self) -> None:
        self.phase_deadline = inf
        self.step(PhaseTimeout(self.phase))

    def step(self, error: BaseException | None = None) -> None:
        """Run until the next `pause`, or to the end."""
        if self._coro is None:
            return
        self.reads_since_pause = 0
        value: object = None
        while (coro := self._coro) is not None:
            try:
                got = coro.send(value) if error is None else coro.throw(error)
            except StopIteration as stop:
                self._coro = self._outer.pop() if self._outer else None
                value, error = stop.value, None
            except BaseException as failure:
                if not self._outer:
                    self._failed(failure)
                    return
                self._coro = self._outer.pop()
                error = failure
            else:
                if got is None:
                    return
                if isinstance(got, Coroutine | Generator):
                    self._outer.append(coro)
                    self._coro = got
                    value = error = None
                else:  # what trio yields: only trio could ever resume it
                    error = RuntimeError("a connection of the door may not await trio")
        self.loop.remove_task(self)

    def _failed(self, failure: BaseException) -> None:
        self._coro = None
        self.loop.remove_task(self)
        if isinstance(failure, ClientDisconnected | PhaseTimeout):
            return
        if not isinstance(failure, Exception):
            raise failure
        _log.error("a connection of the door failed in phase %s", self.phase, exc_info=failure)
        self.loop.failures += 1

    def close_coroutine(self) -> None:
        """The pump ends: run the `finally` blocks of the coroutine, the innermost first."""
        coro, self._coro = self._coro, None
        self.loop.remove_task(self)
        if coro is not None:
            coro.close()
        while self._outer:
            self._outer.pop().close()

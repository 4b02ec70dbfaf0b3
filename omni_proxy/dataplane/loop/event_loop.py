"""The data plane's event loop: one trio task, one epoll set, every socket that carries requests.

It runs plain coroutines (see `task`) and yields to trio's other tasks when they need to run.
Invariant: sockets are closed after the iteration, so that a stale event can't reach a reused
descriptor; an exception ends only the connection that raised it. It awaits trio in only two
places, and no other task of trio waits longer than one iteration plus `TRIO_CHECK_SECS`. An
iteration that takes long ends early, and the next one continues with its events.
A trio task for each connection would cost more CPU per request: see docs/performance.md.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from select import EPOLLET, EPOLLIN, EPOLLOUT, EPOLLRDHUP, epoll
from time import monotonic
from typing import Final, Protocol

import trio

from omni_proxy.dataplane.loop.trio_scheduling import TrioActivity

ALL_EVENTS: Final = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET
# A long iteration flushes all at this number, which bounds the delay of the first one. Not Final:
# tests set it, and CHECK_EVENTS.
MAX_PENDING_WRITERS = 32
BUSY_POLL_SECS: Final = 0.004  # under load, waiting in epoll is cheaper than waiting in trio
TRIO_CHECK_SECS: Final = 0.001  # interval of checks whether trio has ready I/O
# Per iteration. With fewer, clients and workers wait for more iterations, which costs CPU time.
MAX_EVENTS: Final = 64
# Events between two reads of the clock, and between two flushes; more woken tasks than this read it
# each. An event with a large body takes a thousand times as long as most, which a further read for
# each would slow down.
CHECK_EVENTS = 16
MAX_BATCH_SECS: Final = 0.02  # then trio gets a turn before the other events


class IoHandler:
    """An object that receives the events of a descriptor in the epoll set."""

    __slots__ = ()

    def on_event(self, mask: int) -> None:
        raise NotImplementedError


class Steppable(Protocol):
    """An object that `call_soon` can step: a connection task, or its fast path."""

    waiting_on: object

    def step(self) -> None: ...


class WakeCallback:
    """A `Steppable` that calls a function."""

    __slots__ = ("step", "waiting_on")

    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step
        self.waiting_on: object = None


class LoopTask(Protocol):
    """The part of a connection task (`loop.task.ConnectionTask`) that the event loop uses."""

    phase: str
    phase_deadline: float
    started_at: float

    def on_phase_timeout(self) -> None: ...

    def close_coroutine(self) -> None: ...


class PendingWriter(IoHandler):
    """A stream with bytes to send at the end of the iteration."""

    __slots__ = ()

    def flush(self) -> None:
        raise NotImplementedError


class EventLoop:
    """Owns the epoll set and runs the connection tasks; GET /status shows `tasks`.

    `clock`: monotonic time in seconds. `now`: its value at the start of the current iteration.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self.now = clock()  # read once per iteration: all timeouts of connections count from it
        self.tasks: set[LoopTask] = set()
        self.side_tasks = 0  # how many of `tasks` are additional requests of a connection
        self.ended = False  # no task may be started any more
        self.admin_exchanges = 0  # in flight: the loop must not block in its own epoll meanwhile
        self.failures = 0
        self.tasks_ended = trio.Event()  # set, and replaced by a new one, when the last task ends
        self._epoll = epoll()
        self._closing: list[socket.socket] = []
        self.pending_writers: list[PendingWriter] = []  # flushed at the end of this iteration
        self._ended_early = False  # the last iteration has left events or tasks to the next one
        self._unhandled: list[tuple[int, int]] = []  # events of an iteration that ended early
        self._ready: list[Steppable] = []  # stepped in the next iterations, even without an event
        self._trio_checked_at = self.now
        self._trio: TrioActivity | None = None  # set while the loop runs
        self._parked = False  # waits in trio for an event or the wake-up descriptor
        self._wakeup_fd = -1  # open while the loop runs
        self._handlers: list[IoHandler | None] = []  # indexed by descriptor

    def register(self, fd: int, handler: IoHandler) -> None:
        self._make_room(fd)
        self._epoll.register(fd, ALL_EVENTS)
        self._handlers[fd] = handler

    def _drop_unhandled(self, fd: int) -> None:
        if self._unhandled:
            self._unhandled = [event for event in self._unhandled if event[0] != fd]

    def _make_room(self, fd: int) -> None:
        missing = fd + 1 - len(self._handlers)
        if missing > 0:
            self._handlers += [None] * missing

    def replace_handler(self, fd: int, handler: IoHandler) -> None:
        """Pass the events of a registered descriptor to `handler` from now on."""
        self._handlers[fd] = handler

    def suspend(self, fd: int) -> None:
        """Deliver no events until `rearm`. The descriptor stays registered, so neither can fail."""
        self._drop_unhandled(fd)
        with contextlib.suppress(ValueError):  # the loop has ended
            self._epoll.modify(fd, 0)

    def rearm(self, fd: int) -> None:
        """Deliver the descriptor's current events again in the next iteration."""
        self._epoll.modify(fd, ALL_EVENTS)

    def unregister(self, fd: int, sock: socket.socket) -> None:
        if fd < len(self._handlers) and self._handlers[fd] is not None:
            self._handlers[fd] = None
            self._drop_unhandled(fd)  # another socket may get the descriptor
            with contextlib.suppress(OSError, ValueError):  # ValueError: the loop has ended
                self._epoll.unregister(fd)
        self._closing.append(sock)

    def flush_writes(self) -> None:
        """Flush the streams in `pending_writers`."""
        writers, self.pending_writers = self.pending_writers, []
        for writer in writers:
            writer.flush()

    def call_soon(self, task: Steppable) -> None:
        """Step the task after the events of the next iteration, later if that ends early. Tasks are
        stepped in the order of the calls."""
        task.waiting_on = None
        self._ready.append(task)

    def wake(self, task: Steppable) -> None:
        """As `call_soon`, but also ends a wait in trio: required outside an iteration."""
        self.call_soon(task)
        if self._parked:
            self._parked = False
            os.eventfd_write(self._wakeup_fd, 1)

    def request_trio_turn(self) -> None:
        """Yield to trio soon. Call it after changing a trio deadline from a connection task."""
        if self._trio is not None:
            self._trio.request_turn()

    @property
    def connections(self) -> int:
        return len(self.tasks) - self.side_tasks

    def remove_task(self, task: LoopTask) -> None:
        """Remove a task whose coroutine has ended."""
        self.tasks.discard(task)
        if not self.tasks:
            self.tasks_ended.set()
            self.tasks_ended = trio.Event()

    def flush(self) -> None:
        """Flush pending writers and close unregistered sockets. Call it after stepping tasks
        outside an iteration."""
        if self.pending_writers:
            self.flush_writes()
        closing = self._closing
        while closing:
            with contextlib.suppress(OSError):
                closing.pop().close()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; then run every task's `finally` blocks and close every socket."""
        trio_activity = self._trio = TrioActivity(self.clock)
        self._open_wakeup()
        trio.lowlevel.add_instrument(trio_activity)
        try:
            task_status.started()
            while True:
                events, self._unhandled = self._unhandled, []
                if not events:
                    busy = trio_activity.waiting or self._ready or self.admin_exchanges
                    events = self._epoll.poll(0 if busy else BUSY_POLL_SECS, MAX_EVENTS)
                if not events and not self._ready:
                    self._trio_checked_at = self.clock()
                    self._parked = True
                    await trio.lowlevel.wait_readable(self._epoll.fileno())
                    self._parked = False
                    trio_activity.refresh()
                    continue
                self._run_batch(events)
                now = self.clock()  # `self.now` is from before the events, which may take long
                if not (
                    self._ended_early or trio_activity.waiting or now >= trio_activity.next_deadline
                ):
                    if now - self._trio_checked_at < TRIO_CHECK_SECS:
                        continue
                    self._trio_checked_at = now
                    if not trio_activity.has_events():
                        continue
                self._ended_early = False
                await trio.lowlevel.checkpoint()
                trio_activity.refresh()
        finally:
            trio.lowlevel.remove_instrument(trio_activity)
            self.ended = True
            for task in list(self.tasks):
                task.close_coroutine()
            self.flush()
            self._epoll.close()
            os.close(self._wakeup_fd)

    def _open_wakeup(self) -> None:
        """What `wake` writes to. Edge-triggered: it need not be read."""
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._make_room(self._wakeup_fd)  # its events have no handler
        self._epoll.register(self._wakeup_fd, EPOLLIN | EPOLLET)

    def _run_batch(self, events: list[tuple[int, int]]) -> None:
        handlers = self._handlers
        self.now = self.clock()
        rest = None
        if len(events) > CHECK_EVENTS:
            events, rest = events[:CHECK_EVENTS], events[CHECK_EVENTS:]
        for fd, mask in events:
            handler = handlers[fd]
            if handler is not None:
                handler.on_event(mask)
        if rest is not None:
            self._continue_batch(rest)
        if self._ready and not self._unhandled:  # `call_soon`: after the events
            ready, self._ready = self._ready, []
            if len(ready) > CHECK_EVENTS:
                self._step_many(ready)
            else:
                for task in ready:
                    task.step()
        if self.pending_writers:
            self.flush_writes()
        if self._closing:
            self.flush()

    def _continue_batch(self, rest: list[tuple[int, int]]) -> None:
        """Handle these events of the batch too, until it has taken `MAX_BATCH_SECS`. The loop of
        `_run_batch` is repeated here, because a call for each batch would cost every event."""
        handlers = self._handlers
        while rest:
            if len(self.pending_writers) >= MAX_PENDING_WRITERS:
                self.flush_writes()
            if self.clock() - self.now > MAX_BATCH_SECS:
                # Without those of sockets that this batch has unregistered.
                self._unhandled = [event for event in rest if handlers[event[0]] is not None]
                self._ended_early = True
                return
            events, rest = rest[:CHECK_EVENTS], rest[CHECK_EVENTS:]
            for fd, mask in events:
                handler = handlers[fd]
                if handler is not None:
                    handler.on_event(mask)

    def _step_many(self, ready: list[Steppable]) -> None:
        """Step these tasks until the batch has taken `MAX_BATCH_SECS`; the others come first in the
        next iteration."""
        clock, until = self.clock, self.now + MAX_BATCH_SECS
        for count, task in enumerate(ready, 1):
            task.step()
            if len(self.pending_writers) >= MAX_PENDING_WRITERS:
                self.flush_writes()
            if clock() > until and count < len(ready):
                self._ready[:0] = ready[count:]
                self._ended_early = True
                return

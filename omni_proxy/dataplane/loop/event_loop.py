"""The pump: one trio task, one epoll set, every socket of the door.

Invariant: sockets are closed after the batch, so that a stale event can't hit a reused descriptor;
an exception ends the connection it came from and no other. It awaits trio in two places only, and
trio's other tasks wait for no more than a batch and a millisecond. Why not a trio task per
connection: 52 us of CPU per request against 34 (82 with a scope per phase).
"""

from __future__ import annotations

import contextlib
import os
import socket
from select import EPOLLET, EPOLLIN, EPOLLOUT, EPOLLRDHUP, epoll
from time import monotonic
from typing import Final, Protocol

import trio

from omni_proxy.dataplane.loop.task import ConnectionTask, EventHandler
from omni_proxy.dataplane.loop.trio_scheduling import HostLoop

ALL_EVENTS: Final = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET
LINGER_SECS: Final = 0.004  # sleeping here saves trio's park and wake (20 us) on a busy door
LOOK_SECS: Final = 0.001  # so often it is seen whether trio has work
EVENTS_AT_ONCE: Final = 64  # in a batch; each may be a request that takes milliseconds


class Slot(Protocol):
    """Whatever has a descriptor in the epoll set."""

    def on_event(self, mask: int) -> None: ...


class Late(Protocol):
    """A socket with something to send at the end of a turn."""

    def send_late(self) -> None: ...


class EventLoop:
    """Owns the epoll set and the coroutines; `tasks` is what GET /status shows."""

    def __init__(self) -> None:
        self.now = monotonic()  # read once per batch: every clock of the door counts from it
        self.tasks: set[ConnectionTask] = set()
        self.front_exchanges = 0  # while one is open the front needs trio more than we do
        self.failures = 0
        self.emptied = trio.Event()  # set, and replaced, when the last coroutine has ended
        self._set = epoll()
        self._doomed: list[socket.socket] = []
        self.late: list[Late] = []  # who has something to send when this turn ends
        self._again: list[
            EventHandler
        ] = []  # those that gave their turn up though they could go on
        self._looked_at = self.now
        self._others: HostLoop | None = None  # while it runs
        self._parked = False  # in trio's hands until a socket has news, or the bell rings
        # Rung when there is work that no socket tells of. Edge-triggered: nobody need read it.
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._set.register(self._bell, EPOLLIN | EPOLLET)
        # By descriptor: of a list one cache line is touched for each event, of a dict four.
        self._slots: list[Slot | None] = [None] * (self._bell + 1)

    def register(self, fd: int, slot: Slot) -> None:
        slots = self._slots
        if fd >= len(slots):
            slots += [None] * (fd + 1 - len(slots))
        self._set.register(fd, ALL_EVENTS)
        slots[fd] = slot

    def replace(self, fd: int, slot: Slot) -> None:
        """From now on `slot` gets the events of a descriptor that is in the set."""
        self._slots[fd] = slot

    def mute(self, fd: int) -> None:
        """No events of it until `ask_again`. It stays in the set, so that neither call can fail."""
        with contextlib.suppress(ValueError):  # the pump has ended
            self._set.modify(fd, 0)

    def ask_again(self, fd: int) -> None:
        """Its events come once more with the next batch, as far as they still hold."""
        self._set.modify(fd, ALL_EVENTS)

    def forget(self, fd: int, sock: socket.socket) -> None:
        if fd < len(self._slots) and self._slots[fd] is not None:
            self._slots[fd] = None
            with contextlib.suppress(OSError, ValueError):  # ValueError: the pump has ended
                self._set.unregister(fd)
        self._doomed.append(sock)

    def send_late(self) -> None:
        """Let go whatever is `late`."""
        late, self.late = self.late, []
        for each in late:
            each.send_late()

    def again(self, task: EventHandler) -> None:
        """Resume it after everybody else had a turn."""
        task.awaits = None
        self._again.append(task)

    def resume(self, task: EventHandler) -> None:
        """As `again`, and from outside a batch too: whoever changed what it waits for says so."""
        self.again(task)
        if self._parked:
            self._parked = False
            os.eventfd_write(self._bell, 1)

    def give_turn(self) -> None:
        """Say so where a deadline of trio's is moved by one of our coroutines."""
        if self._others is not None:
            self._others.hurry()

    def part(self, task: ConnectionTask) -> None:
        """A coroutine has ended."""
        self.tasks.discard(task)
        if not self.tasks:
            self.emptied.set()
            self.emptied = trio.Event()

    def settle(self) -> None:
        """Send what is late, close what was given up. Call after acting on tasks from outside."""
        if self.late:
            self.send_late()
        doomed = self._doomed
        while doomed:
            with contextlib.suppress(OSError):
                doomed.pop().close()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; then every connection's `finally` runs and every socket is closed."""
        others = self._others = HostLoop()
        trio.lowlevel.add_instrument(others)
        try:
            task_status.started()
            while True:
                busy = others.waiting or self._again or self.front_exchanges
                events = self._set.poll(0 if busy else LINGER_SECS, EVENTS_AT_ONCE)
                if not events and not self._again:
                    self._looked_at = monotonic()
                    self._parked = True
                    await trio.lowlevel.wait_readable(self._set.fileno())
                    self._parked = False
                    others.ask()
                    continue
                self._batch(events)
                if self._yield_due(others):
                    await trio.lowlevel.checkpoint()
                    others.ask()
        finally:
            trio.lowlevel.remove_instrument(others)
            for task in list(self.tasks):
                task.abandon()
            self.settle()
            self._set.close()
            os.close(self._bell)

    def _batch(self, events: list[tuple[int, int]]) -> None:
        self.now = monotonic()
        slots = self._slots
        for fd, mask in events:
            slot = slots[fd]
            if slot is not None:
                slot.on_event(mask)
        if self._again:
            again, self._again = self._again, []
            for task in again:
                task.step()
        if self.late:
            self.send_late()
        if self._doomed:
            self.settle()

    def _yield_due(self, others: HostLoop) -> bool:
        now = self.now
        if others.waiting or now >= others.due:
            return True
        if now - self._looked_at < LOOK_SECS:
            return False
        self._looked_at = now
        return others.news()

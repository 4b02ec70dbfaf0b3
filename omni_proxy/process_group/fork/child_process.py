"""Parent side of the child processes that are ranks of groups: start, call, kill, pool.

Invariant: when a child ends, every caller that waits for it returns within milliseconds; a child
that hangs blocks a caller only for the caller's timeout. A child exits when this process ends for
any reason. No torch in this process.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from omni_proxy.process_group.fork.forkserver_client import ForkServer
from omni_proxy.process_group.fork.ipc import (
    Configure,
    Event,
    Logged,
    ProgressReport,
    Ready,
    ReleaseBlocks,
    Reply,
    TransferEnded,
)
from omni_proxy.process_group.tensor_plan import GroupError

log = logging.getLogger(__name__)

TransferEvent = ProgressReport | TransferEnded

# Between commands a child blocks in a read; if it reads nothing for this time, it was stopped.
SEND_SECS: Final = 10.0
# Importing torch takes seconds, and much longer on an overloaded machine.
START_SECS: Final = 60.0
REAP_SECS: Final = 5.0
# Time for a child to report that its own deadline has passed.
REPORT_GRACE_SECS: Final = 3.0
# Timeout of an orderly end or a query: both can do without the reply.
QUERY_TIMEOUT_SECS: Final = 2.0


class ChildEnded(GroupError):
    """The process has ended, and with it every group that it was in."""

    def __init__(self, message: str) -> None:
        super().__init__(message, group_dropped=True)


class ChildHandle:
    """One child process. A thread of this process reads its events, and ends with it."""

    def __init__(self, configure: Configure, name: str, fork_server: ForkServer) -> None:
        """Requests a fork without waiting. Raises GroupError if no process can be started."""
        self.end_reason: str | None = None
        self.pid: int | None = None  # None until the child is ready
        self._ready = threading.Event()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, _PendingReply] = {}
        self._subscribers: dict[int, Callable[[TransferEvent | ChildEnded], None]] = {}
        self._decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
        self._reaped = threading.Event()
        self._process = fork_server.fork()
        self._reader = threading.Thread(target=self._read_events, name=name, daemon=True)
        self._reader.start()
        self.send(configure)

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    def require_ready(self, timeout_secs: float) -> None:
        """Waits until the child is ready; raises ChildEnded, or GroupError after `timeout_secs`."""
        if not self._ready.wait(timeout_secs):
            raise GroupError(f"the receiver process has not started within {timeout_secs:g} s")
        if self.end_reason is not None:
            raise ChildEnded(self.end_reason)

    def next_number(self) -> int:
        return next(self._numbers)

    def call(self, command: msgspec.Struct, timeout_secs: float, *descriptors: int) -> Reply:
        """Returns the reply to a command. Raises ChildEnded, or GroupError without one in time."""
        number: int = command.number  # type: ignore[attr-defined]  # commands with a reply have it
        pending, deadline = _PendingReply(), time.monotonic() + timeout_secs
        with self._lock:
            if self.end_reason is not None:
                raise ChildEnded(self.end_reason)
            self._pending[number] = pending
        try:
            self._write(command, min(timeout_secs, SEND_SECS), *descriptors)
            ended = pending.done.wait(max(deadline - time.monotonic(), 0))
        finally:
            with self._lock:
                self._pending.pop(number, None)
        if pending.reply is not None:
            return pending.reply
        if ended:
            raise ChildEnded(self.end_reason or "the receiver process ended")
        raise GroupError(f"the receiver process sent no reply within {timeout_secs:g} s")

    def send(self, command: msgspec.Struct) -> None:
        """Sends a command that has no reply; a child that does not read it is killed."""
        try:
            self._write(command, SEND_SECS)
        except GroupError as error:
            self.kill(str(error))

    def _write(self, command: msgspec.Struct, timeout_secs: float, *descriptors: int) -> None:
        """Writes a command. Raises GroupError if the child does not read it."""
        channel = self._process.channel
        try:
            channel.send(command, *descriptors, timeout_secs=timeout_secs)
        except TimeoutError:
            reason = f"the receiver process hangs: it read no command for {timeout_secs:g} s"
            if channel.partial_write:
                self.kill(reason)
                raise ChildEnded(reason) from None
            raise GroupError(reason) from None
        except OSError:
            pass  # the child has ended, which the reader thread handles

    def subscribe(
        self, number: int, on_event: Callable[[TransferEvent | ChildEnded], None]
    ) -> None:
        """Calls `on_event` with the events of command `number`, or with the child's end.

        It is called in the reader thread, the last time with `TransferEnded` or `ChildEnded`.
        """
        with self._lock:
            if self.end_reason is None:
                self._subscribers[number] = on_event
                return
        on_event(ChildEnded(self.end_reason))

    def unsubscribe(self, number: int) -> None:
        with self._lock:
            self._subscribers.pop(number, None)

    def kill(self, reason: str) -> None:
        """Kills the child; its waiting callers get `reason`."""
        with self._lock:
            self.end_reason = self.end_reason or reason
        self._process.kill()

    def wait_reaped(self, timeout_secs: float) -> bool:
        return self._reaped.wait(timeout_secs)

    def _read_events(self) -> None:
        try:
            for line in self._process.channel.lines():
                self._handle(self._decoder.decode(line))
        except msgspec.DecodeError as error:
            reason = f"the receiver process sent an invalid message: {error}"
            self.end_reason = self.end_reason or reason
        finally:
            # Also after a failure, since waiting callers have to be woken.
            self._end()

    def _end(self) -> None:
        self._process.kill()
        # A child killed before it was ready may not be forked yet, so don't wait for its exit.
        reason = (
            self.end_reason if self.end_reason and not self.ready else self._process.exit_reason()
        )
        with self._lock:
            self.end_reason = self.end_reason or reason
            pending, subscribers = list(self._pending.values()), list(self._subscribers.values())
            self._pending.clear()
            self._subscribers.clear()
        self._process.close()
        self._reaped.set()
        self._ready.set()  # wakes `require_ready`, which then raises
        for pending_reply in pending:
            pending_reply.done.set()
        for on_event in subscribers:
            on_event(ChildEnded(self.end_reason))

    def _handle(self, event: Event) -> None:
        match event:
            case Ready(pid):
                self.pid = pid
                self._ready.set()
            case Logged(level, text):
                log.log(level, "%s receiver_pid=%s", text, self.pid)
            case Reply(number=number):
                with self._lock:
                    pending = self._pending.get(number)
                if pending is not None:
                    pending.reply = event
                    pending.done.set()
            case ProgressReport(number=number) | TransferEnded(number=number):
                with self._lock:
                    on_event = self._subscribers.get(number)
                    if isinstance(event, TransferEnded):
                        self._subscribers.pop(number, None)
                if on_event is not None:
                    on_event(event)


class _PendingReply:
    """`done`: the reply has arrived, or the process has ended."""

    __slots__ = ("done", "reply")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.reply: Reply | None = None


class ChildPool:
    """The children of one receiver, one for each group. Safe from any thread.

    It keeps the fork server running until `close`. `start` creates a child, in milliseconds if the
    fork server runs.
    """

    def __init__(self, fork_server: ForkServer, start: Callable[[ForkServer], ChildHandle]) -> None:
        self._fork_server = fork_server
        self._start = start
        self._lock = threading.Lock()
        self._children: list[ChildHandle] = []
        self._closed = False
        fork_server.hold()

    def warm(self) -> None:
        """Starts the fork server if it is not running. Raises GroupError if that fails."""
        with self._lock:
            if not self._closed:
                self._fork_server.warm()

    def start_child(self) -> ChildHandle:
        """Raises GroupError if no process can be started."""
        with self._lock:
            if self._closed:
                raise GroupError("the receiver is shutting down")
            self._remove_reaped()
            child = self._start(self._fork_server)
            self._children.append(child)
            return child

    def release_blocks(self, blocks: tuple[int, ...]) -> None:
        """Makes every child unmap these shared blocks."""
        for child in self.running():
            child.send(ReleaseBlocks(blocks))

    def running(self) -> list[ChildHandle]:
        with self._lock:
            self._remove_reaped()
            return list(self._children)

    def pids(self) -> list[int]:
        """Pids of the fork server, if it runs, and of the children."""
        pids = [self._fork_server.pid(), *(child.pid for child in self.running())]
        return [pid for pid in pids if pid is not None]

    def close(self) -> None:
        """Kills and reaps all children, then releases the fork server."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            children, self._children = self._children, []
        for child in children:
            child.kill("the receiver was closed")
        deadline = time.monotonic() + REAP_SECS
        for child in children:
            child.wait_reaped(max(deadline - time.monotonic(), 0))
        self._fork_server.release()

    def _remove_reaped(self) -> None:
        self._children = [child for child in self._children if not child.wait_reaped(0)]

"""The protocol between a receiver and its child process: JSON lines over a socket, descriptors.

Each command has a number, which its reply repeats. A descriptor is sent with the first byte of its
line; `LOST` replaces one that could not be received because the process had too many open files.
Both ends always run the same version of the program. No torch.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import inf
from typing import Final

import msgspec
from msgspec import Struct

from omni_proxy.process_group.broadcast.mapped_file import FileRegion
from omni_proxy.process_group.rendezvous import HostedRendezvous, Rendezvous
from omni_proxy.process_group.tensor_plan import TensorPlan
from omni_proxy.shared import fd_passing

READ_BYTES: Final = 1 << 18
LOST: Final = -1


class Configure(Struct, tag=True):
    """The first line: the timeouts of groups (see `GroupLimits`) and the log level."""

    stall_secs: float
    silent_secs: float
    ping_secs: float
    first_byte_secs: float | None
    receive_secs: float
    log_level: int


class Init(Struct, tag=True):
    number: int
    rendezvous: Rendezvous


class Arm(Struct, tag=True):
    """Receive into the shared block `block`, whose descriptor is attached, or into a file."""

    number: int
    group_name: str
    plans: tuple[TensorPlan, ...]
    ready_secs: float
    digests: bool
    block: int | None = None
    region: FileRegion | None = None


class Destroy(Struct, tag=True):
    number: int
    group_name: str


class CheckTrainer(Struct, tag=True):
    """Check whether the group's trainer disconnected; with `ping`, whether its store answers."""

    number: int
    group_name: str
    ping: bool


class OpenSender(Struct, tag=True):
    """Makes this child rank 0 of a new group; the reply's values have its `port`."""

    number: int
    rendezvous: HostedRendezvous


class WaitForRanks(Struct, tag=True):
    number: int


class Send(Struct, tag=True):
    """Send from the shared block `block`, whose descriptor is attached, or from a file."""

    number: int
    plans: tuple[TensorPlan, ...]
    block: int | None = None
    region: FileRegion | None = None


class CloseSender(Struct, tag=True):
    """Ends the group in which this child is rank 0."""

    number: int


class ReleaseBlocks(Struct, tag=True):
    """These shared blocks are no longer used: unmap them."""

    blocks: tuple[int, ...]


class Ready(Struct, tag=True):
    """The child runs and has imported all modules."""

    pid: int


class Reply(Struct, tag=True):
    """The result of a command: `error`, or the `values` that it returns."""

    number: int
    error: str | None = None
    dropped: bool = False
    values: dict[str, int] = {}


class ProgressReport(Struct, tag=True):
    number: int
    messages_done: int
    bytes_received: int


class TransferEnded(Struct, tag=True):
    """An armed receive or a send has ended; with `error` None it is complete."""

    number: int
    error: str | None = None
    dropped: bool = False
    secs: float = 0.0
    digests: dict[str, str] = {}


class Logged(Struct, tag=True):
    level: int
    text: str


class Exited(Struct, tag=True):
    """How a process exited, as in `subprocess`: a negative status is a signal."""

    status: int


class ForkFailed(Struct, tag=True):
    """No process could be forked."""

    reason: str


NumberedCommand = (
    Init | Arm | Destroy | CheckTrainer | OpenSender | WaitForRanks | Send | CloseSender
)
Command = Configure | ReleaseBlocks | NumberedCommand
Event = Ready | Reply | ProgressReport | TransferEnded | Logged
ForkEvent = Exited | ForkFailed  # reports of the fork server about a process


class JsonSocket:
    """One end of the connection. Sending is safe from any thread; one thread reads.

    `partial_write`: only a part of a line could be sent, so no other line can follow.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.partial_write = False
        self.descriptors: deque[int] = deque()

    def send(self, message: Struct, *descriptors: int, timeout_secs: float = inf) -> None:
        """Sends a line. Raises OSError if the other end is closed.

        Raises TimeoutError if the other end reads nothing for `timeout_secs`, also if another
        thread's line blocks this one: a process that was stopped keeps its socket open.
        """
        line = msgspec.json.encode(message) + b"\n"
        if not self._lock.acquire(timeout=min(timeout_secs, threading.TIMEOUT_MAX)):
            raise TimeoutError(f"an earlier line was not read within {timeout_secs:g} s")
        try:
            if self.partial_write:
                raise BrokenPipeError("the previous line was sent only in part")
            self._send_all(memoryview(line), descriptors, timeout_secs)
        finally:
            self._lock.release()

    def lines(self) -> Iterator[bytes]:
        """Yields lines until the other end closes; adds received descriptors to `descriptors`."""
        pending: list[bytes] = []
        while data := self._read():
            *complete, last = data.split(b"\n")
            for line in complete:
                yield b"".join((*pending, line))
                pending.clear()
            pending.append(last)

    def shutdown(self) -> None:
        """Ends both directions: blocked reads and sends at both ends return."""
        with suppress(OSError):  # it is shut down already
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shutdown()
        with self._lock:  # a sending thread must not use a descriptor number that was reused
            self._connection.close()
        while self.descriptors:
            if (descriptor := self.descriptors.popleft()) != LOST:
                os.close(descriptor)

    def _send_all(self, line: memoryview, descriptors: Sequence[int], timeout_secs: float) -> None:
        remaining = line
        while remaining:
            try:
                sent = send_at_once(self._connection, remaining, descriptors)
            except BlockingIOError:
                if not self._wait_writable(timeout_secs):
                    self.partial_write = len(remaining) < len(line)
                    raise TimeoutError(f"nothing was read for {timeout_secs:g} s") from None
            else:
                remaining, descriptors = remaining[sent:], ()

    def _wait_writable(self, timeout_secs: float) -> bool:
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        return bool(poll.poll(None if timeout_secs == inf else timeout_secs * 1000))

    def _read(self) -> bytes:
        try:
            data, descriptors, truncated = fd_passing.receive(self._connection, READ_BYTES)
        except OSError:
            return b""
        self.descriptors += descriptors
        if truncated and not descriptors:
            self.descriptors.append(LOST)  # the kernel reports the loss only once
        return data


def send_at_once(
    connection: socket.socket, data: bytes | memoryview, descriptors: Sequence[int]
) -> int:
    """Sends without blocking; returns the byte count. Raises BlockingIOError on a full buffer."""
    return connection.sendmsg([data], fd_passing.ancillary_for(descriptors), socket.MSG_DONTWAIT)

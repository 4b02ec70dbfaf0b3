"""What a receiver and its child process say to each other: JSON lines over a socket, and memory.

Each order has a number that its reply carries. A descriptor travels with the first byte of its
line; `LOST` keeps the place of one that this process had no room for. Pure but for the socket
itself; knows no torch.
"""

from __future__ import annotations

import array
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

from omni_proxy.process_group.mapped_file import FileRegion
from omni_proxy.process_group.rendezvous import Meeting, Rendezvous
from omni_proxy.process_group.tensor_plan import TensorPlan

READ_BYTES: Final = 1 << 18
MOST_DESCRIPTORS: Final = 4
LOST: Final = -1


class Begin(Struct, tag=True):
    """The first line: how patient groups are, and what is worth a line in the log."""

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
    """With `block` the bytes go into that shared block, whose descriptor comes along."""

    number: int
    group_name: str
    plans: tuple[TensorPlan, ...]
    ready_secs: float
    digests: bool
    block: int | None = None
    place: FileRegion | None = None


class Destroy(Struct, tag=True):
    number: int
    group_name: str


class Ask(Struct, tag=True):
    """Whether the group's trainer has gone; with `ping`, whether its store answers."""

    number: int
    group_name: str
    ping: bool


class Open(Struct, tag=True):
    """From now on this child is rank 0 of a group of ours; the reply finds its `port`."""

    number: int
    meeting: Meeting


class Meet(Struct, tag=True):
    number: int


class Send(Struct, tag=True):
    """Out of a shared block, whose descriptor comes along, or out of a file."""

    number: int
    plans: tuple[TensorPlan, ...]
    block: int | None = None
    place: FileRegion | None = None


class Leave(Struct, tag=True):
    """The end of the group that is ours."""

    number: int


class Forget(Struct, tag=True):
    """These shared blocks are no longer used."""

    blocks: tuple[int, ...]


class Ready(Struct, tag=True):
    """It lives, and everything is imported."""

    pid: int


class Reply(Struct, tag=True):
    number: int
    error: str | None = None
    dropped: bool = False
    found: dict[str, int] = {}


class Moved(Struct, tag=True):
    number: int
    messages_done: int
    bytes_come: int


class Ended(Struct, tag=True):
    """An armed receive or a send is over; `error` None: all came."""

    number: int
    error: str | None = None
    dropped: bool = False
    secs: float = 0.0
    digests: dict[str, str] = {}


class Logged(Struct, tag=True):
    level: int
    text: str


class Exited(Struct, tag=True):
    """How a process has ended, as subprocess tells it: below 0 by a signal."""

    status: int


class ForkFailed(Struct, tag=True):
    """There is none, and why."""

    why: str


Numbered = Init | Arm | Destroy | Ask | Open | Meet | Send | Leave
Down = Begin | Forget | Numbered
Up = Ready | Reply | Moved | Ended | Logged
News = Exited | ForkFailed  # what the nest tells of a process


class JsonSocket:
    """One end. Sending is safe from any thread; one thread reads.

    `torn`: the other end has taken a part of a line and not the rest, so that none can follow.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.torn = False
        self.descriptors: deque[int] = deque()

    def send(self, message: Struct, *descriptors: int, patience_secs: float = inf) -> None:
        """Raises OSError when the other end is gone.

        That is a TimeoutError where for `patience_secs` it took nothing, or another thread's line
        stood in the way: a process that was stopped keeps its socket open.
        """
        line = msgspec.json.encode(message) + b"\n"
        if not self._lock.acquire(timeout=min(patience_secs, threading.TIMEOUT_MAX)):
            raise TimeoutError(f"another line was not taken within {patience_secs:g} s")
        try:
            if self.torn:
                raise BrokenPipeError("the line before this one was left in the middle")
            self._put(memoryview(line), descriptors, patience_secs)
        finally:
            self._lock.release()

    def lines(self) -> Iterator[bytes]:
        """Until the other end is closed; what came beside them is in `descriptors`."""
        rest: list[bytes] = []
        while data := self._read():
            *whole, last = data.split(b"\n")
            for line in whole:
                yield b"".join((*rest, line))
                rest.clear()
            rest.append(last)

    def end(self) -> None:
        """Nothing goes either way any more: who reads or sends, here or there, is at its end."""
        with suppress(OSError):  # it is already
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        with self._lock:  # a number that is free again may be anybody's
            self._connection.close()
        while self.descriptors:
            if (descriptor := self.descriptors.popleft()) != LOST:
                os.close(descriptor)

    def _put(self, line: memoryview, descriptors: Sequence[int], patience_secs: float) -> None:
        left = line
        while left:
            try:
                sent = send_at_once(self._connection, left, descriptors)
            except BlockingIOError:
                if not self._has_room(patience_secs):
                    self.torn = len(left) < len(line)
                    raise TimeoutError(f"nothing was taken for {patience_secs:g} s") from None
            else:
                left, descriptors = left[sent:], ()

    def _has_room(self, within_secs: float) -> bool:
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        return bool(poll.poll(None if within_secs == inf else within_secs * 1000))

    def _read(self) -> bytes:
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                self._connection, READ_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return b""
        self.descriptors += descriptors
        if flags & socket.MSG_CTRUNC and not descriptors:
            self.descriptors.append(LOST)  # the kernel does not tell it twice
        return data


def send_at_once(
    connection: socket.socket, data: bytes | memoryview, descriptors: Sequence[int]
) -> int:
    """How many bytes went; raises BlockingIOError where there is room for none."""
    # `socket.send_fds` drops the flags that it is given.
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    return connection.sendmsg([data], rights if descriptors else [], socket.MSG_DONTWAIT)

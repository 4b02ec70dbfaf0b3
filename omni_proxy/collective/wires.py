"""What a receiver and its child process say to each other: JSON lines over a socket, and memory.

Each order has a number that its reply carries. A descriptor travels with the first byte of its
line. Pure but for the socket itself; knows no torch.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct

from omni_proxy.collective.place import Place
from omni_proxy.collective.rendezvous import Meeting, Rendezvous
from omni_proxy.collective.specs import Plan

READ_BYTES: Final = 1 << 18
MOST_DESCRIPTORS: Final = 4


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
    plans: tuple[Plan, ...]
    ready_secs: float
    digests: bool
    block: int | None = None
    place: Place | None = None


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
    plans: tuple[Plan, ...]
    block: int | None = None
    place: Place | None = None


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


class Over(Struct, tag=True):
    """How a process has ended, as subprocess tells it: below 0 by a signal."""

    status: int


class Unborn(Struct, tag=True):
    """There is none, and why."""

    why: str


Numbered = Init | Arm | Destroy | Ask | Open | Meet | Send | Leave
Down = Begin | Forget | Numbered
Up = Ready | Reply | Moved | Ended | Logged
News = Over | Unborn  # what the nest tells of a process


class Wire:
    """One end. Sending is safe from any thread; one thread reads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.descriptors: deque[int] = deque()

    def send(self, message: Struct, *descriptors: int) -> None:
        """Raises OSError when the other end is gone."""
        line = msgspec.json.encode(message) + b"\n"
        with self._lock:
            sent = 0
            if descriptors:
                sent = socket.send_fds(self._connection, [line], list(descriptors))
            self._connection.sendall(memoryview(line)[sent:])

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
            os.close(self.descriptors.popleft())

    def _read(self) -> bytes:
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._connection, READ_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return b""
        self.descriptors += descriptors
        return data

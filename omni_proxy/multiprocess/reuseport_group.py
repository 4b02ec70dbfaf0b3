"""The listening sockets of the public address, one for each door, in the hands of control.

Invariant: control keeps each socket open as long as a door may have it, so what waits in its queue
outlives the door: the next one answers it. The first was bound as if it were the only one, so that
a port which is taken is refused; here it is opened to the others. New connections are steered to
sockets that somebody serves; where the kernel can't do that, they wait for the door that will.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import struct
from collections.abc import Collection, Sequence
from typing import Final

from omni_proxy.dataplane.accept.listener import BACKLOG, Listener
from omni_proxy.dataplane.loop.event_loop import EventLoop

_log = logging.getLogger(__name__)

# Linux: not in the socket module.
SO_ATTACH_REUSEPORT_CBPF: Final = 51
SO_DETACH_REUSEPORT_BPF: Final = 68
_HASH: Final = (0x20, 0, 0, (-0x1000 + 32) & 0xFFFFFFFF)  # A = hash of the addresses
_MOD, _IF_EQUAL, _RETURN = 0x94, 0x15, 0x06


class ReuseportGroup:
    """`seats` are numbered from 0; on a Unix socket all of them are the same one."""

    def __init__(self, loop: EventLoop, listener: Listener) -> None:
        """`listener` is that of control's own door. Raises OSError, changing nothing."""
        self.listener = listener
        self._loop = loop
        first = listener.shared()
        self.shared = first.family == socket.AF_UNIX
        self._seats: dict[int, socket.socket] = {0: first}
        self._group: list[int] = []  # those that listen, as the kernel numbers them
        self._vacant: set[int] = set()  # open, and nobody's
        self._steered: tuple[int, ...] = ()
        self._steers = True  # the kernel lets us
        self.rests = False
        if not self.shared:
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    def rest(self) -> None:
        """Control's own door accepts nobody; the socket stays open."""
        if not self.rests and self.listener.listens:
            self.rests = True
            self.listener.rest()
            self._loop.flush()

    def work(self) -> None:
        """It accepts again."""
        if self.rests:
            self.rests = False
            self.listener.work()

    def listen(self, seat: int) -> socket.socket:
        """The seat's socket, listening; the first one where it can't have its own."""
        self._vacant.discard(seat)
        if 0 not in self._group and _listens(self._seats[0]):
            self._group.insert(0, 0)
        try:
            sock = self._socket(seat)
        except OSError as error:
            _log.error("door %d shares a socket with the first: %s", seat + 1, error)
            return self._seats[0]
        if not self.shared and seat not in self._group:
            self._group.append(seat)
        return sock

    def steer(self, seats: Collection[int]) -> None:
        """New connections to these only, as far as they listen; to all where none does."""
        places = tuple(self._group.index(seat) for seat in sorted(seats) if seat in self._group)
        if len(places) == len(self._group):
            places = ()
        if self.shared or not self._group or places == self._steered:
            return
        try:
            _attach(self._seats[self._group[0]], places)
            self._steered = places
        except OSError as error:
            self._steers = False
            _log.warning("connections can't be steered between processes: %s", error)

    def close(self, seat: int) -> None:
        """Nobody serves it any more, and `steer` has led away from it. In the middle it stays open
        till those behind it close: the kernel would number them anew while connections come."""
        if seat == 0 or seat not in self._seats:
            return  # the first is the address itself
        self._vacant.add(seat)
        if seat not in self._group or not self._steers:
            self._drop(seat)
        while self._group[-1:] and self._group[-1] in self._vacant:
            self._drop(self._group[-1])

    def _drop(self, seat: int) -> None:
        self._vacant.discard(seat)
        self._seats.pop(seat).close()
        if seat in self._group:
            self._group.remove(seat)

    def end(self) -> None:
        for sock in self._seats.values():
            sock.close()
        self._seats.clear()
        self._group.clear()
        self._vacant.clear()

    def _socket(self, seat: int) -> socket.socket:
        if self.shared:
            return self._seats[0]
        sock = self._seats.get(seat)
        if sock is None:
            sock = self._seats[seat] = self._bound()
        if not _listens(sock):
            sock.listen(BACKLOG)
        return sock

    def _bound(self) -> socket.socket:
        first = self._seats[0]
        sock = socket.socket(first.family, first.type, first.proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if first.family == socket.AF_INET6:
                only = first.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
            sock.bind(first.getsockname())
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
        return sock


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _attach(sock: socket.socket, places: Sequence[int]) -> None:
    """A classic BPF program for the whole group: the hash's share of `places`, for none all."""
    if not places:
        sock.setsockopt(socket.SOL_SOCKET, SO_DETACH_REUSEPORT_BPF, 0)
        return
    program = [_HASH, (_MOD, 0, 0, len(places))]
    for share, place in enumerate(places):
        program += [(_IF_EQUAL, 0, 1, share), (_RETURN, 0, 0, place)]
    program.append((_RETURN, 0, 0, places[0]))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    filter_ = struct.pack("@HP", len(program), ctypes.addressof(code))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, filter_)

"""The listening sockets of the public address, one for each data-plane process (SO_REUSEPORT).

Invariant: the main process keeps each socket open as long as a process may use it, so connections
in its backlog outlive a process and are accepted by the next one. The first socket is bound without
SO_REUSEPORT, so that a port in use is refused; it gets the option here. A BPF program steers new
connections to sockets that a process serves (socket(7), SO_ATTACH_REUSEPORT_CBPF). If the kernel
refuses the program, connections wait in the backlog for their process.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from omni_proxy.dataplane.accept.listener import BACKLOG, Listener
from omni_proxy.dataplane.loop.event_loop import EventLoop

_log = logging.getLogger(__name__)

# Linux: not in the socket module.
SO_ATTACH_REUSEPORT_CBPF: Final = 51
SO_DETACH_REUSEPORT_BPF: Final = 68
_HASH: Final = (0x20, 0, 0, (-0x1000 + 32) & 0xFFFFFFFF)  # A = hash of the addresses
_MOD, _IF_EQUAL, _RETURN = 0x94, 0x15, 0x06


@dataclass(frozen=True, slots=True)
class GroupSockets:
    """The part of a group that another program takes over: its sockets by slot except the first,
    the slots that listen in the kernel's order, and the indexes that get new connections."""

    sockets: dict[int, socket.socket] = field(default_factory=dict)
    group: tuple[int, ...] = ()
    steered: tuple[int, ...] = ()

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()
        self.sockets.clear()


class ReuseportGroup:
    """Sockets by slot, from 0 on; for a Unix socket all slots share one."""

    def __init__(
        self, loop: EventLoop, listener: Listener, inherited: GroupSockets | None = None
    ) -> None:
        """`listener`: the main process's own. `inherited`: sockets of another program, which the
        group takes out of it. Raises OSError, changing nothing."""
        self.listener = listener
        self._loop = loop
        first = listener.dup_socket()
        self.shared = first.family == socket.AF_UNIX
        self._sockets: dict[int, socket.socket] = {0: first}
        self._group: list[int] = []  # slots that listen, in the kernel's order
        self._vacant: set[int] = set()  # open, without a process
        self._steered: tuple[int, ...] = ()
        self._steers = True  # the kernel supports it
        self.paused = False
        if not self.shared:
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if inherited is not None and inherited.group:
            self._adopt(inherited)

    def dup_sockets(self) -> GroupSockets:
        """Duplicates for another program. Raises OSError."""
        later = {slot: sock for slot, sock in self._sockets.items() if slot}
        return GroupSockets(
            {slot: sock.dup() for slot, sock in later.items()}, tuple(self._group), self._steered
        )

    def _adopt(self, inherited: GroupSockets) -> None:
        """Take over the sockets of another program; the listener already has the first one. A later
        group of this program, on another address, gets none."""
        name = self._sockets[0].getsockname()
        moved = any(sock.getsockname() != name for sock in inherited.sockets.values())
        if moved or (not inherited.sockets and len(inherited.group) > 1):
            return
        self._sockets |= inherited.sockets
        self._group[:] = inherited.group
        self._vacant.update(inherited.sockets)
        self._steered = inherited.steered
        inherited.sockets.clear()

    def pause(self) -> None:
        """Stop accepting in the main process; the socket stays open."""
        if not self.paused and self.listener.is_listening:
            self.paused = True
            self.listener.pause()
            self._loop.flush()

    def resume(self) -> None:
        """Accept in the main process again."""
        if self.paused:
            self.paused = False
            self.listener.resume()

    def listen(self, slot: int) -> socket.socket:
        """The slot's listening socket; the first slot's if it can't have its own."""
        self._vacant.discard(slot)
        if 0 not in self._group and _is_listening(self._sockets[0]):
            self._group.insert(0, 0)
        try:
            sock = self._socket(slot)
        except OSError as error:
            _log.error("dataplane_process_shares_first_socket process=%d error=%s", slot + 1, error)
            return self._sockets[0]
        if not self.shared and slot not in self._group:
            self._group.append(slot)
        return sock

    def steer(self, slots: Collection[int]) -> None:
        """Steer new connections to those of these slots that listen; to all slots if none does."""
        indexes = tuple(self._group.index(slot) for slot in sorted(slots) if slot in self._group)
        if len(indexes) == len(self._group):
            indexes = ()
        if self.shared or not self._group or indexes == self._steered:
            return
        try:
            _attach_program(self._sockets[self._group[0]], indexes)
            self._steered = indexes
        except OSError as error:
            self._steers = False
            _log.warning("connection_steering_unavailable error=%s", error)

    def close(self, slot: int) -> None:
        """Close a socket that no process serves and that gets no new connections.

        It stays open as long as a later one in the kernel's order: closing it would renumber those.
        """
        if slot == 0 or slot not in self._sockets:
            return  # the first socket reserves the address
        self._vacant.add(slot)
        if slot not in self._group or not self._steers:
            self._close_socket(slot)
        while self._group[-1:] and self._group[-1] in self._vacant:
            self._close_socket(self._group[-1])

    def _close_socket(self, slot: int) -> None:
        self._vacant.discard(slot)
        self._sockets.pop(slot).close()
        if slot in self._group:
            self._group.remove(slot)

    def close_all(self) -> None:
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()
        self._group.clear()
        self._vacant.clear()

    def _socket(self, slot: int) -> socket.socket:
        if self.shared:
            return self._sockets[0]
        sock = self._sockets.get(slot)
        if sock is None:
            sock = self._sockets[slot] = self._bind_socket()
        if not _is_listening(sock):
            sock.listen(BACKLOG)
        return sock

    def _bind_socket(self) -> socket.socket:
        first = self._sockets[0]
        sock = socket.socket(first.family, first.type, first.proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if first.family == socket.AF_INET6:
                v6_only = first.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6_only)
            sock.bind(first.getsockname())
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
        return sock


def _is_listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _attach_program(sock: socket.socket, indexes: Sequence[int]) -> None:
    """Attach a classic BPF program to the group that selects `indexes` by hash; without indexes
    detach it."""
    if not indexes:
        sock.setsockopt(socket.SOL_SOCKET, SO_DETACH_REUSEPORT_BPF, 0)
        return
    program = [_HASH, (_MOD, 0, 0, len(indexes))]
    for share, index in enumerate(indexes):
        program += [(_IF_EQUAL, 0, 1, share), (_RETURN, 0, 0, index)]
    program.append((_RETURN, 0, 0, indexes[0]))
    code = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    )
    filter_ = struct.pack("@HP", len(program), ctypes.addressof(code))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, filter_)

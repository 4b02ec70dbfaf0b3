"""The socket between the running program and the new one, for messages and descriptors.

A frame is the message's length (four bytes), the number of descriptors (four bytes), and the
message; the descriptors follow in batches, each with one byte. All calls block, so the running
program calls them in threads. Invariant: a received descriptor is either returned or closed.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from omni_proxy.shared import fd_passing
from omni_proxy.upgrade.state import Message, decode, encode

HEAD_BYTES: Final = 8
PEER: Final = struct.Struct("3i")  # pid, user, group
MAX_BYTES: Final = 1 << 30
BATCH: Final = 200  # descriptors in one message: an older program receives no more


class ChannelClosed(Exception):
    """The other program has closed the socket, or it has ended."""


class PeerProcess:
    """The process at the other end, which created the socket pair, observed by a pidfd."""

    def __init__(self, sock: socket.socket) -> None:
        self._pidfd: int | None = None
        self._was_gone = False
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        pid, _, _ = PEER.unpack(peer)
        if pid:  # 0: it is in another pid namespace, so it can't be observed
            try:
                self._pidfd = os.pidfd_open(pid)
            except OSError as error:
                self._was_gone = isinstance(error, ProcessLookupError)

    def has_ended(self, secs: float) -> bool:
        """Whether the process ends within `secs`; False if it can't be observed. Blocks."""
        if self._pidfd is None:
            return self._was_gone
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        return bool(ended.poll(secs * 1000))

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class HandoverChannel:
    """One end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.set_inheritable(False)
        self._sock = sock

    def peer_process(self) -> PeerProcess:
        return PeerProcess(self._sock)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message with descriptors. Raises ChannelClosed."""
        body = encode(message)
        head = len(body).to_bytes(4, "big") + len(descriptors).to_bytes(4, "big")
        try:
            self._sock.sendall(head + body)
            for start in range(0, len(descriptors), BATCH):
                batch = descriptors[start : start + BATCH]
                self._sock.sendmsg([b"F"], fd_passing.ancillary_for(batch))
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self) -> tuple[Message, list[int]]:
        """The next message with its descriptors. Raises ChannelClosed, UnreadableMessage."""
        head = self._read(HEAD_BYTES)
        size, count = int.from_bytes(head[:4], "big"), int.from_bytes(head[4:], "big")
        if size > MAX_BYTES:
            raise ChannelClosed(f"a message of {size} bytes is too large")
        message = decode(self._read(size))
        return message, self._read_descriptors(count)

    def wake_receivers(self) -> None:
        """Threads that wait in `receive`, at both ends, get ChannelClosed."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece = self._sock.recv(min(size - len(data), 1 << 20))
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not piece:
                raise ChannelClosed("the other program has closed the connection")
            data += piece
        return bytes(data)

    def _read_descriptors(self, count: int) -> list[int]:
        descriptors: list[int] = []
        try:
            while len(descriptors) < count:
                data, batch, _ = fd_passing.receive(self._sock, 1)
                descriptors += batch
                if not data or not batch:
                    raise ChannelClosed("descriptors are missing: is the limit of open files low?")
        except (OSError, ChannelClosed) as error:
            fd_passing.close_all(descriptors)
            raise ChannelClosed(str(error)) from None
        return descriptors

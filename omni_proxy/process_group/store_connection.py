"""A plain connection to the trainer's store: is it there, does it speak, does it still live?

torch waits for ever on a port that accepts and says nothing, and notices a trainer that died while
bytes move only when the group times out. This connection tells the first within seconds and the
second at once. It asks one question (a ping) and then only listens; it never reads keys.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from omni_proxy.process_group.tensor_plan import GroupError

# What a torch store client says first: a greeting with a magic number, then a ping with a nonce
# that the store sends back (weight-sync.md 0.4, 4.2).
GREETING: Final = struct.pack("=BI", 0, 0x3C85F7CE)
PING: Final = 13
NONCE_BYTES: Final = 4

RETRY_SECS: Final = 0.1
CONNECT_SECS: Final = 10.0
# A dead host sends no end of stream: the kernel asks after 5 s of silence and gives up 6 s later.
KEEPALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


class StoreLink:
    """One open connection to a store that has answered; one thread at a time asks it things."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._ended = False

    def ended(self) -> bool:
        """Whether the trainer's side is known to have closed; returns at once."""
        # Who has it waits for an answer, and will see an end himself.
        if self._lock.acquire(blocking=False):
            try:
                self._ended = self._ended or _at_end(self._connection)
            finally:
                self._lock.release()
        return self._ended

    def answers(self, within_secs: float) -> bool:
        """Whether the store still answers a ping: a stopped process keeps its sockets open."""
        if self.ended():
            return False
        with self._lock:
            try:
                return _pong(self._connection, within_secs)
            except (OSError, GroupError):
                return False

    def close(self) -> None:
        with self._lock:
            self._ended = True
            self._connection.close()


def open_store_link(
    address: tuple[str, int], silent_secs: float, given_up: Callable[[], bool]
) -> StoreLink:
    """Waits until a store answers at `address`, however long: `given_up` is asked between tries.

    Raises GroupError when something accepts there that is no store, or no store's answer comes
    within `silent_secs` of the first connection.
    """
    pause = threading.Event()
    silent_after: float | None = None
    while not given_up():
        connection = _dial(address)
        if connection is None:
            pause.wait(RETRY_SECS)
            continue
        if silent_after is None:
            silent_after = time.monotonic() + silent_secs
        try:
            patience = max(silent_after - time.monotonic(), 0.05)
            if _pong(connection, patience, first=GREETING):
                return StoreLink(connection)
        except OSError:
            # It accepted and hung up: a port forwarder in front of a trainer that is not up yet.
            pass
        except GroupError:
            connection.close()
            raise
        connection.close()
        if time.monotonic() >= silent_after:
            raise GroupError(
                f"{_shown(address)} accepts connections but no torch store answered there within "
                f"{silent_secs:g} s: are master_address and master_port the trainer's?"
            )
        pause.wait(RETRY_SECS)
    raise GroupError(f"gave up waiting for the trainer's store at {_shown(address)}")


def _dial(address: tuple[str, int]) -> socket.socket | None:
    """A connection to the first of the host's addresses that takes one; None where none does."""
    host, port = address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if getattr(error, "errno", None) == socket.EAI_AGAIN:
            return None
        raise GroupError(f"master_address {host!r} does not resolve: {error}") from None
    for family, kind, protocol, _, place in found:
        connection = socket.socket(family, kind, protocol)
        try:
            _avoid_ourselves(connection, port)
            connection.settimeout(CONNECT_SECS)
            connection.connect(place)
        except OSError:
            connection.close()
            continue
        _keep_alive(connection)
        return connection
    return None


def _avoid_ourselves(connection: socket.socket, port: int) -> None:
    """Keeps the kernel from picking the very port we dial: then we would be talking to ourselves.

    It happens on loopback while nothing listens there yet, and holds the trainer's port as well.
    """
    connection.bind(("", 0))
    if connection.getsockname()[1] == port:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _pong(connection: socket.socket, within_secs: float, *, first: bytes = b"") -> bool:
    """Whether the ping came back; raises GroupError on other bytes, OSError on a closed one."""
    nonce = os.urandom(NONCE_BYTES)
    connection.sendall(first + bytes([PING]) + nonce)
    until = time.monotonic() + within_secs
    came = b""
    while len(came) < NONCE_BYTES:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        with suppress(TimeoutError):
            piece = connection.recv(NONCE_BYTES - len(came))
            if not piece:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            came += piece
        if time.monotonic() >= until and len(came) < NONCE_BYTES:
            return False
    if came != nonce:
        raise GroupError(
            f"{_shown(connection.getpeername())} speaks another protocol than a torch store: "
            "are master_address and master_port the trainer's?"
        )
    return True


def _at_end(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _shown(address: tuple[object, ...]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"

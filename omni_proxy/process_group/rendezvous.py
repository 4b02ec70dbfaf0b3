"""The rendezvous of a process group: its address and size, and a connection to the trainer's store.

Invariant: the numbers are validated, by pure functions, before anything is opened: backends do not
detect a wrong or duplicate rank, and the group then never forms, or forms and hangs
(note:weight-sync 0.7). `StoreConnection` detects whether the store exists, responds and is still
open: torch waits forever on a port that accepts but does not respond, and detects a trainer that
died during a transfer only when the group times out. It only sends pings and must never read keys.
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
from dataclasses import dataclass
from typing import Final

from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.shared.origins import MAX_PORT

GLOO: Final = "gloo"
NCCL: Final = "nccl"
MAX_TIMEOUT_SECS: Final = 1e9  # some clocks cannot represent more


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address of a trainer's group, and this process's rank in it (note:two-phase 1.2).

    Rank 0 is the trainer. `timeout_s` bounds only joining; `device` is the CUDA index of an NCCL
    group's GPU: no two ranks of a group may share one. `stateless`: the group is built as in vLLM:
    its keys in the store begin with its address, and `group_name` is only a local name.
    """

    master_address: str
    master_port: int | str
    rank: int
    world_size: int
    group_name: str
    backend: str = NCCL
    timeout_s: float = 300.0
    device: int = 0
    stateless: bool = False


@dataclass(frozen=True, slots=True)
class HostedRendezvous:
    """A group in which this process is rank 0 and has the store, on `host` only.

    Port 0 selects a free port. `timeout_s` bounds joining and, later, each send.
    """

    host: str
    world_size: int
    group_name: str
    backend: str = GLOO
    port: int = 0
    timeout_s: float = 300.0


def validated_address(rendezvous: Rendezvous) -> tuple[str, int]:
    """The master's host and port. Raises GroupError for values that would make the group hang."""
    name, backend = rendezvous.group_name, rendezvous.backend
    if not isinstance(name, str) or not name:
        raise GroupError(f"group_name must be a non-empty string, not {name!r}")
    if backend not in (GLOO, NCCL):
        raise GroupError(f"unknown backend {backend!r}: use gloo or nccl")
    rank, world = rendezvous.rank, rendezvous.world_size
    for key, number in (("rank", rank), ("world_size", world)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise GroupError(f"{key} must be an integer, not {number!r}")
    if world < 2:
        raise GroupError(f"world_size {world}: the trainer and one receiver make at least 2")
    if not 1 <= rank < world:
        raise GroupError(
            f"rank {rank} does not fit a group of {world}: rank 0 is the trainer, so it must be "
            f"1 to {world - 1} (rank = rank_offset + tensor-parallel rank)"
        )
    if not 0 < rendezvous.timeout_s <= MAX_TIMEOUT_SECS:
        raise GroupError(
            f"timeout {rendezvous.timeout_s!r}: it must be a positive number of seconds, at most "
            f"{MAX_TIMEOUT_SECS:g}"
        )
    return _host(rendezvous.master_address), _port(rendezvous.master_port)


def _host(address: object) -> str:
    if not isinstance(address, str) or not address.strip():
        raise GroupError(f"master_address must be the trainer's host, not {address!r}")
    host = address.strip()
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _port(port: object) -> int:
    if isinstance(port, str) and port.strip().isascii() and port.strip().isdigit():
        port = int(port)
    if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= MAX_PORT:
        raise GroupError(f"master_port must be a port from 1 to {MAX_PORT}, not {port!r}")
    return port


# A torch store client starts with a greeting (a magic number) and a ping with a nonce, which the
# store sends back (note:weight-sync 0.4, 4.2).
GREETING: Final = struct.pack("=BI", 0, 0x3C85F7CE)
PING: Final = 13
NONCE_BYTES: Final = 4

RETRY_SECS: Final = 0.1
CONNECT_SECS: Final = 10.0
# A dead host sends no FIN: the kernel probes after 5 s of silence and closes 6 s later.
KEEPALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


class StoreConnection:
    """An open connection to a store that has answered. One thread at a time sends pings."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._ended = False

    def has_ended(self) -> bool:
        """Whether the trainer has closed the connection, as far as detected. Doesn't block."""
        # A thread that has the lock waits for an answer, and detects the end itself.
        if self._lock.acquire(blocking=False):
            try:
                self._ended = self._ended or _is_closed_by_peer(self._connection)
            finally:
                self._lock.release()
        return self._ended

    def answers(self, timeout_secs: float) -> bool:
        """Whether the store still answers a ping: a stopped process keeps its sockets open."""
        if self.has_ended():
            return False
        with self._lock:
            try:
                return _ping(self._connection, timeout_secs)
            except (OSError, GroupError):
                return False

    def close(self) -> None:
        with self._lock:
            self._ended = True
            self._connection.close()


def connect_store(
    address: tuple[str, int], silent_secs: float, cancelled: Callable[[], bool]
) -> StoreConnection:
    """Waits until a store answers at `address`; `cancelled` is called between attempts.

    Raises GroupError if another protocol answers there, if there is no answer within `silent_secs`
    of the first connection, or once `cancelled` returns True.
    """
    pause = threading.Event()
    silent_after: float | None = None
    while not cancelled():
        connection = _dial(address)
        if connection is None:
            pause.wait(RETRY_SECS)
            continue
        if silent_after is None:
            silent_after = time.monotonic() + silent_secs
        try:
            timeout_secs = max(silent_after - time.monotonic(), 0.05)
            if _ping(connection, timeout_secs, greeting=GREETING):
                return StoreConnection(connection)
        except OSError:
            # Accepted, then closed: a port forwarder may be in front of a trainer that starts.
            pass
        except GroupError:
            connection.close()
            raise
        connection.close()
        if time.monotonic() >= silent_after:
            raise GroupError(
                f"{_format_address(address)} accepts connections "
                f"but no torch store answered there within "
                f"{silent_secs:g} s: are master_address and master_port the trainer's?"
            )
        pause.wait(RETRY_SECS)
    raise GroupError(f"gave up waiting for the trainer's store at {_format_address(address)}")


def _dial(address: tuple[str, int]) -> socket.socket | None:
    """Connects to the first of the host's addresses that accepts; None if none does."""
    host, port = address
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if getattr(error, "errno", None) == socket.EAI_AGAIN:
            return None
        raise GroupError(f"master_address {host!r} does not resolve: {error}") from None
    for family, kind, protocol, _, socket_address in addresses:
        connection = socket.socket(family, kind, protocol)
        try:
            _avoid_self_connect(connection, port)
            connection.settimeout(CONNECT_SECS)
            connection.connect(socket_address)
        except OSError:
            connection.close()
            continue
        _enable_keepalive(connection)
        return connection
    return None


def _avoid_self_connect(connection: socket.socket, port: int) -> None:
    """Prevents a TCP self-connect, with the destination port as source port.

    On loopback the kernel may choose it while nothing listens yet, which would also occupy the
    trainer's port.
    """
    connection.bind(("", 0))
    if connection.getsockname()[1] == port:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _enable_keepalive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _ping(connection: socket.socket, timeout_secs: float, *, greeting: bytes = b"") -> bool:
    """Whether the store sent the nonce back in time.

    Raises GroupError on other bytes, OSError on a closed connection.
    """
    nonce = os.urandom(NONCE_BYTES)
    connection.sendall(greeting + bytes([PING]) + nonce)
    deadline = time.monotonic() + timeout_secs
    received = b""
    while len(received) < NONCE_BYTES:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        with suppress(TimeoutError):
            chunk = connection.recv(NONCE_BYTES - len(received))
            if not chunk:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            received += chunk
        if time.monotonic() >= deadline and len(received) < NONCE_BYTES:
            return False
    if received != nonce:
        raise GroupError(
            f"{_format_address(connection.getpeername())} speaks another "
            f"protocol than a torch store: "
            "are master_address and master_port the trainer's?"
        )
    return True


def _is_closed_by_peer(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _format_address(address: tuple[object, ...]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"

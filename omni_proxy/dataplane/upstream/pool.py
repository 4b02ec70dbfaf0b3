"""Connections to one worker: its idle ones, and the lines of a head that are always the same for
it.

Invariant: an idle connection stays in the epoll set; any event but "writable" means it is dead, and
it is dropped, so taking one needs no probe. One that broke, was cut, or holds unread bytes never
comes back.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from typing import Final
from urllib.parse import urlsplit

from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.stream import Stream, connect
from omni_proxy.dataplane.loop.task import ConnectionTask, EventHandler
from omni_proxy.dataplane.loop.tls_stream import TlsHandshake, TlsStream
from omni_proxy.fleet.worker import Worker
from omni_proxy.system.tls_contexts import client_context, tls_error_text
from omni_proxy.wire.head_caching.response_heads import NOT_CACHED
from omni_proxy.wire.request import set_bearer

IDLE_SECS: Final = 30.0  # shorter than any server's keep-alive that we know, the front's included
PIECE_BYTES: Final = 16384


class UpstreamPool:
    """The way to one upstream: a worker, or the front on its Unix socket."""

    __slots__ = ("_address", "closed", "hop_line", "host_line", "idle", "loop", "usual", "worker")

    to_front = False

    def __init__(self, loop: EventLoop, address: tuple[str, int] | str, host: str) -> None:
        self.loop = loop
        self._address = address
        self.worker: Worker | None = None
        self.host_line = f"host: {host}\r\n".encode("latin-1")
        self.hop_line = b""  # the part of it that says that we were here, see `wire.proxy_headers`
        self.idle: list[Stream] = []  # last in, first out: the rest may grow old and go
        self.closed = False
        self.usual = NOT_CACHED  # how the worker writes its answers

    def take(self, task: EventHandler) -> Stream | None:
        """An idle connection, now owned by `task`."""
        if not self.idle:
            return None
        conn = self.idle.pop()
        conn.task = task
        return conn

    @property
    def address(self) -> tuple[str, int] | str:
        """Asked for at each dial: a worker's name may resolve anew."""
        return self._address if self.worker is None else self.worker.address

    async def dial(self, task: ConnectionTask) -> Stream:
        """A new connection. Raises OSError."""
        return await connect(task, self.address)

    def suits(self, worker: Worker) -> bool:
        """Whether it is still the way, as the worker is configured now."""
        return self.hop_line == worker.hop_line

    def give_back(self, conn: Stream) -> None:
        """Keep a connection whose last answer has ended cleanly."""
        if self.closed or conn.peer_closed or (conn.readable and not _drained(conn)):
            conn.close()
            return
        conn.task = None
        if conn.on_idle_event is None:  # it is of this lane for good
            conn.on_idle_event = self._drop
        conn.idle_since = self.loop.now
        self.idle.append(conn)

    def _drop(self, conn: Stream) -> None:
        self.idle.remove(conn)
        conn.close()

    def sweep(self) -> None:
        """Close what has been idle for too long; the oldest stand first."""
        limit = self.loop.now - IDLE_SECS
        old = 0
        while old < len(self.idle) and self.idle[old].idle_since < limit:
            self.idle[old].close()
            old += 1
        del self.idle[:old]

    def close(self) -> None:
        """No idle connection stays; those in use are closed by their exchanges at their end."""
        self.closed = True
        for conn in self.idle:
            conn.close()
        self.idle.clear()


def _drained(conn: Stream) -> bool:
    """Whether nothing is left to read after an answer that filled the last read to the brim."""
    try:
        return conn.read(1) is None
    except OSError:
        return False


class AdminApiPool(UpstreamPool):
    """The way to the front, whose answers may take any time."""

    __slots__ = ()

    to_front = True


class TlsUpstreamPool(UpstreamPool):
    """The way to an https worker. `ca` and `verify` are the worker's `tls_ca` and `tls_verify`."""

    __slots__ = ("_context", "_name", "_session", "ca", "verify")

    def __init__(
        self, loop: EventLoop, address: tuple[str, int] | str, host: str, *, ca: str, verify: bool
    ) -> None:
        super().__init__(loop, address, host)
        self.ca = ca
        self.verify = verify
        # As its URL has it, without the port: an address may have been resolved from it.
        self._name = urlsplit(f"//{host}").hostname or host
        self._context: ssl.SSLContext | None = None
        self._session: ssl.SSLSession | None = None  # of `_context`

    def suits(self, worker: Worker) -> bool:
        same = (self.ca, self.verify) == (worker.tls_ca, worker.tls_verify)
        return same and super().suits(worker)

    async def dial(self, task: ConnectionTask) -> Stream:
        """With its handshake; the task's clock bounds both. Raises OSError."""
        context = client_context(self.ca, verify=self.verify)
        if context is not self._context:
            self._context, self._session = context, None
        plain = await connect(task, self.address)
        shake = TlsHandshake(context, server_name=self._name, session=self._session)
        try:
            return await shake.run(task, plain)
        except OSError as error:
            plain.close()
            raise ConnectionError(f"TLS with {self._name}: {tls_error_text(error)}") from None
        except BaseException:
            plain.close()
            raise

    def give_back(self, conn: Stream) -> None:
        if isinstance(conn, TlsStream) and conn.on_idle_event is None:  # its first answer
            session = conn.session
            if session is not None and conn.context is self._context:
                self._session = session
        super().give_back(conn)

    def _drop(self, conn: Stream) -> None:
        """Unless it was TLS that spoke: servers send tickets for later whenever they like."""
        with contextlib.suppress(OSError):
            if not conn.peer_closed and conn.read(1) is None:
                return
        super()._drop(conn)


def lane_to(loop: EventLoop, worker: Worker) -> UpstreamPool:
    """A new one, for what its URL says."""
    lane = _lane_to(loop, worker)
    lane.worker = worker
    lane.hop_line = worker.hop_line
    lane.host_line += worker.hop_line
    return lane


def _lane_to(loop: EventLoop, worker: Worker) -> UpstreamPool:
    if worker.url.startswith("https://"):
        return TlsUpstreamPool(
            loop, worker.address, worker.display_id, ca=worker.tls_ca, verify=worker.tls_verify
        )
    host = "localhost" if isinstance(worker.address, str) else worker.display_id
    return UpstreamPool(loop, worker.address, host)


def with_key(worker: Worker, lines: bytes) -> bytes:
    """Field lines of a head with the worker's own key, where it has one that is set."""
    key = os.environ.get(worker.api_key_env, "") if worker.api_key_env else ""
    return set_bearer(lines, key.encode("latin-1", "replace")) if key else lines

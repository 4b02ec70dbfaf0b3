"""Upstream pools: connections to each worker and to the admin API, idle ones reused.

Invariant: an idle connection stays in the epoll set and is dropped when bytes arrive or its peer
closes, so reusing one needs no probe. A connection that broke, was aborted, or has unread bytes
never returns to its pool.
"""

from __future__ import annotations

import ssl
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

import msgspec

from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.stream import Stream, connect
from omni_proxy.dataplane.loop.task import ConnectionTask, EventHandler
from omni_proxy.dataplane.loop.tls_stream import TlsHandshake, TlsStream
from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.worker import Worker
from omni_proxy.system.tls_contexts import client_context, tls_error_text
from omni_proxy.wire.head_caching.response_heads import NOT_CACHED
from omni_proxy.wire.load_report import LOAD_FORMAT_LINE
from omni_proxy.wire.response import UpstreamResponse

IDLE_SECS: Final = 30.0  # shorter than the keep-alive of any known server, the admin API's included
# Host fields of requests to the admin API: by these it identifies the listener, see
# admin_api.access.key_check. No client can send them.
CLIENT_HOST: Final = "front"
ADMIN_HOST: Final = "admin"
METRICS_HOST: Final = "metrics"


class UpstreamPool:
    """Connections to one upstream: a worker, or the admin API on its Unix socket."""

    __slots__ = (
        "_address",
        "asks_for_load",
        "closed",
        "hop_line",
        "idle",
        "loop",
        "own_lines",
        "response_template",
        "worker",
    )

    is_admin = False

    def __init__(self, loop: EventLoop, address: tuple[str, int] | str, host: str) -> None:
        self.loop = loop
        self._address = address
        self.worker: Worker | None = None
        self.own_lines = f"host: {host}\r\n".encode("latin-1")
        self.asks_for_load = False  # `own_lines` has the field that requests the engine's load
        self.hop_line = b""  # the hop field in `own_lines`, see `wire.forwarded`
        self.idle: list[Stream] = []  # last in, first out, so that surplus connections expire
        self.closed = False
        self.response_template = NOT_CACHED  # of the worker's last response head

    def reuse(self, task: EventHandler) -> Stream | None:
        """An idle connection, now owned by `task`."""
        if not self.idle:
            return None
        stream = self.idle.pop()
        stream.task = task
        return stream

    @property
    def address(self) -> tuple[str, int] | str:
        """The current address: a worker's name may be resolved again at any time."""
        return self._address if self.worker is None else self.worker.address

    async def dial(self, task: ConnectionTask) -> Stream:
        """A new connection. Raises OSError."""
        return await connect(task, self.address)

    def suits(self, worker: Worker) -> bool:
        """Whether it matches the worker's current configuration."""
        return self.hop_line == worker.hop_line

    def release(self, stream: Stream) -> None:
        """Keep a connection whose last response has ended cleanly."""
        if self.closed or stream.peer_closed or (stream.readable and not _is_empty(stream)):
            stream.close()
            return
        stream.task = None
        if stream.on_idle_event is None:  # it stays in this pool
            stream.on_idle_event = self._drop
        stream.idle_since = self.loop.now
        self.idle.append(stream)

    def _drop(self, stream: Stream) -> None:
        """Drop an idle connection, unless there is nothing to read: the event may be from before
        its release, or only TLS messages arrived, as servers send session tickets at any time."""
        if not stream.peer_closed and _is_empty(stream):
            return
        self.idle.remove(stream)
        stream.close()

    def sweep(self) -> None:
        """Close connections that have been idle for too long; the oldest are first."""
        limit = self.loop.now - IDLE_SECS
        old = 0
        while old < len(self.idle) and self.idle[old].idle_since < limit:
            self.idle[old].close()
            old += 1
        del self.idle[:old]

    def close(self) -> None:
        """Close the idle connections; those in use are closed at the end of their exchanges."""
        self.closed = True
        for stream in self.idle:
            stream.close()
        self.idle.clear()


def _is_empty(stream: Stream) -> bool:
    """Whether nothing is left to read: the last read may have been filled exactly."""
    try:
        return stream.read(1) is None
    except OSError:
        return False


class AdminApiPool(UpstreamPool):
    """Connections to the admin API, whose responses may take any time."""

    __slots__ = ()

    is_admin = True


class TlsUpstreamPool(UpstreamPool):
    """Connections to an https worker. `ca` and `verify`: its `tls_ca` and `tls_verify`."""

    __slots__ = ("_context", "_name", "_session", "ca", "verify")

    def __init__(
        self, loop: EventLoop, address: tuple[str, int] | str, host: str, *, ca: str, verify: bool
    ) -> None:
        super().__init__(loop, address, host)
        self.ca = ca
        self.verify = verify
        # The host name in its URL, without the port; `address` may be resolved from it.
        self._name = urlsplit(f"//{host}").hostname or host
        self._context: ssl.SSLContext | None = None
        self._session: ssl.SSLSession | None = None  # of `_context`

    def suits(self, worker: Worker) -> bool:
        same = (self.ca, self.verify) == (worker.tls_ca, worker.tls_verify)
        return same and super().suits(worker)

    async def dial(self, task: ConnectionTask) -> Stream:
        """Connect and do the handshake, within the task's phase deadline. Raises OSError."""
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

    def release(self, stream: Stream) -> None:
        if isinstance(stream, TlsStream) and stream.on_idle_event is None:  # its first response
            session = stream.session
            if session is not None and stream.context is self._context:
                self._session = session
        UpstreamPool.release(self, stream)  # compiled methods have no `super()`


class RankPool(UpstreamPool):
    """The connections of a rank's worker, for requests that name the rank. All ranks share
    them."""

    __slots__ = ("_of_worker",)

    def __init__(self, rank: DpRank, of_worker: UpstreamPool) -> None:
        super().__init__(of_worker.loop, rank.worker.address, "")
        self._of_worker = of_worker
        self.worker = rank.worker
        self.own_lines = of_worker.own_lines.replace(LOAD_FORMAT_LINE, b"") + rank.header_line
        self.idle = of_worker.idle  # the same list

    async def dial(self, task: ConnectionTask) -> Stream:
        return await self._of_worker.dial(task)

    def release(self, stream: Stream) -> None:
        self._of_worker.release(stream)

    def sweep(self) -> None:
        """Does nothing: the worker's pool sweeps the connections."""

    def close(self) -> None:
        """Does nothing: the worker's pool closes the connections."""


class UpstreamPools:
    """All pools. Those of workers follow the fleet: a removed worker's idle connections are closed
    immediately, those in use at the end of their exchange."""

    def __init__(self, loop: EventLoop, admin_socket: str) -> None:
        self._loop = loop
        self._asks_for_load = False
        self.known: dict[Worker, UpstreamPool] = {}  # by worker or rank; read by `of`
        self._members: Collection[Worker] | None = None  # None: no change of the fleet yet
        # The admin API identifies the listener by the Host, which only the proxy can set.
        self.admin_api = AdminApiPool(loop, admin_socket, CLIENT_HOST)
        self.admin_listener = AdminApiPool(loop, admin_socket, ADMIN_HOST)
        self.metrics_listener = AdminApiPool(loop, admin_socket, METRICS_HOST)

    def of(self, worker: Worker) -> UpstreamPool:
        """The pool of a worker or rank, created if it does not exist."""
        pool = self.known.get(worker)
        if pool is None:
            if isinstance(worker, DpRank):
                pool = RankPool(worker, self.of(worker.worker))
            else:
                pool = pool_for(self._loop, worker)
                if self._asks_for_load:
                    pool.asks_for_load = True
                    pool.own_lines += LOAD_FORMAT_LINE
            if self._members is None or worker.worker in self._members:
                self.known[worker] = pool
            else:  # the worker was removed during a request: its connection is not kept
                pool.closed = True
        return pool

    def ask_for_load(self, asks: bool) -> None:
        """Set whether requests ask for the load of the engine, see `response_reports`."""
        if asks != self._asks_for_load:
            self._asks_for_load = asks
            for pool in self.known.values():
                pool.close()
            self.known.clear()

    def on_fleet_change(self, workers: Collection[Worker]) -> None:
        self._members = workers
        for worker in list(self.known):
            if worker not in workers:  # also pools of ranks, which are created again on demand
                self.known.pop(worker).close()
            else:
                self.on_worker_change(worker)

    def on_worker_change(self, worker: Worker) -> None:
        pool = self.known.get(worker)
        if pool is not None and not pool.suits(worker):
            pool.close()
            del self.known[worker]
            for rank in worker.dp_ranks:
                self.known.pop(rank, None)

    def sweep(self) -> None:
        for pool in self._all():
            pool.sweep()

    def close(self) -> None:
        for pool in self._all():
            pool.close()

    def keep_no_admin_connections(self) -> None:
        """Close the idle admin connections, because another server may listen on the path now."""
        for pool in (self.admin_api, self.admin_listener, self.metrics_listener):
            pool.close()

    def _all(self) -> list[UpstreamPool]:
        return [self.admin_api, self.admin_listener, self.metrics_listener, *self.known.values()]


def pool_for(loop: EventLoop, worker: Worker) -> UpstreamPool:
    """A new pool for the worker's URL."""
    pool = _new_pool(loop, worker)
    pool.worker = worker
    pool.hop_line = worker.hop_line
    pool.own_lines += worker.hop_line
    return pool


def _new_pool(loop: EventLoop, worker: Worker) -> UpstreamPool:
    if worker.url.startswith("https://"):
        return TlsUpstreamPool(
            loop, worker.address, worker.display_id, ca=worker.tls_ca, verify=worker.tls_verify
        )
    host = "localhost" if isinstance(worker.address, str) else worker.display_id
    return UpstreamPool(loop, worker.address, host)


class ResponseStart(msgspec.Struct, gc=False):
    """The head of a response, and the body bytes that arrived with it, already parsed."""

    pool: UpstreamPool
    stream: Stream
    response: UpstreamResponse
    chunk: bytes
    bodiless: bool  # it ended with its head
    all_sent: bool = True  # the whole request was sent

    def close(self) -> None:
        """Close the connection, and drop the rest of the response."""
        self.stream.close()

    def release(self) -> None:
        """Keep the connection if its response has ended cleanly, else close it."""
        response = self.response
        reusable = response.is_complete and response.keep_alive and not response.excess
        if reusable and self.all_sent:
            self.pool.release(self.stream)
        else:
            self.stream.close()

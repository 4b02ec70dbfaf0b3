"""One client connection: reads a request, runs its exchange, finalizes it, and reads the next.

Contract: this file owns the client's socket. Only this file decides whether the connection is kept,
and every HttpError raised in an exchange becomes a local reply here. The steps of an exchange are
in `drivers.exchange_steps`; while the coroutine waits for a head, `drivers.fast_path` may run
whole exchanges instead. Must not depend on workers.

A PROXY protocol header (HAProxy's proxy-protocol.txt) comes before TLS. Only the header is read
from the socket; afterwards `peer` is the client's address. An invalid header, a timeout and a close
end the connection without a response: the sender is not a configured load balancer.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Coroutine
from math import inf
from typing import Any

from omni_proxy.dataplane.downstream.tls_termination import accept_tls
from omni_proxy.dataplane.drivers.exchange_steps import respond
from omni_proxy.dataplane.drivers.fast_path import FastPath
from omni_proxy.dataplane.drivers.fast_path_pair import fast_path_for
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange_io import PUBLIC, ExchangeIO, ListenerRole
from omni_proxy.dataplane.finalize import finalize
from omni_proxy.dataplane.loop.stream import READ_BYTES
from omni_proxy.dataplane.loop.task import ClientDisconnected, PhaseTimeout, pause
from omni_proxy.dataplane.relay.local_reply import reply_with_error
from omni_proxy.dataplane.services import ExchangeServices
from omni_proxy.system.tls_contexts import tls_error_text
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.proxy_protocol import (
    MAX_BYTES,
    ProxyHeader,
    ProxyHeaderError,
    parse_proxy_header,
)
from omni_proxy.wire.request import RequestHead, find_head_end, skip_empty_lines

_log = logging.getLogger(__name__)


class Connection(ExchangeIO):
    """The coroutine of one client connection."""

    __slots__ = ("fast_path", "reads_proxy_header", "request_started_at", "tls_context")

    def __init__(
        self,
        services: ExchangeServices,
        sock: socket.socket,
        peer: str,
        role: ListenerRole = PUBLIC,
        tls_context: ssl.SSLContext | None = None,
    ) -> None:
        """`tls_context`: of the listener when it accepted the connection, None without TLS."""
        super().__init__(services, sock, peer, role)
        self.tls_context = tls_context
        self.fast_path: FastPath | None = None  # set by the first request that may take it
        self.request_started_at = self.loop.now  # when the current request's first byte arrived
        uses_proxy_header = self.settings.config.server.proxy_protocol
        self.reads_proxy_header = uses_proxy_header and not role.admin_only

    async def serve(self) -> None:
        """Run one exchange after another. Deliberately in one frame: every event resumes each
        frame."""
        try:
            keep = await self._handshake()
            while keep:
                self.deadline = inf
                try:
                    raw = await self._read_head()
                except (HttpError, PhaseTimeout) as error:
                    await self.reply_to_bad_head(error)
                    return
                if self.exchange is None:
                    if not raw:
                        return
                    self.exchange = Exchange(self.request_started_at, self.peer)
                try:
                    # Drop `raw` before the response, which may last long.
                    response, raw = self._respond(self.exchange, raw), b""
                    keep = await response
                except (HttpError, PhaseTimeout) as error:
                    keep = await reply_with_error(self, self.exchange, error)
                self.end_exchange()
        except ClientDisconnected:
            exchange = self.exchange
            if exchange is not None:
                exchange.end_by_client()
        except OSError:
            pass  # the client has disconnected
        finally:
            self._close()

    async def _handshake(self) -> bool:
        """Read the PROXY header and do the TLS handshake, if the listener uses them. False if no
        request follows."""
        if self.tls_context is None:
            if self.reads_proxy_header:
                await read_proxy_header(self)
            return True
        try:
            if self.reads_proxy_header:
                await read_proxy_header(self)
            self.client = await accept_tls(self, self.tls_context)
        except HttpError as error:
            self.phase = "head"
            await self.reply_to_bad_head(error)
            return False
        except (ClientDisconnected, PhaseTimeout, OSError) as error:
            self.services.totals.failed_handshakes += 1
            timeout = f"timeout in phase {error}" if isinstance(error, PhaseTimeout) else ""
            cause = timeout or tls_error_text(error)
            _log.debug("tls_handshake_failed peer=%s error=%s", self.peer, cause)
            return False
        return True

    def _close(self) -> None:
        self.end_exchange()
        self.close_upstream()
        self.client.close()

    def _respond(self, exchange: Exchange, raw: bytes) -> Coroutine[Any, Any, bool]:
        """The coroutine of `exchange`, for the head `raw`; if `raw` is empty, the continuation of
        the fast path. Raises HttpError."""
        if not raw:
            assert self.fast_path is not None
            return self.fast_path.continuation(exchange)
        return respond(self, exchange, self._parse(raw))

    def end_exchange(self) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            finalize(self.services, exchange, self.phase)

    async def reply_to_bad_head(self, error: HttpError | PhaseTimeout) -> None:
        """Reply to a head that can't be parsed, and log it as an exchange. Does nothing if the idle
        timeout has passed without a head."""
        if isinstance(error, HttpError) or self.phase != "idle":
            self.exchange = Exchange(self.request_started_at, self.peer)
            await reply_with_error(self, self.exchange, error)

    def _parse(self, raw: bytes) -> RequestHead:
        """Parse a head, and set the fast path for requests with the same template. Raises
        HttpError."""
        self.head_bytes = len(raw)
        settings = self.settings
        head = settings.request_heads[self.client.is_tls].parse(raw)
        cached_heads = self.role.relays and not self.role.admin_only
        cache = settings.fast_path_cache if cached_heads else None
        cached = cache.find(head) if cache is not None else None
        if cached is not None and (self.fast_path is None or self.fast_path.cached is not cached):
            self.fast_path = fast_path_for(self, cached)
        return head

    async def _read_head(self) -> bytes:
        """The next complete head. b"" if the client has closed, or the fast path has begun an
        exchange that the coroutine must continue.

        Raises HttpError, PhaseTimeout.
        """
        client = self.client
        self.await_next_request()
        buffer, self.unread = skip_empty_lines(self.unread), b""
        self.request_started_at = self.loop.now
        searched = 0
        while buffer or client.pending or not self.services.inflight.closes_idle:
            if buffer and buffer != b"\r":  # CR may be the first half of an empty line
                end = find_head_end(buffer, searched)
                if end:
                    self.unread = buffer[end:]
                    return buffer[:end]
                if not searched:
                    self.set_timeout("head", self.settings.timeouts.client_head)
                searched = len(buffer)
            if self.must_wait_for(client):
                await self._wait_for_client(buffer)
                if self.exchange is not None:
                    break
            chunk, self.unread = self.unread or client.read(READ_BYTES), b""
            if chunk is None:
                continue
            if not chunk:
                await self.flush(client)
                break
            if not buffer:
                self.request_started_at = self.loop.now
            buffer = skip_empty_lines(buffer + chunk if buffer else chunk)
        return b""

    async def _wait_for_client(self, buffer: bytes) -> None:
        """Wait until there are bytes to read, or the fast path has an exchange to continue."""
        fast_path = self.fast_path
        if fast_path is None or buffer or self.client.readable:
            await pause
            return
        fast_path.start()
        try:
            await pause
        except (PhaseTimeout, ClientDisconnected, HttpError) as error:
            if self.exchange is None or not fast_path.can_continue_after(error):
                raise
            fast_path.error = error
        finally:
            fast_path.stop()


async def read_proxy_header(io: ExchangeIO) -> None:
    """Read it within `client_head_secs`, and set `io.peer`. Raises ClientDisconnected,
    PhaseTimeout, OSError."""
    client = io.client
    io.set_timeout("head", io.settings.timeouts.client_head)
    header = None
    while header is None:
        if io.must_wait_for(client):
            await pause
        data = client.peek(MAX_BYTES)
        if data is not None:
            header = _parse(io, data)
            client.readable = False  # peeked bytes cause no new edge, later ones do
            if header is None and (client.peer_closed or len(data) == MAX_BYTES):
                raise ClientDisconnected
    client.recv(header.length)
    client.readable = True
    io.peer = header.peer or io.peer


def _parse(io: ExchangeIO, data: bytes) -> ProxyHeader | None:
    totals = io.services.totals
    try:
        return parse_proxy_header(data)
    except ProxyHeaderError as error:
        totals.failed_proxy_headers += 1
        level = logging.WARNING if totals.failed_proxy_headers == 1 else logging.DEBUG
        _log.log(level, "proxy_header_invalid peer=%s error=%s", io.peer, error)
        raise ClientDisconnected from None

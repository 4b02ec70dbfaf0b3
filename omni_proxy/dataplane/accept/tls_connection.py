"""A downstream connection over TLS: its handshake, then as any other connection.

Invariant: nothing is read as a request before the handshake is done, which `client_head_secs`
bounds. A client that speaks plain HTTP here gets a 400 in plain HTTP.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl

from omni_proxy.dataplane.accept.proxy_protocol import read_proxy_header
from omni_proxy.dataplane.downstream.connection import Connection
from omni_proxy.dataplane.loop.task import ClientDisconnected, PhaseTimeout, await_direct
from omni_proxy.dataplane.loop.tls_stream import (
    RECORD,
    TlsHandshake,
    TlsStream,
    read_handshake_bytes,
)
from omni_proxy.dataplane.services import ExchangeServices
from omni_proxy.system.tls_contexts import tls_error_text
from omni_proxy.wire.errors import HttpError

_log = logging.getLogger(__name__)


class TlsConnection(Connection):
    """`context`: the listeners' at the moment of accepting."""

    __slots__ = ("_context",)

    def __init__(
        self, services: ExchangeServices, sock: socket.socket, peer: str, context: ssl.SSLContext
    ) -> None:
        super().__init__(services, sock, peer)
        self._context = context

    async def serve(self) -> None:
        self.set_timeout("handshake", self.settings.limits.client_head)
        plain = self.client
        try:
            self.client = await self._handshake()
        except HttpError as error_reply:
            self.phase = "head"
            with contextlib.suppress(OSError):  # the client has closed
                await self.reply_to_bad_head(error_reply)
            return
        except (ClientDisconnected, PhaseTimeout, OSError) as error:
            self.services.totals.failed_handshakes += 1
            timeout = f"timeout in phase {error}" if isinstance(error, PhaseTimeout) else ""
            _log.debug(
                'tls_handshake_failed peer=%s error="%s"',
                self.peer,
                timeout or tls_error_text(error),
            )
            return
        finally:
            self.end_exchange()
            if self.client is plain:
                plain.close()
        await await_direct(super().serve())

    async def _handshake(self) -> TlsStream:
        if not self.proxy_header_read:
            await read_proxy_header(self)
            self.proxy_header_read = True
            self.set_timeout("handshake", self.settings.limits.client_head)
        first = await read_handshake_bytes(self, self.client)
        if first[:1] != RECORD and first[:1].isalpha():
            raise HttpError(
                400, "this listener requires TLS, and the request is plain HTTP: use https://",
                "plain_http_on_tls_port", close=True,
            )  # fmt: skip
        handshake = TlsHandshake(self._context)
        handshake.incoming.write(first)
        return await handshake.run(self, self.client)


class AdminConnection(Connection):
    """Of the [admin] listener: all requests go to the admin API."""

    __slots__ = ()

    admin_only = True


class TlsAdminConnection(TlsConnection):
    """As `AdminConnection`, over TLS."""

    __slots__ = ()

    admin_only = True


class MetricsConnection(AdminConnection):
    """Of the listener for metrics: the admin API answers nothing else there."""

    __slots__ = ()

    metrics_only = True


class TlsMetricsConnection(TlsAdminConnection):
    """As `MetricsConnection`, over TLS."""

    __slots__ = ()

    metrics_only = True

"""Reads the PROXY protocol header at the start of a connection, before TLS (HAProxy's
proxy-protocol.txt).

Invariant: only the header is read from the socket, whatever follows it; afterwards `peer` is the
client's address. An invalid header, a timeout (`client_head_secs`) and a close end the connection
without a response, because the sender is not a configured load balancer.
"""

from __future__ import annotations

import logging

from omni_proxy.dataplane.exchange_io import ExchangeIO
from omni_proxy.dataplane.loop.task import ClientDisconnected, pause
from omni_proxy.wire.proxy_protocol import (
    MAX_BYTES,
    ProxyHeader,
    ProxyHeaderError,
    parse_proxy_header,
)

_log = logging.getLogger(__name__)


async def read_proxy_header(io: ExchangeIO) -> None:
    """Raises ClientDisconnected, PhaseTimeout, OSError."""
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

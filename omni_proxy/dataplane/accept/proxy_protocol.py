"""The PROXY protocol header at the start of a connection, before TLS (HAProxy's proxy-protocol.txt).

Invariant: only the header is read from the socket, whatever follows it; from then on `peer` is the
client's address. Garbage, silence (`client_head_secs`) and an end close the connection without a
response: the sender is not one of our load balancers.
"""

from __future__ import annotations

import logging

from omni_proxy.dataplane.exchange.exchange_io import ExchangeIO
from omni_proxy.dataplane.loop.task import ClientDisconnected, pause
from omni_proxy.wire.proxy_protocol import (
    MAX_BYTES,
    ProxyHeader,
    ProxyHeaderError,
    parse_proxy_header,
)

_log = logging.getLogger(__name__)


async def read_proxy_header(conn: ExchangeIO) -> None:
    """Raises ClientDisconnected, PhaseTimeout, OSError."""
    client = conn.client
    conn.set_timeout("head", conn.settings.limits.client_head)
    header = None
    while header is None:
        if conn.must_wait_for(client):
            await pause
        data = client.peek(MAX_BYTES)
        if data is not None:
            header = _parse(conn, data)
            client.readable = False  # bytes that were peeked at give no new edge, later ones do
            if header is None and (client.peer_closed or len(data) == MAX_BYTES):
                raise ClientDisconnected
    client.recv(header.length)
    client.readable = True
    conn.peer = header.peer or conn.peer


def _parse(conn: ExchangeIO, data: bytes) -> ProxyHeader | None:
    totals = conn.services.totals
    try:
        return parse_proxy_header(data)
    except ProxyHeaderError as error:
        totals.failed_introductions += 1
        level = logging.WARNING if totals.failed_introductions == 1 else logging.DEBUG
        _log.log(level, 'proxy_header_invalid peer=%s error="%s"', conn.peer, error)
        raise ClientDisconnected from None

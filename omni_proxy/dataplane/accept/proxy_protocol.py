"""The PROXY protocol at the beginning of a connection, ahead of TLS where that is spoken.

Contract: only the introduction is taken out of the socket, whatever came behind it; `peer` is the
client's address from then on. Garbage, silence (`client_head_secs`) and an end close the connection
without a word: whoever sent that is no balancer of ours.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from omni_proxy.dataplane.loop.task import ClientDisconnected, pause
from omni_proxy.wire.proxy_protocol import (
    MAX_BYTES,
    ProxyHeader,
    ProxyHeaderError,
    parse_proxy_header,
)

if TYPE_CHECKING:
    from omni_proxy.dataplane.downstream.connection import Connection

_log = logging.getLogger(__name__)


async def read_proxy_header(conn: Connection) -> None:
    """Raises ClientDisconnected, Expired, OSError."""
    client = conn.client
    conn.clock("head", conn.door.limits.client_head)
    found = None
    while found is None:
        if conn.must_wait_for(client):
            await pause
        came = client.peek(MAX_BYTES)
        if came is not None:
            found = _read(conn, came)
            client.readable = False  # what was seen gives no new edge, what is still to come does
            if found is None and (client.peer_closed or len(came) == MAX_BYTES):
                raise ClientDisconnected
    client.recv(found.length)
    client.readable = True
    conn.proxy_header_read = True
    conn.peer = found.peer or conn.peer


def _read(conn: Connection, came: bytes) -> ProxyHeader | None:
    door = conn.door
    try:
        return parse_proxy_header(came)
    except ProxyHeaderError as error:
        door.failed_introductions += 1
        level = logging.WARNING if door.failed_introductions == 1 else logging.DEBUG
        _log.log(level, "%s does not speak the PROXY protocol: %s", conn.peer, error)
        raise ClientDisconnected from None

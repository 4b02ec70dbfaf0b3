"""TLS of a downstream connection: its handshake. What follows is as on any other connection.

Invariant: nothing is read as a request before the handshake is done, which `client_head_secs`
bounds. A client that speaks plain HTTP here gets a 400 in plain HTTP.
"""

from __future__ import annotations

import ssl

from omni_proxy.dataplane.accept.proxy_protocol import read_proxy_header
from omni_proxy.dataplane.exchange.exchange_io import ExchangeIO
from omni_proxy.dataplane.loop.tls_stream import (
    RECORD,
    TlsHandshake,
    TlsStream,
    read_handshake_bytes,
)
from omni_proxy.wire.errors import HttpError


async def accept_tls(
    io: ExchangeIO, context: ssl.SSLContext, *, reads_proxy_header: bool
) -> TlsStream:
    """The stream in the place of `io.client`; `reads_proxy_header`: the PROXY header comes first.

    Raises HttpError for plain HTTP, ClientDisconnected, PhaseTimeout, OSError for a handshake that
    failed.
    """
    if reads_proxy_header:
        await read_proxy_header(io)
    io.set_timeout("handshake", io.settings.limits.client_head)
    first = await read_handshake_bytes(io, io.client)
    if first[:1] != RECORD and first[:1].isalpha():
        raise HttpError(
            400, "this listener requires TLS, and the request is plain HTTP: use https://",
            "plain_http_on_tls_port", close=True,
        )  # fmt: skip
    handshake = TlsHandshake(context)
    handshake.incoming.write(first)
    return await handshake.run(io, io.client)

"""CORS preflights of model routes: a browser asks whether a page of another origin may send one.

Contract: answered by the proxy, without a worker, without a slot, whatever state the fleet is in.
"""

from __future__ import annotations

from collections.abc import Iterable

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange.exchange_io import ExchangeIO
from omni_proxy.dataplane.exchange.local_reply import send_reply
from omni_proxy.wire.cors import encode_fields
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.forwarded import field_value
from omni_proxy.wire.request import RequestHead


def is_preflight(head: RequestHead) -> bool:
    method = field_value(head.lines, b"access-control-request-method")
    return head.method == b"OPTIONS" and bool(head.origin and method)


async def reply_to_preflight(
    io: ExchangeIO, exchange: Exchange, head: RequestHead, methods: Iterable[str]
) -> bool:
    """`methods` are the route's. Raises HttpError 403 for an origin that is not allowed."""
    names = field_value(head.lines, b"access-control-request-headers").decode("latin-1")
    fields = io.settings.cors.preflight(head.origin.decode("latin-1"), methods, names)
    if not fields:
        raise _forbidden(head)
    keep = head.keep_alive and not head.http_1_0 and not head.length
    keep = keep and not io.close_after_response
    end = b"\r\n" if keep else b"connection: close\r\n\r\n"
    exchange.status = 200
    exchange.end("completed", "")
    reply = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n%b%b" % (encode_fields(fields), end)
    await send_reply(io, exchange, reply, keep=keep)
    return keep


def check_websocket_origin(io: ExchangeIO, head: RequestHead) -> None:
    """Raises HttpError 403 for a WebSocket of a page that may not call here: browsers send no
    preflight for those."""
    if not head.origin:
        return
    same = head.origin.partition(b"//")[2].lower() == head.host.lower()
    if not same and not io.settings.cors.allows(head.origin.decode("latin-1")):
        raise _forbidden(head)


def _forbidden(head: RequestHead) -> HttpError:
    detail = "this origin may not call here: see [server] cors_allow_origins"
    return HttpError(403, detail, "origin_not_allowed", close=bool(head.length), detail=detail)

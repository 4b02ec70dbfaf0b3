"""Preflights of model routes: a browser asks whether another origin's page may send a request.

Contract: answered here, without a worker, without a slot, and whatever state the fleet is in.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange.local_reply import linger
from omni_proxy.dataplane.loop.task import pause
from omni_proxy.wire.cors import encode_fields
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.forwarded import field_value
from omni_proxy.wire.request import RequestHead

if TYPE_CHECKING:
    from omni_proxy.dataplane.downstream.connection import Connection


def is_preflight(head: RequestHead) -> bool:
    wants = field_value(head.lines, b"access-control-request-method")
    return head.method == b"OPTIONS" and bool(head.origin and wants)


async def answer_preflight(
    conn: Connection, mine: Exchange, head: RequestHead, methods: Iterable[str]
) -> bool:
    """`methods` are the route's. Raises HttpError 403 for an origin that is not allowed."""
    asked = field_value(head.lines, b"access-control-request-headers").decode("latin-1")
    fields = conn.door.cors.preflight(head.origin.decode("latin-1"), methods, asked)
    if not fields:
        raise _refused(head)
    keep = head.keep_alive and not head.http_1_0 and not head.length and not conn.closing
    end = b"\r\n" if keep else b"connection: close\r\n\r\n"
    mine.status = 200
    mine.end("completed", "")
    conn.deadline = inf
    conn.clock("refuse", conn.door.limits.idle)
    reply = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n%b%b" % (encode_fields(fields), end)
    await conn.write(conn.client, reply)
    if not keep:
        await linger(conn)
    elif conn.count_read():
        await pause
    return keep


def refuse_foreign_socket(conn: Connection, head: RequestHead) -> None:
    """Raises HttpError 403 for a WebSocket of a page that may not call here: for those browsers ask
    nobody."""
    if not head.origin:
        return
    own = head.origin.partition(b"//")[2].lower() == head.host.lower()
    if not own and not conn.door.cors.allows(head.origin.decode("latin-1")):
        raise _refused(head)


def _refused(head: RequestHead) -> HttpError:
    told = "this origin may not call here: see [server] cors_allow_origins"
    return HttpError(403, told, "origin_not_allowed", close=bool(head.length), detail=told)

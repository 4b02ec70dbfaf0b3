"""Local replies: responses that the proxy itself sends, and the client's connection after them.

Contract: no local reply follows bytes of another response; in that case the connection is closed.
A client that is still sending is read for a moment, so that the reply reaches it. CORS preflights
of model routes are answered here, without a worker and a slot, whatever the state of the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Final

from omni_proxy.admin_ops.admin_route_table import TOPPED
from omni_proxy.dataplane.exchange.exchange import EndedBy, Exchange, Outcome
from omni_proxy.dataplane.exchange.request_id import new_request_id
from omni_proxy.dataplane.exchange_io import ExchangeIO
from omni_proxy.dataplane.loop.task import PhaseTimeout, pause
from omni_proxy.dataplane.relay.response_relay import diagnostic_fields, rate_lines
from omni_proxy.wire.cors import encode_fields
from omni_proxy.wire.errors import HttpError, encode_local_reply
from omni_proxy.wire.forwarded import field_value
from omni_proxy.wire.request import RequestHead

LINGER_READ_BYTES: Final = 262144
TIMEOUT: Final = "timeout"  # code of an error: the request as a whole took too long
LINGER_SECS: Final = 2.0
LINGER_BYTES: Final = 16 * 1024 * 1024


async def reply_with_error(
    io: ExchangeIO, exchange: Exchange, cause: HttpError | PhaseTimeout
) -> bool:
    """Send the reply for an error. Returns whether the connection continues, which requires that
    the request was read to its end."""
    error = cause if isinstance(cause, HttpError) else _timeout_error(str(cause))
    if exchange.route is None and exchange.target.partition("?")[0] in TOPPED:
        # Clients of the admin routes read these fields too (note:api-server 9.1).
        error.extra |= {"success": False, "message": error.message, "status": "error"}
    fields = b"".join(diagnostic_fields(exchange)) if exchange.attempts else rate_lines(exchange)
    fields += _id_line(io, exchange) + exchange.cors
    exchange.status = error.status
    outcome: Outcome = "upstream_error" if exchange.attempts and error.status >= 500 else "refused"
    keepalive, io.keepalive = io.keepalive, None
    if keepalive is not None and keepalive.begun:
        keepalive.reject(error)
        return False
    exchange.end(outcome, _ended_by(error, exchange), str(error.code), phase=io.phase)
    if exchange.relayed:
        return False
    if exchange.held_bytes:
        cause.__traceback__ = cause.__context__ = None  # their frames refer to the body
    io.services.inflight.release_body(exchange)
    unread = io.body_stream is not None and not io.body_stream.is_complete
    keep = not error.close and not unread and not io.close_after_response
    io.body_stream = None
    body = error.body()
    reply = encode_local_reply(
        error.status, body, error.headers, close=not keep, content_type=error.content_type
    )
    if fields:
        reply = reply.replace(b"\r\n\r\n", b"\r\n" + fields + b"\r\n", 1)
    if exchange.method == "HEAD":
        reply = reply[: len(reply) - len(body)]
    await send_reply(io, exchange, reply, body_bytes=len(body), keep=keep)
    return keep


async def send_reply(
    io: ExchangeIO, exchange: Exchange, reply: bytes, *, body_bytes: int = 0, keep: bool
) -> None:
    """Send a local reply. `keep`: the connection continues after it."""
    io.deadline = inf
    io.set_timeout("refuse", io.settings.timeouts.idle)
    await io.write(io.client, reply)
    exchange.bytes_out += body_bytes
    if not keep:
        await linger(io)
    elif io.count_read():  # pipelined requests with local replies must not starve others
        await pause


def _id_line(io: ExchangeIO, exchange: Exchange) -> bytes:
    """The request id line, if configured. A request that was rejected early gets its id here."""
    forwarded = io.settings.forwarded
    if forwarded is None or not forwarded.id_name:
        return b""
    exchange.request_id = exchange.request_id or new_request_id()
    return forwarded.request_id_line(exchange.request_id)


async def linger(io: ExchangeIO) -> None:
    """Read and drop bytes for a moment: closing a connection with unread bytes would reset it, and
    the client could lose the reply."""
    io.client.send_eof()
    io.set_timeout("linger", LINGER_SECS)
    remaining = LINGER_BYTES
    try:
        while remaining > 0:
            chunk = await io.read(io.client, LINGER_READ_BYTES)
            if not chunk:
                break
            remaining -= len(chunk)
    except PhaseTimeout:
        pass


def _timeout_error(phase: str) -> HttpError:
    if phase in ("head", "body"):
        message = f"the request {phase} was not received in time"
        return HttpError(408, message, f"{phase}_timeout", close=True)
    return HttpError(504, f"timeout in phase {phase}", TIMEOUT, close=True)


def _ended_by(error: HttpError, exchange: Exchange) -> EndedBy:
    if error.status in (502, 504) and (exchange.attempts or error.code != TIMEOUT):
        return "worker"
    return "client" if error.status == 408 else "proxy"


def is_preflight(head: RequestHead) -> bool:
    method = field_value(head.lines, b"access-control-request-method")
    return head.method == b"OPTIONS" and bool(head.origin and method)


async def reply_to_preflight(
    io: ExchangeIO, exchange: Exchange, head: RequestHead, methods: Iterable[str]
) -> bool:
    """`methods`: of the route. Raises HttpError 403 for an origin that is not allowed."""
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
    """Raises HttpError 403 for a WebSocket of an origin that is not allowed: browsers send no
    preflight for WebSockets."""
    if not head.origin:
        return
    same = head.origin.partition(b"//")[2].lower() == head.host.lower()
    if not same and not io.settings.cors.allows(head.origin.decode("latin-1")):
        raise _forbidden(head)


def _forbidden(head: RequestHead) -> HttpError:
    detail = "this origin is not allowed: see [server] cors_allow_origins"
    return HttpError(403, detail, "origin_not_allowed", close=bool(head.length), detail=detail)

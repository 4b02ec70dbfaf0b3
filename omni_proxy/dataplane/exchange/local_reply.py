"""A request that we answer ourselves, with why; and the connection that it came by afterwards.

Contract: nothing is refused that has an answer on its way; then its connection is cut. Whoever
still sends is read for a moment, so that the refusal reaches him.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from omni_proxy.admin_ops.routes import TOPPED
from omni_proxy.dataplane.exchange.exchange import Exchange, diagnostics, new_id, settle
from omni_proxy.dataplane.loop.task import PhaseTimeout, pause
from omni_proxy.wire.errors import HttpError, encode_local_reply

if TYPE_CHECKING:
    from omni_proxy.dataplane.downstream.connection import Connection

LINGER_PIECE_BYTES: Final = 262144
LINGER_SECS: Final = 2.0
LINGER_BYTES: Final = 16 * 1024 * 1024


async def refuse_head(conn: Connection, error: HttpError | PhaseTimeout) -> None:
    """A head that can't be read is still an exchange in the logs; no head at all is none."""
    if isinstance(error, PhaseTimeout) and conn.phase == "idle":
        return
    mine = Exchange(conn.turn_at, conn.peer)
    try:
        await refuse(conn, mine, error)
    finally:
        settle(conn.door, mine, conn.phase)


async def refuse(conn: Connection, mine: Exchange, error: HttpError | PhaseTimeout) -> bool:
    """Answer it ourselves; the connection goes on where the request was read to its end."""
    refusal = error if isinstance(error, HttpError) else _late(str(error))
    if mine.route is None and mine.target.partition("?")[0] in TOPPED:
        # Clients of the admin routes read these beside `error` (api-server.md 9.1).
        refusal.extra |= {"success": False, "message": refusal.message, "status": "error"}
    worker_lines = (diagnostics(mine) if mine.attempts else b"") + _id_line(conn, mine) + mine.cors
    mine.status = refusal.status
    outcome = "upstream_error" if mine.attempts and refusal.status >= 500 else "refused"
    comments, conn.comments = conn.comments, None
    if comments is not None and comments.begun:
        comments.refuse(refusal)
        return False
    mine.end(outcome, _whose(refusal), str(refusal.code), phase=conn.phase)
    if mine.relayed:
        return False
    if conn.held_bytes:
        error.__traceback__ = error.__context__ = None  # their frames keep the body
        conn.let_go()
    unread = conn.upload is not None and not conn.upload.whole
    keep = not refusal.close and not unread and not conn.closing
    conn.upload = None
    body = refusal.body()
    reply = encode_local_reply(refusal.status, body, refusal.headers, close=not keep)
    if worker_lines:
        reply = reply.replace(b"\r\n\r\n", b"\r\n" + worker_lines + b"\r\n", 1)
    if mine.method == "HEAD":
        reply = reply[: len(reply) - len(body)]
    conn.deadline = inf
    conn.clock("refuse", conn.door.limits.idle)
    await conn.write(conn.client, reply)
    mine.bytes_out += len(body)
    if not keep:
        await linger(conn)
    elif conn.count_read():  # the next may have come along, and be refused as quickly
        await pause
    return keep


def _id_line(conn: Connection, mine: Exchange) -> bytes:
    """Of a request that may have been refused before it got an id."""
    stamps = conn.door.stamps
    if stamps is None or not stamps.id_name:
        return b""
    mine.request_id = mine.request_id or new_id()
    return stamps.request_id_line(mine.request_id)


async def linger(conn: Connection) -> None:
    """Read on for a moment: closing on unread bytes would reset the answer away."""
    conn.client.send_eof()
    conn.clock("linger", LINGER_SECS)
    left = LINGER_BYTES
    try:
        while left > 0:
            piece = await conn.more(conn.client, LINGER_PIECE_BYTES)
            if not piece:
                break
            left -= len(piece)
    except PhaseTimeout:
        pass


def _late(phase: str) -> HttpError:
    if phase in ("head", "body"):
        message = f"the request's {phase} stopped coming before its end"
        return HttpError(408, message, f"{phase}_timeout", close=True)
    return HttpError(504, f"time ran out in phase {phase}", "timeout", close=True)


def _whose(refusal: HttpError) -> str:
    """Who ended an exchange that we answer ourselves."""
    if refusal.status in (502, 504):
        return "worker"
    return "client" if refusal.status == 408 else "proxy"

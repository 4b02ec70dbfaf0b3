"""Ask an upstream: a connection, the request on it, and the head of the answer.

Contract: nothing has left for the client here, so every failure is a TryFailed and the caller may
try again. A connection that was kept idle and broke without a byte is redialled once, uncounted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final

from omni_proxy.door.account import Exchange
from omni_proxy.door.conn import Conn
from omni_proxy.door.task import Expired, pause
from omni_proxy.door.upstream import PIECE_BYTES, Lane
from omni_proxy.wire.answer import Answer, UpstreamGarbage, find_answer_end
from omni_proxy.wire.head import RequestHead

if TYPE_CHECKING:
    from omni_proxy.door.connection import Connection

JOIN_BYTES: Final = 4096  # below this, joining head and body beats a second buffer


class TryFailed(Exception):
    """One try came to nothing: `kind` as in `retry_on`, `status` for the client if it was the
    last."""

    def __init__(self, kind: str, error: str, status: int = 502) -> None:
        super().__init__(error)
        self.kind = kind
        self.error = error
        self.status = status


class _Broke(Exception):
    """The connection to the worker ended before an answer's head was whole."""

    def __init__(self, why: str, *, silent: bool) -> None:
        super().__init__(why)
        self.silent = silent  # not one byte had come


@dataclass(slots=True)
class First:
    """The head of an answer, and what came along of its body, already fed to it."""

    lane: Lane
    up: Conn
    answer: Answer
    piece: bytes
    all_sent: bool
    bodiless: bool  # it ended with its head


async def ask(
    conn: Connection, mine: Exchange, head: RequestHead, way: tuple[Lane, bytes, bytes]
) -> First:
    """Dial, send, and wait for the answer's head. Raises TryFailed."""
    lane, lines, body = way
    may_redial = True
    while True:
        up = lane.take(conn)
        reused = up is not None
        if up is None:
            before = conn.pump.now
            up = await _dial(conn, lane)
            mine.connect_secs = conn.pump.now - before
        conn.upstream = up
        mine.dialled_at = conn.pump.now
        try:
            return await _ask_on(conn, head, lane, up, _framed(lane, lines, head, body))
        except _Broke as broke:
            _give_up(conn)
            if reused and broke.silent and may_redial:
                may_redial = False
                continue
            raise TryFailed("reset_before_response", f"RemoteProtocolError: {broke}") from None
        except UpstreamGarbage as garbage:
            _give_up(conn)
            raise TryFailed("bad_response", f"RemoteProtocolError: {garbage}") from None
        except Expired as expired:
            _give_up(conn)
            error = f"ReadTimeout: no answer's head in time (phase {expired})"
            raise TryFailed("response_timeout", error, 504) from None


def _give_up(conn: Connection) -> None:
    up, conn.upstream = conn.upstream, None
    if up is not None:
        up.close()


def _framed(lane: Lane, lines: bytes, head: RequestHead, body: bytes) -> list[bytes]:
    """The one framing writer: whatever came in, a plain length goes out."""
    if body or head.length or head.method in (b"POST", b"PUT", b"PATCH"):
        top = b"%b%bcontent-length: %d\r\n\r\n" % (lines, lane.host_line, len(body))
    else:
        top = b"%b%b\r\n" % (lines, lane.host_line)
    return [top + body] if len(body) < JOIN_BYTES else [top, body]


async def _dial(conn: Connection, lane: Lane) -> Conn:
    conn.clock("dial", conn.door.limits.connect)
    try:
        return await lane.dial(conn)
    except OSError as error:
        raise TryFailed("connect_failure", f"ConnectError: {error.strerror or error}") from None
    except Expired:
        raise TryFailed("connect_failure", "ConnectTimeout: no connection in time") from None


async def _ask_on(
    conn: Connection, head: RequestHead, lane: Lane, up: Conn, request: list[bytes]
) -> First:
    limit = conn.door.limits.response_head if lane is not conn.door.front else inf
    conn.clock("send", limit)
    conn.phase = "wait"
    all_sent = _begin(conn, up, request)
    if not all_sent:
        all_sent = await _send_rest(conn, up, request)
        conn.clock("wait", limit)
    buffer = b""
    while True:
        if conn.waits_for(up):
            await pause()
        try:
            piece = up.read(PIECE_BYTES)
        except OSError as error:
            raise _Broke(error.strerror or "reset", silent=not buffer) from None
        if piece is None:
            continue
        if not piece:
            raise _Broke("the worker closed without an answer", silent=not buffer)
        buffer = buffer + piece if buffer else piece
        end = find_answer_end(buffer)
        while end:
            to_head = head.method == b"HEAD"
            answer = conn.door.answers.read(buffer[:end], to_head=to_head)
            buffer = buffer[end:]
            if answer.status >= 200:
                return _first(lane, up, answer, buffer, all_sent=all_sent)
            if answer.status == 101:
                raise UpstreamGarbage("an upgrade that nobody asked for")
            end = find_answer_end(buffer) if buffer else 0


def _first(lane: Lane, up: Conn, answer: Answer, came: bytes, *, all_sent: bool) -> First:
    bodiless = answer.whole
    if bodiless:
        answer.excess = bool(came)  # nobody's: handed on, it could be taken for an answer
        came = b""
    elif came:
        came = answer.feed(came)
    return First(lane, up, answer, came, all_sent, bodiless)


def _begin(conn: Connection, up: Conn, request: list[bytes]) -> bool:
    """As `_send`; what the request took until now, within its batch, was our own time."""
    all_sent = _send(up, request)
    if conn.exchange is not None:
        conn.exchange.own_secs += monotonic() - conn.pump.now
    return all_sent


def _send(up: Conn, request: list[bytes]) -> bool:
    """Whether all of it went at once; what did not stays in `request`."""
    try:
        sent = up.send(request[0]) if len(request) == 1 else up.sock.sendmsg(request)
    except BlockingIOError:
        return False
    except OSError:
        up.hot = True  # its answer, or its end, is waiting to be read
        return False
    if sent == sum(map(len, request)):
        return True
    request[:] = [b"".join(request)[sent:]]
    return False


async def _send_rest(conn: Connection, up: Conn, request: list[bytes]) -> bool:
    """False where the worker answered (413, say) or broke before it had read everything."""
    conn.phase = "send"
    view = memoryview(b"".join(request))
    while view:
        if up.hot:
            return False
        conn.awaits = up
        await pause()
        try:
            view = view[up.send(view) :]
        except BlockingIOError:
            continue
        except OSError:
            return False
    return True

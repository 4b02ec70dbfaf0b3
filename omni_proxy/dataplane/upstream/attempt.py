"""Ask an upstream: a connection, the request on it, and the head of the answer.

Contract: nothing has left for the client here, so every failure is a AttemptFailed and the caller may
try again. A connection that was kept idle and broke without a byte is redialled once, uncounted.
"""

from __future__ import annotations

from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final

import msgspec

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import PhaseTimeout, pause
from omni_proxy.dataplane.upstream.pool import PIECE_BYTES, UpstreamPool
from omni_proxy.system.fd_limit import is_resource_exhaustion
from omni_proxy.wire.errors import HttpError, UpstreamError
from omni_proxy.wire.request import RequestHead
from omni_proxy.wire.response import (
    UpstreamProtocolError,
    UpstreamResponse,
    check_interim,
    find_response_head_end,
)

if TYPE_CHECKING:
    from omni_proxy.dataplane.downstream.connection import Connection
    from omni_proxy.dataplane.exchange.request_body import RequestBody

JOIN_BYTES: Final = PIECE_BYTES  # what came in one read leaves in one send
LENGTHS_TOLD: Final = 4096
_BLANK: Final = b"\r\n\r\n"


def _length_of(size: int) -> tuple[bytes, bytes]:
    return b"%d" % size, b"content-length: %d\r\n\r\n" % size


# To look one up touches two cache lines, to format it fifty.
LENGTHS: Final = tuple(map(_length_of, range(LENGTHS_TOLD)))


def told_length(size: int) -> tuple[bytes, bytes]:
    """How the length of a body is told: its digits, and a head's last line with the blank one."""
    return LENGTHS[size] if size < LENGTHS_TOLD else _length_of(size)


class AttemptFailed(UpstreamError):
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


class ResponseStart(msgspec.Struct, gc=False):
    """The head of an answer, and what came along of its body, already fed to it."""

    lane: UpstreamPool
    up: Stream
    answer: UpstreamResponse
    piece: bytes
    bodiless: bool  # it ended with its head
    all_sent: bool = True


Asked = tuple[
    UpstreamPool, Stream
]  # the way to a worker that has got the request, and the connection


class FastPathHandoff(msgspec.Struct, gc=False):
    """An exchange as far as the short way has come with it."""

    mine: Exchange
    head: RequestHead
    body: bytes
    asked: Asked | None


async def ask(
    conn: Connection,
    mine: Exchange,
    head: RequestHead,
    way: tuple[UpstreamPool, bytes, bytes],
    asked: Asked | None = None,
) -> ResponseStart:
    """Dial, send, and wait for the answer's head; `asked`: only that. Raises AttemptFailed."""
    lane = way[0]
    may_redial = True
    while True:
        up = asked[1] if asked is not None else _kept(conn, lane, may_redial=may_redial)
        reused = up is not None
        if up is None:
            before = conn.loop.now
            up = await _dial(conn, lane)
            mine.connect_secs = conn.loop.now - before
        conn.upstream = up
        try:
            if asked is None:
                return await _ask_on(conn, mine, head, way)
            asked = None
            return await _answer_of(conn, head, lane, up)
        except _Broke as broke:
            _give_up(conn)
            if reused and broke.silent and may_redial:
                may_redial = False
                continue
            raise AttemptFailed("reset_before_response", f"RemoteProtocolError: {broke}") from None
        except UpstreamProtocolError as garbage:
            _give_up(conn)
            raise AttemptFailed("bad_response", f"RemoteProtocolError: {garbage}") from None
        except HttpError:  # of the rest of the body
            _give_up(conn)
            raise
        except PhaseTimeout as expired:
            _give_up(conn)
            if conn.phase == "body":  # that was the client
                raise
            error = f"ReadTimeout: no answer's head in time (phase {expired})"
            raise AttemptFailed("response_timeout", error, 504) from None


def _kept(conn: Connection, lane: UpstreamPool, *, may_redial: bool) -> Stream | None:
    """An idle connection, where one will do.

    For a body that streams it won't: one that is dead could cost it. And where one was dead: a
    worker that restarts has closed all of them, which is not heard of yet.
    """
    return lane.take(conn) if may_redial and conn.upload is None else None


def _give_up(conn: Connection) -> None:
    up, conn.upstream = conn.upstream, None
    if up is not None:
        up.close()


def _framed(
    conn: Connection, lane: UpstreamPool, lines: bytes, head: RequestHead, body: bytes
) -> list[bytes]:
    """The one framing writer: whatever came in, a plain length goes out."""
    if conn.upload is not None:
        return [conn.upload.begin(lines + lane.host_line)]
    size = len(body)
    if not (body or head.length or head.method in (b"POST", b"PUT", b"PATCH")):
        return [lines + lane.host_line + b"\r\n"]
    if size < JOIN_BYTES:
        return [b"".join((lines, lane.host_line, told_length(size)[1], body))]
    return [lines + lane.host_line + told_length(size)[1], body]


async def _dial(conn: Connection, lane: UpstreamPool) -> Stream:
    conn.clock("dial", conn.door.limits.connect)
    try:
        return await lane.dial(conn)
    except OSError as error:
        if is_resource_exhaustion(error):
            raise _full(error) from None
        raise AttemptFailed("connect_failure", f"ConnectError: {error.strerror or error}") from None
    except PhaseTimeout:
        raise AttemptFailed("connect_failure", "ConnectTimeout: no connection in time") from None


def _full(error: OSError) -> HttpError:
    """That is no fault of the worker's: it hears nothing of it."""
    message = f"router overloaded: no connection to a worker can be opened: {error.strerror}"
    return HttpError(
        503, message, 503, type="overloaded_error", reason="descriptors"
    ).with_headers(("retry-after", "1"))  # fmt: skip


async def _ask_on(
    conn: Connection, mine: Exchange, head: RequestHead, way: tuple[UpstreamPool, bytes, bytes]
) -> ResponseStart:
    lane, lines, body = way
    up = conn.upstream
    assert up is not None
    mine.dialled_at = conn.loop.now
    request = _framed(conn, lane, lines, head, body)
    # What it took until now, within its batch, was our own time.
    mine.own_secs += monotonic() - conn.loop.now
    limit = inf if lane.to_front else conn.door.limits.response_head
    conn.clock("wait", limit)
    if conn.upload is None and len(request) == 1:
        up.write_soon(request[0])
        return await _answer_of(conn, head, lane, up)
    all_sent = await _send(conn, up, request)
    conn.clock("wait", limit)
    first = await _answer_of(conn, head, lane, up, conn.upload if all_sent else None)
    first.all_sent &= all_sent
    return first


async def _answer_of(
    conn: Connection,
    head: RequestHead,
    lane: UpstreamPool,
    up: Stream,
    upload: RequestBody | None = None,
) -> ResponseStart:
    """Behind a request that was sent, but for the `upload` that still streams."""
    buffer, interim = b"", 0
    while True:
        if upload is not None and not up.has_input():  # not even where all that came was interim
            upload = None if await _pour(conn, upload, up) else upload
        if conn.must_wait_for(up):
            if conn.comments is None:
                await pause
            else:
                await conn.comments.for_head(up)
        try:
            piece = up.read(PIECE_BYTES)
        except OSError as error:
            raise _Broke(error.strerror or "reset", silent=not buffer) from None
        if piece is None:
            continue
        if not piece:
            raise _Broke("the worker closed without an answer", silent=not buffer)
        came = buffer + piece
        found = _first_in(conn, head, lane, up, came)
        if isinstance(found, ResponseStart):
            found.all_sent = upload is None and not up.pending
            return found
        interim += came.count(_BLANK, 0, len(came) - len(found))
        check_interim(interim)
        buffer = found


async def _pour(conn: Connection, upload: RequestBody, up: Stream) -> bool:
    """The body that streams; False as `RequestBody.pour` has it."""
    all_sent = await upload.pour(up)
    conn.clock("wait", conn.door.limits.response_head)
    return all_sent


def _first_in(
    conn: Connection, head: RequestHead, lane: UpstreamPool, up: Stream, came: bytes
) -> ResponseStart | bytes:
    """The final answer in what came, or what is left of it behind the heads of interim ones."""
    interim = 0
    while end := find_response_head_end(came):
        answer = conn.door.answers.read(came[:end], to_head=head.method == b"HEAD")
        came = came[end:]
        if answer.status >= 200:
            bodiless = answer.whole
            if bodiless:
                answer.excess = bool(came)  # nobody's: handed on, it could be taken for an answer
                came = b""
            elif came:
                came = answer.feed(came)
            return ResponseStart(lane, up, answer, came, bodiless)
        if answer.status == 101:
            raise UpstreamProtocolError("an upgrade that nobody asked for")
        interim += 1
        check_interim(interim)
    return came


async def _send(conn: Connection, up: Stream, request: list[bytes]) -> bool:
    """What is too large to be joined and sent late; whether all of it went, as `_send_rest`."""
    try:
        sent = up.sendmsg(request)
    except BlockingIOError:
        sent = 0
    except OSError:
        up.readable = True  # its answer, or its end, is waiting to be read
        return False
    whole = sum(map(len, request))
    return sent == whole or await _send_rest(conn, up, request, sent)


async def _send_rest(conn: Connection, up: Stream, request: list[bytes], sent: int) -> bool:
    """Behind the first `sent` bytes. Each piece for itself: to join them would copy the body."""
    secs = conn.phase_deadline - conn.loop.now
    for piece in request:
        if sent < len(piece) and not await _send_piece(conn, up, memoryview(piece)[sent:], secs):
            return False
        sent = max(0, sent - len(piece))
    return True


async def _send_piece(conn: Connection, up: Stream, view: memoryview, secs: float) -> bool:
    """False where the worker answered (413, say) or broke before it had read everything."""
    while view:
        conn.clock("send", secs)
        if up.has_input():
            return False
        conn.waiting_on = up
        await pause
        try:
            view = view[up.send(view) :]
        except BlockingIOError:
            continue
        except OSError:
            return False
    return True

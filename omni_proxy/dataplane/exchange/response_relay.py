"""Relay an answer to the client, piece by piece, each with the turn of the pump that it came in.

Contract: `relay` never raises for the worker's faults: after the first relayed byte there is no
second try, and a truncated answer always ends abnormally (no last chunk, too few bytes, a reset).
`_pieces` is the price per token; nothing is parsed or awaited there that need not be.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Generator
from math import inf
from typing import TYPE_CHECKING, Any

from omni_proxy.dataplane.exchange.exchange import Exchange, diagnostics
from omni_proxy.dataplane.loop.task import ClientDisconnected, PhaseTimeout, await_direct, pause
from omni_proxy.dataplane.upstream.attempt import ResponseStart
from omni_proxy.dataplane.upstream.pool import PIECE_BYTES
from omni_proxy.wire.chunked import LAST_CHUNK, encode_chunk
from omni_proxy.wire.cors import drop_cors_fields
from omni_proxy.wire.errors import stream_error_event
from omni_proxy.wire.request import RequestHead, drop_fields
from omni_proxy.wire.response import (
    CHUNKED,
    CLOSE,
    LENGTH,
    Unchunker,
    UpstreamProtocolError,
    UpstreamResponse,
    add_reason_phrase,
)

if TYPE_CHECKING:
    from omni_proxy.dataplane.downstream.connection import Connection
    from omni_proxy.dataplane.exchange.observer import Gaps

END_BYTES = 32  # what only says that a stream is over is no larger
GAPS_AT_ONCE = 256  # sorted in together; they cost 32 bytes each until then


async def relay(conn: Connection, mine: Exchange, head: RequestHead, first: ResponseStart) -> bool:
    """Everything of the answer to the client; whether its connection may go on.

    `mine` tells how it ended. Raises ClientDisconnected when the client left.
    """
    answer, client, piece = first.answer, conn.client, first.piece
    mine.status = answer.status
    mine.wait_at = conn.loop.now
    if answer.sse or mine.stream:
        mine.stream = True
        conn.deadline = inf
    ours = conn.comments if conn.comments is not None and conn.comments.begun else None
    if ours is not None and not ours.goes_on_with(first):
        return await ours.tell_instead(first)
    counted = answer.framing is LENGTH and ours is None
    shape = None if counted else shape_of(first, head, begun=ours is not None)
    keep = head.keep_alive and not conn.closing
    keep &= (shape is None or shape.ends) and (first.all_sent or conn.upload is None)
    top = b"" if ours is not None else head_bytes(mine, first, head, keep=keep)
    conn.phase, mine.relayed = "relay", True
    try:
        if piece:
            _begin(conn, mine, piece)
            top += piece if shape is None else shape.wrap(piece)
        if client.pending or (answer.whole and not keep):
            await _send(conn, top)
        elif top:
            client.write_soon(top)
        if not answer.whole:
            # A stream may last for hours: what nobody reads any more shall not.
            top = piece = head.lines = b""
            await _go_on(conn, mine, first, shape)
    except UpstreamProtocolError as garbage:
        return await _break(conn, mine, first, shape, f"RemoteProtocolError: {garbage}")
    except PhaseTimeout as expired:
        return await _cut_late(conn, mine, first, shape, str(expired))
    mine.end("completed", "")
    conn.upstream = conn.comments = None
    if answer.keep_alive and first.all_sent and not answer.excess and answer.whole:
        first.lane.give_back(first.up)
    else:
        first.up.close()
    return keep


def _begin(conn: Connection, mine: Exchange, piece: bytes) -> None:
    """The piece of the body that came along with the head."""
    mine.first_at = conn.loop.now
    if mine.half_open_id:
        _hear(conn, mine)
    mine.pieces = 1
    mine.bytes_out = len(piece)
    if conn.door.keeps_tail:
        mine.tail = piece


async def _go_on(
    conn: Connection, mine: Exchange, first: ResponseStart, shape: Shape | None
) -> None:
    """Behind a head that has left. Raises as `_pieces`."""
    if first.piece:
        conn.clock("relay", conn.door.limits.idle)
    else:
        conn.clock("first", conn.door.limits.first_byte)
    if conn.comments is not None:
        await conn.comments.for_first(first.up, first.answer)
    first.answer.lines = b""
    await await_direct(_pieces(conn, mine, first, shape))


def _hear(conn: Connection, mine: Exchange) -> None:
    """The body begins. A stream may last for minutes: its worker's trial is passed with that."""
    mine.first_at = conn.loop.now
    if mine.half_open_id and mine.stream and mine.status < 500 and mine.worker is not None:
        conn.door.fleet.observe_success(mine.worker, mine.half_open_id)


@types.coroutine
def _pieces(
    conn: Connection, mine: Exchange, first: ResponseStart, shape: Shape | None
) -> Generator[Any, Any, None]:
    """The rest of the body. Raises UpstreamProtocolError where it breaks, PhaseTimeout, ClientDisconnected.

    What an event touches is in no cache when it comes: so sums are kept in this frame until the
    end, and a bare `yield` is what `await pause` is elsewhere.
    """
    answer, up, client, loop = first.answer, first.up, conn.client, conn.loop
    idle, deadline, keeps_tail = conn.door.limits.idle, conn.deadline, conn.door.keeps_tail
    gaps = _gaps(conn, mine)
    late, before, longest = gaps.late, mine.first_at, 0.0
    count, size, tail, piece = mine.pieces, mine.bytes_out, mine.tail, first.piece
    try:
        while not answer.whole:
            if conn.must_wait_for(up):
                yield
            try:
                came = up.read(PIECE_BYTES)
            except OSError as error:
                raise UpstreamProtocolError(error.strerror or "reset") from None
            if came is None:
                continue
            if not came:
                yield from _say_end(conn, answer, shape)
                return
            piece = answer.feed(came)
            now = loop.now
            if before:
                gap = now - before
                longest = gap if gap > longest else longest  # noqa: FURB136
                late.append(gap)
                if len(late) >= GAPS_AT_ONCE:
                    gaps.sort_in()
            else:
                _hear(conn, mine)
                conn.phase = "relay"
            before = now
            tail = piece if keeps_tail and len(piece) > END_BYTES else tail
            due = now + idle
            conn.phase_deadline = due if due < deadline else deadline  # noqa: FURB136
            count += 1
            size += len(piece)
            piece = piece if shape is None else shape.wrap(piece)
            if client.pending or answer.whole:  # late: of this turn, or the client reads slowly
                yield from _send(conn, piece)
            else:
                client.write_soon(piece)
    finally:
        mine.longest_gap, mine.pieces, mine.bytes_out, mine.tail = longest, count, size, tail
        first.piece = piece  # where it broke, the last one that went on


class _Unwanted:
    """Gaps that nobody asks for: counted all the same, so that the loop has nothing to ask."""

    def __init__(self) -> None:
        self.late: list[float] = []

    def sort_in(self) -> None:
        self.late.clear()


_UNWANTED = _Unwanted()


def _gaps(conn: Connection, mine: Exchange) -> Gaps:
    """Where those of this answer are counted."""
    meters = conn.door.meters
    wanted = meters.gap_histogram(mine) if meters is not None and mine.stream else None
    return _UNWANTED if wanted is None else wanted


async def _say_end(conn: Connection, answer: UpstreamResponse, shape: Shape | None) -> None:
    """The worker closed. Where that says the answer's end, the client is told as its framing has
    it; elsewhere UpstreamProtocolError is raised."""
    if answer.framing is not CLOSE:
        raise UpstreamProtocolError("the worker closed before the answer's end")
    await _send(conn, shape.last if shape is not None else b"")


async def _send(conn: Connection, piece: bytes) -> None:
    """All of it, now, behind what is late. Raises ClientDisconnected."""
    client = conn.client
    client.flush()
    sent = 0
    if not client.pending:
        try:
            sent = client.send(piece)
        except BlockingIOError:
            pass
        except OSError:
            raise ClientDisconnected from None
    if client.pending or sent < len(piece):
        await _rest(conn, memoryview(piece)[sent:])


async def _rest(conn: Connection, view: memoryview) -> None:
    """The client reads slower than the worker writes: wait for it, and let the worker wait."""
    phase, client = conn.phase, conn.client
    conn.clock("client", conn.door.limits.idle)
    while True:
        if not client.pending:
            try:
                view = view[client.send(view) :]
            except BlockingIOError:
                pass
            except OSError:
                raise ClientDisconnected from None
            else:
                conn.clock("client", conn.door.limits.idle)
            if not view:
                break
        conn.waiting_on = client
        await pause
        if client.peer_closed and conn.door.half_close_aborts:
            raise ClientDisconnected
    conn.phase = phase


async def _cut_late(
    conn: Connection, mine: Exchange, first: ResponseStart, shape: Shape | None, phase: str
) -> bool:
    if phase == "client":
        mine.end("client_stalled", "client", "the client stopped reading", phase="client")
        conn.client.close(reset=True)
        return False
    return await _break(conn, mine, first, shape, _overdue(conn, mine, phase))


def _overdue(conn: Connection, mine: Exchange, phase: str) -> str:
    """Why it is cut. A worker that has been sending all the time is not blamed."""
    if conn.loop.now < conn.deadline:
        return f"ReadTimeout: the worker fell silent (phase {phase})"
    mine.end("timed_out", "proxy", "the exchange took longer than request_timeout_secs")
    return mine.error


async def _break(
    conn: Connection, mine: Exchange, first: ResponseStart, shape: Shape | None, why: str
) -> bool:
    """The answer can't be finished: say so where the format has a place for it, then cut.

    In a framing of ours there always is one; in the worker's own chunks, between two of them.
    """
    answer = first.answer
    mine.end("stream_error" if mine.stream else "upstream_error", "worker", why)
    has_place = shape is not None or (
        answer.framing is CHUNKED and answer.is_between_chunks(first.piece)
    )
    conn.client.flush()
    if answer.sse and has_place and not conn.client.pending:
        event = b"\n\n" + stream_error_event(f"upstream stream failed before completion: {why}")
        raw = shape is not None and not shape.ends
        with contextlib.suppress(OSError):
            conn.client.send(event if raw else encode_chunk(event))
    # Where only closing would tell the end, a plain close would look like one.
    conn.client.close(reset=shape is not None and not shape.ends)
    return False


# What an answer looks like to the client: its head, and its body's framing where that must change.
#
# Invariant: the worker's own bytes go on wherever the client can read them as they are. Nothing is
# sent or awaited here.


class Shape:
    """How pieces are changed where the client can't take the worker's framing as it is."""

    __slots__ = ("ends", "last", "wrap")

    def __init__(self, wrap: Callable[[bytes], bytes], last: bytes, *, ends: bool) -> None:
        self.wrap = wrap
        self.last = last
        self.ends = ends  # the client can tell the end without our closing


def shape_of(first: ResponseStart, head: RequestHead, *, begun: bool) -> Shape | None:
    """None where the very bytes of the worker go on. `begun`: in chunks of ours."""
    answer = first.answer
    if first.bodiless and not begun:
        return None
    if answer.framing is CHUNKED:
        return Shape(Unchunker().feed, b"", ends=False) if head.http_1_0 else None
    if head.http_1_0:
        return Shape(bytes, b"", ends=False)
    if answer.framing is LENGTH:
        return Shape(lambda piece: _as_last_chunk(piece, answer), b"", ends=True)
    return Shape(encode_chunk, LAST_CHUNK, ends=True)


def _as_last_chunk(piece: bytes, answer: UpstreamResponse) -> bytes:
    """Of a counted body, which tells of its end by its count."""
    return encode_chunk(piece) + LAST_CHUNK if answer.whole else encode_chunk(piece)


def head_bytes(mine: Exchange, first: ResponseStart, head: RequestHead, *, keep: bool) -> bytes:
    """The answer's head as the client gets it; `keep`: its connection may go on."""
    answer = first.answer
    parts = [answer.lines if mine.route is not None else add_reason_phrase(answer)]
    if mine.route is not None:
        parts.append(diagnostics(mine))
        parts.append(mine.version.lines)
        if mine.worker is not None and mine.worker.version is not mine.version:
            parts.append(mine.worker.version.end_header_lines(mine.version))
        if head.origin:
            parts[0] = drop_cors_fields(parts[0])
            parts.append(mine.cors)
    if mine.request_id_line:
        parts[0] = drop_fields(
            parts[0], frozenset((mine.request_id_line.partition(b":")[0].lower(),))
        )
        parts.append(mine.request_id_line)
    if not first.bodiless and not head.http_1_0 and answer.framing is not LENGTH:
        parts.append(b"transfer-encoding: chunked\r\n")
    if not keep:
        parts.append(b"connection: close\r\n")
    elif head.http_1_0:
        parts.append(b"connection: keep-alive\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)

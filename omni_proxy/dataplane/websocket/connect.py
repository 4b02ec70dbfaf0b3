"""A worker for a speech session: pick, dial, shake hands, and try another where that is allowed.

Contract: nothing of the session has been sent to a worker whose try failed. Health hears of failed
connections and of the statuses that count against a worker as those of any answer do
(`dataplane/upstream/retry`), of nothing else. Source: omni-router.md 12.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wsproto.utilities import generate_nonce

from omni_proxy.dataplane.exchange.exchange import Exchange, report
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import PhaseTimeout
from omni_proxy.dataplane.upstream.acquire import take
from omni_proxy.dataplane.upstream.attempt import AttemptFailed
from omni_proxy.dataplane.upstream.pool import with_key
from omni_proxy.dataplane.upstream.retry import RetryState, counts_as_failed
from omni_proxy.fleet.worker import Worker
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import RequestHead
from omni_proxy.wire.response import UpstreamProtocolError, check_interim, find_response_head_end
from omni_proxy.wire.websocket import encode_handshake, parse_handshake_response

if TYPE_CHECKING:
    from omni_proxy.dataplane.downstream.connection import Connection


async def reach_worker(conn: Connection, mine: Exchange, head: RequestHead) -> tuple[Stream, bytes]:
    """The connection to a worker that said 101, and what it sent after. Raises HttpError, Gone."""
    door, need = conn.door, mine.need
    assert need is not None
    mine.policy = door.policy.name
    tries: RetryState | None = None
    try:
        worker = take(door, mine)
    except HttpError as nobody:
        worker = await _waited(conn, mine, nobody)
    while True:
        try:
            reached = await _open(conn, mine, head, worker)
        except AttemptFailed as failed:
            _close(conn)
            if counts_as_failed(failed.status, door.config.routing.retry_on):
                said = failed.status if failed.kind == "status" else None
                report(conn, mine, worker, failed.error, said)
            tries = tries or RetryState(conn, mine, 0)
            kind = str(failed.status) if failed.kind == "status" else failed.kind
            try:
                worker = await tries.after(kind, _told(failed))
            except HttpError:
                mine.end("upstream_error", "worker", failed.error)
                raise
        else:
            if worker.health.failed_requests:
                door.fleet.observe_success(worker, mine.half_open_id)
            return reached


async def _waited(conn: Connection, mine: Exchange, nobody: HttpError) -> Worker:
    try:
        return await conn.door.queue.for_worker(conn, mine, nobody)
    except HttpError as refusal:
        raise _numbered(refusal) from None


async def _open(
    conn: Connection, mine: Exchange, head: RequestHead, worker: Worker
) -> tuple[Stream, bytes]:
    """Dial and shake hands, both under one clock. Raises AttemptFailed."""
    lane, nonce = conn.door.lane(worker), generate_nonce()
    conn.clock("dial", conn.door.config.health.timeout_secs)
    try:
        up = conn.upstream = await lane.dial(conn)
        mine.dialled_at = conn.loop.now
        conn.phase = "wait"
        await conn.write(up, encode_handshake(with_key(worker, head.lines), lane.host_line, nonce))
        status, rest = await _status(conn, up, nonce)
    except OSError as error:
        dialled = conn.upstream is not None
        kind = "reset_before_response" if dialled else "connect_failure"
        raise AttemptFailed(kind, f"ConnectError: {error.strerror or error}") from None
    except UpstreamProtocolError as garbage:
        raise AttemptFailed("bad_response", f"RemoteProtocolError: {garbage}") from None
    except PhaseTimeout as expired:
        if str(expired) == "dial":
            raise AttemptFailed(
                "connect_failure", "ConnectTimeout: no connection in time"
            ) from None
        late = "ReadTimeout: no answer to the handshake in time"
        raise AttemptFailed("response_timeout", late, 504) from None
    if status != 101:
        raise AttemptFailed("503" if status == 503 else "status", f"status={status}", status)
    mine.wait_at = conn.loop.now
    return up, rest


async def _status(conn: Connection, up: Stream, nonce: bytes) -> tuple[int, bytes]:
    """What it answers, other 1xx skipped, and the bytes after that head."""
    buffer, heads = b"", 0
    while True:
        while end := find_response_head_end(buffer):
            status = parse_handshake_response(buffer[:end], nonce)
            buffer = buffer[end:]
            if status == 101 or status >= 200:
                return status, buffer
            heads += 1
            check_interim(heads)
        piece = await conn.more(up)
        if not piece:
            raise UpstreamProtocolError("it closed without an answer to the handshake")
        buffer += piece


def _close(conn: Connection) -> None:
    up, conn.upstream = conn.upstream, None
    if up is not None:
        up.close()


def _numbered(nobody: HttpError) -> HttpError:
    """The event's code is the number here, and the reason stands beside it."""
    if isinstance(nobody.code, int):
        return nobody
    return HttpError(nobody.status, nobody.message, nobody.status, reason=nobody.code)


def _told(failed: AttemptFailed) -> HttpError:
    """What the client hears of a worker that did not take its session."""
    code, reason = failed.status, failed.kind
    if code == 429:
        message = "upstream WebSocket is overloaded"
        return HttpError(429, message, code, type="overloaded_error", reason=reason)
    if code == 503:
        message = "upstream WebSocket is unavailable"
        return HttpError(503, message, code, type="server_error", reason=reason)
    if 400 <= code < 500:
        message = "upstream WebSocket rejected the request"
        return HttpError(400, message, code, type="upstream_error", reason=reason)
    message = "upstream WebSocket failed"
    return HttpError(502, message, code, type="upstream_error", reason=reason)

"""The short way: a request like the connection's last one, and an answer like the worker's last
one, in two plain calls.

Nearly every request comes whole, in one read, spelled as the one before it; a worker with an idle
connection takes it at once, and its answer comes whole as well. For those the connection's
coroutine rests in its wait for the next head, and what it would do in forty calls is done here in
two. Invariant: whatever does not fit is handed over as far as it has come, and the coroutine goes
on from there, to the same end. This room must not refuse, try again, wait, dial or report health.
Saves 20 us of a request's 50.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Final

import msgspec

from omni_proxy.dataplane.exchange.exchange import (
    FIRST_TRY,
    REQUEST_ID,
    Exchange,
    id_for,
    settle_whole,
)
from omni_proxy.dataplane.upstream.acquire import take
from omni_proxy.dataplane.upstream.attempt import (
    LENGTHS,
    LENGTHS_TOLD,
    Asked,
    FastPathHandoff,
    told_length,
)
from omni_proxy.dataplane.upstream.pool import PIECE_BYTES
from omni_proxy.routing.inspect.requirements import (
    Requirements,
    affinity_key_of,
    has_json_body,
    requirements_of_json,
)
from omni_proxy.routing.routes import UNPINNED, MethodNotAllowed, Route, match_route
from omni_proxy.routing.voices import SPEECH_TRAFFIC
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.head_caching.lru import LruCache
from omni_proxy.wire.head_caching.request_heads import TEMPLATES
from omni_proxy.wire.head_caching.response_heads import NOT_CACHED
from omni_proxy.wire.head_caching.template import HeadTemplate
from omni_proxy.wire.request import RequestHead

if TYPE_CHECKING:
    from omni_proxy.dataplane.downstream.connection import Connection

_BLANK: Final = b"\r\n\r\n"
_CRLF: Final = b"\r\n"


class FastPath:
    """Gets the events of a connection's sockets in the connection's place, while that rests."""

    __slots__ = ("_mine", "_piece", "_way", "asked", "client", "conn", "usual", "waiting_on")

    def __init__(self, conn: Connection, usual: CachedRequest) -> None:
        self.conn = conn
        self.client = conn.client
        self.usual = usual
        self.waiting_on: object = None
        self.asked: Exchange | None = None  # what waits for its answer
        self._piece = b""  # the request, while it does
        self._way: Asked | None = None  # whom it was sent to
        self._mine: Exchange | None = None  # one for all; what is the same in all stays in it

    def stand_in(self) -> None:
        """Whatever comes from the client comes here."""
        self.client.task = self
        self.waiting_on = self.client

    def is_disconnect(self, mask: int) -> bool:
        return self.conn.is_disconnect(mask)

    def throw(self, error: BaseException) -> None:
        self.conn.throw(error)

    def step(self) -> None:
        """An event of the socket that is waited for."""
        try:
            mine = self.asked
            if mine is None:
                self._begin()
            else:
                self._finish(mine)
        except Exception as failure:  # a fault of ours: the end of this connection and of no other
            self.hand_over()
            self.conn.step(failure)

    def hand_over(self, came: bytes = b"") -> None:
        """The coroutine has the events again, and goes on with what was begun. `came`: what was
        read of its answer, which is read once more."""
        conn, mine = self.conn, self.asked
        self.client.task = conn
        asked, self._way = self._way, None
        if asked is not None:
            up = conn.upstream = asked[1]
            up.task = conn
            if came:
                up.unread(came)
        if mine is None:
            return
        top, _, body = self._piece.partition(_BLANK)
        parts = self.usual.template.match(top, told_length(len(body))[0])
        assert parts is not None
        head = msgspec.structs.replace(
            self.usual.head, lines=b"".join(parts), length=len(body),
            request_id=mine.request_id,
        )  # fmt: skip
        mine = conn.exchange = mine.as_begun(asked=asked is not None)
        conn.begun = FastPathHandoff(mine, head, body, asked)
        self.asked = self._mine = None
        self._piece = b""
        conn.step()

    def _miss(self, piece: bytes) -> None:
        """Nothing was begun: the coroutine gets what was read."""
        self.client.task = self.conn
        self.conn.rest = piece
        self.conn.step()

    def _begin(self) -> None:
        """Read a request, and send it to a worker if it is as usual."""
        client, door = self.client, self.conn.door
        if client.task is not self:
            return  # whoever resumes us does not know yet that all was handed over
        try:
            piece = client.read(PIECE_BYTES)
        except OSError:
            piece = b""  # whoever reads again finds the end
        if piece is None:
            self.waiting_on = client
            if (
                client.readable or door.draining
            ):  # what was late may have left, and nothing stays then
                self._miss(b"")
        elif client.readable or self.usual.source is not door.usuals or not self._goes(piece):
            self._miss(piece)

    def _goes(self, piece: bytes) -> bool:
        """Whether it is as usual, and there is a slot for it; then it was begun."""
        usual, door = self.usual, self.conn.door
        template = usual.template
        head, blank, body = piece.partition(_BLANK)
        size = len(body)
        # As `told_length`, which is worth a frame to us.
        digits, length = LENGTHS[size] if size < LENGTHS_TOLD else told_length(size)
        parts = template.match(head, digits)
        if parts is None or not blank:
            return False
        try:
            need = requirements_of_json(usual.route, body)
        except HttpError:
            return False
        if door.policy.needs_affinity_key:
            need.affinity_key = affinity_key_of(b"".join(parts))
        mine = self._accounts(need, size)
        held = door.held_bytes + len(piece)
        if held > door.limits.held or not door.count_in(mine):
            return False
        door.held_bytes = held
        self.conn.held_bytes = len(piece)
        request_id = parts[template.id_index] if template.id_index > 0 else usual.head.request_id
        mine.request_id = request_id or id_for(need)
        self.asked = mine
        self._piece = piece
        way = self._taken(mine)
        if way is not None:
            lane, up = way
            parts += lane.host_line, length, body
            up.write_soon(b"".join(parts))
            mine.own_secs = monotonic() - mine.started_at
            if up.readable:
                self.hand_over()
        return True

    def _accounts(self, need: Requirements, size: int) -> Exchange:
        usual, mine = self.usual, self._mine
        now = self.conn.loop.now
        if mine is None:
            mine = self._mine = Exchange(now, self.conn.peer)
            mine.method, mine.target, _ = usual.head.log_words
            mine.route = usual.route
            mine.idempotency_key = usual.head.idempotency_key
            mine.pieces = 1
            mine.relayed = True
            mine.outcome, mine.phase = "completed", "relay"
        mine.started_at = mine.head_at = mine.body_at = now
        mine.attempts = 0
        mine.need = need
        mine.stream = need.stream
        mine.bytes_in = size
        return mine

    def _taken(self, mine: Exchange) -> Asked | None:
        """An idle connection to the worker that is to have it; None where it was handed over."""
        conn, door = self.conn, self.conn.door
        mine.policy = door.policy.name
        try:
            worker = take(door, mine)
        except HttpError:
            self.hand_over()
            return None
        lane = door.lane(worker)
        up = None if worker.api_key_env else lane.take(self)
        if up is None:
            self.hand_over()
            return None
        limits, now = door.limits, mine.started_at
        self.waiting_on = up
        mine.dialled_at = now
        conn.phase = "wait"
        conn.phase_deadline = now + (limits.response_head if mine.stream else limits.whole_head)
        way = self._way = (lane, up)
        return way

    def _finish(self, mine: Exchange) -> None:
        """Read the answer, and send it to the client if it is as usual."""
        way = self._way
        assert way is not None
        up = way[1]
        try:
            piece = up.read(PIECE_BYTES)
        except OSError:
            piece = b""  # whoever reads again finds the end
        if piece is None and not up.readable:
            self.waiting_on = up
        elif not piece or up.readable or up.pending or not self._comes(mine, piece, way):
            self.hand_over(piece or b"")

    def _comes(self, mine: Exchange, piece: bytes, way: Asked) -> bool:
        """Whether it is as usual, and nothing else is to be done; then it was sent on."""
        conn, client, worker = self.conn, self.client, mine.worker
        assert worker is not None
        door, lane = conn.door, way[0]
        usual = lane.usual
        head, _, body = piece.partition(_BLANK)
        before, _, after = head.partition(usual.name)
        told, _, after = after.partition(_CRLF)
        if before != usual.before or after != usual.after:
            known = door.answers.usual(head)
            if known is not NOT_CACHED:
                lane.usual = known  # for the next one
            return False
        size = len(body)
        digits, length = LENGTHS[size] if size < LENGTHS_TOLD else told_length(size)
        if (
            told != digits
            or not body
            or not usual.plain
            or client.pending
            or conn.closing
            or mine.half_open_id
            or worker.version is not mine.version
            or worker.health.failed_requests
        ):
            return False
        client.write_soon(
            b"".join((
                usual.lines, worker.route_line, REQUEST_ID, mine.request_id, FIRST_TRY,
                mine.version.lines, length, body,
            ))
        )  # fmt: skip
        mine.status = usual.status
        mine.bytes_out = size
        mine.tail = body if door.keeps_tail else b""
        mine.wait_at = mine.first_at = now = conn.loop.now
        self.asked = None
        self.waiting_on = client
        self._piece = b""
        door.held_bytes -= conn.held_bytes
        conn.held_bytes = 0
        conn.phase = "idle"
        conn.phase_deadline = now + door.limits.client_idle
        try:
            lane.give_back(way[1])
            self._way = None
        finally:
            settle_whole(door, mine, worker)
        mine.need = mine.last_worker = None
        if client.readable:  # more has come, or its end
            client.task = conn
            conn.step()
        return True


# What is the same in all requests of a client that are spelled alike, and what of them varies.
#
# Pure. Invariant: what is spelled so was judged before, and its body alone says which workers of its
# route may have it.


class CachedRequest:
    """`head` is such a request's, without the fields that vary; `source` is who knows it."""

    __slots__ = ("head", "route", "source", "template")

    def __init__(
        self, head: RequestHead, template: HeadTemplate, route: Route, source: FastPathCache
    ) -> None:
        own_id = head.request_id if template.id_index < 0 else b""
        self.head = msgspec.structs.replace(head, lines=template.first, length=0, request_id=own_id)
        self.template = template
        self.route = route
        self.source = source


class _Never:
    """In the place of a CachedRequest: requests that are spelled so go the long way."""


_NEVER: Final = _Never()


class FastPathCache:
    """What is known of the heads that many connections have in common, under one configuration."""

    def __init__(self) -> None:
        self._known: LruCache[HeadTemplate, CachedRequest | _Never] = LruCache(TEMPLATES)

    def of(self, head: RequestHead) -> CachedRequest | None:
        """For the requests that are spelled like this one; None where they can't go the short
        way."""
        template = head.template
        if template is None:
            return None
        known = self._known.get(template)
        if known is None:
            known = self._made(head, template) or _NEVER
            self._known.put(template, known)
        return known if isinstance(known, CachedRequest) else None

    def _made(self, head: RequestHead, template: HeadTemplate) -> CachedRequest | None:
        if not template.counted:
            return None
        method, _, path = head.log_words
        try:
            route = match_route(method, path)
        except MethodNotAllowed:
            return None
        if route is None or route.websocket or route.pinning is not UNPINNED:
            return None
        if route.traffic in SPEECH_TRAFFIC:  # a voice may bind it to one worker
            return None
        special = (
            head.hints or head.origin or head.upgrade or head.expects_continue or head.http_1_0
        )
        if special or not head.keep_alive or not has_json_body(route, head):
            return None
        return CachedRequest(head, template, route, self)

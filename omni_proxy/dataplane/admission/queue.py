"""The queue: requests that wait for a slot of the fleet, or for a worker, instead of being refused.

Contract: a waiter is a paused coroutine of the pump. Whatever makes room (an exchange that ends, a
change of the fleet or of the bounds) calls `serve`, which hands the room over then and there: the
worker is taken and counted before the waiter runs. So room that a newcomer sees is room that no
waiter can use, and nobody overtakes. Waiters of one need stand in one line, first come first
served; a line that can't move blocks no other. Costs nothing while nobody waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Final

from omni_proxy.config.schema import ServerConfig
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.loop.task import ClientDisconnected, PhaseTimeout, pause
from omni_proxy.dataplane.upstream.acquire import take
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.pick import eligible_workers, filter_by_version
from omni_proxy.routing.routes import UNPINNED
from omni_proxy.wire.errors import HttpError

if TYPE_CHECKING:
    from omni_proxy.dataplane.dataplane import DataPlane
    from omni_proxy.dataplane.downstream.connection import Connection

# Why nobody can take it now, though somebody may in a moment.
BY_WEIGHTS: Final = frozenset(("weights_updating", "paused", "weights_uncertain"))
WORTH_WAITING: Final = BY_WEIGHTS | {
    "all_disabled", "all_held", "none_healthy", "all_full", "no_workers",
    "weight_version_unavailable",
}  # fmt: skip


SPARE_ENTRIES: Final = 64


class _Line:
    """The waiters of one need, by number; `key` finds it."""

    __slots__ = ("key", "tickets")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.tickets: OrderedDict[int, _Ticket] = OrderedDict()

    @property
    def first(self) -> int:
        return next(iter(self.tickets))


_NOWHERE: Final = _Line(())


class _Ticket:
    """One waiter. Without a need it waits for a slot only: its body has not been read."""

    __slots__ = ("conn", "granted", "line", "mine", "need", "number", "tried")

    def __init__(self, conn: Connection, mine: Exchange, need: Requirements | None) -> None:
        self.conn = conn
        self.mine = mine
        self.need = need
        self.tried: Collection[Worker] = ()
        self.number = 0
        self.line = _NOWHERE
        self.granted = False


class Queue:
    """All waiters of a door; `waiting` is how many there are."""

    def __init__(self, door: DataPlane) -> None:
        self.waiting = 0
        self.peak_waiting = 0
        self._door = door
        self._made = 0
        self._lines: dict[Hashable, _Line] = {}
        # Each line stands in one of the two: by its first number where somebody could take it but
        # has no room, aside where nobody could before the fleet changes.
        self._full: list[tuple[int, _Line]] = []
        self._aside: set[_Line] = set()
        self._names_models = False
        self._serving = False
        self._changed = False

    async def for_slot(self, conn: Connection, mine: Exchange, *, unread: bool) -> None:
        """Until the fleet's bound lets it in and it is counted in. Raises HttpError, ClientDisconnected, PhaseTimeout.

        Where nobody may wait that is `overload_status` at once (omni-router.md 10).
        """
        if self._door.count_in(mine):
            return
        server = self._door.config.server
        over = HttpError(
            server.overload_status, "router overloaded: max in-flight requests reached",
            server.overload_status, close=unread, type="overloaded_error", reason="max_inflight",
        ).with_headers(("retry-after", "1"))  # fmt: skip
        if not server.queue_size:
            self._door.rejected += 1
            raise over
        await self._wait(_Ticket(conn, mine, None), over)

    async def for_worker(
        self, conn: Connection, mine: Exchange, nobody: HttpError, tried: Collection[Worker] = ()
    ) -> Worker:
        """The worker that it has taken in the end. Raises HttpError, ClientDisconnected, PhaseTimeout.

        Until then it gives its slot to others: it would keep it from those that could go.
        """
        if nobody.code in BY_WEIGHTS and mine.need is not None:
            self._door.holding.judge(mine.need, nobody)
        server = self._door.config.server
        if not server.queue_size or nobody.code not in WORTH_WAITING:
            if nobody.code == "all_full":
                nobody.status = server.overload_status
            raise nobody
        self._door.count_out(mine)
        self.serve()
        ticket = _Ticket(conn, mine, mine.need)
        ticket.tried = tried
        await self._wait(ticket, nobody)
        assert mine.worker is not None
        return mine.worker

    def serve(self, *, changed: bool = False) -> None:
        """Let go whoever can; `changed`: the fleet or a bound did, so anybody may be able to."""
        if not self.waiting:
            return
        self._changed |= changed
        if self._serving:
            return  # a grant has changed the fleet: the round that runs sees to it
        self._serving = True
        try:
            self._round()
            while self._changed:
                self._round()
        finally:
            self._serving = False

    def _round(self) -> None:
        if self._changed:
            self._changed = False
            self._look_again()
        full, skipped = self._full, []
        while full and self._door.has_slot():
            number, line = heappop(full)
            if not line.tickets:
                continue
            if line.first != number:  # its first has left the queue
                heappush(full, (line.first, line))
                continue
            if self._grant(line.tickets[number]):
                if line.tickets:
                    heappush(full, (line.first, line))
            elif self._could_ever(line.tickets[number]):
                skipped.append((number, line))
            else:
                self._aside.add(line)
        for entry in skipped:
            heappush(full, entry)

    def _look_again(self) -> None:
        """Nobody stands aside any more; who stands with whom may be another question now."""
        if self._names_models == self._door.fleet.has_named_models:
            for line in self._aside:
                heappush(self._full, (line.first, line))
            self._aside.clear()
            return
        tickets = [each for line in self._lines.values() for each in line.tickets.values()]
        self._lines.clear()
        self._full.clear()
        self._aside.clear()
        self._names_models = self._door.fleet.has_named_models
        for ticket in sorted(tickets, key=lambda ticket: ticket.number):
            self._place(ticket)

    def _grant(self, ticket: _Ticket) -> bool:
        door, mine, need = self._door, ticket.mine, ticket.need
        try:
            if need is not None and not eligible_workers(door.fleet, need, door.voice_owner):
                return False
            if not door.count_in(mine):
                return False
            if need is not None:
                take(door, mine, ticket.tried)
        except HttpError:  # the name it asks for is gone, or another door was quicker
            door.count_out(mine)
            return False
        self._drop(ticket)
        ticket.granted = True
        ticket.conn.phase_deadline = (
            inf  # it has what it waited for, though its turn is yet to come
        )
        door.loop.wake(ticket.conn)
        return True

    def _could_ever(self, ticket: _Ticket) -> bool:
        """Before the fleet changes: somebody is able, and only full."""
        need = ticket.need
        if need is None:
            return True
        return bool(filter_by_version(need, self._door.fleet.candidates(need.model, need.mask)))

    async def _wait(self, ticket: _Ticket, why: HttpError) -> None:
        """`why` it can't go now. Raises HttpError where there is no place or its time is over."""
        door, conn, mine = self._door, ticket.conn, ticket.mine
        server = door.config.server
        if self.waiting >= server.queue_size:
            door.rejected += 1
            full = f"the queue is full: {self.waiting} requests wait"
            raise _overloaded(why, full, "queue_full", server.overload_status)
        if conn.client.peer_closed and door.half_close_aborts:
            raise ClientDisconnected
        began = conn.loop.now
        self._join(ticket)
        timeout_secs = server.queue_timeout_secs or inf
        conn.clock("queue", timeout_secs - mine.queued_secs)
        try:
            while not ticket.granted:
                conn.waiting_on = ticket
                await pause
        except PhaseTimeout:
            if conn.deadline <= conn.loop.now:
                raise
            door.rejected += 1
            late = f"waited {timeout_secs:g} s in the queue"
            raise _overloaded(why, late, "queue_timeout", _late_status(why, server)) from None
        finally:
            mine.queued_secs += conn.loop.now - began
            if not ticket.granted:
                self._drop(ticket)

    def _join(self, ticket: _Ticket) -> None:
        self._made += 1
        ticket.number = self._made
        if not self.waiting:
            self._names_models = self._door.fleet.has_named_models
        self._place(ticket)
        self.waiting += 1
        self.peak_waiting = max(self.peak_waiting, self.waiting)

    def _place(self, ticket: _Ticket) -> None:
        """Behind those that wait for the same."""
        key = _key_of(ticket.need, names_models=self._names_models)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(key)
            if self._could_ever(ticket):
                self._sweep_out()
                heappush(self._full, (ticket.number, line))
            else:
                self._aside.add(line)
        line.tickets[ticket.number] = ticket
        ticket.line = line

    def _sweep_out(self) -> None:
        """Lines that everybody has left, while nothing ends and no round comes across them."""
        if len(self._full) > 2 * len(self._lines) + SPARE_ENTRIES:
            self._full = [entry for entry in self._full if entry[1].tickets]
            heapify(self._full)

    def _drop(self, ticket: _Ticket) -> None:
        """It waits no longer. Its line's place in the heap is mended when it is come across."""
        line = ticket.line
        del line.tickets[ticket.number]
        self.waiting -= 1
        if not line.tickets:
            del self._lines[line.key]
            self._aside.discard(line)


def _key_of(need: Requirements | None, *, names_models: bool) -> Hashable:
    """Equal for all whom the same workers could take; a model counts where a worker names one."""
    if need is None:
        return None
    model = need.model if names_models else None
    place = need.pinning if need.pinning is not UNPINNED else ""
    return model, need.mask, place, need.named_worker, need.version_constraint


def _late_status(why: HttpError, server: ServerConfig) -> int:
    """Of a wait that was too long. Where no worker was there to be waited for, the fleet is out of
    order, not busy: that is 503 for everybody."""
    busy = why.code == "all_full" or not isinstance(why.code, str)
    return 408 if busy and server.overload_status == 429 else 503


def _overloaded(why: HttpError, waited: str, reason: str, status: int) -> HttpError:
    """The error of omni-router.md 10; where a worker is missing, that stays its reason."""
    missing = reason == "queue_timeout" and isinstance(why.code, str)
    return HttpError(
        status, f"{why.message}; {waited}", status,
        close=why.close, type="overloaded_error", reason=why.code if missing else reason,
    ).with_headers(("retry-after", "1"))  # fmt: skip

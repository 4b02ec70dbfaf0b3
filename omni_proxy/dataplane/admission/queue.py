"""The admission queue: requests that wait for a slot of the fleet, or for a worker.

Contract: a waiter is a paused connection task. Each event that frees a slot (an exchange that ends,
a change of the fleet or of a limit) calls `serve`, which assigns it immediately: the worker is
acquired and counted before the waiter runs. So a slot that a new request finds is one that no
waiter can use, and no request overtakes one that waits for the same workers (FIFO). A blocked line
does not block another. A request whose session waits for a worker is in the line of that worker.
Requests of callers with a priority are ordered by priority and waiting time (`_order`); their order
does not change while they wait.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

from omni_proxy.config.schema import ServerConfig
from omni_proxy.dataplane.admission.inflight import InFlight
from omni_proxy.dataplane.admission.update_gate import UpdateGate
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.loop.stream import IoTask
from omni_proxy.dataplane.loop.task import PhaseTimeout, pause
from omni_proxy.dataplane.settings import Settings
from omni_proxy.dataplane.upstream.balancer import Balancer
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.routes import UNPINNED
from omni_proxy.wire.errors import HttpError

# Codes of errors that may be temporary, so that a request waits.
WEIGHT_CODES: Final = frozenset(("weights_updating", "paused", "weights_uncertain"))
WAITABLE_CODES: Final = WEIGHT_CODES | {
    "all_disabled", "all_held", "none_healthy", "all_full", "no_workers",
    "weight_version_unavailable", "weight_versions_differ", "no_prefill_worker",
    "no_decode_worker",
}  # fmt: skip


MAX_STALE_ENTRIES: Final = 64


Order = tuple[float, float, int]  # sort key of a waiter, lowest first; the last item is its number


def _order(priority: int, aging_secs: float, now: float, number: int) -> Order:
    """With aging, each level of priority equals `aging_secs` of waiting, so no request waits for
    ever."""
    if not aging_secs:
        return -priority, now, number
    return 0, now - priority * aging_secs, number


class _Line:
    """The waiters with equal requirements, which `key` identifies. `entry`: number of the line's
    current entry in `Queue._full`; entries with another number are stale."""

    __slots__ = ("_heap", "entry", "key", "waiters")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.entry = 0
        self.waiters: dict[Order, _Waiter] = {}
        self._heap: list[Order] = []  # may contain waiters that have left

    def add(self, waiter: _Waiter) -> None:
        self.waiters[waiter.order] = waiter
        heappush(self._heap, waiter.order)

    @property
    def first(self) -> Order:
        heap, waiters = self._heap, self.waiters
        while heap[0] not in waiters:
            heappop(heap)
        return heap[0]


_NO_LINE: Final = _Line(())


class _Waiter:
    """One waiter. `need`: None if it waits for a slot before its body is read."""

    __slots__ = ("admitted", "exchange", "io", "line", "need", "order", "since", "tried")

    def __init__(self, io: IoTask, exchange: Exchange, need: Requirements | None) -> None:
        self.io = io
        self.exchange = exchange
        self.need = need
        self.tried: Collection[Worker] = ()
        self.order: Order = (0.0, 0.0, 0)
        self.since = 0.0
        self.line = _NO_LINE
        self.admitted = False


class Queue:
    """All waiters of a data plane; `waiting`: their number."""

    def __init__(
        self,
        fleet: Fleet,
        settings: Settings,
        inflight: InFlight,
        balancer: Balancer,
        update_gate: UpdateGate,
    ) -> None:
        self.waiting = 0
        self.peak_waiting = 0
        self._fleet = fleet
        self._settings = settings
        self._inflight = inflight
        self._balancer = balancer
        self._update_gate = update_gate
        self._last_number = 0
        self._lines: dict[Hashable, _Line] = {}
        # Each line is in one of two: `_full`, ordered by first waiters, if some eligible worker has
        # no free slot; `_blocked` if no worker is eligible until the fleet changes.
        self._full: list[tuple[Order, int, _Line]] = []
        self._last_entry = 0
        self._aging_secs = 0.0
        self._blocked: set[_Line] = set()
        self._names_models = False
        self._serving = False
        self._changed = False

    async def wait_for_slot(self, io: IoTask, exchange: Exchange, *, unread: bool) -> None:
        """Wait for a slot of [server] max_inflight, and take it.

        Without a queue it raises HttpError `overload_status` immediately (note:omni-router 10).
        Raises HttpError, ClientDisconnected, PhaseTimeout.
        """
        if self._inflight.admit(exchange):
            return
        server = self._settings.config.server
        over = HttpError(
            server.overload_status, "router overloaded: max in-flight requests reached",
            server.overload_status, close=unread, type="overloaded_error", reason="max_inflight",
        ).with_headers(("retry-after", "1"))  # fmt: skip
        if not server.queue_size:
            self._inflight.rejected += 1
            raise over
        await self._wait(_Waiter(io, exchange, None), over)

    async def wait_for_worker(
        self, io: IoTask, exchange: Exchange, error: HttpError, tried: Collection[Worker] = ()
    ) -> Worker:
        """Wait for a worker, and acquire it. `error`: why none is available now.

        The request releases its slot of `max_inflight` while it waits. Raises HttpError,
        ClientDisconnected, PhaseTimeout.
        """
        if error.code in WEIGHT_CODES and exchange.requirements is not None:
            self._update_gate.check(exchange.requirements, error)
        server = self._settings.config.server
        if not server.queue_size or error.code not in WAITABLE_CODES:
            if error.code == "all_full":
                error.status = server.overload_status
            raise error
        self._inflight.dismiss(exchange, holds_bytes=True)
        self.serve()
        waiter = _Waiter(io, exchange, exchange.requirements)
        waiter.tried = tried
        await self._wait(waiter, error)
        assert exchange.worker is not None
        return exchange.worker

    def serve(self, *, changed: bool = False) -> None:
        """Admit all waiters that a worker can take. `changed`: the fleet or a limit has changed, so
        blocked lines are tried too."""
        if not self.waiting:
            return
        self._changed |= changed
        if self._serving:
            return  # admitting has changed the fleet: the running round continues
        self._serving = True
        try:
            self._admit_waiters()
            while self._changed:
                self._admit_waiters()
        finally:
            self._serving = False

    def _admit_waiters(self) -> None:
        if self._changed:
            self._changed = False
            self._requeue_all()
        full, skipped = self._full, []
        while full and self._inflight.has_slot():
            order, entry, line = heappop(full)
            if not line.waiters or entry != line.entry:
                continue
            if line.first != order:  # its first waiter has left the queue
                self._push(line)
            elif self._admit(line.waiters[order]) or self._hold_for_session(line.waiters[order]):
                if line.waiters:
                    self._push(line)
            elif self._has_eligible_worker(line.waiters[order]):
                skipped.append(line)
            else:
                self._blocked.add(line)
        for line in skipped:
            self._push(line)

    def _push(self, line: _Line) -> None:
        """Add the line to `_full`, ordered by its first waiter."""
        self._last_entry = line.entry = self._last_entry + 1
        heappush(self._full, (line.first, line.entry, line))

    def _requeue_all(self) -> None:
        """Move blocked lines to `_full`; rebuild all lines if their keys or order have changed."""
        aging_secs = self._settings.config.server.priority_aging_secs
        if self._names_models == self._fleet.has_named_models and aging_secs == self._aging_secs:
            for line in self._blocked:
                self._push(line)
            self._blocked.clear()
            return
        waiters = [waiter for line in self._lines.values() for waiter in line.waiters.values()]
        self._lines.clear()
        self._full.clear()
        self._blocked.clear()
        self._names_models = self._fleet.has_named_models
        self._aging_secs = aging_secs
        for waiter in waiters:
            waiter.order = self._order_of(waiter, waiter.order[-1])
        for waiter in sorted(waiters, key=lambda waiter: waiter.order):
            self._add_to_line(waiter)

    def _admit(self, waiter: _Waiter) -> bool:
        exchange, need = waiter.exchange, waiter.need
        try:
            if need is not None and not self._balancer.is_eligible(need):
                return False
            if not self._inflight.admit(exchange):
                return False
            if need is not None:
                self._balancer.acquire(exchange, waiter.tried)
        except HttpError:  # its worker was removed, or another process was faster
            self._inflight.dismiss(exchange, holds_bytes=True)
            return False
        self._remove(waiter)
        waiter.admitted = True
        waiter.io.clear_timeout()  # it is admitted, and runs in the next iteration
        waiter.io.loop.wake(waiter.io)
        return True

    def _hold_for_session(self, waiter: _Waiter) -> bool:
        """Move the waiter to the line of its session's worker if that worker has been cordoned for
        its weights since. Returns whether it moved."""
        key, line = self._key(waiter.need), waiter.line
        if key == line.key or self._held_worker(waiter.need) is None:
            return False
        del line.waiters[waiter.order]
        if not line.waiters:
            del self._lines[line.key]
        self._add_to_line(waiter)
        return True

    def _held_worker(self, need: Requirements | None) -> Worker | None:
        return self._balancer.held_worker(need) if need is not None else None

    def _key(self, need: Requirements | None) -> Hashable:
        return _line_key(need, self._held_worker(need), names_models=self._names_models)

    def _has_eligible_worker(self, waiter: _Waiter) -> bool:
        """Whether an eligible worker only lacks a free slot."""
        need = waiter.need
        if need is None:
            return True
        if self._held_worker(need) is not None:
            return False
        return self._balancer.could_take(need)

    async def _wait(self, waiter: _Waiter, error: HttpError) -> None:
        """`error`: why the request must wait. Raises HttpError if the queue is full, or after a
        timeout."""
        io, exchange = waiter.io, waiter.exchange
        server = self._settings.config.server
        if self.waiting >= server.queue_size:
            self._inflight.rejected += 1
            full = f"the queue is full: {self.waiting} requests wait"
            raise _overloaded(error, full, "queue_full", server.overload_status)
        io.check_client(half_close_aborts=self._settings.half_close_aborts)
        started_at = io.loop.now
        self._enqueue(waiter)
        timeout_secs = server.queue_timeout_secs or inf
        io.set_timeout("queue", timeout_secs - exchange.queued_secs)
        try:
            while not waiter.admitted:
                io.waiting_on = waiter
                await pause
        except PhaseTimeout:
            if io.deadline <= io.loop.now:
                raise
            self._inflight.rejected += 1
            reason_text = f"waited {timeout_secs:g} s in the queue"
            raise _overloaded(
                error, reason_text, "queue_timeout", _timeout_status(error, server)
            ) from None
        finally:
            exchange.queued_secs += io.loop.now - started_at
            if exchange.trace is not None:
                exchange.trace.add_wait(started_at, io.loop.now)
            if not waiter.admitted:
                self._remove(waiter)

    def _enqueue(self, waiter: _Waiter) -> None:
        self._last_number += 1
        waiter.since = waiter.io.loop.now - waiter.exchange.queued_secs
        if not self.waiting:
            self._names_models = self._fleet.has_named_models
            self._aging_secs = self._settings.config.server.priority_aging_secs
        waiter.order = self._order_of(waiter, self._last_number)
        self._add_to_line(waiter)
        self.waiting += 1
        self.peak_waiting = max(self.peak_waiting, self.waiting)

    def _order_of(self, waiter: _Waiter, number: int) -> Order:
        caller = waiter.exchange.caller
        priority = caller.priority if caller is not None else 0
        return _order(priority, self._aging_secs, waiter.since, number)

    def _add_to_line(self, waiter: _Waiter) -> None:
        """Add the waiter to the line of its requirements."""
        key = self._key(waiter.need)
        line, is_new = self._lines.get(key), False
        if line is None:
            line, is_new = self._lines.setdefault(key, _Line(key)), True
        line.add(waiter)
        waiter.line = line
        if is_new and not self._has_eligible_worker(waiter):
            self._blocked.add(line)
        elif is_new or (line.first == waiter.order and line not in self._blocked):
            self._drop_stale_entries()
            self._push(line)

    def _drop_stale_entries(self) -> None:
        """Remove stale entries from `_full` if there are many, also those of empty lines."""
        if len(self._full) > 2 * len(self._lines) + MAX_STALE_ENTRIES:
            self._full = [
                entry for entry in self._full if entry[2].waiters and entry[1] == entry[2].entry
            ]
            heapify(self._full)

    def _remove(self, waiter: _Waiter) -> None:
        """Remove the waiter. Its line's entry in `_full` is corrected in a later round."""
        line = waiter.line
        del line.waiters[waiter.order]
        self.waiting -= 1
        if not line.waiters:
            del self._lines[line.key]
            self._blocked.discard(line)


def _line_key(
    need: Requirements | None, held_worker: Worker | None, *, names_models: bool
) -> Hashable:
    """A key that is equal for requests that the same workers can take. The model counts only if
    some worker has one. `held_worker`: the cordoned worker that the request's session waits for."""
    if need is None:
        return None
    model = need.asked_model if names_models else None
    place = need.pinning if need.pinning is not UNPINNED else ""
    where = (place, need.named_worker, need.dp_rank)
    return model, need.mask, where, need.version_constraint, held_worker, need.legs


def _timeout_status(error: HttpError, server: ServerConfig) -> int:
    """The status after a timeout in the queue. If no worker is in rotation, the fleet is not busy
    but unavailable: then it is 503 whatever is configured."""
    busy = error.code == "all_full" or not isinstance(error.code, str)
    return 408 if busy and server.overload_status == 429 else 503


def _overloaded(error: HttpError, waited: str, reason: str, status: int) -> HttpError:
    """The error of SGLang-Omni's router (note:omni-router 10). After a timeout without a worker in
    rotation, the reason is `error.code`."""
    missing = reason == "queue_timeout" and isinstance(error.code, str)
    return HttpError(
        status, f"{error.message}; {waited}", status,
        close=error.close, type="overloaded_error", reason=error.code if missing else reason,
    ).with_headers(("retry-after", "1"))  # fmt: skip

"""What follows a try that came to nothing: another worker, the same after a pause, or the end.

Contract: made only once a try has failed, so that a request that goes well pays nothing. Nothing
has left for the client. Who is tried next is taken already when a method returns it. An answer
whose status is retried is held, its connection open, until another worker has been found: else it
goes to the client as is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from omni_proxy.backoff import exponential_delay
from omni_proxy.dataplane.exchange.exchange import Exchange, report
from omni_proxy.dataplane.loop.task import ClientDisconnected
from omni_proxy.dataplane.upstream.acquire import leave, take
from omni_proxy.dataplane.upstream.attempt import ResponseStart
from omni_proxy.fleet.worker import FAILED, Worker
from omni_proxy.routing.pick import eligible_workers
from omni_proxy.wire.errors import HttpError

if TYPE_CHECKING:
    from omni_proxy.dataplane.downstream.connection import Connection

CHANCES: Final = 1000


class RetryState:
    """The failed tries of one request."""

    __slots__ = ("_body_bytes", "_conn", "_counted", "_mine", "_pauses", "_workers")

    def __init__(self, conn: Connection, mine: Exchange, body_bytes: int) -> None:
        self._conn = conn
        self._mine = mine
        self._body_bytes = body_bytes
        self._workers: set[Worker] = set()
        self._counted: set[Worker] = set()  # whose statuses were reported as failures
        self._pauses = 0

    async def after(self, kind: str, refusal: HttpError) -> Worker:
        """The worker of the next try. Raises `refusal` where there is none; ClientDisconnected, Expired."""
        mine, worker = self._mine, self._mine.worker
        assert worker is not None
        self._note(worker, kind)
        if not self._allowed(kind):
            raise refusal
        upload = self._conn.upload
        if upload is not None and upload.poured:
            refusal.message += "; not tried again: its body was not kept, since it is large"
            raise refusal
        if self._too_large():
            keep = self._conn.door.config.routing.retry_body_bytes
            refusal.message += f"; not tried again: its body is larger than {keep} bytes"
            raise refusal
        self._give_up(worker)
        await self._pause()
        try:
            return take(self._conn.door, mine, self._workers)
        except HttpError as nobody:
            return await self._held(nobody, refusal)

    async def after_answer(self, first: ResponseStart) -> Worker | None:
        """The same for an answer of 400 and above; None where the client shall get it as it is."""
        conn, mine, worker = self._conn, self._mine, self._mine.worker
        assert worker is not None
        status = first.answer.status
        self._count(worker, status)
        outcome = str(status)
        if not self._allowed(outcome) or self._too_large() or conn.upload is not None:
            return None
        self._give_up(worker)
        await self._pause()
        try:
            found = take(conn.door, mine, self._workers)
        except HttpError:
            return None
        self._note(worker, outcome)
        _let_go(conn, first)
        return found

    def _count(self, worker: Worker, status: int) -> None:
        """Let health know of a status that says that the worker failed (`counts_as_failed`).

        Once for each worker that this request was sent to: else a request that no worker can
        answer would eject one by its own repetitions.
        """
        if not counts_as_failed(status, self._conn.door.config.routing.retry_on):
            return
        if worker not in self._counted:
            self._counted.add(worker)
            report(self._conn, self._mine, worker, f"status={status}", status)

    def _allowed(self, kind: str) -> bool:
        routing = self._conn.door.config.routing
        allowed = tries_allowed(routing.max_total_retries)
        return may_retry(kind, self._mine.attempts, allowed, routing.retry_on)

    def _too_large(self) -> bool:
        return self._body_bytes > self._conn.door.config.routing.retry_body_bytes

    def _note(self, worker: Worker, outcome: str) -> None:
        mine = self._mine
        mine.tried = [*(mine.tried or ()), (worker, outcome)]

    def _give_up(self, worker: Worker) -> None:
        self._workers.add(worker)
        leave(self._conn.door, self._mine, FAILED)
        self._conn.door.queue.serve()

    async def _pause(self) -> None:
        """Only where all who could take it have been tried: they get a moment."""
        conn, need = self._conn, self._mine.need
        door = conn.door
        assert need is not None
        left = eligible_workers(door.fleet, need, door.voice_owner)
        if not left or not self._workers.issuperset(left):
            return
        if conn.client.peer_closed and door.half_close_aborts:
            raise ClientDisconnected
        conn.phase, conn.phase_deadline = "backoff", conn.deadline
        await door.timers.sleep(conn, pause_secs(self._pauses, door.below(CHANCES) / CHANCES))
        self._pauses += 1

    async def _held(self, nobody: HttpError, refusal: HttpError) -> Worker:
        """Nobody is left: wait for one, if that is allowed. What failed says more than that."""
        queue = self._conn.door.queue
        try:
            return await queue.wait_for_worker(self._conn, self._mine, nobody, self._workers)
        except HttpError:
            raise refusal from None


def _let_go(conn: Connection, first: ResponseStart) -> None:
    """Of an answer that nobody will see; its connection is kept where it has ended."""
    answer, up = first.answer, first.up
    conn.upstream = None
    if answer.whole and answer.keep_alive and first.all_sent and not answer.excess:
        first.lane.give_back(up)
    else:
        up.close()


# When a failed try may be made again, and after which pause.
#
# Invariant: never after the first relayed byte; the caller asks only before it. A connection that was
# kept idle and broke before any answer byte is redialled once without costing a try: its worker most
# likely closed it before it saw the request (RFC 9112 9.3.1).

FIRST_PAUSE_SECS: Final = 0.05
LONGEST_PAUSE_SECS: Final = 1.0


def tries_allowed(max_total_retries: int) -> int:
    """`max_total_retries` counts the tries of one request in all; 0 and 1 mean a single one."""
    return max(1, max_total_retries)


def may_retry(failure: str, made: int, allowed: int, retry_on: Collection[str]) -> bool:
    """`failure` is a name of `retry_on`; `made` tries of `allowed` are spent."""
    return made < allowed and failure in retry_on


def counts_as_failed(status: int, retry_on: Collection[str]) -> bool:
    """Whether a worker's answer with this status counts against it.

    A gateway's 502 and 504 always do. A 503 says "busy", which is no failure. Of other 5xx those
    do that are retried: whoever retries a 500 holds it for a failure of the worker.
    """
    if status < 500 or status == 503:
        return False
    return status in (502, 504) or str(status) in retry_on


def pause_secs(made: int, chance: float) -> float:
    """Before a worker is asked again, `made` such pauses after the first; `chance` is in [0, 1).

    Doubles from 50 ms to 1 s; half of it is left to chance, so that those who failed together
    don't come back together.
    """
    whole = exponential_delay(made, FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS)
    return max(FIRST_PAUSE_SECS, whole * (0.5 + 0.5 * chance))

"""Retries: which failed attempts may be repeated, after which back-off, and at which worker.

Invariant: nothing has been sent to the client yet. A worker that a method returns is already
acquired. A response whose status is retried is kept, with its connection open, until another worker
is acquired; if none can be, the client gets it. RetryState is created only after a failed attempt,
so that successful requests don't pay for it.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import Final

from omni_proxy.dataplane.attempt.outlier_reports import FailedStatuses
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange_io import ExchangeIO
from omni_proxy.dataplane.upstream.pool import ResponseStart
from omni_proxy.fleet.worker import FAILED, Worker
from omni_proxy.shared.backoff import exponential_delay
from omni_proxy.wire.aborted_reply import CODE as ABORTED
from omni_proxy.wire.errors import HttpError

CHANCES: Final = 1000
FIRST_PAUSE_SECS: Final = 0.05
MAX_PAUSE_SECS: Final = 1.0


class RetryState:
    """The failed attempts of one request. `body_bytes`: the size of its body."""

    __slots__ = ("_body_bytes", "_exchange", "_io", "_pauses", "_statuses", "_tried")

    def __init__(self, io: ExchangeIO, exchange: Exchange, body_bytes: int) -> None:
        self._io = io
        self._exchange = exchange
        self._body_bytes = body_bytes
        self._tried: set[Worker] = set()
        self._statuses = FailedStatuses()
        self._pauses = RetryPauses(io, exchange)

    def report_status(self, worker: Worker, status: int) -> None:
        """A response of `worker` had this status; it may be one that counts as a failure."""
        self._statuses.report(self._io.services, self._exchange, worker, status)

    async def next_worker(self, failure: str, error: HttpError) -> Worker:
        """The worker of the next attempt. Raises `error` if there is none, ClientDisconnected,
        PhaseTimeout."""
        worker = self._exchange.worker
        assert worker is not None
        target = self._exchange.rank or worker
        self._exchange.add_failed_attempt(target, failure, self._io.loop.now)
        if not self._is_allowed(failure):
            raise error
        body_stream = self._io.body_stream
        if body_stream is not None and body_stream.was_streamed:
            error.message += "; not retried: its body was streamed because it is large"
            raise error
        if self._is_too_large():
            max_bytes = self._io.settings.config.routing.retry_body_bytes
            error.message += f"; not retried: its body is larger than {max_bytes} bytes"
            raise error
        self._release(worker)
        await self._pauses.pause(self._tried)
        try:
            return self._acquire()
        except HttpError as no_worker:
            return await queue_for_retry(self._io, self._exchange, self._tried, no_worker, error)

    async def worker_after_response(self, start: ResponseStart) -> Worker | None:
        """As `next_worker`, for a response with status 400 and above; None if the client must get
        it."""
        io, exchange, worker = self._io, self._exchange, self._exchange.worker
        assert worker is not None
        self.report_status(worker, start.response.status)
        failure = str(start.response.status)
        if not self._is_allowed(failure) or self._is_too_large() or io.body_stream is not None:
            return None
        target = exchange.rank or worker
        self._release(worker)
        await self._pauses.pause(self._tried)
        try:
            another = self._acquire()
        except HttpError:
            return None
        exchange.add_failed_attempt(target, failure, io.loop.now)
        io.upstream = None
        start.release()
        return another

    def _acquire(self) -> Worker:
        """Acquire a worker for the next attempt. Raises HttpError."""
        exchange = self._exchange
        worker = self._io.services.balancer.acquire(exchange, self._tried)
        if exchange.rank is None:
            exchange.last_rank = None  # of an earlier attempt, which may be at this worker
        return worker

    def _is_allowed(self, failure: str) -> bool:
        routing = self._io.settings.config.routing
        allowed = allowed_attempts(routing.max_total_retries)
        return may_retry(failure, self._exchange.attempts, allowed, routing.retry_on)

    def _is_too_large(self) -> bool:
        return self._body_bytes > self._io.settings.config.routing.retry_body_bytes

    def _release(self, worker: Worker) -> None:
        self._tried.add(worker)
        if self._exchange.rank is not None:
            self._tried.add(self._exchange.rank)
        self._io.services.balancer.release(self._exchange, worker, FAILED)
        self._io.services.queue.serve()


class RetryPauses:
    """The pauses between the attempts of one request."""

    __slots__ = ("_exchange", "_io", "_made")

    def __init__(self, io: ExchangeIO, exchange: Exchange) -> None:
        self._io = io
        self._exchange = exchange
        self._made = 0

    async def pause(self, tried: Collection[Worker]) -> None:
        """Pause if every worker that could take the request has been tried. Raises
        ClientDisconnected, PhaseTimeout."""
        io, need = self._io, self._exchange.requirements
        services = io.services
        assert need is not None
        if not services.balancer.all_tried(need, tried):
            return
        io.check_client(half_close_aborts=io.settings.half_close_aborts)
        io.set_timeout("backoff", inf)
        secs = pause_secs(self._made, services.random_below(CHANCES) / CHANCES)
        self._made += 1
        await services.timers.sleep(io, secs)


async def queue_for_retry(
    io: ExchangeIO,
    exchange: Exchange,
    tried: Collection[Worker],
    no_worker: HttpError,
    failure: HttpError,
) -> Worker:
    """Wait in the admission queue, if it is on, after an attempt that failed with `failure`.

    Raises `failure` if no worker became free: it explains more than the queue's own error, except
    for an abort of the request.
    """
    try:
        return await io.services.queue.wait_for_worker(io, exchange, no_worker, tried)
    except HttpError as error:
        raise error if error.code == ABORTED else failure from None


def allowed_attempts(max_total_retries: int) -> int:
    """The maximum number of attempts of one request; 0 and 1 both allow one."""
    return max(1, max_total_retries)


def may_retry(failure: str, attempts: int, allowed: int, retry_on: Collection[str]) -> bool:
    """`failure`: a name as in `retry_on`. `attempts`: how many attempts of `allowed` were made."""
    return attempts < allowed and failure in retry_on


def pause_secs(pauses: int, chance: float) -> float:
    """The pause before another attempt, in seconds. `pauses`: how many preceded it. `chance`:
    random, in [0, 1).

    It doubles from 50 ms to 1 s. Up to half of it is random, so that requests that failed together
    are not retried together.
    """
    whole = exponential_delay(pauses, FIRST_PAUSE_SECS, MAX_PAUSE_SECS)
    return max(FIRST_PAUSE_SECS, whole * (0.5 + 0.5 * chance))

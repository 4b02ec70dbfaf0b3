"""After a failed pair: acquires another pair, falls back to the decode worker, or gives up.

Contract: nothing has been sent to the client, and both legs have ended. The next pair is acquired
when `after` returns None. A worker is reported to outlier ejection only for its own failures, never
for one of the transfer; the prefill leg reports its own. Source: note:features 2.4, 2.6.
"""

from __future__ import annotations

from omni_proxy.dataplane.attempt.attempt import STALE_CONNECTION
from omni_proxy.dataplane.attempt.outlier_reports import FailedStatuses, report_failure
from omni_proxy.dataplane.attempt.retry import (
    RetryPauses,
    allowed_attempts,
    may_retry,
    queue_for_retry,
)
from omni_proxy.dataplane.attempt.side_task import HeldResponse
from omni_proxy.dataplane.disaggregation.prefill_leg import PairFailed
from omni_proxy.dataplane.exchange.exchange import Exchange, TwoLegs
from omni_proxy.dataplane.exchange_io import ExchangeIO
from omni_proxy.fleet.worker import FAILED, Worker
from omni_proxy.wire.errors import HttpError


class PairRetry:
    """The failed pairs of one request."""

    __slots__ = (
        "_body_bytes", "_exchange", "_io", "_pauses", "_reported", "_transfers", "_tried",
        "statuses",
    )  # fmt: skip

    def __init__(self, io: ExchangeIO, exchange: Exchange) -> None:
        self._io = io
        self._exchange = exchange
        self._body_bytes = len(exchange.body)
        self._tried: set[Worker] = set()
        self.statuses = FailedStatuses()  # of both legs
        self._reported: set[Worker] = set()  # decode workers with another failure; once for each
        self._pauses = RetryPauses(io, exchange)
        self._transfers = 0  # failed KV transfers

    async def after(self, failure: PairFailed) -> HeldResponse | None:
        """The response for the client; None if the request continues with the workers that the
        exchange has acquired. Raises HttpError, ClientDisconnected, PhaseTimeout."""
        is_stale = failure.kind == STALE_CONNECTION
        if not is_stale:
            self._record_failure(failure)
            if not self._may_retry(failure):
                return None if self._falls_back(failure) else self._give_up(failure)
        worker = self._exchange.worker
        assert worker is not None
        balancer = self._io.services.balancer
        balancer.release(self._exchange, worker, FAILED)
        if self._exchange.legs is not None:
            balancer.release_prefill(self._exchange.legs)
        self._io.services.queue.serve()
        if is_stale:
            self._exchange.attempts -= 1  # not counted, like the redial of a plain request
        else:
            await self._pauses.pause(self._tried)
        try:
            balancer.acquire(self._exchange, self._tried)
        except HttpError as error:
            if failure.response is not None:
                return failure.response
            await queue_for_retry(
                self._io, self._exchange, self._tried, error, failure.as_http_error()
            )
        self._keep_counts("" if is_stale else failure.kind)
        return None

    def _record_failure(self, failure: PairFailed) -> None:
        """Record the failure, and report it to outlier ejection if the decode worker caused it."""
        exchange, services = self._exchange, self._io.services
        exchange.add_failed_attempt(failure.worker, failure.kind, self._io.loop.now)
        if failure.is_transfer:
            if failure.kind != "weights_changed":
                self._transfers += 1
                self._tried.update(self._both_workers())
                self._keep_counts()
            return
        self._tried.add(failure.worker)
        if failure.leg == "prefill" or failure.error is not None:
            return
        if failure.response is not None:
            self.statuses.report(services, exchange, failure.worker, failure.status)
        elif failure.worker not in self._reported:
            self._reported.add(failure.worker)
            report_failure(services.fleet, exchange, failure.worker, str(failure))

    def _both_workers(self) -> list[Worker]:
        legs = self._exchange.legs
        prefill = legs.prefill if legs is not None else None
        both = (self._exchange.worker, prefill.last_worker if prefill is not None else None)
        return [worker for worker in both if worker is not None]

    def _keep_counts(self, kind: str = "") -> None:
        """Copy the counts to the current legs. `kind`: of the failure before them."""
        legs = self._exchange.legs
        if legs is not None:
            legs.transfer_failures = self._transfers
            if kind and legs.fallback == "fallback":
                legs.fallback = kind

    def _falls_back(self, failure: PairFailed) -> bool:
        """Let the decode worker compute the prompt, if that is allowed after this failure. Returns
        whether it does."""
        exchange = self._exchange
        legs, allowed = exchange.legs, self._io.settings.config.routing.disaggregation.fallback
        if legs is None or legs.connector == "sglang" or allowed != "decode":
            return False
        if failure.leg != "prefill" or failure.error is not None:
            return False
        if failure.response is not None and failure.status < 500:
            return False
        self._io.services.balancer.release_prefill(legs)
        exchange.legs = TwoLegs(legs.connector, None, fallback=failure.kind)
        self._keep_counts()
        return True

    def _may_retry(self, failure: PairFailed) -> bool:
        routing = self._io.settings.config.routing
        if failure.error is not None or self._body_bytes > routing.retry_body_bytes:
            return False
        allowed = allowed_attempts(routing.max_total_retries)
        if failure.kind == "weights_changed":
            return self._exchange.attempts < allowed
        kinds = [failure.kind]
        # The engines ended the request, which is equivalent to a broken connection.
        if failure.is_transfer and failure.kind != "response_timeout":
            kinds.append("reset_before_response")
        return any(
            may_retry(kind, self._exchange.attempts, allowed, routing.retry_on) for kind in kinds
        )

    def _give_up(self, failure: PairFailed) -> HeldResponse:
        if failure.response is not None:
            return failure.response
        raise failure.as_http_error()

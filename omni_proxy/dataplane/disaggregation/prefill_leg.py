"""The prefill leg of a request: sends it to the prefill worker, and reads the response.

Contract: the leg counts as in flight at its worker until its own last byte, and is released exactly
once. A failure is reported to outlier ejection only for this worker, and not if the KV transfer
failed. No byte of its response is sent to the client from here. On the fast path (`send_directly`)
it has no coroutine unless its response differs from the worker's last one. Source:
note:features 2.6.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, Literal, Protocol

import msgspec

from omni_proxy.dataplane.attempt.attempt import (
    STALE_CONNECTION,
    AttemptFailed,
    SentRequest,
    encode_request,
    read_complete_response,
    run_attempt,
)
from omni_proxy.dataplane.attempt.outlier_reports import (
    FailedStatuses,
    report_failure,
    report_success,
)
from omni_proxy.dataplane.attempt.side_task import (
    HeldResponse,
    SideTask,
    hold_response,
    read_body,
)
from omni_proxy.dataplane.exchange.exchange import Exchange, TwoLegs
from omni_proxy.dataplane.exchange_io import ExchangeIO
from omni_proxy.dataplane.loop.event_loop import EventLoop, Steppable
from omni_proxy.dataplane.loop.stream import READ_BYTES, Stream
from omni_proxy.dataplane.loop.task import PhaseTimeout
from omni_proxy.dataplane.upstream.pool import UpstreamPool
from omni_proxy.dataplane.upstream.response_reports import learn_from, prediction_of_leg
from omni_proxy.fleet.worker import FAILED, SUCCEEDED, Worker
from omni_proxy.routing.cache_prediction import CachePrediction
from omni_proxy.wire.errors import HttpError, UpstreamError
from omni_proxy.wire.request import RequestHead
from omni_proxy.wire.response import UpstreamProtocolError

MAX_ERROR_BYTES: Final = 1024 * 1024
MAX_KEPT_BYTES: Final = 64 * 1024 * 1024  # log probabilities of a long prompt
LOOK_BYTES: Final = 16384  # searched in an error's text
# SGLang: `KVTransferError` (disaggregation/base), "Failed to get bootstrap", "bootstrap room", the
# session errors of its Mooncake and NIXL backends. vLLM: the classes and log lines of its NIXL and
# Mooncake connectors, "handshake", "KV load failure" (kv_load_failure_policy).
MARKS: Final = (
    "KVTransferError", "kv transfer", "kv_transfer", "KV load", "KVPoll", "bootstrap", "handshake",
    "nixl", "mooncake", "remote_block_ids", "prefill instance", "decode instance",
)  # fmt: skip
_MARKS: Final = re.compile(b"|".join(re.escape(mark.encode()) for mark in MARKS), re.IGNORECASE)
_ERROR_EVENT: Final = re.compile(
    rb'^data: ?\{.{0,400}?"error" *+: *+(?!null)', re.MULTILINE | re.DOTALL
)

Leg = Literal["prefill", "decode"]


class PairFailed(UpstreamError):
    """A leg of a pair has failed. `kind`: as in `retry_on`, or "kv_transfer". `status`: for the
    client. `response`: the worker's error response, if it sent one. `error`: an error of the proxy
    itself. `is_transfer`: neither worker caused it."""

    def __init__(self, leg: Leg, worker: Worker, kind: str, error: str, status: int = 502) -> None:
        super().__init__(error)
        self.leg = leg
        self.worker = worker
        self.kind = kind
        self.status = status
        self.response: HeldResponse | None = None
        self.error: HttpError | None = None
        self.is_transfer = False

    def as_http_error(self) -> HttpError:
        if self.error is not None:
            return self.error
        message = f"the {self.leg} worker {self.worker.url} failed: {self}"
        return HttpError(self.status, f"upstream request failed: {message}", self.kind)


def failure_of_response(
    leg: Leg, worker: Worker, response: HeldResponse, status: int
) -> PairFailed:
    """The failure of a leg whose response has status 400 or above."""
    failure = PairFailed(leg, worker, str(status), f"status={status}", status)
    failure.response = response
    failure.is_transfer = names_transfer(status, response.chunk)
    return failure


# Errors of KV transfers must not count as failures of either engine of the pair: a transfer fails
# because of the network, or because the other engine is down, and outlier ejection by such errors
# would empty both pools. An error counts as one only if its text names the transfer.


def names_transfer(status: int, body: bytes) -> bool:
    """Whether this response is an error of the KV transfer."""
    return status >= 500 and _MARKS.search(body[:LOOK_BYTES]) is not None


def is_transfer_event(events: bytes) -> bool:
    """Whether the first bytes of an event stream are an error of the KV transfer."""
    look = events[:LOOK_BYTES]
    return _ERROR_EVENT.search(look) is not None and _MARKS.search(look) is not None


class Interruptible(Protocol):
    """The sender of the decode leg, whose wait a failure of the prefill leg interrupts."""

    @property
    def loop(self) -> EventLoop: ...

    def interrupt(self, leg: PrefillLeg) -> bool: ...


class Interrupt:
    """Interrupts that wait outside of the leg's own step."""

    __slots__ = ("_leg", "_sender", "waiting_on")

    def __init__(self, sender: Interruptible, leg: PrefillLeg) -> None:
        self.waiting_on: object = None
        self._sender = sender
        self._leg = leg

    def step(self) -> None:
        if not self._sender.interrupt(self._leg):
            self._sender.loop.call_soon(self)


class PrefillLeg(SideTask):
    """`failure`: why the leg failed. `payload`: the payload of its response, if it is needed."""

    __slots__ = (
        "_cancelled", "_head", "_lines", "_needs_payload", "_pool", "_prediction", "_sent",
        "_sent_bytes", "ended_without_coroutine", "exchange", "failure", "is_stream", "on_end",
        "payload", "statuses", "worker",
    )  # fmt: skip

    def __init__(
        self, io: ExchangeIO, legs: TwoLegs, waiter: Steppable, *, needs_payload: bool
    ) -> None:
        super().__init__(io.services)
        self._coro = self.upstream = None
        self.failure: PairFailed | None = None
        self.payload = b""
        self.is_stream = False
        self.on_end: Callable[[PrefillLeg], None] = ignore_end
        self.statuses: FailedStatuses | None = None  # of the request; None: this is its first leg
        self._cancelled = False
        self._pool: UpstreamPool | None = None  # of its connection, while it has no coroutine
        self._sent: SentRequest | None = None  # the request that the coroutine continues
        self._prediction: CachePrediction | None = None
        self._sent_bytes = 0
        self.reset_for(io, legs, waiter, needs_payload=needs_payload)

    def reset_for(
        self, io: ExchangeIO, legs: TwoLegs, waiter: Steppable, *, needs_payload: bool
    ) -> None:
        """Reset it for another request. Only for a leg that has `ended_without_coroutine`: fields
        that such a leg never changes are not reset."""
        exchange = legs.prefill
        assert exchange is not None
        assert exchange.worker is not None
        self.waiter, self.readable = waiter, False
        self.exchange: Exchange = exchange
        self.worker: Worker = exchange.worker
        exchange.started_at = self.loop.now
        self.connections = "idle"
        if legs.connector == "nixl":  # only the prefill engine reports its cached tokens
            self.connections = "redialled"
            need = exchange.requirements
            if need is not None and need.prediction is not None:
                self._prediction = prediction_of_leg(exchange)
                self._sent_bytes = io.exchange.bytes_in if io.exchange is not None else 0
        exchange.requirements = None  # the body has already been changed
        self.deadline = io.deadline
        self._needs_payload = needs_payload
        self.ended_without_coroutine = False  # it succeeded without a coroutine
        legs.begun = True

    def send(self, head: RequestHead, body: bytes) -> None:
        """Send the request in a coroutine."""
        self._head, self._lines = head, head.lines
        self.exchange.body = body
        self.start()

    def send_directly(
        self, pool: UpstreamPool, head: RequestHead, lines: bytes, length_line: bytes, body: bytes
    ) -> None:
        """Send the request without a coroutine, on an idle connection, which the pool must have.
        `lines`: used instead of the lines of `head`."""
        exchange, loop, stream = self.exchange, self.loop, pool.idle.pop()
        stream.task = self
        self._head, self._lines, self._pool = head, lines, pool
        exchange.body = body
        self.upstream = self.waiting_on = stream
        loop.side_tasks += 1
        loop.tasks.add(self)
        # As `start_waiting`, but the proxy's own time is counted only for the decode leg.
        exchange.sent_at = now = loop.now
        # inlined: IoTask.set_timeout
        self.phase = "wait"
        due = now + self.settings.timeouts.prefill_head
        self.phase_deadline = due if due < self.deadline else self.deadline  # noqa: FURB136
        # inlined: Stream.write_soon
        stream.pending = encode_request(pool.own_lines, [lines], length_line, body)
        loop.pending_writers.append(stream)

    def step(self, error: BaseException | None = None) -> None:
        """Without a coroutine, handle an event of the connection or a timeout. Anything but an
        ordinary response starts the coroutine."""
        pool, stream = self._pool, self.upstream
        if pool is None or stream is None:
            super().step(error)
            return
        chunk: bytes | None = b""
        if error is None:
            try:
                chunk = stream.read(READ_BYTES)
            except OSError:
                chunk = b""  # handled like a close
        if chunk is None:
            self.waiting_on = stream
            return
        if (
            chunk
            and not stream.readable
            and not stream.pending
            and self._finish_if_cached(pool, stream, chunk)
        ):
            return
        self._pool, self._sent = None, SentRequest(pool, stream, chunk, error)
        self._coro = self.serve()
        super().step()

    def _finish_if_cached(self, pool: UpstreamPool, stream: Stream, chunk: bytes) -> bool:
        """End the leg if this is a complete response like the worker's last one. Returns whether it
        is."""
        body = read_complete_response(
            pool, chunk, self.services.response_heads, self.services.fleet
        )
        status = pool.response_template.status
        if body is None or status >= 400:
            return False
        exchange, loop = self.exchange, self.loop
        exchange.outcome = "completed"  # inlined: Exchange.end
        exchange.status, exchange.body = status, b""
        exchange.response_head_at = exchange.ended_at = loop.now
        if self._needs_payload:
            self.payload = body
        self._pool = self.upstream = None
        self.ended_without_coroutine = self.readable = True
        loop.side_tasks -= 1
        pool.release(stream)
        self._release(SUCCEEDED)
        waiter = self.waiter
        if waiter is not None and waiter.waiting_on is self:
            loop.wake(waiter)
        loop.remove_task(self)
        return True

    def close_coroutine(self) -> None:
        """As for a coroutine; without one, do what its end would do."""
        is_direct, self._pool = self._pool is not None, None
        super().close_coroutine()
        if is_direct:
            self.finish()

    @property
    def response_head_secs(self) -> float:
        """A pair without a response is ended early: its engines might wait for minutes."""
        return self.settings.timeouts.prefill_head

    async def run(self) -> None:
        try:
            await self._exchange()
        except AttemptFailed as error:
            failure = self._fail(error.kind, error.error, error.status)
            failure.is_transfer = error.kind == STALE_CONNECTION  # the worker didn't fail
            if error.kind == "response_timeout":
                self._settle_timeout()
        except HttpError as error:  # caused by the proxy
            self._fail(str(error.code), error.message).error = error
        except (UpstreamProtocolError, OSError) as error:
            self._fail("reset_before_response", f"RemoteProtocolError: {error}")
        except PhaseTimeout as error:
            self._fail("response_timeout", f"ReadTimeout: no data in time (phase {error})", 504)

    async def _exchange(self) -> None:
        exchange = self.exchange
        sent, self._sent = self._sent, None
        pool = (
            sent.pool
            if sent is not None
            else self.services.upstream_pools.of(exchange.rank or self.worker)
        )
        head = self._head
        if head.lines is not self._lines:
            head = msgspec.structs.replace(head, lines=self._lines)
        start = await run_attempt(self, exchange, head, pool, sent)
        exchange.body = b""
        exchange.status = status = start.response.status
        exchange.response_head_at = self.loop.now
        self.is_stream = start.response.sse
        max_bytes = (
            MAX_ERROR_BYTES if status >= 400 else MAX_KEPT_BYTES if self._needs_payload else 0
        )
        payload = await read_body(self, start, "prefill", max_bytes)
        if status >= 400:
            error_response = hold_response(start, payload)
            self.failure = failure_of_response("prefill", self.worker, error_response, status)
        else:
            self.payload = payload

    def _fail(self, kind: str, error: str, status: int = 502) -> PairFailed:
        self.failure = PairFailed("prefill", self.worker, kind, error, status)
        return self.failure

    def _settle_timeout(self) -> None:
        secs = self.settings.timeouts.transfer
        if secs < self.settings.timeouts.response_head and self.failure is not None:
            self._fail("response_timeout", f"no response within {secs:g} s", 504).is_transfer = True

    @property
    def is_response_complete(self) -> bool:
        """Whether its engine has ended the request: its whole response was received."""
        failure = self.failure
        whole = failure is None or failure.response is not None
        return self.readable and whole and not self._cancelled

    def cancel(self) -> None:
        """End the leg, whose result is not needed any more."""
        if not self.readable:
            self._cancelled = True
            super().cancel()

    def ended(self) -> None:
        exchange = self.exchange
        exchange.ended_at = self.loop.now
        exchange.body = b""
        failure = None if self._cancelled else self.failure
        if failure is not None:
            exchange.end("upstream_error", "worker", str(failure))
            self._report(failure)
        elif self._cancelled:
            exchange.end("cut_by_proxy", "proxy")
        else:
            exchange.end("completed", "")
        self._release(SUCCEEDED if exchange.outcome == "completed" else FAILED)

    def _release(self, result: int) -> None:
        """Count the leg, and release its worker; `on_end` is called last."""
        services, exchange, worker = self.services, self.exchange, self.worker
        if result == SUCCEEDED:
            recorders = services.recorders
            if recorders.meters is not None:
                recorders.meters.record_prefill(exchange, worker)
            if self._prediction is not None:
                if self.payload:
                    learn_from(recorders, self._prediction, self.payload, self._sent_bytes)
                self._prediction = None
            if worker.health.failed_requests:  # checked here to save the call in the usual case
                report_success(services.fleet, exchange, worker)
        services.balancer.release(exchange, worker, result)
        if services.queue.waiting:
            services.queue.serve()
        self.on_end(self)
        self.on_end = ignore_end

    def _report(self, failure: PairFailed) -> None:
        services = self.services
        if failure.is_transfer or failure.error is not None:
            return
        if failure.response is None:
            report_failure(services.fleet, self.exchange, self.worker, str(failure))
        else:
            statuses = self.statuses or FailedStatuses()
            statuses.report(services, self.exchange, self.worker, failure.status)


def ignore_end(_: PrefillLeg) -> None:
    """The default of `PrefillLeg.on_end`: does nothing."""

"""A request in two legs, from the acquired pair to the client's last byte.

SGLang and Mooncake: both legs are sent at the same time. NIXL: prefill first. The client's response
is the decode worker's, sent by the ordinary relay, unless the prefill worker refuses the request.
Contract: nothing is sent to the client until the decode worker's first chunk, so a failure of
either leg ends both immediately, and the request may be retried with another pair; from then on
only the decode worker's response counts. No KV reference is sent to two decode workers: each
attempt begins with prefill.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from math import inf

import msgspec

from omni_proxy.dataplane.attempt.attempt import (
    STALE_CONNECTION,
    AttemptFailed,
    SentRequest,
    run_attempt,
)
from omni_proxy.dataplane.attempt.outlier_reports import report_end
from omni_proxy.dataplane.attempt.side_task import (
    AnswerCut,
    hold_response,
    read_body,
    wait_for,
    wait_for_read,
)
from omni_proxy.dataplane.disaggregation.leg_requests import (
    LegRequests,
    with_prefill_rank,
)
from omni_proxy.dataplane.disaggregation.pair_retry import PairRetry
from omni_proxy.dataplane.disaggregation.prefill_leg import (
    MAX_ERROR_BYTES,
    MAX_KEPT_BYTES,
    Interrupt,
    PairFailed,
    PrefillLeg,
    failure_of_response,
    is_transfer_event,
)
from omni_proxy.dataplane.engine_calls import EngineIdQuery, abort_at
from omni_proxy.dataplane.exchange.exchange import Exchange, TwoLegs
from omni_proxy.dataplane.exchange_io import Connections, ExchangeIO
from omni_proxy.dataplane.loop.stream import READ_BYTES
from omni_proxy.dataplane.loop.task import PhaseTimeout
from omni_proxy.dataplane.relay.response_relay import RewrittenResponse, relay
from omni_proxy.dataplane.upstream.pool import ResponseStart
from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.json_splice import Edits, JsonText
from omni_proxy.routing.kv_connectors import nixl
from omni_proxy.routing.kv_connectors.mooncake import bootstrap_address, mooncake_legs
from omni_proxy.routing.kv_connectors.sglang import (
    ClientIds,
    ResponseRewriter,
    SglangLegs,
    read_logprobs,
    sglang_legs,
)
from omni_proxy.wire.request import RequestHead
from omni_proxy.wire.response import CLOSE, LENGTH, UpstreamProtocolError

RespondAlone = Callable[[ExchangeIO, Exchange, RequestHead], Awaitable[bool]]


async def respond_in_two_legs(
    io: ExchangeIO,
    exchange: Exchange,
    head: RequestHead,
    respond_alone: RespondAlone,
    sent: SentPair | None = None,
) -> bool:
    """Respond with the pair that `exchange` has acquired. `respond_alone`: called for a retry at a
    regular worker. Returns whether the client's connection continues. Raises HttpError if no pair
    responded, PhaseTimeout, ClientDisconnected."""
    driver = TwoLegDriver(io, exchange, head, sent)
    try:
        start = await driver.first_response()
        if start is None:
            return await respond_alone(io, exchange, head)
        io.services.inflight.release_body(exchange)
        driver.drop_body()
        worker = exchange.worker
        keep = await relay(io, exchange, head, start)
        if worker is not None and not driver.is_answered_by_prefill:
            report_end(io.services, exchange, worker)
        return keep
    finally:
        driver.end()


class SentPair(msgspec.Struct, gc=False):
    """Legs that the fast path has sent. `json`: the body, if it was parsed. `decode`: None while
    the prefill response is outstanding. `transfer_due`: as in the driver. `error`: an exception
    thrown into the fast path. `with_rid`: set if the response must get the client's own id."""

    leg: PrefillLeg
    json: JsonText | None
    decode: SentRequest | None
    transfer_due: float
    error: BaseException | None
    with_rid: SglangLegs | None


class TwoLegDriver:
    """`is_answered_by_prefill`: the client gets an error response of the prefill worker."""

    def __init__(
        self, io: ExchangeIO, exchange: Exchange, head: RequestHead, sent: SentPair | None
    ) -> None:
        self.loop = io.loop
        self.is_answered_by_prefill = False
        self._io = io
        self._exchange = exchange
        self._requests = LegRequests(exchange, head, sent.json if sent is not None else None)
        self._sent = sent
        self._leg: PrefillLeg | None = None
        self._open_to: PrefillLeg | None = None  # the leg whose failure interrupts the current wait
        self._decode_worker: Worker | None = None  # the decode worker that has the request
        # No room or KV reference may reach an engine twice: if an idle connection breaks, the pair
        # is retried on new connections.
        self._connections: Connections = "idle"
        self._transfer_due = 0.0  # deadline for the decode worker's start after prefill has ended
        self._retry = PairRetry(io, exchange)
        if sent is None:
            # Two more copies of the body, one for each leg, until the request can't be sent again.
            io.services.inflight.hold(exchange, 2 * len(exchange.body))

    def drop_body(self) -> None:
        """Release the body, because the request is not sent again."""
        self._requests.drop()

    async def first_response(self) -> ResponseStart | None:
        """The response for the client; None if a retry has acquired a regular worker."""
        exchange = self._exchange
        while True:
            legs = exchange.legs
            if legs is None:
                exchange.body = self._requests.whole_body
                return None
            try:
                start = await self._attempt(legs)
            except PairFailed as error:
                self._stop()
                if error.kind == STALE_CONNECTION:
                    self._connections = "new"
                answer = await self._retry.after(error)
                if answer is not None:
                    self.is_answered_by_prefill = error.leg == "prefill"
                    return answer
            else:
                return start

    async def _attempt(self, legs: TwoLegs) -> ResponseStart:
        """Raises PairFailed."""
        worker = self._exchange.worker
        assert worker is not None
        sent, self._sent = self._sent, None
        try:
            if sent is not None:
                return await self._continue(legs, sent)
            return await self._by_protocol(legs, await self._requests.read(self._io))
        except AttemptFailed as error:
            if self._leg is not None and self._leg.failure is not None:
                raise self._leg.failure from None
            failure = PairFailed("decode", worker, error.kind, error.error, error.status)
            failure.is_transfer = self._is_transfer_timeout(error.kind)
            raise failure from None
        except UpstreamProtocolError as error:
            message = f"RemoteProtocolError: {error}"
            kind = "reset_before_response" if isinstance(error, AnswerCut) else "bad_response"
            raise PairFailed("decode", worker, kind, message) from None

    async def _continue(self, legs: TwoLegs, sent: SentPair) -> ResponseStart:
        leg = self._leg = sent.leg
        leg.on_end, leg.waiter, leg.statuses = self._leg_ended, self._io, self._retry.statuses
        self._transfer_due = sent.transfer_due
        if sent.decode is None:
            if sent.error is not None:
                raise sent.error
            if leg.failure is not None:
                raise leg.failure
            await self._requests.read(self._io)
            return await self._after_prefill(legs, leg)
        with_rid = sent.with_rid
        head = self._requests.decode_head(legs.connector, is_read=with_rid is not None)
        running_leg = leg if legs.connector != "nixl" else None
        start = await self._answer(head, running_leg, sent.decode)
        return start if with_rid is None else await self._rewritten(start, with_rid, leg)

    async def _by_protocol(self, legs: TwoLegs, body: JsonText) -> ResponseStart:
        prefill = legs.prefill.worker if legs.prefill is not None else None
        if prefill is None:
            return await self._decode(nixl.decode_edits(None), None)
        if legs.connector == "sglang":
            return await self._by_sglang(legs, body, prefill)
        if legs.connector == "nixl":
            return await self._by_nixl(legs, body)
        return await self._by_mooncake(legs, body, prefill)

    async def _by_sglang(self, legs: TwoLegs, body: JsonText, prefill: Worker) -> ResponseStart:
        random_below, path = self._io.services.random_below, self._requests.path
        leg_edits = sglang_legs(path, body, prefill.url, prefill.bootstrap_port, random_below)
        legs.rid = leg_edits.rid
        rank = legs.prefill.rank if legs.prefill is not None else None
        edits = with_prefill_rank(leg_edits.decode, rank)
        self._requests.decode_body(edits)  # refuses a repeated key before any leg is sent
        leg = self._start_leg(legs, leg_edits.prefill, needs_payload=leg_edits.merges_logprobs)
        rewrites = bool(leg_edits.client_rid) or leg_edits.merges_logprobs
        start = await self._decode(edits, leg, is_read=rewrites)
        return await self._rewritten(start, leg_edits, leg) if rewrites else start

    async def _by_nixl(self, legs: TwoLegs, body: JsonText) -> ResponseStart:
        edits = nixl.prefill_edits(self._requests.path, body)
        leg = self._start_leg(legs, edits, needs_payload=True)
        self._io.set_timeout("prefill", self._io.settings.timeouts.total)
        return await self._after_prefill(legs, leg)

    async def _after_prefill(self, legs: TwoLegs, leg: PrefillLeg) -> ResponseStart:
        await wait_for(self._io, leg)
        if leg.failure is not None:
            raise leg.failure
        params = take_params(legs, leg)
        self._check_versions()
        return await self._decode(nixl.decode_edits(params), None)

    async def _by_mooncake(self, legs: TwoLegs, body: JsonText, prefill: Worker) -> ResponseStart:
        assert legs.prefill is not None
        engine_id = await self._engine_id(prefill, legs.prefill.rank)
        address = bootstrap_address(prefill.url, prefill.bootstrap_port or 0)
        random_below = self._io.services.random_below
        leg_edits = mooncake_legs(self._requests.path, body, address, engine_id, random_below)
        leg = self._start_leg(legs, leg_edits.prefill, needs_payload=False)
        return await self._decode(leg_edits.decode, leg)

    async def _engine_id(self, prefill: Worker, rank: DpRank | None) -> str:
        """The id of the prefill engine, queried once for each of its processes. Raises
        PairFailed."""
        services = self._io.services
        index = rank.index if rank is not None else 0
        cached_id = services.engine_ids.find(prefill, index)
        if cached_id is not None:
            return cached_id
        query = EngineIdQuery(services, self._io, prefill)
        query.start()
        self._io.set_timeout("prefill", self._io.settings.timeouts.total)
        try:
            await wait_for(self._io, query)
        finally:
            query.cancel()
        services.engine_ids.keep(prefill, query.engine_ids)
        engine_id = query.engine_ids.get(index)
        if engine_id is None:
            reason = query.error or f"no id for data-parallel rank {index}"
            error = f"its bootstrap server returned no engine id: {reason}"
            raise PairFailed("prefill", prefill, "connect_failure", error)
        return engine_id

    def _start_leg(self, legs: TwoLegs, edits: Edits, *, needs_payload: bool) -> PrefillLeg:
        assert legs.prefill is not None
        io, requests = self._io, self._requests
        body = requests.prefill_body(edits, legs.prefill.rank)
        has_ranks = io.services.fleet.has_ranks
        head = requests.prefill_head(
            legs.connector, needs_payload=needs_payload, has_ranks=has_ranks
        )
        leg = self._leg = PrefillLeg(io, legs, io, needs_payload=needs_payload)
        leg.connections = "redialled" if legs.connector == "nixl" else self._connections
        leg.on_end, leg.statuses = self._leg_ended, self._retry.statuses
        leg.send(head, body)
        return leg

    async def _decode(
        self, edits: Edits, leg: PrefillLeg | None, *, is_read: bool = False
    ) -> ResponseStart:
        """Send the decode leg, and wait for its first chunk. Raises PairFailed, AttemptFailed,
        UpstreamProtocolError."""
        exchange, requests = self._exchange, self._requests
        assert exchange.legs is not None
        if leg is not None and leg.failure is not None:
            raise leg.failure
        exchange.body = requests.decode_body(edits)
        head = requests.decode_head(exchange.legs.connector, is_read=is_read)
        return await self._answer(head, leg)

    async def _answer(
        self, head: RequestHead, leg: PrefillLeg | None, sent: SentRequest | None = None
    ) -> ResponseStart:
        """As `_decode`, with the body in `exchange`. `sent`: the request, if already sent."""
        io, exchange = self._io, self._exchange
        worker, legs = exchange.worker, exchange.legs
        assert worker is not None
        assert legs is not None
        self._decode_worker = worker
        is_thrown_into = sent is not None and sent.error is not None  # precedes the leg's failure
        if leg is not None and leg.failure is not None and not is_thrown_into:
            raise leg.failure
        self._open_to = leg
        io.connections = "redialled" if legs.prefill is None else self._connections
        pool = (
            sent.pool
            if sent is not None
            else io.services.upstream_pools.of(exchange.rank or worker)
        )
        try:
            start = await run_attempt(io, exchange, head, pool, sent)
            if start.response.status >= 400:
                raise await self._refused(start, worker)
            await self._first_chunk(start)
        finally:
            self._open_to = None
            io.connections = "redialled"
        if start.response.sse and is_transfer_event(start.chunk):
            failure = PairFailed("decode", worker, "kv_transfer", "its KV transfer failed")
            failure.is_transfer = True
            raise failure
        self._check_versions()
        return start

    async def _refused(self, start: ResponseStart, worker: Worker) -> PairFailed:
        status = start.response.status
        self._exchange.response_head_at = self.loop.now
        try:
            payload = await read_body(self._io, start, "first", MAX_ERROR_BYTES)
        except (OSError, PhaseTimeout) as error:
            return PairFailed("decode", worker, str(status), f"status={status}, {error}", status)
        self._decode_worker = None
        return failure_of_response("decode", worker, hold_response(start, payload), status)

    def _is_transfer_timeout(self, kind: str) -> bool:
        """Whether the decode worker sent nothing in time after prefill had ended."""
        return kind == "response_timeout" and 0 < self._transfer_due <= self.loop.now

    async def _first_chunk(self, start: ResponseStart) -> None:
        """Wait for the first chunk. Raises AttemptFailed, UpstreamProtocolError."""
        io, response, stream = self._io, start.response, start.stream
        io.set_timeout("first", io.settings.timeouts.first_byte)
        if self._transfer_due:  # a response head does not prove that the transfer has ended
            io.limit_phase(self._transfer_due)
        while not start.chunk and not response.is_complete:
            try:
                await wait_for_read(io, stream)
                received = stream.read(READ_BYTES)
            except OSError as error:
                raise AnswerCut(error.strerror or "reset") from None
            except PhaseTimeout:
                raise AttemptFailed(
                    "response_timeout", "ReadTimeout: no body after the response head", 504
                ) from None
            if received == b"":
                if response.framing is CLOSE:
                    return
                raise AnswerCut("the worker closed before the end of the response")
            if received:
                start.chunk = response.feed(received)

    async def _rewritten(
        self, start: ResponseStart, leg_edits: SglangLegs, leg: PrefillLeg
    ) -> ResponseStart:
        """The response with the client's own id and with the prompt's log probabilities."""
        io, response = self._io, start.response
        logprobs = {}
        if leg_edits.merges_logprobs:
            io.set_timeout("prefill", io.settings.timeouts.idle)
            await wait_for(io, leg)
            if leg.failure is not None:
                raise leg.failure
            logprobs = dict(read_logprobs(leg.payload, stream=leg.is_stream))
            leg.payload = b""
        ids = ClientIds(leg_edits.rid, leg_edits.client_rid) if leg_edits.client_rid else None
        rewriter = ResponseRewriter(ids, logprobs)
        if response.sse and response.framing is not LENGTH:
            return RewrittenResponse(
                start.pool, start.stream, response, start.chunk, start.bodiless, start.all_sent,
                rewriter,
            )  # fmt: skip
        payload = await self._whole_answer(start)
        return hold_response(start, rewriter.rewrite_body(payload))

    async def _whole_answer(self, start: ResponseStart) -> bytes:
        """Read the whole body. Raises AttemptFailed, UpstreamProtocolError."""
        try:
            payload = await read_body(self._io, start, "first", MAX_KEPT_BYTES)
        except OSError as error:
            raise AnswerCut(error.strerror or "reset") from None
        except PhaseTimeout:
            error_text = "ReadTimeout: the worker stopped sending its response"
            raise AttemptFailed("response_timeout", error_text, 504) from None
        self._decode_worker = None
        return payload

    def _check_versions(self) -> None:
        """Both legs must have used the same weights throughout. Raises PairFailed."""
        exchange = self._exchange
        legs, worker = exchange.legs, exchange.worker
        prefill = legs.prefill if legs is not None else None
        if prefill is None or worker is None or self._leg is None:
            return
        if (
            worker.weight_version is exchange.weight_version
            and self._leg.worker.weight_version is prefill.weight_version
        ):
            return
        error = "the weights changed between the legs"
        failure = PairFailed("decode", worker, "weights_changed", error, 503)
        failure.is_transfer = True
        raise failure

    def _leg_ended(self, leg: PrefillLeg) -> None:
        """Called in the leg's own step."""
        if self._open_to is not leg:
            return
        if leg.failure is not None:
            self.loop.wake(Interrupt(self, leg))
            return
        self._transfer_due = limit_decode_phase(self._io)

    def interrupt(self, leg: PrefillLeg) -> bool:
        """End the exchange's current wait with the leg's failure. False if it must be called again,
        because the exchange has yet to run."""
        io = self._io
        if self._open_to is not leg or leg.failure is None:
            return True
        if io.waiting_on is None:
            return False
        self._open_to = None
        if io.waiting_on is io.client:  # a keep-alive comment is only partially sent
            if io.upstream is not None:
                io.upstream.readable = True
                io.upstream.shut_down()
            return True
        io.throw(leg.failure)
        return True

    def _stop(self) -> None:
        """End both legs if they are still running."""
        legs, services = self._exchange.legs, self._io.services
        rid = legs.rid if legs is not None else ""
        leg, self._leg, self._transfer_due = self._leg, None, 0.0
        if leg is not None:
            leg.cancel()
            # The prefill engine may have restarted, which only the decode engine detects.
            services.engine_ids.forget(leg.worker)
            if not leg.is_response_complete:
                abort_at(services, leg.worker, rid)
        decode_worker, self._decode_worker = self._decode_worker, None
        if decode_worker is not None:
            self._io.close_upstream()
            abort_at(services, decode_worker, rid)

    def end(self) -> None:
        """The exchange has ended. A prefill leg may continue only if the response is complete."""
        if self._exchange.outcome != "completed":
            self._stop()
        if self._leg is not None:  # break the reference cycle
            legs = self._exchange.legs
            self._leg.on_end = partial(free_late_leg, legs.rid if legs is not None else "")
            self._leg = None


def take_params(legs: TwoLegs, leg: PrefillLeg) -> bytes | None:
    """The KV transfer parameters in the prefill response, for NIXL's decode engine; None if it has
    none."""
    params = nixl.read_params(leg.payload)
    if params is None:
        legs.fallback = "no_params"
    leg.payload = b""
    return params


def free_late_leg(rid: str, leg: PrefillLeg) -> None:
    """Abort a prefill leg that failed after the end of the response: its engine may wait for a
    decode engine that never connects."""
    if not leg.is_response_complete:
        abort_at(leg.services, leg.worker, rid)


def limit_decode_phase(io: ExchangeIO) -> float:
    """Prefill has ended: limit the phase. Returns when the decode worker must have begun, 0.0 for
    no limit."""
    secs = io.settings.timeouts.transfer
    if secs == inf:
        return 0.0
    due = io.loop.now + secs
    io.limit_phase(due)
    return due

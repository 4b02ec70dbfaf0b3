"""The fast path of requests in two legs: both legs from the event loop, without a coroutine.

    sglang, mooncake   both legs are sent at the same time; decode's response is relayed
    nixl               the prefill leg is sent; after its complete response, the decode leg

It calls the same functions as the coroutine and makes no decisions of its own. At the first unusual
step (a response in parts or an error, a leg that fails, a timeout, a client that disconnects, log
probabilities to merge, a sampled trace) the coroutine continues with the legs that were sent.
Contract: as for `drivers.fast_path`; the coroutine never sends a leg again that has begun.
"""

from __future__ import annotations

from functools import partial
from typing import Final, TypeAlias

from omni_proxy.dataplane.attempt.attempt import (
    CACHED_LENGTHS,
    LENGTHS,
    encode_request,
    length_lines,
    read_complete_response,
    start_waiting,
)
from omni_proxy.dataplane.disaggregation.leg_requests import (
    EngineLines,
    for_prefill_rank,
    for_rank,
    with_prefill_rank,
    without_encoding,
)
from omni_proxy.dataplane.disaggregation.prefill_leg import (
    Interrupt,
    PrefillLeg,
)
from omni_proxy.dataplane.disaggregation.two_leg_request import (
    SentPair,
    free_late_leg,
    limit_decode_phase,
    respond_in_two_legs,
    take_params,
)
from omni_proxy.dataplane.drivers.exchange_steps import Response, respond_by_worker
from omni_proxy.dataplane.drivers.fast_path import FastPath
from omni_proxy.dataplane.exchange.exchange import Exchange, TwoLegs
from omni_proxy.dataplane.exchange.fast_path_cache import (
    CachedRequest,
    decode_unless_ranked,
    rank_error,
)
from omni_proxy.dataplane.exchange_io import ExchangeIO
from omni_proxy.dataplane.loop.event_loop import EventLoop, WakeCallback
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import PhaseTimeout
from omni_proxy.dataplane.upstream.pool import UpstreamPool
from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.body_fields import BodyFields, decode_body
from omni_proxy.routing.inspect.json_splice import JsonText
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.kv_connectors import nixl
from omni_proxy.routing.kv_connectors.plain_chat import (
    chat_with_params,
    decode_chat,
    one_token_chat,
    sglang_chat,
)
from omni_proxy.routing.kv_connectors.sglang import (
    CHAT,
    ClientIds,
    SglangLegs,
    is_one_id,
    sglang_legs,
)
from omni_proxy.routing.model_aliases import parts_for_target
from omni_proxy.routing.pinning import may_name_rank
from omni_proxy.upstream_http.credentials import lines_with_own_key
from omni_proxy.wire.head_caching.response_heads import NOT_CACHED


def fast_path_for(io: ExchangeIO, cached: CachedRequest) -> FastPath:
    """The fast path for requests with the head of `cached`."""
    in_legs = cached.source.has_pools and cached.route.legs.connectors
    return FastPairPath(io, cached) if in_legs else FastPath(io, cached)


def _decode_chat_unless_ranked(body: bytes) -> BodyFields:
    if may_name_rank(body):
        raise rank_error()
    return decode_chat(body)


_DECODE_CHAT: Final = {
    decode_body: decode_chat,
    decode_unless_ranked: _decode_chat_unless_ranked,
}
_BLANK: Final = b"\r\n\r\n"
_Bodies: TypeAlias = tuple[bytes, bytes | None]


class FastPairPath(FastPath):
    """The fast path of one connection for requests in two legs; `loop` as for `Interruptible`."""

    __slots__ = (
        "_after_prefill", "_body", "_engine_lines", "_fault", "_is_chat", "_json", "_leg", "_lines",
        "_path", "_random_below", "_spare_leg", "_transfer_due", "_with_rid", "loop",
    )  # fmt: skip

    def __init__(self, io: ExchangeIO, cached: CachedRequest) -> None:
        super().__init__(io, cached)
        self.loop: EventLoop = io.loop
        self._leg: PrefillLeg | None = None  # of the current exchange, once it is sent
        self._path = cached.head.log_words[2]
        self._is_chat = self._path == CHAT
        self._body = b""  # for NIXL's decode engine, still without prefill's parameters
        self._json: JsonText | None = None  # the client's body, if it was parsed
        self._lines = b""  # head lines of the decode leg
        self._engine_lines: EngineLines | None = None  # created for the first pair of vLLM workers
        self._random_below = io.services.random_below
        self._after_prefill = WakeCallback(self.go_on_after_prefill)  # waits for the leg
        self._fault: Exception | None = None  # a bug that was raised in a leg's step
        self._with_rid: SglangLegs | None = None  # set if the response must get the client's own id
        self._transfer_due = 0.0
        self._spare_leg: PrefillLeg | None = None  # of the last request, for reuse

    def go_on_after_prefill(self) -> None:
        """The prefill leg has ended, and its step did not send the decode leg."""
        io, leg = self._io, self._leg
        if leg is None or self.client.task is not self:
            return  # woken after `stop`
        fault, self._fault = self._fault, None
        try:
            was_tried = leg.ended_without_coroutine or leg.failure is not None
            if was_tried or not self._send_after_prefill(leg):
                io.step(fault)
        except Exception as error:  # as in `FastPath.step`
            io.step(error)

    def _prefill_ended(self, leg: PrefillLeg) -> None:
        """Called in the leg's own step: send the decode leg, unless the coroutine must continue."""
        if self._leg is not leg or not leg.ended_without_coroutine or self.client.task is not self:
            return
        try:
            if self._send_after_prefill(leg):
                self._after_prefill.waiting_on = None  # so that it is not woken
        except Exception as error:  # a bug: raised in the next step
            self._fault = error

    def can_continue_after(self, error: BaseException) -> bool:
        return self._leg is not None or isinstance(error, PhaseTimeout)

    def continuation(self, exchange: Exchange) -> Response:
        leg, json = self._leg, self._json
        self._leg = self._json = None
        if leg is None:
            return super().continuation(exchange)
        head, error = self._head(exchange), self.error
        with_rid, self._with_rid = self._with_rid, None
        sent = SentPair(leg, json, self._sent(), self._transfer_due, error, with_rid)
        return respond_in_two_legs(self._io, exchange, head, respond_by_worker, sent)

    def interrupt(self, leg: PrefillLeg) -> bool:
        """The leg has failed, so the coroutine continues, unless the response came first."""
        if self._leg is leg and self.client.task is self:
            self._io.step()
        return True

    def _send_legs(self, exchange: Exchange, lines: list[bytes], body: bytes) -> bool:
        """Send the legs. False if the coroutine must continue. Raises HttpError before anything
        is sent."""
        legs, need, worker, io = exchange.legs, exchange.requirements, exchange.worker, self._io
        other = legs.prefill if legs is not None else None
        prefill = other.worker if other is not None else None
        if legs is None or other is None or prefill is None or need is None or worker is None:
            return False
        trace, pools, connector = exchange.trace, io.services.upstream_pools, legs.connector
        known_pools, waits = pools.known, connector == "nixl"
        target = other.rank or prefill
        pool = prefill_pool = known_pools.get(target) or pools.of(target)
        if not waits:
            target = exchange.rank or worker
            pool = known_pools.get(target) or pools.of(target)
        if not prefill_pool.idle or not pool.idle or (trace is not None and trace.sampled):
            return False
        self._json, self._with_rid, size = None, None, len(body)  # clear the last request's
        if need.alias is not None:
            body = b"".join(parts_for_target(need, self.cached.route, body))
        bodies = (
            self._sglang_bodies(legs, prefill, body, need, exchange.rank)
            if connector == "sglang"
            else self._vllm_bodies(legs, prefill, body, need.body_fields)
        )
        if bodies is None or not io.services.inflight.try_to_hold(exchange, 2 * size):
            return False
        if connector == "sglang":
            text = b"".join(lines)
            self._lines = text if self._with_rid is None else without_encoding(text)
        else:
            text = self._vllm_lines(lines, exchange.request_id, is_read=waits)
        text = lines_with_own_key(prefill, text) if prefill.api_key_env else text
        for_prefill, for_decode = bodies
        size = len(for_prefill)
        length_line = LENGTHS[size][1] if size < CACHED_LENGTHS else length_lines(size)[1]
        leg, self._spare_leg = self._spare_leg, None
        if leg is None:
            leg = PrefillLeg(io, legs, self._after_prefill, needs_payload=waits)
        else:
            leg.reset_for(io, legs, self._after_prefill, needs_payload=waits)
        self._leg, self._transfer_due = leg, 0.0
        leg.send_directly(prefill_pool, self.cached.head, text, length_line, for_prefill)
        if for_decode is None:
            self._body = body
            leg.on_end = self._prefill_ended
            io.set_timeout("prefill", io.settings.timeouts.total)
            self.waiting_on, self._after_prefill.waiting_on = None, leg
            return True
        if self._has_failed(leg):
            return False
        leg.on_end = self._leg_ended
        same = for_decode is for_prefill
        length_line = length_line if same else length_lines(len(for_decode))[1]
        return self._send_decode(exchange, pool, length_line, for_decode)

    def _has_failed(self, leg: PrefillLeg) -> bool:
        """Whether the leg failed immediately, on a broken connection: then decode is not sent."""
        if leg.upstream is not None and leg.upstream.readable:
            leg.step()
        return leg.failure is not None

    def _vllm_lines(self, parts: list[bytes], request_id: bytes, *, is_read: bool) -> bytes:
        """Head lines of the prefill leg; those of the decode leg are stored in `_lines`."""
        engine_lines = self._engine_lines
        if engine_lines is None:
            engine_lines = self._engine_lines = EngineLines(self.cached.template)
        self._lines = lines = engine_lines.with_id(parts, request_id)
        return engine_lines.of_read(parts, lines) if is_read else lines

    def _sglang_bodies(
        self, legs: TwoLegs, prefill: Worker, body: bytes, need: Requirements, rank: DpRank | None
    ) -> _Bodies | None:
        """Bodies of both legs; None if the coroutine must continue. `rank`: of the decode worker.
        Raises HttpError 400."""
        path, port, random_below = self._path, prefill.bootstrap_port, self._random_below
        prefill_rank = legs.prefill.rank if legs.prefill is not None else None
        index = prefill_rank.index if prefill_rank is not None else None
        plain = sglang_chat(body, prefill.url, port, random_below, index) if self._is_chat else None
        if plain is not None:
            legs.rid, for_prefill, for_decode = plain
            return for_prefill, for_decode
        self._json = json = JsonText(body, is_checked=True)  # its fields were validated
        leg_edits = sglang_legs(path, json, prefill.url, port, random_below)
        if leg_edits.merges_logprobs or (
            leg_edits.client_rid and not is_one_id(leg_edits.client_rid)
        ):
            return None
        legs.rid = leg_edits.rid
        self._with_rid = leg_edits if leg_edits.client_rid else None
        if rank is None and prefill_rank is None:
            both = json.splice(leg_edits.prefill, leg_edits.text)
            return both, both
        edits = with_prefill_rank(leg_edits.decode, prefill_rank)
        return (
            json.splice(for_prefill_rank(need, path, leg_edits.prefill, prefill_rank)),
            json.splice(for_rank(need, path, edits, rank)),
        )

    def _vllm_bodies(
        self, legs: TwoLegs, prefill: Worker, body: bytes, fields: BodyFields | None
    ) -> _Bodies | None:
        """As `_sglang_bodies`; decode's is None if it depends on the prefill response."""
        params, own_params = nixl.REMOTE_DECODE, None
        if legs.connector == "mooncake":
            rank = legs.prefill.rank if legs.prefill is not None else None
            index = rank.index if rank is not None else 0
            both = self._io.services.engine_ids.transfer(prefill, index, self._random_below)
            if both is None:
                return None
            params, own_params = both
        plain = one_token_chat(body, fields, params) if self._is_chat else None
        if plain is not None:
            return plain, None if own_params is None else chat_with_params(body, own_params)
        cached = self.cached
        if cached.decode in _DECODE_CHAT:
            # For the next request.
            cached.decode = cached.decode_ascii = _DECODE_CHAT[cached.decode]
        self._json = json = JsonText(body, is_checked=True)
        prefill_body = json.splice(nixl.prefill_edits(self._path, json, params))
        return prefill_body, None if own_params is None else json.splice(
            nixl.decode_edits(own_params)
        )

    def _leg_ended(self, leg: PrefillLeg) -> None:
        """Called in the leg's own step, while the decode response is outstanding."""
        if self._leg is not leg:
            return
        if leg.failure is not None:
            self.loop.wake(Interrupt(self, leg))
            return
        self._transfer_due = limit_decode_phase(self._io)

    def _send_after_prefill(self, leg: PrefillLeg) -> bool:
        """NIXL: send the decode leg with the parameters of the prefill response. False if the
        coroutine must send it."""
        exchange, json = self._io.exchange, self._json
        if exchange is None or exchange.legs is None or exchange.worker is None:
            return False
        worker, pools = exchange.worker, self._io.services.upstream_pools
        target = exchange.rank or worker
        pool = pools.known.get(target) or pools.of(target)
        if not pool.idle or worker.weight_version is not exchange.weight_version:
            return False
        if leg.worker.weight_version is not leg.exchange.weight_version:
            return False
        params = take_params(exchange.legs, leg)
        if json is None:
            body = chat_with_params(self._body, params)
        else:  # a repeated key was refused when the body was spliced for prefill
            body = json.splice(nixl.decode_edits(params))
        return self._send_decode(exchange, pool, length_lines(len(body))[1], body)

    def _send_decode(
        self, exchange: Exchange, pool: UpstreamPool, length_line: bytes, body: bytes
    ) -> bool:
        """Send the decode leg on an idle connection, which `pool` must have."""
        io, upstream = self._io, pool.idle.pop()
        upstream.task = self
        io.upstream = self.waiting_on = upstream
        self._pool = pool
        lines, worker = self._lines, exchange.worker
        if worker is not None and worker.api_key_env:
            lines = lines_with_own_key(worker, lines)
        request = encode_request(pool.own_lines, [lines], length_line, body)
        start_waiting(io, exchange, io.settings.timeouts.response_head)
        # inlined: Stream.write_soon
        upstream.pending = request
        io.loop.pending_writers.append(upstream)
        return not upstream.readable

    def _relay(
        self, exchange: Exchange, upstream: Stream, chunk: bytes, sent_at_once: bool = True
    ) -> bool:
        leg, legs, pool = self._leg, exchange.legs, self._pool
        if leg is None or legs is None or pool is None:
            return super()._relay(exchange, upstream, chunk)
        if leg.worker.weight_version is not leg.exchange.weight_version:
            return False
        if pool.response_template.status >= 400:
            pool.response_template = NOT_CACHED  # the next step sets it for this response
        if self._with_rid is not None:
            services = self._io.services
            body = read_complete_response(pool, chunk, services.response_heads, services.fleet)
            if body is None:
                return False
            chunk = _with_own_id(self._with_rid, pool, body)
        at_once = exchange.sent_at == exchange.started_at
        self._leg = None
        if not super()._relay(exchange, upstream, chunk, at_once):
            self._leg = leg
            return False
        exchange.legs, self._body = None, b""
        if leg.ended_without_coroutine:
            self._keep(leg)
        elif not leg.readable:
            leg.on_end = partial(self._late_leg_ended, legs.rid)
        return True

    def _late_leg_ended(self, rid: str, leg: PrefillLeg) -> None:
        """The leg ended after the response."""
        free_late_leg(rid, leg)
        self._keep(leg)

    def _keep(self, leg: PrefillLeg) -> None:
        """Keep the leg for reuse, if it ended on the fast path."""
        if leg.ended_without_coroutine:
            self._spare_leg = leg
            if self._spare is not None:
                self._spare.spare_leg = leg.exchange


def _with_own_id(leg_edits: SglangLegs, pool: UpstreamPool, body: bytes) -> bytes:
    """A complete response with the client's id, and with the head of the pool's template. `body`:
    its body with the proxy's id."""
    template, body = (
        pool.response_template,
        ClientIds(leg_edits.rid, leg_edits.client_rid).restore(body),
    )
    return b"".join((template.start, length_lines(len(body))[0], template.end, _BLANK, body))

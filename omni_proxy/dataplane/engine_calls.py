"""Calls to engines that are no exchanges: aborts by id, Mooncake's engine id, tokens of texts.

Contract: only Mooncake's id is awaited by a request. Few calls run at a time, each with a bounded
time and a bounded response; a failed call has no other effect. An abort is sent immediately; its
failure is ignored, because the engine has its own timeout. Must not tokenize texts that no policy
has requested. Source: note:features 2.3, 2.6.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from omni_proxy.dataplane.attempt.attempt import AttemptFailed, run_attempt
from omni_proxy.dataplane.attempt.side_task import SideTask, head_for, read_body
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange_io import AttemptIO
from omni_proxy.dataplane.loop.task import PhaseTimeout
from omni_proxy.dataplane.services import ExchangeServices
from omni_proxy.dataplane.upstream.pool import UpstreamPool
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.kv_connectors.mooncake import MAX_QUERY_BYTES, QUERY, read_engine_ids
from omni_proxy.routing.kv_connectors.sglang import abort_body, bootstrap_host
from omni_proxy.routing.kv_events.tokenized_texts import TokenizedTexts, TokenizeRequest
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.response import UpstreamProtocolError

_log = logging.getLogger(__name__)

CALL_SECS: Final = 5.0
AGAIN_SECS: Final = 1.0  # delay of the second abort
_JSON_LINE: Final = b"content-type: application/json\r\n"
_FAILURES: Final = (AttemptFailed, HttpError, UpstreamProtocolError, OSError, PhaseTimeout)


class AbortCall(SideTask):
    """POST /abort_request with the proxy's `rid`, twice, to one engine."""

    __slots__ = ("_rid", "_worker")

    def __init__(self, services: ExchangeServices, worker: Worker, rid: str) -> None:
        super().__init__(services)
        self._worker = worker
        self._rid = rid
        self.deadline = self.loop.now + CALL_SECS

    async def run(self) -> None:
        await self._call()
        # The request was sent on another connection: the abort may have overtaken it.
        await self.services.timers.sleep(self, AGAIN_SECS)
        self.deadline = self.loop.now + CALL_SECS
        await self._call()

    async def _call(self) -> None:
        worker = self._worker
        exchange = Exchange(self.loop.now, "")
        exchange.body = abort_body(self._rid)
        head = head_for(b"POST", b"/abort_request", _JSON_LINE, length=len(exchange.body))
        try:
            start = await run_attempt(self, exchange, head, self.services.upstream_pools.of(worker))
            await read_body(self, start, "abort")
        except _FAILURES as error:
            _log.debug("abort_failed worker=%s error=%s", worker.url, error)


def abort_at(services: ExchangeServices, worker: Worker, rid: str) -> None:
    """Make SGLang's engine release the request: closing the connection does not end a request that
    waits for the other leg."""
    if rid and not services.loop.ended:
        AbortCall(services, worker, rid).start()


def abort_legs(services: ExchangeServices, exchange: Exchange) -> None:
    """Abort both legs by the id that the proxy has given them; with other protocols the engines use
    the client's own id. The decode worker's response then ends like any aborted one."""
    legs = exchange.legs
    if legs is None or exchange.worker is None:
        return
    abort_at(services, exchange.worker, legs.rid)
    leg = legs.prefill
    if leg is not None and leg.worker is not None:
        abort_at(services, leg.worker, legs.rid)


class EngineIdQuery(SideTask):
    """GET /query at a prefill worker's bootstrap server. `engine_ids`: by data-parallel rank; empty
    if it failed, with the reason in `error`."""

    __slots__ = ("_pool", "engine_ids", "error")

    def __init__(self, services: ExchangeServices, waiter: AttemptIO, worker: Worker) -> None:
        super().__init__(services, waiter)
        self.engine_ids: dict[int, str] = {}
        self.error = ""
        port = worker.bootstrap_port or 0
        host = worker.address if isinstance(worker.address, str) else worker.address[0]
        self._pool = UpstreamPool(self.loop, (host, port), f"{bootstrap_host(worker.url)}:{port}")
        self.deadline = self.loop.now + CALL_SECS

    async def run(self) -> None:
        exchange = Exchange(self.loop.now, "")
        try:
            start = await run_attempt(self, exchange, head_for(b"GET", QUERY.encode()), self._pool)
            answer = await read_body(self, start, "query", MAX_QUERY_BYTES)
            if start.response.status == 200:
                self.engine_ids = read_engine_ids(answer)
            if not self.engine_ids:
                self.error = f"status {start.response.status}, without an engine id"
        except _FAILURES as error:
            self.error = str(error)

    def ended(self) -> None:
        self._pool.close()


AT_ONCE: Final = 2  # in each process
TOKENIZE_SECS: Final = 2.0
MAX_ANSWER_BYTES: Final = 1 << 20


class _Answer(msgspec.Struct, gc=False):
    tokens: list[int]


_decode = msgspec.json.Decoder(_Answer).decode


class TokenizeCalls:
    def __init__(self, services: ExchangeServices, texts: TokenizedTexts) -> None:
        self.running = 0
        self.texts = texts
        self._services = services

    def start_due(self) -> None:
        """Start the waiting queries, up to AT_ONCE at a time."""
        while self.running < AT_ONCE and not self._services.loop.ended:
            request = self.texts.next_request()
            if request is None:
                return
            worker = self._services.fleet.find(request.url)
            if worker is not None:
                self.running += 1
                _TokenizeCall(self._services, self, request, worker).start()


class _TokenizeCall(SideTask):
    """POST /tokenize at one engine."""

    __slots__ = ("_calls", "_request", "_worker")

    def __init__(
        self,
        services: ExchangeServices,
        calls: TokenizeCalls,
        request: TokenizeRequest,
        worker: Worker,
    ) -> None:
        super().__init__(services)
        self._calls, self._request, self._worker = calls, request, worker
        self.deadline = self.loop.now + TOKENIZE_SECS

    async def run(self) -> None:
        texts, request = self._calls.texts, self._request
        tokens = await self._tokens()
        if tokens:
            texts.add(request, tokens)
        else:
            texts.record_failure(request, self.loop.now)

    async def _tokens(self) -> list[int]:
        """The tokens of the text; [] if the call failed."""
        exchange = Exchange(self.loop.now, "")
        exchange.body = self._request.body
        head = head_for(b"POST", b"/tokenize", _JSON_LINE, length=len(exchange.body))
        try:
            start = await run_attempt(
                self, exchange, head, self.services.upstream_pools.of(self._worker)
            )
            answer = await read_body(self, start, "tokenize", MAX_ANSWER_BYTES)
            return _decode(answer).tokens if start.response.status == 200 else []
        except (*_FAILURES, msgspec.DecodeError):
            return []

    def ended(self) -> None:
        self._calls.running -= 1

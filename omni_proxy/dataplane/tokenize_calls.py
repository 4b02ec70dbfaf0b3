"""Queries engines for the tokens of texts that were sent to them, independently of the requests.

Invariants: no request waits for such a call; few run at a time, each with a bounded time and a
bounded response; a failed call has no other effect. Must not tokenize texts that no policy has
requested.
"""

from __future__ import annotations

from typing import Final

import msgspec

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.loop.task import PhaseTimeout
from omni_proxy.dataplane.services import ExchangeServices
from omni_proxy.dataplane.upstream.attempt import AttemptFailed, run_attempt
from omni_proxy.dataplane.upstream.side_task import SideTask, head_for, read_body
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.kv_events.known_texts import KnownTexts, TextQuestion
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.response import UpstreamProtocolError

AT_ONCE: Final = 2  # in each process
CALL_SECS: Final = 2.0
MAX_ANSWER_BYTES: Final = 1 << 20
_JSON_LINE: Final = b"content-type: application/json\r\n"
_FAILURES: Final = (AttemptFailed, HttpError, UpstreamProtocolError, OSError, PhaseTimeout)


class _Answer(msgspec.Struct, gc=False):
    tokens: list[int]


_decode = msgspec.json.Decoder(_Answer).decode


class TokenizeCalls:
    def __init__(self, services: ExchangeServices, texts: KnownTexts) -> None:
        self.running = 0
        self.texts = texts
        self._services = services

    def start_due(self) -> None:
        """Start the waiting queries, up to AT_ONCE at a time."""
        while self.running < AT_ONCE and not self._services.loop.ended:
            question = self.texts.take_question()
            if question is None:
                return
            worker = self._services.fleet.find(question.url)
            if worker is not None:
                self.running += 1
                _TokenizeCall(self._services, self, question, worker).start()


class _TokenizeCall(SideTask):
    """POST /tokenize at one engine."""

    __slots__ = ("_calls", "_question", "_worker")

    def __init__(
        self,
        services: ExchangeServices,
        calls: TokenizeCalls,
        question: TextQuestion,
        worker: Worker,
    ) -> None:
        super().__init__(services)
        self._calls, self._question, self._worker = calls, question, worker
        self.deadline = self.loop.now + CALL_SECS

    async def run(self) -> None:
        texts, question = self._calls.texts, self._question
        tokens = await self._tokens()
        if tokens:
            texts.learn(question, tokens)
        else:
            texts.note_silence(question, self.loop.now)

    async def _tokens(self) -> list[int]:
        """The tokens of the text; [] if the call failed."""
        exchange = Exchange(self.loop.now, "")
        exchange.body = self._question.body
        head = head_for(b"POST", b"/tokenize", _JSON_LINE, length=len(exchange.body))
        try:
            start = await run_attempt(self, exchange, head, self.services.pools.of(self._worker))
            answer = await read_body(self, start, "tokenize", MAX_ANSWER_BYTES)
            return _decode(answer).tokens if start.response.status == 200 else []
        except (*_FAILURES, msgspec.DecodeError):
            return []

    def ended(self) -> None:
        self._calls.running -= 1

"""Sends the requests of a workload to a server and measures each answer as its bytes arrive.

Invariant: without `users`, a request is sent at its arrival time regardless of the others, unless
`places` bounds the number in flight. A chat's next turn includes the server's own answer; a chat
whose request failed ends. Every request that ends is measured once; cancelled ones count as
unfinished. It must not repeat a request. Prompt sizes are approximate, one common English word per
token; the figures take token counts from the server's `usage`. With the same seed, equal block ids
give equal text, and a shorter block is a prefix of a longer one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Final

import httpx
import trio

from omni_proxy.cli.bench.measurements import LoadMeasurements, RequestTimes
from omni_proxy.simulate.workload import Request, Workload
from omni_proxy.upstream_http.event_stream import EventStreamError, EventStreamReader, read_chunk

Messages = list[dict[str, str]]
EVENT_STREAM: Final = "text/event-stream"
_EXAMPLE_BYTES: Final = 300  # of an error's body


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The requests to send and their timing."""

    workload: Workload
    texts: PromptTexts
    model: str
    chat: bool  # /v1/chat/completions, else /v1/completions
    speed: float  # of the workload's clock, relative to real time
    users: int | None  # closed loop: each user sends when its last request ended; no arrival times
    places: int | None  # most requests in flight, with arrival times
    max_tokens: int | None
    ignore_eos: bool
    timeout_secs: float


class _FailedError(Exception):
    def __init__(self, kind: str, example: str) -> None:
        super().__init__(example)
        self.kind = kind


class LoadGenerator:
    """One run of a plan."""

    def __init__(
        self, client: httpx.AsyncClient, base: str, plan: LoadPlan, measured: LoadMeasurements
    ) -> None:
        self._client = client
        self._url = f"{base}/v1/chat/completions" if plan.chat else f"{base}/v1/completions"
        self._plan = plan
        self._measured = measured
        self._started_at = measured.started_at
        self._places = None if plan.places is None else trio.Semaphore(plan.places)

    async def run(self) -> None:
        """Run until the last answer has ended."""
        async with trio.open_nursery() as nursery:
            if self._plan.users is not None:
                openings = iter(self._plan.workload.requests)
                for _ in range(self._plan.users):
                    nursery.start_soon(self._serve_user, openings)
                return
            for request in self._plan.workload.requests:
                await trio.sleep_until(self._due(request))
                nursery.start_soon(self._converse, request)

    async def _serve_user(self, openings: Iterator[Request]) -> None:
        for request in openings:
            await self._converse(request)

    def _due(self, request: Request) -> float:
        return self._started_at + request.at / self._plan.speed

    async def _converse(self, request: Request) -> None:
        """Send a request and, in a chat, the turns that follow it."""
        plan = self._plan
        messages: Messages = [{"role": "user", "content": plan.texts.prompt(request)}]
        while True:
            await trio.lowlevel.checkpoint()  # even if the client library has none
            answer = await self._send(request, messages)
            now = (trio.current_time() - self._started_at) * plan.speed
            following = next(iter(plan.workload.next_after(request, now)), None)
            if answer is None or following is None:
                return
            if plan.users is None:
                await trio.sleep_until(self._due(following))
            new_tokens = following.input_tokens - request.input_tokens - request.output_tokens
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": plan.texts.words(new_tokens)})
            request = following

    async def _send(self, request: Request, messages: Messages) -> str | None:
        """The answer's text; None if the request failed."""
        if self._places is None:
            return await self._measure(request, messages)
        async with self._places:
            return await self._measure(request, messages)

    async def _measure(self, request: Request, messages: Messages) -> str | None:
        body = self._body(request, messages)
        times = RequestTimes(trio.current_time())
        late = 0.0 if self._plan.users is not None else times.sent_at - self._due(request)
        self._measured.begin(late)
        try:
            with trio.fail_after(self._plan.timeout_secs):
                await self._exchange(body, times)
        except trio.TooSlowError:
            kind, example = "timeout", f"not complete after {self._plan.timeout_secs:g} s"
        except _FailedError as error:
            kind, example = error.kind, str(error)
        except EventStreamError as error:
            kind, example = "stream", str(error)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            kind, example = "connect", str(error) or type(error).__name__
        except httpx.HTTPError as error:
            kind, example = "connection lost", str(error) or type(error).__name__
        else:
            self._measured.complete(times)
            return "".join(times.text)
        self._measured.fail(kind, example, trio.current_time())
        return None

    def _body(self, request: Request, messages: Messages) -> dict[str, object]:
        plan = self._plan
        most = request.output_tokens
        body: dict[str, object] = {
            "model": plan.model,
            "max_tokens": most if plan.max_tokens is None else min(most, plan.max_tokens),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if plan.ignore_eos:
            body["ignore_eos"] = True
        if plan.chat:
            body["messages"] = messages
        else:
            body["prompt"] = "\n".join(message["content"] for message in messages)
        return body

    async def _exchange(self, body: dict[str, object], times: RequestTimes) -> None:
        """Raises httpx.HTTPError, EventStreamError, _FailedError."""
        headers = {"accept": EVENT_STREAM, "accept-encoding": "identity"}
        async with self._client.stream("POST", self._url, json=body, headers=headers) as response:
            if response.status_code != 200:
                await response.aread()
                text = response.text[:_EXAMPLE_BYTES]
                raise _FailedError(f"status {response.status_code}", text)
            if not response.headers.get("content-type", "").startswith(EVENT_STREAM):
                raise _FailedError("stream", "the response is not an event stream")
            events = EventStreamReader()
            async for chunk in response.aiter_bytes():
                now = trio.current_time()
                for data in events.feed(chunk):
                    times.add(read_chunk(data), now)
        times.ended_at = trio.current_time()
        if not times.finished:
            raise _FailedError("stream", "it ended without finish_reason and [DONE]")


_TEXT: Final = """\
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book
eye job word business issue side kind head house service friend father power hour game line
end member law car city community name president team minute idea body information back
parent face level office door health person art war history party result change morning
reason research girl guy moment air teacher force education food
"""
_WORDS: Final = tuple(_TEXT.split())
_PHRASE_WORDS: Final = 16
_PHRASES: Final = tuple(
    tuple(Random(place).choices(_WORDS, k=_PHRASE_WORDS)) for place in range(4096)
)


class PromptTexts:
    """Generates the prompts of one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._unshared = 0
        # Shared prefixes recur in many prompts.
        self._block = lru_cache(4096)(self._make)

    def prompt(self, request: Request) -> str:
        """The prompt of a request; prompts without blocks share no text."""
        if not request.blocks:
            return self.words(request.input_tokens)
        blocks = (
            self._block(block, request.block_size(place))
            for place, block in enumerate(request.blocks)
        )
        return " ".join(text for text in blocks if text)

    def words(self, tokens: int) -> str:
        """Text that no other prompt shares, for the next message of a chat."""
        self._unshared += 1
        return self._make(-self._unshared, tokens)

    def _make(self, name: int, tokens: int) -> str:
        chance = Random(f"{self._seed} {name}")
        phrases = chance.choices(_PHRASES, k=-(-tokens // _PHRASE_WORDS))
        return " ".join([word for phrase in phrases for word in phrase][:tokens])

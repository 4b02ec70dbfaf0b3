"""POST /v1/completions: OpenAI's text completion, with OpenAI's errors.

Invariant: several prompts, and `n` answers to each, are several requests of one answer, each under
its own `index`; usage is the sum of theirs and rides on the last finish event. What cannot be done
(`best_of`, `echo`, `suffix`) is refused rather than ignored. A token without a text is told as
`token_id:N`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.answer_format import schema_of
from omni_proxy.replica.api.chat_answer import cut_at_stop
from omni_proxy.replica.api.choices import count_of, repeated, usage_of_all
from omni_proxy.replica.api.errors import CLIENT_ERRORS, Refused, enveloped, reply
from omni_proxy.replica.api.fields import json_body, read
from omni_proxy.replica.api.logprobs import MOST_TOP, CompletionLogprobs, ToldTokens
from omni_proxy.replica.api.lowering import (
    Common,
    Whole,
    check_biases,
    new_id,
    sampling_of,
    stops_of,
)
from omni_proxy.replica.api.prompts import MOST as MOST_PROMPTS
from omni_proxy.replica.api.prompts import Prompt, prompts_of
from omni_proxy.replica.api.served import Served
from omni_proxy.replica.api.several import complete_all, ids_of, source_of
from omni_proxy.replica.api.sse import Event, EventStream, stream_response
from omni_proxy.replica.api.unserved import refuse_unserved
from omni_proxy.replica.pipeline.requests import CompletionResult, GenerateChunk, GenerateRequest
from omni_proxy.replica.text.stops import StopStrings

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionBody(Common, kw_only=True):
    prompt: Any
    best_of: Whole | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Whole | None = None


class CompletionRoutes:
    def __init__(self, served: Served) -> None:
        self._served = served

    async def complete(self) -> Response:
        try:
            given = await json_body()
            body = read(CompletionBody, given)
            _refuse_undoable(body)
            refuse_unserved(given)
            check_biases(body, self._served)
            prompts, _ = prompts_of(body.prompt, "prompt")
            schema = await schema_of(self._served, body.response_format)
            return await self._answer(body, prompts, schema)
        except (Refused, *CLIENT_ERRORS) as error:
            raise enveloped(error) from None

    async def _answer(
        self, body: CompletionBody, prompts: list[Prompt], schema: str | None
    ) -> Response:
        served = self._served
        count = count_of(body.n)
        if count * len(prompts) > MOST_PROMPTS:
            told = f"n times the prompts is {count * len(prompts)}; at most {MOST_PROMPTS} are made"
            raise Refused(400, told)
        request_id = new_id(body.request_id)
        lowered = [_lowered(body, prompt, schema) for prompt in prompts]
        requests = [each for request in lowered for each in repeated(request, count)]
        ids = ids_of(request_id, len(requests))
        head = _head(request_id, body.model or served.model_name)
        stops = stops_of(body.stop)
        timing = served.meters.timed(served.model_name)
        if body.stream:
            source = source_of(served.client, requests, ids)
            shape = CompletionDeltas(head, ids, stops, count)
            return stream_response(
                EventStream(source, shape, timing, cut=served.cut_failed_streams)
            )
        try:
            results = await complete_all(served.client, requests, ids)
            timing.ended()
        finally:
            timing.left()
        choices = [_choice(index, result, stops) for index, result in enumerate(results)]
        usage = usage_of_all([result.usage for result in results], count)
        return reply(head | {"choices": choices, "usage": usage})


class CompletionDeltas:
    """The events of a streamed completion; which prompt a chunk answers is told by its id."""

    def __init__(self, head: Event, ids: Sequence[str], stops: Sequence[str], n: int) -> None:
        self._head = head
        self._n = n
        self._index = {request_id: index for index, request_id in enumerate(ids)}
        self._stops = [StopStrings(stops) for _ in ids]
        self._told = [ToldTokens() for _ in ids]
        self._logprobs = [CompletionLogprobs() for _ in ids]
        self._usages: dict[int, dict[str, Any] | None] = {}

    def feed(self, chunk: GenerateChunk) -> Iterator[Event]:
        index = self._index[chunk.request_id]
        text = self._stops[index].feed(chunk.text)
        if chunk.terminal:
            text += self._stops[index].flush()
        logprobs = self._logprobs[index].feed(self._told[index].feed(chunk.logprobs, text))
        if text or logprobs:
            yield self._event(index, text, logprobs, None)
        if chunk.terminal:
            yield self._finish(index, chunk)

    def _finish(self, index: int, chunk: GenerateChunk) -> Event:
        self._usages[index] = chunk.usage
        finish = self._event(index, "", None, chunk.finish_reason or "stop")
        if len(self._usages) < len(self._index):
            return finish
        usage = usage_of_all([self._usages[each] for each in sorted(self._usages)], self._n)
        return finish if usage is None else finish | {"usage": usage}

    def _event(
        self, index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> Event:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._head | {"choices": [choice]}


def _refuse_undoable(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise Refused(400, "best_of must be equal to n: all completions that are made are returned")
    if body.logprobs is not None and not 0 <= body.logprobs <= MOST_TOP:
        raise Refused(400, f"logprobs must be within 0 and {MOST_TOP}, not {body.logprobs}")
    if body.echo:
        raise Refused(400, "echo must be false: the prompt is not given back")
    if body.suffix:
        raise Refused(400, "suffix is not supported: the model continues text, it inserts none")


def _lowered(body: CompletionBody, prompt: Prompt, schema: str | None) -> GenerateRequest:
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return GenerateRequest(
        prompt=prompt,
        model=body.model,
        sampling=sampling_of(body, limit, top=body.logprobs, schema=schema),
        stream=bool(body.stream),
        task="completion",
        stage_sampling=body.stage_sampling or {},
        stage_params=body.stage_params or {},
    )


def _head(request_id: str, model: str) -> Event:
    return {
        "id": f"cmpl-{request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }


def _choice(index: int, result: CompletionResult, stops: Sequence[str]) -> dict[str, Any]:
    text = cut_at_stop(result.text, stops)
    return {
        "index": index,
        "text": text,
        "logprobs": CompletionLogprobs().feed(ToldTokens().feed(result.logprobs, text)),
        "finish_reason": result.finish_reason or "stop",
    }


def mount(app: QuartTrio, served: Served) -> None:
    routes = CompletionRoutes(served)
    app.add_url_rule("/v1/completions", "completions", routes.complete, methods=["POST"])

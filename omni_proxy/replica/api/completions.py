"""POST /v1/completions: OpenAI's text completion, with OpenAI's errors.

Invariant: several prompts are several requests of one answer, each under its own `index`; usage is
the sum of theirs and rides on the last finish event. What cannot be done (`n` or `best_of` above 1,
`echo`, `suffix`) is refused rather than ignored. A token without a text is told as `token_id:N`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.chat_answer import cut_at_stop, usage_of
from omni_proxy.replica.api.errors import CLIENT_ERRORS, Refused, enveloped, reply
from omni_proxy.replica.api.fields import read_body
from omni_proxy.replica.api.lowering import Common, Whole, new_id, sampling_of, stops_of
from omni_proxy.replica.api.prompts import Prompt, prompts_of
from omni_proxy.replica.api.served import Served
from omni_proxy.replica.api.several import Braid, complete_all, ids_of
from omni_proxy.replica.api.sse import Event, EventStream, Source, stream_response
from omni_proxy.replica.pipeline.requests import CompletionResult, GenerateChunk, GenerateRequest
from omni_proxy.replica.text.stops import StopStrings

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionBody(Common, kw_only=True):
    prompt: Any
    n: Whole | None = None
    best_of: Whole | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Whole | None = None


class CompletionRoutes:
    def __init__(self, served: Served) -> None:
        self._served = served

    async def complete(self) -> Response:
        try:
            body = await read_body(CompletionBody)
            _refuse_undoable(body)
            prompts, _ = prompts_of(body.prompt, "prompt")
            return await self._answer(body, prompts)
        except (Refused, *CLIENT_ERRORS) as error:
            raise enveloped(error) from None

    async def _answer(self, body: CompletionBody, prompts: list[Prompt]) -> Response:
        served = self._served
        request_id = new_id(body.request_id)
        requests = [_lowered(body, prompt) for prompt in prompts]
        ids = ids_of(request_id, len(requests))
        head = _head(request_id, body.model or served.model_name)
        stops = stops_of(body.stop)
        timing = served.meters.timed(served.model_name)
        if body.stream:
            generations = [
                served.client.generate(*each) for each in zip(requests, ids, strict=True)
            ]
            source: Source = generations[0] if len(generations) == 1 else Braid(generations)
            shape = CompletionDeltas(head, ids, stops)
            return stream_response(
                EventStream(source, shape, timing, cut=served.cut_failed_streams)
            )
        try:
            results = await complete_all(served.client, requests, ids)
            timing.ended()
        finally:
            timing.left()
        choices = [_choice(index, result, stops) for index, result in enumerate(results)]
        usage = total_usage(result.usage for result in results)
        return reply(head | {"choices": choices, "usage": usage})


class CompletionDeltas:
    """The events of a streamed completion; which prompt a chunk answers is told by its id."""

    def __init__(self, head: Event, ids: Sequence[str], stops: Sequence[str]) -> None:
        self._head = head
        self._index = {request_id: index for index, request_id in enumerate(ids)}
        self._stops = [StopStrings(stops) for _ in ids]
        self._places = [0 for _ in ids]
        self._usages: list[dict[str, Any] | None] = []

    def feed(self, chunk: GenerateChunk) -> Iterator[Event]:
        index = self._index[chunk.request_id]
        text = self._stops[index].feed(chunk.text)
        if chunk.terminal:
            text += self._stops[index].flush()
        logprobs = _logprobs(chunk.logprobs, self._places[index])
        self._places[index] += len(text)
        if text or logprobs:
            yield self._event(index, text, logprobs, None)
        if chunk.terminal:
            yield self._finish(index, chunk)

    def _finish(self, index: int, chunk: GenerateChunk) -> Event:
        self._usages.append(chunk.usage)
        finish = self._event(index, "", None, chunk.finish_reason or "stop")
        usage = total_usage(self._usages) if len(self._usages) == len(self._index) else None
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
    for name in ("n", "best_of"):
        if (getattr(body, name) or 1) != 1:
            raise Refused(400, f"{name} must be 1: this server makes one completion per prompt")
    if body.echo:
        raise Refused(400, "echo must be false: the prompt is not given back")
    if body.suffix:
        raise Refused(400, "suffix is not supported: the model continues text, it inserts none")


def _lowered(body: CompletionBody, prompt: Prompt) -> GenerateRequest:
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return GenerateRequest(
        prompt=prompt,
        model=body.model,
        sampling=sampling_of(body, limit, logprobs=body.logprobs is not None),
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
    return {
        "index": index,
        "text": cut_at_stop(result.text, stops),
        "logprobs": _logprobs(result.logprobs, 0),
        "finish_reason": result.finish_reason or "stop",
    }


def _logprobs(told: Sequence[Sequence[Any]] | None, place: int) -> dict[str, Any] | None:
    """OpenAI's four lists from `[logprob, token id, text or null]` items; `place` is where the
    first one's text begins. Without the texts nobody knows where the others begin: no offsets."""
    if not told:
        return None
    texts: list[Any] = [item[2] if len(item) > 2 else None for item in told]
    offsets = []
    if all(isinstance(text, str) for text in texts):
        for text in texts:
            offsets.append(place)
            place += len(text)
    return {
        "tokens": [text or f"token_id:{item[1]}" for item, text in zip(told, texts, strict=True)],
        "token_logprobs": [item[0] for item in told],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def total_usage(usages: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """The sum of several requests' usage; None where one of them is not known."""
    known = [usage_of(dict(usage)) if usage is not None else None for usage in usages]
    total: dict[str, Any] = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    cached: int | None = None
    for usage in known:
        if usage is None:
            return None
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            total[name] += usage.get(name) or 0
        details = usage.get("prompt_tokens_details")
        if details is not None:
            cached = (cached or 0) + (details.get("cached_tokens") or 0)
    return total if cached is None else total | {"prompt_tokens_details": {"cached_tokens": cached}}


def mount(app: QuartTrio, served: Served) -> None:
    routes = CompletionRoutes(served)
    app.add_url_rule("/v1/completions", "completions", routes.complete, methods=["POST"])

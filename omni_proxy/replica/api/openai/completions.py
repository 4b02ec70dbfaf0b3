"""POST /v1/completions: OpenAI's text completion, with OpenAI's errors.

Invariant: several prompts, and `n` choices for each, become several requests, each with its own
`index`; usage is their sum and is sent with the last finish event. Unsupported fields (`best_of`,
`echo`, `suffix`) are refused, not ignored. A token without text is named `token_id:N`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import (
    CLIENT_ERRORS,
    DetailError,
    json_response,
    to_openai_error,
)
from omni_proxy.replica.api.common.kv_transfers import (
    caller_request_id,
    leg_fields,
    transfer_fields,
    with_transfers,
)
from omni_proxy.replica.api.common.lenient_decode import json_body, validate
from omni_proxy.replica.api.common.sse import Event, EventStream, stream_response
from omni_proxy.replica.api.openai.chat import truncate_at_stop
from omni_proxy.replica.api.openai.logprobs import (
    MAX_TOP_LOGPROBS,
    CompletionLogprobs,
    LogprobAligner,
)
from omni_proxy.replica.api.openai.multi_generation import (
    complete_all,
    merged_stream,
    parse_choice_count,
    request_ids,
    requests_for_choices,
    total_usage,
)
from omni_proxy.replica.api.openai.to_generate_request import (
    MAX_PROMPTS,
    CommonFields,
    Int64,
    Prompt,
    check_biases,
    check_supported_fields,
    new_request_id,
    parse_prompts,
    response_schema,
    sampling_params,
    stop_strings,
)
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.pipeline.requests import CompletionResult, GenerateChunk, GenerateRequest
from omni_proxy.replica.text.stop_strings import StopStrings

DEFAULT_MAX_TOKENS = 16  # OpenAI's default


class CompletionBody(CommonFields, kw_only=True):
    prompt: Any
    best_of: Int64 | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Int64 | None = None


class CompletionRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def complete(self) -> Response:
        try:
            payload = await json_body()
            body = validate(CompletionBody, payload)
            _check_supported(body)
            check_supported_fields(leg_fields(self._context, payload))
            check_biases(body, self._context)
            prompts, _ = parse_prompts(body.prompt, "prompt")
            schema = await response_schema(self._context, body.response_format)
            return await self._respond(body, payload, prompts, schema)
        except (DetailError, *CLIENT_ERRORS) as error:
            raise to_openai_error(error) from None

    async def _respond(
        self, body: CompletionBody, payload: Any, prompts: list[Prompt], schema: str | None
    ) -> Response:
        context = self._context
        count = parse_choice_count(body.n)
        if count * len(prompts) > MAX_PROMPTS:
            message = f"n times the prompts is {count * len(prompts)}; the limit is {MAX_PROMPTS}"
            raise DetailError(400, message)
        request_id = new_request_id(caller_request_id(context, body.request_id, body.rid))
        per_prompt = [_to_generate_request(body, prompt, schema) for prompt in prompts]
        requests = [
            choice for request in per_prompt for choice in requests_for_choices(request, count)
        ]
        requests = with_transfers(context, payload, requests, request_id, len(prompts))
        ids = request_ids(request_id, len(requests), None if body.request_id else body.rid)
        head = _head(request_id, body.model or context.model_name)
        stops = stop_strings(body.stop)
        timing = context.meters.timed(context.model_name)
        if body.stream:
            source = merged_stream(context.client, requests, ids)
            formatter = CompletionChunkFormatter(head, ids, stops, count)
            return stream_response(
                EventStream(source, formatter, timing, cut=context.cut_failed_streams)
            )
        with timing:
            results = await complete_all(context.client, requests, ids)
        choices = [_choice(index, result, stops) for index, result in enumerate(results)]
        usage = total_usage([result.usage for result in results], count)
        response = head | {"choices": choices, "usage": usage}
        return json_response(response | transfer_fields(results))


class CompletionChunkFormatter:
    """The events of a streamed completion; the request id of a chunk determines its index."""

    def __init__(self, head: Event, ids: Sequence[str], stops: Sequence[str], n: int) -> None:
        self._head = head
        self._n = n
        self._index = {request_id: index for index, request_id in enumerate(ids)}
        self._stops = [StopStrings(stops) for _ in ids]
        self._aligners = [LogprobAligner() for _ in ids]
        self._logprobs = [CompletionLogprobs() for _ in ids]
        self._usages: dict[int, dict[str, Any] | None] = {}

    def feed(self, chunk: GenerateChunk) -> Iterator[Event]:
        index = self._index[chunk.request_id]
        text = self._stops[index].feed(chunk.text)
        if chunk.terminal:
            text += self._stops[index].flush()
        logprobs = self._logprobs[index].feed(self._aligners[index].feed(chunk.logprobs, text))
        if text or logprobs:
            yield self._event(index, text, logprobs, None)
        if chunk.terminal:
            yield self._finish(index, chunk)

    def _finish(self, index: int, chunk: GenerateChunk) -> Event:
        self._usages[index] = chunk.usage
        finish = self._event(index, "", None, chunk.finish_reason or "stop")
        if len(self._usages) < len(self._index):
            return finish
        usage = total_usage(
            [self._usages[choice_index] for choice_index in sorted(self._usages)], self._n
        )
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


def _check_supported(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise DetailError(400, "best_of must be equal to n: all generated completions are returned")
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_TOP_LOGPROBS:
        raise DetailError(
            400, f"logprobs must be within 0 and {MAX_TOP_LOGPROBS}, not {body.logprobs}"
        )
    if body.echo:
        raise DetailError(400, "echo must be false: the prompt is not returned")
    if body.suffix:
        raise DetailError(400, "suffix is not supported: the model cannot insert text")


def _to_generate_request(
    body: CompletionBody, prompt: Prompt, schema: str | None
) -> GenerateRequest:
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return GenerateRequest(
        prompt=prompt,
        model=body.model,
        sampling=sampling_params(body, limit, top=body.logprobs, schema=schema),
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
    text = truncate_at_stop(result.text, stops)
    return {
        "index": index,
        "text": text,
        "logprobs": CompletionLogprobs().feed(LogprobAligner().feed(result.logprobs, text)),
        "finish_reason": result.finish_reason or "stop",
    }


def mount(app: QuartTrio, context: RouteContext) -> None:
    routes = CompletionRoutes(context)
    app.add_url_rule("/v1/completions", "completions", routes.complete, methods=["POST"])

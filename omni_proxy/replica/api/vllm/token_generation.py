"""POST /inference/v1/generate: tokens in, tokens out, with the weight version of each token.

Invariant: the ids of a response, in all its events together, are exactly the sampled tokens,
including an end-of-text token; `weight_versions` covers each of them once. Text is decoded only if
`output_mode` requests it. An aborted request returns its partial output.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec import Struct
from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import DetailError, json_response
from omni_proxy.replica.api.common.kv_transfers import leg_fields, transfer_fields, with_transfers
from omni_proxy.replica.api.common.lenient_decode import json_body, problem, validate
from omni_proxy.replica.api.common.sse import Event, EventStream, stream_response
from omni_proxy.replica.api.openai.logprobs import MAX_TOP_LOGPROBS, require_logprobs
from omni_proxy.replica.api.openai.multi_generation import (
    complete_all,
    merged_stream,
    parse_choice_count,
    request_ids,
    requests_for_choices,
)
from omni_proxy.replica.api.openai.to_generate_request import (
    Int64,
    PositiveInt64,
    check_supported_fields,
    sampling_params,
)
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.sglang.generate import TokenId
from omni_proxy.replica.api.vllm.vllm_errors import VllmError, validation_error, vllm_view
from omni_proxy.replica.pipeline.requests import (
    CompletionResult,
    GenerateChunk,
    GenerateRequest,
)

REQUEST_ID_HEADER = "X-Request-Id"
ID_PREFIX = "generate-tokens-"


class TokenSampling(Struct, kw_only=True):
    """vLLM's sampling_params; fields that only concern vLLM's engine are ignored."""

    n: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    max_tokens: PositiveInt64 | None = None
    logprobs: Int64 | None = None
    logit_bias: dict[str, float] | None = None


class TokenStreamOptions(Struct):
    include_usage: bool | None = None


class TokensBody(Struct, kw_only=True):
    token_ids: list[TokenId]
    sampling_params: TokenSampling
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: TokenStreamOptions | None = None
    output_mode: Literal["tokens", "text"] | None = None
    return_token_ids: bool | None = None
    features: Any = None
    content_parts: Any = None
    kv_transfer_params: dict[str, Any] | None = None


class TokenRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def generate(self) -> Response:
        payload = await json_body()
        body = validate(TokensBody, payload)
        if not body.token_ids:
            text = "List should have at least 1 item after validation, not 0"
            raise validation_error([problem("too_short", ("body", "token_ids"), text, [])])
        check_supported_fields(leg_fields(self._context, payload["sampling_params"]))
        for name in ("features", "content_parts"):
            if getattr(body, name):
                raise VllmError(400, f"{name} is not supported: only tokens are", param=name)
        count = parse_choice_count(body.sampling_params.n)
        name = request.headers.get(REQUEST_ID_HEADER) or body.request_id or secrets.token_hex(8)
        ids = request_ids(name, count)
        requests = requests_for_choices(to_request(body), count)
        requests = with_transfers(self._context, payload, requests, name)
        form = TokenResponse(body, f"{ID_PREFIX}{name}", body.model or self._context.model_name)
        timing = self._context.meters.timed(self._context.model_name)
        if body.stream:
            source = merged_stream(self._context.client, requests, ids)
            return stream_response(EventStream(source, TokenEvents(form, ids), timing))
        with timing:
            results = await complete_all(self._context.client, requests, ids)
        return json_response(form.whole(results) | transfer_fields(results))


def to_request(body: TokensBody) -> GenerateRequest:
    """Raises DetailError 400 for log probabilities that are not available."""
    sampling_fields = body.sampling_params
    top = sampling_fields.logprobs
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise DetailError(400, f"logprobs must be within 0 and {MAX_TOP_LOGPROBS}, not {top}")
    if top is not None and body.output_mode == "text":
        raise DetailError(400, "logprobs need tokens as output: omit output_mode")
    sampling = sampling_params(sampling_fields, sampling_fields.max_tokens, top=top)
    return GenerateRequest(
        prompt=body.token_ids, model=body.model, sampling=sampling,
        stream=bool(body.stream), task="completion",
    )  # fmt: skip


class TokenResponse:
    """The response to one body, with its choices."""

    def __init__(self, body: TokensBody, response_id: str, model: str) -> None:
        self.body = body
        self.response_id = response_id
        self._model = model
        self._stop_ids = frozenset(body.sampling_params.stop_token_ids or ())

    @property
    def mode(self) -> str:
        return self.body.output_mode or "tokens"

    def whole(self, results: Sequence[CompletionResult]) -> dict[str, Any]:
        prompt_ids = self.body.token_ids if self.body.return_token_ids else None
        return {
            "request_id": self.response_id,
            "model": self._model,
            "created": int(time.time()),
            "usage": self.usage([result.usage for result in results]),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": prompt_ids,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": self.mode,
            "choices": [self.choice(index, result) for index, result in enumerate(results)],
        }

    def usage(self, usages: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
        """The total usage; the prompt, computed once for all choices, is counted once."""
        first = usages[0] or {}
        details = first.get("prompt_tokens_details") or {}
        prompt = len(self.body.token_ids)
        completion = sum((usage or {}).get("completion_tokens") or 0 for usage in usages)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {
                "cached_tokens": details.get("cached_tokens") or 0,
                "created_cache_tokens": None,
                "multimodal_tokens": None,
            },
            "completion_tokens_details": None,
        }

    def choice(self, index: int, part: CompletionResult | GenerateChunk) -> dict[str, Any]:
        """One choice, with all its tokens or those of one chunk of a stream."""
        ended = isinstance(part, CompletionResult) or part.terminal
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": (part.finish_reason or "stop") if ended else None,
            "stop_reason": self._stop_reason(part.extra.get("stop_hit")) if ended else None,
            "token_ids": list(part.token_ids),
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": part.extra.get("weight_versions") if ended else None,
            "logprobs": self._logprobs(part),
        }
        return choice | ({"text": part.text} if self.mode == "text" else {})

    def _stop_reason(self, hit: str | int | None) -> str | int | None:
        """As in vLLM, an end-of-text token is the reason only if the caller listed it."""
        return hit if isinstance(hit, str) or hit in self._stop_ids else None

    def _logprobs(self, part: CompletionResult | GenerateChunk) -> dict[str, Any] | None:
        count = self.body.sampling_params.logprobs
        if count is None:
            return None
        items = require_logprobs(part.logprobs, bool(part.token_ids)) or ()
        return {"content": [_position(item, count) for item in items]}


def _position(item: Sequence[Any], count: int) -> dict[str, Any]:
    """The log probabilities of one position: the token itself, then its likeliest alternatives."""
    own = {"token_id": item[1], "logprob": item[0], "rank": None}
    others = [
        {"token_id": token, "logprob": logprob, "rank": rank}
        for rank, (logprob, token, *_) in enumerate(item[3] if len(item) > 3 else (), start=1)
    ]
    for other in others:
        if other["token_id"] == own["token_id"]:
            own = own | {"rank": other["rank"]}
    top = [own, *(other for other in others if other["token_id"] != own["token_id"])]
    return own | {"top_logprobs": top[: count + 1]}


class TokenEvents:
    """The events of one streamed response; `ids` are those of its choices, in order."""

    def __init__(self, form: TokenResponse, ids: Sequence[str]) -> None:
        self._form = form
        self._index = {request_id: index for index, request_id in enumerate(ids)}
        self._usages: list[dict[str, Any] | None] = []
        self._first = True

    def feed(self, chunk: GenerateChunk) -> Iterator[Event]:
        if not (chunk.token_ids or chunk.terminal or chunk.text):
            return
        yield self._event([self._form.choice(self._index[chunk.request_id], chunk)], None)
        if not chunk.terminal:
            return
        self._usages.append(chunk.usage)
        options = self._form.body.stream_options
        if options is not None and options.include_usage and len(self._usages) == len(self._index):
            yield self._event([], self._form.usage(self._usages))

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> Event:
        wants_ids = self._first and self._form.body.return_token_ids
        self._first = False
        prompt = {"prompt_token_ids": self._form.body.token_ids} if wants_ids else {}
        return {
            "request_id": self._form.response_id,
            "usage": usage,
            **prompt,
            "output_mode": self._form.mode,
            "choices": choices,
        }


def mount(app: QuartTrio, context: RouteContext) -> None:
    routes = TokenRoutes(context)
    view = vllm_view(routes.generate)
    app.add_url_rule("/inference/v1/generate", "inference_v1_generate", view, methods=["POST"])

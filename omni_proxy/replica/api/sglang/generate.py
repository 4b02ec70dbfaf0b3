"""POST /generate, as a rollout (note:api-server 1.9) and in SGLang's format; POST /abort_request.

A body with `text`, `rid`, `input_ids` as a list of lists, or `stream: true` with `input_ids` is
SGLang's; anything else is a rollout with one of `input_ids`, `prompt`, `messages`. Invariant: a
rollout with logprobs (the default) gets one for each token of the response, or an error. An event
of SGLang's stream has the complete output so far, not a delta. A list of prompts gets a list in the
same order. SGLang's sampling keys that don't apply here are ignored. Aborted requests return their
partial output, with `finish_reason` abort; an unknown id is not an error, since the request may
have ended.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

import trio
from msgspec import Meta, Struct
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import DetailError, empty_response, json_response
from omni_proxy.replica.api.common.kv_transfers import release_kept, transfer_fields, with_transfers
from omni_proxy.replica.api.common.lenient_decode import json_body, validate
from omni_proxy.replica.api.common.media import encode_audio
from omni_proxy.replica.api.common.request_ids import bare_id, id_matcher
from omni_proxy.replica.api.common.sse import Event, EventStream, stream_response
from omni_proxy.replica.api.openai.multi_generation import complete_all, request_ids
from omni_proxy.replica.api.openai.to_generate_request import (
    Int64,
    MediaReader,
    PositiveInt64,
    Prompt,
    is_token_ids,
    new_request_id,
    parse_prompts,
    sampling_params,
)
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.sglang.admin_operations import admin_body
from omni_proxy.replica.pipeline.requests import (
    CompletionResult,
    GenerateChunk,
    GenerateRequest,
    PromptMessage,
)

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's
TokenId = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class SglangSampling(Struct, kw_only=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    sampling_seed: Int64 | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    max_new_tokens: PositiveInt64 | None = None
    ignore_eos: bool | None = None
    n: Int64 | None = None


class SglangBody(Struct, kw_only=True):
    text: Any = None
    input_ids: Any = None
    rid: str | list[str] | None = None
    sampling_params: SglangSampling | None = None
    stream: bool | None = None
    return_logprob: bool | None = None


def is_sglang_request(body: Any) -> bool:
    if not isinstance(body, dict):
        return False
    if body.get("text") is not None or body.get("rid") is not None:
        return True
    ids = body.get("input_ids")
    nested = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    return nested or (ids is not None and bool(body.get("stream")))


class SglangGenerate:
    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def respond(self, payload: Any) -> Response:
        body = validate(SglangBody, payload)
        prompts, batched = _prompts(body)
        request_id = new_request_id(body.rid if isinstance(body.rid, str) else None)
        ids = request_ids(request_id, len(prompts), body.rid)
        context = self._context
        requests = [_to_generate_request(body, prompt) for prompt in prompts]
        requests = with_transfers(context, payload, requests, request_id, len(prompts))
        timing = context.meters.timed(context.model_name)
        logprobs = bool(body.return_logprob)
        if body.stream:
            if batched:
                raise DetailError(
                    400, "a list of prompts cannot be streamed: send one request each"
                )
            generation = context.client.generate(requests[0], ids[0])
            cut = context.cut_failed_streams
            formatter = SglangResponse(ids[0], logprobs=logprobs)
            return stream_response(EventStream(generation, formatter, timing, cut=cut))
        started_secs = trio.current_time()
        with timing:
            results = await complete_all(context.client, requests, ids)
        responses = []
        for response_id, result in zip(ids, results, strict=True):
            response = SglangResponse(response_id, logprobs=logprobs, started_secs=started_secs)
            responses.append(response.complete(result))
        return json_response(responses if batched else responses[0] | transfer_fields(results))


class SglangResponse:
    """The accumulated output of one request."""

    def __init__(
        self, request_id: str, *, logprobs: bool, started_secs: float | None = None
    ) -> None:
        self._request_id = request_id
        self._wants_logprobs = logprobs
        self._started_secs = trio.current_time() if started_secs is None else started_secs
        self._text = ""
        self._tokens: list[int] = []
        self._logprobs: list[Any] | None = None

    def complete(self, result: CompletionResult) -> dict[str, Any]:
        """Raises DetailError 501 if logprobs were requested and the pipeline has none."""
        if self._wants_logprobs and result.logprobs is None:
            message = "this pipeline returns no logprobs; omit return_logprob"
            raise DetailError(501, message)
        self._add(result.text, result.token_ids, result.logprobs)
        return self._event(result.finish_reason or "stop", result)

    def feed(self, chunk: GenerateChunk) -> Iterator[Event]:
        if not (chunk.text or chunk.token_ids or chunk.terminal):
            return
        self._add(chunk.text, chunk.token_ids, chunk.logprobs)
        reason = (chunk.finish_reason or "stop") if chunk.terminal else None
        yield self._event(reason, chunk)

    def _add(self, text: str, tokens: Sequence[int], logprobs: Sequence[Any] | None) -> None:
        self._text += text
        self._tokens += tokens
        if logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *logprobs]

    def _event(self, reason: str | None, latest: GenerateChunk | CompletionResult) -> Event:
        usage = latest.usage or {}
        details = usage.get("prompt_tokens_details") or {}
        generated = usage.get("completion_tokens", len(self._tokens))
        finish: dict[str, Any] | None = None
        if reason is not None:
            finish = {"type": reason} | ({"length": generated} if reason == "length" else {})
            if reason == "abort":
                finish["message"] = "Aborted"
        meta: dict[str, Any] = {
            "id": self._request_id,
            "finish_reason": finish,
            "prompt_tokens": usage.get("prompt_tokens"),
            "weight_version": latest.weight_version,
            "completion_tokens": generated,
            "cached_tokens": details.get("cached_tokens") or 0,
            "e2e_latency": trio.current_time() - self._started_secs,
        }
        if self._wants_logprobs:
            meta["output_token_logprobs"] = self._logprobs
        return {"text": self._text, "output_ids": list(self._tokens), "meta_info": meta}


def _prompts(body: SglangBody) -> tuple[list[Prompt], bool]:
    """Return the prompts, and whether the body had a list of them. Raises DetailError 400."""
    if body.text is not None and body.input_ids is not None:
        raise DetailError(400, "set one of text and input_ids, not both")
    if body.input_ids is None:
        if isinstance(body.text, str) or (
            isinstance(body.text, list) and all(isinstance(text, str) for text in body.text)
        ):
            return parse_prompts(body.text, "text")
        raise DetailError(400, "text must be a string or a list of strings")
    if is_token_ids(body.input_ids) or (
        isinstance(body.input_ids, list) and all(map(is_token_ids, body.input_ids))
    ):
        return parse_prompts(body.input_ids, "input_ids")
    raise DetailError(400, "input_ids must be a list of token ids, or a list of such lists")


def _to_generate_request(body: SglangBody, prompt: Prompt) -> GenerateRequest:
    sampling_fields = body.sampling_params or SglangSampling()
    if (sampling_fields.n or 1) != 1:
        raise DetailError(
            400, "sampling_params.n must be 1: this server returns one response per prompt"
        )
    limit = sampling_fields.max_new_tokens
    sampling = sampling_params(
        sampling_fields,
        DEFAULT_MAX_NEW_TOKENS if limit is None else limit,
        logprobs=bool(body.return_logprob),
    )
    if sampling_fields.sampling_seed is not None:
        sampling = replace(sampling, seed=sampling_fields.sampling_seed)
    return GenerateRequest(
        prompt=prompt, sampling=sampling, stream=bool(body.stream), task="completion"
    )


class RolloutSampling(Struct, kw_only=True, forbid_unknown_fields=True):
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Int64 | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    seed: Int64 | None = None
    max_new_tokens: PositiveInt64 | None = None
    max_tokens: PositiveInt64 | None = None


class RolloutMessage(Struct):
    role: str
    content: Any = None


class RolloutBody(Struct, kw_only=True):
    input_ids: list[TokenId] | None = None
    prompt: str | None = None
    messages: list[RolloutMessage] | None = None
    model: str | None = None
    sampling_params: RolloutSampling | None = None
    stream: bool | None = None
    stage_sampling: dict[str, dict[str, Any]] | None = None
    stage_params: dict[str, dict[str, Any]] | None = None
    output_modalities: list[str] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    return_logprob: bool | None = None
    return_omni_rollout: bool | None = None
    return_routed_experts: bool | None = None
    return_indexer_topk: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.return_logprob is not False


class GenerateRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._sglang = SglangGenerate(context)

    async def generate(self) -> Response:
        payload = await json_body()
        if is_sglang_request(payload):
            return await self._sglang.respond(payload)
        return await self._rollout(validate(RolloutBody, payload), payload)

    async def _rollout(self, body: RolloutBody, payload: Any) -> Response:
        _check_supported(body)
        context, request_id = self._context, new_request_id()
        request = await self._to_generate_request(body)
        request = with_transfers(context, payload, [request], request_id)[0]
        timing = context.meters.timed(context.model_name)
        with timing:
            result = await context.client.completion(request, request_id)
        return json_response(_response_body(body, result) | transfer_fields([result]))

    async def _to_generate_request(self, body: RolloutBody) -> GenerateRequest:
        sampling = body.sampling_params or RolloutSampling()
        prompt: str | list[int] | list[PromptMessage]
        media: dict[str, list[Any]] = {}
        if body.messages is not None:
            reader = MediaReader(self._context)
            turns = [(message.role, message.content) for message in body.messages]
            prompt = await reader.messages(turns, {})
            media = reader.media
        else:
            prompt = body.prompt if body.prompt is not None else body.input_ids or []
        return GenerateRequest(
            prompt=prompt,
            model=body.model,
            sampling=sampling_params(
                sampling,
                sampling.max_new_tokens or sampling.max_tokens,
                logprobs=body.wants_logprobs,
            ),
            output_modalities=tuple(body.output_modalities or ("text",)),
            task="chat" if body.messages is not None else "completion",
            metadata={"request_metadata": body.metadata} if body.metadata else {},
            stage_sampling=body.stage_sampling or {},
            stage_params=body.stage_params or {},
            media=media,
        )


def _check_supported(body: RolloutBody) -> None:
    """Raises DetailError 400 for fields that this server does not support."""
    prompt_fields = [name for name in ("input_ids", "prompt", "messages") if getattr(body, name)]
    if len(prompt_fields) != 1:
        suffix = f", not {' and '.join(prompt_fields)}" if prompt_fields else ""
        raise DetailError(400, f"set exactly one of input_ids, prompt and messages{suffix}")
    if body.stream:
        raise DetailError(400, "stream=true is not supported by /generate with prompt or messages")
    flags = ("return_omni_rollout", "return_routed_experts", "return_indexer_topk")
    for name in (*flags, "multimodal_train_inputs"):
        if getattr(body, name):
            raise DetailError(400, f"{name} is not supported by this server's model")


def _response_body(body: RolloutBody, result: CompletionResult) -> dict[str, Any]:
    """Raises DetailError 501 or 500 if requested logprobs are missing."""
    usage = result.usage or {}
    generated = usage.get("completion_tokens")
    if body.wants_logprobs:
        if result.logprobs is None:
            message = "this pipeline returns no logprobs; send return_logprob=false"
            raise DetailError(501, message)
        if generated is not None and len(result.logprobs) != generated:
            count = len(result.logprobs)
            message = f"the pipeline returned {count} logprobs for {generated} completion tokens"
            raise DetailError(500, message)
    reason = result.finish_reason or "stop"
    details = usage.get("prompt_tokens_details") or {}
    return {
        "text": result.text,
        "audio": _audio_body(result),
        "meta_info": {
            "finish_reason": {"type": reason, "length": generated if reason == "length" else None},
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": generated,
            "cached_tokens": details.get("cached_tokens") or 0,
            "weight_version": result.weight_version,
            "request_metadata": body.metadata or {},
            "output_token_logprobs": result.logprobs if body.wants_logprobs else None,
            "omni_rollout": None,
        },
    }


def _audio_body(result: CompletionResult) -> dict[str, Any] | None:
    if not result.audio:
        return None
    encoded = encode_audio(result.audio, result.sample_rate, "wav")
    data = base64.b64encode(encoded).decode("ascii")
    return {"data": data, "path": None, "format": "wav", "sample_rate": result.sample_rate}


class AbortBody(Struct, kw_only=True):
    """`rid` names one request with all its choices; with `prefix`, every id that starts with it."""

    rid: str | None = None
    prefix: bool | None = None
    abort_all: bool | None = None


class AbortRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def abort(self) -> Response:
        body = validate(AbortBody, await admin_body(self._context))
        client, rid = self._context.client, body.rid
        if body.abort_all:
            client.end_early(lambda _: True)
        elif not rid:
            raise DetailError(400, "set rid (with prefix: true for all ids that start with it), or "
                              "abort_all: true")  # fmt: skip
        elif body.prefix:
            client.end_early(lambda request_id: request_id.startswith(rid))
        else:
            client.end_early(id_matcher([rid]))
        if body.abort_all or not rid:
            await release_kept(self._context, {"all": True})
        else:
            selector = {"prefix": rid} if body.prefix else {"ids": [rid, bare_id(rid)]}
            await release_kept(self._context, selector)
        return empty_response()


def mount(app: QuartTrio, context: RouteContext) -> None:
    generate = GenerateRoutes(context).generate
    app.add_url_rule("/generate", "generate", generate, methods=["POST"])
    abort = AbortRoutes(context).abort
    app.add_url_rule("/abort_request", "abort_request", abort, methods=["POST"])

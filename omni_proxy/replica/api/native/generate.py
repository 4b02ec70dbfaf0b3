"""POST /generate in two formats: an RL trainer's rollout (api-server.md 1.9), and SGLang's own.

A body with `text`, `rid`, `input_ids` as a list of lists, or `stream: true` with `input_ids` is
SGLang's (`sglang_generate`). Anything else is a rollout with one of `input_ids`, `prompt`,
`messages`. Invariant: a rollout with logprobs (the default) gets one for each token of the
response, or an error.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any

from msgspec import Meta, Struct
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import DetailError, json_response
from omni_proxy.replica.api.common.fields import json_body, validate
from omni_proxy.replica.api.common.media import encode_audio
from omni_proxy.replica.api.native.sglang_generate import SglangGenerate, is_sglang_request
from omni_proxy.replica.api.openai.chat_media import MediaReader
from omni_proxy.replica.api.openai.to_generate_request import (
    Int64,
    PositiveInt64,
    new_request_id,
    stop_strings,
)
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.pipeline.requests import (
    CompletionResult,
    GenerateRequest,
    PromptMessage,
    SamplingParams,
)

TokenId = Annotated[int, Meta(ge=0, le=2**63 - 1)]


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
        self._native = SglangGenerate(context)

    async def generate(self) -> Response:
        given = await json_body()
        if is_sglang_request(given):
            return await self._native.answer(given)
        return await self._rollout(validate(RolloutBody, given))

    async def _rollout(self, body: RolloutBody) -> Response:
        _check_supported(body)
        context = self._context
        request = await self._to_generate_request(body)
        timing = context.meters.timed(context.model_name)
        try:
            result = await context.client.completion(request, new_request_id())
            timing.finish()
        finally:
            timing.close()
        return json_response(_response_body(body, result))

    async def _to_generate_request(self, body: RolloutBody) -> GenerateRequest:
        sampling = body.sampling_params or RolloutSampling()
        prompt: str | list[int] | list[PromptMessage]
        media: dict[str, list[Any]] = {}
        if body.messages is not None:
            reader = MediaReader(self._context)
            given = [(message.role, message.content) for message in body.messages]
            prompt = await reader.messages(given, {})
            media = reader.media
        else:
            prompt = body.prompt if body.prompt is not None else body.input_ids or []
        return GenerateRequest(
            prompt=prompt,
            model=body.model,
            sampling=_sampling(sampling, logprobs=body.wants_logprobs),
            output_modalities=tuple(body.output_modalities or ("text",)),
            task="chat" if body.messages is not None else "completion",
            metadata={"request_metadata": body.metadata} if body.metadata else {},
            stage_sampling=body.stage_sampling or {},
            stage_params=body.stage_params or {},
            media=media,
        )


def _check_supported(body: RolloutBody) -> None:
    """Raises DetailError 400 for fields that this server does not support."""
    named = [name for name in ("input_ids", "prompt", "messages") if getattr(body, name)]
    if len(named) != 1:
        suffix = f", not {' and '.join(named)}" if named else ""
        raise DetailError(400, f"give exactly one of input_ids, prompt and messages{suffix}")
    if body.stream:
        raise DetailError(400, "stream=true is not supported by /generate with prompt or messages")
    flags = ("return_omni_rollout", "return_routed_experts", "return_indexer_topk")
    for name in (*flags, "multimodal_train_inputs"):
        if getattr(body, name):
            raise DetailError(
                400, f"{name} is not supported: this server's model has nothing of it"
            )


def _sampling(given: RolloutSampling, *, logprobs: bool) -> SamplingParams:
    return SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        seed=given.seed,
        max_new_tokens=given.max_new_tokens or given.max_tokens,
        stop=stop_strings(given.stop),
        stop_token_ids=tuple(given.stop_token_ids or ()),
        logprobs=logprobs,
    )


def _response_body(body: RolloutBody, result: CompletionResult) -> dict[str, Any]:
    """Raises DetailError 501 or 500 if requested logprobs are missing."""
    usage = result.usage or {}
    generated = usage.get("completion_tokens")
    if body.wants_logprobs:
        if result.logprobs is None:
            message = "this pipeline returns no logprobs; send return_logprob=false to go without"
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


def mount(app: QuartTrio, context: RouteContext) -> None:
    routes = GenerateRoutes(context)
    app.add_url_rule("/generate", "generate", routes.generate, methods=["POST"])

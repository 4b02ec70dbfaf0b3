"""POST /generate in two dialects: an RL trainer's rollout (api-server.md 1.9), and SGLang's own.

`text`, `rid`, `input_ids` as a list of lists, or `stream: true` with `input_ids`: SGLang's
(`generate_native`). Anything else is a rollout: one of `input_ids`, `prompt`, `messages`.
Invariant: a rollout that asks for logprobs (it does unless it says no) gets one for each token that
it is told of, or an error.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any

from msgspec import Meta, Struct
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.errors import Refused, reply
from omni_proxy.replica.api.fields import json_body, read
from omni_proxy.replica.api.generate_native import NativeRoute, speaks_native
from omni_proxy.replica.api.lowering import Count, Whole, new_id, stops_of
from omni_proxy.replica.api.media import MediaReader
from omni_proxy.replica.api.served import Served
from omni_proxy.replica.api.speaking import encode
from omni_proxy.replica.pipeline.requests import (
    CompletionResult,
    GenerateRequest,
    Message,
    SamplingParams,
)

TokenId = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class RolloutSampling(Struct, kw_only=True, forbid_unknown_fields=True):
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Whole | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    seed: Whole | None = None
    max_new_tokens: Count | None = None
    max_tokens: Count | None = None


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
    def __init__(self, served: Served) -> None:
        self._served = served
        self._native = NativeRoute(served)

    async def generate(self) -> Response:
        given = await json_body()
        if speaks_native(given):
            return await self._native.answer(given)
        return await self._rollout(read(RolloutBody, given))

    async def _rollout(self, body: RolloutBody) -> Response:
        _refuse_undoable(body)
        served = self._served
        request = await self._lowered(body)
        timing = served.meters.timed(served.model_name)
        try:
            result = await served.client.completion(request, new_id())
            timing.ended()
        finally:
            timing.left()
        return reply(_answer(body, result))

    async def _lowered(self, body: RolloutBody) -> GenerateRequest:
        sampling = body.sampling_params or RolloutSampling()
        prompt: str | list[int] | list[Message]
        media: dict[str, list[Any]] = {}
        if body.messages is not None:
            reader = MediaReader(self._served)
            given = [(each.role, each.content) for each in body.messages]
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


def _refuse_undoable(body: RolloutBody) -> None:
    """Raises Refused 400."""
    named = [name for name in ("input_ids", "prompt", "messages") if getattr(body, name)]
    if len(named) != 1:
        told = f", not {' and '.join(named)}" if named else ""
        raise Refused(400, f"give exactly one of input_ids, prompt and messages{told}")
    if body.stream:
        raise Refused(400, "stream=true is not supported by /generate with prompt or messages")
    asked = ("return_omni_rollout", "return_routed_experts", "return_indexer_topk")
    for name in (*asked, "multimodal_train_inputs"):
        if getattr(body, name):
            raise Refused(400, f"{name} is not supported: this server's model has nothing of it")


def _sampling(given: RolloutSampling, *, logprobs: bool) -> SamplingParams:
    return SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        seed=given.seed,
        max_new_tokens=given.max_new_tokens or given.max_tokens,
        stop=stops_of(given.stop),
        stop_token_ids=tuple(given.stop_token_ids or ()),
        logprobs=logprobs,
    )


def _answer(body: RolloutBody, result: CompletionResult) -> dict[str, Any]:
    """Raises Refused 501 or 500 where the logprobs that were asked for are not there."""
    usage = result.usage or {}
    generated = usage.get("completion_tokens")
    if body.wants_logprobs:
        if result.logprobs is None:
            told = "this pipeline returns no logprobs; send return_logprob=false to go without"
            raise Refused(501, told)
        if generated is not None and len(result.logprobs) != generated:
            count = len(result.logprobs)
            told = f"the pipeline returned {count} logprobs for {generated} completion tokens"
            raise Refused(500, told)
    reason = result.finish_reason or "stop"
    details = usage.get("prompt_tokens_details") or {}
    return {
        "text": result.text,
        "audio": _audio(result),
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


def _audio(result: CompletionResult) -> dict[str, Any] | None:
    if not result.audio:
        return None
    whole = encode(result.audio, result.sample_rate, "wav")
    data = base64.b64encode(whole).decode("ascii")
    return {"data": data, "path": None, "format": "wav", "sample_rate": result.sample_rate}


def mount(app: QuartTrio, served: Served) -> None:
    routes = GenerateRoutes(served)
    app.add_url_rule("/generate", "generate", routes.generate, methods=["POST"])

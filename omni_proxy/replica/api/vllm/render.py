"""POST /v1/chat/completions/render and /v1/completions/render: a request as its tokens.

What they return is a body for /inference/v1/generate: the same tokens and the same sampling, so
that it generates what the rendered request would. Nothing is generated here.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import DetailError, json_response
from omni_proxy.replica.api.common.lenient_decode import json_body, validate
from omni_proxy.replica.api.common.prompt_tokens import PromptTokens
from omni_proxy.replica.api.openai.chat import ChatBody
from omni_proxy.replica.api.openai.chat_media import MediaReader
from omni_proxy.replica.api.openai.completions import DEFAULT_MAX_TOKENS, CompletionBody
from omni_proxy.replica.api.openai.to_generate_request import (
    CommonFields,
    check_no_tools,
    check_supported_fields,
    parse_prompts,
    stop_strings,
)
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.vllm.vllm_errors import vllm_view
from omni_proxy.replica.text.sampling import Sampling

NO_FORMAT = "response_format has no place among tokens: generate with /v1/chat/completions"
_DEFAULTS = Sampling()
# The rest of what vLLM returns, which means nothing here.
_UNSET: dict[str, Any] = {
    "token_offsets": None, "features": None, "content_parts": None,
}  # fmt: skip
_REST: dict[str, Any] = {
    "reasoning_ended": None, "reasoning_parser_kwargs": None, "return_token_ids": None,
    "output_mode": "tokens", "stream_options": None, "cache_salt": None, "priority": 0,
    "kv_transfer_params": None, "ec_transfer_params": None,
}  # fmt: skip


class RenderRoutes:
    def __init__(self, context: RouteContext, tokens: PromptTokens) -> None:
        self._context = context
        self._tokens = tokens

    async def chat(self) -> Response:
        given = await json_body()
        body = validate(ChatBody, given)
        _check(given)
        check_no_tools(given)
        turns = [(message.role, message.content) for message in body.messages]
        messages = await MediaReader(self._context).messages(turns, {})
        tokens = await self._tokens.of_messages(messages)
        limit = body.max_completion_tokens or body.max_tokens
        sampling = _sampling(body, limit, _top(body.logprobs, body.top_logprobs))
        return json_response(self._rendered("chatcmpl", body, tokens, sampling))

    async def completions(self) -> Response:
        """One for each prompt."""
        given = await json_body()
        body = validate(CompletionBody, given)
        _check(given)
        prompts, _ = parse_prompts(body.prompt, "prompt")
        sampling = _sampling(body, body.max_tokens or DEFAULT_MAX_TOKENS, body.logprobs)
        rendered = []
        for prompt in prompts:
            tokens = await self._tokens.of_text(prompt) if isinstance(prompt, str) else prompt
            rendered.append(self._rendered("cmpl", body, tokens, sampling))
        return json_response(rendered)

    def _rendered(
        self, kind: str, body: CommonFields, tokens: list[int], sampling: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "request_id": f"{kind}-{body.request_id or uuid4().hex[:16]}",
            "token_ids": tokens,
            **_UNSET,
            "sampling_params": sampling,
            "model": body.model or self._context.model_name,
            "stream": bool(body.stream),
            **_REST,
        }


def _check(given: dict[str, Any]) -> None:
    """Raises DetailError 400 for what /inference/v1/generate could not take over."""
    check_supported_fields(given)
    if (given.get("response_format") or {}).get("type", "text") != "text":
        raise DetailError(400, NO_FORMAT)


def _top(logprobs: bool | None, top: int | None) -> int | None:
    return (top or 0) if logprobs else None


def _sampling(body: CommonFields, limit: int | None, top: int | None) -> dict[str, Any]:
    """vLLM's sampling_params; what is unset has the default that the stage has for it."""
    defaults = {
        name: getattr(_DEFAULTS, name) if getattr(body, name) is None else getattr(body, name)
        for name in (
            "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p",
            "min_p",
        )
    }  # fmt: skip
    optional = {
        "top_k": body.top_k,
        "seed": body.seed,
        "n": body.n,
        "max_tokens": limit,
        "logprobs": top,
        "ignore_eos": body.ignore_eos,
        "logit_bias": body.logit_bias,
    }
    return {
        **defaults,
        "stop": list(stop_strings(body.stop)),
        "stop_token_ids": body.stop_token_ids or [],
        **{name: value for name, value in optional.items() if value is not None},
        "output_kind": 2,
        "skip_clone": True,
        "bad_words": [],
        "skip_reading_prefix_cache": False,
    }


def mount(app: QuartTrio, context: RouteContext, tokens: PromptTokens) -> None:
    routes = RenderRoutes(context, tokens)
    views = {
        "/v1/chat/completions/render": routes.chat,
        "/v1/completions/render": routes.completions,
    }
    for path, view in views.items():
        name = path.strip("/").replace("/", "_")
        app.add_url_rule(path, name, vllm_view(view), methods=["POST"])

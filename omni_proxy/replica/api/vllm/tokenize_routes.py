"""Requests as tokens: POST /tokenize, /detokenize, and render routes of chat and completions.

vLLM and SGLang both have /tokenize and /detokenize: these respond like vLLM unless only SGLang's
routes are served; `/v1/tokenize` and `/v1/detokenize` always respond like SGLang, which accepts
lists of prompts and returns `text` instead of vLLM's `prompt`. Invariant: nothing is generated. A
rendered request is a body for /inference/v1/generate with the same tokens and the same sampling, so
it generates the same response as the original request. The model's tokenizer and chat template
(`PromptTokens`) are loaded once, in a thread, for the first request that needs them; their tokens
are those that the pipeline's prompt stage computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import trio
from msgspec import Struct
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import DetailError, json_response
from omni_proxy.replica.api.common.lenient_decode import json_body, problem, validate
from omni_proxy.replica.api.openai.chat import ChatBody
from omni_proxy.replica.api.openai.completions import DEFAULT_MAX_TOKENS, CompletionBody
from omni_proxy.replica.api.openai.to_generate_request import (
    MAX_PROMPTS,
    CommonFields,
    MediaReader,
    check_no_tools,
    check_supported_fields,
    is_token_ids,
    parse_prompts,
    stop_strings,
)
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.sglang.admin_operations import View
from omni_proxy.replica.api.sglang.generate import TokenId
from omni_proxy.replica.api.vllm.vllm_errors import VllmError, validation_error, vllm_view
from omni_proxy.replica.pipeline.requests import PromptMessage
from omni_proxy.replica.pipeline.stage import CallerError
from omni_proxy.replica.text.sampling import Sampling

if TYPE_CHECKING:
    from omni_proxy.replica.stages.prepare import PromptBuilder

UNSUPPORTED = ("chat_template", "continue_final_message")
NO_TOKENIZER = "this server was started without a text model, so it has no tokenizer"
NO_FORMAT = "response_format cannot be rendered as tokens: use /v1/chat/completions"
_DEFAULTS = Sampling()
# vLLM's other keys, which are always null here.
_UNSET: dict[str, Any] = {
    "token_offsets": None, "features": None, "content_parts": None,
}  # fmt: skip
_REST: dict[str, Any] = {
    "reasoning_ended": None, "reasoning_parser_kwargs": None, "return_token_ids": None,
    "output_mode": "tokens", "stream_options": None, "cache_salt": None, "priority": 0,
    "kv_transfer_params": None, "ec_transfer_params": None,
}  # fmt: skip


class TokenizedMessage(Struct):
    role: str
    content: Any = None


class TokenizeBody(Struct, kw_only=True):
    """vLLM's body: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[TokenizedMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class PromptsBody(Struct, kw_only=True):
    """SGLang's body."""

    model: str | None = None
    prompt: str | list[str]
    add_special_tokens: bool | None = None


class TokenListsBody(Struct, kw_only=True):
    model: str | None = None
    tokens: list[Any]
    skip_special_tokens: bool | None = None


class PromptTokens:
    """Counts and decodes tokens of `model`, a model's name or file; "" if there is none."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = trio.Lock()
        self._builder: PromptBuilder | None = None

    async def of_text(self, text: str) -> list[int]:
        """Tokens of a text. Raises DetailError 501 without a model, 400 for an invalid prompt."""
        builder = await self._loaded()
        return await trio.to_thread.run_sync(_checked, builder.text_tokens, text)

    async def of_messages(
        self, messages: Sequence[PromptMessage], *, generation_prompt: bool = True
    ) -> list[int]:
        """The tokens of a chat, without those of its media. Raises DetailError."""
        builder = await self._loaded()
        plain = [{"role": message.role, "content": message.content} for message in messages]

        def tokens() -> list[int]:
            return builder.message_tokens(plain, generation_prompt=generation_prompt)

        return await trio.to_thread.run_sync(_checked, tokens)

    async def spelled(self, ids: Iterable[int]) -> list[str]:
        """The text of each token, or the name of a control token. Raises DetailError."""
        tokenizer = (await self._loaded()).tokenizer
        pieces = []
        for token in ids:
            if not 0 <= token < tokenizer.vocab_size:
                raise DetailError(
                    400,
                    f"Token id {token} is out of vocabulary: the model's tokens are 0 to "
                    f"{tokenizer.vocab_size - 1}",
                )
            name = tokenizer.control_name(token)
            text = tokenizer.token_bytes(token).decode("utf-8", errors="replace")
            pieces.append(text if name is None else name)
        return pieces

    async def text(self, ids: Sequence[int], *, control_names: bool) -> str:
        """The text of these tokens together; a character may span several tokens."""
        names = await self.spelled(ids)
        tokenizer = (await self._loaded()).tokenizer
        parts, run = [], list[int]()
        for token, name in zip(ids, names, strict=True):
            if control_names and tokenizer.control_name(token) is not None:
                parts += [tokenizer.decode(run), name]
                run = []
            else:
                run.append(token)
        return "".join([*parts, tokenizer.decode(run)])

    async def context(self) -> int:
        """Maximum number of tokens of a prompt and its response together."""
        return (await self._loaded()).context

    async def _loaded(self) -> PromptBuilder:
        if self._builder is None:
            if not self._model:
                raise DetailError(501, NO_TOKENIZER)
            async with self._lock:
                if self._builder is None:
                    self._builder = await trio.to_thread.run_sync(_load, self._model)
        return self._builder


def _load(model: str) -> PromptBuilder:
    # Import it only here: most servers never tokenize for a route.
    from omni_proxy.replica.stages.prepare import load_prompt_builder

    return load_prompt_builder(model)


def _checked(function: object, *arguments: object) -> list[int]:
    assert callable(function)
    try:
        tokens: list[int] = function(*arguments)
    except CallerError as error:
        raise DetailError(400, str(error)) from None
    return tokens


class TokenizeRoutes:
    def __init__(self, context: RouteContext, tokens: PromptTokens) -> None:
        self._context = context
        self._tokens = tokens

    async def tokenize(self) -> Response:
        payload = await json_body()
        body = validate(TokenizeBody, payload)
        if body.prompt is None and body.messages is None:
            missing = [
                problem("missing", ("body", name), "Field required", payload)
                for name in ("prompt", "messages")
            ]
            raise validation_error(missing)
        for name in UNSUPPORTED:
            if payload.get(name):
                raise VllmError(400, f"{name} is not supported: only the model's own template "
                                "is used", param=name)  # fmt: skip
        if body.prompt is not None:
            tokens = await self._tokens.of_text(body.prompt)
        else:
            messages, opened = await self._messages(body), body.add_generation_prompt is not False
            tokens = await self._tokens.of_messages(messages, generation_prompt=opened)
        names = await self._tokens.spelled(tokens) if body.return_token_strs else None
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": await self._max_tokens(),
                "tokens": tokens,
                "token_strs": names,
            }
        )

    async def detokenize(self) -> Response:
        body = validate(DetokenizeBody, await json_body())
        return json_response({"prompt": await self._tokens.text(body.tokens, control_names=True)})

    async def tokenize_prompts(self) -> Response:
        body = validate(PromptsBody, await json_body())
        if isinstance(body.prompt, str):
            tokens: Any = await self._tokens.of_text(body.prompt)
            count: Any = len(tokens)
        else:
            if len(body.prompt) > MAX_PROMPTS:
                raise DetailError(400, f"prompt has {len(body.prompt)} elements; the "
                                  f"limit is {MAX_PROMPTS}")  # fmt: skip
            tokens = [await self._tokens.of_text(text) for text in body.prompt]
            count = [len(prompt_tokens) for prompt_tokens in tokens]
        size = await self._max_tokens()
        return json_response({"tokens": tokens, "count": count, "max_model_len": size})

    async def detokenize_lists(self) -> Response:
        body = validate(TokenListsBody, await json_body())
        names = body.skip_special_tokens is False
        text: Any
        if not body.tokens or is_token_ids(body.tokens):
            text = await self._tokens.text(body.tokens, control_names=names)
        elif all(not token_ids or is_token_ids(token_ids) for token_ids in body.tokens):
            text = [
                await self._tokens.text(token_ids, control_names=names) for token_ids in body.tokens
            ]
        else:
            raise DetailError(400, "tokens must be a list of token ids, or a list of such lists")
        return json_response({"text": text})

    async def _messages(self, body: TokenizeBody) -> list[PromptMessage]:
        turns = [(message.role, message.content) for message in body.messages or ()]
        return await MediaReader(self._context).messages(turns, {})

    async def _max_tokens(self) -> int:
        """The stage's limit, which may be lower than the model's."""
        infos = self._context.client.stage_info().values()
        sizes: list[int] = [info["context"] for info in infos if "context" in info]
        return min([await self._tokens.context(), *sizes])


class RenderRoutes:
    def __init__(self, context: RouteContext, tokens: PromptTokens) -> None:
        self._context = context
        self._tokens = tokens

    async def chat(self) -> Response:
        payload = await json_body()
        body = validate(ChatBody, payload)
        _check(payload)
        check_no_tools(payload)
        turns = [(message.role, message.content) for message in body.messages]
        messages = await MediaReader(self._context).messages(turns, {})
        tokens = await self._tokens.of_messages(messages)
        limit = body.max_completion_tokens or body.max_tokens
        sampling = _sampling(body, limit, _top(body.logprobs, body.top_logprobs))
        return json_response(self._rendered("chatcmpl", body, tokens, sampling))

    async def completions(self) -> Response:
        """A list with one rendered request for each prompt."""
        payload = await json_body()
        body = validate(CompletionBody, payload)
        _check(payload)
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


def _check(fields: dict[str, Any]) -> None:
    """Raises DetailError 400 for fields without a counterpart in /inference/v1/generate."""
    check_supported_fields(fields)
    if (fields.get("response_format") or {}).get("type", "text") != "text":
        raise DetailError(400, NO_FORMAT)


def _top(logprobs: bool | None, top: int | None) -> int | None:
    return (top or 0) if logprobs else None


def _sampling(body: CommonFields, limit: int | None, top: int | None) -> dict[str, Any]:
    """vLLM's sampling_params; unset fields have the stage's defaults."""
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


def mount(app: QuartTrio, context: RouteContext, tokens: PromptTokens, *, as_vllm: bool) -> None:
    routes = TokenizeRoutes(context, tokens)
    sglang_views = {"tokenize": routes.tokenize_prompts, "detokenize": routes.detokenize_lists}
    views: dict[str, View] = dict(sglang_views)
    if as_vllm:
        views = {
            "tokenize": vllm_view(routes.tokenize),
            "detokenize": vllm_view(routes.detokenize),
        }
        _mount_render(app, RenderRoutes(context, tokens))
    for name, view in views.items():
        app.add_url_rule(f"/{name}", name, view, methods=["POST"])
    for name, view in sglang_views.items():
        app.add_url_rule(f"/v1/{name}", f"v1_{name}", view, methods=["POST"])


def _mount_render(app: QuartTrio, routes: RenderRoutes) -> None:
    views = {
        "/v1/chat/completions/render": routes.chat,
        "/v1/completions/render": routes.completions,
    }
    for path, view in views.items():
        name = path.strip("/").replace("/", "_")
        app.add_url_rule(path, name, vllm_view(view), methods=["POST"])

"""POST /tokenize and /detokenize, as vLLM and as SGLang have them.

Both engines use these paths: `/tokenize` and `/detokenize` answer as vLLM unless only SGLang's
routes are served; `/v1/tokenize` and `/v1/detokenize` always answer as SGLang. SGLang takes lists
of prompts, and returns `text` where vLLM returns `prompt`.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import DetailError, json_response
from omni_proxy.replica.api.common.lenient_decode import json_body, problem, validate
from omni_proxy.replica.api.common.prompt_tokens import PromptTokens
from omni_proxy.replica.api.native.admin_operations import View
from omni_proxy.replica.api.openai.chat_media import MediaReader
from omni_proxy.replica.api.openai.to_generate_request import MAX_PROMPTS, is_token_ids
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.vllm.vllm_errors import VllmError, invalid, vllm_view
from omni_proxy.replica.pipeline.requests import PromptMessage

SpelledToken = Annotated[int, Meta(ge=0, le=2**63 - 1)]
UNSUPPORTED = ("chat_template", "continue_final_message")


class TokenizedMessage(Struct):
    role: str
    content: Any = None


class TokenizeBody(Struct, kw_only=True):
    """vLLM's: one of prompt and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[TokenizedMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, kw_only=True):
    model: str | None = None
    tokens: list[SpelledToken]


class PromptsBody(Struct, kw_only=True):
    """SGLang's."""

    model: str | None = None
    prompt: str | list[str]
    add_special_tokens: bool | None = None


class TokenListsBody(Struct, kw_only=True):
    model: str | None = None
    tokens: list[Any]
    skip_special_tokens: bool | None = None


class TokenizeRoutes:
    def __init__(self, context: RouteContext, tokens: PromptTokens) -> None:
        self._context = context
        self._tokens = tokens

    async def tokenize(self) -> Response:
        given = await json_body()
        body = validate(TokenizeBody, given)
        if body.prompt is None and body.messages is None:
            missing = [
                problem("missing", ("body", name), "Field required", given)
                for name in ("prompt", "messages")
            ]
            raise invalid(missing)
        for name in UNSUPPORTED:
            if given.get(name):
                raise VllmError(400, f"{name} is not supported: messages are written by the "
                                "model's own template", param=name)  # fmt: skip
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
                raise DetailError(400, f"prompt has {len(body.prompt)} elements; at most "
                                  f"{MAX_PROMPTS} are taken")  # fmt: skip
            tokens = [await self._tokens.of_text(text) for text in body.prompt]
            count = [len(each) for each in tokens]
        size = await self._max_tokens()
        return json_response({"tokens": tokens, "count": count, "max_model_len": size})

    async def detokenize_lists(self) -> Response:
        body = validate(TokenListsBody, await json_body())
        names = body.skip_special_tokens is False
        text: Any
        if not body.tokens or is_token_ids(body.tokens):
            text = await self._tokens.text(body.tokens, control_names=names)
        elif all(not each or is_token_ids(each) for each in body.tokens):
            text = [await self._tokens.text(each, control_names=names) for each in body.tokens]
        else:
            raise DetailError(400, "tokens must be a list of token ids, or a list of such lists")
        return json_response({"text": text})

    async def _messages(self, body: TokenizeBody) -> list[PromptMessage]:
        given = [(message.role, message.content) for message in body.messages or ()]
        return await MediaReader(self._context).messages(given, {})

    async def _max_tokens(self) -> int:
        """The stage's bound, which may be lower than the model's."""
        infos = self._context.client.stage_info().values()
        sizes: list[int] = [info["context"] for info in infos if "context" in info]
        return min([await self._tokens.context(), *sizes])


def mount(app: QuartTrio, context: RouteContext, tokens: PromptTokens, *, as_vllm: bool) -> None:
    routes = TokenizeRoutes(context, tokens)
    native = {"tokenize": routes.tokenize_prompts, "detokenize": routes.detokenize_lists}
    short: dict[str, View] = dict(native)
    if as_vllm:
        short = {
            "tokenize": vllm_view(routes.tokenize),
            "detokenize": vllm_view(routes.detokenize),
        }
    for name, view in short.items():
        app.add_url_rule(f"/{name}", name, view, methods=["POST"])
    for name, view in native.items():
        app.add_url_rule(f"/v1/{name}", f"v1_{name}", view, methods=["POST"])

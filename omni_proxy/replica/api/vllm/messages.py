"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the chat pipeline.

Invariant: errors of the engine are Anthropic's `{"type": "error", "error": {type, message}}`,
invalid bodies vLLM's 400, as vLLM answers them. Tools are accepted while the model may choose not
to call one, which it always does; a required call is refused.
"""

from __future__ import annotations

from typing import Any, Literal
from uuid import uuid4

import msgspec
from msgspec import Struct
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import CLIENT_ERRORS, DetailError, json_response
from omni_proxy.replica.api.common.lenient_decode import json_body, validate
from omni_proxy.replica.api.common.prompt_tokens import PromptTokens
from omni_proxy.replica.api.common.sse import (
    DeferredStream,
    close_streams_after_requests,
    deferred_response,
)
from omni_proxy.replica.api.openai.chat_media import MediaReader
from omni_proxy.replica.api.openai.to_generate_request import (
    NO_TOOLS,
    Int64,
    PositiveInt64,
    response_schema,
    stop_strings,
)
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.vllm.message_events import (
    EVENT_STREAM_HEADERS,
    MessageEvents,
    anthropic_error,
    anthropic_message,
)
from omni_proxy.replica.api.vllm.vllm_errors import VllmError, to_vllm_error, vllm_view
from omni_proxy.replica.pipeline.requests import GenerateRequest, PromptMessage, SamplingParams

# A line that a coding agent puts into its system prompt; it differs in each request.
BILLING_LINE = "x-anthropic-billing-header"
REQUIRED_CALLS = ("any", "tool")


class AnthropicTurn(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountBody(Struct, kw_only=True):
    model: str
    messages: list[AnthropicTurn]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None


class MessagesBody(CountBody, kw_only=True):
    max_tokens: PositiveInt64
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    output_config: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class MessageRoutes:
    def __init__(self, context: RouteContext, tokens: PromptTokens) -> None:
        self._context = context
        self._tokens = tokens

    async def create(self) -> Response:
        body = validate(MessagesBody, await json_body())
        try:
            return await self._answer(body)
        except (DetailError, VllmError, *CLIENT_ERRORS) as error:
            return _refusal(to_vllm_error(error))

    async def count(self) -> Response:
        body = validate(CountBody, await json_body())
        try:
            reader = MediaReader(self._context)
            tokens = await self._tokens.of_messages(await _prompt(body, reader))
        except (DetailError, VllmError) as error:
            return _refusal(to_vllm_error(error))
        count = len(tokens)
        response = {"input_tokens": count, "context_management": {"original_input_tokens": count}}
        return json_response(response)

    async def _answer(self, body: MessagesBody) -> Response:
        request = await self._to_request(body)
        context, request_id = self._context, uuid4().hex[:16]
        model = body.model or context.model_name
        timing = context.meters.timed(context.model_name)
        if body.stream:
            events = MessageEvents(f"chatcmpl-{request_id}", model)
            generation = context.client.generate(request, request_id)
            stream = DeferredStream(generation, events, timing)
            try:
                await stream.begin()
            except BaseException:
                await stream.aclose()
                raise
            return deferred_response(stream, EVENT_STREAM_HEADERS)
        try:
            result = await context.client.completion(request, request_id)
            timing.finish()
        finally:
            timing.close()
        return json_response(anthropic_message(f"chatcmpl-{request_id}", model, result))

    async def _to_request(self, body: MessagesBody) -> GenerateRequest:
        if (body.tool_choice or {}).get("type") in REQUIRED_CALLS:
            raise VllmError(400, f"tool_choice must be auto or none: {NO_TOOLS}")
        reader = MediaReader(self._context)
        messages = await _prompt(body, reader)
        sampling = SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            max_new_tokens=body.max_tokens,
            stop=stop_strings(body.stop_sequences),
            json_schema=await response_schema(self._context, _response_format(body.output_config)),
        )
        return GenerateRequest(
            prompt=messages, model=body.model, sampling=sampling,
            stream=bool(body.stream), task="chat", media=reader.media,
        )  # fmt: skip


def _response_format(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """`output_config.format` in OpenAI's words."""
    wanted = (config or {}).get("format")
    if not isinstance(wanted, dict):
        return None
    return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}


async def _prompt(body: CountBody, reader: MediaReader) -> list[PromptMessage]:
    """The system text first, then the turns; raises DetailError 400."""
    given: list[tuple[str, Any]] = []
    if system := _system_text(body.system):
        given.append(("system", system))
    for turn in body.messages:
        if turn.role == "system":
            if text := _system_text(turn.content):
                given.append(("system", text))
        elif isinstance(turn.content, str):
            given.append((turn.role, turn.content))
        else:
            parts = [part for block in turn.content for part in _parts(block)]
            given.append((turn.role, parts))
    return await reader.messages(given, {})


def _system_text(given: str | list[dict[str, Any]] | None) -> str:
    blocks = [given] if isinstance(given, str) else [_text(block) for block in given or ()]
    return "".join(text for text in blocks if not text.startswith(BILLING_LINE))


def _text(block: dict[str, Any]) -> str:
    text = block.get("text")
    return text if block.get("type") == "text" and isinstance(text, str) else ""


def _parts(block: dict[str, Any]) -> list[dict[str, Any]]:
    """A content block as parts of an OpenAI message; thoughts of earlier turns are left out."""
    match block.get("type"):
        case "image":
            return [{"type": "image_url", "image_url": {"url": _image_url(block.get("source"))}}]
        case "tool_use":
            call = {"name": block.get("name"), "input": block.get("input")}
            return [{"type": "text", "text": msgspec.json.encode(call).decode()}]
        case "tool_result":
            content = block.get("content")
            if isinstance(content, list):
                return [part for inner in content if isinstance(inner, dict)
                        for part in _parts(inner)]  # fmt: skip
            return [{"type": "text", "text": str(content or "")}]
        case "thinking" | "redacted_thinking" | "tool_reference":
            return []
        case _:
            return [block]


def _image_url(source: Any) -> str:
    if not isinstance(source, dict):
        return ""
    if source.get("type") == "url":
        return str(source.get("url") or "")
    kind = source.get("media_type") or "image/jpeg"
    return f"data:{kind};base64,{source.get('data') or ''}"


def _refusal(error: VllmError) -> Response:
    return json_response(anthropic_error(error.kind, error.message), error.status)


def mount(app: QuartTrio, context: RouteContext, tokens: PromptTokens) -> None:
    close_streams_after_requests(app)
    routes = MessageRoutes(context, tokens)
    views = {"/v1/messages": routes.create, "/v1/messages/count_tokens": routes.count}
    for path, view in views.items():
        name = path.strip("/").replace("/", "_")
        app.add_url_rule(path, name, vllm_view(view), methods=["POST"])

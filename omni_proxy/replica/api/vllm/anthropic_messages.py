"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the chat pipeline.

    message_start, content_block_start, content_block_delta*, content_block_stop, message_delta,
    message_stop

Invariant: a stream has all of these events in this order, or ends with an `error` event. The first
text opens the text block; as in vLLM, an empty response has no text block in a stream, and an empty
one otherwise. Errors of the engine have Anthropic's format, an invalid body gets vLLM's 400. Tools
are accepted if the model may choose not to call one (it never does); a required call is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal
from uuid import uuid4

import msgspec
from msgspec import Struct
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import (
    CLIENT_ERRORS,
    ClientError,
    DetailError,
    SpeechError,
    json_response,
    status_and_message,
)
from omni_proxy.replica.api.common.kv_transfers import (
    caller_request_id,
    transfer_fields,
    with_transfers,
)
from omni_proxy.replica.api.common.lenient_decode import json_body, validate
from omni_proxy.replica.api.common.sse import (
    EVENT_STREAM_HEADERS,
    DeferredStream,
    close_streams_after_requests,
    deferred_response,
    named_event,
)
from omni_proxy.replica.api.openai.to_generate_request import (
    NO_TOOLS,
    Int64,
    MediaReader,
    PositiveInt64,
    response_schema,
    stop_strings,
)
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.vllm.tokenize_routes import PromptTokens
from omni_proxy.replica.api.vllm.vllm_errors import VllmError, error_kind, to_vllm_error, vllm_view
from omni_proxy.replica.pipeline.requests import (
    CompletionResult,
    GenerateChunk,
    GenerateRequest,
    PromptMessage,
    SamplingParams,
)

# A line that a coding agent adds to its system prompt. It is removed, because it differs in each
# request and no cached prefix would match.
BILLING_LINE = "x-anthropic-billing-header"
REQUIRED_CALLS = ("any", "tool")


def anthropic_error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


def anthropic_message(message_id: str, model: str, result: CompletionResult) -> dict[str, Any]:
    message: dict[str, Any] = {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": result.text}],
        "model": model,
    }
    reason, stop = stop_reason(result.finish_reason, result.extra.get("stop_hit"))
    ended = {"stop_reason": reason, "stop_sequence": stop}
    message |= {key: value for key, value in ended.items() if value is not None}
    return message | {"usage": anthropic_usage(result.usage)}


def stop_reason(finish_reason: str | None, hit: Any) -> tuple[str | None, str | None]:
    """Anthropic's stop reason and stop sequence; None for an aborted request, which has neither."""
    if finish_reason == "length":
        return "max_tokens", None
    if finish_reason != "stop":
        return None, None
    return ("stop_sequence", hit) if isinstance(hit, str) else ("end_turn", None)


def anthropic_usage(usage: dict[str, Any] | None) -> dict[str, Any]:
    """Input tokens are those that were not read from the prefix cache."""
    counts = usage or {}
    cached = (counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": max(0, (counts.get("prompt_tokens") or 0) - cached),
        "output_tokens": counts.get("completion_tokens") or 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


class MessageEvents:
    """The events of one streamed message (a `ChunkEncoder`)."""

    def __init__(self, message_id: str, model: str) -> None:
        self._id = message_id
        self._model = model
        self._started = False
        self._open = False

    def feed(self, chunk: GenerateChunk) -> Iterator[bytes]:
        if not self._started:
            self._started = True
            yield self._start(chunk)
        if chunk.text:
            if not self._open:
                self._open = True
                block = {"type": "text", "text": ""}
                yield _event("content_block_start", content_block=block, index=0)
            delta = {"type": "text_delta", "text": chunk.text}
            yield _event("content_block_delta", delta=delta, index=0)
        if not chunk.terminal:
            return
        if self._open:
            yield _event("content_block_stop", index=0)
        reason, stop = stop_reason(chunk.finish_reason, chunk.extra.get("stop_hit"))
        ended = {"stop_reason": reason, "stop_sequence": stop}
        yield _event("message_delta", delta=ended, usage=anthropic_usage(chunk.usage))
        yield _event("message_stop")

    def failed(self, error: ClientError | SpeechError) -> bytes | None:
        if isinstance(error, SpeechError):
            return None
        status, message = status_and_message(error)
        return named_event("error", anthropic_error(error_kind(status), message))

    def _start(self, chunk: GenerateChunk) -> bytes:
        tokens = (chunk.usage or {}).get("prompt_tokens") or chunk.extra.get("prompt_tokens") or 0
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": tokens, "output_tokens": 0},
        }
        return _event("message_start", message=message)


def _event(name: str, **fields: Any) -> bytes:
    return named_event(name, {"type": name, **fields})


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
        payload = await json_body()
        body = validate(MessagesBody, payload)
        try:
            return await self._respond(body, payload)
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

    async def _respond(self, body: MessagesBody, payload: Any) -> Response:
        context = self._context
        request_id = caller_request_id(context) or uuid4().hex[:16]
        request = await self._to_request(body)
        request = with_transfers(context, payload, [request], request_id)[0]
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
        with timing:
            result = await context.client.completion(request, request_id)
        message = anthropic_message(f"chatcmpl-{request_id}", model, result)
        return json_response(message | transfer_fields([result]))

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
    """`output_config.format` in OpenAI's format."""
    wanted = (config or {}).get("format")
    if not isinstance(wanted, dict):
        return None
    return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}


async def _prompt(body: CountBody, reader: MediaReader) -> list[PromptMessage]:
    """The system text first, then the turns; raises DetailError 400."""
    turns: list[tuple[str, Any]] = []
    if system := _system_text(body.system):
        turns.append(("system", system))
    for turn in body.messages:
        if turn.role == "system":
            if text := _system_text(turn.content):
                turns.append(("system", text))
        elif isinstance(turn.content, str):
            turns.append((turn.role, turn.content))
        else:
            parts = [part for block in turn.content for part in _parts(block)]
            turns.append((turn.role, parts))
    return await reader.messages(turns, {})


def _system_text(system: str | list[dict[str, Any]] | None) -> str:
    blocks = [system] if isinstance(system, str) else [_text(block) for block in system or ()]
    return "".join(text for text in blocks if not text.startswith(BILLING_LINE))


def _text(block: dict[str, Any]) -> str:
    text = block.get("text")
    return text if block.get("type") == "text" and isinstance(text, str) else ""


def _parts(block: dict[str, Any]) -> list[dict[str, Any]]:
    """A content block as parts of an OpenAI message, without the thinking of earlier turns."""
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

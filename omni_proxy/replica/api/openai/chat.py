"""POST /v1/chat/completions (note:api-server 1.3): the route, and the format of its responses.

Invariant of requests: null is the same as absent. Unknown fields are ignored, unless they would
change the response: then they are refused by name. Errors are `{"detail"}`, or an event once a
stream has begun.

Invariant of responses: keys without a value are left out, except `finish_reason`. The finish event
is the last one and the only one with `usage` (with several choices, the last finish event of all).
Text and audio never share a delta. No text after a stop string is sent.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import DetailError, json_response
from omni_proxy.replica.api.common.kv_transfers import (
    caller_request_id,
    leg_fields,
    transfer_fields,
    with_transfers,
)
from omni_proxy.replica.api.common.lenient_decode import json_body, validate, value_error
from omni_proxy.replica.api.common.media import encode_audio
from omni_proxy.replica.api.common.sse import Event, EventStream, stream_response
from omni_proxy.replica.api.openai.logprobs import (
    LogprobAligner,
    chat_logprobs,
    parse_top_logprobs,
    require_logprobs,
)
from omni_proxy.replica.api.openai.multi_generation import (
    complete_all,
    merged_stream,
    openai_usage,
    parse_choice_count,
    request_ids,
    requests_for_choices,
    total_usage,
)
from omni_proxy.replica.api.openai.to_generate_request import (
    CommonFields,
    Int64,
    MediaReader,
    PositiveInt64,
    check_biases,
    check_no_tools,
    check_supported_fields,
    new_request_id,
    raise_unsupported_medium,
    response_schema,
    sampling_params,
    stop_strings,
)
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.pipeline.requests import CompletionResult, GenerateChunk, GenerateRequest
from omni_proxy.replica.text.stop_strings import StopStrings


def truncate_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return `text` up to its first match of the first stop string, in request order, in it."""
    for stop in stops:
        index = text.find(stop)
        if index >= 0:
            return text[:index]
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResponseOptions:
    """Request fields that determine the format of the response."""

    request_id: str
    model: str
    modalities: tuple[str, ...] = ("text",)
    audio_format: str = "wav"
    stops: tuple[str, ...] = ()
    logprobs: bool = False
    created_unix_secs: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.request_id}",
            "object": kind,
            "created": self.created_unix_secs,
            "model": self.model,
        }

    def audio(self, audio: bytes | None, rate: int) -> dict[str, Any] | None:
        """The audio object, if audio was requested and generated; else None."""
        if "audio" not in self.modalities or not audio:
            return None
        encoded = encode_audio(audio, rate, self.audio_format)
        data = base64.b64encode(encoded).decode("ascii")
        return {"id": f"audio-{self.request_id}", "data": data}


def chat_completion(
    options: ChatResponseOptions, results: Sequence[CompletionResult]
) -> dict[str, Any]:
    """The body of a response that is not streamed, with one choice for each result.

    Raises RequestFailed 501 if log probabilities were requested and are missing.
    """
    choices = [_choice(options, index, result) for index, result in enumerate(results)]
    usages = [result.usage for result in results]
    usage = openai_usage(usages[0]) if len(usages) == 1 else total_usage(usages, len(usages))
    return options.head("chat.completion") | {"choices": choices, "usage": usage}


def _choice(options: ChatResponseOptions, index: int, result: CompletionResult) -> dict[str, Any]:
    text = truncate_at_stop(result.text, options.stops)
    message: dict[str, Any] = {"role": "assistant"}
    audio = options.audio(result.audio, result.sample_rate)
    if ("text" in options.modalities and text) or audio is None:
        message["content"] = text
    if audio is not None:
        message["audio"] = audio | {"transcript": text or None}
    choice: dict[str, Any] = {"index": index, "message": message}
    if options.logprobs:
        items = require_logprobs(result.logprobs, bool(text))
        choice["logprobs"] = chat_logprobs(LogprobAligner().feed(items, text))
    return choice | {"finish_reason": result.finish_reason or "stop"}


class ChatChunkFormatter:
    """The events of one streamed response.

    `ids` are the request ids whose chunks arrive, one for each choice in order.
    """

    def __init__(self, options: ChatResponseOptions, ids: Sequence[str]) -> None:
        self._options = options
        self._choices = {
            choice_id: _ChoiceFormatter(options, index) for index, choice_id in enumerate(ids)
        }
        self._usages: dict[str, dict[str, Any] | None] = {}

    def feed(self, chunk: GenerateChunk) -> Iterator[Event]:
        """Raises RequestFailed 501 if log probabilities were requested and are missing."""
        for choice in self._choices[chunk.request_id].feed(chunk):
            yield (
                self._options.head("chat.completion.chunk")
                | {"choices": [choice]}
                | (self._usage(chunk) if choice["finish_reason"] else {})
            )

    def _usage(self, chunk: GenerateChunk) -> dict[str, Any]:
        """The total usage for the last finish event of all choices, nothing for earlier ones."""
        self._usages[chunk.request_id] = chunk.usage
        if len(self._usages) < len(self._choices):
            return {}
        usages = [self._usages[choice_id] for choice_id in self._choices]
        usage = openai_usage(usages[0]) if len(usages) == 1 else total_usage(usages, len(usages))
        return {} if usage is None else {"usage": usage}


class _ChoiceFormatter:
    """The events' `choices` items of one choice."""

    def __init__(self, options: ChatResponseOptions, index: int) -> None:
        self._options = options
        self._index = index
        self._stops = StopStrings(options.stops)
        self._aligner = LogprobAligner()
        self._role_sent = False

    def feed(self, chunk: GenerateChunk) -> Iterator[dict[str, Any]]:
        payloads = list(self._payloads(chunk))
        for payload, logprobs in payloads:
            yield self._delta(payload, logprobs)
        if chunk.terminal:
            yield self._choice({}, chunk.finish_reason or "stop")
        elif not payloads and not self._role_sent:
            yield self._delta({}, None)

    def _payloads(self, chunk: GenerateChunk) -> Iterator[tuple[dict[str, Any], Any]]:
        if "text" in self._options.modalities:
            text = self._stops.feed(chunk.text)
            if chunk.terminal:
                text += self._stops.flush()
            logprobs = self._logprobs(chunk, text)
            if text or logprobs:
                yield {"content": text}, logprobs
        audio = self._options.audio(chunk.audio, chunk.sample_rate)
        if audio is not None:
            yield {"audio": audio}, None

    def _logprobs(self, chunk: GenerateChunk, text: str) -> dict[str, Any] | None:
        if not self._options.logprobs:
            return None
        items = self._aligner.feed(require_logprobs(chunk.logprobs, bool(chunk.text)), text)
        return chat_logprobs(items) if items else None

    def _delta(self, payload: dict[str, Any], logprobs: Any) -> dict[str, Any]:
        role = {} if self._role_sent else {"role": "assistant"}
        self._role_sent = True
        return self._choice(role | payload, None, logprobs)

    def _choice(
        self, delta: dict[str, Any], finish_reason: str | None, logprobs: Any = None
    ) -> dict[str, Any]:
        optional = {} if logprobs is None else {"logprobs": logprobs}
        return {"index": self._index, "delta": delta} | optional | {"finish_reason": finish_reason}


MODALITIES = ("text", "audio")
AUDIO_FORMATS = ("wav", "pcm")
TALKER = (
    "talker_temperature",
    "talker_top_p",
    "talker_top_k",
    "talker_repetition_penalty",
    "talker_max_new_tokens",
)


class ChatMessage(Struct):
    role: str
    content: Any = None


class ChatBody(CommonFields, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: PositiveInt64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    audios: list[str] | None = None
    images: list[str] | None = None
    videos: list[str] | None = None
    talker_temperature: float | None = None
    talker_top_p: float | None = None
    talker_top_k: Int64 | None = None
    talker_repetition_penalty: float | None = None
    talker_max_new_tokens: Int64 | None = None


class ChatRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def complete(self) -> Response:
        payload = await json_body()
        body = validate(ChatBody, payload)
        if not (body.messages or body.audios or body.images or body.videos):
            raise value_error("messages must not be empty", payload)
        check_supported_fields(leg_fields(self._context, payload))
        check_no_tools(payload)
        count = parse_choice_count(body.n)
        top_logprobs = parse_top_logprobs(body.logprobs, body.top_logprobs)
        check_biases(body, self._context)
        options = self._response_options(body, logprobs=top_logprobs is not None)
        schema = await response_schema(self._context, body.response_format)
        request = await self._to_generate_request(body, options, top_logprobs, schema)
        requests = requests_for_choices(request, count)
        requests = with_transfers(self._context, payload, requests, options.request_id)
        return await self._respond(options, requests)

    async def _respond(
        self, options: ChatResponseOptions, requests: list[GenerateRequest]
    ) -> Response:
        context = self._context
        ids = request_ids(options.request_id, len(requests))
        timing = context.meters.timed(context.model_name)
        if requests[0].stream:
            source = merged_stream(context.client, requests, ids)
            formatter = ChatChunkFormatter(options, ids)
            cut = context.cut_failed_streams
            return stream_response(EventStream(source, formatter, timing, cut=cut))
        with timing:
            results = await complete_all(context.client, requests, ids)
        return json_response(chat_completion(options, results) | transfer_fields(results))

    def _response_options(self, body: ChatBody, *, logprobs: bool) -> ChatResponseOptions:
        """Raises DetailError 400 for an unknown modality or an audio format that cannot be encoded.

        Requested audio that no stage can generate is left out: the response is text then.
        """
        modalities = tuple(body.modalities or ("text",))
        for modality in modalities:
            if modality not in MODALITIES:
                raise DetailError(
                    400, f"modalities: {modality!r} is not one of {', '.join(MODALITIES)}"
                )
        audio_format = (body.audio or {}).get("format") or "wav"
        if not self._context.can("audio_output"):
            modalities = ("text",)
        if "audio" in modalities and audio_format not in AUDIO_FORMATS:
            supported = " or ".join(AUDIO_FORMATS)
            raise DetailError(
                400, f"audio.format {audio_format!r} is not supported; use {supported}"
            )
        return ChatResponseOptions(
            request_id=new_request_id(caller_request_id(self._context, body.request_id, body.rid)),
            model=body.model or self._context.model_name,
            modalities=modalities,
            audio_format=audio_format,
            stops=stop_strings(body.stop),
            logprobs=logprobs,
        )

    async def _to_generate_request(
        self,
        body: ChatBody,
        options: ChatResponseOptions,
        top_logprobs: int | None,
        schema: str | None,
    ) -> GenerateRequest:
        if body.videos:
            raise_unsupported_medium("video", "videos")
        reader = MediaReader(self._context)
        turns = [(message.role, message.content) for message in body.messages]
        attachments = {"audio": body.audios or (), "image": body.images or ()}
        messages = await reader.messages(turns, attachments)
        limit = body.max_completion_tokens or body.max_tokens
        talker = {name: getattr(body, name) for name in TALKER}
        return GenerateRequest(
            prompt=messages,
            model=body.model,
            sampling=sampling_params(body, limit, top=top_logprobs, schema=schema),
            stream=bool(body.stream),
            output_modalities=options.modalities,
            task="chat",
            metadata={"audio": body.audio} if body.audio else {},
            stage_sampling=body.stage_sampling or {},
            stage_params=body.stage_params or {},
            extra_params={name: value for name, value in talker.items() if value is not None},
            media=reader.media,
        )


def mount(app: QuartTrio, context: RouteContext) -> None:
    routes = ChatRoutes(context)
    app.add_url_rule("/v1/chat/completions", "chat", routes.complete, methods=["POST"])

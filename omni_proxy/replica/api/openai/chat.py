"""POST /v1/chat/completions (api-server.md 1.3).

Invariant: null is the same as absent. Unknown fields are ignored, unless they would change the
response: then they are refused by name. Errors are `{"detail"}`, or an event once a stream has
begun.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import DetailError, json_response
from omni_proxy.replica.api.common.fields import json_body, validate, value_error
from omni_proxy.replica.api.common.sse import EventStream, stream_response
from omni_proxy.replica.api.openai.chat_media import MediaReader, raise_unsupported_medium
from omni_proxy.replica.api.openai.chat_response import (
    ChatChunkFormatter,
    ChatResponseOptions,
    chat_completion,
)
from omni_proxy.replica.api.openai.logprobs import parse_top_logprobs
from omni_proxy.replica.api.openai.multi_generation import (
    complete_all,
    merged_stream,
    parse_choice_count,
    request_ids,
    requests_for_choices,
)
from omni_proxy.replica.api.openai.response_format import response_schema
from omni_proxy.replica.api.openai.to_generate_request import (
    CommonFields,
    Int64,
    PositiveInt64,
    check_biases,
    check_no_tools,
    check_supported_fields,
    new_request_id,
    sampling_params,
    stop_strings,
)
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.pipeline.requests import GenerateRequest

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
        given = await json_body()
        body = validate(ChatBody, given)
        if not (body.messages or body.audios or body.images or body.videos):
            raise value_error("messages must not be empty", given)
        check_supported_fields(given)
        check_no_tools(given)
        count = parse_choice_count(body.n)
        top_logprobs = parse_top_logprobs(body.logprobs, body.top_logprobs)
        check_biases(body, self._context)
        options = self._response_options(body, logprobs=top_logprobs is not None)
        schema = await response_schema(self._context, body.response_format)
        request = await self._to_generate_request(body, options, top_logprobs, schema)
        return await self._answer(options, requests_for_choices(request, count))

    async def _answer(
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
        try:
            results = await complete_all(context.client, requests, ids)
            timing.finish()
        finally:
            timing.close()
        return json_response(chat_completion(options, results))

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
                400, f"audio.format {audio_format!r} cannot be made; ask for {supported}"
            )
        return ChatResponseOptions(
            request_id=new_request_id(body.request_id),
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
        given = [(message.role, message.content) for message in body.messages]
        attachments = {"audio": body.audios or (), "image": body.images or ()}
        messages = await reader.messages(given, attachments)
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

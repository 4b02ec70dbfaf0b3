"""POST /v1/chat/completions (api-server.md 1.3).

Invariant: null is the same as absent; what a body says that nobody here knows is ignored, unless it
changes what the answer is: then it is refused by its name. Errors are `{"detail"}`, or an event
once a stream has begun.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.answer_format import schema_of
from omni_proxy.replica.api.chat_answer import ChatAsk, ChatDeltas, completion
from omni_proxy.replica.api.choices import count_of, repeated
from omni_proxy.replica.api.errors import Refused, reply
from omni_proxy.replica.api.fields import json_body, read, value_error
from omni_proxy.replica.api.logprobs import top_of
from omni_proxy.replica.api.lowering import (
    Common,
    Count,
    Whole,
    check_biases,
    new_id,
    sampling_of,
    stops_of,
)
from omni_proxy.replica.api.media import MediaReader, refuse
from omni_proxy.replica.api.served import Served
from omni_proxy.replica.api.several import complete_all, ids_of, source_of
from omni_proxy.replica.api.sse import EventStream, stream_response
from omni_proxy.replica.api.unserved import refuse_tools, refuse_unserved
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


class ChatBody(Common, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    audios: list[str] | None = None
    images: list[str] | None = None
    videos: list[str] | None = None
    talker_temperature: float | None = None
    talker_top_p: float | None = None
    talker_top_k: Whole | None = None
    talker_repetition_penalty: float | None = None
    talker_max_new_tokens: Whole | None = None


class ChatRoutes:
    def __init__(self, served: Served) -> None:
        self._served = served

    async def complete(self) -> Response:
        given = await json_body()
        body = read(ChatBody, given)
        if not (body.messages or body.audios or body.images or body.videos):
            raise value_error("messages must not be empty", given)
        refuse_unserved(given)
        refuse_tools(given)
        count = count_of(body.n)
        top = top_of(body.logprobs, body.top_logprobs)
        check_biases(body, self._served)
        ask = self._ask(body, logprobs=top is not None)
        schema = await schema_of(self._served, body.response_format)
        request = await self._lower(body, ask, top, schema)
        return await self._answer(ask, repeated(request, count))

    async def _answer(self, ask: ChatAsk, requests: list[GenerateRequest]) -> Response:
        served = self._served
        ids = ids_of(ask.request_id, len(requests))
        timing = served.meters.timed(served.model_name)
        if requests[0].stream:
            source = source_of(served.client, requests, ids)
            shape = ChatDeltas(ask, ids)
            cut = served.cut_failed_streams
            return stream_response(EventStream(source, shape, timing, cut=cut))
        try:
            results = await complete_all(served.client, requests, ids)
            timing.ended()
        finally:
            timing.left()
        return reply(completion(ask, results))

    def _ask(self, body: ChatBody, *, logprobs: bool) -> ChatAsk:
        """Raises Refused 400 for an unknown modality or a format of audio that cannot be made.

        Audio that was asked for and that no stage makes is left out: the answer is text then.
        """
        modalities = tuple(body.modalities or ("text",))
        for wanted in modalities:
            if wanted not in MODALITIES:
                raise Refused(400, f"modalities: {wanted!r} is not one of {', '.join(MODALITIES)}")
        audio_format = (body.audio or {}).get("format") or "wav"
        if not self._served.can("audio_output"):
            modalities = ("text",)
        if "audio" in modalities and audio_format not in AUDIO_FORMATS:
            known = " or ".join(AUDIO_FORMATS)
            raise Refused(400, f"audio.format {audio_format!r} cannot be made; ask for {known}")
        return ChatAsk(
            request_id=new_id(body.request_id),
            model=body.model or self._served.model_name,
            modalities=modalities,
            audio_format=audio_format,
            stops=stops_of(body.stop),
            logprobs=logprobs,
        )

    async def _lower(
        self, body: ChatBody, ask: ChatAsk, top: int | None, schema: str | None
    ) -> GenerateRequest:
        if body.videos:
            refuse("video", "videos")
        reader = MediaReader(self._served)
        given = [(message.role, message.content) for message in body.messages]
        listed = {"audio": body.audios or (), "image": body.images or ()}
        messages = await reader.messages(given, listed)
        limit = body.max_completion_tokens or body.max_tokens
        talker = {name: getattr(body, name) for name in TALKER}
        return GenerateRequest(
            prompt=messages,
            model=body.model,
            sampling=sampling_of(body, limit, top=top, schema=schema),
            stream=bool(body.stream),
            output_modalities=ask.modalities,
            task="chat",
            metadata={"audio": body.audio} if body.audio else {},
            stage_sampling=body.stage_sampling or {},
            stage_params=body.stage_params or {},
            extra_params={name: value for name, value in talker.items() if value is not None},
            media=reader.media,
        )


def mount(app: QuartTrio, served: Served) -> None:
    routes = ChatRoutes(served)
    app.add_url_rule("/v1/chat/completions", "chat", routes.complete, methods=["POST"])

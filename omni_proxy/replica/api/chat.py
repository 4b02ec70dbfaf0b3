"""POST /v1/chat/completions (api-server.md 1.3).

Invariant: null is the same as absent; what a body says that nobody here knows (`n`, `tools`,
`stream_options`, ...) is ignored. Errors are `{"detail"}`, or an event once a stream has begun.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.chat_answer import ChatAsk, ChatDeltas, completion
from omni_proxy.replica.api.errors import Refused, reply
from omni_proxy.replica.api.fields import json_body, read, value_error
from omni_proxy.replica.api.lowering import Common, Count, Whole, new_id, sampling_of, stops_of
from omni_proxy.replica.api.media import MediaReader, refuse
from omni_proxy.replica.api.served import Served
from omni_proxy.replica.api.sse import EventStream, stream_response
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
        ask = self._ask(body)
        request = await self._lower(body, ask)
        served = self._served
        timing = served.meters.timed(served.model_name)
        if body.stream:
            generation = served.client.generate(request, ask.request_id)
            cut = served.cut_failed_streams
            return stream_response(EventStream(generation, ChatDeltas(ask), timing, cut=cut))
        try:
            result = await served.client.completion(request, ask.request_id)
            timing.ended()
        finally:
            timing.left()
        return reply(completion(ask, result))

    def _ask(self, body: ChatBody) -> ChatAsk:
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
        )

    async def _lower(self, body: ChatBody, ask: ChatAsk) -> GenerateRequest:
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
            sampling=sampling_of(body, limit, logprobs=False),
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

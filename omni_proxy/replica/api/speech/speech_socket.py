"""WS /v1/audio/speech/stream: text goes in as it is written, speech comes out by sentences.

    configure -> (input.text | input.commit)* -> input.done -> close 1000      (api-server.md 1.6)

Invariant: sentences are spoken one after another, in order, and each `audio.start` has its
`audio.done`. Whatever ends a session but its own `input.done` is told by an error event before the
closing frame. A client that goes away cancels the session, and that aborts what is being spoken.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import trio
from quart import Websocket, websocket
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import CLIENT_ERRORS, SpeechError, speech_server_error
from omni_proxy.replica.api.common.media import encode_audio
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.speech.sentence_splitter import SentenceSplitter
from omni_proxy.replica.api.speech.speech_fields import (
    SpeechRequest,
    check_input,
    parse_object,
    parse_speech_request,
)
from omni_proxy.replica.api.speech.speech_service import (
    DEFAULT_SAMPLE_RATE,
    NO_AUDIO,
    SpeechService,
    to_speech_error,
)
from omni_proxy.replica.api.speech.speech_stream import SampleRateGuard
from omni_proxy.replica.pipeline.client import GenerateRequest

CONFIG_SECS: Final = 10.0
IDLE_SECS: Final = 30.0
CONFIG_BYTES: Final = 15_029_592  # 10 MiB of reference audio in base64, and 1 MiB of the rest
FRAME_BYTES: Final = 128 * 1024
HELD_CHARS: Final = 256 * 1024
WAITING_FRAMES: Final = 16
AUDIO_FRAME_BYTES: Final = 256 * 1024  # clients commonly refuse messages above 1 MiB
NORMAL, UNSUPPORTED, POLICY, TOO_BIG = 1000, 1003, 1008, 1009


GRANULARITIES: Final = ("sentence", "clause")
# Text of a frame, or bytes; None is what Quart makes of a binary frame without bytes.
Frame = str | bytes | None


class NotTextFrame(Exception):
    """A binary frame: the protocol has none from the client."""


class FrameTooLong(Exception):
    """A frame beyond its limit."""


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """How every sentence of a session is to be spoken."""

    ask: SpeechRequest
    stream_audio: bool = False
    split_granularity: str = "sentence"


def parse_message(frame: Frame, most_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a text frame. Raises NotTextFrame, FrameTooLong, SpeechError."""
    if not isinstance(frame, str):
        raise NotTextFrame
    if len(frame) > most_bytes or len(data := frame.encode()) > most_bytes:
        raise FrameTooLong
    return parse_object(data, "a message")


def parse_session_config(message: Mapping[str, Any]) -> SessionConfig:
    """Read a session.config, whose fields stand under "session" or beside its type.

    Raises SpeechError.
    """
    if message.get("type") != "session.config":
        raise SpeechError("the first message must be session.config", "type")
    fields = message.get("session", message)
    if not isinstance(fields, dict):
        raise SpeechError("session must be an object", "session")
    stream_audio = fields.get("stream_audio")
    if stream_audio is not None and not isinstance(stream_audio, bool):
        raise SpeechError("stream_audio must be true or false", "stream_audio")
    granularity = fields.get("split_granularity")
    if granularity is not None and granularity not in GRANULARITIES:
        names = " or ".join(GRANULARITIES)
        raise SpeechError(f"split_granularity must be {names}", "split_granularity")
    ask = parse_speech_request(fields, default_format="pcm")
    if stream_audio and ask.response_format != "pcm":
        raise SpeechError('stream_audio needs response_format="pcm" or none', "response_format")
    return SessionConfig(ask, bool(stream_audio), granularity or GRANULARITIES[0])


class _SessionEnd(Exception):
    """The session ends here: with that closing code, after that error."""

    def __init__(self, code: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.refusal = SpeechError(message, param)


class _EventSocket:
    """The connection, as events and audio."""

    def __init__(self, socket: Websocket) -> None:
        self._socket = socket

    async def hear(self) -> Frame:
        frame: Frame = await self._socket.receive()
        return frame

    async def tell(self, event: Mapping[str, Any]) -> None:
        await self._socket.send(msgspec.json.encode(event).decode())

    async def tell_error(self, refusal: SpeechError) -> None:
        event = {"type": "error", "message": refusal.message, "error_type": refusal.kind}
        told = {"param": refusal.param, "code": refusal.code}
        await self.tell(event | {name: value for name, value in told.items() if value is not None})

    async def send_audio(self, data: bytes) -> None:
        for start in range(0, len(data), AUDIO_FRAME_BYTES):
            await self._socket.send(data[start : start + AUDIO_FRAME_BYTES])

    async def close(self, code: int, reason: str = "") -> None:
        # A closing frame holds 123 bytes of reason; all of ours are ASCII.
        await self._socket.close(code, reason[:123])


class _Session:
    """One conversation, and how far it has come."""

    def __init__(self, context: RouteContext, line: _EventSocket) -> None:
        self._context = context
        self._speaking = SpeechService(context)
        self._line = line
        self._id = f"speech_ws_{secrets.token_hex(16)}"
        self._cutter = SentenceSplitter()
        self._sentences = 0  # of the whole session
        self._committed = 0  # so many of them stood before the last commit
        self._segments = 0

    async def run(self) -> None:
        try:
            voice = await self._configure()
        except _SessionEnd as over:
            await self._part(over)
            return
        frames_in, frames_out = trio.open_memory_channel[Frame](WAITING_FRAMES)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, frames_in)
            try:
                await self._converse(voice, frames_out)
            except _SessionEnd as over:
                await self._part(over)
            nursery.cancel_scope.cancel()

    async def _part(self, over: _SessionEnd) -> None:
        await self._line.tell_error(over.refusal)
        await self._line.close(over.code, over.refusal.message)

    async def _listen(self, frames: trio.MemorySendChannel[Frame]) -> None:
        # A full channel stops the reading, and so at length the client: no text is lost.
        while True:
            await frames.send(await self._line.hear())

    async def _configure(self) -> _SentenceSpeaker:
        """Take the first message and answer it. Raises _Over."""
        with trio.move_on_after(CONFIG_SECS) as patience:
            frame = await self._line.hear()
        if patience.cancelled_caught:
            raise _SessionEnd(POLICY, "session.config was not received before timeout")
        try:
            config = parse_session_config(_message(frame, CONFIG_BYTES))
            self._speaking.check(config.ask, with_input=False)
            lowered = await self._speaking.lower(config.ask, stream=config.stream_audio)
        except SpeechError as refusal:
            over = _SessionEnd(POLICY, refusal.message)
            over.refusal = refusal
            raise over from None
        self._cutter = SentenceSplitter(clauses=config.split_granularity == "clause")
        await self._line.tell(
            {
                "type": "session.configured",
                "session_id": self._id,
                "response_format": config.ask.response_format,
                "stream_audio": config.stream_audio,
                "split_granularity": config.split_granularity,
            }
        )
        return _SentenceSpeaker(self._context, self._line, config, lowered)

    async def _converse(
        self, voice: _SentenceSpeaker, frames: trio.MemoryReceiveChannel[Frame]
    ) -> None:
        """Take the client's messages until input.done. Raises _Over."""
        while True:
            with trio.move_on_after(IDLE_SECS) as patience:
                frame = await frames.receive()
            if patience.cancelled_caught:
                raise _SessionEnd(POLICY, f"no message came for {IDLE_SECS:g} seconds")
            try:
                if await self._take(_message(frame, FRAME_BYTES), voice):
                    return
            except SpeechError as refusal:
                await self._line.tell_error(refusal)

    async def _take(self, message: Mapping[str, Any], voice: _SentenceSpeaker) -> bool:
        """Act on one message; True for the last. Raises SpeechError where it means nothing."""
        match message.get("type"):
            case "input.text":
                await self._speak(self._cut(message.get("text")), voice)
            case "input.commit":
                await self._speak(self._cutter.flush(), voice)
                await self._tell_committed()
            case "input.done":
                await self._speak(self._cutter.flush(), voice)
                done = {"type": "session.done", "session_id": self._id}
                await self._line.tell(done | {"total_sentences": self._sentences})
                await self._line.close(NORMAL)
                return True
            case "session.config":
                raise SpeechError("the session is configured already", "type")
            case other:
                raise SpeechError(
                    f"unknown message type {other!r}; known are input.text, input.commit and "
                    "input.done",
                    "type",
                )
        return False

    def _cut(self, text: object) -> list[str]:
        if not isinstance(text, str):
            raise SpeechError("text must be a string", "text")
        if self._cutter.held_chars + len(text) > HELD_CHARS:
            told = f"more than {HELD_CHARS} characters wait for the end of a sentence"
            raise _SessionEnd(TOO_BIG, told, "text")
        return self._cutter.feed(text)

    async def _speak(self, sentences: list[str], voice: _SentenceSpeaker) -> None:
        for sentence in sentences:
            index, self._sentences = self._sentences, self._sentences + 1
            await voice.speak(sentence, index, f"{self._id}-{index}")

    async def _tell_committed(self) -> None:
        await self._line.tell(
            {
                "type": "input.committed",
                "session_id": self._id,
                "segment_index": self._segments,
                "segment_sentences": self._sentences - self._committed,
                "total_sentences": self._sentences,
            }
        )
        self._segments += 1
        self._committed = self._sentences


class _SentenceSpeaker:
    """Speaks sentences as the session was configured."""

    def __init__(
        self,
        context: RouteContext,
        line: _EventSocket,
        config: SessionConfig,
        lowered: GenerateRequest,
    ) -> None:
        self._context = context
        self._line = line
        self._config = config
        self._lowered = lowered

    async def speak(self, text: str, index: int, sentence_id: str) -> None:
        """Speak one sentence; its failure is told and ends nothing else."""
        start = {
            "type": "audio.start",
            "id": sentence_id,
            "sentence_index": index,
            "sentence_text": text,
            "format": self._config.ask.response_format,
        }
        told = _SentenceEvents(self._line, start)
        failed = False
        try:
            check_input(replace(self._config.ask, input=text), self._context.max_speech_input_chars)
            await self._generate(text, sentence_id, told)
        except (*CLIENT_ERRORS, SpeechError) as fault:
            failed = True
            await told.fail(to_speech_error(fault))
        done = {"type": "audio.done", "id": sentence_id, "sentence_index": index}
        await self._line.tell(done | {"total_bytes": told.total_bytes, "error": failed})

    async def _generate(self, text: str, sentence_id: str, told: _SentenceEvents) -> None:
        prompt = self._lowered.prompt
        prompt = {**prompt, "text": text} if isinstance(prompt, dict) else text
        request = replace(self._lowered, prompt=prompt)
        response_format = self._config.ask.response_format
        rate, held = SampleRateGuard(), bytearray()
        async with self._context.client.generate(request, sentence_id) as generation:
            async for chunk in generation:
                if not chunk.audio:
                    continue
                rate.hold(chunk)
                if self._config.stream_audio:
                    await told.audio(
                        encode_audio(chunk.audio, rate.rate, response_format), rate.rate
                    )
                else:
                    held += chunk.audio
        if not rate.rate:
            raise speech_server_error(NO_AUDIO)
        if held:
            await told.audio(encode_audio(bytes(held), rate.rate, response_format), rate.rate)


class _SentenceEvents:
    """What the client has heard of one sentence: its start exactly once, before all else."""

    def __init__(self, line: _EventSocket, start: dict[str, Any]) -> None:
        self._line = line
        self._start = start
        self._started = False
        self.total_bytes = 0

    async def audio(self, data: bytes, sample_rate: int) -> None:
        await self._begin(sample_rate)
        await self._line.send_audio(data)
        self.total_bytes += len(data)

    async def fail(self, refusal: SpeechError) -> None:
        await self._begin(DEFAULT_SAMPLE_RATE)  # it failed before its rate was known
        await self._line.tell_error(refusal)

    async def _begin(self, sample_rate: int) -> None:
        if not self._started:
            self._started = True
            await self._line.tell(self._start | {"sample_rate": sample_rate})


def _message(frame: Frame, most_bytes: int) -> dict[str, Any]:
    """Return a frame's JSON object. Raises SpeechError, or _Over for no frame of ours."""
    try:
        return parse_message(frame, most_bytes)
    except NotTextFrame:
        raise _SessionEnd(UNSUPPORTED, "messages must be text frames, not binary ones") from None
    except FrameTooLong:
        raise _SessionEnd(TOO_BIG, f"a message is larger than {most_bytes} bytes") from None


def mount(app: QuartTrio, context: RouteContext) -> None:
    async def session() -> None:
        await websocket.accept()
        # The proxy object looks the connection up at each use, which only this task may do.
        line = _EventSocket(websocket._get_current_object())  # type: ignore[attr-defined]
        await _Session(context, line).run()

    app.add_websocket("/v1/audio/speech/stream", "speech_session", session)

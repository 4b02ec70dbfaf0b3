"""WS /v1/audio/speech/stream: receives text incrementally, sends speech sentence by sentence.

    configure -> (input.text | input.commit)* -> input.done -> close 1000      (note:api-server 1.6)

Invariant: sentences are synthesized one after another, in order, and each `audio.start` has an
`audio.done`. A session that doesn't end with `input.done` gets an error event before the close
frame. A disconnect cancels the session, which aborts the synthesis.
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
from omni_proxy.replica.api.speech.speech_writers import SampleRateGuard
from omni_proxy.replica.pipeline.client import GenerateRequest
from omni_proxy.shared.engine_protocol import (
    SPEECH_CONFIG_BYTES,
    SPEECH_CONFIG_SECS,
    SPEECH_MESSAGE_BYTES,
)

IDLE_SECS: Final = 30.0
HELD_CHARS: Final = 256 * 1024
WAITING_FRAMES: Final = 16
AUDIO_FRAME_BYTES: Final = 256 * 1024  # clients commonly refuse messages above 1 MiB
NORMAL, UNSUPPORTED, POLICY, TOO_BIG = 1000, 1003, 1008, 1009


GRANULARITIES: Final = ("sentence", "clause")
# Text or bytes of a frame; Quart gives None for an empty binary frame.
Frame = str | bytes | None


class NotTextFrame(Exception):
    """A binary frame, which a client must not send."""


class FrameTooLong(Exception):
    """A frame is above its size limit."""


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """How the sentences of a session are synthesized."""

    request: SpeechRequest
    stream_audio: bool = False
    split_granularity: str = "sentence"


def parse_message(frame: Frame, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a text frame. Raises NotTextFrame, FrameTooLong, SpeechError."""
    if not isinstance(frame, str):
        raise NotTextFrame
    if len(frame) > max_bytes or len(data := frame.encode()) > max_bytes:
        raise FrameTooLong
    return parse_object(data, "a message")


def parse_session_config(message: Mapping[str, Any]) -> SessionConfig:
    """Parse a session.config, whose fields are under "session" or at the top level.

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
    request = parse_speech_request(fields, default_format="pcm")
    if stream_audio and request.response_format != "pcm":
        raise SpeechError('stream_audio needs response_format="pcm" or none', "response_format")
    return SessionConfig(request, bool(stream_audio), granularity or GRANULARITIES[0])


class _SessionEnd(Exception):
    """Ends the session with a close code, after an error event."""

    def __init__(self, code: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.error = SpeechError(message, param)


class _EventSocket:
    """The WebSocket connection as events and audio."""

    def __init__(self, socket: Websocket) -> None:
        self._socket = socket

    async def receive_frame(self) -> Frame:
        frame: Frame = await self._socket.receive()
        return frame

    async def send_event(self, event: Mapping[str, Any]) -> None:
        await self._socket.send(msgspec.json.encode(event).decode())

    async def send_error(self, error: SpeechError) -> None:
        event = {"type": "error", "message": error.message, "error_type": error.kind}
        optional = {"param": error.param, "code": error.code}
        await self.send_event(
            event | {name: value for name, value in optional.items() if value is not None}
        )

    async def send_audio(self, data: bytes) -> None:
        for start in range(0, len(data), AUDIO_FRAME_BYTES):
            await self._socket.send(data[start : start + AUDIO_FRAME_BYTES])

    async def close(self, code: int, reason: str = "") -> None:
        # A close frame holds up to 123 bytes of reason; all reasons here are ASCII.
        await self._socket.close(code, reason[:123])


class _Session:
    """One session and its progress."""

    def __init__(self, context: RouteContext, socket: _EventSocket) -> None:
        self._context = context
        self._service = SpeechService(context)
        self._socket_events = socket
        self._id = f"speech_ws_{secrets.token_hex(16)}"
        self._splitter = SentenceSplitter()
        self._sentences = 0  # of the whole session
        self._committed = 0  # number of sentences before the last commit
        self._segments = 0

    async def run(self) -> None:
        try:
            speaker = await self._configure()
        except _SessionEnd as error:
            await self._close_with_error(error)
            return
        frames_in, frames_out = trio.open_memory_channel[Frame](WAITING_FRAMES)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, frames_in)
            try:
                await self._converse(speaker, frames_out)
            except _SessionEnd as error:
                await self._close_with_error(error)
            nursery.cancel_scope.cancel()

    async def _close_with_error(self, end: _SessionEnd) -> None:
        await self._socket_events.send_error(end.error)
        await self._socket_events.close(end.code, end.error.message)

    async def _listen(self, frames: trio.MemorySendChannel[Frame]) -> None:
        # If the channel is full, reading stops: backpressure slows the client, and no text is lost.
        while True:
            await frames.send(await self._socket_events.receive_frame())

    async def _configure(self) -> _SentenceSpeaker:
        """Receive the first message and answer it. Raises _SessionEnd."""
        with trio.move_on_after(SPEECH_CONFIG_SECS) as timeout:
            frame = await self._socket_events.receive_frame()
        if timeout.cancelled_caught:
            raise _SessionEnd(POLICY, "session.config was not received before timeout")
        try:
            config = parse_session_config(_message(frame, SPEECH_CONFIG_BYTES))
            self._service.check(config.request, with_input=False)
            template = await self._service.to_generate_request(
                config.request, stream=config.stream_audio
            )
        except SpeechError as error:
            end = _SessionEnd(POLICY, error.message)
            end.error = error
            raise end from None
        self._splitter = SentenceSplitter(clauses=config.split_granularity == "clause")
        await self._socket_events.send_event(
            {
                "type": "session.configured",
                "session_id": self._id,
                "response_format": config.request.response_format,
                "stream_audio": config.stream_audio,
                "split_granularity": config.split_granularity,
            }
        )
        return _SentenceSpeaker(self._context, self._socket_events, config, template)

    async def _converse(
        self, speaker: _SentenceSpeaker, frames: trio.MemoryReceiveChannel[Frame]
    ) -> None:
        """Handle the client's messages until input.done. Raises _SessionEnd."""
        while True:
            with trio.move_on_after(IDLE_SECS) as timeout:
                frame = await frames.receive()
            if timeout.cancelled_caught:
                raise _SessionEnd(POLICY, f"no message was received for {IDLE_SECS:g} seconds")
            try:
                if await self._handle(_message(frame, SPEECH_MESSAGE_BYTES), speaker):
                    return
            except SpeechError as error:
                await self._socket_events.send_error(error)

    async def _handle(self, message: Mapping[str, Any], speaker: _SentenceSpeaker) -> bool:
        """Handle one message; return whether it is the last. Raises SpeechError if invalid."""
        match message.get("type"):
            case "input.text":
                await self._synthesize_all(self._split(message.get("text")), speaker)
            case "input.commit":
                await self._synthesize_all(self._splitter.flush(), speaker)
                await self._send_committed()
            case "input.done":
                await self._synthesize_all(self._splitter.flush(), speaker)
                done = {"type": "session.done", "session_id": self._id}
                await self._socket_events.send_event(done | {"total_sentences": self._sentences})
                await self._socket_events.close(NORMAL)
                return True
            case "session.config":
                raise SpeechError("the session is already configured", "type")
            case other:
                raise SpeechError(
                    f"unknown message type {other!r}; use input.text, input.commit or input.done",
                    "type",
                )
        return False

    def _split(self, text: object) -> list[str]:
        if not isinstance(text, str):
            raise SpeechError("text must be a string", "text")
        if self._splitter.buffered_chars + len(text) > HELD_CHARS:
            reason = f"more than {HELD_CHARS} characters wait for the end of a sentence"
            raise _SessionEnd(TOO_BIG, reason, "text")
        return self._splitter.feed(text)

    async def _synthesize_all(self, sentences: list[str], speaker: _SentenceSpeaker) -> None:
        for sentence in sentences:
            index, self._sentences = self._sentences, self._sentences + 1
            await speaker.synthesize(sentence, index, f"{self._id}-{index}")

    async def _send_committed(self) -> None:
        await self._socket_events.send_event(
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
    """Synthesizes sentences with the configuration of the session."""

    def __init__(
        self,
        context: RouteContext,
        socket: _EventSocket,
        config: SessionConfig,
        template: GenerateRequest,
    ) -> None:
        self._context = context
        self._socket_events = socket
        self._config = config
        self._template = template

    async def synthesize(self, text: str, index: int, sentence_id: str) -> None:
        """Synthesize one sentence; a failure is reported and doesn't end the session."""
        start = {
            "type": "audio.start",
            "id": sentence_id,
            "sentence_index": index,
            "sentence_text": text,
            "format": self._config.request.response_format,
        }
        events = _SentenceEvents(self._socket_events, start)
        failed = False
        try:
            check_input(
                replace(self._config.request, input=text), self._context.max_speech_input_chars
            )
            await self._generate(text, sentence_id, events)
        except (*CLIENT_ERRORS, SpeechError) as error:
            failed = True
            await events.send_failure(to_speech_error(error))
        done = {"type": "audio.done", "id": sentence_id, "sentence_index": index}
        await self._socket_events.send_event(
            done | {"total_bytes": events.total_bytes, "error": failed}
        )

    async def _generate(self, text: str, sentence_id: str, events: _SentenceEvents) -> None:
        prompt = self._template.prompt
        prompt = {**prompt, "text": text} if isinstance(prompt, dict) else text
        request = replace(self._template, prompt=prompt)
        response_format = self._config.request.response_format
        rate, collected = SampleRateGuard(), bytearray()
        async with self._context.client.generate(request, sentence_id) as generation:
            async for chunk in generation:
                if not chunk.audio:
                    continue
                rate.check(chunk)
                if self._config.stream_audio:
                    await events.send_audio_chunk(
                        encode_audio(chunk.audio, rate.rate, response_format), rate.rate
                    )
                else:
                    collected += chunk.audio
        if not rate.rate:
            raise speech_server_error(NO_AUDIO)
        if collected:
            await events.send_audio_chunk(
                encode_audio(bytes(collected), rate.rate, response_format), rate.rate
            )


class _SentenceEvents:
    """The events of one sentence: `audio.start` exactly once, before all others."""

    def __init__(self, socket: _EventSocket, start: dict[str, Any]) -> None:
        self._socket_events = socket
        self._start = start
        self._started = False
        self.total_bytes = 0

    async def send_audio_chunk(self, data: bytes, sample_rate: int) -> None:
        await self._send_start(sample_rate)
        await self._socket_events.send_audio(data)
        self.total_bytes += len(data)

    async def send_failure(self, error: SpeechError) -> None:
        await self._send_start(DEFAULT_SAMPLE_RATE)  # the sample rate may be unknown yet
        await self._socket_events.send_error(error)

    async def _send_start(self, sample_rate: int) -> None:
        if not self._started:
            self._started = True
            await self._socket_events.send_event(self._start | {"sample_rate": sample_rate})


def _message(frame: Frame, max_bytes: int) -> dict[str, Any]:
    """Return a frame's JSON object. Raises SpeechError, or _SessionEnd for an invalid frame."""
    try:
        return parse_message(frame, max_bytes)
    except NotTextFrame:
        raise _SessionEnd(UNSUPPORTED, "messages must be text frames, not binary ones") from None
    except FrameTooLong:
        raise _SessionEnd(TOO_BIG, f"a message is larger than {max_bytes} bytes") from None


def mount(app: QuartTrio, context: RouteContext) -> None:
    async def session() -> None:
        await websocket.accept()
        # Quart's proxy object is bound to this task; other tasks need the connection itself.
        socket = _EventSocket(websocket._get_current_object())  # type: ignore[attr-defined]
        await _Session(context, socket).run()

    app.add_websocket("/v1/audio/speech/stream", "speech_session", session)

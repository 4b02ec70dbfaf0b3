"""WS /v1/audio/speech/stream: text goes in as it is written, speech comes out by sentences.

    configure -> (input.text | input.commit)* -> input.done -> close 1000      (api-server.md 1.6)

Invariant: sentences are spoken one after another, in order, and each `audio.start` has its
`audio.done`. Whatever ends a session but its own `input.done` is told by an error event before the
closing frame. A client that goes away cancels the session, and that aborts what is being spoken.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec
import trio
from quart import Websocket, websocket
from quart_trio import QuartTrio

from omni_proxy.replica.api.envelope import SpeechRefusal, server_fault
from omni_proxy.replica.api.errors import CLIENT_ERRORS
from omni_proxy.replica.api.sentences import SentenceCutter
from omni_proxy.replica.api.served import Served
from omni_proxy.replica.api.session_config import (
    Frame,
    FrameTooLong,
    NotText,
    SessionConfig,
    read_config,
    read_message,
)
from omni_proxy.replica.api.speaking import (
    NO_AUDIO,
    USUAL_RATE,
    Speaking,
    as_refusal,
    encode,
)
from omni_proxy.replica.api.speech_fields import check_input
from omni_proxy.replica.api.speech_stream import OneRate
from omni_proxy.replica.pipeline.client import GenerateRequest

CONFIG_SECS: Final = 10.0
IDLE_SECS: Final = 30.0
CONFIG_BYTES: Final = 15_029_592  # 10 MiB of reference audio in base64, and 1 MiB of the rest
FRAME_BYTES: Final = 128 * 1024
HELD_CHARS: Final = 256 * 1024
WAITING_FRAMES: Final = 16
AUDIO_FRAME_BYTES: Final = 256 * 1024  # clients commonly refuse messages above 1 MiB
NORMAL, UNSUPPORTED, POLICY, TOO_BIG = 1000, 1003, 1008, 1009


class _Over(Exception):
    """The session ends here: with that closing code, after that error."""

    def __init__(self, code: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.refusal = SpeechRefusal(message, param)


class _Line:
    """The connection, as events and audio."""

    def __init__(self, socket: Websocket) -> None:
        self._socket = socket

    async def hear(self) -> Frame:
        frame: Frame = await self._socket.receive()
        return frame

    async def tell(self, event: Mapping[str, Any]) -> None:
        await self._socket.send(msgspec.json.encode(event).decode())

    async def tell_error(self, refusal: SpeechRefusal) -> None:
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

    def __init__(self, served: Served, line: _Line) -> None:
        self._served = served
        self._speaking = Speaking(served)
        self._line = line
        self._id = f"speech_ws_{secrets.token_hex(16)}"
        self._cutter = SentenceCutter()
        self._sentences = 0  # of the whole session
        self._committed = 0  # so many of them stood before the last commit
        self._segments = 0

    async def run(self) -> None:
        try:
            voice = await self._configure()
        except _Over as over:
            await self._part(over)
            return
        frames_in, frames_out = trio.open_memory_channel[Frame](WAITING_FRAMES)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, frames_in)
            try:
                await self._converse(voice, frames_out)
            except _Over as over:
                await self._part(over)
            nursery.cancel_scope.cancel()

    async def _part(self, over: _Over) -> None:
        await self._line.tell_error(over.refusal)
        await self._line.close(over.code, over.refusal.message)

    async def _listen(self, frames: trio.MemorySendChannel[Frame]) -> None:
        # A full channel stops the reading, and so at length the client: no text is lost.
        while True:
            await frames.send(await self._line.hear())

    async def _configure(self) -> _Voice:
        """Take the first message and answer it. Raises _Over."""
        with trio.move_on_after(CONFIG_SECS) as patience:
            frame = await self._line.hear()
        if patience.cancelled_caught:
            raise _Over(POLICY, "session.config was not received before timeout")
        try:
            config = read_config(_message(frame, CONFIG_BYTES))
            self._speaking.check(config.ask, with_input=False)
            lowered = await self._speaking.lower(config.ask, stream=config.stream_audio)
        except SpeechRefusal as refusal:
            over = _Over(POLICY, refusal.message)
            over.refusal = refusal
            raise over from None
        self._cutter = SentenceCutter(clauses=config.split_granularity == "clause")
        await self._line.tell(
            {
                "type": "session.configured",
                "session_id": self._id,
                "response_format": config.ask.response_format,
                "stream_audio": config.stream_audio,
                "split_granularity": config.split_granularity,
            }
        )
        return _Voice(self._served, self._line, config, lowered)

    async def _converse(self, voice: _Voice, frames: trio.MemoryReceiveChannel[Frame]) -> None:
        """Take the client's messages until input.done. Raises _Over."""
        while True:
            with trio.move_on_after(IDLE_SECS) as patience:
                frame = await frames.receive()
            if patience.cancelled_caught:
                raise _Over(POLICY, f"no message came for {IDLE_SECS:g} seconds")
            try:
                if await self._take(_message(frame, FRAME_BYTES), voice):
                    return
            except SpeechRefusal as refusal:
                await self._line.tell_error(refusal)

    async def _take(self, message: Mapping[str, Any], voice: _Voice) -> bool:
        """Act on one message; True for the last. Raises SpeechRefusal where it means nothing."""
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
                raise SpeechRefusal("the session is configured already", "type")
            case other:
                raise SpeechRefusal(
                    f"unknown message type {other!r}; known are input.text, input.commit and "
                    "input.done",
                    "type",
                )
        return False

    def _cut(self, text: object) -> list[str]:
        if not isinstance(text, str):
            raise SpeechRefusal("text must be a string", "text")
        if self._cutter.held_chars + len(text) > HELD_CHARS:
            told = f"more than {HELD_CHARS} characters wait for the end of a sentence"
            raise _Over(TOO_BIG, told, "text")
        return self._cutter.feed(text)

    async def _speak(self, sentences: list[str], voice: _Voice) -> None:
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


class _Voice:
    """Speaks sentences as the session was configured."""

    def __init__(
        self, served: Served, line: _Line, config: SessionConfig, lowered: GenerateRequest
    ) -> None:
        self._served = served
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
        told = _Told(self._line, start)
        failed = False
        try:
            check_input(replace(self._config.ask, input=text), self._served.max_speech_input_chars)
            await self._generate(text, sentence_id, told)
        except (*CLIENT_ERRORS, SpeechRefusal) as fault:
            failed = True
            await told.fail(as_refusal(fault))
        done = {"type": "audio.done", "id": sentence_id, "sentence_index": index}
        await self._line.tell(done | {"total_bytes": told.total_bytes, "error": failed})

    async def _generate(self, text: str, sentence_id: str, told: _Told) -> None:
        prompt = self._lowered.prompt
        prompt = {**prompt, "text": text} if isinstance(prompt, dict) else text
        request = replace(self._lowered, prompt=prompt)
        response_format = self._config.ask.response_format
        rate, held = OneRate(), bytearray()
        async with self._served.client.generate(request, sentence_id) as generation:
            async for chunk in generation:
                if not chunk.audio:
                    continue
                rate.hold(chunk)
                if self._config.stream_audio:
                    await told.audio(encode(chunk.audio, rate.rate, response_format), rate.rate)
                else:
                    held += chunk.audio
        if not rate.rate:
            raise server_fault(NO_AUDIO)
        if held:
            await told.audio(encode(bytes(held), rate.rate, response_format), rate.rate)


class _Told:
    """What the client has heard of one sentence: its start exactly once, before all else."""

    def __init__(self, line: _Line, start: dict[str, Any]) -> None:
        self._line = line
        self._start = start
        self._started = False
        self.total_bytes = 0

    async def audio(self, data: bytes, sample_rate: int) -> None:
        await self._begin(sample_rate)
        await self._line.send_audio(data)
        self.total_bytes += len(data)

    async def fail(self, refusal: SpeechRefusal) -> None:
        await self._begin(USUAL_RATE)  # it failed before its rate was known
        await self._line.tell_error(refusal)

    async def _begin(self, sample_rate: int) -> None:
        if not self._started:
            self._started = True
            await self._line.tell(self._start | {"sample_rate": sample_rate})


def _message(frame: Frame, most_bytes: int) -> dict[str, Any]:
    """Return a frame's JSON object. Raises SpeechRefusal, or _Over for no frame of ours."""
    try:
        return read_message(frame, most_bytes)
    except NotText:
        raise _Over(UNSUPPORTED, "messages must be text frames, not binary ones") from None
    except FrameTooLong:
        raise _Over(TOO_BIG, f"a message is larger than {most_bytes} bytes") from None


def mount(app: QuartTrio, served: Served) -> None:
    async def session() -> None:
        await websocket.accept()
        # The proxy object looks the connection up at each use, which only this task may do.
        line = _Line(websocket._get_current_object())  # type: ignore[attr-defined]
        await _Session(served, line).run()

    app.add_websocket("/v1/audio/speech/stream", "speech_session", session)

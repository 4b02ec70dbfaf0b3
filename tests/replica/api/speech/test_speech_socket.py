import json

import pytest
import trio
from quart.testing.connections import WebsocketDisconnectError

from omni_proxy.replica.api.common.media import encode_audio
from omni_proxy.replica.api.speech import speech_socket
from omni_proxy.replica.api.speech.speech_socket import NotTextFrame, parse_message
from tests.replica.api.audio_stages import ABORTED, HOLDING, RATE, REQUESTS, open_replica, wave

PATH = "/v1/audio/speech/stream"


def pcm(sentence):
    return encode_audio(wave(sentence).tobytes(), RATE, "pcm")


class SpeechSession:
    """The client side of a speech session."""

    def __init__(self, socket):
        self.socket = socket

    async def send(self, kind, **fields):
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def receive(self):
        frame = await self.socket.receive()
        return json.loads(frame) if isinstance(frame, str) else frame

    async def configure(self, **session):
        await self.send("session.config", session=session)
        return await self.receive()

    async def close_code(self):
        """Expect the socket's close as the next message; return its code."""
        with pytest.raises(WebsocketDisconnectError) as closed:
            await self.socket.receive()
        return closed.value.args[0]

    async def error_and_close_code(self):
        error = await self.receive()
        assert error["type"] == "error"
        assert {"message", "error_type"} <= error.keys()
        return error, await self.close_code()


def connect(replica):
    return replica.http.websocket(PATH)


async def test_a_session_synthesizes_by_sentence_and_closes_at_its_end():
    async with open_replica() as replica, connect(replica) as socket:
        session = SpeechSession(socket)
        configured = await session.configure()
        session_id = configured.pop("session_id")
        assert session_id.startswith("speech_ws_")
        assert configured == {
            "type": "session.configured",
            "response_format": "pcm",
            "stream_audio": False,
            "split_granularity": "sentence",
        }
        await session.send("input.text", text="Hello there. Good")
        assert await session.receive() == {
            "type": "audio.start",
            "id": f"{session_id}-0",
            "sentence_index": 0,
            "sentence_text": "Hello there.",
            "format": "pcm",
            "sample_rate": RATE,
        }
        audio = pcm("Hello there")
        assert await session.receive() == audio
        assert await session.receive() == {
            "type": "audio.done",
            "id": f"{session_id}-0",
            "sentence_index": 0,
            "total_bytes": len(audio),
            "error": False,
        }
        await session.send("input.text", text=" day")
        await session.send("input.commit")
        start, audio, done, committed = [await session.receive() for _ in range(4)]
        assert (start["sentence_text"], start["sentence_index"]) == ("Good day", 1)
        assert audio == pcm("Good day")
        assert done["error"] is False
        assert committed == {
            "type": "input.committed",
            "session_id": session_id,
            "segment_index": 0,
            "segment_sentences": 2,
            "total_sentences": 2,
        }
        await session.send("input.text", text="Last one")
        await session.send("input.done")
        start, audio, done, last = [await session.receive() for _ in range(4)]
        assert (start["sentence_index"], audio) == (2, pcm("Last one"))
        assert last == {"type": "session.done", "session_id": session_id, "total_sentences": 3}
        assert await session.close_code() == 1000


async def test_streamed_audio_keeps_the_chunks_of_the_synthesizer():
    async with open_replica() as replica, connect(replica) as socket:
        session = SpeechSession(socket)
        configured = await session.configure(stream_audio=True, split_granularity="clause")
        assert (configured["stream_audio"], configured["split_granularity"]) == (True, "clause")
        await session.send("input.text", text="Version 1.0 here, ")
        start, first, second, done = [await session.receive() for _ in range(4)]
        assert start["sentence_text"] == "Version 1.0 here,"
        assert (first, second) == (pcm("Version 1"), pcm("0 here,"))
        assert done["total_bytes"] == len(first) + len(second)
        await session.send("input.commit")
        assert (await session.receive())["segment_sentences"] == 1
        assert REQUESTS[0].params["stream"] is True


async def test_settings_without_a_session_object_are_accepted_and_wav_files_are_complete(
    monkeypatch,
):
    monkeypatch.setattr(speech_socket, "AUDIO_FRAME_BYTES", 300)
    async with open_replica() as replica, connect(replica) as socket:
        session = SpeechSession(socket)
        await session.send("session.config", response_format="wav", speed=2, voice="alloy")
        assert (await session.receive())["response_format"] == "wav"
        await session.send("input.text", text="Hello there.")
        assert (await session.receive())["format"] == "wav"
        wav = encode_audio(wave("Hello there").tobytes(), RATE, "wav")
        frames = [await session.receive(), await session.receive()]
        assert frames == [wav[:300], wav[300:]]
        assert (await session.receive())["total_bytes"] == len(wav)
        assert REQUESTS[0].metadata["tts_params"] == {
            "voice": "alloy",
            "response_format": "wav",
            "speed": 2.0,
        }


@pytest.mark.parametrize(
    ("text", "before", "message", "kind"),
    [
        ("BROKEN.", [], "RuntimeError: the voice broke", "server_error"),
        ("SILENT.", [], "No audio output generated from the pipeline.", "server_error"),
        ("REFUSED.", [], "this text is refused", "BadRequestError"),
        ("One 1.2 BROKEN.", ["One 1"], "RuntimeError: the voice broke", "server_error"),
    ],
)
async def test_a_failed_sentence_is_reported_and_the_session_continues(text, before, message, kind):
    async with open_replica() as replica, connect(replica) as socket:
        session = SpeechSession(socket)
        await session.configure(stream_audio=True)
        await session.send("input.text", text=text)
        start = await session.receive()
        assert (start["type"], start["sample_rate"]) == ("audio.start", RATE)
        for sentence in before:
            assert await session.receive() == pcm(sentence)
        error, done = await session.receive(), await session.receive()
        assert (error["type"], error["message"], error["error_type"]) == ("error", message, kind)
        assert (done["type"], done["error"]) == ("audio.done", True)
        assert done["total_bytes"] == sum(len(pcm(sentence)) for sentence in before)
        await session.send("input.text", text="Fine.")
        assert (await session.receive())["sentence_index"] == 1


@pytest.mark.parametrize(
    ("frame", "param"),
    [
        ('{"type": "input.sing"}', "type"),
        ("{}", "type"),
        ('{"type": "session.config"}', "type"),
        ('{"type": "input.text"}', "text"),
        ('{"type": "input.text", "text": 5}', "text"),
        ("no json", None),
        ("[]", None),
    ],
)
async def test_an_invalid_message_is_reported_and_the_session_continues(frame, param):
    async with open_replica() as replica, connect(replica) as socket:
        session = SpeechSession(socket)
        await session.configure()
        await socket.send(frame)
        error = await session.receive()
        assert (error["type"], error["error_type"]) == ("error", "BadRequestError")
        assert error.get("param") == param
        await session.send("input.done")
        assert (await session.receive())["total_sentences"] == 0


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ({"stream_audio": 1}, "stream_audio"),
        ({"stream_audio": True, "response_format": "wav"}, "response_format"),
        ({"split_granularity": "word"}, "split_granularity"),
        ({"split_granularity": []}, "split_granularity"),
        ({"speed": "fast"}, "speed"),
        ({"voice": "greta"}, "voice"),
        ("x", "session"),
    ],
)
async def test_invalid_settings_end_the_session(session, param):
    async with open_replica() as replica, connect(replica) as socket:
        await SpeechSession(socket).send("session.config", session=session)
        error, code = await SpeechSession(socket).error_and_close_code()
    assert (error["param"], error["code"], code) == (param, 400, 1008)


async def test_without_a_speech_model_sessions_are_refused():
    async with (
        open_replica(capabilities=frozenset({"chat"})) as replica,
        connect(replica) as socket,
    ):
        await SpeechSession(socket).send("session.config", session={})
        error, code = await SpeechSession(socket).error_and_close_code()
    assert (error["code"], code) == ("speech_not_available", 1008)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"bytes", 1003),
        ("x" * (15_029_592 + 1), 1009),
        ('{"type": "input.text"}', 1008),
        ("no json", 1008),
    ],
    ids=["binary", "too long", "no config", "no json"],
)
async def test_a_first_message_other_than_the_config_ends_the_session(frame, code):
    async with open_replica() as replica, connect(replica) as socket:
        await socket.send(frame)
        assert (await SpeechSession(socket).error_and_close_code())[1] == code


def test_an_empty_binary_frame_is_not_text():
    with pytest.raises(NotTextFrame):
        parse_message(None, 10)


async def test_frames_and_buffered_text_are_limited():
    for frames, code in (
        ([b"x"], 1003),
        (["x" * (128 * 1024 + 1)], 1009),
        (["\u3002" * 50_000], 1009),
        ([json.dumps({"type": "input.text", "text": "a" * 130_000})] * 3, 1009),
    ):
        async with open_replica() as replica, connect(replica) as socket:
            session = SpeechSession(socket)
            await session.configure()
            for frame in frames:
                await socket.send(frame)
            assert (await session.error_and_close_code())[1] == code


async def test_a_frame_of_exactly_the_limit_is_accepted():
    empty = len(json.dumps({"type": "input.text", "text": ""}))
    async with open_replica() as replica, connect(replica) as socket:
        session = SpeechSession(socket)
        await session.configure()
        await session.send("input.text", text=" " * (128 * 1024 - empty))
        await session.send("input.done")
        assert (await session.receive())["type"] == "session.done"


async def test_settings_must_arrive_within_ten_seconds(mock_clock):
    async with open_replica() as replica, connect(replica) as socket:
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(9.9)
        await trio.testing.wait_all_tasks_blocked()
        assert socket._client_receive.statistics().current_buffer_used == 0
        mock_clock.jump(0.2)
        error, code = await SpeechSession(socket).error_and_close_code()
    assert error["message"] == "session.config was not received before timeout"
    assert code == 1008


async def test_a_client_may_be_silent_for_thirty_seconds(mock_clock):
    async with open_replica() as replica, connect(replica) as socket:
        session = SpeechSession(socket)
        await session.configure()
        for _ in range(2):
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(29.9)
            await session.send("input.commit")
            assert (await session.receive())["type"] == "input.committed"
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(30.1)
        error, code = await session.error_and_close_code()
    assert "30 seconds" in error["message"]
    assert code == 1008


async def test_the_client_timeout_does_not_run_during_a_synthesis(mock_clock):
    async with open_replica() as replica, connect(replica) as socket:
        session = SpeechSession(socket)
        await session.configure()
        await session.send("input.text", text="HELD.")
        await trio.to_thread.run_sync(HOLDING.wait)
        mock_clock.jump(300)
        await trio.testing.wait_all_tasks_blocked()
        assert socket._client_receive.statistics().current_buffer_used == 0
        assert replica.live == 1


async def test_messages_during_a_synthesis_are_queued():
    async with open_replica() as replica, connect(replica) as socket:
        session = SpeechSession(socket)
        await session.configure()

        async def write():
            for n in range(60):
                await session.send("input.text", text=f"Number {n} is here. ")
            await session.send("input.done")

        sentences, frame = [], {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            while frame.get("type") != "session.done":
                frame = await session.receive()
                if isinstance(frame, bytes):
                    frame = {}
                elif frame["type"] == "audio.start":
                    sentences.append(frame["sentence_text"])
    assert sentences == [f"Number {n} is here." for n in range(60)]
    assert frame["total_sentences"] == 60


async def test_a_disconnect_aborts_the_sentence():
    async with open_replica() as replica:
        async with connect(replica) as socket:
            session = SpeechSession(socket)
            await session.configure(stream_audio=True)
            await session.send("input.text", text="HELD. ")
            await trio.to_thread.run_sync(HOLDING.wait)
            assert replica.live == 1
        assert replica.live == 0
        assert await trio.to_thread.run_sync(ABORTED.wait, 5.0)

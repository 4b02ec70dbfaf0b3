"""Speech over real sockets: the parts that depend on the server below the app."""

import json

import pytest
import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Request,
    TextMessage,
)

from omni_proxy.replica.api.common.media import encode_audio
from tests.replica.api.api_fixture import listening
from tests.replica.api.audio_stages import HOLDING, LEFT, RATE, replica, wave


@pytest.fixture
async def wire():
    """A replica, and a function that connects to it."""
    async with replica() as it, listening(it.app) as port:
        streams = []

        async def dial():
            streams.append(await trio.open_tcp_stream("127.0.0.1", port))
            return streams[-1]

        with trio.fail_after(30):
            yield it, dial
        for stream in streams:
            await stream.aclose()


def post(path, body, length=None):
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    return head.encode() + body


async def until(stream, end):
    """All bytes up to `end`, or up to the end of the connection."""
    heard = b""
    while end not in heard and (piece := await stream.receive_some()):
        heard += piece
    return heard


class Socket:
    """A client's websocket."""

    def __init__(self, stream):
        self.stream = stream
        self.protocol = WSConnection(ConnectionType.CLIENT)

    async def open(self):
        asked = Request(host="x", target="/v1/audio/speech/stream")
        await self.stream.send_all(self.protocol.send(asked))
        assert isinstance(await self.next(), AcceptConnection)

    async def say(self, kind, **fields):
        frame = TextMessage(json.dumps({"type": kind, **fields}))
        await self.stream.send_all(self.protocol.send(frame))

    async def next(self):
        while True:
            for event in self.protocol.events():
                return event
            self.protocol.receive_data(await self.stream.receive_some())

    async def receive(self):
        """The next complete message."""
        parts = []
        while True:
            event = await self.next()
            if not isinstance(event, (TextMessage, BytesMessage)):
                return event
            parts.append(event.data)
            if event.message_finished:
                whole = parts[0][:0].join(parts)
                return json.loads(whole) if isinstance(event, TextMessage) else bytes(whole)


async def test_a_stream_that_fails_ends_without_its_last_chunk(wire):
    it, dial = wire
    stream = await dial()
    body = json.dumps({"input": "Hello there. BROKEN", "stream": True}).encode()
    await stream.send_all(post("/v1/audio/speech", body))
    heard = await until(stream, b"\r\n0\r\n\r\n")
    assert heard.startswith(b"HTTP/1.1 200")
    assert b"audio.speech.chunk" in heard
    assert not heard.endswith(b"0\r\n\r\n")
    assert it.live == 0


async def test_a_whole_stream_leaves_its_connection_usable(wire):
    _, dial = wire
    stream = await dial()
    body = json.dumps({"input": "Hello there. Bye", "stream": True}).encode()
    for _ in range(2):
        await stream.send_all(post("/v1/audio/speech", body))
        assert b"[DONE]" in await until(stream, b"\r\n0\r\n\r\n")


async def test_hanging_up_aborts_a_stream(wire):
    it, dial = wire
    stream = await dial()
    body = json.dumps({"input": "Hello there. HELD", "stream": True}).encode()
    await stream.send_all(post("/v1/audio/speech", body))
    await until(stream, b"\n\n")
    await trio.to_thread.run_sync(HOLDING.wait)
    assert it.live == 1
    await stream.aclose()
    assert await trio.to_thread.run_sync(LEFT.wait, 5.0)
    assert it.live == 0


async def test_an_upload_that_is_too_large_is_answered_before_it_is_sent(wire):
    _, dial = wire
    stream = await dial()
    head = post("/v1/audio/voices", b"", length=11 * 2**20)
    head = head.replace(b"application/json", b"multipart/form-data; boundary=x")
    await stream.send_all(head)
    heard = await until(stream, b'"code":413}}')
    assert heard.startswith(b"HTTP/1.1 413")


async def test_a_session_synthesizes_and_closes(wire):
    _, dial = wire
    socket = Socket(await dial())
    await socket.open()
    await socket.say("session.config", session={"stream_audio": True})
    assert (await socket.receive())["type"] == "session.configured"
    await socket.say("input.text", text="Hello there.")
    assert (await socket.receive())["type"] == "audio.start"
    assert await socket.receive() == encode_audio(wave("Hello there").tobytes(), RATE, "pcm")
    assert (await socket.receive())["type"] == "audio.done"
    await socket.say("input.done")
    assert (await socket.receive())["type"] == "session.done"
    closing = await socket.receive()
    assert isinstance(closing, CloseConnection)
    assert closing.code == 1000


async def test_a_session_that_is_refused_reports_why_in_its_closing(wire):
    _, dial = wire
    socket = Socket(await dial())
    await socket.open()
    await socket.stream.send_all(socket.protocol.send(BytesMessage(b"")))
    assert (await socket.receive())["type"] == "error"
    closing = await socket.receive()
    assert (closing.code, closing.reason) == (1003, "messages must be text frames, not binary ones")


async def test_hanging_up_aborts_a_session(wire):
    it, dial = wire
    socket = Socket(await dial())
    await socket.open()
    await socket.say("session.config")
    await socket.receive()
    await socket.say("input.text", text="HELD.")
    await trio.to_thread.run_sync(HOLDING.wait)
    assert it.live == 1
    await socket.stream.aclose()
    assert await trio.to_thread.run_sync(LEFT.wait, 5.0)
    assert it.live == 0

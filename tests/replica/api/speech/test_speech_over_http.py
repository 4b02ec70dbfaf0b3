"""Speech over real sockets: behaviour that depends on the HTTP server below the app."""

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
from tests.replica.api.audio_stages import ABORTED, HOLDING, RATE, open_replica, wave


@pytest.fixture
async def served():
    """A replica, and a function that connects to it."""
    async with open_replica() as replica, listening(replica.app) as port:
        streams = []

        async def connect():
            streams.append(await trio.open_tcp_stream("127.0.0.1", port))
            return streams[-1]

        with trio.fail_after(30):
            yield replica, connect
        for stream in streams:
            await stream.aclose()


def post(path, body, length=None):
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    return head.encode() + body


async def receive_until(stream, end):
    """Receive up to `end`, or up to the end of the connection."""
    received = b""
    while end not in received and (chunk := await stream.receive_some()):
        received += chunk
    return received


class Socket:
    """A client's websocket."""

    def __init__(self, stream):
        self.stream = stream
        self.protocol = WSConnection(ConnectionType.CLIENT)

    async def open(self):
        request = Request(host="x", target="/v1/audio/speech/stream")
        await self.stream.send_all(self.protocol.send(request))
        assert isinstance(await self.next_event(), AcceptConnection)

    async def send_message(self, kind, **fields):
        frame = TextMessage(json.dumps({"type": kind, **fields}))
        await self.stream.send_all(self.protocol.send(frame))

    async def next_event(self):
        while True:
            for event in self.protocol.events():
                return event
            self.protocol.receive_data(await self.stream.receive_some())

    async def receive(self):
        """The next complete message."""
        parts = []
        while True:
            event = await self.next_event()
            if not isinstance(event, (TextMessage, BytesMessage)):
                return event
            parts.append(event.data)
            if event.message_finished:
                message = parts[0][:0].join(parts)
                return json.loads(message) if isinstance(event, TextMessage) else bytes(message)


async def test_a_stream_that_fails_ends_without_its_last_chunk(served):
    replica, connect = served
    stream = await connect()
    body = json.dumps({"input": "Hello there. BROKEN", "stream": True}).encode()
    await stream.send_all(post("/v1/audio/speech", body))
    received = await receive_until(stream, b"\r\n0\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 200")
    assert b"audio.speech.chunk" in received
    assert not received.endswith(b"0\r\n\r\n")
    assert replica.live == 0


async def test_a_complete_stream_leaves_its_connection_usable(served):
    _, connect = served
    stream = await connect()
    body = json.dumps({"input": "Hello there. Bye", "stream": True}).encode()
    for _ in range(2):
        await stream.send_all(post("/v1/audio/speech", body))
        assert b"[DONE]" in await receive_until(stream, b"\r\n0\r\n\r\n")


async def test_hanging_up_aborts_a_stream(served):
    replica, connect = served
    stream = await connect()
    body = json.dumps({"input": "Hello there. HELD", "stream": True}).encode()
    await stream.send_all(post("/v1/audio/speech", body))
    await receive_until(stream, b"\n\n")
    await trio.to_thread.run_sync(HOLDING.wait)
    assert replica.live == 1
    await stream.aclose()
    assert await trio.to_thread.run_sync(ABORTED.wait, 5.0)
    assert replica.live == 0


async def test_a_too_large_upload_is_refused_before_its_body_is_sent(served):
    _, connect = served
    stream = await connect()
    head = post("/v1/audio/voices", b"", length=11 * 2**20)
    head = head.replace(b"application/json", b"multipart/form-data; boundary=x")
    await stream.send_all(head)
    received = await receive_until(stream, b'"code":413}}')
    assert received.startswith(b"HTTP/1.1 413")


async def test_a_session_synthesizes_and_closes(served):
    _, connect = served
    socket = Socket(await connect())
    await socket.open()
    await socket.send_message("session.config", session={"stream_audio": True})
    assert (await socket.receive())["type"] == "session.configured"
    await socket.send_message("input.text", text="Hello there.")
    assert (await socket.receive())["type"] == "audio.start"
    assert await socket.receive() == encode_audio(wave("Hello there").tobytes(), RATE, "pcm")
    assert (await socket.receive())["type"] == "audio.done"
    await socket.send_message("input.done")
    assert (await socket.receive())["type"] == "session.done"
    close = await socket.receive()
    assert isinstance(close, CloseConnection)
    assert close.code == 1000


async def test_a_refused_session_is_closed_with_the_reason(served):
    _, connect = served
    socket = Socket(await connect())
    await socket.open()
    await socket.stream.send_all(socket.protocol.send(BytesMessage(b"")))
    assert (await socket.receive())["type"] == "error"
    close = await socket.receive()
    assert (close.code, close.reason) == (1003, "messages must be text frames, not binary ones")


async def test_hanging_up_aborts_a_session(served):
    replica, connect = served
    socket = Socket(await connect())
    await socket.open()
    await socket.send_message("session.config")
    await socket.receive()
    await socket.send_message("input.text", text="HELD.")
    await trio.to_thread.run_sync(HOLDING.wait)
    assert replica.live == 1
    await socket.stream.aclose()
    assert await trio.to_thread.run_sync(ABORTED.wait, 5.0)
    assert replica.live == 0

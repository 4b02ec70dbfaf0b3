"""A client that disconnects ends its request, on every route and in every phase."""

import base64
import json
import os
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio

from omni_proxy.replica.audio import encode_wav
from tests.promises.support.replica_program import gauges, until

pytest.importorskip("torch")
pytest.importorskip("tiktoken")

LONG = "Once upon a time there was a small grey cat. " * 30
ENDLESS = {"max_tokens": 7000, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": LONG}]
WAV = encode_wav(np.full(8000, 0.1, np.float32), 8000)
NATIVE = {"text": LONG, "sampling_params": {"max_new_tokens": 7000, "ignore_eos": True}}


def posted(path, fields):
    return head(path, json.dumps(fields).encode(), "application/json")


def form(fields):
    parts = [f'name="{name}"\r\n\r\n{text}'.encode() for name, text in fields.items()]
    parts.append(b'name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n' + WAV)
    body = b"".join(b"--B\r\nContent-Disposition: form-data; " + p + b"\r\n" for p in parts)
    return head("/v1/audio/transcriptions", body + b"--B--\r\n", "multipart/form-data; boundary=B")


def head(path, body, content_type):
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-type: {content_type}"]
    lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"
WHOLE = {
    "chat": posted(CHAT, {"messages": MESSAGES, **ENDLESS}),
    "completion": posted("/v1/completions", {"prompt": [LONG] * 3, **ENDLESS}),
    "rollout": posted("/generate", {"prompt": LONG, "sampling_params": {"max_new_tokens": 7000}}),
    "native generate": posted("/generate", NATIVE),
    "embeddings": posted("/v1/embeddings", {"input": [LONG * 5] * 400}),
    "speech": posted(SPEECH, {"input": "one two. HELD"}),
    "speech before its head": posted(SPEECH, {"input": "HELD", "stream": True}),
    "speech batch": posted(f"{SPEECH}/batch", {"items": [{"input": "HELD"}, {"input": "fine"}]}),
    "transcription": form({"prompt": "HELD"}),
    "transcription before its head": form({"prompt": "HELD", "stream": "true"}),
}
STREAMED = {
    "chat": posted(CHAT, {"messages": MESSAGES, "stream": True, **ENDLESS}),
    "completions": posted("/v1/completions", {"prompt": [LONG] * 3, "stream": True, **ENDLESS}),
    "native generate": posted("/generate", NATIVE | {"stream": True}),
    "speech events": posted(SPEECH, {"input": "one two. HELD", "stream": True}),
    "raw speech": posted(
        SPEECH,
        {"input": "one. HELD", "stream_format": "audio", "stream": True, "response_format": "pcm"},
    ),
    "transcription": form({"prompt": "HELD LATER", "stream": "true"}),
}


@asynccontextmanager
async def dialled(replica, data):
    async with await trio.open_tcp_stream("127.0.0.1", replica.port) as stream:
        await stream.send_all(data)
        yield stream


async def until_busy(client):
    async def has_requests():
        states = (await client.get("/health")).json()["request_states"]
        return states.get("running") or states.get("pending")

    await until(has_requests)


async def assert_idle(client, late=0):
    """Waits until no stage has a request.

    The server may receive up to `late` requests after it has reported that it has none.
    """

    async def forgotten():
        body = (await client.get("/health")).json()
        return not body["total_requests"] and body["request_states"] == {}

    async def idle():
        body = await gauges(client)
        return not (body["sglang:num_running_reqs"] or body["sglang:num_queue_reqs"])

    for _ in range(late + 1):
        await until(forgotten)
        # The stage answers between two steps, after all messages that were sent to it before.
        (decode,) = [
            result["data"]
            for result in (await client.get("/model_info")).json()["results"]
            if result["stage"] == "decode"
        ]
        computed = decode["running_batch_size"], decode["waiting_queue_size"]
        if computed == (0, 0):
            break
    assert computed == (0, 0)
    await until(idle)
    hi = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    assert (await client.post(CHAT, json=hi)).json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("name", WHOLE)
async def test_a_disconnect_before_a_complete_response_ends_the_request(replica, client, name):
    async with dialled(replica, WHOLE[name]):
        await until_busy(client)
    await assert_idle(client)


@pytest.mark.parametrize("name", STREAMED)
async def test_a_disconnect_during_a_stream_ends_the_request(replica, client, name):
    async with dialled(replica, STREAMED[name]) as stream:
        received = b""
        while len(received.partition(b"\r\n\r\n")[2]) < 50:
            received += await stream.receive_some()
        assert b" 200 " in received
    await assert_idle(client)


@pytest.mark.parametrize("cut", [0, 20, -1])
async def test_a_disconnect_before_the_end_of_a_request_leaves_no_request(replica, client, cut):
    async with dialled(replica, WHOLE["chat"][:cut]):
        pass
    async with dialled(replica, WHOLE["transcription"][:cut]):
        pass
    await assert_idle(client, late=2)


@pytest.mark.parametrize("name", ["chat", "transcription before its head"])
async def test_a_disconnect_right_after_a_request_ends_it(replica, client, name):
    for _ in range(5):
        async with dialled(replica, WHOLE[name]):
            pass
    await assert_idle(client, late=5)


async def test_a_disconnect_ends_a_speech_session(replica, client):
    key = base64.b64encode(os.urandom(16)).decode()
    lines = ["GET /v1/audio/speech/stream HTTP/1.1", "host: x", "connection: upgrade"]
    lines += ["upgrade: websocket", "sec-websocket-version: 13", f"sec-websocket-key: {key}"]
    async with dialled(replica, ("\r\n".join(lines) + "\r\n\r\n").encode()) as stream:
        assert b" 101 " in await stream.receive_some()
        await stream.send_all(frame({"type": "session.config", "session": {}}))
        await stream.send_all(frame({"type": "input.text", "text": "One two. HELD. "}))
        await until_busy(client)
    await assert_idle(client)


def frame(message):
    """Returns a client's text frame, masked with zeros."""
    data = json.dumps(message).encode()
    assert len(data) < 126
    return bytes([0x81, 0x80 | len(data), 0, 0, 0, 0]) + data

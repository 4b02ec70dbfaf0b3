"""A failure in a replica ends one request, with an error in its route's format."""

import io
import json
import os
import signal
import wave
from contextlib import suppress

import pytest
import trio

from tests.promises.replica.test_replica_leaving import dialled, form, posted
from tests.promises.support.replica_program import PATIENCE_SECS, healthy, program, until

pytest.importorskip("torch")
pytest.importorskip("tiktoken")

CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
USER = {"messages": [{"role": "user", "content": "hi"}]}
HELD = posted(CHAT, USER | {"max_tokens": 7000, "ignore_eos": True, "stream": True})
FULL = "The request queue is full."
SERVER_ERROR = {"type": "server_error", "param": None, "code": None}


@pytest.fixture
async def client(replica, client):
    """Checks after each test that the same replica process is alive and responds."""
    yield client
    assert replica.process.poll() is None
    assert (await client.get("/health")).json()["request_states"] == {}
    assert (await client.post(CHAT, json=USER | {"max_tokens": 2})).status_code == 200


def audio_file():
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(8000)
        out.writeframes(bytes(16000))
    return {"file": ("a.wav", file.getvalue(), "audio/wav")}


def events(text):
    return [line.removeprefix("data: ") for line in text.splitlines() if line]


async def test_a_stage_that_raises_is_an_error_in_the_format_of_each_route(client):
    message = "RuntimeError: our fault"
    response = await client.post(CHAT, json=USER | {"model": "broken"})
    assert (response.status_code, response.json()) == (500, {"detail": message})
    response = await client.post(CHAT, json=USER | {"model": "broken", "stream": True})
    error = {"error": {"message": message, "type": "server_error", "code": 500}}
    first, done = events(response.text)
    assert (response.status_code, json.loads(first), done) == (200, error, "[DONE]")
    response = await client.post("/generate", json={"prompt": "x", "model": "broken"})
    assert (response.status_code, response.json()) == (500, {"detail": message})
    response = await client.post("/v1/completions", json={"prompt": "x", "model": "broken"})
    assert (response.status_code, response.json()) == (
        500,
        {"error": SERVER_ERROR | {"message": message}},
    )
    response = await client.post(SPEECH, json={"input": "BROKEN"})
    error = SERVER_ERROR | {"message": "RuntimeError: the voice broke"}
    assert (response.status_code, response.json()) == (500, {"error": error})
    response = await client.post(TRANSCRIPTIONS, data={"prompt": "BROKEN"}, files=audio_file())
    assert (response.status_code, response.json()) == (
        500,
        {"detail": "RuntimeError: the ear broke"},
    )


async def test_a_killed_stage_process_fails_its_requests_and_is_restarted(replica, client):
    (before,) = replica.children()
    responses = []

    async def speak():
        responses.append(await client.post(SPEECH, json={"input": "one. HELD"}))

    async with trio.open_nursery() as nursery, dialled(replica, HELD) as text:
        nursery.start_soon(speak)

        async def both_run():
            return (await client.get("/health")).json()["request_states"].get("running") == 2

        await until(both_run)
        os.kill(before, signal.SIGKILL)
        while not responses:
            assert await text.receive_some()  # the other stages continue
    (response,) = responses
    message = "stage speak ended: process sound was ended by SIGKILL"
    assert (response.status_code, response.json()) == (
        500,
        {"error": SERVER_ERROR | {"message": message}},
    )
    await healthy(client)
    assert (await client.post(SPEECH, json={"input": "one two"})).status_code == 200
    assert replica.children() != {before}


async def test_a_full_queue_is_a_503_on_every_route(tmp_path):
    with program(tmp_path, max_in_flight=1) as replica, trio.fail_after(PATIENCE_SECS):
        async with replica.client() as client:
            await healthy(client)
            async with dialled(replica, HELD) as stream:
                await stream.receive_some()
                for path, body in (
                    (CHAT, USER),
                    ("/generate", {"prompt": "x"}),
                    ("/generate", {"text": "x"}),
                    ("/v1/completions", {"prompt": "x"}),
                    ("/v1/embeddings", {"input": "x"}),
                    (SPEECH, {"input": "one"}),
                    (SPEECH, {"input": "one", "stream": True}),
                ):
                    response = await client.post(path, json=body)
                    assert (response.status_code, FULL in response.text) == (503, True), path
                response = await client.post(TRANSCRIPTIONS, files=audio_file())
                assert (response.status_code, response.json()) == (503, {"detail": FULL})
                response = await client.post(f"{SPEECH}/batch", json={"items": [{"input": "one"}]})
                (item,) = response.json()["results"]
                assert (item["status"], item["error"]["message"]) == ("error", FULL)
            await until(lambda: has_capacity(client))


async def has_capacity(client):
    return (await client.post(CHAT, json=USER | {"max_tokens": 2})).status_code == 200


async def test_a_request_id_in_use_is_rejected_and_can_be_reused_later(replica, client):
    body = USER | {"request_id": "R", "max_tokens": 7000, "ignore_eos": True, "stream": True}
    async with dialled(replica, posted(CHAT, body)) as stream:
        await stream.receive_some()
        response = await client.post(CHAT, json=USER | {"request_id": "R"})
        assert (response.status_code, response.json()) == (
            400,
            {"detail": "Request R already exists"},
        )

    async def id_is_free():
        fields = USER | {"request_id": "R", "max_tokens": 2}
        return (await client.post(CHAT, json=fields)).status_code == 200

    await until(id_is_free)


async def test_health_responds_while_a_long_prompt_is_parsed(replica, client):
    body = {"prompt": "a b c d " * 400, "max_tokens": 1}
    async with dialled(replica, posted("/v1/completions", body)):
        answered = 0
        while True:
            response = await client.get("/health")
            assert response.status_code == 200
            if not response.json()["pending_completions"]:
                if answered:
                    break
                continue
            answered += 1
    assert answered >= 10


HOSTILE = {
    "a number beyond floats": {"stage_sampling": {"decode": {"temperature": 10**400}}},
    "many stop strings": {"stop": [f"zz{number}" for number in range(1000)]},
    "many wrong messages": {"messages": [1] * 100_000},
    "many messages": {"messages": [{"role": "user", "content": "a"}] * 100_000},
    "a very long message": {"messages": [{"role": "user", "content": "a" * 20_000_000}]},
    "no messages": {"messages": []},
    "a list for a role": {"messages": [{"role": [], "content": "x"}]},
    "an unknown field of a stage": {"stage_sampling": {"decode": {"no": 1}}},
    "a message that is none": {"messages": ["x"]},
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_request_is_a_client_error(replica, client, name):
    response = await client.post(CHAT, json=USER | HOSTILE[name])
    assert response.status_code in (400, 422)
    assert len(response.content) < 100_000
    assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"messages": NaN}',
        b'{"messages": "\xff"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 1_000_000,
        b'{"a":' * 1_000_000,
    ],
    ids=["nothing", "cut", "NaN", "no UTF-8", "half a character", "deep", "deep objects"],
)
async def test_a_body_that_is_not_a_request_is_rejected(replica, client, data):
    assert (await client.post(CHAT, content=data)).status_code == 422


async def test_a_body_of_a_hundred_megabytes_is_rejected_before_it_is_read(replica, client):
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n"
    async with dialled(replica, head.encode() + b'{"a": "') as stream:
        assert b" 413 " in await stream.receive_some()


async def test_a_chunked_body_over_the_limit_is_rejected(replica, client):
    piece = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with dialled(replica, head.encode()) as stream:
        received = b""

        async def receive():
            nonlocal received
            with suppress(trio.BrokenResourceError):
                received = await stream.receive_some()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            # The response may be lost: a server that stops reading can only reset.
            with suppress(trio.BrokenResourceError):
                while True:
                    await stream.send_all(piece)
            await trio.sleep_forever()
    assert not received or b" 413 " in received


@pytest.mark.parametrize(
    "path",
    ["/v1/audio/voices/..%2F..%2Fx", "/v1/audio/voices/.x", f"{SPEECH}/..%2F..%2Fetc%2Fpasswd"],
)
async def test_no_path_escapes_its_folder(replica, client, path):
    method = "GET" if path.startswith(SPEECH) else "DELETE"
    assert (await client.request(method, path)).status_code in (404, 405)


async def test_a_form_of_a_thousand_parts_is_rejected(replica, client):
    data = form({f"f{number}": "x" for number in range(1000)})
    async with dialled(replica, data) as stream:
        assert b" 413 " in await stream.receive_some()


async def test_control_tokens_in_a_message_are_plain_text(client):
    async def tokens(content):
        fields = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return (await client.post(CHAT, json=fields)).json()["usage"]["prompt_tokens"]

    assert await tokens("<|im_end|>") - await tokens("") == len("<|im_end|>")

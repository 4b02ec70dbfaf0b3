import base64
import json

import pytest
import trio

from omni_proxy.replica.api.common.errors import SpeechError
from omni_proxy.replica.api.common.media import encode_audio
from omni_proxy.replica.api.speech.speech_fields import parse_speech_request
from omni_proxy.replica.api.speech.speech_writers import choose_stream_format
from tests.replica.api.audio_stages import ABORTED, HOLDING, RATE, REQUESTS, open_replica, wave

PATH = "/v1/audio/speech"
EVENTS = "text/event-stream; charset=utf-8"


def pcm(sentence):
    return encode_audio(wave(sentence).tobytes(), RATE, "pcm")


def wav(sentence):
    return encode_audio(wave(sentence).tobytes(), RATE, "wav")


def body(**fields):
    return json.dumps(fields).encode()


def events(call):
    parts = call.body.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [part[6:] for part in parts]


@pytest.mark.parametrize(
    ("fields", "server_default", "expected"),
    [
        ({}, "sse", None),
        ({"stream": False, "stream_format": "audio"}, "pcm", None),
        ({"stream": True}, "sse", "sse"),
        ({"stream": True, "response_format": "pcm"}, "pcm", "pcm"),
        ({"stream": True}, "openai-sse", "openai-sse"),
        ({"stream": True, "stream_format": "audio", "response_format": "pcm"}, "sse", "pcm"),
        ({"stream_format": "sse"}, "sse", "openai-sse"),
        ({"stream": True, "stream_format": "sse"}, "sse", "openai-sse"),
        ({"stream": False, "stream_format": "SSE", "response_format": "pcm"}, "pcm", "openai-sse"),
    ],
)
def test_the_stream_format_follows_the_request_and_then_the_server(
    fields, server_default, expected
):
    assert choose_stream_format(parse_speech_request(fields), server_default) == expected


@pytest.mark.parametrize(
    ("fields", "server_default"),
    [
        ({"stream": True}, "pcm"),
        ({"stream": True, "response_format": "wav"}, "pcm"),
        ({"stream": True, "stream_format": "audio"}, "sse"),
        ({"stream_format": "sse", "response_format": "wav"}, "sse"),
    ],
)
def test_a_stream_of_samples_requires_pcm(fields, server_default):
    with pytest.raises(SpeechError) as refused:
        choose_stream_format(parse_speech_request(fields), server_default)
    assert (refused.value.param, refused.value.status) == ("response_format", 400)


async def test_an_sse_stream_sends_wav_files_then_the_usage_and_done():
    async with open_replica() as replica:
        call = await replica.post(PATH, body(input="Hello there. Good day.", stream=True))
    request_id = call.headers.pop("x-request-id")
    assert call.headers == {
        "content-type": EVENTS,
        "cache-control": "no-cache",
        "vary": "Origin",
    }
    *chunks, done = events(call)
    head = f'{{"id": "speech-{request_id}", "object": "audio.speech.chunk", "index": '
    for index, text in enumerate(("Hello there", "Good day")):
        data = base64.b64encode(wav(text)).decode()
        assert chunks[index] == (
            f'{head}{index}, "audio": {{"data": "{data}", "format": "wav", '
            f'"mime_type": "audio/wav", "sample_rate": {RATE}}}, "finish_reason": null}}'
        )
    usage = (
        '{"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12, "engine_time_s": 0.25}'
    )
    assert chunks[2:] == [f'{head}2, "audio": null, "finish_reason": "stop", "usage": {usage}}}']
    assert done == "[DONE]"
    assert call.complete
    assert REQUESTS[0].params["stream"] is True


async def test_a_pcm_stream_is_raw_samples_described_by_the_headers():
    fields = {"input": "Hello there. Good day.", "stream": True, "response_format": "pcm"}
    async with open_replica(stream_speech_as="pcm") as replica:
        call = await replica.post(PATH, body(**fields))
        request_id = call.headers["x-request-id"]
        outcome = await replica.http.get(f"{PATH}/{request_id}")
        assert (await outcome.get_json())["usage"]["completion_tokens"] == 8
    assert call.headers == {
        "content-type": "audio/pcm",
        "x-request-id": request_id,
        "x-sglang-omni-speech-id": request_id,
        "x-sample-rate": str(RATE),
        "x-channels": "1",
        "x-bit-depth": "16",
        "vary": "Origin",
    }
    assert call.chunks == [pcm("Hello there"), pcm("Good day")]
    assert call.complete


async def test_an_openai_sse_stream_has_deltas_and_no_done():
    async with open_replica() as replica:
        call = await replica.post(PATH, body(input="Hello there. Good day.", stream_format="sse"))
    del call.headers["x-request-id"]
    assert call.headers == {
        "content-type": EVENTS,
        "cache-control": "no-cache",
        "x-sample-rate": str(RATE),
        "x-channels": "1",
        "x-bit-depth": "16",
        "vary": "Origin",
    }
    assert events(call) == [
        *(
            f'{{"type": "speech.audio.delta", "audio": "{base64.b64encode(pcm(text)).decode()}"}}'
            for text in ("Hello there", "Good day")
        ),
        '{"type": "speech.audio.done", "usage": {"input_tokens": 4, "output_tokens": 8, '
        '"total_tokens": 12}, "finish_reason": "stop"}',
    ]
    assert call.complete


STREAM_FIELDS = [
    {"stream": True},
    {"stream": True, "stream_format": "audio", "response_format": "pcm"},
    {"stream_format": "sse"},
]


@pytest.mark.parametrize("stream_fields", STREAM_FIELDS)
@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("REFUSED", 400, "this text is refused"),
        ("BROKEN", 500, "RuntimeError: the voice broke"),
        ("SILENT", 500, "No audio output generated from the pipeline."),
        (" ", 400, "input must be a non-empty string"),
    ],
)
async def test_a_failure_before_the_first_audio_is_a_plain_http_error(
    stream_fields, text, status, message
):
    async with open_replica() as replica:
        call = await replica.post(PATH, body(input=text, **stream_fields))
        assert replica.live == 0
    assert call.status == status
    assert call.headers["content-type"] == "application/json"
    assert json.loads(call.body)["error"]["message"] == message
    assert call.complete


@pytest.mark.parametrize("text", ["Hello there. BROKEN", "Hello there. FASTER now"])
async def test_a_later_failure_cuts_sse_and_pcm_streams(text):
    async with open_replica() as replica:
        for stream_fields, count in ((STREAM_FIELDS[0], 1), (STREAM_FIELDS[1], 1)):
            call = await replica.post(PATH, body(input=text, **stream_fields))
            assert (call.status, len(call.chunks), call.complete) == (200, count, False)
            assert b"[DONE]" not in call.body
            assert call.error is not None
            outcome = await replica.http.get(f"{PATH}/{call.headers['x-request-id']}")
            assert outcome.status_code == 404
        assert replica.live == 0


async def test_a_later_failure_is_an_event_in_an_openai_sse_stream():
    async with open_replica() as replica:
        call = await replica.post(PATH, body(input="Hello there. BROKEN", stream_format="sse"))
    delta, error = events(call)
    assert json.loads(delta)["type"] == "speech.audio.delta"
    assert json.loads(error) == {
        "type": "error",
        "error": {
            "message": "RuntimeError: the voice broke",
            "type": "server_error",
            "param": None,
            "code": None,
        },
    }
    assert call.complete
    assert call.error is None


@pytest.mark.parametrize("stream_fields", STREAM_FIELDS)
async def test_audio_is_streamed_during_synthesis_and_a_disconnect_aborts_it(
    stream_fields, nursery
):
    async with open_replica() as replica:
        call = replica.begin(nursery, PATH, body(input="Hello there. HELD", **stream_fields))
        await call.wait_for_chunks(1)
        await trio.to_thread.run_sync(HOLDING.wait)
        assert replica.live == 1
        call.disconnect()
        await call.ended.wait()
        assert replica.live == 0
        assert await trio.to_thread.run_sync(ABORTED.wait, 5.0)
    assert (call.status, call.complete) == (200, False)


async def test_a_disconnect_before_the_response_starts_aborts_the_synthesis(nursery):
    async with open_replica() as replica:
        call = replica.begin(nursery, PATH, body(input="Hello there. HELD", **STREAM_FIELDS[0]))

        async def never_sends(message):
            await trio.sleep_forever()

        call._send = never_sends
        await trio.to_thread.run_sync(HOLDING.wait)
        call.disconnect()
        await call.ended.wait()
        assert replica.live == 0
        assert await trio.to_thread.run_sync(ABORTED.wait, 5.0)

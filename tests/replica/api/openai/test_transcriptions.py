import json

import numpy as np
import pytest
import trio

from omni_proxy.replica.api.common.errors import DetailError
from omni_proxy.replica.api.openai.transcriptions import MAX_LONG_UPLOADS, LongUploadLimit
from omni_proxy.replica.audio import encode_wav
from tests.replica.api.audio_stages import ABORTED, HOLDING, REQUESTS, open_replica
from tests.replica.api.multipart_bodies import CONTENT_TYPE, form

PATH = "/v1/audio/transcriptions"
RATE = 8000
SAMPLES = 12_000
WAV = encode_wav(np.full(SAMPLES, 0.25, np.float32), RATE)
TEXT = f"{SAMPLES} samples heard"
USAGE = {"type": "duration", "seconds": 2}


def upload(data=WAV, **fields):
    return form(fields, [("file", "a.wav", "audio/wav", data)])


async def transcribe(replica, **fields):
    return await replica.post(PATH, upload(**fields), CONTENT_TYPE)


async def test_json_has_the_text_and_the_whole_seconds():
    async with open_replica() as replica:
        call = await transcribe(replica)
    assert call.status == 200
    assert call.body == b'{"text":"%b","usage":{"type":"duration","seconds":2}}' % TEXT.encode()
    assert call.headers["content-type"] == "application/json"


async def test_text_is_plain():
    async with open_replica() as replica:
        call = await transcribe(replica, response_format="text")
    assert call.body.decode() == TEXT
    assert call.headers["content-type"] == "text/plain; charset=utf-8"


async def test_verbose_json_has_the_language_duration_and_segments():
    async with open_replica() as replica:
        call = await transcribe(replica, response_format="verbose_json", prompt="UNTIMED")
    assert json.loads(call.body) == {
        "task": "transcribe",
        "language": "en",
        "duration": 1.5,
        "text": TEXT,
        "segments": [{"id": 0, "start": 0.0, "end": 1.5, "text": f" {TEXT}"}],
        "usage": USAGE,
    }


async def test_subtitles_need_a_model_that_reports_timestamps():
    async with open_replica() as replica:
        refused = [await transcribe(replica, response_format=kind) for kind in ("srt", "vtt")]
    assert [call.status for call in refused] == [400, 400]
    assert all(list(json.loads(call.body)) == ["detail"] for call in refused)
    async with open_replica(capabilities=frozenset({"audio_input", "timestamps"})) as replica:
        srt = await transcribe(replica, response_format="srt")
        vtt = await transcribe(replica, response_format="vtt")
    assert srt.body.decode() == f"1\n00:00:00,000 --> 00:00:01,500\n{TEXT}\n"
    assert vtt.body.decode() == f"WEBVTT\n\n00:00:00.000 --> 00:00:01.500\n{TEXT}\n"


async def test_the_stage_receives_samples_and_only_the_fields_that_are_set():
    fields = {"temperature": "0.5", "max_new_tokens": "7", "language": "en", "prompt": ""}
    async with open_replica() as replica:
        await transcribe(replica, model="whisper", **fields)
        (request,) = REQUESTS
    (audio,) = request.inputs["audios"]
    assert audio["sample_rate"] == RATE
    assert len(audio["audio_data"]) == 4 * SAMPLES
    assert np.allclose(np.frombuffer(audio["audio_data"], "<f4"), 0.25, atol=1e-4)
    assert request.metadata == {
        "asr_params": {"language": "en"},
        "model": "whisper",
        "output_modalities": ["text"],
        "task": "asr",
    }
    assert (request.params["temperature"], request.params["max_new_tokens"]) == (0.5, 7)


async def test_a_stream_has_deltas_the_complete_text_and_done():
    async with open_replica() as replica:
        call = await transcribe(replica, stream="true")
    assert call.status == 200
    assert call.headers.pop("x-request-id").startswith("transcription-")
    assert call.headers == {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "vary": "Origin",
    }
    assert call.body.decode().split("\n\n") == [
        f'data: {{"type":"transcript.text.delta","delta":"{SAMPLES} samples"}}',
        'data: {"type":"transcript.text.delta","delta":" heard"}',
        f'data: {{"type":"transcript.text.done","text":"{TEXT}",'
        '"usage":{"type":"duration","seconds":2}}',
        "data: [DONE]",
        "",
    ]


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_a_failure_before_the_first_words_is_a_plain_http_error(stream):
    async with open_replica() as replica:
        call = await transcribe(replica, stream=stream, prompt="REFUSED")
    assert (call.status, json.loads(call.body)) == (400, {"detail": "this prompt is refused"})


async def test_a_later_failure_is_an_event_without_done():
    async with open_replica() as replica:
        call = await transcribe(replica, stream="1", prompt="BROKEN")
        plain = await transcribe(replica, prompt="BROKEN")
        assert replica.live == 0
    message = "RuntimeError: the ear broke"
    assert call.body.decode().split("\n\n")[1:] == [
        f'data: {{"type":"error","error":{{"message":"{message}"}}}}',
        "",
    ]
    assert (plain.status, json.loads(plain.body)) == (500, {"detail": message})


@pytest.mark.parametrize(
    ("fields", "status", "loc"),
    [
        ({"response_format": "xml"}, 422, ["body", "response_format"]),
        ({"temperature": "hot"}, 422, ["body", "temperature"]),
        ({"temperature": "-1"}, 422, ["body", "temperature"]),
        ({"repetition_penalty": "0"}, 422, ["body", "repetition_penalty"]),
        ({"repetition_penalty": "2.1"}, 422, ["body", "repetition_penalty"]),
        ({"max_new_tokens": "0"}, 422, ["body", "max_new_tokens"]),
        ({"max_new_tokens": "1.5"}, 422, ["body", "max_new_tokens"]),
        ({"stream": "perhaps"}, 422, ["body", "stream"]),
        ({"stream": "true", "response_format": "verbose_json"}, 400, None),
        ({"data": b""}, 400, None),
        ({"data": b"no audio"}, 400, None),
    ],
)
async def test_invalid_fields_are_refused_like_those_of_other_routes(fields, status, loc):
    async with open_replica() as replica:
        call = await transcribe(replica, **fields)
        assert REQUESTS == []
    assert call.status == status
    detail = json.loads(call.body)["detail"]
    assert (
        isinstance(detail, str) if loc is None else [problem["loc"] for problem in detail] == [loc]
    )


async def test_the_file_is_required():
    async with open_replica() as replica:
        call = await replica.post(PATH, form({"model": "m"}), CONTENT_TYPE)
        other = await replica.post(PATH, b"{}")
    missing = {"type": "missing", "loc": ["body", "file"], "msg": "Field required", "input": None}
    assert (call.status, json.loads(call.body)) == (422, {"detail": [missing]})
    assert other.status == 400


async def test_the_upload_limit_is_configurable():
    async with open_replica(max_body_bytes=1000) as replica:
        call = await transcribe(replica)
    assert call.status == 413
    assert list(json.loads(call.body)) == ["detail"]


async def test_without_a_transcription_model_the_error_names_the_flag_for_one():
    async with open_replica(capabilities=frozenset({"chat", "speech"})) as replica:
        call = await transcribe(replica)
    assert call.status == 400
    assert "--transcription whisper-tiny" in json.loads(call.body)["detail"]


@pytest.mark.parametrize("fields", [{}, {"stream": "true"}, {"stream": "true", "late": "yes"}])
async def test_a_disconnect_aborts_a_transcription(fields, nursery):
    prompt = "HELD LATER" if "late" in fields else "HELD"
    async with open_replica() as replica:
        call = replica.begin(nursery, PATH, upload(prompt=prompt, **fields), CONTENT_TYPE)
        await trio.to_thread.run_sync(HOLDING.wait)
        if "late" in fields:
            await call.wait_for_chunks(1)
        call.disconnect()
        await call.ended.wait()
        assert replica.live == 0
        assert await trio.to_thread.run_sync(ABORTED.wait, 5.0)


async def test_long_uploads_in_flight_are_limited(nursery):
    long = encode_wav(np.full(4000 * 61, 0.25, np.float32), 4000)
    async with open_replica() as replica:
        calls = []
        for n in range(MAX_LONG_UPLOADS):
            body = upload(data=long, prompt="HELD LATER", stream="true" if n else "false")
            calls.append(replica.begin(nursery, PATH, body, CONTENT_TYPE))
        while replica.live < MAX_LONG_UPLOADS:
            await trio.to_thread.run_sync(ABORTED.wait, 0.002)
        refused = await transcribe(replica, data=long)
        short = await transcribe(replica)
        for call in calls:
            call.disconnect()
            await call.ended.wait()
        later = await transcribe(replica, data=long)
    assert (refused.status, short.status, later.status) == (503, 200, 200)
    assert "try again later" in json.loads(refused.body)["detail"]


async def test_the_slot_of_a_long_upload_is_released_however_its_stream_ends(nursery):
    long = encode_wav(np.full(4000 * 61, 0.25, np.float32), 4000)

    async def never_sends(message):
        await trio.sleep_forever()

    async with open_replica() as replica:
        for _ in range(MAX_LONG_UPLOADS):
            failed = await transcribe(replica, data=long, prompt="REFUSED", stream="true")
            assert failed.status == 400
        for _ in range(MAX_LONG_UPLOADS):
            HOLDING.clear()
            body = upload(data=long, prompt="HELD LATER", stream="true")
            call = replica.begin(nursery, PATH, body, CONTENT_TYPE)
            call._send = never_sends
            await trio.to_thread.run_sync(HOLDING.wait)
            call.disconnect()
            await call.ended.wait()
        assert (await transcribe(replica, data=long, stream="true")).status == 200


def test_releasing_a_slot_twice_frees_only_one():
    uploads = LongUploadLimit(limit=1)
    slot = uploads.acquire(61.0)
    with pytest.raises(DetailError):
        uploads.acquire(61.0)
    slot.release()
    slot.release()
    uploads.acquire(61.0)
    with pytest.raises(DetailError):
        uploads.acquire(61.0)


async def test_translations_are_refused_in_the_error_envelope():
    async with open_replica(model_name="omni") as replica:
        known = await replica.post("/v1/audio/translations", upload(model="omni"), CONTENT_TYPE)
        other = await replica.post("/v1/audio/translations", upload(model="x"), CONTENT_TYPE)
        nothing = await replica.post("/v1/audio/translations", b"{}")
    errors = [json.loads(call.body)["error"] for call in (known, other, nothing)]
    assert [call.status for call in (known, other, nothing)] == [400, 404, 400]
    assert [error["type"] for error in errors] == ["invalid_request_error"] * 3
    assert [error["code"] for error in errors] == [None, "model_not_found", None]
    assert [error["param"] for error in errors] == ["model", "model", None]


async def test_diarizations_are_refused():
    async with open_replica() as replica:
        call = await replica.post("/v1/audio/diarizations", upload(), CONTENT_TYPE)
    assert call.status == 400
    assert list(json.loads(call.body)) == ["detail"]

import json

import numpy as np
import pytest
import trio

from omni_proxy.replica.api.common.errors import DetailError
from omni_proxy.replica.api.openai.transcriptions import MAX_LONG_UPLOADS, LongUploadLimit
from omni_proxy.replica.audio import encode_wav
from tests.replica.api.audio_stages import HOLDING, LEFT, SEEN, replica
from tests.replica.api.multipart_bodies import CONTENT_TYPE, form

PATH = "/v1/audio/transcriptions"
RATE = 8000
COUNT = 12_000
WAV = encode_wav(np.full(COUNT, 0.25, np.float32), RATE)
TEXT = f"{COUNT} samples heard"
USAGE = {"type": "duration", "seconds": 2}


def upload(data=WAV, **fields):
    return form(fields, [("file", "a.wav", "audio/wav", data)])


async def transcribe(it, **fields):
    return await it.post(PATH, upload(**fields), CONTENT_TYPE)


async def test_json_has_the_text_and_the_whole_seconds():
    async with replica() as it:
        call = await transcribe(it)
    assert call.status == 200
    assert call.body == b'{"text":"%b","usage":{"type":"duration","seconds":2}}' % TEXT.encode()
    assert call.headers["content-type"] == "application/json"


async def test_text_is_plain():
    async with replica() as it:
        call = await transcribe(it, response_format="text")
    assert call.body.decode() == TEXT
    assert call.headers["content-type"] == "text/plain; charset=utf-8"


async def test_verbose_json_reports_all():
    async with replica() as it:
        call = await transcribe(it, response_format="verbose_json", prompt="UNTIMED")
    assert json.loads(call.body) == {
        "task": "transcribe",
        "language": "en",
        "duration": 1.5,
        "text": TEXT,
        "segments": [{"id": 0, "start": 0.0, "end": 1.5, "text": f" {TEXT}"}],
        "usage": USAGE,
    }


async def test_subtitles_need_a_model_that_reports_times():
    async with replica() as it:
        refused = [await transcribe(it, response_format=kind) for kind in ("srt", "vtt")]
    assert [call.status for call in refused] == [400, 400]
    assert all(list(json.loads(call.body)) == ["detail"] for call in refused)
    async with replica(capabilities=frozenset({"audio_input", "timestamps"})) as it:
        srt = await transcribe(it, response_format="srt")
        vtt = await transcribe(it, response_format="vtt")
    assert srt.body.decode() == f"1\n00:00:00,000 --> 00:00:01,500\n{TEXT}\n"
    assert vtt.body.decode() == f"WEBVTT\n\n00:00:00.000 --> 00:00:01.500\n{TEXT}\n"


async def test_the_stage_gets_samples_and_only_what_was_set():
    fields = {"temperature": "0.5", "max_new_tokens": "7", "language": "en", "prompt": ""}
    async with replica() as it:
        await transcribe(it, model="whisper", **fields)
        (request,) = SEEN
    (audio,) = request.inputs["audios"]
    assert audio["sample_rate"] == RATE
    assert len(audio["audio_data"]) == 4 * COUNT
    assert np.allclose(np.frombuffer(audio["audio_data"], "<f4"), 0.25, atol=1e-4)
    assert request.metadata == {
        "asr_params": {"language": "en"},
        "model": "whisper",
        "output_modalities": ["text"],
        "task": "asr",
    }
    assert (request.params["temperature"], request.params["max_new_tokens"]) == (0.5, 7)


async def test_a_stream_is_deltas_the_whole_and_done():
    async with replica() as it:
        call = await transcribe(it, stream="true")
    assert call.status == 200
    assert call.headers.pop("x-request-id").startswith("transcription-")
    assert call.headers == {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "vary": "Origin",
    }
    assert call.body.decode().split("\n\n") == [
        f'data: {{"type":"transcript.text.delta","delta":"{COUNT} samples"}}',
        'data: {"type":"transcript.text.delta","delta":" heard"}',
        f'data: {{"type":"transcript.text.done","text":"{TEXT}",'
        '"usage":{"type":"duration","seconds":2}}',
        "data: [DONE]",
        "",
    ]


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_a_failure_before_the_first_words_is_a_plain_http_error(stream):
    async with replica() as it:
        call = await transcribe(it, stream=stream, prompt="REFUSED")
    assert (call.status, json.loads(call.body)) == (400, {"detail": "nobody hears that"})


async def test_a_later_failure_is_an_event_without_done():
    async with replica() as it:
        call = await transcribe(it, stream="1", prompt="BROKEN")
        plain = await transcribe(it, prompt="BROKEN")
        assert it.live == 0
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
async def test_bad_fields_are_refused_as_the_other_text_routes_refuse_them(fields, status, loc):
    async with replica() as it:
        call = await transcribe(it, **fields)
        assert SEEN == []
    assert call.status == status
    detail = json.loads(call.body)["detail"]
    assert isinstance(detail, str) if loc is None else [each["loc"] for each in detail] == [loc]


async def test_the_file_is_required():
    async with replica() as it:
        call = await it.post(PATH, form({"model": "m"}), CONTENT_TYPE)
        other = await it.post(PATH, b"{}")
    missing = {"type": "missing", "loc": ["body", "file"], "msg": "Field required", "input": None}
    assert (call.status, json.loads(call.body)) == (422, {"detail": [missing]})
    assert other.status == 400


async def test_the_upload_limit_is_configurable():
    async with replica(max_body_bytes=1000) as it:
        call = await transcribe(it)
    assert call.status == 413
    assert list(json.loads(call.body)) == ["detail"]


async def test_a_replica_without_transcription_names_the_flag_for_it():
    async with replica(capabilities=frozenset({"chat", "speech"})) as it:
        call = await transcribe(it)
    assert call.status == 400
    assert "--transcription whisper-tiny" in json.loads(call.body)["detail"]


@pytest.mark.parametrize("fields", [{}, {"stream": "true"}, {"stream": "true", "late": "yes"}])
async def test_a_disconnect_aborts_a_transcription(fields, nursery):
    prompt = "HELD LATER" if "late" in fields else "HELD"
    async with replica() as it:
        call = it.begin(nursery, PATH, upload(prompt=prompt, **fields), CONTENT_TYPE)
        await trio.to_thread.run_sync(HOLDING.wait)
        if "late" in fields:
            await call.until(1)
        call.leave()
        await call.over.wait()
        assert it.live == 0
        assert await trio.to_thread.run_sync(LEFT.wait, 5.0)


async def test_of_long_uploads_only_some_are_in_work_at_once(nursery):
    long = encode_wav(np.full(4000 * 61, 0.25, np.float32), 4000)
    async with replica() as it:
        calls = []
        for n in range(MAX_LONG_UPLOADS):
            body = upload(data=long, prompt="HELD LATER", stream="true" if n else "false")
            calls.append(it.begin(nursery, PATH, body, CONTENT_TYPE))
        while it.live < MAX_LONG_UPLOADS:
            await trio.to_thread.run_sync(LEFT.wait, 0.002)
        full = await transcribe(it, data=long)
        short = await transcribe(it)
        for call in calls:
            call.leave()
            await call.over.wait()
        again = await transcribe(it, data=long)
    assert (full.status, short.status, again.status) == (503, 200, 200)
    assert "try again later" in json.loads(full.body)["detail"]


async def test_a_place_is_given_back_however_a_stream_ends(nursery):
    long = encode_wav(np.full(4000 * 61, 0.25, np.float32), 4000)

    async def never_sent(message):
        await trio.sleep_forever()

    async with replica() as it:
        for _ in range(MAX_LONG_UPLOADS):
            failed = await transcribe(it, data=long, prompt="REFUSED", stream="true")
            assert failed.status == 400
        for _ in range(MAX_LONG_UPLOADS):
            HOLDING.clear()
            body = upload(data=long, prompt="HELD LATER", stream="true")
            call = it.begin(nursery, PATH, body, CONTENT_TYPE)
            call._send = never_sent
            await trio.to_thread.run_sync(HOLDING.wait)
            call.leave()
            await call.over.wait()
        assert (await transcribe(it, data=long, stream="true")).status == 200


def test_a_place_is_given_back_once():
    among = LongUploadLimit(limit=1)
    place = among.acquire(61.0)
    with pytest.raises(DetailError):
        among.acquire(61.0)
    place.release()
    place.release()
    among.acquire(61.0)
    with pytest.raises(DetailError):
        among.acquire(61.0)


async def test_translations_are_refused_in_the_envelope():
    async with replica(model_name="omni") as it:
        known = await it.post("/v1/audio/translations", upload(model="omni"), CONTENT_TYPE)
        other = await it.post("/v1/audio/translations", upload(model="x"), CONTENT_TYPE)
        nothing = await it.post("/v1/audio/translations", b"{}")
    errors = [json.loads(call.body)["error"] for call in (known, other, nothing)]
    assert [call.status for call in (known, other, nothing)] == [400, 404, 400]
    assert [error["type"] for error in errors] == ["invalid_request_error"] * 3
    assert [error["code"] for error in errors] == [None, "model_not_found", None]
    assert [error["param"] for error in errors] == ["model", "model", None]


async def test_diarizations_are_refused():
    async with replica() as it:
        call = await it.post("/v1/audio/diarizations", upload(), CONTENT_TYPE)
    assert call.status == 400
    assert list(json.loads(call.body)) == ["detail"]

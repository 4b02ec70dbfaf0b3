import base64
import json

import pytest
import trio

from omni_proxy.replica.api.common.media import encode_audio
from tests.replica.api.audio_stages import HOLDING, LEFT, RATE, SEEN, replica, wave

PATH = "/v1/audio/speech/batch"


async def batch(it, **body):
    response = await it.http.post(PATH, json=body)
    return response.status_code, await response.get_json()


def audio(sentence, response_format):
    whole = encode_audio(wave(sentence).tobytes(), RATE, response_format)
    return base64.b64encode(whole).decode()


async def test_items_override_what_they_share_and_keep_their_order():
    items = [
        {"input": "One"},
        {"input": "Two three", "response_format": "pcm", "voice": None},
        {"response_format": None},
    ]
    async with replica() as it:
        status, told = await batch(it, input="Shared words here", voice="alloy", items=items)
        voices = {request.metadata["tts_params"]["voice"] for request in SEEN}
    assert status == 200
    assert told.pop("id").startswith("speech-batch-")
    assert voices == {"alloy"}
    shared = {"status": "success", "finish_reason": "stop"}
    as_wav = shared | {"format": "wav", "media_type": "audio/wav"}
    as_pcm = shared | {"format": "pcm", "media_type": "audio/pcm"}
    assert told == {
        "results": [
            {"index": 0, **as_wav, "audio_data": audio("One", "wav")},
            {"index": 1, **as_pcm, "audio_data": audio("Two three", "pcm")},
            {"index": 2, **as_wav, "audio_data": audio("Shared words here", "wav")},
        ],
        "total": 3,
        "succeeded": 3,
        "failed": 0,
    }


async def test_one_items_failure_is_its_own_and_names_its_place():
    items = [
        {"input": " "},
        {"input": "Fine"},
        {"input": "BROKEN"},
        {"input": "x", "speed": "fast"},
        {"input": "x", "voice": "greta"},
        {"input": "x", "response_format": "mp3"},
        {"input": "REFUSED"},
    ]
    async with replica() as it:
        status, told = await batch(it, items=items)
    assert (status, told["total"], told["succeeded"], told["failed"]) == (200, 7, 1, 6)
    results = told["results"]
    assert [result["index"] for result in results] == list(range(7))
    assert [result["status"] == "success" for result in results] == [i == 1 for i in range(7)]
    bad = {"type": "BadRequestError", "code": 400}
    assert results[0] == {
        "index": 0,
        "status": "error",
        "error": {**bad, "message": "input must be a non-empty string", "param": "items.0.input"},
    }
    assert results[2]["error"] == {
        "message": "RuntimeError: the voice broke",
        "type": "server_error",
        "param": "items.2",
    }
    assert results[3]["error"]["param"] == "items.3.speed"
    assert results[4]["error"]["param"] == "items.4.voice"
    assert results[5]["error"]["type"] == "server_error"
    assert results[6]["error"] == {**bad, "message": "nobody says that", "param": "items.6"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "items"),
        ({"items": []}, "items"),
        ({"items": {"input": "x"}}, "items"),
        ({"items": [{"input": "x"}] * 4}, "items"),
        ({"items": [{"input": "x"}, "y"]}, "items.1"),
        ({"items": [{"input": "x"}], "stream": True}, "stream"),
        ({"items": [{"input": "x"}, {"stream": True}]}, "items.1.stream"),
        ({"items": [{"input": "x"}, {"stream": "no"}]}, "items.1.stream"),
        ({"items": [{"input": "x", "stream_format": "sse"}]}, "items.0.stream_format"),
    ],
)
async def test_what_is_wrong_with_the_whole_refuses_all_of_it(body, param):
    async with replica(tts_batch_max_items=3) as it:
        status, told = await batch(it, **body)
        assert SEEN == []
    assert status == 400
    assert told["error"]["param"] == param
    assert (told["error"]["type"], told["error"]["code"]) == ("BadRequestError", 400)


async def test_a_body_that_is_no_json_is_refused():
    async with replica() as it:
        response = await it.http.post(PATH, data=b"items")
        error = (await response.get_json())["error"]
    assert (response.status_code, error["message"]) == (
        400,
        "speech request body must be valid JSON",
    )


async def test_items_are_spoken_at_once_and_a_leaving_caller_aborts_them_all(nursery):
    async with replica() as it:
        body = json.dumps({"items": [{"input": "HELD"}, {"input": "HELD too"}]}).encode()
        call = it.begin(nursery, PATH, body)
        await trio.to_thread.run_sync(HOLDING.wait)
        while len(SEEN) < 2:
            await trio.to_thread.run_sync(LEFT.wait, 0.002)
        assert it.live == 2
        call.leave()
        await call.over.wait()
        assert it.live == 0

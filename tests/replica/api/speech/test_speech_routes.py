import base64
import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import trio

from omni_proxy.replica.api.common.media import encode_audio
from omni_proxy.replica.api.speech.speech_routes import OutcomeHistory
from omni_proxy.replica.api.speech.speech_writers import SpeechOutcome
from tests.replica.api.audio_stages import (
    ABORTED,
    HOLDING,
    PIPELINE,
    RATE,
    REQUESTS,
    open_replica,
    wave,
)


def pcm(*sentences):
    samples = np.concatenate([wave(sentence) for sentence in sentences])
    return (samples * np.float32(32767)).astype("<i2").tobytes()


async def error_of(response, status=400):
    assert response.status_code == status
    assert response.content_type == "application/json"
    body = await response.get_json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    return body["error"]


async def test_a_text_is_answered_with_one_wav_file_and_headers_about_it():
    async with open_replica() as replica:
        response = await replica.speech(input="Hello there. Good day.")
        body = await response.get_data()
    assert response.status_code == 200
    assert body[44:] == pcm("Hello there", "Good day")
    assert body[:4] == b"RIFF"
    assert struct.unpack_from("<I", body, 24) == (RATE,)
    headers = {name.lower(): value for name, value in response.headers.items()}
    request_id = headers.pop("x-request-id")
    assert request_id.startswith("speech-")
    assert len(request_id) == len("speech-") + 36
    assert headers == {
        "content-type": "audio/wav",
        "content-length": str(len(body)),
        "content-disposition": 'attachment; filename="speech.wav"',
        "x-finish-reason": "stop",
        "x-prompt-tokens": "4",
        "x-completion-tokens": "8",
        "x-sglang-omni-input-tokens": "4",
        "x-sglang-omni-output-tokens": "8",
        "x-sglang-omni-total-tokens": "12",
        "x-engine-time": "0.25",
        "vary": "Origin",
    }


async def test_pcm_is_raw_samples_and_format_names_are_case_insensitive():
    async with open_replica() as replica:
        response = await replica.speech(input="One two three", response_format="PCM")
        assert await response.get_data() == pcm("One two three")
    assert response.content_type == "audio/pcm"
    assert response.headers["content-disposition"] == 'attachment; filename="speech.pcm"'


async def test_the_stage_receives_only_the_fields_that_are_set():
    async with open_replica() as replica:
        await replica.speech(input="Plain", voice=None, seed=None)
        await replica.speech(
            input="Rich",
            model="m",
            speaker="alloy",
            speed=2,
            seed=7,
            top_k=5,
            temperature=0.5,
            task_type="voice-design",
            language="english",
            instructions="softly",
            initial_codec_chunk_frames=3,
            stage_params={"speak": {"a": 1}},
            unknown_field=[1],
        )
        plain, rich = REQUESTS
    assert plain.inputs == "Plain"
    assert plain.params == {"stream": False, "stop": [], "stop_token_ids": []}
    tts_params = {"voice": "default", "response_format": "wav", "speed": 1.0}
    assert plain.metadata == {
        "tts_params": tts_params,
        "output_modalities": ["audio"],
        "task": "tts",
    }
    assert rich.metadata["model"] == "m"
    assert rich.metadata["tts_params"] == {
        "voice": "alloy",
        "response_format": "wav",
        "speed": 2.0,
        "task_type": "VoiceDesign",
        "language": "English",
        "instructions": "softly",
        "seed": 7,
    }
    assert rich.params == {
        "stream": False,
        "stop": [],
        "stop_token_ids": [],
        "temperature": 0.5,
        "top_k": 5,
        "seed": 7,
        "initial_codec_chunk_frames": 3,
        "stage_params": {"speak": {"a": 1}},
    }


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"{", "speech request body must be valid JSON", None),
        (b"\xff", "speech request body must be valid JSON", None),
        (b"", "speech request body must be valid JSON", None),
        (b"[]", "speech request body must be a JSON object", None),
        (b"{}", "input must be a non-empty string", "input"),
        (b'{"input": " \\n"}', "input must be a non-empty string", "input"),
    ],
)
async def test_a_body_without_input_is_refused_in_the_error_envelope(body, message, param):
    async with open_replica() as replica:
        response = await replica.http.post("/v1/audio/speech", data=body)
        error = await error_of(response)
    assert error == {"message": message, "type": "BadRequestError", "param": param, "code": 400}


BAD = [
    *((name, 5, "a string") for name in ("input", "model", "voice", "speaker", "response_format")),
    *((name, 5, "a string") for name in ("stream_format", "task_type", "language", "ref_audio")),
    *((name, ["x"], "a string") for name in ("instructions", "ref_text")),
    *((name, "1", "a number") for name in ("speed", "temperature", "top_p")),
    *((name, True, "a number") for name in ("speed", "temperature", "repetition_penalty")),
    *((name, 1.0, "an integer") for name in ("top_k",)),
    *((name, True, "an integer") for name in ("top_k",)),
    *((name, -1, "an integer of 0 or more") for name in ("seed", "initial_codec_chunk_frames")),
    *((name, 0, "an integer above 0") for name in ("token_count", "duration_tokens")),
    *((name, True, "an integer above 0") for name in ("max_new_tokens",)),
    ("seed", 2**64, "an integer of 0 or more"),
    *((name, 1, "true or false") for name in ("stream", "x_vector_only_mode")),
    *((name, "yes", "true or false") for name in ("stream_codec_output",)),
    ("suppress_bootstrap_silence", 0, "true or false"),
    ("stage_params", [], "an object"),
    ("references", {}, "a list of objects"),
    ("references", ["x"], "a list of objects"),
]


async def test_every_field_must_have_its_type_and_nothing_is_converted():
    async with open_replica() as replica:
        for name, value, requirement in BAD:
            error = await error_of(await replica.speech(**{"input": "x", name: value}))
            assert error["message"] == f"{name} must be {requirement}"
            assert error["param"] == name
        assert REQUESTS == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "ogg"}, "response_format"),
        ({"stream_format": "chunks"}, "stream_format"),
        ({"task_type": "song"}, "task_type"),
        ({"language": "Klingon"}, "language"),
        ({"speed": 0.2}, "speed"),
        ({"speed": 4.01}, "speed"),
        ({"voice": " "}, "voice"),
        ({"voice": "greta"}, "voice"),
        ({"references": [{"text": "only"}]}, "references.0"),
        ({"references": [{"audio": "a", "data": "b"}]}, "references.0"),
        ({"references": [{"audio": 5}]}, "references.0.audio"),
        ({"ref_audio": "data:audio/wav;base64,AA==", "references": [{"audio": "a"}]}, "references"),
    ],
)
async def test_an_invalid_value_is_refused_and_names_its_field(fields, param):
    async with open_replica() as replica:
        error = await error_of(await replica.speech(input="x", **fields))
    assert error["param"] == param
    assert (error["type"], error["code"]) == ("BadRequestError", 400)


async def test_the_input_limit_is_configurable():
    async with open_replica(max_speech_input_chars=5) as replica:
        assert (await replica.speech(input="abcde")).status_code == 200
        error = await error_of(await replica.speech(input="abcdef"))
    assert error["param"] == "input"
    assert "6 characters" in error["message"]


async def test_openai_voice_names_select_the_only_voice_and_others_are_refused():
    async with open_replica() as replica:
        for voice in ("default", "heart", "Heart", "alloy", "shimmer"):
            assert (await replica.speech(input="x", voice=voice)).status_code == 200
        error = await error_of(await replica.speech(input="x", voice="my-upload"))
        cloned = await error_of(
            await replica.speech(input="x", ref_audio="data:audio/wav;base64,AA==")
        )
    assert "this model has one voice" in error["message"]
    assert "'my-upload'" in error["message"]
    assert cloned["param"] == "ref_audio"


@pytest.mark.parametrize("response_format", ["mp3", "flac", "aac", "opus"])
async def test_a_format_without_encoder_is_unavailable(response_format):
    async with open_replica() as replica:
        error = await error_of(
            await replica.speech(input="x", response_format=response_format), 503
        )
        assert REQUESTS == []
    assert "missing encoder" in error["message"]
    assert response_format in error["message"]
    assert (error["type"], error["param"], error["code"]) == ("server_error", None, None)


async def test_without_a_speech_model_the_error_names_the_flag_for_one():
    async with open_replica(capabilities=frozenset({"chat"})) as replica:
        error = await error_of(await replica.speech(input="x"))
    assert error["code"] == "speech_not_available"
    assert "--speech hibari" in error["message"]


@pytest.mark.parametrize(
    ("text", "status", "message", "kind"),
    [
        ("REFUSED", 400, "this text is refused", "BadRequestError"),
        ("BROKEN", 500, "RuntimeError: the voice broke", "server_error"),
        ("SILENT", 500, "No audio output generated from the pipeline.", "server_error"),
    ],
)
async def test_a_failure_in_the_pipeline_is_reported_in_the_error_envelope(
    text, status, message, kind
):
    async with open_replica() as replica:
        error = await error_of(await replica.speech(input=text), status)
    assert (error["message"], error["type"]) == (message, kind)


async def test_a_full_queue_is_a_503():
    async with (
        open_replica(replace(PIPELINE, max_in_flight=1)) as replica,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(lambda: replica.speech(input="HELD"))
        await trio.to_thread.run_sync(HOLDING.wait)
        error = await error_of(await replica.speech(input="x"), 503)
        assert "The request queue is full." in error["message"]
        nursery.cancel_scope.cancel()


async def test_reference_audio_reaches_a_pipeline_that_can_clone_voices(tmp_path):
    from omni_proxy.replica.audio import encode_wav

    sample = tmp_path / "a.wav"
    sample.write_bytes(encode_wav(np.ones(10, np.float32), 8000))
    options = {
        "capabilities": frozenset({"speech", "voice_clone"}),
        "allowed_local_media_path": tmp_path,
    }
    async with open_replica(**options) as replica:
        with_ref_audio = await replica.speech(
            input="x", voice="anna", ref_audio=str(sample), ref_text="one"
        )
        with_references = await replica.speech(
            input="y", references=[{"vq_codes": [1, 2], "text": "two"}]
        )
        missing_file = await replica.speech(
            input="z", references=[{"audio_path": str(tmp_path / "b.wav")}]
        )
        not_audio = await replica.speech(input="z", ref_audio="data:audio/wav;base64,AAAA")
        first, second = REQUESTS
        for response, param in (
            (missing_file, "references.0.audio_path"),
            (not_audio, "ref_audio"),
        ):
            assert (await error_of(response))["param"] == param
    assert (with_ref_audio.status_code, with_references.status_code) == (200, 200)
    (reference,) = first.inputs["references"]
    assert first.inputs["text"] == "x"
    assert (reference["sample_rate"], reference["text"]) == (8000, "one")
    assert len(reference["audio_data"]) == 40
    assert second.inputs["references"] == [{"text": "two", "vq_codes": [1, 2]}]


async def test_a_disconnect_aborts_a_synthesis(nursery):
    async with open_replica() as replica:
        call = replica.begin(nursery, "/v1/audio/speech", json.dumps({"input": "HELD"}).encode())
        await trio.to_thread.run_sync(HOLDING.wait)
        call.disconnect()
        await call.ended.wait()
        assert replica.live == 0
        assert await trio.to_thread.run_sync(ABORTED.wait, 5.0)
    assert (call.status, call.chunks) == (None, [])


async def test_only_a_synthesis_that_succeeded_has_an_outcome():
    async with open_replica() as replica:
        spoken = await replica.speech(input="One two")
        await replica.speech(input="BROKEN")
        request_id = spoken.headers["x-request-id"]
        outcome = await replica.http.get(f"/v1/audio/speech/{request_id}")
        other = await replica.http.get("/v1/audio/speech/speech-x")
        assert await outcome.get_json() == {
            "request_id": request_id,
            "finish_reason": "stop",
            "usage": {
                "prompt_tokens": 2,
                "completion_tokens": 4,
                "total_tokens": 6,
                "engine_time_s": 0.25,
            },
        }
        assert other.status_code == 404
        assert list(await other.get_json()) == ["detail"]


def test_the_oldest_outcome_is_forgotten_first():
    outcomes = OutcomeHistory(limit=2)
    for name in "abc":
        outcomes.add(name, SpeechOutcome(name))
    assert [outcomes.get(name) for name in "abc"] == [None, SpeechOutcome("b"), SpeechOutcome("c")]


PATH = "/v1/audio/speech/batch"


async def batch(replica, **body):
    response = await replica.http.post(PATH, json=body)
    return response.status_code, await response.get_json()


def audio(sentence, response_format):
    encoded = encode_audio(wave(sentence).tobytes(), RATE, response_format)
    return base64.b64encode(encoded).decode()


async def test_batch_items_override_shared_fields_and_keep_their_order():
    items = [
        {"input": "One"},
        {"input": "Two three", "response_format": "pcm", "voice": None},
        {"response_format": None},
    ]
    async with open_replica() as replica:
        status, body = await batch(replica, input="Shared words here", voice="alloy", items=items)
        voices = {request.metadata["tts_params"]["voice"] for request in REQUESTS}
    assert status == 200
    assert body.pop("id").startswith("speech-batch-")
    assert voices == {"alloy"}
    shared = {"status": "success", "finish_reason": "stop"}
    as_wav = shared | {"format": "wav", "media_type": "audio/wav"}
    as_pcm = shared | {"format": "pcm", "media_type": "audio/pcm"}
    assert body == {
        "results": [
            {"index": 0, **as_wav, "audio_data": audio("One", "wav")},
            {"index": 1, **as_pcm, "audio_data": audio("Two three", "pcm")},
            {"index": 2, **as_wav, "audio_data": audio("Shared words here", "wav")},
        ],
        "total": 3,
        "succeeded": 3,
        "failed": 0,
    }


async def test_a_failed_item_names_its_index_and_does_not_fail_the_batch():
    items = [
        {"input": " "},
        {"input": "Fine"},
        {"input": "BROKEN"},
        {"input": "x", "speed": "fast"},
        {"input": "x", "voice": "greta"},
        {"input": "x", "response_format": "mp3"},
        {"input": "REFUSED"},
    ]
    async with open_replica() as replica:
        status, body = await batch(replica, items=items)
    assert (status, body["total"], body["succeeded"], body["failed"]) == (200, 7, 1, 6)
    results = body["results"]
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
    assert results[6]["error"] == {**bad, "message": "this text is refused", "param": "items.6"}


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
async def test_an_invalid_batch_is_refused_as_a_whole(body, param):
    async with open_replica(tts_batch_max_items=3) as replica:
        status, reply = await batch(replica, **body)
        assert REQUESTS == []
    assert status == 400
    assert reply["error"]["param"] == param
    assert (reply["error"]["type"], reply["error"]["code"]) == ("BadRequestError", 400)


async def test_a_batch_that_is_not_json_is_refused():
    async with open_replica() as replica:
        response = await replica.http.post(PATH, data=b"items")
        error = (await response.get_json())["error"]
    assert (response.status_code, error["message"]) == (
        400,
        "speech request body must be valid JSON",
    )


async def test_items_are_synthesized_concurrently_and_a_disconnect_aborts_all(nursery):
    async with open_replica() as replica:
        body = json.dumps({"items": [{"input": "HELD"}, {"input": "HELD too"}]}).encode()
        call = replica.begin(nursery, PATH, body)
        await trio.to_thread.run_sync(HOLDING.wait)
        while len(REQUESTS) < 2:
            await trio.to_thread.run_sync(ABORTED.wait, 0.002)
        assert replica.live == 2
        call.disconnect()
        await call.ended.wait()
        assert replica.live == 0

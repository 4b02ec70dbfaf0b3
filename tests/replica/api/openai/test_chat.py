import base64
import re
import struct

import pytest

from tests.replica.api.api_fixture import HELLO, MESSAGES, RATE, USAGE

PATH = "/v1/chat/completions"


def deltas(events):
    return [event["choices"][0]["delta"] for event in events[:-1]]


async def test_a_complete_response_has_the_keys_of_the_contract_in_order(api):
    response = await api.chat(request_id="R")
    body = await response.get_json()
    created = body["created"]
    assert await response.get_data() == (
        b'{"id":"chatcmpl-R","object":"chat.completion","created":%d,"model":"fake","choices":'
        b'[{"index":0,"message":{"role":"assistant","content":"Hello"},"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4}}' % created
    )
    assert response.headers["content-type"] == "application/json"


async def test_a_stream_matches_the_contract_byte_for_byte(api):
    response = await api.chat(request_id="R", stream=True)
    body = (await response.get_data()).decode()
    created = re.search(r'"created": (\d+)', body)[1]
    head = (
        'data: {"id": "chatcmpl-R", "object": "chat.completion.chunk", '
        f'"created": {created}, "model": "fake", "choices": [{{"index": 0, "delta": '
    )
    assert body == (
        head + '{"role": "assistant", "content": "Hel"}, "finish_reason": null}]}\n\n'
        + head + '{"content": "lo"}, "finish_reason": null}]}\n\n'
        + head + '{}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 2, '
        '"completion_tokens": 2, "total_tokens": 4}}\n\n'
        "data: [DONE]\n\n"
    )  # fmt: skip
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_the_model_of_the_request_is_echoed_and_never_checked(api):
    assert (await api.chat_json(model="other"))["model"] == "other"
    assert api.last_request.metadata["model"] == "other"


async def test_an_id_is_generated_if_the_request_has_none(api):
    first, second = await api.chat_json(), await api.chat_json(request_id=None)
    assert re.fullmatch(r"chatcmpl-[0-9a-f-]{36}", first["id"])
    assert first["id"] != second["id"]


async def test_usage_is_null_when_the_pipeline_reports_none(api):
    assert (await api.chat_json({"result": {"text": "x"}}))["usage"] is None


async def test_cached_tokens_are_reported_if_known(api):
    usage = USAGE | {"prompt_tokens_details": {"cached_tokens": 1}, "engine_time_s": 0.1}
    body = await api.chat_json({"result": {"text": "x", "usage": usage}})
    assert body["usage"] == USAGE | {"prompt_tokens_details": {"cached_tokens": 1}}


async def test_finish_reason_defaults_to_stop(api):
    assert (await api.chat_json({"result": {"text": "x"}}))["choices"][0]["finish_reason"] == "stop"
    body = await api.chat_json({"result": {"text": "x", "finish_reason": "length"}})
    assert body["choices"][0]["finish_reason"] == "length"


async def test_sampling_reaches_the_stage_and_null_is_unset(api):
    await api.chat(
        temperature=0.5, top_p=None, top_k=3, seed=7, max_tokens=9, stop=["a", "b"], min_p=0
    )
    params = dict(api.last_request.params)
    assert params == {
        "temperature": 0.5,
        "top_k": 3,
        "seed": 7,
        "min_p": 0,
        "max_new_tokens": 9,
        "stop": ["a", "b"],
        "stop_token_ids": [],
        "stream": False,
    }


async def test_max_completion_tokens_wins_over_max_tokens(api):
    await api.chat(max_tokens=9, max_completion_tokens=4)
    assert api.last_request.params["max_new_tokens"] == 4


async def test_per_stage_and_talker_parameters_reach_the_stage(api):
    await api.chat(
        HELLO, stage_sampling={"play": {"temperature": 0}}, talker_top_k=5, talker_top_p=None
    )
    assert api.last_request.params["stage_sampling"] == {"play": {"temperature": 0}}
    assert api.last_request.params["talker_top_k"] == 5
    assert "talker_top_p" not in api.last_request.params


async def test_fields_that_change_nothing_are_ignored(api):
    ignored_fields = {
        "tools": [{}],
        "tool_choice": "auto",
        "stream_options": {},
        "user": "u",
        "store": True,
    }
    assert (await api.chat(**ignored_fields)).status_code == 200
    unused_values = {
        "n": None,
        "logprobs": False,
        "response_format": {"type": "text"},
        "min_tokens": 0,
    }
    body = await api.chat_json(**unused_values)
    assert len(body["choices"]) == 1
    assert "logprobs" not in body["choices"][0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0}, {"n": 129}, {"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 1},
        {"logit_bias": {"one": 1}}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"1": 100.5}},
        {"logit_bias": {str(token): 1 for token in range(1025)}},
        {"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_object"}},  # no stage supports it
        {"tool_choice": "required"}, {"tool_choice": {"type": "function"}},
        {"function_call": {"name": "f"}}, {"guided_json": {}, "regex": "a"}, {"min_tokens": 1},
        {"chat_template": "x"},
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_an_unsupported_field_that_would_change_the_response_is_refused_by_name(
    api, wrong, stream
):
    response = await api.chat(stream=stream, **wrong)
    detail = (await response.get_json())["detail"]
    assert response.status_code == 400, detail
    assert any(detail.startswith(name) for name in wrong), detail


async def test_only_role_and_content_of_a_message_are_forwarded(api):
    message = {"role": "assistant", "content": None, "name": "n", "tool_calls": [{}]}
    await api.chat(messages=[message, *MESSAGES])
    assert api.last_request.inputs == {
        "messages": [{"role": "assistant", "content": ""}, {"role": "user", "content": "hi"}]
    }


async def test_text_parts_become_one_text(api):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await api.chat(messages=[{"role": "user", "content": parts}])
    assert api.last_request.inputs["messages"][0]["content"] == "a\nb"


@pytest.mark.parametrize(
    ("body", "kind", "loc"),
    [
        ({}, "missing", ["body", "messages"]),
        ({"messages": "x"}, "list_type", ["body", "messages"]),
        ({"messages": [{}]}, "missing", ["body", "messages", 0, "role"]),
        ({"messages": [], "model": "m"}, "value_error", ["body"]),
        ({"messages": MESSAGES, "max_tokens": 0}, "greater_than_equal", ["body", "max_tokens"]),
        ({"messages": MESSAGES, "temperature": "x"}, "float_parsing", ["body", "temperature"]),
        ([], "model_attributes_type", ["body"]),
        (b"{", "json_invalid", ["body", 1]),
        (b"", "missing", ["body"]),
    ],
)
async def test_an_invalid_body_is_a_422_that_names_the_location(api, body, kind, loc):
    response = await api.post(PATH, body)
    assert response.status_code == 422
    first = (await response.get_json())["detail"][0]
    assert (first["type"], first["loc"]) == (kind, loc)
    assert {"type", "loc", "msg", "input"} <= first.keys()


async def test_a_number_in_a_string_is_a_number(api):
    await api.chat(temperature="0.5", max_tokens="3", stream="false")
    assert (api.last_request.params["temperature"], api.last_request.params["max_new_tokens"]) == (
        0.5,
        3,
    )


# Audio output


async def test_audio_is_returned_only_if_requested(api):
    script = {"result": {"text": "Hi", "samples": 3}}
    plain = await api.chat_json(script)
    assert plain["choices"][0]["message"] == {"role": "assistant", "content": "Hi"}
    body = await api.chat_json(script, modalities=["text", "audio"], request_id="R")
    message = body["choices"][0]["message"]
    assert list(message) == ["role", "content", "audio"]
    assert (message["audio"]["id"], message["audio"]["transcript"]) == ("audio-R", "Hi")
    wav = base64.b64decode(message["audio"]["data"])
    assert wav[:4] == b"RIFF"
    assert wav[44:] == struct.pack("<3h", *[16383] * 3)
    assert struct.unpack("<I", wav[24:28]) == (RATE,)


async def test_with_audio_alone_the_text_is_only_in_the_transcript(api):
    script = {"result": {"text": "Hi", "samples": 3}}
    body = await api.chat_json(script, modalities=["audio"], audio={"format": "pcm"})
    message = body["choices"][0]["message"]
    assert "content" not in message
    assert base64.b64decode(message["audio"]["data"]) == struct.pack("<3h", *[16383] * 3)


async def test_without_audio_the_content_is_the_text(api):
    body = await api.chat_json({"result": {"text": "Hi"}}, modalities=["audio"])
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hi"}
    body = await api.chat_json({"result": {"text": ""}})
    assert body["choices"][0]["message"] == {"role": "assistant", "content": ""}


async def test_an_audio_response_without_text_has_a_null_transcript(api):
    body = await api.chat_json({"result": {"text": "", "samples": 1}}, modalities=["audio"])
    assert body["choices"][0]["message"]["audio"]["transcript"] is None


async def test_every_streamed_audio_chunk_is_a_complete_file_in_its_own_delta(api):
    script = {
        "chunks": [{"text": "Hi", "samples": 2}, {"samples": 1}],
        "result": {"text": "Hi"},
    }
    events = await api.chat_events(script, modalities=["text", "audio"], request_id="R")
    first, second, third, last = deltas(events)
    assert first == {"role": "assistant", "content": "Hi"}
    assert (list(second), second["audio"]["id"]) == (["audio"], "audio-R")
    assert [len(base64.b64decode(delta["audio"]["data"])) for delta in (second, third)] == [48, 46]
    assert last == {}


@pytest.mark.parametrize(
    "wrong",
    [{"modalities": ["image"]}, {"modalities": ["audio"], "audio": {"format": "mp3"}}],
)
async def test_an_unsupported_output_is_a_400(api, wrong):
    response = await api.chat(**wrong)
    assert response.status_code == 400
    assert "detail" in await response.get_json()


@pytest.mark.parametrize("modalities", [["audio"], ["text", "audio"]])
async def test_a_server_without_speech_responds_with_text(api, modalities):
    mute = api.with_options(capabilities=frozenset(("chat",)))
    fields = {"modalities": modalities, "audio": {"format": "mp3", "voice": "alloy"}}
    body = await mute.chat_json(**fields)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello"}
    assert mute.last_request.metadata["output_modalities"] == ["text"]
    *chunks, last, done = await mute.chat_events(**fields)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "Hello"
    assert (last["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")


# Streams


async def test_the_role_is_sent_alone_if_the_first_chunk_is_empty(api):
    script = {"chunks": [{"token_ids": [1]}, {"text": "Hi"}], "result": {"text": "Hi"}}
    assert deltas(await api.chat_events(script)) == [{"role": "assistant"}, {"content": "Hi"}, {}]


async def test_audio_that_was_not_requested_is_dropped_from_a_stream(api):
    script = {"chunks": [{"samples": 2}, {"text": "Hi"}], "result": {"text": "Hi"}}
    assert deltas(await api.chat_events(script)) == [{"role": "assistant"}, {"content": "Hi"}, {}]


async def test_an_empty_result_alone_has_no_role_chunk(api):
    events = await api.chat_events({"result": {"text": ""}})
    assert deltas(events) == [{}]
    assert events[-1] == "[DONE]"


async def test_empty_chunks_are_dropped_once_the_role_is_sent(api):
    script = {
        "chunks": [{"text": "a"}, {"token_ids": [1]}, {"text": ""}, {"text": "b"}],
        "result": {"text": "ab"},
    }
    assert deltas(await api.chat_events(script)) == [
        {"role": "assistant", "content": "a"},
        {"content": "b"},
        {},
    ]


async def test_a_result_adds_only_the_text_that_was_not_streamed(api):
    script = {"chunks": [{"text": "Hel"}], "result": {"text": "Hello", "usage": USAGE}}
    events = await api.chat_events(script)
    assert deltas(events) == [{"role": "assistant", "content": "Hel"}, {"content": "lo"}, {}]


async def test_every_event_has_a_finish_reason_and_only_the_last_has_usage(api):
    events = await api.chat_events()
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons == [None, None, "stop"]
    assert ["usage" in event for event in events[:-1]] == [False, False, True]


async def test_there_is_no_usage_key_when_usage_is_not_known(api):
    events = await api.chat_events({"chunks": [{"text": "a"}], "result": {"text": "a"}})
    assert not any("usage" in event for event in events[:-1])


async def test_a_stream_of_audio_only_has_no_text(api):
    script = {"chunks": [{"text": "a"}, {"samples": 1}], "result": {"text": "a"}}
    role, audio, last = deltas(await api.chat_events(script, modalities=["audio"]))
    assert (role, list(audio), last) == ({"role": "assistant"}, ["audio"], {})


# Stop strings


async def test_a_complete_text_ends_before_the_first_stop_string_of_the_request(api):
    script = {"result": {"text": "one two three"}}
    body = await api.chat_json(script, stop=["three", "two"])
    assert body["choices"][0]["message"]["content"] == "one two "
    body = await api.chat_json(script, stop="two")
    assert body["choices"][0]["message"]["content"] == "one "


async def test_a_possible_stop_string_is_held_back_and_released_at_the_end(api):
    script = {
        "chunks": [{"text": "aEN"}, {"text": "x"}, {"text": "bE"}],
        "result": {"text": "aENxbE"},
    }
    texts = [delta.get("content") for delta in deltas(await api.chat_events(script, stop=["END"]))]
    assert texts == ["a", "ENx", "b", "E", None]


async def test_nothing_after_a_stop_string_is_streamed(api):
    script = {
        "chunks": [{"text": "aE"}, {"text": "NDb"}, {"text": "c"}],
        "result": {"text": "aENDbc"},
    }
    texts = [delta.get("content") for delta in deltas(await api.chat_events(script, stop=["END"]))]
    assert texts == ["a", None]


async def test_an_empty_stop_string_stops_nothing(api):
    assert (await api.chat_json(stop=[""]))["choices"][0]["message"]["content"] == "Hello"


# Failures


@pytest.mark.parametrize(
    ("script", "status", "message"),
    [({"fault": "too long"}, 400, "too long"), ({"bug": "oops"}, 500, "RuntimeError: oops")],
)
async def test_a_failure_has_its_status_and_message(api, script, status, message):
    response = await api.chat(script)
    assert response.status_code == status
    assert await response.get_json() == {"detail": message}


async def test_a_failure_within_a_stream_is_an_event_before_done(api):
    script = {"chunks": [{"text": "a"}], "fault": "too long"}
    response = await api.chat(script, stream=True)
    assert response.status_code == 200
    tail = (await response.get_data()).split(b"\n\n", 1)[1]
    assert tail == (
        b'data: {"error": {"message": "too long", "type": "invalid_request_error", "code": 400}}'
        b"\n\ndata: [DONE]\n\n"
    )


async def test_an_internal_error_within_a_stream_is_a_server_error(api):
    error = (await api.chat_events({"bug": "oops"}))[0]["error"]
    assert (error["type"], error["code"]) == ("server_error", 500)


async def test_malformed_parts_are_refused_by_name(api):
    for content, path in (
        (3, "messages[0].content"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        ([{"type": "fun"}], "messages[0].content[0].type"),
        ([{"type": "image_url", "image_url": {}}], "image_url.url"),
        ([{"type": "video_url", "video_url": {"url": "x"}}], "videos"),
        ([{"type": "input_audio", "input_audio": {}}], "input_audio.data"),
    ):
        response = await api.chat(messages=[{"role": "user", "content": content}])
        assert response.status_code == 400, content
        assert path in (await response.get_json())["detail"]


async def test_top_level_images_and_videos_are_refused_without_vision(api):
    blind = api.with_options(capabilities=frozenset(("chat",)))
    for name in ("images", "videos"):
        response = await blind.chat(**{name: ["x"]})
        assert response.status_code == 400
        assert name in (await response.get_json())["detail"]

import base64
import re
import struct

import pytest

from tests.replica.api.api_fixture import HELLO, MESSAGES, RATE, USAGE

PATH = "/v1/chat/completions"


def deltas(events):
    return [event["choices"][0]["delta"] for event in events[:-1]]


async def test_a_whole_answer_has_the_contracts_keys_in_their_order(world):
    answer = await world.chat(request_id="R")
    body = await answer.get_json()
    created = body["created"]
    assert await answer.get_data() == (
        b'{"id":"chatcmpl-R","object":"chat.completion","created":%d,"model":"fake","choices":'
        b'[{"index":0,"message":{"role":"assistant","content":"Hello"},"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4}}' % created
    )
    assert answer.headers["content-type"] == "application/json"


async def test_a_stream_is_byte_for_byte_the_contracts(world):
    answer = await world.chat(request_id="R", stream=True)
    body = (await answer.get_data()).decode()
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
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_the_model_of_the_request_is_echoed_and_never_checked(world):
    assert (await world.chat_json(model="other"))["model"] == "other"
    assert world.heard.metadata["model"] == "other"


async def test_ids_are_made_where_none_is_given(world):
    first, second = await world.chat_json(), await world.chat_json(request_id=None)
    assert re.fullmatch(r"chatcmpl-[0-9a-f-]{36}", first["id"])
    assert first["id"] != second["id"]


async def test_usage_is_null_when_the_pipeline_reports_none(world):
    assert (await world.chat_json({"result": {"text": "x"}}))["usage"] is None


async def test_cached_tokens_are_reported_where_they_are_known(world):
    usage = USAGE | {"prompt_tokens_details": {"cached_tokens": 1}, "engine_time_s": 0.1}
    body = await world.chat_json({"result": {"text": "x", "usage": usage}})
    assert body["usage"] == USAGE | {"prompt_tokens_details": {"cached_tokens": 1}}


async def test_finish_reason_defaults_to_stop(world):
    assert (await world.chat_json({"result": {"text": "x"}}))["choices"][0][
        "finish_reason"
    ] == "stop"
    body = await world.chat_json({"result": {"text": "x", "finish_reason": "length"}})
    assert body["choices"][0]["finish_reason"] == "length"


async def test_sampling_reaches_the_stage_and_null_is_unset(world):
    await world.chat(
        temperature=0.5, top_p=None, top_k=3, seed=7, max_tokens=9, stop=["a", "b"], min_p=0
    )
    params = dict(world.heard.params)
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


async def test_max_completion_tokens_wins_over_max_tokens(world):
    await world.chat(max_tokens=9, max_completion_tokens=4)
    assert world.heard.params["max_new_tokens"] == 4


async def test_per_stage_and_talker_parameters_reach_the_stage(world):
    await world.chat(
        HELLO, stage_sampling={"play": {"temperature": 0}}, talker_top_k=5, talker_top_p=None
    )
    assert world.heard.params["stage_sampling"] == {"play": {"temperature": 0}}
    assert world.heard.params["talker_top_k"] == 5
    assert "talker_top_p" not in world.heard.params


async def test_fields_that_change_nothing_are_ignored(world):
    hints = {"tools": [{}], "tool_choice": "auto", "stream_options": {}, "user": "u", "store": True}
    assert (await world.chat(**hints)).status_code == 200
    asked = {"n": None, "logprobs": False, "response_format": {"type": "text"}, "min_tokens": 0}
    body = await world.chat_json(**asked)
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
async def test_what_would_change_the_answer_and_cannot_be_is_refused_by_name(world, wrong, stream):
    answer = await world.chat(stream=stream, **wrong)
    output = (await answer.get_json())["detail"]
    assert answer.status_code == 400, output
    assert any(output.startswith(name) for name in wrong), output


async def test_only_role_and_content_of_a_message_are_forwarded(world):
    message = {"role": "assistant", "content": None, "name": "n", "tool_calls": [{}]}
    await world.chat(messages=[message, *MESSAGES])
    assert world.heard.inputs == {
        "messages": [{"role": "assistant", "content": ""}, {"role": "user", "content": "hi"}]
    }


async def test_text_parts_become_one_text(world):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await world.chat(messages=[{"role": "user", "content": parts}])
    assert world.heard.inputs["messages"][0]["content"] == "a\nb"


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
async def test_a_wrong_body_is_a_422_that_names_the_place(world, body, kind, loc):
    answer = await world.post(PATH, body)
    assert answer.status_code == 422
    first = (await answer.get_json())["detail"][0]
    assert (first["type"], first["loc"]) == (kind, loc)
    assert {"type", "loc", "msg", "input"} <= first.keys()


async def test_a_number_in_a_string_is_a_number(world):
    await world.chat(temperature="0.5", max_tokens="3", stream="false")
    assert (world.heard.params["temperature"], world.heard.params["max_new_tokens"]) == (0.5, 3)


# Audio out


async def test_audio_is_returned_only_if_requested(world):
    script = {"result": {"text": "Hi", "samples": 3}}
    plain = await world.chat_json(script)
    assert plain["choices"][0]["message"] == {"role": "assistant", "content": "Hi"}
    body = await world.chat_json(script, modalities=["text", "audio"], request_id="R")
    message = body["choices"][0]["message"]
    assert list(message) == ["role", "content", "audio"]
    assert (message["audio"]["id"], message["audio"]["transcript"]) == ("audio-R", "Hi")
    wav = base64.b64decode(message["audio"]["data"])
    assert wav[:4] == b"RIFF"
    assert wav[44:] == struct.pack("<3h", *[16383] * 3)
    assert struct.unpack("<I", wav[24:28]) == (RATE,)


async def test_audio_alone_leaves_the_text_out_but_not_of_the_transcript(world):
    script = {"result": {"text": "Hi", "samples": 3}}
    body = await world.chat_json(script, modalities=["audio"], audio={"format": "pcm"})
    message = body["choices"][0]["message"]
    assert "content" not in message
    assert base64.b64decode(message["audio"]["data"]) == struct.pack("<3h", *[16383] * 3)


async def test_without_audio_the_content_is_the_text(world):
    body = await world.chat_json({"result": {"text": "Hi"}}, modalities=["audio"])
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hi"}
    body = await world.chat_json({"result": {"text": ""}})
    assert body["choices"][0]["message"] == {"role": "assistant", "content": ""}


async def test_an_audio_answer_without_text_has_a_null_transcript(world):
    body = await world.chat_json({"result": {"text": "", "samples": 1}}, modalities=["audio"])
    assert body["choices"][0]["message"]["audio"]["transcript"] is None


async def test_every_audio_chunk_of_a_stream_is_a_whole_file_in_a_delta_of_its_own(world):
    script = {
        "chunks": [{"text": "Hi", "samples": 2}, {"samples": 1}],
        "result": {"text": "Hi"},
    }
    events = await world.chat_events(script, modalities=["text", "audio"], request_id="R")
    first, second, third, last = deltas(events)
    assert first == {"role": "assistant", "content": "Hi"}
    assert (list(second), second["audio"]["id"]) == (["audio"], "audio-R")
    assert [len(base64.b64decode(each["audio"]["data"])) for each in (second, third)] == [48, 46]
    assert last == {}


@pytest.mark.parametrize(
    "wrong",
    [{"modalities": ["image"]}, {"modalities": ["audio"], "audio": {"format": "mp3"}}],
)
async def test_an_output_that_cannot_be_made_is_a_400(world, wrong):
    answer = await world.chat(**wrong)
    assert answer.status_code == 400
    assert "detail" in await answer.get_json()


@pytest.mark.parametrize("modalities", [["audio"], ["text", "audio"]])
async def test_where_the_server_makes_no_audio_the_answer_is_text(world, modalities):
    mute = world.with_options(capabilities=frozenset(("chat",)))
    ask = {"modalities": modalities, "audio": {"format": "mp3", "voice": "alloy"}}
    body = await mute.chat_json(**ask)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello"}
    assert mute.heard.metadata["output_modalities"] == ["text"]
    *pieces, last, done = await mute.chat_events(**ask)
    assert "".join(each["choices"][0]["delta"]["content"] for each in pieces) == "Hello"
    assert (last["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")


# Streams


async def test_the_role_rides_alone_when_the_first_chunk_has_nothing_to_give(world):
    script = {"chunks": [{"token_ids": [1]}, {"text": "Hi"}], "result": {"text": "Hi"}}
    assert deltas(await world.chat_events(script)) == [{"role": "assistant"}, {"content": "Hi"}, {}]


async def test_audio_that_was_not_requested_is_dropped_from_a_stream(world):
    script = {"chunks": [{"samples": 2}, {"text": "Hi"}], "result": {"text": "Hi"}}
    assert deltas(await world.chat_events(script)) == [{"role": "assistant"}, {"content": "Hi"}, {}]


async def test_an_empty_result_alone_has_no_role_chunk(world):
    events = await world.chat_events({"result": {"text": ""}})
    assert deltas(events) == [{}]
    assert events[-1] == "[DONE]"


async def test_chunks_without_payload_are_swallowed_once_the_role_is_out(world):
    script = {
        "chunks": [{"text": "a"}, {"token_ids": [1]}, {"text": ""}, {"text": "b"}],
        "result": {"text": "ab"},
    }
    assert deltas(await world.chat_events(script)) == [
        {"role": "assistant", "content": "a"},
        {"content": "b"},
        {},
    ]


async def test_a_result_contributes_only_its_new_tail(world):
    script = {"chunks": [{"text": "Hel"}], "result": {"text": "Hello", "usage": USAGE}}
    events = await world.chat_events(script)
    assert deltas(events) == [{"role": "assistant", "content": "Hel"}, {"content": "lo"}, {}]


async def test_finish_reason_is_always_there_and_usage_on_the_last_event_alone(world):
    events = await world.chat_events()
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons == [None, None, "stop"]
    assert ["usage" in event for event in events[:-1]] == [False, False, True]


async def test_there_is_no_usage_key_when_usage_is_not_known(world):
    events = await world.chat_events({"chunks": [{"text": "a"}], "result": {"text": "a"}})
    assert not any("usage" in event for event in events[:-1])


async def test_a_stream_of_audio_only_has_no_text(world):
    script = {"chunks": [{"text": "a"}, {"samples": 1}], "result": {"text": "a"}}
    role, audio, last = deltas(await world.chat_events(script, modalities=["audio"]))
    assert (role, list(audio), last) == ({"role": "assistant"}, ["audio"], {})


# Stop strings


async def test_a_whole_text_ends_before_the_first_stop_string_in_request_order(world):
    script = {"result": {"text": "one two three"}}
    body = await world.chat_json(script, stop=["three", "two"])
    assert body["choices"][0]["message"]["content"] == "one two "
    body = await world.chat_json(script, stop="two")
    assert body["choices"][0]["message"]["content"] == "one "


async def test_what_may_begin_a_stop_string_is_held_back_and_released_at_the_end(world):
    script = {
        "chunks": [{"text": "aEN"}, {"text": "x"}, {"text": "bE"}],
        "result": {"text": "aENxbE"},
    }
    texts = [each.get("content") for each in deltas(await world.chat_events(script, stop=["END"]))]
    assert texts == ["a", "ENx", "b", "E", None]


async def test_nothing_behind_a_stop_string_is_streamed(world):
    script = {
        "chunks": [{"text": "aE"}, {"text": "NDb"}, {"text": "c"}],
        "result": {"text": "aENDbc"},
    }
    texts = [each.get("content") for each in deltas(await world.chat_events(script, stop=["END"]))]
    assert texts == ["a", None]


async def test_an_empty_stop_string_stops_nothing(world):
    assert (await world.chat_json(stop=[""]))["choices"][0]["message"]["content"] == "Hello"


# Failures


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [({"fault": "too long"}, 400, "too long"), ({"bug": "oops"}, 500, "RuntimeError: oops")],
)
async def test_a_failure_is_a_status_with_its_words(world, script, status, words):
    answer = await world.chat(script)
    assert answer.status_code == status
    assert await answer.get_json() == {"detail": words}


async def test_a_failure_within_a_stream_is_an_event_before_done(world):
    script = {"chunks": [{"text": "a"}], "fault": "too long"}
    answer = await world.chat(script, stream=True)
    assert answer.status_code == 200
    tail = (await answer.get_data()).split(b"\n\n", 1)[1]
    assert tail == (
        b'data: {"error": {"message": "too long", "type": "invalid_request_error", "code": 400}}'
        b"\n\ndata: [DONE]\n\n"
    )


async def test_a_server_fault_within_a_stream_is_reported_as_ours(world):
    error = (await world.chat_events({"bug": "oops"}))[0]["error"]
    assert (error["type"], error["code"]) == ("server_error", 500)


async def test_malformed_parts_are_refused_by_name(world):
    for content, words in (
        (3, "messages[0].content"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        ([{"type": "fun"}], "messages[0].content[0].type"),
        ([{"type": "image_url", "image_url": {}}], "image_url.url"),
        ([{"type": "video_url", "video_url": {"url": "x"}}], "videos"),
        ([{"type": "input_audio", "input_audio": {}}], "input_audio.data"),
    ):
        answer = await world.chat(messages=[{"role": "user", "content": content}])
        assert answer.status_code == 400, content
        assert words in (await answer.get_json())["detail"]


async def test_images_and_videos_beside_the_messages_are_refused(world):
    blind = world.with_options(capabilities=frozenset(("chat",)))
    for name in ("images", "videos"):
        answer = await blind.chat(**{name: ["x"]})
        assert answer.status_code == 400
        assert name in (await answer.get_json())["detail"]

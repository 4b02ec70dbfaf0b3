import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.routing.inspect.requirements import MAX_MODEL_CHARS, RequestFacts, inspect_request
from omni_proxy.routing.routes import Pinning, match_route
from omni_proxy.wire.errors import HttpError

CHAT, SPEECH, BATCH = "/v1/chat/completions", "/v1/audio/speech", "/v1/audio/speech/batch"
FORM, VOICES = "/v1/audio/transcriptions", "/v1/audio/voices"
MULTIPART = b"multipart/form-data; boundary=B"


def look(path, body=b"", *, content_type=b"application/json", method="POST", **hints):
    route = match_route(method, path)
    assert route is not None
    raw_hints = {name.encode(): value.encode() for name, value in hints.items()}
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return inspect_request(route, raw, RequestFacts(content_type, raw_hints))


def refused(*args, **kwargs) -> str:
    with pytest.raises(HttpError) as caught:
        look(*args, **kwargs)
    assert caught.value.status == 400
    return caught.value.message


def form(**fields: str) -> bytes:
    parts = (
        f'--B\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    )
    return ("".join(parts) + "--B--\r\n").encode()


def content(kind: str) -> dict:
    return {"messages": [{"role": "user", "content": [{"type": kind}, {"type": "text"}]}]}


@pytest.mark.parametrize(
    ("path", "body", "needs"),
    [
        (CHAT, {}, {"chat"}),
        ("/v1/completions", {}, {"chat"}),
        ("/v1/embeddings", {}, {"chat"}),
        ("/generate", {}, {"chat"}),
        (SPEECH, {}, {"speech"}),
        (BATCH, {}, {"speech"}),
        (CHAT, {"stream": True}, {"chat", "streaming"}),
        (CHAT, {"stream": "true"}, {"chat"}),
        (CHAT, {"stream": 1}, {"chat"}),
        (CHAT, {"stream": False}, {"chat"}),
        (SPEECH, {"stream": True}, {"speech", "streaming"}),
        (SPEECH, {"stream_format": "sse"}, {"speech", "streaming"}),
        (SPEECH, {"stream_format": "audio"}, {"speech"}),
        (CHAT, {"stream_format": "sse"}, {"chat"}),
        (CHAT, {"modalities": ["text", "audio"]}, {"chat", "audio_output"}),
        (CHAT, {"output_modalities": ["audio"]}, {"chat", "audio_output"}),
        (CHAT, {"modalities": ["text"]}, {"chat"}),
        (CHAT, {"modalities": "audio"}, {"chat"}),
        (CHAT, {"audio": {"voice": "ada"}}, {"chat", "audio_output"}),
        (SPEECH, {"ref_audio": "data:audio/wav;base64,AA"}, {"speech", "audio_input"}),
        (CHAT, {"ref_audio": "x"}, {"chat"}),
        (SPEECH, {"references": [{"text": "hi"}]}, {"speech"}),
        (SPEECH, {"references": {"audio": "x"}}, {"speech"}),
        (SPEECH, {"references": [7, {"data": "x"}]}, {"speech", "audio_input"}),
        (SPEECH, {"images": ["x"]}, {"speech", "image_input"}),
    ],
)
def test_path_and_body_determine_the_requirements(path, body, needs):
    assert set(look(path, body).capabilities) == needs


@pytest.mark.parametrize(
    ("field", "capability"),
    [
        ("image", "image_input"),
        ("images", "image_input"),
        ("audios", "audio_input"),
        ("audio_inputs", "audio_input"),
        ("video", "video_input"),
        ("videos", "video_input"),
        ("audio", "audio_output"),
    ],
)
def test_a_field_requires_a_capability_unless_it_is_empty(field, capability):
    for value in ("x", ["x"], {"a": 1}, 0, 0.0, 3, True):
        assert set(look(CHAT, {field: value}).capabilities) == {"chat", capability}
    for value in (None, False, "", [], {}):
        assert look(CHAT, {field: value}).capabilities == ["chat"]


@pytest.mark.parametrize(
    ("kinds", "capability"),
    [
        (("image", "image_url", "input_image"), "image_input"),
        (("audio", "audio_url", "input_audio"), "audio_input"),
        (("video", "video_url", "input_video"), "video_input"),
    ],
)
def test_a_media_part_of_a_message_requires_a_capability(kinds, capability):
    for kind in kinds:
        assert set(look(CHAT, content(kind)).capabilities) == {"chat", capability}


@pytest.mark.parametrize("key", ["audio_path", "ref_audio", "audio", "data"])
def test_a_reference_with_audio_requires_audio_input(key):
    assert "audio_input" in look(SPEECH, {"references": [{key: "x"}]}).capabilities
    assert "audio_input" not in look(SPEECH, {"references": [{key: ""}]}).capabilities


@pytest.mark.parametrize(
    "messages",
    ["hi", 7, {"content": []}, [None, "x", {"content": "image"}, {"content": [1, {"type": []}]}]],
)
def test_malformed_messages_are_left_to_the_worker(messages):
    assert look(CHAT, {"messages": messages}).capabilities == ["chat"]


def test_model_stream_and_request_id_are_read():
    need = look(CHAT, {"model": "m", "stream": True, "request_id": "r"})
    assert (need.model, need.stream, need.request_id) == ("m", True, "r")
    assert look(CHAT, {"model": ""}).model is None
    assert look(CHAT, {"model": 7}).model is None


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"{} x",
        b" ",
        b"nonsense",
        b'{"a": \x01}',
        b'{"messages":' + b"[" * 100_000,
        b'{"unread":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda body: body[:12].decode("latin-1"),
)
def test_bad_json_is_refused(body):
    assert refused(CHAT, body) == "invalid JSON body"


@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"7"])
def test_json_that_is_not_an_object_is_refused(body):
    assert refused(CHAT, body) == "JSON request body must be an object"


@pytest.mark.parametrize(
    "body",
    [
        b'{"temperature": NaN, "model": "m"}',
        b'{"temperature": -Infinity, "model": "m"}',
        b'{"model": "other", "model": "m"}',
        b'\xef\xbb\xbf{"model": "m"}',
        '{"model": "m"}'.encode("utf-16"),
        '{"model": "m"}'.encode("utf-32"),
        b'{"text": "\\ud800", "model": "m"}',
    ],
)
def test_json_that_pythons_parser_accepts_is_accepted(body):
    assert look(CHAT, body).model == "m"


def test_characters_of_a_model_that_utf_8_cannot_encode_are_replaced():
    assert look(CHAT, b'{"model": "\\ud800m"}').model == "?m"
    assert look(CHAT, '{"model": "müsli"}'.encode()).model == "müsli"


@given(st.binary())
def test_any_bytes_are_inspected_or_refused(body):
    for path in (CHAT, SPEECH, BATCH, FORM):
        try:
            look(path, body)
        except HttpError as refusal:
            assert refusal.status == 400  # noqa: PT017  both outcomes are valid


fields = st.sampled_from(
    ["model", "stream", "messages", "audio", "images", "references", "items", "modalities", "x"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(fields | st.text(), inner),
)


@given(st.dictionaries(fields, values))
def test_the_fast_and_the_slow_parser_agree(body):
    text = json.dumps(body)
    for path in (CHAT, SPEECH):
        fast = look(path, text.encode("utf-8"))
        slow = look(path, text.encode("utf-16"))  # only Python's parser accepts it
        assert (fast.model, fast.stream, fast.mask) == (slow.model, slow.stream, slow.mask)


def test_a_body_without_a_json_content_type_is_not_read():
    need = look(CHAT, b"{", content_type=b"text/plain", model="m", stream="true")
    assert (need.model, need.stream) == ("m", True)
    assert need.capabilities == ["chat", "streaming"]
    assert look(CHAT, {"model": "m"}, content_type=b"Application/Problem+JSON").model == "m"
    assert look(SPEECH, {"model": "m"}, content_type=b"text/plain").model == "m"
    assert refused(SPEECH, b"{", content_type=b"") == "invalid JSON body"


def test_an_empty_body_takes_its_requirements_from_hints():
    need = look(CHAT, b"", model="m", capabilities="image_input, streaming")
    assert need.model == "m"
    assert need.capabilities == ["chat", "image_input", "streaming"]


@pytest.mark.parametrize(
    ("body", "hints", "message"),
    [
        ({}, {"model": " "}, "model must not be empty"),
        ({}, {"stream": "yes"}, "stream must be true or false"),
        ({}, {"capabilities": "fly"}, "capabilities contains unsupported capability 'fly'"),
        ({}, {"capabilities": " , "}, "capabilities must not be empty"),
        ({"model": "a"}, {"model": "b"}, "model conflicts with JSON body model"),
        ({"stream": True}, {"stream": "false"}, "stream conflicts with JSON body stream"),
        ({}, {"stream": "true"}, "stream conflicts with JSON body stream"),
        ({}, {"capabilities": "streaming"}, "capabilities conflicts with JSON body"),
    ],
)
def test_a_bad_or_contradicting_hint_is_refused(body, hints, message):
    assert refused(CHAT, body, **hints) == f"x-sglang-omni-route-{message}"


def test_a_hint_that_agrees_with_the_body_is_taken():
    need = look(
        CHAT, {"model": "m", "stream": True}, model="m", stream="TRUE", capabilities="streaming"
    )
    assert need.capabilities == ["chat", "streaming"]
    assert look(CHAT, {}, model="m").model == "m"


@pytest.mark.parametrize("value", ["true", "1", "yes", "on", " TRUE "])
def test_a_form_may_request_a_stream(value):
    need = look(FORM, form(model="w", stream=value), content_type=MULTIPART)
    assert (need.model, need.stream) == ("w", True)
    assert need.capabilities == ["audio_input", "streaming"]


def test_a_form_without_a_true_stream_field_is_no_stream():
    for body in (form(stream="false"), form(stream="2"), form(), b"rubbish"):
        need = look(FORM, body, content_type=MULTIPART)
        assert (need.model, need.stream, need.capabilities) == (None, False, ["audio_input"])


def test_hints_that_contradict_a_form_are_refused():
    for fields, hints, message in (
        ({"model": "a"}, {"model": "b"}, "model conflicts with the multipart form model"),
        ({"stream": "1"}, {"stream": "false"}, "stream conflicts with the multipart form stream"),
    ):
        body = form(**fields)
        assert refused(FORM, body, content_type=MULTIPART, **hints).endswith(message)


def test_hints_provide_what_an_unreadable_form_lacks():
    need = look(FORM, b"rubbish", content_type=MULTIPART, model="w", stream="true")
    assert (need.model, need.stream) == ("w", True)
    assert need.capabilities == ["audio_input", "streaming"]


@pytest.mark.parametrize(
    ("body", "model"),
    [
        ({"model": "a", "items": [{}, {}]}, "a"),
        ({"items": [{"model": "a"}, {"model": "a"}]}, "a"),
        ({"model": "a", "items": [{"model": "b"}, {"model": "b"}]}, "b"),
        ({"model": "a", "items": [{"model": "a"}, {"model": ""}]}, "a"),
        ({"model": "a"}, "a"),
        ({"model": "a", "items": ["odd"]}, "a"),
    ],
)
def test_a_batch_has_the_common_model_of_its_items(body, model):
    assert look(BATCH, body).model == model


def test_a_batch_of_two_models_or_with_a_stream_is_refused():
    assert "must resolve to one model" in refused(
        BATCH, {"model": "a", "items": [{"model": "b"}, {}]}
    )
    assert "stream is not supported" in refused(BATCH, {"stream": True})


def test_an_outcome_request_is_pinned_to_the_named_worker():
    need = look("/v1/audio/speech/r1", method="GET", worker="http://a:1")
    assert (need.pinning, need.named_worker) == (Pinning.NAMED, "http://a:1")
    assert "route-worker is required" in refused("/v1/audio/speech/r1", method="GET")


def test_voice_requests_are_pinned_to_the_owner_of_the_voices():
    assert look(VOICES, method="GET").pinning is Pinning.VOICE_OWNER


def test_requests_require_only_known_capabilities():
    body = {"stream": True, "audio": 1, "images": [1], "videos": [1], "audios": [1]}
    assert set(look(CHAT, body).capabilities) <= set(CAPABILITIES)


def test_a_long_model_name_is_cut():
    need = look(CHAT, {"model": "x" * 1_000_000})
    assert need.model == "x" * MAX_MODEL_CHARS

import json

import pytest

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.dataplane.upstream.fleet_requirements import check_large_body
from omni_proxy.routing.inspect.large_json import LARGE_BYTES, PREFIX_BYTES
from omni_proxy.routing.inspect.prefix_text import prefix_text
from omni_proxy.routing.inspect.requirements import RequestFacts, inspect_request
from omni_proxy.routing.routes import match_route
from omni_proxy.wire.errors import HttpError
from tests.fleet.entries import entry, fleet_of

CHAT, SPEECH, BATCH = "/v1/chat/completions", "/v1/audio/speech", "/v1/audio/speech/batch"
ALL = frozenset(CAPABILITIES)
PAD = "x" * LARGE_BYTES


def look(body, path=CHAT, **hints):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    raw_hints = {name.encode(): value.encode() for name, value in hints.items()}
    return inspect_request(
        match_route("POST", path), raw, RequestFacts(b"application/json", raw_hints)
    )


def large(path=CHAT, **fields):
    return {**fields, "messages": [{"role": "user", "content": PAD}]}


def fleet(*rows):
    return fleet_of(
        *(
            entry(f"w{n}", model=model, capabilities=frozenset(names))
            for n, (model, names) in enumerate(rows)
        )
    )


def refused(fleet, need):
    with pytest.raises(HttpError) as error:
        check_large_body(fleet, need)
    assert error.value.status == 400
    return error.value.message


def test_the_top_level_of_a_large_body_is_read_and_its_parts_are_not():
    image = {"type": "image_url", "image_url": {"url": PAD}}
    body = {
        "messages": [{"content": [image]}],
        "model": "m",
        "stream": True,
        "request_id": "r",
    }
    need = look(body)
    assert (need.model, need.stream, need.request_id) == ("m", True, "r")
    assert need.capabilities == ["chat", "streaming"]
    assert need.large_body_class


def test_a_body_of_exactly_the_limit_is_read_whole():
    frame = json.dumps({"images": [""], "messages": []})
    body = frame.replace('""', '"' + "i" * (LARGE_BYTES - len(frame)) + '"').encode()
    assert len(body) == LARGE_BYTES
    assert look(body).capabilities == ["chat", "image_input"]
    assert look(body + b" ").capabilities == ["chat"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": "' + PAD.encode(),
        b"[" + b"1," * LARGE_BYTES + b"1]",
        b'{"a": ' + b"[" * LARGE_BYTES,
        b'{"a": NaN, "b": "' + PAD.encode() + b'"}',
        b'{"b": "' + PAD.encode() + b'\xff"} x',
    ],
)
def test_a_large_body_that_is_not_an_object_is_refused(body):
    with pytest.raises(HttpError, match="invalid JSON body"):
        look(body)


def test_the_prefix_of_a_large_body_is_its_raw_text_and_bounded():
    first, second = (look(large(model=name)) for name in "ab")
    text = prefix_text(first.body_fields)
    assert text == prefix_text(second.body_fields)
    assert PREFIX_BYTES <= len(text) <= PREFIX_BYTES + 8
    assert prefix_text(look({"prompt": PAD + "1"}).body_fields) != text


def test_large_json_needs_a_model_if_workers_serve_several():
    mixed = fleet(("m", ALL), ("n", ALL))
    message = refused(mixed, look(large()))
    assert (
        message
        == "large JSON requests across mixed-model workers require x-sglang-omni-route-model"
    )
    for need in (look(large(model="m")), look(large(), model="m")):
        check_large_body(mixed, need)
        assert need.model == "m"
    need = look(large())
    check_large_body(fleet(("m", ALL), ("m", ALL)), need)
    assert need.model is None


def test_a_large_batch_needs_the_hint_even_if_it_names_a_model():
    mixed = fleet(("m", ALL), ("n", ALL))
    body = {"model": "m", "items": [{"input": PAD}]}
    assert refused(mixed, look(body, BATCH)).startswith("large speech batch requests")
    need = look(body, BATCH, model="m")
    check_large_body(mixed, need)
    assert need.model == "m"


def test_the_largest_capability_set_is_required_if_it_includes_all_others():
    narrow = ("chat", "streaming")
    need = look(large())
    check_large_body(fleet(("m", narrow), ("m", (*narrow, "image_input"))), need)
    assert need.capabilities == ["chat", "image_input", "streaming"]
    same = look(large())
    check_large_body(fleet(("m", narrow), ("m", narrow)), same)
    assert same.capabilities == ["chat"]


def test_capability_sets_that_none_includes_require_the_hint():
    mixed = fleet(("m", ("chat", "image_input")), ("m", ("chat", "audio_input")))
    assert "x-sglang-omni-route-capabilities" in refused(mixed, look(large()))
    need = look(large(), capabilities="image_input")
    check_large_body(mixed, need)
    assert need.capabilities == ["chat", "image_input"]


def test_a_hint_may_add_to_a_large_body_but_not_contradict_it():
    assert look(large(), capabilities="image_input").mask
    with pytest.raises(HttpError, match="conflicts with JSON body model"):
        look(large(model="m"), model="n")
    with pytest.raises(HttpError, match="conflicts with JSON body stream"):
        look(large(), stream="true")


def test_a_large_speech_request_may_contain_reference_audio():
    assert "audio_input" in look({"input": "hi", "ref_audio": PAD}, SPEECH).capabilities


def test_without_a_routable_worker_a_large_body_is_not_refused():
    need = look(large())
    check_large_body(fleet(), need)
    assert need.capabilities == ["chat"]


@pytest.mark.parametrize(
    ("member", "names"),
    [
        (b'"lora_path": "z"', {"z"}),
        (b'"lora_path": ["a", null, "z"]', {"a", "z"}),
        (b'"lor\\u0061_path": "z"', {"z"}),
        (b'"lora_path": "a", "lora_path": "z"', {"z"}),
        (b'"lora_path": null', set()),
        (b'"text": "lora_path"', set()),
    ],
)
def test_all_adapters_of_a_large_body_are_read(member, names):
    body = b'{"model": "m", %b, "more": "%b"}' % (member, b"x" * LARGE_BYTES)
    assert look(body).adapters_in_large_body == names

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.dataplane.upstream.fleet_requirements import requirements_of_beginning
from omni_proxy.routing.inspect.requirements import (
    RequestFacts,
    inspect_request,
)
from omni_proxy.routing.routes import match_route
from omni_proxy.wire.errors import HttpError
from tests.fleet.entries import entry, fleet_of

CHAT, SPEECH, TRANSCRIPTIONS, VOICES = (
    "/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/voices",
)  # fmt: skip
AUDIO = frozenset(("audio_input", "chat"))
STREAMS = AUDIO | {"streaming"}
NAMED = fleet_of(entry("a", model="m", capabilities=STREAMS))
NAMELESS = fleet_of(entry("a", capabilities=STREAMS))
MIXED = fleet_of(entry("a", capabilities=STREAMS), entry("b", capabilities=AUDIO))
FILE = ("file", "x" * 50)


def form(*fields, end=True):
    parts = []
    for name, value in fields:
        file = '; filename="a"' if name == "file" else ""
        parts.append(f'--x\r\ncontent-disposition: form-data; name="{name}"{file}\r\n\r\n{value}')
    return ("\r\n".join(parts) + ("\r\n--x--\r\n" if end else "")).encode()


def facts(kind, **hints):
    return RequestFacts(kind, {name.encode(): value.encode() for name, value in hints.items()})


def of_form(*fields, fleet=NAMED, **hints):
    form_facts = facts(b"multipart/form-data; boundary=x", **hints)
    return requirements_of_beginning(
        fleet, match_route("POST", TRANSCRIPTIONS), form(*fields, end=False), form_facts
    )


def of_json(path=CHAT, **hints):
    return requirements_of_beginning(
        NAMED, match_route("POST", path), b'{"model": "other', facts(b"a/json", **hints)
    )


def test_streamed_json_is_routed_by_hints_only():
    need = of_json(model="m", capabilities="chat,image_input", stream="true")
    assert (need.model, need.stream) == ("m", True)
    assert need.capabilities == ["chat", "image_input", "streaming"]
    assert of_json(model="m") is None
    assert of_json(capabilities="chat") is None
    assert of_json() is None


def test_streamed_speech_requires_audio_input():
    need = of_json(SPEECH, model="m", capabilities="speech")
    assert need.capabilities == ["audio_input", "speech"]


def test_an_invalid_hint_is_refused_before_the_body_streams():
    with pytest.raises(HttpError) as caught:
        of_json(model="m", capabilities="fly")
    assert caught.value.status == 400


def test_a_body_that_is_not_inspected_is_routed_at_once():
    need = requirements_of_beginning(
        NAMED, match_route("POST", VOICES), b"", facts(b"multipart/form-data; boundary=x")
    )
    assert need.capabilities == ["speech"]


def test_a_form_is_routable_once_its_model_is_read():
    assert of_form(("model", "m"), FILE).model == "m"
    assert of_form(FILE) is None
    assert of_form(("model", "m")) is None  # the field has no end yet: more could follow
    assert of_form(FILE, model="m").model == "m"
    assert of_form(FILE, fleet=NAMELESS).model is None


def test_the_stream_field_is_awaited_if_not_all_workers_can_stream():
    assert of_form(FILE, fleet=MIXED) is None
    assert of_form(("stream", "true"), FILE, fleet=MIXED).stream
    assert not of_form(("stream", "no"), FILE, fleet=MIXED).stream
    assert of_form(FILE, fleet=MIXED, stream="true").capabilities == ["audio_input", "streaming"]
    assert of_form(("model", "m"), FILE, stream="true").model == "m"


def test_a_hint_that_contradicts_the_model_is_refused():
    for stream in ({}, {"stream": "true"}):
        with pytest.raises(HttpError) as caught:
            of_form(("model", "m"), FILE, model="n", **stream)
        assert "conflicts with the multipart form model" in caught.value.message


FIELDS = st.lists(
    st.sampled_from([("model", "m"), ("model", "n"), ("stream", "true"), ("stream", "0"), FILE]),
    max_size=5,
)


@given(FIELDS, st.integers(0, 400))
def test_early_requirements_equal_those_of_the_whole_form(fields, at):
    form_facts = facts(b"multipart/form-data; boundary=x")
    route, whole = match_route("POST", TRANSCRIPTIONS), form(*fields)
    known = requirements_of_beginning(MIXED, route, whole[:at], form_facts)
    if known is not None:
        final = inspect_request(route, whole, form_facts)
        assert (known.stream, known.mask) == (final.stream, final.mask)
        assert known.model in (None, final.model)
    known = requirements_of_beginning(NAMED, route, whole[:at], form_facts)
    if known is not None:
        assert known.model == inspect_request(route, whole, form_facts).model

import json

import pytest

from omni_proxy.fleet.voice_registry import VoiceRegistry
from omni_proxy.routing.inspect.body_fields import decode_body
from omni_proxy.routing.inspect.requirements import (
    AUDIO,
    RequestFacts,
    Requirements,
    inspect_request,
)
from omni_proxy.routing.routes import UNPINNED, VOICE_OWNER, match_route
from omni_proxy.routing.voice_pinning import pin_to_voice_owner, voice_names

OWNER = "http://a:1"


def bound(path, fields, *names):
    registry = VoiceRegistry()
    registry.voices_changed(OWNER)
    registry.set_names(registry.generation, names)
    route = match_route("POST", path)
    need = inspect_request(route, json.dumps(fields).encode(), RequestFacts(b"application/json"))
    pin_to_voice_owner(registry, route.traffic, need)
    return need


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"voice": "Bob"}, ["bob"]),
        ({"speaker": "Bob"}, ["bob"]),
        ({"voice": "a", "speaker": "b"}, ["a"]),
        ({"voice": "DEFAULT"}, []),
        ({"voice": 3}, []),
        ({"voice": [1], "speaker": "b"}, []),
        ({"voice": 0, "speaker": "b"}, ["b"]),
        ({"voice": float("nan"), "speaker": "NaN"}, []),
        ({"speed": float("nan"), "speaker": "NaN"}, ["nan"]),
        ({"voice": ""}, []),
        ({}, []),
        ({"voice": "Bob", "ref_audio": "x"}, []),
        ({"voice": "Bob", "references": [{"data": "x"}]}, []),
        ({"voice": "Bob", "references": [{"text": "x"}]}, ["bob"]),
        ({"voice": "Bob", "items": [{"input": "x"}, {"voice": "Ann"}]}, ["bob", "ann"]),
        ({"voice": "Bob", "items": [{"ref_audio": "x"}]}, []),
        ({"items": [{"input": "x"}, 4, None]}, []),
    ],
)
def test_the_voices_that_a_body_names(fields, names):
    assert list(voice_names(decode_body(json.dumps(fields).encode()))) == names


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/audio/speech/batch"])
def test_an_uploaded_voice_binds_its_request_to_the_owner(path):
    need = bound(path, {"input": "x", "voice": "Bob", "items": [{"input": "x"}]}, "bob")
    assert need.pinning is VOICE_OWNER
    assert need.mask & AUDIO


@pytest.mark.parametrize("fields", [{"voice": "ann"}, {}, {"voice": "default"}])
def test_any_other_voice_request_takes_any_worker(fields):
    assert bound("/v1/audio/speech", {"input": "x", **fields}, "bob").pinning is UNPINNED


def test_a_chat_names_no_voice_that_counts():
    assert bound("/v1/chat/completions", {"voice": "bob"}, "bob").pinning is UNPINNED


def test_a_partly_read_body_takes_the_owner():
    registry = VoiceRegistry()
    need = Requirements(0)
    pin_to_voice_owner(registry, "speech_http", need)
    assert need.pinning is UNPINNED
    registry.voices_changed(OWNER)
    pin_to_voice_owner(registry, "speech_http", need)
    assert need.pinning is VOICE_OWNER


def test_a_session_without_a_voice_takes_any_worker():
    registry = VoiceRegistry()
    registry.voices_changed(OWNER)
    need = Requirements(0)
    pin_to_voice_owner(registry, "tts_websocket", need)
    assert need.pinning is UNPINNED

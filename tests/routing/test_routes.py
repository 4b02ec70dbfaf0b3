import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.parse import parse
from omni_proxy.fleet.worker import capability_mask
from omni_proxy.routing.routes import (
    DEFAULT_PATH,
    MODEL_PATHS,
    BodyKind,
    MethodNotAllowed,
    Pinning,
    configured_routes,
    find_route,
    match_route,
)

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
ROWS = [
    ("POST", "/v1/chat/completions", "generation", ["chat"], Pinning.ANY),
    ("POST", "/v1/completions", "generation", ["chat"], Pinning.ANY),
    ("POST", "/v1/embeddings", "generation", ["chat"], Pinning.ANY),
    ("POST", "/generate", "generation", ["chat"], Pinning.ANY),
    ("POST", "/inference/v1/generate", "generation", ["chat"], Pinning.ANY),
    ("POST", "/v1/messages", "generation", ["chat"], Pinning.ANY),
    ("POST", "/v1/messages/count_tokens", "auxiliary", ["chat"], Pinning.ANY),
    ("POST", "/tokenize", "auxiliary", ["chat"], Pinning.ANY),
    ("POST", "/v1/chat/completions/render", "auxiliary", ["chat"], Pinning.ANY),
    ("POST", "/v1/rerank", "auxiliary", ["chat"], Pinning.ANY),
    ("POST", "/v1/images/generations", "images", ["chat"], Pinning.ANY),
    ("POST", "/v1/responses", "responses", ["chat"], Pinning.RESPONSE_OWNER),
    ("GET", "/v1/responses/resp_1", "responses", ["chat"], Pinning.RESPONSE_OWNER),
    ("DELETE", "/v1/responses/resp_1", "responses", ["chat"], Pinning.RESPONSE_OWNER),
    ("POST", "/v1/responses/resp_1/cancel", "responses", ["chat"], Pinning.RESPONSE_OWNER),
    ("POST", "/v1/responses/render", "auxiliary", ["chat"], Pinning.ANY),
    ("POST", "/v1/audio/speech", "speech_http", ["speech"], Pinning.ANY),
    ("POST", "/v1/audio/speech/batch", "speech_batch", ["speech"], Pinning.ANY),
    ("GET", "/v1/audio/speech/req-1", "speech_outcome", ["speech"], Pinning.NAMED),
    ("GET", "/v1/audio/speech/stream", "tts_websocket", ["speech", "streaming"], Pinning.ANY),
    ("POST", "/v1/audio/transcriptions", "transcription", ["audio_input"], Pinning.ANY),
    ("POST", "/v1/audio/translations", "transcription", ["audio_input"], Pinning.ANY),
    ("GET", "/v1/audio/voices", "voice_control", ["speech"], Pinning.VOICE_OWNER),
    ("POST", "/v1/audio/voices", "voice_control", ["speech"], Pinning.VOICE_OWNER),
    ("DELETE", "/v1/audio/voices/ada", "voice_control", ["speech"], Pinning.VOICE_OWNER),
]


@pytest.mark.parametrize(("method", "path", "traffic", "needs", "pinning"), ROWS)
def test_a_model_route_has_its_class_capabilities_and_pinning(
    method, path, traffic, needs, pinning
):
    route = match_route(method, path)
    assert route is not None
    assert (route.traffic, route.mask, route.pinning) == (traffic, capability_mask(needs), pinning)
    assert route.websocket == (traffic == "tts_websocket")


@pytest.mark.parametrize("path", sorted({row[1] for row in ROWS}))
def test_the_error_for_another_method_lists_the_allowed_ones(path):
    allowed = {row[0] for row in ROWS if row[1] == path}
    for method in METHODS:
        if method in allowed:
            assert match_route(method, path) is not None
        else:
            with pytest.raises(MethodNotAllowed) as caught:
                match_route(method, path)
            assert caught.value.allowed == allowed


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/health",
        "/workers",
        "/v1/models",
        "/v1/chat/completions/",
        "/V1/chat/completions",
        "//v1/chat/completions",
        "/v1/audio/speech/",
        "/v1/audio/speech/a/b",
        "/v1/audio/voices/",
        "/v1/audio/voices/a/b",
        "/generate/x",
        "/v1/responses/",
        "/v1/responses/a/b",
        "/v1/responses/a/b/cancel",
        "/v1/responses//cancel",
        "/tokenize/",
        "/inference/v1",
    ],
)
def test_a_path_outside_the_table_is_not_a_model_route(path):
    for method in METHODS:
        assert match_route(method, path) is None


BELOW = re.compile(r"/v1/audio/(speech|voices)/[^/]+|/v1/responses/[^/]+(/cancel)?")


@given(
    st.text()
    | st.tuples(
        st.sampled_from(["/v1/audio/speech/", "/v1/audio/voices/", "/v1/responses/"]),
        st.text(max_size=4),
        st.sampled_from(["", "/", "/cancel", "/x"]),
    ).map("".join)
)
def test_only_paths_of_the_table_match(path):
    try:
        matched = match_route("GET", path) is not None
    except MethodNotAllowed:
        matched = True
    assert matched == (path in MODEL_PATHS or BELOW.fullmatch(path) is not None)


def test_a_speech_body_is_json_for_any_content_type():
    for path in ("/v1/audio/speech", "/v1/audio/speech/batch"):
        route = match_route("POST", path)
        assert route is not None
        assert route.body_kind is BodyKind.ALWAYS_JSON


CONFIGURED = """
[[routes]]
path = "/skyrl/v1/generate"
capability = "speech"
methods = ["POST", "PUT"]
text = ["token_ids", "input.text"]

[[routes]]
path = "/own"
"""


def test_a_configured_route_matches_exactly_its_path():
    routes = configured_routes(parse(CONFIGURED).routes)
    route = find_route(routes, "PUT", "/skyrl/v1/generate")
    assert (route.traffic, route.mask) == ("configured", capability_mask(["speech"]))
    assert route.text == ("token_ids", "input.text")
    assert find_route(routes, "POST", "/own").mask == capability_mask(["chat"])
    for path in ("/own/", "/own/x", "/Own", "/skyrl/v1", "/"):
        assert find_route(routes, "POST", path) is None
    with pytest.raises(MethodNotAllowed) as caught:
        find_route(routes, "GET", "/skyrl/v1/generate")
    assert caught.value.allowed == {"POST", "PUT"}
    error = caught.value.as_http_error(close=True)
    assert (error.status, error.message) == (405, "this path accepts only POST, PUT")
    assert error.close
    assert ("allow", "POST, PUT") in error.headers
    # A built-in route is found, too, and takes precedence.
    assert find_route(routes, "POST", DEFAULT_PATH) is match_route("POST", DEFAULT_PATH)

import pytest

from omni_proxy.admin_api.responses import MAX_PATH_CHARS, closest_path
from tests.admin_api.api_fixture import build_api


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/healht", "/health"),
        ("/update_weights_from_disc", "/update_weights_from_disk"),
        ("/", ""),
        ("/favicon.ico", ""),
        ("/v1/responses", ""),
        ("/" + "v1/chat/completions" * 4, ""),
    ],
)
def test_the_closest_path_is_suggested_if_it_is_similar(path, suggestion):
    assert closest_path(path) == suggestion


def test_a_long_path_gets_no_suggestion():
    assert closest_path("/v1/chat/completions".ljust(MAX_PATH_CHARS + 1, "s")) == ""


async def test_a_404_suggests_a_similar_path():
    client = build_api().client()
    body = await (await client.post("/v1/chat/completion")).get_json()
    assert body["error"]["message"] == (
        "Not Found: POST /v1/chat/completion; did you mean /v1/chat/completions?"
    )
    assert (body["error"]["code"], body["detail"]) == ("not_found", "Not Found")
    body = await (await client.get("/favicon.ico")).get_json()
    assert body["error"]["message"] == "Not Found: GET /favicon.ico"

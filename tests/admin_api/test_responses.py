import pytest

from omni_proxy.admin_api.responses import MAX_PATH_CHARS, closest_path
from tests.admin_api.api_fixture import build_api


@pytest.mark.parametrize(
    ("asked", "meant"),
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
def test_what_was_meant_is_suggested_and_nothing_else(asked, meant):
    assert closest_path(asked) == meant


def test_a_long_path_is_compared_with_none():
    assert closest_path("/v1/chat/completions".ljust(MAX_PATH_CHARS + 1, "s")) == ""


async def test_a_404_names_the_path_that_was_meant():
    client = build_api().client()
    body = await (await client.post("/v1/chat/completion")).get_json()
    assert body["error"]["message"] == (
        "Not Found: POST /v1/chat/completion; did you mean /v1/chat/completions?"
    )
    assert (body["error"]["code"], body["detail"]) == ("not_found", "Not Found")
    body = await (await client.get("/favicon.ico")).get_json()
    assert body["error"]["message"] == "Not Found: GET /favicon.ico"

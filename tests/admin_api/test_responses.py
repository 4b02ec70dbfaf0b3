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


async def test_the_404_of_a_similar_path_names_the_path_as_sent():
    body = await (await build_api().client().post("//v1/chat/completions")).get_json()
    assert body["error"]["message"] == (
        "Not Found: POST //v1/chat/completions; did you mean /v1/chat/completions?"
    )


async def test_an_unknown_path_gets_a_json_404_with_detail(api):
    response = await api.client().get("/nowhere")
    body = await response.get_json()
    assert (response.status_code, body["detail"]) == (404, "Not Found")
    assert set(body["error"]) == {"message", "type", "code"}


async def test_a_wrong_method_gets_a_json_405_with_the_allowed_methods(api):
    response = await api.client().delete("/live")
    body = await response.get_json()
    assert (response.status_code, body["detail"]) == (405, "Method Not Allowed")
    assert "GET" in response.headers["Allow"]
    assert "error" in body


async def test_an_internal_error_gets_a_json_500(api, monkeypatch):
    def broken() -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(api.data_plane, "admission", broken)
    response = await api.client().get("/health")
    body = await response.get_json()
    assert response.status_code == 500
    assert body["error"]["code"] == "internal_server_error"
    assert "secret" not in str(body)

import httpx
import pytest

from omni_proxy.replica import create_app
from tests.replica.api.api_fixture import MESSAGES, listening

ORIGIN = {"origin": "https://page.example"}
CHAT = "/v1/chat/completions"


async def test_an_unknown_path_gets_fastapis_404_body(api):
    response = await api.get("/nowhere")
    assert (response.status_code, await response.get_data()) == (404, b'{"detail":"Not Found"}')


async def test_a_wrong_method_is_a_405_with_an_allow_header(api):
    response = await api.get(CHAT)
    assert response.status_code == 405
    assert await response.get_data() == b'{"detail":"Method Not Allowed"}'
    assert response.headers["allow"] == "POST"


async def test_an_unexpected_error_is_a_plain_text_500(api, caplog):
    async def broken():
        raise ZeroDivisionError

    api.app.view_functions["health"] = broken
    response = await api.get("/health", headers=ORIGIN)
    assert response.status_code == 500
    assert await response.get_data() == b"Internal Server Error"
    assert response.headers["content-type"].startswith("text/plain")
    assert "vary" not in response.headers
    assert "ZeroDivisionError" in caplog.text


async def test_no_log_line_of_a_request_has_its_query(api, caplog):
    async def broken():
        raise ZeroDivisionError

    api.app.view_functions["health"] = broken
    with caplog.at_level("DEBUG"):
        for path in ("/health", "/nowhere", CHAT):
            await api.get(f"{path}?api_key=secret-key")
    assert "Exception on request GET /health" in caplog.text
    assert "secret-key" not in caplog.text


async def test_every_other_response_varies_by_origin_and_allows_the_pages_origin(api):
    for path in ("/health", "/nowhere", CHAT):
        plain = await api.get(path)
        assert plain.headers["vary"] == "Origin"
        assert "access-control-allow-origin" not in plain.headers
        response = await api.get(path, headers=ORIGIN)
        assert response.headers["access-control-allow-origin"] == ORIGIN["origin"]
        assert response.headers["access-control-allow-credentials"] == "true"


async def test_a_preflight_allows_any_origin_method_and_header(api):
    headers = ORIGIN | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "x-one, x-two",
    }
    response = await api.call("OPTIONS", CHAT, headers=headers)
    assert (response.status_code, await response.get_data()) == (200, b"OK")
    assert response.headers["access-control-allow-origin"] == ORIGIN["origin"]
    assert response.headers["access-control-allow-headers"] == "x-one, x-two"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-max-age"] == "600"
    assert response.headers["vary"] == "Origin"


async def test_options_without_preflight_headers_is_a_405(api):
    assert (await api.call("OPTIONS", CHAT)).status_code == 405


async def test_a_body_over_the_limit_is_a_413(api):
    small = api.with_options(max_body_bytes=100)
    body = {"messages": MESSAGES, "user": "x" * 200}
    response = await small.post(CHAT, body)
    assert (response.status_code, await response.get_json()) == (
        413, {"detail": "Request body too large"}
    )  # fmt: skip


async def test_any_content_type_is_read_as_json(api):
    for content_type in ("text/plain", "application/x-www-form-urlencoded"):
        body = b'{"messages": [{"role": "user", "content": "hi"}]}'
        response = await api.post(CHAT, body, headers={"content-type": content_type})
        assert response.status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/v1/audio/speech", "/v1/audio/speech/batch", "/v1/audio/transcriptions", "/v1/audio/voices"],
)
async def test_the_audio_routes_are_mounted(api, path):
    assert (await api.post(path)).status_code not in (404, 405, 500)


async def test_creating_an_app_needs_no_running_pipeline():
    assert create_app(object(), model_name="m").name == "sglang-omni"


async def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="modelname"):
        create_app(object(), modelname="m")


async def test_several_requests_share_a_connection(api):
    async with listening(api.app) as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False) as client:
            for stream in (False, True, False, True):
                body = {"messages": MESSAGES, "stream": stream}
                assert (await client.post(CHAT, json=body)).status_code == 200

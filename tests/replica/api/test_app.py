import httpx
import pytest

from omni_proxy.replica import create_app
from tests.replica.api.api_fixture import MESSAGES, listening

ORIGIN = {"origin": "https://page.example"}
CHAT = "/v1/chat/completions"


async def test_an_unknown_path_is_a_404_like_fastapis(world):
    answer = await world.get("/nowhere")
    assert (answer.status_code, await answer.get_data()) == (404, b'{"detail":"Not Found"}')


async def test_a_wrong_method_is_a_405_that_names_the_right_ones(world):
    answer = await world.get(CHAT)
    assert answer.status_code == 405
    assert await answer.get_data() == b'{"detail":"Method Not Allowed"}'
    assert answer.headers["allow"] == "POST"


async def test_an_unexpected_error_is_a_plain_text_500(world, caplog):
    async def broken():
        raise ZeroDivisionError

    world.app.view_functions["health"] = broken
    answer = await world.get("/health", headers=ORIGIN)
    assert answer.status_code == 500
    assert await answer.get_data() == b"Internal Server Error"
    assert answer.headers["content-type"].startswith("text/plain")
    assert "vary" not in answer.headers
    assert "ZeroDivisionError" in caplog.text


async def test_no_log_line_of_a_request_has_its_query(world, caplog):
    async def broken():
        raise ZeroDivisionError

    world.app.view_functions["health"] = broken
    with caplog.at_level("DEBUG"):
        for path in ("/health", "/nowhere", CHAT):
            await world.get(f"{path}?api_key=of-somebody")
    assert "Exception on request GET /health" in caplog.text
    assert "of-somebody" not in caplog.text


async def test_every_other_answer_varies_by_origin_and_allows_it(world):
    for path in ("/health", "/nowhere", CHAT):
        plain = await world.get(path)
        assert plain.headers["vary"] == "Origin"
        assert "access-control-allow-origin" not in plain.headers
        answer = await world.get(path, headers=ORIGIN)
        assert answer.headers["access-control-allow-origin"] == ORIGIN["origin"]
        assert answer.headers["access-control-allow-credentials"] == "true"


async def test_a_preflight_is_answered_for_any_page_method_and_header(world):
    asked = ORIGIN | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "x-one, x-two",
    }
    answer = await world.call("OPTIONS", CHAT, headers=asked)
    assert (answer.status_code, await answer.get_data()) == (200, b"OK")
    assert answer.headers["access-control-allow-origin"] == ORIGIN["origin"]
    assert answer.headers["access-control-allow-headers"] == "x-one, x-two"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-max-age"] == "600"
    assert answer.headers["vary"] == "Origin"


async def test_options_without_a_preflights_headers_is_a_405(world):
    assert (await world.call("OPTIONS", CHAT)).status_code == 405


async def test_a_body_beyond_the_bound_is_a_413(world):
    small = world.with_options(max_body_bytes=100)
    body = {"messages": MESSAGES, "user": "x" * 200}
    answer = await small.post(CHAT, body)
    assert (answer.status_code, await answer.get_json()) == (
        413, {"detail": "Request body too large"}
    )  # fmt: skip


async def test_any_content_type_is_read_as_json(world):
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        body = b'{"messages": [{"role": "user", "content": "hi"}]}'
        answer = await world.post(CHAT, body, headers={"content-type": kind})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/v1/audio/speech", "/v1/audio/speech/batch", "/v1/audio/transcriptions", "/v1/audio/voices"],
)
async def test_the_audio_routes_are_mounted(world, path):
    assert (await world.post(path)).status_code not in (404, 405, 500)


async def test_making_an_app_needs_no_running_pipeline():
    assert create_app(object(), model_name="m").name == "sglang-omni"


async def test_options_that_do_not_exist_are_refused():
    with pytest.raises(TypeError, match="modelname"):
        create_app(object(), modelname="m")


async def test_several_requests_share_a_connection(world):
    async with listening(world.app) as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False) as client:
            for stream in (False, True, False, True):
                body = {"messages": MESSAGES, "stream": stream}
                assert (await client.post(CHAT, json=body)).status_code == 200

import json

import pytest
import trio

from omni_proxy.config.fields import CAPABILITIES
from tests.promises.support.clients import CHAT, STREAMED, client_of, post
from tests.promises.support.dataplane_fixture import run_dataplane
from tests.promises.support.fakes import answering, counted, fake_workers
from tests.promises.support.fleet_program import program, put, toml

FORM = (
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n'
    b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
)
FORM_TYPE = "content-type: multipart/form-data; boundary=b"
GET = b"GET %b HTTP/1.1\r\nhost: proxy\r\n\r\n"
REQUESTS = {
    "chat": (post(CHAT), {"chat"}),
    "chat stream": (post(STREAMED), {"chat", "streaming"}),
    "completions": (post(b'{"prompt": "a"}', path="/v1/completions"), {"chat"}),
    "embeddings": (post(b'{"input": "a"}', path="/v1/embeddings"), {"chat"}),
    "generate": (post(b'{"text": "a"}', path="/generate"), {"chat"}),
    "image part": (
        post(b'{"messages": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}'),
        {"chat", "image_input"},
    ),
    "audio part": (
        post(b'{"messages": [{"content": [{"type": "input_audio", "input_audio": {}}]}]}'),
        {"chat", "audio_input"},
    ),
    "video part": (
        post(b'{"messages": [{"content": [{"type": "video_url", "video_url": {"url": "x"}}]}]}'),
        {"chat", "video_input"},
    ),
    "audio out": (
        post(b'{"messages": [], "modalities": ["text", "audio"]}'),
        {"chat", "audio_output"},
    ),
    "speech": (post(b'{"input": "a"}', path="/v1/audio/speech"), {"speech"}),
    "speech batch": (post(b'{"items": []}', path="/v1/audio/speech/batch"), {"speech"}),
    "transcription": (
        post(FORM, path="/v1/audio/transcriptions", kind=FORM_TYPE), {"audio_input"},
    ),
    "translation": (post(FORM, path="/v1/audio/translations", kind=FORM_TYPE), {"audio_input"}),
    "voices": (GET % b"/v1/audio/voices", {"speech", "audio_input"}),
    "voice upload": (
        post(FORM, path="/v1/audio/voices", kind=FORM_TYPE), {"speech", "audio_input"},
    ),
    "voice deletion": (
        post(b"", path="/v1/audio/voices/bob", method="DELETE"), {"speech", "audio_input"},
    ),
}  # fmt: skip


def entry(url, capabilities, more=""):
    return (
        f'[[workers]]\nurl = "{url}"\ncapabilities = {json.dumps(sorted(capabilities))}\n{more}\n'
    )


@pytest.fixture
async def pair():
    async with fake_workers(*[answering(counted(b"{}"))] * 2) as fleet:
        yield fleet


@pytest.mark.parametrize("name", REQUESTS)
async def test_each_route_reaches_a_worker_with_its_capabilities(name, pair):
    request, needs = REQUESTS[name]
    able, other = pair
    for lacking in sorted(needs):
        del able.requests[:]
        config = entry(other.url, set(CAPABILITIES) - {lacking}) + entry(able.url, needs)
        async with run_dataplane(config=config) as opened, opened.client() as client:
            for _ in range(2):
                await client.send(request)
                response = await client.answer()
                assert response.status == 200
                assert response.one("x-sglang-omni-worker") == opened.fleet.workers[1].id
        assert len(able.requests) == 2
        assert able.requests[0][0] == request.decode("latin-1").partition("\r\n")[0]
    assert other.requests == []


async def test_a_speech_outcome_is_requested_from_the_named_worker(pair):
    async with run_dataplane(*pair) as opened, opened.client() as client:
        for worker in (*opened.fleet.workers, *opened.fleet.workers):
            header = f"x-sglang-omni-route-worker: {worker.id}"
            await client.send(post(b"", header, path="/v1/audio/speech/r-1", method="GET"))
            response = await client.answer("GET")
            assert response.one("x-sglang-omni-worker") == worker.id
        await client.send(GET % b"/v1/audio/speech/r-1")
        assert (await client.answer("GET")).status == 400
        await client.send(post(b"", header[:-1], path="/v1/audio/speech/r-1", method="GET"))
        assert (await client.answer("GET")).status == 404


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/generate", "POST"),
        ("DELETE", "/v1/audio/voices", "GET, POST"),
        ("POST", "/v1/audio/voices/bob", "DELETE"),
        ("POST", "/v1/audio/speech/r-1", "GET"),
    ],
)
async def test_a_wrong_method_gets_405_with_an_allow_header(pair, method, path, allowed):
    async with run_dataplane(*pair) as opened, opened.client() as client:
        await client.send(f"{method} {path} HTTP/1.1\r\nhost: proxy\r\n\r\n".encode(), post())
        response = await client.answer(method)
        assert (response.status, response.one("allow")) == (405, allowed)
        body = json.loads(response.body)
        assert body["detail"] == "Method Not Allowed"
        assert body["error"]["code"] == "method_not_allowed"
        assert (await client.answer()).status == 200
    assert sum(len(worker.requests) for worker in pair) == 1


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"text"', b"no json", b'{"messages": [],}', b"\xff\xfe\xfd"]
)
async def test_a_body_that_is_not_a_json_object_never_reaches_a_worker(pair, body):
    path = "/v1/audio/speech" if not body else "/v1/chat/completions"
    async with run_dataplane(*pair) as opened, opened.client() as client:
        await client.send(post(body, path=path))
        response = await client.answer()
        if body:
            assert response.status == 400
            assert json.loads(response.body)["error"]["type"] == "invalid_request_error"
    assert not body or not any(worker.requests for worker in pair)


async def error_code(config, request):
    async with run_dataplane(config=config) as opened, opened.client() as client:
        await client.send(request)
        response = await client.answer()
        assert (response.status, response.one("x-sglang-omni-worker")) == (503, None)
        error = json.loads(response.body)["error"]
        assert error["message"].startswith("no eligible upstream: ")
        assert error["type"] == "server_error"
        assert response.one("retry-after") == "1"
        return error["code"]


async def test_without_an_eligible_worker_the_error_has_the_reason(pair):
    url = pair[0].url
    for_m = post(b'{"model": "m", "messages": []}')
    cases = {
        "no_workers": ("", post()),
        "no_capable_worker": (entry(url, {"speech"}), post()),
        "model_not_found": (entry(url, {"chat"}, 'model = "other"'), for_m),
        "all_disabled": (entry(url, {"chat"}, "disabled = true"), post()),
    }
    assert {code: await error_code(*case) for code, case in cases.items()} == {c: c for c in cases}
    assert pair[0].requests == []


async def test_an_unhealthy_fleet_gets_503(pair):
    config = "[health]\nsuccess_threshold = 1\nfailure_threshold = 1\n"
    async with run_dataplane(*pair, config=config) as opened, opened.client() as client:
        for worker in opened.fleet.workers:
            opened.fleet.mark_dead(worker, worker.registered_at)
        await client.send(post())
        response = await client.answer()
        error = json.loads(response.body)["error"]
        assert (response.status, error["code"]) == (503, "none_healthy")
        assert "dead" in error["message"]


async def test_full_workers_and_a_full_fleet_have_distinct_errors():
    received, released = trio.Event(), trio.Event()

    async def script(call):
        received.set()
        await released.wait()
        await call.send(counted(b"{}"))

    async with fake_workers(script) as (worker,):
        for config, code in (
            (entry(worker.url, {"chat"}, "max_inflight = 1"), "all_full"),
            (f"[server]\nmax_inflight = 1\n{entry(worker.url, {'chat'})}", 503),
        ):
            received, released = trio.Event(), trio.Event()
            async with run_dataplane(config=config) as opened, opened.client() as client:
                await client.send(post())
                await received.wait()
                async with opened.client() as other:
                    await other.send(post())
                    response = await other.answer()
                    assert (response.status, response.one("retry-after")) == (503, "1")
                    assert json.loads(response.body)["error"]["code"] == code
                released.set()
                assert (await client.answer()).status == 200
                await client.send(post())
                assert (await client.answer()).status == 200


async def test_without_the_admin_api_control_routes_are_503_and_models_work(pair):
    async with run_dataplane(*pair) as opened, opened.client() as client:
        await client.send(GET % b"/health", post())
        response = await client.answer("GET")
        assert response.status == 503
        error = json.loads(response.body)["error"]
        assert (error["code"], error["reason"]) == ("front_unavailable", "admin_api_unavailable")
        assert (await client.answer()).status == 200


async def test_an_unknown_path_is_a_json_404_and_reaches_no_worker(tmp_path, pair):
    file = tmp_path / "proxy.toml"
    put(file, toml(pair))
    async with program("--config", file) as running:
        await running.until_routable(*pair)
        for method, path in (
            ("GET", "/"), ("GET", "/nope"), ("POST", "/v1/nope"), ("POST", "/v1/chat"),
            ("POST", "/v1/chat/completions/"), ("POST", "//v1/chat/completions"),
            ("POST", "/v1/chat/completions/../completions"), ("GET", "/v1/audio/voices/a/b"),
            ("OPTIONS", "*"), ("GET", "/%00"), ("GET", "/%c3%28"), ("POST", "/V1/chat/completions"),
        ):  # fmt: skip
            async with client_of(running.client.base_url.netloc.decode()) as client:
                await client.send(post(CHAT, path=path, method=method))
                response = await client.answer(method)
                assert response.status in (404, 405), path
                assert response.one("content-type") == "application/json", path
                body = json.loads(response.body)
                assert body["detail"] == ("Not Found" if response.status == 404 else body["detail"])
                assert body["error"]["code"] in ("not_found", "method_not_allowed")
        rejected = await running.client.delete("/health")
        assert rejected.status_code == 405
        assert "GET" in rejected.headers["allow"]
        assert (await running.client.head("/live")).content == b""
        assert (await running.ask()).status_code == 200
    # Without the proxy's own requests to a worker that has become healthy.
    from_proxy = {"GET /model_info HTTP/1.1", "GET /server_info?config_format=json HTTP/1.1"}
    forwarded = [line for worker in pair for line, _ in worker.requests if line not in from_proxy]
    assert forwarded == ["POST /v1/chat/completions HTTP/1.1"]

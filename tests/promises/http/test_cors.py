"""CORS of model routes: preflights, response headers and allowed origins."""

from contextlib import suppress

import pytest
import trio

from tests.promises.support.fleet_program import chat, program, put, toml, workers

pytestmark = pytest.mark.usefixtures("soon")
PAGE = {"origin": "https://app.example"}
PREFLIGHT = PAGE | {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
ALLOW = "access-control-allow-origin"
MODELS = "/v1/chat/completions"


async def test_cors_headers_follow_the_allowed_origins(tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("w") as fleet:
        put(file, toml(fleet))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            preflight = await running.client.options(MODELS, headers=PREFLIGHT)
            assert (preflight.status_code, preflight.headers[ALLOW]) == (200, "*")
            assert preflight.headers["access-control-allow-methods"] == "POST"
            assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
            for _ in range(3):
                answer = await running.client.post(MODELS, json=chat(), headers=PAGE)
                assert answer.status_code == 200
                assert answer.headers.get_list(ALLOW) == ["*"]
                exposed = answer.headers["access-control-expose-headers"].split(", ")
                assert "x-sglang-omni-request-id" in exposed
            streamed = await running.client.post(MODELS, json=chat(stream=True), headers=PAGE)
            assert streamed.headers[ALLOW] == "*"
            refused = await running.client.post(MODELS, json=chat(model="x"), headers=PAGE)
            assert refused.headers[ALLOW] == "*"
            plain = await running.client.post(MODELS, json=chat())
            assert not [name for name in plain.headers if name.startswith("access-control")]
            assert (await running.client.options(MODELS)).status_code == 405

            put(file, toml(fleet, more="cors_allow_origins = ['https://other.example']\n"))
            await running.until_logged("revision=2")
            preflight = await running.client.options(MODELS, headers=PREFLIGHT)
            assert (preflight.status_code, ALLOW in preflight.headers) == (403, False)
            answer = await running.client.post(MODELS, json=chat(), headers=PAGE)
            assert (answer.status_code, ALLOW in answer.headers) == (200, False)
            upgrade = {"connection": "upgrade", "upgrade": "websocket", **PAGE}
            answer = await running.client.get("/v1/audio/speech/stream", headers=upgrade)
            assert answer.json()["error"]["code"] == "origin_not_allowed"

            put(file, toml(fleet, more="cors_allow_origins = []\n"))
            await running.until_logged("revision=3")
            preflight = await running.client.options(MODELS, headers=PREFLIGHT)
            assert (preflight.status_code, ALLOW in preflight.headers) == (405, False)


async def test_cors_headers_of_a_worker_are_replaced(tmp_path):
    head = (
        b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: https://app.example\r\n"
        b"access-control-allow-credentials: true\r\nvary: Origin\r\ncontent-length: 2\r\n\r\n{}"
    )

    async def serve(stream):
        async with stream:
            with suppress(trio.BrokenResourceError):  # a probe that was cut off
                while await stream.receive_some():
                    await stream.send_all(head)

    file = tmp_path / "proxy.toml"
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        put(file, toml([]) + f'[[workers]]\nurl = "{url}"\n')
        async with program("--config", file) as running:
            await running.until("/ready", lambda body: body.get("status") == "ready")
            answer = await running.client.post(MODELS, json=chat(), headers=PAGE)
            assert answer.headers.get_list(ALLOW) == ["*"]
            assert "access-control-allow-credentials" not in answer.headers
        nursery.cancel_scope.cancel()

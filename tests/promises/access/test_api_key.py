"""[server] api_key: every model request needs it, on the fast path too."""

import json

import httpx
import pytest

from tests.promises.support.fleet_program import chat, program, toml, workers

pytestmark = pytest.mark.usefixtures("soon")
KEY = "k3y"
CHAT = "/v1/chat/completions"
ACCEPTED = (
    {"Authorization": f"Bearer {KEY}"},
    {"authorization": f"bearer  {KEY}"},
    {"x-api-key": KEY},
    {"X-Api-Key": KEY, "Authorization": "Basic eA=="},
)
REJECTED = (
    {},
    {"Authorization": "Bearer other"},
    {"Authorization": KEY},
    {"Authorization": f"Basic {KEY}"},
    {"Authorization": "Bearer"},
    {"x-api-key": "other"},
    {"Authorization": "Bearer other", "x-api-key": KEY},
)


async def test_only_requests_with_the_key_reach_a_worker():
    async with workers("w") as (worker,):
        arguments = ("--api-key", KEY, "--port", "0", "--worker-urls", worker.url)
        async with program(*arguments) as running:
            await running.until_routable(worker)
            for headers in ACCEPTED * 2:  # the second time, the head is cached
                answer = await running.client.post(CHAT, json=chat(), headers=headers)
                assert answer.status_code == 200, headers
            served = worker.requests
            for headers in REJECTED * 2:
                answer = await running.client.post(CHAT, json=chat(), headers=headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert answer.json()["error"]["code"] == "invalid_api_key"
            streamed = await running.client.post(CHAT, json=chat(stream=True), headers=REJECTED[1])
            assert streamed.status_code == 401
            assert worker.requests == served
            key = {"Authorization": f"Bearer {KEY}"}
            metrics = (await running.client.get("/metrics", headers=key)).text
            refused = 'end="refused",model="",route="/v1/chat/completions",status="4xx"'
            assert refused in metrics
            wrong = 'omni_proxy_key_refused_total{key="",reason="invalid_api_key"}'
            assert f"{wrong} {2 * len(REJECTED) + 1}.0\n" in metrics
            await running.until_logged("WARNING .*wrong_api_key requests=")
            # Without an admin key, control routes require this one; /health stays open.
            body = {"url": "http://127.0.0.1:1"}
            assert (await running.client.post("/workers", json=body)).status_code == 401
            added = await running.client.post("/workers", json=body, headers=ACCEPTED[0])
            assert added.status_code == 200
            assert (await running.client.get("/health")).status_code == 200
            text = (await running.client.get("/config", headers=ACCEPTED[0])).text
            assert KEY not in text
            assert json.loads(text)["config"]["server"]["api_key"] == "***"


async def test_a_large_body_without_the_key_is_refused():
    async with workers("w") as (worker,):
        arguments = ("--api-key", KEY, "--port", "0", "--worker-urls", worker.url)
        async with program(*arguments) as running:
            body = b'{"messages": [], "x": "' + b"x" * 30_000_000 + b'"}'
            answer = await running.client.post(CHAT, content=body)
            assert answer.status_code == 401


async def test_a_reload_changes_the_key_for_open_connections(tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("w") as fleet:
        file.write_text(toml(fleet))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            base = str(running.client.base_url)
            async with httpx.AsyncClient(base_url=base, trust_env=False, verify=False) as client:
                for _ in range(3):
                    assert (await client.post(CHAT, json=chat())).status_code == 200
                file.write_text(toml(fleet, more=f"api_key = '{KEY}'"))
                await running.client.post("/reload")
                assert (await client.post(CHAT, json=chat())).status_code == 401
                answer = await client.post(CHAT, json=chat(), headers=ACCEPTED[0])
                assert answer.status_code == 200
                file.write_text(toml(fleet))
                await running.client.post("/reload", headers=ACCEPTED[0])
                assert (await client.post(CHAT, json=chat())).status_code == 200


async def test_control_routes_require_the_admin_key_where_there_is_one():
    async with workers("w") as (worker,):
        keys = ("--api-key", KEY, "--admin-api-key", "adm1n")
        async with program(*keys, "--port", "0", "--worker-urls", worker.url) as running:
            await running.until_routable(worker)
            client, admin = running.client, {"Authorization": "Bearer adm1n"}
            body = {"url": "http://127.0.0.1:1"}
            assert (
                await client.post("/workers", json=body, headers=ACCEPTED[0])
            ).status_code == 403
            assert (await client.post("/workers", json=body, headers=admin)).status_code == 200
            assert (await client.post(CHAT, json=chat(), headers=admin)).status_code == 401
            assert (await client.post(CHAT, json=chat(), headers=ACCEPTED[0])).status_code == 200


async def test_a_preflight_needs_no_key_and_a_refusal_has_cors_headers():
    async with workers("w") as (worker,):
        arguments = ("--api-key", KEY, "--port", "0", "--worker-urls", worker.url)
        async with program(*arguments) as running:
            origin = {"Origin": "https://app.example"}
            preflight = {**origin, "Access-Control-Request-Method": "POST"}
            answer = await running.client.options(CHAT, headers=preflight)
            assert answer.status_code == 200
            refused = await running.client.post(CHAT, json=chat(), headers=origin)
            assert refused.status_code == 401
            assert refused.headers["access-control-allow-origin"] == "*"

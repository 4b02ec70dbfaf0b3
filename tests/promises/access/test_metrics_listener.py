"""`[admin] metrics_listen` opens a listener that serves GET /metrics and nothing else."""

import httpx
import pytest

from tests.promises.support.fleet_program import chat, program, put, toml, workers

pytestmark = pytest.mark.usefixtures("soon")


async def client_of(running, times=1):
    match = await running.until_logged(
        r"(?s)" + r".*?".join([r"listener_opened url=(http://\S+) purpose=metrics"] * times)
    )
    return httpx.AsyncClient(base_url=match[times], trust_env=False, verify=False)


async def test_the_metrics_listener_needs_no_key_and_serves_nothing_else():
    async with workers("w") as (worker,):
        arguments = ("--prometheus-port", "0", "--admin-api-key", "k", "--port", "0")
        async with program(*arguments, "--worker-urls", worker.url) as running:
            await running.until_routable(worker)
            await running.client.post("/v1/chat/completions", json=chat())
            assert (await running.client.get("/metrics")).status_code == 401
            async with await client_of(running) as client:
                response = await client.get("/metrics", headers={"Host": "prometheus.internal"})
                assert response.status_code == 200
                assert "omni_proxy_requests_total{" in response.text
                for path in ("/workers", "/config", "/health", "/", "/nothing"):
                    response = await client.get(path)
                    assert (response.status_code, response.json()["error"]["code"]) == (
                        404,
                        "metrics_listener",
                    )
                before = worker.requests
                response = await client.post("/v1/chat/completions", json=chat())
                assert response.status_code == 404
                response = await client.post("/reload", headers={"Authorization": "Bearer k"})
                assert response.status_code == 404
                assert (await client.post("/metrics")).status_code == 405
                assert worker.requests == before


async def test_a_reload_adds_and_moves_the_listener_next_to_the_admin_listener(tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("w") as fleet:
        file.write_text(toml(fleet))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            admin = "[admin]\nlisten = '127.0.0.1:0'\nmetrics_listen = '127.0.0.1:0'\n"
            put(file, toml(fleet, more=admin))
            async with await client_of(running) as client:
                assert (await client.get("/metrics")).status_code == 200
                listeners = await running.until_logged(
                    r"listener_opened url=(http://\S+) purpose=admin"
                )
                assert listeners[1] != str(client.base_url)
                address = str(client.base_url).removeprefix("http://").rstrip("/")
            put(file, toml(fleet, more="[admin]\nmetrics_listen = 'unix:" + str(tmp_path / "m'\n")))
            await running.until_logged(r"listener_opened url=unix:\S+ purpose=metrics")
            transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "m"))
            async with httpx.AsyncClient(transport=transport, base_url="http://m") as client:
                assert (await client.get("/metrics")).status_code == 200
            with pytest.raises(httpx.ConnectError):
                async with httpx.AsyncClient(trust_env=False, verify=False) as client:
                    await client.get(f"http://{address}/metrics")


async def test_an_address_in_use_is_reported_with_its_configuration_key(tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("w", "taken") as (worker, taken):
        file.write_text(toml([worker]))
        async with program("--config", file) as running:
            address = taken.url.removeprefix("http://")
            file.write_text(toml([worker], more=f"[admin]\nmetrics_listen = '{address}'\n"))
            response = await running.client.post("/reload")
            assert response.status_code == 422
            (problem,) = response.json()["refused"]["problems"]
            assert problem["path"] == "admin.metrics_listen"

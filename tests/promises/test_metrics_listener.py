"""[admin] metrics_listen: GET /metrics on an address of its own, and nothing else there."""

import httpx
import pytest

from tests.promises.fleet_program import chat, program, put, toml, workers

pytestmark = pytest.mark.usefixtures("soon")


async def client_of(running, times=1):
    found = await running.says(
        r"(?s)" + r".*?".join([r"listening on (http://\S+) for metrics"] * times)
    )
    return httpx.AsyncClient(base_url=found[times], trust_env=False, verify=False)


async def test_it_serves_metrics_without_a_key_and_nothing_else():
    async with workers("w") as (worker,):
        words = ("--prometheus-port", "0", "--admin-api-key", "k", "--port", "0")
        async with program(*words, "--worker-urls", worker.url) as running:
            await running.until_routable(worker)
            await running.client.post("/v1/chat/completions", json=chat())
            assert (await running.client.get("/metrics")).status_code == 401
            async with await client_of(running) as client:
                answer = await client.get("/metrics", headers={"Host": "prometheus.internal"})
                assert answer.status_code == 200
                assert "omni_proxy_requests_total{" in answer.text
                for path in ("/workers", "/config", "/health", "/", "/nothing"):
                    answer = await client.get(path)
                    assert (answer.status_code, answer.json()["error"]["code"]) == (
                        404,
                        "metrics_listener",
                    )
                before = worker.requests
                answer = await client.post("/v1/chat/completions", json=chat())
                assert answer.status_code == 404
                answer = await client.post("/reload", headers={"Authorization": "Bearer k"})
                assert answer.status_code == 404
                assert (await client.post("/metrics")).status_code == 405
                assert worker.requests == before


async def test_it_may_be_added_and_moved_by_a_reload_beside_the_admin_listener(tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("w") as fleet:
        file.write_text(toml(fleet))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            admin = "[admin]\nlisten = '127.0.0.1:0'\nmetrics_listen = '127.0.0.1:0'\n"
            put(file, toml(fleet, more=admin))
            async with await client_of(running) as client:
                assert (await client.get("/metrics")).status_code == 200
                listeners = await running.says(r"listening on (http://\S+) for admin requests")
                assert listeners[1] != str(client.base_url)
                where = str(client.base_url).removeprefix("http://").rstrip("/")
            put(file, toml(fleet, more="[admin]\nmetrics_listen = 'unix:" + str(tmp_path / "m'\n")))
            await running.says(r"listening on unix:\S+ for metrics")
            transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "m"))
            async with httpx.AsyncClient(transport=transport, base_url="http://m") as client:
                assert (await client.get("/metrics")).status_code == 200
            with pytest.raises(httpx.ConnectError):
                async with httpx.AsyncClient(trust_env=False, verify=False) as client:
                    await client.get(f"http://{where}/metrics")


async def test_an_address_that_is_taken_is_named_with_its_key(tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("w", "taken") as (worker, taken):
        file.write_text(toml([worker]))
        async with program("--config", file) as running:
            place = taken.url.removeprefix("http://")
            file.write_text(toml([worker], more=f"[admin]\nmetrics_listen = '{place}'\n"))
            answer = await running.client.post("/reload")
            assert answer.status_code == 422
            (problem,) = answer.json()["refused"]["problems"]
            assert problem["path"] == "admin.metrics_listen"

"""GET /history of the real program, with several processes."""

import httpx

from tests.promises.support.fleet_program import program, put, toml, workers


async def test_every_process_returns_the_same_history(tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("a") as fleet:
        put(file, toml(fleet, more="processes = 2"))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            base = running.client.base_url
            for _ in range(8):  # over new connections, so that either process gets some
                async with httpx.AsyncClient(base_url=base, trust_env=False) as client:
                    response = await client.post("/v1/chat/completions", json={"messages": []})
                    assert response.status_code == 200
            path = "/history?secs=3600&series=requests_per_sec,in_flight"
            counted = await running.until(
                path, lambda body: any(body["series"]["requests_per_sec"])
            )
            histories = []
            for _ in range(6):
                async with httpx.AsyncClient(base_url=base, trust_env=False) as client:
                    histories.append((await client.get(path)).json())
            known = [
                [value is not None for value in body["series"]["in_flight"][:-2]]
                for body in histories
                if body["from"] == counted["from"]
            ]
            assert all(values == known[0] for values in known)
            assert all(any(body["series"]["requests_per_sec"]) for body in histories)

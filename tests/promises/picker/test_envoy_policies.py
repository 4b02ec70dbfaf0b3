"""Subset hints, callers' keys and clusters for requests that Envoy relays."""

from contextlib import AsyncExitStack

import httpx
import trio

from tests.promises.support.envoy_program import (
    OPEN,
    envoy,
    grpc_listens,
    idle,
    needs_envoy,
    picked,
    picker_config,
    ports,
    ports_with_same_picker,
)
from tests.promises.support.fleet_program import chat, program, put, record, toml, workers
from tests.redis_server import needs_store, redis_server

pytestmark = needs_envoy
CHAT = "/v1/chat/completions"
SUBSET = (
    (
        "          http_filters:\n",
        """          http_filters:
          - name: envoy.filters.http.header_to_metadata
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config
              request_rules:
              - header: x-subset
                on_header_present:
                  metadata_namespace: envoy.lb.subset_hint
                  key: x-gateway-destination-endpoint-subset
                  type: STRING
""",
    ),
)
KEYS = """
[[keys]]
name = "rated"
key_env = "RATED_KEY"
requests_per_minute = 1
[[keys]]
name = "other-model"
key_env = "MODEL_KEY"
models = ["n"]
"""
COMPARED = ("content-type", "www-authenticate", "retry-after")


async def test_the_picker_respects_a_subset_hint(tmp_path):
    async with picked(tmp_path, changes=SUBSET) as here:
        for chosen in here.fleet:
            address = chosen.url.removeprefix("http://")
            for _ in range(3):
                headers = {"x-subset": f"10.255.0.1:1, {address}"}
                answer = await here.client.post(CHAT, json=chat(), headers=headers)
                assert answer.json()["worker"] == chosen.name
        refused = await here.client.post(CHAT, json=chat(), headers={"x-subset": "10.255.0.1:1"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "subset_unavailable")
        await idle(here.picker)


async def refusals(client: httpx.AsyncClient) -> list[tuple[object, ...]]:
    """Status, code and headers for: no key, a wrong one, one for another model, the rate limit."""
    results = []
    for key in (None, "wrong", "model-key", "rated-key", "rated-key"):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        answer = await client.post(CHAT, json=chat(model="m"), headers=headers)
        code = answer.json().get("error", {}).get("code")
        fields = [name for name in COMPARED if name in answer.headers]
        limits = sorted(name for name in answer.headers if name.startswith("x-ratelimit"))
        results.append((answer.status_code, code, fields, limits))
    return results


async def test_keys_are_refused_through_envoy_as_they_are_by_the_proxy(tmp_path, monkeypatch):
    monkeypatch.setenv("RATED_KEY", "rated-key")
    monkeypatch.setenv("MODEL_KEY", "model-key")
    async with picked(tmp_path, tables=KEYS) as here:
        through_envoy = await refusals(here.client)
        file = tmp_path / "proxy.toml"
        text = toml(here.fleet).replace("[[workers]]\n", '[[workers]]\nmodel = "m"\n')
        file.write_text(f"{text}{KEYS}")
        async with program("--config", file) as proxy:
            await proxy.until_routable(*here.fleet)
            assert through_envoy == await refusals(proxy.client)
        assert [status for status, *_ in through_envoy] == [401, 401, 403, 200, 429]
        await idle(here.picker)


@needs_store
async def test_two_pickers_share_their_in_flight_counts(tmp_path):
    async with redis_server() as store, workers("a", "b") as fleet, AsyncExitStack() as stack:
        shared = f'[cluster]\nurl = "redis://127.0.0.1:{store.port}"\npublish_secs = 0.01\n'
        least, pickers, clients = "[routing]\npolicy = 'least_request'", [], []
        for number in range(2):
            at, file = ports(), tmp_path / f"{number}.toml"
            node = f'{shared}node = "p{number}"\n'
            file.write_text(picker_config(at, fleet, more=least, tables=node))
            running = await stack.enter_async_context(program("picker", "--config", file))
            await running.until_routable(*fleet)
            await grpc_listens(running)
            pickers.append(running)
            clients.append(await stack.enter_async_context(envoy(tmp_path, at, fleet)))
        for running in pickers:
            await running.until("/status", lambda body: body["cluster"]["members"] == 2)

        def has_counts(counts):
            return lambda body: [record(body, worker)["in_flight"] for worker in fleet] == counts

        for worker in fleet:
            worker.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            for turn in range(1, 4):
                before = [worker.requests for worker in fleet]
                for number, client in enumerate(clients):
                    nursery.start_soon(lambda c=client: c.post(CHAT, json=chat()))
                    while sum(worker.requests for worker in fleet) != 2 * turn - 1 + number:
                        await trio.sleep(0.01)
                    counts = [worker.requests for worker in fleet]
                    await pickers[1 - number].until("/workers", has_counts(counts))
                    await pickers[number].until("/workers", has_counts(counts))
                assert [
                    worker.requests - count for worker, count in zip(fleet, before, strict=True)
                ] == [1, 1]
            for worker in fleet:
                worker.gate.set()
        for running in pickers:
            await idle(running)


async def test_a_removed_worker_completes_its_requests(tmp_path):
    async with picked(tmp_path) as here:
        removed, kept = here.fleet
        for worker in here.fleet:
            worker.gate = trio.Event()
        path, statuses = "/workers", []

        async def ask():
            answer = await here.client.post(CHAT, json=chat())
            statuses.append(answer.status_code)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
            await removed.halfway.wait()
            put(here.file, picker_config(here.at, [kept]))
            await here.picker.client.post("/reload")
            await here.picker.until(path, lambda body: not [
                row for row in body["workers"] if row["url"] == removed.url and row["routable"]
            ])  # fmt: skip
            for worker in here.fleet:
                worker.gate.set()
        assert statuses == [200] * 4
        await idle(here.picker)
        assert (await here.client.post(CHAT, json=chat())).json()["worker"] == kept.name


async def test_responses_after_the_picker_was_killed_follow_the_failure_mode(tmp_path):
    async with picked(tmp_path) as here:
        at = ports_with_same_picker(here.at)
        async with envoy(tmp_path, at, here.fleet, OPEN) as open_client:
            endings = {}
            for worker in here.fleet:
                worker.gate = trio.Event()

            async def read(name, client):
                body, lines = chat(stream=True), []
                try:
                    async with client.stream("POST", CHAT, json=body) as answer:
                        lines.extend([line async for line in answer.aiter_lines() if line])
                    endings[name] = lines[-1]
                except httpx.RemoteProtocolError:
                    endings[name] = "cut"

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, "closed", here.client)
                nursery.start_soon(read, "open", open_client)
                while sum(worker.requests for worker in here.fleet) < 2:
                    await trio.sleep(0.01)
                here.picker.process.kill()
                await here.picker.process.wait()
                for worker in here.fleet:
                    worker.gate.set()
            assert endings == {"closed": "cut", "open": "data: [DONE]"}

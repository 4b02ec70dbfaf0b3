"""Discovered workers: the real program against an API server and a DNS server of the tests."""

from urllib.parse import quote

import dns.rcode
import pytest
import trio

from tests.discovery_watch.api_server import ApiServer, pod
from tests.discovery_watch.dns_server import DnsServer
from tests.promises.support.engines import engines as labelled_engines
from tests.promises.support.fleet_program import (
    PROBES,
    program,
    put,
    record,
    routable,
    urls,
    workers,
)

SERVER = "[server]\nport = 0\n"


@pytest.fixture
async def api(nursery):
    server = ApiServer()
    await nursery.start(server.serve)
    return server


@pytest.fixture
async def engines():
    async with workers("one", "two", "three") as fleet:
        yield fleet


@pytest.fixture
def file(tmp_path):
    return tmp_path / "proxy.toml"


def table(api, more="") -> str:
    return f'[[discover]]\napi_server = "{api.url}"\nnamespace = "default"\n{more}\n'


def pod_of(engine, uid="", **settings) -> dict:
    """A pod that runs this worker."""
    return pod(engine.name, uid, port=int(engine.url.rpartition(":")[2]), **settings)


async def ask(running, times: int) -> None:
    for _ in range(times):
        assert (await running.ask()).status_code == 200


async def not_routable(running, engine) -> dict:
    body = await running.until("/workers", lambda body: engine.url not in routable(body))
    return record(body, engine)


async def test_pods_join_and_leave_while_requests_are_served(api, engines, file):
    one, two, three = engines
    put(file, SERVER + PROBES + table(api))
    for engine in (one, two):
        api.put(pod_of(engine))
    async with program("--config", file) as running:
        body = await running.until_routable(one, two)
        discovered = record(body, one)
        assert discovered["origin"] == "discover"
        assert discovered["discovered"] == {
            "source": "pods", "uid": "uid-one", "namespace": "default", "pod": "one",
        }  # fmt: skip
        one.gate = trio.Event()
        streamed = []
        async with trio.open_nursery() as nursery:

            async def stream():
                streamed.append(await running.ask(stream=True))

            nursery.start_soon(stream)
            nursery.start_soon(stream)
            with trio.fail_after(20):
                await one.halfway.wait()
            api.begin_deletion("uid-one")  # its probes still succeed
            body = await not_routable(running, one)
            assert (body["why"], body["health_state"]) == ("its pod is being deleted", "healthy")
            before = one.requests
            await ask(running, 20)
            assert one.requests == before
            one.gate.set()
        assert all(b"[DONE]" in answer.content for answer in streamed)
        await running.until("/workers", lambda body: urls(body) == [two.url])

        api.put(pod_of(three, ready=False))
        api.ready("uid-three", True)
        await running.until_routable(two, three)
        api.ready("uid-two", False)
        assert (await not_routable(running, two))["why"] == "its pod is not ready"
        before = two.requests
        await ask(running, 10)
        assert two.requests == before
        api.ready("uid-two", True)
        await running.until_routable(two, three)
        api.label("uid-two", app="other")
        await running.until("/workers", lambda body: urls(body) == [three.url])
        api.delete("uid-three")
        api.put(pod_of(three, "reborn"))
        body = await running.until(
            "/workers",
            lambda body: [row["discovered"]["uid"] for row in body["workers"]] == ["reborn"],
        )
        assert record(body, three)["routed_requests"] == 0
        await running.until_routable(three)


async def test_a_failing_api_server_removes_no_worker(api, engines, file):
    one, two, _ = engines
    put(file, SERVER + PROBES + table(api))
    api.put(pod_of(one))
    async with program("--config", file) as running:
        await running.until_routable(one)
        (row,) = (await running.get_json("/status"))["discovery"]
        assert (row["name"], row["state"], row["error"]) == ("pods", "synced", None)
        api.faults.status = 403
        api.delete("uid-one")
        api.put(pod_of(two))
        api.cut_watches()

        def stale(body):
            (row,) = body["discovery"]
            return row["state"] == "stale" and "403" in row["error"]

        # Events that were sent before the cut may have been applied.
        await running.until("/status", stale)
        assert urls(await running.get_json("/workers")) in (
            [one.url],
            [one.url, two.url],
            [two.url],
        )
        metrics = (await running.client.get("/metrics")).text
        assert 'omni_proxy_discovery_up{source="pods"} 0.0' in metrics
        assert "discovery_failed source=pods" in running.log
        api.faults.status = 0
        await running.until_routable(two)


async def test_http_changes_of_a_discovered_worker_survive_a_restart(api, engines, file):
    one, two, three = engines
    put(file, SERVER + PROBES + table(api))
    for engine in engines:
        api.put(pod_of(engine))

    def path_of(engine):
        return f"/workers/{quote(engine.url, safe='')}"

    async with program("--config", file) as running:
        await running.until_routable(*engines)
        assert (await running.client.put(path_of(one), json={"disabled": True})).status_code == 200
        assert (await running.client.delete(path_of(two))).status_code == 200
    async with program("--config", file) as running:
        body = await running.until_routable(three)
        assert {*urls(body)} == {one.url, three.url}
        assert (record(body, one)["disabled"], record(body, one)["origin"]) == (True, "discover")
        added = await running.client.post("/workers", json={"url": two.url})
        assert added.status_code == 200
        body = await running.until_routable(two, three)
        assert record(body, two)["origin"] == "api"


async def test_every_process_stops_routing_to_a_deleted_pod_at_once(api, engines, file):
    one, two, _ = engines
    put(file, "[server]\nport = 0\nprocesses = 2\n" + PROBES + table(api))
    for engine in (one, two):
        api.put(pod_of(engine))
    async with program("--config", file) as running:
        await running.until_routable(one, two)
        api.begin_deletion("uid-one")
        await running.until("/workers", lambda body: urls(body) == [two.url])
        before = one.requests
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask, running, 4)
        assert one.requests == before
        assert api.watches == 1


async def test_dns_records_add_and_remove_workers(nursery, engines, file):
    one, two, _ = engines
    server = DnsServer()
    await nursery.start(server.serve)
    name = "_http._tcp.engines.test"

    def put_records(*fleet):
        ports = [engine.url.rpartition(":")[2] for engine in fleet]
        server.put(name, "SRV", *(f"0 1 {port} host.test." for port in ports))

    put_records(one, two)
    server.put("host.test", "A", "127.0.0.1")
    put(
        file,
        f'{SERVER}{PROBES}[[discover]]\nkind = "dns"\ndns_name = "{name}"\n'
        f'dns_server = "{server.address}"\nrefresh_secs = 0.1\n',
    )
    async with program("--config", file) as running:
        body = await running.until_routable(one, two)
        assert record(body, one)["discovered"]["uid"] == one.url
        put_records(two)
        await running.until("/workers", lambda body: urls(body) == [two.url])
        server.rcodes[name] = dns.rcode.SERVFAIL
        await running.until("/status", lambda body: body["discovery"][0]["state"] == "stale")
        await ask(running, 5)


async def test_a_reload_adds_and_removes_a_discover_table(api, engines, file):
    one, two, _ = engines
    entry = f'[[workers]]\nurl = "{one.url}"\n'
    put(file, SERVER + PROBES + entry)
    api.put(pod_of(one))
    api.put(pod_of(two))
    async with program("--config", file) as running:
        await running.until_routable(one)
        put(file, SERVER + PROBES + entry + table(api))
        body = await running.until_routable(one, two)
        assert (record(body, one)["origin"], record(body, two)["origin"]) == ("file", "discover")
        put(file, SERVER + PROBES + entry)
        await running.until_routable(one)


async def test_a_weight_version_that_could_not_be_read_is_read_later(api, file):
    """Even though no change of the worker's health triggers the second attempt."""
    async with labelled_engines(1) as (engine,):
        engine.name, engine.version = "one", "v7"
        engine.responses["/model_info"] = 503, {"error": "still loading"}
        put(file, SERVER + PROBES + table(api))
        api.put(pod_of(engine))
        async with program("--config", file) as running:
            await running.until_routable(engine)
            while "/model_info" not in engine.paths():
                await trio.sleep(0.01)
            del engine.responses["/model_info"]
            await running.until(
                "/workers", lambda body: record(body, engine)["weight_version"] == "v7"
            )
        assert engine.paths().count("/model_info") == 2

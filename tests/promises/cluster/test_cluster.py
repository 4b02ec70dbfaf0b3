"""Proxies of a cluster count each other's requests, also when a proxy or the store fails."""

from contextlib import asynccontextmanager
from urllib.parse import quote

import trio

from tests.promises.support.cluster_programs import cluster, connected, lost, members
from tests.promises.support.fleet_program import program, put, record, routable, toml, workers
from tests.promises.support.tls_helpers import AUTHORITY
from tests.redis_server import needs_store, redis_server

pytestmark = needs_store


async def in_flight(running, worker, count):
    """Wait until the proxy counts `count` requests in flight at the worker."""
    await running.until("/workers", lambda reply: record(reply, worker)["in_flight"] == count)


@asynccontextmanager
async def held_requests(running, fleet, count):
    """Send `count` requests that stay in flight at the workers while the context is open."""
    for worker in fleet:
        worker.gate = trio.Event()
    before = sum(worker.requests for worker in fleet)
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(running.ask)
        while sum(worker.requests for worker in fleet) < before + count:
            await trio.sleep(0.01)
        yield
        for worker in fleet:
            worker.gate.set()


async def test_a_proxy_counts_requests_of_the_others_until_they_die(tmp_path):
    async with cluster(tmp_path) as (_, fleet, (first, second)):
        async with held_requests(first, fleet, 1):
            (busy,) = [worker for worker in fleet if worker.requests]
            (idle,) = [worker for worker in fleet if worker is not busy]
            await in_flight(second, busy, 1)
            idle.gate.set()
            for _ in range(4):
                assert (await second.ask()).json()["worker"] == idle.name
            reply = await second.get_json("/status")
            assert [peer["in_flight"] for peer in reply["cluster"]["peers"]] == [1]
            text = (await second.client.get("/metrics")).text
            assert 'omni_proxy_cluster_peer_requests_in_flight{peer="p0"} 1.0' in text
            assert "omni_proxy_cluster_store_connected 1.0" in text
        await in_flight(second, busy, 0)
        first.process.kill()
        await first.process.wait()
        await second.until("/status", lambda reply: members(reply) == 1)
        assert "cluster_peer_lease_expired peer=p0/" in second.log


async def test_requests_of_a_killed_proxy_count_until_its_lease_ends(tmp_path):
    async with cluster(tmp_path, more="processes = 2") as (_, fleet, (first, second)):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for worker in fleet:
                    worker.gate = trio.Event()

                async def ask():
                    with trio.CancelScope():
                        await first.client.post(
                            "/v1/chat/completions", json={"messages": [], "stream": True}
                        )

                nursery.start_soon(ask)
                while not any(worker.requests for worker in fleet):
                    await trio.sleep(0.01)
                (busy,) = [worker for worker in fleet if worker.requests]
                await in_flight(second, busy, 1)
                nursery.cancel_scope.cancel()
                first.process.kill()
                await first.process.wait()
            scope.cancel()
        await in_flight(second, busy, 0)


async def test_requests_are_served_without_the_store_and_counts_return_with_it(tmp_path):
    async with cluster(tmp_path) as (store, fleet, (first, second)):
        store.pause()
        await first.until("/status", lost)
        for running in (first, second):
            assert (await running.ask()).status_code == 200
        store.resume()
        await first.until("/status", lambda reply: connected(reply) and members(reply) == 2)
        store.kill()
        await first.until("/status", lost)
        async with held_requests(first, fleet, 1):
            assert any(worker.requests and not worker.gate.is_set() for worker in fleet)
            assert (await second.get_json("/ready"))["status"] == "ready"
            await store.start()
            await second.until("/status", lambda reply: members(reply) == 2)
            await second.until(
                "/workers", lambda reply: sum(row["in_flight"] for row in reply["workers"]) == 1
            )
        assert "cluster_store_lost" in first.log


async def test_counts_of_a_proxy_without_the_store_end_and_return(tmp_path):
    async with cluster(tmp_path) as (store, fleet, (cut_off, other)):
        async with held_requests(cut_off, fleet, 1):
            (busy,) = [worker for worker in fleet if worker.requests]
            await in_flight(other, busy, 1)
            store.relay.cut()
            await in_flight(other, busy, 0)
            await cut_off.until("/status", lambda reply: lost(reply) and members(reply) == 1)
            for worker in fleet:
                worker.gate.set()
            for running in (cut_off, other):
                assert (await running.ask()).status_code == 200
        store.relay.is_cut = False
        for running in (cut_off, other):
            await running.until("/status", lambda reply: connected(reply) and members(reply) == 2)
        async with held_requests(cut_off, fleet, 1):
            await other.until(
                "/workers", lambda reply: sum(row["in_flight"] for row in reply["workers"]) == 1
            )
        await other.until(
            "/workers", lambda reply: sum(row["in_flight"] for row in reply["workers"]) == 0
        )


async def test_max_inflight_of_a_worker_holds_over_all_proxies(tmp_path):
    async with cluster(tmp_path, bound=2, names=("a",)) as (_, (worker,), (first, second)):
        async with held_requests(first, [worker], 2):
            await in_flight(second, worker, 2)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(second.ask)
                await second.until("/status", lambda reply: reply["data_plane"]["waiting"] == 1)
                assert worker.requests == 2
                worker.gate.set()
        assert worker.requests == 3


async def test_without_the_store_a_proxy_with_on_loss_refuse_is_not_ready(tmp_path):
    async with cluster(tmp_path, count=1, table="on_loss = 'refuse'") as (store, _, (only,)):
        await only.until("/ready", lambda reply: reply["status"] == "ready")
        store.kill()
        await only.until("/ready", lambda reply: reply.get("reason") == "cluster_store_lost")
        await store.start()
        await only.until("/ready", lambda reply: reply["status"] == "ready")


async def test_a_wrong_password_is_reported_and_never_shown(tmp_path):
    secret = tmp_path / "password"
    secret.write_text("hunter2\n")
    async with redis_server("--requirepass", "right") as store, workers("a") as fleet:
        url = store.url.replace("//", "//:hunter1@")
        table = f'[cluster]\nurl = "{url}"\npassword_file = "{secret}"\n'
        file = tmp_path / "proxy.toml"
        put(file, toml(fleet) + table)
        async with program("--config", file) as running:
            await running.until_logged("cluster_store_lost .*the password is wrong")
            await running.until_routable(*fleet)
            assert (await running.ask()).status_code == 200
            visible = (await running.client.get("/status")).text
            visible += (await running.client.get("/config")).text + running.log
            assert "hunter" not in visible
            secret.write_text("right\n")
            await running.until("/status", connected)


async def test_the_store_can_require_tls_and_an_acl_user(tmp_path):
    secret, file = tmp_path / "password", tmp_path / "proxy.toml"
    secret.write_text("right\n")
    allowed = ("+@read", "+@write", "+@pubsub", "+@connection", "+@scripting", "+time")
    rules = ("--user", "proxy", "on", ">right", "~omni:*", "&omni:*", *allowed)
    async with redis_server(*rules, tls=True) as store, workers("a") as fleet:
        url = store.url.replace("//", "//proxy@")
        table = f'[cluster]\nurl = "{url}"\npassword_file = "{secret}"\n'
        put(file, toml(fleet) + table)
        async with program("--config", file) as running:
            await running.until_logged("cluster_store_lost .*certificate")
            put(file, toml(fleet, more=f"tls_worker_ca = '{AUTHORITY}'") + table + "name = 'other'")
            await running.until_logged(
                "cluster_store_lost .*the store's user has no permission: NOPERM"
            )
            put(file, toml(fleet, more=f"tls_worker_ca = '{AUTHORITY}'") + table)
            await running.until("/status", connected)


async def test_a_change_over_http_reaches_all_proxies_even_after_a_store_failure(tmp_path):
    async with cluster(tmp_path) as (store, fleet, (first, second)), workers("c") as (added,):
        body = {"url": added.url, "max_inflight": 3}
        assert (await first.client.post("/workers", json=body)).status_code == 200
        await second.until_routable(*fleet, added)
        assert record(await second.get_json("/workers"), added)["max_inflight"] == 3
        store.kill()
        await second.until("/status", lost)
        name = quote(fleet[0].url, safe="")
        await second.client.put(f"/workers/{name}", json={"disabled": True})
        await second.client.delete(f"/workers/{quote(added.url, safe='')}")
        await store.start()
        await first.until_routable(fleet[1])
        reply = await first.get_json("/workers")
        assert [row["url"] for row in reply["workers"]] == [worker.url for worker in fleet]
        assert record(reply, fleet[0])["disabled"]


async def test_a_failure_that_one_proxy_sees_makes_the_others_probe_at_once(tmp_path):
    rare = "interval_secs = 60\nfailure_threshold = 1"
    async with cluster(tmp_path, probes=rare) as (_, fleet, (first, second)):
        async with workers("c") as (victim,):
            await first.client.post("/workers", json={"url": victim.url})
            for running in (first, second):
                await running.until_routable(*fleet, victim)
        while victim.url in routable(await first.get_json("/workers")):
            assert (await first.ask()).status_code == 200
        await second.until_routable(*fleet)

"""One proxy of a cluster changes weights at a time; no proxy uses a worker during its update."""

from contextlib import asynccontextmanager

import trio

from tests.promises.support.fleet_program import program, put, routable, toml
from tests.redis_server import needs_store, redis_server
from tools.bench.cluster.faults import Relay
from tools.bench.cluster.weights import UPDATE, Traffic, workers

pytestmark = needs_store

SYNC = "[weight_sync]\nmode = 'off'\nverify = 'off'\ndrain_secs = 5\n"


@asynccontextmanager
async def cluster(tmp_path, *, lease_secs=1.0, count=2):
    """A store, two engines and `count` proxies; the first reaches the store through a relay."""
    async with redis_server() as store, workers(2) as fleet, trio.open_nursery() as nursery:
        done, programs = trio.Event(), []
        store.relay = Relay(store.port)
        await nursery.start(store.relay.serve)

        async def start(number, *, task_status=trio.TASK_STATUS_IGNORED):
            file = tmp_path / f"{number}.toml"
            port = store.port if number else store.relay.port
            url = f"redis://127.0.0.1:{port}"
            shared = f'[cluster]\nurl = "{url}"\nnode = "p{number}"\npublish_secs = 0.02\n'
            text = toml(fleet, more="queue_size = 100") + SYNC + shared
            put(file, f"{text}lease_secs = {lease_secs}\n")
            async with program("--config", file) as running:
                await running.until_routable(*fleet)
                task_status.started(running)
                await done.wait()

        try:
            for number in range(count):
                running = await nursery.start(start, number)
                programs.append(running)
            for running in programs:
                await running.until("/status", lambda reply: reply["cluster"]["members"] == count)
                await running.until("/workers", lambda reply: labels(reply) == {"v0"})
            yield store, fleet, programs
        finally:
            for worker in fleet:
                worker.gate.set()
            done.set()
            nursery.cancel_scope.cancel()


def port_of(running):
    return running.client.base_url.port


async def update(running, label, query=""):
    body = {"model_path": "m", "weight_version": label}
    return await running.client.post(UPDATE + query, json=body)


def connected(reply):
    return reply["cluster"]["connected"] and reply["cluster"]["members"] == 2


def labels(reply):
    return {row["weight_version"] for row in reply["workers"]}


def held(reply, worker):
    (row,) = [row for row in reply["workers"] if row["url"] == worker.url]
    return row["held_by"]


async def begin_update(nursery, running, worker, label):
    """Start an update of one worker through `running`; the worker holds its response back."""
    before, worker.gate = worker.changes, trio.Event()
    replies = []

    async def call():
        replies.append(await update(running, label, f"?selector=url={worker.url}"))

    nursery.start_soon(call)
    while worker.changes == before:
        await trio.sleep(0.01)
    return replies


async def test_no_response_mixes_versions_when_proxies_update_in_turn(tmp_path):
    async with cluster(tmp_path) as (_, fleet, programs):
        traffic = Traffic([port_of(running) for running in programs])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(traffic.run, 6)
            for number in (1, 2, 3):
                while traffic.answered < 20 * number:
                    await trio.sleep(0.01)
                reply = await update(programs[number % 2], f"v{number}")
                assert (reply.status_code, reply.json()["weight_epoch"]) == (200, number)
            nursery.cancel_scope.cancel()
        assert (traffic.failures, traffic.wrong) == ([], 0)
        assert sum(worker.mixed for worker in fleet) == 0
        for running in programs:
            assert labels(await running.get_json("/workers")) == {"v3"}


async def test_a_second_proxy_waits_for_the_lease(tmp_path):
    async with cluster(tmp_path) as (_, (busy, _), (first, second)):
        async with trio.open_nursery() as nursery:
            await begin_update(nursery, first, busy, "v1")
            await second.until("/workers", lambda reply: "updating" in held(reply, busy))
            assert (await second.get_json("/status"))["cluster"]["weights"]["busy"]
            replies = []

            async def later():
                replies.append(await update(second, "v2"))

            nursery.start_soon(later)
            await trio.sleep(0.2)
            assert busy.changes == 1
            busy.gate.set()
        assert replies[0].status_code == 200
        assert replies[0].json()["weight_epoch"] == 2


async def test_workers_of_a_proxy_that_died_in_an_update_are_uncertain_at_all_proxies(tmp_path):
    async with cluster(tmp_path) as (_, (busy, other), (first, second)):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                await begin_update(nursery, first, busy, "v1")
                nursery.cancel_scope.cancel()
            scope.cancel()
        first.process.kill()
        await first.process.wait()
        await second.until("/workers", lambda reply: held(reply, busy) == ["uncertain"])
        served = busy.served
        for _ in range(4):
            assert (await second.ask()).status_code == 200
        assert busy.served == served
        busy.gate.set()
        assert (await update(second, "v2")).status_code == 200
        await second.until_routable(busy, other)


async def test_without_the_store_updates_are_refused_and_requests_are_served(tmp_path):
    async with cluster(tmp_path) as (store, fleet, (first, second)):
        assert (await update(first, "v1")).status_code == 200
        await second.until("/workers", lambda reply: labels(reply) == {"v1"})
        store.kill()
        await first.until("/status", lambda reply: not reply["cluster"]["connected"])
        refused = await update(first, "v2")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "cluster_store_lost")
        await second.until_logged("cluster_lease_lost held=0")
        for running in (first, second):
            assert (await running.ask()).status_code == 200
            assert routable(await running.get_json("/workers")) == {worker.url for worker in fleet}
        await store.start()
        for running in (first, second):
            await running.until("/status", connected)
        updated = await update(second, "v2")
        assert (updated.status_code, updated.json()["weight_epoch"]) == (200, 2)
        await first.until("/workers", lambda reply: labels(reply) == {"v2"})


async def test_no_proxy_uses_an_updating_worker_while_the_store_is_lost(tmp_path):
    async with cluster(tmp_path) as (store, (busy, other), (first, second)):
        async with trio.open_nursery() as nursery:
            replies = await begin_update(nursery, first, busy, "v1")
            store.kill()
            await second.until_logged("cluster_lease_lost|cluster_store_lost")
            assert "updating" in held(await second.get_json("/workers"), busy)
            busy.gate.set()
        assert replies[0].status_code == 200
        served = busy.served
        assert (await second.ask()).status_code == 200
        assert busy.served == served
        await store.start()
        await second.until_routable(busy, other)
        assert labels(await second.get_json("/workers")) == {"v0", "v1"}
        assert busy.mixed == 0


async def test_no_response_mixes_versions_while_a_proxy_cannot_reach_the_store(tmp_path):
    async with cluster(tmp_path, count=3) as (store, fleet, programs):
        cut_off, *rest = programs
        traffic = Traffic([port_of(running) for running in programs])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(traffic.run, 9)
            assert (await update(cut_off, "v1")).status_code == 200
            async with trio.open_nursery() as during:
                during.start_soon(update, rest[0], "v2")
                store.relay.cut()
            for number in range(3, 7):
                enough = traffic.answered + 30
                reply = await update(rest[number % 2], f"v{number}")
                assert (reply.status_code, reply.json()["weight_epoch"]) == (200, number)
                while traffic.answered < enough:
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        assert not (await cut_off.get_json("/status"))["cluster"]["connected"]
        assert (traffic.failures, traffic.wrong) == ([], 0)
        assert sum(worker.mixed for worker in fleet) == 0
        assert labels(await cut_off.get_json("/workers")) == {"v6"}
        await cut_off.until_routable(*fleet)

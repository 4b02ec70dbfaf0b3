"""A store that misbehaves: out of memory, a changed password, slow replies, a clock that jumps."""

import hiredis
import trio

from tests.promises.cluster.test_cluster_weights import begin_update, update
from tests.promises.cluster.test_cluster_weights import cluster as cluster_of_weights
from tests.promises.support.cluster_programs import cluster, connected, lost, members
from tests.promises.support.fleet_program import record, routable
from tests.redis_server import needs_store

pytestmark = needs_store

HOUR_MS = 3_600_000


async def run_commands(store, *commands):
    """Run commands as an operator would, and return the store's replies."""
    reader, replies = hiredis.Reader(), []
    async with await trio.open_tcp_stream("127.0.0.1", store.port) as stream:
        for command in commands:
            await stream.send_all(hiredis.pack_command(command))
            while (reply := reader.gets()) is False:
                reader.feed(await stream.receive_some(65536))
            replies.append(reply)
    return replies


def joined(reply):
    return connected(reply) and members(reply) == 2


def error_of(reply):
    return reply["cluster"]["error"] or ""


async def test_a_store_out_of_memory_counts_as_lost(tmp_path):
    async with cluster(tmp_path) as (store, fleet, programs):
        first = programs[0]
        assert await run_commands(store, ("CONFIG", "SET", "maxmemory", "1")) == [b"OK"]
        for running in programs:
            await running.until("/status", lambda reply: lost(reply) and "OOM" in error_of(reply))
            assert (await running.ask()).status_code == 200
            assert routable(await running.get_json("/workers")) == {worker.url for worker in fleet}
        body = {"model_path": "m"}
        refused = await first.client.post("/update_weights_from_disk", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "cluster_store_lost")
        await run_commands(store, ("CONFIG", "SET", "maxmemory", "0"))
        for running in programs:
            await running.until("/status", joined)


async def test_the_password_file_is_read_again_when_the_password_changes(tmp_path):
    file = tmp_path / "password"
    file.write_text("unused")
    table = f'password_file = "{file}"'
    options = ("--requirepass", "unused")
    async with cluster(tmp_path, table=table, options=options) as (store, _, programs):
        await run_commands(
            store, ("AUTH", "unused"), ("CONFIG", "SET", "requirepass", "another"),
            ("CLIENT", "KILL", "TYPE", "pubsub"),
        )  # fmt: skip
        for running in programs:
            await running.until("/status", lambda reply: "password is wrong" in error_of(reply))
            assert (await running.ask()).status_code == 200
            assert "another" not in running.log
        file.write_text("another")
        for running in programs:
            await running.until("/status", joined)


async def test_a_slow_store_does_not_count_as_lost(tmp_path):
    async with cluster(tmp_path) as (store, fleet, (slow, other)):
        store.relay.delay = 0.04  # connecting takes ten replies: longer than a lease
        store.relay.cut()
        store.relay.is_cut = False
        await slow.until("/status", lambda reply: reply["cluster"]["losses"] == 1)
        await slow.until("/status", joined)
        worker, _ = fleet
        for engine in fleet:
            engine.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(slow.ask)
            await other.until("/workers", lambda reply: record(reply, worker)["in_flight"] == 1)
            for engine in fleet:
                engine.gate.set()
        await other.until("/workers", lambda reply: record(reply, worker)["in_flight"] == 0)
        status = await slow.get_json("/status")
        assert (status["cluster"]["losses"], joined(status)) == (1, True)


async def test_leases_of_a_dead_proxy_end_although_the_stores_clock_was_set_back(tmp_path):
    async with cluster_of_weights(tmp_path) as (store, (busy, other), (first, second)):
        name = (await first.get_json("/status"))["cluster"]["member"]
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                await begin_update(nursery, first, busy, "v1")
                nursery.cancel_scope.cancel()
            scope.cancel()
        first.process.kill()
        await first.process.wait()
        await run_commands(
            store, ("SADD", "omni:nodes", name),
            ("SET", f"omni:lease:{name}", "", "PX", HOUR_MS),
            ("SET", "omni:weights-lease", f"1:{name}", "PX", HOUR_MS),
        )  # fmt: skip
        await second.until(
            "/workers", lambda reply: record(reply, busy)["held_by"] == ["uncertain"]
        )
        busy.gate.set()
        assert (await update(second, "v2")).status_code == 200
        await second.until_routable(busy, other)


async def test_live_proxies_renew_leases_after_the_stores_clock_was_set_forward(
    tmp_path,
):
    async with cluster_of_weights(tmp_path) as (store, fleet, programs):
        first, second = programs
        assert (await update(first, "v1")).status_code == 200
        keys = [
            f"omni:lease:{(await running.get_json('/status'))['cluster']['member']}"
            for running in programs
        ]
        assert (await run_commands(store, ("DEL", *keys))) == [2]
        assert (await update(second, "v2")).status_code == 200
        for running in programs:
            await running.until_routable(*fleet)
            status = await running.get_json("/status")
            assert (joined(status), status["cluster"]["losses"]) == (True, 0)

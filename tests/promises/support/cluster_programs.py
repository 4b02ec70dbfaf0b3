"""Several programs of one cluster, with a store and workers."""

from contextlib import asynccontextmanager

import trio

from tests.promises.support.fleet_program import program, put, toml, workers
from tests.redis_server import redis_server
from tools.bench.cluster.faults import Relay

LEASE_SECS = 0.5


@asynccontextmanager
async def cluster(
    tmp_path, *, count=2, more="", bound=0, table="", names=("a", "b"), probes="",
    routing="policy = 'least_request'", options=(),
):  # fmt: skip
    """Runs a store, workers and programs. The first one uses the store through `relay`."""
    async with redis_server(*options) as store, workers(*names) as fleet:
        programs = []
        store.relay = Relay(store.port)
        async with trio.open_nursery() as nursery:
            await nursery.start(store.relay.serve)

            async def start(number, *, task_status=trio.TASK_STATUS_IGNORED):
                file = tmp_path / f"{number}.toml"
                port = store.port if number else store.relay.port
                server = f"queue_size = 100\n{more}\n[routing]\n{routing}"
                text = toml(fleet, more=server)
                text = text.replace("interval_secs = 0.2", probes or "interval_secs = 0.2")
                text = text.replace("[[workers]]", f"[[workers]]\nmax_inflight = {bound}")
                shared = (
                    f'[cluster]\nurl = "redis://127.0.0.1:{port}"\nnode = "p{number}"\n{table}\n'
                )
                put(file, f"{text}{shared}lease_secs = {LEASE_SECS}\npublish_secs = 0.01\n")
                async with program("--config", file) as running:
                    await running.until_routable(*fleet)
                    task_status.started(running)
                    await done.wait()

            done = trio.Event()
            try:
                for number in range(count):
                    running = await nursery.start(start, number)
                    programs.append(running)
                for running in programs:
                    await running.until("/status", lambda reply: members(reply) == count)
                yield store, fleet, programs
            finally:
                for worker in fleet:
                    worker.gate.set()
                done.set()
                nursery.cancel_scope.cancel()


def members(reply):
    return reply["cluster"]["members"]


def connected(reply):
    return reply["cluster"]["connected"]


def lost(reply):
    return not connected(reply)

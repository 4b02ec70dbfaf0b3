"""Upgrades of a program with discovered workers: no takeover before the new one has found them."""

import os
import signal

import pytest
import trio

from tests.discovery_watch.api_server import ApiServer
from tests.promises.cluster.test_discovery import pod_of, table
from tests.promises.support.fleet_program import PROBES, program, put, workers
from tests.promises.support.processes_fixture import serving
from tests.promises.upgrade.test_upgrade import keep_asking, status, until_gone, upgrade

pytestmark = pytest.mark.usefixtures("soon")


async def test_no_request_reaches_a_program_that_has_not_found_its_workers(tmp_path, nursery):
    api = ApiServer()
    await nursery.start(api.serve)
    file = tmp_path / "proxy.toml"
    async with workers("w") as (worker,):
        put(file, "[server]\nport = 0\nprocesses = 2\n" + PROBES + table(api))
        api.put(pod_of(worker))
        async with program("--config", file) as running:
            await running.until_routable(worker)
            await running.until("/status", serving)
            api.faults.silent = True
            completed, stop = [0], trio.Event()
            async with trio.open_nursery() as clients:
                clients.start_soon(keep_asking, running, completed, stop)
                clients.start_soon(keep_asking, running, completed, stop)
                failed = await upgrade(running)
                assert failed.outcome == "failed"
                assert "got no list from pods" in failed.text
                api.faults.silent = False
                done = await upgrade(running)
                assert done.outcome == "done", done.text
                before = completed[0]
                while completed[0] < before + 2:
                    await trio.sleep(0.01)
                stop.set()
            assert (await status(running))["pid"] == done.pid
            os.kill(done.pid, signal.SIGTERM)
            await until_gone(done.pid)

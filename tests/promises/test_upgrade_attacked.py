"""What comes between an upgrade's beginning and its end: another one, or a shutdown."""

import signal

import pytest
import trio

from tests.promises.clients import client_of, post
from tests.promises.fleet_program import program, put, toml, workers
from tests.promises.test_upgrade import address, upgradable, upgrade

pytestmark = pytest.mark.usefixtures("soon")


async def test_of_several_upgrades_at_the_same_time_one_is_done(tmp_path):
    async with upgradable(tmp_path) as running:
        reports = []

        async def one():
            reports.append(await upgrade(running))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one)
    assert sorted(report.outcome for report in reports) == ["done", "failed", "failed"]
    assert "an upgrade is running already" in {report.text for report in reports}


async def test_a_shutdown_during_an_upgrade_leaves_no_program(tmp_path):
    """Though a request keeps the old one for a while."""
    file = tmp_path / "proxy.toml"
    async with workers("w") as (worker,):
        put(file, toml([worker]))
        async with program("--config", file) as running:
            await running.until_routable(worker)
            worker.gate = trio.Event()
            reports = []

            async def one():
                reports.append(await upgrade(running))

            async with client_of(address(running)) as client:
                await client.send(post())
                await worker.halfway.wait()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(one)
                    await running.says("upgrade_started")
                    running.process.send_signal(signal.SIGTERM)
                worker.gate.set()
                assert (await client.answer()).status == 200
            assert await running.process.wait() == 0
            assert reports[0].outcome == "failed"
            assert "shutting down" in reports[0].text
            with pytest.raises(OSError):
                await trio.open_tcp_stream("127.0.0.1", running.client.base_url.port)

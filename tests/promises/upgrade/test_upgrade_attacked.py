"""Interrupted upgrades: another upgrade, a shutdown, or the end of the new program."""

import os
import signal
import sys
from pathlib import Path

import pytest
import trio

import omni_proxy
from tests.ports import free_run
from tests.promises.launch.test_launch import REPLICA, launch, until_ready
from tests.promises.support.clients import client_of, post
from tests.promises.support.fleet_program import program, put, toml, workers
from tests.promises.upgrade.test_upgrade import (
    address,
    script,
    status,
    until_gone,
    upgradable,
    upgrade,
)

pytestmark = pytest.mark.usefixtures("soon")


async def test_of_several_simultaneous_upgrades_one_is_done(tmp_path):
    async with upgradable(tmp_path) as running:
        reports = []

        async def run_upgrade():
            reports.append(await upgrade(running))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(run_upgrade)
    assert sorted(report.outcome for report in reports) == ["done", "failed", "failed"]
    assert "an upgrade is running already" in {report.text for report in reports}


async def test_a_shutdown_during_an_upgrade_leaves_no_program(tmp_path):
    """A request keeps the old program alive for a while."""
    file = tmp_path / "proxy.toml"
    async with workers("w") as (worker,):
        put(file, toml([worker]))
        async with program("--config", file) as running:
            await running.until_routable(worker)
            worker.gate = trio.Event()
            reports = []

            async def run_upgrade():
                reports.append(await upgrade(running))

            async with client_of(address(running)) as client:
                await client.send(post())
                await worker.halfway.wait()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(run_upgrade)
                    await running.until_logged("upgrade_started")
                    running.process.send_signal(signal.SIGTERM)
                worker.gate.set()
                assert (await client.answer()).status == 200
            assert await running.process.wait() == 0
            assert reports[0].outcome == "failed"
            assert "shutting down" in reports[0].text
            with pytest.raises(OSError):
                await trio.open_tcp_stream("127.0.0.1", running.client.base_url.port)


# Reports that it is ready, and exits before the running program can answer. Its child stops the
# running program until then, because that might answer first on a busy machine.
EXITING = f"""
import os, select, signal, socket, sys
sys.path[:0] = {[str(Path(omni_proxy.__file__).parents[1]), *sys.path]!r}
from omni_proxy.upgrade.child_program import HandoverChannel
from omni_proxy.upgrade.state import FORMATS, ReadyMessage, StartedMessage
number = int(os.environ["OMNI_PROXY_UPGRADE"].split()[0])
channel = HandoverChannel(socket.socket(fileno=number))
channel.send(StartedMessage(FORMATS, "gone"))
channel.receive()
running = os.getppid()
own = os.pidfd_open(os.getpid())
if os.fork():
    os.kill(running, signal.SIGSTOP)
    channel.send(ReadyMessage(os.getpid(), "none"))
    os._exit(0)
os.close(number)
os.close(2)
select.select([own], [], [])
os.kill(running, signal.SIGCONT)
os._exit(0)
"""


async def test_a_new_program_that_exits_before_its_takeover_changes_nothing(tmp_path):
    """The old program keeps its services, replicas and reservations, and can be upgraded later."""
    replica, file = tmp_path / "replica.py", tmp_path / "proxy.toml"
    replica.write_text(REPLICA)
    command = f'["{sys.executable}", "-S", "{replica}", "{{port}}"]'
    file.write_text(launch(command, free_run(2)))
    async with program("--config", file) as running:
        before = await until_ready(running)
        reserved = await running.client.post("/select_and_reserve", json={})
        assert reserved.status_code == 200, reserved.text
        failed = await upgrade(running, script(tmp_path, EXITING))
        assert failed.outcome == "failed"
        assert "the new program failed" in failed.text
        body = await status(running)
        assert (body["pid"], body["upgrade"]["state"]) == (running.process.pid, "idle")
        assert [row["pid"] for row in await until_ready(running)] == [row["pid"] for row in before]
        assert (await running.client.get("/ready")).status_code == 200
        name = reserved.json()["reservation_id"]
        assert (await running.client.delete(f"/reservations/{name}")).status_code == 200
        assert (await running.client.post("/reload")).status_code == 200
        os.kill(before[0]["pid"], signal.SIGKILL)
        await running.until_logged(r"replica_failed replica=local\[0\]")
        replicas = [row["pid"] for row in await until_ready(running)]
        done = await upgrade(running)
        assert done.outcome == "done", done
        await running.client.aclose()
        assert await running.process.wait() == 0
        running.client = type(running.client)(base_url=running.client.base_url, timeout=60)
        assert [row["pid"] for row in await until_ready(running)] == replicas
        os.kill(done.pid, signal.SIGTERM)
        with trio.fail_after(20):
            for pid in (done.pid, *replicas):
                await until_gone(pid)

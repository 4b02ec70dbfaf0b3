"""Launched replicas survive an upgrade and belong to the new program."""

import os
import signal
import sys
from contextlib import suppress

import pytest
import trio

from tests.ports import free_run
from tests.processes import alive
from tests.promises.launch.test_launch import REPLICA, launch, until_ready
from tests.promises.support.fleet_program import program
from tests.promises.upgrade.test_upgrade import status, until_gone, upgrade

pytestmark = pytest.mark.usefixtures("soon")


async def test_replicas_survive_and_the_new_program_restarts_and_ends_them(tmp_path):
    script, file = tmp_path / "replica.py", tmp_path / "proxy.toml"
    script.write_text(REPLICA)
    command = f'["{sys.executable}", "-S", "{script}", "{{port}}"]'
    file.write_text(launch(command, free_run(2)))
    async with program("--config", file) as running:
        before = [row["pid"] for row in await until_ready(running)]
        done = await upgrade(running)
        assert done.outcome == "done", done
        try:
            await running.client.aclose()
            assert await running.process.wait() == 0
        finally:
            running.client = type(running.client)(base_url=running.client.base_url, timeout=60)
        try:
            assert [row["pid"] for row in await until_ready(running)] == before
            assert all(map(alive, before))
            os.kill(before[0], signal.SIGKILL)
            await running.until_logged(r"replica_failed replica=local\[0\]")
            rows = await until_ready(running)
            after = [row["pid"] for row in rows]
            assert after[0] != before[0]
            assert after[1] == before[1]
            assert [row["restarts"] for row in rows] == [1, 0]
            pid = (await status(running))["pid"]
            os.kill(pid, signal.SIGTERM)
            await until_gone(pid)
            with trio.fail_after(20):
                for replica_pid in after:
                    await until_gone(replica_pid)
        finally:  # if the test failed; the parent-death guard ends the replicas
            with suppress(ProcessLookupError):
                os.kill(done.pid, signal.SIGKILL)


async def test_a_new_program_that_exits_at_once_ends_the_replicas(tmp_path):
    script, file = tmp_path / "replica.py", tmp_path / "proxy.toml"
    script.write_text(REPLICA)
    file.write_text(launch(f'["{sys.executable}", "-S", "{script}", "{{port}}"]', free_run(2)))
    async with program("--config", file) as running:
        replicas = [row["pid"] for row in await until_ready(running)]
        done = await upgrade(running)
        os.kill(done.pid, signal.SIGTERM)
        try:
            await until_gone(done.pid)
            assert not any(map(alive, replicas))  # the program exits after its replicas
        finally:
            for pid in filter(alive, [done.pid, *replicas]):
                os.kill(pid, signal.SIGKILL)

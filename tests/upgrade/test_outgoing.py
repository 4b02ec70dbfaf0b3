"""The running program in an upgrade."""

import os
from types import SimpleNamespace

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.config.parse import parse
from omni_proxy.upgrade.outgoing import Outgoing, UpgradeFailed

PARTS = SimpleNamespace(
    fleet=SimpleNamespace(workers=()),
    config_store=SimpleNamespace(config=parse("[server]\nupgrade_timeout_secs = 60\n")),
    weight_operations=SimpleNamespace(
        queue=SimpleNamespace(current=None), journal=SimpleNamespace(in_group=False, rollout=None)
    ),
    service_manager=SimpleNamespace(variables={}),
)


async def test_time_in_which_the_process_was_stopped_does_not_count(mock_clock, tmp_path):
    started, program = tmp_path / "started", tmp_path / "program"
    os.mkfifo(started)
    program.write_text(f"#!/bin/sh\necho > {started}\nexec sleep 1000\n")
    program.chmod(0o755)
    errors = []

    async def upgrade():
        with pytest.raises(UpgradeFailed) as caught:
            await outgoing.upgrade(str(program), lambda text: None)
        errors.append(str(caught.value))

    ended = []  # tasks that the upgrade has started, one of which limits its time

    def start_soon(function):
        async def run():
            await function()
            ended.append(function)

        nursery.start_soon(run)

    async with trio.open_nursery() as nursery:
        outgoing = Outgoing(PARTS, start_soon)
        nursery.start_soon(upgrade)
        await trio.to_thread.run_sync(started.read_bytes)
        await wait_all_tasks_blocked()
        mock_clock.jump(1000)
        await wait_all_tasks_blocked()
        for _ in range(119):
            assert not ended
            mock_clock.jump(0.5)
            await wait_all_tasks_blocked()
        assert ended
    assert errors == ["the new program was not ready within 60 s"]

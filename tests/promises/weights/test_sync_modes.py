"""The receiver process runs only in modes that need it."""

from pathlib import Path

import pytest
import trio

from tests.promises.support.engines import engines
from tests.promises.support.fleet_program import program, put, toml
from tests.promises.support.process_resources import tree

pytest.importorskip("torch")

PATIENCE_SECS = 60


def receivers(running):
    """Returns the ids of the program's receiver processes."""
    pids = []
    for pid in tree(running.process.pid):
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:  # the process has just ended
            continue
        pids += [pid] * (b"receiver-process" in arguments)
    return pids


async def test_the_receiver_process_runs_only_in_modes_that_need_it(tmp_path):
    file = tmp_path / "proxy.toml"

    async def switch_mode(running, mode, *, receives):
        put(file, toml([engine], more=f'[weight_sync]\nmode = "{mode}"\n'))
        response = await running.client.post("/reload")
        assert response.status_code == 200, response.text
        while bool(receivers(running)) is not receives:
            await trio.sleep(0.02)

    with trio.fail_after(PATIENCE_SECS):
        async with engines(1) as (engine,):
            put(file, toml([engine]))
            async with program("--config", file) as running:
                assert receivers(running) == []
                for mode, receives in (("receive", True), ("off", False), ("both", True)):
                    await switch_mode(running, mode, receives=receives)
                await switch_mode(running, "coordinate", receives=False)

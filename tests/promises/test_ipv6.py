"""An IPv6 address may be written as URLs have it, and is shown so wherever a port follows it."""

import json
import socket

import pytest
import trio

from tests.ports import free_port
from tests.program_forkserver import forking_interpreter
from tests.promises.fleet_program import program, put, toml, workers


@pytest.fixture(autouse=True)
async def soon():
    with socket.socket(socket.AF_INET6) as trial:
        try:
            trial.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
    with trio.fail_after(60):
        yield


async def status_of(file):
    words = ["-m", "omni_proxy", "status", "--json", "--config", str(file)]
    done = await trio.run_process([forking_interpreter(), *words], capture_stdout=True, check=False)
    return json.loads(done.stdout)


async def test_a_listener_named_in_brackets_is_found_moved_and_reports_its_clients(tmp_path):
    file, log = tmp_path / "proxy.toml", tmp_path / "access.log"
    more = f"access_log = '{log}'\nlog_format = 'json'\nhost = "
    async with workers("w") as fleet:
        port = free_port()
        put(file, toml(fleet, port=port, more=f"{more}'[::1]'"))
        async with program("--config", file) as running:
            assert running.client.base_url == f"http://[::1]:{port}"
            await running.until_routable(*fleet)
            assert (await running.ask()).json() == {"worker": "w"}
            assert (await status_of(file))["revision"] == 1
            moved = free_port()
            put(file, toml(fleet, port=moved, more=f"{more}'[::]'"))
            await running.says(rf"listening on http://\[::\]:{moved}")
            assert (await status_of(file))["revision"] == 2
    clients = [json.loads(line)["client"] for line in log.read_text().splitlines()]
    assert clients
    assert all(client.startswith("[::1]:") for client in clients)

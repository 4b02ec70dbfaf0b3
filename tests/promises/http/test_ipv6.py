"""IPv6 addresses may be configured in brackets, and are shown in brackets before a port."""

import json
import socket

import pytest
import trio

from tests.ports import free_port
from tests.program_forkserver import forking_interpreter
from tests.promises.support.fleet_program import program, put, toml, workers


@pytest.fixture(autouse=True)
async def soon():
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
    with trio.fail_after(60):
        yield


async def status_of(file):
    arguments = ["-m", "omni_proxy", "status", "--json", "--config", str(file)]
    done = await trio.run_process(
        [forking_interpreter(), *arguments], capture_stdout=True, check=False
    )
    return json.loads(done.stdout)


async def test_a_bracketed_ipv6_host_listens_moves_and_logs_its_clients(tmp_path):
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
            new_port = free_port()
            put(file, toml(fleet, port=new_port, more=f"{more}'[::]'"))
            await running.until_logged(rf"listener_opened url=http://\[::\]:{new_port}")
            assert (await status_of(file))["revision"] == 2
    clients = [json.loads(line)["client"] for line in log.read_text().splitlines()]
    assert clients
    assert all(client.startswith("[::1]:") for client in clients)

"""One of the two programs of an upgrade is killed or stopped at some step: the other one serves."""

import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio

from tests.ports import free_run
from tests.program_forkserver import forking_interpreter
from tests.promises.support.fleet_program import program, put, toml, workers
from tests.promises.upgrade.test_upgrade import script, status, until_gone, upgrade

pytestmark = pytest.mark.usefixtures("soon")

# A fork, like the first program, because importing the program takes a second.
STEPPING = """
import os, sys
program = ["{interpreter}", "-m", "tests.promises.support.stepping_program", *sys.argv]
os.execv(program[0], program)
"""
STARTED, READY = "StartedMessage", "ReadyMessage"


@asynccontextmanager
async def upgrading(tmp_path, step, more=""):
    """Runs an upgrade whose new program waits before the message `step`; yields the old program,
    its workers and the reports of `upgrade`."""
    binary = script(tmp_path, STEPPING.format(interpreter=forking_interpreter()))
    file, reports = tmp_path / "proxy.toml", []
    async with workers("w") as fleet:
        put(file, toml(fleet, port=free_run(1), more=more))
        async with program("--config", file) as running, trio.open_nursery() as nursery:
            await running.until_routable(*fleet)

            async def run_upgrade():
                try:
                    reports.append(await upgrade(running, binary))
                except ConnectionError:  # the old program was killed
                    reports.append(None)

            nursery.start_soon(run_upgrade)
            if step == READY:
                (tmp_path / f"{STARTED}.go").touch()
            while not (tmp_path / step).exists():
                await trio.sleep(0.01)
            yield running, fleet, reports


def release_new_program(tmp_path):
    for name in (STARTED, READY):
        (tmp_path / f"{name}.go").touch()


async def renew_client(running) -> None:
    """Replaces the client, whose connections belong to the killed program."""
    url = running.client.base_url
    await running.client.aclose()
    running.client = type(running.client)(base_url=url, timeout=60, trust_env=False)


async def until_serving(running, fleet) -> int:
    """Waits until a program serves requests; returns its process id."""
    await renew_client(running)
    with trio.fail_after(60):
        while True:
            try:
                pid = (await status(running))["pid"]
                break
            except httpx.TransportError:  # no program listens yet
                await trio.sleep(0.05)
    await running.until_routable(*fleet)
    assert (await running.ask()).status_code == 200
    return pid


async def end(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    await until_gone(pid)


@pytest.mark.parametrize("more", ["", "processes = 2\n"], ids=["one", "processes"])
@pytest.mark.parametrize(
    ("step", "message"),
    [(STARTED, "upgrade_predecessor_killed"), (READY, "upgrade_commit_missing")],
    ids=["with nothing handed over", "with the state handed over"],
)
async def test_the_new_program_serves_if_the_old_one_is_killed(tmp_path, step, message, more):
    async with upgrading(tmp_path, step, more) as (running, fleet, _):
        running.process.kill()
        await running.process.wait()
        release_new_program(tmp_path)
        await running.until_logged(message)
        pid = await until_serving(running, fleet)
        assert pid != running.process.pid
        assert not (await status(running))["upgrade"]["last_error"]
        await end(pid)


@pytest.mark.parametrize("step", [STARTED, READY])
async def test_the_old_program_serves_if_the_new_one_is_killed(tmp_path, step):
    async with upgrading(tmp_path, step) as (running, fleet, reports):
        (pid,) = children_of(running.process.pid, str(tmp_path / "binary"))
        os.kill(pid, signal.SIGKILL)
        await running.until_logged("upgrade_failed.*SIGKILL")
        assert (await status(running))["pid"] == running.process.pid
        assert (await running.ask()).status_code == 200
        done = await upgrade(running)
        assert done.outcome == "done", done
        await running.client.aclose()
        assert await running.process.wait() == 0
        await renew_client(running)
        assert (await status(running))["pid"] == done.pid
        await running.until_routable(*fleet)
        await end(done.pid)
    assert [report.outcome for report in reports] == ["failed"]


def children_of(pid: int, argument: str) -> list[int]:
    """Returns the child processes with this argument in their command line."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            arguments = (path / "cmdline").read_bytes().decode().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid and argument in arguments:
            pids.append(int(path.name))
    return pids


async def test_the_new_program_serves_while_the_old_one_is_stopped(
    tmp_path,
):
    async with upgrading(tmp_path, READY) as (running, _, reports):
        first = running.process.pid
        running.process.send_signal(signal.SIGSTOP)
        release_new_program(tmp_path)
        await renew_client(running)
        assert (await running.ask()).status_code == 200
        assert (await status(running))["pid"] != first
        assert reports == []
        running.process.send_signal(signal.SIGCONT)
        await running.until_logged("upgrade_taken_over")
        await running.client.aclose()
        assert await running.process.wait() == 0
        await renew_client(running)
        assert (await running.ask()).status_code == 200
        await end((await status(running))["pid"])
    assert [report.outcome for report in reports] == ["done"]

"""At the descriptor limit the proxy stops accepting, serves open connections, and recovers."""

import os
import resource
import signal
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio

from tests.ports import free_port
from tests.promises.support.clients import client_of, post
from tests.promises.support.fleet_program import PATIENCE_SECS, PROBES, program, put, toml, workers

SPARE = 12
CROWD = 3 * SPARE
PAUSED = "accept_paused"
RARELY = PROBES.replace("0.2", "600")

# Processes forked by a fork server do not inherit the limits of the process that requests them.
pytestmark = pytest.mark.usefixtures("own_interpreters")


@asynccontextmanager
async def limited_program(tmp_path, probes: str = RARELY):
    """A program that can open `SPARE` more descriptors, and a client that it has already served."""
    async with workers("a") as fleet:
        put(tmp_path / "proxy.toml", toml(fleet).replace(PROBES, probes))
        async with program("--config", tmp_path / "proxy.toml") as running:
            await running.until_routable(*fleet)
            running.address = running.client.base_url.netloc.decode()
            running.fleet = fleet
            async with client_of(running.address) as first:
                await served(first)
                await until_file_watched(running)
                limit = open_descriptors(running) + SPARE
                resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
                yield running, first


def open_descriptors(running) -> int:
    return len(os.listdir(f"/proc/{running.process.pid}/fd"))


async def until_file_watched(running) -> None:
    """The watcher of the configuration file starts after the listener, and opens some too."""
    folder = f"/proc/{running.process.pid}/fd"
    with trio.fail_after(PATIENCE_SECS):
        while "anon_inode:inotify" not in [
            link_of(f"{folder}/{name}") for name in os.listdir(folder)
        ]:
            await trio.sleep(0.02)


def link_of(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # closed meanwhile
        return ""


async def served(client) -> None:
    await client.send(post())
    answer = await client.answer()
    assert (answer.status, answer.body) == (200, b'{"worker": "a"}'), answer


async def until_closed(running, before: int) -> None:
    """Wait until the proxy has closed the descriptors of the crowd."""
    with trio.fail_after(PATIENCE_SECS):
        while open_descriptors(running) > before:
            await trio.sleep(0.02)


async def test_at_the_limit_open_connections_are_served_and_new_ones_wait(tmp_path):
    async with limited_program(tmp_path) as (running, first), AsyncExitStack() as stack:
        before = open_descriptors(running)
        crowd = [await stack.enter_async_context(client_of(running.address)) for _ in range(CROWD)]
        await running.until_logged(PAUSED)
        for _ in range(3):
            await served(first)
        assert open_descriptors(running) <= before + SPARE
        for client in crowd[:-1]:
            client.close()
        await served(crowd[-1])  # it was waiting in the backlog
        crowd[-1].close()
        await until_closed(running, before)
        async with client_of(running.address) as late:
            await served(late)
        assert running.log.count(PAUSED) == 1


async def test_the_proxy_recovers_each_time_and_leaks_no_descriptor(tmp_path):
    async with limited_program(tmp_path) as (running, first):
        before = open_descriptors(running)
        for time in range(1, 4):
            async with AsyncExitStack() as stack:
                for _ in range(CROWD):
                    await stack.enter_async_context(client_of(running.address))
                with trio.fail_after(PATIENCE_SECS):
                    while running.log.count(PAUSED) < time:
                        await trio.sleep(0.02)
            async with client_of(running.address) as late:
                await served(late)  # so the backlog is empty
            await until_closed(running, before)
            # That client may have taken the last descriptor, which pauses accepting once more: a
            # crowd that connects before the pause ends would not cause a pause of its own.
            async with client_of(running.address) as alone:
                await served(alone)
            await until_closed(running, before)
            await served(first)


async def test_workers_stay_healthy_at_the_limit(tmp_path):
    async with limited_program(tmp_path, PROBES) as (running, first), AsyncExitStack() as stack:
        for _ in range(CROWD):
            await stack.enter_async_context(client_of(running.address))
        await running.until_logged(PAUSED)
        for _ in range(15):  # longer than several probe intervals
            await served(first)
            await trio.sleep(0.1)


async def test_a_process_that_exits_without_free_descriptors_is_replaced_later(tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("a") as fleet:
        put(file, toml(fleet, more="processes = 2").replace(PROBES, RARELY))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            body = await running.until("/status", serving)
            soft, hard = resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (3, hard))
            os.kill(body["data_plane"]["processes"][0]["pid"], signal.SIGKILL)
            await running.until_logged(
                'dataplane_process_exited process=1 reason="could not be started: Too many open files'
            )
            resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
            await running.until("/status", serving)


def serving(body: dict) -> bool:
    return [process["state"] for process in body["data_plane"]["processes"]] == ["serving"] * 2


async def test_a_process_without_free_descriptors_moves_to_a_new_port_later(tmp_path):
    file, port = tmp_path / "proxy.toml", free_port()
    async with workers("a") as fleet:
        put(file, toml(fleet, more="processes = 2").replace(PROBES, RARELY))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            pids = pids_of(await running.until("/status", serving))
            limits = [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids]
            for pid, (_, hard) in zip(pids, limits, strict=True):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
            put(file, toml(fleet, port=port, more="processes = 2").replace(PROBES, RARELY))
            running.process.send_signal(signal.SIGHUP)
            for number in (1, 2):
                await running.until_logged(
                    f"dataplane_process_listen_failed process={number} .*Too many open files"
                )
            for pid, limit in zip(pids, limits, strict=True):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
            async with client_of(f"127.0.0.1:{port}") as client:
                await served(client)
            for number in (1, 2):
                await running.until_logged(f"dataplane_process_listen_recovered process={number}")
            running.client.base_url = f"http://127.0.0.1:{port}"
            assert pids_of(await running.until("/status", serving)) == pids


def pids_of(body: dict) -> list[int]:
    return [process["pid"] for process in body["data_plane"]["processes"]]

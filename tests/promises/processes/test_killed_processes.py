"""A killed process leaves no half-open request, and no process, behind."""

import os
import signal
from contextlib import AsyncExitStack

import pytest
import trio

from tests.processes import alive, until_gone
from tests.promises.support.clients import CHAT, client_of, post
from tests.promises.support.fakes import answering, counted, fake_workers
from tests.promises.support.fleet_program import PATIENCE_SECS, program, put, record, toml, workers
from tests.promises.support.processes_fixture import ResetsUntilHealthy, address, serving

pytestmark = pytest.mark.usefixtures("own_interpreters")
STICKY = "processes = 2\n[routing]\npolicy = 'random'\nsticky_sessions = true"
ROUNDS = 2


async def test_a_half_open_request_ends_with_its_process(tmp_path):
    script, file = ResetsUntilHealthy(), tmp_path / "proxy.toml"
    async with (
        fake_workers(script, answering(counted(b"{}"))) as fleet,
        AsyncExitStack() as clients,
    ):
        put(file, toml(fleet, more=STICKY))
        async with program("--config", file) as running:
            running.client.headers["connection"] = "close"
            await running.until_routable(*fleet)
            await running.until("/status", serving)
            while not record(await running.get_json("/workers"), fleet[0])["trial"]:
                async with client_of(address(running)) as client:
                    await client.send(ask())
                    assert (await client.answer()).status == 200
            script.well = True
            for count in range(1, ROUNDS + 1):
                await until_on_trial(running, script, clients, count)
                body = await running.until("/status", lambda body: in_flight(body)[-1] == 1)
                rows = body["data_plane"]["processes"]
                os.kill(max(rows, key=lambda row: row["in_flight"])["pid"], signal.SIGKILL)
                await running.until(
                    "/status", lambda body: in_flight(body) == [0, 0] and serving(body)
                )
                assert (await running.get_json("/status"))["data_plane"]["inflight"] == 0
                body = await running.get_json("/workers")
                assert [worker["in_flight"] for worker in body["workers"]] == [0, 0]
                assert record(body, fleet[0])["trial"]
            script.gate.set()
            while record(await running.get_json("/workers"), fleet[0])["trial"]:
                async with client_of(address(running)) as client:
                    await client.send(ask())
                    assert (await client.answer()).status == 200
            assert script.served


sessions = iter(range(1 << 30))


def ask() -> bytes:
    """A request of a new session, which any worker may get."""
    return post(CHAT, f"x-session-id: {next(sessions)}")


def in_flight(body: dict) -> list[int]:
    return sorted(row["in_flight"] for row in body["data_plane"]["processes"])


async def until_on_trial(
    running, script: ResetsUntilHealthy, clients: AsyncExitStack, count: int
) -> None:
    """Ask until one request, the only one in flight, waits at the half-open worker."""
    with trio.fail_after(PATIENCE_SECS):
        while script.now < count:
            client = await clients.enter_async_context(client_of(address(running)))
            await client.send(ask())
            while script.now < count and not client.rest:
                with trio.move_on_after(0.02):
                    client.rest += await client.receive()


async def test_a_stopped_process_exits_on_sigcont_after_the_main_process_was_killed(tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("a") as fleet:
        put(file, toml(fleet, more="processes = 2"))
        async with program("--config", file) as running:
            body = await running.until("/status", serving)
            stopped, other = (row["pid"] for row in body["data_plane"]["processes"])
            os.kill(stopped, signal.SIGSTOP)
            try:
                running.process.kill()
                await running.process.wait()
                await until_gone(other)
                assert alive(stopped)
            finally:
                os.kill(stopped, signal.SIGCONT)
            await until_gone(stopped)

"""Data-plane processes share in-flight counts, limits, sessions and half-open requests."""

import os
import signal
from collections import Counter

import httpx
import pytest
import trio

from tests.promises.support.clients import CHAT, client_of, post
from tests.promises.support.fakes import answering, counted, fake_workers
from tests.promises.support.fleet_program import program, put, record, starting, toml, workers
from tests.promises.support.processes_fixture import (
    ResetsUntilHealthy,
    address,
    held_streams,
    in_flight,
    open_gates,
    run_processes,
    send_requests,
    serving,
)


async def test_no_request_reaches_a_worker_after_it_was_disabled(tmp_path):
    async with run_processes(tmp_path, "a", "b") as running, trio.open_nursery() as nursery:
        a, _ = running.fleet
        completed, stop = [0], trio.Event()
        for _ in range(6):
            nursery.start_soon(send_requests, running, completed, stop)
        for _ in range(3):
            while a.requests < 5:
                await trio.sleep(0.01)
            worker_id = record(await running.get_json("/workers"), a)["id"]
            response = await running.client.put(f"/workers/{worker_id}", json={"disabled": True})
            assert response.status_code == 200
            await running.until("/workers", lambda t: not record(t, a)["in_flight"])
            a.requests, before = 0, completed[0]
            while completed[0] < before + 60:
                await trio.sleep(0.01)
            assert a.requests == 0
            await running.client.put(f"/workers/{worker_id}", json={"disabled": False})
        stop.set()


async def test_a_change_responds_after_the_slowest_process_has_applied_it(
    tmp_path, own_interpreters
):
    sock = tmp_path / "admin.sock"
    more = f"[admin]\nlisten = 'unix:{sock}'"
    async with workers("a") as fleet:
        put(tmp_path / "proxy.toml", toml(fleet, more=f"processes = 2\n{more}"))
        async with starting("--config", tmp_path / "proxy.toml") as running:
            await running.until_logged("listener_opened .*purpose=admin")
            transport = httpx.AsyncHTTPTransport(uds=str(sock))
            running.client = httpx.AsyncClient(transport=transport, base_url="http://control")
            body = await running.until("/status", serving)
            worker_id = (await running.until_routable(*fleet))["workers"][0]["id"]
            slow_pid = body["data_plane"]["processes"][1]["pid"]
            responses = []

            async def disable() -> None:
                switch = {"disabled": True}
                responses.append(await running.client.put(f"/workers/{worker_id}", json=switch))

            os.kill(slow_pid, signal.SIGSTOP)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(disable)
                await running.until("/workers", lambda body: body["workers"][0]["disabled"])
                await trio.sleep(0.2)
                assert responses == []
                os.kill(slow_pid, signal.SIGCONT)
            assert responses[0].status_code == 200


async def test_least_request_counts_in_flight_requests_of_all_processes(tmp_path):
    more = "[routing]\npolicy = 'least_request'"
    async with (
        run_processes(tmp_path, "a", "b", "c", more=more) as running,
        held_streams(running, 12),
    ):
        assert await in_flight(running) == [4, 4, 4]
        open_gates(running)


async def test_limits_hold_over_all_processes_and_queued_requests_follow(tmp_path):
    more = "max_inflight = 4\nqueue_size = 8\nqueue_timeout_secs = 30"
    async with run_processes(tmp_path, "a", more=more) as running, held_streams(running, 4):
        async with client_of(address(running)) as first, client_of(address(running)) as second:
            await first.send(post())
            await second.send(post())
            body = await running.until("/health", lambda t: t["admission"]["waiting"] == 2)
            assert body["admission"]["inflight"] == 4
            open_gates(running)
            assert (await first.answer()).status == 200
            assert (await second.answer()).status == 200
        assert (await running.get_json("/health"))["admission"]["peak_inflight"] == 4


async def test_a_session_has_the_same_worker_in_every_process(tmp_path):
    more = "[routing]\npolicy = 'random'\nsticky_sessions = true"
    async with run_processes(tmp_path, "a", "b", "c", more=more) as running:
        bodies_of: dict[str, set[bytes]] = {}
        for _ in range(8):
            for key in ("me", "you", "them"):
                async with client_of(address(running)) as client:
                    await client.send(post(CHAT, f"x-session-id: {key}"))
                    bodies_of.setdefault(key, set()).add((await client.answer()).body)
        assert [len(bodies) for bodies in bodies_of.values()] == [1, 1, 1]
        await running.until(
            "/status", lambda body: all(row["accepted"] for row in body["data_plane"]["processes"])
        )


class ConcurrencyRecorder:
    """A worker that records its greatest number of concurrent requests."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    async def __call__(self, call) -> None:
        if call.line.startswith("POST "):
            self.now += 1
            self.peak = max(self.peak, self.now)
            await trio.lowlevel.checkpoint()
            self.now -= 1
        await call.send(counted(b"{}"))


@pytest.mark.parametrize("limited", ["worker", "fleet"])
async def test_no_limit_is_exceeded_when_all_processes_pick_at_once(tmp_path, limited):
    recorder, file = ConcurrencyRecorder(), tmp_path / "proxy.toml"
    worker_limit = "max_inflight = 2\n" if limited == "worker" else ""
    fleet_limit = "max_inflight = 2\n" if limited == "fleet" else ""
    statuses = Counter()

    async def ask(running) -> None:
        async with client_of(address(running)) as client:
            for _ in range(40):
                await client.send(post())
                statuses[(await client.answer()).status] += 1

    async with fake_workers(recorder) as fleet:
        server = f"processes = 3\nqueue_size = 50\n{fleet_limit}"
        put(file, f"{toml([], more=server)}[[workers]]\nurl = '{fleet[0].url}'\n{worker_limit}")
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            await running.until("/status", lambda body: serving(body, 3))
            async with trio.open_nursery() as nursery:
                for _ in range(12):
                    nursery.start_soon(ask, running)
    assert statuses == {200: 480}
    assert recorder.peak == 2


async def test_a_half_open_worker_gets_one_request_at_a_time_from_all_processes(tmp_path):
    resetting, file = ResetsUntilHealthy(), tmp_path / "proxy.toml"
    async with fake_workers(resetting, answering(counted(b"{}"))) as fleet:
        put(file, toml(fleet, more="processes = 2"))
        async with program("--config", file) as running, trio.open_nursery() as nursery:
            await running.until_routable(*fleet)
            await running.until("/status", serving)
            completed, stop = [0], trio.Event()
            for _ in range(6):
                nursery.start_soon(send_requests, running, completed, stop)
            await running.until("/workers", lambda t: record(t, fleet[0])["failed_requests"] >= 3)
            await running.until("/workers", lambda t: record(t, fleet[0])["trial"])
            resetting.well = True
            while not resetting.now:
                await trio.sleep(0.01)
            before = completed[0]
            while completed[0] < before + 60:
                await trio.sleep(0.01)
            assert (resetting.peak, resetting.served) == (1, 0)
            resetting.gate.set()
            while resetting.served < 10:
                await trio.sleep(0.01)
            stop.set()

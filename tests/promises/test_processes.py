"""Several door processes are one proxy: to clients, to workers and to operators."""

import os
import signal
from collections import Counter
from contextlib import asynccontextmanager

import httpx
import pytest
import trio

from tests.promises.clients import CHAT, STREAMED, client_of, post
from tests.promises.fakes import answering, counted, fake_workers
from tests.promises.fleet_program import (
    PATIENCE_SECS,
    program,
    put,
    record,
    starting,
    toml,
    workers,
)

LAST = b"0\r\n\r\n"


def serving(told: dict, count: int = 2) -> bool:
    states = [door["state"] for door in told["door"]["doors"]]
    return states == ["serving"] * count


@asynccontextmanager
async def doors(tmp_path, *names: str, more: str = "", count: int = 2):
    file = tmp_path / "proxy.toml"
    async with workers(*names) as fleet:
        put(file, toml(fleet, more=f"processes = {count}\n{more}"))
        async with program("--config", file) as running:
            running.file, running.fleet = file, fleet
            running.client.headers["connection"] = "close"  # at any door, each time
            await running.until_routable(*fleet)
            if count > 1:
                await running.until("/status", lambda told: serving(told, count))
            try:
                yield running
            finally:
                for worker in fleet:
                    worker.gate.set()


def address(running) -> str:
    return running.client.base_url.netloc.decode()


async def in_flight(running) -> list[int]:
    told = await running.told("/workers")
    return [record(told, worker)["in_flight"] for worker in running.fleet]


@asynccontextmanager
async def held_streams(running, count: int, *, everywhere: bool = False):
    """Streams on a connection each, begun one after the other, all halfway.

    `everywhere`: so many and as it takes until every door has one, for the kernel deals them out.
    """
    for worker in running.fleet:
        worker.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        streams, done = [], trio.Event()

        async def hold(*, task_status=trio.TASK_STATUS_IGNORED):
            async with client_of(address(running)) as client:
                await client.send(post(STREAMED))
                await client.until(b"\n\n")
                streams.append(client)
                task_status.started()
                await done.wait()

        for _ in range(count):
            await nursery.start(hold)
        while everywhere and not all(await at_doors(running, len(streams))):
            assert len(streams) < 100
            await nursery.start(hold)
        yield streams
        done.set()


async def at_doors(running, count: int) -> list[int]:
    """How many of so many requests each door has."""
    told = await running.until(
        "/status", lambda t: sum(row["in_flight"] for row in t["door"]["doors"]) == count
    )
    return [row["in_flight"] for row in told["door"]["doors"]]


async def came_whole(stream) -> bool:
    try:
        while not stream.rest.endswith(LAST):
            piece = await stream.receive()
            if not piece:
                return False
            stream.rest += piece
    except trio.BrokenResourceError:
        return False
    return True


def let_go(running) -> None:
    for worker in running.fleet:
        worker.gate.set()


async def hammer(running, tally: list[int], stop: trio.Event) -> None:
    """A connection for each request; whatever is no 200 is a failure."""
    while not stop.is_set():
        async with client_of(address(running)) as client:
            await client.send(post())
            answer = await client.answer()
            assert answer.status == 200, answer
            tally[0] += 1


async def test_requests_reach_every_door_and_are_counted_once(tmp_path):
    async with doors(tmp_path, "a", "b") as running:
        for _ in range(40):
            async with client_of(address(running)) as client:
                await client.send(post())
                assert (await client.answer()).status == 200

        def all_told(told: dict) -> bool:  # what ended and what was let in are told one by one
            rows = told["door"]["doors"]
            ended = told["door"]["ended"].get("completed", 0)
            return ended >= 40 and all(row["accepted"] for row in rows)

        told = await running.until("/status", all_told)
        assert len({row["pid"] for row in told["door"]["doors"]} | {told["pid"]}) == 3

        def routed(told: dict) -> bool:
            return sum(worker["routed_requests"] for worker in told["workers"]) == 40

        await running.until("/workers", routed)
        text = (await running.client.get("/metrics")).text
        lines = [line for line in text.splitlines() if 'route="/v1/chat/completions"' in line]
        ended = [line for line in lines if line.startswith("omni_proxy_requests_total")]
        assert sum(float(line.rpartition(" ")[2]) for line in ended) == 40


async def test_a_killed_door_costs_its_own_connections_and_is_replaced(tmp_path):
    async with (
        doors(tmp_path, "a", "b") as running,
        held_streams(running, 10, everywhere=True) as streams,
    ):
        count = len(streams)
        assert sum(await in_flight(running)) == count
        victim = (await running.told("/status"))["door"]["doors"][0]
        os.kill(victim["pid"], signal.SIGKILL)
        mine = victim["in_flight"]
        assert 0 < mine < count
        await running.until(
            "/workers", lambda t: sum(w["in_flight"] for w in t["workers"]) == count - mine
        )
        let_go(running)
        whole = 0
        for stream in streams:
            whole += await came_whole(stream)
        assert whole == count - mine
        told = await running.until("/status", serving)
        assert [row["restarts"] for row in told["door"]["doors"]] == [1, 0]
        await running.until("/workers", lambda t: not any(w["in_flight"] for w in t["workers"]))
        assert (await running.told("/status"))["door"]["inflight"] == 0
        await running.says("was ended by SIGKILL")


async def test_nothing_reaches_a_worker_after_its_disabling_was_answered(tmp_path):
    async with doors(tmp_path, "a", "b") as running, trio.open_nursery() as nursery:
        a, _ = running.fleet
        tally, stop = [0], trio.Event()
        for _ in range(6):
            nursery.start_soon(hammer, running, tally, stop)
        for _ in range(3):
            while a.requests < 5:
                await trio.sleep(0.01)
            worker_id = record(await running.told("/workers"), a)["id"]
            answer = await running.client.put(f"/workers/{worker_id}", json={"disabled": True})
            assert answer.status_code == 200
            await running.until("/workers", lambda t: not record(t, a)["in_flight"])
            a.requests, before = 0, tally[0]
            while tally[0] < before + 60:
                await trio.sleep(0.01)
            assert a.requests == 0
            await running.client.put(f"/workers/{worker_id}", json={"disabled": False})
        stop.set()


async def test_a_change_is_answered_once_the_slowest_door_has_taken_it(tmp_path):
    sock = tmp_path / "admin.sock"
    more = f"[admin]\nlisten = 'unix:{sock}'"
    async with workers("a") as fleet:
        put(tmp_path / "proxy.toml", toml(fleet, more=f"processes = 2\n{more}"))
        async with starting("--config", tmp_path / "proxy.toml") as running:
            await running.says("listening on .* for control requests")
            transport = httpx.AsyncHTTPTransport(uds=str(sock))
            running.client = httpx.AsyncClient(transport=transport, base_url="http://control")
            told = await running.until("/status", serving)
            worker_id = (await running.until_routable(*fleet))["workers"][0]["id"]
            slow = told["door"]["doors"][1]["pid"]
            answers = []

            async def disable() -> None:
                switch = {"disabled": True}
                answers.append(await running.client.put(f"/workers/{worker_id}", json=switch))

            os.kill(slow, signal.SIGSTOP)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(disable)
                await running.until("/workers", lambda told: told["workers"][0]["disabled"])
                await trio.sleep(0.2)
                assert answers == []
                os.kill(slow, signal.SIGCONT)
            assert answers[0].status_code == 200


async def test_least_request_sees_what_all_doors_have_in_flight(tmp_path):
    more = "[routing]\npolicy = 'least_request'"
    async with doors(tmp_path, "a", "b", "c", more=more) as running, held_streams(running, 12):
        assert await in_flight(running) == [4, 4, 4]
        let_go(running)


async def test_the_bounds_hold_over_all_doors_and_room_wakes_those_who_wait(tmp_path):
    more = "max_inflight = 4\nqueue_size = 8\nqueue_timeout_secs = 30"
    async with doors(tmp_path, "a", more=more) as running, held_streams(running, 4):
        async with client_of(address(running)) as late, client_of(address(running)) as later:
            await late.send(post())
            await later.send(post())
            told = await running.until("/health", lambda t: t["admission"]["waiting"] == 2)
            assert told["admission"]["inflight"] == 4
            let_go(running)
            assert (await late.answer()).status == 200
            assert (await later.answer()).status == 200
        assert (await running.told("/health"))["admission"]["peak_inflight"] == 4


async def test_a_session_means_the_same_worker_to_every_door(tmp_path):
    more = "[routing]\npolicy = 'random'\nsticky_sessions = true"
    async with doors(tmp_path, "a", "b", "c", more=more) as running:
        homes: dict[str, set[bytes]] = {}
        for _ in range(8):
            for key in ("me", "you", "them"):
                async with client_of(address(running)) as client:
                    await client.send(post(CHAT, f"x-session-id: {key}"))
                    homes.setdefault(key, set()).add((await client.answer()).body)
        assert [len(bodies) for bodies in homes.values()] == [1, 1, 1]
        await running.until(
            "/status", lambda told: all(row["accepted"] for row in told["door"]["doors"])
        )


class Crowd:
    """A worker that answers after a breath, and knows how many it had at a time at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def __call__(self, call) -> None:
        if call.line.startswith("POST "):
            self.now += 1
            self.most = max(self.most, self.now)
            await trio.lowlevel.checkpoint()
            self.now -= 1
        await call.send(counted(b"{}"))


@pytest.mark.parametrize("bound", ["worker", "fleet"])
async def test_no_bound_is_passed_where_all_doors_pick_at_the_same_moment(tmp_path, bound):
    crowd, file = Crowd(), tmp_path / "proxy.toml"
    at_worker = "max_inflight = 2\n" if bound == "worker" else ""
    at_fleet = "max_inflight = 2\n" if bound == "fleet" else ""
    statuses = Counter()

    async def ask(running) -> None:
        async with client_of(address(running)) as client:
            for _ in range(40):
                await client.send(post())
                statuses[(await client.answer()).status] += 1

    async with fake_workers(crowd) as fleet:
        server = f"processes = 3\nqueue_size = 50\n{at_fleet}"
        put(file, f"{toml([], more=server)}[[workers]]\nurl = '{fleet[0].url}'\n{at_worker}")
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            await running.until("/status", lambda told: serving(told, 3))
            async with trio.open_nursery() as nursery:
                for _ in range(12):
                    nursery.start_soon(ask, running)
    assert statuses == {200: 480}
    assert crowd.most == 2


class Ill:
    """Resets until it is `well`; then its first request takes as long as the test likes."""

    def __init__(self) -> None:
        self.well = False
        self.now = self.most = self.served = 0
        self.gate = trio.Event()

    async def __call__(self, call) -> None:
        if call.line.startswith("GET "):  # not of a client
            await call.send(counted(b"{}"))
            return
        if not self.well:
            call.reset()
            return
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.gate.wait()
            await call.send(counted(b"{}"))
            self.served += 1
        finally:
            self.now -= 1


async def test_a_worker_on_trial_gets_one_request_at_a_time_from_all_doors_together(tmp_path):
    ill, file = Ill(), tmp_path / "proxy.toml"
    async with fake_workers(ill, answering(counted(b"{}"))) as fleet:
        put(file, toml(fleet, more="processes = 2"))
        async with program("--config", file) as running, trio.open_nursery() as nursery:
            await running.until_routable(*fleet)
            await running.until("/status", serving)
            tally, stop = [0], trio.Event()
            for _ in range(6):
                nursery.start_soon(hammer, running, tally, stop)
            await running.until("/workers", lambda t: record(t, fleet[0])["failed_requests"] >= 3)
            await running.until("/workers", lambda t: record(t, fleet[0])["trial"])
            ill.well = True
            while not ill.now:
                await trio.sleep(0.01)
            before = tally[0]
            while tally[0] < before + 60:
                await trio.sleep(0.01)
            assert (ill.most, ill.served) == (1, 0)
            ill.gate.set()
            while ill.served < 10:
                await trio.sleep(0.01)
            stop.set()


async def test_a_reload_is_in_force_at_every_door_once_it_is_answered(tmp_path):
    async with doors(tmp_path, "a", "b") as running:
        a, b = running.fleet
        put(running.file, toml([b], more="processes = 2\nmax_payload_size = 100"))
        answer = await running.client.post("/reload")
        assert answer.json()["outcome"] in ("applied", "unchanged")
        a.requests = 0
        for _ in range(20):
            async with client_of(address(running)) as client:
                await client.send(post(), post(b" " * 101))
                assert [(await client.answer()).status for _ in range(2)] == [200, 413]
        assert a.requests == 0


async def test_the_number_of_processes_may_change_under_load(tmp_path):
    async with doors(tmp_path, "a", count=1) as running, trio.open_nursery() as nursery:
        tally, stop = [0], trio.Event()
        for _ in range(4):
            nursery.start_soon(hammer, running, tally, stop)
        for count in (3, 2, 1):
            put(running.file, toml(running.fleet, more=f"processes = {count}"))
            assert (await running.client.post("/reload")).status_code == 200
            wanted = 0 if count == 1 else count
            await running.until(
                "/status", lambda t, wanted=wanted: len(t["door"].get("doors", ())) == wanted
            )
            if wanted:
                await running.until("/status", lambda t, wanted=wanted: serving(t, wanted))
            before = tally[0]
            while tally[0] < before + 50:
                await trio.sleep(0.01)
        stop.set()


async def test_the_number_may_change_again_before_the_doors_that_leave_are_gone(tmp_path):
    async with doors(tmp_path, "a", count=1) as running, trio.open_nursery() as nursery:
        tally, stop = [0], trio.Event()
        for _ in range(8):
            nursery.start_soon(hammer, running, tally, stop)
        for count in (3, 1, 2):
            put(running.file, toml(running.fleet, more=f"processes = {count}"))
            assert (await running.client.post("/reload")).status_code == 200
            if count == 3:
                await running.until("/status", lambda told: serving(told, 3))
        told = await running.until("/status", serving)
        assert [row["door"] for row in told["door"]["doors"]] == [4, 5]
        before = tally[0]
        while tally[0] < before + 100:
            await trio.sleep(0.01)
        stop.set()


async def test_a_drain_lets_every_door_end_what_it_has(tmp_path):
    async with (
        doors(tmp_path, "a") as running,
        held_streams(running, 6, everywhere=True) as streams,
    ):
        running.process.send_signal(signal.SIGTERM)
        await running.says("draining")
        await trio.sleep(0.1)
        let_go(running)
        for stream in streams:
            assert await came_whole(stream)
        with trio.fail_after(PATIENCE_SECS):
            assert await running.process.wait() == 0


async def test_the_doors_end_with_control(tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("a") as fleet:
        put(file, toml(fleet, more="processes = 2"))
        async with program("--config", file) as running:
            told = await running.until("/status", serving)
            pids = [row["pid"] for row in told["door"]["doors"]]
            running.process.kill()
            await running.process.wait()
            with trio.fail_after(PATIENCE_SECS):
                while any(alive(pid) for pid in pids):
                    await trio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

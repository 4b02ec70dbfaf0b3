"""Sticky sessions counted as load: where they are placed, and when they end, wait and move."""

import json
from collections import Counter
from contextlib import asynccontextmanager

import pytest
import trio

from tests.dataplane.loop_script import until
from tests.promises.support.clients import CHAT, client_of, post
from tests.promises.support.dataplane_fixture import run_dataplane
from tests.promises.support.engines import engines
from tests.promises.support.fakes import answering, counted, fake_workers
from tests.promises.support.fleet_program import program, put, record, toml
from tests.promises.support.processes_fixture import address, run_processes, serving

BY_SESSIONS = (
    "[routing]\npolicy = 'least_request'\nsticky_sessions = true\nsticky_load = 'sessions'\n"
)
QUEUED = "[server]\nqueue_size = 50\n"


def session_request(session, body=CHAT):
    return post(body, f"x-session-id: {session}")


async def ask(running, session):
    """Sends a request on a new connection, so to any process; returns the worker that served it."""
    async with client_of(address(running)) as client:
        await client.send(session_request(session))
        response = await client.answer()
        assert response.status == 200
        return response.one("x-sglang-omni-worker")


async def finish(running, session):
    response = await running.client.post(f"/finish_session?session_id={session}")
    assert response.status_code == 200
    return response.json()["finished"]


async def sessions(running):
    body = await running.get_json("/workers")
    return [record(body, worker)["sessions"] for worker in running.fleet]


@pytest.mark.parametrize("count", [1, 3])
async def test_sessions_are_spread_evenly_and_finished_by_their_clients(tmp_path, count):
    """No request is in flight at any time: only session counts differ between workers."""
    async with run_processes(tmp_path, "a", "b", "c", more=BY_SESSIONS, count=count) as running:
        homes = {f"s{number}": await ask(running, f"s{number}") for number in range(12)}
        assert await sessions(running) == [4, 4, 4]
        assert {key: await ask(running, key) for key in homes} == homes
        finished = [key for key, home in homes.items() if home == homes["s0"]]
        assert [await finish(running, key) for key in finished] == [True] * 4
        assert [await finish(running, key) for key in finished] == [False] * 4
        assert sorted(await sessions(running)) == [0, 4, 4]
        placed = [await ask(running, f"t{number}") for number in range(4)]
        assert placed == [homes["s0"]] * 4
        metrics = (await running.client.get("/metrics")).text
        for worker in running.fleet:
            assert f'omni_proxy_worker_sessions{{worker="{worker.url}"}} 4.0' in metrics
        assert "omni_proxy_sticky_sessions_finished_total 4.0" in metrics


@pytest.mark.parametrize("count", [1, 2])
async def test_explain_sees_the_sessions_of_every_process(tmp_path, count):
    more = BY_SESSIONS.replace("least_request", "random")
    async with run_processes(tmp_path, "a", "b", "c", more=more, count=count) as running:
        home = await ask(running, "anna")
        for _ in range(3):
            response = await running.client.post(
                "/explain", content=CHAT, headers={"x-session-id": "anna"}
            )
            pick = response.json()["pick"]
            assert (pick["worker_id"], pick["reason"]) == (home, "its session stays there")


async def test_sessions_survive_changes_of_the_processes(tmp_path):
    async with run_processes(tmp_path, "a", "b", more=BY_SESSIONS, count=2) as running:
        homes = {f"s{number}": await ask(running, f"s{number}") for number in range(8)}
        for count in (3, 2):
            put(running.file, toml(running.fleet, more=f"processes = {count}\n{BY_SESSIONS}"))
            await running.until("/status", lambda body, count=count: serving(body, count))
            assert {key: await ask(running, key) for key in homes} == homes
        assert await sessions(running) == [4, 4]


async def test_an_idle_session_expires_and_no_longer_counts(tmp_path):
    more = f"{BY_SESSIONS}sticky_idle_secs = 0.05\n"
    async with run_processes(tmp_path, "a", "b", more=more, count=2) as running:
        await ask(running, "me")
        await running.until(
            "/workers", lambda body: not any(worker["sessions"] for worker in body["workers"])
        )


@asynccontextmanager
async def fleet_of(count, config=QUEUED + BY_SESSIONS):
    """Runs a data plane with workers that answer with their number."""
    scripts = [answering(counted(str(number).encode())) for number in range(count)]
    async with fake_workers(*scripts) as workers, run_dataplane(*workers, config=config) as opened:
        yield opened


async def worker_of(opened, session):
    async with opened.client() as client:
        await client.send(session_request(session))
        response = await client.answer()
        assert response.status == 200
        return opened.fleet.workers[int(response.body)]


class SessionClients:
    """Sends requests that may wait; `answers` has the worker of each session once it responds."""

    def __init__(self, opened, nursery):
        self._opened, self._nursery, self.answers = opened, nursery, {}

    def start(self, *sessions):
        for session in sessions:
            self._nursery.start_soon(self._ask, session)

    async def _ask(self, session):
        self.answers[session] = await worker_of(self._opened, session)


@pytest.mark.parametrize("reason", ["updating", "paused"])
async def test_a_session_waits_for_its_worker_while_others_are_served(reason):
    holding = "[weight_sync]\nwhile_updating = 'hold'\n"
    config = QUEUED + BY_SESSIONS + "while_paused = 'hold'\n" + holding
    async with fleet_of(3, config) as opened, trio.open_nursery() as nursery:
        home = await worker_of(opened, "mine")
        opened.fleet.cordon(home, reason)
        clients = SessionClients(opened, nursery)
        clients.start("mine")
        await until(lambda: opened.dataplane.queue.waiting == 1)
        for number in range(6):
            assert await worker_of(opened, f"other {number}") is not home
        assert opened.dataplane.queue.waiting == 1
        opened.fleet.uncordon(home, reason)
        await until(lambda: clients.answers)
        assert clients.answers == {"mine": home}
        assert opened.log.records[-1]["queue_ms"] >= 0


async def test_after_an_update_of_all_workers_sessions_stay_at_their_workers():
    """Workers return one by one, and no session moves to the first of them."""
    async with fleet_of(4) as opened, trio.open_nursery() as nursery:
        names = [f"s{number}" for number in range(12)]
        homes = {name: await worker_of(opened, name) for name in names}
        assert Counter(homes.values()) == dict.fromkeys(opened.fleet.workers, 3)
        for worker in opened.fleet.workers:
            opened.fleet.cordon(worker, "updating")
        clients = SessionClients(opened, nursery)
        clients.start(*names)
        await until(lambda: opened.dataplane.queue.waiting == 12)
        for number, worker in enumerate(opened.fleet.workers, 1):
            opened.fleet.uncordon(worker, "updating")
            await until(lambda count=3 * number: len(clients.answers) == count)
            assert opened.dataplane.queue.waiting == 12 - 3 * number
        assert clients.answers == homes


def place_sessions(opened, worker, *names):
    """As if an earlier program had placed these sessions."""
    rows = [(name, worker.url, opened.dataplane.loop.now) for name in names]
    opened.dataplane.policy.restore_sessions(rows, opened.fleet.find)


async def test_queued_sessions_block_no_other_queued_request():
    """Some requests are queued before their worker is updated, others afterwards."""
    config = QUEUED + "max_inflight = 1\n" + BY_SESSIONS
    gate = trio.Event()

    async def gated(call):
        await gate.wait()
        await call.send(counted(b"good"))

    async with (
        fake_workers(gated, gated) as workers,
        run_dataplane(*workers, config=config) as opened,
        trio.open_nursery() as nursery,
    ):
        responses = []

        async def send_one(session):
            async with opened.client() as client:
                await client.send(session_request(session))
                response = await client.answer()
                responses.append((session, response.status, response.one("x-sglang-omni-worker")))

        async def queue(*names):
            for name in names:
                before = opened.dataplane.queue.waiting
                nursery.start_soon(send_one, name)
                await until(lambda before=before: opened.dataplane.queue.waiting > before)

        holder, home = "holder", opened.fleet.workers[0]
        place_sessions(opened, home, "held")
        nursery.start_soon(send_one, holder)
        await until(lambda: opened.dataplane.in_flight == 1)
        await queue("held", "free 1", "free 2")
        opened.fleet.cordon(home, "updating")
        gate.set()
        await until(lambda: len(responses) == 3)
        assert {name for name, status, _ in responses if status == 200} == {
            holder, "free 1", "free 2",
        }  # fmt: skip
        assert opened.dataplane.queue.waiting == 1
        opened.fleet.uncordon(home, "updating")
        await until(lambda: len(responses) == 4)
        assert responses[-1] == ("held", 200, home.id)


def specs(fleet):
    return [worker.spec for worker in fleet.workers]


@pytest.mark.parametrize(
    "change",
    [
        lambda fleet, home: fleet.cordon(home, "uncertain"),
        lambda fleet, home: fleet.mark_dead(home, home.registered_at),
        lambda fleet, home: fleet.apply(
            [spec for spec in specs(fleet) if spec.url != home.url], home.registered_at
        ),
    ],
    ids=["its weights are uncertain", "it died", "it was removed"],
)
async def test_a_queued_session_moves_if_its_worker_will_not_return(change):
    async with fleet_of(3) as opened, trio.open_nursery() as nursery:
        home = await worker_of(opened, "mine")
        workers = opened.fleet.workers
        opened.fleet.cordon(home, "updating")
        async with opened.client() as client:
            await client.send(session_request("mine"))
            await until(lambda: opened.dataplane.queue.waiting == 1)
            change(opened.fleet, home)
            response = await client.answer()
        assert response.status == 200
        assert workers[int(response.body)] is not home
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "config",
    [BY_SESSIONS, QUEUED + BY_SESSIONS + "[weight_sync]\nwhile_updating = 'shed'\n"],
    ids=["without a queue", "shed"],
)
async def test_a_session_moves_during_an_update_if_requests_are_not_queued(config):
    async with fleet_of(3, config) as opened:
        home = await worker_of(opened, "mine")
        opened.fleet.cordon(home, "updating")
        new = await worker_of(opened, "mine")
        assert new is not home
        opened.fleet.uncordon(home, "updating")
        assert await worker_of(opened, "mine") is new


async def test_the_error_of_a_session_that_waited_too_long_has_the_reason():
    config = "[server]\nqueue_size = 5\nqueue_timeout_secs = 0.05\n" + BY_SESSIONS
    async with fleet_of(2, config) as opened:
        home = await worker_of(opened, "mine")
        opened.fleet.cordon(home, "updating")
        async with opened.client() as client:
            await client.send(session_request("mine"))
            response = await client.answer()
        assert (response.status, response.one("retry-after")) == (503, "1")
        error = json.loads(response.body)["error"]
        assert error["reason"] == "weights_updating"
        assert "the worker of this session is being updated" in error["message"]
        assert "waited 0.05 s" in error["message"]


@pytest.mark.parametrize("pad", [0, 100_000, 3 << 20], ids=["small", "large", "very large"])
async def test_a_body_key_identifies_the_session_in_a_body_of_any_size(pad):
    config = BY_SESSIONS + "session_headers = []\nsession_body_keys = ['session.id', 'user']\n"
    async with fleet_of(3, config) as opened, opened.client() as client:
        homes = Counter()
        for number in range(9):
            fields = {"messages": [], "pad": "x" * pad, "session": {"id": f"s{number % 3}"}}
            await client.send(post(json.dumps(fields).encode()))
            homes[number % 3, (await client.answer()).body] += 1
        assert sorted(homes.values()) == [3, 3, 3]
        assert len({worker for _, worker in homes}) == 3


async def test_the_rebalance_limits_move_sessions_from_a_slow_worker():
    gate = trio.Event()

    async def slow(call):
        await gate.wait()
        await call.send(counted(b"0"))

    config = BY_SESSIONS + "sticky_rebalance_abs = 3\nsticky_rebalance_rel = 2.0\n"
    async with (
        fake_workers(slow, answering(counted(b"1"))) as workers,
        run_dataplane(*workers, config=config) as opened,
        trio.open_nursery() as nursery,
    ):
        home, other = opened.fleet.workers
        names = [f"s{number}" for number in range(6)]
        place_sessions(opened, home, *names)
        clients = SessionClients(opened, nursery)
        for number, name in enumerate(names, 1):
            clients.start(name)
            await until(lambda count=number: home.in_flight + len(clients.answers) == count)
        # Three requests wait, and the other sessions move.
        assert set(clients.answers) == set(names[3:])
        assert set(clients.answers.values()) == {other}
        assert [opened.dataplane.session_count(worker) for worker in (home, other)] == [3, 3]
        assert await worker_of(opened, "new") is other  # although it has as many sessions
        gate.set()
        await until(lambda: len(clients.answers) == 6)


async def test_a_paused_worker_keeps_its_sessions_in_every_process(tmp_path):
    more = f"processes = 2\nqueue_size = 20\n{BY_SESSIONS}while_paused = 'hold'\n"
    async with engines(2) as fleet:
        file = tmp_path / "proxy.toml"
        put(file, toml(fleet, more=more))
        async with program("--config", file) as running:
            running.client.headers["connection"] = "close"
            await running.until_routable(*fleet)
            await running.until("/status", serving)
            home = await ask(running, "mine")
            url = {
                record(await running.get_json("/workers"), engine)["id"]: engine.url
                for engine in fleet
            }
            paused = await running.client.post(
                f"/pause_generation?selector=url={url[home]}", json={}
            )
            assert paused.json()["status"] == "ok", paused.text
            responses = {}

            async def send_one(number):
                responses[number] = await ask(running, "mine")

            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(send_one, number)
                await running.until("/health", lambda t: t["admission"]["waiting"] == 4)
                others = {await ask(running, f"other {number}") for number in range(6)}
                assert len(others) == 1
                assert home not in others
                assert responses == {}
                assert (await running.client.post("/continue_generation", json={})).is_success
            assert responses == dict.fromkeys(range(4), home)

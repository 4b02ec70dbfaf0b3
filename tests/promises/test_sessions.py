"""Sticky sessions as load: where they begin, when they end, when they wait and when they move."""

import json
from collections import Counter
from contextlib import asynccontextmanager

import pytest
import trio

from tests.dataplane.loop_script import until
from tests.promises.clients import CHAT, client_of, post
from tests.promises.dataplane_fixture import run_dataplane
from tests.promises.engines import engines
from tests.promises.fakes import answering, counted, fake_workers
from tests.promises.fleet_program import program, put, record, toml
from tests.promises.processes_fixture import address, run_processes, serving

BY_SESSIONS = (
    "[routing]\npolicy = 'least_request'\nsticky_sessions = true\nsticky_load = 'sessions'\n"
)
QUEUED = "[server]\nqueue_size = 50\n"


def turn(session, body=CHAT):
    return post(body, f"x-session-id: {session}")


async def ask(running, session):
    """On a connection of its own, so at any process; the worker that answered."""
    async with client_of(address(running)) as client:
        await client.send(turn(session))
        answer = await client.answer()
        assert answer.status == 200
        return answer.one("x-sglang-omni-worker")


async def finish(running, session):
    answer = await running.client.post(f"/finish_session?session_id={session}")
    assert answer.status_code == 200
    return answer.json()["finished"]


async def sessions(running):
    body = await running.get_json("/workers")
    return [record(body, worker)["sessions"] for worker in running.fleet]


@pytest.mark.parametrize("count", [1, 3])
async def test_sessions_are_spread_by_their_number_and_ended_by_their_clients(tmp_path, count):
    """No request is in flight at any time: only sessions tell the workers apart."""
    async with run_processes(tmp_path, "a", "b", "c", more=BY_SESSIONS, count=count) as running:
        homes = {f"s{number}": await ask(running, f"s{number}") for number in range(12)}
        assert await sessions(running) == [4, 4, 4]
        assert {key: await ask(running, key) for key in homes} == homes
        ending = [key for key, home in homes.items() if home == homes["s0"]]
        assert [await finish(running, key) for key in ending] == [True] * 4
        assert [await finish(running, key) for key in ending] == [False] * 4
        assert sorted(await sessions(running)) == [0, 4, 4]
        begun = [await ask(running, f"t{number}") for number in range(4)]
        assert begun == [homes["s0"]] * 4
        metrics = (await running.client.get("/metrics")).text
        for worker in running.fleet:
            assert f'omni_proxy_worker_sessions{{worker="{worker.url}"}} 4.0' in metrics
        sticky = "omni_proxy_sticky_sessions_finished_total 4.0"
        assert sticky in metrics


@pytest.mark.parametrize("count", [1, 2])
async def test_explain_sees_the_sessions_of_every_process(tmp_path, count):
    more = BY_SESSIONS.replace("least_request", "random")
    async with run_processes(tmp_path, "a", "b", "c", more=more, count=count) as running:
        home = await ask(running, "anna")
        for _ in range(3):
            answer = await running.client.post(
                "/explain", content=CHAT, headers={"x-session-id": "anna"}
            )
            pick = answer.json()["pick"]
            assert (pick["worker_id"], pick["reason"]) == (home, "its session stays there")


async def test_sessions_survive_changes_of_the_processes(tmp_path):
    async with run_processes(tmp_path, "a", "b", more=BY_SESSIONS, count=2) as running:
        homes = {f"s{number}": await ask(running, f"s{number}") for number in range(8)}
        for count in (3, 2):
            put(running.file, toml(running.fleet, more=f"processes = {count}\n{BY_SESSIONS}"))
            await running.until("/status", lambda body, count=count: serving(body, count))
            assert {key: await ask(running, key) for key in homes} == homes
        assert await sessions(running) == [4, 4]


async def test_an_idle_session_is_no_load_any_more(tmp_path):
    more = f"{BY_SESSIONS}sticky_idle_secs = 0.05\n"
    async with run_processes(tmp_path, "a", "b", more=more, count=2) as running:
        await ask(running, "me")
        await running.until(
            "/workers", lambda body: not any(each["sessions"] for each in body["workers"])
        )


@asynccontextmanager
async def fleet_of(count, config=QUEUED + BY_SESSIONS):
    """Workers that answer with their number."""
    scripts = [answering(counted(str(number).encode())) for number in range(count)]
    async with fake_workers(*scripts) as made, run_dataplane(*made, config=config) as opened:
        yield opened


async def home_of(opened, session):
    async with opened.client() as client:
        await client.send(turn(session))
        answer = await client.answer()
        assert answer.status == 200
        return opened.fleet.workers[int(answer.body)]


class Asker:
    """Requests that may wait; the answers as they come, worker by session."""

    def __init__(self, opened, nursery):
        self.opened, self.nursery, self.answers = opened, nursery, {}

    def start(self, *sessions):
        for session in sessions:
            self.nursery.start_soon(self._ask, session)

    async def _ask(self, session):
        self.answers[session] = await home_of(self.opened, session)


@pytest.mark.parametrize("reason", ["updating", "paused"])
async def test_a_session_waits_for_its_worker_while_others_are_served(reason):
    more = "[weight_sync]\nwhile_updating = 'hold'\n"
    config = QUEUED + BY_SESSIONS + "while_paused = 'hold'\n" + more
    async with fleet_of(3, config) as opened, trio.open_nursery() as nursery:
        home = await home_of(opened, "mine")
        opened.fleet.cordon(home, reason)
        asker = Asker(opened, nursery)
        asker.start("mine")
        await until(lambda: opened.dataplane.queue.waiting == 1)
        for number in range(6):
            assert await home_of(opened, f"other {number}") is not home
        assert opened.dataplane.queue.waiting == 1
        opened.fleet.uncordon(home, reason)
        await until(lambda: asker.answers)
        assert asker.answers == {"mine": home}
        assert opened.log.records[-1]["queue_ms"] >= 0


async def test_after_an_update_of_all_each_session_is_where_it_was():
    """Workers come back one after the other: nobody moves to the first of them."""
    async with fleet_of(4) as opened, trio.open_nursery() as nursery:
        names = [f"s{number}" for number in range(12)]
        homes = {name: await home_of(opened, name) for name in names}
        assert Counter(homes.values()) == dict.fromkeys(opened.fleet.workers, 3)
        for worker in opened.fleet.workers:
            opened.fleet.cordon(worker, "updating")
        asker = Asker(opened, nursery)
        asker.start(*names)
        await until(lambda: opened.dataplane.queue.waiting == 12)
        for number, worker in enumerate(opened.fleet.workers, 1):
            opened.fleet.uncordon(worker, "updating")
            await until(lambda done=3 * number: len(asker.answers) == done)
            assert opened.dataplane.queue.waiting == 12 - 3 * number
        assert asker.answers == homes


async def test_queued_sessions_block_no_other_queued_request():
    """Some wait for room before their worker is updated, some come afterwards."""
    config = QUEUED + "max_inflight = 1\n" + BY_SESSIONS
    opened_gate = trio.Event()

    async def gated(call):
        await opened_gate.wait()
        await call.send(counted(b"good"))

    async with (
        fake_workers(gated, gated) as made,
        run_dataplane(*made, config=config) as opened,
        trio.open_nursery() as nursery,
    ):
        answers = []

        async def one(session):
            async with opened.client() as client:
                await client.send(turn(session))
                answer = await client.answer()
                answers.append((session, answer.status, answer.one("x-sglang-omni-worker")))

        async def begin(*names):
            for name in names:
                before = opened.dataplane.queue.waiting
                nursery.start_soon(one, name)
                await until(lambda before=before: opened.dataplane.queue.waiting > before)

        holder, home = "holder", opened.fleet.workers[0]
        opened.dataplane.policy._sessions.keep("held", home, opened.dataplane.loop.now)
        nursery.start_soon(one, holder)
        await until(lambda: opened.dataplane.in_flight == 1)
        await begin("held", "free 1", "free 2")
        opened.fleet.cordon(home, "updating")
        opened_gate.set()
        await until(lambda: len(answers) == 3)
        assert {name for name, status, _ in answers if status == 200} == {
            holder, "free 1", "free 2",
        }  # fmt: skip
        assert opened.dataplane.queue.waiting == 1
        opened.fleet.uncordon(home, "updating")
        await until(lambda: len(answers) == 4)
        assert answers[-1] == ("held", 200, home.id)


def specs(fleet):
    return [worker.spec for worker in fleet.workers]


@pytest.mark.parametrize(
    "change",
    [
        lambda fleet, home: fleet.cordon(home, "uncertain"),
        lambda fleet, home: fleet.mark_dead(home, home.registered_at),
        lambda fleet, home: fleet.apply(
            [each for each in specs(fleet) if each.url != home.url], home.registered_at
        ),
    ],
    ids=["its weights are uncertain", "it died", "it was removed"],
)
async def test_a_session_that_waits_moves_when_its_worker_is_not_coming_back(change):
    async with fleet_of(3) as opened, trio.open_nursery() as nursery:
        home = await home_of(opened, "mine")
        workers = opened.fleet.workers
        opened.fleet.cordon(home, "updating")
        async with opened.client() as client:
            await client.send(turn("mine"))
            await until(lambda: opened.dataplane.queue.waiting == 1)
            change(opened.fleet, home)
            answer = await client.answer()
        assert answer.status == 200
        assert workers[int(answer.body)] is not home
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "config",
    [BY_SESSIONS, QUEUED + BY_SESSIONS + "[weight_sync]\nwhile_updating = 'shed'\n"],
    ids=["without a queue", "shed"],
)
async def test_a_session_moves_where_requests_do_not_wait(config):
    async with fleet_of(3, config) as opened:
        home = await home_of(opened, "mine")
        opened.fleet.cordon(home, "updating")
        new = await home_of(opened, "mine")
        assert new is not home
        opened.fleet.uncordon(home, "updating")
        assert await home_of(opened, "mine") is new


async def test_a_session_that_waited_for_too_long_is_reported_for_what():
    config = "[server]\nqueue_size = 5\nqueue_timeout_secs = 0.05\n" + BY_SESSIONS
    async with fleet_of(2, config) as opened:
        home = await home_of(opened, "mine")
        opened.fleet.cordon(home, "updating")
        async with opened.client() as client:
            await client.send(turn("mine"))
            answer = await client.answer()
        assert (answer.status, answer.one("retry-after")) == (503, "1")
        reported = json.loads(answer.body)["error"]
        assert reported["reason"] == "weights_updating"
        assert "the worker of this session is being updated" in reported["message"]
        assert "waited 0.05 s" in reported["message"]


@pytest.mark.parametrize("pad", [0, 100_000, 3 << 20], ids=["small", "large", "very large"])
async def test_a_key_of_the_body_names_the_session_whatever_the_bodys_size(pad):
    config = BY_SESSIONS + "session_headers = []\nsession_body_keys = ['session.id', 'user']\n"
    async with fleet_of(3, config) as opened, opened.client() as client:
        homes = Counter()
        for number in range(9):
            fields = {"messages": [], "pad": "x" * pad, "session": {"id": f"s{number % 3}"}}
            await client.send(post(json.dumps(fields).encode()))
            homes[number % 3, (await client.answer()).body] += 1
        assert sorted(homes.values()) == [3, 3, 3]
        assert len({worker for _, worker in homes}) == 3


async def test_the_gate_moves_sessions_away_from_a_worker_that_got_slow():
    gate = trio.Event()

    async def slow(call):
        await gate.wait()
        await call.send(counted(b"0"))

    config = BY_SESSIONS + "sticky_rebalance_abs = 3\nsticky_rebalance_rel = 2.0\n"
    async with (
        fake_workers(slow, answering(counted(b"1"))) as made,
        run_dataplane(*made, config=config) as opened,
        trio.open_nursery() as nursery,
    ):
        home, other = opened.fleet.workers
        table = opened.dataplane.policy._sessions
        names = [f"s{number}" for number in range(6)]
        for name in names:
            table.keep(name, home, opened.dataplane.loop.now)
        asker = Asker(opened, nursery)
        for number, name in enumerate(names, 1):
            asker.start(name)
            await until(lambda due=number: home.in_flight + len(asker.answers) == due)
        assert set(asker.answers) == set(names[3:])  # three pile up, the others move
        assert set(asker.answers.values()) == {other}
        assert [opened.dataplane.session_count(worker) for worker in (home, other)] == [3, 3]
        assert await home_of(opened, "new") is other  # although it has as many sessions
        gate.set()
        await until(lambda: len(asker.answers) == 6)


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
                record(await running.get_json("/workers"), each)["id"]: each.url for each in fleet
            }
            paused = await running.client.post(
                f"/pause_generation?selector=url={url[home]}", json={}
            )
            assert paused.json()["status"] == "ok", paused.text
            answers = {}

            async def waits(number):
                answers[number] = await ask(running, "mine")

            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(waits, number)
                await running.until("/health", lambda t: t["admission"]["waiting"] == 4)
                others = {await ask(running, f"other {number}") for number in range(6)}
                assert len(others) == 1
                assert home not in others
                assert answers == {}
                assert (await running.client.post("/continue_generation", json={})).is_success
            assert answers == dict.fromkeys(range(4), home)

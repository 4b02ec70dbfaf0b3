import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import httpx
import pytest
import trio
import trio.testing

from omni_proxy.config.overlay import SavedState, desired_workers, with_deleted
from omni_proxy.config.schema import Config, LaunchEntry
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.launch import child_process, replica_process
from omni_proxy.launch.launcher import Launcher
from omni_proxy.runtime_config.membership_lock import MembershipLock
from tests.ports import free_run
from tests.processes import alive

SERVER = """
import http.server, os, signal, subprocess, sys
port, mode = int(sys.argv[1]), sys.argv[2]
if mode == "broken":
    print("no such model")
    sys.exit(3)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
family = subprocess.Popen(["sleep", "600"]).pid if mode == "parent" else 0
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{family} {mode}".encode()
        self.send_response(503 if mode == "loading" else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
print("listening on", port)
http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


class Keeper:
    """Stands in for the real one: applies to the fleet, then tells its subscribers."""

    def __init__(self, fleet: Fleet) -> None:
        self.config = Config()
        self.membership_lock = MembershipLock()
        self._fleet = fleet
        self._subscribers = []

    def subscribe(self, callback):
        self._subscribers.append(callback)

    def change(self, state: SavedState) -> None:
        self._fleet.apply(desired_workers(self.config, (), state), datetime.now(UTC))

    def apply(self, *launch: LaunchEntry) -> None:
        old, self.config = self.config, Config(launch=launch)
        self.change(SavedState())
        for callback in self._subscribers:
            callback(old, self.config)


class Prober:
    """Every probe is good: what is tried here is the launcher."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def probe_once(self, worker: Worker) -> None:
        now, epoch = datetime.now(UTC), worker.health.epoch
        self._fleet.observe_probe(worker, status=200, error=None, at=now, epoch=epoch)


class House:
    def __init__(self) -> None:
        self.fleet = Fleet()
        self.config_store = Keeper(self.fleet)
        self.launcher = Launcher(
            self.fleet, self.config_store, Prober(self.fleet), chance=lambda: 0.5
        )

    def routable(self) -> list[str]:
        return [worker.url for worker in self.fleet.workers if worker.routable]

    def states(self) -> list[str]:
        return [place["state"] for place in self.launcher.status()]

    def pids(self) -> list[int | None]:
        return [place["pid"] for place in self.launcher.status()]

    async def until(self, holds: Callable[[], bool]) -> None:
        with trio.fail_after(30):
            while not holds():  # noqa: ASYNC110  # other processes ring no bell here
                await trio.sleep(0.01)

    async def until_states(self, *states: str) -> None:
        await self.until(lambda: self.states() == list(states))


@asynccontextmanager
async def running(*launch: LaunchEntry) -> AsyncIterator[House]:
    house = House()
    house.config_store.apply(*launch)
    async with trio.open_nursery() as nursery:
        await nursery.start(house.launcher.run)
        yield house
        nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(replica_process, "FIRST_DELAY_SECS", 0.05)
    monkeypatch.setattr(child_process, "TERM_SECS", 5.0)


@pytest.fixture
def base_port() -> int:
    return free_run(4)


def entry(base_port: int, mode: str = "plain", **keys) -> LaunchEntry:
    command = (sys.executable, "-S", "-c", SERVER, "{port}", mode)
    return LaunchEntry(command=command, base_port=base_port, **keys)


async def body_of(url: str) -> list[str]:
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(url)).text.split()


async def test_a_replica_becomes_routable_once_its_health_endpoint_answers(base_port):
    async with running(entry(base_port, replicas=2)) as house:
        await house.until_states("ready", "ready")
        urls = [f"http://127.0.0.1:{base_port + i}" for i in range(2)]
        assert house.routable() == urls
        assert [place["url"] for place in house.launcher.status()] == urls
        assert [place["restarts"] for place in house.launcher.status()] == [0, 0]


async def test_a_killed_replica_is_out_at_once_and_comes_back(base_port):
    async with running(entry(base_port, replicas=2)) as house:
        await house.until_states("ready", "ready")
        seen = []
        worker = house.fleet.workers[0]
        house.fleet.watch(lambda: seen.append((worker.health.state, worker.health.last_error)))
        killed = house.pids()[0]
        os.kill(killed, signal.SIGKILL)
        await house.until(lambda: house.pids()[0] not in (None, killed))
        await house.until_states("ready", "ready")
        assert seen[0] == (Health.UNHEALTHY, "process ended with signal SIGKILL")
        assert house.launcher.status()[0]["restarts"] == 1
        assert len(house.routable()) == 2


async def test_a_replica_that_a_person_declared_dead_stays_so_when_it_is_started_anew(base_port):
    async with running(entry(base_port)) as house:
        await house.until_states("ready")
        worker = house.fleet.workers[0]
        house.fleet.mark_dead(worker, datetime.now(UTC), declared=True)
        killed = house.pids()[0]
        os.kill(killed, signal.SIGKILL)
        await house.until(lambda: house.pids()[0] not in (None, killed))
        await house.until_states("ready")
        assert worker.health.state is Health.DEAD


async def test_a_killed_replica_is_started_anew_only_when_its_ranks_count_for_nobody(base_port):
    async with running(entry(base_port)) as house:
        await house.until_states("ready")
        killed = house.pids()[0]
        house.config_store.membership_lock.acquire(lambda: "a sync")
        os.kill(killed, signal.SIGKILL)
        await house.until(lambda: house.launcher.status()[0]["restarts"] == 1)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert house.pids()[0] is None
        house.config_store.membership_lock.release()
        await house.until_states("ready")
        assert house.pids()[0] not in (None, killed)


async def test_an_unready_replica_is_not_routable_and_tells_why_it_is_given_another_try(base_port):
    late = entry(base_port, "loading", ready_timeout_secs=0.5)
    async with running(late) as house:
        await house.until(lambda: house.launcher.status()[0]["restarts"] == 1)
        assert house.routable() == []
        assert "not ready after 0.5 s" in house.launcher.status()[0]["last_error"]


async def test_status_shows_how_it_ended_and_what_it_said_last(base_port):
    async with running(entry(base_port, "broken", restart="never")) as house:
        await house.until_states("stopped")
        (place,) = house.launcher.status()
        ended = "process ended with exit status 3; last line: no such model"
        assert (place["last_error"], place["restarts"], place["pid"]) == (ended, 0, None)
        assert house.fleet.workers[0].health.state is Health.DEAD


async def test_a_program_that_is_not_there_is_told_in_the_status(base_port):
    absent = LaunchEntry(command=("/nowhere/replica", "{port}"), base_port=base_port)
    async with running(absent) as house:
        await house.until_states("backing_off")
        (place,) = house.launcher.status()
        assert "`/nowhere/replica`: No such file" in place["last_error"]
        assert place["fatal"]


@pytest.mark.parametrize(
    ("says", "status", "fatal"),
    [
        ("unrecognized arguments: --x", 2, True),
        ("No module named sglang", 1, True),
        ("error: not installed: torch; get it by pip", 1, True),
        ("CUDA out of memory", 1, False),
    ],
)
async def test_what_no_further_try_will_mend_is_called_fatal(base_port, says, status, fatal):
    words = (sys.executable, "-c", f"print({says!r}); raise SystemExit({status})")
    refuses = LaunchEntry(command=words, base_port=base_port, restart="never")
    async with running(refuses) as house:
        await house.until_states("stopped")
        (place,) = house.launcher.status()
        assert says in place["last_error"]
        assert place["fatal"] is fatal


async def test_a_taken_port_is_never_routed_to_and_tried_again(base_port):
    squatters = await trio.open_tcp_listeners(base_port, host="127.0.0.1")
    async with running(entry(base_port)) as house:
        await house.until_states("backing_off")
        assert f"port {base_port} of 127.0.0.1" in house.launcher.status()[0]["last_error"]
        await Prober(house.fleet).probe_once(house.fleet.workers[0])
        assert house.routable() == []
        for listener in squatters:
            await listener.aclose()
        await house.until_states("ready")


async def test_a_stop_ends_the_grandchildren_too(base_port):
    async with running(entry(base_port, "parent")) as house:
        await house.until_states("ready")
        grandchild = int((await body_of(house.routable()[0]))[0])
        assert alive(grandchild)
        (pid,) = house.pids()
    assert not alive(pid)
    assert not alive(grandchild)


async def test_a_killed_parent_takes_its_children_along_before_it_is_restarted(base_port):
    async with running(entry(base_port, "parent")) as house:
        await house.until_states("ready")
        grandchild = int((await body_of(house.routable()[0]))[0])
        os.kill(house.pids()[0], signal.SIGKILL)
        await house.until(lambda: house.launcher.status()[0]["restarts"] == 1)
        assert not alive(grandchild)


async def test_who_ignores_sigterm_gets_sigkill(base_port, monkeypatch):
    monkeypatch.setattr(child_process, "TERM_SECS", 0.1)
    async with running(entry(base_port, "stubborn")) as house:
        await house.until_states("ready")
        (pid,) = house.pids()
    assert not alive(pid)


async def test_another_count_starts_and_stops_only_the_difference(base_port):
    async with running(entry(base_port, replicas=2)) as house:
        await house.until_states("ready", "ready")
        first, second = house.pids()
        house.config_store.apply(entry(base_port, replicas=3))
        await house.until_states("ready", "ready", "ready")
        assert house.pids()[:2] == [first, second]
        house.config_store.apply(entry(base_port, replicas=1))
        await house.until_states("ready")
        assert house.pids() == [first]
        assert not alive(second)


async def test_keys_that_need_no_restart_cause_none(base_port):
    async with running(entry(base_port)) as house:
        await house.until_states("ready")
        before = house.pids()
        house.config_store.apply(entry(base_port, model="other", ready_timeout_secs=7))
        await trio.testing.wait_all_tasks_blocked()
        assert house.pids() == before
        assert house.states() == ["ready"]


async def test_a_changed_command_replaces_one_replica_at_a_time(base_port):
    async with running(entry(base_port, replicas=3)) as house:
        await house.until_states("ready", "ready", "ready")
        counts = []
        house.fleet.watch(lambda: counts.append(len(house.routable())))
        old = house.pids()
        house.config_store.apply(entry(base_port, "changed", replicas=3))
        await house.until(lambda: not set(old) & set(house.pids()))
        await house.until_states("ready", "ready", "ready")
        assert [(await body_of(url))[1] for url in house.routable()] == ["changed"] * 3
        assert min(counts) == 2


async def test_a_broken_new_command_costs_one_replica_until_it_is_mended(base_port):
    async with running(entry(base_port, replicas=2)) as house:
        await house.until_states("ready", "ready")
        second = house.pids()[1]
        house.config_store.apply(entry(base_port, "broken", replicas=2))
        await house.until(lambda: house.launcher.status()[0]["restarts"] >= 2)
        assert house.pids()[1] == second
        house.config_store.apply(entry(base_port, "mended", replicas=2))
        await house.until(lambda: house.pids()[1] != second)
        await house.until_states("ready", "ready")


async def test_a_removed_replica_first_finishes_what_it_has(base_port):
    async with running(entry(base_port, replicas=2)) as house:
        await house.until_states("ready", "ready")
        leaving = house.fleet.workers[1]
        pid = house.pids()[1]
        leaving.in_flight = 1
        house.config_store.apply(entry(base_port, replicas=1))
        await trio.testing.wait_all_tasks_blocked()
        assert alive(pid)
        leaving.in_flight = 0
        await house.until(lambda: not alive(pid))
        await house.until_states("ready")


async def test_a_replica_that_was_removed_has_no_process_until_it_is_added_again(base_port):
    async with running(entry(base_port, replicas=2)) as house:
        await house.until_states("ready", "ready")
        kept, gone = house.fleet.workers
        pid = house.pids()[1]
        gone.in_flight = 1
        house.config_store.change(with_deleted(SavedState(), house.config_store.config, gone.url))
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert alive(pid)  # it finishes what it has
        gone.in_flight = 0
        await house.until_states("ready")
        assert not alive(pid)
        assert house.routable() == [kept.url]
        house.config_store.change(SavedState())
        await house.until_states("ready", "ready")
        assert house.routable() == [kept.url, gone.url]


async def test_output_reaches_the_log_with_the_replicas_name(base_port, caplog):
    caplog.set_level("INFO", logger="omni_proxy.launch")
    async with running(entry(base_port, name="chat")) as house:
        await house.until(lambda: f"chat[0] listening on {base_port}" in caplog.messages)

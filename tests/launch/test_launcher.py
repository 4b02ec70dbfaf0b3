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
from omni_proxy.fleet.health_state import Health
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


class FakeConfigStore:
    """Applies a configuration to the fleet, then calls the subscribers."""

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


class FakeProber:
    """Every probe succeeds."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def probe_once(self, worker: Worker) -> None:
        now, epoch = datetime.now(UTC), worker.health.epoch
        self._fleet.observe_probe(worker, status=200, error=None, at=now, epoch=epoch)


class LauncherFixture:
    def __init__(self) -> None:
        self.fleet = Fleet()
        self.config_store = FakeConfigStore(self.fleet)
        self.launcher = Launcher(
            self.fleet, self.config_store, FakeProber(self.fleet), jitter=lambda: 0.5
        )

    def routable(self) -> list[str]:
        return [worker.url for worker in self.fleet.workers if worker.routable]

    def states(self) -> list[str]:
        return [replica["state"] for replica in self.launcher.status()]

    def pids(self) -> list[int | None]:
        return [replica["pid"] for replica in self.launcher.status()]

    async def until(self, holds: Callable[[], bool]) -> None:
        with trio.fail_after(30):
            while not holds():  # noqa: ASYNC110  # other processes signal nothing
                await trio.sleep(0.01)

    async def until_states(self, *states: str) -> None:
        await self.until(lambda: self.states() == list(states))


@asynccontextmanager
async def running(*launch: LaunchEntry) -> AsyncIterator[LauncherFixture]:
    fixture = LauncherFixture()
    fixture.config_store.apply(*launch)
    async with trio.open_nursery() as nursery:
        await nursery.start(fixture.launcher.run)
        yield fixture
        nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def fast_restarts(monkeypatch):
    monkeypatch.setattr(replica_process, "FIRST_DELAY_SECS", 0.05)
    monkeypatch.setattr(child_process, "TERM_SECS", 5.0)


@pytest.fixture
def base_port() -> int:
    return free_run(4)


def entry(base_port: int, mode: str = "plain", **keys) -> LaunchEntry:
    command = (sys.executable, "-S", "-c", SERVER, "{port}", mode)
    return LaunchEntry(command=command, base_port=base_port, **keys)


async def body_of(url: str) -> list[str]:
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        return (await client.get(url)).text.split()


async def test_a_replica_becomes_routable_once_its_health_endpoint_answers(base_port):
    async with running(entry(base_port, replicas=2)) as fixture:
        await fixture.until_states("ready", "ready")
        urls = [f"http://127.0.0.1:{base_port + i}" for i in range(2)]
        assert fixture.routable() == urls
        assert [replica["url"] for replica in fixture.launcher.status()] == urls
        assert [replica["restarts"] for replica in fixture.launcher.status()] == [0, 0]


async def test_a_killed_replica_leaves_rotation_at_once_and_returns(base_port):
    async with running(entry(base_port, replicas=2)) as fixture:
        await fixture.until_states("ready", "ready")
        seen = []
        worker = fixture.fleet.workers[0]
        fixture.fleet.watch(lambda: seen.append((worker.health.state, worker.health.last_error)))
        killed = fixture.pids()[0]
        os.kill(killed, signal.SIGKILL)
        await fixture.until(lambda: fixture.pids()[0] not in (None, killed))
        await fixture.until_states("ready", "ready")
        assert seen[0] == (Health.UNHEALTHY, "process was ended by SIGKILL")
        assert fixture.launcher.status()[0]["restarts"] == 1
        assert len(fixture.routable()) == 2


async def test_a_worker_that_was_declared_dead_stays_dead_after_a_restart(base_port):
    async with running(entry(base_port)) as fixture:
        await fixture.until_states("ready")
        worker = fixture.fleet.workers[0]
        fixture.fleet.mark_dead(worker, datetime.now(UTC), declared=True)
        killed = fixture.pids()[0]
        os.kill(killed, signal.SIGKILL)
        await fixture.until(lambda: fixture.pids()[0] not in (None, killed))
        await fixture.until_states("ready")
        assert worker.health.state is Health.DEAD


async def test_a_killed_replica_is_restarted_only_after_a_weight_sync(base_port):
    async with running(entry(base_port)) as fixture:
        await fixture.until_states("ready")
        killed = fixture.pids()[0]
        fixture.config_store.membership_lock.acquire(lambda: "a sync")
        os.kill(killed, signal.SIGKILL)
        await fixture.until(lambda: fixture.launcher.status()[0]["restarts"] == 1)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert fixture.pids()[0] is None
        fixture.config_store.membership_lock.release()
        await fixture.until_states("ready")
        assert fixture.pids()[0] not in (None, killed)


async def test_a_replica_that_does_not_become_ready_in_time_is_restarted_with_a_reason(base_port):
    late = entry(base_port, "loading", ready_timeout_secs=0.5)
    async with running(late) as fixture:
        await fixture.until(lambda: fixture.launcher.status()[0]["restarts"] == 1)
        assert fixture.routable() == []
        assert "not ready after 0.5 s" in fixture.launcher.status()[0]["last_error"]


async def test_status_shows_the_exit_and_the_last_line_of_output(base_port):
    async with running(entry(base_port, "broken", restart="never")) as fixture:
        await fixture.until_states("stopped")
        (replica,) = fixture.launcher.status()
        ended = "process ended with exit status 3; last line: no such model"
        assert (replica["last_error"], replica["restarts"], replica["pid"]) == (ended, 0, None)
        assert fixture.fleet.workers[0].health.state is Health.DEAD


async def test_status_shows_a_missing_program(base_port):
    absent = LaunchEntry(command=("/nowhere/replica", "{port}"), base_port=base_port)
    async with running(absent) as fixture:
        await fixture.until_states("backing_off")
        (replica,) = fixture.launcher.status()
        assert "`/nowhere/replica`: No such file" in replica["last_error"]
        assert replica["fatal"]


@pytest.mark.parametrize(
    ("output", "status", "fatal"),
    [
        ("unrecognized arguments: --x", 2, True),
        ("No module named sglang", 1, True),
        ("error: not installed: torch; get it by pip", 1, True),
        ("CUDA out of memory", 1, False),
    ],
)
async def test_a_failure_that_no_retry_can_fix_is_fatal(base_port, output, status, fatal):
    words = (sys.executable, "-c", f"print({output!r}); raise SystemExit({status})")
    refuses = LaunchEntry(command=words, base_port=base_port, restart="never")
    async with running(refuses) as fixture:
        await fixture.until_states("stopped")
        (replica,) = fixture.launcher.status()
        assert output in replica["last_error"]
        assert replica["fatal"] is fatal


async def test_a_port_in_use_gets_no_requests_and_is_retried(base_port):
    listeners = await trio.open_tcp_listeners(base_port, host="127.0.0.1")
    async with running(entry(base_port)) as fixture:
        await fixture.until_states("backing_off")
        assert f"port {base_port} of 127.0.0.1" in fixture.launcher.status()[0]["last_error"]
        await FakeProber(fixture.fleet).probe_once(fixture.fleet.workers[0])
        assert fixture.routable() == []
        for listener in listeners:
            await listener.aclose()
        await fixture.until_states("ready")


async def test_stopping_a_replica_ends_its_process_group(base_port):
    async with running(entry(base_port, "parent")) as fixture:
        await fixture.until_states("ready")
        grandchild = int((await body_of(fixture.routable()[0]))[0])
        assert alive(grandchild)
        (pid,) = fixture.pids()
    assert not alive(pid)
    assert not alive(grandchild)


async def test_the_group_of_a_killed_replica_is_ended_before_the_restart(base_port):
    async with running(entry(base_port, "parent")) as fixture:
        await fixture.until_states("ready")
        grandchild = int((await body_of(fixture.routable()[0]))[0])
        os.kill(fixture.pids()[0], signal.SIGKILL)
        await fixture.until(lambda: fixture.launcher.status()[0]["restarts"] == 1)
        assert not alive(grandchild)


async def test_a_process_that_ignores_sigterm_gets_sigkill(base_port, monkeypatch):
    monkeypatch.setattr(child_process, "TERM_SECS", 0.1)
    async with running(entry(base_port, "stubborn")) as fixture:
        await fixture.until_states("ready")
        (pid,) = fixture.pids()
    assert not alive(pid)


async def test_a_changed_count_starts_or_stops_only_the_difference(base_port):
    async with running(entry(base_port, replicas=2)) as fixture:
        await fixture.until_states("ready", "ready")
        first, second = fixture.pids()
        fixture.config_store.apply(entry(base_port, replicas=3))
        await fixture.until_states("ready", "ready", "ready")
        assert fixture.pids()[:2] == [first, second]
        fixture.config_store.apply(entry(base_port, replicas=1))
        await fixture.until_states("ready")
        assert fixture.pids() == [first]
        assert not alive(second)


async def test_a_changed_key_that_needs_no_restart_causes_none(base_port):
    async with running(entry(base_port)) as fixture:
        await fixture.until_states("ready")
        before = fixture.pids()
        fixture.config_store.apply(entry(base_port, model="other", ready_timeout_secs=7))
        await trio.testing.wait_all_tasks_blocked()
        assert fixture.pids() == before
        assert fixture.states() == ["ready"]


async def test_a_changed_command_replaces_one_replica_at_a_time(base_port):
    async with running(entry(base_port, replicas=3)) as fixture:
        await fixture.until_states("ready", "ready", "ready")
        counts = []
        fixture.fleet.watch(lambda: counts.append(len(fixture.routable())))
        old = fixture.pids()
        fixture.config_store.apply(entry(base_port, "changed", replicas=3))
        await fixture.until(lambda: not set(old) & set(fixture.pids()))
        await fixture.until_states("ready", "ready", "ready")
        assert [(await body_of(url))[1] for url in fixture.routable()] == ["changed"] * 3
        assert min(counts) == 2


async def test_a_broken_new_command_costs_one_replica_until_it_is_fixed(base_port):
    async with running(entry(base_port, replicas=2)) as fixture:
        await fixture.until_states("ready", "ready")
        second = fixture.pids()[1]
        fixture.config_store.apply(entry(base_port, "broken", replicas=2))
        await fixture.until(lambda: fixture.launcher.status()[0]["restarts"] >= 2)
        assert fixture.pids()[1] == second
        fixture.config_store.apply(entry(base_port, "fixed", replicas=2))
        await fixture.until(lambda: fixture.pids()[1] != second)
        await fixture.until_states("ready", "ready")


async def test_a_removed_replica_is_drained_first(base_port):
    async with running(entry(base_port, replicas=2)) as fixture:
        await fixture.until_states("ready", "ready")
        removed = fixture.fleet.workers[1]
        pid = fixture.pids()[1]
        removed.in_flight = 1
        fixture.config_store.apply(entry(base_port, replicas=1))
        await trio.testing.wait_all_tasks_blocked()
        assert alive(pid)
        removed.in_flight = 0
        await fixture.until(lambda: not alive(pid))
        await fixture.until_states("ready")


async def test_a_removed_replica_has_no_process_until_it_is_added_again(base_port):
    async with running(entry(base_port, replicas=2)) as fixture:
        await fixture.until_states("ready", "ready")
        kept, removed = fixture.fleet.workers
        pid = fixture.pids()[1]
        removed.in_flight = 1
        fixture.config_store.change(
            with_deleted(SavedState(), fixture.config_store.config, removed.url)
        )
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert alive(pid)  # it finishes its requests
        removed.in_flight = 0
        await fixture.until_states("ready")
        assert not alive(pid)
        assert fixture.routable() == [kept.url]
        fixture.config_store.change(SavedState())
        await fixture.until_states("ready", "ready")
        assert fixture.routable() == [kept.url, removed.url]


async def test_output_is_logged_with_the_name_of_the_replica(base_port, caplog):
    caplog.set_level("INFO", logger="omni_proxy.launch")
    async with running(entry(base_port, name="chat")) as fixture:
        await fixture.until(lambda: f"chat[0] listening on {base_port}" in caplog.messages)


async def test_a_handed_process_that_was_not_adopted_is_ended(base_port):
    async with running(entry(base_port)) as first:
        await first.until_states("ready")
        (pid,) = first.pids()
        next_launcher = LauncherFixture().launcher
        next_launcher.adopt(first.launcher.hand_over())
        first.launcher.release([pid])
        assert alive(pid)
        await next_launcher.end_handed()
        assert not alive(pid)


async def test_a_launcher_that_is_cancelled_at_once_ends_its_handed_processes(base_port):
    async with running(entry(base_port)) as first:
        await first.until_states("ready")
        (pid,) = first.pids()
        handed = first.launcher.hand_over()
        first.launcher.release([pid])
        second = LauncherFixture()
        second.config_store.apply(entry(base_port))
        second.launcher.adopt(handed)
        async with trio.open_nursery() as nursery:
            await nursery.start(second.launcher.run)
            nursery.cancel_scope.cancel()
        await second.launcher.end_handed()
        assert not alive(pid)

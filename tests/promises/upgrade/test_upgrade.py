"""Upgrades end no connection, refuse no request and keep state; a failed one changes nothing."""

import os
import signal
import socket
import sys
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path

import pytest
import trio

from omni_proxy.cli.upgrade import main
from omni_proxy.upgrade.control_socket import UpgradeReport, request_upgrade
from tests.promises.support.clients import STREAMED, client_of, post
from tests.promises.support.fleet_program import Program, program, put, toml, workers
from tests.promises.support.processes_fixture import serving

pytestmark = pytest.mark.usefixtures("soon")


async def upgrade(running: Program, binary: str | None = None) -> UpgradeReport:
    """Upgrades the program; returns the last report, which has the outcome."""
    reply = await status(running)
    path = Path(reply["upgrade"]["socket"])
    reports = await trio.to_thread.run_sync(lambda: list(request_upgrade(path, binary)))
    return reports[-1]


async def status(running: Program) -> dict:
    """Returns the status of the program that accepts new connections."""
    return (await running.client.get("/status", headers={"connection": "close"})).json()


async def until_gone(pid: int) -> None:
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            await trio.lowlevel.wait_readable(descriptor)
        finally:
            os.close(descriptor)


@asynccontextmanager
async def upgradable(tmp_path, more: str = "", names: tuple[str, ...] = ("w",)):
    """Runs a program and its workers; ends the program that serves at the end."""
    file = tmp_path / "proxy.toml"
    async with workers(*names) as fleet:
        put(file, toml(fleet, more=more))
        async with program("--config", file) as running:
            running.file, running.fleet = file, fleet
            await running.until_routable(*fleet)
            if "processes" in more:
                await running.until("/status", serving)
            try:
                yield running
            finally:
                for worker in fleet:
                    worker.gate.set()
                with trio.CancelScope(shield=True):
                    pid = (await status(running))["pid"]
                    if pid != running.process.pid:
                        os.kill(pid, signal.SIGTERM)
                        await until_gone(pid)


def address(running: Program) -> str:
    return running.client.base_url.netloc.decode()


async def keep_asking(running: Program, completed: list[int], stop: trio.Event) -> None:
    """Sends requests on one connection, and opens a new one when the proxy closes it."""
    while not stop.is_set():
        async with client_of(address(running)) as client:
            while not stop.is_set():
                await client.send(post())
                response = await client.answer()
                assert response.status == 200, response
                completed[0] += 1
                if response.one("connection") == "close":
                    assert await client.until_closed() == b""
                    break
                await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("more", ["", "processes = 2\n"], ids=["one", "processes"])
async def test_two_upgrades_end_no_stream_and_refuse_no_request(tmp_path, more):
    async with upgradable(tmp_path, more) as running, trio.open_nursery() as nursery:
        (worker,), completed, stop = running.fleet, [0], trio.Event()
        first = running.process.pid
        async with client_of(address(running)) as stream, client_of(address(running)) as idle:
            await idle.send(post())
            assert (await idle.answer()).status == 200
            worker.gate = trio.Event()
            await stream.send(post(STREAMED))
            await stream.until(b"\n\n")
            worker.gate, gate = trio.Event(), worker.gate
            worker.gate.set()
            for _ in range(3):
                nursery.start_soon(keep_asking, running, completed, stop)
            reports = [await upgrade(running) for _ in range(2)]
            assert [report.outcome for report in reports] == ["done", "done"], reports
            pids = [report.pid for report in reports]
            assert len({first, *pids}) == 3
            reply = await status(running)
            assert (reply["pid"], reply["ready"]) == (pids[1], True)
            await until_gone(pids[0])  # it has neither a stream nor an idle connection
            before = completed[0]
            while completed[0] == before:
                await trio.sleep(0.01)
            stop.set()
            await idle.send(post())
            response = await idle.answer()
            assert (response.status, response.one("connection")) == (200, "close")
            assert running.process.returncode is None
            gate.set()
            assert (await stream.until(b"0\r\n\r\n")).endswith(b"0\r\n\r\n")
        assert await running.process.wait() == 0


@pytest.fixture
def notified(tmp_path, monkeypatch):
    """Yields the notification socket of a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", sock.getsockname())
        yield sock


async def test_a_signal_upgrades_the_program_and_state_is_kept(tmp_path, notified):
    more = "[routing]\nsticky_sessions = true\n"
    async with upgradable(tmp_path, more, ("up", "off")) as running:
        for turn in range(3):
            await running.client.post(
                "/v1/chat/completions", json={"messages": []}, headers={"x-session-id": str(turn)}
            )
        off = running.fleet[1]
        worker_id = next(
            worker["worker_id"]
            for worker in (await running.get_json("/workers"))["workers"]
            if worker["url"] == off.url
        )
        await running.client.put(f"/workers/{worker_id}", json={"disabled": True})
        assert (await running.ask()).status_code == 200
        running.process.send_signal(signal.SIGUSR2)
        await running.until_logged("upgrade_taken_over")
        reply = await running.until("/status", lambda t: t["pid"] != running.process.pid)
        assert reply["ready"] is True
        rows = {row["url"]: row for row in (await running.get_json("/workers"))["workers"]}
        assert [rows[worker.url]["routable"] for worker in running.fleet] == [True, False]
        assert rows[off.url]["disabled"] is True
        assert reply["data_plane"]["policy"]["sticky"]["sessions"] == 3
        assert notified.recv(99) == b"READY=1"
        await trio.lowlevel.wait_readable(notified)
        assert notified.recv(99) == f"MAINPID={reply['pid']}\nREADY=1".encode()


PREFIX = "You answer in one word. " * 200


async def chat(running: Program, prompt: str) -> str:
    """Sends a chat; returns the name of the worker that served it."""
    body = {"messages": [{"role": "user", "content": prompt}]}
    response = await running.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    return response.json()["worker"]


async def test_an_upgrade_keeps_what_workers_have_cached(tmp_path):
    more = '[routing]\npolicy = "cache_aware"\nsticky_sessions = true\n'
    async with upgradable(tmp_path, more, ("a", "b", "c")) as running:
        before = {}
        for number in range(6):
            before[number] = await chat(running, f"{number} {PREFIX}")
        assert len(set(before.values())) == 3
        policy = (await status(running))["data_plane"]["policy"]
        assert (await upgrade(running)).outcome == "done"
        for number, worker in before.items():
            assert await chat(running, f"{number} {PREFIX} What is {number}?") == worker
        after = (await status(running))["data_plane"]["policy"]
        assert after["picks"] == {"matched": 6}
        assert after["tree_size"] == policy["tree_size"]  # the questions are shorter than a block
        assert "prefix_tree_unreadable" not in running.log


async def test_an_upgrade_keeps_in_every_process_what_workers_have_cached(tmp_path):
    more = 'processes = 2\n[routing]\npolicy = "cache_aware"\n'
    async with upgradable(tmp_path, more, ("a", "b", "c")) as running:
        running.client.headers["connection"] = "close"  # any process may accept the next request
        later_workers = (await running.get_json("/workers"))["workers"][1:]
        for worker in later_workers:
            await running.client.put(f"/workers/{worker['worker_id']}", json={"disabled": True})
        shown_status: dict = {}
        while not all(tree_sizes(shown_status)):
            await chat(running, PREFIX)  # until each process has received the prompt
            shown_status = await status(running)
        for worker in later_workers:
            await running.client.put(f"/workers/{worker['worker_id']}", json={"disabled": False})
        await running.until_routable(*running.fleet)
        assert (await upgrade(running)).outcome == "done"
        await running.until("/status", serving)
        assert {await chat(running, f"{PREFIX} And {n}?") for n in range(12)} == {"a"}


def tree_sizes(body: dict) -> list[int]:
    """Returns the sizes of the prefix trees of both processes."""
    rows = body.get("data_plane", {}).get("processes", [{}])
    return [row.get("policy", {}).get("tree_size", 0) for row in rows]


@pytest.mark.parametrize("processes", ["", "processes = 2\n"], ids=["one", "several"])
async def test_an_upgrade_keeps_sessions_and_owners_of_stored_responses(tmp_path, processes):
    more = processes + "[routing]\nsticky_sessions = true\n"
    async with upgradable(tmp_path, more, ("a", "b", "c")) as running:
        for worker in running.fleet:
            worker.fields = {"id": f"resp_{worker.name}"}

        bodies = [{"input": ""}] * 6 + [{"previous_response_id": f"resp_{n}"} for n in "abc"]

        async def workers_of(numbers) -> dict[int, str]:
            """Returns the workers of sessions (0 to 5) and of stored responses (6 to 8)."""
            names = {}
            for number in numbers:
                headers = {"connection": "close"} | (
                    {"x-session-id": str(number)} if number < 6 else {}
                )
                response = await running.client.post(
                    "/v1/responses", json=bodies[number], headers=headers
                )
                names[number] = response.json()["worker"]
            return names

        before = await workers_of(range(6))
        owners = dict(zip(range(6, 9), "abc", strict=True))
        assert set(before.values()) == set("abc")
        assert (await workers_of(owners)) == owners
        assert (await upgrade(running)).outcome == "done"
        if processes:
            await running.until("/status", serving)
        assert await workers_of(range(8, -1, -1)) == before | owners
        policy = (await status(running))["data_plane"]["policy"]
        assert policy["sticky"]["sessions"] == 6


@pytest.mark.parametrize("processes", ["", "processes = 2\n"], ids=["one", "several"])
async def test_an_upgrade_keeps_the_used_rates_of_callers(tmp_path, processes):
    keys = f"""{processes}
        [[keys]]
        name = "team"
        key_sha256 = "{sha256(b"sk-a").hexdigest()}"
        requests_per_minute = 5
        """
    async with upgradable(tmp_path, keys) as running:
        headers = {"authorization": "Bearer sk-a", "connection": "close"}

        async def ask() -> int:
            body = {"messages": []}
            response = await running.client.post("/v1/chat/completions", json=body, headers=headers)
            return response.status_code

        assert [await ask() for _ in range(3)] == [200, 200, 200]
        assert (await upgrade(running)).outcome == "done"
        if processes:
            await running.until("/status", serving)
        assert [await ask() for _ in range(3)] == [200, 200, 429]


def script(tmp_path, line: str) -> str:
    path = tmp_path / "binary"
    path.write_text(f"#!{sys.executable} -SEs\n{line}\n")
    path.chmod(0o755)
    return str(path)


async def test_a_new_program_that_fails_leaves_the_old_one_serving(tmp_path):
    async with upgradable(tmp_path, "upgrade_timeout_secs = 0.5\n") as running:
        first = running.process.pid
        broken = script(tmp_path, "import sys; sys.exit('it can not start')")
        failed = await upgrade(running, broken)
        assert failed.outcome == "failed"
        assert "exit status 1" in failed.text
        assert "it can not start" in failed.text
        hung = script(tmp_path, "import signal; signal.pause()")
        failed = await upgrade(running, hung)
        assert (failed.outcome, "within 0.5 s" in failed.text) == ("failed", True)
        failed = await upgrade(running, str(tmp_path / "none"))
        assert "not an executable file" in failed.text
        assert "within 0.5 s" in (await status(running))["upgrade"]["last_error"]
        assert (await status(running))["pid"] == first
        assert (await running.ask()).status_code == 200
        assert "upgrade_failed" in running.log


async def test_the_command_reports_progress_and_the_outcome(tmp_path, capsys):
    async with upgradable(tmp_path) as running:
        arguments = ["--url", str(running.client.base_url)]
        broken = script(tmp_path, "import sys; sys.exit('it can not start')")
        failed = await trio.to_thread.run_sync(main, [*arguments, "--binary", broken])
        printed = capsys.readouterr()
        assert failed == 1
        assert "it can not start\nthe old program keeps running" in printed.err
        assert await trio.to_thread.run_sync(main, arguments) == 0
        printed = capsys.readouterr()
        pid = (await status(running))["pid"]
        assert f"upgraded: the new program serves, process {pid}" in printed.out
        assert "accepts the configuration" in printed.out


async def test_an_invalid_file_is_reported_and_the_old_program_continues(tmp_path):
    async with upgradable(tmp_path) as running:
        put(running.file, running.file.read_text() + "[routing]\npolicy = 'no_such'\n")
        failed = await upgrade(running)
        assert failed.outcome == "failed"
        assert "no_such" in failed.text
        assert (await status(running))["pid"] == running.process.pid
        assert (await running.ask()).status_code == 200


async def test_a_new_program_that_fails_leaves_the_file_of_a_unix_socket(tmp_path):
    path = tmp_path / "metrics"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with upgradable(tmp_path, f'[admin]\nmetrics_listen = "unix:{path}"\n') as running:
            text = running.file.read_text()
            put(running.file, text.replace("port = 0", f"port = {taken.getsockname()[1]}"))
            failed = await upgrade(running)
            assert "listen_failed address=" in failed.text
            assert path.is_socket()
            put(running.file, text)
            assert (await upgrade(running)).outcome == "done"
            await until_gone(running.process.pid)
            assert path.is_socket()
    assert not path.exists()

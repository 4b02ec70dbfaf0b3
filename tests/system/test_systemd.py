"""Notifications to systemd, and settings and sockets from it."""

import socket
import subprocess
import sys

import pytest
import trio

from omni_proxy.system.systemd import ServiceManager


@pytest.fixture
def notify_socket(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        yield sock


def manager(notify_socket, **variables: str) -> tuple[ServiceManager, dict[str, str]]:
    environ = {"NOTIFY_SOCKET": notify_socket.getsockname(), "HOME": "/", **variables}
    return ServiceManager(environ, 7), environ


def test_no_child_process_gets_the_variables(notify_socket):
    service_manager, environ = manager(
        notify_socket, WATCHDOG_USEC="5000", WATCHDOG_PID="7", LISTEN_PID="7", LISTEN_FDS="0"
    )
    assert environ == {"HOME": "/"}
    assert set(service_manager.variables) == {"NOTIFY_SOCKET", "WATCHDOG_USEC"}


def test_states_are_sent_as_systemd_reads_them(notify_socket, monkeypatch):
    monkeypatch.setattr("os.getpid", lambda: 7)
    service_manager, _ = manager(notify_socket)
    service_manager.ready()
    service_manager.ready(taken_over=True)
    service_manager.reloading()
    service_manager.stopping()
    assert notify_socket.recv(99) == b"READY=1"
    assert notify_socket.recv(99) == b"MAINPID=7\nREADY=1"
    reloading, usecs = notify_socket.recv(99).split(b"\nMONOTONIC_USEC=")
    assert reloading == b"RELOADING=1"
    assert int(usecs) > 0
    assert notify_socket.recv(99) == b"STOPPING=1"


def test_a_program_that_has_handed_over_sends_nothing(notify_socket):
    service_manager, _ = manager(notify_socket)
    service_manager.silent = True
    service_manager.stopping()
    with pytest.raises(BlockingIOError):
        notify_socket.recv(99)


def test_without_systemd_nothing_is_sent(monkeypatch):
    monkeypatch.setattr(socket, "socket", pytest.fail)
    ServiceManager({}, 7).ready()


async def test_the_watchdog_is_notified_twice_in_each_interval(notify_socket, autojump_clock):
    service_manager, _ = manager(notify_socket, WATCHDOG_USEC="4000000")
    started_at = trio.current_time()
    with trio.move_on_after(5):
        await service_manager.run_watchdog()
    assert trio.current_time() - started_at == 5
    assert [notify_socket.recv(99) for _ in range(3)] == [b"WATCHDOG=1"] * 3  # at 0, 2 and 4 s


@pytest.mark.parametrize("pid", ["7", "8"])
async def test_a_watchdog_for_another_process_is_not_notified(notify_socket, autojump_clock, pid):
    service_manager, _ = manager(notify_socket, WATCHDOG_USEC="4000000", WATCHDOG_PID=pid)
    with trio.move_on_after(1):
        await service_manager.run_watchdog()
    if pid == "8":
        with pytest.raises(BlockingIOError):
            notify_socket.recv(99)
    else:
        assert notify_socket.recv(99) == b"WATCHDOG=1"


CODE = """
import os
from omni_proxy.system.systemd import ServiceManager
environ = {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
print([sock.getsockname()[1] for sock in ServiceManager(environ, os.getpid()).take_sockets()])
"""


def test_listening_sockets_begin_with_descriptor_three(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        number = sock.fileno()
        code = f"import os\nif {number} != 3: os.dup2({number}, 3)\n{CODE}"
        result = subprocess.run(
            [sys.executable, "-c", code],
            pass_fds=[number],
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == f"[{sock.getsockname()[1]}]"

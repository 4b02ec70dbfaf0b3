"""What is sent to systemd, and what is taken from it."""

import socket
import subprocess
import sys

import pytest
import trio

from omni_proxy.system.service_manager import ServiceManager


@pytest.fixture
def heard(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        yield sock


def manager(heard, **more: str) -> tuple[ServiceManager, dict[str, str]]:
    environ = {"NOTIFY_SOCKET": heard.getsockname(), "HOME": "/", **more}
    return ServiceManager(environ, 7), environ


def test_no_child_process_gets_the_variables(heard):
    made, environ = manager(
        heard, WATCHDOG_USEC="5000", WATCHDOG_PID="7", LISTEN_PID="7", LISTEN_FDS="0"
    )
    assert environ == {"HOME": "/"}
    assert set(made.variables) == {"NOTIFY_SOCKET", "WATCHDOG_USEC"}


def test_states_are_sent_as_systemd_reads_them(heard, monkeypatch):
    monkeypatch.setattr("os.getpid", lambda: 7)
    made, _ = manager(heard)
    made.ready()
    made.ready(taken_over=True)
    made.reloading()
    made.stopping()
    assert heard.recv(99) == b"READY=1"
    assert heard.recv(99) == b"MAINPID=7\nREADY=1"
    reloading, usecs = heard.recv(99).split(b"\nMONOTONIC_USEC=")
    assert reloading == b"RELOADING=1"
    assert int(usecs) > 0
    assert heard.recv(99) == b"STOPPING=1"


def test_who_has_handed_over_is_silent(heard):
    made, _ = manager(heard)
    made.silent = True
    made.stopping()
    with pytest.raises(BlockingIOError):
        heard.recv(99)


def test_without_systemd_nothing_is_sent():
    ServiceManager({}, 7).ready()


async def test_the_watchdog_is_fed_twice_in_each_interval(heard, autojump_clock):
    made, _ = manager(heard, WATCHDOG_USEC="4000000")
    started_at = trio.current_time()
    with trio.move_on_after(5):
        await made.run_watchdog()
    assert trio.current_time() - started_at == 5
    assert [heard.recv(99) for _ in range(3)] == [b"WATCHDOG=1"] * 3  # at 0, 2 and 4 s


@pytest.mark.parametrize("pid", ["7", "8"])
async def test_a_watchdog_for_another_process_is_not_fed(heard, autojump_clock, pid):
    made, _ = manager(heard, WATCHDOG_USEC="4000000", WATCHDOG_PID=pid)
    with trio.move_on_after(1):
        await made.run_watchdog()
    if pid == "8":
        with pytest.raises(BlockingIOError):
            heard.recv(99)
    else:
        assert heard.recv(99) == b"WATCHDOG=1"


CODE = """
import os
from omni_proxy.system.service_manager import ServiceManager
environ = {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
print([sock.getsockname()[1] for sock in ServiceManager(environ, os.getpid()).take_sockets()])
"""


def test_listening_sockets_begin_with_descriptor_three(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        number = sock.fileno()
        code = f"import os\nif {number} != 3: os.dup2({number}, 3)\n{CODE}"
        done = subprocess.run(
            [sys.executable, "-c", code],
            pass_fds=[number],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == f"[{sock.getsockname()[1]}]"

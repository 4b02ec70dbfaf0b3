"""The guarantees of tests/ports.py for tests that start programs at a fixed port."""

import socket
import subprocess
import sys
from pathlib import Path

from tests import ports

ROOT = Path(__file__).parents[1]
PRINT_PORT = "from tests.ports import free_port; print(free_port(), flush=True); input()"


def test_a_port_is_not_returned_twice_in_a_row():
    free_ports = [ports.free_port() for _ in range(20)]
    assert len(set(free_ports)) == 20


def test_a_port_range_is_free_and_returned_once():
    first = ports.free_run(3)
    assert ports.free_port() not in range(first, first + 3)
    server = socket.create_server(("127.0.0.1", ports.free_port() + 2))
    with server:
        run = ports.free_run(4)
        assert server.getsockname()[1] not in range(run, run + 4)


def test_two_processes_have_different_blocks():
    command = [sys.executable, "-c", PRINT_PORT]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        other_port = int(other.stdout.readline())
        other.communicate("\n", timeout=20)
    own_port = ports.free_port()
    size = ports.BLOCK_SIZE
    assert (other_port - ports.FIRST) // size != (own_port - ports.FIRST) // size

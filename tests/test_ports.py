"""What tests/ports.py promises to tests that start programs at a port of their choice."""

import socket
import subprocess
import sys
from pathlib import Path

from tests import ports

ROOT = Path(__file__).parents[1]
TELL = "from tests.ports import free_port; print(free_port(), flush=True); input()"


def test_a_port_is_not_given_twice_in_a_row():
    given = [ports.free_port() for _ in range(20)]
    assert len(set(given)) == 20


def test_a_port_range_is_free_and_given_out_once():
    first = ports.free_run(3)
    assert ports.free_port() not in range(first, first + 3)
    taken = socket.create_server(("127.0.0.1", ports.free_port() + 2))
    with taken:
        run = ports.free_run(4)
        assert taken.getsockname()[1] not in range(run, run + 4)


def test_two_processes_have_different_blocks():
    command = [sys.executable, "-c", TELL]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        other.communicate("\n", timeout=20)
    ours = ports.free_port()
    size = ports.BLOCK_SIZE
    assert (theirs - ports.FIRST) // size != (ours - ports.FIRST) // size

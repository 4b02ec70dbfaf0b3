import os
import signal
import socket
import subprocess
import sys

import msgspec
import pytest

from omni_proxy.process_group.fork.ipc import Exited, ForkEvent, JsonSocket
from tests.tree import ROOT

SERVER = """
import os, signal, socket, sys
from omni_proxy.process_group.fork.forkserver import run

def serve(connection):
    word = connection.recv(20)
    if word == b"fail":
        raise ValueError("the last error")
    connection.sendall(word)
    connection.recv(1)

run(socket.socket(fileno=int(sys.argv[1])), serve)
"""


@pytest.fixture
def control():
    client, server_end = socket.socketpair()
    with server_end:
        argv = [sys.executable, "-c", SERVER, str(server_end.fileno())]
        server = subprocess.Popen(argv, cwd=ROOT, pass_fds=[server_end.fileno()])
    with server, client:
        yield client
        client.close()
        assert server.wait(20) == 0


class Fork:
    def __init__(self, control):
        self.errors = os.memfd_create("errors")
        self.wire, child_wire = socket.socketpair()
        self.events, child_events = socket.socketpair()
        with child_wire, child_events:
            socket.send_fds(
                control, [b"."], [child_wire.fileno(), self.errors, child_events.fileno()]
            )

    def status(self):
        (line,) = JsonSocket(self.events).lines()
        event = msgspec.json.decode(line, type=ForkEvent)
        assert isinstance(event, Exited)
        return event.status

    def close(self):
        self.wire.close()
        self.events.close()
        os.close(self.errors)


@pytest.fixture
def forks(control):
    forks = [Fork(control) for _ in range(3)]
    yield forks
    for fork in forks:
        fork.close()


def test_each_fork_is_independent_and_its_exit_is_reported(forks):
    for number, fork in enumerate(forks):
        fork.wire.sendall(b"word %d" % number)
    assert [fork.wire.recv(20) for fork in forks] == [b"word 0", b"word 1", b"word 2"]
    forks[1].wire.shutdown(socket.SHUT_WR)
    assert forks[1].status() == 0
    forks[0].wire.sendall(b".")
    assert forks[0].status() == 0


def test_the_traceback_of_a_failed_fork_is_on_its_stderr(forks):
    forks[0].wire.sendall(b"fail")
    assert forks[0].status() == 1
    assert b"ValueError: the last error" in os.pread(forks[0].errors, 4096, 0)


def test_closing_the_event_socket_kills_the_fork(forks):
    forks[0].wire.sendall(b"living")
    assert forks[0].wire.recv(20) == b"living"
    forks[0].events.shutdown(socket.SHUT_WR)
    assert forks[0].status() == -signal.SIGKILL
    forks[1].wire.sendall(b"as before")
    assert forks[1].wire.recv(20) == b"as before"


def test_a_cancelled_request_is_not_forked(control):
    fork = Fork(control)
    fork.events.shutdown(socket.SHUT_WR)
    assert list(JsonSocket(fork.events).lines()) == []
    assert fork.wire.recv(1) == b""
    fork.close()

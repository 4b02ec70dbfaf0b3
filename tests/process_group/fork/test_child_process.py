import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from omni_proxy.process_group.fork import child_process
from omni_proxy.process_group.fork import forkserver_client as module
from omni_proxy.process_group.fork.child_process import ChildEnded, ChildHandle, ChildPool
from omni_proxy.process_group.fork.ipc import (
    CheckTrainer,
    Configure,
    JsonSocket,
    Logged,
    ReleaseBlocks,
)
from omni_proxy.process_group.tensor_plan import GroupError
from tests.process_group.receiver_steps import torchless_server
from tests.process_group.wait_helpers import run_within, wait_until
from tests.processes import alive

CONFIGURE = Configure(1.0, 1.0, 1.0, None, 60.0, 30)
HUGE = "g" * (4 << 20)  # much more than the buffer of a socket


@pytest.fixture
def child(fork_server):
    child = ChildHandle(CONFIGURE, "child", fork_server)
    yield child
    child.kill("the test is over")
    assert child.wait_reaped(20)


@pytest.fixture
def sockets():
    return socket.socketpair()


@pytest.fixture
def channels(sockets):
    parent, child = map(JsonSocket, sockets)
    yield parent, child
    parent.close()
    child.close()


def test_lines_of_any_length_arrive_in_order_with_their_descriptors(sockets, channels):
    parent, child = channels
    sent = [Logged(1, "a" * 3), Logged(2, "b" * (3 << 20)), Logged(3, "\n c \u00e9")]
    pipes = [os.pipe() for _ in range(2)]

    def send():
        parent.send(sent[0])
        parent.send(sent[1], pipes[0][0])
        parent.send(sent[2], pipes[1][0])
        sockets[0].shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    received = [msgspec.json.decode(line, type=Logged) for line in child.lines()]
    thread.join()
    assert received == sent
    assert len(child.descriptors) == 2
    for _, write in pipes:
        os.write(write, b"x")
    for (read, write), passed in zip(pipes, child.descriptors, strict=True):
        assert os.stat(passed) == os.stat(read)
        os.close(read)
        os.close(write)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, "the receiver process was ended by SIGKILL"),
        (signal.SIGABRT, "the receiver process was ended by SIGABRT"),
    ],
)
def test_callers_of_a_killed_child_get_the_reason(child, number, message):
    child.require_ready(60)
    errors = []
    child.subscribe(7, errors.append)
    os.kill(child.pid, signal.SIGSTOP)  # so that it cannot answer before the signal
    os.kill(child.pid, number)
    os.kill(child.pid, signal.SIGCONT)
    with pytest.raises(ChildEnded, match=message):
        child.call(CheckTrainer(child.next_number(), "g", False), 20)
    assert child.wait_reaped(10)
    child.subscribe(8, errors.append)
    assert (
        [str(error) for error in errors]
        == [child.end_reason, child.end_reason]
        == [message, message]
    )
    with pytest.raises(ChildEnded, match=message):
        child.require_ready(0)


def test_an_ended_child_leaves_no_descriptor_and_no_thread(fork_server):
    def start_and_kill():
        child = ChildHandle(CONFIGURE, "brief", fork_server)
        child.require_ready(60)
        child.kill("enough")
        assert child.wait_reaped(10)
        wait_until(lambda: "brief" not in [thread.name for thread in threading.enumerate()])

    start_and_kill()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        start_and_kill()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files)
    wait_until(lambda: threading.active_count() <= threads)


def test_a_call_to_a_stopped_child_times_out(child):
    child.require_ready(60)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(GroupError, match=r"no reply within 0\.1 s"):
        child.call(CheckTrainer(child.next_number(), "g", False), 0.1)
    child.kill("enough")
    assert child.wait_reaped(10)
    assert child.end_reason == "enough"


def test_a_command_that_a_stopped_child_cannot_read_kills_it(child, monkeypatch):
    monkeypatch.setattr(child_process, "SEND_SECS", 0.2)
    child.require_ready(60)
    errors = []
    child.subscribe(7, errors.append)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(ChildEnded, match=r"hangs: it read no command for 0\.2 s"):
        run_within(30, lambda: child.call(CheckTrainer(child.next_number(), HUGE, False), 600))
    assert child.wait_reaped(20)
    wait_until(lambda: not alive(child.pid))
    assert [str(error) for error in errors] == [child.end_reason]
    assert child.end_reason.startswith("the receiver process hangs")


def test_a_command_blocked_by_another_one_times_out(child):
    child.require_ready(60)
    os.kill(child.pid, signal.SIGSTOP)
    huge = CheckTrainer(child.next_number(), HUGE, False)
    stuck = ThreadPoolExecutor(1).submit(child.call, huge, 600)
    message = ""
    while "read no command for 0.1 s" not in message:  # before the other call has begun: no answer
        with pytest.raises(GroupError) as refusal:
            run_within(30, lambda: child.call(CheckTrainer(child.next_number(), "g", False), 0.1))
        message = str(refusal.value)
    assert not stuck.done()
    assert child.end_reason is None  # a call with a timeout does not kill the child
    child.kill("enough")
    with pytest.raises(ChildEnded, match="enough"):
        stuck.result(30)


def test_a_stopped_child_whose_socket_is_full_is_killed(child, monkeypatch):
    monkeypatch.setattr(child_process, "SEND_SECS", 0.2)
    child.require_ready(60)
    os.kill(child.pid, signal.SIGSTOP)
    message = ""
    while "read no command" not in message:  # short lines are sent completely or not at all
        with pytest.raises(GroupError) as refusal:
            run_within(
                30, lambda: child.call(CheckTrainer(child.next_number(), "g" * 1000, False), 0)
            )
        message = str(refusal.value)
    assert child.end_reason is None
    run_within(30, lambda: child.send(ReleaseBlocks((1,))))
    assert child.wait_reaped(20)
    assert child.end_reason == "the receiver process hangs: it read no command for 0.2 s"


def test_no_line_is_sent_after_one_that_was_sent_only_in_part(channels):
    parent, _ = channels
    with pytest.raises(TimeoutError, match="nothing was read"):
        run_within(30, lambda: parent.send(Logged(1, HUGE), timeout_secs=0.05))
    assert parent.partial_write
    with pytest.raises(BrokenPipeError, match="sent only in part"):
        parent.send(Logged(1, "short"), timeout_secs=0.05)


def test_a_child_killed_before_it_is_forked_ends_at_once(fork_server, monkeypatch):
    busy = "import threading; threading.Event().wait()"  # as if it were importing torch
    monkeypatch.setattr(module, "command", lambda _: [sys.executable, "-c", busy])
    child = ChildHandle(CONFIGURE, "never", fork_server)
    assert not child.ready
    child.kill("not wanted any more")
    assert child.wait_reaped(20)
    assert child.pid is None
    with pytest.raises(ChildEnded, match="not wanted any more"):
        child.require_ready(0)


def test_a_child_that_sends_an_invalid_message_is_killed(fork_server, monkeypatch):
    monkeypatch.setattr(module, "command", torchless_server("send_invalid_message"))
    child = ChildHandle(CONFIGURE, "invalid", fork_server)
    with pytest.raises(ChildEnded, match="invalid message"):
        child.require_ready(20)
    assert child.wait_reaped(20)


class FakeChild:
    def __init__(self, pid):
        self.pid = pid
        self.end_reason = None
        self.released = []

    def send(self, command):
        self.released.append(command.blocks)

    def kill(self, reason):
        self.end_reason = self.end_reason or reason

    def wait_reaped(self, timeout_secs):
        return self.end_reason is not None


class FakeForkServer:
    def __init__(self):
        self.calls = []

    def hold(self):
        self.calls.append("held")

    def warm(self):
        self.calls.append("warm")

    def release(self):
        self.calls.append("released")

    def pid(self):
        return 1


@pytest.fixture
def fake_server():
    return FakeForkServer()


@pytest.fixture
def children(fake_server):
    numbers = iter((10, None, 12))
    return ChildPool(fake_server, lambda _: FakeChild(next(numbers)))


def test_only_running_children_are_listed_and_release_blocks(children):
    first, not_forked, third = (children.start_child() for _ in range(3))
    assert children.pids() == [1, 10, 12]
    first.kill("gone")
    assert children.running() == [not_forked, third]
    children.release_blocks((4, 5))
    assert [child.released for child in (first, not_forked, third)] == [[], [(4, 5)], [(4, 5)]]


def test_close_kills_all_children_and_releases_the_fork_server_once(children, fake_server):
    child = children.start_child()
    children.warm()
    children.close()
    children.close()
    children.warm()
    assert child.end_reason == "the receiver was closed"
    assert fake_server.calls == ["held", "warm", "released"]
    with pytest.raises(GroupError, match="shutting down"):
        children.start_child()

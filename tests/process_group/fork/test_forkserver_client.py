import os
import signal
import sys
from pathlib import Path

import pytest

from omni_proxy.process_group.fork import forkserver_client as module
from omni_proxy.process_group.fork.child_process import ChildEnded, ChildHandle
from omni_proxy.process_group.fork.forkserver_client import SHARED_FORK_SERVER, command
from omni_proxy.process_group.fork.ipc import CheckTrainer, Configure
from omni_proxy.process_group.tensor_plan import GroupError
from tests.process_group.wait_helpers import wait_until
from tests.processes import alive

CONFIGURE = Configure(1.0, 1.0, 1.0, None, 60.0, 30)


def test_a_single_file_build_starts_the_server_by_its_own_command(monkeypatch):
    assert command(5)[1:] == ["-m", "omni_proxy", "receiver-process", "5"]
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert command(5) == [sys.executable, "receiver-process", "5"]


def test_the_fork_server_has_one_thread_and_torch_imported():
    child = ChildHandle(CONFIGURE, "child", SHARED_FORK_SERVER)
    child.require_ready(60)
    assert len(os.listdir(f"/proc/{SHARED_FORK_SERVER.pid()}/task")) == 1
    for pid in (SHARED_FORK_SERVER.pid(), child.pid):
        assert "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    child.kill("enough")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_process_group_are_ignored(number):
    child = ChildHandle(CONFIGURE, "child", SHARED_FORK_SERVER)
    child.require_ready(60)
    before = SHARED_FORK_SERVER.pid()
    for pid in (before, child.pid):
        os.kill(pid, number)
    assert child.call(CheckTrainer(child.next_number(), "g", False), 20).values == {
        "owner_gone": 0,
        "owner_answers": 0,
    }
    assert SHARED_FORK_SERVER.pid() == before
    child.kill("enough")


def test_children_end_with_the_fork_server(fork_server):
    assert fork_server.pid() is None  # hold() alone does not start it
    children = [ChildHandle(CONFIGURE, f"child-{number}", fork_server) for number in range(3)]
    for child in children:
        child.require_ready(60)
    assert len({child.pid for child in children}) == 3
    for child in children:
        assert f"PPid:\t{fork_server.pid()}\n" in Path(f"/proc/{child.pid}/status").read_text()
    os.kill(children[0].pid, signal.SIGSTOP)  # a stopped child cannot end itself
    os.kill(fork_server.pid(), signal.SIGKILL)
    for child in children:
        assert child.wait_reaped(20)
        assert child.end_reason == "the receiver process was ended by SIGKILL"
    wait_until(lambda: not any(alive(child.pid) for child in children))
    replacement = ChildHandle(CONFIGURE, "again", fork_server)
    replacement.require_ready(60)


def test_a_stopped_fork_server_is_continued_for_a_fork_or_a_kill(fork_server):
    first = ChildHandle(CONFIGURE, "first", fork_server)
    first.require_ready(60)
    before = fork_server.pid()
    os.kill(before, signal.SIGSTOP)
    second = ChildHandle(CONFIGURE, "second", fork_server)
    second.require_ready(20)
    for pid in (before, first.pid):
        os.kill(pid, signal.SIGSTOP)
    first.kill("enough")
    wait_until(lambda: not alive(first.pid))
    assert (fork_server.pid(), alive(second.pid)) == (before, True)


def test_a_fork_inherits_no_descriptor_of_another_fork(fork_server):
    first = ChildHandle(CONFIGURE, "first", fork_server)
    first.require_ready(60)
    second = ChildHandle(CONFIGURE, "second", fork_server)
    second.require_ready(60)
    for child in (first, second):
        targets = [os.readlink(path) for path in Path(f"/proc/{child.pid}/fd").iterdir()]
        assert len([path for path in targets if path.startswith("socket:")]) == 1
        assert len([path for path in targets if path.startswith("pipe:")]) == 1
    first.kill("enough")
    assert first.wait_reaped(20)
    wait_until(lambda: not alive(first.pid))
    assert alive(second.pid)


def test_the_last_release_ends_the_fork_server_and_its_forks(fork_server):
    fork_server.hold()
    child = ChildHandle(CONFIGURE, "child", fork_server)
    child.require_ready(60)
    pid = fork_server.pid()
    fork_server.release()
    assert fork_server.pid() == pid
    fork_server.release()
    assert fork_server.pid() is None
    assert not alive(pid)
    assert child.wait_reaped(20)
    wait_until(lambda: not alive(child.pid))
    fork_server.hold()


def test_a_fork_server_that_cannot_start_is_a_group_error(fork_server, monkeypatch):
    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(module, "command", lambda _: ["/nowhere/python"])
    with pytest.raises(GroupError, match="no receiver process could be started"):
        fork_server.warm()
    with pytest.raises(GroupError, match="no receiver process could be started"):
        ChildHandle(CONFIGURE, "none", fork_server)
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('no module named torch')", "status 1: no module named torch"),
        (
            "import os; os.write(2, b'gloo::EnforceNotMet'); os.abort()",
            "sent more bytes than it announced",
        ),
    ],
)
def test_a_failed_start_is_reported_with_the_end_of_its_stderr(
    fork_server, monkeypatch, code, message
):
    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(module, "command", lambda number: [sys.executable, "-c", code, str(number)])
    child = ChildHandle(CONFIGURE, "unborn", fork_server)
    with pytest.raises(ChildEnded, match=message):
        child.require_ready(20)
    assert child.wait_reaped(10)
    assert fork_server.pid() is None
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == files)

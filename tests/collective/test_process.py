import os
import socket
import sys
import threading

import pytest

from omni_proxy.collective import process as module
from omni_proxy.collective.process import Child, ChildEnded, command
from omni_proxy.collective.spares import Spares
from omni_proxy.collective.specs import GroupError
from omni_proxy.collective.wires import Ask, Begin, Logged, Wire

BEGIN = Begin(1.0, 1.0, 1.0, None, 60.0, 30)


@pytest.fixture
def wires():
    ours, theirs = map(Wire, socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_lines_of_any_length_and_their_descriptors_come_in_order(wires):
    ours, theirs = wires
    sent = [Logged(1, "a" * 3), Logged(2, "b" * (3 << 20)), Logged(3, "\n c \u00e9")]
    ends = [os.pipe() for _ in range(2)]

    def send():
        ours.send(sent[0])
        ours.send(sent[1], ends[0][0])
        ours.send(sent[2], ends[1][0])
        ours._connection.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    came = [module.msgspec.json.decode(line, type=Logged) for line in theirs.lines()]
    thread.join()
    assert came == sent
    assert len(theirs.descriptors) == 2
    for _, write in ends:
        os.write(write, b"x")
    for (read, write), theirs_of_it in zip(ends, theirs.descriptors, strict=True):
        assert os.stat(theirs_of_it) == os.stat(read)
        os.close(read)
        os.close(write)


def test_a_single_file_build_starts_itself(monkeypatch):
    assert command(5)[1:] == ["-m", "omni_proxy.collective.child", "5"]
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert command(5) == [sys.executable, "receiver-process", "5"]


def test_a_child_that_cannot_be_started_is_a_group_error(monkeypatch):
    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(module, "command", lambda _: ["/nowhere/python"])
    with pytest.raises(GroupError, match="no receiver process could be started"):
        Child(BEGIN, "none")
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; print('why', file=sys.stderr); sys.exit(3)", "ended with status 3: why"),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL"),
        (
            "import os; os.write(2, b'gloo::EnforceNotMet'); os.abort()",
            "sent more bytes than it announced",
        ),
        ("import os, sys; os.write(int(sys.argv[1]), b'hello\\n')", "speaks nonsense"),
    ],
)
def test_how_a_child_ended_is_told_to_who_asks_it(monkeypatch, code, said):
    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(module, "command", lambda number: [sys.executable, "-c", code, str(number)])
    child = Child(BEGIN, "brief")
    heard = []
    child.follow(7, heard.append)
    with pytest.raises(ChildEnded, match=said):
        child.call(Ask(child.number(), "g", False), 20)
    assert child.reaped(10)
    child.follow(8, heard.append)
    assert [str(each) for each in heard] == [child.why, child.why]
    with pytest.raises(ChildEnded, match=said):
        child.call(Ask(child.number(), "g", False), 20)
    child._reader.join(10)
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_child_that_does_not_answer_is_not_waited_for(monkeypatch):
    silent = "import threading; threading.Event().wait()"
    monkeypatch.setattr(module, "command", lambda n: [sys.executable, "-c", silent, str(n)])
    child = Child(BEGIN, "silent")
    with pytest.raises(GroupError, match=r"no answer within 0\.1 s"):
        child.call(Ask(child.number(), "g", False), 0.1)
    child.kill("enough")
    assert child.reaped(10)
    assert child.why == "enough"


class FakeChild:
    def __init__(self, ready=False):
        self.ready = ready
        self.why = None
        self.told = []

    def tell(self, order):
        self.told.append(order)

    def kill(self, why):
        self.why = self.why or why

    def reaped(self, within_secs):
        return self.why is not None


@pytest.fixture
def spares():
    return Spares(FakeChild)


def test_one_spare_is_started_however_often_that_is_asked(spares):
    spares.warm()
    spares.warm()
    assert len(spares.living()) == 1
    spares.take()
    spares.warm()
    assert len(spares.living()) == 2


def test_who_is_ready_is_taken_first(spares):
    spares.warm()
    ready = FakeChild(ready=True)
    spares.give(ready)
    assert spares.take() is ready


def test_two_idle_ones_are_enough(spares):
    children = [FakeChild() for _ in range(3)]
    for child in children:
        spares.give(child)
    assert [child.why is None for child in children] == [True, True, False]
    assert [len(child.told) for child in children] == [1, 1, 1]


def test_a_dead_one_is_neither_kept_nor_taken(spares):
    spares.warm()
    (dead,) = spares.living()
    dead.kill("gone")
    assert spares.take() is not dead
    spares.give(dead)
    assert spares.take() is not dead


def test_a_close_ends_those_in_use_too(spares):
    taken = spares.take()
    spares.warm()
    everyone = spares.living()
    spares.close()
    assert [child.why for child in everyone] == ["the receiver was closed"] * 2
    with pytest.raises(GroupError, match="shutting down"):
        spares.take()
    spares.give(taken)
    spares.warm()
    assert spares.living() == []

import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from omni_proxy.process_group import child_handle
from omni_proxy.process_group import forkserver_client as module
from omni_proxy.process_group.child_handle import ChildEnded, ChildHandle
from omni_proxy.process_group.ipc import Ask, Begin, Forget, JsonSocket, Logged
from omni_proxy.process_group.tensor_plan import GroupError
from tests.process_group.receiving import light
from tests.process_group.waiting import until, within
from tests.processes import alive

BEGIN = Begin(1.0, 1.0, 1.0, None, 60.0, 30)
HUGE = "g" * (4 << 20)  # much more than a socket holds


@pytest.fixture
def child(nest):
    child = ChildHandle(BEGIN, "child", nest)
    yield child
    child.kill("the test is over")
    assert child.reaped(20)


@pytest.fixture
def wires():
    ours, theirs = map(JsonSocket, socket.socketpair())
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
    came = [msgspec.json.decode(line, type=Logged) for line in theirs.lines()]
    thread.join()
    assert came == sent
    assert len(theirs.descriptors) == 2
    for _, write in ends:
        os.write(write, b"x")
    for (read, write), theirs_of_it in zip(ends, theirs.descriptors, strict=True):
        assert os.stat(theirs_of_it) == os.stat(read)
        os.close(read)
        os.close(write)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "the receiver process was ended by SIGKILL"),
        (signal.SIGABRT, "the receiver process was ended by SIGABRT"),
    ],
)
def test_how_a_child_ended_is_told_to_who_asks_it(child, number, said):
    child.require_ready(60)
    heard = []
    child.follow(7, heard.append)
    os.kill(child.pid, signal.SIGSTOP)  # so that the answer can't be first
    os.kill(child.pid, number)
    os.kill(child.pid, signal.SIGCONT)
    with pytest.raises(ChildEnded, match=said):
        child.call(Ask(child.number(), "g", False), 20)
    assert child.reaped(10)
    child.follow(8, heard.append)
    assert [str(each) for each in heard] == [child.why, child.why] == [said, said]
    with pytest.raises(ChildEnded, match=said):
        child.require_ready(0)


def test_nothing_of_a_child_is_left_here(nest):
    def live():
        child = ChildHandle(BEGIN, "brief", nest)
        child.require_ready(60)
        child.kill("enough")
        assert child.reaped(10)
        child._reader.join(30)

    live()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        live()
    until(lambda: len(os.listdir("/proc/self/fd")) <= files)
    until(lambda: threading.active_count() <= threads)


def test_a_child_that_does_not_answer_is_not_waited_for(child):
    child.require_ready(60)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(GroupError, match=r"no answer within 0\.1 s"):
        child.call(Ask(child.number(), "g", False), 0.1)
    child.kill("enough")
    assert child.reaped(10)
    assert child.why == "enough"


def test_an_order_that_a_stopped_child_cannot_take_ends_it(child, monkeypatch):
    monkeypatch.setattr(child_handle, "TAKE_SECS", 0.2)
    child.require_ready(60)
    heard = []
    child.follow(7, heard.append)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(ChildEnded, match=r"hangs: it took no order for 0\.2 s"):
        within(30, lambda: child.call(Ask(child.number(), HUGE, False), 600))
    assert child.reaped(20)
    until(lambda: not alive(child.pid))
    assert [str(each) for each in heard] == [child.why]
    assert child.why.startswith("the receiver process hangs")


def test_nobody_waits_behind_an_order_that_a_stopped_child_does_not_take(child):
    child.require_ready(60)
    os.kill(child.pid, signal.SIGSTOP)
    huge = Ask(child.number(), HUGE, False)
    stuck = ThreadPoolExecutor(1).submit(child.call, huge, 600)
    until(child._hatched.wire._lock.locked)
    with pytest.raises(GroupError, match=r"took no order for 0\.1 s"):
        within(30, lambda: child.call(Ask(child.number(), "g", False), 0.1))
    assert not stuck.done()
    assert child.why is None  # who only asks ends nobody
    child.kill("enough")
    with pytest.raises(ChildEnded, match="enough"):
        stuck.result(30)


def test_a_stopped_child_that_is_told_more_than_it_holds_is_ended(child, monkeypatch):
    monkeypatch.setattr(child_handle, "TAKE_SECS", 0.2)
    child.require_ready(60)
    os.kill(child.pid, signal.SIGSTOP)
    message = ""
    while "took no order" not in message:  # short lines go in whole or not at all
        with pytest.raises(GroupError) as refusal:
            within(30, lambda: child.call(Ask(child.number(), "g" * 1000, False), 0))
        message = str(refusal.value)
    assert child.why is None
    within(30, lambda: child.tell(Forget((1,))))
    assert child.reaped(20)
    assert child.why == "the receiver process hangs: it took no order for 0.2 s"


def test_after_a_line_that_was_left_in_the_middle_no_other_one_goes(wires):
    ours, _ = wires
    with pytest.raises(TimeoutError, match="nothing was taken"):
        within(30, lambda: ours.send(Logged(1, HUGE), patience_secs=0.05))
    assert ours.torn
    with pytest.raises(BrokenPipeError, match="left in the middle"):
        ours.send(Logged(1, "short"), patience_secs=0.05)


def test_a_child_that_is_given_up_before_it_is_born_is_gone_at_once(nest, monkeypatch):
    busy = "import threading; threading.Event().wait()"  # as in an import
    monkeypatch.setattr(module, "command", lambda _: [sys.executable, "-c", busy])
    child = ChildHandle(BEGIN, "never", nest)
    assert not child.ready
    child.kill("not wanted any more")
    assert child.reaped(20)
    assert child.pid is None
    with pytest.raises(ChildEnded, match="not wanted any more"):
        child.require_ready(0)


def test_a_child_that_speaks_nonsense_is_ended(nest, monkeypatch):
    monkeypatch.setattr(module, "command", light("babble"))
    child = ChildHandle(BEGIN, "babbling", nest)
    with pytest.raises(ChildEnded, match="speaks nonsense"):
        child.require_ready(20)
    assert child.reaped(20)

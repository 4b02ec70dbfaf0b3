import threading

import pytest

from omni_proxy.process_group.blocking_call import AbandonedThreads, BlockingCall, CancelToken
from omni_proxy.process_group.tensor_plan import GroupError


@pytest.fixture
def threads():
    return AbandonedThreads()


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


class Noted:
    """Notes in which thread it was freed."""

    def __init__(self, freed_in):
        self.freed_in = freed_in

    def __del__(self):
        self.freed_in.append(threading.current_thread().name)


def test_a_result_is_handed_over(threads):
    assert threads.wait_for(BlockingCall("sum", lambda _: 1 + 1), lambda: None) == 2
    assert threads.names() == []


def test_a_fault_is_told_by_its_text(threads):
    def fail(_):
        raise ValueError("torn")

    with pytest.raises(GroupError, match=r"^torn$"):
        threads.wait_for(BlockingCall("fails", fail), lambda: None)


def test_a_fault_without_a_text_is_told_by_its_kind(threads):
    def fail(_):
        raise KeyError

    with pytest.raises(GroupError, match=r"^KeyError$"):
        threads.wait_for(BlockingCall("fails", fail), lambda: None)


def test_what_is_given_up_is_counted_until_it_is_back(threads, gate):
    errand = BlockingCall("stuck", lambda _: gate.wait())
    with pytest.raises(GroupError, match="enough"):
        threads.wait_for(errand, lambda: "enough")
    assert errand.abandoned
    assert threads.names() == ["stuck"]
    gate.set()
    errand.thread.join()
    assert threads.names() == []


def test_the_one_who_waits_may_fail_itself(threads, gate):
    def broken():
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        threads.wait_for(BlockingCall("stuck", lambda _: gate.wait()), broken)
    assert threads.names() == ["stuck"]


def test_what_has_ended_is_not_given_up(threads):
    errand = BlockingCall("quick", lambda _: "done")
    errand.thread.join()
    assert not errand.abandon()
    assert threads.wait_for(errand, lambda: "too late") == "done"


def test_what_a_given_up_thread_made_is_freed_in_it(threads, gate):
    freed_in = []

    def make(_):
        gate.wait()
        return Noted(freed_in)

    errand = BlockingCall("maker", make)
    with pytest.raises(GroupError):
        threads.wait_for(errand, lambda: "enough")
    gate.set()
    errand.thread.join()
    assert freed_in == ["maker"]


def test_the_last_reference_goes_in_a_thread_of_its_own(threads):
    freed_in = []
    box = [Noted(freed_in)]
    threads.drop("dropper", list.clear, box)
    assert freed_in == ["dropper"]
    assert box == []
    assert threads.names() == []


def test_what_is_said_is_heard_once_by_who_listens_before_or_after():
    heard = []
    stop = CancelToken()
    stop.on_cancel(heard.append)
    stop.cancel("enough")
    stop.cancel("again")
    assert (heard, stop.reason) == (["enough"], "enough")
    stop.on_cancel(heard.append)
    assert heard == ["enough", "enough"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_nobody_need_listen(when):
    heard = []
    stop = CancelToken()
    if when == "after":
        stop.on_cancel(heard.append)
        stop.on_cancel(None)
    stop.cancel("enough")
    assert heard == []

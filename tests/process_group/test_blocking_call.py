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


class FreedObject:
    """Records the name of the thread in which it is freed."""

    def __init__(self, freed_in):
        self.freed_in = freed_in

    def __del__(self):
        self.freed_in.append(threading.current_thread().name)


def test_a_call_returns_its_result(threads):
    assert threads.wait_for(BlockingCall("sum", lambda _: 1 + 1), lambda: None) == 2
    assert threads.names() == []


def test_an_error_is_raised_with_its_text(threads):
    def fail(_):
        raise ValueError("torn")

    with pytest.raises(GroupError, match=r"^torn$"):
        threads.wait_for(BlockingCall("fails", fail), lambda: None)


def test_an_error_without_text_is_raised_with_its_type(threads):
    def fail(_):
        raise KeyError

    with pytest.raises(GroupError, match=r"^KeyError$"):
        threads.wait_for(BlockingCall("fails", fail), lambda: None)


def test_an_abandoned_thread_is_counted_until_it_returns(threads, gate):
    call = BlockingCall("stuck", lambda _: gate.wait())
    with pytest.raises(GroupError, match="enough"):
        threads.wait_for(call, lambda: "enough")
    assert call.abandoned
    assert threads.names() == ["stuck"]
    gate.set()
    call.thread.join()
    assert threads.names() == []


def test_an_error_in_the_waiting_thread_abandons_the_call(threads, gate):
    def fail():
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        threads.wait_for(BlockingCall("stuck", lambda _: gate.wait()), fail)
    assert threads.names() == ["stuck"]


def test_an_ended_call_is_not_abandoned(threads):
    call = BlockingCall("quick", lambda _: "done")
    call.thread.join()
    assert not call.abandon()
    assert threads.wait_for(call, lambda: "too late") == "done"


def test_the_result_of_an_abandoned_call_is_freed_in_its_thread(threads, gate):
    freed_in = []

    def make(_):
        gate.wait()
        return FreedObject(freed_in)

    call = BlockingCall("maker", make)
    with pytest.raises(GroupError):
        threads.wait_for(call, lambda: "enough")
    gate.set()
    call.thread.join()
    assert freed_in == ["maker"]


def test_drop_frees_the_last_reference_in_another_thread(threads):
    freed_in = []
    references = [FreedObject(freed_in)]
    threads.drop("dropper", list.clear, references)
    assert freed_in == ["dropper"]
    assert references == []
    assert threads.names() == []


def test_a_cancel_calls_a_callback_once_even_if_it_is_registered_later():
    reasons = []
    stop = CancelToken()
    stop.on_cancel(reasons.append)
    stop.cancel("enough")
    stop.cancel("again")
    assert (reasons, stop.reason) == (["enough"], "enough")
    stop.on_cancel(reasons.append)
    assert reasons == ["enough", "enough"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cancel_without_a_callback_does_nothing(when):
    reasons = []
    stop = CancelToken()
    if when == "after":
        stop.on_cancel(reasons.append)
        stop.on_cancel(None)
    stop.cancel("enough")
    assert reasons == []

import queue
import threading

import pytest

from omni_proxy.replica.pipeline.messages import (
    Abort,
    Admin,
    AdminResult,
    Result,
    ResultChunk,
    StageFailure,
)
from omni_proxy.replica.text.slow_operations import BackgroundStep, InterruptibleCall
from tests.replica.text.scheduler_harness import Desk, Loop, submission

GREEDY = {"temperature": 0, "max_new_tokens": 5}


class Gate:
    """An operation with one step that ends when it is told to; `aside`, or halting the stage."""

    def __init__(self, scheduler, action="grind", *, aside=False, **how):
        self.begun, self.open = threading.Event(), threading.Event()
        self.threads = []
        self.aside = aside
        scheduler.register_slow_admin(action, self.operation, **how)

    def operation(self, order):
        self.threads.append(threading.current_thread().name)
        told = yield BackgroundStep(self.step) if self.aside else self.step
        self.threads.append(threading.current_thread().name)
        return True, "ground", {"told": told} | order.payload, None

    def step(self):
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        assert self.open.wait(20)
        return 7


def answered(loop, op_id):
    return loop.next(AdminResult, lambda told: told.op_id == op_id)


def test_the_stage_reads_messages_during_a_slow_step():
    scheduler = Desk().scheduler
    gate = Gate(scheduler)
    with Loop(scheduler) as loop:
        loop.inbox.put(submission("a", stream=True, max_new_tokens=5000))
        loop.next(ResultChunk)
        loop.inbox.put(Admin("slow", "grind", {"fine": True}))
        assert gate.begun.wait(20)
        loop.inbox.put(Abort("a"))
        loop.inbox.put(submission("late", **GREEDY))
        loop.inbox.put(Admin("info", "model_info"))
        facts = answered(loop, "info").data
        assert (facts["running_batch_size"], facts["waiting_queue_size"]) == (0, 1)
        assert facts["engine_paused"] is True
        gate.open.set()
        answer = answered(loop, "slow")
        assert (answer.success, answer.message) == (True, "ground")
        assert answer.data == {"told": 7, "fine": True}
        assert (answer.stage, answer.action, answer.rank) == ("decode", "grind", 0)
        assert loop.next(Result).request_id == "late"
    own, step, again = gate.threads
    assert own == again != step == "decode-grind"


def test_nothing_is_computed_before_the_answer():
    desk = Desk()
    gate = Gate(desk.scheduler)
    with Loop(desk.scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        assert gate.begun.wait(20)
        loop.inbox.put(submission("a", **GREEDY))
        # Neither may a pause that comes and goes meanwhile start what the operation holds.
        loop.inbox.put(Admin("pause", "pause_generation", {"mode": "in_place"}))
        loop.inbox.put(Admin("on", "continue_generation"))
        assert answered(loop, "on").success
        assert desk.worker.batches == []
        gate.open.set()
        assert loop.next((AdminResult, Result), lambda told: True).op_id == "slow"
        assert loop.next(Result).request_id == "a"


def test_a_second_operation_is_refused_naming_the_first_and_may_be_repeated():
    scheduler = Desk().scheduler
    gate = Gate(scheduler)
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("one", "grind"))
        assert gate.begun.wait(20)
        loop.inbox.put(Admin("two", "grind"))
        refused = answered(loop, "two")
        assert not refused.success
        assert "grind is in progress on stage decode for 0.0 s" in refused.error
        gate.open.set()
        assert answered(loop, "one").success
        loop.inbox.put(Admin("three", "grind"))
        assert answered(loop, "three").success


def test_what_may_begin_beside_does_and_only_that():
    scheduler = Desk().scheduler
    gate = Gate(scheduler)
    Gate(scheduler, "help", aside=True, beside=True).open.set()
    Gate(scheduler, "chat", aside=True).open.set()
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        assert gate.begun.wait(20)
        loop.inbox.put(Admin("beside", "help"))
        assert answered(loop, "beside").success
        for action in ("grind", "chat"):
            loop.inbox.put(Admin(action, action))
            assert not answered(loop, action).success
        gate.open.set()
        assert answered(loop, "slow").success


def test_beside_a_step_that_looks_at_no_weights_answers_are_computed():
    scheduler = Desk().scheduler
    gate = Gate(scheduler, aside=True)
    other = Gate(scheduler, "other")
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        assert gate.begun.wait(20)
        loop.inbox.put(submission("a", **GREEDY))
        assert loop.next(Result).request_id == "a"
        loop.inbox.put(Admin("info", "model_info"))
        assert answered(loop, "info").data["engine_paused"] is False
        other.open.set()
        loop.inbox.put(Admin("other", "other"))
        assert answered(loop, "other").success
        gate.open.set()
        assert answered(loop, "slow").success


def test_of_two_steps_that_halt_one_waits_for_the_other():
    order = []

    def late(_):
        yield BackgroundStep(lambda: order.append("aside"))
        yield lambda: order.append("halting")
        return True, "late", {}, None

    scheduler = Desk().scheduler
    gate = Gate(scheduler)
    scheduler.register_slow_admin("late", late, beside=True)
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        assert gate.begun.wait(20)
        loop.inbox.put(Admin("late", "late"))
        loop.inbox.put(submission("a", **GREEDY))
        # Asked again and again, it has passed its first step by some answer, and stays there.
        while not order:
            loop.inbox.put(Admin("info", "model_info"))
            answered(loop, "info")
        loop.inbox.put(Admin("info", "model_info"))
        assert answered(loop, "info").data["engine_paused"] is True
        assert order == ["aside"]
        order.append("opened")
        gate.open.set()
        ends = [loop.next(AdminResult).op_id for _ in range(2)]
        assert ends == ["slow", "late"]
        assert order == ["aside", "opened", "halting"]
        assert loop.next(Result).request_id == "a"


def test_an_abort_of_all_reaches_requests_waiting_for_a_step():
    scheduler = Desk().scheduler
    gate = Gate(scheduler)
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        assert gate.begun.wait(20)
        loop.inbox.put(submission("a", **GREEDY))
        loop.inbox.put(Admin("pause", "pause_generation", {"mode": "abort"}))
        assert loop.next(StageFailure).request_id == "a"
        gate.open.set()
        assert answered(loop, "slow").success
        loop.inbox.put(Admin("info", "model_info"))
        assert answered(loop, "info").data["engine_paused"] is True


@pytest.mark.parametrize("where", ["before", "step", "after"])
def test_what_is_raised_becomes_the_answer_and_the_stage_lives_on(where):
    def operation(order):
        if where == "before":
            raise KeyError("model_path")
        value = yield (lambda: 1 / 0) if where == "step" else (lambda: 0)
        raise KeyError(value, "model_path")

    scheduler = Desk().scheduler
    scheduler.register_slow_admin("grind", operation)
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        answer = answered(loop, "slow")
        assert not answer.success
        assert answer.data == {}
        assert ("ZeroDivisionError" if where == "step" else "KeyError") in answer.error
        loop.inbox.put(submission("a", **GREEDY))
        assert loop.next(Result).request_id == "a"


def test_an_operation_sees_what_its_step_raised():
    def operation(order):
        try:
            yield lambda: int("x")
        except ValueError as error:
            value = yield lambda: 3
            return True, f"{error}", {"value": value}, None

    scheduler = Desk().scheduler
    scheduler.register_slow_admin("grind", operation)
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        answer = answered(loop, "slow")
        assert (answer.success, answer.data) == (True, {"value": 3})
        assert "invalid literal" in answer.message


def test_a_shutdown_does_not_wait_for_a_step():
    scheduler = Desk().scheduler
    gate = Gate(scheduler)
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        assert gate.begun.wait(20)
    gate.open.set()


@pytest.mark.parametrize("aside", [False, True])
def test_a_step_that_can_be_is_ended_by_an_interrupt(aside):
    scheduler = Desk().scheduler
    begun, word = threading.Event(), queue.SimpleQueue()

    def step():
        begun.set()
        raise ValueError(word.get(timeout=60))

    def operation(order):
        call = InterruptibleCall(step, word.put)
        yield BackgroundStep(call) if aside else call

    scheduler.register_slow_admin("grind", operation)
    scheduler.register_admin(
        "enough", lambda payload: (scheduler.interrupt("slow", "stop"), "", {}, None)
    )
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind", {}))
        assert begun.wait(20)
        loop.inbox.put(Admin("other", "enough", {}))
        answer = answered(loop, "slow")
    assert (answer.success, answer.message) == (False, "ValueError: stop")
    scheduler.interrupt("slow", "nobody is there any more")

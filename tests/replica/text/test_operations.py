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
from omni_proxy.replica.text.operations import BackgroundStep, InterruptibleCall
from tests.replica.text.scheduler_harness import (
    Loop,
    SchedulerHarness,
    long_prompt,
    submission,
    undisturbed,
)

GREEDY = {"temperature": 0, "max_new_tokens": 30}
GREEDY_TOKENS = {"temperature": 0, "max_new_tokens": 5}


def running_harness(**bounds) -> SchedulerHarness:
    harness = SchedulerHarness(**bounds)
    harness.submit("a", "The sea", stream=True, **GREEDY)
    harness.submit("b", "A song", stream=True, **GREEDY)
    harness.step(10)
    return harness


def test_in_place_freezes_and_continues_where_it_was():
    harness = running_harness()
    answer = harness.admin("pause_generation", mode="in_place")
    assert (answer.success, answer.message) == (True, "generation paused")
    assert answer.data == {"mode": "in_place", "num_paused_requests": 0, "engine_paused": True}
    assert (answer.rank, answer.role, answer.stage) == (0, "single", "decode")
    reported, computed = len(harness.reported), len(harness.worker.batches)
    used = harness.scheduler.batch_queue.used_tokens
    harness.step(5)
    assert not harness.scheduler.busy
    assert (len(harness.reported), len(harness.worker.batches)) == (reported, computed)
    assert harness.scheduler.batch_queue.used_tokens == used > 0
    harness.admin("continue_generation", torch_empty_cache=True)
    harness.finish()
    assert len(harness.worker.batches) == 30
    assert harness.result("a")["text"] == undisturbed("The sea", **GREEDY)["text"]


def test_retract_frees_all_and_recomputes_without_repeating_itself():
    harness = running_harness()
    answer = harness.admin("pause_generation", mode="retract")
    assert answer.data["num_paused_requests"] == 2
    assert harness.scheduler.batch_queue.used_tokens == 0
    assert [each.request_id for each in harness.scheduler.batch_queue.waiting] == ["a", "b"]
    harness.admin("continue_generation")
    before = len(harness.worker.batches)
    harness.finish()
    assert harness.worker.batches[before] == [each + 10 for each in harness.worker.batches[0]]
    for name, prompt in (("a", "The sea"), ("b", "A song")):
        text = undisturbed(prompt, **GREEDY)["text"]
        assert harness.result(name)["text"] == harness.streamed(name) == text
        assert harness.result(name)["usage"]["completion_tokens"] == 30


def test_abort_ends_every_caller():
    harness = running_harness(max_running=1)
    harness.submit("e", task="embed")
    answer = harness.admin("pause_generation")
    assert answer.data == {"mode": "abort", "num_paused_requests": 3, "engine_paused": True}
    for name in "abe":
        assert harness.of(StageFailure, name) == [
            StageFailure(name, "decode", "The request was dropped by an admin action.", "dropped")
        ]
    assert len(harness.scheduler.batch_queue) == 0
    harness.admin("continue_generation")
    assert not harness.scheduler.busy


def test_requests_during_a_pause_wait_for_its_end():
    harness = SchedulerHarness()
    harness.admin("pause_generation", mode="abort")
    harness.submit("late", **GREEDY)
    harness.submit("vector", task="embed")
    harness.step(3)
    assert harness.worker.batches == []
    assert harness.admin("model_info").data["waiting_queue_size"] == 1
    harness.admin("continue_generation")
    harness.finish()
    assert harness.result("late")["usage"]["completion_tokens"] == 30
    assert harness.result("vector")["embedding"]


def test_a_second_pause_takes_the_place_of_the_first():
    harness = running_harness()
    harness.admin("pause_generation", mode="in_place")
    assert harness.admin("pause_generation", mode="retract").data["num_paused_requests"] == 2
    assert harness.scheduler.pause_mode == "retract"
    assert harness.scheduler.batch_queue.used_tokens == 0


def test_an_abort_reaches_a_frozen_request():
    harness = running_harness()
    harness.admin("pause_generation", mode="in_place")
    harness.abort("a")
    harness.admin("continue_generation")
    harness.finish()
    assert not harness.of(Result, "a")
    assert harness.result("b")["text"] == undisturbed("A song", **GREEDY)["text"]


def test_an_unknown_pause_mode_is_refused_and_changes_nothing():
    harness = running_harness()
    answer = harness.admin("pause_generation", mode="later")
    assert not answer.success
    assert answer.message == answer.error == "invalid pause mode: later"
    assert harness.scheduler.busy


def test_continuing_without_a_pause_is_a_success():
    answer = SchedulerHarness().admin("continue_generation")
    assert (answer.success, answer.message) == (True, "generation continued")
    assert answer.data == {"engine_paused": False}


def test_a_flush_drops_cached_and_running_prefixes():
    prompt = long_prompt(40)
    harness = SchedulerHarness(cache_entries=4)
    harness.submit("one", prompt, max_new_tokens=2)
    harness.finish()
    harness.submit("two", long_prompt(40, 99), max_new_tokens=5)
    harness.step(2)
    answer = harness.admin("flush_cache")
    assert (answer.success, answer.data["flush_success"]) == (True, True)
    assert answer.data["flushed_entries"] == 1
    harness.finish()
    assert len(harness.scheduler.cache) == 0
    harness.submit("three", prompt, max_new_tokens=2)
    harness.finish()
    assert harness.result("three")["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_model_info_reports_every_fact():
    harness = running_harness(max_running=1)
    harness.admin("pause_generation", mode="in_place")
    assert harness.admin("model_info").data == {
        "model_path": "tiny",
        "load_format": "auto",
        "weight_version": "default",
        "weight_sync": {},
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "cache_epoch": 0,
        "disable_radix_cache": True,
        "tp_rank": 0,
        "tp_size": 1,
        "model_arch_override": None,
        "supports_weight_update": False,
        "supports_weight_checker": False,
        "prefill_cuda_graph": False,
        "stage_tp_rank": 0,
        "stage_tp_size": 1,
        "engine_paused": True,
        "paused": True,
        "waiting_queue_size": 1,
        "running_batch_size": 1,
        "request_build_workers": 0,
        "request_build_pending": 0,
        "request_build_max_pending": 0,
        "request_build_backlog": 0,
        "request_build_max_pending_observed": 0,
        "request_admission_pending": 0,
    }


def test_an_unknown_action_is_a_failure_by_name():
    answer = SchedulerHarness().admin("paint_weights")
    assert not answer.success
    assert "paint_weights" in answer.error


def test_a_registered_operation_answers_and_may_change_the_weight_version():
    harness = SchedulerHarness()

    def update(payload):
        harness.scheduler.weight_version = payload["weight_version"]
        return True, "updated", {"names": 3}, None

    harness.scheduler.register_admin("update_weights_from_disk", update)
    harness.submit("a", max_new_tokens=2)
    answer = harness.admin("update_weights_from_disk", weight_version="v2")
    assert (answer.success, answer.message, answer.data) == (True, "updated", {"names": 3})
    assert harness.admin("model_info").data["supports_weight_update"] is True
    harness.finish()
    assert harness.result("a")["weight_version"] == "v2"


@pytest.mark.parametrize("error", [KeyError("weight_version"), RuntimeError("no such file")])
def test_an_operation_that_raises_is_an_answer(error):
    harness = SchedulerHarness()

    def fail(payload):
        raise error

    harness.scheduler.register_admin("weights_checker", fail)
    answer = harness.admin("weights_checker")
    assert not answer.success
    assert answer.data == {}
    assert type(error).__name__ in answer.error
    harness.submit("a", max_new_tokens=2)
    harness.finish()
    assert harness.result("a")


class Gate:
    """An operation with one step that the test ends; `aside`, or halting the stage."""

    def __init__(self, scheduler, action="grind", *, aside=False, **how):
        self.begun, self.open = threading.Event(), threading.Event()
        self.threads = []
        self.aside = aside
        scheduler.register_slow_admin(action, self.operation, **how)

    def operation(self, order):
        self.threads.append(threading.current_thread().name)
        reported = yield BackgroundStep(self.step) if self.aside else self.step
        self.threads.append(threading.current_thread().name)
        return True, "ground", {"reported": reported} | order.payload, None

    def step(self):
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        assert self.open.wait(20)
        return 7


def answered(loop, op_id):
    return loop.next(AdminResult, lambda reported: reported.op_id == op_id)


def test_the_stage_reads_messages_during_a_slow_step():
    scheduler = SchedulerHarness().scheduler
    gate = Gate(scheduler)
    with Loop(scheduler) as loop:
        loop.inbox.put(submission("a", stream=True, max_new_tokens=5000))
        loop.next(ResultChunk)
        loop.inbox.put(Admin("slow", "grind", {"fine": True}))
        assert gate.begun.wait(20)
        loop.inbox.put(Abort("a"))
        loop.inbox.put(submission("late", **GREEDY_TOKENS))
        loop.inbox.put(Admin("info", "model_info"))
        facts = answered(loop, "info").data
        assert (facts["running_batch_size"], facts["waiting_queue_size"]) == (0, 1)
        assert facts["engine_paused"] is True
        gate.open.set()
        answer = answered(loop, "slow")
        assert (answer.success, answer.message) == (True, "ground")
        assert answer.data == {"reported": 7, "fine": True}
        assert (answer.stage, answer.action, answer.rank) == ("decode", "grind", 0)
        assert loop.next(Result).request_id == "late"
    own, step, again = gate.threads
    assert own == again != step == "decode-grind"


def test_nothing_is_computed_before_the_answer():
    harness = SchedulerHarness()
    gate = Gate(harness.scheduler)
    with Loop(harness.scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        assert gate.begun.wait(20)
        loop.inbox.put(submission("a", **GREEDY_TOKENS))
        # Nor may a pause and its end in between start requests that the operation halts.
        loop.inbox.put(Admin("pause", "pause_generation", {"mode": "in_place"}))
        loop.inbox.put(Admin("on", "continue_generation"))
        assert answered(loop, "on").success
        assert harness.worker.batches == []
        gate.open.set()
        assert loop.next((AdminResult, Result), lambda reported: True).op_id == "slow"
        assert loop.next(Result).request_id == "a"


def test_a_second_operation_is_refused_naming_the_first_and_may_be_repeated():
    scheduler = SchedulerHarness().scheduler
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
    scheduler = SchedulerHarness().scheduler
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
    scheduler = SchedulerHarness().scheduler
    gate = Gate(scheduler, aside=True)
    other = Gate(scheduler, "other")
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        assert gate.begun.wait(20)
        loop.inbox.put(submission("a", **GREEDY_TOKENS))
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

    scheduler = SchedulerHarness().scheduler
    gate = Gate(scheduler)
    scheduler.register_slow_admin("late", late, beside=True)
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        assert gate.begun.wait(20)
        loop.inbox.put(Admin("late", "late"))
        loop.inbox.put(submission("a", **GREEDY_TOKENS))
        # Polled until it has finished its first step, where it stays.
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
    scheduler = SchedulerHarness().scheduler
    gate = Gate(scheduler)
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        assert gate.begun.wait(20)
        loop.inbox.put(submission("a", **GREEDY_TOKENS))
        loop.inbox.put(Admin("pause", "pause_generation", {"mode": "abort"}))
        assert loop.next(StageFailure).request_id == "a"
        gate.open.set()
        assert answered(loop, "slow").success
        loop.inbox.put(Admin("info", "model_info"))
        assert answered(loop, "info").data["engine_paused"] is True


@pytest.mark.parametrize("where", ["before", "step", "after"])
def test_an_exception_becomes_the_answer_and_the_stage_continues(where):
    def operation(order):
        if where == "before":
            raise KeyError("model_path")
        value = yield (lambda: 1 / 0) if where == "step" else (lambda: 0)
        raise KeyError(value, "model_path")

    scheduler = SchedulerHarness().scheduler
    scheduler.register_slow_admin("grind", operation)
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        answer = answered(loop, "slow")
        assert not answer.success
        assert answer.data == {}
        assert ("ZeroDivisionError" if where == "step" else "KeyError") in answer.error
        loop.inbox.put(submission("a", **GREEDY_TOKENS))
        assert loop.next(Result).request_id == "a"


def test_an_operation_gets_the_exception_of_its_step():
    def operation(order):
        try:
            yield lambda: int("x")
        except ValueError as error:
            value = yield lambda: 3
            return True, f"{error}", {"value": value}, None

    scheduler = SchedulerHarness().scheduler
    scheduler.register_slow_admin("grind", operation)
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        answer = answered(loop, "slow")
        assert (answer.success, answer.data) == (True, {"value": 3})
        assert "invalid literal" in answer.message


def test_a_shutdown_does_not_wait_for_a_step():
    scheduler = SchedulerHarness().scheduler
    gate = Gate(scheduler)
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        assert gate.begun.wait(20)
    gate.open.set()


@pytest.mark.parametrize("aside", [False, True])
def test_a_step_that_can_be_is_ended_by_an_interrupt(aside):
    scheduler = SchedulerHarness().scheduler
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

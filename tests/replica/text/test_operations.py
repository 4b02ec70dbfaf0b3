import queue
import threading

import pytest

from omni_proxy.replica.pipeline.stage_messages import (
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


def test_an_in_place_pause_freezes_requests_until_they_continue():
    harness = running_harness()
    result = harness.admin("pause_generation", mode="in_place")
    assert (result.success, result.message) == (True, "generation paused")
    assert result.data == {"mode": "in_place", "num_paused_requests": 0, "engine_paused": True}
    assert (result.rank, result.role, result.stage) == (0, "single", "decode")
    emitted, computed = len(harness.emitted), len(harness.worker.batches)
    used = harness.scheduler.batch_queue.used_tokens
    harness.step(5)
    assert not harness.scheduler.busy
    assert (len(harness.emitted), len(harness.worker.batches)) == (emitted, computed)
    assert harness.scheduler.batch_queue.used_tokens == used > 0
    harness.admin("continue_generation", torch_empty_cache=True)
    harness.finish()
    assert len(harness.worker.batches) == 30
    assert harness.result("a")["text"] == undisturbed("The sea", **GREEDY)["text"]


def test_a_retract_pause_frees_all_tokens_and_repeats_no_text():
    harness = running_harness()
    result = harness.admin("pause_generation", mode="retract")
    assert result.data["num_paused_requests"] == 2
    assert harness.scheduler.batch_queue.used_tokens == 0
    assert [request.request_id for request in harness.scheduler.batch_queue.waiting] == ["a", "b"]
    harness.admin("continue_generation")
    before = len(harness.worker.batches)
    harness.finish()
    assert harness.worker.batches[before] == [count + 10 for count in harness.worker.batches[0]]
    for name, prompt in (("a", "The sea"), ("b", "A song")):
        text = undisturbed(prompt, **GREEDY)["text"]
        assert harness.result(name)["text"] == harness.streamed(name) == text
        assert harness.result(name)["usage"]["completion_tokens"] == 30


def test_an_abort_pause_drops_every_request():
    harness = running_harness(max_running=1)
    harness.submit("e", task="embed")
    result = harness.admin("pause_generation")
    assert result.data == {"mode": "abort", "num_paused_requests": 3, "engine_paused": True}
    for name in "abe":
        assert harness.emitted_for(StageFailure, name) == [
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


def test_a_second_pause_replaces_the_first():
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
    assert not harness.emitted_for(Result, "a")
    assert harness.result("b")["text"] == undisturbed("A song", **GREEDY)["text"]


def test_an_unknown_pause_mode_is_refused_and_changes_nothing():
    harness = running_harness()
    result = harness.admin("pause_generation", mode="later")
    assert not result.success
    assert result.message == result.error == "invalid pause mode: later"
    assert harness.scheduler.busy


def test_continuing_without_a_pause_is_a_success():
    result = SchedulerHarness().admin("continue_generation")
    assert (result.success, result.message) == (True, "generation continued")
    assert result.data == {"engine_paused": False}


def test_a_flush_drops_cached_and_running_prefixes():
    prompt = long_prompt(40)
    harness = SchedulerHarness(cache_entries=4)
    harness.submit("one", prompt, max_new_tokens=2)
    harness.finish()
    harness.submit("two", long_prompt(40, 99), max_new_tokens=5)
    harness.step(2)
    result = harness.admin("flush_cache")
    assert (result.success, result.data["flush_success"]) == (True, True)
    assert result.data["flushed_entries"] == 1
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


def test_an_unknown_action_fails_with_its_name():
    result = SchedulerHarness().admin("paint_weights")
    assert not result.success
    assert "paint_weights" in result.error


def test_a_registered_operation_has_a_result_and_may_set_the_weight_version():
    harness = SchedulerHarness()

    def update(payload):
        harness.scheduler.weight_version = payload["weight_version"]
        return True, "updated", {"names": 3}, None

    harness.scheduler.register_admin("update_weights_from_disk", update)
    harness.submit("a", max_new_tokens=2)
    result = harness.admin("update_weights_from_disk", weight_version="v2")
    assert (result.success, result.message, result.data) == (True, "updated", {"names": 3})
    assert harness.admin("model_info").data["supports_weight_update"] is True
    harness.finish()
    assert harness.result("a")["weight_version"] == "v2"


@pytest.mark.parametrize("error", [KeyError("weight_version"), RuntimeError("no such file")])
def test_an_operation_that_raises_has_a_failed_result(error):
    harness = SchedulerHarness()

    def fail(payload):
        raise error

    harness.scheduler.register_admin("weights_checker", fail)
    result = harness.admin("weights_checker")
    assert not result.success
    assert result.data == {}
    assert type(error).__name__ in result.error
    harness.submit("a", max_new_tokens=2)
    harness.finish()
    assert harness.result("a")


class Gate:
    """An operation with one step, which waits for `open` and halts the stage or runs in background."""

    def __init__(self, scheduler, action="grind", *, in_background=False, **options):
        self.started, self.open = threading.Event(), threading.Event()
        self.threads = []
        self.in_background = in_background
        scheduler.register_slow_admin(action, self.operation, **options)

    def operation(self, order):
        self.threads.append(threading.current_thread().name)
        value = yield BackgroundStep(self.step) if self.in_background else self.step
        self.threads.append(threading.current_thread().name)
        return True, "ground", {"value": value} | order.payload, None

    def step(self):
        self.threads.append(threading.current_thread().name)
        self.started.set()
        assert self.open.wait(20)
        return 7


def result_of(loop, op_id):
    return loop.next(AdminResult, lambda message: message.op_id == op_id)


def test_the_stage_reads_messages_during_a_slow_step():
    scheduler = SchedulerHarness().scheduler
    gate = Gate(scheduler)
    with Loop(scheduler) as loop:
        loop.inbox.put(submission("a", stream=True, max_new_tokens=5000))
        loop.next(ResultChunk)
        loop.inbox.put(Admin("slow", "grind", {"fine": True}))
        assert gate.started.wait(20)
        loop.inbox.put(Abort("a"))
        loop.inbox.put(submission("late", **GREEDY_TOKENS))
        loop.inbox.put(Admin("info", "model_info"))
        facts = result_of(loop, "info").data
        assert (facts["running_batch_size"], facts["waiting_queue_size"]) == (0, 1)
        assert facts["engine_paused"] is True
        gate.open.set()
        result = result_of(loop, "slow")
        assert (result.success, result.message) == (True, "ground")
        assert result.data == {"value": 7, "fine": True}
        assert (result.stage, result.action, result.rank) == ("decode", "grind", 0)
        assert loop.next(Result).request_id == "late"
    stage_thread, step_thread, stage_thread_after = gate.threads
    assert stage_thread == stage_thread_after != step_thread == "decode-grind"


def test_nothing_is_computed_before_a_halting_operation_ends():
    harness = SchedulerHarness()
    gate = Gate(harness.scheduler)
    with Loop(harness.scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        assert gate.started.wait(20)
        loop.inbox.put(submission("a", **GREEDY_TOKENS))
        # A pause and its end must not start the requests that the operation halts.
        loop.inbox.put(Admin("pause", "pause_generation", {"mode": "in_place"}))
        loop.inbox.put(Admin("on", "continue_generation"))
        assert result_of(loop, "on").success
        assert harness.worker.batches == []
        gate.open.set()
        assert loop.next((AdminResult, Result), lambda message: True).op_id == "slow"
        assert loop.next(Result).request_id == "a"


def test_a_second_operation_is_refused_until_the_first_has_ended():
    scheduler = SchedulerHarness().scheduler
    gate = Gate(scheduler)
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("one", "grind"))
        assert gate.started.wait(20)
        loop.inbox.put(Admin("two", "grind"))
        refused = result_of(loop, "two")
        assert not refused.success
        assert "grind is in progress on stage decode for 0.0 s" in refused.error
        gate.open.set()
        assert result_of(loop, "one").success
        loop.inbox.put(Admin("three", "grind"))
        assert result_of(loop, "three").success


def test_only_operations_registered_with_beside_run_during_another():
    scheduler = SchedulerHarness().scheduler
    gate = Gate(scheduler)
    Gate(scheduler, "help", in_background=True, beside=True).open.set()
    Gate(scheduler, "chat", in_background=True).open.set()
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        assert gate.started.wait(20)
        loop.inbox.put(Admin("beside", "help"))
        assert result_of(loop, "beside").success
        for action in ("grind", "chat"):
            loop.inbox.put(Admin(action, action))
            assert not result_of(loop, action).success
        gate.open.set()
        assert result_of(loop, "slow").success


def test_requests_are_computed_during_a_background_step():
    scheduler = SchedulerHarness().scheduler
    gate = Gate(scheduler, in_background=True)
    other = Gate(scheduler, "other")
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        assert gate.started.wait(20)
        loop.inbox.put(submission("a", **GREEDY_TOKENS))
        assert loop.next(Result).request_id == "a"
        loop.inbox.put(Admin("info", "model_info"))
        assert result_of(loop, "info").data["engine_paused"] is False
        other.open.set()
        loop.inbox.put(Admin("other", "other"))
        assert result_of(loop, "other").success
        gate.open.set()
        assert result_of(loop, "slow").success


def test_a_halting_step_waits_for_another_one():
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
        assert gate.started.wait(20)
        loop.inbox.put(Admin("late", "late"))
        loop.inbox.put(submission("a", **GREEDY_TOKENS))
        # Poll until its first step has ended; the second one waits.
        while not order:
            loop.inbox.put(Admin("info", "model_info"))
            result_of(loop, "info")
        loop.inbox.put(Admin("info", "model_info"))
        assert result_of(loop, "info").data["engine_paused"] is True
        assert order == ["aside"]
        order.append("opened")
        gate.open.set()
        ended = [loop.next(AdminResult).op_id for _ in range(2)]
        assert ended == ["slow", "late"]
        assert order == ["aside", "opened", "halting"]
        assert loop.next(Result).request_id == "a"


def test_an_abort_pause_drops_requests_that_wait_for_a_step():
    scheduler = SchedulerHarness().scheduler
    gate = Gate(scheduler)
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        assert gate.started.wait(20)
        loop.inbox.put(submission("a", **GREEDY_TOKENS))
        loop.inbox.put(Admin("pause", "pause_generation", {"mode": "abort"}))
        assert loop.next(StageFailure).request_id == "a"
        gate.open.set()
        assert result_of(loop, "slow").success
        loop.inbox.put(Admin("info", "model_info"))
        assert result_of(loop, "info").data["engine_paused"] is True


@pytest.mark.parametrize("where", ["before", "step", "after"])
def test_an_exception_is_a_failed_result_and_the_stage_continues(where):
    def operation(order):
        if where == "before":
            raise KeyError("model_path")
        value = yield (lambda: 1 / 0) if where == "step" else (lambda: 0)
        raise KeyError(value, "model_path")

    scheduler = SchedulerHarness().scheduler
    scheduler.register_slow_admin("grind", operation)
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        result = result_of(loop, "slow")
        assert not result.success
        assert result.data == {}
        assert ("ZeroDivisionError" if where == "step" else "KeyError") in result.error
        loop.inbox.put(submission("a", **GREEDY_TOKENS))
        assert loop.next(Result).request_id == "a"


def test_an_operation_receives_the_exception_of_its_step():
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
        result = result_of(loop, "slow")
        assert (result.success, result.data) == (True, {"value": 3})
        assert "invalid literal" in result.message


def test_a_shutdown_does_not_wait_for_a_step():
    scheduler = SchedulerHarness().scheduler
    gate = Gate(scheduler)
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind"))
        assert gate.started.wait(20)
    gate.open.set()


@pytest.mark.parametrize("in_background", [False, True])
def test_an_interruptible_step_is_ended_by_an_interrupt(in_background):
    scheduler = SchedulerHarness().scheduler
    started, interrupts = threading.Event(), queue.SimpleQueue()

    def step():
        started.set()
        raise ValueError(interrupts.get(timeout=60))

    def operation(order):
        call = InterruptibleCall(step, interrupts.put)
        yield BackgroundStep(call) if in_background else call

    scheduler.register_slow_admin("grind", operation)
    scheduler.register_admin(
        "enough", lambda payload: (scheduler.interrupt("slow", "stop"), "", {}, None)
    )
    with Loop(scheduler) as loop:
        loop.inbox.put(Admin("slow", "grind", {}))
        assert started.wait(20)
        loop.inbox.put(Admin("other", "enough", {}))
        result = result_of(loop, "slow")
    assert (result.success, result.message) == (False, "ValueError: stop")
    scheduler.interrupt("slow", "there is no such operation")

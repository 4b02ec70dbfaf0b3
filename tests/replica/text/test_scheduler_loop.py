from omni_proxy.replica.pipeline.stage_messages import (
    Abort,
    Admin,
    AdminResult,
    Result,
    ResultChunk,
    StageStats,
)
from tests.replica.text.scheduler_harness import Loop, SchedulerHarness, submission, undisturbed


def test_the_loop_serves_requests_that_arrive_during_a_step():
    with Loop(SchedulerHarness().scheduler) as loop:
        loop.inbox.put(submission("first", stream=True, max_new_tokens=400))
        loop.next(ResultChunk)
        loop.inbox.put(submission("second", temperature=0, max_new_tokens=5))
        assert loop.next(Result).request_id == "second"
        loop.inbox.put(Abort("first"))
        loop.inbox.put(submission("third", temperature=0, max_new_tokens=5))
        third = loop.next(Result)
        assert third.request_id == "third"
        expected = undisturbed(temperature=0, max_new_tokens=5)
        assert third.data["text"] == expected["text"]


def test_an_idle_loop_reports_no_running_requests():
    with Loop(SchedulerHarness().scheduler) as loop:
        loop.inbox.put(submission("a", max_new_tokens=5))
        loop.next(Result)
        idle = loop.next(StageStats)
        assert idle.values["num_running_reqs"] == 0
        assert idle.values["generation_tokens_total"] == 5


def test_a_paused_loop_executes_operations_and_computes_nothing():
    harness = SchedulerHarness()
    with Loop(harness.scheduler) as loop:
        loop.inbox.put(Admin("1", "pause_generation", {"mode": "in_place"}))
        assert loop.next(AdminResult).success
        loop.inbox.put(submission("a", max_new_tokens=5))
        stats = loop.next(StageStats, lambda message: message.values["num_waiting_reqs"] == 1)
        assert stats.values["paused"] == 1
        loop.inbox.put(Admin("2", "model_info"))
        assert loop.next(AdminResult).data["waiting_queue_size"] == 1
        assert harness.worker.batches == []
        loop.inbox.put(Admin("3", "continue_generation"))
        assert loop.next(Result).request_id == "a"


def test_a_shutdown_ends_the_loop_during_a_response():
    with Loop(SchedulerHarness().scheduler) as loop:
        loop.inbox.put(submission("a", stream=True, max_new_tokens=8000))
        loop.next(ResultChunk)


def test_a_shutdown_ends_a_paused_loop():
    with Loop(SchedulerHarness().scheduler) as loop:
        loop.inbox.put(Admin("1", "pause_generation", {"mode": "in_place"}))
        loop.inbox.put(submission("a"))
        loop.next(AdminResult)

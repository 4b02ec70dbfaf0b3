import pytest

from omni_proxy.replica.pipeline.messages import Result, StageFailure
from tests.replica.text.scheduler_harness import Desk, long_prompt, undisturbed

GREEDY = {"temperature": 0, "max_new_tokens": 30}


def running_desk(**bounds) -> Desk:
    desk = Desk(**bounds)
    desk.submit("a", "The sea", stream=True, **GREEDY)
    desk.submit("b", "A song", stream=True, **GREEDY)
    desk.step(10)
    return desk


def test_in_place_freezes_and_continues_where_it_was():
    desk = running_desk()
    answer = desk.admin("pause_generation", mode="in_place")
    assert (answer.success, answer.message) == (True, "generation paused")
    assert answer.data == {"mode": "in_place", "num_paused_requests": 0, "engine_paused": True}
    assert (answer.rank, answer.role, answer.stage) == (0, "single", "decode")
    told, computed = len(desk.told), len(desk.worker.batches)
    used = desk.scheduler.batch_queue.used_tokens
    desk.step(5)
    assert not desk.scheduler.busy
    assert (len(desk.told), len(desk.worker.batches)) == (told, computed)
    assert desk.scheduler.batch_queue.used_tokens == used > 0
    desk.admin("continue_generation", torch_empty_cache=True)
    desk.finish()
    assert len(desk.worker.batches) == 30
    assert desk.result("a")["text"] == undisturbed("The sea", **GREEDY)["text"]


def test_retract_frees_all_and_recomputes_without_repeating_itself():
    desk = running_desk()
    answer = desk.admin("pause_generation", mode="retract")
    assert answer.data["num_paused_requests"] == 2
    assert desk.scheduler.batch_queue.used_tokens == 0
    assert [each.request_id for each in desk.scheduler.batch_queue.waiting] == ["a", "b"]
    desk.admin("continue_generation")
    before = len(desk.worker.batches)
    desk.finish()
    assert desk.worker.batches[before] == [each + 10 for each in desk.worker.batches[0]]
    for name, prompt in (("a", "The sea"), ("b", "A song")):
        text = undisturbed(prompt, **GREEDY)["text"]
        assert desk.result(name)["text"] == desk.streamed(name) == text
        assert desk.result(name)["usage"]["completion_tokens"] == 30


def test_abort_ends_every_caller():
    desk = running_desk(max_running=1)
    desk.submit("e", task="embed")
    answer = desk.admin("pause_generation")
    assert answer.data == {"mode": "abort", "num_paused_requests": 3, "engine_paused": True}
    for name in "abe":
        assert desk.of(StageFailure, name) == [
            StageFailure(name, "decode", "The request was dropped by an admin action.", "dropped")
        ]
    assert len(desk.scheduler.batch_queue) == 0
    desk.admin("continue_generation")
    assert not desk.scheduler.busy


def test_requests_during_a_pause_wait_for_its_end():
    desk = Desk()
    desk.admin("pause_generation", mode="abort")
    desk.submit("late", **GREEDY)
    desk.submit("vector", task="embed")
    desk.step(3)
    assert desk.worker.batches == []
    assert desk.admin("model_info").data["waiting_queue_size"] == 1
    desk.admin("continue_generation")
    desk.finish()
    assert desk.result("late")["usage"]["completion_tokens"] == 30
    assert desk.result("vector")["embedding"]


def test_a_second_pause_takes_the_place_of_the_first():
    desk = running_desk()
    desk.admin("pause_generation", mode="in_place")
    assert desk.admin("pause_generation", mode="retract").data["num_paused_requests"] == 2
    assert desk.scheduler.pause_mode == "retract"
    assert desk.scheduler.batch_queue.used_tokens == 0


def test_an_abort_reaches_a_frozen_request():
    desk = running_desk()
    desk.admin("pause_generation", mode="in_place")
    desk.abort("a")
    desk.admin("continue_generation")
    desk.finish()
    assert not desk.of(Result, "a")
    assert desk.result("b")["text"] == undisturbed("A song", **GREEDY)["text"]


def test_an_unknown_pause_mode_is_refused_and_changes_nothing():
    desk = running_desk()
    answer = desk.admin("pause_generation", mode="later")
    assert not answer.success
    assert answer.message == answer.error == "invalid pause mode: later"
    assert desk.scheduler.busy


def test_continuing_without_a_pause_is_a_success():
    answer = Desk().admin("continue_generation")
    assert (answer.success, answer.message) == (True, "generation continued")
    assert answer.data == {"engine_paused": False}


def test_a_flush_forgets_what_is_kept_and_what_is_being_computed():
    prompt = long_prompt(40)
    desk = Desk(cache_entries=4)
    desk.submit("one", prompt, max_new_tokens=2)
    desk.finish()
    desk.submit("two", long_prompt(40, 99), max_new_tokens=5)
    desk.step(2)
    answer = desk.admin("flush_cache")
    assert (answer.success, answer.data["flush_success"]) == (True, True)
    assert answer.data["flushed_entries"] == 1
    desk.finish()
    assert len(desk.scheduler.cache) == 0
    desk.submit("three", prompt, max_new_tokens=2)
    desk.finish()
    assert desk.result("three")["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_model_info_reports_every_fact():
    desk = running_desk(max_running=1)
    desk.admin("pause_generation", mode="in_place")
    assert desk.admin("model_info").data == {
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
    answer = Desk().admin("paint_weights")
    assert not answer.success
    assert "paint_weights" in answer.error


def test_a_registered_operation_answers_and_may_change_the_weight_version():
    desk = Desk()

    def update(payload):
        desk.scheduler.weight_version = payload["weight_version"]
        return True, "updated", {"names": 3}, None

    desk.scheduler.register_admin("update_weights_from_disk", update)
    desk.submit("a", max_new_tokens=2)
    answer = desk.admin("update_weights_from_disk", weight_version="v2")
    assert (answer.success, answer.message, answer.data) == (True, "updated", {"names": 3})
    assert desk.admin("model_info").data["supports_weight_update"] is True
    desk.finish()
    assert desk.result("a")["weight_version"] == "v2"


@pytest.mark.parametrize("error", [KeyError("weight_version"), RuntimeError("no such file")])
def test_an_operation_that_raises_is_an_answer(error):
    desk = Desk()

    def fail(payload):
        raise error

    desk.scheduler.register_admin("weights_checker", fail)
    answer = desk.admin("weights_checker")
    assert not answer.success
    assert answer.data == {}
    assert type(error).__name__ in answer.error
    desk.submit("a", max_new_tokens=2)
    desk.finish()
    assert desk.result("a")

"""Requests that end early, pauses that wait for them, and the weight version of each token."""

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.pipeline.stage_messages import EndEarly, Result, ResultChunk, StageFailure
from tests.replica.text.scheduler_harness import Loop, SchedulerHarness, submission, undisturbed

GREEDY = {"temperature": 0, "max_new_tokens": 9}


def end_early(harness, request_id):
    harness.scheduler.take(EndEarly(request_id))


def test_a_running_request_ends_with_its_tokens_and_others_continue():
    harness = SchedulerHarness()
    harness.submit("one", **GREEDY)
    harness.submit("two", **GREEDY)
    harness.step(4)
    end_early(harness, "one")
    result = harness.result("one")
    complete = undisturbed(**GREEDY)
    assert result["finish_reason"] == "abort"
    assert result["token_ids"] == complete["token_ids"][:4]
    assert result["usage"]["completion_tokens"] == 4
    harness.finish()
    assert harness.result("two")["token_ids"] == complete["token_ids"]
    end_early(harness, "one")
    assert len(harness.emitted_for(Result, "one")) == 1


def test_a_waiting_request_ends_without_tokens_and_an_unknown_id_is_ignored():
    harness = SchedulerHarness(max_running=1)
    harness.submit("runs", **GREEDY)
    harness.submit("waits", **GREEDY)
    harness.step(2)
    end_early(harness, "waits")
    assert (harness.result("waits")["token_ids"], harness.result("waits")["text"]) == ([], "")
    emitted_before = len(harness.emitted)
    end_early(harness, "unknown")
    assert len(harness.emitted) == emitted_before


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_request_ends_with_its_tokens_while_paused(mode):
    harness = SchedulerHarness()
    harness.submit("one", **GREEDY)
    harness.step(3)
    harness.admin("pause_generation", mode=mode)
    end_early(harness, "one")
    assert harness.result("one")["token_ids"] == undisturbed(**GREEDY)["token_ids"][:3]
    assert not harness.scheduler.active_ids()


@pytest.mark.parametrize("stream", [False, True])
def test_text_held_back_for_a_stop_string_is_part_of_the_result(stream):
    complete = undisturbed(**GREEDY)
    for count in range(1, 9):
        harness = SchedulerHarness()
        harness.submit("one", stop=[complete["text"] + "!"], stream=stream, **GREEDY)
        harness.step(count)
        end_early(harness, "one")
        result = harness.result("one")
        assert harness.streamed("one") == ""  # all of it may be the start of the stop string
        assert result["text"] == harness.worker.tokenizer.decode(result["token_ids"])
        assert complete["text"].startswith(result["text"])


def test_the_kv_of_a_request_that_ended_early_is_cached():
    harness = SchedulerHarness(cache_entries=4)
    prompt = list(range(300, 340))
    harness.submit("one", prompt, **GREEDY)
    harness.step(3)
    end_early(harness, "one")
    harness.submit("two", prompt, **GREEDY)
    harness.finish()
    assert harness.result("two")["usage"]["prompt_tokens_details"]["cached_tokens"] == 39


def test_an_embedding_that_ends_early_is_dropped():
    harness = SchedulerHarness()
    harness.submit("vector", task="embed")
    end_early(harness, "vector")
    assert harness.failure("vector").kind == "dropped"


def test_a_request_that_waits_for_its_schema_ends_without_tokens():
    pytest.importorskip("llguidance")
    harness = SchedulerHarness()
    harness.submit("schema", json_schema='{"type": "object"}', **GREEDY)
    assert harness.scheduler.active_ids() == ["schema"]
    end_early(harness, "schema")
    assert harness.result("schema")["finish_reason"] == "abort"
    assert harness.scheduler.active_ids() == []


def test_only_the_first_chunk_has_the_length_of_the_prompt():
    harness = SchedulerHarness()
    harness.submit("one", stream=True, **GREEDY)
    harness.finish()
    first, *others = harness.emitted_for(ResultChunk, "one")
    assert first.chunk["prompt_tokens"] == harness.result("one")["usage"]["prompt_tokens"]
    assert not any("prompt_tokens" in chunk.chunk for chunk in others)


# Versions


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), max_size=4))
def test_weight_version_spans_cover_every_token_and_neighbours_differ(changes):
    harness = SchedulerHarness()
    harness.submit("one", temperature=0, max_new_tokens=14, ignore_eos=True)
    labels = []
    for steps, new_version in changes:
        harness.step(steps)
        labels += [harness.scheduler.weight_version] * steps
        harness.scheduler.weight_version = new_version
    harness.finish()
    labels += [harness.scheduler.weight_version] * (14 - len(labels))
    spans = harness.result("one")["weight_versions"]
    assert [span["version"] for span in spans for _ in range(span["start"], span["end"])] == labels
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    names = [span["version"] for span in spans]
    assert all(version != next_version for version, next_version in itertools.pairwise(names))


def test_a_request_without_tokens_has_no_span():
    harness = SchedulerHarness(max_running=1)
    harness.submit("runs", **GREEDY)
    harness.submit("waits", **GREEDY)
    harness.scheduler.weight_version = "v2"
    end_early(harness, "waits")
    assert harness.result("waits")["weight_versions"] == []


# Waiting for idle


def test_pause_when_idle_finishes_running_requests_and_holds_new_ones():
    from omni_proxy.replica.pipeline.stage_messages import Admin, AdminResult

    harness = SchedulerHarness()
    with Loop(harness.scheduler) as loop:
        loop.inbox.put(submission("early", temperature=0, max_new_tokens=40, ignore_eos=True))
        loop.inbox.put(Admin("wait", "pause_when_idle"))
        loop.inbox.put(submission("late", temperature=0, max_new_tokens=3))
        first = loop.next((Result, AdminResult))
        assert first.request_id == "early"
        assert first.data["finish_reason"] == "length"
        assert loop.next(AdminResult).success
        loop.inbox.put(Admin("look", "model_info"))
        facts = loop.next(AdminResult).data
        assert (facts["paused"], facts["engine_paused"]) == (True, True)
        loop.inbox.put(Admin("go", "continue_generation"))
        assert loop.next(Result).request_id == "late"


def test_await_idle_finishes_a_paused_request_and_resume_starts_held_ones():
    harness = SchedulerHarness()
    harness.submit("one", **GREEDY)
    harness.step(1)
    harness.admin("pause_generation", mode="in_place")
    idle = harness.scheduler.await_idle()
    assert not idle.is_set()
    assert harness.scheduler.busy
    harness.submit("held", **GREEDY)
    harness.step(20)
    assert harness.result("one")["finish_reason"] == "length"
    assert harness.scheduler.active_ids() == ["held"]
    assert harness.scheduler.await_idle() is idle
    assert idle.is_set()
    harness.scheduler.resume()
    harness.finish()
    assert harness.result("held")["finish_reason"] == "length"


def test_held_requests_can_be_aborted_dropped_and_ended_early():
    harness = SchedulerHarness()
    assert isinstance(harness.scheduler.await_idle(), threading.Event)
    for name in ("aborted", "ended", "dropped"):
        harness.submit(name, **GREEDY)
    harness.abort("aborted")
    end_early(harness, "ended")
    assert harness.result("ended")["finish_reason"] == "abort"
    assert harness.scheduler.drop_all() == 1
    assert harness.emitted_for(StageFailure, "dropped")
    assert not harness.emitted_for(Result, "aborted")

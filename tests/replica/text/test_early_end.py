"""Aborted requests, pauses that wait, and the weight version of each token."""

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.pipeline.messages import EndEarly, Result, ResultChunk, StageFailure
from tests.replica.text.scheduler_harness import Desk, Loop, submission, undisturbed

GREEDY = {"temperature": 0, "max_new_tokens": 9}


def end(desk, request_id):
    desk.scheduler.take(EndEarly(request_id))


def test_a_running_request_returns_its_tokens_and_others_continue():
    desk = Desk()
    desk.submit("one", **GREEDY)
    desk.submit("two", **GREEDY)
    desk.step(4)
    end(desk, "one")
    told = desk.result("one")
    whole = undisturbed(**GREEDY)
    assert told["finish_reason"] == "abort"
    assert told["token_ids"] == whole["token_ids"][:4]
    assert told["usage"]["completion_tokens"] == 4
    desk.finish()
    assert desk.result("two")["token_ids"] == whole["token_ids"]
    end(desk, "one")
    assert len(desk.of(Result, "one")) == 1


def test_one_that_waits_has_no_tokens_and_one_that_is_unknown_no_answer():
    desk = Desk(max_running=1)
    desk.submit("runs", **GREEDY)
    desk.submit("waits", **GREEDY)
    desk.step(2)
    end(desk, "waits")
    assert (desk.result("waits")["token_ids"], desk.result("waits")["text"]) == ([], "")
    before = len(desk.told)
    end(desk, "nobody")
    assert len(desk.told) == before


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_it_ends_while_paused_with_all_that_it_had(mode):
    desk = Desk()
    desk.submit("one", **GREEDY)
    desk.step(3)
    desk.admin("pause_generation", mode=mode)
    end(desk, "one")
    assert desk.result("one")["token_ids"] == undisturbed(**GREEDY)["token_ids"][:3]
    assert not desk.scheduler.active_ids()


@pytest.mark.parametrize("streamed", [False, True])
def test_text_that_was_held_back_for_a_stop_string_is_reported(streamed):
    whole = undisturbed(**GREEDY)
    for count in range(1, 9):
        desk = Desk()
        desk.submit("one", stop=[whole["text"] + "!"], stream=streamed, **GREEDY)
        desk.step(count)
        end(desk, "one")
        told = desk.result("one")
        assert desk.streamed("one") == ""  # all of it may be the start of the stop string
        assert told["text"] == desk.worker.tokenizer.decode(told["token_ids"])
        assert whole["text"].startswith(told["text"])


def test_its_keys_are_kept_for_the_next_prompt():
    desk = Desk(cache_entries=4)
    prompt = list(range(300, 340))
    desk.submit("one", prompt, **GREEDY)
    desk.step(3)
    end(desk, "one")
    desk.submit("two", prompt, **GREEDY)
    desk.finish()
    assert desk.result("two")["usage"]["prompt_tokens_details"]["cached_tokens"] == 39


def test_an_embedding_has_no_part_to_give():
    desk = Desk()
    desk.submit("vector", task="embed")
    end(desk, "vector")
    assert desk.failure("vector").kind == "dropped"


def test_a_schema_that_is_still_compiled_ends_without_tokens():
    pytest.importorskip("llguidance")
    desk = Desk()
    desk.submit("schema", json_schema='{"type": "object"}', **GREEDY)
    assert desk.scheduler.active_ids() == ["schema"]
    end(desk, "schema")
    assert desk.result("schema")["finish_reason"] == "abort"
    assert desk.scheduler.active_ids() == []


def test_a_first_chunk_reports_how_long_the_prompt_is():
    desk = Desk()
    desk.submit("one", stream=True, **GREEDY)
    desk.finish()
    first, *others = desk.of(ResultChunk, "one")
    assert first.chunk["prompt_tokens"] == desk.result("one")["usage"]["prompt_tokens"]
    assert not any("prompt_tokens" in each.chunk for each in others)


# Versions


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), max_size=4))
def test_the_spans_cover_every_token_once_and_neighbours_differ(changes):
    desk = Desk()
    desk.submit("one", temperature=0, max_new_tokens=14, ignore_eos=True)
    labels = []
    for steps, version in changes:
        desk.step(steps)
        labels += [desk.scheduler.weight_version] * steps
        desk.scheduler.weight_version = version
    desk.finish()
    labels += [desk.scheduler.weight_version] * (14 - len(labels))
    spans = desk.result("one")["weight_versions"]
    assert [span["version"] for span in spans for _ in range(span["start"], span["end"])] == labels
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    names = [span["version"] for span in spans]
    assert all(one != other for one, other in itertools.pairwise(names))


def test_a_request_without_tokens_has_no_span():
    desk = Desk(max_running=1)
    desk.submit("runs", **GREEDY)
    desk.submit("waits", **GREEDY)
    desk.scheduler.weight_version = "v2"
    end(desk, "waits")
    assert desk.result("waits")["weight_versions"] == []


# Waiting for idle


def test_a_waiting_pause_finishes_running_requests_and_holds_new_ones():
    from omni_proxy.replica.pipeline.messages import Admin, AdminResult

    desk = Desk()
    with Loop(desk.scheduler) as loop:
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


def test_it_waits_for_a_paused_request_too_and_a_resume_ends_the_wait():
    desk = Desk()
    desk.submit("one", **GREEDY)
    desk.step(1)
    desk.admin("pause_generation", mode="in_place")
    idle = desk.scheduler.await_idle()
    assert not idle.is_set()
    assert desk.scheduler.busy
    desk.submit("held", **GREEDY)
    desk.step(20)
    assert desk.result("one")["finish_reason"] == "length"
    assert desk.scheduler.active_ids() == ["held"]
    assert desk.scheduler.await_idle() is idle
    assert idle.is_set()
    desk.scheduler.resume()
    desk.finish()
    assert desk.result("held")["finish_reason"] == "length"


def test_held_requests_can_be_aborted_dropped_and_ended():
    desk = Desk()
    assert isinstance(desk.scheduler.await_idle(), threading.Event)
    for name in ("aborted", "ended", "dropped"):
        desk.submit(name, **GREEDY)
    desk.abort("aborted")
    end(desk, "ended")
    assert desk.result("ended")["finish_reason"] == "abort"
    assert desk.scheduler.drop_all() == 1
    assert desk.of(StageFailure, "dropped")
    assert not desk.of(Result, "aborted")

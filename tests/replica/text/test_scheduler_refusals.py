"""Requests that the scheduler changes or refuses."""

import pytest

from omni_proxy.replica.pipeline.messages import (
    OmniRequest,
    Result,
    StageFailure,
    StagePayload,
    Submit,
)
from tests.replica.text.scheduler_harness import SchedulerHarness, long_prompt

GREEDY = {"temperature": 0, "max_new_tokens": 40}


@pytest.mark.parametrize("prompt_tokens", [200, 260])
def test_a_prompt_that_leaves_no_room_names_both_lengths(prompt_tokens):
    harness = SchedulerHarness(max_total_tokens=200)
    harness.submit("a", long_prompt(prompt_tokens))
    failure = harness.failure("a")
    assert failure.kind == "caller"
    assert f"{prompt_tokens} tokens" in failure.error
    assert "200 tokens" in failure.error
    assert "context length" in failure.error


@pytest.mark.parametrize("asked", [{}, {"max_new_tokens": 5000}])
def test_an_answer_ends_where_the_context_does(asked):
    harness = SchedulerHarness(max_total_tokens=50)
    harness.submit("a", long_prompt(30), **asked)
    harness.finish()
    result = harness.result("a")
    assert (result["usage"]["completion_tokens"], result["finish_reason"]) == (20, "length")


@pytest.mark.parametrize(
    ("prompt", "params", "reported"),
    [
        ([], {}, "empty"),
        ([5, 512], {}, "512 is out of vocabulary"),
        ([5, -1], {}, "out of vocabulary"),
        ([True], {}, "out of vocabulary"),
        ([5], {"top_p": 3}, "top_p must be"),
    ],
)
def test_a_request_that_cannot_be_is_its_callers_fault(prompt, params, reported):
    harness = SchedulerHarness()
    harness.submit("a", prompt, **params)
    assert harness.failure("a").kind == "caller"
    assert reported in harness.failure("a").error


@pytest.mark.parametrize("data", [{"raw_inputs": "text"}, "text", {"token_ids": "text"}])
def test_a_payload_without_tokens_is_the_pipelines_fault(data):
    harness = SchedulerHarness()
    harness.scheduler.take(Submit(StagePayload("a", OmniRequest("text"), data)))
    assert harness.failure("a").kind == "server"
    assert "no token_ids" in harness.failure("a").error


def test_a_live_id_is_refused_and_free_again_afterwards():
    harness = SchedulerHarness()
    harness.submit("a", max_new_tokens=2)
    harness.submit("a", max_new_tokens=2)
    (failure,) = harness.of(StageFailure, "a")
    assert (failure.error, failure.kind) == ("Request a already exists", "caller")
    harness.finish()
    harness.submit("a", max_new_tokens=2)
    harness.finish()
    assert len(harness.of(Result, "a")) == 2

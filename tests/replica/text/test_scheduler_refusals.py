"""Requests that the scheduler shortens or refuses."""

import pytest

from omni_proxy.replica.pipeline.stage_messages import (
    OmniRequest,
    Result,
    StageFailure,
    StagePayload,
    Submit,
)
from tests.replica.text.scheduler_harness import SchedulerHarness, long_prompt

GREEDY = {"temperature": 0, "max_new_tokens": 40}


@pytest.mark.parametrize("prompt_tokens", [200, 260])
def test_the_error_for_a_too_long_prompt_names_both_lengths(prompt_tokens):
    harness = SchedulerHarness(max_total_tokens=200)
    harness.submit("a", long_prompt(prompt_tokens))
    failure = harness.failure("a")
    assert failure.kind == "caller"
    assert f"{prompt_tokens} tokens" in failure.error
    assert "200 tokens" in failure.error
    assert "context length" in failure.error


@pytest.mark.parametrize("params", [{}, {"max_new_tokens": 5000}])
def test_a_response_ends_at_the_context_length(params):
    harness = SchedulerHarness(max_total_tokens=50)
    harness.submit("a", long_prompt(30), **params)
    harness.finish()
    result = harness.result("a")
    assert (result["usage"]["completion_tokens"], result["finish_reason"]) == (20, "length")


@pytest.mark.parametrize(
    ("prompt", "params", "reason"),
    [
        ([], {}, "empty"),
        ([5, 512], {}, "512 is out of vocabulary"),
        ([5, -1], {}, "out of vocabulary"),
        ([True], {}, "out of vocabulary"),
        ([5], {"top_p": 3}, "top_p must be"),
    ],
)
def test_an_invalid_request_is_a_caller_error(prompt, params, reason):
    harness = SchedulerHarness()
    harness.submit("a", prompt, **params)
    assert harness.failure("a").kind == "caller"
    assert reason in harness.failure("a").error


@pytest.mark.parametrize("data", [{"raw_inputs": "text"}, "text", {"token_ids": "text"}])
def test_a_payload_without_tokens_is_a_server_error(data):
    harness = SchedulerHarness()
    harness.scheduler.take(Submit(StagePayload("a", OmniRequest("text"), data)))
    assert harness.failure("a").kind == "server"
    assert "no token_ids" in harness.failure("a").error


def test_a_live_id_is_refused_until_its_request_has_ended():
    harness = SchedulerHarness()
    harness.submit("a", max_new_tokens=2)
    harness.submit("a", max_new_tokens=2)
    (failure,) = harness.emitted_for(StageFailure, "a")
    assert (failure.error, failure.kind) == ("Request a already exists", "caller")
    harness.finish()
    harness.submit("a", max_new_tokens=2)
    harness.finish()
    assert len(harness.emitted_for(Result, "a")) == 2

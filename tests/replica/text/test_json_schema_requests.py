"""Requests with a schema in a text stage on the tiny model, alone and in batches."""

import json
import threading

import jsonschema_rs
import pytest

from omni_proxy.replica.pipeline.stage_messages import Result, ResultChunk, StageFailure
from omni_proxy.replica.text.json_schema import CompiledConstraint
from tests.replica.text.scheduler_harness import (
    Loop,
    SchedulerHarness,
    long_prompt,
    submission,
    undisturbed,
)

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
COLOURS = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 2}


class ConstraintHarness(SchedulerHarness):
    """A harness in which a test decides when the scheduler receives a compiled constraint."""

    def __init__(self, **options):
        super().__init__(**options)
        self.available = threading.Semaphore(0)
        self.compiled = []
        self.scheduler._post = self._post

    def _post(self, constraint):
        self.compiled.append(constraint)
        self.available.release()

    def deliver_constraint(self):
        assert self.available.acquire(timeout=60)
        self.scheduler.take(self.compiled.pop(0))

    def submit_schema(self, request_id, schema, prompt="The sea", **params):
        text = schema if isinstance(schema, str) else json.dumps(schema)
        self.submit(request_id, prompt, **({"json_schema": text, "temperature": 0} | params))


def result_alone(schema, **params):
    harness = ConstraintHarness()
    harness.submit_schema("a", schema, **params)
    harness.deliver_constraint()
    harness.finish()
    return harness.result("a")


def fits(schema, text):
    return jsonschema_rs.validator_for(schema).is_valid(json.loads(text))


def test_a_response_fits_its_schema_and_ends_with_it():
    result = result_alone(PERSON)
    assert fits(PERSON, result["text"])
    assert result["finish_reason"] == "stop"
    assert result["usage"]["completion_tokens"] == len(result["token_ids"])


def test_a_seed_gives_the_same_response_alone_and_in_a_batch():
    harness = ConstraintHarness()
    for name, seed in (("a", 1), ("b", 2), ("c", 1)):
        harness.submit_schema(name, PERSON, temperature=1.0, seed=seed)
        harness.deliver_constraint()
    harness.finish()
    texts = [harness.result(name)["text"] for name in "abc"]
    assert texts[0] == texts[2] != texts[1]
    assert texts[0] == result_alone(PERSON, temperature=1.0, seed=1)["text"]
    assert all(fits(PERSON, text) for text in texts)


def test_requests_of_one_batch_can_have_different_schemas_or_none():
    harness = ConstraintHarness()
    harness.submit_schema("person", PERSON)
    harness.submit_schema("colours", COLOURS)
    harness.submit("free", temperature=0, max_new_tokens=12)
    harness.deliver_constraint()
    harness.deliver_constraint()
    harness.finish()
    assert fits(PERSON, harness.result("person")["text"])
    assert fits(COLOURS, harness.result("colours")["text"])
    free = undisturbed(temperature=0, max_new_tokens=12)
    assert harness.result("free")["text"] == free["text"]


def test_the_token_limit_cuts_a_response_with_finish_reason_length():
    result = result_alone(PERSON, max_new_tokens=5)
    assert (result["finish_reason"], len(result["token_ids"])) == ("length", 5)
    complete = result_alone(PERSON)
    assert complete["text"].startswith(result["text"])
    exact = result_alone(PERSON, max_new_tokens=len(complete["token_ids"]))
    assert (exact["finish_reason"], exact["text"]) == ("stop", complete["text"])


def test_a_stop_string_ends_a_response_early():
    result = result_alone(PERSON, stop=['"age"'])
    assert (result["finish_reason"], result["stop_hit"]) == ("stop", '"age"')
    assert '"age"' not in result["text"]


def test_a_stream_has_the_same_text():
    harness = ConstraintHarness()
    harness.submit_schema("a", PERSON, stream=True)
    harness.deliver_constraint()
    harness.finish()
    assert harness.streamed("a") == harness.result("a")["text"] == result_alone(PERSON)["text"]


def test_with_ignore_eos_a_response_still_ends_with_its_schema():
    result = result_alone({"type": "boolean"}, ignore_eos=True)
    assert result["finish_reason"] == "stop"
    assert result["text"] in ("true", "false")
    assert result["text"] == result_alone({"type": "boolean"})["text"]


def test_a_retracted_response_continues_where_it_was():
    harness = ConstraintHarness()
    harness.submit_schema("a", PERSON)
    harness.deliver_constraint()
    harness.step(9)
    harness.admin("pause_generation", mode="retract")
    harness.admin("continue_generation")
    harness.finish()
    assert harness.result("a")["text"] == result_alone(PERSON)["text"]


def test_other_requests_are_computed_while_a_constraint_is_compiled():
    harness = ConstraintHarness()
    harness.submit_schema("a", PERSON)
    harness.submit("b", temperature=0, max_new_tokens=3)
    harness.finish()
    assert harness.result("b")["text"] == undisturbed(temperature=0, max_new_tokens=3)["text"]
    harness.deliver_constraint()
    harness.finish()
    assert fits(PERSON, harness.result("a")["text"])


def test_the_constraint_of_an_aborted_request_is_not_used_for_its_id_again():
    harness = ConstraintHarness()
    harness.submit_schema("a", PERSON)
    harness.abort("a")
    harness.submit_schema("a", COLOURS)
    harness.deliver_constraint()
    harness.deliver_constraint()
    harness.finish()
    assert fits(COLOURS, harness.result("a")["text"])


def test_a_request_that_waits_for_its_constraint_counts_and_can_be_dropped():
    harness = ConstraintHarness()
    harness.submit_schema("a", PERSON)
    assert harness.scheduler.active_ids() == ["a"]
    harness.scheduler.emit_stats()
    assert harness.stats()["num_waiting_reqs"] == 1
    harness.submit("a", max_new_tokens=1)
    assert "already exists" in harness.failure("a").error
    harness.admin("pause_generation", mode="abort")
    harness.deliver_constraint()
    assert harness.scheduler.active_ids() == []
    assert [failure.kind for failure in harness.emitted_for(StageFailure, "a")] == [
        "caller",
        "dropped",
    ]


@pytest.mark.parametrize("schema", ['{"not": {}}', "[", '{"type": "strin"}'])
def test_a_schema_that_cannot_be_enforced_is_a_caller_error(schema):
    harness = ConstraintHarness()
    harness.submit_schema("a", schema)
    harness.deliver_constraint()
    assert harness.failure("a").kind == "caller"


def test_an_unexpected_error_of_the_compiler_is_a_server_error():
    harness = ConstraintHarness()
    harness.submit_schema("a", PERSON)
    assert harness.available.acquire(timeout=60)
    harness.scheduler.take(CompiledConstraint(harness.compiled[0].prompt, RuntimeError("a fault")))
    assert harness.failure("a").kind == "server"


def test_the_loop_waits_for_a_constraint_and_continues():
    with Loop(SchedulerHarness().scheduler) as loop:
        text = json.dumps(PERSON)
        loop.inbox.put(submission("a", long_prompt(20), json_schema=text, stream=True, seed=1))
        loop.next(ResultChunk)
        assert fits(PERSON, loop.next(Result).data["text"])


def test_a_token_with_logprobs_has_the_text_of_its_top_candidates():
    result = undisturbed(temperature=0, max_new_tokens=3, logprobs=True, top_logprobs=2)
    for logprob, token, text, candidates in result["output_token_logprobs"]:
        assert isinstance(text, bytes)
        assert candidates[0] == [logprob, token, text]
        assert candidates[1][0] <= logprob
    text = b"".join(row[2] for row in result["output_token_logprobs"])
    assert text.decode() == result["text"]
    plain = undisturbed(temperature=0, max_new_tokens=3, logprobs=True)
    assert [row[2:] for row in plain["output_token_logprobs"]] == [[None]] * 3

"""Requests with a schema in a text stage on the tiny model, in batches with others."""

import json
import threading

import jsonschema_rs
import pytest

from omni_proxy.replica.pipeline.messages import Result, ResultChunk, StageFailure
from omni_proxy.replica.text.constraint import CompiledConstraint
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


class Constraining(SchedulerHarness):
    """Waits for each constraint, where the stage itself would continue."""

    def __init__(self, **more):
        super().__init__(**more)
        self.came = threading.Semaphore(0)
        self.compiled = []
        self.scheduler._post = self._posted

    def _posted(self, done):
        self.compiled.append(done)
        self.came.release()

    def ready(self):
        assert self.came.acquire(timeout=60)
        self.scheduler.take(self.compiled.pop(0))

    def ask(self, request_id, schema, prompt="The sea", **params):
        text = schema if isinstance(schema, str) else json.dumps(schema)
        self.submit(request_id, prompt, **({"json_schema": text, "temperature": 0} | params))


def alone(schema, **params):
    harness = Constraining()
    harness.ask("a", schema, **params)
    harness.ready()
    harness.finish()
    return harness.result("a")


def fits(schema, text):
    return jsonschema_rs.validator_for(schema).is_valid(json.loads(text))


def test_an_answer_fits_its_schema_and_ends_with_it():
    result = alone(PERSON)
    assert fits(PERSON, result["text"])
    assert result["finish_reason"] == "stop"
    assert result["usage"]["completion_tokens"] == len(result["token_ids"])


def test_a_seed_gives_the_same_answer_whatever_runs_beside_it():
    harness = Constraining()
    for name, seed in (("a", 1), ("b", 2), ("c", 1)):
        harness.ask(name, PERSON, temperature=1.0, seed=seed)
        harness.ready()
    harness.finish()
    texts = [harness.result(name)["text"] for name in "abc"]
    assert texts[0] == texts[2] != texts[1]
    assert texts[0] == alone(PERSON, temperature=1.0, seed=1)["text"]
    assert all(fits(PERSON, text) for text in texts)


def test_requests_of_one_batch_have_each_its_own_schema_or_none():
    harness = Constraining()
    harness.ask("person", PERSON)
    harness.ask("colours", COLOURS)
    harness.submit("free", temperature=0, max_new_tokens=12)
    harness.ready()
    harness.ready()
    harness.finish()
    assert fits(PERSON, harness.result("person")["text"])
    assert fits(COLOURS, harness.result("colours")["text"])
    free = undisturbed(temperature=0, max_new_tokens=12)
    assert harness.result("free")["text"] == free["text"]


def test_the_token_limit_cuts_it_with_finish_reason_length():
    result = alone(PERSON, max_new_tokens=5)
    assert (result["finish_reason"], len(result["token_ids"])) == ("length", 5)
    whole = alone(PERSON)
    assert whole["text"].startswith(result["text"])
    exact = alone(PERSON, max_new_tokens=len(whole["token_ids"]))
    assert (exact["finish_reason"], exact["text"]) == ("stop", whole["text"])


def test_a_stop_string_ends_it_early():
    result = alone(PERSON, stop=['"age"'])
    assert (result["finish_reason"], result["stop_hit"]) == ("stop", '"age"')
    assert '"age"' not in result["text"]


def test_a_stream_has_the_same_text():
    harness = Constraining()
    harness.ask("a", PERSON, stream=True)
    harness.ready()
    harness.finish()
    assert harness.streamed("a") == harness.result("a")["text"] == alone(PERSON)["text"]


def test_a_model_that_ignores_its_end_still_ends_with_the_schema():
    result = alone({"type": "boolean"}, ignore_eos=True)
    assert (json.loads(result["text"]), result["finish_reason"]) == (True, "stop") or (
        json.loads(result["text"]) is False
    )


def test_a_retracted_response_continues_where_it_was():
    harness = Constraining()
    harness.ask("a", PERSON)
    harness.ready()
    harness.step(9)
    harness.admin("pause_generation", mode="retract")
    harness.admin("continue_generation")
    harness.finish()
    assert harness.result("a")["text"] == alone(PERSON)["text"]


def test_others_are_computed_while_a_constraint_is_made():
    harness = Constraining()
    harness.ask("a", PERSON)
    harness.submit("b", temperature=0, max_new_tokens=3)
    harness.finish()
    assert harness.result("b")["text"]
    harness.ready()
    harness.finish()
    assert harness.result("a")["text"]


def test_an_aborted_request_does_not_resume():
    harness = Constraining()
    harness.ask("a", PERSON)
    harness.abort("a")
    harness.ask("a", COLOURS)
    harness.ready()
    harness.ready()
    harness.finish()
    assert fits(COLOURS, harness.result("a")["text"])


def test_what_waits_for_its_constraint_counts_and_can_be_dropped():
    harness = Constraining()
    harness.ask("a", PERSON)
    assert harness.scheduler.active_ids() == ["a"]
    harness.scheduler.emit_stats()
    assert harness.stats()["num_waiting_reqs"] == 1
    harness.submit("a", max_new_tokens=1)
    assert "already exists" in harness.failure("a").error
    harness.admin("pause_generation", mode="abort")
    harness.ready()
    assert harness.scheduler.active_ids() == []
    assert [each.kind for each in harness.of(StageFailure, "a")] == ["caller", "dropped"]


@pytest.mark.parametrize("schema", ['{"not": {}}', "[", '{"type": "strin"}'])
def test_a_schema_that_cannot_be_enforced_is_the_callers_fault(schema):
    harness = Constraining()
    harness.ask("a", schema)
    harness.ready()
    assert harness.failure("a").kind == "caller"


def test_a_fault_of_ours_is_not_the_callers():
    harness = Constraining()
    harness.ask("a", PERSON)
    assert harness.came.acquire(timeout=60)
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
    for logprob, token, spelled, likeliest in result["output_token_logprobs"]:
        assert isinstance(spelled, bytes)
        assert likeliest[0] == [logprob, token, spelled]
        assert likeliest[1][0] <= logprob
    spelled = b"".join(each[2] for each in result["output_token_logprobs"])
    assert spelled.decode() == result["text"]
    plain = undisturbed(temperature=0, max_new_tokens=3, logprobs=True)
    assert [each[2:] for each in plain["output_token_logprobs"]] == [[None]] * 3

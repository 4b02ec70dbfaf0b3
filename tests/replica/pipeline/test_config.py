from dataclasses import replace

import pytest

from omni_proxy.replica.pipeline.config import PipelineConfigError, validate_config
from tests.replica.pipeline.pipeline_stages import pipeline, stage


def problems(*stages, **keys):
    with pytest.raises(PipelineConfigError) as refused:
        validate_config(pipeline(*stages, **keys))
    return refused.value.problems


def test_the_first_stage_is_the_entry_unless_one_is_named():
    two = (stage("a", next=("b",)), stage("b", terminal=True))
    assert validate_config(pipeline(*two)).entry == "a"
    assert validate_config(pipeline(two[1], entry="b")).entry == "b"


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"next": ("aa",)}, "stages[0].next: no stage is named aa; did you mean a?"),
        ({"factory": "no dots"}, "stages[0].factory: 'no dots' is not of the form"),
        ({"merge": "m:f"}, "stages[0].wait_for: needs merge beside it, and merge needs wait_for"),
        ({"route": "m:f"}, "stages[0].route: there is no next to choose from"),
        ({"terminal": False}, "stages[0].next: the stage is not terminal and leads nowhere"),
        ({"terminal": False}, "stages: none is terminal: no request would ever have a result"),
        ({"env": {"A": "1"}}, "stages[0].env: only a stage with a process has an environment"),
        ({"next": ("a",)}, "stages: a leads back to a"),
        ({"name": ""}, "stages[0].name: must not be empty"),
    ],
)
def test_a_wrong_stage_is_named_with_its_key(keys, problem):
    only = replace(stage("a", terminal=True), **keys)
    if "factory" in keys:
        only = replace(only, factory=keys["factory"])
    assert any(told.startswith(problem) for told in problems(only))


def test_every_problem_is_notified_at_once():
    told = problems(
        stage("a", next=("b", "x")),
        stage("b", terminal=True, stream_to=("y",)),
        entries={"tts": "z"},
        max_in_flight=-1,
    )
    assert {line.partition(":")[0] for line in told} == {
        "entries.tts",
        "max_in_flight",
        "stages[0].next",
        "stages[1].stream_to",
    }


@pytest.mark.parametrize("task", ["chat+images", "chat+image+audio", "chat+", "chat+audio+audio"])
def test_an_entry_for_media_that_no_request_brings_is_reported(task):
    (told,) = problems(stage("a", terminal=True), entries={"chat+audio+image": "a", task: "a"})
    assert told == f"entries.{task}: a task and its media are written TASK[+audio][+image][+video]"


def test_a_circle_over_several_stages_is_found():
    told = problems(
        stage("a", next=("b",)), stage("b", next=("c",)), stage("c", next=("a",), terminal=True)
    )
    assert told == ("stages: c leads back to a",)


def test_two_stages_of_one_name_and_one_that_nobody_reaches_are_found():
    assert "stages: 2 stages are named a" in problems(
        stage("a", terminal=True), stage("a", terminal=True)
    )
    assert problems(stage("a", terminal=True), stage("b", terminal=True)) == (
        "stages[1]: no request ever reaches b",
    )


def test_who_is_waited_for_must_lead_there():
    told = problems(
        stage("a", next=("b", "c")),
        stage("b", next=("c",)),
        stage("c", terminal=True, wait_for=("a", "b"), merge="m:f"),
        stage("d", terminal=True, wait_for=("b",), merge="m:f"),
        entries={"other": "d"},
    )
    assert told == ("stages[3].wait_for: b does not have d in its next",)


def test_a_stage_that_waits_cannot_be_streamed_into():
    told = problems(
        stage("a", next=("b",), stream_to=("b",)),
        stage("b", terminal=True, wait_for=("a",), merge="m:f"),
    )
    assert told == ("stages[0].stream_to: b waits for whole results and cannot be streamed into",)


def test_stages_of_one_process_agree_on_its_environment():
    told = problems(
        stage("a", next=("b",), process="p", env={"X": "1"}),
        stage("b", terminal=True, process="p", env={"X": "2"}),
    )
    assert told == ("stages[1].env.X: another stage of process p sets it otherwise",)


def test_a_pipeline_without_stages_is_refused():
    assert problems() == ("stages: a pipeline needs at least one",)

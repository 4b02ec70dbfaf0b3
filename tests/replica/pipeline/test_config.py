from dataclasses import replace

import pytest

from omni_proxy.replica.pipeline.config import (
    PipelineConfigError,
    compile_plan,
    import_dotted,
    load_pipeline,
    merge_fields,
    merge_terminals,
    validate_config,
)
from omni_proxy.replica.pipeline.stage_messages import OmniRequest
from tests.replica.pipeline.pipeline_stages import HERE, pipeline, stage

VALID = """
name = "omni"
model_path = "tiny"
max_in_flight = 8
[entries]
tts = "b"
[[stages]]
name = "a"
factory = "some.where:make"
next = "b"
params = { size = 3, names = ["x"] }
[[stages]]
name = "b"
factory = "some.where:make"
terminal = true
process = "voice"
env = { THREADS = "2" }
"""


def problems(*stages, **keys):
    with pytest.raises(PipelineConfigError) as caught:
        validate_config(pipeline(*stages, **keys))
    return caught.value.problems


def test_the_first_stage_is_the_entry_unless_one_is_named():
    two = (stage("a", next=("b",)), stage("b", terminal=True))
    assert validate_config(pipeline(*two)).entry == "a"
    assert validate_config(pipeline(two[1], entry="b")).entry == "b"


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"next": ("aa",)}, "stages[0].next: no stage is named aa; did you mean a?"),
        ({"factory": "no dots"}, "stages[0].factory: 'no dots' is not of the form"),
        ({"merge": "m:f"}, "stages[0].wait_for: needs merge, and merge needs wait_for"),
        ({"route": "m:f"}, "stages[0].route: there is no next to choose from"),
        ({"terminal": False}, "stages[0].next: the stage is not terminal and leads nowhere"),
        ({"terminal": False}, "stages: none is terminal: no request would ever have a result"),
        ({"env": {"A": "1"}}, "stages[0].env: only a stage with a process has its own"),
        ({"next": ("a",)}, "stages: a leads back to a"),
        ({"name": ""}, "stages[0].name: must not be empty"),
    ],
)
def test_a_problem_names_the_stage_and_its_key(keys, problem):
    only = replace(stage("a", terminal=True), **keys)
    if "factory" in keys:
        only = replace(only, factory=keys["factory"])
    assert any(line.startswith(problem) for line in problems(only))


def test_all_problems_are_reported_together():
    found = problems(
        stage("a", next=("b", "x")),
        stage("b", terminal=True, stream_to=("y",)),
        entries={"tts": "z"},
        max_in_flight=-1,
    )
    assert {line.partition(":")[0] for line in found} == {
        "entries.tts",
        "max_in_flight",
        "stages[0].next",
        "stages[1].stream_to",
    }


@pytest.mark.parametrize("task", ["chat+images", "chat+image+audio", "chat+", "chat+audio+audio"])
def test_an_entry_with_invalid_media_is_reported(task):
    (found,) = problems(stage("a", terminal=True), entries={"chat+audio+image": "a", task: "a"})
    assert found == f"entries.{task}: a task and its media are written TASK[+audio][+image][+video]"


def test_a_cycle_over_several_stages_is_reported():
    found = problems(
        stage("a", next=("b",)), stage("b", next=("c",)), stage("c", next=("a",), terminal=True)
    )
    assert found == ("stages: c leads back to a",)


def test_duplicate_and_unreachable_stages_are_reported():
    assert "stages: 2 stages are named a" in problems(
        stage("a", terminal=True), stage("a", terminal=True)
    )
    assert problems(stage("a", terminal=True), stage("b", terminal=True)) == (
        "stages[1]: no request ever reaches b",
    )


def test_a_stage_in_wait_for_must_have_this_stage_in_next():
    found = problems(
        stage("a", next=("b", "c")),
        stage("b", next=("c",)),
        stage("c", terminal=True, wait_for=("a", "b"), merge="m:f"),
        stage("d", terminal=True, wait_for=("b",), merge="m:f"),
        entries={"other": "d"},
    )
    assert found == ("stages[3].wait_for: b does not have d in its next",)


def test_a_stage_that_waits_cannot_be_streamed_into():
    found = problems(
        stage("a", next=("b",), stream_to=("b",)),
        stage("b", terminal=True, wait_for=("a",), merge="m:f"),
    )
    assert found == ("stages[0].stream_to: b waits for whole results and cannot be streamed into",)


def test_stages_of_one_process_must_agree_on_its_environment():
    found = problems(
        stage("a", next=("b",), process="p", env={"X": "1"}),
        stage("b", terminal=True, process="p", env={"X": "2"}),
    )
    assert found == ("stages[1].env.X: another stage of process p sets another value",)


def test_a_pipeline_without_stages_is_refused():
    assert problems() == ("stages: a pipeline needs at least one",)


def test_a_file_can_define_every_pipeline_field(tmp_path):
    (tmp_path / "p.toml").write_text(VALID)
    config = load_pipeline(tmp_path / "p.toml")
    first, second = config.stages
    assert (config.name, config.entry, config.max_in_flight) == ("omni", "a", 8)
    assert config.entries == {"tts": "b"}
    assert first.next == ("b",)
    assert first.params == {"size": 3, "names": ["x"]}
    assert (second.process, second.env, second.terminal) == ("voice", {"THREADS": "2"}, True)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("max_in_flight", "max_inflight", "max_inflight: unknown key; did you mean max_in_flight?"),
        ("terminal = true", "terminal = 1", "stages[1].terminal: expected true or false, got 1"),
        ("terminal =", "terminl =", "stages[1].terminl: unknown key; did you mean terminal?"),
        ('name = "omni"', "", "name: is missing"),
        ('next = "b"', "next = [1]", "stages[0].next: expected a stage's name or a list"),
        ('"2"', "2", "stages[1].env: expected a table of strings"),
        ("max_in_flight = 8", "max_in_flight = true", "max_in_flight: expected a whole number"),
        ('next = "b"', 'next = "c"', "stages[0].next: no stage is named c"),
    ],
)
def test_an_invalid_file_is_refused_with_the_problem(tmp_path, old, new, problem):
    (tmp_path / "p.toml").write_text(VALID.replace(old, new))
    with pytest.raises(PipelineConfigError) as caught:
        load_pipeline(tmp_path / "p.toml")
    assert any(line.startswith(problem) for line in caught.value.problems)


def test_all_problems_of_a_file_are_reported_together(tmp_path):
    (tmp_path / "p.toml").write_text(VALID.replace("factory", "factry").replace("model_path", "x"))
    with pytest.raises(PipelineConfigError) as caught:
        load_pipeline(tmp_path / "p.toml")
    # x, and in both stages an unknown and a missing key.
    assert len(caught.value.problems) == 5


@pytest.mark.parametrize(("text", "reason"), [("a = ", "not a TOML file"), (None, "No such file")])
def test_an_unreadable_file_is_reported_with_its_path(tmp_path, text, reason):
    path = tmp_path / "p.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PipelineConfigError, match=reason) as caught:
        load_pipeline(path)
    assert str(path) in str(caught.value)


def test_stages_that_are_not_tables_are_reported(tmp_path):
    (tmp_path / "p.toml").write_text('name = "x"\nstages = ["a"]')
    with pytest.raises(PipelineConfigError, match=r"stages\[0\]: expected a table"):
        load_pipeline(tmp_path / "p.toml")


@pytest.mark.parametrize(
    ("task", "inputs", "entry"),
    [
        ("chat", {"messages": [1]}, "a"),
        ("chat", {"messages": [1], "audios": []}, "a"),
        ("chat", {"messages": [1], "audios": [b"x"]}, "t"),
        ("tts", "say it", "s"),
        ("chat", {"messages": [1], "images": [b"x"]}, "i"),
        ("chat", {"audios": [b"x"], "images": [b"x"]}, "t"),
        ("chat", {"images": [b"x"], "videos": [b"x"]}, "v"),
        ("chat", {"audios": [b"x"], "images": [b"x"], "videos": [b"x"]}, "v"),
        ("chat", {"videos": [b"x"]}, "a"),
        ("embed", {"images": [b"x"]}, "a"),
        ("tts", {"audios": [b"x"]}, "s"),
        ("unknown", "x", "a"),
        (None, "x", "a"),
    ],
)
def test_the_task_and_its_media_choose_the_entry(task, inputs, entry):
    plan = compile_plan(
        pipeline(
            stage("a", terminal=True),
            stage("s", terminal=True),
            stage("t", terminal=True),
            stage("i", terminal=True),
            stage("v", terminal=True),
            entries={"tts": "s", "chat+audio": "t", "chat+image": "i", "chat+image+video": "v"},
        )
    )
    assert plan.entry_for(OmniRequest(inputs, {}, {"task": task} if task else {})) == entry


def test_functions_that_cannot_be_imported_are_all_reported():
    with pytest.raises(PipelineConfigError) as caught:
        compile_plan(
            pipeline(
                stage("a", next=("b",), route=f"{HERE}:no_such_route"),
                stage("b", terminal=True, wait_for=("a",), merge="no.such.module:f"),
            )
        )
    first, second = caught.value.problems
    assert first.startswith(f"stages[0].route: cannot import {HERE}:no_such_route")
    assert second.startswith("stages[1].merge: cannot import no.such.module:f")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("omni_proxy.replica.stages.speak:build", "omni_proxy.replica.stages.synthesize"),
        ("omni_proxy.replica.stages.look:build", "omni_proxy.replica.stages.ocr"),
        ("omni_proxy.replica.pipeline.merge:merge_fields", "omni_proxy.replica.pipeline.config"),
        ("omni_proxy.replica.text.stage:build", "omni_proxy.replica.stages.text"),
    ],
)
def test_dotted_names_of_the_last_release_still_work(old, new):
    assert import_dotted(old).__module__ == new


def test_results_of_terminal_stages_are_kept_under_their_names():
    results = {"decode": {"text": "a"}, "speak": {"audio_data": b"b"}}
    assert merge_terminals(results) == results
    assert merge_terminals(results) is not results


def test_fan_in_merges_the_keys_of_all_results():
    assert merge_fields({"a": {"x": 1, "z": 1}, "b": {"y": 2, "z": 2}}) == {"x": 1, "y": 2, "z": 2}

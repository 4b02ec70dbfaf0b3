import pytest

from omni_proxy.replica.pipeline.config import PipelineConfigError, compile_plan, import_dotted
from omni_proxy.replica.pipeline.messages import OmniRequest
from tests.replica.pipeline.pipeline_stages import HERE, pipeline, stage


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
    with pytest.raises(PipelineConfigError) as refused:
        compile_plan(
            pipeline(
                stage("a", next=("b",), route=f"{HERE}:no_such_route"),
                stage("b", terminal=True, wait_for=("a",), merge="no.such.module:f"),
            )
        )
    first, second = refused.value.problems
    assert first.startswith(f"stages[0].route: cannot import {HERE}:no_such_route")
    assert second.startswith("stages[1].merge: cannot import no.such.module:f")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("omni_proxy.replica.stages.synthesize:build", "omni_proxy.replica.stages.synthesize"),
        ("omni_proxy.replica.stages.ocr:build", "omni_proxy.replica.stages.ocr"),
        ("omni_proxy.replica.pipeline.config:merge_fields", "omni_proxy.replica.pipeline.config"),
    ],
)
def test_dotted_names_of_the_last_release_still_work(old, new):
    assert import_dotted(old).__module__ == new

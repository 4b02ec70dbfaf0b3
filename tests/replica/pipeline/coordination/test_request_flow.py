import pytest

from omni_proxy.replica.pipeline.config import FlowError, compile_plan
from omni_proxy.replica.pipeline.coordination.request_flow import RequestFlow
from omni_proxy.replica.pipeline.stage_messages import OmniRequest, ResultChunk, StreamChunk, Submit
from tests.replica.pipeline.pipeline_stages import HERE, pipeline, stage


def flow_of(config, inputs="hi", **metadata):
    return RequestFlow(compile_plan(config), "r", OmniRequest(inputs, {}, metadata))


def submits(sends):
    return {name: message.payload.data for name, message in sends if isinstance(message, Submit)}


def test_a_chain_passes_each_result_to_the_next_stage():
    flow = flow_of(pipeline(stage("a", next=("b",)), stage("b", terminal=True)))
    assert not flow.done
    assert submits(flow.begin()) == {"a": {"raw_inputs": "hi"}}
    assert submits(flow.finished("a", {"x": 1})) == {"b": {"x": 1}}
    assert not flow.done
    assert flow.finished("b", {"text": "end"}) == []
    assert flow.done
    assert flow.results == {"b": {"text": "end"}}


def test_fan_in_waits_for_all_and_merges_them():
    flow = flow_of(
        pipeline(
            stage("a", next=("b", "c")),
            stage("b", next=("d",)),
            stage("c", next=("d",)),
            stage("d", terminal=True, wait_for=("b", "c"), merge=f"{HERE}:join_texts"),
        )
    )
    flow.begin()
    assert set(submits(flow.finished("a", {}))) == {"b", "c"}
    assert flow.finished("c", {"text": "two"}) == []
    assert submits(flow.finished("b", {"text": "one"})) == {"d": {"text": "one and two"}}


def test_a_missing_input_stage_is_reported():
    flow = flow_of(
        pipeline(
            stage("a", next=("b", "c", "d")),
            stage("b", next=("d",), route=f"{HERE}:route_nowhere"),
            stage("c", terminal=True),
            stage("d", terminal=True, wait_for=("a", "b"), merge=f"{HERE}:join_texts"),
        )
    )
    flow.begin()
    flow.finished("a", {"text": "one"})
    flow.finished("c", {})
    with pytest.raises(FlowError, match="stage d got no data from b"):
        flow.finished("b", {})


def speaking():
    return pipeline(
        stage(
            "d",
            terminal=True,
            next=("s",),
            stream_to=("s",),
            route=f"{HERE}:speak_if_audio_is_wanted",
        ),
        stage("s", "speaker", terminal=True),
    )


def test_a_fed_stage_gets_all_text_once():
    flow = flow_of(speaking(), output_modalities=["text", "audio"])
    submitted = dict(flow.begin())
    assert submitted["s"].fed
    assert not submitted["d"].fed
    sends = flow.streamed(ResultChunk("r", "d", {"text": "one "}, 0))
    sends += flow.streamed(ResultChunk("r", "d", {"text": "two "}, 1))
    sends += flow.finished("d", {"text": "one two three"})
    assert {name for name, _ in sends} == {"s"}
    assert [(message.chunk["text"], message.last) for _, message in sends] == [
        ("one ", False),
        ("two ", False),
        ("three", True),
    ]
    assert not flow.done
    flow.finished("s", {"audio_data": b""})
    assert set(flow.results) == {"d", "s"}


def test_the_whole_result_is_fed_if_nothing_was_streamed():
    flow = flow_of(speaking(), output_modalities=["audio"])
    flow.begin()
    ((_, last),) = flow.finished("d", {"text": "all"})
    assert last == StreamChunk("r", "d", {"text": "all"}, last=True)


def test_a_route_may_skip_a_stage():
    flow = flow_of(speaking(), output_modalities=["text"])
    assert set(submits(flow.begin())) == {"d"}
    assert flow.streamed(ResultChunk("r", "d", {"text": "a"})) == []
    assert flow.finished("d", {"text": "a"}) == []
    assert flow.done


def test_a_result_that_a_route_passes_on_is_not_a_result_of_the_request():
    config = pipeline(
        stage("t", terminal=True, next=("s",), route=f"{HERE}:speak_if_audio_is_wanted"),
        stage("s", terminal=True),
    )
    routed = flow_of(config, output_modalities=["audio"])
    routed.begin()
    routed.finished("t", {"text": "x"})
    assert routed.results == {}
    ended = flow_of(config, output_modalities=["text"])
    ended.begin()
    ended.finished("t", {"text": "x"})
    assert ended.results == {"t": {"text": "x"}}


def test_a_stage_that_is_reached_twice_is_an_error():
    flow = flow_of(
        pipeline(stage("a", next=("b", "c")), stage("b", next=("c",)), stage("c", terminal=True))
    )
    flow.begin()
    flow.finished("a", {})
    with pytest.raises(FlowError, match="stage c was reached twice"):
        flow.finished("b", {})


def test_a_route_to_a_stage_that_is_not_next_is_an_error():
    flow = flow_of(
        pipeline(
            stage("a", next=("b",), route=f"{HERE}:route_to_an_unknown_stage"),
            stage("b", terminal=True),
        )
    )
    flow.begin()
    with pytest.raises(FlowError, match="chose 'nowhere'"):
        flow.finished("a", {})


def test_a_request_that_reaches_no_terminal_stage_is_an_error():
    flow = flow_of(
        pipeline(stage("a", next=("b",), route=f"{HERE}:route_nowhere"), stage("b", terminal=True))
    )
    flow.begin()
    with pytest.raises(FlowError, match="no terminal stage was reached"):
        flow.finished("a", {})


def test_an_unexpected_result_is_ignored():
    flow = flow_of(pipeline(stage("a", next=("b",)), stage("b", terminal=True)))
    flow.begin()
    assert flow.finished("b", {"text": "early"}) == []
    flow.finished("a", {})
    assert flow.finished("a", {}) == []
    assert not flow.done

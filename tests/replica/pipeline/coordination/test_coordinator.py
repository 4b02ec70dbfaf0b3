"""The coordinator, compared with a simple model for sequences of client calls and stage messages.

Also: which requests can be ended early, by which stage, and which can only be aborted.
"""

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.replica.pipeline.config import compile_plan
from omni_proxy.replica.pipeline.coordination.coordinator import Coordinator, StageUnavailable
from omni_proxy.replica.pipeline.coordination.delivery import DeliveryEnd
from omni_proxy.replica.pipeline.requests import QueueFullError, RequestAborted, RequestFailed
from omni_proxy.replica.pipeline.stage_messages import (
    Abort,
    EndEarly,
    OmniRequest,
    ProfilerStart,
    ProfilerStop,
    Result,
    ResultChunk,
    StageEnded,
    StageFailure,
    StageReady,
    StageStats,
    Submit,
)
from tests.example_counts import examples
from tests.replica.pipeline.pipeline_stages import HERE, pipeline, stage

STAGES = ("a", "d", "s")
IDS = ("r0", "r1", "r2")
REQUEST = OmniRequest("hi", {}, {"output_modalities": ["text", "audio"]})
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.sampled_from(IDS)),
        st.tuples(st.just("abort"), st.sampled_from(IDS)),
        st.tuples(st.just("release"), st.sampled_from(IDS)),
        st.tuples(st.just("result"), st.sampled_from(IDS), st.sampled_from(STAGES)),
        st.tuples(st.just("result"), st.sampled_from(IDS), st.sampled_from(STAGES)),
        st.tuples(
            st.just("failed"),
            st.sampled_from(IDS),
            st.sampled_from(["caller", "server", "dropped"]),
        ),
        st.tuples(st.just("ended"), st.sampled_from(STAGES)),
        st.tuples(st.just("ready"), st.sampled_from(STAGES)),
    ),
    max_size=30,
)
TEXT = OmniRequest("hi", {}, {"output_modalities": ["text"]})


class FakeTransport:
    """Records the messages to each stage."""

    def __init__(self):
        self.sent = []

    def send(self, stage_name, message):
        self.sent.append((stage_name, message))

    def kinds(self, kind):
        return [name for name, message in self.sent if isinstance(message, kind)]


def config(**keys):
    return pipeline(
        stage("a", next=("d",)),
        stage(
            "d",
            terminal=True,
            next=("s",),
            stream_to=("s",),
            route=f"{HERE}:speak_if_audio_is_wanted",
        ),
        stage("s", "speaker", terminal=True),
        **keys,
    )


def coordinator(transport=None, **keys):
    return Coordinator(compile_plan(config(**keys)), transport or FakeTransport())


class Model:
    """The state of each request by id: [state, stages that have no result yet]."""

    def __init__(self, bound):
        self.bound = bound
        self.down = set()
        self.requests = {}
        self.early_ends = 0

    def live(self, request_id):
        return self.requests.get(request_id, ("", ()))[0] in ("pending", "running")

    def open(self, request_id):
        if request_id in self.requests:
            return 400
        if sum(map(self.live, self.requests)) >= self.bound:
            return "full"
        if "a" in self.down:
            self.early_ends += 1
            return 503
        self.requests[request_id] = ["pending", {"a"}]
        return "opened"

    def end(self, request_id, state):
        if self.live(request_id):
            self.requests[request_id][0] = state
            self.early_ends += 1

    def result(self, request_id, name):
        if not self.live(request_id):
            return
        entry = self.requests[request_id]
        entry[0] = "running"
        if name not in entry[1]:
            return
        if name == "a":
            entry[1] = {"d", "s"}
        else:
            entry[1].discard(name)
        # The end of the stream is sent to the fed stage, too.
        receivers = {"a": {"d", "s"}, "d": {"s"}, "s": set()}[name]
        if receivers & self.down:
            self.end(request_id, "failed")
        elif not entry[1]:
            entry[0] = "completed"


@settings(max_examples=examples(150))
@given(OPERATIONS)
def test_requests_have_the_states_of_the_model(operations):
    trio.run(play, operations)


async def play(operations):
    pair = CoordinatorAndModel()
    for operation, *words in operations:
        getattr(pair, operation)(*words)
        compare(pair.hub, pair.model, pair.deliveries, pair.transport)


class CoordinatorAndModel:
    """Applies each step to the coordinator and to the model."""

    def __init__(self):
        self.transport, self.model = FakeTransport(), Model(bound=2)
        self.hub = coordinator(self.transport, max_in_flight=2)
        for name in STAGES:
            self.hub.receive(StageReady(name, {}))
        self.deliveries = {}

    def open(self, request_id):
        try:
            self.deliveries[request_id] = self.hub.open(request_id, REQUEST)
            outcome = "opened"
        except QueueFullError:
            outcome = "full"
        except RequestFailed as error:
            outcome = error.status
        assert outcome == self.model.open(request_id)

    def abort(self, request_id):
        assert self.hub.abort(request_id) == self.model.live(request_id)
        self.model.end(request_id, "aborted")

    def release(self, request_id):
        if request_id in self.model.requests:
            self.hub.release(self.deliveries[request_id])
            self.model.end(request_id, "aborted")
            del self.model.requests[request_id]

    def result(self, request_id, name):
        self.hub.receive(Result(request_id, name, {"text": "x"}))
        self.model.result(request_id, name)

    def failed(self, request_id, kind):
        self.hub.receive(StageFailure(request_id, "a", "bad", kind))
        self.model.end(request_id, "aborted" if kind == "dropped" else "failed")

    def ended(self, name):
        self.hub.receive(StageEnded(name, "gone"))
        self.model.down.add(name)
        for request_id, (_, unfinished) in self.model.requests.items():
            if name in unfinished:
                self.model.end(request_id, "failed")

    def ready(self, name):
        self.hub.receive(StageReady(name, {}))
        self.model.down.discard(name)


def compare(hub, model, deliveries, transport):
    health = hub.health()
    states = [state for state, _ in model.requests.values()]
    assert health["request_states"] == {state: states.count(state) for state in set(states)}
    assert health["total_requests"] == len(states)
    assert health["pending_completions"] == hub.live_count == sum(map(model.live, model.requests))
    assert health["status"] == ("unhealthy" if model.down else "healthy")
    assert health["stream_delivery"]["open_stream_count"] == len(states)
    # Every early end is sent to every stage once.
    assert len(transport.kinds(Abort)) == model.early_ends * len(STAGES)
    for request_id, (state, _) in model.requests.items():
        end = deliveries[request_id].end
        kinds = {"completed": DeliveryEnd, "failed": RequestFailed, "aborted": RequestFailed}
        assert isinstance(end, kinds.get(state, type(None)))


async def test_an_abort_reaches_the_stages_before_the_reader():
    order = []

    class Ordered(FakeTransport):
        def send(self, stage_name, message):
            if isinstance(message, Abort):
                order.append(delivery.end)
            super().send(stage_name, message)

    hub = coordinator(Ordered())
    delivery = hub.open("r", REQUEST)
    assert hub.abort("r")
    assert not hub.abort("r")
    assert order == [None] * 3
    with pytest.raises(RequestFailed, match="aborted"):
        await delivery.take()


async def test_admission_is_bounded_by_the_number_of_live_requests():
    hub = coordinator(max_in_flight=1)
    first = hub.open("one", REQUEST)
    with pytest.raises(QueueFullError, match=r"The request queue is full\."):
        hub.open("two", REQUEST)
    hub.release(first)
    hub.open("two", REQUEST)


async def test_an_id_is_in_use_until_its_reader_has_left():
    hub = coordinator()
    first = hub.open("r", REQUEST)
    hub.abort("r")
    with pytest.raises(RequestFailed, match="Request r already exists") as caught:
        hub.open("r", REQUEST)
    assert caught.value.status == 400
    hub.release(first)
    second = hub.open("r", REQUEST)
    hub.release(first)  # has no effect: the id belongs to the second request
    assert second.end is None


@pytest.mark.parametrize(
    ("message", "status", "text"),
    [
        (StageFailure("r", "a", "too long", "caller"), 400, "too long"),
        (StageFailure("r", "a", "out of memory"), 500, "out of memory"),
        (
            StageFailure("r", "a", "The request was dropped by an admin action.", "dropped"),
            500,
            "aborted",
        ),
        (StageEnded("a", "killed"), 500, "stage a ended: killed"),
    ],
)
async def test_a_failure_at_one_stage_ends_the_request_everywhere(message, status, text):
    transport = FakeTransport()
    hub = coordinator(transport)
    delivery = hub.open("r", REQUEST)
    hub.receive(message)
    assert transport.kinds(Abort) == list(STAGES)
    with pytest.raises(RequestFailed, match=text) as caught:
        await delivery.take()
    assert caught.value.status == status


async def test_the_reader_gets_chunks_of_terminal_stages_only():
    hub = coordinator()
    delivery = hub.open("r", REQUEST)
    hub.receive(ResultChunk("r", "a", {"text": "inner"}))
    hub.receive(Result("r", "a", {}))
    hub.receive(ResultChunk("r", "d", {"text": "outer"}))
    assert (await delivery.take()).chunk == {"text": "outer"}


async def test_requests_to_a_stage_that_is_down_are_refused_at_once():
    hub = coordinator()
    for name in STAGES:
        hub.receive(StageReady(name, {}))
    hub.receive(StageEnded("a", "ended by SIGKILL"))
    assert hub.health()["failed_stages"] == {"a": "ended by SIGKILL"}
    with pytest.raises(
        RequestFailed, match=r"stage a is not running \(ended by SIGKILL\)"
    ) as caught:
        hub.open("r", REQUEST)
    assert caught.value.status == 503
    assert hub.health()["total_requests"] == 0
    hub.receive(StageReady("a", {}))
    assert "failed_stages" not in hub.health()


async def test_health_is_starting_until_every_stage_has_been_ready():
    hub = coordinator()
    statuses = [hub.health()["status"]]
    for name in STAGES:
        hub.receive(StageReady(name, {}))
        statuses.append(hub.health()["status"])
    assert statuses == ["starting", "starting", "starting", "healthy"]
    assert list(hub.health()) == [
        "status",
        "running",
        "stages",
        "entry_stage",
        "total_requests",
        "pending_completions",
        "request_states",
        "stream_delivery",
    ]


async def test_stop_fails_live_requests_and_refuses_new_ones():
    hub = coordinator()
    delivery = hub.open("r", REQUEST)
    hub.stop()
    with pytest.raises(RequestFailed, match="not running") as caught:
        await delivery.take()
    assert caught.value.status == 503
    with pytest.raises(RequestFailed, match="not running"):
        hub.open("s", REQUEST)
    with pytest.raises(RequestFailed, match="not running"):
        await hub.admin("model_info", {})
    assert (hub.health()["status"], hub.health()["running"]) == ("unhealthy", False)


async def test_a_route_that_fails_ends_only_its_request():
    plan = compile_plan(
        pipeline(stage("a", next=("b",), route=f"{HERE}:failing_route"), stage("b", terminal=True))
    )
    hub = Coordinator(plan, FakeTransport())
    delivery, other = hub.open("r", REQUEST), hub.open("s", REQUEST)
    hub.receive(Result("r", "a", {}))
    with pytest.raises(RequestFailed, match="KeyError: 'route'") as caught:
        await delivery.take()
    assert caught.value.status == 500
    assert other.end is None


async def test_a_message_that_cannot_be_sent_fails_its_request():
    class Closed(FakeTransport):
        def send(self, stage_name, message):
            if isinstance(message, Submit):
                raise StageUnavailable(f"stage {stage_name} is unreachable")

    with pytest.raises(RequestFailed, match="unreachable"):
        coordinator(Closed()).open("r", REQUEST)


async def test_the_latest_gauges_of_each_stage_are_kept_until_it_ends():
    hub = coordinator()
    hub.receive(StageStats("a", {"num_running_reqs": 1.0}))
    hub.receive(StageStats("a", {"num_running_reqs": 2.0}))
    assert hub.stats() == {"a": {"num_running_reqs": 2.0}}
    hub.receive(StageEnded("a", "gone"))
    assert hub.stats() == {}


async def test_profiling_starts_and_stops_at_every_stage(tmp_path):
    transport = FakeTransport()
    hub = coordinator(transport)
    hub.profiler_start(ProfilerStart("run", "", str(tmp_path), False))
    hub.open("r", REQUEST)
    assert transport.kinds(ProfilerStart) == list(STAGES)
    assert hub.profiler_stop("another") == "another"
    assert hub.profiling_run_id == "run"
    assert hub.profiler_stop() == "run"
    assert hub.profiler_stop() is None
    assert len(transport.kinds(ProfilerStop)) == 3 * len(STAGES)
    (file,) = tmp_path.iterdir()
    assert "request_admission" in file.read_text()


def every_request(request_id):
    return True


def open_at_stage_a(request=TEXT):
    """A coordinator whose stage d ends requests early, with one request at stage a."""
    transport = FakeTransport()
    coordinator = Coordinator(compile_plan(config()), transport)
    coordinator.receive(StageReady("d", {"ends_early": True}))
    return coordinator, transport, coordinator.open("r", request)


def end_early_messages(transport):
    return [(name, message) for name, message in transport.sent if isinstance(message, EndEarly)]


async def test_an_early_end_is_sent_to_the_generating_stage_whose_result_ends_the_request():
    coordinator, transport, delivery = open_at_stage_a()
    coordinator.receive(Result("r", "a", {}))
    assert coordinator.end_early(every_request) == ["r"]
    assert end_early_messages(transport) == [("d", EndEarly("r"))]
    assert coordinator.live_count == 1
    coordinator.receive(Result("r", "d", {"text": "x", "finish_reason": "abort"}))
    assert delivery.end.results["d"]["finish_reason"] == "abort"
    assert coordinator.end_early(every_request) == []


async def test_a_request_at_an_earlier_stage_is_ended_when_it_reaches_the_generating_one():
    coordinator, transport, _ = open_at_stage_a()
    assert coordinator.end_early(every_request) == ["r"]
    assert end_early_messages(transport) == []
    coordinator.receive(Result("r", "a", {}))
    kinds = [type(message).__name__ for name, message in transport.sent if name == "d"]
    assert kinds == ["Submit", "EndEarly"]


async def test_a_request_at_a_stage_that_cannot_end_early_is_aborted_everywhere():
    coordinator, transport, delivery = open_at_stage_a(REQUEST)
    coordinator.receive(Result("r", "a", {}))  # now at d, and at s, into which d streams
    assert coordinator.end_early(every_request) == ["r"]
    assert end_early_messages(transport) == []
    assert set(transport.kinds(Abort)) == {"a", "d", "s"}
    assert isinstance(delivery.end, RequestAborted)


async def test_only_the_selected_requests_are_ended_early():
    coordinator, transport, _ = open_at_stage_a()
    coordinator.open("other", TEXT)
    assert coordinator.end_early(lambda request_id: request_id == "other") == ["other"]
    assert coordinator.end_early(lambda request_id: request_id == "x") == []
    coordinator.receive(Result("r", "a", {}))
    coordinator.receive(Result("other", "a", {}))
    assert end_early_messages(transport) == [("d", EndEarly("other"))]


async def test_an_early_end_does_not_hide_that_its_stage_is_down():
    coordinator, transport, delivery = open_at_stage_a()
    coordinator.end_early(every_request)
    coordinator.receive(StageEnded("d", "it crashed"))
    coordinator.receive(Result("r", "a", {}))
    assert delivery.end.status == 503
    assert end_early_messages(transport) == []

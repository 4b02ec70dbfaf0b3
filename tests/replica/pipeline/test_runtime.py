import pytest
import trio
import trio.testing

from omni_proxy.replica.pipeline.client import Client
from omni_proxy.replica.pipeline.config import PipelineConfigError
from omni_proxy.replica.pipeline.requests import GenerateRequest, RequestFailed
from omni_proxy.replica.pipeline.runtime import StartError, ThreadMailbox, open_pipeline
from omni_proxy.replica.pipeline.stage_messages import StageStats
from tests.replica.pipeline.pipeline_stages import pipeline, stage, until

pytestmark = pytest.mark.usefixtures("soon")


async def start(config):
    async with open_pipeline(config) as (_, runtime):
        await runtime.ready.wait()
        raise AssertionError("the pipeline started")


@pytest.mark.parametrize("process", ["", "p"])
@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("unstartable", r"stage a: ValueError: no such weights"),
        (
            "missing_dependency",
            r"surely_not_installed is not installed: pip install 'omni-proxy\[replica\]'",
        ),
        ("absent", "has no attribute 'absent'"),
    ],
)
async def test_a_stage_that_cannot_start_fails_the_start_with_its_reason(process, factory, reason):
    config = pipeline(stage("a", factory, terminal=True, process=process))
    with pytest.RaisesGroup(pytest.RaisesExc(StartError, match=reason), flatten_subgroups=True):
        await start(config)


async def test_an_invalid_pipeline_is_refused_before_anything_starts():
    with pytest.raises(PipelineConfigError):
        await start(pipeline(stage("a", next=("x",), terminal=True)))


async def test_a_broken_stage_fails_its_requests_and_restarts():
    config = pipeline(
        stage("a", "broken", terminal=True), stage("b", terminal=True), entries={"tts": "b"}
    )
    async with open_pipeline(config) as (hub, runtime):
        await runtime.ready.wait()
        client = Client(hub)
        for _ in range(2):
            with pytest.raises(RequestFailed, match="stage a ended: MemoryError: no room"):
                await client.completion(GenerateRequest("x"))
            assert (await client.completion(GenerateRequest("hi", task="tts"))).text == "HI"
            await until(lambda: client.health()["status"] == "healthy")


@pytest.mark.parametrize(("caller", "status"), [(True, 400), (False, 500)])
async def test_an_error_of_a_function_has_the_status_for_its_kind(caller, status):
    config = pipeline(stage("a", "failing", terminal=True, params={"caller": caller}))
    async with open_pipeline(config) as (hub, runtime):
        await runtime.ready.wait()
        with pytest.raises(RequestFailed, match="fault") as caught:
            await Client(hub).completion(GenerateRequest("x"))
        assert caught.value.status == status


async def test_requests_before_the_stages_are_ready_wait_for_them():
    config = pipeline(stage("a", next=("b",), process="p"), stage("b", terminal=True))
    async with open_pipeline(config) as (hub, _):
        assert hub.health()["status"] == "starting"
        assert (await Client(hub).completion(GenerateRequest("hi"))).text == "HI"
        assert hub.health()["status"] == "healthy"


async def test_closing_the_pipeline_fails_the_requests_in_flight():
    async with trio.open_nursery() as nursery:
        statuses = []

        async def ask(client):
            with pytest.raises(RequestFailed, match="not running") as caught:
                await client.completion(GenerateRequest("x"))
            statuses.append(caught.value.status)

        config = pipeline(stage("a", "until_aborted", terminal=True))
        async with open_pipeline(config) as (hub, runtime):
            await runtime.ready.wait()
            nursery.start_soon(ask, Client(hub))
            await until(lambda: hub.live_count)
    assert statuses == [503]


async def test_operations_reach_stages_in_threads_and_processes():
    answers = {"model_info": True, "update_weights_from_disk": False}
    config = pipeline(
        stage("pre", next=("x",)),
        stage("x", "answering_operations", next=("y",), params={"answers": answers}),
        stage("y", "answering_operations", terminal=True, process="p", params={"answers": answers}),
    )
    async with open_pipeline(config) as (hub, runtime):
        await runtime.ready.wait()
        client = Client(hub)
        assert client.stage_info()["y"] == {"supports_admin": True, "answers": sorted(answers)}
        body = await client.admin("model_info", {"a": 1}, timeout_s=20)
        assert body["success"]
        assert {result["stage"] for result in body["results"]} == {"pre", "x", "y"}
        data = [result["data"] for result in body["results"] if result["rank"] == 0]
        assert data == [{"got": {"a": 1}, "timeout_s": 20}] * 2
        body = await client.admin("update_weights_from_disk")
        assert not body["success"]
        assert sorted(body["message"].split("; ")) == ["x refused", "y refused"]


@pytest.mark.parametrize(
    ("stages", "payload", "aborted"),
    [
        (None, {"mode": "abort"}, True),
        (["a", "x"], {}, True),
        (["x"], {"mode": "abort"}, False),
        (None, {"mode": "in_place"}, False),
    ],
)
async def test_a_pause_in_abort_mode_of_all_stages_aborts_every_request(stages, payload, aborted):
    config = pipeline(
        stage("a", "until_aborted", terminal=True),
        stage("x", "answering_operations", terminal=True, params={"answers": {}}),
        entries={"tts": "x"},
    )
    async with open_pipeline(config) as (hub, runtime):
        await runtime.ready.wait()
        client = Client(hub)
        async with client.generate(GenerateRequest("x"), "r") as generation:
            await anext(generation)
            # Requests are aborted even if a stage does not answer in time.
            with pytest.raises(RequestFailed, match="no reply from x"):
                await client.admin("pause_generation", payload, stages, timeout_s=0.01)
            states = client.health()["request_states"]
            assert states == ({"aborted": 1} if aborted else {"running": 1})


async def test_an_error_while_receiving_a_message_loses_only_that_message(caplog):
    received = []

    def receive(message):
        if message.stage == "bad":
            raise KeyError("bad")
        received.append(message.stage)

    mailbox = ThreadMailbox(receive)
    for name in ("a", "bad", "b"):
        mailbox.post(StageStats(name, {}))
    await trio.testing.wait_all_tasks_blocked()
    assert received == ["a", "b"]
    assert "message_lost stage=bad" in caplog.text

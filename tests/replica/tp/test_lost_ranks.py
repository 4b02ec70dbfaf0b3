"""Real ranks are killed, in every order."""

import os
import signal

import pytest

from omni_proxy.replica.pipeline.builtin import BuiltinOptions, builtin_pipeline
from omni_proxy.replica.pipeline.client import Client
from omni_proxy.replica.pipeline.requests import GenerateRequest, RequestFailed, SamplingParams
from omni_proxy.replica.pipeline.runtime import open_pipeline
from omni_proxy.replica.stages import text
from omni_proxy.replica.stages.text import build
from omni_proxy.replica.tp.group import RankLost
from tests.processes import alive
from tests.replica.pipeline.pipeline_stages import until
from tests.replica.text.scheduler_harness import undisturbed

LONG = SamplingParams(temperature=0, max_new_tokens=2000)
SHORT = SamplingParams(temperature=0, max_new_tokens=12)


def two_rank_pipeline(**options):
    return builtin_pipeline(BuiltinOptions(model="tiny", tp=2, **options))


def completion_request(sampling):
    return GenerateRequest("The sea", sampling=sampling, task="completion", stream=True)


async def kill_after_the_first_chunk(client, pid):
    async with client.generate(completion_request(LONG)) as generation:
        await anext(generation)
        os.kill(pid, signal.SIGKILL)
        async for _ in generation:
            pass


def follower_of(hub):
    (pid,) = hub.stage_info()["decode"]["follower_pids"]
    return pid


@pytest.mark.usefixtures("soon")
async def test_a_killed_follower_fails_the_requests_and_all_ranks_start_again():
    async with open_pipeline(two_rank_pipeline()) as (hub, runtime):
        await runtime.ready.wait()
        client, first = Client(hub), follower_of(hub)
        # Either its socket or a sum without it reports the loss first.
        with pytest.raises(RequestFailed, match=r"rank 1 of stage decode is lost|received no data"):
            await kill_after_the_first_chunk(client, first)
        await until(lambda: client.health()["status"] != "healthy")
        await until(lambda: client.health()["status"] == "healthy")
        second = follower_of(hub)
        assert second != first
        result = await client.completion(completion_request(SHORT))
        assert result.text == undisturbed("The sea", temperature=0, max_new_tokens=12)["text"]
        assert not alive(first)
        # A rank that is killed while no batch runs is detected as well.
        os.kill(second, signal.SIGKILL)
        await until(lambda: client.health()["status"] != "healthy")
    await until(lambda: not alive(second))


@pytest.mark.usefixtures("soon")
async def test_a_follower_ends_when_its_leader_is_killed_during_a_step():
    config = two_rank_pipeline(own_process=frozenset({"decode"}))
    async with open_pipeline(config) as (hub, runtime):
        await runtime.ready.wait()
        client, follower = Client(hub), follower_of(hub)
        (host,) = (host for host in runtime.hosts if "decode" in host.stages)
        with pytest.raises(RequestFailed):
            await kill_after_the_first_chunk(client, host.pid)
        await until(lambda: not alive(follower))


@pytest.mark.usefixtures("soon")
async def test_the_followers_end_with_the_pipeline():
    async with open_pipeline(two_rank_pipeline()) as (hub, runtime):
        await runtime.ready.wait()
        follower = follower_of(hub)
        assert alive(follower)
    assert not alive(follower)


def test_a_follower_that_cannot_start_is_reported_with_its_reason(monkeypatch):
    monkeypatch.setattr(text, "FOLLOWER", "omni_proxy.replica.models.shard:Shard")
    message = "rank 1 of stage decode is lost: TypeError: .*unexpected keyword argument"
    with pytest.raises(RankLost, match=message):
        build("decode", model="tiny", tp=2)

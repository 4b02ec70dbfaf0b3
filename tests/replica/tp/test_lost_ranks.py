"""Ranks that are killed, in every order: real processes, real signals."""

import os
import signal

import pytest

from omni_proxy.replica.pipeline.builtin import BuiltinOptions, builtin_pipeline
from omni_proxy.replica.pipeline.client import Client
from omni_proxy.replica.pipeline.requests import GenerateRequest, RequestFailed, SamplingParams
from omni_proxy.replica.pipeline.runtime import open_pipeline
from omni_proxy.replica.text.stage import build
from omni_proxy.replica.tp import leader
from omni_proxy.replica.tp.group import RankLost
from tests.processes import alive
from tests.replica.pipeline.pipeline_stages import until
from tests.replica.text.scheduler_harness import undisturbed

LONG = SamplingParams(temperature=0, max_new_tokens=2000)
SHORT = SamplingParams(temperature=0, max_new_tokens=12)


def over_two(**choices):
    return builtin_pipeline(BuiltinOptions(model="tiny", tp=2, **choices))


def asked(sampling):
    return GenerateRequest("The sea", sampling=sampling, task="completion", stream=True)


async def killed_after_the_first_piece(client, pid):
    async with client.generate(asked(LONG)) as generation:
        await anext(generation)
        os.kill(pid, signal.SIGKILL)
        async for _ in generation:
            pass


def follower_of(hub):
    (pid,) = hub.stage_info()["decode"]["follower_pids"]
    return pid


@pytest.mark.usefixtures("soon")
async def test_a_killed_follower_fails_the_requests_and_all_ranks_start_again():
    async with open_pipeline(over_two()) as (hub, runtime):
        await runtime.ready.wait()
        client, first = Client(hub), follower_of(hub)
        # Its end is reported by its socket or by a sum without it, whichever is first.
        with pytest.raises(RequestFailed, match=r"rank 1 of stage decode is lost|received no data"):
            await killed_after_the_first_piece(client, first)
        await until(lambda: client.health()["status"] != "healthy")
        await until(lambda: client.health()["status"] == "healthy")
        second = follower_of(hub)
        assert second != first
        result = await client.completion(asked(SHORT))
        assert result.text == undisturbed("The sea", temperature=0, max_new_tokens=12)["text"]
        assert not alive(first)
        # A rank that is killed while no batch runs is detected as well.
        os.kill(second, signal.SIGKILL)
        await until(lambda: client.health()["status"] != "healthy")
    await until(lambda: not alive(second))


@pytest.mark.usefixtures("soon")
async def test_a_killed_leader_takes_its_follower_with_it_in_the_middle_of_a_step():
    config = over_two(own_process=frozenset({"decode"}))
    async with open_pipeline(config) as (hub, runtime):
        await runtime.ready.wait()
        client, follower = Client(hub), follower_of(hub)
        (host,) = (each for each in runtime.hosts if "decode" in each.stages)
        with pytest.raises(RequestFailed):
            await killed_after_the_first_piece(client, host.pid)
        await until(lambda: not alive(follower))


@pytest.mark.usefixtures("soon")
async def test_the_followers_end_with_the_pipeline():
    async with open_pipeline(over_two()) as (hub, runtime):
        await runtime.ready.wait()
        follower = follower_of(hub)
        assert alive(follower)
    assert not alive(follower)


def test_a_follower_that_cannot_start_is_reported_with_its_reason(monkeypatch):
    monkeypatch.setattr(leader, "FOLLOWER", "omni_proxy.replica.tp.sharded_model:Shard")
    reported = "rank 1 of stage decode is lost: TypeError: .*unexpected keyword argument"
    with pytest.raises(RankLost, match=reported):
        build("decode", model="tiny", tp=2)

"""Rollouts of stored versions over workers that load from the store."""

import pytest
import trio

from omni_proxy.weight_sync.rollout.request import parse_rollout
from omni_proxy.weight_sync.rollout.service import RolloutCall
from omni_proxy.wire.errors import HttpError
from tests.admin_api.api_fixture import A, B
from tests.weight_sync.version_holders import DESTROY, INIT, VersionEngines

pytest.importorskip("torch")
ENGINES = VersionEngines


async def roll_out(running, **body):
    """Start a rollout and wait until it has ended; return its status."""
    call = RolloutCall(parse_rollout(body), None, "me")
    response = await running.operations.start_rollout(call)
    assert response.status == 202, response.body
    progress = running.operations.rollouts.progress
    with trio.fail_after(30):
        while progress.active is not None:
            await progress.changed.wait()
    return progress.to_dict()


async def test_a_stored_version_is_delivered_to_one_worker_after_the_other(running):
    await running.sync(1)
    await running.sync(2)
    loads = running.engines.loads(A)
    body = await roll_out(running, version="v1")
    assert (body["state"], body["weight_version"], body["version"]) == ("succeeded", "v1", 1)
    assert running.versions() == [("v1", 3), ("v1", 3)]
    assert running.engines.loads(A) == loads + 1
    current = running.store.current
    assert (current.label, current.epoch) == ("v1", 3)
    assert running.engines.holds[A] == running.engines.holds[B] == current.digests


async def test_if_a_worker_fails_all_return_to_their_former_stored_version(running):
    await running.sync(1)
    await running.sync(2)
    running.engines.failing_loads[B] = 1
    body = await roll_out(running, version=1)
    assert (body["state"], [row["state"] for row in body["workers"]]) == (
        "failed", ["restored", "restored"],
    )  # fmt: skip
    assert "out of memory" in body["cause"]
    assert running.versions() == [("v2", 2), ("v2", 2)]
    assert running.store.current.label == "v2"
    assert running.engines.holds[A] == running.engines.holds[B] == running.store.current.digests
    assert running.cordon_reasons() == [[], []]


async def test_an_unknown_version_is_refused_with_a_list_of_the_stored_ones(running):
    await running.sync(1)
    with pytest.raises(HttpError) as refusal:
        await running.operations.rollouts.start(RolloutCall(parse_rollout({"version": 9})))
    assert (refusal.value.status, refusal.value.code) == (404, "unknown_version")
    assert [version["version"] for version in refusal.value.extra["versions"]] == ["v1"]


async def test_a_rollout_is_refused_while_a_trainer_has_a_group(running, pool):
    trainer = pool.trainer()
    trainer.order("open", group="g")
    port = (await trio.to_thread.run_sync(trainer.reply))["port"]
    place = {"master_address": "127.0.0.1", "master_port": port, "backend": "gloo"}
    assert (await running.ask(INIT, **place, rank_offset=1, world_size=2)).ok
    assert trainer.reply() == {"joined": True}
    with pytest.raises(HttpError, match="a trainer has a group with the workers") as refusal:
        await running.operations.rollouts.start(
            RolloutCall(parse_rollout({"model_path": "/m", "weight_version": "v9"}))
        )
    assert (refusal.value.status, refusal.value.code) == (409, "sync_in_progress")
    assert (await running.ask(DESTROY)).ok
    trainer.tell("destroy", group="g")


async def test_a_stored_version_may_get_another_label(running):
    await running.sync(1)
    await running.sync(2)
    body = await roll_out(running, version=1, weight_version="again")
    assert body["state"] == "succeeded"
    assert running.versions() == [("again", 3), ("again", 3)]
    assert running.engines.labels == {A: "again", B: "again"}

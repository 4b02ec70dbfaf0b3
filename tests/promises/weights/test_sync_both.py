"""Mode "both": workers and the proxy join the trainer's group; the proxy's copy repairs workers
that failed or come up later, and allows a rollback."""

import httpx
import pytest

from tests.promises.support.sync_program import DESTROY
from tests.promises.support.sync_steps import (
    ManualSync,
    assert_all_hold,
    label_of,
    run_sync,
    wait_received,
)
from tests.promises.support.sync_trainer import expected_checksum


@pytest.fixture(scope="module")
def running(fleets):
    return fleets.of("wide", "one", mode="both")


@pytest.fixture
async def seen(seen, trainers):
    """A fleet with a version in the proxy's store."""
    if not seen.fleet.seed:
        await run_sync(seen, trainers)
    return seen


async def test_the_proxy_joins_as_one_more_rank_and_stores_the_version(seen):
    assert (await seen.get_json("/server_info"))["tp_size"] == 4
    (stored,) = (await seen.get_json("/weights/versions"))["versions"]
    assert (stored["version"], stored["checksum"]) == (
        label_of(seen.fleet.seed),
        expected_checksum(seen.fleet.seed),
    )


async def sync_that_loses_a_replica(seen, trainers):
    """Runs a sync in which the last replica discards its received weights before the end."""
    sync = await ManualSync(seen, trainers.one(), world=5).arm()
    await sync.send()
    await wait_received(seen, len((await sync.announced())["buckets"]))
    last = seen.fleet.replicas[-1]
    async with httpx.AsyncClient(
        base_url=last.url, timeout=20, trust_env=False, verify=False
    ) as replica_client:
        response = await replica_client.post(DESTROY, json={"group_name": sync.group})
        assert response.json()["success"], response.text
    return sync, last


async def test_on_failure_forward_delivers_the_stored_version_to_failed_workers(seen, trainers):
    epoch = await assert_all_hold(seen, seen.fleet.seed)
    async with seen.fleet.changed(seen, on_failure='"forward"'):
        sync, _ = await sync_that_loses_a_replica(seen, trainers)
        await sync.completed()
        await sync.end(good=False)
    await seen.ready()
    assert await assert_all_hold(seen, sync.seed) == epoch + 1


async def test_on_failure_rollback_gives_all_workers_the_previous_version(seen, trainers):
    epoch = await assert_all_hold(seen, seen.fleet.seed)
    async with seen.fleet.changed(seen, on_failure='"rollback"'):
        sync, last = await sync_that_loses_a_replica(seen, trainers)
        assert last.url in await sync.refused()
        await sync.end(good=False)
    await seen.ready()
    assert await assert_all_hold(seen, seen.fleet.seed) == epoch + 1
    versions = (await seen.get_json("/weights/versions"))["versions"]
    assert label_of(sync.seed) not in {stored["version"] for stored in versions}
    await run_sync(seen, trainers)


async def test_a_worker_that_dies_before_the_end_catches_up_after_its_restart(seen, trainers):
    sync = await ManualSync(seen, trainers.one(), world=5).arm()
    await sync.send()
    victim = seen.fleet.replicas[-1]
    victim.kill()
    assert victim.url in await sync.refused()
    await sync.end(good=False)
    await seen.until("/workers", lambda body: body["routable_workers"] == 1)
    # The version depends on what the proxy detects first: the death or the end of the sync.
    body = await seen.get_json("/weights")
    assert body["weight_version"] in (label_of(seen.fleet.seed), label_of(sync.seed))
    if body["weight_version"] == label_of(sync.seed):
        seen.fleet.seed = sync.seed
    victim.start()
    await seen.ready()
    await assert_all_hold(seen, seen.fleet.seed)
    await run_sync(seen, trainers)

"""Mode "both": workers and the proxy join the trainer's group; the proxy's copy repairs workers
that failed or come up later, and allows a rollback."""

import httpx
import pytest

from tests.promises.sync_program import DESTROY
from tests.promises.sync_steps import ManualSync, assert_all_hold, label_of, run_sync, wait_received
from tests.promises.sync_trainer import expected_checksum


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
    (kept,) = (await seen.get_json("/weights/versions"))["versions"]
    assert (kept["version"], kept["checksum"]) == (
        label_of(seen.fleet.seed),
        expected_checksum(seen.fleet.seed),
    )


async def one_that_drops_out(seen, trainers):
    """A sync in which the last replica discards what it received, just before the end."""
    begun = await ManualSync(seen, trainers.one(), world=5).arm()
    await begun.send()
    await wait_received(seen, len((await begun.announced())["buckets"]))
    last = seen.fleet.replicas[-1]
    async with httpx.AsyncClient(
        base_url=last.url, timeout=20, trust_env=False, verify=False
    ) as behind:
        response = await behind.post(DESTROY, json={"group_name": begun.group})
        assert response.json()["success"], response.text
    return begun, last


async def test_on_failure_forward_delivers_the_stored_version_to_a_worker_that_did_not_apply_it(
    seen, trainers
):
    epoch = await assert_all_hold(seen, seen.fleet.seed)
    async with seen.fleet.changed(seen, on_failure='"forward"'):
        begun, _ = await one_that_drops_out(seen, trainers)
        await begun.completed()
        await begun.end(good=False)
    await seen.ready()
    assert await assert_all_hold(seen, begun.seed) == epoch + 1


async def test_on_failure_rollback_gives_all_workers_the_previous_version(seen, trainers):
    epoch = await assert_all_hold(seen, seen.fleet.seed)
    async with seen.fleet.changed(seen, on_failure='"rollback"'):
        begun, last = await one_that_drops_out(seen, trainers)
        assert last.url in await begun.refused()
        await begun.end(good=False)
    await seen.ready()
    assert await assert_all_hold(seen, seen.fleet.seed) == epoch + 1
    versions = (await seen.get_json("/weights/versions"))["versions"]
    assert label_of(begun.seed) not in {each["version"] for each in versions}
    await run_sync(seen, trainers)


async def test_a_worker_that_dies_before_the_end_catches_up_after_its_restart(seen, trainers):
    begun = await ManualSync(seen, trainers.one(), world=5).arm()
    await begun.send()
    victim = seen.fleet.replicas[-1]
    victim.kill()
    assert victim.url in await begun.refused()
    await begun.end(good=False)
    await seen.until("/workers", lambda body: body["routable_workers"] == 1)
    # The version depends on which is noticed first, its death or the end.
    body = await seen.get_json("/weights")
    assert body["weight_version"] in (label_of(seen.fleet.seed), label_of(begun.seed))
    if body["weight_version"] == label_of(begun.seed):
        seen.fleet.seed = begun.seed
    victim.start()
    await seen.ready()
    await assert_all_hold(seen, seen.fleet.seed)
    await run_sync(seen, trainers)

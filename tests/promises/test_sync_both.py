"""Workers join the trainer's group, and the proxy beside them keeps a copy for who failed, for who
comes later, and to go back to."""

import httpx
import pytest

from tests.promises.sync_program import DESTROY
from tests.promises.sync_steps import Begun, holds, label, received, sync
from tests.promises.sync_trainer import checksum


@pytest.fixture(scope="module")
def running(fleets):
    return fleets.of("wide", "one", mode="both")


@pytest.fixture
async def seen(seen, trainers):
    """A fleet with a version that its proxy holds."""
    if not seen.fleet.seed:
        await sync(seen, trainers)
    return seen


async def test_the_proxy_is_one_more_rank_and_keeps_what_all_received(seen):
    assert (await seen.told("/server_info"))["tp_size"] == 4
    (kept,) = (await seen.told("/weights/versions"))["versions"]
    assert (kept["version"], kept["checksum"]) == (
        label(seen.fleet.seed),
        checksum(seen.fleet.seed),
    )


async def one_that_drops_out(seen, trainers):
    """A sync in which the last replica forgets what it received, just before the end."""
    begun = await Begun(seen, trainers.one(), world=5).arm()
    await begun.send()
    await received(seen, len((await begun.announced())["buckets"]))
    last = seen.fleet.replicas[-1]
    async with httpx.AsyncClient(base_url=last.url, timeout=20, trust_env=False) as behind:
        told = await behind.post(DESTROY, json={"group_name": begun.group})
        assert told.json()["success"], told.text
    return begun, last


async def test_forward_mends_from_its_copy_who_did_not_apply_what_the_others_did(seen, trainers):
    epoch = await holds(seen, seen.fleet.seed)
    async with seen.fleet.changed(seen, on_failure='"forward"'):
        begun, _ = await one_that_drops_out(seen, trainers)
        await begun.completed()
        await begun.end(good=False)
    await seen.ready()
    assert await holds(seen, begun.seed) == epoch + 1


async def test_rollback_gives_all_the_version_of_before_where_one_did_not_apply_the_new_one(
    seen, trainers
):
    epoch = await holds(seen, seen.fleet.seed)
    async with seen.fleet.changed(seen, on_failure='"rollback"'):
        begun, last = await one_that_drops_out(seen, trainers)
        assert last.url in await begun.refused()
        await begun.end(good=False)
    await seen.ready()
    assert await holds(seen, seen.fleet.seed) == epoch + 1
    versions = (await seen.told("/weights/versions"))["versions"]
    assert label(begun.seed) not in {each["version"] for each in versions}
    await sync(seen, trainers)


async def test_a_worker_that_dies_before_the_end_comes_back_with_what_the_others_have(
    seen, trainers
):
    begun = await Begun(seen, trainers.one(), world=5).arm()
    await begun.send()
    victim = seen.fleet.replicas[-1]
    victim.kill()
    assert victim.url in await begun.refused()
    await begun.end(good=False)
    await seen.until("/workers", lambda told: told["routable_workers"] == 1)
    # Whether its death or the end was heard of first decides which version it is.
    told = await seen.told("/weights")
    assert told["weight_version"] in (label(seen.fleet.seed), label(begun.seed))
    if told["weight_version"] == label(begun.seed):
        seen.fleet.seed = begun.seed
    victim.start()
    await seen.ready()
    await holds(seen, seen.fleet.seed)
    await sync(seen, trainers)

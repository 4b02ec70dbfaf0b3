"""The proxy receives once for all: workers that come late, go early or were restarted catch up
before they answer anybody, and any version that is kept can be gone back to."""

from urllib.parse import quote

import pytest
import trio

from tests.promises.sync_program import FAR, replica_digest
from tests.promises.sync_steps import Begun, disarmed, holds, label, sync
from tests.promises.sync_traffic import Traffic
from tests.promises.sync_trainer import checksum

WORLD = 2  # the trainer, and the proxy for everybody behind it


@pytest.fixture(scope="module")
def running(fleets):
    return fleets.of("one", "wide", "other", mode="receive")


@pytest.fixture
async def seen(seen, trainers):
    """A fleet with a version that its proxy holds."""
    if not seen.fleet.seed:
        await sync(seen, trainers)
    return seen


@pytest.mark.parametrize(
    "wishes",
    [
        {"form": "buckets"},
        {"form": "single"},
        {"form": "two-phase", "load_format": "flattened_bucket"},
    ],
    ids=lambda wishes: "-".join(wishes.values()),
)
async def test_a_trainer_sends_once_and_every_worker_has_it(seen, trainers, wishes):
    assert (await seen.told("/server_info"))["tp_size"] == WORLD - 1
    await sync(seen, trainers, **wishes)


async def test_a_worker_that_is_added_in_the_middle_answers_nobody_by_older_weights(
    seen, trainers, fleets
):
    late, old = fleets.replicas[FAR], seen.fleet.seed
    begun = await Begun(seen, trainers.one(), world=WORLD).arm()
    traffic = Traffic(seen)
    try:
        async with traffic.going_on():
            added = await seen.client.post("/workers", json={"url": late.url})
            assert added.status_code < 300, added.text
            await begun.send()
            await begun.completed()
            await begun.end()
            told = await seen.ready(4)
            assert await replica_digest(late.url) == checksum(begun.seed)
            await traffic.some_more(12)
        assert not traffic.failures()
        assert set(traffic.texts()) == {label(old), label(begun.seed)}
        # What it answered before it caught up would be a third text, or a second under a label.
        assert [len(texts) for texts in traffic.texts().values()] == [1, 1]
        record = next(each for each in told["workers"] if each["url"] == late.url)
        assert record["weight_version"] == label(begun.seed)
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(60):
            await seen.client.delete(f"/workers/{quote(late.url, safe='')}")
    await seen.ready(3)


async def test_a_version_is_taken_back_if_a_worker_is_lost_that_catches_up_when_it_is_there_again(
    seen, trainers
):
    victim, old = seen.fleet.replicas[0], seen.fleet.seed
    epoch = await holds(seen, old)
    async with seen.fleet.changed(seen, on_failure='"rollback"'):
        begun = await Begun(seen, trainers.one(), world=WORLD).arm()
        await begun.send()
        victim.kill()
        assert victim.url in await begun.refused()
        await begun.end()
    told = await seen.until("/workers", lambda told: told["routable_workers"] == 2)
    assert {w["weight_version"] for w in told["workers"] if w["routable"]} == {label(old)}
    victim.start()
    traffic = Traffic(seen)
    async with traffic.going_on():
        await seen.ready(3)
        await traffic.some_more(12)
    assert not traffic.failures()
    assert [(name, len(texts)) for name, texts in traffic.texts().items()] == [(label(old), 1)]
    assert await holds(seen, old) > epoch


async def test_a_version_that_is_kept_can_be_gone_back_to(seen, trainers):
    old = seen.fleet.seed
    await sync(seen, trainers)
    told = await seen.told("/weights/versions")
    kept = {each["version"] for each in told["versions"]}
    assert {label(old), label(seen.fleet.seed)} <= kept, told
    epoch = await holds(seen, seen.fleet.seed)
    status, told = await seen.post("/weights/rollback", version=label(old))
    assert (status, told["success"]) == (200, True), told
    seen.fleet.seed = old
    await seen.ready()
    assert await holds(seen, old) == epoch + 1
    status, told = await seen.post("/weights/rollback", version="never seen")
    assert (status, told["success"]) == (404, False), told
    assert await holds(seen, old) == epoch + 1


async def test_a_trainer_that_dies_leaves_the_store_and_the_fleet_with_the_last_whole_version(
    seen, trainers
):
    begun = await Begun(seen, trainers.one(), world=WORLD).arm()
    await begun.send("half")
    begun.trainer.kill()
    assert await begun.refused()
    await disarmed(seen)
    await seen.ready()
    await holds(seen, seen.fleet.seed)
    versions = (await seen.told("/weights/versions"))["versions"]
    assert label(begun.seed) not in {each["version"] for each in versions}
    await sync(seen, trainers)


async def test_a_proxy_that_is_killed_in_the_middle_comes_back_to_the_last_whole_version(
    seen, trainers
):
    begun = await Begun(seen, trainers.one(), world=WORLD).arm()
    await begun.send("half")
    seen.fleet.kill_proxy()
    # A worker that has lost its weights meanwhile gets them from the store.
    victim = seen.fleet.replicas[2]
    victim.kill()
    victim.start()
    seen.fleet.start_proxy()
    begun.trainer.kill()
    await seen.ready()
    await holds(seen, seen.fleet.seed)
    await sync(seen, trainers)

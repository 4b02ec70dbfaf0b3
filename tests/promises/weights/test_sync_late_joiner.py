"""Mode "receive": the proxy receives once for all workers; workers that come up late or restart
catch up before they get a request, and a stored version can be rolled back to."""

from urllib.parse import quote

import pytest
import trio

from tests.promises.support.sync_program import FAR, replica_digest
from tests.promises.support.sync_steps import (
    ManualSync,
    assert_all_hold,
    label_of,
    run_sync,
    wait_disarmed,
)
from tests.promises.support.sync_traffic import Traffic
from tests.promises.support.sync_trainer import expected_checksum

WORLD = 2  # the trainer, and the proxy for all its workers


@pytest.fixture(scope="module")
def running(fleets):
    return fleets.of("one", "wide", "other", mode="receive")


@pytest.fixture
async def seen(seen, trainers):
    """A fleet with a version in the proxy's store."""
    if not seen.fleet.seed:
        await run_sync(seen, trainers)
    return seen


@pytest.mark.parametrize(
    "options",
    [
        {"form": "buckets"},
        {"form": "single"},
        {"form": "two-phase", "load_format": "flattened_bucket"},
    ],
    ids=lambda options: "-".join(options.values()),
)
async def test_a_trainer_sends_once_and_every_worker_gets_the_version(seen, trainers, options):
    assert (await seen.get_json("/server_info"))["tp_size"] == WORLD - 1
    await run_sync(seen, trainers, **options)


async def test_a_worker_added_during_a_sync_never_serves_older_weights(seen, trainers, fleets):
    late, old = fleets.replicas[FAR], seen.fleet.seed
    sync = await ManualSync(seen, trainers.one(), world=WORLD).arm()
    traffic = Traffic(seen)
    try:
        async with traffic.keep_asking():
            added = await seen.client.post("/workers", json={"url": late.url})
            assert added.status_code < 300, added.text
            await sync.send()
            await sync.completed()
            await sync.end()
            body = await seen.ready(4)
            assert await replica_digest(late.url) == expected_checksum(sync.seed)
            await traffic.wait_for_more(12)
        assert not traffic.failures()
        assert set(traffic.texts()) == {label_of(old), label_of(sync.seed)}
        # A response from before the catch-up would add a third text, or a second one for a label.
        assert [len(texts) for texts in traffic.texts().values()] == [1, 1]
        record = next(worker for worker in body["workers"] if worker["url"] == late.url)
        assert record["weight_version"] == label_of(sync.seed)
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(60):
            await seen.client.delete(f"/workers/{quote(late.url, safe='')}")
    await seen.ready(3)


async def test_a_version_is_rolled_back_if_a_worker_is_lost_and_the_worker_catches_up(
    seen, trainers
):
    victim, old = seen.fleet.replicas[0], seen.fleet.seed
    epoch = await assert_all_hold(seen, old)
    async with seen.fleet.changed(seen, on_failure='"rollback"'):
        sync = await ManualSync(seen, trainers.one(), world=WORLD).arm()
        await sync.send()
        victim.kill()
        assert victim.url in await sync.refused()
        await sync.end()
    body = await seen.until("/workers", lambda body: body["routable_workers"] == 2)
    assert {w["weight_version"] for w in body["workers"] if w["routable"]} == {label_of(old)}
    victim.start()
    traffic = Traffic(seen)
    async with traffic.keep_asking():
        await seen.ready(3)
        await traffic.wait_for_more(12)
    assert not traffic.failures()
    assert [(name, len(texts)) for name, texts in traffic.texts().items()] == [(label_of(old), 1)]
    assert await assert_all_hold(seen, old) > epoch


async def test_a_stored_version_can_be_rolled_back_to(seen, trainers):
    old = seen.fleet.seed
    await run_sync(seen, trainers)
    body = await seen.get_json("/weights/versions")
    stored = {entry["version"] for entry in body["versions"]}
    assert {label_of(old), label_of(seen.fleet.seed)} <= stored, body
    epoch = await assert_all_hold(seen, seen.fleet.seed)
    status, body = await seen.post("/weights/rollback", version=label_of(old))
    assert (status, body["success"]) == (200, True), body
    seen.fleet.seed = old
    await seen.ready()
    assert await assert_all_hold(seen, old) == epoch + 1
    status, body = await seen.post("/weights/rollback", version="never seen")
    assert (status, body["success"]) == (404, False), body
    assert await assert_all_hold(seen, old) == epoch + 1


async def test_a_trainer_that_dies_leaves_store_and_fleet_at_the_last_complete_version(
    seen, trainers
):
    sync = await ManualSync(seen, trainers.one(), world=WORLD).arm()
    await sync.send("half")
    sync.trainer.kill()
    assert await sync.refused()
    await wait_disarmed(seen)
    await seen.ready()
    await assert_all_hold(seen, seen.fleet.seed)
    versions = (await seen.get_json("/weights/versions"))["versions"]
    assert label_of(sync.seed) not in {entry["version"] for entry in versions}
    await run_sync(seen, trainers)


async def test_a_proxy_killed_during_a_sync_restarts_with_the_last_complete_version(seen, trainers):
    sync = await ManualSync(seen, trainers.one(), world=WORLD).arm()
    await sync.send("half")
    seen.fleet.kill_proxy()
    # A worker that has restarted meanwhile gets its weights from the store.
    victim = seen.fleet.replicas[2]
    victim.kill()
    victim.start()
    seen.fleet.start_proxy()
    sync.trainer.kill()
    await seen.ready()
    await assert_all_hold(seen, seen.fleet.seed)
    await run_sync(seen, trainers)

"""A fleet belongs to one trainer at a time, and every sync that starts is ended."""

from functools import partial
from urllib.parse import quote

import httpx
import pytest
import trio

from tests.promises.support.sync_program import (
    COMPLETE,
    DESTROY,
    FAR,
    INIT,
    PREPARE,
    healthy,
    init_body,
    replica_digest,
)
from tests.promises.support.sync_steps import (
    NOTICED_SECS,
    ManualSync,
    assert_all_hold,
    label_of,
    run_sync,
)
from tests.promises.support.sync_trainer import expected_checksum


@pytest.fixture(scope="module")
def running(fleets):
    return fleets.of("wide", "one")


@pytest.mark.parametrize("group", ["steps", "another"])
async def test_a_second_trainer_is_rejected_with_the_first_ones_name(seen, trainers, group):
    first, second = trainers.two()
    sync = await ManualSync(seen, first).arm()
    second.order("open", world=4, group=group, timeout=3)
    second_port = (await second.reply())["port"]
    status, body = await seen.post(INIT, **init_body(second_port, 4, group))
    assert (status, body["success"]) == (409, False), body
    assert f"127.0.0.1:{sync.port}" in body["message"]
    assert "'steps'" in body["message"]
    await sync.send()
    await sync.completed()
    await assert_all_hold(seen, sync.seed)
    await sync.end()
    second.kill()


async def test_a_new_trainer_replaces_a_dead_one(seen, trainers):
    first, _ = trainers.two()
    await ManualSync(seen, first).arm()
    first.kill()
    await run_sync(seen, trainers)


async def test_two_simultaneous_trainers_end_with_the_weights_of_the_first(seen, trainers):
    done = await run_sync(seen, trainers, fault="two-at-once")
    status, body = done["rival"]
    assert (status, body["success"]) == (409, False), body


async def test_a_caller_that_disconnects_cancels_nothing_and_can_retry(seen, trainers):
    sync = await ManualSync(seen, trainers.one()).arm()
    async with httpx.AsyncClient(base_url=seen.fleet.url, timeout=0.3, verify=False) as impatient:
        with pytest.raises(httpx.ReadTimeout):
            await impatient.post(COMPLETE, json=sync.ending)
    await sync.send()
    await sync.completed()
    await assert_all_hold(seen, sync.seed)
    await sync.end()


async def test_calls_in_the_wrong_state_are_refused_and_change_nothing(seen, trainers):
    for path in (PREPARE, COMPLETE, DESTROY):
        body = {"group_name": "steps", "names": ["a"], "dtypes": ["uint8"], "shapes": [[1]]}
        status, result = await seen.post(path, **body)
        assert (status, result["success"]) == (400, False), (path, result)
    sync = await ManualSync(seen, trainers.one()).join()
    assert await sync.refused()
    assert (await sync.prepare())[0] == 200
    status, result = await sync.prepare()
    assert (status, result["success"]) == (409, False), result
    await sync.send()
    await sync.completed()
    await sync.end()


async def test_adding_or_removing_a_worker_waits_for_the_end_of_the_sync(seen, trainers, fleets):
    late = fleets.replicas[FAR]
    members = {replica.url for replica in seen.fleet.replicas}
    sync = await ManualSync(seen, trainers.one()).join()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(seen.post, "/workers", url=late.url))
            assert (await sync.prepare())[0] == 200
            await sync.send()
            body = await sync.completed()
            assert {result["worker"] for result in body["results"]} == members
            await sync.end()
        body = await seen.until(
            "/workers",
            lambda body: [w["health_state"] for w in body["workers"]] == ["healthy"] * 3,
        )
        # The new worker has its first weights: it joins rotation only with the fleet's weights.
        record = next(worker for worker in body["workers"] if worker["url"] == late.url)
        assert not record["routable"]
        done = await trainers.one().tell(
            "sync", url=seen.fleet.url, seed=sync.seed, version=label_of(sync.seed)
        )
        assert done["why"] == "", done
        await seen.ready(3)
        assert await replica_digest(late.url) == expected_checksum(sync.seed)
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(60):
            deleted = await seen.client.delete(f"/workers/{quote(late.url, safe='')}")
    assert deleted.status_code == 200, deleted.text


async def test_a_replica_that_dies_before_the_end_is_named_and_leaves_rotation(seen, trainers):
    survivor, victim = seen.fleet.replicas
    before = seen.fleet.seed
    sync = await ManualSync(seen, trainers.one()).arm()
    await sync.send()
    victim.kill()
    assert victim.url in await sync.refused()
    await sync.end(good=False)
    victim.start()
    await healthy(victim.url)
    body = await seen.until(
        "/workers",
        lambda body: [w["health_state"] for w in body["workers"]] == ["healthy"] * 2,
    )
    for worker in body["workers"]:
        assert worker["url"] == survivor.url or not worker["routable"], worker
        if worker["routable"]:
            label_of_checksum = {
                expected_checksum(seed): label_of(seed) for seed in (before, sync.seed)
            }
            assert (
                worker["weight_version"] == label_of_checksum[await replica_digest(worker["url"])]
            )
    await run_sync(seen, trainers)


async def test_a_dead_replica_ends_an_idle_sync_within_seconds(seen, trainers):
    survivor, victim = seen.fleet.replicas
    sync = await ManualSync(seen, trainers.one()).arm()
    victim.kill()
    with trio.fail_after(NOTICED_SECS):  # all configured timeouts are longer
        body = await seen.until("/weights", lambda body: body["sync"]["state"] == "idle")
    assert body["sync"]["last_cause"].startswith(f"{victim.url} is lost"), body
    assert survivor.url not in body["uncertain"]
    sync.trainer.kill()
    victim.start()
    await healthy(victim.url)
    await run_sync(seen, trainers)


async def test_a_proxy_killed_during_a_sync_routes_to_no_worker_with_unknown_weights(
    seen, trainers
):
    if not seen.fleet.seed:
        await run_sync(seen, trainers)
    sync = await ManualSync(seen, trainers.one()).arm()
    await sync.send("half")
    seen.fleet.kill_proxy()
    seen.fleet.start_proxy()
    sync.trainer.kill()
    # The digests prove that nothing was applied, so no repair is needed.
    await seen.whole()
    await assert_all_hold(seen, seen.fleet.seed)
    await run_sync(seen, trainers)

"""A fleet belongs to one trainer at a time, and every sync that begins is ended."""

from functools import partial
from urllib.parse import quote

import httpx
import pytest
import trio

from tests.promises.sync_program import (
    COMPLETE,
    DESTROY,
    FAR,
    INIT,
    PREPARE,
    healthy,
    init_body,
    replica_digest,
)
from tests.promises.sync_steps import NOTICED_SECS, ManualSync, assert_all_hold, label_of, run_sync
from tests.promises.sync_trainer import expected_checksum


@pytest.fixture(scope="module")
def running(fleets):
    return fleets.of("wide", "one")


@pytest.mark.parametrize("group", ["steps", "another"])
async def test_a_second_trainer_is_refused_by_name_and_the_first_one_finishes(
    seen, trainers, group
):
    first, second = trainers.two()
    begun = await ManualSync(seen, first).arm()
    second.order("open", world=4, group=group, timeout=3)
    other = (await second.reply())["port"]
    status, body = await seen.post(INIT, **init_body(other, 4, group))
    assert (status, body["success"]) == (409, False), body
    assert f"127.0.0.1:{begun.port}" in body["message"]
    assert "'steps'" in body["message"]
    await begun.send()
    await begun.completed()
    await assert_all_hold(seen, begun.seed)
    await begun.end()
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


async def test_a_caller_that_disconnects_cancels_nothing_and_gets_the_result_on_retry(
    seen, trainers
):
    begun = await ManualSync(seen, trainers.one()).arm()
    async with httpx.AsyncClient(base_url=seen.fleet.url, timeout=0.3, verify=False) as impatient:
        with pytest.raises(httpx.ReadTimeout):
            await impatient.post(COMPLETE, json=begun.ending)
    await begun.send()
    await begun.completed()
    await assert_all_hold(seen, begun.seed)
    await begun.end()


async def test_calls_in_the_wrong_state_are_refused_and_change_nothing(seen, trainers):
    for path in (PREPARE, COMPLETE, DESTROY):
        body = {"group_name": "steps", "names": ["a"], "dtypes": ["uint8"], "shapes": [[1]]}
        status, reported = await seen.post(path, **body)
        assert (status, reported["success"]) == (400, False), (path, reported)
    begun = await ManualSync(seen, trainers.one()).join()
    assert await begun.refused()
    assert (await begun.prepare())[0] == 200
    status, reported = await begun.prepare()
    assert (status, reported["success"]) == (409, False), reported
    await begun.send()
    await begun.completed()
    await begun.end()


async def test_adding_or_removing_a_worker_waits_for_the_end_of_the_sync(seen, trainers, fleets):
    late = fleets.replicas[FAR]
    members = {each.url for each in seen.fleet.replicas}
    begun = await ManualSync(seen, trainers.one()).join()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(seen.post, "/workers", url=late.url))
            assert (await begun.prepare())[0] == 200
            await begun.send()
            body = await begun.completed()
            assert {each["worker"] for each in body["results"]} == members
            await begun.end()
        body = await seen.until(
            "/workers",
            lambda body: [w["health_state"] for w in body["workers"]] == ["healthy"] * 3,
        )
        # It restarted with its first weights: back in rotation only with the fleet's weights.
        record = next(each for each in body["workers"] if each["url"] == late.url)
        assert not record["routable"]
        done = await trainers.one().tell(
            "sync", url=seen.fleet.url, seed=begun.seed, version=label_of(begun.seed)
        )
        assert done["why"] == "", done
        await seen.ready(3)
        assert await replica_digest(late.url) == expected_checksum(begun.seed)
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(60):
            gone = await seen.client.delete(f"/workers/{quote(late.url, safe='')}")
    assert gone.status_code == 200, gone.text


async def test_a_replica_that_dies_before_the_end_is_named_and_left_out_until_it_recovers(
    seen, trainers
):
    survivor, victim = seen.fleet.replicas
    before = seen.fleet.seed
    begun = await ManualSync(seen, trainers.one()).arm()
    await begun.send()
    victim.kill()
    assert victim.url in await begun.refused()
    await begun.end(good=False)
    victim.start()
    await healthy(victim.url)
    body = await seen.until(
        "/workers",
        lambda body: [w["health_state"] for w in body["workers"]] == ["healthy"] * 2,
    )
    for each in body["workers"]:
        assert each["url"] == survivor.url or not each["routable"], each
        if each["routable"]:
            known = {expected_checksum(seed): label_of(seed) for seed in (before, begun.seed)}
            assert each["weight_version"] == known[await replica_digest(each["url"])]
    await run_sync(seen, trainers)


async def test_a_dead_replica_ends_an_idle_sync_within_seconds(seen, trainers):
    survivor, victim = seen.fleet.replicas
    begun = await ManualSync(seen, trainers.one()).arm()
    victim.kill()
    with trio.fail_after(NOTICED_SECS):  # all timeouts of FILE are longer
        body = await seen.until("/weights", lambda body: body["sync"]["state"] == "idle")
    assert body["sync"]["last_cause"].startswith(f"{victim.url} is lost"), body
    assert survivor.url not in body["uncertain"]
    begun.trainer.kill()
    victim.start()
    await healthy(victim.url)
    await run_sync(seen, trainers)


async def test_a_proxy_killed_during_a_sync_routes_to_no_worker_with_unknown_weights(
    seen, trainers
):
    if not seen.fleet.seed:
        await run_sync(seen, trainers)
    begun = await ManualSync(seen, trainers.one()).arm()
    await begun.send("half")
    seen.fleet.kill_proxy()
    seen.fleet.start_proxy()
    begun.trainer.kill()
    # Nothing was applied, which the digests prove: no repair is needed.
    await seen.whole()
    await assert_all_hold(seen, seen.fleet.seed)
    await run_sync(seen, trainers)

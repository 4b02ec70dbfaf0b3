"""A fleet belongs to one trainer at a time, and what was begun is brought to an end."""

from functools import partial

import httpx
import pytest
import trio

from tests.promises.sync_program import (
    COMPLETE,
    DESTROY,
    INIT,
    PREPARE,
    Replica,
    fleet,
    healthy,
    init_body,
    replica_digest,
)
from tests.promises.sync_trainer import Trainers, checksum

pytest.importorskip("torch")
pytest.importorskip("tiktoken")


@pytest.fixture(autouse=True)
async def soon():
    with trio.fail_after(60):
        yield


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with fleet(tmp_path_factory.mktemp("owner"), (), ()) as it:
        yield it


@pytest.fixture(scope="module")
def trainers():
    made = Trainers()
    yield made
    made.close()


@pytest.fixture
async def seen(running):
    async with running.client() as it:
        await it.ready()
        yield it


async def join(seen, trainer, group="steps"):
    trainer.order("open", world=3, group=group)
    port = (await trainer.reply())["port"]
    answer = await seen.post(INIT, **init_body(port, 3, group))
    return port, answer


async def prepare(seen, trainer, seed, group="steps"):
    buckets = (await trainer.tell("announce", seed=seed))["buckets"]
    return await seen.post(PREPARE, num_buckets=len(buckets), buckets=buckets, group_name=group)


@pytest.mark.parametrize("group", ["steps", "another"])
async def test_a_second_trainer_is_told_whose_turn_it_is_and_the_first_one_finishes(
    seen, trainers, group
):
    first, second = trainers.two()
    port, (status, told) = await join(seen, first)
    assert (status, await first.reply()) == (200, {"joined": True}), told
    assert (await prepare(seen, first, 3))[0] == 200
    second.order("open", world=3, group=group, timeout=3)
    other = (await second.reply())["port"]
    status, told = await seen.post(INIT, **init_body(other, 3, group))
    assert (status, told["success"]) == (409, False), told
    assert f"127.0.0.1:{port}" in told["message"]
    assert "'steps'" in told["message"]
    assert await first.tell("send", seed=3) == {"sent": True}
    status, told = await seen.post(COMPLETE, group_name="steps", weight_version="v3")
    assert (status, told["success"]) == (200, True), told
    assert set((await seen.digests()).values()) == {checksum(3)}
    assert (await seen.post(DESTROY, group_name="steps"))[0] == 200
    assert "fault" in await second.reply()
    await first.tell("leave")


async def test_who_comes_after_a_dead_trainer_takes_its_place(seen, trainers):
    first, second = trainers.two()
    _, (status, told) = await join(seen, first)
    assert (status, await first.reply()) == (200, {"joined": True}), told
    assert (await prepare(seen, first, 4))[0] == 200
    first.kill()
    done = await second.tell("sync", url=seen.fleet.url, seed=5, version="v5")
    assert done["why"] == "", done
    assert set((await seen.digests()).values()) == {checksum(5)}


async def test_the_fault_of_two_at_once_ends_with_the_first_ones_weights(seen, trainers):
    done = await trainers.one().tell(
        "sync", url=seen.fleet.url, seed=6, version="v6", fault="two-at-once"
    )
    assert done["why"] == "", done
    status, told = done["rival"]
    assert (status, told["success"]) == (409, False)
    assert set((await seen.digests()).values()) == {checksum(6)}


async def test_a_caller_that_hangs_up_stops_nothing_and_hears_the_outcome_when_it_asks_again(
    seen, trainers
):
    trainer = trainers.one()
    _, (status, told) = await join(seen, trainer)
    assert (status, await trainer.reply()) == (200, {"joined": True}), told
    assert (await prepare(seen, trainer, 7))[0] == 200
    body = {"group_name": "steps", "flush_cache": True, "weight_version": "v7"}
    async with httpx.AsyncClient(base_url=seen.fleet.url, timeout=0.3) as impatient:
        with pytest.raises(httpx.ReadTimeout):
            await impatient.post(COMPLETE, json=body)
    assert await trainer.tell("send", seed=7) == {"sent": True}
    status, told = await seen.post(COMPLETE, **body)
    assert (status, told["success"]) == (200, True), told
    assert set((await seen.digests()).values()) == {checksum(7)}
    assert {version for version, _ in (await seen.versions()).values()} == {"v7"}
    assert (await seen.post(DESTROY, group_name="steps"))[0] == 200
    await trainer.tell("leave")


async def test_calls_out_of_place_are_refused_and_change_nothing(seen, trainers):
    for path in (PREPARE, COMPLETE, DESTROY):
        body = {"group_name": "steps", "names": ["a"], "dtypes": ["uint8"], "shapes": [[1]]}
        status, told = await seen.post(path, **body)
        assert (status, told["success"]) == (400, False), (path, told)
    trainer = trainers.one()
    _, (status, told) = await join(seen, trainer)
    assert (status, await trainer.reply()) == (200, {"joined": True}), told
    status, told = await seen.post(COMPLETE, group_name="steps")
    assert (status, told["success"]) == (400, False), told
    assert (await prepare(seen, trainer, 8))[0] == 200
    status, told = await prepare(seen, trainer, 8)
    assert (status, told["success"]) == (409, False), told
    assert await trainer.tell("send", seed=8) == {"sent": True}
    status, told = await seen.post(COMPLETE, group_name="steps", weight_version="v8")
    assert (status, told["success"]) == (200, True), told
    assert (await seen.post(DESTROY, group_name="steps"))[0] == 200
    await trainer.tell("leave")


async def test_who_joins_or_leaves_in_the_middle_waits_for_its_end(seen, trainers, tmp_path):
    trainer = trainers.one()
    _, (status, told) = await join(seen, trainer)
    assert (status, await trainer.reply()) == (200, {"joined": True}), told
    late = Replica()
    late.start(tmp_path / "late.log")
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(seen.post, "/workers", url=late.url))
            assert (await prepare(seen, trainer, 9))[0] == 200
            assert await trainer.tell("send", seed=9) == {"sent": True}
            status, told = await seen.post(COMPLETE, group_name="steps", weight_version="v9")
            assert (status, told["success"]) == (200, True), told
            assert {each["worker"] for each in told["results"]} == {
                each.url for each in seen.fleet.replicas
            }
            assert (await seen.post(DESTROY, group_name="steps"))[0] == 200
        await trainer.tell("leave")
        told = await seen.until(
            "/workers",
            lambda told: [w["health_state"] for w in told["workers"]] == ["healthy"] * 3,
        )
        # It has what it was started with: in routing only by weights that are the fleet's.
        record = next(each for each in told["workers"] if each["url"] == late.url)
        assert not record["routable"]
        done = await trainer.tell("sync", url=seen.fleet.url, seed=10, version="v10")
        assert done["why"] == "", done
        await seen.ready(3)
        assert await replica_digest(late.url) == checksum(10)
        assert (await seen.client.delete(f"/workers/{record['id']}")).status_code == 200
    finally:
        late.kill()


async def test_a_replica_that_dies_before_the_end_is_named_and_out_until_it_is_mended(
    seen, trainers
):
    victim, survivor = seen.fleet.replicas
    trainer = trainers.one()
    _, (status, told) = await join(seen, trainer)
    assert (status, await trainer.reply()) == (200, {"joined": True}), told
    assert (await prepare(seen, trainer, 12))[0] == 200
    assert await trainer.tell("send", seed=12) == {"sent": True}
    victim.kill()
    status, told = await seen.post(COMPLETE, group_name="steps", weight_version="v12")
    assert (status >= 400, told["success"], told["status"]) == (True, False, "error"), told
    assert victim.url in told["message"]
    await seen.post(DESTROY, group_name="steps")
    await trainer.tell("leave")
    victim.start(seen.fleet.folder / "replica-0.log")
    await healthy(victim.url)
    told = await seen.until(
        "/workers",
        lambda told: [w["health_state"] for w in told["workers"]] == ["healthy"] * 2,
    )
    for each in told["workers"]:
        assert each["url"] == survivor.url or not each["routable"], each
        if each["routable"]:
            label = {checksum(10): "v10", checksum(12): "v12"}[await replica_digest(each["url"])]
            assert each["weight_version"] == label
    done = await trainers.one().tell("sync", url=seen.fleet.url, seed=13, version="v13")
    assert done["why"] == "", done
    await seen.ready()
    assert set((await seen.digests()).values()) == {checksum(13)}

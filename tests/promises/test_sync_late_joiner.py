"""The proxy receives once for all: workers that come late, go early or were restarted catch up
before they answer anybody, and any version that is kept can be gone back to."""

import pytest
import trio

from tests.promises.sync_program import (
    COMPLETE,
    INIT,
    PREPARE,
    Replica,
    Traffic,
    fleet,
    init_body,
    replica_digest,
)
from tests.promises.sync_trainer import Trainers, checksum

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
pytest.importorskip("safetensors.torch")

WORLD = 2  # the trainer, and the proxy for everybody behind it


@pytest.fixture(autouse=True)
async def soon():
    with trio.fail_after(90):
        yield


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with fleet(tmp_path_factory.mktemp("receive"), (), (), (), mode="receive") as it:
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


async def sync(seen, trainers, seed, **wishes):
    done = await trainers.one().tell(
        "sync", url=seen.fleet.url, seed=seed, version=f"v{seed}", **wishes
    )
    assert done["why"] == "", done
    await seen.ready()
    await holds(seen, seed)
    return done


async def holds(seen, seed):
    assert set((await seen.digests()).values()) == {checksum(seed)}
    assert {version for version, _ in (await seen.versions()).values()} == {f"v{seed}"}


async def armed(seen, trainer, seed):
    """A sync that is prepared, by hand."""
    trainer.order("open", world=WORLD)
    port = (await trainer.reply())["port"]
    status, told = await seen.post(INIT, **init_body(port, WORLD))
    assert (status, await trainer.reply()) == (200, {"joined": True}), told
    buckets = (await trainer.tell("announce", seed=seed))["buckets"]
    status, told = await seen.post(
        PREPARE, num_buckets=len(buckets), buckets=buckets, group_name="steps"
    )
    assert (status, told["status"]) == (200, "ready"), told


@pytest.mark.parametrize(
    ("seed", "wishes"),
    [
        (1, {"form": "two-phase", "bucket_bytes": 1 << 20}),
        (2, {"form": "buckets", "bucket_bytes": 1 << 20}),
        (3, {"form": "single"}),
        (4, {"form": "two-phase", "load_format": "flattened_bucket"}),
    ],
    ids=["two-phase", "buckets", "single", "flattened"],
)
async def test_a_trainer_sends_once_and_every_worker_has_it(seen, trainers, seed, wishes):
    assert (await seen.told("/server_info"))["tp_size"] == WORLD - 1
    await sync(seen, trainers, seed, **wishes)


async def test_a_worker_that_is_added_in_the_middle_answers_nobody_by_older_weights(
    seen, trainers, tmp_path
):
    await sync(seen, trainers, 5)
    trainer = trainers.one()
    await armed(seen, trainer, 6)
    late = Replica()
    late.start(tmp_path / "late.log")
    traffic = Traffic(seen)
    try:
        async with traffic.going_on():
            added = await seen.client.post("/workers", json={"url": late.url})
            assert added.status_code < 300, added.text
            assert await trainer.tell("send", seed=6) == {"sent": True}
            status, told = await seen.post(COMPLETE, group_name="steps", weight_version="v6")
            assert (status, told["success"]) == (200, True), told
            await seen.post("/destroy_weights_update_group", group_name="steps")
            told = await seen.ready(4)
            assert await replica_digest(late.url) == checksum(6)
            await traffic.some_more(12)
        assert not traffic.failures()
        assert set(traffic.texts()) == {"v5", "v6"}
        # What it answered before it caught up would be a third text, or a second under a label.
        assert [len(texts) for texts in traffic.texts().values()] == [1, 1]
        record = next(each for each in told["workers"] if each["url"] == late.url)
        assert record["weight_version"] == "v6"
        removed = await seen.client.delete(f"/workers/{record['id']}")
        assert removed.status_code < 300, removed.text
    finally:
        late.kill()
    await trainer.tell("leave")
    await seen.ready(3)


async def test_a_worker_that_is_restarted_has_the_fleets_weights_before_it_is_asked_again(
    seen, trainers
):
    await sync(seen, trainers, 7)
    victim = seen.fleet.replicas[0]
    victim.kill()
    await seen.until("/workers", lambda told: told["routable_workers"] == 2)
    victim.start(seen.fleet.folder / "replica-0.log")
    traffic = Traffic(seen)
    async with traffic.going_on():
        await seen.ready(3)
        await traffic.some_more(12)
    assert not traffic.failures()
    assert set(traffic.texts()) == {"v7"}
    assert len(traffic.texts()["v7"]) == 1
    await holds(seen, 7)


async def test_a_version_that_is_kept_can_be_gone_back_to(seen, trainers):
    await sync(seen, trainers, 8)
    await sync(seen, trainers, 9)
    told = await seen.told("/weights/versions")
    assert {"v8", "v9"} <= {each["version"] for each in told["versions"]}, told
    epoch = max(epoch for _, epoch in (await seen.versions()).values())
    status, told = await seen.post("/weights/rollback", version="v8")
    assert (status, told["success"]) == (200, True), told
    await seen.ready()
    await holds(seen, 8)
    assert {found for _, found in (await seen.versions()).values()} == {epoch + 1}
    status, told = await seen.post("/weights/rollback", version="never seen")
    assert (status, told["success"]) == (404, False), told
    await holds(seen, 8)


async def test_a_trainer_that_dies_leaves_the_store_and_the_fleet_with_the_last_whole_version(
    seen, trainers
):
    await sync(seen, trainers, 10)
    trainer = trainers.one()
    await armed(seen, trainer, 11)
    assert await trainer.tell("send", seed=11, part="half") == {"sent": True}
    trainer.kill()
    status, told = await seen.post(COMPLETE, group_name="steps", weight_version="v11")
    assert (status >= 400, told["success"]) == (True, False), told
    await seen.ready()
    await holds(seen, 10)
    versions = (await seen.told("/weights/versions"))["versions"]
    assert "v11" not in {each["version"] for each in versions}
    await sync(seen, trainers, 12)


async def test_a_proxy_that_is_killed_in_the_middle_comes_back_to_the_last_whole_version(
    seen, trainers
):
    await sync(seen, trainers, 13)
    trainer = trainers.one()
    await armed(seen, trainer, 14)
    assert await trainer.tell("send", seed=14, part="half") == {"sent": True}
    seen.fleet.kill_proxy()
    # A worker that has lost its weights meanwhile gets them from the store.
    victim = seen.fleet.replicas[1]
    victim.kill()
    victim.start(seen.fleet.folder / "replica-1.log")
    seen.fleet.start_proxy()
    trainer.kill()
    await seen.ready()
    await holds(seen, 13)
    answer = await seen.chat()
    assert (answer.status_code, answer.headers["x-omni-weight-version"]) == (200, "v13")
    await sync(seen, trainers, 15)

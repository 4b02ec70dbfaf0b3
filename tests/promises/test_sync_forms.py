"""A trainer's new weights reach every replica whole, in each form that trainers send them in."""

import pytest
import trio

from tests.promises.sync_program import COMPLETE, DESTROY, INIT, PREPARE, fleet, init_body
from tests.promises.sync_trainer import Trainers, checksum

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
pytest.importorskip("safetensors.torch")

MIB = 1 << 20


@pytest.fixture(autouse=True)
async def soon():
    with trio.fail_after(60):
        yield


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with fleet(tmp_path_factory.mktemp("forms"), ("--tp", "2"), ()) as it:
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


async def holds(seen, seed, label):
    """Every replica has the weights of this seed, and everybody who is asked says so."""
    assert set((await seen.digests()).values()) == {checksum(seed)}
    versions = await seen.versions()
    assert {version for version, _ in versions.values()} == {label}
    assert len({epoch for _, epoch in versions.values()}) == 1
    answer = await seen.chat()
    assert (answer.status_code, answer.headers["x-omni-weight-version"]) == (200, label)
    return int(answer.headers["x-omni-weight-epoch"])


async def test_a_version_is_seen_when_every_replica_has_all_of_it_and_not_before(seen, trainers):
    trainer = trainers.one()
    before = await seen.digests(), await seen.versions(), (await seen.chat()).text
    label_before = (await seen.chat()).headers["x-omni-weight-version"]
    trainer.order("open", world=4)
    port = (await trainer.reply())["port"]
    assert (await seen.post(INIT, **init_body(port, 4)))[0] == 200
    assert await trainer.reply() == {"joined": True}
    buckets = (await trainer.tell("announce", seed=11))["buckets"]
    assert len(buckets) > 2
    status, told = await seen.post(
        PREPARE, num_buckets=len(buckets), buckets=buckets, group_name="steps"
    )
    assert (status, told["status"], told["success"]) == (200, "ready", True), told
    assert await trainer.tell("send", seed=11) == {"sent": True}
    assert (await seen.digests(), await seen.versions()) == before[:2]
    assert (await seen.chat()).headers["x-omni-weight-version"] == label_before
    status, told = await seen.post(
        COMPLETE, group_name="steps", flush_cache=True, weight_version="v11"
    )
    assert (status, told["success"]) == (200, True), told
    assert told["num_buckets_received"] == len(buckets)
    assert told["weight_version"] == "v11"
    assert await holds(seen, 11, "v11") > max(epoch for _, epoch in before[1].values())
    assert (await seen.post(DESTROY, group_name="steps"))[0] == 200
    await trainer.tell("leave")
    assert await holds(seen, 11, "v11")


@pytest.mark.parametrize(
    ("seed", "wishes"),
    [
        (21, {"form": "two-phase", "bucket_bytes": MIB}),
        (22, {"form": "two-phase", "load_format": "flattened_bucket", "bucket_bytes": MIB}),
        (23, {"form": "buckets", "bucket_bytes": MIB}),
        (24, {"form": "buckets", "load_format": "flattened_bucket", "bucket_bytes": MIB}),
        (25, {"form": "single", "bucket_bytes": MIB}),
        (26, {"form": "single", "session": True, "bucket_bytes": MIB}),
        (27, {"form": "single", "load_format": "flattened_bucket"}),
        (28, {"form": "two-phase", "pause_mode": "in_place"}),
        (29, {"form": "two-phase", "pause_mode": "abort"}),
        (30, {"form": "two-phase", "pause_mode": None}),
        (31, {"form": "disk"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
async def test_every_form_of_a_sync_gives_every_replica_the_trainers_bytes(
    seen, trainers, seed, wishes
):
    epoch = int((await seen.chat()).headers.get("x-omni-weight-epoch", 0))
    done = await trainers.one().tell(
        "sync", url=seen.fleet.url, seed=seed, version=f"v{seed}", **wishes
    )
    assert done["why"] == "", done
    assert await holds(seen, seed, f"v{seed}") == epoch + 1


async def test_a_second_sync_needs_nothing_to_be_tidied_up_by_hand(seen, trainers):
    trainer = trainers.one()
    for seed in (41, 42, 43):
        done = await trainer.tell("sync", url=seen.fleet.url, seed=seed, version=f"v{seed}")
        assert done["why"] == "", done
        await holds(seen, seed, f"v{seed}")

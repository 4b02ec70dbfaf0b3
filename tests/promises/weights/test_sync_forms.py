"""All of a trainer's new weights reach every replica, in each form that trainers use."""

import json

import pytest

from tests.promises.support.sync_steps import ManualSync, assert_all_hold, label_of, run_sync


@pytest.fixture(scope="module")
def running(fleets):
    return fleets.of("wide", "one")


async def test_a_version_is_published_only_when_every_replica_has_all_of_it(seen, trainers):
    sync = ManualSync(seen, trainers.one())
    epoch = await assert_all_hold(seen, seen.fleet.seed)
    await sync.arm()
    await sync.send()
    assert await assert_all_hold(seen, seen.fleet.seed) == epoch
    body = await sync.completed()
    assert body["num_buckets_received"] == len((await sync.announced())["buckets"]) > 2
    assert body["weight_version"] == label_of(sync.seed)
    assert await assert_all_hold(seen, sync.seed) == epoch + 1
    await sync.end()
    assert await assert_all_hold(seen, sync.seed) == epoch + 1


@pytest.mark.parametrize(
    "options",
    [
        {"form": "two-phase"},
        {"form": "two-phase", "load_format": "flattened_bucket"},
        {"form": "buckets"},
        {"form": "buckets", "load_format": "flattened_bucket"},
        {"form": "single"},
        {"form": "single", "session": True},
        {"form": "single", "load_format": "flattened_bucket"},
        {"form": "two-phase", "pause_mode": "in_place"},
        {"form": "two-phase", "pause_mode": "abort"},
        {"form": "two-phase", "pause_mode": None},
        {"form": "disk"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
async def test_every_form_of_a_sync_gives_every_replica_the_trainers_bytes(seen, trainers, options):
    epoch = await assert_all_hold(seen, seen.fleet.seed)
    await run_sync(seen, trainers, **options)
    assert await assert_all_hold(seen, seen.fleet.seed) == epoch + 1


async def test_a_file_with_a_wrong_shape_is_rejected_with_an_error(seen, trainers):
    trainer = trainers.one()
    arguments = ["--endpoint", seen.fleet.url, "--sync", "disk", "--rounds", "1", "--steps", "1"]
    done = await trainer.tell("program", words=[*arguments, "--fault", "wrong-shape"])
    trainer.kill()  # its timeout would end it during another test
    assert done["status"] == 1, done
    assert "has the shape [513, 128]" in done["errors"]
    assert (await seen.chat()).headers["x-omni-weight-version"] == label_of(seen.fleet.seed)


async def test_the_documented_trainer_updates_all_replicas_and_exits_with_a_status(seen, trainers):
    arguments = ["--endpoint", seen.fleet.url, "--json", "--bucket-mb", "1", "--steps", "2"]
    trainer = trainers.one()
    trained = await trainer.tell("program", words=[*arguments, "--rounds", "2"])
    assert trained["status"] == 0, trained
    start, first, second = map(json.loads, trained["out"].splitlines())
    assert second["loss"] < first["loss"]
    assert set(second["checksums"].values()) == {second["own_checksum"]}
    assert len(second["checksums"]) == 2
    assert (second["version"], second["good"]) == ("step-2", True)
    assert len({line["answer"] for line in (start, first, second)}) == 3
    refused = await trainer.tell(
        "program", words=[*arguments, "--rounds", "1", "--fault", "wrong-shape"]
    )
    trainer.kill()  # its timeout would end it during another test
    assert refused["status"] == 1, refused
    body = json.loads(refused["out"].splitlines()[-1])
    assert "has the shape [513, 128]" in body["why"]
    assert (body["version"], body["good"]) == ("step-2", False)

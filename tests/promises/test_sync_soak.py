"""Sync after sync under traffic, some of them aborted: no client notices, and nothing grows."""

import pytest
import trio

from tests.promises.sync_program import Held, Traffic, fleet
from tests.promises.sync_trainer import Trainers, checksum

pytest.importorskip("torch")
pytest.importorskip("tiktoken")

FORMS = [
    {"form": "two-phase", "bucket_bytes": 1 << 20},
    {"form": "buckets", "bucket_bytes": 1 << 20},
]
FAULTS = ["wrong-shape", "short-bucket", "die-during", "die-before"]
SLACK = {"children": 2, "threads": 4, "files": 10, "mib": 60.0, "shared_mib": 8.0}
DRAIN = 'drain_secs = 20\n[routing]\nwhile_paused = "hold"'


@pytest.fixture(autouse=True)
async def soon():
    with trio.fail_after(120):
        yield


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    with fleet(folder, (), ("--tp", "2"), (), more=DRAIN) as it:
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


async def one(seen, trainers, seed, **wishes):
    trainer = trainers.one()
    done = await trainer.tell("sync", url=seen.fleet.url, seed=seed, version=f"v{seed}", **wishes)
    assert done.get("why") == "", done
    assert set((await seen.digests()).values()) == {checksum(seed)}
    assert {version for version, _ in (await seen.versions()).values()} == {f"v{seed}"}


async def test_twenty_syncs_in_a_row_pass_under_traffic_unnoticed_and_nothing_grows(seen, trainers):
    assert (await seen.told("/server_info"))["tp_size"] == 4
    traffic = Traffic(seen, clients=2)
    async with traffic.going_on():
        for seed in range(101, 105):  # what is kept for the next time is there after these
            await one(seen, trainers, seed, **FORMS[seed % 2])
        before = Held(seen.fleet.processes())
        for seed in range(105, 125):
            await one(seen, trainers, seed, **FORMS[seed % 2])
        after = Held(seen.fleet.processes())
    assert not traffic.failures()
    assert not traffic.spanning()
    mixed = {label: texts for label, texts in traffic.texts().items() if len(texts) > 1}
    assert not mixed
    assert grown(before, after) == [], (before, after)


async def test_syncs_that_are_aborted_in_between_leave_nothing_behind(seen, trainers):
    for round_ in range(2):
        await aborted_ones(seen, trainers, 200 + 10 * round_)
        if not round_:
            before = Held(seen.fleet.processes())
    after = Held(seen.fleet.processes())
    assert grown(before, after) == [], (before, after)


async def aborted_ones(seen, trainers, seed):
    for number, fault in enumerate(FAULTS):
        trainer = trainers.one()
        done = await trainer.tell(
            "sync",
            url=seen.fleet.url,
            seed=seed,
            version="never",
            fault=fault,
            bucket_bytes=1 << 20,
            timeout_secs=20.0,
        )
        assert done.get("gone") or done["why"], (fault, done)
        await one(seen, trainers, seed + number + 1)
        await seen.ready()


def grown(before, after):
    """What has grown by more than chance: descriptors, threads and children come and go by two."""
    rows = [
        (name, getattr(before, name), getattr(after, name), slack) for name, slack in SLACK.items()
    ]
    return [(name, was, now) for name, was, now, slack in rows if now > was + slack]

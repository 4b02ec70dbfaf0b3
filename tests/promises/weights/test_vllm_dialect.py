"""Trainers for vLLM use a fleet like one engine: rounds by vLLM's routes under traffic."""

import httpx
import pytest
import trio

from tests.example_counts import thorough
from tests.promises.support.sync_program import PATIENCE_SECS, Fleet, Replica, healthy
from tests.promises.support.sync_traffic import Traffic
from tests.promises.support.sync_trainer import expected_checksum

for name in ("torch", "tiktoken", "safetensors.torch"):
    pytest.importorskip(name)

ROUNDS = 20 if thorough() else 6
FIRST = "default"  # vLLM's label for the weights that an engine starts with
OPTIONS = (
    {"pause_mode": None, "chunks": 3},
    {"pause_mode": "keep", "chunks": 2},
    {"pause_mode": "wait", "packed_bytes": 100_000},
    {"pause_mode": "abort"},
)


class VllmFleet:
    """Two replicas with the given dialects, and a proxy."""

    def __init__(self, folder, *dialects, **settings):
        self.replicas = [
            Replica(folder / f"{number}.log", "--dialect", dialect)
            for number, dialect in enumerate(dialects)
        ]
        for replica in self.replicas:
            replica.start()
        self.fleet = Fleet(folder, self.replicas, (dialects, "coordinate", settings))

    def close(self):
        try:
            self.fleet.close()
        finally:
            for replica in self.replicas:
                replica.kill()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    started = VllmFleet(tmp_path_factory.mktemp("vllm"), "vllm", "vllm", drain_secs=20)
    yield started.fleet
    started.close()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    started = VllmFleet(tmp_path_factory.mktemp("mixed"), "vllm", "sglang", drain_secs=20)
    yield started.fleet
    started.close()


@pytest.fixture
async def seen(running):
    async with running.client() as client:
        with trio.fail_after(2 * PATIENCE_SECS):
            await client.ready()
            yield client


async def digest_of(url):
    """Returns the checksum over all tensors of the replica, computed by the replica."""
    from omni_proxy.process_group.broadcast.tensor_hashing import roll_up

    async with httpx.AsyncClient(
        base_url=url, timeout=PATIENCE_SECS, trust_env=False, verify=False
    ) as client:
        body = (await client.post("/weight_checker", json={"action": "checksum"})).json()
    return roll_up({name.split(":")[-1]: value for name, value in body["checksums"].items()})


async def run_round(seen, trainer, seed, **options):
    """Runs a whole round, after which all workers have this version."""
    done = await trainer.tell(
        "transfer", url=seen.fleet.url, seed=seed, version=f"v{seed}", **options
    )
    assert done.get("why") == "", (done, seen.fleet.log()[-3000:])
    return done


async def assert_all_hold(seen, seed):
    versions = await seen.versions()
    assert {label for label, _ in versions.values()} == {f"v{seed}"}, versions
    for url in versions:
        assert await digest_of(url) == expected_checksum(seed)


def mixed_texts(traffic):
    """Returns labels with more than one text: an error, as all requests are equal and greedy."""
    return {label: texts for label, texts in traffic.texts().items() if len(texts) > 1}


async def test_under_traffic_rounds_mix_no_response_and_fail_no_request(seen, trainers):
    trainer, traffic = trainers.one(), Traffic(seen, clients=3)
    ranks = (await seen.get_json("/get_world_size"))["world_size"]
    assert ranks == 2
    epochs = [(await seen.get_json("/weights"))["weight_epoch"]]
    async with traffic.keep_asking():
        for seed in range(1, ROUNDS + 1):
            options = OPTIONS[seed * len(OPTIONS) // (ROUNDS + 1)]
            await run_round(seen, trainer, seed, **options)
            await assert_all_hold(seen, seed)
            body = await seen.get_json("/weights")
            epochs.append(body["weight_epoch"])
            assert body["weight_version"] == f"v{seed}"
            await traffic.wait_for_more(2)
    assert epochs == list(range(epochs[0], epochs[0] + ROUNDS + 1))
    assert not traffic.failures()
    assert not traffic.spanning()
    assert not mixed_texts(traffic)
    assert set(traffic.texts()) >= {f"v{seed}" for seed in range(1, ROUNDS + 1)}
    await trainer.tell("leave_engines")
    await seen.until("/weights", lambda body: body["sync"]["state"] == "idle")


async def test_a_replica_killed_during_a_round_fails_only_that_round(seen, trainers):
    trainer, traffic = trainers.one(), Traffic(seen, clients=2)
    await run_round(seen, trainer, 30, chunks=40)
    victim = seen.fleet.replicas[1]
    async with traffic.keep_asking():
        trainer.order("transfer", url=seen.fleet.url, seed=31, version="v31", chunks=40)
        await seen.until("/weights", lambda body: body["sync"]["buckets"] >= 3)
        victim.kill()
        done = await trainer.reply()
        assert victim.url in done["why"], done
        body = await seen.until("/weights", lambda body: body["sync"]["state"] == "idle")
        assert not any(worker["routable"] for worker in body["workers"])
        victim.start()
        await healthy(victim.url)
        await seen.until("/workers", lambda body: body["healthy_workers"] == 2)
        assert not any(
            worker["routable"] for worker in (await seen.get_json("/workers"))["workers"]
        )
        # The next round of the trainer, in a new group, brings both back.
        await run_round(seen, trainer, 32)
        await assert_all_hold(seen, 32)
        await seen.ready()
        await traffic.wait_for_more()
    assert not mixed_texts(traffic)
    assert set(traffic.texts()) <= {"v30", "v32"}
    assert not traffic.failures()
    await trainer.tell("leave_engines")


async def test_a_restarted_engine_with_its_first_weights_gets_no_request(seen, trainers):
    trainer, victim = trainers.one(), seen.fleet.replicas[0]
    await run_round(seen, trainer, 35)
    await trainer.tell("leave_engines")
    victim.kill()
    victim.start()
    await healthy(victim.url)
    body = await seen.until("/weights", lambda body: victim.url in body["uncertain"])
    assert "missed the update to 'v35'" in body["uncertain"][victim.url]
    responses = [await seen.chat() for _ in range(4)]
    assert {response.headers["x-omni-weight-version"] for response in responses} == {"v35"}
    await run_round(seen, trainer, 36)
    await assert_all_hold(seen, 36)
    await trainer.tell("leave_engines")


async def test_after_a_trainer_dies_during_a_round_the_next_one_succeeds(seen, trainers):
    one, other = trainers.two()
    await run_round(seen, one, 40)
    done = await one.tell(
        "transfer", url=seen.fleet.url, seed=41, version="v41", chunks=3, dies=True,
        pause_mode=None,
    )  # fmt: skip
    assert done == {"gone": True}
    body = await seen.until("/weights", lambda body: body["sync"]["state"] == "idle")
    assert set(body["uncertain"]) == {replica.url for replica in seen.fleet.replicas}
    await run_round(seen, other, 42)
    await seen.ready()
    await assert_all_hold(seen, 42)
    assert (await seen.get_json("/is_paused"))["is_paused"] is False
    await other.tell("leave_engines")


async def test_a_fleet_of_both_dialects_is_paused_by_the_routes_of_each(mixed, trainers):
    async with mixed.client() as seen:
        await seen.ready()
        status, body = await seen.post("/pause?mode=keep")
        assert (status, body["success"]) == (200, True), body
        assert {result.get("sent_to") for result in body["results"]} == {None, "/pause_generation"}
        assert (await seen.get_json("/is_paused"))["is_paused"] is True
        assert (await seen.get_json("/get_world_size"))["world_size"] == 2
        status, body = await seen.post("/resume")
        assert status == 200
        assert (await seen.get_json("/is_paused"))["is_paused"] is False
        status, body = await seen.post("/update_weight_version", new_version="step-1")
        assert (status, set(body["weight_versions"].values())) == (200, {"step-1"})
        assert (await seen.get_json("/weight_info"))["weight_version"] == "step-1"
        done = await trainers.one().tell("transfer", url=mixed.url, seed=1, version="v1")
        assert "cannot be ranks of a vLLM" in done["why"]
        await seen.ready()

"""A version of the store is delivered to real replicas: by path, or through a group."""

from __future__ import annotations

import httpx
import pytest
import trio

from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.process_group.receiver import GroupLimits, open_receiver
from omni_proxy.weight_sync.delivery.deliver import (
    DeliveryOptions,
    ProcessGroupSender,
    VersionDeliverer,
)
from omni_proxy.weight_sync.store.service import StoreService
from tests.ports import free_port
from tests.promises.replica_program import gauges
from tests.promises.tiny_fleet import CHAT
from tests.weight_sync.store.drafts import delete_store, store_version
from tests.weight_sync.store.tiny_version import fleet_of, tiny_version

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
pytest.importorskip("safetensors.torch")

PATIENCE_SECS = 120
NEAR, FAR = 0, 1


@pytest.fixture(scope="module")
def fleet(fleets):
    """Two workers; the second cannot read the proxy's files."""
    replicas = fleets.alone()
    return fleet_of(replicas["one"].url, replicas["far"].url).workers


@pytest.fixture(scope="module")
def receiver():
    """The child process imports torch once for all tests."""
    made = open_receiver("process", GroupLimits(), name="relay")
    made.warm()
    yield made
    made.close()


@pytest.fixture
async def running_server(tmp_path, receiver):
    """A store service, and a deliverer from it."""
    settings = WeightSyncConfig(mode="receive", store_dir=str(tmp_path / "versions"))
    store_service = StoreService(lambda: settings, tmp_path)
    await store_service.open()

    async def sender(meeting):
        return await trio.to_thread.run_sync(receiver.sender, meeting)

    yield (
        store_service,
        VersionDeliverer(store_service, ProcessGroupSender(lambda: settings, sender)),
    )
    delete_store(store_service.store)


async def asked(worker, path, **body):
    async with httpx.AsyncClient(
        base_url=worker.url, timeout=PATIENCE_SECS, verify=False
    ) as client:
        return (await (client.post(path, json=body) if body else client.get(path))).json()


async def answer_of(worker):
    body = await asked(worker, "/v1/chat/completions", **CHAT)
    return body["choices"][0]["message"]


@pytest.mark.parametrize(("seed", "files"), [(7, 1), (8, 3)])
async def test_local_workers_get_the_path_others_a_group_and_all_are_proven(
    running_server, fleet, seed, files
):
    store_service, relay = running_server
    version = tiny_version(store_service.store, seed, files=files)
    with trio.fail_after(PATIENCE_SECS):
        before = await answer_of(fleet[NEAR])
        answers = await relay.deliver(version, fleet, DeliveryOptions(label=f"step-{seed}"))
        assert all(answer.success for answer in answers), answers
        ways = [answer.body["delivered_by"] for answer in answers]
        assert ways == ["disk", "group"]
        for worker, answer in zip(fleet, answers, strict=True):
            assert answer.body["checked_tensors"] == len(version.manifest.tensors)
            assert (await relay.prove(version, worker, {})).proven
            assert (await asked(worker, "/model_info"))["weight_version"] == f"step-{seed}"
        after = [await answer_of(worker) for worker in fleet]
        assert after[NEAR] == after[FAR] != before


async def test_tensors_that_differ_from_the_version_are_a_failure(running_server, fleet):
    store_service, relay = running_server
    version, other = tiny_version(store_service.store, 7), tiny_version(store_service.store, 8)
    file = "model.safetensors"
    (version.folder / file).write_bytes((other.folder / file).read_bytes())
    with trio.fail_after(PATIENCE_SECS):
        for answer in await relay.deliver(version, fleet):
            assert (answer.success, answer.refused) == (False, False)
            assert "full_checksum" in answer.reason


async def test_a_version_that_does_not_fit_is_refused_and_changes_nothing(running_server, fleet):
    store_service, relay = running_server
    good, bad = tiny_version(store_service.store, 7), store_version(store_service.store)
    with trio.fail_after(PATIENCE_SECS):
        await relay.deliver(good, fleet)
        for answer in await relay.deliver(bad, fleet):
            assert answer.refused, answer
            assert "the model has no tensor 'a'" in answer.reason
        for worker in fleet:
            assert (await relay.prove(good, worker, {})).proven
        assert all(answer.success for answer in await relay.deliver(good, fleet))


async def test_a_worker_paused_by_its_trainer_stays_paused(running_server, fleet):
    store_service, relay = running_server
    version = tiny_version(store_service.store, 7)
    with trio.fail_after(PATIENCE_SECS):
        await asked(fleet[NEAR], "/pause_generation", mode="retract")
        how = DeliveryOptions(paused=frozenset((fleet[NEAR].url,)))
        assert all(answer.success for answer in await relay.deliver(version, fleet, how))
        for worker, paused in zip(fleet, (1, 0), strict=True):
            async with httpx.AsyncClient(base_url=worker.url, verify=False) as client:
                assert (await gauges(client))["sglang:engine_paused"] == paused
        await asked(fleet[NEAR], "/continue_generation", torch_empty_cache=False)


async def test_a_worker_that_is_gone_does_not_affect_the_others(running_server, fleet):
    store_service, relay = running_server
    version = tiny_version(store_service.store, 7)
    nobody = f"http://127.0.0.1:{free_port()}"
    with trio.fail_after(PATIENCE_SECS):
        workers = [*fleet_of(nobody).workers, fleet[FAR]]
        gone, well = await relay.deliver(version, workers)
        assert (gone.success, gone.error, well.success) == (False, "ConnectError", True)

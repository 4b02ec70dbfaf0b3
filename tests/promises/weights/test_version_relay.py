"""A stored version is delivered to real replicas: by path, or through a process group."""

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
from tests.promises.support.replica_program import gauges
from tests.promises.support.tiny_fleet import CHAT
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
    """Opens a receiver, whose child process imports torch once for all tests."""
    opened = open_receiver("process", GroupLimits(), name="relay")
    opened.warm()
    yield opened
    opened.close()


@pytest.fixture
async def store_and_deliverer(tmp_path, receiver):
    """Yields a store service and a deliverer that uses it."""
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


async def call(worker, path, **body):
    async with httpx.AsyncClient(
        base_url=worker.url, timeout=PATIENCE_SECS, verify=False
    ) as client:
        return (await (client.post(path, json=body) if body else client.get(path))).json()


async def message_of(worker):
    body = await call(worker, "/v1/chat/completions", **CHAT)
    return body["choices"][0]["message"]


@pytest.mark.parametrize(("seed", "files"), [(7, 1), (8, 3)])
async def test_local_workers_get_a_path_and_others_a_group_and_all_are_proven(
    store_and_deliverer, fleet, seed, files
):
    store_service, deliverer = store_and_deliverer
    version = tiny_version(store_service.store, seed, files=files)
    with trio.fail_after(PATIENCE_SECS):
        before = await message_of(fleet[NEAR])
        results = await deliverer.deliver(version, fleet, DeliveryOptions(label=f"step-{seed}"))
        assert all(result.success for result in results), results
        methods = [result.body["delivered_by"] for result in results]
        assert methods == ["disk", "group"]
        for worker, result in zip(fleet, results, strict=True):
            assert result.body["checked_tensors"] == len(version.manifest.tensors)
            assert (await deliverer.prove(version, worker, {})).proven
            assert (await call(worker, "/model_info"))["weight_version"] == f"step-{seed}"
        after = [await message_of(worker) for worker in fleet]
        assert after[NEAR] == after[FAR] != before


async def test_tensors_that_differ_from_the_version_are_a_failure(store_and_deliverer, fleet):
    store_service, deliverer = store_and_deliverer
    version, other = tiny_version(store_service.store, 7), tiny_version(store_service.store, 8)
    file = "model.safetensors"
    (version.folder / file).write_bytes((other.folder / file).read_bytes())
    with trio.fail_after(PATIENCE_SECS):
        for result in await deliverer.deliver(version, fleet):
            assert (result.success, result.refused) == (False, False)
            assert "full_checksum" in result.reason


async def test_a_version_that_does_not_fit_is_rejected_and_changes_nothing(
    store_and_deliverer, fleet
):
    store_service, deliverer = store_and_deliverer
    good, bad = tiny_version(store_service.store, 7), store_version(store_service.store)
    with trio.fail_after(PATIENCE_SECS):
        await deliverer.deliver(good, fleet)
        for result in await deliverer.deliver(bad, fleet):
            assert result.refused, result
            assert "the model has no tensor 'a'" in result.reason
        for worker in fleet:
            assert (await deliverer.prove(good, worker, {})).proven
        assert all(result.success for result in await deliverer.deliver(good, fleet))


async def test_a_worker_paused_by_its_trainer_stays_paused(store_and_deliverer, fleet):
    store_service, deliverer = store_and_deliverer
    version = tiny_version(store_service.store, 7)
    with trio.fail_after(PATIENCE_SECS):
        await call(fleet[NEAR], "/pause_generation", mode="retract")
        options = DeliveryOptions(paused=frozenset((fleet[NEAR].url,)))
        assert all(
            response.success for response in await deliverer.deliver(version, fleet, options)
        )
        for worker, paused in zip(fleet, (1, 0), strict=True):
            async with httpx.AsyncClient(base_url=worker.url, verify=False) as client:
                assert (await gauges(client))["sglang:engine_paused"] == paused
        await call(fleet[NEAR], "/continue_generation", torch_empty_cache=False)


async def test_an_unreachable_worker_does_not_affect_the_others(store_and_deliverer, fleet):
    store_service, deliverer = store_and_deliverer
    version = tiny_version(store_service.store, 7)
    unreachable_url = f"http://127.0.0.1:{free_port()}"
    with trio.fail_after(PATIENCE_SECS):
        workers = [*fleet_of(unreachable_url).workers, fleet[FAR]]
        failed, delivered = await deliverer.deliver(version, workers)
        assert (failed.success, failed.error, delivered.success) == (False, "ConnectError", True)

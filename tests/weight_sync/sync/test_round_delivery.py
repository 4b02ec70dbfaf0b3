"""A received version is delivered to all workers at the same time, before they get requests."""

import pytest
import trio

from tests.admin_api.api_fixture import NOW, A, B
from tests.weight_sync.version_holders import DISK, VersionEngines

pytest.importorskip("torch")
ENGINES = VersionEngines


async def test_workers_get_the_version_at_the_same_time(running):
    engines, responses = running.engines, []
    engines.close_gate(DISK)

    async def sync():
        responses.append(await running.sync(1))

    async with trio.open_nursery() as caller:
        caller.start_soon(sync)
        for url in (A, B):
            await engines.arrived[url, DISK].wait()
        assert running.cordon_reasons() == [["updating"], ["updating"]]
        assert running.versions() == [(None, 0), (None, 0)]
        engines.open_gate(DISK)
    assert responses[0].ok, responses[0].body


async def test_a_worker_that_becomes_healthy_during_a_delivery_is_cordoned_first(running):
    api, engines, reasons = running.api, running.engines, []
    late, publish = api.worker(B), running.operations.journal.publish
    for _ in range(api.fleet.thresholds.fall):
        epoch = late.health.epoch
        api.fleet.observe_probe(late, status=None, error="gone", at=NOW, epoch=epoch)

    async def record_and_publish(*arguments):
        reasons.append(sorted(late.cordon_reasons))
        return await publish(*arguments)

    running.operations.journal.publish = record_and_publish
    engines.close_gate(DISK, A)
    async with trio.open_nursery() as caller:
        caller.start_soon(running.sync, 1)
        await engines.arrived[A, DISK].wait()
        api.fleet.revive(late, NOW)
        api.healthy(B)
        engines.open_gate(DISK, A)
    assert reasons == [["catching_up"]]
    await running.until(lambda: running.versions() == [("v1", 1), ("v1", 1)])
    await running.until(lambda: running.cordon_reasons() == [[], []])


@pytest.mark.parametrize("policy", ["rollback"])
async def test_a_rollback_needs_a_previous_version_in_the_store(running):
    await running.sync(1)
    renamed = await running.ask("/update_weight_version", new_version="set by a caller")
    assert (renamed.ok, running.operations.journal.published.epoch) == (True, 2)
    running.engines.failing_loads[B] = 1
    completed = await running.sync(2)
    assert completed.status == 502
    assert "rolled_back_to" not in completed.body
    assert list(completed.body["uncertain"]) == [B]

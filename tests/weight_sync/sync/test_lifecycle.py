import json
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.fleet.health_state import Health
from omni_proxy.weight_sync.protocol.journal import decode
from omni_proxy.weight_sync.sync import lifecycle
from tests.admin_api.api_fixture import NOW, A, B
from tests.weight_sync.trainer_fixture import (
    BUCKETS,
    COMPLETE,
    DESTROY,
    INIT,
    PREPARE,
    TENSORS,
    UPDATE,
    SyncEngines,
    Trainer,
    sync_api,
    uncertain_workers,
    versions_by_url,
)

pytestmark = pytest.mark.usefixtures("listening")
ENGINES = SyncEngines


# Lost participants


async def test_a_lost_participant_ends_the_sync_and_is_named(trainer, listening, engines):
    await trainer.arm()
    listening[B].set()
    await trainer.until("idle")
    assert engines.bodies(DESTROY, A)
    response = await trainer.ask(COMPLETE)
    assert response.status == 400
    assert f"{B} is lost: nothing listens" in response.body["message"]


async def test_a_participant_that_fails_its_probes_ends_the_sync(trainer):
    await trainer.arm()
    trainer.api.fleet.mark_dead(trainer.api.worker(B), NOW)
    assert trainer.api.worker(B).health.state is Health.DEAD
    await trainer.until("idle")
    assert B in trainer.api.operations.sync.status()["last_cause"]


async def test_a_participant_that_did_not_leave_is_called_again_before_it_joins(
    trainer, engines, monkeypatch
):
    monkeypatch.setattr(lifecycle, "DESTROY_TIMEOUT_SECS", 0.1)
    await trainer.join()
    engines.close_gate(DESTROY, B)
    response = await trainer.ask(DESTROY)
    assert (response.status, trainer.state) == (502, "idle")
    engines.open_gate(DESTROY, B)
    await trainer.join()
    assert len(engines.bodies(DESTROY, B)) == 2
    assert len(engines.bodies(DESTROY, A)) == 1


# Journal


async def test_armed_participants_are_recorded_and_uncertain_after_a_restart(
    trainer, folder, engines, nursery
):
    await trainer.join()
    journal = decode((folder / "journal.json").read_bytes())
    assert (journal.sync.step, journal.sync.targets, journal.uncertain_at_start()) == (
        "grouped",
        (A, B),
        {},
    )
    await trainer.expect_ok(PREPARE, **BUCKETS)
    assert decode((folder / "journal.json").read_bytes()).sync.step == "arming"
    restarted = sync_api(folder)
    assert uncertain_workers(restarted) == [A, B]
    await nursery.start(restarted.operations.run)
    with trio.fail_after(30):
        while not engines.bodies(DESTROY, B):  # noqa: ASYNC110  # nothing signals it
            await trio.sleep(0.01)
    assert engines.bodies(DESTROY, A) == [{"group_name": "g"}]


async def test_a_call_that_changes_weights_is_recorded_before_it_is_sent(trainer, folder, engines):
    await trainer.join()
    engines.close_gate(UPDATE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trainer.ask, UPDATE, **TENSORS))
        await engines.arrived[A, UPDATE].wait()
        assert decode((folder / "journal.json").read_bytes()).sync.step == "committing"
        assert uncertain_workers(sync_api(folder)) == [A, B]
        engines.open_gate(UPDATE)


async def test_participants_of_an_interrupted_group_leave_it_before_the_next_init(
    trainer, folder, engines, nursery
):
    await trainer.arm()
    restarted = Trainer(sync_api(folder), trainer.store)
    engines.close_gate(DESTROY, B)
    await nursery.start(restarted.api.operations.run)
    responses = []

    async def init():
        responses.append(await restarted.init())

    async with trio.open_nursery() as caller:
        caller.start_soon(init)
        await engines.arrived[B, DESTROY].wait()
        for _ in range(5):  # the journal is written in a thread
            await wait_all_tasks_blocked(0.01)
        assert [len(engines.bodies(INIT, url)) for url in (A, B)] == [1, 1]
        engines.open_gate(DESTROY, B)
    assert responses[0].ok, responses[0].body


async def test_nothing_is_sent_if_the_journal_cannot_be_written(trainer, engines, monkeypatch):
    await trainer.join()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer.api.operations.journal._file, "write", full)
    response = await trainer.ask(PREPARE, **BUCKETS)
    assert (response.status, response.body["error"]["code"]) == (503, "journal_unwritable")
    assert not engines.bodies(PREPARE, A)
    await trainer.until("idle")


async def test_the_journal_is_empty_after_a_sync(trainer, folder):
    await trainer.arm()
    await trainer.expect_ok(COMPLETE, weight_version="v2")
    await trainer.expect_ok(DESTROY)
    assert not (folder / "journal.json").exists()
    assert json.loads((folder / "epoch.json").read_bytes())["epoch"] == 1


async def test_a_worker_back_after_a_sync_is_cordoned_until_its_version_is_read(trainer, engines):
    await trainer.arm()
    await trainer.expect_ok(COMPLETE, weight_version="v2")
    await trainer.expect_ok(DESTROY)
    worker, fleet = trainer.api.worker(B), trainer.api.fleet
    engines.labels[B] = "default"
    engines.close_gate("/model_info", B)
    fleet.set_version(worker, None, 0)  # its restart was noticed
    fleet.cache_cleared(worker)
    assert (worker.cordon_reasons, worker.routable) == ({"unproven"}, False)
    await engines.arrived[B, "/model_info"].wait()
    engines.open_gate("/model_info", B)
    with trio.fail_after(30):
        while "uncertain" not in worker.cordon_reasons:
            await trio.sleep(0.01)
            assert not worker.routable
    assert "missed the update to 'v2'" in trainer.api.operations.journal.uncertain[B]


async def test_a_worker_with_the_synced_weights_is_uncordoned(trainer, engines):
    await trainer.arm()
    await trainer.expect_ok(COMPLETE, weight_version="v2")
    worker, fleet = trainer.api.worker(B), trainer.api.fleet
    fleet.set_version(worker, None, 0)
    fleet.cache_cleared(worker)
    with trio.fail_after(30):
        while worker.cordon_reasons:  # noqa: ASYNC110  # nothing signals it
            await trio.sleep(0.01)
    assert versions_by_url(trainer.api)[B] == ("v2", 1)

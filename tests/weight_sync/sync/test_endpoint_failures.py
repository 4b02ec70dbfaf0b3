"""Repeated calls, stalls, recovery, a full disk, a failing service, pauses."""

import pytest
import trio

from omni_proxy.admin_api.serializers.weight_status import weight_status
from omni_proxy.config.schema import RoutingConfig, ServerConfig, WeightSyncConfig
from omni_proxy.weight_sync.sync import lifecycle
from tests.admin_api.api_fixture import A, B
from tests.weight_sync.operation_fixture import PAUSE, api_with, cordon_reasons_of
from tests.weight_sync.trainer_fixture import (
    BUCKETS,
    COMPLETE,
    CONTINUE,
    DESTROY,
    INIT,
    LOST,
    PREPARE,
    TENSORS,
    UPDATE,
    SyncEngines,
    Trainer,
    init_body,
    open_trainer_store,
    sync_api,
    trainer_call,
    uncertain_workers,
)

pytestmark = pytest.mark.usefixtures("listening")
ENGINES = SyncEngines


async def complete(trainer, responses):
    responses.append(await trainer.ask(COMPLETE, weight_version="v2"))


# Repeated calls


async def test_of_two_simultaneous_trainers_the_second_is_refused(trainer, engines):
    engines.close_gate("/server_info", A)
    async with open_trainer_store() as other, trio.open_nursery() as nursery:
        responses = []

        async def first():
            responses.append(await trainer.init())

        nursery.start_soon(first)
        await engines.arrived[A, "/server_info"].wait()
        response = await trainer.ask(INIT, **init_body(other, group_name="mine"))
        assert response.status == 409
        for part in ("'g'", f"127.0.0.1:{trainer.store.port}", "of trainer", "step joining"):
            assert part in response.body["message"]
        assert response.body["owner"]["group_name"] == "g"
        engines.open_gate("/server_info", A)
    assert responses[0].ok, responses[0].body


async def test_an_init_that_fails_early_does_not_block_the_next_one(trainer, engines):
    engines.set_reply(B, "/server_info", {}, 500)
    assert (await trainer.init()).status == 502
    del engines.replies[B, "/server_info"]
    await trainer.join()


async def test_two_simultaneous_completes_get_the_same_response(trainer, engines):
    await trainer.arm()
    engines.close_gate(COMPLETE, B)
    responses = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(complete, trainer, responses)
        await engines.arrived[B, COMPLETE].wait()
        nursery.start_soon(complete, trainer, responses)
        with trio.fail_after(30):
            while not trainer.api.operations.waiting:  # noqa: ASYNC110  # nothing signals it
                await trio.sleep(0.01)
        engines.open_gate(COMPLETE, B)
    assert [(r.status, r.body["weight_version"]) for r in responses] == [(200, "v2")] * 2
    assert len(engines.bodies(COMPLETE, A)) == 1


async def test_a_destroy_succeeds_if_participants_have_already_left(trainer, engines):
    await trainer.arm()
    engines.close_gate(COMPLETE)
    for url in (A, B):
        engines.set_reply(
            url, DESTROY, {"success": False, "message": "there is no such group"}, 400
        )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trainer.api.operations.submit, trainer_call(COMPLETE))
        await engines.arrived[A, COMPLETE].wait()
        response = await trainer.ask(DESTROY)
        engines.open_gate(COMPLETE)
    assert response.ok
    assert "already left it" in response.body["message"]


async def test_an_operator_ends_a_sync_whose_participants_do_not_answer(trainer, engines):
    await trainer.arm()
    engines.close_gate(COMPLETE)
    responses = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(complete, trainer, responses)
        await engines.arrived[A, COMPLETE].wait()
        aborted = await trainer.api.operations.sync.abort("ops from 10.0.0.9")
        engines.open_gate(COMPLETE)
    assert (aborted.status, aborted.body["ended"]) == (200, True)
    assert "'g'" in aborted.body["message"]
    assert uncertain_workers(trainer.api) == sorted(aborted.body["uncertain"]) == [A, B]
    assert responses[0].status == 409
    assert "ops from 10.0.0.9 aborted it" in responses[0].body["message"]
    assert trainer.api.operations.sync.lifecycle.meters.aborts == {"aborted": 1}


async def test_a_group_without_a_round_is_aborted_and_its_workers_keep_their_weights(trainer):
    await trainer.join()
    response = await trainer.api.client().post("/weights/sync/abort")
    body = await response.get_json()
    assert (response.status_code, body["ended"], body["uncertain"]) == (200, True, {})
    assert trainer.state == "idle"
    again = await trainer.api.client().post("/weights/sync/abort")
    assert (again.status_code, (await again.get_json())["error"]["code"]) == (409, "no_sync")


async def test_bytes_are_counted_for_each_participant_that_received_them(trainer):
    await trainer.join()
    await trainer.expect_ok(UPDATE, **TENSORS, flush_cache=False)
    await trainer.expect_ok(PREPARE, **TENSORS)
    await trainer.expect_ok(COMPLETE)
    assert trainer.api.operations.sync.lifecycle.meters.nbytes == 2 * 2 * (4 * 2 + 3 * 4)


# Stalls


def report_progress(engines, state, nbytes, error=None):
    """Set the progress that the replicas report, each time with a new age."""

    def info(url):
        engines.info_calls += 1
        progress = {
            "state": state,
            "bytes_received": nbytes,
            "secs": engines.info_calls,
            "error": error,
        }
        return {"tp_size": engines.ranks[url], "weight_sync": progress}

    engines.info_calls, default_response = 0, type(engines).default_response
    engines.default_response = lambda url, path: (
        info(url) if path == "/server_info" else default_response(engines, url, path)
    )


async def test_a_live_trainer_that_sends_nothing_ends_the_sync(trainer_with, engines):
    trainer = await trainer_with(stall_timeout_secs=1.0, ready_timeout_secs=60)
    await trainer.arm()
    report_progress(engines, "receiving", 7)
    await trainer.until("idle")
    assert "nothing was received for 1 s" in trainer.api.operations.sync.status()["last_cause"]
    assert engines.bodies(DESTROY, A) == engines.bodies(DESTROY, B) == [{"group_name": "g"}]
    assert uncertain_workers(trainer.api) == []
    response = await trainer.ask(COMPLETE)
    assert response.status == 400
    assert "nothing was received" in response.body["message"]


async def test_a_failed_receive_ends_the_sync_before_a_complete(trainer, engines):
    await trainer.arm()
    report_progress(engines, "failed", 7, "the peer sent more than it announced")
    await trainer.until("idle")
    cause = trainer.api.operations.sync.status()["last_cause"]
    assert "its receive ended: the peer sent more than it announced" in cause
    assert uncertain_workers(trainer.api) == []


async def test_only_the_first_cause_decides_the_status_code(trainer, engines):
    await trainer.arm()
    engines.replies[B, COMPLETE] = LOST
    engines.close_gate(COMPLETE, A)
    engines.set_reply(A, COMPLETE, {"success": False, "message": "a peer has gone"}, 400)
    responses = []
    async with trio.open_nursery() as nursery:

        async def complete():
            responses.append(await trainer.ask(COMPLETE, weight_version="v2"))

        nursery.start_soon(complete)
        await engines.arrived[A, COMPLETE].wait()
        engines.open_gate(COMPLETE, A)
    assert responses[0].status == 502
    assert responses[0].body["message"] == f"{B}: ReadError"


async def test_a_participant_that_received_everything_does_not_stall(trainer, engines):
    report_progress(engines, "received", 7)
    await trainer.arm()
    with trio.fail_after(30):
        while engines.info_calls < 10:  # noqa: ASYNC110  # nothing signals it
            await trio.sleep(0.05)
    assert trainer.state == "armed"
    await trainer.expect_ok(COMPLETE, weight_version="v2")


async def test_continue_after_the_trainer_died_publishes_nothing(trainer):
    await trainer.join()
    await trainer.expect_ok(UPDATE, **TENSORS, flush_cache=True, weight_version="v2")
    trainer.api.operations.sync.lifecycle._watching.cancel()  # disable the watchdog
    trainer.store.die()
    await trainer.expect_ok(CONTINUE)
    await trainer.until("idle")
    assert trainer.api.operations.journal.published.epoch == 0
    assert uncertain_workers(trainer.api) == [A, B]


async def test_a_participant_of_an_old_group_is_asked_to_destroy_it(trainer, engines, monkeypatch):
    monkeypatch.setattr(lifecycle, "DESTROY_TIMEOUT_SECS", 0.1)
    await trainer.join()
    engines.close_gate(DESTROY, B)
    assert (await trainer.ask(DESTROY)).status == 502
    engines.open_gate(DESTROY, B)
    assert (await trainer.init(group_name="another")).ok
    assert engines.bodies(DESTROY, B) == [{"group_name": "g"}] * 2


# Recovery after a restart


async def test_after_a_restart_workers_with_the_published_weights_recover(
    trainer, folder, engines, nursery
):
    await trainer.arm()
    await trainer.expect_ok(COMPLETE, weight_version="v2")
    await trainer.expect_ok(PREPARE, **BUCKETS)
    engines.sums[B] = "new"  # B completed after the proxy ended
    restarted = sync_api(folder)
    assert uncertain_workers(restarted) == [A, B]
    await nursery.start(restarted.operations.run)
    with trio.fail_after(30):
        while uncertain_workers(restarted) != [B]:  # noqa: ASYNC110  # nothing signals it
            await trio.sleep(0.01)
    assert engines.paths(A).index(DESTROY) < len(engines.paths(A)) - 1
    assert cordon_reasons_of(restarted) == [[], ["uncertain"]]
    assert [w.weight_epoch for w in restarted.fleet.workers] == [1, 0]
    assert restarted.operations.journal.published.epoch == 1


async def test_workers_that_a_failed_sync_did_not_change_recover(trainer, engines):
    await trainer.arm()
    await trainer.expect_ok(COMPLETE, weight_version="v2")
    await trainer.expect_ok(UPDATE, **TENSORS, flush_cache=False)
    trainer.store.die()  # every worker discarded what it had received
    await trainer.until("idle")
    with trio.fail_after(30):
        while uncertain_workers(trainer.api):  # noqa: ASYNC110  # nothing signals it
            await trio.sleep(0.01)
    assert cordon_reasons_of(trainer.api) == [[], []]
    assert {(w.weight_label, w.weight_epoch) for w in trainer.api.fleet.workers} == {("v2", 1)}


# A full disk, or a failing service


def full(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("path", [COMPLETE, UPDATE, DESTROY])
async def test_a_full_disk_after_the_calls_is_not_an_error_of_the_call(
    trainer, engines, monkeypatch, path
):
    body = {**TENSORS, "flush_cache": True, "weight_version": "v2"}
    await (trainer.arm() if path == COMPLETE else trainer.join())
    if path == DESTROY:
        await trainer.expect_ok(UPDATE, **body)
    engines.close_gate("/weights_checker" if path != UPDATE else UPDATE, B)
    responses = []
    async with trio.open_nursery() as nursery:

        async def ask():
            responses.append(await trainer.ask(path, **body))

        nursery.start_soon(ask)
        await next(event for (url, _), event in engines.arrived.items() if url == B).wait()
        monkeypatch.setattr(trainer.api.operations.journal._file, "write", full)
        for event in engines.gates.values():
            event.set()
    assert responses[0].status == 200, responses[0].body
    assert "No space left" in weight_status(trainer.api.operations)["journal"]["error"]
    assert uncertain_workers(trainer.api) == []


async def test_a_failure_of_the_service_ends_the_sync_and_unlocks_the_fleet(engines, folder, store):
    api = sync_api(folder)
    trainer = Trainer(api, store)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(api.operations.run)
            await trainer.arm()
            scope.cancel()
    assert api.config_store.membership_lock.held
    async with trio.open_nursery() as nursery:
        await nursery.start(api.operations.run)
        await trainer.until("idle")
        assert not api.config_store.membership_lock.held
        assert engines.bodies(DESTROY, A)
        await trainer.join()
        nursery.cancel_scope.cancel()


# Pauses in a sync


async def trainer_with_queue(folder, nursery, store, **fields):
    fields = {"mode": "coordinate", "drain_secs": 60.0, **fields}
    sync = WeightSyncConfig(**fields)
    api = api_with(
        folder, weight_sync=sync, server=ServerConfig(queue_size=5), routing=RoutingConfig()
    )
    await nursery.start(api.operations.run)
    return Trainer(api, store)


async def test_in_a_group_a_pause_holds_requests_and_skips_the_drain(
    engines, folder, nursery, store
):
    trainer = await trainer_with_queue(folder, nursery, store)
    api = trainer.api
    await trainer.join()
    await trainer.expect_ok(PAUSE, mode="retract")
    assert cordon_reasons_of(api) == [["paused"], ["paused"]]
    api.worker(A).in_flight = 1  # retracted requests wait until generation continues
    await trainer.expect_ok(PREPARE, **BUCKETS)
    await trainer.expect_ok(COMPLETE, weight_version="v2")
    assert cordon_reasons_of(api) == [["paused"], ["paused"]]
    await trainer.expect_ok(DESTROY)
    await trainer.expect_ok(CONTINUE)
    assert cordon_reasons_of(api) == [[], []]
    assert api.operations.journal.paused_engines == set()


@pytest.mark.parametrize("fields", [{"while_updating": "pass"}, {"mode": "off"}])
async def test_with_pass_or_without_a_group_a_pause_holds_no_worker(
    engines, folder, nursery, store, fields
):
    trainer = await trainer_with_queue(folder, nursery, store, **fields)
    if fields.get("mode") != "off":
        await trainer.join()
    await trainer.expect_ok(PAUSE)
    assert cordon_reasons_of(trainer.api) == [[], []]
    assert trainer.api.operations.journal.paused_engines == {A, B}


async def test_a_worker_that_is_healthy_before_the_service_starts_is_cordoned(
    trainer, engines, folder, nursery
):
    await trainer.arm()
    await trainer.expect_ok(COMPLETE, weight_version="v2")
    await trainer.expect_ok(DESTROY)
    restarted = sync_api(folder)
    # The health check succeeded before the service started.
    assert cordon_reasons_of(restarted) == [["unproven"], ["unproven"]]
    await nursery.start(restarted.operations.run)
    with trio.fail_after(30):
        while cordon_reasons_of(restarted) != [[], []]:
            await trio.sleep(0.01)
            for worker in restarted.fleet.workers:
                assert worker.routable is (worker.weight_label == "v2")

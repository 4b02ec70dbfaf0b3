"""Rollouts that are paused, cancelled or interrupted by a restart of the proxy or of a worker."""

import pytest
import trio

from omni_proxy.weight_sync.delivery import catchup
from omni_proxy.wire.errors import HttpError
from tests.admin_api.api_fixture import A, B, build_api, entry
from tests.idle import wait_until_idle
from tests.weight_sync.operation_fixture import (
    PAUSE,
    UPDATE,
    admin_call,
    api_with,
    cordon_reasons_of,
)
from tests.weight_sync.rollout.rollout_fixture import (
    BODY,
    LoadingEngines,
    ended_rollout,
    rollout_when,
    start_rollout,
    states,
    versions,
)

ENGINES = LoadingEngines


async def test_updates_and_pauses_are_refused_during_a_rollout(settled, engines):
    engines.close_gate(UPDATE, A)
    await start_rollout(settled)
    await engines.arrived[A, UPDATE].wait()
    for call in (admin_call(PAUSE), admin_call(UPDATE), admin_call("/init_weights_update_group")):
        refused = await settled.operations.submit(call)
        assert (refused.status, refused.body["error"]["code"]) == (409, "rollout_in_progress")
        assert "/weights/rollout/cancel" in refused.body["message"]
    second = await start_rollout(settled, weight_version="v3")
    assert second.body["error"]["code"] == "rollout_in_progress"
    assert (await settled.operations.submit(admin_call("/continue_generation"))).ok
    engines.open_gate(UPDATE, A)
    assert (await ended_rollout(settled))["state"] == "succeeded"


async def test_an_operation_that_waits_while_a_rollout_starts_is_refused(settled, engines, nursery):
    engines.close_gate(UPDATE, A)
    responses = []

    async def update():
        responses.append(
            await settled.operations.submit(admin_call(UPDATE, {**BODY, "weight_version": "v0"}))
        )

    nursery.start_soon(update)
    await engines.arrived[A, UPDATE].wait()
    refused = []

    async def submit_second():
        refused.append(await settled.operations.submit(admin_call(UPDATE, {"model_path": "/m/v9"})))

    nursery.start_soon(start_rollout, settled)
    await wait_until_idle()
    nursery.start_soon(submit_second)
    await wait_until_idle()
    engines.open_gate(UPDATE, A)
    body = await rollout_when(
        settled, lambda rollout: rollout is not None and rollout["state"] == "succeeded"
    )
    assert body["updated"] == 2
    assert responses[0].ok
    assert refused[0].body["error"]["code"] == "rollout_in_progress"


async def test_a_pause_takes_effect_after_the_batch_and_resume_continues(settled, engines):
    rollouts = settled.operations.rollouts
    engines.close_gate(UPDATE, A)
    await start_rollout(settled)
    await engines.arrived[A, UPDATE].wait()
    assert (await rollouts.pause()).ok
    assert rollouts.status()["state"] == "pausing"
    engines.open_gate(UPDATE, A)
    rollout = await rollout_when(settled, lambda rollout: rollout["state"] == "paused")
    assert states(rollout) == ["updated", "pending"]
    assert (await rollouts.pause()).ok
    assert (await rollouts.resume()).ok
    assert (await ended_rollout(settled))["state"] == "succeeded"
    for steer in (rollouts.pause, rollouts.resume):
        with pytest.raises(HttpError, match="no rollout is running"):
            await steer()


async def test_a_pause_during_a_write_of_the_journal_is_not_lost(settled, monkeypatch):
    """The current batch is completed, and the next one waits."""
    journal, rollouts = settled.operations.journal, settled.operations.rollouts
    record_rollout = journal.record_rollout

    async def pause_after_record(state):
        await record_rollout(state)
        if "updating" in [row.phase for row in state.workers]:
            await rollouts.pause()

    monkeypatch.setattr(journal, "record_rollout", pause_after_record)
    await start_rollout(settled)
    rollout = await rollout_when(settled, lambda rollout: rollout["state"] == "paused")
    assert states(rollout) == ["updated", "pending"]


async def test_a_full_disk_before_the_first_batch_ends_a_rollout_without_changes(
    settled, engines, monkeypatch
):
    journal = settled.operations.journal
    record_rollout = journal.record_rollout

    async def fail_to_record(state):
        if "updating" in [row.phase for row in state.workers]:
            raise OSError(28, "No space left on device")
        await record_rollout(state)

    monkeypatch.setattr(journal, "record_rollout", fail_to_record)
    await start_rollout(settled)
    body = await ended_rollout(settled)
    assert (body["state"], states(body)) == ("failed", ["pending", "pending"])
    assert "nothing was sent: the journal" in body["cause"]
    assert "No space left on device" in body["cause"]
    assert engines.loaded(A) == []
    assert cordon_reasons_of(settled) == [[], []]


async def test_a_cancel_during_the_last_write_of_the_journal_is_refused(settled, monkeypatch):
    journal, rollouts = settled.operations.journal, settled.operations.rollouts
    save, refusals = journal.save_rollout, []

    async def cancel_before_save(state):
        if state is None:
            with pytest.raises(HttpError) as refusal:
                await rollouts.cancel("late")
            refusals.append((refusal.value.status, refusal.value.message))
        await save(state)

    monkeypatch.setattr(journal, "save_rollout", cancel_before_save)
    await start_rollout(settled)
    assert (await ended_rollout(settled))["state"] == "succeeded"
    assert refusals == [(409, "the rollout is ending")]


async def test_a_cancel_while_draining_returns_the_worker_to_rotation(settled, engines):
    settled.worker(A).in_flight = 1
    await start_rollout(settled)
    await rollout_when(settled, lambda rollout: rollout["workers"][0]["step"] == "draining")
    assert (await settled.operations.rollouts.cancel("an operator")).ok
    body = await ended_rollout(settled)
    assert (body["state"], body["cause"]) == ("cancelled", "cancelled by an operator")
    assert states(body) == ["pending", "pending"]
    assert engines.loaded(A) == []
    assert cordon_reasons_of(settled) == [[], []]


async def test_a_cancel_restores_the_updated_workers(settled, engines):
    await start_rollout(settled, pause_after_canary=True)
    await rollout_when(settled, lambda rollout: rollout["state"] == "paused")
    await settled.operations.rollouts.cancel("")
    body = await ended_rollout(settled)
    assert (body["state"], states(body)) == ("cancelled", ["restored", "pending"])
    assert versions(settled) == [("v1", 0), ("v1", 0)]


async def test_after_a_restart_the_interrupted_worker_is_updated_again(engines, folder, nursery):
    api = api_with(folder)
    async with trio.open_nursery() as first_run:
        await first_run.start(api.operations.run)
        await api.settle()
        engines.close_gate(UPDATE, A)
        await start_rollout(api)
        await engines.arrived[A, UPDATE].wait()
        first_run.cancel_scope.cancel()
    del engines.gates[A, UPDATE], engines.arrived[A, UPDATE]
    engines.requests.clear()
    restarted = build_api(entry(A), entry(B), folder=folder)
    assert list(restarted.operations.journal.uncertain) == [A]
    await nursery.start(restarted.operations.run)
    restarted.healthy(A, B)
    body = await ended_rollout(restarted)
    assert (body["state"], body["updated"]) == ("succeeded", 2)
    assert (engines.loaded(A), engines.loaded(B)) == (["/m/v2"], ["/m/v2"])
    assert [label for label, _ in versions(restarted)] == ["v2", "v2"]
    assert restarted.operations.journal.uncertain == {}


async def test_a_paused_rollout_is_still_paused_after_a_restart(engines, folder, nursery):
    api = api_with(folder)
    async with trio.open_nursery() as first_run:
        await first_run.start(api.operations.run)
        await api.settle()
        await start_rollout(api, pause_after_canary=True)
        await rollout_when(api, lambda rollout: rollout["state"] == "paused")
        first_run.cancel_scope.cancel()
    restarted = build_api(entry(A), entry(B), folder=folder)
    await nursery.start(restarted.operations.run)
    restarted.healthy(A, B)
    await wait_until_idle()
    assert restarted.operations.rollouts.status()["state"] == "paused"
    await restarted.operations.rollouts.resume()
    assert (await ended_rollout(restarted))["state"] == "succeeded"


async def test_a_worker_that_joins_during_a_rollout_is_updated_too(engines, folder, nursery):
    engines.labels = {A: "v1", B: "v1"}
    api = build_api(entry(A), folder=folder)
    api.healthy(A)
    await nursery.start(api.operations.run)
    await api.settle()
    await start_rollout(api, pause_after_canary=False)
    api.config_store.config = build_api(entry(A), entry(B)).config_store.config
    api.config_store.apply()
    api.healthy(B)
    rollout = await ended_rollout(api)
    assert states(rollout) in (["updated"], ["updated", "updated"])
    await wait_until_caught_up(api, B)  # updated by the rollout, or after it


async def test_an_unhealthy_worker_is_skipped_and_catches_up_later(engines, folder, nursery):
    api = build_api(entry(A), entry(B), folder=folder)
    api.healthy(A)
    await nursery.start(api.operations.run)
    api.fleet.cache_cleared(api.worker(A))
    await wait_until_idle()
    await start_rollout(api)
    body = await ended_rollout(api)
    assert (body["state"], states(body)) == ("succeeded", ["updated", "skipped"])
    api.healthy(B)
    await wait_until_caught_up(api, B)
    assert engines.loaded(B) == ["/m/v2"]


async def wait_until_caught_up(api, url):
    """Wait until the worker is in rotation with the version of the rollout."""
    with trio.fail_after(30):
        while not api.worker(url).routable or api.worker(url).weight_label != "v2":  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert api.worker(url).weight_epoch == api.operations.journal.published.epoch
    assert url not in api.operations.journal.uncertain


async def test_a_worker_that_restarts_after_a_rollout_gets_the_version_first(settled, engines):
    await start_rollout(settled)
    await ended_rollout(settled)
    restart(engines, B)
    engines.close_gate(UPDATE, B)
    settled.fleet.set_version(settled.worker(B), None, 0)
    settled.fleet.cache_cleared(settled.worker(B))
    await engines.arrived[B, UPDATE].wait()
    assert settled.worker(B).cordon_reasons == {"catching_up"}
    engines.open_gate(UPDATE, B)
    await wait_until_caught_up(settled, B)
    assert engines.loaded(B) == ["/m/v2", "/m/v2"]


async def test_a_restarted_worker_is_uncertain_if_the_path_no_longer_exists(
    settled, engines, monkeypatch
):
    monkeypatch.setattr(catchup, "RETRY_SECS", (0.01,))
    await start_rollout(settled)
    await ended_rollout(settled)
    restart(engines, B)
    engines.set_reply(B, UPDATE, {"success": False, "message": "no such file"}, 400)
    settled.fleet.set_version(settled.worker(B), None, 0)
    settled.fleet.cache_cleared(settled.worker(B))
    with trio.fail_after(30):
        while B not in settled.operations.journal.uncertain:  # noqa: ASYNC110
            await trio.sleep(0.01)
    reason = settled.operations.journal.uncertain[B]
    assert reason == ("missed the update of epoch 1 and did not catch up: status 400: no such file")


def restart(engines, url):
    engines.labels[url], engines.paths_held[url], engines.sums[url] = "v1", "/m/v1", "/m/v1"

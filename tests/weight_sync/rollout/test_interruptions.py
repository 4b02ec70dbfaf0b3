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
    begin,
    ended,
    stands,
    states,
    versions,
)

ENGINES = LoadingEngines


async def test_while_it_runs_nothing_else_changes_weights_or_pauses(settled, engines):
    engines.close_gate(UPDATE, A)
    await begin(settled)
    await engines.arrived[A, UPDATE].wait()
    for call in (admin_call(PAUSE), admin_call(UPDATE), admin_call("/init_weights_update_group")):
        refused = await settled.operations.submit(call)
        assert (refused.status, refused.body["error"]["code"]) == (409, "rollout_in_progress")
        assert "/weights/rollout/cancel" in refused.body["message"]
    again = await begin(settled, weight_version="v3")
    assert again.body["error"]["code"] == "rollout_in_progress"
    assert (await settled.operations.submit(admin_call("/continue_generation"))).ok
    engines.open_gate(UPDATE, A)
    assert (await ended(settled))["state"] == "succeeded"


async def test_an_operation_that_already_waits_for_its_turn_is_refused_then(
    settled, engines, nursery
):
    engines.close_gate(UPDATE, A)
    first = []

    async def update():
        first.append(
            await settled.operations.submit(admin_call(UPDATE, {**BODY, "weight_version": "v0"}))
        )

    nursery.start_soon(update)
    await engines.arrived[A, UPDATE].wait()
    refused = []

    async def wait():
        refused.append(await settled.operations.submit(admin_call(UPDATE, {"model_path": "/m/v9"})))

    nursery.start_soon(begin, settled)
    await wait_until_idle()
    nursery.start_soon(wait)
    await wait_until_idle()
    engines.open_gate(UPDATE, A)
    body = await stands(
        settled, lambda reported: reported is not None and reported["state"] == "succeeded"
    )
    assert body["updated"] == 2
    assert first[0].ok
    assert refused[0].body["error"]["code"] == "rollout_in_progress"


async def test_a_pause_takes_effect_after_the_batch_and_resume_continues(settled, engines):
    rollouts = settled.operations.rollouts
    engines.close_gate(UPDATE, A)
    await begin(settled)
    await engines.arrived[A, UPDATE].wait()
    assert (await rollouts.pause()).ok
    assert rollouts.status()["state"] == "pausing"
    engines.open_gate(UPDATE, A)
    reported = await stands(settled, lambda reported: reported["state"] == "paused")
    assert states(reported) == ["updated", "pending"]
    assert (await rollouts.pause()).ok
    assert (await rollouts.resume()).ok
    assert (await ended(settled))["state"] == "succeeded"
    for steer in (rollouts.pause, rollouts.resume):
        with pytest.raises(HttpError, match="no rollout is running"):
            await steer()


async def test_a_pause_while_the_journal_is_written_is_not_lost(settled, monkeypatch):
    """The batch that has begun is completed, and the next one waits."""
    journal, rollouts = settled.operations.journal, settled.operations.rollouts
    record = journal.record_rollout

    async def recording(state):
        await record(state)
        if "updating" in [row.phase for row in state.workers]:
            await rollouts.pause()

    monkeypatch.setattr(journal, "record_rollout", recording)
    await begin(settled)
    reported = await stands(settled, lambda reported: reported["state"] == "paused")
    assert states(reported) == ["updated", "pending"]


async def test_a_disk_that_fails_in_the_middle_ends_it_untouched(settled, engines, monkeypatch):
    journal = settled.operations.journal
    record = journal.record_rollout

    async def recording(state):
        if "updating" in [row.phase for row in state.workers]:
            raise OSError(28, "No space left on device")
        await record(state)

    monkeypatch.setattr(journal, "record_rollout", recording)
    await begin(settled)
    body = await ended(settled)
    assert (body["state"], states(body)) == ("failed", ["pending", "pending"])
    assert "nothing was sent: the journal" in body["cause"]
    assert "No space left on device" in body["cause"]
    assert engines.loaded(A) == []
    assert cordon_reasons_of(settled) == [[], []]


async def test_a_cancel_while_the_end_is_written_is_too_late(settled, monkeypatch):
    journal, rollouts = settled.operations.journal, settled.operations.rollouts
    save, refusals = journal.save_rollout, []

    async def saving(state):
        if state is None:
            with pytest.raises(HttpError) as refusal:
                await rollouts.cancel("late")
            refusals.append((refusal.value.status, refusal.value.message))
        await save(state)

    monkeypatch.setattr(journal, "save_rollout", saving)
    await begin(settled)
    assert (await ended(settled))["state"] == "succeeded"
    assert refusals == [(409, "the rollout is ending")]


async def test_a_cancel_while_draining_gives_the_worker_back(settled, engines):
    settled.worker(A).in_flight = 1
    await begin(settled)
    await stands(settled, lambda reported: reported["workers"][0]["step"] == "draining")
    assert (await settled.operations.rollouts.cancel("an operator")).ok
    body = await ended(settled)
    assert (body["state"], body["cause"]) == ("cancelled", "cancelled by an operator")
    assert states(body) == ["pending", "pending"]
    assert engines.loaded(A) == []
    assert cordon_reasons_of(settled) == [[], []]


async def test_a_cancel_takes_back_what_was_updated(settled, engines):
    await begin(settled, pause_after_canary=True)
    await stands(settled, lambda reported: reported["state"] == "paused")
    await settled.operations.rollouts.cancel("")
    body = await ended(settled)
    assert (body["state"], states(body)) == ("cancelled", ["restored", "pending"])
    assert versions(settled) == [("v1", 0), ("v1", 0)]


async def test_after_a_restart_the_worker_is_done_again_and_it_ends_whole(engines, folder, nursery):
    api = api_with(folder)
    async with trio.open_nursery() as first:
        await first.start(api.operations.run)
        await api.settle()
        engines.close_gate(UPDATE, A)
        await begin(api)
        await engines.arrived[A, UPDATE].wait()
        first.cancel_scope.cancel()
    del engines.gates[A, UPDATE], engines.arrived[A, UPDATE]
    engines.requests.clear()
    again = build_api(entry(A), entry(B), folder=folder)
    assert list(again.operations.journal.uncertain) == [A]
    await nursery.start(again.operations.run)
    again.healthy(A, B)
    body = await ended(again)
    assert (body["state"], body["updated"]) == ("succeeded", 2)
    assert (engines.loaded(A), engines.loaded(B)) == (["/m/v2"], ["/m/v2"])
    assert [label for label, _ in versions(again)] == ["v2", "v2"]
    assert again.operations.journal.uncertain == {}


async def test_after_a_restart_a_paused_one_stays_paused(engines, folder, nursery):
    api = api_with(folder)
    async with trio.open_nursery() as first:
        await first.start(api.operations.run)
        await api.settle()
        await begin(api, pause_after_canary=True)
        await stands(api, lambda reported: reported["state"] == "paused")
        first.cancel_scope.cancel()
    again = build_api(entry(A), entry(B), folder=folder)
    await nursery.start(again.operations.run)
    again.healthy(A, B)
    await wait_until_idle()
    assert again.operations.rollouts.status()["state"] == "paused"
    await again.operations.rollouts.resume()
    assert (await ended(again))["state"] == "succeeded"


async def test_a_worker_that_joins_in_the_middle_is_updated_too(engines, folder, nursery):
    engines.labels = {A: "v1", B: "v1"}
    api = build_api(entry(A), folder=folder)
    api.healthy(A)
    await nursery.start(api.operations.run)
    await api.settle()
    await begin(api, pause_after_canary=False)
    api.config_store.config = build_api(entry(A), entry(B)).config_store.config
    api.config_store.apply()
    api.healthy(B)
    reported = await ended(api)
    assert states(reported) in (["updated"], ["updated", "updated"])
    await caught_up(api, B)  # by the rollout, or after it


async def test_a_worker_that_is_not_healthy_is_left_out_and_held_afterwards(
    engines, folder, nursery
):
    api = build_api(entry(A), entry(B), folder=folder)
    api.healthy(A)
    await nursery.start(api.operations.run)
    api.fleet.cache_cleared(api.worker(A))
    await wait_until_idle()
    await begin(api)
    body = await ended(api)
    assert (body["state"], states(body)) == ("succeeded", ["updated", "skipped"])
    api.healthy(B)
    await caught_up(api, B)
    assert engines.loaded(B) == ["/m/v2"]


async def caught_up(api, url):
    """Until the worker is in rotation with the version of the rollout."""
    with trio.fail_after(30):
        while not api.worker(url).routable or api.worker(url).weight_version != "v2":  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert api.worker(url).weight_epoch == api.operations.journal.published.epoch
    assert url not in api.operations.journal.uncertain


async def test_a_worker_that_restarts_afterwards_gets_the_version_before_any_request(
    settled, engines
):
    await begin(settled)
    await ended(settled)
    restart(engines, B)
    engines.close_gate(UPDATE, B)
    settled.fleet.set_version(settled.worker(B), None, 0)
    settled.fleet.cache_cleared(settled.worker(B))
    await engines.arrived[B, UPDATE].wait()
    assert settled.worker(B).cordon_reasons == {"catching_up"}
    engines.open_gate(UPDATE, B)
    await caught_up(settled, B)
    assert engines.loaded(B) == ["/m/v2", "/m/v2"]


async def test_a_path_that_is_gone_keeps_a_worker_that_restarted_out(settled, engines, monkeypatch):
    monkeypatch.setattr(catchup, "RETRY_SECS", (0.01,))
    await begin(settled)
    await ended(settled)
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

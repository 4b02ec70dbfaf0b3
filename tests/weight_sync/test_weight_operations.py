import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.admin_api.serializers.weight_status import weight_status
from omni_proxy.config.schema import AdminConfig, RoutingConfig, WeightSyncConfig
from omni_proxy.fleet.health_state import Health
from omni_proxy.weight_sync.protocol.journal import Journal
from tests.admin_api.api_fixture import NOW, A, B
from tests.fleet.entries import heal
from tests.idle import wait_until_idle
from tests.weight_sync.operation_fixture import (
    LOST,
    PAUSE,
    UPDATE,
    admin_call,
    api_with,
    cordon_reasons_of,
    read_journal,
    start_operation,
    submit_all,
)


async def test_the_journal_names_the_targets_before_the_first_call(api, engines, folder, nursery):
    await start_operation(engines, nursery, api, admin_call())
    entry = read_journal(folder).in_progress
    assert (entry.path, entry.targets, entry.step) == (UPDATE, (A, B), "calling")
    assert cordon_reasons_of(api) == [["updating"], ["updating"]]
    engines.open_gate(UPDATE)
    await wait_until_idle()
    assert (read_journal(folder), cordon_reasons_of(api)) == (Journal(), [[], []])


async def test_operations_run_in_order_of_arrival(api, engines):
    bodies = [{"model_path": str(at)} for at in range(5)]
    await submit_all(api, *(admin_call(body=body) for body in bodies))
    sent = [r.content for r in engines.requests if r.url.path == UPDATE and r.url.port == 8011]
    assert sent == [admin_call(body=body).body for body in bodies]


async def test_with_lock_timeout_zero_a_second_operation_is_refused_at_once(
    engines, folder, nursery
):
    api = api_with(folder, admin=AdminConfig(lock_timeout_secs=0))
    await nursery.start(api.operations.run)
    await start_operation(engines, nursery, api, admin_call(caller="one"))
    refused = await api.operations.submit(admin_call(PAUSE))
    assert (refused.status, refused.body["error"]["code"]) == (503, "update_in_progress")
    assert "update_weights_from_disk of one began" in refused.body["message"]
    engines.open_gate(UPDATE, A)
    await wait_until_idle()
    rows = weight_status(api.operations)["operation"]["workers"]
    assert [row["progress"] for row in rows] == ["done", "asked"]
    engines.open_gate(UPDATE, B)
    await wait_until_idle()
    assert (await api.operations.submit(admin_call(PAUSE))).status == 200


async def test_requests_in_flight_are_drained_up_to_the_time_limit(
    engines, folder, nursery, autojump_clock
):
    api = api_with(folder, weight_sync=WeightSyncConfig(drain_secs=9))
    await nursery.start(api.operations.run)
    worker = api.worker(A)
    for late in (False, True):
        engines.requests.clear()
        engines.close_gate(UPDATE, A)
        worker.in_flight = 1
        began = trio.current_time()
        nursery.start_soon(api.operations.submit, admin_call(caller=str(late)))
        await trio.sleep(5)
        assert (engines.paths(), cordon_reasons_of(api)) == ([], [["updating"]] * 2)
        assert weight_status(api.operations)["operation"]["step"] == "draining"
        worker.in_flight = int(late)
        await engines.arrived[A, UPDATE].wait()
        assert (round(trio.current_time() - began, 6) >= 9) is late
        engines.open_gate(UPDATE, A)
        await wait_until_idle()


async def test_with_while_updating_pass_no_worker_is_held(engines, folder, nursery):
    api = api_with(folder, weight_sync=WeightSyncConfig(while_updating="pass"))
    await nursery.start(api.operations.run)
    await start_operation(engines, nursery, api, admin_call())
    assert cordon_reasons_of(api) == [[], []]
    engines.open_gate(UPDATE)


@pytest.mark.parametrize(("choice", "expected"), [("pass", []), ("hold", ["paused"])])
async def test_a_successful_pause_holds_unless_while_paused_is_pass(
    engines, folder, nursery, choice, expected
):
    api = api_with(folder, routing=RoutingConfig(while_paused=choice))
    await nursery.start(api.operations.run)
    engines.replies[B, PAUSE] = (500, b"oops")
    await start_operation(engines, nursery, api, admin_call(PAUSE))
    assert cordon_reasons_of(api) == [["paused"], ["paused"]]
    engines.open_gate(PAUSE)
    await wait_until_idle()
    assert (cordon_reasons_of(api), read_journal(folder).in_progress) == ([expected, []], None)
    assert read_journal(folder).paused == ((A,) if expected else ())
    await api.operations.submit(admin_call("/continue_generation"))
    assert cordon_reasons_of(api) == [[], []]


@pytest.mark.parametrize("choice", ["pass", "hold"])
async def test_the_status_shows_pauses_until_continue_even_after_a_restart(
    engines, folder, nursery, choice
):
    api = api_with(folder, routing=RoutingConfig(while_paused=choice))
    await nursery.start(api.operations.run)
    await api.operations.submit(
        admin_call(PAUSE, {"mode": "retract"}, caller="trainer from 10.0.0.3")
    )
    pauses = weight_status(api.operations)["paused"]
    assert set(pauses) == {A, B}
    assert pauses[A]["at"]
    assert {**pauses[A], "at": ""} == {
        "at": "", "by": "trainer from 10.0.0.3", "path": PAUSE, "mode": "retract"
    }  # fmt: skip

    restarted = api_with(folder, routing=RoutingConfig(while_paused=choice))
    assert weight_status(restarted.operations)["paused"] == pauses
    await nursery.start(restarted.operations.run)
    await restarted.operations.submit(admin_call(PAUSE, caller="another"))
    assert weight_status(restarted.operations)["paused"] == pauses  # the first pause counts
    await restarted.operations.submit(admin_call("/continue_generation"))
    assert weight_status(restarted.operations)["paused"] == {}
    assert read_journal(folder) == Journal()


async def test_a_pause_of_some_workers_is_recorded_for_those_only(api, folder):
    await api.operations.submit(admin_call(PAUSE, chosen=frozenset((B,))))
    assert list(weight_status(api.operations)["paused"]) == [B]
    assert list(read_journal(folder).pauses) == [B]


async def test_an_engine_that_restarted_unnoticed_is_no_longer_paused(api, folder, nursery):
    api.worker(A).instance = api.worker(B).instance = "first"
    await api.operations.submit(admin_call(PAUSE))
    restarted = api_with(folder)
    await nursery.start(restarted.operations.run)
    for url, instance in ((A, "second"), (B, "first")):
        restarted.worker(url).instance = instance
        restarted.fleet.mark_dead(restarted.worker(url), NOW)
        restarted.fleet.revive(restarted.worker(url), NOW)
        restarted.healthy(url)
    await wait_until_idle()
    assert list(weight_status(restarted.operations)["paused"]) == [B]
    assert list(read_journal(folder).pauses) == [B]


async def test_a_worker_that_does_not_continue_stays_paused(engines, folder, nursery):
    api = api_with(folder, routing=RoutingConfig(while_paused="shed"))
    await nursery.start(api.operations.run)
    await api.operations.submit(admin_call(PAUSE))
    engines.replies[A, "/continue_generation"] = LOST
    response = await api.operations.submit(admin_call("/continue_generation"))
    assert (response.status, cordon_reasons_of(api)) == (502, [["paused"], []])


async def test_an_update_with_keep_pause_counts_as_a_pause(engines, folder, nursery):
    api = api_with(folder, routing=RoutingConfig(while_paused="hold"))
    await nursery.start(api.operations.run)
    await api.operations.submit(admin_call(body={"keep_pause": True}))
    assert cordon_reasons_of(api) == [["paused"], ["paused"]]
    await api.operations.submit(admin_call())
    assert cordon_reasons_of(api) == [["paused"], ["paused"]]


async def test_holds_from_before_the_operation_survive(api, engines):
    api.fleet.cordon(api.worker(A), "launch")
    await api.operations.submit(admin_call())
    assert cordon_reasons_of(api) == [["launch"], []]


async def test_a_worker_whose_update_failed_is_uncertain_until_a_whole_update(api, engines, folder):
    engines.replies[B, UPDATE] = LOST
    response = await api.operations.submit(admin_call())
    assert (response.status, cordon_reasons_of(api)) == (502, [[], ["uncertain"]])
    assert response.body["results"][1]["reason"] == "update_weights_from_disk failed: ReadError"
    assert read_journal(folder).uncertain == {B: "update_weights_from_disk failed: ReadError"}
    del engines.replies[B, UPDATE]
    await api.operations.submit(admin_call("/continue_generation"))
    await api.operations.submit(admin_call("/update_weights_from_distributed"))
    assert cordon_reasons_of(api) == [[], ["uncertain"]]
    await api.operations.submit(admin_call())
    assert (cordon_reasons_of(api), read_journal(folder)) == ([[], []], Journal())


async def test_a_worker_that_is_deleted_and_added_again_is_still_uncertain(api, engines):
    engines.replies[B, UPDATE] = LOST
    await api.operations.submit(admin_call())
    entries = api.config_store.config.workers
    api.config_store.config = type(api.config_store.config)(workers=entries[:1])
    api.config_store.apply()
    api.config_store.config = type(api.config_store.config)(workers=entries)
    api.config_store.apply()
    assert cordon_reasons_of(api) == [[], ["uncertain"]]


async def test_in_mode_off_a_failed_init_disables_and_more_than_one_target_is_refused(
    plain, engines
):
    api, init = plain, "/init_weights_update_group"
    refused = await api.operations.submit(admin_call(init))
    assert (refused.status, refused.body["success"]) == (422, False)
    assert "2 live workers were targeted" in refused.body["message"]
    engines.replies[A, init] = LOST
    response = await api.operations.submit(admin_call(init, chosen=frozenset((A,))))
    assert response.body["results"][0]["standing"] == "disabled"
    assert [w.disabled for w in api.fleet.workers] == [True, False]
    assert cordon_reasons_of(api) == [[], []]


async def test_without_a_live_or_a_matching_worker_a_call_is_refused(api):
    refused = await api.operations.submit(admin_call(chosen=frozenset()))
    assert refused.body["error"]["code"] == "no_workers_match"
    for worker in api.fleet.workers:
        api.fleet.mark_dead(worker, worker.registered_at)
    refused = await api.operations.submit(admin_call())
    assert (refused.status, refused.body["message"]) == (503, "no live upstream workers")


async def test_an_update_clears_cache_knowledge_unless_flush_cache_is_false(api, engines):
    forgotten = []
    api.fleet.watch_cache_cleared(forgotten.append)
    await api.operations.submit(admin_call(body={"flush_cache": False}))
    assert forgotten == []
    await api.operations.submit(admin_call())
    assert forgotten == api.fleet.workers


async def test_a_flush_clears_cache_knowledge_only_where_it_succeeded(api, engines):
    forgotten = []
    api.fleet.watch_cache_cleared(forgotten.append)
    engines.replies[B, "/flush_cache"] = (500, b"busy")
    assert (await api.operations.submit(admin_call("/flush_cache"))).status == 502
    assert forgotten == api.fleet.workers[:1]
    await api.operations.submit(admin_call(PAUSE))
    assert len(forgotten) == 1


async def test_the_epoch_increases_with_each_update_that_succeeds_on_a_worker(api, engines, folder):
    engines.labels = {A: "v2", B: "v2"}
    body = (await api.operations.submit(admin_call())).body
    assert (body["weight_epoch"], body["weight_versions"]) == (1, {A: "v2", B: "v2"})
    engines.replies[B, UPDATE] = LOST
    assert (await api.operations.submit(admin_call())).body["weight_epoch"] == 2
    assert [w.weight_epoch for w in api.fleet.workers] == [2, 0]
    engines.replies[A, UPDATE] = LOST
    assert "weight_epoch" not in (await api.operations.submit(admin_call())).body
    again = api_with(folder)
    assert again.operations.journal.published.epoch == 2
    assert cordon_reasons_of(again) == [["uncertain"], ["uncertain"]]


async def test_prefill_and_decode_workers_are_paused_and_updated_like_others(api, engines, folder):
    for worker, role in zip(api.fleet.workers, ("prefill", "decode"), strict=True):
        api.fleet.report_role(worker, role)
    engines.labels = {A: "v2", B: "v2"}
    for path in (PAUSE, UPDATE, "/continue_generation"):
        body = (await api.operations.submit(admin_call(path))).body
        assert [row["worker"] for row in body["results"]] == [A, B], path
        assert body["success"]
    assert [w.weight_epoch for w in api.fleet.workers] == [1, 1]


async def test_the_version_of_a_worker_is_read_when_it_becomes_healthy(api, engines):
    engines.labels = {A: "v2", B: "v2"}
    await api.operations.submit(admin_call(body={"weight_version": "v2"}))
    engines.labels[B] = "v0"  # restarted with its first weights
    api.fleet.cache_cleared(api.worker(B))
    await wait_until_idle()
    assert [(w.weight_label, w.weight_epoch) for w in api.fleet.workers] == [
        ("v2", 1), ("v0", 0),
    ]  # fmt: skip
    engines.labels[B] = "v2"
    api.fleet.cache_cleared(api.worker(B))
    await wait_until_idle()
    assert api.worker(B).weight_epoch == 1


async def test_differing_checksums_are_a_502_and_off_requests_none(engines, folder, nursery):
    engines.sums[B] = "t"
    api = api_with(folder, weight_sync=WeightSyncConfig(verify="off"))
    await nursery.start(api.operations.run)
    assert (await api.operations.submit(admin_call())).status == 200
    assert "/weights_checker" not in engines.paths()
    other = api_with(folder)
    await nursery.start(other.operations.run)
    response = await other.operations.submit(admin_call())
    assert (response.status, response.body["success"], response.body["status"]) == (
        502,
        False,
        "error",
    )
    assert cordon_reasons_of(other) == [["uncertain"], ["uncertain"]]


async def test_in_mode_off_one_of_many_buckets_for_one_worker_is_not_hashed(plain, engines):
    await plain.operations.submit(
        admin_call("/update_weights_from_distributed", chosen=frozenset((A,)))
    )  # fmt: skip
    assert engines.paths() == ["/update_weights_from_distributed", "/model_info"]


async def test_the_same_call_from_two_waiting_callers_runs_twice(api, engines):
    responses = await submit_all(api, admin_call(caller="one"), admin_call(caller="two"))
    assert [response.status for response in responses] == [200, 200]
    assert engines.paths().count(UPDATE) == 2


async def test_a_caller_that_disconnected_and_retries_gets_the_running_result(
    api, engines, nursery
):
    engines.close_gate(UPDATE)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as callers:
            callers.start_soon(api.operations.submit, admin_call(caller="one"))
            await engines.arrived[A, UPDATE].wait()
            scope.cancel()
    responses = []

    async def retry():
        responses.append(await api.operations.submit(admin_call(caller="one, again")))

    nursery.start_soon(retry)
    await wait_all_tasks_blocked()
    engines.open_gate(UPDATE)
    await wait_until_idle()
    assert responses[0].status == 200
    assert engines.paths().count(UPDATE) == 1


async def test_calls_are_refused_with_503_while_the_service_does_not_run(engines, folder):
    api = api_with(folder)
    refused = await api.operations.submit(admin_call())
    assert (refused.status, refused.body["error"]["code"]) == (503, "weights_unavailable")


async def test_a_service_that_ends_during_an_operation_leaves_its_targets_uncertain(
    engines, folder
):
    api = api_with(folder)
    responses = []
    async with trio.open_nursery() as outer:
        async with trio.open_nursery() as lifecycle:
            await lifecycle.start(api.operations.run)

            async def caller():
                responses.append(await api.operations.submit(admin_call()))

            outer.start_soon(caller)
            engines.close_gate(UPDATE)
            await engines.arrived[A, UPDATE].wait()
            lifecycle.cancel_scope.cancel()
        assert cordon_reasons_of(api) == [["updating"], ["updating"]]
        async with trio.open_nursery() as lifecycle:
            await lifecycle.start(api.operations.run)
            assert cordon_reasons_of(api) == [["uncertain"], ["uncertain"]]
            assert api.config_store.operation_lock.locked() is False
            assert (await api.operations.resolve({})).status == 200
            assert cordon_reasons_of(api) == [[], []]
            lifecycle.cancel_scope.cancel()
    assert responses[0].status == 503


async def test_resolve_keeps_workers_uncertain_that_did_not_continue(api, engines, folder):
    engines.replies[A, UPDATE] = engines.replies[B, UPDATE] = LOST
    await api.operations.submit(admin_call())
    engines.replies[A, "/continue_generation"] = LOST
    engines.replies[B, "/continue_generation"] = (404, b"{}")
    response = await api.operations.resolve({})
    assert (response.status, response.body["success"]) == (502, False)
    assert response.body["unresolved"] == {A: "ReadError"}
    assert response.body["resolved_worker_ids"] == [api.worker(B).id]
    assert list(read_journal(folder).uncertain) == [A]
    api.fleet.mark_dead(api.worker(A), api.worker(A).registered_at)
    assert (await api.operations.resolve({})).status == 200
    assert cordon_reasons_of(api) == [[], []]


async def test_the_history_is_bounded_and_contains_no_reads(api, engines):
    for _ in range(60):
        await api.operations.submit(admin_call("/continue_generation"))
    await api.operations.submit(admin_call("/model_info"))
    history = weight_status(api.operations)["history"]
    assert len(history) == 50
    assert {row["path"] for row in history} == {"/continue_generation"}


async def test_a_journal_that_cannot_be_cleared_is_reported_and_not_an_error(
    api, engines, folder, monkeypatch
):
    write = type(api.operations.journal._file).write

    def full(file, record):
        if record.in_progress is None:
            raise OSError(28, "No space left on device")
        write(file, record)

    monkeypatch.setattr(type(api.operations.journal._file), "write", full)
    response = await api.operations.submit(admin_call())
    assert (response.status, cordon_reasons_of(api)) == (200, [[], []])
    assert "No space left" in response.body["journal_error"]
    assert read_journal(folder).in_progress is not None


async def test_a_pause_survives_a_restart_and_ends_with_continue(engines, folder, nursery):
    hold = RoutingConfig(while_paused="hold")
    api = api_with(folder, routing=hold)
    await nursery.start(api.operations.run)
    await api.operations.submit(admin_call(PAUSE))
    assert read_journal(folder).paused == (A, B)
    again = api_with(folder, routing=hold)
    assert cordon_reasons_of(again) == [["paused"], ["paused"]]
    await nursery.start(again.operations.run)
    engines.replies[B, "/continue_generation"] = LOST
    await again.operations.submit(admin_call("/continue_generation"))
    assert (cordon_reasons_of(again), read_journal(folder).paused) == ([[], ["paused"]], (B,))
    passing = api_with(folder)
    assert cordon_reasons_of(passing) == [[], []]


async def test_continue_during_an_update_does_not_clear_its_record(engines, folder, nursery):
    api = api_with(folder, routing=RoutingConfig(while_paused="hold"))
    await nursery.start(api.operations.run)
    await api.operations.submit(admin_call(PAUSE))
    await start_operation(engines, nursery, api, admin_call())
    await api.operations.submit(admin_call("/continue_generation"))
    journal = read_journal(folder)
    assert (journal.in_progress.path, journal.paused) == (UPDATE, ())
    engines.open_gate(UPDATE)
    await wait_until_idle()
    assert (cordon_reasons_of(api), read_journal(folder)) == ([[], []], Journal())


async def test_lone_surrogates_in_worker_messages_are_replaced(api, engines, folder):
    engines.replies[B, UPDATE] = (500, b'{"message": "half \\ud83d"}')
    engines.labels[A] = "v\ud83d"
    response = await api.operations.submit(admin_call())
    assert (response.status, cordon_reasons_of(api)) == (502, [[], ["uncertain"]])
    assert read_journal(folder).uncertain[B].endswith("half ?")
    assert api_with(folder).operations.journal.published.epoch == 1


@pytest.mark.parametrize("steps", [1, 2] * 8)  # the order within a step is random
async def test_a_worker_may_become_healthy_while_the_service_ends(engines, folder, steps):
    """Between the end of the service's tasks and the end of their nursery is a scheduler step."""
    api, service_ended = api_with(folder), trio.Event()
    worker = api.worker(A)

    async def recover_later():
        with trio.CancelScope(shield=True):
            await service_ended.wait()
            for _ in range(steps):
                await trio.lowlevel.cancel_shielded_checkpoint()
            heal(api.fleet, worker)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(recover_later)
        await nursery.start(api.operations.run)
        api.fleet.process_exited(worker, "it was killed", NOW)
        api.fleet.revive(worker, NOW)
        await wait_until_idle()
        nursery.cancel_scope.cancel()
        service_ended.set()
    assert worker.health.state is Health.HEALTHY

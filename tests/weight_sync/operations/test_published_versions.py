"""The recorded versions of workers, and workers that missed an update."""

import pytest
import trio

from omni_proxy.config.schema import WeightSyncConfig
from tests.admin_api.api_fixture import A, B
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
)


async def versions_during(api, engines, nursery, call):
    """The recorded versions while the call runs on the workers."""
    await start_operation(engines, nursery, api, call)
    versions = [(w.weight_label, w.weight_epoch) for w in api.fleet.workers]
    engines.open_gate(call.route.path)
    await wait_until_idle()
    return versions


@pytest.mark.parametrize(
    ("path", "known"),
    [(UPDATE, None), ("/update_weight_version", None), (PAUSE, "v1"), ("/flush_cache", "v1")],
)
async def test_versions_are_unknown_while_weights_change(api, engines, nursery, path, known):
    await api.settle()
    assert await versions_during(api, engines, nursery, admin_call(path)) == [(known, 0)] * 2


async def test_a_worker_that_refused_keeps_its_version_and_an_uncertain_one_does_not(
    api, engines, nursery
):
    engines.labels = {A: "v2", B: "v2"}
    await api.operations.submit(admin_call(body={"weight_version": "v2"}))
    engines.replies[A, UPDATE] = engines.replies[B, UPDATE] = (400, b"{}")
    assert await versions_during(api, engines, nursery, admin_call()) == [(None, 0)] * 2
    assert [(w.weight_label, w.weight_epoch) for w in api.fleet.workers] == [("v2", 1)] * 2
    engines.replies[B, UPDATE] = LOST
    await api.operations.submit(admin_call())
    assert [w.weight_label for w in api.fleet.workers] == [None, None]


async def test_a_label_read_during_an_update_is_ignored(api, engines, nursery):
    engines.close_gate(UPDATE)
    nursery.start_soon(api.operations.submit, admin_call())
    await engines.arrived[A, UPDATE].wait()
    assert (await api.operations.submit(admin_call("/model_info"))).body["weight_version"] == "v1"
    assert [w.weight_label for w in api.fleet.workers] == [None, None]
    engines.open_gate(UPDATE)


async def test_a_label_is_read_again_if_the_response_to_its_change_was_lost(api, engines):
    await api.settle()
    engines.labels = {A: "v9", B: "v9"}
    engines.replies[B, "/update_weight_version"] = LOST
    response = await api.operations.submit(
        admin_call("/update_weight_version", {"new_version": "v9"})
    )
    assert (response.status, cordon_reasons_of(api)) == (502, [[], ["unproven"]])
    await wait_until_idle()
    assert (api.worker(B).weight_label, cordon_reasons_of(api)) == ("v9", [[], []])


async def miss_update(api, engines, label, body):
    """B is dead during an update of A, and returns with its old weights."""
    await api.settle()
    worker = api.worker(B)
    api.fleet.mark_dead(worker, worker.registered_at)
    engines.labels[A] = label
    assert (await api.operations.submit(admin_call(body=body))).status == 200
    api.fleet.revive(worker, worker.registered_at)
    api.healthy(B)
    await wait_until_idle()


async def test_a_worker_that_was_dead_during_an_update_does_not_serve_its_old_weights(
    api, engines, folder
):
    await miss_update(api, engines, "v2", {"weight_version": "v2"})
    reason = "missed the update to 'v2': it returned with 'v1'"
    assert (cordon_reasons_of(api), read_journal(folder).uncertain) == (
        [[], ["uncertain"]],
        {B: reason},
    )
    assert (api.worker(B).weight_label, api.worker(B).weight_epoch) == ("v1", 0)
    await api.operations.submit(admin_call("/continue_generation"))
    assert cordon_reasons_of(api) == [[], ["uncertain"]]
    engines.labels[B] = "v2"
    await api.operations.submit(admin_call(body={"weight_version": "v2"}))
    assert cordon_reasons_of(api) == [[], []]


async def test_a_worker_resolved_after_a_missed_update_is_not_held_for_it_again(api, engines):
    await miss_update(api, engines, "v2", {"weight_version": "v2"})
    assert (await api.operations.resolve({})).status == 200
    api.fleet.set_version(api.worker(B), None, 0)
    api.fleet.cache_cleared(api.worker(B))
    await wait_until_idle()
    assert (cordon_reasons_of(api), api.worker(B).weight_label) == ([[], []], "v1")


async def test_a_worker_that_crashed_after_an_update_does_not_serve_its_first_weights(api, engines):
    await api.settle()
    engines.labels = {A: "v2", B: "v2"}
    await api.operations.submit(admin_call(body={"weight_version": "v2"}))
    engines.labels[B] = "v1"
    api.fleet.set_version(api.worker(B), None, 0)
    api.fleet.cache_cleared(api.worker(B))
    await wait_until_idle()
    assert cordon_reasons_of(api) == [[], ["uncertain"]]


async def test_an_update_without_a_new_label_is_recognized_by_its_checksum(api, engines):
    engines.whole = {A: "new", B: "old"}
    await miss_update(api, engines, "v1", {})
    assert cordon_reasons_of(api) == [[], ["uncertain"]]
    assert "epoch 1: it returned with other tensors" in api.operations.journal.uncertain[B]
    await api.operations.resolve({})
    engines.whole = {A: "new", B: "new"}
    await miss_update(api, engines, "v1", {})
    assert cordon_reasons_of(api) == [[], []]
    assert api.worker(B).weight_epoch == 2


async def test_an_unchanged_label_proves_no_epoch(engines, folder, nursery):
    api = api_with(folder, weight_sync=WeightSyncConfig(verify="off"))
    await nursery.start(api.operations.run)
    await miss_update(api, engines, "v1", {})
    assert cordon_reasons_of(api) == [[], []]
    assert [w.weight_epoch for w in api.fleet.workers] == [1, 0]


async def test_workers_that_were_not_targets_have_not_missed_an_update(api, engines):
    await api.settle()
    engines.labels[A] = "v2"
    await api.operations.submit(admin_call(body={"weight_version": "v2"}, chosen=frozenset((A,))))
    api.fleet.set_version(api.worker(B), None, 0)
    api.fleet.cache_cleared(api.worker(B))
    await wait_until_idle()
    assert cordon_reasons_of(api) == [[], []]


async def test_a_worker_that_reports_no_label_is_probed_again(
    engines, folder, nursery, autojump_clock
):
    api = api_with(folder)
    await nursery.start(api.operations.run)
    await api.settle()
    engines.labels = {A: "v2", B: "v2"}
    await api.operations.submit(admin_call(body={"weight_version": "v2"}))
    for path in ("/model_info", "/get_model_info"):
        engines.replies[B, path] = (503, b"{}")
    api.fleet.set_version(api.worker(B), None, 0)
    api.fleet.cache_cleared(api.worker(B))
    await trio.sleep(1)
    assert (api.worker(B).weight_label, cordon_reasons_of(api)) == (None, [[], []])
    engines.replies.clear()
    engines.labels[B] = "v1"
    await trio.sleep(10)
    assert cordon_reasons_of(api) == [[], ["uncertain"]]

"""The recorded versions of workers, and workers that missed an update."""

import pytest
import trio

from omni_proxy.config.schema import WeightSyncConfig
from tests.admin_api.house import A, B
from tests.rest import at_rest
from tests.weight_sync.operation_fixture import (
    LOST,
    PAUSE,
    UPDATE,
    admin_call,
    cordon_reasons_of,
    house_with,
    read_journal,
    start_operation,
)


async def versions_while(house, engines, nursery, wanted):
    """The recorded versions while an operation runs on the workers."""
    await start_operation(engines, nursery, house, wanted)
    found = [(w.weight_version, w.weight_epoch) for w in house.fleet.workers]
    engines.open_gate(wanted.route.path)
    await at_rest()
    return found


@pytest.mark.parametrize(
    ("path", "known"),
    [(UPDATE, None), ("/update_weight_version", None), (PAUSE, "v1"), ("/flush_cache", "v1")],
)
async def test_versions_are_unknown_while_weights_change(house, engines, nursery, path, known):
    await house.settle()
    assert await versions_while(house, engines, nursery, admin_call(path)) == [(known, 0)] * 2


async def test_a_worker_that_refused_keeps_its_version_and_an_uncertain_one_has_none(
    house, engines, nursery
):
    engines.labels = {A: "v2", B: "v2"}
    await house.desk.submit(admin_call(body={"weight_version": "v2"}))
    engines.says[A, UPDATE] = engines.says[B, UPDATE] = (400, b"{}")
    assert await versions_while(house, engines, nursery, admin_call()) == [(None, 0)] * 2
    assert [(w.weight_version, w.weight_epoch) for w in house.fleet.workers] == [("v2", 1)] * 2
    engines.says[B, UPDATE] = LOST
    await house.desk.submit(admin_call())
    assert [w.weight_version for w in house.fleet.workers] == [None, None]


async def test_a_label_read_during_an_update_is_ignored(house, engines, nursery):
    engines.close_gate(UPDATE)
    nursery.start_soon(house.desk.submit, admin_call())
    await engines.arrived[A, UPDATE].wait()
    assert (await house.desk.submit(admin_call("/model_info"))).body["weight_version"] == "v1"
    assert [w.weight_version for w in house.fleet.workers] == [None, None]
    engines.open_gate(UPDATE)


async def test_a_lost_change_of_a_label_is_read_back(house, engines):
    await house.settle()
    engines.labels = {A: "v9", B: "v9"}
    engines.says[B, "/update_weight_version"] = LOST
    response = await house.desk.submit(admin_call("/update_weight_version", {"new_version": "v9"}))
    assert (response.status, cordon_reasons_of(house)) == (502, [[], ["unproven"]])
    await at_rest()
    assert (house.worker(B).weight_version, cordon_reasons_of(house)) == ("v9", [[], []])


async def missing(house, engines, label, body):
    """B is dead while A takes an update, and comes back with its old weights."""
    await house.settle()
    worker = house.worker(B)
    house.fleet.mark_dead(worker, worker.registered_at)
    engines.labels[A] = label
    assert (await house.desk.submit(admin_call(body=body))).status == 200
    house.fleet.revive(worker, worker.registered_at)
    house.healthy(B)
    await at_rest()


async def test_a_worker_that_was_dead_during_an_update_does_not_serve_its_old_weights(
    house, engines, folder
):
    await missing(house, engines, "v2", {"weight_version": "v2"})
    reason = "missed the update to 'v2': it came up with 'v1'"
    assert (cordon_reasons_of(house), read_journal(folder).uncertain) == (
        [[], ["uncertain"]],
        {B: reason},
    )
    assert (house.worker(B).weight_version, house.worker(B).weight_epoch) == ("v1", 0)
    await house.desk.submit(admin_call("/continue_generation"))
    assert cordon_reasons_of(house) == [[], ["uncertain"]]
    engines.labels[B] = "v2"
    await house.desk.submit(admin_call(body={"weight_version": "v2"}))
    assert cordon_reasons_of(house) == [[], []]


async def test_a_worker_resolved_after_a_missed_update_is_not_held_for_it_again(house, engines):
    await missing(house, engines, "v2", {"weight_version": "v2"})
    assert (await house.desk.resolve({})).status == 200
    house.fleet.set_version(house.worker(B), None, 0)
    house.fleet.cache_cleared(house.worker(B))
    await at_rest()
    assert (cordon_reasons_of(house), house.worker(B).weight_version) == ([[], []], "v1")


async def test_a_worker_that_crashed_after_an_update_does_not_serve_its_first_weights(
    house, engines
):
    await house.settle()
    engines.labels = {A: "v2", B: "v2"}
    await house.desk.submit(admin_call(body={"weight_version": "v2"}))
    engines.labels[B] = "v1"
    house.fleet.set_version(house.worker(B), None, 0)
    house.fleet.cache_cleared(house.worker(B))
    await at_rest()
    assert cordon_reasons_of(house) == [[], ["uncertain"]]


async def test_an_update_without_a_new_label_is_recognized_by_its_checksum(house, engines):
    engines.whole = {A: "new", B: "old"}
    await missing(house, engines, "v1", {})
    assert cordon_reasons_of(house) == [[], ["uncertain"]]
    assert "epoch 1: it came up with other tensors" in house.desk.journal.uncertain[B]
    await house.desk.resolve({})
    engines.whole = {A: "new", B: "new"}
    await missing(house, engines, "v1", {})
    assert cordon_reasons_of(house) == [[], []]
    assert house.worker(B).weight_epoch == 2


async def test_a_label_that_existed_before_proves_no_epoch(engines, folder, nursery):
    house = house_with(folder, weight_sync=WeightSyncConfig(verify="off"))
    await nursery.start(house.desk.run)
    await missing(house, engines, "v1", {})
    assert cordon_reasons_of(house) == [[], []]
    assert [w.weight_epoch for w in house.fleet.workers] == [1, 0]


async def test_workers_that_were_not_targets_have_not_missed_an_update(house, engines):
    await house.settle()
    engines.labels[A] = "v2"
    await house.desk.submit(admin_call(body={"weight_version": "v2"}, chosen=frozenset((A,))))
    house.fleet.set_version(house.worker(B), None, 0)
    house.fleet.cache_cleared(house.worker(B))
    await at_rest()
    assert cordon_reasons_of(house) == [[], []]


async def test_a_worker_that_reports_no_label_is_probed_again(
    engines, folder, nursery, autojump_clock
):
    house = house_with(folder)
    await nursery.start(house.desk.run)
    await house.settle()
    engines.labels = {A: "v2", B: "v2"}
    await house.desk.submit(admin_call(body={"weight_version": "v2"}))
    for path in ("/model_info", "/get_model_info"):
        engines.says[B, path] = (503, b"{}")
    house.fleet.set_version(house.worker(B), None, 0)
    house.fleet.cache_cleared(house.worker(B))
    await trio.sleep(1)
    assert (house.worker(B).weight_version, cordon_reasons_of(house)) == (None, [[], []])
    engines.says.clear()
    engines.labels[B] = "v1"
    await trio.sleep(10)
    assert cordon_reasons_of(house) == [[], ["uncertain"]]

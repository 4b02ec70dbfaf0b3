import json
import shutil

import pytest
import trio

from omni_proxy.admin_ops.admin_route_table import BY_PATH
from omni_proxy.weight_sync.delivery import catchup
from omni_proxy.weight_sync.protocol.published_version import TargetVersion
from omni_proxy.weight_sync.worker_calls import AdminCall
from tests.admin_api.api_fixture import NOW, A, B, build_api
from tests.weight_sync.version_holders import CHECKER, DISK, FIRST_DIGESTS, VersionEngines

pytest.importorskip("torch")
ENGINES = VersionEngines


def mark_down(running, url):
    worker = running.api.worker(url)
    for _ in range(running.api.fleet.thresholds.fall):
        epoch = worker.health.epoch
        running.api.fleet.observe_probe(worker, status=None, error="gone", at=NOW, epoch=epoch)
    running.api.fleet.revive(worker, NOW)


def restart(running, url):
    """The worker's process restarts with its first weights."""
    mark_down(running, url)
    running.engines.restart(url)
    running.api.fleet.set_version(running.api.worker(url), None, 0)


# A sync that succeeds on all workers


async def test_a_received_version_is_delivered_to_all_workers_and_published(running):
    completed = await running.sync(1)
    assert completed.ok
    assert completed.body["weight_version"] == "v1"
    assert completed.body["num_buckets_received"] == 1
    assert running.versions() == [("v1", 1), ("v1", 1)]
    assert running.cordon_reasons() == [[], []]
    current = running.store.current
    assert (current.label, current.epoch) == ("v1", 1)
    assert running.engines.holds[A] == running.engines.holds[B] == current.digests


async def test_a_newer_version_becomes_current_and_both_are_kept(running):
    await running.sync(1)
    await running.sync(2)
    assert [(v.label, v.epoch) for v in running.store.versions()] == [("v2", 2), ("v1", 1)]
    await running.until(lambda: all(version.on_disk for version in running.store.versions()))


# A worker that fails to load the version


async def test_on_failure_quarantine_publishes_for_the_other_workers(running):
    running.engines.failing_loads[B] = 1
    completed = await running.sync(1)
    assert (completed.status, completed.body["success"]) == (502, False)
    assert f"{B}: status 500: out of memory" in completed.body["message"]
    assert list(completed.body["uncertain"]) == [B]
    assert running.cordon_reasons() == [[], ["uncertain"]]
    assert running.versions()[0] == ("v1", 1)
    assert running.store.current.label == "v1"


@pytest.mark.parametrize("policy", ["forward"])
async def test_on_failure_forward_delivers_the_version_again(running):
    running.engines.failing_loads[B] = 1
    completed = await running.sync(1)
    assert completed.ok, completed.body
    assert running.versions() == [("v1", 1), ("v1", 1)]
    assert (running.cordon_reasons(), running.engines.loads(A), running.engines.loads(B)) == (
        [[], []],
        1,
        2,
    )


@pytest.mark.parametrize("policy", ["forward"])
async def test_a_worker_that_fails_the_forward_too_is_uncertain(running):
    running.engines.failing_loads[B] = 2
    completed = await running.sync(1)
    assert (completed.status, list(completed.body["uncertain"])) == (502, [B])
    assert running.cordon_reasons() == [[], ["uncertain"]]


@pytest.mark.parametrize("policy", ["rollback"])
async def test_on_failure_rollback_delivers_the_previous_version_to_all(running):
    await running.sync(1)
    before = dict(running.engines.holds)
    running.engines.failing_loads[B] = 1
    completed = await running.sync(2)
    assert (completed.status, completed.body["rolled_back_to"]) == (502, "v1")
    assert (
        "out of memory; version 1 ('v1') was delivered to all workers again"
        in completed.body["message"]
    )
    assert running.engines.holds == before
    assert (running.versions(), running.cordon_reasons()) == ([("v1", 2), ("v1", 2)], [[], []])
    assert [(v.label, v.epoch) for v in running.store.versions()] == [("v1", 2)]
    assert (await running.sync(3)).ok


@pytest.mark.parametrize("policy", ["rollback"])
async def test_without_a_previous_version_there_is_no_rollback(running):
    running.engines.failing_loads[B] = 1
    assert (await running.sync(1)).status == 502
    assert running.cordon_reasons() == [[], ["uncertain"]]


async def test_weights_that_all_refuse_leave_no_worker_uncertain(running):
    await running.sync(1)
    running.engines.refuses = True
    completed = await running.sync(2)
    assert (completed.ok, "the model has no tensor" in completed.body["message"]) == (False, True)
    assert (running.versions(), running.cordon_reasons()) == ([("v1", 1), ("v1", 1)], [[], []])
    assert [version.label for version in running.store.versions()] == ["v1"]


# Catching up


async def test_a_restarted_worker_is_held_until_it_has_caught_up(running):
    await running.sync(1)
    restart(running, B)
    running.engines.close_gate(DISK, B)
    running.api.healthy(B)
    assert (running.cordon_reasons()[1], running.api.worker(B).routable) == (["catching_up"], False)
    await running.engines.arrived[B, DISK].wait()
    assert not running.api.worker(B).routable
    running.engines.open_gate(DISK, B)
    await running.until(lambda: running.api.worker(B).routable)
    assert running.versions() == [("v1", 1), ("v1", 1)]
    assert running.engines.holds[B] == running.store.current.digests
    assert running.operations.version_service.catch_up.caught_up == 1


async def test_a_worker_that_has_the_version_gets_no_delivery(running):
    await running.sync(1)
    mark_down(running, B)
    running.api.healthy(B)
    assert running.cordon_reasons()[1] == ["catching_up"]
    await running.until(lambda: running.api.worker(B).routable)
    assert (running.engines.loads(B), running.versions()[1]) == (1, ("v1", 1))


async def test_a_worker_that_reports_the_label_but_holds_other_tensors_is_detected(running):
    await running.sync(1)
    mark_down(running, B)
    running.engines.holds[B] = FIRST_DIGESTS
    running.api.healthy(B)
    await running.until(lambda: running.api.worker(B).routable)
    assert running.engines.holds[B] == running.store.current.digests


async def test_an_uncertain_worker_recovers_after_a_restart(running):
    running.engines.failing_loads[B] = 1
    await running.sync(1)
    restart(running, B)
    running.api.healthy(B)
    await running.until(lambda: running.api.worker(B).routable)
    assert (running.versions()[1], running.operations.journal.uncertain) == (("v1", 1), {})


async def test_a_worker_that_cannot_catch_up_becomes_uncertain(running, monkeypatch):
    monkeypatch.setattr(catchup, "RETRY_SECS", (0.01, 0.01))
    await running.sync(1)
    restart(running, B)
    running.engines.failing_loads[B] = 99
    running.api.healthy(B)
    await running.until(lambda: running.cordon_reasons()[1] == ["uncertain"])
    assert running.engines.loads(B) == 1 + 3
    reason = running.operations.journal.uncertain[B]
    assert "did not catch up: status 500: out of memory" in reason


async def test_a_worker_whose_target_version_vanished_is_not_released_with_older_weights(
    running, monkeypatch
):
    monkeypatch.setattr(catchup, "RETRY_SECS", (0.01, 0.01))
    await running.sync(1)
    await running.until(lambda: running.store.current.on_disk)
    for version in running.store.versions():
        for root in running.store.roots:
            shutil.rmtree(root / version.folder.name, ignore_errors=True)
    restart(running, B)
    running.api.healthy(B)
    with trio.fail_after(10):
        while running.cordon_reasons()[1] != ["uncertain"]:
            assert not running.api.worker(B).routable
            await trio.lowlevel.checkpoint()
    assert (
        "missed the update to 'v1': it returned with 'default'"
        in running.operations.journal.uncertain[B]
    )
    assert (await running.sync(2)).ok
    assert (running.versions(), running.cordon_reasons()) == ([("v2", 2), ("v2", 2)], [[], []])


async def test_a_worker_whose_target_is_not_in_the_store_is_checked_by_label(running):
    """Another update published a version while the worker waited to catch up."""
    await running.sync(1)
    restart(running, B)
    async with running.api.config_store.operation_lock:
        running.api.healthy(B)
        await running.until(lambda: running.engines.paths(B).count(CHECKER) > 1)
        target = TargetVersion(
            label="elsewhere", is_new_label=True, models=(running.api.worker(B).model,)
        )
        await running.operations.journal.publish(target, None)
    await running.until(lambda: running.cordon_reasons()[1] == ["uncertain"])
    assert "missed the update to 'elsewhere'" in running.operations.journal.uncertain[B]


# Listing versions, and rolling back


async def test_versions_are_listed_newest_first(running):
    client = running.api.client()
    assert (await (await client.get("/weights/versions")).get_json())["versions"] == []
    await running.sync(1)
    await running.sync(2)
    body = await (await client.get("/weights/versions")).get_json()
    rows = [(v["version"], v["number"], v["current"]) for v in body["versions"]]
    assert rows == [("v2", 2, True), ("v1", 1, False)]
    assert body["versions"][0]["checksum"]
    assert body["current"] == 2


@pytest.mark.parametrize("request_body", [{"version": "v1"}, {"version": 1}, {}])
async def test_a_rollback_delivers_an_older_version_under_a_new_epoch(running, request_body):
    await running.sync(1)
    first = dict(running.engines.holds)
    await running.sync(2)
    client = running.api.client()
    response = await client.post("/weights/rollback", json=request_body)
    body = await response.get_json()
    assert (response.status_code, body["success"], body["weight_epoch"]) == (200, True, 3), body
    assert running.engines.holds == first
    assert running.versions() == [("v1", 3), ("v1", 3)]
    assert (running.store.current.number, running.store.current.epoch) == (1, 3)
    assert running.operations.history.rows[-1]["path"] == "/weights/rollback"
    restart(running, B)
    running.api.healthy(B)
    await running.until(lambda: running.api.worker(B).routable)
    assert running.versions()[1] == ("v1", 3)


PAUSE, CONTINUE = "/pause_generation", "/continue_generation"


@pytest.mark.parametrize("way", ["sync", "rollback", "catching up"])
async def test_engines_that_a_caller_paused_stay_paused(running, way):
    await running.sync(1)
    await running.sync(2)
    pause = AdminCall(BY_PATH[PAUSE], "POST", PAUSE, b"{}")
    assert (await running.operations.submit(pause)).ok
    running.engines.requests.clear()
    if way == "sync":
        assert (await running.sync(3)).ok
    elif way == "rollback":
        response = await running.api.client().post("/weights/rollback", json={"version": "v1"})
        assert response.status_code == 200
    else:
        mark_down(running, B)
        running.engines.holds[B] = FIRST_DIGESTS  # the process is the same
        running.api.healthy(B)
        await running.until(lambda: running.operations.version_service.catch_up.caught_up == 1)
    assert DISK in running.engines.paths(B)
    assert CONTINUE not in [*running.engines.paths(A), *running.engines.paths(B)]


@pytest.mark.parametrize(
    ("request_body", "status", "message"),
    [
        ({"version": "v9"}, 404, "there are: version 1 ('v1')"),
        ({"version": 9}, 404, "there is no version 9"),
        ({}, 404, "no version before the current one"),
        ({"version": True}, 400, "a number or a label"),
        ({"version": ["v1"]}, 400, "a number or a label"),
    ],
)
async def test_a_rollback_to_an_unknown_version_is_refused_before_any_call(
    running, request_body, status, message
):
    await running.sync(1)
    response = await running.api.client().post("/weights/rollback", json=request_body)
    body = await response.get_json()
    assert (response.status_code, body["success"], body["status"]) == (status, False, "error")
    assert message in body["message"]
    assert running.engines.loads() == 1


async def test_a_rollback_without_a_store_is_refused():
    client = build_api().client()
    body = json.loads(await (await client.get("/weights/versions")).get_data())
    assert (body["store"], body["versions"]) == (None, [])
    response = await client.post("/weights/rollback", json={"version": "v1"})
    assert response.status_code == 404
    assert "no versions are kept" in (await response.get_json())["message"]

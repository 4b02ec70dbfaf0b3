"""Rollouts over scripted engines: order of calls, outcomes, rollback, invalid plans, vLLM."""

import json

import httpx
import pytest

from omni_proxy.admin_api.serializers.weight_status import weight_status
from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.routing.disaggregation.partners import can_serve
from omni_proxy.weight_sync.rollout.request import parse_rollout
from omni_proxy.weight_sync.rollout.service import RolloutCall, spread_roles
from omni_proxy.weight_sync.weight_operations import RESOLVE
from tests.admin_api.api_fixture import A, B, build_api, entry
from tests.fleet.entries import entry as worker_entry
from tests.fleet.entries import fleet_of
from tests.weight_sync.operation_fixture import (
    PAUSE,
    UPDATE,
    GatedEngines,
    admin_call,
    api_with,
    cordon_reasons_of,
    read_journal,
)
from tests.weight_sync.rollout.rollout_fixture import (
    BODY,
    CHECKER,
    INFO,
    PROBE,
    LoadingEngines,
    ended_rollout,
    rollout_when,
    start_rollout,
    states,
    versions,
)

ENGINES = LoadingEngines


async def test_workers_are_updated_one_after_the_other_while_the_other_serves(settled, engines):
    api = settled
    engines.close_gate(UPDATE, A)
    response = await start_rollout(api)
    assert (response.status, response.body["rollout"]["state"]) == (202, "running")
    await engines.arrived[A, UPDATE].wait()
    assert cordon_reasons_of(api) == [["rollout", "updating"], []]
    assert engines.loaded(B) == []
    engines.open_gate(UPDATE, A)
    body = await ended_rollout(api)
    assert (body["state"], body["updated"], body["weight_epoch"]) == ("succeeded", 2, 1)
    assert versions(api) == [("v2", 1), ("v2", 1)]
    assert cordon_reasons_of(api) == [[], []]
    calls = [path for path in engines.paths(B) if path not in (INFO, "/get_model_info")]
    assert calls == [CHECKER, UPDATE, CHECKER, PROBE]
    published = api.operations.journal.published
    assert (published.epoch, published.label, list(published.targets)) == (1, "v2", ["*"])


async def test_the_journal_names_the_worker_before_it_is_called(settled, engines, folder):
    engines.close_gate(UPDATE, A)
    await start_rollout(settled)
    await engines.arrived[A, UPDATE].wait()
    journal = read_journal(folder)
    assert [row.phase for row in journal.rollout.workers] == ["updating", "pending"]
    reasons = journal.uncertain_at_start()
    assert list(reasons) == [A]
    assert "to 'v2': the proxy ended while it was being updated" in reasons[A]
    engines.open_gate(UPDATE, A)
    await ended_rollout(settled)
    assert not read_journal(folder)


async def test_a_worker_is_drained_before_it_is_called(settled, engines):
    settled.worker(A).in_flight = 1
    await start_rollout(settled)
    body = await rollout_when(settled, lambda rollout: rollout["workers"][0]["step"] == "draining")
    assert (body["state"], engines.loaded(A)) == ("running", [])
    assert weight_status(settled.operations)["operation"]["step"] == "draining"
    settled.worker(A).in_flight = 0
    assert (await ended_rollout(settled))["state"] == "succeeded"


async def test_a_worker_that_does_not_drain_in_time_ends_the_rollout_unchanged(settled, engines):
    settled.worker(A).in_flight = 2
    await start_rollout(settled, drain_secs=0.05)
    body = await ended_rollout(settled)
    assert (body["state"], states(body)) == ("failed", ["pending", "pending"])
    assert f"requests were still running after 0.05 s: 2 at {A}" in body["cause"]
    assert engines.loaded(A) == engines.loaded(B) == []
    assert cordon_reasons_of(settled) == [[], []]
    assert versions(settled) == [("v1", 0), ("v1", 0)]


async def test_a_file_that_the_canary_refuses_ends_the_rollout_without_changes(settled, engines):
    engines.set_reply(A, UPDATE, {"success": False, "message": "no such file"}, 400)
    await start_rollout(settled)
    body = await ended_rollout(settled)
    assert (body["state"], states(body)) == ("failed", ["restored", "pending"])
    assert body["cause"] == f"{A}: status 400: no such file"
    assert engines.loaded(B) == []
    assert versions(settled) == [("v1", 0), ("v1", 0)]
    assert (cordon_reasons_of(settled), settled.operations.journal.uncertain) == ([[], []], {})
    assert settled.operations.journal.published.epoch == 0


async def test_updated_workers_are_rolled_back_if_a_later_one_fails(settled, engines):
    engines.set_reply(B, UPDATE, {"success": False, "message": "no such file"}, 400)
    await start_rollout(settled)
    body = await ended_rollout(settled)
    assert (body["state"], states(body)) == ("failed", ["restored", "restored"])
    assert engines.loaded(A) == ["/m/v2", "/m/v1"]
    assert versions(settled) == [("v1", 0), ("v1", 0)]
    published = settled.operations.journal.published
    assert (published.epoch, published.label, published.targets) == (0, None, {})
    del engines.replies[B, UPDATE]
    await start_rollout(settled)
    assert (await ended_rollout(settled))["weight_epoch"] == 2  # no epoch is used twice
    assert versions(settled) == [("v2", 2), ("v2", 2)]


@pytest.mark.parametrize(
    ("path", "reply", "message"),
    [
        (UPDATE, (500, b'{"message": "out of memory"}'), "status 500: out of memory"),
        (UPDATE, httpx.ReadError("gone"), "ReadError"),
        (PROBE, (503, b"no token"), "the probe request failed: status=503: no token"),
    ],
)
async def test_a_worker_with_unknown_weights_is_restored(settled, engines, path, reply, message):
    """Its former weights are proven, so it serves again."""
    engines.replies[A, path] = [reply, (200, b'{"success": true}')]
    if path == UPDATE:
        engines.paths_held[A] = "/m/v1"
    await start_rollout(settled)
    body = await ended_rollout(settled)
    assert (body["state"], states(body)) == ("failed", ["restored", "pending"])
    assert message in body["cause"]
    assert versions(settled) == [("v1", 0), ("v1", 0)]
    assert (cordon_reasons_of(settled), settled.operations.journal.uncertain) == ([[], []], {})


async def test_a_worker_that_cannot_be_restored_is_uncertain(settled, engines):
    engines.replies[A, UPDATE] = (500, b'{"message": "out of memory"}')
    await start_rollout(settled)
    body = await ended_rollout(settled)
    assert (body["state"], states(body)) == ("failed", ["lost", "pending"])
    reason = weight_status(settled.operations)["uncertain"][A]
    name = f"rollout {body['id'][:8]} to 'v2'"
    assert reason == f"{name}: it could not be restored: status 500: out of memory"
    assert cordon_reasons_of(settled) == [["uncertain"], []]
    assert settled.worker(B).routable


async def test_a_worker_that_does_not_report_the_new_label_has_failed(settled, engines):
    engines.replies[A, UPDATE] = (200, b'{"success": true}')  # loads nothing
    await start_rollout(settled)
    body = await ended_rollout(settled)
    assert "it reports the weight version 'v1' after loading 'v2'" in body["cause"]


async def test_a_checksum_that_differs_from_the_first_is_a_failure(settled, engines):
    engines.broken_loads.add((B, "/m/v2"))
    await start_rollout(settled)
    body = await ended_rollout(settled)
    assert (body["state"], states(body)) == ("failed", ["restored", "restored"])
    assert "its checksum differs from the recorded one of 'v2'" in body["cause"]
    assert versions(settled) == [("v1", 0), ("v1", 0)]


async def test_a_worker_rolled_back_to_different_weights_is_uncertain(settled, engines):
    """After an update over a process group, `model_path` is not the source of the weights."""
    engines.broken_loads |= {(A, "/m/v1")}
    engines.set_reply(B, UPDATE, {"success": False, "message": "no such file"}, 400)
    await start_rollout(settled)
    rollout = await ended_rollout(settled)
    assert states(rollout) == ["lost", "restored"]
    assert (
        "its checksum differs from the recorded one of 'v1'"
        in weight_status(settled.operations)["uncertain"][A]
    )


async def test_with_verify_off_no_checksum_is_requested(engines, folder, nursery):
    api = api_with(folder, weight_sync=WeightSyncConfig(verify="off"))
    await nursery.start(api.operations.run)
    await api.settle()
    await start_rollout(api)
    assert (await ended_rollout(api))["state"] == "succeeded"
    assert CHECKER not in engines.paths(A)


async def test_invalid_plans_are_refused_before_anything_is_changed(settled, engines):
    journal = settled.operations.journal
    in_use = await start_rollout(settled, weight_version="v1")
    assert (in_use.status, in_use.body["error"]["code"]) == (409, "label_in_use")
    assert A in in_use.body["message"]
    await settled.operations.submit(admin_call(PAUSE))
    paused = await start_rollout(settled)
    assert (paused.status, paused.body["error"]["code"]) == (409, "workers_paused")
    await settled.operations.submit(admin_call("/continue_generation"))
    for path in (INFO, "/get_model_info", "/weight_info"):
        engines.set_reply(B, path, {"detail": "Not Found"}, 404)
    unsupported = await start_rollout(settled)
    assert (unsupported.status, unsupported.body["error"]["code"]) == (422, "not_updatable")
    assert list(unsupported.body["workers"]) == [B]
    assert "VLLM_SERVER_DEV_MODE=1" in unsupported.body["message"]
    assert engines.loaded(A) == []
    assert (journal.rollout, settled.operations.rollouts.status()) == (None, None)


async def test_with_several_models_the_workers_must_be_selected(engines, folder, nursery):
    api = build_api(entry(A, model="a"), entry(B, model="b"), folder=folder)
    api.healthy(A, B)
    await nursery.start(api.operations.run)
    await api.settle()
    refused = await start_rollout(api)
    assert (refused.status, refused.body["error"]["code"]) == (400, "invalid_rollout")
    assert "several models: a, b" in refused.body["message"]
    call = RolloutCall(parse_rollout(BODY), frozenset({B}), "me")
    assert (await api.operations.start_rollout(call)).status == 202
    body = await ended_rollout(api)
    assert [row["worker"] for row in body["workers"]] == [B]
    assert engines.loaded(A) == []
    assert list(api.operations.journal.published.targets) == [B]


async def test_a_plan_that_cannot_be_recorded_is_refused(settled, folder):
    folder.mkdir(exist_ok=True)
    (folder / "journal.json").mkdir()
    refused = await start_rollout(settled)
    assert (refused.status, refused.body["error"]["code"]) == (503, "journal_unwritable")
    assert settled.operations.rollouts.status() is None


VLLM_PATHS = ("/weight_info", "/v1/models")


class VllmEngines(GatedEngines):
    """Responds as vLLM 0.32.0 in dev mode."""

    def __init__(self):
        super().__init__()
        self.labels = {A: "default", B: "default"}

    async def answer(self, request):
        url = str(request.url.copy_with(raw_path=b"/")).rstrip("/")
        if request.url.path == "/update_weight_version":
            self.labels[url] = json.loads(request.content)["new_version"]
        return await super().answer(request)

    def default_response(self, url, path):
        if path == "/v1/models":
            return {"data": [{"id": "m", "root": "/m/base", "parent": None}]}
        if path == "/weight_info":
            return {"weight_version": self.labels[url]}
        return {"results": [None]}

    async def respond(self, request, url, path):
        if path in (INFO, "/get_model_info", CHECKER, PROBE, UPDATE, "/flush_cache"):
            self.set_reply(url, path, {"detail": "Not Found"}, 404)
        return await super().respond(request, url, path)

    def reloads(self, url):
        port = int(url.rpartition(":")[2])
        requests = [
            r for r in self.requests if r.url.path == "/collective_rpc" and r.url.port == port
        ]
        return [json.loads(request.content)["kwargs"]["weights_path"] for request in requests]


@pytest.fixture
async def vllm(monkeypatch, folder, nursery):
    engines = VllmEngines().install(monkeypatch)
    api = api_with(folder)
    await nursery.start(api.operations.run)
    await api.settle()
    return api, engines


async def test_vllm_workers_reload_by_collective_rpc_and_restore_their_root(vllm):
    api, engines = vllm
    await start_rollout(api)
    assert (await ended_rollout(api))["state"] == "succeeded"
    assert (engines.reloads(A), engines.labels) == (["/m/v2"], {A: "v2", B: "v2"})
    assert "/reset_prefix_cache" in engines.paths(A)
    assert versions(api) == [("v2", 1), ("v2", 1)]
    # `root` is still the first path; the path of the last rollout is restored.
    engines.replies[B, "/collective_rpc"] = [(500, b'{"error": {"message": "bad"}}'), (200, b"{}")]
    await start_rollout(api, model_path="/m/v3", weight_version="v3")
    body = await ended_rollout(api)
    assert (body["state"], states(body)) == ("failed", ["restored", "restored"])
    assert engines.reloads(A) == ["/m/v2", "/m/v3", "/m/v2"]
    assert versions(api) == [("v2", 1), ("v2", 1)]


async def test_a_vllm_worker_that_cannot_reload_a_path_keeps_its_weights(vllm):
    api, engines = vllm
    error = b'{"error": {"message": "reload_weights() got an unexpected keyword argument"}}'
    engines.replies[A, "/collective_rpc"] = (500, error)
    await start_rollout(api)
    body = await ended_rollout(api)
    assert (body["state"], states(body)) == ("failed", ["restored", "pending"])
    assert "it can't reload weights from a path" in body["cause"]
    assert api.operations.journal.uncertain == {}


async def test_vllm_workers_with_the_weights_of_a_trainer_are_refused(vllm):
    api, engines = vllm
    engines.labels = {A: "step-3", B: "step-3"}
    await api.settle()
    engines.replies[A, "/update_weight_version"] = engines.replies[B, "/update_weight_version"] = (
        200, b'{"success": true}'
    )  # fmt: skip
    update = admin_call("/update_weight_version", {"new_version": "step-3"})
    assert (await api.operations.submit(update)).ok
    refused = await start_rollout(api)
    assert refused.body["error"]["code"] == "not_updatable"
    assert "could not be restored" in refused.body["message"]


def test_resolve_does_not_count_as_an_update():
    assert not RESOLVE.labels


def test_a_rollout_alternates_between_prefill_and_decode_workers():
    def order(*roles):
        fleet = fleet_of(*(worker_entry(f"w{n}", role=role) for n, role in enumerate(roles)))
        return [worker.role[0] for worker in spread_roles(fleet.workers)]

    assert order("prefill", "prefill", "decode", "decode") == ["p", "d", "p", "d"]
    assert order(*["prefill"] * 2, *["decode"] * 6) == ["d", "p", "d", "d", "d", "p", "d", "d"]
    assert order("regular", "regular", "regular") == ["r", "r", "r"]


def test_a_fleet_with_two_pairs_always_has_a_pair_during_a_rollout():
    fleet = fleet_of(
        *(worker_entry(f"p{n}", role="prefill") for n in range(2)),
        *(worker_entry(f"d{n}", role="decode") for n in range(2)),
    )
    for worker in spread_roles(fleet.workers):
        others = [other for other in fleet.workers if other is not worker]
        assert can_serve(others, fallback=False)
        fleet.set_version(worker, "v2", 2)
        assert can_serve(fleet.workers, fallback=False)

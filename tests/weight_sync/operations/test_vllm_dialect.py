"""Calls of vLLM without a group (pauses, sleep, labels, checksums), in fleets of both engines."""

import pytest
from trio.testing import wait_all_tasks_blocked

from omni_proxy.config.schema import RoutingConfig
from tests.admin_api.api_fixture import A, B
from tests.weight_sync.operation_fixture import admin_call, api_with, cordon_reasons_of
from tests.weight_sync.trainer_fixture import uncertain_workers, versions_by_url
from tests.weight_sync.vllm_fixture import (
    INIT,
    LOST,
    PAUSE,
    RESUME,
    START,
    VllmEngines,
    rpc_error,
    vllm_call,
)

ENGINES = VllmEngines


@pytest.fixture
def mixed(engines):
    engines.kinds[B] = "sglang"
    return engines


async def ask(api, path, body=None, **fields):
    response = await api.operations.submit(vllm_call(path, body, **fields))
    assert response.ok is response.body["success"], response
    return response


# Pauses


async def test_a_pause_has_the_response_of_a_single_engine(api, engines):
    response = await ask(api, PAUSE, query="mode=keep&clear_cache=false")
    assert (response.status, response.body["status"]) == (200, "paused")
    assert engines.targets(PAUSE, B) == ["/pause?mode=keep&clear_cache=false"]
    assert api.operations.journal.pauses()[A].mode == "keep"
    paused = (await ask(api, "/is_paused", method="GET")).body["is_paused"]
    assert paused is True
    assert (await ask(api, RESUME)).body["status"] == "resumed"
    assert api.operations.journal.pauses() == {}


async def test_each_engine_gets_the_call_in_its_own_dialect(api, mixed):
    response = await ask(api, PAUSE, query="mode=keep")
    assert response.status == 200
    assert mixed.targets(PAUSE) == ["/pause?mode=keep"]
    assert mixed.bodies("/pause_generation", B) == [{"mode": "in_place"}]
    assert [row.get("sent_to") for row in response.body["results"]] == [None, "/pause_generation"]
    assert (await ask(api, "/is_paused", method="GET")).body["is_paused"] is True
    await ask(api, RESUME)
    assert mixed.bodies("/continue_generation", B) == [{}]
    assert (await ask(api, "/is_paused", method="GET")).body["is_paused"] is False


async def test_calls_of_sglang_are_translated_for_vllm(api, mixed):
    response = await api.operations.submit(admin_call("/pause_generation", {"mode": "retract"}))
    assert response.ok
    assert mixed.targets(PAUSE) == ["/pause?mode=keep"]
    assert (await api.operations.submit(admin_call("/continue_generation"))).ok
    assert mixed.targets(RESUME) == ["/resume"]
    mixed.labels[B] = "v1"
    assert (await api.operations.submit(admin_call("/model_info"))).status == 409
    mixed.labels[B] = "default"
    assert (await api.operations.submit(admin_call("/model_info"))).body[
        "weight_version"
    ] == "default"


async def test_an_invalid_mode_is_refused_as_by_a_single_engine(api, engines):
    error = {"error": {"message": "Input should be 'abort', 'wait' or 'keep'", "code": 400}}
    for url in (A, B):
        engines.set_reply(url, PAUSE, error, 400)
    response = await ask(api, PAUSE, query="mode=bogus")
    assert (response.status, "Input should be" in response.body["message"]) == (400, True)
    assert api.operations.journal.pauses() == {}
    assert cordon_reasons_of(api) == [[], []]


@pytest.mark.parametrize(
    ("mode", "cleared"), [("keep", []), ("abort", [A, B]), ("wait", [A, B]), ("", [A, B])]
)
async def test_a_pause_clears_cache_knowledge_unless_its_mode_is_keep(api, mode, cleared):
    await ask(api, "/weight_info", method="GET")
    forgotten = []
    api.fleet.watch_cache_cleared(lambda worker: forgotten.append(worker.url))
    await ask(api, PAUSE, query=f"mode={mode}" if mode else "")
    assert forgotten == cleared
    assert set(api.operations.journal.pauses()) == {A, B}


async def test_requests_of_an_uncertain_engine_are_aborted_before_it_resumes(api, engines):
    await ask(api, PAUSE, query="mode=keep")
    api.operations.journal.mark_uncertain({A: "half an update"})
    await ask(api, RESUME)
    assert engines.bodies("/abort_requests", A) == [{}]
    assert engines.bodies("/abort_requests", B) == []
    assert engines.paths(A).index("/abort_requests") < engines.paths(A).index(RESUME)


# Sleep


async def test_requests_are_held_for_a_sleeping_engine_as_for_a_paused_one(
    engines, folder, nursery
):
    api = api_with(folder, routing=RoutingConfig(while_paused="hold"))
    await nursery.start(api.operations.run)
    response = await ask(api, "/sleep", query="level=1")
    assert (response.body["status"], response.body["level"]) == ("sleeping", 1)
    assert cordon_reasons_of(api) == [["paused"], ["paused"]]
    assert (await ask(api, "/is_sleeping", method="GET")).body["is_sleeping"] is True
    # vLLM reports that it resumed, but still sleeps (tested with 0.32.0).
    await ask(api, RESUME)
    assert cordon_reasons_of(api) == [["paused"], ["paused"]]
    assert (await ask(api, "/wake_up")).body["status"] == "awake"
    assert cordon_reasons_of(api) == [[], []]
    assert uncertain_workers(api) == []


async def test_weights_discarded_by_a_sleep_must_be_restored(api, engines):
    response = await ask(api, "/sleep", query="level=2")
    assert [row["standing"] for row in response.body["results"]] == ["uncertain"] * 2
    await ask(api, "/wake_up")
    assert uncertain_workers(api) == [A, B]
    assert versions_by_url(api) == {A: (None, 0), B: (None, 0)}
    body = {"method": "reload_weights"}
    assert (await ask(api, "/collective_rpc", body)).body["weight_epoch"] == 1
    assert uncertain_workers(api) == []


# Other calls


async def test_the_world_size_is_the_sum_over_both_engines(api, mixed):
    mixed.ranks = {A: 2, B: 3}
    response = await ask(api, "/get_world_size", method="GET")
    assert response.body["world_size"] == 5


async def test_a_label_is_set_on_all_workers(api, engines):
    response = await ask(api, "/update_weight_version", {"new_version": "step-7"})
    assert response.body["weight_versions"] == {A: "step-7", B: "step-7"}
    assert (await ask(api, "/weight_info", method="GET")).body["weight_version"] == "step-7"


async def test_a_collective_rpc_without_weights_keeps_workers_routable(api, engines):
    for url in (A, B):
        engines.set_reply(url, "/collective_rpc", *reversed(rpc_error("no attribute 'nope'")))
    response = await ask(api, "/collective_rpc", {"method": "nope"})
    assert response.status == 502
    assert uncertain_workers(api) == []


async def test_a_failed_reload_makes_its_worker_uncertain(api, engines):
    engines.set_reply(B, "/collective_rpc", *reversed(rpc_error("no such file")))
    body = {"method": "reload_weights", "kwargs": {"weights_path": "/w"}}
    response = await ask(api, "/collective_rpc", body)
    assert (response.status, response.body["weight_epoch"]) == (502, 1)
    assert uncertain_workers(api) == [B]


async def test_an_update_from_disk_is_translated_for_each_engine(api, mixed):
    body = {"model_path": "/w", "weight_version": "v2"}
    mixed.labels[B] = "v2"
    response = await api.operations.submit(admin_call("/update_weights_from_disk", body))
    assert response.ok, response.body
    assert mixed.bodies("/collective_rpc", A) == [
        {"method": "reload_weights", "kwargs": {"weights_path": "/w"}}
    ]
    assert mixed.bodies("/update_weights_from_disk", B) == [body]
    assert versions_by_url(api) == {A: ("v2", 1), B: ("v2", 1)}


async def test_a_worker_whose_cache_was_not_flushed_after_a_reload_is_uncertain(api, engines):
    engines.set_reply(A, "/reset_prefix_cache", {"success": False})
    body = {"model_path": "/w", "weight_version": "v2"}
    assert (
        await api.operations.submit(admin_call("/update_weights_from_disk", body))
    ).status == 502
    assert uncertain_workers(api) == [A]


async def test_checksums_are_compared_in_both_dialects(api, engines):
    engines.ranks = {A: 1, B: 1}
    assert (await ask(api, "/weight_checker", {"action": "checksum"})).body["checksums"]
    engines.sums[B] = "other"
    assert (await ask(api, "/weight_checker", {"action": "checksum"})).status == 409
    assert (await api.operations.submit(admin_call("/weights_checker"))).ok


async def test_a_reset_of_weights_makes_all_workers_uncertain(api, engines):
    await ask(api, "/weight_checker", {"action": "reset"})
    assert uncertain_workers(api) == [A, B]


async def test_an_adapter_is_loaded_at_the_path_of_each_engine(api, mixed):
    body = {"lora_name": "a", "lora_path": "/a"}
    mixed.set_reply(A, "/v1/load_lora_adapter", {"message": "ok"})
    assert (await ask(api, "/load_lora_adapter", body)).ok
    assert mixed.bodies("/v1/load_lora_adapter", A) == [body]
    assert mixed.bodies("/load_lora_adapter", B) == [body]


# A restarted engine


async def test_an_engine_restarted_with_its_first_weights_is_uncertain(api, engines):
    assert (await ask(api, "/update_weight_version", {"new_version": "v2"})).ok
    engines.labels[B] = "default"  # it has restarted
    api.operations._probe.probe_soon(api.worker(B), returned=True)
    await wait_all_tasks_blocked(0.05)
    assert uncertain_workers(api) == [B]
    assert "returned with 'default'" in api.operations.journal.uncertain[B]


# In mode "off", and lost engines


async def test_in_mode_off_a_single_engine_gets_the_calls_unchanged(plain, engines):
    body = {"init_info": {"rank_offset": 1, "world_size": 2}}
    response = await ask(plain, INIT, body)
    assert (response.status, "several" in str(response.body["error"])) == (422, True)
    response = await ask(plain, INIT, body, chosen=frozenset((A,)))
    assert response.ok
    assert engines.bodies(INIT, A) == [body]
    assert (await ask(plain, START, chosen=frozenset((A,)))).body["message"] == (
        "Weight update started"
    )


async def test_an_unreachable_engine_is_not_recorded_as_paused(api, engines):
    engines.replies[B, PAUSE] = LOST
    response = await ask(api, PAUSE)
    assert response.status == 502
    assert [row["success"] for row in response.body["results"]] == [True, False]
    assert set(api.operations.journal.pauses()) == {A}

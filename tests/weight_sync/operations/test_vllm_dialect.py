"""vLLM's calls that change no group: pauses, sleep, labels, checksums, in fleets of both kinds."""

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
    answer = await api.operations.submit(vllm_call(path, body, **fields))
    assert answer.ok is answer.body["success"], answer
    return answer


# Pauses


async def test_a_pause_is_that_of_one_engine(api, engines):
    response = await ask(api, PAUSE, query="mode=keep&clear_cache=false")
    assert (response.status, response.body["status"]) == (200, "paused")
    assert engines.targets(PAUSE, B) == ["/pause?mode=keep&clear_cache=false"]
    assert api.operations.journal.pauses()[A].mode == "keep"
    paused = (await ask(api, "/is_paused", method="GET")).body["is_paused"]
    assert paused is True
    assert (await ask(api, RESUME)).body["status"] == "resumed"
    assert api.operations.journal.pauses() == {}


async def test_each_kind_of_engine_gets_its_own_words(api, mixed):
    response = await ask(api, PAUSE, query="mode=keep")
    assert response.status == 200
    assert mixed.targets(PAUSE) == ["/pause?mode=keep"]
    assert mixed.bodies("/pause_generation", B) == [{"mode": "in_place"}]
    assert [each.get("sent_to") for each in response.body["results"]] == [None, "/pause_generation"]
    assert (await ask(api, "/is_paused", method="GET")).body["is_paused"] is True
    await ask(api, RESUME)
    assert mixed.bodies("/continue_generation", B) == [{}]
    assert (await ask(api, "/is_paused", method="GET")).body["is_paused"] is False


async def test_calls_in_words_of_sglang_reach_vllm_too(api, mixed):
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


async def test_a_bad_mode_is_refused_as_one_engine_refuses_it(api, engines):
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
async def test_what_was_cached_is_forgotten_where_the_engine_forgets_it(api, mode, cleared):
    await ask(api, "/weight_info", method="GET")
    found = []
    api.fleet.watch_cache_cleared(lambda worker: found.append(worker.url))
    await ask(api, PAUSE, query=f"mode={mode}" if mode else "")
    assert found == cleared
    assert set(api.operations.journal.pauses()) == {A, B}


async def test_what_an_uncertain_engine_kept_is_aborted_before_it_resumes(api, engines):
    await ask(api, PAUSE, query="mode=keep")
    api.operations.journal.mark_uncertain({A: "half an update"})
    await ask(api, RESUME)
    assert engines.bodies("/abort_requests", A) == [{}]
    assert engines.bodies("/abort_requests", B) == []
    assert engines.paths(A).index("/abort_requests") < engines.paths(A).index(RESUME)


# Sleep


async def test_a_sleeping_engine_holds_requests_as_a_paused_one(engines, folder, nursery):
    api = api_with(folder, routing=RoutingConfig(while_paused="hold"))
    await nursery.start(api.operations.run)
    response = await ask(api, "/sleep", query="level=1")
    assert (response.body["status"], response.body["level"]) == ("sleeping", 1)
    assert cordon_reasons_of(api) == [["paused"], ["paused"]]
    assert (await ask(api, "/is_sleeping", method="GET")).body["is_sleeping"] is True
    # vLLM answers that it resumed, and sleeps on (run with 0.32.0).
    await ask(api, RESUME)
    assert cordon_reasons_of(api) == [["paused"], ["paused"]]
    assert (await ask(api, "/wake_up")).body["status"] == "awake"
    assert cordon_reasons_of(api) == [[], []]
    assert uncertain_workers(api) == []


async def test_weights_discarded_by_a_sleep_must_be_restored(api, engines):
    response = await ask(api, "/sleep", query="level=2")
    assert [each["standing"] for each in response.body["results"]] == ["uncertain"] * 2
    await ask(api, "/wake_up")
    assert uncertain_workers(api) == [A, B]
    assert versions_by_url(api) == {A: (None, 0), B: (None, 0)}
    body = {"method": "reload_weights"}
    assert (await ask(api, "/collective_rpc", body)).body["weight_epoch"] == 1
    assert uncertain_workers(api) == []


# Other calls


async def test_the_world_size_is_the_sum_over_both_kinds(api, mixed):
    mixed.ranks = {A: 2, B: 3}
    response = await ask(api, "/get_world_size", method="GET")
    assert response.body["world_size"] == 5


async def test_a_label_is_given_to_all(api, engines):
    response = await ask(api, "/update_weight_version", {"new_version": "step-7"})
    assert response.body["weight_versions"] == {A: "step-7", B: "step-7"}
    assert (await ask(api, "/weight_info", method="GET")).body["weight_version"] == "step-7"


async def test_a_collective_rpc_without_weights_keeps_workers_routable(api, engines):
    for url in (A, B):
        engines.set_reply(url, "/collective_rpc", *reversed(rpc_error("no attribute 'nope'")))
    response = await ask(api, "/collective_rpc", {"method": "nope"})
    assert response.status == 502
    assert uncertain_workers(api) == []


async def test_a_reload_that_fails_keeps_its_engine_out(api, engines):
    engines.set_reply(B, "/collective_rpc", *reversed(rpc_error("no such file")))
    body = {"method": "reload_weights", "kwargs": {"weights_path": "/w"}}
    response = await ask(api, "/collective_rpc", body)
    assert (response.status, response.body["weight_epoch"]) == (502, 1)
    assert uncertain_workers(api) == [B]


async def test_an_update_from_disk_reaches_both_kinds(api, mixed):
    body = {"model_path": "/w", "weight_version": "v2"}
    mixed.labels[B] = "v2"
    response = await api.operations.submit(admin_call("/update_weights_from_disk", body))
    assert response.ok, response.body
    assert mixed.bodies("/collective_rpc", A) == [
        {"method": "reload_weights", "kwargs": {"weights_path": "/w"}}
    ]
    assert mixed.bodies("/update_weights_from_disk", B) == [body]
    assert versions_by_url(api) == {A: ("v2", 1), B: ("v2", 1)}


async def test_a_cache_that_vllm_did_not_flush_after_a_reload_keeps_it_out(api, engines):
    engines.set_reply(A, "/reset_prefix_cache", {"success": False})
    body = {"model_path": "/w", "weight_version": "v2"}
    assert (
        await api.operations.submit(admin_call("/update_weights_from_disk", body))
    ).status == 502
    assert uncertain_workers(api) == [A]


async def test_a_checksum_is_compared_in_words_of_either(api, engines):
    engines.ranks = {A: 1, B: 1}
    assert (await ask(api, "/weight_checker", {"action": "checksum"})).body["checksums"]
    engines.sums[B] = "other"
    assert (await ask(api, "/weight_checker", {"action": "checksum"})).status == 409
    assert (await api.operations.submit(admin_call("/weights_checker"))).ok


async def test_a_reset_of_weights_keeps_everybody_out(api, engines):
    await ask(api, "/weight_checker", {"action": "reset"})
    assert uncertain_workers(api) == [A, B]


async def test_an_adapter_is_loaded_where_the_engine_has_it(api, mixed):
    body = {"lora_name": "a", "lora_path": "/a"}
    mixed.set_reply(A, "/v1/load_lora_adapter", {"message": "ok"})
    assert (await ask(api, "/load_lora_adapter", body)).ok
    assert mixed.bodies("/v1/load_lora_adapter", A) == [body]
    assert mixed.bodies("/load_lora_adapter", B) == [body]


# A restarted engine


async def test_an_engine_restarted_with_its_first_weights_gets_no_request(api, engines):
    assert (await ask(api, "/update_weight_version", {"new_version": "v2"})).ok
    engines.labels[B] = "default"  # it has restarted
    api.operations._probe.probe_soon(api.worker(B), returned=True)
    await wait_all_tasks_blocked(0.05)
    assert uncertain_workers(api) == [B]
    assert "returned with 'default'" in api.operations.journal.uncertain[B]


# Without a session


async def test_with_the_mode_off_one_engine_gets_the_calls_unchanged(plain, engines):
    body = {"init_info": {"rank_offset": 1, "world_size": 2}}
    response = await ask(plain, INIT, body)
    assert (response.status, "several" in str(response.body["error"])) == (422, True)
    response = await ask(plain, INIT, body, chosen=frozenset((A,)))
    assert response.ok
    assert engines.bodies(INIT, A) == [body]
    assert (await ask(plain, START, chosen=frozenset((A,)))).body["message"] == (
        "Weight update started"
    )


async def test_an_engine_that_cannot_be_reached_is_distinguished(api, engines):
    engines.replies[B, PAUSE] = LOST
    response = await ask(api, PAUSE)
    assert response.status == 502
    assert [each["success"] for each in response.body["results"]] == [True, False]
    assert set(api.operations.journal.pauses()) == {A}

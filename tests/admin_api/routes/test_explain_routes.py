import json

import pytest
import trio

from omni_proxy.admin_api.routes.explain_routes import top_of
from omni_proxy.config.parse import parse
from omni_proxy.config.schema import RoutingConfig
from omni_proxy.routing.disaggregation.explanation import Candidate, PickRecord
from omni_proxy.routing.inspect.body_fields import keyed_fields
from omni_proxy.routing.inspect.large_json import ONE_PASS_BYTES, SLICE_BYTES
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.model_aliases import ModelAliases
from omni_proxy.routing.policies import build_policy
from tests.admin_api.api_fixture import A, B, build_api, entry
from tests.routing.regular_workers import RegularWorkers
from tests.telemetry.ends import ended

CHAT = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": true}'


async def test_every_worker_has_a_verdict_and_no_request_is_sent(api):
    api.healthy(A)
    response = await api.client().post("/explain", data=CHAT)
    body = await response.get_json()
    assert response.status_code == 200
    assert [(row["url"], row["eligible"]) for row in body["workers"]] == [(A, True), (B, False)]
    assert body["workers"][1]["reasons"]
    assert body["pick"]["url"] == A
    assert body["need"]["capabilities"] == ["chat", "streaming"]
    assert sum(api.worker().routed.values()) == 0


async def test_the_path_and_routing_hints_are_respected(api):
    response = await api.client().post(
        "/explain?path=/v1/audio/speech",
        data=b"{}",
        headers={"x-sglang-omni-route-capabilities": "speech"},
    )
    assert (await response.get_json())["need"]["capabilities"] == ["speech"]


@pytest.mark.parametrize("path", ["/nowhere", "/workers", "/v1/audio/voices/x", ""])
async def test_a_path_that_is_not_a_model_route_is_refused(api, path):
    response = await api.client().post(f"/explain?path={path}", data=CHAT)
    assert response.status_code == 400
    assert (await response.get_json())["error"]["code"] == "unknown_path"


async def test_a_body_that_no_worker_would_get_is_refused_as_by_the_model_routes(api):
    response = await api.client().post("/explain", data=b"{not json")
    assert response.status_code == 400
    assert "invalid JSON body" in (await response.get_json())["error"]["message"]


async def test_a_body_that_curl_sends_as_a_form_is_read_as_json(api):
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    response = await api.client().post("/explain", data=CHAT, headers=headers)
    assert (await response.get_json())["need"]["model"] == "m"


async def test_a_policy_with_keys_uses_the_key_of_the_request(api):
    api.healthy(A, B)
    api.data_plane.policy = build_policy(
        RoutingConfig(policy="consistent_hashing"), lambda n: 0, 0.0
    )
    client = api.client()

    async def picked(key):
        response = await client.post("/explain", data=CHAT, headers={"X-Session-Id": key})
        return (await response.get_json())["pick"]["url"]

    by_key = {key: await picked(key) for key in map(str, range(40))}
    assert set(by_key.values()) == {A, B}
    assert {key: await picked(key) for key in by_key} == by_key


LARGE = b'{"messages": [' + b'{"role": "user"},' * (ONE_PASS_BYTES // 16) + b'{}], "model": "m"}'


async def test_a_large_body_is_explained_like_a_small_one(api):
    api.healthy(A)
    response = await api.client().post("/explain", data=LARGE)
    body = await response.get_json()
    assert response.status_code == 200
    assert (body["need"]["model"], body["pick"]["url"]) == ("m", A)
    response = await api.client().post("/explain", data=LARGE[:-1])
    assert (response.status_code, (await response.get_json())["error"]["code"]) == (
        400,
        "invalid_json",
    )


async def test_other_tasks_run_while_a_large_body_is_scanned():
    turns = 0

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        assert bytes((await top_of(LARGE)).model) == b'"m"'
        nursery.cancel_scope.cancel()
    assert turns >= len(LARGE) // SLICE_BYTES // 2


async def test_a_request_with_a_stored_response_is_routed_to_its_owner(api):
    api.healthy(A, B)
    api.data_plane.response_owners.keep("resp_1", api.worker(B), 0.0)
    for body, url in ((b'{"previous_response_id": "resp_1"}', B), (b'{"input": "a"}', A)):
        response = await api.client().post("/explain?path=/v1/responses", data=body)
        assert (await response.get_json())["pick"]["url"] == url


async def test_instructions_and_input_are_the_prompt_of_a_response():
    api = build_api(entry(A), entry(B))
    api.healthy(A, B)
    policy = api.data_plane.policy = build_policy(
        RoutingConfig(policy="cache_aware"), lambda n: 0, 0.0
    )
    first = {
        "model": "m",
        "instructions": "Be brief. " * 9,
        "input": [{"role": "user", "content": "Why"}],
    }
    fields = keyed_fields(json.dumps(first).encode(), ("instructions", "input"))
    policy.record_pick(api.worker(B), Requirements(0, "m", decoded=fields))
    for question, url in (("Why not", B), ("Why " * 400, A)):
        body = {**first, "input": [{"role": "user", "content": question}]}
        response = await api.client().post("/explain?path=/v1/responses", json=body)
        assert (await response.get_json())["pick"]["url"] == url


async def test_a_configured_route_is_explained_like_a_built_in_one():
    config = parse('[[routes]]\npath = "/own"\ncapability = "speech"\ntext = ["x"]')
    api = build_api(entry(A), routes=config.routes)
    api.healthy(A)
    response = await api.client().post("/explain?path=/own", data=b'{"x": [1, 2]}')
    assert (await response.get_json())["need"]["capabilities"] == ["speech"]


async def test_each_data_parallel_rank_has_a_verdict_and_the_pick_names_its_rank():
    api = build_api(entry(A, ranks=2), entry(B))
    api.healthy(A)
    body = await (await api.client().post("/explain", data=CHAT)).get_json()
    rows = [(row["url"], row.get("rank"), row["eligible"]) for row in body["workers"]]
    assert rows == [(A, 0, True), (A, 1, True), (B, None, False)]
    assert (body["pick"]["url"], body["pick"]["rank"]) == (A, 0)


@pytest.mark.parametrize("place", ["header", "body"])
async def test_a_rank_that_the_client_requests_is_respected(place):
    api = build_api(entry(A, ranks=2))
    api.healthy(A)
    headers = {"X-data-parallel-rank": "1"} if place == "header" else {}
    body = b'{"routed_dp_rank": 1}' if place == "body" else CHAT
    explanation = await (await api.client().post("/explain", data=body, headers=headers)).get_json()
    assert explanation["pick"]["rank"] == 1
    assert [row["reasons"] for row in explanation["workers"]] == [
        ["is not data-parallel rank 1"],
        [],
    ]


async def test_a_rank_that_does_not_exist_is_explained_as_a_refusal():
    api = build_api(entry(A, ranks=2))
    api.healthy(A)
    headers = {"X-data-parallel-rank": "7"}
    explanation = await (await api.client().post("/explain", data=CHAT, headers=headers)).get_json()
    assert explanation["refusal"]["code"] == "invalid_rank"


async def test_both_picks_of_a_pair_are_explained_with_a_verdict_per_leg():
    api = build_api(entry(A, role="prefill"), entry(B, role="decode"))
    api.healthy(A, B)
    body = await (await api.client().post("/explain", data=CHAT)).get_json()
    assert [(row["role"], row["eligible"]) for row in body["workers"]] == [
        ("prefill", True),
        ("decode", True),
    ]
    assert (body["pick"]["url"], body["prefill"]["pick"]["url"]) == (B, A)
    response = await api.client().post("/explain?path=/v1/embeddings", data=CHAT)
    body = await response.get_json()
    assert body["refusal"]["code"] == "no_regular_worker"
    assert "prefill" not in body


ALIAS = """
[[routing.models]]
name = "alias"
targets = [{ model = "m1", weight = 3 }, { model = "m2" }]
"""


async def test_an_alias_is_explained_with_its_target_and_the_reason():
    api = build_api(entry(A, model="m1"), entry(B, model="m2"))
    api.healthy(A)
    api.data_plane.aliases = ModelAliases(parse(ALIAS))
    api.data_plane.target_checks = RegularWorkers(api.fleet)
    response = await api.client().post("/explain", data=b'{"model": "alias"}')
    body = await response.get_json()
    assert body["alias"] == {
        "name": "alias",
        "target": "m1",
        "reason": "no other target has a worker for it now",
        "rewrite": True,
        "targets": [
            {"model": "m1", "weight": 3, "available": True},
            {"model": "m2", "weight": 1, "available": False},
        ],
    }
    assert (body["need"]["model"], body["pick"]["url"]) == ("alias", A)
    response = await api.client().post("/explain", data=b'{"model": "m1"}')
    assert (await response.get_json())["alias"] is None


async def test_a_past_request_is_explained_with_the_candidates_of_its_time(api):
    api.healthy(A)
    rows = (
        Candidate(A, None, 3, "", {"matched_bytes": 5}),
        Candidate(B, None, 0, "disabled", {}),
    )
    recent = api.instruments.recent
    exchange = ended(api.worker(), candidates=PickRecord("cache_aware", A, "most of it", rows, 7))
    recent.note_completed(exchange, api.worker())
    recent.note_completed(ended(api.worker(), request_id=b"other"), api.worker())
    response = await api.client().get("/explain?request_id=r")
    assert await response.get_json() == {
        "request_id": "r", "policy": "cache_aware", "worker": A, "reason": "most of it", "total": 7,
        "workers": [
            {"url": A, "eligible": True, "reasons": [], "in_flight": 3, "matched_bytes": 5},
            {"url": B, "eligible": False, "reasons": ["disabled"], "in_flight": 0},
        ],
    }  # fmt: skip
    other = await api.client().get("/explain?request_id=other")
    assert (other.status_code, (await other.get_json())["error"]["code"]) == (
        404,
        "unknown_request",
    )
    ends = (await (await api.client().get("/feed?once=true")).get_json())["recent_ends"]
    assert {end["request_id"]: "has_candidates" in end for end in ends} == {
        "r": True,
        "other": False,
    }


async def test_the_reason_is_left_out_if_another_worker_served_the_request(api):
    record = PickRecord("random", B, "drawn at random", (), 2)
    exchange = ended(api.worker(), candidates=record)
    api.instruments.recent.note_completed(exchange, api.worker())
    body = await (await api.client().get("/explain?request_id=r")).get_json()
    assert (body["worker"], body["reason"]) == (A, None)

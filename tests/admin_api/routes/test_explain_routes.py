import json

import pytest
import trio

from omni_proxy.admin_api.routes.models_routes import top_of
from omni_proxy.config.parse import parse
from omni_proxy.config.schema import RoutingConfig
from omni_proxy.routing.disaggregation.pick_record import Candidate, PickRecord
from omni_proxy.routing.inspect.keyed_text import keyed_fields
from omni_proxy.routing.inspect.large_json import ONE_PASS_BYTES, SLICE_BYTES
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.model_aliases import ModelAliases
from omni_proxy.routing.policies import build_policy
from tests.admin_api.api_fixture import A, B, build_api, entry
from tests.routing.regular_workers import RegularWorkers
from tests.telemetry.ends import ended

CHAT = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": true}'


async def test_every_worker_has_a_verdict_and_nothing_is_sent(api):
    api.healthy(A)
    answer = await api.client().post("/explain", data=CHAT)
    body = await answer.get_json()
    assert answer.status_code == 200
    assert [(row["url"], row["eligible"]) for row in body["workers"]] == [(A, True), (B, False)]
    assert body["workers"][1]["reasons"]
    assert body["pick"]["url"] == A
    assert body["need"]["capabilities"] == ["chat", "streaming"]
    assert sum(api.worker().routed.values()) == 0


async def test_the_path_chooses_the_route_and_hints_count(api):
    answer = await api.client().post(
        "/explain?path=/v1/audio/speech",
        data=b"{}",
        headers={"x-sglang-omni-route-capabilities": "speech"},
    )
    assert (await answer.get_json())["need"]["capabilities"] == ["speech"]


@pytest.mark.parametrize("path", ["/nowhere", "/workers", "/v1/audio/voices/x", ""])
async def test_a_path_that_is_no_model_route_is_refused(api, path):
    answer = await api.client().post(f"/explain?path={path}", data=CHAT)
    assert answer.status_code == 400
    assert (await answer.get_json())["error"]["code"] == "unknown_path"


async def test_a_body_that_a_worker_would_not_get_is_refused_alike(api):
    answer = await api.client().post("/explain", data=b"{not json")
    assert answer.status_code == 400
    assert "invalid JSON body" in (await answer.get_json())["error"]["message"]


async def test_what_curl_calls_a_form_is_read_as_json(api):
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = await api.client().post("/explain", data=CHAT, headers=kind)
    assert (await answer.get_json())["need"]["model"] == "m"


async def test_a_keyed_policy_is_shown_with_the_key_of_the_request(api):
    api.healthy(A, B)
    api.data_plane.policy = build_policy(
        RoutingConfig(policy="consistent_hashing"), lambda n: 0, 0.0
    )
    client = api.client()

    async def picked(key):
        answer = await client.post("/explain", data=CHAT, headers={"X-Session-Id": key})
        return (await answer.get_json())["pick"]["url"]

    by_key = {key: await picked(key) for key in map(str, range(40))}
    assert set(by_key.values()) == {A, B}
    assert {key: await picked(key) for key in by_key} == by_key


LARGE = b'{"messages": [' + b'{"role": "user"},' * (ONE_PASS_BYTES // 16) + b'{}], "model": "m"}'


async def test_a_large_body_is_explained_as_a_small_one(api):
    api.healthy(A)
    answer = await api.client().post("/explain", data=LARGE)
    body = await answer.get_json()
    assert answer.status_code == 200
    assert (body["need"]["model"], body["pick"]["url"]) == ("m", A)
    answer = await api.client().post("/explain", data=LARGE[:-1])
    assert (answer.status_code, (await answer.get_json())["error"]["code"]) == (400, "invalid_json")


async def test_others_have_their_turns_while_a_large_body_is_walked_over():
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


async def test_a_stored_response_is_explained_by_its_owner(api):
    api.healthy(A, B)
    api.data_plane.response_owners.keep("resp_1", api.worker(B), 0.0)
    for body, url in ((b'{"previous_response_id": "resp_1"}', B), (b'{"input": "a"}', A)):
        answer = await api.client().post("/explain?path=/v1/responses", data=body)
        assert (await answer.get_json())["pick"]["url"] == url


async def test_a_response_goes_where_its_instructions_and_input_were_sent():
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
        answer = await api.client().post("/explain?path=/v1/responses", json=body)
        assert (await answer.get_json())["pick"]["url"] == url


async def test_a_configured_route_is_explained_like_a_built_in_one():
    config = parse('[[routes]]\npath = "/own"\ncapability = "speech"\ntext = ["x"]')
    api = build_api(entry(A), routes=config.routes)
    api.healthy(A)
    answer = await api.client().post("/explain?path=/own", data=b'{"x": [1, 2]}')
    assert (await answer.get_json())["need"]["capabilities"] == ["speech"]


async def test_each_data_parallel_rank_has_a_verdict_and_the_pick_names_its_rank():
    api = build_api(entry(A, ranks=2), entry(B))
    api.healthy(A)
    body = await (await api.client().post("/explain", data=CHAT)).get_json()
    rows = [(row["url"], row.get("rank"), row["eligible"]) for row in body["workers"]]
    assert rows == [(A, 0, True), (A, 1, True), (B, None, False)]
    assert (body["pick"]["url"], body["pick"]["rank"]) == (A, 0)


@pytest.mark.parametrize("by", ["header", "body"])
async def test_a_rank_that_the_client_names_counts(by):
    api = build_api(entry(A, ranks=2))
    api.healthy(A)
    headers = {"X-data-parallel-rank": "1"} if by == "header" else {}
    body = b'{"routed_dp_rank": 1}' if by == "body" else CHAT
    answer = await (await api.client().post("/explain", data=body, headers=headers)).get_json()
    assert answer["pick"]["rank"] == 1
    assert [row["reasons"] for row in answer["workers"]] == [["is not data-parallel rank 1"], []]


async def test_a_rank_that_does_not_exist_is_refused_as_the_request_would_be():
    api = build_api(entry(A, ranks=2))
    api.healthy(A)
    headers = {"X-data-parallel-rank": "7"}
    answer = await (await api.client().post("/explain", data=CHAT, headers=headers)).get_json()
    assert answer["refusal"]["code"] == "invalid_rank"


async def test_both_picks_of_a_pair_are_explained_and_each_worker_has_the_verdict_of_its_leg():
    api = build_api(entry(A, role="prefill"), entry(B, role="decode"))
    api.healthy(A, B)
    body = await (await api.client().post("/explain", data=CHAT)).get_json()
    assert [(row["role"], row["eligible"]) for row in body["workers"]] == [
        ("prefill", True),
        ("decode", True),
    ]
    assert (body["pick"]["url"], body["prefill"]["pick"]["url"]) == (B, A)
    answer = await api.client().post("/explain?path=/v1/embeddings", data=CHAT)
    body = await answer.get_json()
    assert body["refusal"]["code"] == "no_regular_worker"
    assert "prefill" not in body


ALIAS = """
[[routing.models]]
name = "alias"
targets = [{ model = "m1", weight = 3 }, { model = "m2" }]
"""


async def test_an_alias_is_explained_with_its_target_and_why():
    api = build_api(entry(A, model="m1"), entry(B, model="m2"))
    api.healthy(A)
    api.data_plane.aliases = ModelAliases(parse(ALIAS))
    api.data_plane.target_checks = RegularWorkers(api.fleet)
    answer = await api.client().post("/explain", data=b'{"model": "alias"}')
    body = await answer.get_json()
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
    answer = await api.client().post("/explain", data=b'{"model": "m1"}')
    assert (await answer.get_json())["alias"] is None


async def test_a_past_request_has_the_candidates_that_it_had_then(api):
    api.healthy(A)
    rows = (
        Candidate(A, None, 3, "", {"matched_bytes": 5}),
        Candidate(B, None, 0, "disabled", {}),
    )
    recent = api.services.instruments.recent
    one = ended(api.worker(), candidates=PickRecord("cache_aware", A, "most of it", rows, 7))
    recent.note_completed(one, api.worker())
    recent.note_completed(ended(api.worker(), request_id=b"other"), api.worker())
    answer = await api.client().get("/explain?request_id=r")
    assert await answer.get_json() == {
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


async def test_the_reason_of_a_pick_that_was_another_one_is_left_out(api):
    record = PickRecord("random", B, "drawn at random", (), 2)
    one = ended(api.worker(), candidates=record)
    api.services.instruments.recent.note_completed(one, api.worker())
    body = await (await api.client().get("/explain?request_id=r")).get_json()
    assert (body["worker"], body["reason"]) == (A, None)

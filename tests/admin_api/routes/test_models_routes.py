import json

import httpx
import pytest
import trio

from omni_proxy.admin_api.routes.models_routes import ALL_LISTS_BYTES, LIST_BYTES, MAX_CARDS, merge
from omni_proxy.admin_api.serializers.worker_records import worker_record
from omni_proxy.config.api_keys import CallerKey
from omni_proxy.config.parse import parse
from omni_proxy.config.schema import HealthConfig
from omni_proxy.routing.model_aliases import ModelAliases
from omni_proxy.upstream_http import client
from omni_proxy.upstream_http.client import CallResult
from omni_proxy.wire.bounded_json import MAX_VALUES
from tests.admin_api.api_fixture import A, B, build_api, entry


@pytest.fixture
def replies(monkeypatch):
    """What each worker says, by URL; the requests they got."""
    output, asked = {}, []

    async def answer(request):
        asked.append(request)
        reply = output[str(request.url.copy_with(raw_path=b"/")).rstrip("/")]
        if isinstance(reply, Exception):
            raise reply
        return reply

    def open_client(worker):
        return httpx.AsyncClient(transport=httpx.MockTransport(answer))

    monkeypatch.setattr(client, "open_client", open_client)
    output["asked"] = asked
    return output


def sent(body, status=200):
    """A reply whose body is still to come, as from a socket."""

    async def pieces():
        yield body if isinstance(body, bytes) else body.encode()

    return httpx.Response(status, content=pieces())


def cards(*cards):
    return sent(json.dumps({"object": "list", "data": list(cards)}))


async def listed(api, query="", **headers):
    answer = await api.client().get(f"/v1/models{query}", headers=headers)
    return answer.status_code, await answer.get_json()


async def test_no_routable_worker_is_a_503(api):
    status, body = await listed(api)
    assert (status, body["error"]["message"]) == (503, "no routable upstream")


async def test_lists_are_merged_in_registration_order_and_the_first_card_wins(api, replies):
    api.healthy(A, B)
    replies[A] = cards({"id": "m", "owned_by": "a"}, "no card", {"model": "n"})
    replies[B] = cards({"id": "m", "owned_by": "b"}, {"id": "o"}, {"id": "", "model": "n", "x": 1})
    status, body = await listed(api)
    assert status == 200
    assert body == {
        "object": "list",
        "data": [{"id": "m", "owned_by": "a"}, {"model": "n"}, {"id": "o"}],
    }


async def test_nameless_cards_are_distinguished_by_their_content(api, replies):
    api.healthy(A, B)
    replies[A] = cards({"a": 1, "b": 2}, {"id": 7})
    replies[B] = cards({"b": 2, "a": 1}, {"id": 8})
    assert (await listed(api))[1]["data"] == [{"a": 1, "b": 2}, {"id": 7}, {"id": 8}]


async def test_one_working_worker_is_enough(api, replies):
    api.healthy(A, B)
    replies[A] = httpx.ConnectError("refused")
    replies[B] = cards({"id": "m"})
    assert await listed(api) == (200, {"object": "list", "data": [{"id": "m"}]})


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (sent("broken", 500), "status=500"),
        (sent("[]"), "invalid models payload"),
        (sent('"text"'), "invalid models payload"),
        (sent("{}"), "invalid models payload"),
        (sent('{"data": {}}'), "invalid models payload"),
        (sent("[" * 100_000), "invalid models payload"),
        (sent(b" " * (LIST_BYTES + 1)), "invalid models payload"),
        (sent("not json"), "JSONDecodeError"),
        (sent(b"\xff\xfe\xfa"), "JSONDecodeError"),
        (httpx.ConnectError("refused"), "ConnectError"),
        (httpx.RemoteProtocolError("garbage"), "RemoteProtocolError"),
    ],
)
async def test_when_no_card_was_found_each_failure_is_named(api, replies, reply, reason):
    api.healthy(A)
    replies[A] = reply
    status, body = await listed(api)
    assert (status, body["error"]["message"]) == (502, "failed to fetch models from workers")
    assert body["error"]["details"] == {A: reason}


async def test_an_empty_list_is_no_failure_and_no_card(api, replies):
    api.healthy(A)
    replies[A] = cards()
    status, body = await listed(api)
    assert (status, body["error"]["details"]) == (502, {})


async def test_a_worker_that_never_answers_costs_no_more_than_the_probes_timeout(
    monkeypatch, autojump_clock
):
    async def never(request):
        await trio.sleep_forever()

    def open_client(worker):
        return httpx.AsyncClient(transport=httpx.MockTransport(never), timeout=None)

    monkeypatch.setattr(client, "open_client", open_client)
    api = build_api(entry(A), health=HealthConfig(timeout_secs=7))
    api.healthy(A)
    before = trio.current_time()
    status, body = await listed(api)
    assert (status, body["error"]["details"]) == (502, {A: "ReadTimeout"})
    assert trio.current_time() - before == 7


async def test_query_and_client_headers_pass_but_hints_and_hop_by_hop_do_not(api, replies):
    api.healthy(A)
    replies[A] = cards({"id": "m"})
    headers = {
        "Authorization": "Bearer mine",
        "X-Request-Id": "r1",
        "Connection": "close",
        "TE": "trailers",
        "x-sglang-omni-route-model": "m",
        "Accept-Encoding": "br",
    }
    await listed(api, "?limit=%20x", **headers)
    (request,) = replies["asked"]
    assert request.url.raw_path == b"/v1/models?limit=%20x"
    assert request.headers["authorization"] == "Bearer mine"
    assert request.headers["x-request-id"] == "r1"
    assert request.headers["host"] == "127.0.0.1:8011"
    assert "te" not in request.headers
    assert "x-sglang-omni-route-model" not in request.headers
    assert request.headers["accept-encoding"] != "br"


async def test_asking_leaves_no_trace_on_the_worker(api, replies):
    api.healthy(A)
    replies[A] = httpx.ConnectError("refused")
    before = worker_record(api.worker())
    await listed(api)
    assert worker_record(api.worker()) == before


async def test_one_model_is_the_record_of_the_merged_list(api, replies):
    api.healthy(A, B)
    replies[A] = cards({"id": "org/m", "owned_by": "a"})
    replies[B] = httpx.ConnectError("refused")
    answer = await api.client().get("/v1/models/org/m")
    assert (answer.status_code, await answer.get_json()) == (
        200, {"id": "org/m", "owned_by": "a"},
    )  # fmt: skip


async def test_a_model_that_no_worker_serves_is_a_404(api, replies):
    api.healthy(A)
    replies[A] = cards({"id": "m"})
    answer = await api.client().get("/v1/models/n")
    body = await answer.get_json()
    assert (answer.status_code, body["error"]["code"]) == (404, "model_not_found")


async def test_without_any_list_one_model_is_a_502(api, replies):
    api.healthy(A)
    replies[A] = httpx.ConnectError("refused")
    assert (await api.client().get("/v1/models/m")).status_code == 502


@pytest.mark.parametrize("count", [MAX_CARDS + 1, MAX_VALUES])
@pytest.mark.parametrize("card", [b"{}", b'{"x":1}', b'{"id":"m"}'])
async def test_a_list_with_too_many_cards_costs_that_workers_cards_only(api, replies, count, card):
    api.healthy(A, B)
    many = b'{"data": [' + b",".join([card] * count) + b"]}"
    replies[A], replies[B] = sent(many), cards({"id": "n"})
    assert await listed(api) == (200, {"object": "list", "data": [{"id": "n"}]})
    replies[A], replies[B] = sent(many), sent(b"", 500)
    status, body = await listed(api)
    why = "more than 1000 models" if count * card.count(b"{") < 2000 else "invalid models payload"
    assert (status, body["error"]["details"][A]) == (502, why)


async def test_lists_that_are_too_long_together_are_left_out(api):
    card = json.dumps({"data": [{"id": "m", "text": "x" * (LIST_BYTES - 100)}]}).encode()
    outcome = CallResult(api.worker(A), 200, card, "", 0.0)
    other = CallResult(api.worker(B), 200, card, "", 0.0)
    merged, reasons = await merge([outcome] * (ALL_LISTS_BYTES // len(card)) + [other])
    assert [card["id"] for card in merged] == ["m"]
    assert reasons == {B: "the other workers' lists are too long"}


ALIASES = """
[[routing.models]]
name = "alias"
targets = [{ model = "m1" }, { model = "m2", weight = 2 }]
[[routing.models]]
name = "shadowed"
targets = [{ model = "m2" }]
[[routing.models]]
name = "gone"
targets = [{ model = "nobody" }]
"""


async def test_aliases_and_adapters_are_listed_beside_the_workers_models(replies):
    api = build_api(entry(A, model="m1", loras=("x", "listed", "shadowed")), entry(B, model="m2"))
    api.healthy(A, B)
    api.data_plane.aliases = ModelAliases(parse(ALIASES))
    own = {"id": "listed", "parent": "m1", "root": "/loras/listed"}
    replies[A] = cards({"id": "m1", "max_model_len": 8192}, own)
    replies[B] = cards({"id": "m2", "max_model_len": 4096})
    _, body = await listed(api)
    found = {card["id"]: card for card in body["data"]}
    assert len(found) == len(body["data"])
    assert found.keys() == {"m1", "m2", "listed", "x", "shadowed", "alias"}
    assert found["listed"] == own
    assert (found["x"]["parent"], found["x"]["root"]) == ("m1", "x")
    expected = {"object": "model", "owned_by": "omni-proxy", "root": "m2", "parent": None}
    assert found["alias"] == expected | {
        "id": "alias",
        "created": int(api.services.started_at.timestamp()),
        "max_model_len": 4096,
    }
    assert (found["shadowed"]["root"], found["shadowed"]["parent"]) == ("m2", None)
    replies[A], replies[B] = cards({"id": "m1"}), cards({"id": "m2"})
    answer = await api.client().get("/v1/models/alias")
    assert (answer.status_code, (await answer.get_json())["id"]) == (200, "alias")


async def test_an_alias_is_listed_only_while_a_target_is_served(replies):
    api = build_api(entry(A, model="m1"), entry(B, model="m2"))
    api.healthy(A)
    api.data_plane.aliases = ModelAliases(parse(ALIASES))
    replies[A] = cards({"id": "m1"})
    _, body = await listed(api)
    assert [card["id"] for card in body["data"]] == ["m1", "alias"]


async def test_the_key_of_a_caller_lists_its_models_and_reaches_no_worker(replies):
    caller = CallerKey(name="team-a", key_sha256="00" * 32, models=("n", "other"))
    found = {"find_caller": lambda key: caller if key == b"team-key" else None}
    api = build_api(entry(A), keys=(caller,), services=found)
    api.healthy(A)
    for headers, names in (
        ({"Authorization": "Bearer team-key"}, ["n"]),
        ({"X-Api-Key": "team-key"}, ["n"]),
        ({}, ["m", "n"]),
    ):
        replies[A] = cards({"id": "m"}, {"id": "n"})
        _, body = await listed(api, **headers)
        assert [card["id"] for card in body["data"]] == names
    replies[A] = cards({"id": "m"}, {"id": "n"})
    answer = await api.client().get("/v1/models/m", headers={"X-Api-Key": "team-key"})
    assert answer.status_code == 404
    for asked in replies["asked"]:
        assert not {"authorization", "x-api-key"} & set(asked.headers)

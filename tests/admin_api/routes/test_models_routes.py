import json

import httpx
import pytest
import trio

from omni_proxy.admin_api.routes.models_routes import ALL_LISTS_BYTES, LIST_BYTES, MAX_CARDS, merge
from omni_proxy.admin_api.serializers.worker_records import worker_record
from omni_proxy.config.parse import parse
from omni_proxy.config.schema import HealthConfig
from omni_proxy.config.tables.keys import CallerKey
from omni_proxy.routing.model_aliases import ModelAliases
from omni_proxy.upstream_http import client
from omni_proxy.upstream_http.client import CallResult
from omni_proxy.wire.bounded_json import MAX_VALUES
from tests.admin_api.api_fixture import A, B, build_api, entry


@pytest.fixture
def replies(monkeypatch):
    """The reply of each worker, by URL; under "requests", the requests that they received."""
    replies, requests = {}, []

    async def answer(request):
        requests.append(request)
        reply = replies[str(request.url.copy_with(raw_path=b"/")).rstrip("/")]
        if isinstance(reply, Exception):
            raise reply
        return reply

    def open_client(worker):
        return httpx.AsyncClient(transport=httpx.MockTransport(answer))

    monkeypatch.setattr(client, "open_client", open_client)
    replies["requests"] = requests
    return replies


def reply_with(body, status=200):
    """A reply whose body is still to be read, as from a socket."""

    async def pieces():
        yield body if isinstance(body, bytes) else body.encode()

    return httpx.Response(status, content=pieces())


def cards(*cards):
    return reply_with(json.dumps({"object": "list", "data": list(cards)}))


async def get_models(api, query="", **headers):
    response = await api.client().get(f"/v1/models{query}", headers=headers)
    return response.status_code, await response.get_json()


async def test_without_a_routable_worker_the_list_is_a_503(api):
    status, body = await get_models(api)
    assert (status, body["error"]["message"]) == (503, "no routable upstream")


async def test_lists_are_merged_in_registration_order_and_the_first_card_wins(api, replies):
    api.healthy(A, B)
    replies[A] = cards({"id": "m", "owned_by": "a"}, "no card", {"model": "n"})
    replies[B] = cards({"id": "m", "owned_by": "b"}, {"id": "o"}, {"id": "", "model": "n", "x": 1})
    status, body = await get_models(api)
    assert status == 200
    assert body == {
        "object": "list",
        "data": [{"id": "m", "owned_by": "a"}, {"model": "n"}, {"id": "o"}],
    }


async def test_nameless_cards_are_distinguished_by_their_content(api, replies):
    api.healthy(A, B)
    replies[A] = cards({"a": 1, "b": 2}, {"id": 7})
    replies[B] = cards({"b": 2, "a": 1}, {"id": 8})
    assert (await get_models(api))[1]["data"] == [{"a": 1, "b": 2}, {"id": 7}, {"id": 8}]


async def test_one_working_worker_is_enough(api, replies):
    api.healthy(A, B)
    replies[A] = httpx.ConnectError("refused")
    replies[B] = cards({"id": "m"})
    assert await get_models(api) == (200, {"object": "list", "data": [{"id": "m"}]})


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (reply_with("broken", 500), "status=500"),
        (reply_with("[]"), "invalid models payload"),
        (reply_with('"text"'), "invalid models payload"),
        (reply_with("{}"), "invalid models payload"),
        (reply_with('{"data": {}}'), "invalid models payload"),
        (reply_with("[" * 100_000), "invalid models payload"),
        (reply_with(b" " * (LIST_BYTES + 1)), "invalid models payload"),
        (reply_with("not json"), "JSONDecodeError"),
        (reply_with(b"\xff\xfe\xfa"), "JSONDecodeError"),
        (httpx.ConnectError("refused"), "ConnectError"),
        (httpx.RemoteProtocolError("garbage"), "RemoteProtocolError"),
    ],
)
async def test_a_list_without_cards_is_a_502_with_each_failure(api, replies, reply, reason):
    api.healthy(A)
    replies[A] = reply
    status, body = await get_models(api)
    assert (status, body["error"]["message"]) == (502, "failed to fetch models from workers")
    assert body["error"]["details"] == {A: reason}


async def test_models_get_a_502_without_a_reason_if_each_list_is_empty(api, replies):
    api.healthy(A)
    replies[A] = cards()
    status, body = await get_models(api)
    assert (status, body["error"]["details"]) == (502, {})


async def test_a_worker_that_never_replies_is_limited_by_the_probe_timeout(
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
    status, body = await get_models(api)
    assert (status, body["error"]["details"]) == (502, {A: "ReadTimeout"})
    assert trio.current_time() - before == 7


async def test_query_and_headers_are_sent_on_except_hints_and_hop_by_hop(api, replies):
    api.healthy(A)
    replies[A] = cards({"id": "m"})
    headers = {
        "Authorization": "Bearer client",
        "X-Request-Id": "r1",
        "Connection": "close",
        "TE": "trailers",
        "x-sglang-omni-route-model": "m",
        "Accept-Encoding": "br",
    }
    await get_models(api, "?limit=%20x", **headers)
    (request,) = replies["requests"]
    assert request.url.raw_path == b"/v1/models?limit=%20x"
    assert request.headers["authorization"] == "Bearer client"
    assert request.headers["x-request-id"] == "r1"
    assert request.headers["host"] == "127.0.0.1:8011"
    assert "te" not in request.headers
    assert "x-sglang-omni-route-model" not in request.headers
    assert request.headers["accept-encoding"] != "br"


async def test_listing_models_does_not_change_worker_records(api, replies):
    api.healthy(A)
    replies[A] = httpx.ConnectError("refused")
    before = worker_record(api.worker())
    await get_models(api)
    assert worker_record(api.worker()) == before


async def test_one_model_is_its_card_of_the_merged_list(api, replies):
    api.healthy(A, B)
    replies[A] = cards({"id": "org/m", "owned_by": "a"})
    replies[B] = httpx.ConnectError("refused")
    response = await api.client().get("/v1/models/org/m")
    assert (response.status_code, await response.get_json()) == (
        200, {"id": "org/m", "owned_by": "a"},
    )  # fmt: skip


async def test_a_model_that_no_worker_serves_gets_a_404(api, replies):
    api.healthy(A)
    replies[A] = cards({"id": "m"})
    response = await api.client().get("/v1/models/n")
    body = await response.get_json()
    assert (response.status_code, body["error"]["code"]) == (404, "model_not_found")


async def test_one_model_gets_a_502_if_no_list_can_be_read(api, replies):
    api.healthy(A)
    replies[A] = httpx.ConnectError("refused")
    assert (await api.client().get("/v1/models/m")).status_code == 502


@pytest.mark.parametrize("count", [MAX_CARDS + 1, MAX_VALUES])
@pytest.mark.parametrize("card", [b"{}", b'{"x":1}', b'{"id":"m"}'])
async def test_a_list_with_too_many_cards_is_ignored_for_that_worker_only(
    api, replies, count, card
):
    api.healthy(A, B)
    many = b'{"data": [' + b",".join([card] * count) + b"]}"
    replies[A], replies[B] = reply_with(many), cards({"id": "n"})
    assert await get_models(api) == (200, {"object": "list", "data": [{"id": "n"}]})
    replies[A], replies[B] = reply_with(many), reply_with(b"", 500)
    status, body = await get_models(api)
    reason = (
        "more than 1000 models" if count * card.count(b"{") < 2000 else "invalid models payload"
    )
    assert (status, body["error"]["details"][A]) == (502, reason)


async def test_lists_that_are_too_long_together_are_left_out(api):
    card = json.dumps({"data": [{"id": "m", "text": "x" * (LIST_BYTES - 100)}]}).encode()
    first = CallResult(api.worker(A), 200, card, "", 0.0)
    second = CallResult(api.worker(B), 200, card, "", 0.0)
    merged, reasons = await merge([first] * (ALL_LISTS_BYTES // len(card)) + [second])
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
name = "without-worker"
targets = [{ model = "unserved" }]
"""


async def test_aliases_and_adapters_are_listed_with_the_workers_models(replies):
    api = build_api(entry(A, model="m1", loras=("x", "listed", "shadowed")), entry(B, model="m2"))
    api.healthy(A, B)
    api.data_plane.aliases = ModelAliases(parse(ALIASES))
    adapter = {"id": "listed", "parent": "m1", "root": "/loras/listed"}
    replies[A] = cards({"id": "m1", "max_model_len": 8192}, adapter)
    replies[B] = cards({"id": "m2", "max_model_len": 4096})
    _, body = await get_models(api)
    by_id = {card["id"]: card for card in body["data"]}
    assert len(by_id) == len(body["data"])
    assert by_id.keys() == {"m1", "m2", "listed", "x", "shadowed", "alias"}
    assert by_id["listed"] == adapter
    assert (by_id["x"]["parent"], by_id["x"]["root"]) == ("m1", "x")
    expected = {"object": "model", "owned_by": "omni-proxy", "root": "m2", "parent": None}
    assert by_id["alias"] == expected | {
        "id": "alias",
        "created": int(api.services.process.started_at.timestamp()),
        "max_model_len": 4096,
    }
    assert (by_id["shadowed"]["root"], by_id["shadowed"]["parent"]) == ("m2", None)
    replies[A], replies[B] = cards({"id": "m1"}), cards({"id": "m2"})
    response = await api.client().get("/v1/models/alias")
    assert (response.status_code, (await response.get_json())["id"]) == (200, "alias")


async def test_an_alias_is_listed_only_while_a_target_is_served(replies):
    api = build_api(entry(A, model="m1"), entry(B, model="m2"))
    api.healthy(A)
    api.data_plane.aliases = ModelAliases(parse(ALIASES))
    replies[A] = cards({"id": "m1"})
    _, body = await get_models(api)
    assert [card["id"] for card in body["data"]] == ["m1", "alias"]


async def test_a_caller_sees_its_models_and_its_key_is_not_sent_to_workers(replies):
    caller = CallerKey(name="team-a", key_sha256="00" * 32, models=("n", "other"))
    services = {"find_caller": lambda key: caller if key == b"team-key" else None}
    api = build_api(entry(A), keys=(caller,), services=services)
    api.healthy(A)
    for headers, names in (
        ({"Authorization": "Bearer team-key"}, ["n"]),
        ({"X-Api-Key": "team-key"}, ["n"]),
        ({}, ["m", "n"]),
    ):
        replies[A] = cards({"id": "m"}, {"id": "n"})
        _, body = await get_models(api, **headers)
        assert [card["id"] for card in body["data"]] == names
    replies[A] = cards({"id": "m"}, {"id": "n"})
    response = await api.client().get("/v1/models/m", headers={"X-Api-Key": "team-key"})
    assert response.status_code == 404
    for request in replies["requests"]:
        assert not {"authorization", "x-api-key"} & set(request.headers)

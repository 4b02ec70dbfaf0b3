import json

import pytest
import trio

from tests.promises.support.clients import post
from tests.promises.support.disaggregated_engines import KV_ERROR, eventually, failing, fleet_of

CHAT = {"messages": [], "model": "m", "max_tokens": 7, "stream_options": {"a": 1}, "min_tokens": 2}
REMOTE_DECODE = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


def ask(body, *fields, path="/v1/chat/completions"):
    return post(json.dumps(body).encode(), *fields, path=path)


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_computes_one_token_and_decode_gets_its_handle_unchanged(stream):
    async with fleet_of("nixl") as (fleet, client):
        await client.send(ask(CHAT | {"stream": stream}))
        answer = await client.answer()
        assert answer.status == 200
        assert (b"[DONE]" in answer.body) == stream
        (prefill,), (decode,) = fleet.prefills[0].bodies, fleet.decodes[0].bodies
        one_token = {"messages": [], "model": "m", "max_tokens": 1, "stream": False}
        assert prefill == one_token | {"kv_transfer_params": REMOTE_DECODE}
        params = decode.pop("kv_transfer_params")
        assert decode == CHAT | {"stream": stream}
        assert params["odd"] == "\u00e9 \u2028"
        assert params["remote_request_id"] == fleet.decodes[0].pulled[0]


async def test_a_handle_of_the_client_reaches_no_engine():
    async with fleet_of("nixl") as (fleet, client):
        fleet.prefills[0].gives_params = False
        await client.send(ask(CHAT | {"kv_transfer_params": {"do_remote_prefill": True}}))
        assert (await client.answer()).status == 200
        assert fleet.prefills[0].bodies[0]["kv_transfer_params"] == REMOTE_DECODE
        assert "kv_transfer_params" not in fleet.decodes[0].bodies[0]
        assert fleet.decodes[0].computed == 1
        assert fleet.before.last["fallback"] == "no_params"


@pytest.mark.parametrize(
    ("path", "body", "limits"),
    [
        ("/v1/completions", {"prompt": "a", "max_completion_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 9}, {"max_output_tokens": 1}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 9, "n": 1, "min_tokens": 3}},
         {"sampling_params": {"max_tokens": 1, "n": 1}}),
    ],
)  # fmt: skip
async def test_each_route_limits_prefill_by_its_own_parameter_names(path, body, limits):
    async with fleet_of("nixl") as (fleet, client):
        await client.send(ask(body, path=path))
        assert (await client.answer()).status == 200
        (prefill_body,) = fleet.prefills[0].bodies
        del prefill_body["kv_transfer_params"]
        assert prefill_body == body | limits | {"stream": False}
        assert fleet.decodes[0].bodies[0].keys() - body.keys() == {"kv_transfer_params"}


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
@pytest.mark.parametrize("request_id", ["", "mine-7"])
async def test_both_engines_get_the_same_request_id(connector, request_id):
    async with fleet_of(connector) as (fleet, client):
        await client.send(ask(CHAT, *([f"X-Request-Id: {request_id}"] if request_id else [])))
        answer = await client.answer()
        ids = {engine.heads[0]["x-request-id"] for engine in fleet.engines}
        assert len(ids) == 1
        assert ids == {request_id or answer.one("x-sglang-omni-request-id")}


async def test_v1_messages_goes_unchanged_to_the_decode_worker_only():
    async with fleet_of("nixl") as (fleet, client):
        text = b'{"messages" : [], "max_tokens": 5}'
        await client.send(post(text, path="/v1/messages"))
        assert (await client.answer()).status == 200
        assert fleet.decodes[0].raw == [text]
        assert not fleet.prefills[0].raw


async def test_mooncake_legs_are_sent_at_once_with_the_same_transfer_id():
    async with fleet_of("mooncake") as (fleet, client):
        for number in range(3):
            await client.send(ask(CHAT))
            assert (await client.answer()).status == 200
            prefill, decode = (
                engine.bodies[number]["kv_transfer_params"] for engine in fleet.engines
            )
            assert prefill.pop("transfer_id") == decode.pop("transfer_id")
            assert prefill == {"do_remote_decode": True, "do_remote_prefill": False}
            assert decode == {
                "do_remote_decode": False, "do_remote_prefill": True,
                "remote_bootstrap_addr": fleet.prefills[0].bootstrap.url,
                "remote_engine_id": "engine-1",
            }  # fmt: skip
        assert fleet.prefills[0].queries == 1


async def test_the_id_of_a_restarted_mooncake_engine_is_queried_again():
    async with fleet_of("mooncake") as (fleet, client):
        await client.send(ask(CHAT))
        assert (await client.answer()).status == 200
        fleet.prefills[0].engine_id = "engine-2"
        fleet.before.fleet.find(fleet.prefills[0].url).instance = "restarted"
        await client.send(ask(CHAT))
        assert (await client.answer()).status == 200
        params = fleet.decodes[0].bodies[1]["kv_transfer_params"]
        assert params["remote_engine_id"] == "engine-2"
        assert fleet.prefills[0].queries == 2


async def test_a_mooncake_engine_id_that_decode_rejects_is_queried_again():
    """The proxy is not notified when an engine restarts."""
    async with fleet_of("mooncake") as (fleet, client):
        (prefill,), (decode,) = fleet.prefills, fleet.decodes

        async def refuse_old(call):
            params = json.loads(call.body).get("kv_transfer_params")
            is_old = params is not None and params["remote_engine_id"] != prefill.engine_id
            return is_old and await failing("500 Internal Server Error", KV_ERROR)(call)

        decode.fault = refuse_old
        for _ in range(2):
            await client.send(ask(CHAT))
            assert (await client.answer()).status == 200
        prefill.engine_id = "engine-2"
        for _ in range(2):
            await client.send(ask(CHAT))
            assert (await client.answer()).status == 200
        assert prefill.queries == 2
        assert len(decode.bodies) == 5  # one of them was rejected
        assert fleet.failures() == {}


async def test_a_bootstrap_server_that_fails_counts_as_a_failed_prefill_worker():
    async with fleet_of("mooncake") as (fleet, client):
        fleet.prefills[0].engine_id = 7  # not a valid engine id
        await client.send(ask(CHAT))
        assert (await client.answer()).status == 200
        assert fleet.decodes[0].bodies[-1].get("kv_transfer_params") is None
        assert fleet.before.last["fallback"]


@pytest.mark.parametrize("connector", ["sglang", "nixl", "mooncake"])
async def test_a_body_of_many_megabytes_takes_two_legs_too(connector):
    text = "x" * (9 * 1024 * 1024)
    async with fleet_of(connector) as (fleet, client):
        body = {"messages": [{"role": "user", "content": text}], "model": "m"}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send, ask(body))
            answer = await client.answer()
        assert answer.status == 200
        assert [engine.bodies[0]["messages"] for engine in fleet.engines] == [body["messages"]] * 2
        await eventually(fleet.before.is_idle)
        assert fleet.before.dataplane.inflight.held_bytes == 0

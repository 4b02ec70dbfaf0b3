import json

import pytest
import trio
import trio.testing

from tests.promises.support.clients import post
from tests.promises.support.disaggregated_engines import TOKENS, fleet_of
from tests.promises.support.fakes import LAST_CHUNK


def generate(**fields):
    body = {"text": "a prompt", "sampling_params": {"temperature": 0}, **fields}
    return post(json.dumps(body).encode(), path="/generate")


def events(body: bytes) -> list:
    lines = [line for line in body.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_both_legs_are_sent_at_once_and_the_client_gets_the_decode_response():
    async with fleet_of("sglang") as (fleet, client):
        with trio.fail_after(5):  # a prefill engine does not answer before decode has joined
            await client.send(generate())
            answer = await client.answer()
        assert answer.status == 200
        assert json.loads(answer.body)["text"] == f"{TOKENS - 1}"
        prefill, decode = fleet.prefills[0].bodies[0], fleet.decodes[0].bodies[0]
        assert prefill == decode
        host, _, _ = fleet.prefills[0].url.removeprefix("http://").partition(":")
        assert (prefill["bootstrap_host"], prefill["bootstrap_port"]) == (host, 8998)
        assert 0 <= prefill["bootstrap_room"] < 2**63
        assert len(prefill["rid"]) == 32
        await trio.testing.wait_all_tasks_blocked()
        assert fleet.before.is_idle()


async def test_all_other_bytes_are_the_clients():
    sent = b'{ "text" : "\\u00e9\xc3\xa9", "n": 1.0e0 , "bootstrap_room" :7,"x":{"rid":1}}'
    async with fleet_of("sglang") as (fleet, client):
        await client.send(post(sent, path="/generate"))
        assert (await client.answer()).status == 200
        body, raw = fleet.decodes[0].bodies[0], fleet.decodes[0].raw[0]
        assert body["bootstrap_room"] != 7
        room = b"%d" % body["bootstrap_room"]
        for key in ("bootstrap_host", "bootstrap_port", "rid"):
            spliced = b'"%b":%b,' % (key.encode(), json.dumps(body[key]).encode())
            assert spliced in raw
            raw = raw.replace(spliced, b"")
        assert raw == sent.replace(b":7", b":" + room)


async def test_a_stream_is_relayed_token_by_token():
    async with fleet_of("sglang") as (fleet, client):
        fleet.decodes[0].gate = trio.Event()
        await client.send(generate(stream=True))
        first = await client.until(b"\n\n")  # while the engine holds all others back
        assert b'"text": "0"' in first
        fleet.decodes[0].gate.set()
        rest = await client.until(LAST_CHUNK)
        assert b'"text": "2"' in rest
        assert fleet.before.last["status"] == 200


@pytest.mark.parametrize("rid", ["mine", "another one with \u00e9"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_keeps_its_own_rid(rid, stream):
    async with fleet_of("sglang") as (fleet, client):
        await client.send(generate(rid=rid, stream=stream))
        answer = await client.answer()
        items = events(answer.body) if stream else [json.loads(answer.body)]
        assert {item["meta_info"]["id"] for item in items} == {rid}
        assert fleet.prefills[0].bodies[0]["rid"] == fleet.decodes[0].bodies[0]["rid"] != rid


@pytest.mark.parametrize("stream", [False, True])
async def test_a_batch_has_a_room_and_an_id_for_each_prompt(stream):
    async with fleet_of("sglang") as (fleet, client):
        await client.send(generate(text=["a", "b", "c"], rid=["x", "y", "z"], stream=stream))
        answer = await client.answer()
        items = events(answer.body) if stream else json.loads(answer.body)
        assert {item["meta_info"]["id"] for item in items} == {"x", "y", "z"}
        body = fleet.prefills[0].bodies[0]
        assert [len(body[key]) for key in ("bootstrap_room", "bootstrap_host", "rid")] == [3, 3, 3]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("many", [False, True])
async def test_the_logprobs_of_the_prompt_are_those_of_prefill(stream, many):
    async with fleet_of("sglang") as (_, client):
        text = ["a", "b"] if many else "a"
        await client.send(generate(text=text, return_logprob=True, stream=stream))
        answer = await client.answer()
        items = events(answer.body) if stream else json.loads(answer.body)
        for item in items if isinstance(items, list) else [items]:
            number = item["index"]
            assert item["meta_info"]["input_token_logprobs"] == [[-0.5, number, None]]


async def test_a_chat_with_several_choices_has_a_room_for_each():
    async with fleet_of("sglang") as (fleet, client):
        await client.send(post(b'{"messages": [], "n": 2}'))
        assert (await client.answer()).status == 200
        body = fleet.decodes[0].bodies[0]
        assert len(body["bootstrap_room"]) == 2
        assert isinstance(body["rid"], str)


async def test_a_duplicate_protocol_key_is_refused():
    async with fleet_of("sglang") as (fleet, client):
        await client.send(post(b'{"text": "a", "rid": "a", "rid": "b"}', path="/generate"))
        answer = await client.answer()
        assert answer.status == 400
        assert b"duplicate_key" in answer.body
        assert not fleet.prefills[0].bodies
        assert not fleet.decodes[0].bodies


async def test_later_requests_of_a_connection_take_two_legs_too():
    async with fleet_of("sglang") as (fleet, client):
        for _ in range(4):
            await client.send(generate())
            assert (await client.answer()).status == 200
        assert [len(engine.bodies) for engine in fleet.engines] == [4, 4]

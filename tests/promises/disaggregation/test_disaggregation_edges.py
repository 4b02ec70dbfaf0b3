"""Requests in two legs combined with other features, and under load with failures."""

import gc
import json
from random import Random

import pytest
import trio

from omni_proxy.routing.inspect.json_splice import JsonText
from tests.promises.support.clients import Truncated, post
from tests.promises.support.disaggregated_engines import (
    KV_ERROR,
    eventually,
    failing,
    fleet_of,
    once,
    resetting,
)
from tests.promises.support.fakes import counted

CONNECTORS = ["sglang", "nixl", "mooncake"]
STREAMED = post(b'{"messages": [], "stream": true}')
KEEP_ALIVE = "[server]\nsse_keepalive_secs = 0.05\n"


def waiting_for(gate):
    async def wait(_):
        await gate.wait()
        return False

    return wait


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_sse_keep_alives_keep_the_stream_open_while_prefill_computes(connector):
    async with fleet_of(connector, config=KEEP_ALIVE) as (fleet, client):
        gate = trio.Event()
        fleet.prefills[0].fault = waiting_for(gate)
        await client.send(STREAMED)
        await client.until(b": keep-alive\n\n")
        gate.set()
        assert (await client.until(b"[DONE]")).count(b'"text"') == 3
        await eventually(fleet.before.is_idle)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_after_an_sse_keep_alive_a_refusal_by_prefill_is_an_event(connector):
    async with fleet_of(connector, config=KEEP_ALIVE) as (fleet, client):
        gate = trio.Event()
        wait, refuse = waiting_for(gate), failing("400 Bad Request", b'{"error": {"code": 7}}')

        async def refuse_late(call):
            await wait(call)
            return await refuse(call)

        fleet.prefills[0].fault = refuse_late
        await client.send(STREAMED)
        await client.until(b": keep-alive\n\n")
        gate.set()
        assert b'data: {"error":{"code":7}}' in await client.until_closed()
        await eventually(lambda: not fleet.held and fleet.before.is_idle())


async def test_a_response_that_breaks_before_it_is_rewritten_is_retried():
    async with fleet_of("sglang", decodes=2) as (fleet, client):

        async def break_body(call):
            body = json.loads(call.body)
            fleet.decodes[0].rooms.side(body["bootstrap_room"], "decode").set()
            await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{")
            call.reset()
            return True

        fleet.decodes[0].fault = break_body
        for _ in range(3):
            await client.send(post(b'{"text": "a", "rid": "mine"}', path="/generate"))
            answer = await client.answer()
            assert json.loads(answer.body)["meta_info"]["id"] == "mine"
        assert set(fleet.failures()) == {fleet.decodes[0].url}


@pytest.mark.parametrize("rid", [b"", b', "rid": "mine"'])
async def test_an_http_1_0_client_gets_the_stream(rid):
    async with fleet_of("sglang") as (_, client):
        body = b'{"text": "a", "stream": true%b}' % rid
        await client.send(post(body, path="/generate").replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        received = await client.until_closed()
        assert received.count(b"data: {") == 3
        assert received.endswith(b"data: [DONE]\n\n")
        assert (b'"mine"' in received) == bool(rid)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_stream_that_ends_with_its_connection_is_relayed_completely(version):
    gate = trio.Event()
    async with fleet_of("sglang") as (fleet, client):

        async def stream_until_close(call):
            rid = json.loads(call.body)["rid"].encode()
            await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
            await call.send(b'data: {"id": "%b"}\n\n' % rid)
            await gate.wait()
            await call.send(b'data: {"id": "%b", "last": 1}\n' % rid)
            call.close()
            return True

        fleet.decodes[0].fault = stream_until_close
        body = b'{"text": "a", "stream": true, "rid": "mine"}'
        await client.send(post(body, path="/generate").replace(b"1.1", version, 1))
        received = await client.until(b'"mine"')
        gate.set()
        if version == b"1.0":
            received += await client.until_closed()
        else:
            received += await client.until(b"0\r\n\r\n")
        assert b'data: {"id": "mine", "last": 1}\n' in received


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_is_released_when_decode_answers_without_joining_it(stream):
    config = "[routing.disaggregation]\ntransfer_timeout_secs = 0.1\n"
    async with fleet_of("sglang", config=config) as (fleet, client):

        async def answer_alone(call):
            kind = "text/event-stream" if stream else "application/json"
            await call.send(counted(b'data: {"error": "no"}\n\n', f"content-type: {kind}"))
            return True

        fleet.decodes[0].fault = answer_alone
        await client.send(STREAMED if stream else post(b'{"messages": []}'))
        assert (await client.answer()).status == 200
        await eventually(lambda: fleet.prefills[0].bodies and not fleet.held)
        await eventually(fleet.before.is_idle)
        assert set(fleet.prefills[0].aborts) == {fleet.prefills[0].bodies[0]["rid"]}
        assert fleet.failures() == {}


def json_texts():
    return {id(value): value for value in gc.get_objects() if isinstance(value, JsonText)}


async def test_the_body_is_released_while_the_response_streams():
    before = json_texts()  # some of an earlier test may not be collected yet
    async with fleet_of("nixl") as (fleet, client):
        fleet.decodes[0].gate = trio.Event()
        await client.send(post(b'{"messages": [], "stream": true, "x": "%b"}' % (b"a" * 100_000)))
        await client.until(b'"0"')
        assert not fleet.before.dataplane.inflight.held_bytes
        assert json_texts().keys() <= before.keys()
        fleet.decodes[0].gate.set()
        await client.until(b"[DONE]")


async def test_a_transfer_that_fails_once_is_retried_and_counted():
    async with fleet_of("sglang", prefills=2) as (fleet, client):
        fleet.decodes[0].fault = once(failing("500 Internal Server Error", KV_ERROR))
        await client.send(post(b'{"messages": []}'))
        assert (await client.answer()).status == 200
        assert fleet.before.last["transfer_failures"] == 1
        assert fleet.failures() == {}


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("seed", range(3))
async def test_nothing_leaks_under_load_with_failures(connector, seed):
    chance = Random(seed)
    async with fleet_of(connector, prefills=2, decodes=2) as (fleet, _):

        def sometimes(fault):
            async def fault_or_not(call):
                return chance.random() < 0.15 and await fault(call)

            return fault_or_not

        faults = [resetting, failing("500 Internal Server Error"), failing("503 Busy"),
                  failing("500 Internal Server Error", KV_ERROR)]  # fmt: skip
        for engine, fault in zip(fleet.engines, faults, strict=True):
            engine.fault = sometimes(fault)
        statuses = []

        async def one(number):
            body = {"messages": [], "stream": number % 2 == 0}
            async with fleet.before.client() as client:
                await client.send(post(json.dumps(body).encode()))
                if number % 7 == 0:
                    return  # disconnects at once
                try:
                    statuses.append((await client.answer()).status)
                except Truncated:
                    statuses.append(0)

        async with trio.open_nursery() as nursery:
            for number in range(60):
                nursery.start_soon(one, number)
        await eventually(fleet.before.is_idle)
        assert fleet.before.dataplane.inflight.held_bytes == 0
        assert statuses.count(200) > len(statuses) / 2
        await eventually(lambda: not fleet.before.dataplane.loop.side_tasks)

"""Failures of legs: a test for each bug report about other routers (note:features 2.6), and more.

The time limits are generous: other routers took minutes, or waited for an engine's own timeout of
300 s; here the other leg must end at once.
"""

import json

import pytest
import trio
import trio.testing

from tests.promises.support.clients import Truncated, post
from tests.promises.support.disaggregated_engines import (
    KV_ERROR,
    eventually,
    failing,
    fleet_of,
    once,
    resetting,
    silent,
)
from tests.promises.support.fakes import SSE_HEAD, counted, unreachable_url

AT_ONCE_SECS = 1.0
CHAT = post(b'{"messages": [], "model": "m"}')
STREAMED = post(b'{"messages": [], "stream": true}')
ONCE = "[routing]\nmax_total_retries = 1"
CONNECTORS = ["sglang", "nixl", "mooncake"]
AT_ONCE = ["sglang", "mooncake"]  # both legs are sent at once


async def all_freed(fleet):
    """Wait until no engine holds a request, and the proxy counts none."""
    await eventually(lambda: not fleet.held and fleet.before.is_idle())


@pytest.mark.parametrize("connector", AT_ONCE)
@pytest.mark.parametrize("fault", [failing("500 Internal Server Error"), resetting])
async def test_decode_does_not_wait_after_prefill_failed(connector, fault):
    """sglang#9726, aibrix#2289: decode waited for minutes."""
    config = ONCE + '\n[routing.disaggregation]\nfallback = "refuse"'
    async with fleet_of(connector, config=config) as (fleet, client):

        async def after_decode(call):
            await fleet.decodes[0].begun.wait()
            return await fault(call)

        fleet.prefills[0].fault = after_decode
        with trio.fail_after(AT_ONCE_SECS):
            await client.send(CHAT)
            assert (await client.answer()).status in (500, 502)
        await all_freed(fleet)


@pytest.mark.parametrize("connector", AT_ONCE)
@pytest.mark.parametrize("fault", [failing("500 Internal Server Error"), resetting])
async def test_prefill_does_not_wait_after_decode_failed(connector, fault):
    """sglang#29482, smg#831: prefill waited until its timeout of 1800 s."""
    async with fleet_of(connector, config=ONCE) as (fleet, client):

        async def after_prefill(call):
            await fleet.prefills[0].begun.wait()
            return await fault(call)

        fleet.decodes[0].fault = after_prefill
        with trio.fail_after(AT_ONCE_SECS):
            await client.send(CHAT)
            assert (await client.answer()).status in (500, 502)
        await all_freed(fleet)


async def test_an_unreachable_decode_worker_leaves_no_request_at_prefill():
    async with (
        unreachable_url() as url,
        fleet_of("sglang", decodes=1, config=ONCE) as (fleet, client),
    ):
        fleet.before.fleet.find(fleet.decodes[0].url).address = address_of(url)
        with trio.fail_after(AT_ONCE_SECS):
            await client.send(CHAT)
            assert (await client.answer()).status == 502
        await all_freed(fleet)


def address_of(url):
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


async def test_a_disconnect_aborts_a_queued_leg_by_the_id_that_the_proxy_sent():
    """aibrix#2746: closing the connection freed nothing."""
    async with fleet_of("sglang") as (fleet, _):
        fleet.decodes[0].fault = silent
        async with fleet.before.client() as client:
            await client.send(post(b'{"text": "a", "rid": "shared"}', path="/generate"))
            await fleet.prefills[0].begun.wait()
            await eventually(lambda: fleet.held)
            client.close()
        with trio.fail_after(AT_ONCE_SECS):
            await all_freed(fleet)
        (rid,) = set(fleet.prefills[0].aborts)
        assert rid != "shared"
        assert len(rid) == 32


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_failure_counts_against_the_worker_of_the_failed_leg(connector, leg):
    """Other routers counted it against both workers, and the circuit breaker emptied the pool."""
    config = ONCE + '\n[routing.disaggregation]\nfallback = "refuse"'
    async with fleet_of(connector, config=config) as (fleet, client):
        bad = fleet.prefills[0] if leg == "prefill" else fleet.decodes[0]
        bad.fault = resetting
        await client.send(CHAT)
        assert (await client.answer()).status == 502
        await all_freed(fleet)
        assert fleet.failures() == {bad.url: 1}


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_retries_of_one_request_count_one_failure_per_worker(connector, leg):
    """Otherwise a request that no worker can answer would eject a worker by its retries alone."""
    config = '[routing]\nmax_total_retries = 3\nretry_on = ["502"]\n'
    config += '[routing.disaggregation]\nfallback = "refuse"'
    async with fleet_of(connector, config=config) as (fleet, client):
        bad = fleet.prefills[0] if leg == "prefill" else fleet.decodes[0]
        tries = []
        answer_502 = failing("502 Bad Gateway", b"{}")

        async def counted(call):
            tries.append(call)
            return await answer_502(call)

        bad.fault = counted
        await client.send(CHAT)
        assert (await client.answer()).status == 502
        await all_freed(fleet)
        assert len(tries) == 3
        assert fleet.failures() == {bad.url: 1}


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_kv_transfer_error_counts_against_no_worker(connector, leg):
    config = '[routing]\nmax_total_retries = 1\nretry_on = ["500"]\n'
    config += '[routing.disaggregation]\nfallback = "refuse"'
    async with fleet_of(connector, config=config) as (fleet, client):
        bad = fleet.prefills[0] if leg == "prefill" else fleet.decodes[0]
        bad.fault = failing("500 Internal Server Error", KV_ERROR)
        await client.send(CHAT)
        answer = await client.answer()
        assert (answer.status, answer.body) == (500, KV_ERROR)
        await all_freed(fleet)
        assert fleet.failures() == {}


async def test_the_first_token_does_not_wait_for_the_end_of_prefills_body():
    """smg: prefill's body was read to its end before decode's answer was relayed."""
    async with fleet_of("sglang") as (fleet, client):
        gate = trio.Event()

        async def slow_end(call):
            body = json.loads(call.body)
            fleet.prefills[0].rooms.side(body["bootstrap_room"], "kv").set()
            await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{")
            await gate.wait()
            await call.send(b"        }")
            return True

        fleet.prefills[0].fault = slow_end
        with trio.fail_after(AT_ONCE_SECS):
            await client.send(CHAT)
            assert (await client.answer()).status == 200
        prefill = fleet.before.fleet.find(fleet.prefills[0].url)
        decode = fleet.before.fleet.find(fleet.decodes[0].url)
        # Each leg counts until its own last byte.
        assert (prefill.in_flight, decode.in_flight) == (1, 0)
        gate.set()
        await all_freed(fleet)


async def test_load_is_counted_for_each_leg_until_that_leg_ends():
    """sglang#9484: the load was released before the stream ended."""
    async with fleet_of("sglang") as (fleet, client):
        fleet.decodes[0].gate = trio.Event()
        await client.send(STREAMED)
        await client.until(b"\n\n")
        find = fleet.before.fleet.find
        await eventually(lambda: find(fleet.prefills[0].url).in_flight == 0)
        assert find(fleet.decodes[0].url).in_flight == 1
        fleet.decodes[0].gate.set()
        await client.until(b"[DONE]")
        await all_freed(fleet)


async def test_a_pair_is_picked_by_the_whole_conversation():
    """sglang#26263: only the first message was the routing text."""
    config = '[routing]\npolicy = "cache_aware"'
    async with fleet_of("sglang", 2, 2, config=config) as (fleet, client):
        system = {"role": "system", "content": "You are a pilot." * 8}
        for letter in "abab":
            messages = [system, {"role": "user", "content": letter * 400}]
            await client.send(post(json.dumps({"messages": messages}).encode()))
            assert (await client.answer()).status == 200
        for pool in (fleet.prefills, fleet.decodes):
            users = [
                [body["messages"][1]["content"][0] for body in engine.bodies] for engine in pool
            ]
            assert sorted(users) == [["a", "a"], ["b", "b"]]
        await all_freed(fleet)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_stale_kept_connections_are_replaced_without_an_error(connector):
    """sglang#9926, #9266: after idle hours requests failed."""
    async with fleet_of(connector, config=ONCE) as (fleet, client):
        for engine in fleet.engines:
            engine.fault = resetting_if_kept()
        for _ in range(4):
            await client.send(CHAT)
            assert (await client.answer()).status == 200
        assert fleet.failures() == {}
        assert fleet.before.last["attempts"] == 1
        await all_freed(fleet)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_no_engine_gets_a_room_or_a_handle_twice(connector):
    """sglang#40125, vllm#52234. An engine may have read a request whose connection broke."""
    async with fleet_of(connector) as (fleet, client):
        for engine in fleet.engines:
            engine.fault = resetting_if_kept()
        for _ in range(4):
            await client.send(CHAT)
            assert (await client.answer()).status == 200
        reset = [engine for engine in fleet.engines if len(engine.bodies) > 4]
        assert reset, "no kept connection was broken"
        for engine in fleet.engines:
            handles = [handle_of(body) for body in engine.bodies]
            handles = [handle for handle in handles if handle is not None]
            assert len(handles) == len(set(handles))


def handle_of(body):
    """The room or handle in a body; None for NIXL's prefill leg, whose request has none."""
    params = body.get("kv_transfer_params") or {}
    if params.get("do_remote_decode") and "transfer_id" not in params:
        return None
    return body.get("bootstrap_room") or json.dumps(params, sort_keys=True)


def resetting_if_kept():
    """A fault that resets each connection after its second request was read."""
    seen = set()

    async def fault(call):
        if call in seen:
            return await resetting(call)
        seen.add(call)
        return False

    return fault


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_failed_prefill_leg_is_retried_at_another_prefill_worker(connector):
    async with fleet_of(connector, prefills=2) as (fleet, client):
        fleet.prefills[0].fault = resetting
        for _ in range(3):
            await client.send(CHAT)
            assert (await client.answer()).status == 200
        assert len(fleet.prefills[1].bodies) == 3
        assert set(fleet.failures()) <= {fleet.prefills[0].url}


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
async def test_decode_computes_the_prompt_itself_if_no_prefill_worker_answers(connector):
    async with fleet_of(connector) as (fleet, client):
        fleet.prefills[0].fault = resetting
        await client.send(post(b'{"messages": [], "kv_transfer_params": {"old": 1}}'))
        assert (await client.answer()).status == 200
        assert [body.get("kv_transfer_params") for body in fleet.decodes[0].bodies][-1] is None
        assert fleet.failures() == {fleet.prefills[0].url: 1}


async def test_with_fallback_refuse_the_client_gets_the_error():
    config = '[routing.disaggregation]\nfallback = "refuse"'
    async with fleet_of("nixl", config=config) as (fleet, client):
        fleet.prefills[0].fault = resetting
        await client.send(CHAT)
        assert (await client.answer()).status == 502
        assert not fleet.decodes[0].bodies


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_refusal_of_prefill_is_relayed_to_the_client(connector):
    refusal = b'{"error": {"message": "the prompt is too long"}}'
    async with fleet_of(connector) as (fleet, client):
        fleet.prefills[0].fault = failing("400 Bad Request", refusal)
        with trio.fail_after(AT_ONCE_SECS):
            await client.send(CHAT)
            answer = await client.answer()
        assert (answer.status, answer.body) == (400, refusal)
        if connector == "nixl":
            assert not fleet.decodes[0].bodies
        await all_freed(fleet)
        assert fleet.failures() == {}
        await client.send(CHAT)  # the connection stays usable
        assert (await client.answer()).status == 400


@pytest.mark.parametrize("connector", AT_ONCE)
async def test_a_silent_pair_ends_at_the_proxys_transfer_timeout(connector):
    config = ONCE + '\n[routing.disaggregation]\ntransfer_timeout_secs = 0.1\nfallback = "refuse"'
    async with fleet_of(connector, config=config) as (fleet, client):
        fleet.decodes[0].fault = silent
        fleet.prefills[0].fault = None
        with trio.fail_after(5):
            await client.send(CHAT)
            assert (await client.answer()).status == 504
        await all_freed(fleet)
        assert fleet.failures() == {}


async def test_a_decode_worker_silent_after_its_head_ends_at_the_transfer_timeout():
    config = ONCE + "\n[routing.disaggregation]\ntransfer_timeout_secs = 0.1"
    async with fleet_of("sglang", config=config) as (fleet, client):
        prefilled = trio.Event()

        async def answer_at_once(call):
            await call.send(counted(b"{}", "content-type: application/json"))
            prefilled.set()
            return True

        async def head_alone(call):
            await prefilled.wait()
            await call.send(SSE_HEAD)
            return await silent(call)

        fleet.prefills[0].fault, fleet.decodes[0].fault = answer_at_once, head_alone
        with trio.fail_after(5):
            await client.send(STREAMED)
            assert (await client.answer()).status == 504
        await all_freed(fleet)
        assert fleet.failures() == {}


async def test_a_nixl_handle_is_never_sent_to_two_decode_workers():
    async with fleet_of("nixl", decodes=2) as (fleet, client):
        fleet.decodes[0].fault = resetting
        for _ in range(3):
            await client.send(CHAT)
            assert (await client.answer()).status == 200
        sent = [
            body["kv_transfer_params"]["remote_request_id"]
            for engine in fleet.decodes
            for body in engine.bodies
        ]
        assert len(sent) > 3
        assert len(sent) == len(set(sent)) == len(fleet.prefills[0].bodies)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_the_client_sees_that_decode_broke_off_its_response(connector):
    async with fleet_of(connector) as (fleet, client):

        async def cut(call):
            body = json.loads(call.body)
            fleet.decodes[0].rooms.side(body.get("bootstrap_room"), "decode").set()
            await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{")
            await trio.testing.wait_all_tasks_blocked()
            call.reset()
            return True

        fleet.decodes[0].fault = cut
        await client.send(CHAT)
        with pytest.raises(Truncated):
            await client.answer()
        await all_freed(fleet)
        assert set(fleet.failures()) <= {fleet.decodes[0].url}


async def test_a_stream_completes_although_prefill_breaks_off_its_response():
    async with fleet_of("sglang") as (fleet, client):

        async def cut(call):
            body = json.loads(call.body)
            fleet.prefills[0].rooms.side(body["bootstrap_room"], "kv").set()
            await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{")
            await fleet.decodes[0].gate.wait()
            call.reset()
            return True

        gate = fleet.decodes[0].gate = trio.Event()
        fleet.prefills[0].fault = cut
        await client.send(STREAMED)
        await client.until(b"\n\n")
        gate.set()
        assert (await client.until(b"[DONE]")).count(b"data:") == 3
        await all_freed(fleet)
        assert fleet.failures() == {fleet.prefills[0].url: 1}


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_new_weights_between_the_legs_restart_the_request(connector):
    async with fleet_of(connector) as (fleet, client):

        async def update(call):
            for worker in fleet.before.fleet.workers:
                fleet.before.fleet.set_version(worker, "v2", 2)
            return False

        fleet.prefills[0].fault = once(update)
        await client.send(CHAT)
        answer = await client.answer()
        assert answer.status == 200
        assert answer.one("x-omni-weight-version") == "v2"
        assert len(fleet.prefills[0].bodies) == 2
        await all_freed(fleet)
        assert fleet.failures() == {}


async def test_requests_use_another_pair_when_a_worker_is_unreachable():
    async with (
        unreachable_url() as url,
        fleet_of("sglang", prefills=2, decodes=2) as (fleet, client),
    ):
        for engine in (fleet.prefills[0], fleet.decodes[0]):
            fleet.before.fleet.find(engine.url).address = address_of(url)
        for _ in range(4):
            await client.send(CHAT)
            assert (await client.answer()).status == 200
        await all_freed(fleet)
        assert [len(engine.bodies) for engine in fleet.decodes] == [0, 4]
        assert fleet.prefills[0].bodies == []

"""Envoy sends requests to the workers that the picker chooses; each counts until it ends."""

import signal
from urllib.parse import quote

import pytest
import trio

from tests.promises.support.envoy_program import (
    DUPLEX,
    NO_BODY,
    OPEN,
    PATIENCE_SECS,
    envoy,
    idle,
    needs_envoy,
    picked,
    ports_with_same_picker,
)
from tests.promises.support.fleet_program import chat, record

pytestmark = needs_envoy
MODES = {"buffered": (), "duplex": DUPLEX, "no_response_body": NO_BODY}
LEAST = "[routing]\npolicy = 'least_request'"
ALIAS = """
[[routing.models]]
name = "gpt"
targets = [{ model = "m", weight = 1 }]
"""


def in_flight(body):
    return sum(worker["in_flight"] for worker in body["workers"])


@pytest.mark.parametrize("mode", MODES)
async def test_requests_follow_the_policy_and_count_until_their_last_byte(tmp_path, mode):
    async with picked(tmp_path, changes=MODES[mode], more=LEAST) as here:
        first, second = here.fleet
        first.gate, second.gate = trio.Event(), trio.Event()
        received = {}

        async def stream(name):
            async with here.client.stream(
                "POST", "/v1/chat/completions", json=chat("x" * 100_000, stream=True)
            ) as answer:
                lines = [line async for line in answer.aiter_lines() if line]
                received[name] = answer.status_code, lines

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(stream, number)
            await first.halfway.wait()
            await second.halfway.wait()
            await here.picker.until(
                "/workers", lambda body: [row["in_flight"] for row in body["workers"]] == [2, 2]
            )
            first.gate.set()
            await here.picker.until("/workers", lambda body: not record(body, first)["in_flight"])
            assert record(await here.picker.get_json("/workers"), second)["in_flight"] == 2
            second.gate.set()
        assert all(status == 200 for status, _ in received.values())
        lines = sorted(lines for _, lines in received.values())
        assert lines == [
            [f"data: {name}", "data: rest", "data: [DONE]"] for name in ("a", "a", "b", "b")
        ]
        await idle(here.picker)
        records = (await here.picker.get_json("/workers"))["workers"]
        assert [row["successful_requests"] for row in records] == [2, 2]
        metrics = (await here.picker.client.get("/metrics")).text
        assert "omni_proxy_requests_in_flight 0.0" in metrics


@pytest.mark.parametrize("mode", ["buffered", "duplex"])
async def test_a_disconnect_ends_the_request_at_the_picker(tmp_path, mode):
    async with picked(tmp_path, changes=MODES[mode]) as here:
        for worker in here.fleet:
            worker.gate = trio.Event()

        async def ask():
            await here.client.post("/v1/chat/completions", json=chat(stream=True))

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await here.picker.until("/workers", lambda body: in_flight(body) == 1)
                scope.cancel()
        await idle(here.picker)


async def test_the_picker_answers_requests_that_no_worker_can_take(tmp_path):
    async with picked(tmp_path, tables=ALIAS) as here:
        client, picker = here.client, here.picker
        unknown = await client.post("/v1/chat/completions", json=chat(model="unknown"))
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        no_route = await client.post("/pause_generation", json={})
        assert (no_route.status_code, no_route.json()["error"]["code"]) == (404, "unknown_path")
        broken = await client.post(
            "/v1/chat/completions", content=b"{", headers={"content-type": "application/json"}
        )
        assert broken.status_code == 400
        relayed = await picker.client.post("/v1/chat/completions", json=chat())
        assert (relayed.status_code, relayed.json()["error"]["code"]) == (404, "picker_only")
        assert sum(worker.requests for worker in here.fleet) == 0
        await idle(picker)
        forged = {"x-gateway-destination-endpoint": "127.0.0.1:1"}
        answer = await client.post("/v1/chat/completions", json=chat(), headers=forged)
        assert answer.status_code == 200
        for worker in here.fleet:
            path = f"/workers/{quote(worker.url, safe='')}"
            assert (await picker.client.put(path, json={"disabled": True})).status_code < 300
        refused = await client.post("/v1/chat/completions", json=chat())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "all_disabled")
        assert refused.headers["retry-after"] == "1"


@pytest.mark.parametrize("mode", ["buffered", "duplex"])
async def test_an_alias_is_replaced_by_its_target_through_envoy(tmp_path, mode):
    async with picked(tmp_path, changes=MODES[mode], tables=ALIAS, model="m") as here:
        answer = await here.client.post("/v1/chat/completions", json=chat(model="gpt"))
        assert answer.status_code == 200
        assert [*here.fleet[0].bodies, *here.fleet[1].bodies] == [chat(model="m")]


async def test_without_a_picker_envoy_fails_closed_or_open_as_configured(tmp_path):
    async with (
        picked(tmp_path) as here,
        envoy(tmp_path, ports_with_same_picker(here.at), here.fleet, OPEN) as open_client,
    ):
        here.picker.process.kill()
        await here.picker.process.wait()
        refused = await here.client.post("/v1/chat/completions", json=chat())
        assert refused.status_code == 500
        alone = await open_client.post("/v1/chat/completions", json=chat())
        assert alone.status_code == 200


async def test_a_draining_picker_lets_streams_end(tmp_path):
    async with picked(tmp_path) as here:
        for worker in here.fleet:
            worker.gate = trio.Event()
        texts = []

        async def ask():
            answer = await here.client.post("/v1/chat/completions", json=chat(stream=True))
            texts.append(answer.text)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await here.picker.until("/workers", lambda body: in_flight(body) == 1)
            here.picker.process.send_signal(signal.SIGTERM)
            await here.picker.until_logged("drain_started")
            for worker in here.fleet:
                worker.gate.set()
        assert texts[0].endswith("data: [DONE]\n\n")
        with trio.fail_after(PATIENCE_SECS):
            assert await here.picker.process.wait() == 0

"""Both legs in logs, metrics and aborts."""

import json

import pytest
import trio
from prometheus_client.openmetrics.exposition import generate_latest

from omni_proxy.admin_ops.abort_requests import AbortTarget
from omni_proxy.dataplane.exchange.access_log import access_text
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.prometheus import request_families
from omni_proxy.telemetry.recent_window import RecentWindow
from tests.promises.support.clients import post
from tests.promises.support.disaggregated_engines import eventually, fleet_of, resetting

CHAT = post(b'{"messages": [], "model": "m"}')
CONNECTORS = ["sglang", "nixl", "mooncake"]


def metered(fleet):
    meters = Metrics(fleet.before.fleet, RecentWindow(), fleet.before.dataplane.loop.clock)
    fleet.before.dataplane.recorders.meters = meters
    return meters


def samples(meters):
    class Registry:
        def collect(self):
            return request_families(meters)

    lines = generate_latest(Registry()).decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_an_access_log_line_has_both_workers_and_their_times(connector):
    async with fleet_of(connector) as (fleet, client):
        await client.send(CHAT)
        await client.answer()
        line = fleet.before.last
        assert (line["prefill"], line["decode"]) == tuple(engine.url for engine in fleet.engines)
        assert line["worker"] == line["decode"]
        assert line["prefill_status"] == 200
        assert 0 < line["prefill_ms"] < line["total_ms"]
        assert 0 < line["decode_ms"] < line["total_ms"]
        text = access_text(json.dumps(line).encode()).decode()
        assert f" prefill={fleet.prefills[0].url} " in text
        assert f" decode={fleet.decodes[0].url} " in text


async def test_the_line_of_a_regular_request_has_no_leg_fields():
    async with fleet_of("nixl") as (fleet, client):
        await client.send(post(b'{"messages": []}', path="/v1/messages"))
        await client.answer()
        assert not {"prefill", "decode"} & fleet.before.last.keys()


async def test_legs_fallbacks_and_failed_transfers_are_counted():
    async with fleet_of("nixl") as (fleet, client):
        meters = metered(fleet)
        await client.send(CHAT)
        await client.answer()
        fleet.prefills[0].gives_params = False
        await client.send(CHAT)
        await client.answer()
        fleet.prefills[0].fault = resetting
        await client.send(CHAT)
        await client.answer()
        values = samples(meters)
        assert values['omni_proxy_leg_seconds_count{leg="prefill"}'] == "2.0"
        assert values['omni_proxy_leg_seconds_count{leg="decode"}'] == "3.0"
        reasons = {
            key: value for key, value in values.items() if key.startswith("omni_proxy_prefill_fall")
        }
        assert reasons == {
            'omni_proxy_prefill_fallbacks_total{reason="no_params"}': "1.0",
            'omni_proxy_prefill_fallbacks_total{reason="reset_before_response"}': "1.0",
        }
        assert values["omni_proxy_kv_transfer_failures_total"] == "0.0"


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_recent_requests_name_both_workers_and_the_time_of_prefill(connector):
    async with fleet_of(connector) as (fleet, client):
        recent = RecentWindow()
        clock = fleet.before.dataplane.loop.clock
        fleet.before.dataplane.recorders.meters = Metrics(fleet.before.fleet, recent, clock)
        for _ in range(3):  # the first requests of a connection do not take the fast path
            await client.send(CHAT)
            await client.answer()
        prefill, decode = (engine.url for engine in fleet.engines)
        ends = recent.ends()
        assert [(end.steps.prefill, end.worker) for end in ends] == [(prefill, decode)] * 3
        if connector == "nixl":  # with the others, prefill may end after the response
            assert all(0 < end.steps.prefill_secs < end.total_secs for end in ends)


async def test_a_prefill_leg_counts_for_its_worker_and_not_as_a_request_of_the_fleet():
    async with fleet_of("sglang") as (fleet, client):
        window = RecentWindow()
        meters = Metrics(fleet.before.fleet, window, fleet.before.dataplane.loop.clock)
        fleet.before.dataplane.recorders.meters = meters
        for _ in range(3):
            await client.send(CHAT)
            await client.answer()
        await eventually(fleet.before.is_idle)
        for worker in fleet.before.fleet.workers:
            stats = window.worker_window(worker, 1.0)
            assert (stats.rate, stats.answers, stats.errors) == (3.0, 3, 0)
            assert stats.first_p50_ms > 0
        assert window.last_minute() == (3, 0)


@pytest.mark.parametrize("rid", ["mine", "*"])
async def test_an_abort_by_the_clients_rid_ends_both_legs(rid):
    async with fleet_of("sglang") as (fleet, client):
        fleet.decodes[0].gate = trio.Event()

        async def hold_until_left(call):
            fleet.decodes[0].held["x"] = trio.Event()
            await call.until_left()
            return True

        fleet.decodes[0].fault = hold_until_left
        body = {"text": "a", "rid": "mine"}
        await client.send(post(json.dumps(body).encode(), path="/generate"))
        await eventually(lambda: fleet.prefills[0].held)
        target = AbortTarget(("mine",)) if rid == "mine" else AbortTarget(("m",), prefix=True)
        result = await fleet.before.dataplane.abort(target)
        assert set(result.known) == set(target.ids)
        await eventually(lambda: fleet.prefills[0].aborts and fleet.decodes[0].aborts)
        assert fleet.prefills[0].aborts[0] == fleet.prefills[0].bodies[0]["rid"]
        assert (await client.answer()).status == 500  # the status of the prefill engine


async def test_an_abort_while_prefill_computes_sends_nothing_to_the_decode_worker():
    async with fleet_of("nixl") as (fleet, client):
        left = trio.Event()

        async def compute_until_left(call):
            await call.until_left()
            left.set()
            return True

        fleet.prefills[0].fault = compute_until_left
        await client.send(post(b'{"messages": []}', "X-Request-Id: r7"))
        await fleet.prefills[0].begun.wait()
        result = await fleet.before.dataplane.abort(AbortTarget(("r7",)))
        assert result.waiting == 1
        assert b"abort" in (await client.answer()).body
        await left.wait()
        assert not fleet.decodes[0].bodies

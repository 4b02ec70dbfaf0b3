"""Prefill and decode workers in the whole program: by flags, over HTTP, as their engines report,
and in a file that is edited."""

import json
from contextlib import asynccontextmanager

import pytest
import trio

from tests.promises.support.disaggregated_engines import TOKENS, Rooms, SglangDecode, SglangPrefill
from tests.promises.support.fakes import counted
from tests.promises.support.fleet_program import program, put, record

PROMPT = {"text": "a prompt", "sampling_params": {"temperature": 0}}
FILE = """\
[server]
port = 0
processes = {processes}
state_file = "off"
[health]
interval_secs = 0.2
success_threshold = 1
[[workers]]
url = "{prefill.url}"
role = "prefill"
[[workers]]
url = "{decode.url}"
role = "{role}"
"""


class _Reporting:
    """An engine that reports its mode in /server_info and has no other GET route."""

    async def _serve(self, call):
        if not call.line.startswith("GET "):
            await super()._serve(call)
        elif call.line.split()[1].startswith("/server_info"):
            await call.send(counted(json.dumps({"disaggregation_mode": self.role}).encode()))
        else:
            await call.send(counted(b"{}", status="404 Not Found"))


class Prefill(_Reporting, SglangPrefill):
    pass


class Decode(_Reporting, SglangDecode):
    pass


@asynccontextmanager
async def engines(*kinds):
    rooms = Rooms()
    started = [kind(rooms) for kind in kinds]
    async with trio.open_nursery() as nursery:
        for engine in started:
            await nursery.start(engine.serve)
        yield started
        nursery.cancel_scope.cancel()


def has_role(worker, role):
    def matches(listed):
        worker_record = record(listed, worker)
        return worker_record["routable"] and worker_record["role"] == role

    return matches


async def test_workers_of_the_flags_serve_and_one_added_later_reports_its_role():
    async with engines(Prefill, Decode, Prefill) as (prefill, decode, late):
        arguments = (
            "--pd-disaggregation",
            "--prefill",
            prefill.url,
            "none",
            "--decode",
            decode.url,
        )
        async with program("launch-router", "--port", "0", *arguments) as running:
            await running.until("/ready", lambda body: body["status"] == "ready")
            response = await running.client.post("/generate", json=PROMPT)
            assert (response.status_code, response.json()["text"]) == (200, f"{TOKENS - 1}")
            assert prefill.bodies[0] == decode.bodies[0]
            assert prefill.bodies[0]["bootstrap_port"] is None
            await running.client.post("/workers", json={"url": late.url})
            body = await running.until("/workers", lambda body: len(body["workers"]) == 3)
            body = await running.until("/workers", has_role(late, "prefill"))
            assert body["stats"] == {"prefill_count": 2, "decode_count": 1, "regular_count": 0}
            for _ in range(4):
                assert (await running.client.post("/generate", json=PROMPT)).status_code == 200
            explained = (await running.client.post("/explain?path=/generate", json=PROMPT)).json()
            assert explained["pick"]["url"] == decode.url
            assert explained["prefill"]["pick"]["url"] in (prefill.url, late.url)


@pytest.mark.parametrize("processes", [1, 2])
async def test_an_edited_role_does_not_affect_the_request_in_flight(tmp_path, processes):
    file = tmp_path / "proxy.toml"
    async with engines(Prefill, Decode) as (prefill, decode):
        values = {"prefill": prefill, "decode": decode, "processes": processes}
        put(file, FILE.format(**values, role="decode"))
        async with program("--config", file) as running:
            await running.until("/ready", lambda body: body["status"] == "ready")
            decode.gate = trio.Event()
            body = {**PROMPT, "stream": True}
            async with running.client.stream("POST", "/generate", json=body) as response:
                lines = response.aiter_lines()
                assert json.loads((await anext(lines)).removeprefix("data: "))["text"] == "0"
                put(file, FILE.format(**values, role="regular"))
                listed = await running.until("/workers", has_role(decode, "regular"))
                assert record(listed, decode)["in_flight"] == 1
                decode.gate.set()
                rest = [line async for line in lines if line.startswith("data: ")]
            assert len(rest) == TOKENS
            assert rest[-1] == "data: [DONE]"
            await running.until("/workers", lambda body: not record(body, decode)["in_flight"])

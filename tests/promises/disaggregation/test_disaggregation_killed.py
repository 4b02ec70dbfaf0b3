"""SIGKILL of prefill and decode workers at each moment of a request, under load.

The workers are processes: two of each role, of which the first is killed. Clients send requests
continuously, half of them for streams. The other workers serve requests whose response has not
begun; a response that has begun ends visibly broken. Afterwards no request is counted as in flight,
and no failure counts against the surviving workers.
"""

import json
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE

import pytest
import trio

from tests.ports import free_run
from tests.promises.support.clients import Truncated, client_of, post
from tests.promises.support.fleet_program import PATIENCE_SECS, PROBES, program, put
from tests.promises.support.processes_fixture import address

ENGINE = Path(__file__).parents[1] / "support" / "leg_engine_program.py"
CLIENTS = 16
HELD = 5  # requests at the engines when some are killed
CONNECTORS = ["sglang", "nixl", "mooncake"]
MOMENTS = ["", "head", "prefilled", "streaming"]  # "": killed before any request is sent
KILLED = [("prefill",), ("decode",), ("prefill", "decode")]
# Fields of a worker's record: a failure that counts against it changes some of them.
FAILURE_FIELDS = ["health_state", "since", "half_open", "consecutive_failures", "last_error"]


class Process:
    """One engine; after a SIGKILL, a new process with the same ports replaces it."""

    def __init__(self, role, connector):
        self.role, self.connector = role, connector
        self.port = free_run(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None
        self.held = 0
        self.rest = b""

    async def start(self, nursery):
        arguments = [self.role, self.connector, self.port, self.port + 1]
        command = [sys.executable, "-S", "-E", str(ENGINE), *map(str, arguments)]
        self.rest = b""
        run = partial(trio.run_process, command, stdin=PIPE, stdout=PIPE, check=False)
        self.process = await nursery.start(run)
        assert await self.line() == b"ready"

    async def line(self):
        """The next line of output; b"" once the process has ended."""
        while b"\n" not in self.rest:
            piece = await self.process.stdout.receive_some()
            if not piece:
                return b""
            self.rest += piece
        line, _, self.rest = self.rest.partition(b"\n")
        return line

    async def hold(self, moment):
        self.held = 0
        await self.process.stdin.send_all(f"{moment}\n".encode())
        assert await self.line() == b"ready"

    async def count_held(self, changed):
        while await self.line():
            self.held += 1
            changed()

    async def kill(self):
        self.process.kill()
        await self.process.wait()

    async def release(self):
        await self.process.stdin.send_all(b"\n")

    def entry(self):
        has_port = self.role == "prefill" and self.connector != "nixl"
        port = f"bootstrap_port = {self.port + 1}\n" if has_port else ""
        return (
            f'[[workers]]\nurl = "{self.url}"\nrole = "{self.role}"\n'
            f'kv_connector = "{self.connector}"\n{port}'
        )


class Load:
    """Clients that send requests; `results` has what `ask` returned for each."""

    def __init__(self, address):
        self.address = address
        self.results = []
        self.after = []  # results of requests sent after the kill
        self.is_killed = False

    async def client(self, number):
        while True:
            last = self.is_killed
            async with client_of(self.address) as client:
                result = await ask(client, stream=number % 2 == 0)
            self.results.append(result)
            if last:
                self.after.append(result)
                return

    def failed(self):
        return [result for result in self.results if result[2]]

    async def run_until_held(self, moment, holding, victims):
        """Kill the victims while the engines in `holding` hold requests at this moment."""
        reached = trio.Event()

        def check_held():
            if sum(engine.held for engine in holding) >= HELD:
                reached.set()

        for engine in holding:
            await engine.hold(moment)
        async with trio.open_nursery() as counting:
            for engine in holding:
                counting.start_soon(engine.count_held, check_held)
            async with trio.open_nursery() as clients:
                for number in range(CLIENTS):
                    clients.start_soon(self.client, number)
                await reached.wait()
                await self.kill(victims)
                for engine in holding:
                    if engine not in victims:
                        await engine.release()
            counting.cancel_scope.cancel()

    async def run_after(self, victims):
        await self.kill(victims)
        async with trio.open_nursery() as clients:
            for number in range(CLIENTS):
                clients.start_soon(self.client, number)

    async def kill(self, victims):
        for victim in victims:
            await victim.kill()
        self.is_killed = True


async def ask(client, *, stream):
    """The text, the names of the decode workers that sent it, and the error ("" for none)."""
    body = json.dumps({"messages": [], "stream": stream}).encode()
    await client.send(post(body))
    error = ""
    try:
        answer = await client.answer()
    except Truncated as cut:
        answer, error = cut.answer, "truncated"
    if answer.status != 200:
        return "", set(), f"{answer.status} {answer.body}"
    if not stream:
        if error:
            return "", {answer.body.split(b'"')[3].decode()}, error
        body = json.loads(answer.body)
        return body["text"], {body["by"]}, ""
    lines = [line[6:] for line in answer.body.split(b"\n") if line.startswith(b"data: ")]
    events = [json.loads(line) for line in lines if line != b"[DONE]"]
    if any("error" in event for event in events):
        assert b"[DONE]" not in lines
        error = "error event"
    parts = [event for event in events if "text" in event]
    text = "".join(event["text"] for event in parts)
    assert error or lines[-1] == b"[DONE]"
    return text, {event["by"] for event in parts}, error


@asynccontextmanager
async def fleet_before(tmp_path, connector):
    """The proxy, and two engines of each role."""
    fleet = [Process(role, connector) for role in ("prefill", "prefill", "decode", "decode")]
    probes = PROBES.replace("0.2", "0.1")
    text = f"[server]\nport = 0\n{probes}[routing]\npolicy = 'random'\n"
    put(tmp_path / "proxy.toml", text + "".join(engine.entry() for engine in fleet))
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as starting:
            for engine in fleet:
                starting.start_soon(engine.start, nursery)
        async with program("--config", tmp_path / "proxy.toml") as running:
            yield running, fleet, nursery
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_killed_workers_break_only_responses_that_have_begun(tmp_path, connector):
    async with fleet_before(tmp_path, connector) as (running, fleet, nursery):
        await until_healthy(running, fleet)
        for moment in MOMENTS:
            for roles in KILLED:
                await kill_at(moment, roles, running, fleet, nursery)


async def kill_at(moment, roles, running, fleet, nursery):
    victims = [engine for engine in (fleet[0], fleet[2]) if engine.role in roles]
    others = [engine for engine in fleet if engine not in victims]
    case, before = (moment, roles), await records(running)
    # Only decode workers stream: they hold requests while only their prefill worker is killed.
    holding = fleet[2:] if moment == "streaming" and roles == ("prefill",) else victims
    load = Load(address(running))
    with trio.fail_after(PATIENCE_SECS):
        if moment:
            await load.run_until_held(moment, holding, victims)
        else:
            await load.run_after(victims)
    # A response may break only if the killed decode worker had begun to send it.
    names = {name for _, by, error in load.results if error for name in by or {"no worker"}}
    begun = moment == "streaming" and "decode" in roles
    assert names == ({str(fleet[2].port)} if begun else set()), (case, load.failed())
    assert {text for text, _, error in load.results if not error} == {"012"}, case
    assert [error for _, _, error in load.after] == [""] * CLIENTS, (case, load.failed())
    await until_idle(running, others)
    after = await records(running)
    for engine in others:
        fields = {key: (before[engine.url][key], after[engine.url][key]) for key in FAILURE_FIELDS}
        assert all(was == now for was, now in fields.values()), (case, engine.role, fields)
    for victim in victims:
        await victim.start(nursery)
    await until_healthy(running, fleet)


async def records(running):
    body = await running.get_json("/workers")
    return {record["url"]: record for record in body["workers"]}


async def until_healthy(running, fleet):
    """Wait until all are in rotation, and no failure counts against any of them."""
    await running.until_routable(*fleet)
    while any(
        record["half_open"] or record["consecutive_failures"]
        for record in (await records(running)).values()
    ):
        async with client_of(address(running)) as client:
            await ask(client, stream=False)


async def until_idle(running, engines):
    """Wait until no request is in flight, and none waits at an engine."""

    def none_in_flight(body):
        counts = [record["in_flight"] for record in body["workers"]]
        assert min(counts) >= 0
        return not any(counts)

    await running.until("/workers", none_in_flight)
    await running.until("/status", lambda body: body["data_plane"]["inflight"] == 0)
    for engine in engines:
        with trio.fail_after(PATIENCE_SECS):
            while (await running.client.get(engine.url)).json()["waiting"]:
                await trio.sleep(0.02)

"""SIGKILL of prefill and decode workers at each moment of a request, under load.

The workers are processes; two of each role, of which the first ones are killed. Clients ask without
a pause, streams and others. What has not begun is served by the others, what has begun ends visibly
broken, nobody holds a slot afterwards, and nobody but the killed is blamed.
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
from tests.promises.clients import Truncated, client_of, post
from tests.promises.fleet_program import PATIENCE_SECS, PROBES, program, put
from tests.promises.processes_fixture import address

ENGINE = Path(__file__).with_name("leg_engine_program.py")
CLIENTS = 16
HELD = 5  # requests that the killed engines have at the moment
CONNECTORS = ["sglang", "nixl", "mooncake"]
MOMENTS = ["", "head", "prefilled", "streaming"]  # "": idle, before anything is dialled
KILLED = [("prefill",), ("decode",), ("prefill", "decode")]
# Of a worker's record; a failure that counts changes some of them.
BLAME = ["health_state", "since", "half_open", "consecutive_failures", "last_error"]


class Process:
    """One engine; a new process at the same ports takes its place after a SIGKILL."""

    def __init__(self, role, connector):
        self.role, self.connector = role, connector
        self.port = free_run(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None
        self.held = 0
        self.rest = b""

    async def start(self, nursery):
        words = [self.role, self.connector, self.port, self.port + 1]
        command = [sys.executable, "-S", "-E", str(ENGINE), *map(str, words)]
        self.rest = b""
        run = partial(trio.run_process, command, stdin=PIPE, stdout=PIPE, check=False)
        self.process = await nursery.start(run)
        assert await self.line() == b"ready"

    async def line(self):
        """b"" once the process has ended."""
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
    """`results`: of each request its text and what went wrong, "" for nothing."""

    def __init__(self, address):
        self.address = address
        self.results = []
        self.after = []  # those that began when the workers had been killed
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

    def wrong(self):
        return [result for result in self.results if result[2]]

    async def run_until_held(self, moment, holding, victims):
        """Kill the victims while requests are at this moment at the engines that hold."""
        reached = trio.Event()

        def one_more():
            if sum(each.held for each in holding) >= HELD:
                reached.set()

        for each in holding:
            await each.hold(moment)
        async with trio.open_nursery() as counting:
            for each in holding:
                counting.start_soon(each.count_held, one_more)
            async with trio.open_nursery() as clients:
                for number in range(CLIENTS):
                    clients.start_soon(self.client, number)
                await reached.wait()
                await self.kill(victims)
                for each in holding:
                    if each not in victims:
                        await each.release()
            counting.cancel_scope.cancel()

    async def run_after(self, victims):
        await self.kill(victims)
        async with trio.open_nursery() as clients:
            for number in range(CLIENTS):
                clients.start_soon(self.client, number)

    async def kill(self, victims):
        for each in victims:
            await each.kill()
        self.is_killed = True


async def ask(client, *, stream):
    """(texts, names of the decode workers, what went wrong)"""
    body = json.dumps({"messages": [], "stream": stream}).encode()
    await client.send(post(body))
    wrong = ""
    try:
        answer = await client.answer()
    except Truncated as cut:
        answer, wrong = cut.answer, "truncated"
    if answer.status != 200:
        return "", set(), f"{answer.status} {answer.body}"
    if not stream:
        if wrong:
            return "", {answer.body.split(b'"')[3].decode()}, wrong
        reported = json.loads(answer.body)
        return reported["text"], {reported["by"]}, ""
    lines = [line[6:] for line in answer.body.split(b"\n") if line.startswith(b"data: ")]
    events = [json.loads(line) for line in lines if line != b"[DONE]"]
    if any("error" in event for event in events):
        assert b"[DONE]" not in lines
        wrong = "error event"
    reported = [event for event in events if "text" in event]
    text = "".join(event["text"] for event in reported)
    assert wrong or lines[-1] == b"[DONE]"
    return text, {event["by"] for event in reported}, wrong


@asynccontextmanager
async def fleet_before(tmp_path, connector):
    """The proxy, and two engines of each role."""
    fleet = [Process(role, connector) for role in ("prefill", "prefill", "decode", "decode")]
    probes = PROBES.replace("0.2", "0.1")
    text = f"[server]\nport = 0\n{probes}[routing]\npolicy = 'random'\n"
    put(tmp_path / "proxy.toml", text + "".join(each.entry() for each in fleet))
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as starting:
            for each in fleet:
                starting.start_soon(each.start, nursery)
        async with program("--config", tmp_path / "proxy.toml") as running:
            yield running, fleet, nursery
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_killed_workers_take_only_what_they_had_begun(tmp_path, connector):
    async with fleet_before(tmp_path, connector) as (running, fleet, nursery):
        await until_well(running, fleet)
        for moment in MOMENTS:
            for roles in KILLED:
                await kill_at(moment, roles, running, fleet, nursery)


async def kill_at(moment, roles, running, fleet, nursery):
    victims = [each for each in (fleet[0], fleet[2]) if each.role in roles]
    others = [each for each in fleet if each not in victims]
    case, before = (moment, roles), await records(running)
    # Only decode workers stream; those of a killed prefill worker wait while it is killed.
    holding = fleet[2:] if moment == "streaming" and roles == ("prefill",) else victims
    load = Load(address(running))
    with trio.fail_after(PATIENCE_SECS):
        if moment:
            await load.run_until_held(moment, holding, victims)
        else:
            await load.run_after(victims)
    # One reason for a broken end: the killed decode worker had begun to answer.
    names = {name for _, by, wrong in load.results if wrong for name in by or {"nobody"}}
    begun = moment == "streaming" and "decode" in roles
    assert names == ({str(fleet[2].port)} if begun else set()), (case, load.wrong())
    assert {text for text, _, wrong in load.results if not wrong} == {"012"}, case
    assert [wrong for _, _, wrong in load.after] == [""] * CLIENTS, (case, load.wrong())
    await until_idle(running, others)
    after = await records(running)
    for each in others:
        kept = {key: (before[each.url][key], after[each.url][key]) for key in BLAME}
        assert all(was == now for was, now in kept.values()), (case, each.role, kept)
    for victim in victims:
        await victim.start(nursery)
    await until_well(running, fleet)


async def records(running):
    body = await running.get_json("/workers")
    return {record["url"]: record for record in body["workers"]}


async def until_well(running, fleet):
    """All are in rotation, and nothing is left of what was counted against them."""
    await running.until_routable(*fleet)
    while any(
        record["half_open"] or record["consecutive_failures"]
        for record in (await records(running)).values()
    ):
        async with client_of(address(running)) as client:
            assert await ask(client, stream=False)


async def until_idle(running, engines):
    """No request is counted anywhere, and none waits at an engine."""

    def nobody_counts(reported):
        counts = [record["in_flight"] for record in reported["workers"]]
        assert min(counts) >= 0
        return not any(counts)

    await running.until("/workers", nobody_counts)
    await running.until("/status", lambda body: body["data_plane"]["inflight"] == 0)
    for each in engines:
        with trio.fail_after(PATIENCE_SECS):
            while (await running.client.get(each.url)).json()["waiting"]:
                await trio.sleep(0.02)

"""A program with several data-plane processes, and helpers of its tests."""

from __future__ import annotations

from contextlib import asynccontextmanager

import trio

from tests.promises.support.clients import STREAMED, client_of, post
from tests.promises.support.fakes import counted
from tests.promises.support.fleet_program import program, put, record, toml, workers

LAST = b"0\r\n\r\n"


def serving(status: dict, count: int = 2) -> bool:
    states = [dataplane["state"] for dataplane in status["data_plane"]["processes"]]
    return states == ["serving"] * count


@asynccontextmanager
async def run_processes(tmp_path, *names: str, more: str = "", count: int = 2):
    file = tmp_path / "proxy.toml"
    async with workers(*names) as fleet:
        put(file, toml(fleet, more=f"processes = {count}\n{more}"))
        async with program("--config", file) as running:
            running.file, running.fleet = file, fleet
            running.client.headers["connection"] = (
                "close"  # any process may accept the next request
            )
            await running.until_routable(*fleet)
            if count > 1:
                await running.until("/status", lambda body: serving(body, count))
            try:
                yield running
            finally:
                for worker in fleet:
                    worker.gate.set()


def address(running) -> str:
    return running.client.base_url.netloc.decode()


async def in_flight(running) -> list[int]:
    body = await running.get_json("/workers")
    return [record(body, worker)["in_flight"] for worker in running.fleet]


@asynccontextmanager
async def held_streams(running, count: int, *, everywhere: bool = False):
    """Opens streams one after another, each on its connection, which wait halfway.

    `everywhere`: opens more until every process has one, because the kernel chooses the process.
    """
    for worker in running.fleet:
        worker.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        streams, done = [], trio.Event()

        async def hold(*, task_status=trio.TASK_STATUS_IGNORED):
            async with client_of(address(running)) as client:
                await client.send(post(STREAMED))
                await client.until(b"\n\n")
                streams.append(client)
                task_status.started()
                await done.wait()

        for _ in range(count):
            await nursery.start(hold)
        while everywhere and not all(await in_flight_by_process(running, len(streams))):
            assert len(streams) < 100
            await nursery.start(hold)
        yield streams
        done.set()


async def in_flight_by_process(running, count: int) -> list[int]:
    """Waits until `count` requests are in flight, and returns how many each process has."""
    body = await running.until(
        "/status", lambda t: sum(row["in_flight"] for row in t["data_plane"]["processes"]) == count
    )
    return [row["in_flight"] for row in body["data_plane"]["processes"]]


async def read_whole_stream(stream) -> bool:
    try:
        while not stream.rest.endswith(LAST):
            piece = await stream.receive()
            if not piece:
                return False
            stream.rest += piece
    except trio.BrokenResourceError:
        return False
    return True


async def until_one_closed(streams) -> None:
    """Waits until a killed process has closed a stream: the id in /status may belong to a stand-in
    process, which ends a moment earlier."""
    async with trio.open_nursery() as nursery:

        async def watch(stream):
            await stream.until_closed()
            nursery.cancel_scope.cancel()

        for stream in streams:
            nursery.start_soon(watch, stream)


def open_gates(running) -> None:
    for worker in running.fleet:
        worker.gate.set()


async def send_requests(running, tally: list[int], stop: trio.Event) -> None:
    """Sends requests on one connection each; any other status than 200 fails the test."""
    while not stop.is_set():
        async with client_of(address(running)) as client:
            await client.send(post())
            answer = await client.answer()
            assert answer.status == 200, answer
            tally[0] += 1


class ResetsUntilHealthy:
    """Resets connections until `well` is set; then its first request waits for `gate`."""

    def __init__(self) -> None:
        self.well = False
        self.now = self.peak = self.served = 0
        self.gate = trio.Event()

    async def __call__(self, call) -> None:
        if call.line.startswith("GET "):  # not a client's request
            await call.send(counted(b"{}"))
            return
        if not self.well:
            call.reset()
            return
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            await self.gate.wait()
            await call.send(counted(b"{}"))
            self.served += 1
        finally:
            self.now -= 1

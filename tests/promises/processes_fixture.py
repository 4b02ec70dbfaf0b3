"""A program of several data-plane processes, and what its tests see and do at each of them."""

from __future__ import annotations

from contextlib import asynccontextmanager

import trio

from tests.promises.clients import STREAMED, client_of, post
from tests.promises.fakes import counted
from tests.promises.fleet_program import program, put, record, toml, workers

LAST = b"0\r\n\r\n"


def serving(reported: dict, count: int = 2) -> bool:
    states = [dataplane["state"] for dataplane in reported["data_plane"]["processes"]]
    return states == ["serving"] * count


@asynccontextmanager
async def run_processes(tmp_path, *names: str, more: str = "", count: int = 2):
    file = tmp_path / "proxy.toml"
    async with workers(*names) as fleet:
        put(file, toml(fleet, more=f"processes = {count}\n{more}"))
        async with program("--config", file) as running:
            running.file, running.fleet = file, fleet
            running.client.headers["connection"] = "close"  # at any process, each time
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
    """Streams on a connection each, begun one after the other, all halfway.

    `everywhere`: so many and as it takes until every process has one, for the kernel deals them out.
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
    """How many of so many requests each process has."""
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
    """Of a process that was killed: the id that the program knows may be that of a process which
    stands in for it and ends a moment earlier."""
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
    """A connection for each request; whatever is no 200 is a failure."""
    while not stop.is_set():
        async with client_of(address(running)) as client:
            await client.send(post())
            answer = await client.answer()
            assert answer.status == 200, answer
            tally[0] += 1


class ResetsUntilHealthy:
    """Resets until it is `well`; then its first request takes as long as the test likes."""

    def __init__(self) -> None:
        self.well = False
        self.now = self.most = self.served = 0
        self.gate = trio.Event()

    async def __call__(self, call) -> None:
        if call.line.startswith("GET "):  # not of a client
            await call.send(counted(b"{}"))
            return
        if not self.well:
            call.reset()
            return
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.gate.wait()
            await call.send(counted(b"{}"))
            self.served += 1
        finally:
            self.now -= 1

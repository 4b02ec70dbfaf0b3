"""`omni-proxy launch-router`, tested as other routers' test suites test theirs."""

import json
from contextlib import asynccontextmanager
from urllib.parse import quote

import pytest
import trio

from tests.promises.support.fakes import Call, answering, counted, fake_workers
from tests.promises.support.fleet_program import program

REQUEST = {"model": "mock", "prompt": "hi", "max_tokens": 1}
FAST_PROBES = ("--health-check-interval-secs", "1")


@pytest.fixture(autouse=True)
def no_journal(tmp_path, monkeypatch):
    """Keeps state journals of other programs with the same address out of these tests."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def worker_that(answer):
    """Returns a worker that answers GET with 200 and other requests by `answer`."""

    async def script(call: Call) -> None:
        if call.head.startswith(b"GET"):
            await call.send(counted(b'{"status": "ok"}'))
        else:
            await answer(call)

    return script


def answering_with(status, body=b"{}"):
    return worker_that(answering(counted(body, status=f"{status} Said")))


GOOD = answering_with(200, b'{"good": true}')


def failing_times(times):
    calls = []

    async def answer(call):
        calls.append(call)
        status = "500 Oh" if len(calls) <= times else "200 OK"
        await call.send(counted(b"{}", status=status))

    return worker_that(answer)


@asynccontextmanager
async def router(*scripts, flags=""):
    """Runs the router with these workers, and waits until it is healthy."""
    async with fake_workers(*scripts) as workers:
        arguments = ["launch-router", "--port", "0", "--policy", "round_robin", *FAST_PROBES]
        arguments += flags.split()
        arguments += ["--worker-urls", *(worker.url for worker in workers)] if workers else []
        async with program(*arguments) as running:
            await running.until("/health", lambda body: body["status"] == "healthy")
            yield running, workers


async def statuses_of(running, times=1):
    responses = [await running.client.post("/v1/completions", json=REQUEST) for _ in range(times)]
    return [response.status_code for response in responses]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_a_failing_worker_is_hidden_from_clients_while_another_is_healthy(status):
    async with router(answering_with(status), GOOD) as (running, _):
        assert await statuses_of(running, 8) == [200] * 8


async def test_without_retries_clients_receive_the_failure():
    async with router(answering_with(500), flags="--disable-retries") as (running, _):
        assert await statuses_of(running, 2) == [500, 500]


async def test_a_failing_worker_leaves_rotation_and_returns():
    flags = "--disable-retries --cb-failure-threshold 3 --cb-timeout-duration-secs 2"
    async with router(failing_times(3), flags=flags) as (running, _):
        assert await statuses_of(running, 4) == [500, 500, 500, 503]
        await running.until("/health", lambda body: body["status"] == "healthy")
        assert await statuses_of(running, 3) == [200] * 3


@pytest.mark.parametrize(
    ("flags", "statuses"),
    [("--disable-circuit-breaker", [500] * 8), ("--cb-failure-threshold 6", [500] * 6 + [503] * 2)],
)
async def test_the_circuit_breaker_follows_its_flags(flags, statuses):
    async with router(answering_with(500), flags=f"--disable-retries {flags}") as (running, _):
        assert await statuses_of(running, 8) == statuses


async def test_a_request_over_the_limit_and_the_queue_gets_429():
    gate = trio.Event()

    async def answer(call):
        await gate.wait()
        await call.send(counted(b"{}"))

    flags = "--max-concurrent-requests 2 --queue-size 0"
    async with router(worker_that(answer), flags=flags) as (running, _):
        statuses = []
        async with trio.open_nursery() as nursery:

            async def send_one():
                statuses.append(
                    (await running.client.post("/v1/completions", json=REQUEST)).status_code
                )
                if len(statuses) == 14:
                    gate.set()

            for _ in range(16):
                nursery.start_soon(send_one)
        assert sorted(statuses) == [200] * 2 + [429] * 14


async def test_a_request_that_is_queued_too_long_gets_408():
    gate = trio.Event()

    async def answer(call):
        await gate.wait()
        await call.send(counted(b"{}"))

    flags = "--max-concurrent-requests 1 --queue-size 1 --queue-timeout-secs 1"
    async with router(worker_that(answer), flags=flags) as (running, _):
        statuses = []

        async def send_one():
            statuses.append(
                (await running.client.post("/v1/completions", json=REQUEST)).status_code
            )
            if len(statuses) == 3:
                gate.set()

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(send_one)
        assert sorted(statuses) == [200, 408, 429, 429]


async def test_engines_register_with_a_router_that_was_started_without_any():
    async with router() as (running, _), fake_workers(GOOD) as (worker,):
        assert (await running.client.get("/readiness")).status_code == 503
        added = await running.client.post("/workers", json={"url": worker.url})
        body = added.json()
        assert (added.status_code, body["url"]) == (202, worker.url)
        await running.until("/readiness", lambda body: body["status"] == "ready")
        assert await statuses_of(running) == [200]
        path = f"/workers/{quote(body['worker_id'], safe='')}"
        assert added.headers["location"] == body["location"]
        put = await running.client.put(path, json={"url": worker.url})
        assert put.status_code == 202
        record = (await running.client.get(path)).json()
        assert (record["url"], record["is_healthy"]) == (worker.url, True)
        assert (await running.client.delete(path)).status_code == 202
        assert json.loads((await running.client.get("/workers")).content)["total"] == 0
        assert (await running.client.get("/health")).status_code == 503


async def test_the_router_is_unhealthy_until_all_given_workers_are_probed():
    gate = trio.Event()

    async def slow(call):
        await gate.wait()
        await call.send(counted(b"{}"))

    async with fake_workers(GOOD, slow) as workers:
        arguments = ["launch-router", "--port", "0", "--health-check-endpoint", "/probed"]
        arguments += ["--health-check-timeout-secs", "60"]
        arguments += ["--worker-urls", *(worker.url for worker in workers)]
        async with program(*arguments) as running:
            first = workers[0].url

            def first_is_routable(listed):
                return any(
                    worker["routable"] and worker["url"] == first for worker in listed["workers"]
                )

            await running.until("/workers", first_is_routable)
            for path in ("/health", "/ready", "/readiness"):
                assert (await running.client.get(path)).status_code == 503
            gate.set()
            body = await running.until("/health", lambda body: body["status"] == "healthy")
            assert body["routable_workers"] == 2

"""`omni-proxy launch-router`, used as the peers' own suites use their routers."""

import json
from contextlib import asynccontextmanager
from urllib.parse import quote

import pytest
import trio

from tests.promises.fakes import Call, answering, counted, fake_workers
from tests.promises.fleet_program import program

ASKED = {"model": "mock", "prompt": "hi", "max_tokens": 1}
QUICK = ("--health-check-interval-secs", "1")


@pytest.fixture(autouse=True)
def no_journal(tmp_path, monkeypatch):
    """What other programs wrote down of weights at an address like ours is not this one's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def worker_that(answer):
    """Answers its probes with 200, and what is posted as `answer` does."""

    async def script(call: Call) -> None:
        if call.head.startswith(b"GET"):
            await call.send(counted(b'{"status": "ok"}'))
        else:
            await answer(call)

    return script


def saying(status, body=b"{}"):
    return worker_that(answering(counted(body, status=f"{status} Said")))


GOOD = saying(200, b'{"good": true}')


def failing_first(times):
    asked = []

    async def answer(call):
        asked.append(call)
        status = "500 Oh" if len(asked) <= times else "200 OK"
        await call.send(counted(b"{}", status=status))

    return worker_that(answer)


@asynccontextmanager
async def router(*scripts, flags=""):
    """The router before such workers, with what it waits for at the start behind it."""
    async with fake_workers(*scripts) as workers:
        words = ["launch-router", "--port", "0", "--policy", "round_robin", *QUICK]
        words += flags.split()
        words += ["--worker-urls", *(worker.url for worker in workers)] if workers else []
        async with program(*words) as running:
            await running.until("/health", lambda body: body["status"] == "healthy")
            yield running, workers


async def asked(running, times=1):
    answers = [await running.client.post("/v1/completions", json=ASKED) for _ in range(times)]
    return [answer.status_code for answer in answers]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_a_failure_of_one_worker_is_not_seen_while_another_is_well(status):
    async with router(saying(status), GOOD) as (running, _):
        assert await asked(running, 8) == [200] * 8


async def test_without_retries_the_failure_is_seen():
    async with router(saying(500), flags="--disable-retries") as (running, _):
        assert await asked(running, 2) == [500, 500]


async def test_a_failing_worker_leaves_rotation_and_returns():
    flags = "--disable-retries --cb-failure-threshold 3 --cb-timeout-duration-secs 2"
    async with router(failing_first(3), flags=flags) as (running, _):
        assert await asked(running, 4) == [500, 500, 500, 503]
        await running.until("/health", lambda body: body["status"] == "healthy")
        assert await asked(running, 3) == [200] * 3


@pytest.mark.parametrize(
    ("flags", "seen"),
    [("--disable-circuit-breaker", [500] * 8), ("--cb-failure-threshold 6", [500] * 6 + [503] * 2)],
)
async def test_the_breaker_opens_on_request(flags, seen):
    async with router(saying(500), flags=f"--disable-retries {flags}") as (running, _):
        assert await asked(running, 8) == seen


async def test_what_finds_no_place_gets_429():
    gate = trio.Event()

    async def answer(call):
        await gate.wait()
        await call.send(counted(b"{}"))

    flags = "--max-concurrent-requests 2 --queue-size 0"
    async with router(worker_that(answer), flags=flags) as (running, _):
        reported = []
        async with trio.open_nursery() as nursery:

            async def one():
                reported.append(
                    (await running.client.post("/v1/completions", json=ASKED)).status_code
                )
                if len(reported) == 14:
                    gate.set()

            for _ in range(16):
                nursery.start_soon(one)
        assert sorted(reported) == [200] * 2 + [429] * 14


async def test_what_waits_too_long_gets_408():
    gate = trio.Event()

    async def answer(call):
        await gate.wait()
        await call.send(counted(b"{}"))

    flags = "--max-concurrent-requests 1 --queue-size 1 --queue-timeout-secs 1"
    async with router(worker_that(answer), flags=flags) as (running, _):
        reported = []

        async def one():
            reported.append((await running.client.post("/v1/completions", json=ASKED)).status_code)
            if len(reported) == 3:
                gate.set()

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(one)
        assert sorted(reported) == [200, 408, 429, 429]


async def test_engines_register_with_a_router_that_was_started_without_any():
    async with router() as (running, _), fake_workers(GOOD) as (worker,):
        assert (await running.client.get("/readiness")).status_code == 503
        added = await running.client.post("/workers", json={"url": worker.url})
        body = added.json()
        assert (added.status_code, body["url"]) == (202, worker.url)
        await running.until("/readiness", lambda body: body["status"] == "ready")
        assert await asked(running) == [200]
        path = f"/workers/{quote(body['worker_id'], safe='')}"
        assert added.headers["location"] == body["location"]
        put = await running.client.put(path, json={"url": worker.url})
        assert put.status_code == 202
        record = (await running.client.get(path)).json()
        assert (record["url"], record["is_healthy"]) == (worker.url, True)
        assert (await running.client.delete(path)).status_code == 202
        assert json.loads((await running.client.get("/workers")).content)["total"] == 0
        assert (await running.client.get("/health")).status_code == 503


async def test_it_is_not_well_before_each_given_worker_was_probed():
    gate = trio.Event()

    async def slow(call):
        await gate.wait()
        await call.send(counted(b"{}"))

    async with fake_workers(GOOD, slow) as workers:
        words = ["launch-router", "--port", "0", "--health-check-endpoint", "/probed"]
        words += ["--health-check-timeout-secs", "60"]
        words += ["--worker-urls", *(each.url for each in workers)]
        async with program(*words) as running:
            first = workers[0].url

            def one_is_in(reported):
                return any(
                    each["routable"] and each["url"] == first for each in reported["workers"]
                )

            await running.until("/workers", one_is_in)
            for path in ("/health", "/ready", "/readiness"):
                assert (await running.client.get(path)).status_code == 503
            gate.set()
            body = await running.until("/health", lambda body: body["status"] == "healthy")
            assert body["routable_workers"] == 2

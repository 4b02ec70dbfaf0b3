from datetime import UTC, datetime

import httpx
import trio

from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http import client as broadcasts
from omni_proxy.upstream_http.client import Call, broadcast


def workers(count):
    return [
        Worker(
            WorkerSpec(f"http://127.0.0.1:{8000 + i}", None, frozenset(), False, 1, 0, "api"),
            datetime.now(UTC),
        )
        for i in range(count)
    ]


def sent(body=b"", status=200):
    """A reply whose body is still to come, as from a socket."""

    async def pieces():
        yield body

    return httpx.Response(status, content=pieces())


def through(monkeypatch, answer):
    def open_client(worker):
        return httpx.AsyncClient(transport=httpx.MockTransport(answer), timeout=None)

    monkeypatch.setattr(broadcasts, "open_client", open_client)


async def test_outcomes_keep_the_order_of_the_workers_whatever_comes_first(
    monkeypatch, autojump_clock
):
    async def answer(request):
        await trio.sleep(8010 - request.url.port)
        return sent(b'{"port": %d}' % request.url.port)

    through(monkeypatch, answer)
    asked = workers(4)
    outcomes = await broadcast(asked, Call("GET", "/x", timeout_secs=60))
    assert [outcome.worker for outcome in outcomes] == asked
    assert [outcome.json() for outcome in outcomes] == [{"port": 8000 + i} for i in range(4)]
    assert [round(outcome.secs) for outcome in outcomes] == [10, 9, 8, 7]


async def test_each_worker_has_the_whole_timeout_and_all_run_at_once(monkeypatch, autojump_clock):
    async def answer(request):
        if request.url.port == 8001:
            await trio.sleep_forever()
        return sent()

    through(monkeypatch, answer)
    began = trio.current_time()
    first, second = await broadcast(workers(2), Call("GET", "/x", timeout_secs=7))
    assert first.ok
    assert (second.status, second.failure) == (None, "ReadTimeout")
    assert trio.current_time() - began == 7


async def test_a_body_goes_out_and_too_long_an_answer_is_no_success(monkeypatch):
    seen = []

    async def answer(request):
        seen.append((request.method, request.url.raw_path, await request.aread()))
        return sent(b"x" * 100)

    through(monkeypatch, answer)
    (outcome,) = await broadcast(
        workers(1), Call("POST", "/p?q=1", b"body", {"a": "b"}, max_bytes=99)
    )
    assert seen == [("POST", b"/p?q=1", b"body")]
    assert not outcome.ok
    assert outcome.failure == "answer of more than 99 bytes"


async def test_more_workers_than_connections_are_all_asked(monkeypatch):
    at_once, most = 0, 0

    async def answer(request):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await trio.lowlevel.checkpoint()
        at_once -= 1
        return sent()

    through(monkeypatch, answer)
    outcomes = await broadcast(workers(300), Call("GET", "/x"))
    assert all(outcome.ok for outcome in outcomes)
    assert 1 < most <= broadcasts.MAX_PARALLEL_CALLS

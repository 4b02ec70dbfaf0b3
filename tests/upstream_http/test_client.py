import math
from datetime import UTC, datetime

import httpx
import pytest
import trio

from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http import client as client
from omni_proxy.upstream_http.client import Call, broadcast, call_each, open_client
from tests.fleet.entries import entry, fleet_of


def workers(count):
    return [
        Worker(
            WorkerSpec(f"http://127.0.0.1:{8000 + i}", None, frozenset(), False, 1, 0, "api"),
            datetime.now(UTC),
        )
        for i in range(count)
    ]


def response(body=b"", status=200):
    """A response with a body that has not been read yet, as from a socket."""

    async def chunks():
        yield body

    return httpx.Response(status, content=chunks())


def mock_workers(monkeypatch, respond):
    def open_client(worker):
        return httpx.AsyncClient(transport=httpx.MockTransport(respond), timeout=None)

    monkeypatch.setattr(client, "open_client", open_client)


async def test_results_are_in_the_order_of_the_workers(monkeypatch, autojump_clock):
    async def respond(request):
        await trio.sleep(8010 - request.url.port)
        return response(b'{"port": %d}' % request.url.port)

    mock_workers(monkeypatch, respond)
    targets = workers(4)
    results = await broadcast(targets, Call("GET", "/x", timeout_secs=60))
    assert [result.worker for result in results] == targets
    assert [result.json() for result in results] == [{"port": 8000 + i} for i in range(4)]
    assert [round(result.secs) for result in results] == [10, 9, 8, 7]


async def test_each_call_has_the_whole_timeout_and_all_run_in_parallel(monkeypatch, autojump_clock):
    async def respond(request):
        if request.url.port == 8001:
            await trio.sleep_forever()
        return response()

    mock_workers(monkeypatch, respond)
    started_at = trio.current_time()
    first, second = await broadcast(workers(2), Call("GET", "/x", timeout_secs=7))
    assert first.ok
    assert (second.status, second.failure) == (None, "ReadTimeout")
    assert trio.current_time() - started_at == 7


async def test_the_body_is_sent_and_a_response_that_is_too_long_is_a_failure(monkeypatch):
    seen = []

    async def respond(request):
        seen.append((request.method, request.url.raw_path, await request.aread()))
        return response(b"x" * 100)

    mock_workers(monkeypatch, respond)
    (result,) = await broadcast(
        workers(1), Call("POST", "/p?q=1", b"body", {"a": "b"}, max_bytes=99)
    )
    assert seen == [("POST", b"/p?q=1", b"body")]
    assert not result.ok
    assert result.failure == "answer of more than 99 bytes"


async def test_parallel_calls_are_bounded(monkeypatch):
    in_flight, most = 0, 0

    async def respond(request):
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await trio.lowlevel.checkpoint()
        in_flight -= 1
        return response()

    mock_workers(monkeypatch, respond)
    results = await broadcast(workers(300), Call("GET", "/x"))
    assert all(result.ok for result in results)
    assert 1 < most <= client.MAX_PARALLEL_CALLS


async def test_results_are_passed_on_as_they_arrive(monkeypatch, autojump_clock):
    async def respond(request):
        await trio.sleep(8010 - request.url.port)
        return response()

    mock_workers(monkeypatch, respond)
    targets, received = workers(3), []
    call = Call("GET", "/x", timeout_secs=60)
    results = await broadcast(targets, call, max_parallel=math.inf, on_result=received.append)
    assert received == results[::-1]


def tls_context(http_client):
    # Of httpx and httpcore, which have nothing public for it. A context of its own would cost each
    # client a few milliseconds.
    return http_client._transport._pool._ssl_context


async def test_clients_of_plain_http_share_one_tls_context():
    a, b = fleet_of(entry("a"), entry("b")).workers
    async with open_client(a) as one, open_client(b) as other:
        assert tls_context(one) is tls_context(other)


async def test_results_are_in_the_order_of_the_items(autojump_clock):
    async def call(secs):
        await trio.sleep(secs)
        return secs

    assert await call_each([3, 1, 3, 2], call) == [3, 1, 3, 2]
    assert trio.current_time() == pytest.approx(3)  # concurrently
    assert await call_each([], call) == []


async def test_no_more_calls_than_allowed_run_at_a_time(autojump_clock):
    running, most = 0, 0

    async def call(_):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(1)
        running -= 1

    await call_each(range(5), call, max_parallel=2)
    assert most == 2


async def test_an_exception_of_a_call_cancels_the_others(autojump_clock):
    async def call(fails):
        if fails:
            raise ValueError("no")
        await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        await call_each([False, True], call)
    assert caught.group_contains(ValueError, match="no")

import pytest
import trio
import trio.testing

from omni_proxy.dataplane.attempt import retry
from tests.promises.support.clients import CHAT, STREAMED, Truncated, post
from tests.promises.support.dataplane_fixture import dataplane_and_client, run_dataplane
from tests.promises.support.early_readers import HINTS
from tests.promises.support.fakes import (
    CHUNKED_HEAD,
    SSE_HEAD,
    answering,
    chunk,
    counted,
    fake_workers,
    hanging_up_after,
    resetting,
    unreachable_url,
)

GOOD = answering(counted(b"good"))


async def ask(client, body=CHAT, *fields):
    await client.send(post(body, *fields))
    return await client.answer()


async def test_a_refused_connection_is_retried_on_another_worker():
    async with (
        unreachable_url() as unreachable,
        fake_workers(GOOD) as (worker,),
        run_dataplane(unreachable, worker) as opened,
        opened.client() as client,
    ):
        for _ in range(4):
            response = await ask(client)
            assert (response.status, response.body) == (200, b"good")
        refused, answered = opened.failures()
        assert (refused > 0, answered) == (True, 0)
    assert [body for _, body in worker.requests] == [CHAT] * 4


@pytest.mark.parametrize("bad", [resetting, hanging_up_after()], ids=["reset", "close"])
async def test_a_worker_that_dies_before_responding_is_retried_elsewhere(bad):
    async with dataplane_and_client(bad, GOOD) as (opened, client):
        response = await ask(client)
        assert (response.status, response.body) == (200, b"good")
        assert response.one("x-sglang-omni-route-attempt") == "2"
        assert response.one("x-sglang-omni-worker") == opened.fleet.workers[1].id
        assert opened.last["attempts"] == 2
    assert [len(worker.requests) for worker in opened.workers] == [1, 1]


@pytest.mark.parametrize(
    "first", [CHUNKED_HEAD, SSE_HEAD + chunk(b"data: one\n\n")], ids=["head only", "an event"]
)
async def test_a_request_is_not_retried_after_the_first_byte(first):
    async def script(call):
        await call.send(first)
        await trio.testing.wait_all_tasks_blocked()
        call.reset()

    async with fake_workers(script, GOOD) as workers, run_dataplane(*workers) as opened:
        async with opened.client() as client:
            with pytest.raises(Truncated):
                await ask(client, STREAMED)
        assert [len(worker.requests) for worker in workers] == [1, 0]


@pytest.mark.parametrize(("allowed", "attempts"), [(0, 1), (1, 1), (2, 2), (4, 4)])
async def test_attempts_end_at_max_total_retries(allowed, attempts):
    config = f"[routing]\nmax_total_retries = {allowed}"
    async with dataplane_and_client(*[resetting] * 3, config=config) as (opened, client):
        response = await ask(client)
        assert response.status == 502
        assert response.one("x-sglang-omni-route-attempt") == str(attempts)
        assert opened.last["attempts"] == attempts
    counts = [len(worker.requests) for worker in opened.workers]
    assert sum(counts) == attempts
    assert min(counts) == attempts // 3  # each worker got one attempt before any got two


async def test_a_failure_that_is_not_in_retry_on_is_not_retried():
    config = '[routing]\nretry_on = ["connect_failure"]'
    async with dataplane_and_client(resetting, GOOD, config=config) as (opened, client):
        assert (await ask(client)).status == 502
    assert [len(worker.requests) for worker in opened.workers] == [1, 0]


async def test_a_single_worker_is_retried():
    calls = []

    async def script(call):
        calls.append(call)
        await (resetting if len(calls) < 3 else GOOD)(call)

    async with dataplane_and_client(script) as (_, client):
        assert (await ask(client)).status == 200
    assert len(calls) == 3


async def test_a_retry_sends_the_same_body():
    body = b'{"messages": [], "pad": "%b"}' % (b"\xc3\xa4" * 400_000)
    async with dataplane_and_client(resetting, GOOD) as (opened, client):
        assert (await ask(client, body)).status == 200
    assert opened.workers[0].requests == opened.workers[1].requests
    assert opened.workers[1].requests[0][1] == body


async def test_an_idle_connection_closed_by_its_worker_is_replaced():
    closed = trio.Event()

    async def script(call):
        await call.send(counted(b"good"))
        call.close()
        closed.set()

    async with fake_workers(script) as (worker,), run_dataplane(worker) as opened:
        async with opened.client() as client:
            for _ in range(3):
                response = await ask(client)
                assert (response.status, response.one("x-sglang-omni-route-attempt")) == (200, "1")
                await closed.wait()
            assert opened.failures() == [0]
        assert len(worker.calls) == 3


@pytest.mark.parametrize("bad", [resetting, hanging_up_after()], ids=["reset", "close"])
async def test_a_dead_keep_alive_connection_is_reopened_within_the_same_attempt(bad):
    calls = []

    async def script(call):
        calls.append(call)
        await (bad if len(calls) == 2 else GOOD)(call)

    config = "[routing]\nmax_total_retries = 1"
    async with dataplane_and_client(script, config=config) as (opened, client):
        for _ in range(2):
            response = await ask(client)
            assert (response.status, response.one("x-sglang-omni-route-attempt")) == (200, "1")
        assert opened.failures() == [0]
    assert (len(calls), len(opened.workers[0].calls)) == (3, 2)


async def test_every_attempt_is_counted_and_none_stays_in_flight():
    async with fake_workers(resetting, GOOD) as workers, run_dataplane(*workers) as opened:
        async with opened.client() as client:
            await ask(client)
        bad, good = opened.fleet.workers
        assert (bad.routed["generation"], bad.failed["generation"]) == (1, 1)
        assert (good.routed["generation"], good.succeeded["generation"]) == (1, 1)
        assert opened.is_idle()


BUSY = counted(b"busy", "Retry-After: 7", "x-mine: a", "x-mine: b", status="503 Over Full")


def names(opened):
    return [worker.display_id for worker in opened.fleet.workers]


async def test_a_503_is_retried_elsewhere_and_does_not_affect_health():
    async with dataplane_and_client(answering(BUSY), GOOD) as (opened, client):
        response = await ask(client)
        assert (response.status, response.body) == (200, b"good")
        busy, good = names(opened)
        assert response.one("x-omni-attempts") == f"{busy}=503, {good}=200"
        assert opened.last["tried"] == [
            {"worker": f"http://{busy}", "outcome": "503"},
            {"worker": f"http://{good}", "outcome": "200"},
        ]
        assert opened.failures() == [0, 0]
        pool = opened.dataplane.upstream_pools.of(opened.fleet.workers[0])
        assert len(pool.idle) == 1  # the response ended cleanly
    assert [len(worker.requests) for worker in opened.workers] == [1, 1]


async def test_with_503_everywhere_the_last_one_is_relayed_unchanged():
    config = "[routing]\nmax_total_retries = 3"
    first = answering(counted(b"first", status="503 No"))
    async with dataplane_and_client(first, answering(BUSY), config=config) as (opened, client):
        response = await ask(client)
        one, other = names(opened)
        assert response.one("x-omni-attempts") == f"{one}=503, {other}=503, {one}=503"
        assert (response.status, response.body) == (503, b"first")
        response = await ask(client)  # round robin: the other worker is the last
        assert (response.status, response.body) == (503, b"busy")
        assert (response.all("x-mine"), response.one("retry-after")) == (["a", "b"], "7")
        assert opened.failures() == [0, 0]
    assert sum(len(worker.requests) for worker in opened.workers) == 6


async def test_a_503_that_may_not_be_retried_is_relayed_at_once():
    config = '[routing]\nretry_on = ["connect_failure"]'
    async with dataplane_and_client(answering(BUSY), GOOD, config=config) as (opened, client):
        response = await ask(client)
        assert (response.status, response.one("x-omni-attempts")) == (503, None)
        assert opened.last["tried"] == [{"worker": opened.workers[0].url, "outcome": "503"}]
    assert len(opened.workers[1].requests) == 0


async def test_a_503_of_a_worker_that_left_rotation_is_relayed():
    async def script(call):
        (worker,) = opened.fleet.workers
        opened.fleet.cordon(worker, "launch")
        await call.send(BUSY)

    async with dataplane_and_client(script) as (opened, client):
        response = await ask(client)
        assert (response.status, response.body) == (503, b"busy")
    assert len(opened.workers[0].requests) == 1


async def test_a_client_error_is_never_retried():
    async with dataplane_and_client(answering(counted(b"no", status="429 Slow")), GOOD) as (
        opened,
        client,
    ):
        assert (await ask(client)).status == 429
        assert opened.failures() == [0, 0]
    assert len(opened.workers[1].requests) == 0


ALL = (
    '[routing]\nretry_on = ["connect_failure", "reset_before_response", '
    '"408", "429", "500", "502", "503", "504"]\n'
)


def answering_with(status, body=b"its own words"):
    return answering(counted(body, "x-mine: a", status=f"{status} Said"))


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_a_status_in_retry_on_is_retried_on_another_worker(status):
    async with dataplane_and_client(answering_with(status), GOOD, config=ALL) as (opened, client):
        for _ in range(8):
            response = await ask(client)
            assert (response.status, response.body) == (200, b"good")
        bad, _ = opened.fleet.workers
        counts = status in (500, 502, 504)
        assert bad.routable is not counts
        assert len(opened.workers[0].requests) == (3 if counts else 8)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 501, 505])
async def test_other_statuses_are_not_retried_and_do_not_affect_health(status):
    async with dataplane_and_client(answering_with(status), GOOD, config=ALL) as (opened, client):
        for _ in range(8):
            assert (await ask(client)).status in (status, 200)
        assert opened.failures() == [0, 0]
    assert [len(worker.requests) for worker in opened.workers] == [4, 4]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_with_a_single_attempt_the_status_reaches_the_client(status):
    config = ALL + "max_total_retries = 1\nmax_worker_retries = 0"
    async with dataplane_and_client(answering_with(status), GOOD, config=config) as (
        opened,
        client,
    ):
        statuses = [(await ask(client)).status for _ in range(4)]
        assert statuses == [status, 200] * 2
        assert opened.failures()[0] == (2 if status in (500, 502, 504) else 0)


async def test_a_request_that_fails_everywhere_counts_once_for_each_worker():
    async with dataplane_and_client(
        answering_with(500), answering_with(500, b"other"), config=ALL
    ) as (
        opened,
        client,
    ):
        response = await ask(client)
        assert (response.status, response.one("x-mine")) == (500, "a")
        assert response.body in (b"its own words", b"other")
        assert response.one("x-sglang-omni-route-attempt") == "6"
        assert opened.failures() == [1, 1]
        assert all(worker.routable for worker in opened.fleet.workers)
    assert [len(worker.requests) for worker in opened.workers] == [3, 3]


async def test_a_single_worker_that_fails_twice_is_retried():
    calls = []

    async def script(call):
        calls.append(call)
        await (answering_with(500) if len(calls) < 3 else GOOD)(call)

    async with dataplane_and_client(script, config=ALL) as (_, client):
        assert (await ask(client)).status == 200
    assert len(calls) == 3


async def test_a_worker_with_permanent_500s_is_ejected():
    config = ALL + "max_total_retries = 1"
    async with dataplane_and_client(answering_with(500), config=config) as (opened, client):
        statuses = [(await ask(client)).status for _ in range(4)]
        assert statuses == [500, 500, 500, 503]
        assert opened.fleet.workers[0].health.state == "unhealthy"


async def test_a_stream_that_fails_with_500_is_retried_on_another_worker():
    async def script(call):
        await call.send(SSE_HEAD + chunk(b"data: one\n\n") + b"0\r\n\r\n")

    async with dataplane_and_client(answering_with(500), script, config=ALL) as (_, client):
        response = await ask(client, STREAMED)
        assert (response.status, response.body) == (200, b"data: one\n\n")


async def test_a_large_streamed_body_is_not_retried_after_a_500():
    body = b'{"messages": [], "pad": "%b"}' % (b"x" * 3_000_000)
    async with dataplane_and_client(answering_with(500), GOOD, config=ALL) as (opened, client):
        assert (await ask(client, body, *HINTS)).status == 500
    assert len(opened.workers[1].requests) == 0


async def test_a_reload_applies_retry_on():
    async with dataplane_and_client(answering_with(500), GOOD) as (opened, client):
        assert (await ask(client)).status == 500
        opened.reload(ALL)
        assert [(await ask(client)).status for _ in range(4)] == [200] * 4


async def test_a_failed_request_reports_its_attempts():
    config = "[routing]\nmax_total_retries = 2"
    async with (
        unreachable_url() as unreachable,
        fake_workers(resetting) as (resetting_worker,),
        run_dataplane(unreachable, resetting_worker, config=config) as opened,
        opened.client() as client,
    ):
        response = await ask(client)
        one, other = names(opened)
        assert response.status == 502
        attempts = f"{one}=connect_failure, {other}=reset_before_response"
        assert response.one("x-omni-attempts") == attempts


async def test_a_body_above_retry_body_bytes_is_not_retried_and_the_error_says_so():
    config = '[routing]\nretry_body_bytes = "1KiB"'
    body = b'{"messages": [], "pad": "%b"}' % (b"x" * 1024)
    async with dataplane_and_client(resetting, answering(BUSY), config=config) as (opened, client):
        response = await ask(client, body)
        assert response.status == 502
        assert b"larger than 1024 bytes" in response.body
        assert opened.last["attempts"] == 1
        assert (await ask(client, body)).status == 503
    assert [len(worker.requests) for worker in opened.workers] == [1, 1]


async def test_the_backoff_grows_only_when_all_workers_were_tried(monkeypatch):
    pauses = []
    monkeypatch.setattr(
        retry, "pause_secs", lambda attempts, chance: pauses.append(attempts) or 0.0
    )
    async with dataplane_and_client(*[resetting] * 2) as (opened, client):
        assert (await ask(client)).status == 502
        # Each was ejected at its third failure, so there is no pause after the last.
        assert opened.last["attempts"] == 6
    assert pauses == [0, 1, 2, 3]


async def test_a_client_that_disconnects_during_a_backoff_ends_it_at_once(monkeypatch):
    monkeypatch.setattr(retry, "pause_secs", lambda attempts, chance: 3600.0)
    async with fake_workers(resetting) as (worker,), run_dataplane(worker) as opened:
        async with opened.client() as client:
            await client.send(post(CHAT))
            while not any(task.phase == "backoff" for task in opened.dataplane.loop.tasks):
                await trio.sleep(0.001)
        await opened.dataplane.drained()
        assert opened.last["outcome"] == "client_disconnected"
        assert opened.last["phase"] == "backoff"
    assert len(worker.requests) == 1


async def test_a_backoff_ends_at_the_timeout_of_the_request(monkeypatch):
    monkeypatch.setattr(retry, "pause_secs", lambda attempts, chance: 3600.0)
    config = "[server]\nrequest_timeout_secs = 0.05"
    async with dataplane_and_client(resetting, config=config) as (opened, client):
        response = await ask(client)
        assert (response.status, b"in phase backoff" in response.body) == (504, True)
        assert response.one("x-omni-attempts") == f"{names(opened)[0]}=reset_before_response"

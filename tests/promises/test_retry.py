import pytest
import trio
import trio.testing

from omni_proxy.dataplane.upstream import retry as trying
from tests.promises.clients import CHAT, STREAMED, Truncated, post
from tests.promises.dataplane_fixture import dataplane_before, run_dataplane
from tests.promises.early_readers import HINTS
from tests.promises.fakes import (
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
        unreachable_url() as gone,
        fake_workers(GOOD) as (worker,),
        run_dataplane(gone, worker) as opened,
        opened.client() as client,
    ):
        for _ in range(4):
            answer = await ask(client)
            assert (answer.status, answer.body) == (200, b"good")
        refused, answered = opened.failures()
        assert (refused > 0, answered) == (True, 0)
    assert [body for _, body in worker.requests] == [CHAT] * 4


@pytest.mark.parametrize("bad", [resetting, hanging_up_after()], ids=["reset", "close"])
async def test_a_worker_that_dies_before_responding_is_retried_elsewhere(bad):
    async with dataplane_before(bad, GOOD) as (opened, client):
        answer = await ask(client)
        assert (answer.status, answer.body) == (200, b"good")
        assert answer.one("x-sglang-omni-route-attempt") == "2"
        assert answer.one("x-sglang-omni-worker") == opened.fleet.workers[1].id
        assert opened.last["attempts"] == 2
    assert [len(worker.requests) for worker in opened.workers] == [1, 1]


@pytest.mark.parametrize(
    "first", [CHUNKED_HEAD, SSE_HEAD + chunk(b"data: one\n\n")], ids=["head only", "an event"]
)
async def test_nothing_is_tried_again_after_the_first_byte(first):
    async def script(call):
        await call.send(first)
        await trio.testing.wait_all_tasks_blocked()
        call.reset()

    async with fake_workers(script, GOOD) as made, run_dataplane(*made) as opened:
        async with opened.client() as client:
            with pytest.raises(Truncated):
                await ask(client, STREAMED)
        assert [len(worker.requests) for worker in made] == [1, 0]


@pytest.mark.parametrize(("allowed", "made"), [(0, 1), (1, 1), (2, 2), (4, 4)])
async def test_tries_end_at_max_total_retries(allowed, made):
    config = f"[routing]\nmax_total_retries = {allowed}"
    async with dataplane_before(*[resetting] * 3, config=config) as (opened, client):
        answer = await ask(client)
        assert answer.status == 502
        assert answer.one("x-sglang-omni-route-attempt") == str(made)
        assert opened.last["attempts"] == made
    asked = [len(worker.requests) for worker in opened.workers]
    assert sum(asked) == made
    assert min(asked) == made // 3  # each was asked once before one was asked twice


async def test_what_retry_on_does_not_name_is_not_tried_again():
    config = '[routing]\nretry_on = ["connect_failure"]'
    async with dataplane_before(resetting, GOOD, config=config) as (opened, client):
        assert (await ask(client)).status == 502
    assert [len(worker.requests) for worker in opened.workers] == [1, 0]


async def test_a_single_worker_is_retried():
    tries = []

    async def script(call):
        tries.append(call)
        await (resetting if len(tries) < 3 else GOOD)(call)

    async with dataplane_before(script) as (_, client):
        assert (await ask(client)).status == 200
    assert len(tries) == 3


async def test_the_body_of_a_second_try_is_the_very_same():
    body = b'{"messages": [], "pad": "%b"}' % (b"\xc3\xa4" * 400_000)
    async with dataplane_before(resetting, GOOD) as (opened, client):
        assert (await ask(client, body)).status == 200
    assert opened.workers[0].requests == opened.workers[1].requests
    assert opened.workers[1].requests[0][1] == body


async def test_an_idle_connection_that_its_worker_closed_does_no_harm():
    closed = trio.Event()

    async def script(call):
        await call.send(counted(b"good"))
        call.close()
        closed.set()

    async with fake_workers(script) as (worker,), run_dataplane(worker) as opened:
        async with opened.client() as client:
            for _ in range(3):
                answer = await ask(client)
                assert (answer.status, answer.one("x-sglang-omni-route-attempt")) == (200, "1")
                await closed.wait()
            assert opened.failures() == [0]
        assert len(worker.calls) == 3


@pytest.mark.parametrize("bad", [resetting, hanging_up_after()], ids=["reset", "close"])
async def test_a_kept_connection_that_dies_under_a_request_is_redialled_without_costing_a_try(bad):
    tries = []

    async def script(call):
        tries.append(call)
        await (bad if len(tries) == 2 else GOOD)(call)

    config = "[routing]\nmax_total_retries = 1"
    async with dataplane_before(script, config=config) as (opened, client):
        for _ in range(2):
            answer = await ask(client)
            assert (answer.status, answer.one("x-sglang-omni-route-attempt")) == (200, "1")
        assert opened.failures() == [0]
    assert (len(tries), len(opened.workers[0].calls)) == (3, 2)


async def test_every_try_is_counted_and_none_stays_in_flight():
    async with fake_workers(resetting, GOOD) as made, run_dataplane(*made) as opened:
        async with opened.client() as client:
            await ask(client)
        bad, good = opened.fleet.workers
        assert (bad.routed["generation"], bad.failed["generation"]) == (1, 1)
        assert (good.routed["generation"], good.succeeded["generation"]) == (1, 1)
        assert opened.wait_until_idle()


BUSY = counted(b"busy", "Retry-After: 7", "x-mine: a", "x-mine: b", status="503 Over Full")


def names(opened):
    return [worker.display_id for worker in opened.fleet.workers]


async def test_a_503_is_retried_elsewhere_and_does_not_affect_health():
    async with dataplane_before(answering(BUSY), GOOD) as (opened, client):
        answer = await ask(client)
        assert (answer.status, answer.body) == (200, b"good")
        busy, good = names(opened)
        assert answer.one("x-omni-attempts") == f"{busy}=503, {good}=200"
        assert opened.last["tried"] == [
            {"worker": f"http://{busy}", "outcome": "503"},
            {"worker": f"http://{good}", "outcome": "200"},
        ]
        assert opened.failures() == [0, 0]
        assert len(opened.dataplane.pools.of(opened.fleet.workers[0]).idle) == 1  # it ended cleanly
    assert [len(worker.requests) for worker in opened.workers] == [1, 1]


async def test_with_503_everywhere_the_last_one_is_relayed_unchanged():
    config = "[routing]\nmax_total_retries = 3"
    first = answering(counted(b"first", status="503 No"))
    async with dataplane_before(first, answering(BUSY), config=config) as (opened, client):
        answer = await ask(client)
        one, other = names(opened)
        assert answer.one("x-omni-attempts") == f"{one}=503, {other}=503, {one}=503"
        assert (answer.status, answer.body) == (503, b"first")
        answer = await ask(client)  # in turn, the other one is the last
        assert (answer.status, answer.body) == (503, b"busy")
        assert (answer.all("x-mine"), answer.one("retry-after")) == (["a", "b"], "7")
        assert opened.failures() == [0, 0]
    assert sum(len(worker.requests) for worker in opened.workers) == 6


async def test_a_503_that_may_not_be_tried_again_is_relayed_at_once():
    config = '[routing]\nretry_on = ["connect_failure"]'
    async with dataplane_before(answering(BUSY), GOOD, config=config) as (opened, client):
        answer = await ask(client)
        assert (answer.status, answer.one("x-omni-attempts")) == (503, None)
        assert opened.last["tried"] == [{"worker": opened.workers[0].url, "outcome": "503"}]
    assert len(opened.workers[1].requests) == 0


async def test_a_worker_that_went_out_meanwhile_leaves_its_503_to_the_client():
    async def script(call):
        (worker,) = opened.fleet.workers
        opened.fleet.cordon(worker, "launch")
        await call.send(BUSY)

    async with dataplane_before(script) as (opened, client):
        answer = await ask(client)
        assert (answer.status, answer.body) == (503, b"busy")
    assert len(opened.workers[0].requests) == 1


async def test_a_client_error_is_never_tried_again():
    async with dataplane_before(answering(counted(b"no", status="429 Slow")), GOOD) as (
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


def saying(status, body=b"its own words"):
    return answering(counted(body, "x-mine: a", status=f"{status} Said"))


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_a_status_in_retry_on_is_retried_on_another_worker(status):
    async with dataplane_before(saying(status), GOOD, config=ALL) as (opened, client):
        for _ in range(8):
            answer = await ask(client)
            assert (answer.status, answer.body) == (200, b"good")
        bad, _ = opened.fleet.workers
        counts = status in (500, 502, 504)
        assert bad.routable is not counts
        assert len(opened.workers[0].requests) == (3 if counts else 8)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 501, 505])
async def test_other_statuses_are_not_retried_and_do_not_affect_health(status):
    async with dataplane_before(saying(status), GOOD, config=ALL) as (opened, client):
        for _ in range(8):
            assert (await ask(client)).status in (status, 200)
        assert opened.failures() == [0, 0]
    assert [len(worker.requests) for worker in opened.workers] == [4, 4]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_with_a_single_try_the_status_reaches_the_client(status):
    config = ALL + "max_total_retries = 1\nmax_worker_retries = 0"
    async with dataplane_before(saying(status), GOOD, config=config) as (opened, client):
        reported = [(await ask(client)).status for _ in range(4)]
        assert reported == [status, 200] * 2
        assert opened.failures()[0] == (2 if status in (500, 502, 504) else 0)


async def test_a_request_that_every_worker_fails_counts_once_for_each_and_ends_with_their_word():
    async with dataplane_before(saying(500), saying(500, b"other"), config=ALL) as (opened, client):
        answer = await ask(client)
        assert (answer.status, answer.one("x-mine")) == (500, "a")
        assert answer.body in (b"its own words", b"other")
        assert answer.one("x-sglang-omni-route-attempt") == "6"
        assert opened.failures() == [1, 1]
        assert all(worker.routable for worker in opened.fleet.workers)
    assert [len(worker.requests) for worker in opened.workers] == [3, 3]


async def test_a_single_worker_that_fails_once_is_retried():
    tries = []

    async def script(call):
        tries.append(call)
        await (saying(500) if len(tries) < 3 else GOOD)(call)

    async with dataplane_before(script, config=ALL) as (_, client):
        assert (await ask(client)).status == 200
    assert len(tries) == 3


async def test_a_worker_with_permanent_500s_is_ejected():
    config = ALL + "max_total_retries = 1"
    async with dataplane_before(saying(500), config=config) as (opened, client):
        reported = [(await ask(client)).status for _ in range(4)]
        assert reported == [500, 500, 500, 503]
        assert opened.fleet.workers[0].health.state == "unhealthy"


async def test_a_stream_refused_with_500_is_retried_on_another_worker():
    async def script(call):
        await call.send(SSE_HEAD + chunk(b"data: one\n\n") + b"0\r\n\r\n")

    async with dataplane_before(saying(500), script, config=ALL) as (_, client):
        answer = await ask(client, STREAMED)
        assert (answer.status, answer.body) == (200, b"data: one\n\n")


async def test_a_large_body_that_streams_is_not_tried_again_after_a_500():
    body = b'{"messages": [], "pad": "%b"}' % (b"x" * 3_000_000)
    async with dataplane_before(saying(500), GOOD, config=ALL) as (opened, client):
        assert (await ask(client, body, *HINTS)).status == 500
    assert len(opened.workers[1].requests) == 0


async def test_retry_on_is_read_anew_with_the_file():
    async with dataplane_before(saying(500), GOOD) as (opened, client):
        assert (await ask(client)).status == 500
        opened.reload(ALL)
        assert [(await ask(client)).status for _ in range(4)] == [200] * 4


async def test_a_failure_after_failed_tries_reports_what_was_tried():
    config = "[routing]\nmax_total_retries = 2"
    async with (
        unreachable_url() as gone,
        fake_workers(resetting) as (made,),
        run_dataplane(gone, made, config=config) as opened,
        opened.client() as client,
    ):
        answer = await ask(client)
        one, other = names(opened)
        assert answer.status == 502
        reported = f"{one}=connect_failure, {other}=reset_before_response"
        assert answer.one("x-omni-attempts") == reported


async def test_a_body_above_retry_body_bytes_is_tried_once_and_the_client_is_informed_why():
    config = '[routing]\nretry_body_bytes = "1KiB"'
    body = b'{"messages": [], "pad": "%b"}' % (b"x" * 1024)
    async with dataplane_before(resetting, answering(BUSY), config=config) as (opened, client):
        answer = await ask(client, body)
        assert answer.status == 502
        assert b"larger than 1024 bytes" in answer.body
        assert opened.last["attempts"] == 1
        assert (await ask(client, body)).status == 503
    assert [len(worker.requests) for worker in opened.workers] == [1, 1]


async def test_the_backoff_grows_only_when_all_workers_were_tried(monkeypatch):
    pauses = []
    monkeypatch.setattr(trying, "pause_secs", lambda made, chance: pauses.append(made) or 0.0)
    async with dataplane_before(*[resetting] * 2) as (opened, client):
        assert (await ask(client)).status == 502
        # Each went out at its third failure; there was no fourth to pause before.
        assert opened.last["attempts"] == 6
    assert pauses == [0, 1, 2, 3]


async def test_a_client_that_leaves_during_a_pause_ends_it_at_once(monkeypatch):
    monkeypatch.setattr(trying, "pause_secs", lambda made, chance: 3600.0)
    async with fake_workers(resetting) as (worker,), run_dataplane(worker) as opened:
        async with opened.client() as client:
            await client.send(post(CHAT))
            while not any(task.phase == "backoff" for task in opened.dataplane.loop.tasks):
                await trio.sleep(0.001)
        await opened.dataplane.drained()
        assert opened.last["outcome"] == "client_disconnected"
        assert opened.last["phase"] == "backoff"
    assert len(worker.requests) == 1


async def test_a_pause_ends_with_the_time_of_the_exchange(monkeypatch):
    monkeypatch.setattr(trying, "pause_secs", lambda made, chance: 3600.0)
    config = "[server]\nrequest_timeout_secs = 0.05"
    async with dataplane_before(resetting, config=config) as (opened, client):
        answer = await ask(client)
        assert (answer.status, b"in phase backoff" in answer.body) == (504, True)
        assert answer.one("x-omni-attempts") == f"{names(opened)[0]}=reset_before_response"

import json
from contextlib import AsyncExitStack

import pytest
import trio

from omni_proxy.admin_ops.abort_requests import AbortTarget
from omni_proxy.dataplane import abort
from tests.dataplane.loop_script import until
from tests.promises.support.clients import post
from tests.promises.support.dataplane_fixture import run_dataplane
from tests.promises.support.fakes import SSE_HEAD, answering, chunk, counted, fake_workers, silent

ALL = AbortTarget(everything=True)
GENERATE = "/generate"


def generate(rid, *fields, **more):
    return post(json.dumps({"text": "a", "rid": rid, **more}).encode(), *fields, path=GENERATE)


def by_id(*ids):
    return AbortTarget(ids)


async def halfway(call):
    await call.send(SSE_HEAD, chunk(b"data: {}\n\n"))
    await call.until_left()


@pytest.mark.parametrize("script", [silent, halfway], ids=["unary", "stream"])
async def test_the_worker_of_a_request_is_known_while_it_runs(script):
    async with fake_workers(script) as workers, run_dataplane(*workers) as proxy:
        (worker,) = proxy.fleet.workers
        async with proxy.client() as client:
            await client.send(generate("r1", stream=script is halfway))
            await until(lambda: workers[0].requests)
            result = await proxy.dataplane.abort(by_id("r1"))
            assert (result.waiting, result.known, dict(result.running)) == (
                0, ("r1",), {worker.url: result.running[worker.url]},
            )  # fmt: skip
            assert "r1" in result.running[worker.url]
            assert (await proxy.dataplane.abort(by_id("r2"))).running == {}
            assert (
                await proxy.dataplane.abort(ALL)
            ).running == {}  # aborting everything needs no list of workers
        await until(proxy.is_idle)
        assert (await proxy.dataplane.abort(by_id("r1"))).known == ()


async def test_the_second_request_of_a_connection_is_known_too():
    """The second one takes the fast path, which does not read the ids in advance."""
    responses = [counted(b"{}"), None]

    async def script(call):
        response = responses.pop(0)
        await (silent(call) if response is None else call.send(response))

    async with (
        fake_workers(script) as workers,
        run_dataplane(*workers) as proxy,
        proxy.client() as client,
    ):
        await client.send(generate("r1"))
        assert (await client.answer()).status == 200
        await client.send(generate("r2"))
        await until(lambda: len(workers[0].requests) == 2)
        assert (await proxy.dataplane.abort(by_id("r1"))).known == ()
        assert (await proxy.dataplane.abort(by_id("r2"))).known == ("r2",)


@pytest.mark.parametrize(
    ("sent", "ids"),
    [
        (generate(["a", "b"]), ["a", "b"]),
        (post(b'{"messages": [], "request_id": "a"}'), ["a", "chatcmpl-a"]),
        (post(b'{"messages": []}', "x-request-id: a"), ["a"]),
        (post(b'{"prompt": "p"}', "x-request-id: a", path="/v1/completions"), ["cmpl-a"]),
        (generate("x" * 300), []),
        (generate({"no": "id"}), []),
        (generate("\ud800"), []),
    ],
    ids=["batch", "body", "head", "written by vLLM", "too long", "not a string", "lone surrogate"],
)
async def test_a_request_is_found_by_any_id_that_its_engine_may_use(sent, ids):
    async with (
        fake_workers(silent) as workers,
        run_dataplane(*workers) as proxy,
        proxy.client() as client,
    ):
        await client.send(sent)
        await until(lambda: workers[0].requests)
        for request_id in ids:
            assert (await proxy.dataplane.abort(by_id(request_id))).known == (request_id,)
        assert (await proxy.dataplane.abort(by_id("another", "\ud800", "x" * 300))).known == ()


QUEUED = "[server]\nqueue_size = 9\n"


async def test_a_request_waiting_for_a_slot_can_be_aborted_before_its_body_arrives():
    config = f"{QUEUED}max_inflight = 1"
    async with fake_workers(silent) as workers, run_dataplane(*workers, config=config) as proxy:
        async with proxy.client() as holder, proxy.client() as client, proxy.client() as sender:
            await holder.send(generate("r1"))
            await until(lambda: proxy.dataplane.in_flight)
            await client.send(generate("r2"))
            head = generate("r3", pad="x" * 100_000).partition(b"\r\n\r\n")[0]
            await sender.send(head, b"\r\n\r\n")  # the body is never sent
            await until(lambda: proxy.dataplane.queue.waiting == 2)
            # The id of r2 is not known yet: its body has not been read.
            assert (await proxy.dataplane.abort(by_id("r2"))).waiting == 0
            assert (await proxy.dataplane.abort(ALL)).waiting == 2
            response = await client.answer()
            assert json.loads(response.body)["meta_info"]["finish_reason"]["type"] == "abort"
            last_response = await sender.answer()
            assert (last_response.status, last_response.one("connection")) == (200, "close")
            assert proxy.dataplane.queue.waiting == 0
        await until(proxy.is_idle)
        assert len(workers[0].requests) == 1


async def test_only_the_aborted_request_leaves_the_queue_and_its_connection_stays():
    async with (
        fake_workers(answering(counted(b"{}"))) as workers,
        run_dataplane(*workers, config=QUEUED) as proxy,
    ):
        (worker,) = proxy.fleet.workers
        proxy.fleet.cordon(worker, "updating")
        async with proxy.client() as first, proxy.client() as second:
            await first.send(generate("r1"))
            await second.send(generate("r2"))
            await until(lambda: proxy.dataplane.queue.waiting == 2)
            assert (await proxy.dataplane.abort(by_id("r1", "r9"))).waiting == 1
            assert (await first.answer()).status == 200
            proxy.fleet.uncordon(worker, "updating")
            assert (await second.answer()).body == b"{}"
            await first.send(generate("r3"))
            assert (await first.answer()).body == b"{}"
            assert [record["outcome"] for record in proxy.log.records[:1]] == ["refused"]


async def test_an_aborted_request_that_generates_no_text_gets_an_error():
    async with (
        fake_workers(answering(counted(b"{}"))) as workers,
        run_dataplane(*workers, config=QUEUED) as proxy,
    ):
        (worker,) = proxy.fleet.workers
        proxy.fleet.cordon(worker, "updating")
        async with proxy.client() as client:
            await client.send(post(b'{"request_id": "r1"}', path="/tokenize"))
            await until(lambda: proxy.dataplane.queue.waiting)
            await proxy.dataplane.abort(by_id("r1"))
            response = await client.answer()
            assert response.status == 400
            assert json.loads(response.body)["error"]["code"] == "request_aborted"
        proxy.fleet.uncordon(worker, "updating")


async def test_a_request_aborted_between_attempts_is_not_retried():
    async def resets(call):
        call.reset()

    config = "[routing]\nmax_total_retries = 1000000\nmax_worker_retries = 0\n"
    async with fake_workers(resets) as workers, run_dataplane(*workers, config=config) as proxy:
        async with proxy.client() as client:
            await client.send(generate("r1"))
            await until(lambda: any(task.phase == "backoff" for task in proxy.dataplane.loop.tasks))
            assert (await proxy.dataplane.abort(by_id("r1"))).waiting == 1
            response = await client.answer()
            assert json.loads(response.body)["meta_info"]["finish_reason"]["type"] == "abort"
        await until(proxy.is_idle)


async def test_an_aborted_stream_with_keep_alives_ends_with_a_last_chunk():
    may_reset = trio.Event()

    async def script(call):
        await may_reset.wait()
        call.reset()

    config = f"{QUEUED}sse_keepalive_secs = 0.01"
    async with fake_workers(script) as workers, run_dataplane(*workers, config=config) as proxy:
        (worker,) = proxy.fleet.workers
        async with proxy.client() as client:
            await client.send(generate("r1", stream=True))
            await client.until(b": keep-alive\n\n")
            proxy.fleet.cordon(worker, "updating")
            may_reset.set()
            await until(lambda: proxy.dataplane.queue.waiting)
            assert (await proxy.dataplane.abort(by_id("r1"))).waiting == 1
            rest = await client.until_closed()
            assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert b'"type":"abort"' in rest
        proxy.fleet.uncordon(worker, "updating")


async def test_aborting_many_requests_yields_to_other_tasks(monkeypatch):
    monkeypatch.setattr(abort, "CONNECTIONS_PER_TURN", 1)
    async with (
        fake_workers(answering(counted(b"{}"))) as workers,
        run_dataplane(*workers, config=QUEUED) as proxy,
        AsyncExitStack() as clients,
    ):
        (worker,) = proxy.fleet.workers
        proxy.fleet.cordon(worker, "updating")
        waiting_clients = [await clients.enter_async_context(proxy.client()) for _ in range(5)]
        for number, client in enumerate(waiting_clients):
            await client.send(generate(f"r{number}"))
        await until(lambda: proxy.dataplane.queue.waiting == 5)
        assert (await proxy.dataplane.abort(ALL)).waiting == 5
        for client in waiting_clients:
            assert b'"type":"abort"' in (await client.answer()).body
        proxy.fleet.uncordon(worker, "updating")

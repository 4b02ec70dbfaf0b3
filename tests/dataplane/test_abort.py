import json
from contextlib import AsyncExitStack

import pytest
import trio

from omni_proxy.admin_ops.abort_requests import AbortTarget
from omni_proxy.dataplane import abort
from tests.dataplane.loop_script import until
from tests.promises.clients import post
from tests.promises.dataplane_fixture import run_dataplane
from tests.promises.fakes import SSE_HEAD, answering, chunk, counted, fake_workers, silent

ALL = AbortTarget(everything=True)
GENERATE = "/generate"


def generate(rid, *fields, **more):
    return post(json.dumps({"text": "a", "rid": rid, **more}).encode(), *fields, path=GENERATE)


def one(*ids):
    return AbortTarget(ids)


async def halfway(call):
    await call.send(SSE_HEAD, chunk(b"data: {}\n\n"))
    await call.until_left()


@pytest.mark.parametrize("script", [silent, halfway], ids=["unary", "stream"])
async def test_the_worker_of_a_request_is_known_while_it_runs(script):
    async with fake_workers(script) as made, run_dataplane(*made) as opened:
        (worker,) = opened.fleet.workers
        async with opened.client() as client:
            await client.send(generate("r1", stream=script is halfway))
            await until(lambda: made[0].requests)
            found = await opened.dataplane.abort(one("r1"))
            assert (found.waiting, found.known, dict(found.running)) == (
                0, ("r1",), {worker.url: found.running[worker.url]},
            )  # fmt: skip
            assert "r1" in found.running[worker.url]
            assert (await opened.dataplane.abort(one("r2"))).running == {}
            assert (await opened.dataplane.abort(ALL)).running == {}  # all are asked anyway
        await until(opened.wait_until_idle)
        assert (await opened.dataplane.abort(one("r1"))).known == ()


async def test_the_second_request_of_a_connection_is_known_too():
    """It takes the fast path, where nothing is looked at that need not be."""
    answers = [counted(b"{}"), None]

    async def script(call):
        answer = answers.pop(0)
        await (silent(call) if answer is None else call.send(answer))

    async with (
        fake_workers(script) as made,
        run_dataplane(*made) as opened,
        opened.client() as client,
    ):
        await client.send(generate("r1"))
        assert (await client.answer()).status == 200
        await client.send(generate("r2"))
        await until(lambda: len(made[0].requests) == 2)
        assert (await opened.dataplane.abort(one("r1"))).known == ()
        assert (await opened.dataplane.abort(one("r2"))).known == ("r2",)


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
    ids=["batch", "body", "head", "written by vLLM", "too long", "no text", "half a character"],
)
async def test_a_request_is_found_by_the_ids_of_its_engine(sent, ids):
    async with (
        fake_workers(silent) as made,
        run_dataplane(*made) as opened,
        opened.client() as client,
    ):
        await client.send(sent)
        await until(lambda: made[0].requests)
        for each in ids:
            assert (await opened.dataplane.abort(one(each))).known == (each,)
        assert (await opened.dataplane.abort(one("another", "\ud800", "x" * 300))).known == ()


QUEUED = "[server]\nqueue_size = 9\n"


async def test_a_request_that_waits_for_a_slot_can_be_aborted_without_its_body():
    config = f"{QUEUED}max_inflight = 1"
    async with fake_workers(silent) as made, run_dataplane(*made, config=config) as opened:
        async with opened.client() as holder, opened.client() as client, opened.client() as sender:
            await holder.send(generate("r1"))
            await until(lambda: opened.dataplane.in_flight)
            await client.send(generate("r2"))
            head = generate("r3", pad="x" * 100_000).partition(b"\r\n\r\n")[0]
            await sender.send(head, b"\r\n\r\n")  # its body does not come
            await until(lambda: opened.dataplane.queue.waiting == 2)
            assert (
                await opened.dataplane.abort(one("r2"))
            ).waiting == 0  # nobody has read that yet
            assert (await opened.dataplane.abort(ALL)).waiting == 2
            answer = await client.answer()
            assert json.loads(answer.body)["meta_info"]["finish_reason"]["type"] == "abort"
            closed = await sender.answer()
            assert (closed.status, closed.one("connection")) == (200, "close")
            assert opened.dataplane.queue.waiting == 0
        await until(opened.wait_until_idle)
        assert len(made[0].requests) == 1


async def test_only_the_aborted_request_leaves_the_queue_and_its_connection_stays():
    async with (
        fake_workers(answering(counted(b"{}"))) as made,
        run_dataplane(*made, config=QUEUED) as opened,
    ):
        (worker,) = opened.fleet.workers
        opened.fleet.cordon(worker, "updating")
        async with opened.client() as one_client, opened.client() as other:
            await one_client.send(generate("r1"))
            await other.send(generate("r2"))
            await until(lambda: opened.dataplane.queue.waiting == 2)
            assert (await opened.dataplane.abort(one("r1", "r9"))).waiting == 1
            assert (await one_client.answer()).status == 200
            opened.fleet.uncordon(worker, "updating")
            assert (await other.answer()).body == b"{}"
            await one_client.send(generate("r3"))
            assert (await one_client.answer()).body == b"{}"
            assert [record["outcome"] for record in opened.log.records[:1]] == ["refused"]


async def test_what_generates_no_text_gets_an_error():
    async with (
        fake_workers(answering(counted(b"{}"))) as made,
        run_dataplane(*made, config=QUEUED) as opened,
    ):
        (worker,) = opened.fleet.workers
        opened.fleet.cordon(worker, "updating")
        async with opened.client() as client:
            await client.send(post(b'{"request_id": "r1"}', path="/tokenize"))
            await until(lambda: opened.dataplane.queue.waiting)
            await opened.dataplane.abort(one("r1"))
            answer = await client.answer()
            assert answer.status == 400
            assert json.loads(answer.body)["error"]["code"] == "request_aborted"
        opened.fleet.uncordon(worker, "updating")


async def test_between_two_attempts_a_request_ends_and_is_not_sent_again():
    async def resets(call):
        call.reset()

    config = "[routing]\nmax_total_retries = 1000000\nmax_worker_retries = 0\n"
    async with fake_workers(resets) as made, run_dataplane(*made, config=config) as opened:
        async with opened.client() as client:
            await client.send(generate("r1"))
            await until(
                lambda: any(task.phase == "backoff" for task in opened.dataplane.loop.tasks)
            )
            assert (await opened.dataplane.abort(one("r1"))).waiting == 1
            answer = await client.answer()
            assert json.loads(answer.body)["meta_info"]["finish_reason"]["type"] == "abort"
        await until(opened.wait_until_idle)


async def test_a_stream_that_was_kept_alive_meanwhile_ends_regularly():
    asked = trio.Event()

    async def script(call):
        await asked.wait()
        call.reset()

    config = f"{QUEUED}sse_keepalive_secs = 0.01"
    async with fake_workers(script) as made, run_dataplane(*made, config=config) as opened:
        (worker,) = opened.fleet.workers
        async with opened.client() as client:
            await client.send(generate("r1", stream=True))
            await client.until(b": keep-alive\n\n")
            opened.fleet.cordon(worker, "updating")
            asked.set()
            await until(lambda: opened.dataplane.queue.waiting)
            assert (await opened.dataplane.abort(one("r1"))).waiting == 1
            rest = await client.until_closed()
            assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert b'"type":"abort"' in rest
        opened.fleet.uncordon(worker, "updating")


async def test_other_tasks_have_their_turns_while_many_end(monkeypatch):
    monkeypatch.setattr(abort, "CONNECTIONS_PER_TURN", 1)
    async with (
        fake_workers(answering(counted(b"{}"))) as made,
        run_dataplane(*made, config=QUEUED) as opened,
        AsyncExitStack() as clients,
    ):
        (worker,) = opened.fleet.workers
        opened.fleet.cordon(worker, "updating")
        waiting = [await clients.enter_async_context(opened.client()) for _ in range(5)]
        for number, client in enumerate(waiting):
            await client.send(generate(f"r{number}"))
        await until(lambda: opened.dataplane.queue.waiting == 5)
        assert (await opened.dataplane.abort(ALL)).waiting == 5
        for client in waiting:
            assert b'"type":"abort"' in (await client.answer()).body
        opened.fleet.uncordon(worker, "updating")

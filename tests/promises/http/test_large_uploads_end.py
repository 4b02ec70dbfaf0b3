import pytest
import trio
import trio.lowlevel

from tests.promises.support.clients import post
from tests.promises.support.dataplane_fixture import run_dataplane
from tests.promises.support.early_readers import (
    CHAT,
    HINTS,
    MIB,
    MODEL,
    ended,
    head,
    whole,
)
from tests.promises.support.fakes import (
    LAST_CHUNK,
    PATIENCE_SECS,
    answering,
    chunk,
    counted,
    fake_workers,
    unreachable_url,
)


@pytest.mark.parametrize("framing", [8 * MIB, None], ids=["counted", "chunked"])
async def test_a_response_before_the_bodys_end_is_relayed_and_closes_the_connection(
    taking, framing
):
    async def script(taker):
        await taker.until(MIB)
        await taker.send(counted(b"too loud", status="413 Content Too Large"))
        await taker.until_left()

    worker = await taking(script)
    async with run_dataplane(config=MODEL.format(worker.url)) as opened, opened.client() as client:
        piece = bytes(MIB)
        await client.send(head(framing, *HINTS))
        for _ in range(2):
            await client.send(piece if framing else chunk(piece))
        answer = await client.answer()
        assert (answer.status, answer.body) == (413, b"too loud")
        assert answer.one("connection") == "close"
        await client.send(piece if framing else chunk(piece))  # the client may still be sending
        assert await client.until_closed() == b""
        assert (await ended(opened, client))["outcome"] == "completed"
        assert opened.failures() == [0]


async def test_an_interim_response_does_not_stop_an_upload(taking):
    async def script(taker):
        await taker.until(MIB)
        await taker.send(b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n")
        await whole(taker, 4 * MIB)

    worker = await taking(script)
    async with run_dataplane(config=MODEL.format(worker.url)) as opened, opened.client() as client:
        await client.send(head(4 * MIB, *HINTS), bytes(2 * MIB))
        with trio.fail_after(PATIENCE_SECS):
            while worker.taker is None or len(worker.taker.body) < 2 * MIB:
                await trio.sleep(0.01)
        await client.send(bytes(2 * MIB))
        assert (await client.answer()).status == 200


async def test_a_chunked_body_above_the_limit_is_413_and_closes_the_upstream(taking):
    left = trio.Event()

    async def script(taker):
        await taker.until_left()
        left.set()

    worker = await taking(script)
    text = '[server]\nmax_payload_size = "3MiB"\n' + MODEL.format(worker.url)
    async with run_dataplane(config=text) as opened, opened.client() as client:
        await client.send(head(None, *HINTS), *[chunk(bytes(MIB))] * 3, b"1\r\n")
        answer = await client.answer()
        assert (answer.status, answer.one("connection")) == (413, "close")
        with trio.fail_after(PATIENCE_SECS):
            await left.wait()
        assert await client.until_closed() == b""
        assert (await ended(opened, client))["outcome"] == "refused"
        assert opened.failures() == [0]
    assert not worker.taker.body.endswith(LAST_CHUNK)


async def test_malformed_chunks_in_a_streamed_body_are_400_and_close_the_upstream(taking):
    left = trio.Event()

    async def script(taker):
        await taker.until_left()
        left.set()

    worker = await taking(script)
    async with run_dataplane(config=MODEL.format(worker.url)) as opened, opened.client() as client:
        await client.send(head(None, *HINTS), *[chunk(bytes(MIB))] * 2, b"nonsense\r\n")
        assert (await client.answer()).status == 400
        with trio.fail_after(PATIENCE_SECS):
            await left.wait()
        assert opened.failures() == [0]


async def test_a_client_reset_within_an_upload_closes_the_upstream(taking):
    left = trio.Event()

    async def script(taker):
        await taker.until_left()
        left.set()

    worker = await taking(script)
    async with run_dataplane(config=MODEL.format(worker.url)) as opened:
        async with opened.client() as client:
            await client.send(head(4 * MIB, *HINTS), bytes(2 * MIB))
            with trio.fail_after(PATIENCE_SECS):
                while worker.taker is None:
                    await trio.sleep(0.01)
            client.reset()
        with trio.fail_after(PATIENCE_SECS):
            await left.wait()
            await opened.dataplane.drained()
        assert opened.is_idle()
        assert opened.last["outcome"] == "client_disconnected"
        assert opened.failures() == [0]


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_worker_that_dies_during_an_upload_is_a_502_without_retry(taking, how):
    async def script(taker):
        await taker.until(MIB)
        getattr(taker, how)()

    dying, other = await taking(script), await taking(script)
    text = MODEL.format(dying.url) + MODEL.format(other.url)
    async with run_dataplane(config=text) as opened, opened.client() as client:
        await client.send(head(4 * MIB, *HINTS), bytes(2 * MIB))
        answer = await client.answer()
        assert (answer.status, answer.one("connection")) == (502, "close")
        assert b"its body was streamed because it is large" in answer.body
        assert sorted(opened.failures()) == [0, 1]
    assert dying.connections + other.connections == 1


async def test_a_large_upload_is_retried_when_a_worker_is_unreachable(taking):
    async def script(taker):
        await whole(taker, 2 * MIB)

    worker = await taking(script)
    async with unreachable_url() as url:
        text = MODEL.format(url) + MODEL.format(worker.url)
        async with run_dataplane(config=text) as opened, opened.client() as client:
            for _ in range(2):  # one of them tries the unreachable worker first
                await client.send(head(2 * MIB, *HINTS), bytes(2 * MIB))
                assert (await client.answer()).status == 200
            assert min(opened.failures()) == 0


async def test_an_upload_that_stalls_is_408_and_no_failure_of_the_worker(taking):
    left = trio.Event()

    async def script(taker):
        await taker.until_left()
        left.set()

    worker = await taking(script)
    text = "[server.timeouts]\nclient_body_secs = 0.2\n" + MODEL.format(worker.url)
    async with run_dataplane(config=text) as opened, opened.client() as client:
        await client.send(head(4 * MIB, *HINTS), bytes(2 * MIB))
        answer = await client.answer()
        assert (answer.status, answer.one("connection")) == (408, "close")
        with trio.fail_after(PATIENCE_SECS):
            await left.wait()
        assert (await ended(opened, client))["ended_by"] == "client"
        assert opened.failures() == [0]


async def test_a_worker_that_does_not_read_an_upload_is_504(taking):
    async def script(taker):
        await trio.sleep_forever()

    worker = await taking(script)
    text = "[server.timeouts]\nresponse_head_secs = 0.2\n" + MODEL.format(worker.url)
    async with run_dataplane(config=text) as opened, opened.client() as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.stream.send_all, head(64 * MIB, *HINTS) + bytes(64 * MIB))
            assert (await client.answer()).status == 504
            nursery.cancel_scope.cancel()
        assert opened.failures() == [1]


@pytest.mark.parametrize("framing", [3 * MIB, None], ids=["counted", "chunked"])
@pytest.mark.parametrize(
    "hint", ["x-sglang-omni-route-capabilities: telepathy", "x-sglang-omni-route-stream: maybe"]
)
async def test_the_rest_of_a_refused_body_is_never_parsed_as_a_request(taking, framing, hint):
    async def script(taker):
        raise AssertionError(f"a worker got a request: {taker.head!r}")

    worker = await taking(script)
    smuggled = f"POST {CHAT} HTTP/1.1\r\nhost: proxy\r\ncontent-length: 2\r\n\r\n{{}}".encode()
    async with run_dataplane(config=MODEL.format(worker.url)) as opened, opened.client() as client:
        chunk_head = b"" if framing else b"%x\r\n" % (3 * MIB)
        hints = (*HINTS[:1], hint) if "capabilities" in hint else (*HINTS, hint)
        await client.send(head(framing, *hints), chunk_head, bytes(MIB + 1))
        answer = await client.answer()
        assert (answer.status, answer.one("connection")) == (400, "close")
        await client.send(smuggled)
        assert await client.until_closed() == b""


async def test_other_requests_are_answered_while_a_large_body_is_parsed():
    """The model, which routing needs, is last: after parts that take long to skip."""
    large_body = b'{"messages":[' + b'"",' * (3 * MIB) + b'""],"model":"m"}'
    async with (
        fake_workers(answering(counted(b"{}"))) as (fake,),
        run_dataplane(config=MODEL.format(fake.url)) as opened,
        opened.client() as large,
        opened.client() as small,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(large.send, head(len(large_body)), large_body)
            with trio.fail_after(PATIENCE_SECS):
                while opened.dataplane.inflight.held_bytes < len(large_body):
                    await trio.lowlevel.checkpoint()
        assert not fake.requests
        await small.send(post())
        assert (await small.answer()).status == 200
        assert len(fake.requests) == 1
        assert (await large.answer()).status == 200
        assert [len(body) for _, body in fake.requests][1:] == [len(large_body)]
        assert opened.last["model"] == "m"
        assert opened.dataplane.inflight.held_bytes == 0

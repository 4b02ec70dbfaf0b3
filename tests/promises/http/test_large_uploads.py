import json
import re

import pytest
import trio

from tests.promises.support.clients import post
from tests.promises.support.dataplane_fixture import run_dataplane
from tests.promises.support.early_readers import (
    BOUNDARY,
    END,
    FILE,
    FORM,
    HINTS,
    MIB,
    MODEL,
    SPOKEN,
    head,
    whole,
)
from tests.promises.support.fakes import (
    PATIENCE_SECS,
    answering,
    counted,
    fake_workers,
)


async def test_json_above_a_mebibyte_with_hints_is_streamed(taking):
    reached = trio.Event()

    async def script(taker):
        await taker.until(MIB)
        reached.set()
        await whole(taker, 3 * MIB)

    worker = await taking(script)
    async with run_dataplane(config=MODEL.format(worker.url)) as opened, opened.client() as client:
        await client.send(head(3 * MIB, *HINTS), b"no json" + bytes(2 * MIB - 7))
        with trio.fail_after(PATIENCE_SECS):
            await reached.wait()
        assert opened.dataplane.inflight.held_bytes == 0
        await client.send(bytes(MIB))
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, b"%d" % (3 * MIB))
        await client.send(head(3 * MIB, *HINTS), bytes(3 * MIB))  # the connection stays usable
        assert (await client.answer()).status == 200
        assert opened.last["bytes_in"] == 3 * MIB
        assert (opened.last["outcome"], opened.last["model"]) == ("completed", "m")
    assert b"content-length: %d" % (3 * MIB) in worker.taker.head
    assert b"route-model" not in worker.taker.head


@pytest.mark.parametrize("missing", [0, 1], ids=["model", "capabilities"])
async def test_json_with_only_one_hint_is_read_completely_first(missing):
    one_hint = (HINTS[1 - missing],)
    async with fake_workers(answering(counted(b"{}"))) as fakes:
        text = MODEL.format(fakes[0].url)
        async with run_dataplane(config=text) as opened, opened.client() as client:
            await client.send(head(2 * MIB, *one_hint), b"no json" + bytes(2 * MIB - 7))
            assert (await client.answer()).status == 400
            body = json.dumps({"model": "m", "prompt": "x" * 2 * MIB}).encode()
            await client.send(head(len(body), *one_hint), body)
            assert (await client.answer()).status == 200
            assert opened.dataplane.inflight.held_bytes == 0
        assert [received for _, received in fakes[0].requests] == [body]


async def test_a_chunked_body_is_rechunked_without_extensions_and_trailers(taking):
    def payload_of(wire):
        sizes, payload = [], b""
        while wire:
            size, _, wire = wire.partition(b"\r\n")
            sizes.append(int(size, 16))
            payload += wire[: sizes[-1]]
            wire = wire[sizes[-1] + 2 :]
        return sizes, payload

    async def script(taker):
        while not taker.body.endswith(b"\r\n0\r\n\r\n"):
            await taker.until(len(taker.body) + 1)
        await taker.send(counted(b"{}"))

    worker = await taking(script)
    async with run_dataplane(config=MODEL.format(worker.url)) as opened, opened.client() as client:
        await client.send(head(None, *HINTS))
        for letter in b"abcdefgh":
            payload = bytes([letter]) * (MIB // 4)
            await client.send(b"%x;ext=1\r\n%b\r\n" % (len(payload), payload))
        await client.send(b"0\r\nx-trailer: 1\r\n\r\n")
        assert (await client.answer()).status == 200
        assert opened.last["bytes_in"] == 2 * MIB
    assert b"transfer-encoding: chunked" in worker.taker.head
    assert b"content-length" not in worker.taker.head
    sizes, payload = payload_of(worker.taker.body)
    assert sizes[-1] == 0
    assert payload == b"".join(bytes([letter]) * (MIB // 4) for letter in b"abcdefgh")
    assert b"x-trailer" not in worker.taker.body


async def test_a_form_is_streamed_once_its_model_is_read(taking):
    reached = trio.Event()
    audio = bytes(range(256)) * (3 * MIB // 256)
    form = FORM + FILE + audio + END

    async def script(taker):
        await taker.until(MIB)
        reached.set()
        await whole(taker, len(form))

    worker = await taking(script)
    async with run_dataplane(config=MODEL.format(worker.url)) as opened, opened.client() as client:
        request_head = head(len(form), path=SPOKEN, kind=BOUNDARY)
        await client.send(request_head, form[: 2 * MIB])
        with trio.fail_after(PATIENCE_SECS):
            await reached.wait()
        await client.send(form[2 * MIB :])
        assert (await client.answer()).body == b"%d" % len(form)
        assert opened.last["model"] == "m"
    assert worker.taker.body == form


async def test_a_form_with_its_model_last_is_read_completely():
    form = FILE + bytes(2 * MIB) + b"\r\n" + FORM + b"--x--\r\n"
    async with fake_workers(answering(counted(b"{}"))) as fakes:
        text = MODEL.format(fakes[0].url)
        async with run_dataplane(config=text) as opened, opened.client() as client:
            request_head = head(len(form), path=SPOKEN, kind=BOUNDARY)
            await client.send(request_head, form[:MIB], form[MIB:])
            assert (await client.answer()).status == 200
            assert opened.last["model"] == "m"
        assert [body for _, body in fakes[0].requests] == [form]


async def test_a_worker_that_does_not_read_blocks_its_client_and_uses_no_memory(taking):
    may_read = trio.Event()
    size = 64 * MIB

    async def script(taker):
        await may_read.wait()
        while taker.length < size:
            taker.length += len(await taker.receive())
        await taker.send(counted(b"{}"))

    worker = await taking(script)
    async with run_dataplane(config=MODEL.format(worker.url)) as opened, opened.client() as client:
        sent = 0

        async def upload():
            nonlocal sent
            for _ in range(size // MIB):
                await client.stream.send_all(bytes(MIB))
                sent += MIB

        await client.send(head(size, *HINTS))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(upload)
            before = -1
            while sent != before or not sent:
                before = sent
                await trio.sleep(0.2)
            (connection,) = opened.dataplane.loop.tasks
            assert (connection.phase, opened.dataplane.inflight.held_bytes) == ("send", 0)
            assert sent < size
            worker.taker.length = len(worker.taker.body)
            may_read.set()
        assert (await client.answer()).status == 200
        assert opened.last["bytes_in"] == size


async def test_the_memory_for_all_bodies_is_limited():
    text = '[server]\nmax_held_bytes = "3MiB"\n'
    body = json.dumps({"model": "m", "prompt": "x" * 2 * MIB}).encode()
    async with (
        fake_workers(answering(counted(b"{}"))) as (fake,),
        run_dataplane(config=text + MODEL.format(fake.url)) as opened,
        opened.client() as first,
        opened.client() as second,
    ):
        await first.send(head(len(body)), body[:-10])
        with trio.fail_after(PATIENCE_SECS):
            while opened.dataplane.inflight.held_bytes < len(body) - 10:
                await trio.sleep(0.01)
        await second.send(head(len(body)), body[:-10])
        answer = await second.answer()
        assert (answer.status, answer.one("retry-after")) == (503, "1")
        assert b'"reason":"max_held_bytes"' in answer.body
        async with opened.client() as small:  # small bodies still fit
            await small.send(post())
            assert (await small.answer()).status == 200
        await first.send(body[-10:])
        assert (await first.answer()).status == 200
        assert opened.dataplane.inflight.held_bytes == 0
        assert opened.dataplane.admission()["rejected_total"] == 1


async def test_a_large_upload_waits_in_the_queue_without_being_read(taking):
    async def script(taker):
        await whole(taker, 2 * MIB)

    worker = await taking(script)
    text = "[server]\nqueue_size = 1\nqueue_timeout_secs = 0.2\n" + MODEL.format(worker.url)
    text += "disabled = true\n"
    async with run_dataplane(config=text) as opened, opened.client() as client:
        await client.send(head(2 * MIB, *HINTS), bytes(MIB))
        answer = await client.answer()
        assert (answer.status, answer.one("connection")) == (503, "close")
    assert worker.connections == 0


async def test_100_continue_precedes_a_large_body(taking):
    async def script(taker):
        await whole(taker, 2 * MIB)

    worker = await taking(script)
    async with run_dataplane(config=MODEL.format(worker.url)) as opened, opened.client() as client:
        await client.send(head(2 * MIB, *HINTS, "expect: 100-continue"))
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(bytes(2 * MIB))
        assert (await client.answer()).status == 200
    assert re.search(rb"\nexpect:", worker.taker.head) is None


async def test_a_pipelined_request_behind_a_large_body_is_answered(taking):
    async def script(taker):
        body = await taker.until(2 * MIB)
        await taker.send(counted(b"%d" % len(body)))
        await taker.until_left()

    worker = await taking(script)
    async with fake_workers(answering(counted(b"{}"))) as fakes:
        text = MODEL.format(worker.url) + MODEL.format(fakes[0].url).replace('"m"', '"n"')
        async with run_dataplane(config=text) as opened, opened.client() as client:
            await client.send(head(2 * MIB, *HINTS), bytes(2 * MIB), post(b'{"model": "n"}'))
            assert (await client.answer()).body == b"%d" % (2 * MIB)
            assert (await client.answer()).body == b"{}"

"""Calls to /tokenize: few at a time, and not repeated soon after a failure."""

import json

import pytest
import trio

from omni_proxy.dataplane.engine_calls import AT_ONCE
from omni_proxy.routing.kv_events.block_keys import block_keys
from omni_proxy.routing.kv_events.tokenized_texts import TokenizeRequest
from omni_proxy.routing.tree_key import tree_key
from tests.promises.support.dataplane_fixture import run_dataplane
from tests.promises.support.fakes import counted, fake_workers

TEXT = b"t" * 5000


def request(worker, mark=b""):
    text = mark + TEXT
    return TokenizeRequest(worker.url, tree_key(text), len(text), b'{"prompt":"t"}')


async def until(holds):
    with trio.fail_after(30):
        while not holds():  # noqa: ASYNC110 - there is no event to wait for
            await trio.sleep(0.01)


async def test_the_tokens_of_a_text_are_requested_and_stored():
    async def tokenizes(call):
        assert call.line.startswith("POST /tokenize ")
        assert json.loads(call.body) == {"prompt": "t"}
        await call.send(counted(b'{"count":3,"max_model_len":9,"tokens":[5,6,7]}'))

    async with fake_workers(tokenizes) as workers, run_dataplane(*workers) as running:
        texts = running.dataplane.kv_blocks.texts
        texts.enqueue(request(workers[0]))
        await until(lambda: len(texts))
        found = texts.find(tree_key(TEXT), len(TEXT))
        assert list(found.known.blocks(1, 3).each_key()) == block_keys([5, 6, 7], 1)
        await until(lambda: not running.dataplane.tokenize_calls.running)


@pytest.mark.parametrize("body", [b'{"detail":"none"}', b'{"tokens":"5"}', b"{", b'{"tokens":[]}'])
async def test_an_engine_that_fails_to_tokenize_is_not_called_again_soon(body):
    async def refuses(call):
        await call.send(counted(body))

    async with fake_workers(refuses) as workers, run_dataplane(*workers) as running:
        texts = running.dataplane.kv_blocks.texts
        texts.enqueue(request(workers[0]))
        await until(lambda: texts.failed == 1)
        assert not texts.should_tokenize(workers[0].url, 5000, None, running.dataplane.loop.now)
        assert len(texts) == 0
        await until(lambda: not running.dataplane.tokenize_calls.running)


async def test_few_calls_run_at_a_time_and_none_to_removed_workers():
    gate = trio.Event()

    async def waits(call):
        await gate.wait()
        await call.send(counted(b'{"tokens":[1]}'))

    async with fake_workers(waits) as workers, run_dataplane(*workers) as running:
        calls, texts = running.dataplane.tokenize_calls, running.dataplane.kv_blocks.texts
        for mark in (b"a", b"b", b"c"):
            texts.enqueue(request(workers[0], mark))
        texts.enqueue(TokenizeRequest("http://gone", tree_key(TEXT), len(TEXT), b"{}"))
        await until(lambda: len(workers[0].requests) == AT_ONCE)
        calls.start_due()
        assert calls.running == AT_ONCE
        gate.set()
        await until(lambda: len(texts) == 3)
        await until(lambda: not calls.running)

"""Prompts go to the real vLLM engine that has their blocks, as its own count of cached tokens says.

Opt-in as test_real_vllm.py is. The engines get their first prompts directly, so nothing but their
events tells the proxy where a prompt is cached.
"""

import faulthandler
import json
import pydoc_data.topics
import random
from contextlib import asynccontextmanager
from urllib.parse import unquote

import httpx
import pytest
import trio

from tests.ports import free_port
from tests.promises.fleet_program import PROBES, program, put
from tests.promises.vllm_engine import NOT_RUN, PYTHON, START_SECS, Engine, write_model

pytestmark = pytest.mark.skipif(not PYTHON, reason=NOT_RUN)
pytest.importorskip("zmq")

BLOCK = 128  # tokens, of vLLM on a CPU
KNOWN = 5 * BLOCK
VOCABULARY = 2048
CONFIG = """\
[server]
port = 0
{probes}
[routing]
policy = "cache_aware"
[routing.cache_aware]
source = "events"
tokenize = "engine"
"""


def events_words():
    events = {
        "enable_kv_cache_events": True, "publisher": "zmq", "topic": "",
        "endpoint": f"tcp://*:{free_port()}", "replay_endpoint": f"tcp://*:{free_port()}",
    }  # fmt: skip
    more = ["--enable-prompt-tokens-details", "--max-model-len", "2048"]
    return ["--kv-events-config", json.dumps(events), *more]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    faulthandler.cancel_dump_traceback_later()  # it takes a minute until they are up
    folder = tmp_path_factory.mktemp("vllm-events")
    write_model(folder / "model", 0)
    made = [Engine(folder, folder / "model", number, *events_words()) for number in range(2)]
    for engine in made:
        engine.start()
    yield made
    for engine in made:
        engine.kill()


async def post(client, path, body):
    """The worker's URL, if it came through the proxy, and the cached tokens."""
    answer = await client.post(path, json={"model": "tiny", "max_tokens": 2} | body)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"] or {}
    worker = answer.headers.get("x-sglang-omni-worker")
    return worker and unquote(worker), details.get("cached_tokens") or 0


async def complete(client, tokens):
    return await post(client, "/v1/completions", {"prompt": tokens})


async def ask(client, text):
    return await post(client, "/v1/chat/completions", chat(text))


def chat(text):
    return {"messages": [{"role": "user", "content": text}]}


@asynccontextmanager
async def proxy_before(engines, folder):
    """That has found out where the engines publish."""
    file = folder / "omni.toml"
    entries = "".join(
        f'[[workers]]\nurl = "{engine.url}"\nmodel = "tiny"\nkv_events = "auto"\n'
        for engine in engines
    )
    put(file, CONFIG.format(probes=PROBES) + entries)
    with trio.fail_after(2 * START_SECS):
        for engine in engines:
            await engine.up()
    async with program("--config", file) as running:
        await running.until_routable(*engines)
        await running.until(
            "/workers", lambda seen: all("publish" not in w["kv_reason"] for w in seen["workers"])
        )
        yield running


async def test_prompts_go_to_the_engine_that_reports_their_blocks_as_cached(tmp_path, engines):
    chance = random.Random(7)
    prompts = [chance.choices(range(100, VOCABULARY), k=KNOWN) for _ in engines]
    async with proxy_before(engines, tmp_path) as running:
        with trio.fail_after(START_SECS):
            for engine, prompt in zip(engines, prompts, strict=True):
                async with httpx.AsyncClient(
                    base_url=engine.url, timeout=60, verify=False
                ) as client:
                    assert await complete(client, prompt) == (None, 0)
            await running.until(
                "/workers", lambda seen: [w["kv_mode"] for w in seen["workers"]] == ["exact"] * 2
            )
            for _ in range(3):
                for engine, prompt in zip(engines, prompts, strict=True):
                    tail = chance.choices(range(100, VOCABULARY), k=BLOCK)
                    worker, cached = await complete(running.client, [*prompt, *tail])
                    assert worker == engine.url
                    assert cached >= KNOWN
            # A flush through the proxy is known at once: the blocks are nowhere.
            assert (await running.client.post("/flush_cache")).status_code == 200
            _, cached = await complete(running.client, prompts[0])
            assert cached == 0


async def test_a_chat_goes_where_its_blocks_are_by_the_tokens_that_vllm_reports(tmp_path, engines):
    text = pydoc_data.topics.topics["import"][:4400]
    async with proxy_before(engines, tmp_path) as running:
        with trio.fail_after(START_SECS):
            for engine in engines:
                async with httpx.AsyncClient(base_url=engine.url, timeout=60) as client:
                    await client.post("/reset_prefix_cache")
                    await ask(client, "An engine publishes what it has cleared with its next step.")
            await running.until(
                "/workers", lambda seen: [w["kv_mode"] for w in seen["workers"]] == ["exact"] * 2
            )
            url, cached = await ask(running.client, text)
            assert cached == 0
            await running.until(
                "/status", lambda seen: seen["data_plane"]["policy"]["tokenize"]["texts"] == 1
            )
            (first,) = (engine for engine in engines if engine.url == url)
            (other,) = (engine for engine in engines if engine.url != url)
            async with httpx.AsyncClient(base_url=first.url, timeout=60) as client:
                await client.post("/reset_prefix_cache")
                await ask(client, "Nothing is cached here any more.")
            async with httpx.AsyncClient(base_url=other.url, timeout=60) as client:
                assert (await ask(client, text))[1] == 0
            longer = text + " And what is new about it?"
            while await matched_at(running, longer) != {other.url}:
                await trio.sleep(0.05)
            url, cached = await ask(running.client, longer)
            assert (url, cached >= 4 * BLOCK) == (other.url, True)


async def matched_at(running, text):
    answer = await running.client.post("/explain", json=chat(text) | {"model": "tiny"})
    tokens = answer.json()["pick"].get("matched_tokens", {})
    return {url for url, count in tokens.items() if count}

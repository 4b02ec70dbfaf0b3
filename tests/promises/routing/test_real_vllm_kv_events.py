"""Prompts go to the real vLLM engine that has their blocks; the engine counts its cached tokens.

Opt-in, like test_real_vllm.py. The engines get their first prompts directly, so only their events
show the proxy where a prompt is cached.
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
from tests.promises.support.fleet_program import PROBES, program, put
from tests.promises.support.vllm_engine import NOT_RUN, PYTHON, START_SECS, Engine, write_model

pytestmark = pytest.mark.skipif(not PYTHON, reason=NOT_RUN)
pytest.importorskip("zmq")

BLOCK = 128  # tokens in a block of vLLM on a CPU
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


def events_arguments():
    events = {
        "enable_kv_cache_events": True, "publisher": "zmq", "topic": "",
        "endpoint": f"tcp://*:{free_port()}", "replay_endpoint": f"tcp://*:{free_port()}",
    }  # fmt: skip
    arguments = ["--enable-prompt-tokens-details", "--max-model-len", "2048"]
    return ["--kv-events-config", json.dumps(events), *arguments]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    faulthandler.cancel_dump_traceback_later()  # the engines take a minute to start
    folder = tmp_path_factory.mktemp("vllm-events")
    write_model(folder / "model", 0)
    started = [Engine(folder, folder / "model", number, *events_arguments()) for number in range(2)]
    for engine in started:
        engine.start()
    yield started
    for engine in started:
        engine.kill()


async def post(client, path, body):
    """Returns the worker's URL (None without the proxy) and the number of cached tokens."""
    response = await client.post(path, json={"model": "tiny", "max_tokens": 2} | body)
    assert response.status_code == 200, response.text
    details = response.json()["usage"]["prompt_tokens_details"] or {}
    worker = response.headers.get("x-sglang-omni-worker")
    return worker and unquote(worker), details.get("cached_tokens") or 0


async def complete(client, tokens):
    return await post(client, "/v1/completions", {"prompt": tokens})


async def ask(client, text):
    return await post(client, "/v1/chat/completions", chat(text))


def chat(text):
    return {"messages": [{"role": "user", "content": text}]}


@asynccontextmanager
async def proxy_before(engines, folder):
    """Runs the proxy, and waits until it has found where the engines publish."""
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
            "/workers",
            lambda listed: all("publish" not in w["kv_reason"] for w in listed["workers"]),
        )
        yield running


async def test_prompts_go_to_the_engine_that_reports_their_blocks_as_cached(tmp_path, engines):
    generator = random.Random(7)
    prompts = [generator.choices(range(100, VOCABULARY), k=KNOWN) for _ in engines]
    async with proxy_before(engines, tmp_path) as running:
        with trio.fail_after(START_SECS):
            for engine, prompt in zip(engines, prompts, strict=True):
                async with httpx.AsyncClient(
                    base_url=engine.url, timeout=60, verify=False
                ) as client:
                    assert await complete(client, prompt) == (None, 0)
            await running.until(
                "/workers",
                lambda listed: [w["kv_mode"] for w in listed["workers"]] == ["exact"] * 2,
            )
            for _ in range(3):
                for engine, prompt in zip(engines, prompts, strict=True):
                    tail = generator.choices(range(100, VOCABULARY), k=BLOCK)
                    worker, cached = await complete(running.client, [*prompt, *tail])
                    assert worker == engine.url
                    assert cached >= KNOWN
            # A flush through the proxy clears its record of the blocks at once.
            assert (await running.client.post("/flush_cache")).status_code == 200
            _, cached = await complete(running.client, prompts[0])
            assert cached == 0


async def test_a_chat_goes_to_its_blocks_by_the_tokens_that_vllm_computes(tmp_path, engines):
    text = pydoc_data.topics.topics["import"][:4400]
    async with proxy_before(engines, tmp_path) as running:
        with trio.fail_after(START_SECS):
            for engine in engines:
                async with httpx.AsyncClient(base_url=engine.url, timeout=60) as client:
                    await client.post("/reset_prefix_cache")
                    await ask(client, "An engine publishes what it has cleared with its next step.")
            await running.until(
                "/workers",
                lambda listed: [w["kv_mode"] for w in listed["workers"]] == ["exact"] * 2,
            )
            url, cached = await ask(running.client, text)
            assert cached == 0
            await running.until(
                "/status", lambda status: status["data_plane"]["policy"]["tokenize"]["texts"] == 1
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
    response = await running.client.post("/explain", json=chat(text) | {"model": "tiny"})
    tokens = response.json()["pick"].get("matched_tokens", {})
    return {url for url, count in tokens.items() if count}

"""Prompts go to the real vLLM engine that has their blocks, as its own count of cached tokens says.

Opt-in as test_real_vllm.py is. The engines get their first prompts directly, so nothing but their
events tells the proxy where a prompt is cached.
"""

import faulthandler
import json
import random

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
"""


def events_words():
    events = {
        "enable_kv_cache_events": True, "publisher": "zmq", "topic": "",
        "endpoint": f"tcp://*:{free_port()}", "replay_endpoint": f"tcp://*:{free_port()}",
    }  # fmt: skip
    return ["--kv-events-config", json.dumps(events), "--enable-prompt-tokens-details"]


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


async def complete(client, tokens):
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 2, "temperature": 0}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"] or {}
    return answer.headers.get("x-sglang-omni-worker"), details.get("cached_tokens") or 0


async def test_prompts_go_to_the_engine_that_reports_their_blocks_as_cached(tmp_path, engines):
    chance = random.Random(7)
    prompts = [chance.choices(range(100, VOCABULARY), k=KNOWN) for _ in engines]
    file = tmp_path / "omni.toml"
    entries = "".join(
        f'[[workers]]\nurl = "{engine.url}"\nkv_events = "auto"\n' for engine in engines
    )
    put(file, CONFIG.format(probes=PROBES) + entries)
    with trio.fail_after(2 * START_SECS):
        for engine in engines:
            await engine.up()
        async with program("--config", file) as running:
            await running.until_routable(*engines)
            await running.until(
                "/workers",
                lambda seen: all("publish" not in w["kv_reason"] for w in seen["workers"]),
            )
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
                    assert worker.replace("%3A", ":").replace("%2F", "/") == engine.url
                    assert cached >= KNOWN
            # A flush through the proxy is known at once: the blocks are nowhere.
            assert (await running.client.post("/flush_cache")).status_code == 200
            _, cached = await complete(running.client, prompts[0])
            assert cached == 0

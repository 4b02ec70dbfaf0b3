"""Texts go to workers with their blocks, by the tokens that a real replica computes."""

import httpx
import pytest
import trio

from tests.ports import free_run
from tests.promises.support.fleet_program import PATIENCE_SECS, PROBES, program, put

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
pytest.importorskip("zmq")

BEGINNING = "The guard of the lighthouse counts the ships that pass, and writes each one down. "
TEXT = BEGINNING * 60


def config(base_port):
    command = (
        '["omni-proxy", "replica", "--model", "tiny", "--port", "{port}", '
        f'"--kv-events", "tcp://*:{{{base_port + 2}+index}}", "--kv-replay", "tcp://*:0"]'
    )
    return (
        f'[server]\nport = 0\n{PROBES}[routing]\npolicy = "cache_aware"\n'
        '[routing.cache_aware]\nsource = "events"\ntokenize = "engine"\n'
        f'[[launch]]\nbase_port = {base_port}\nreplicas = 2\nkv_events = "auto"\n'
        f"command = {command}\n"
    )


def chat(text):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


def cached_tokens(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def until_tokenized(running, texts):
    def has_tokenized(status):
        return status["data_plane"]["policy"]["tokenize"]["texts"] == texts

    return (await running.until("/status", has_tokenized))["data_plane"]["policy"]["tokenize"]


async def until_cached_at(running, body, url):
    """Waits until the events have shown that only this worker has the text."""
    with trio.fail_after(PATIENCE_SECS):
        while True:
            response = await running.client.post("/explain", json=body)
            tokens = response.json()["pick"].get("matched_tokens", {})
            if {worker for worker, count in tokens.items() if count} == {url}:
                return
            await trio.sleep(0.02)


async def test_a_text_goes_to_its_present_blocks_and_not_where_it_was_sent_before(tmp_path):
    put(tmp_path / "proxy.toml", config(free_run(4)))
    async with program("--config", tmp_path / "proxy.toml") as running:
        listed = await running.until(
            "/workers",
            lambda body: [worker["kv_mode"] for worker in body["workers"]] == ["exact"] * 2,
        )
        urls = {worker["url"] for worker in listed["workers"]}
        response = await running.client.post("/v1/chat/completions", json=chat(TEXT))
        assert cached_tokens(response) == 0
        first = response.headers["x-sglang-omni-worker"].replace("%3A", ":").replace("%2F", "/")
        (other,) = urls - {first}
        assert (await until_tokenized(running, 1))["calls"] == 1
        # These requests bypass the proxy, which learns of them only from events.
        async with httpx.AsyncClient(timeout=PATIENCE_SECS, trust_env=False) as client:
            assert (await client.post(f"{first}/flush_cache")).status_code == 200
            assert (
                cached_tokens(await client.post(f"{other}/v1/chat/completions", json=chat(TEXT)))
                == 0
            )
        longer = chat(TEXT + "And the last one of them?")
        await until_cached_at(running, longer, other)
        response = await running.client.post("/v1/chat/completions", json=longer)
        assert response.headers["x-sglang-omni-worker"].endswith(other.rpartition(":")[2])
        assert cached_tokens(response) > 100
        assert (await until_tokenized(running, 1))["used"] == 1

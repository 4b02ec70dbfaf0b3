"""Callers' keys against the real program: limits hold over its two processes together."""

import json
from collections import Counter
from hashlib import sha256

import httpx
import pytest
import trio

from tests.promises.support.fleet_program import chat, put, toml
from tests.promises.support.processes_fixture import run_processes

pytestmark = pytest.mark.usefixtures("soon")
CHAT = "/v1/chat/completions"
CLIENTS = 64
KEYS = """
[[keys]]
name = "narrow"
key_env = "NARROW_KEY"
max_inflight = 5
[[keys]]
name = "rated"
key_file = "{file}"
requests_per_minute = {rate}
[[keys]]
name = "open"
key_sha256 = "{digest}"
"""


def config(running, folder, rate=20):
    digest = sha256(b"open-key").hexdigest()
    keys = KEYS.format(file=folder / "rated", rate=rate, digest=digest)
    return toml(running.fleet, more=f"processes = 2\n{keys}")


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


async def post(running, key, **more):
    """Use a new connection for each request, so that the kernel chooses the process."""
    async with httpx.AsyncClient(
        base_url=running.client.base_url, trust_env=False, verify=False
    ) as client:
        return await client.post(CHAT, json=chat(**more), headers=bearer(key), timeout=30)


async def check_the_in_flight_limit(running):
    """Send all at once; the worker holds what it gets until the others are refused."""
    worker, statuses, refused = running.fleet[0], Counter(), trio.Event()
    worker.gate = trio.Event()
    before = worker.requests

    async def one():
        answer = await post(running, "narrow-key")
        statuses[answer.status_code] += 1
        if answer.status_code == 429:
            assert answer.headers["retry-after"] == "1"
        if statuses[429] == CLIENTS - 5:
            refused.set()

    async with trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
            nursery.start_soon(one)
        await refused.wait()
        assert worker.requests - before <= 5
        worker.gate.set()
    assert statuses == {200: 5, 429: CLIENTS - 5}


async def check_that_the_processes_share_the_rate(running):
    answers = [await post(running, "rated-key") for _ in range(30)]
    assert Counter(answer.status_code for answer in answers) == {200: 20, 429: 10}
    remaining = [int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers]
    assert remaining == [*range(19, -1, -1), *[0] * 10]
    assert 30 <= int(answers[-1].headers["retry-after"]) <= 61


async def check_that_a_reload_keeps_the_counts(running, folder):
    put(running.file, config(running, folder, rate=25))
    assert (await running.client.post("/reload")).status_code == 200
    statuses = Counter([(await post(running, "rated-key")).status_code for _ in range(10)])
    assert statuses == {200: 5, 429: 5}


async def check_that_a_key_in_a_file_can_be_replaced(running, folder):
    assert (await post(running, "next-key")).status_code == 401
    (folder / "rated").write_text("next-key\n")
    with trio.fail_after(20):
        while (await post(running, "next-key")).status_code == 401:
            await trio.sleep(0.05)
    assert (await post(running, "next-key")).status_code == 429  # the same caller
    assert (await post(running, "rated-key")).status_code == 401


async def check_that_usage_names_callers_and_keys_are_shown_nowhere(running):
    def all_counted(body):
        usage = {key["name"]: key for key in body["keys"]}
        return usage["rated"]["requests"] == 25 and not usage["narrow"]["in_flight"]

    body = await running.until("/keys", all_counted)
    metrics = (await running.client.get("/metrics")).text
    assert 'omni_proxy_key_requests_total{key="rated"} 25' in metrics
    shown = [json.dumps(body), metrics, (await running.client.get("/config")).text, running.log]
    shown.append((await running.client.get("/status")).text)
    for secret in ("open-key", "narrow-key", "rated-key", "next-key"):
        assert not [text for text in shown if secret in text]
        assert not [text for text in shown if sha256(secret.encode()).hexdigest() in text]


async def test_limits_of_keys_hold_over_two_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("NARROW_KEY", "narrow-key")
    (tmp_path / "rated").write_text("rated-key\n")
    async with run_processes(tmp_path, "a") as running:
        put(running.file, config(running, tmp_path))
        assert (await running.client.post("/reload")).status_code == 200
        assert (await post(running, "unknown-key")).status_code == 401
        assert (await post(running, "open-key")).status_code == 200
        await check_the_in_flight_limit(running)
        await check_that_the_processes_share_the_rate(running)
        await check_that_a_reload_keeps_the_counts(running, tmp_path)
        await check_that_a_key_in_a_file_can_be_replaced(running, tmp_path)
        await check_that_usage_names_callers_and_keys_are_shown_nowhere(running)

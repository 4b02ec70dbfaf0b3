"""Callers' keys before the real program, with two processes: limits hold over both of them."""

import json
from collections import Counter
from hashlib import sha256

import httpx
import pytest
import trio

from tests.promises.fleet_program import chat, put, toml
from tests.promises.processes_fixture import run_processes

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
    """On a connection of its own, so that the kernel chooses the process."""
    async with httpx.AsyncClient(
        base_url=running.client.base_url, trust_env=False, verify=False
    ) as client:
        return await client.post(CHAT, json=chat(**more), headers=bearer(key), timeout=30)


async def never_more_in_flight_than_allowed(running):
    """All at once; the worker keeps those that it has got until the others were refused."""
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


async def the_rate_is_one_for_both(running):
    answers = [await post(running, "rated-key") for _ in range(30)]
    assert Counter(each.status_code for each in answers) == {200: 20, 429: 10}
    left = [int(each.headers["x-ratelimit-remaining-requests"]) for each in answers]
    assert left == [*range(19, -1, -1), *[0] * 10]
    assert 30 <= int(answers[-1].headers["retry-after"]) <= 61


async def a_reload_keeps_what_was_counted(running, folder):
    put(running.file, config(running, folder, rate=25))
    assert (await running.client.post("/reload")).status_code == 200
    statuses = Counter([(await post(running, "rated-key")).status_code for _ in range(10)])
    assert statuses == {200: 5, 429: 5}


async def a_key_in_a_file_may_be_replaced(running, folder):
    assert (await post(running, "next-key")).status_code == 401
    (folder / "rated").write_text("next-key\n")
    with trio.fail_after(20):
        while (await post(running, "next-key")).status_code == 401:
            await trio.sleep(0.05)
    assert (await post(running, "next-key")).status_code == 429  # the same caller
    assert (await post(running, "rated-key")).status_code == 401


async def usage_names_callers_and_no_key_is_anywhere(running):
    def all_reported(reported):
        usage = {each["name"]: each for each in reported["keys"]}
        return usage["rated"]["requests"] == 25 and not usage["narrow"]["in_flight"]

    body = await running.until("/keys", all_reported)
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
        assert (await post(running, "nobody")).status_code == 401
        assert (await post(running, "open-key")).status_code == 200
        await never_more_in_flight_than_allowed(running)
        await the_rate_is_one_for_both(running)
        await a_reload_keeps_what_was_counted(running, tmp_path)
        await a_key_in_a_file_may_be_replaced(running, tmp_path)
        await usage_names_callers_and_no_key_is_anywhere(running)

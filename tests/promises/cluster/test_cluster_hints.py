"""Proxies of a cluster send equal prompts, and requests of one session, to the same worker."""

import pytest
import trio

from tests.promises.support.cluster_programs import cluster
from tests.promises.support.fleet_program import chat
from tests.redis_server import needs_store

pytestmark = needs_store

PROMPTS = [f"{number} " * 400 for number in range(8)]
SESSIONS = [f"secret-{number}" for number in range(8)]
ROUTING = "policy = 'cache_aware'\nsticky_sessions = true"


async def worker_of(running, text, session=""):
    headers = {"x-session-id": session} if session else {}
    body = chat(text)
    reply = await running.client.post("/v1/chat/completions", json=body, headers=headers)
    return reply.json()["worker"]


async def until_hints(running, *, prefixes=0, sessions=0):
    def complete(reply):
        hints = reply["cluster"]["hints"]
        return hints["prefixes"] >= prefixes and hints["sessions"] >= sessions

    await running.until("/status", complete)


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_prompt_and_a_session_go_to_the_same_worker_through_each_proxy(tmp_path, processes):
    more = f"processes = {processes}"
    names = ("a", "b", "c", "d")
    async with cluster(tmp_path, more=more, names=names, routing=ROUTING) as (_, _, proxies):
        first, second = proxies
        by_prompt = {text: await worker_of(first, text) for text in PROMPTS}
        by_session = {session: await worker_of(first, session, session) for session in SESSIONS}
        await until_hints(second, prefixes=4 * len(PROMPTS), sessions=len(SESSIONS))
        explained = await second.client.post("/explain", json=chat(PROMPTS[0]))
        assert "as another proxy has published" in explained.json()["pick"]["reason"]
        assert {text: await worker_of(second, text + "and more") for text in PROMPTS} == by_prompt
        assert {
            session: await worker_of(second, "something else", session) for session in SESSIONS
        } == by_session


async def test_a_session_finished_at_one_proxy_is_finished_at_all(tmp_path):
    async with cluster(tmp_path, routing=ROUTING) as (_, _, (first, second)):
        await worker_of(first, "hi", SESSIONS[0])
        await until_session(second, "its session stays there")
        finished = await second.client.post(f"/finish_session?session_id={SESSIONS[0]}")
        assert finished.status_code == 200
        await until_session(first, "a new session")


async def until_session(running, reason):
    """Wait until POST /explain names this reason."""
    headers = {"x-session-id": SESSIONS[0]}
    while True:
        reply = await running.client.post("/explain", json=chat("hi"), headers=headers)
        if reason in reply.json()["pick"]["reason"]:
            return
        await trio.sleep(0.02)

"""What waiting requests hold is at most four times their bytes, and never more than the bound."""

import json
import re
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.example_counts import thorough
from tests.promises.clients import client_of, post
from tests.promises.fakes import fake_workers
from tests.promises.fleet_program import program

MIB = 1024 * 1024
TIMES = 4
# Of a megabyte each: what is not counted would be more than the allowed bytes of a few.
MANY = 40 if thorough() else 12
MANY_SMALL = 1000 if thorough() else 400
AT_ONCE_BYTES = MIB // 4  # the program reads what has come in one turn, which must be no stall
# For buffers that are used again, and for what an allocator keeps of bodies while they come.
ALLOWED_BYTES = 24 * MIB
CONNECTION_BYTES = 16 * 1024  # with its exchange and the connection to the worker
PATIENCE_SECS = 60
EMPTY = b'{"messages":[' + b"{}," * 330_000 + b"{}]}"
LISTS = b'{"messages":[' + b"[]," * 330_000 + b"[]]}"
NOT_QUITE_JSON = b'{"messages":[' + b"[]," * 330_000 + b"NaN]}"
PARTS = b'{"messages":[{"content":[' + b'{"type":"text"},' * 60_000 + b"{}]}]}"
WIDE = json.dumps({"model": "m", "request_id": "x" * 900_000 + "😀"}, ensure_ascii=False).encode()
NAMED = json.dumps({"model": "x" * 900_000 + "😀"}, ensure_ascii=False).encode()
SMALL = b'{"messages":[' + b"[]," * 4_990 + b"[]]}"  # comes along with its head
LARGE = b'{"messages":[' + b"[]," * 1_000_000 + b"[]]}"
TYPED = b'{"model":[' + b"[]," * 330_000 + b"[]]}"


def resident_bytes(pid: int) -> int:
    reported = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", reported)
    assert found
    return int(found[1]) * 1024


@asynccontextmanager
async def proxy(tmp_path, *, more="", routing="", workers=True):
    async def answer_nothing(call):
        await call.until_left()

    async with fake_workers(answer_nothing) as (made,):
        file = tmp_path / "proxy.toml"
        entry = f'[[workers]]\nurl = "{made.url}"\n' if workers else ""
        file.write_text(f"[server]\nport = 0\n{more}\n[routing]\n{routing}\n{entry}")
        async with program("--config", file) as running:
            if workers:
                await running.until("/workers", lambda body: body["workers"][0]["routable"])
            yield running


async def sent(stack, running, count, request):
    """So many clients that wait for their answers."""
    address = f"{running.client.base_url.host}:{running.client.base_url.port}"
    clients = []
    for _ in range(count):
        client = await stack.enter_async_context(client_of(address))
        await client.send(request)
        clients.append(client)
    return clients


async def until_held(running, wanted):
    await running.until("/status", lambda body: body["data_plane"]["held_bytes"] >= wanted)


async def growth(running, count, request):
    """Of resident memory with so many requests that wait."""
    before = resident_bytes(running.process.pid)
    group = max(AT_ONCE_BYTES // len(request), 1)
    async with AsyncExitStack() as stack:
        for begin in range(0, count, group):
            end = min(begin + group, count)
            await sent(stack, running, end - begin, request)
            await until_held(running, end * (len(request) - 400))
        grown = resident_bytes(running.process.pid) - before
    return grown


async def check(running, count, body):
    request = post(body)
    grown = await growth(running, count, request)
    allowed = TIMES * count * len(request) + ALLOWED_BYTES + count * CONNECTION_BYTES
    assert grown <= allowed, f"{grown / (count * len(request)):.1f} bytes for each byte"
    await running.until("/status", lambda body: body["data_plane"]["held_bytes"] == 0)


@pytest.mark.parametrize(
    ("count", "body"),
    [(MANY, EMPTY), (MANY, LISTS), (MANY, NOT_QUITE_JSON), (MANY, PARTS), (MANY, WIDE), (MANY, NAMED),
     (MANY_SMALL, SMALL), (20 if thorough() else 6, LARGE), (MANY, TYPED)],
    ids=["objects", "lists", "NaN", "parts", "wide id", "wide name", "small", "large", "odd model"],
)  # fmt: skip
async def test_a_request_that_waits_for_its_worker_holds_its_bytes_and_not_their_values(
    tmp_path, count, body
):
    async with proxy(tmp_path, routing='policy = "cache_aware"') as running:
        await check(running, count, body)


@pytest.mark.parametrize(
    ("count", "body"), [(MANY, EMPTY), (MANY_SMALL, SMALL)], ids=["objects", "small"]
)
async def test_a_request_that_waits_in_the_queue_does_so_too(tmp_path, count, body):
    more = "queue_size = 2000\nqueue_timeout_secs = 100"
    async with proxy(tmp_path, more=more, workers=False) as running:
        await check(running, count, body)


async def test_small_bodies_count_and_past_the_bound_there_is_a_503(tmp_path):
    request = post(SMALL)
    async with (
        proxy(tmp_path, more='max_held_bytes = "1MiB"') as running,
        AsyncExitStack() as stack,
    ):
        fit = MIB // len(request)
        await sent(stack, running, fit, request)
        await running.until("/status", lambda body: body["data_plane"]["inflight"] == fit)
        (late,) = await sent(stack, running, 1, request)
        with trio.fail_after(PATIENCE_SECS):
            answer = await late.answer()
        assert (answer.status, answer.one("retry-after")) == (503, "1")
        assert b'"reason":"max_held_bytes"' in answer.body
        assert (await running.get_json("/live"))["status"] == "alive"
        body = await running.get_json("/status")
        assert body["data_plane"]["held_bytes"] <= MIB


async def test_bytes_that_arrive_one_at_a_time_count_as_held(tmp_path):
    body = b'{"prompt":"' + b"x" * 20_000 + b'"}'
    request = post(body)
    head = request[: -len(body)]
    async with proxy(tmp_path) as running, AsyncExitStack() as stack:
        before = resident_bytes(running.process.pid)
        clients = await sent(stack, running, 4, head)
        with trio.fail_after(PATIENCE_SECS):  # one for all: for each byte it would cost as much
            for at in range(len(body) - 1):
                for client in clients:
                    await client.stream.send_all(body[at : at + 1])
        wanted = len(clients) * (len(body) - 1)
        await until_held(running, wanted)
        grown = resident_bytes(running.process.pid) - before
    assert grown <= TIMES * wanted + 4 * MIB, grown / wanted

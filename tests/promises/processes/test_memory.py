"""Each waiting request uses at most four times its size in bytes of memory."""

import json
import re
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.example_counts import thorough
from tests.promises.support.clients import client_of, post
from tests.promises.support.fakes import fake_workers
from tests.promises.support.fleet_program import program

MIB = 1024 * 1024
TIMES = 4
# Each request is a megabyte: memory that the proxy does not count exceeds ALLOWED_BYTES after a few.
MANY = 40 if thorough() else 12
MANY_SMALL = 1000 if thorough() else 400
AT_ONCE_BYTES = MIB // 4  # read in one iteration of the event loop, which must not stall
# For buffers that are reused, and for the allocator's overhead while bodies are received.
ALLOWED_BYTES = 24 * MIB
CONNECTION_BYTES = 16 * 1024  # including its exchange and the upstream connection
PATIENCE_SECS = 60
EMPTY = b'{"messages":[' + b"{}," * 330_000 + b"{}]}"
LISTS = b'{"messages":[' + b"[]," * 330_000 + b"[]]}"
NOT_QUITE_JSON = b'{"messages":[' + b"[]," * 330_000 + b"NaN]}"
PARTS = b'{"messages":[{"content":[' + b'{"type":"text"},' * 60_000 + b"{}]}]}"
WIDE = json.dumps({"model": "m", "request_id": "x" * 900_000 + "😀"}, ensure_ascii=False).encode()
NAMED = json.dumps({"model": "x" * 900_000 + "😀"}, ensure_ascii=False).encode()
SMALL = b'{"messages":[' + b"[]," * 4_990 + b"[]]}"  # received in one read with its head
LARGE = b'{"messages":[' + b"[]," * 1_000_000 + b"[]]}"
TYPED = b'{"model":[' + b"[]," * 330_000 + b"[]]}"


def resident_bytes(pid: int) -> int:
    process_status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"VmRSS:\s+(\d+) kB", process_status)
    assert match
    return int(match[1]) * 1024


@asynccontextmanager
async def proxy(tmp_path, *, server_options="", routing="", workers=True):
    async def answer_nothing(call):
        await call.until_left()

    async with fake_workers(answer_nothing) as (worker,):
        file = tmp_path / "proxy.toml"
        entry = f'[[workers]]\nurl = "{worker.url}"\n' if workers else ""
        file.write_text(f"[server]\nport = 0\n{server_options}\n[routing]\n{routing}\n{entry}")
        async with program("--config", file) as running:
            if workers:
                await running.until("/workers", lambda body: body["workers"][0]["routable"])
            yield running


async def send_from_clients(stack, running, count, request):
    """Sends the request from `count` clients, and returns the clients."""
    address = f"{running.client.base_url.host}:{running.client.base_url.port}"
    clients = []
    for _ in range(count):
        client = await stack.enter_async_context(client_of(address))
        await client.send(request)
        clients.append(client)
    return clients


async def until_held(running, held_bytes):
    await running.until("/status", lambda body: body["data_plane"]["held_bytes"] >= held_bytes)


async def growth(running, count, request):
    """Returns how much resident memory grows while `count` requests wait."""
    before = resident_bytes(running.process.pid)
    group = max(AT_ONCE_BYTES // len(request), 1)
    async with AsyncExitStack() as stack:
        for begin in range(0, count, group):
            end = min(begin + group, count)
            await send_from_clients(stack, running, end - begin, request)
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
async def test_a_request_waiting_for_its_worker_holds_its_bytes_and_no_parsed_values(
    tmp_path, count, body
):
    async with proxy(tmp_path, routing='policy = "cache_aware"') as running:
        await check(running, count, body)


@pytest.mark.parametrize(
    ("count", "body"), [(MANY, EMPTY), (MANY_SMALL, SMALL)], ids=["objects", "small"]
)
async def test_a_queued_request_holds_its_bytes_and_no_parsed_values(tmp_path, count, body):
    server_options = "queue_size = 2000\nqueue_timeout_secs = 100"
    async with proxy(tmp_path, server_options=server_options, workers=False) as running:
        await check(running, count, body)


async def test_small_bodies_count_as_held_and_a_request_over_the_limit_gets_503(tmp_path):
    request = post(SMALL)
    async with (
        proxy(tmp_path, server_options='max_held_bytes = "1MiB"') as running,
        AsyncExitStack() as stack,
    ):
        fit = MIB // len(request)
        await send_from_clients(stack, running, fit, request)
        await running.until("/status", lambda body: body["data_plane"]["inflight"] == fit)
        (last,) = await send_from_clients(stack, running, 1, request)
        with trio.fail_after(PATIENCE_SECS):
            response = await last.answer()
        assert (response.status, response.one("retry-after")) == (503, "1")
        assert b'"reason":"max_held_bytes"' in response.body
        assert (await running.get_json("/live"))["status"] == "alive"
        body = await running.get_json("/status")
        assert body["data_plane"]["held_bytes"] <= MIB


async def test_bytes_that_arrive_one_at_a_time_count_as_held(tmp_path):
    body = b'{"prompt":"' + b"x" * 20_000 + b'"}'
    request = post(body)
    head = request[: -len(body)]
    async with proxy(tmp_path) as running, AsyncExitStack() as stack:
        before = resident_bytes(running.process.pid)
        clients = await send_from_clients(stack, running, 4, head)
        # One timeout for all bytes, because one for each would be slow.
        with trio.fail_after(PATIENCE_SECS):
            for position in range(len(body) - 1):
                for client in clients:
                    await client.stream.send_all(body[position : position + 1])
        sent_bytes = len(clients) * (len(body) - 1)
        await until_held(running, sent_bytes)
        grown = resident_bytes(running.process.pid) - before
    assert grown <= TIMES * sent_bytes + 4 * MIB, grown / sent_bytes

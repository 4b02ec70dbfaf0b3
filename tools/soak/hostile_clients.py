"""The hostile clients: each repeats one thing that a broken or hostile client may do.

Their answers are ignored, with one exception: if a request that must be refused is not, it counts
as a breach. The load is bounded: each client does one thing at a time, with a pause after it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from tools.soak.wire import Broken, Reader, asked

TIMEOUT_SECS: Final = 10.0
PAUSE_SECS: Final = 0.5
MIB: Final = 1024 * 1024
CHAT: Final = "/v1/chat/completions"
REFUSED: Final = (400, 401, 403, 404, 405, 409, 415, 421)


@dataclass(frozen=True, slots=True)
class Request:
    """A request; an empty `host` means the proxy's address."""

    method: str
    target: str
    body: bytes = b""
    fields: dict[str, str] = field(default_factory=dict)
    host: str = ""


class Attack:
    """The proxy's port, and the requests that it should have refused but did not."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.breaches: list[str] = []
        self.rounds = 0

    async def run(self, act: Act, stop: trio.Event) -> None:
        while not stop.is_set():
            try:
                with trio.move_on_after(TIMEOUT_SECS):
                    await act(self)
            except* (Broken, OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the proxy may close the connection
            self.rounds += 1
            with trio.move_on_after(PAUSE_SECS):
                await stop.wait()

    async def status(self, request: Request) -> int:
        """The status of one request on its own connection; 0 if the connection was cut."""
        host = request.host or f"127.0.0.1:{self.port}"
        sent = asked(request.method, request.target, host, request.body, request.fields)
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        async with stream:
            await stream.send_all(sent)
            answer = await Reader(stream).message(answer=True)
        return answer.status if answer else 0

    async def refused(self, what: str, request: Request) -> None:
        status = await self.status(request)
        if status not in (0, *REFUSED):
            named = f"{request.method} {request.target}"
            self.breaches.append(f"{what}: {named} was answered {status}")


Act = Callable[[Attack], Awaitable[None]]
_PLAIN = {"content-type": "text/plain;charset=UTF-8"}
_WORKER = b'{"url": "http://127.0.0.1:9"}'


async def cross_site(attack: Attack) -> None:
    for origin in ("http://evil.example", "null"):
        fields = {"origin": origin, **_PLAIN}
        request = Request("POST", "/workers", _WORKER, fields)
        await attack.refused("a page of another site", request)
    page = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    release = "/v1/rl/engine/release_memory_occupation?selector=x!%3Dy"
    for target in ("/flush_cache", release):
        request = Request("GET", target, fields=page)
        await attack.refused("an image of another site", request)


async def rebinding(attack: Attack) -> None:
    host = f"evil.example:{attack.port}"
    await attack.refused("a rebound name", Request("GET", "/config", host=host))
    await attack.refused("a rebound name", Request("POST", "/workers", _WORKER, host=host))


async def own_address(attack: Attack) -> None:
    body = json.dumps({"url": f"http://127.0.0.1:{attack.port}"}).encode()
    await attack.refused("the proxy as its own worker", Request("POST", "/workers", body))


async def many_objects(attack: Attack) -> None:
    """Bodies that take 24 times their size when decoded, for workers of which some never answer."""
    body = b'{"model": "hostile", "messages": [' + b"{}," * (MIB // 3) + b"{}]}"
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(attack.status, Request("POST", CHAT, body))


async def large_body(attack: Attack) -> None:
    """A body whose model, which routing needs, comes at its end."""
    body = b'{"prompt": "' + b"x" * (16 * MIB) + b'", "model": "hostile"}'
    await attack.status(Request("POST", "/v1/completions", body))


async def not_a_number(attack: Attack) -> None:
    body = b'{"x": NaN, "model": "hostile", "y": [' + b"[]," * (MIB // 4) + b"[]]}"
    await attack.status(Request("POST", CHAT, body))


async def lists(attack: Attack) -> None:
    for target in (
        "/v1/models",
        "/get_loads",
        "/engine_metrics",
        "/server_info",
        "/get_model_info",
    ):
        await attack.status(Request("GET", target))


async def hostile_workers(attack: Attack) -> None:
    for streamed in (True, False):
        body = json.dumps({"model": "hostile", "stream": streamed, "messages": []}).encode()
        await attack.status(Request("POST", CHAT, body))


async def slow_head(attack: Attack) -> None:
    stream = await trio.open_tcp_stream("127.0.0.1", attack.port)
    async with stream:
        for byte in b"POST /v1/chat/completions HTTP/1.1\r\nx-slow: ":
            await stream.send_all(bytes((byte,)))
            await trio.sleep(0.1)


async def slow_reader(attack: Attack) -> None:
    body = json.dumps({"model": "honest", "stream": True, "messages": []}).encode()
    stream = await trio.open_tcp_stream("127.0.0.1", attack.port)
    async with stream:
        await stream.send_all(asked("POST", CHAT, "127.0.0.1", body))
        await trio.sleep(TIMEOUT_SECS / 2)


async def leaves(attack: Attack) -> None:
    """Disconnects in the middle of an upload, and in the middle of an answer."""
    stream = await trio.open_tcp_stream("127.0.0.1", attack.port)
    async with stream:
        await stream.send_all(asked("POST", CHAT, "127.0.0.1", b"x" * 5000)[:2000])
    body = json.dumps({"model": "honest", "stream": True, "messages": []}).encode()
    stream = await trio.open_tcp_stream("127.0.0.1", attack.port)
    async with stream:
        await stream.send_all(asked("POST", CHAT, "127.0.0.1", body))
        await stream.receive_some(1)


async def garbage(attack: Attack) -> None:
    for junk in (b"\x16\x03\x01\x02\x00" * 50, b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 4000,
                 b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n",
                 b"GET /" + b"a" * 100_000):  # fmt: skip
        stream = await trio.open_tcp_stream("127.0.0.1", attack.port)
        async with stream:
            await stream.send_all(junk)
            await stream.receive_some(1000)


async def unique_fields(attack: Attack) -> None:
    """A header field with a new name in each request: the proxy must not store each of them."""
    stream = await trio.open_tcp_stream("127.0.0.1", attack.port)
    async with stream:
        reader = Reader(stream)
        for number in range(200):
            fields = {f"x-{attack.rounds}-{number}": "1"}
            await stream.send_all(asked("GET", "/live", "127.0.0.1", fields=fields))
            await reader.message(answer=True)


ACTS: Final[tuple[Act, ...]] = (
    cross_site, rebinding, own_address, many_objects, large_body, not_a_number, lists,
    hostile_workers, slow_head, slow_reader, leaves, garbage, unique_fields,
)  # fmt: skip


async def attack_for(port: int, secs: float) -> Attack:
    """Run all attacks concurrently, each repeatedly."""
    attack, stop = Attack(port), trio.Event()
    async with trio.open_nursery() as nursery:
        for act in ACTS:
            nursery.start_soon(attack.run, act, stop)
        await trio.sleep(secs)
        stop.set()
    return attack


def main() -> None:
    """Run in a separate process, so that large bodies don't delay the honest clients."""
    port, secs = int(sys.argv[1]), float(sys.argv[2])
    attack = trio.run(attack_for, port, secs)
    print(json.dumps({"rounds": attack.rounds, "breaches": attack.breaches}))


if __name__ == "__main__":
    main()

"""A cluster of pods for the bench of discovery: its API server, a worker in each pod, and clients.

A separate process, so that only the proxy is measured. Reads the proxy's URL from stdin and writes
JSON lines. Pods have their own loopback addresses and are as large as real ones. They answer 200 to
all requests until the process ends, so only the watch reports a deletion.
"""

from __future__ import annotations

import itertools
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import trio

from omni_proxy.system.fd_limit import raise_fd_limit
from tools.bench.harness.simulated_worker import ANSWER, next_request

PORT = 8000
LATE_SECS = 0.35  # after a deletion, from which on no request should arrive, unless overloaded
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
CHAT = b'{"messages": [{"role": "user", "content": "hi"}]}'
PADDING = [{"manager": "kubelet", "fieldsV1": {f"f:field-{n}": {"f:value": {}}}} for n in range(90)]


class Cluster:
    def __init__(self) -> None:
        self.pods: dict[int, dict[str, Any]] = {}
        self.version = 1
        self.gone_at: dict[int, float] = {}
        self.late = 0  # requests to a pod later than LATE_SECS after its deletion
        self.requests: Counter[int] = Counter()
        self.failed = 0
        self._events: list[tuple[int, bytes, int | None]] = []  # the last item: the deleted pod
        self._more = trio.Event()
        self._pages: dict[str, list[dict[str, Any]]] = {}
        self._names = itertools.count()

    def add(self) -> int:
        number = next(self._names)
        self._change(number, "ADDED", _pod(number))
        return number

    def begin_deletion(self, number: int) -> None:
        pod = _pod(number)
        pod["metadata"]["deletionTimestamp"] = "2026-11-23T10:00:00Z"
        self._change(number, "MODIFIED", pod)

    def delete(self, number: int) -> None:
        self._change(number, "DELETED", _pod(number))
        del self.pods[number]

    def _change(self, number: int, kind: str, pod: dict[str, Any]) -> None:
        self.version += 1
        pod["metadata"]["resourceVersion"] = str(self.version)
        self.pods[number] = pod
        line = json.dumps({"type": kind, "object": pod}).encode() + b"\n"
        gone = number if kind == "MODIFIED" else None
        self._events.append((self.version, b"%x\r\n%b\r\n" % (len(line), line), gone))
        self._more.set()
        self._more = trio.Event()

    async def api(self, stream: trio.SocketStream) -> None:
        found = await next_request(stream, b"")
        if found is None:
            return
        target = urlsplit(found[0].split(b" ")[1].decode())
        query = {key: values[0] for key, values in parse_qs(target.query).items()}
        async with stream:
            try:
                await (self._watch if "watch" in query else self._list)(stream, query)
            except trio.BrokenResourceError:
                return

    async def _list(self, stream: trio.SocketStream, query: dict[str, str]) -> None:
        things = self._pages.pop(query.get("continue", ""), None) or list(self.pods.values())
        limit = int(query.get("limit", "0")) or len(things)
        metadata = {"resourceVersion": str(self.version)}
        if len(things) > limit:
            metadata["continue"] = f"page-{len(self._pages)}-{len(things)}"
            self._pages[metadata["continue"]] = things[limit:]
        body = json.dumps({"metadata": metadata, "items": things[:limit]}).encode()
        await stream.send_all(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)

    async def _watch(self, stream: trio.SocketStream, query: dict[str, str]) -> None:
        position = int(query["resourceVersion"])
        await stream.send_all(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        while True:
            more = self._more
            for version, chunk, gone in self._events:
                if version > position:
                    position = version
                    await stream.send_all(chunk)
                    if gone is not None:
                        self.gone_at.setdefault(gone, time.perf_counter())
            await more.wait()

    async def worker(self, number: int, stream: trio.SocketStream) -> None:
        rest = b""
        async with stream:
            try:
                while (found := await next_request(stream, rest)) is not None:
                    head, _, rest = found
                    if head.startswith(b"POST"):
                        self.requests[number] += 1
                        gone_at = self.gone_at.get(number)
                        if gone_at is not None and time.perf_counter() - gone_at > LATE_SECS:
                            self.late += 1
                    await stream.send_all(ANSWER)
            except trio.BrokenResourceError:
                return

    async def client(self, host: str, port: int) -> None:
        request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n%b"
        stream = await trio.open_tcp_stream(host, port)
        async with stream:
            while True:
                await stream.send_all(request % (len(CHAT), CHAT))
                answer = b""
                while b"\r\n\r\n{}" not in answer:
                    piece = await stream.receive_some(65536)
                    if not piece or (not answer and not piece.startswith(b"HTTP/1.1 200")):
                        self.failed += 1
                        return
                    answer += piece
                await trio.sleep(0.01)


def _pod(number: int) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {
            "name": f"engine-{number}",
            "namespace": "bench",
            "uid": f"uid-{number}",
            "labels": {"app": "sglang"},
            "managedFields": PADDING,
        },
        "spec": {"containers": [{"name": "engine", "ports": [{"containerPort": PORT}]}]},
        "status": {
            "phase": "Running",
            "podIP": _address(number),
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def _address(number: int) -> str:
    return f"127.8.{number // 250}.{number % 250 + 1}"


def _listeners(count: int) -> Iterator[tuple[int, trio.SocketListener]]:
    for number in range(count):
        listening = socket.create_server((_address(number), PORT), backlog=64)
        yield number, trio.SocketListener(trio.socket.from_stdlib_socket(listening))


def _print_json(**words: object) -> None:
    print(json.dumps(words), flush=True)


async def main(pods: int, replaced: int, secs: float, clients: int) -> None:
    raise_fd_limit()
    cluster = Cluster()
    async with trio.open_nursery() as nursery:
        for number, listener in _listeners(pods + replaced):

            async def serve(stream: trio.SocketStream, number: int = number) -> None:
                await cluster.worker(number, stream)

            nursery.start_soon(trio.serve_listeners, serve, [listener])
        (api,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, cluster.api, [api])
        numbers = [cluster.add() for _ in range(pods)]
        _print_json(api=f"http://127.0.0.1:{api.socket.getsockname()[1]}")
        address = json.loads(await trio.to_thread.run_sync(sys.stdin.readline))["proxy"]
        host, _, port = address.rpartition(":")
        for _ in range(clients):
            nursery.start_soon(cluster.client, host, int(port))
        for turn in range(replaced):
            number = numbers[turn * (pods // replaced)]
            cluster.begin_deletion(number)
            cluster.add()
            await trio.sleep(secs / replaced)
            cluster.delete(number)
        await trio.sleep(1.0)
        gone = sum(cluster.requests[number] for number in cluster.gone_at)
        _print_json(
            requests=cluster.requests.total(), to_replaced=gone, late=cluster.late,
            failed=cluster.failed,
            gone_at={_address(number): at for number, at in cluster.gone_at.items()},
        )  # fmt: skip
        await trio.to_thread.run_sync(sys.stdin.readline)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))

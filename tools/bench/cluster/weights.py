"""python -m tools.bench.cluster.weights: updates through one proxy, requests through all of them.

Each worker records the weights with which a request began and ended. If they changed during the
request, the response is mixed. `--alone` runs without [cluster].
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from tools.bench.cluster.fleet import fetch, proxies, store
from tools.bench.harness.simulated_worker import next_request

WORKERS, PROXIES, CLIENTS = 4, 3, 24
REQUEST_SECS, UPDATE_SECS = (0.01, 0.05), 0.03
UPDATE = "/update_weights_from_disk"


@dataclass
class VersionedWorker:
    """An engine whose weights may change while requests run, unless a proxy prevents it.

    An update takes at least until `gate` is set.
    """

    version: str = "v0"
    changes: int = 0
    in_flight: int = 0
    mixed: int = 0
    served: int = 0
    url: str = ""
    gate: trio.Event = field(default_factory=trio.Event)
    random: random.Random = field(default_factory=lambda: random.Random(1))

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        task_status.started()
        await trio.serve_listeners(self._connection, [listener])

    async def _connection(self, stream: trio.SocketStream) -> None:
        rest = b""
        with contextlib.suppress(trio.BrokenResourceError):
            while (found := await next_request(stream, rest)) is not None:
                head, body, rest = found
                path = head.split(b" ", 2)[1].decode()
                reply = json.dumps(await self._reply(path, body)).encode()
                await stream.send_all(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                    b"content-length: %d\r\n\r\n%b" % (len(reply), reply)
                )

    async def _reply(self, path: str, body: bytes) -> dict[str, object]:
        if path == UPDATE:
            self.changes += 1
            await trio.sleep(UPDATE_SECS)
            await self.gate.wait()
            self.changes += 1
            self.version = json.loads(body)["weight_version"]
            return {"success": True, "message": "ok", "weight_version": self.version}
        if path.startswith("/v1/"):
            before = self.changes
            await trio.sleep(self.random.uniform(*REQUEST_SECS))
            self.served += 1
            self.mixed += before != self.changes or bool(before % 2)
            return {"version": self.version}
        return {"status": "ok", "success": True, "weight_version": self.version}


async def post(port: int, path: str, body: dict[str, object]) -> tuple[int, str]:
    """The response's status, and its head and body; 0 if there is none."""
    payload = json.dumps(body).encode()
    try:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
    except OSError:
        return 0, ""
    async with stream:
        text = b""
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(
                b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: "
                b"application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (path.encode(), len(payload), payload)
            )
            while piece := await stream.receive_some(65536):
                text += piece
    return int(text[9:12] or 0), text.decode(errors="replace")


@dataclass
class Traffic:
    """Requests through all proxies.

    `wrong` counts responses whose header has no version or not the worker's; `wrong_heads` has
    them.
    """

    ports: list[int]
    answered: int = 0
    wrong: int = 0
    failures: list[str] = field(default_factory=list)
    wrong_heads: list[str] = field(default_factory=list)

    async def run(self, clients: int) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(clients):
                nursery.start_soon(self._client, self.ports[number % len(self.ports)])

    async def _client(self, port: int) -> None:
        while True:
            status, text = await post(port, "/v1/chat/completions", {"messages": []})
            if status != 200:
                if port in self.ports:
                    self.failures.append(f"{port}: {text[-300:] or 'no response'}")
                await trio.sleep(0.05)
                continue
            self.answered += 1
            head, _, body = text.partition("\r\n\r\n")
            version = json.loads(body)["version"]
            named = f"x-omni-weight-version: {version}\r\n" in head.lower() + "\r\n"
            if not named:
                self.wrong += 1
                lines = [line for line in head.splitlines() if line.startswith("x-omni-weight")]
                self.wrong_heads.append(f"{port}, request {self.answered}, {version}: {lines}")


@asynccontextmanager
async def workers(count: int) -> AsyncIterator[list[VersionedWorker]]:
    made = [VersionedWorker() for _ in range(count)]
    async with trio.open_nursery() as nursery:
        for worker in made:
            worker.gate.set()
            await nursery.start(worker.serve)
        yield made
        nursery.cancel_scope.cancel()


async def measure(arguments: argparse.Namespace, store_url: str) -> None:
    more = (
        f"[weight_sync]\nmode = 'off'\nverify = 'off'\ndrain_secs = 5\n"
        f"[cluster]\nurl = '{store_url}'\nlease_secs = 1\n"
        if arguments.shared
        else "[weight_sync]\nmode = 'off'\nverify = 'off'\ndrain_secs = 5\n"
    )
    async with workers(WORKERS) as fleet:
        urls = [worker.url for worker in fleet]
        async with proxies(PROXIES, urls, more) as found:
            ports = [port for port, _ in found]
            await trio.sleep(1)
            traffic, refused = Traffic(list(ports)), 0
            async with trio.open_nursery() as nursery:
                nursery.start_soon(traffic.run, CLIENTS)
                for number in range(1, arguments.rounds + 1):
                    body: dict[str, object] = {"model_path": "m", "weight_version": f"v{number}"}
                    status, text = await post(ports[number % PROXIES], UPDATE, body)
                    if status != 200:
                        refused += 1
                        print(status, text[-600:])
                    await trio.sleep(0.1)
                nursery.cancel_scope.cancel()
            mixed, served = sum(w.mixed for w in fleet), sum(w.served for w in fleet)
            print(
                f"{arguments.rounds} updates, {refused} refused; {traffic.answered} answered, "
                f"{len(traffic.failures)} failed, {mixed} of {served} mixed, {traffic.wrong} with "
                "the header of another version"
            )
            for line in (*traffic.failures[:3], *traffic.wrong_heads[:3]):
                print(line)
            for port in ports if arguments.status else ():
                text = (await fetch(port, "/status")).partition("\r\n\r\n")[2]
                print(json.dumps(json.loads(text)["cluster"], indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.cluster.weights", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=50, help="updates (50)")
    parser.add_argument("--alone", dest="shared", action="store_false", help="without [cluster]")
    parser.add_argument(
        "--status", action="store_true", help="print the proxies' status at the end"
    )
    arguments = parser.parse_args()
    with store() as store_url:
        trio.run(measure, arguments, store_url)


if __name__ == "__main__":
    main()

"""A data plane in one process with its clients and workers, driven batch by batch.

`python -m tools.bench.data_plane.hand_driven unary|stream ROUNDS`: in each round, one request of
every client is answered, or one event of every stream is relayed. The data plane's work runs inside
`sys.call_tracing`, which `instructions` looks for. Invariant: equal arguments do equal work: the
clock is advanced manually, no trio task runs, and every answer is checked.
"""

import socket
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.config.parse import parse
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.dataplane.downstream.connection import Connection
from omni_proxy.fleet.registry import Fleet
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow

CLIENTS = 8
WORKERS = 2
WARM = 20  # rounds until the heads are cached
TURN_SECS = 0.0001
CONFIG = '[server]\naccess_log = "off"\n[routing]\npolicy = "least_request"\n'
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:30000\r\nAccept: application/json\r\n"
    b"Accept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n"
    b"Content-Type: application/json\r\nUser-Agent: OpenAI/Python 1.99.1\r\n"
    b"X-Stainless-Lang: python\r\n"
    b"X-Request-Id: bench-%08d\r\nContent-Length: %d\r\n\r\n"
)
BODY = b'{"model":"bench","messages":[{"role":"user","content":"%b"}],"max_tokens":64,"stream":%b}'
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
STREAMED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"%08d"}}]}\n\n'
RECEIVE_BYTES = 65536


class DrivenDataPlane:
    """The data plane, its clients (`clients` are their sockets) and its workers.

    Workers listen on Unix sockets in `folder`.
    """

    def __init__(
        self, folder: Path, config: str = CONFIG, workers: int = WORKERS, clients: int = CLIENTS
    ) -> None:
        self._now = 1000.0
        self._numbers = iter(range(1 << 30))
        self._listeners = [self._listener(folder / f"{number}") for number in range(workers)]
        fleet = Fleet()
        now = datetime(2026, 1, 1, tzinfo=UTC)
        fleet.apply([self._spec(listener) for listener in self._listeners], now)
        for worker in fleet.workers:
            for _ in range(fleet.thresholds.rise):
                fleet.observe_probe(
                    worker, status=200, error=None, at=now, epoch=worker.health.epoch
                )
        sources = Sources(lambda bound: 0, lambda: self._now)
        self._dataplane = DataPlane(
            fleet, parse(config), admin_socket=str(folder / "admin"), sources=sources
        )
        recent = RecentWindow()
        self._dataplane.recorders.meters = Metrics(fleet, recent, lambda: self._now)
        self._upstream: list[socket.socket] = []
        self.clients = [self._client() for _ in range(clients)]

    @staticmethod
    def _listener(path: Path) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        return listener

    @staticmethod
    def _spec(listener: socket.socket) -> WorkerSpec:
        return WorkerSpec(
            url=f"unix:{listener.getsockname()}", model="bench", origin="file",
            capabilities=frozenset(CAPABILITIES), disabled=False, weight=1, max_inflight=0,
        )  # fmt: skip

    def _client(self) -> socket.socket:
        near, far = socket.socketpair()
        near.setblocking(False)
        Connection(self._dataplane.services, near, "127.0.0.1").start()
        return far

    def _turn(self, *, counted: bool) -> None:
        """Handle one batch of all pending events."""
        self._now += TURN_SECS
        loop = self._dataplane.loop
        events = loop._epoll.poll(0, 4 * CLIENTS)
        if counted:
            sys.call_tracing(loop._run_batch, (events,))
        else:
            loop._run_batch(events)

    def ask(self, *, stream: bool, counted: bool) -> list[tuple[socket.socket, bytes]]:
        """Send a request from every client; return the workers' connections with their numbers."""
        for client in self.clients:
            number = next(self._numbers)
            body = BODY % (b"a ferry " * (50 + number % 10), b"true" if stream else b"false")
            client.sendall(HEAD % (number, len(body)) + body)
        self._turn(counted=counted)
        self._accept()
        return [(end, self._request_id(end)) for end in self._upstream]

    def _accept(self) -> None:
        """Accept connections until every client's first request has reached a worker."""
        turns = 0
        while len(self._upstream) < CLIENTS:
            turns += 1
            assert turns < 100
            for listener in self._listeners:
                try:
                    self._upstream.append(listener.accept()[0])
                except BlockingIOError:
                    self._turn(counted=False)

    @staticmethod
    def _request_id(end: socket.socket) -> bytes:
        request = end.recv(RECEIVE_BYTES)
        return request.partition(b"X-Request-Id: bench-")[2][:8]

    def serve(self, *, counted: bool) -> None:
        """Serve a small POST of every client."""
        for end, number in self.ask(stream=False, counted=counted):
            body = b'{"id":"%b","choices":[{"message":{"content":"%b"}}]}' % (number, b"tide " * 40)
            end.sendall(ANSWER % (len(body), body))
        self._turn(counted=counted)
        for client in self.clients:
            response = client.recv(RECEIVE_BYTES)
            head, _, body = response.partition(b"\r\n\r\n")
            number = head.partition(b"Request-ID: bench-")[2][:8]
            assert head.startswith(b"HTTP/1.1 200 "), response
            assert body.startswith(b'{"id":"%b"' % number), response

    def begin_streams(self) -> None:
        for end, _ in self.ask(stream=True, counted=False):
            end.sendall(STREAMED)
        self._turn(counted=False)
        for client in self.clients:
            assert client.recv(RECEIVE_BYTES).startswith(b"HTTP/1.1 200 ")

    def relay_event(self, *, counted: bool) -> None:
        """Relay an event of every stream."""
        event = EVENT % next(self._numbers)
        chunk = b"%x\r\n%b\r\n" % (len(event), event)
        for end in self._upstream:
            end.sendall(chunk)
        self._turn(counted=counted)
        for client in self.clients:
            assert client.recv(RECEIVE_BYTES) == chunk

    def close(self) -> None:
        for end in (*self.clients, *self._upstream, *self._listeners):
            end.close()


def drive(mode: str, rounds: int) -> int:
    """Run the rounds; return the number of counted requests or events."""
    with tempfile.TemporaryDirectory(prefix="omni-proxy-bench-") as folder:
        driven = DrivenDataPlane(Path(folder))
        try:
            for _ in range(WARM):
                driven.serve(counted=False)
            if mode == "stream":
                driven.begin_streams()
            step = driven.relay_event if mode == "stream" else driven.serve
            for _ in range(WARM):
                step(counted=False)
            for _ in range(rounds):
                step(counted=True)
        finally:
            driven.close()
    return rounds * CLIENTS


if __name__ == "__main__":
    print(drive(sys.argv[1], int(sys.argv[2])))

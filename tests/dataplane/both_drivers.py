"""A data plane whose clients and workers act step by step, with or without the fast path.

All sockets are Unix sockets: sent bytes can be read at once. So no step has to wait, and the same
steps always have the same results. `World.snapshot` returns all results, with the header fields of
each message sorted.
"""

import contextlib
import itertools
import json
import re
import socket
from dataclasses import replace

import pytest

from omni_proxy.config.parse import parse
from omni_proxy.dataplane.downstream.connection import Connection
from omni_proxy.dataplane.exchange import request_id
from omni_proxy.dataplane.exchange.fast_path_cache import FastPathCache
from omni_proxy.dataplane.loop import event_loop
from omni_proxy.dataplane.loop.task import pause
from omni_proxy.dataplane.status import connection_record
from omni_proxy.fleet.weight_version import UNKNOWN_VERSION
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow
from tests.dataplane.manual_loop import ManualLoop, read_available
from tests.fleet.entries import NOW, entry, heal

HEAD = re.compile(rb"((?:POST |HTTP/1\.1)[^\r\n]*\r\n)(.*?\r\n)\r\n", re.DOTALL)
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
OK_RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


def with_sorted_fields(stream):
    """`stream` with the fields of each message head sorted."""

    def sort_fields(head):
        fields = sorted(head[2].split(b"\r\n")[:-1])
        return head[1] + b"\r\n".join(fields) + b"\r\n\r\n"

    return HEAD.sub(sort_fields, stream)


def chat_request(name=b"content-length", request_id=b"", body=b'{"messages": []}', **more):
    """A chat request; `name` is the spelling of its Content-Length field."""
    length = more.get("length", b"%d" % len(body))
    lines = [b"POST /v1/chat/completions HTTP/1.1", b"host: proxy", b"%b: %b" % (name, length)]
    lines += [b"X-Request-Id: %b" % request_id] if request_id else []
    lines += [b"content-type: application/json", *more.get("fields", ())]
    if more.get("reversed_fields"):
        lines[1:] = reversed(lines[1:])
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def worker_sockets(folder, names="ab"):
    """The listening sockets of the workers, by name. Several worlds can use them in turn."""
    listeners = {}
    for name in names:
        listeners[name] = socket.socket(socket.AF_UNIX)
        listeners[name].bind(str(folder / name))
        listeners[name].listen()
        listeners[name].setblocking(False)
    return listeners


def exchange_once(world, client):
    send_request(world, client)
    world.worker_responds(OK_RESPONSE)


def send_request(world, client, request=None):
    world.client_sends(client, request or chat_request())
    assert world.dataplane.in_flight == 1


def flush_after_each_event(patch):
    """Let an iteration send after each of its events, not only at its end."""
    patch.setattr(event_loop, "MAX_PENDING_WRITERS", 1)
    patch.setattr(event_loop, "CHECK_EVENTS", 1)


class WorkerConnection:
    """The worker's end of a connection.

    `to_send` has the pieces that the worker will send; None stands for closing the connection.
    """

    def __init__(self, name, sock):
        self.name, self.sock = name, sock
        self.received, self.state = b"", "open"
        self.parsed = 0  # the end of the last complete request in `received`
        self.unanswered, self.to_send = 0, []

    def receive(self):
        if self.state == "open":
            more, self.state = read_available(self.sock)
            self.received += more
        while head := HEAD.search(self.received, self.parsed):
            length = LENGTH.search(head[2])
            end = head.end() + int(length[1] if length else 0)
            if len(self.received) < end:
                break
            self.parsed = end
            self.unanswered += 1

    def send_next(self):
        piece = self.to_send.pop(0)
        if piece is None:
            self.close()
            return
        with contextlib.suppress(OSError):
            self.sock.sendall(piece)

    def close(self):
        self.sock.close()
        self.state, self.unanswered, self.to_send = "closed by worker", 0, []


class Client:
    def __init__(self, sock, connection, slow):
        self.sock, self.connection, self.slow = sock, connection, slow
        self.received, self.state = b"", "open"
        self._on_fast_path = False

    def has_begun(self):
        """Whether the fast path has sent a request to a worker since the last call."""
        connection, before = self.connection, self._on_fast_path
        self._on_fast_path = (
            connection.client.task is not connection and connection.exchange is not None
        )
        return self._on_fast_path and not before

    def receive(self):
        if self.state == "open":
            more, self.state = read_available(self.sock)
            self.received += more

    def disconnect(self, *, half=False):
        if half:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)
            return
        self.receive()
        self.sock.close()
        self.state = "left" if self.state == "open" else self.state


class ManualTimers:
    """Replaces the timers of the pauses between two attempts: the test ends all sleeps at once."""

    def __init__(self):
        self.tasks = []

    async def sleep(self, task, secs):
        self.tasks.append(task)
        try:
            while task in self.tasks:
                task.waiting_on = self
                await pause
        finally:
            if task in self.tasks:
                self.tasks.remove(task)

    def wake_all(self):
        sleeping, self.tasks = self.tasks, []
        for task in sleeping:
            task.loop.wake(task)


class OrderedSet(dict):
    """A set of tasks that is iterated in insertion order."""

    def add(self, task):
        self[task] = None

    def discard(self, task):
        self.pop(task, None)


class World(ManualLoop):
    """A data plane with workers and clients. The event loop runs after each step of the test."""

    def __init__(self, listeners, config="", *, use_fast_path=True, fields=None):
        """`fields`: settings of the workers, by worker name."""
        super().__init__(config)
        self.recent = RecentWindow()
        self.dataplane.recorders.meters = self.meters = Metrics(self.fleet, self.recent, self.clock)
        self.listeners, self.use_fast_path = listeners, use_fast_path
        self.dataplane.loop.tasks = OrderedSet()
        self.timers = ManualTimers()
        object.__setattr__(self.dataplane.services, "timers", self.timers)
        self.worker_connections, self.clients, self.routes = [], [], []
        self.entries = [
            replace(
                entry(name, **(fields or {}).get(name, {})), url=f"unix:{listener.getsockname()}"
            )
            for name, listener in listeners.items()
        ]
        self.apply()
        for worker in self.fleet.workers:
            heal(self.fleet, worker)
        # Exchanges that the fast path began, and those that a coroutine took over.
        self.began = self.handed_over = 0
        self.dataplane.recorders.route_log = self.Routes(self.routes)

    class Routes:
        def __init__(self, kept):
            self.kept = kept

        def write(self, record):
            row = json.loads(record)
            del row["timestamp"]
            self.kept.append(row)

    def write(self, record):
        super().write(record)
        del self.log[-1]["at"]

    @contextlib.contextmanager
    def patched(self):
        """Number request ids instead of drawing them, and count the exchanges handed over."""
        numbers, respond = itertools.count(1), Connection._respond

        def count_and_respond(connection, current, raw):
            self.handed_over += not raw
            return respond(connection, current, raw)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(request_id, "getrandbits", lambda bits: next(numbers))
            patch.setattr(Connection, "_respond", count_and_respond)
            if not self.use_fast_path:
                patch.setattr(FastPathCache, "find", lambda cache, head: None)
            try:
                yield self
            finally:
                self.close()

    def apply(self):
        self.fleet.apply(self.entries, NOW)

    def run_until_idle(self):
        loop = self.dataplane.loop
        while (events := loop._epoll.poll(0)) or loop._ready:
            loop._run_batch(events)
            self.began += sum(client.has_begun() for client in self.clients)
        loop.flush()
        for connection in self.worker_connections:
            connection.receive()
        for name, listener in self.listeners.items():
            with contextlib.suppress(BlockingIOError):
                while True:
                    connection = WorkerConnection(name, listener.accept()[0])
                    self.worker_connections.append(connection)
                    self.sockets.append(connection.sock)
                    connection.receive()
        for client in self.clients:
            if not client.slow:
                client.receive()

    def connect_client(self, *, slow=False, warm=0, warm_request=None):
        """A client that has exchanged `warm_request` and its response `warm` times."""
        before = set(self.dataplane.loop.tasks)
        sock = self.client()
        (connection,) = set(self.dataplane.loop.tasks) - before
        if slow:
            connection.client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        self.clients.append(Client(sock, connection, slow=False))
        for _ in range(warm):
            self.client_sends(self.clients[-1], warm_request or chat_request())
            self.worker_responds(OK_RESPONSE)
        self.clients[-1].slow = slow
        return self.clients[-1]

    def client_sends(self, client, *pieces):
        for piece in pieces:
            with contextlib.suppress(OSError):
                client.sock.sendall(piece)
            self.run_until_idle()

    def worker_responds(self, *pieces, by=None):
        """Send the first piece on the first connection with an unanswered request.

        `worker_continues` sends the next piece. `by`: only connections of the worker of this name.
        """
        for connection in self.worker_connections:
            if connection.unanswered and not connection.to_send and by in (None, connection.name):
                connection.unanswered -= 1
                connection.to_send = list(pieces)
                connection.send_next()
                break
        self.run_until_idle()

    def worker_continues(self):
        for connection in self.worker_connections:
            if connection.to_send:
                connection.send_next()
                break
        self.run_until_idle()

    def idle_connections(self):
        return [
            connection
            for connection in self.worker_connections
            if connection.state == "open" and not (connection.unanswered or connection.to_send)
        ]

    def change_worker(self, at, **fields):
        self.entries[at] = replace(self.entries[at], **fields)
        self.apply()
        self.run_until_idle()

    def remove_worker(self, at):
        del self.entries[at]
        self.apply()
        self.dataplane.loop.flush()
        self.run_until_idle()

    def wait(self, secs):
        super().wait(secs)
        self.timers.wake_all()
        self.run_until_idle()

    def record_failure(self, worker):
        self.fleet.observe_request_failure(worker, status=502, error="bad gateway", at=NOW)

    def eject(self, worker):
        """Eject the worker and heal it: its breaker is half-open afterwards."""
        while not worker.health.breaker_tripped:
            self.record_failure(worker)
        heal(self.fleet, worker)
        self.run_until_idle()

    def finish(self):
        for client in self.clients:
            client.disconnect()
        self.run_until_idle()

    def snapshot(self, *, whole=False):
        dataplane = self.dataplane
        return {
            "clients": [
                (
                    with_sorted_fields(client.received)
                    if whole or not client.slow
                    else len(client.received),
                    client.state,
                )
                for client in self.clients
            ],
            "workers": [
                (connection.name, connection.received, connection.state)
                for connection in self.worker_connections
            ],
            "fleet": [_worker_state(worker) for worker in self.fleet.workers],
            "idle": {  # a rank shares the connections of its worker
                worker.url: len(pool.idle)
                for worker, pool in dataplane.upstream_pools.known.items()
                if worker.worker is worker
            },
            "phases": sorted(self.phases),
            "connection_records": [connection_record(client.connection) for client in self.clients],
            "data_plane": [
                dataplane.admission(),
                dataplane.counts(),
                dataplane.inflight.held_bytes,
            ],
            "log": list(self.log),
            "routes": list(self.routes),
            "metrics": self.metric_values(),
        }

    def metric_values(self):
        cells = {
            (route, worker and worker.url): (
                dict(cell.ends), cell.bytes_in, cell.bytes_out, cell.chunks, dict(cell.tokens),
                ([*cell.total.counts], cell.total.sum), ([*cell.first.counts], cell.first.sum),
            )
            for (route, worker), cell in self.meters.series.items()
        }  # fmt: skip
        phases = {
            route: [([*of.counts], of.sum) for of in (each.head, each.queue, each.overhead)]
            for route, each in self.meters.phases.items()
        }
        return cells, phases, self.recent.ends()

    def reload(self, config):
        self.dataplane.configure(parse(f"[server]\nlog_format = 'json'\n{config}"))
        self.run_until_idle()


def run_fast_and_slow(listeners, script, config="", *, began, handed_over, warm=6, new_world=World):
    """Run `script(world, client)` without and with the fast path, and compare all results.

    `began` and `handed_over`: how many exchanges of the script begin on the fast path, and how many
    of these a coroutine ends; a set where the number depends on the test's parameters. `new_world`
    creates a `World`. Returns the world with the fast path.
    """
    worlds, snapshots = [], []
    for use_fast_path in (False, True):
        unpatched = new_world(
            listeners, f"[server]\nlog_format = 'json'\n{config}", use_fast_path=use_fast_path
        )
        with unpatched.patched() as world:
            client = world.connect_client(warm=warm)
            world.began = world.handed_over = 0
            script(world, client)
            snapshots.append(world.snapshot(whole=True))
            world.finish()
            snapshots[-1]["ended"] = world.snapshot(whole=True)
            assert not world.dataplane.loop.tasks
            assert world.dataplane.in_flight == 0
            assert len(world.log) == sum(world.dataplane.services.totals.ended.values())
            worlds.append(world)
    assert snapshots[1] == snapshots[0]
    slow, fast = worlds
    assert slow.began == 0
    for count, expected in ((fast.began, began), (fast.handed_over, handed_over)):
        assert count in (expected if isinstance(expected, set) else {expected})
    return fast


def _worker_state(worker):
    health = worker.health
    return (
        worker.url, worker.in_flight, worker.peak_in_flight, list(worker.counts),
        worker.weight_version is UNKNOWN_VERSION, health.state, health.failed_requests, health.half_open_id,
        health.breaker_tripped, health.last_error, health.consecutive_failures,
    )  # fmt: skip

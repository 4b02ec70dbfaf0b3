"""A data plane whose clients and workers act step by step, with the fast path or without.

Every socket is a Unix one, on which sent bytes can be read at once: so no step waits, and equal
steps give equal transcripts. `seen` has all results, but for the order of fields in a response.
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
from omni_proxy.dataplane.exchange import exchange
from omni_proxy.dataplane.exchange.fast_path_cache import FastPathCache
from omni_proxy.dataplane.loop.task import pause
from omni_proxy.dataplane.status import connection_record
from omni_proxy.fleet.weight_version import UNKNOWN_VERSION
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow
from tests.dataplane.manual_loop import ManualLoop, received
from tests.fleet.entries import NOW, entry, heal

HEAD = re.compile(rb"((?:POST |HTTP/1\.1)[^\r\n]*\r\n)(.*?\r\n)\r\n", re.DOTALL)
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


def with_sorted_fields(came):
    """With each head's fields in one order."""

    def in_order(found):
        fields = sorted(found[2].split(b"\r\n")[:-1])
        return found[1] + b"\r\n".join(fields) + b"\r\n\r\n"

    return HEAD.sub(in_order, came)


def chat_request(name=b"content-length", request_id=b"", body=b'{"messages": []}', **more):
    """One way of writing a chat request."""
    response = more.get("length", b"%d" % len(body))
    lines = [b"POST /v1/chat/completions HTTP/1.1", b"host: proxy", b"%b: %b" % (name, response)]
    lines += [b"X-Request-Id: %b" % request_id] if request_id else []
    lines += [b"content-type: application/json", *more.get("fields", ())]
    if more.get("turned"):
        lines[1:] = reversed(lines[1:])
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def worker_sockets(folder, names="ab"):
    """Where the workers of any number of worlds are met, one after the other."""
    made = {}
    for name in names:
        made[name] = socket.socket(socket.AF_UNIX)
        made[name].bind(str(folder / name))
        made[name].listen()
        made[name].setblocking(False)
    return made


def exchange_once(world, client):
    send_request(world, client)
    world.answer(WHOLE)


def send_request(world, client, request=None):
    world.ask(client, request or chat_request())
    assert world.dataplane.in_flight == 1


class End:
    """A worker's end of a connection; `plan` is what it has still to say. None: it closes."""

    def __init__(self, name, sock):
        self.name, self.sock = name, sock
        self.came, self.end = b"", "open"
        self.read, self.asked, self.plan = 0, 0, []

    def look(self):
        if self.end == "open":
            more, self.end = received(self.sock)
            self.came += more
        while found := HEAD.search(self.came, self.read):
            reported = LENGTH.search(found[2])
            whole = found.end() + int(reported[1] if reported else 0)
            if len(self.came) < whole:
                break
            self.read = whole
            self.asked += 1

    def say(self):
        piece = self.plan.pop(0)
        if piece is None:
            self.close()
            return
        with contextlib.suppress(OSError):
            self.sock.sendall(piece)

    def close(self):
        self.sock.close()
        self.end, self.asked, self.plan = "ours", 0, []


class Client:
    def __init__(self, sock, connection, slow):
        self.sock, self.connection, self.slow = sock, connection, slow
        self.came, self.end = b"", "open"
        self._asked = False

    def has_begun(self):
        """Whether the fast path has sent to a worker since the last call."""
        connection, before = self.connection, self._asked
        self._asked = connection.client.task is not connection and connection.exchange is not None
        return self._asked and not before

    def look(self):
        if self.end == "open":
            more, self.end = received(self.sock)
            self.came += more

    def leave(self, *, half=False):
        if half:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)
            return
        self.look()
        self.sock.close()
        self.end = "left" if self.end == "open" else self.end


class Pauses:
    """Between two tries: over when the test's clock moves on."""

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

    def end(self):
        ended, self.tasks = self.tasks, []
        for task in ended:
            task.loop.wake(task)


class InOrder(dict):
    """A set of tasks that tells them in the order in which they came."""

    def add(self, task):
        self[task] = None

    def discard(self, task):
        self.pop(task, None)


class World(ManualLoop):
    def __init__(self, listeners, config="", *, short=True, fields=None):
        """`fields`: of workers, by name."""
        super().__init__(config)
        self.recent = RecentWindow()
        self.dataplane.recorders.meters = self.meters = Metrics(self.fleet, self.recent, self.clock)
        self.listeners, self.short = listeners, short
        self.dataplane.loop.tasks = InOrder()
        self.pauses = Pauses()
        object.__setattr__(self.dataplane.services, "timers", self.pauses)
        self.lines, self.clients, self.routes = [], [], []
        self.entries = [
            replace(
                entry(name, **(fields or {}).get(name, {})), url=f"unix:{listener.getsockname()}"
            )
            for name, listener in listeners.items()
        ]
        self.apply()
        for worker in self.fleet.workers:
            heal(self.fleet, worker)
        self.began = self.handed_over = 0  # exchanges of the fast path
        self.dataplane.recorders.route_log = self.Routes(self.routes)

    class Routes:
        def __init__(self, kept):
            self.kept = kept

        def write(self, record):
            body = json.loads(record)
            del body["timestamp"]
            self.kept.append(body)

    def write(self, record):
        super().write(record)
        del self.log[-1]["at"]

    @contextlib.contextmanager
    def at_work(self):
        """Ids are counted instead of drawn; whoever is handed over is counted, too."""
        numbers, respond = itertools.count(1), Connection._respond

        def counted(connection, current, raw):
            self.handed_over += not raw
            return respond(connection, current, raw)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange, "getrandbits", lambda bits: next(numbers))
            patch.setattr(Connection, "_respond", counted)
            if not self.short:
                patch.setattr(FastPathCache, "find", lambda cache, head: None)
            try:
                yield self
            finally:
                self.close()

    def apply(self):
        self.fleet.apply(self.entries, NOW)

    def turn(self):
        made = self.dataplane.loop
        while (events := made._epoll.poll(0)) or made._ready:
            made._run_batch(events)
            self.began += sum(client.has_begun() for client in self.clients)
        made.flush()
        for end in self.lines:
            end.look()
        for name, listener in self.listeners.items():
            with contextlib.suppress(BlockingIOError):
                while True:
                    self.lines.append(End(name, listener.accept()[0]))
                    self.ends.append(self.lines[-1].sock)
                    self.lines[-1].look()
        for client in self.clients:
            if not client.slow:
                client.look()

    def connect_client(self, *, slow=False, warm=0, like=None):
        """A client that has had `warm` answers already."""
        before = set(self.dataplane.loop.tasks)
        far = self.client()
        (connection,) = set(self.dataplane.loop.tasks) - before
        if slow:
            connection.client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        self.clients.append(Client(far, connection, slow=False))
        for _ in range(warm):
            self.ask(self.clients[-1], like or chat_request())
            self.answer(WHOLE)
        self.clients[-1].slow = slow
        return self.clients[-1]

    def ask(self, client, *pieces):
        for piece in pieces:
            with contextlib.suppress(OSError):
                client.sock.sendall(piece)
            self.turn()

    def answer(self, *plan, by=None):
        """Of the worker that has waited longest, the first piece; `more` says the next ones. `by`:
        the name of the worker."""
        for end in self.lines:
            if end.asked and not end.plan and by in (None, end.name):
                end.asked -= 1
                end.plan = list(plan)
                end.say()
                break
        self.turn()

    def more(self):
        for end in self.lines:
            if end.plan:
                end.say()
                break
        self.turn()

    def idle_ends(self):
        return [end for end in self.lines if end.end == "open" and not (end.asked or end.plan)]

    def change(self, at, **fields):
        self.entries[at] = replace(self.entries[at], **fields)
        self.apply()
        self.turn()

    def remove(self, at):
        del self.entries[at]
        self.apply()
        self.dataplane.loop.flush()
        self.turn()

    def wait(self, secs):
        super().wait(secs)
        self.pauses.end()
        self.turn()

    def blame(self, worker):
        """For a request that has failed."""
        self.fleet.observe_request_failure(worker, status=502, error="so told", at=NOW)

    def eject(self, worker):
        """For failed requests; good probes let it back, and it owes a trial."""
        while not worker.health.breaker_tripped:
            self.blame(worker)
        heal(self.fleet, worker)
        self.turn()

    def finish(self):
        for client in self.clients:
            client.leave()
        self.turn()

    def seen(self, *, whole=False):
        dataplane = self.dataplane
        return {
            "clients": [
                (
                    with_sorted_fields(each.came) if whole or not each.slow else len(each.came),
                    each.end,
                )
                for each in self.clients
            ],
            "workers": [(end.name, end.came, end.end) for end in self.lines],
            "fleet": [_of(worker) for worker in self.fleet.workers],
            "idle": {  # a rank's pool has the connections of its worker's
                worker.url: len(pool.idle)
                for worker, pool in dataplane.pools.known.items()
                if worker.worker is worker
            },
            "phases": sorted(self.phases),
            "shown": [connection_record(each.connection) for each in self.clients],
            "data_plane": [
                dataplane.admission(),
                dataplane.counts(),
                dataplane.inflight.held_bytes,
            ],
            "log": list(self.log),
            "routes": list(self.routes),
            "metrics": self.counted(),
        }

    def counted(self):
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
        """As a configuration that was judged and is in force now."""
        self.dataplane.configure(parse(f"[server]\nlog_format = 'json'\n{config}"))
        self.turn()


def run_fast_and_slow(listeners, script, config="", *, began, handed_over, warm=6, new_world=World):
    """Run `script(world, client)` without the fast path and with it: whatever is seen must be the
    same. Returns the world with the fast path.

    `began` and `handed_over`: how many exchanges of the script the fast path began, and how many
    of them a coroutine ended; a set where that depends on the test's parameters. `new_world`: makes
    a `World`.
    """
    worlds, seen = [], []
    for short in (False, True):
        made = new_world(listeners, f"[server]\nlog_format = 'json'\n{config}", short=short)
        with made.at_work() as world:
            client = world.connect_client(warm=warm)
            world.began = world.handed_over = 0
            script(world, client)
            seen.append(world.seen(whole=True))
            world.finish()
            seen[-1]["ended"] = world.seen(whole=True)
            assert not world.dataplane.loop.tasks
            assert world.dataplane.in_flight == 0
            assert len(world.log) == sum(world.dataplane.services.totals.ended.values())
            worlds.append(world)
    assert seen[1] == seen[0]
    slow, fast = worlds
    assert slow.began == 0
    for came, expected in ((fast.began, began), (fast.handed_over, handed_over)):
        assert came in (expected if isinstance(expected, set) else {expected})
    return fast


def _of(worker):
    machine = worker.health
    return (
        worker.url, worker.in_flight, worker.peak_in_flight, list(worker.counts),
        worker.version is UNKNOWN_VERSION, machine.state, machine.failed_requests, machine.half_open_id,
        machine.breaker_tripped, machine.last_error, machine.consecutive_failures,
    )  # fmt: skip

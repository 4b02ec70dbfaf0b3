"""The door as a whole: its listeners, its lanes to the workers, its bounds, and what it can tell.

Contract: `prepare` is the only step of a configuration change that may fail here (a listener that
can't be opened), and its commit can't. Lanes follow the fleet: a removed worker's idle connections
close at once, those in use at the end of their exchange. All methods but `run` are synchronous
atoms.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import trio

from omni_proxy.config.schema import Config
from omni_proxy.door import clocks
from omni_proxy.door.account import Exchange
from omni_proxy.door.connection import Connection
from omni_proxy.door.holding import Holding
from omni_proxy.door.limits import limits_of
from omni_proxy.door.listener import Listener, open_socket
from omni_proxy.door.pump import Pump
from omni_proxy.door.queue import Queue
from omni_proxy.door.task import Gone
from omni_proxy.door.timers import Timers
from omni_proxy.door.upstream import Lane
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.policies import Below, Policy, build
from omni_proxy.wire.template import AnswerTemplates, RequestTemplates

_log = logging.getLogger(__name__)

SHOWN_CONNECTIONS = 100


class LineSink(Protocol):
    """Where log lines go: takes each at once, loses it rather than wait."""

    def write(self, record: bytes) -> None: ...


class Meters(Protocol):
    """Who counts the exchanges that have ended."""

    def count(self, mine: Exchange, worker: Worker | None) -> None: ...


class Door:
    """What every connection shares. `front` is the lane to the control routes."""

    def __init__(self, fleet: Fleet, config: Config, *, front_socket: str, below: Below) -> None:
        self.pump = Pump()
        self.fleet = fleet
        self.front = Lane(self.pump, front_socket, "front")
        self.draining = False
        self.held = False  # the port is taken, yet nobody is let in
        self.in_flight = 0
        self.peak_in_flight = 0
        self.rejected = 0
        self.accepted = 0
        self.ended: Counter[str] = Counter()
        self.across_versions = 0  # answers whose worker got other weights meanwhile
        self.queue = Queue(self)
        self.holding = Holding(self)
        self.timers = Timers(self.pump)
        self.voice_owner = ""
        self.access_log: LineSink | None = None
        self.route_log: LineSink | None = None
        self.meters: Meters | None = None
        self.below = below  # chance, for policies and for pauses
        self.requests = RequestTemplates()
        self.answers = AnswerTemplates()
        self._lanes: dict[Worker, Lane] = {}
        self._listeners: list[Listener] = []
        self.policy: Policy = build(config.routing, below, self.pump.now)
        self._take(config)
        fleet.watch(self._follow_fleet)
        fleet.watch_forgotten(lambda worker: self.policy.forget(worker))

    def _take(self, config: Config) -> None:
        self.config = config
        self.limits = limits_of(config)
        self.half_close_aborts = config.server.half_close == "abort"
        self.access_json = config.server.log_format == "json"
        self.keeps_tail = config.server.metrics and config.server.usage_metrics
        if not self.policy.tune(config.routing):
            self.policy = build(config.routing, self.below, self.pump.now, self.policy)
        self.queue.serve(changed=True)

    def prepare(self, new: Config) -> Callable[[], None]:
        """Open what `new` needs; the result puts it in force. Raises OSError, changing nothing."""
        now = self.config.server
        moved = (new.server.host, new.server.port) != (now.host, now.port) or not self._listeners
        wanted = moved and not self.draining  # a reload does not open what a drain has closed
        sock = None
        if wanted:
            sock = open_socket(new.server.host, new.server.port, listening=not self.held)

        def commit() -> None:
            self._take(new)
            if sock is not None:
                self._move_to(sock)

        return commit

    def _move_to(self, sock: socket.socket) -> None:
        """The new listener is open before the old one closes; its connections live on."""
        old, self._listeners = self._listeners, [Listener(self.pump, sock, self._welcome)]
        for listener in old:
            listener.close()
        self.pump.settle()
        if not self.held:
            _log.info("listening on http://%s", self._listeners[0].address)

    def open(self) -> None:
        """Let them in where `held` kept them out. Raises OSError."""
        self.held = False
        for listener in self._listeners:
            listener.listen()
            _log.info("listening on http://%s", listener.address)

    def _welcome(self, sock: socket.socket, peer: str) -> None:
        self.accepted += 1
        Connection(self, sock, peer).start()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The pump and its clocks, until cancelled; then every socket is closed."""
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.pump.run)
                nursery.start_soon(self.timers.run)
                nursery.start_soon(clocks.run, self.pump, self._sweep)
                task_status.started()
        finally:
            self._close_listeners()
            for lane in (self.front, *self._lanes.values()):
                lane.close()
            self.pump.settle()

    def lane(self, worker: Worker) -> Lane:
        lane = self._lanes.get(worker)
        if lane is None:
            host = "localhost" if isinstance(worker.address, str) else worker.display_id
            lane = self._lanes[worker] = Lane(self.pump, worker.address, host)
        lane.address = worker.address  # a name may resolve anew
        return lane

    def has_slot(self) -> bool:
        bound = self.config.server.max_inflight
        return not bound or self.in_flight < bound

    def count_in(self, mine: Exchange) -> None:
        mine.admitted = True
        self.in_flight += 1
        if self.in_flight > self.peak_in_flight:
            self.peak_in_flight = self.in_flight

    def count_out(self, mine: Exchange) -> None:
        if mine.admitted:
            mine.admitted = False
            self.in_flight -= 1

    def begin_drain(self) -> None:
        """No new connection; idle ones close now, the others after the answer they wait for."""
        self.draining = True
        self._close_listeners()
        for task in [task for task in self.pump.tasks if task.phase == "idle"]:
            task.throw(Gone())
        self.pump.settle()

    async def drained(self) -> None:
        """Until the last connection has ended; the caller's scope bounds it."""
        while self.pump.tasks:
            await self.pump.emptied.wait()

    def admission(self) -> dict[str, int]:
        return {
            "inflight": self.in_flight,
            "max_inflight": self.config.server.max_inflight,
            "peak_inflight": self.peak_in_flight,
            "rejected_total": self.rejected,
            "waiting": self.queue.waiting,
            "peak_waiting": self.queue.peak_waiting,
        }

    def counts(self) -> dict[str, object]:
        """What costs little to tell, however many connections there are."""
        return {
            "accepted": self.accepted,
            "connections": len(self.pump.tasks),
            "ended": dict(self.ended),
            "failures": self.pump.failures,
            "answers_across_versions": self.across_versions,
        }

    def addresses(self) -> list[str]:
        return [listener.address for listener in self._listeners]

    def status(self) -> dict[str, object]:
        tasks = self.pump.tasks
        oldest = sorted(tasks, key=lambda task: task.began)[:SHOWN_CONNECTIONS]
        return {
            "draining": self.draining,
            **self.counts(),
            "phases": dict(Counter(task.phase for task in tasks)),
            **self.admission(),
            "voice_owner": self.voice_owner or None,
            "policy": {"name": self.policy.name, **self.policy.facts()},
            "oldest_connections": [
                self._shown(task) for task in oldest if isinstance(task, Connection)
            ],
        }

    def _shown(self, conn: Connection) -> dict[str, object]:
        mine = conn.exchange
        return {
            "peer": conn.peer,
            "phase": conn.phase,
            "age_secs": round(self.pump.now - conn.began, 3),
            "target": mine.target if mine else None,
            "worker": mine.worker.url if mine and mine.worker else None,
        }

    def _follow_fleet(self) -> None:
        workers = set(self.fleet.workers)
        for worker in [worker for worker in self._lanes if worker not in workers]:
            self._lanes.pop(worker).close()
        if self.voice_owner and self.fleet.find(self.voice_owner) is None:
            _log.warning("the worker that kept the uploaded voices is gone: %s", self.voice_owner)
            self.voice_owner = ""
        self.holding.follow_fleet()
        self.queue.serve(changed=True)

    def keep_voices_at(self, worker: Worker) -> None:
        """From now on it is the one that has the uploaded voices."""
        self.voice_owner = worker.url
        self.queue.serve(changed=True)

    def _sweep(self) -> None:
        self.policy.tend(self.pump.now)
        self.front.sweep()
        for lane in self._lanes.values():
            lane.sweep()
        for listener in self._listeners:
            listener.sweep()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []

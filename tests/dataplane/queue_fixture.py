"""An admission queue over a fleet, with waiters that are tasks without sockets."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace

from omni_proxy.config.parse import parse
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.finalize import finalize
from omni_proxy.dataplane.loop.stream import IoTask
from omni_proxy.dataplane.loop.task import ClientDisconnected
from omni_proxy.fleet.worker import CAPABILITY_BITS
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.routes import NO_LEGS
from omni_proxy.wire.errors import HttpError
from tests.fleet.entries import fleet_of


class Waiter(IoTask):
    """Acquires a slot, then a worker of `model`, and holds both until `finish`."""

    def __init__(self, room, model=None, version=None, legs=NO_LEGS):
        super().__init__(room.dataplane.loop)
        self.room, self.dataplane, self.model = room, room.dataplane, model
        self.client = SimpleNamespace(peer_closed=False)
        self.exchange = Exchange(self.loop.now, "test")
        self.exchange.requirements = Requirements(
            CAPABILITY_BITS["chat"], model, version_constraint=version, legs=legs
        )
        self.refusal = None

    @property
    def granted(self):
        """Admitted, but not resumed yet."""
        return self.phase == "queue" and self.phase_deadline == inf

    def set_timeout(self, phase, secs):
        self.phase = phase
        self.phase_deadline = min(self.loop.now + secs, self.deadline)

    async def serve(self):
        try:
            await self._acquire()
        except HttpError as refusal:
            self.refusal = refusal
        except ClientDisconnected:
            pass
        else:
            self.phase = "admitted"
            self.room.admitted.append(self)

    async def _acquire(self):
        dataplane, exchange = self.dataplane, self.exchange
        if not dataplane.inflight.admit(exchange):
            await dataplane.queue.wait_for_slot(self, exchange, unread=False)
        self.phase = "pick"
        try:
            dataplane.balancer.acquire(exchange)
        except HttpError as no_worker:
            await dataplane.queue.wait_for_worker(self, exchange, no_worker)

    def finish(self):
        if self in self.room.admitted:
            self.room.admitted.remove(self)
        finalize(self.dataplane.services, self.exchange, "done")

    def disconnect(self):
        self.throw(ClientDisconnected())
        self.finish()


class Room:
    """A data plane with a fleet and a queue: the place where the waiters wait."""

    def __init__(self, *entries, config="", healthy=True):
        self.fleet = fleet_of(*entries, healthy=healthy)
        self.dataplane = DataPlane(
            self.fleet,
            parse(f"[server]\n{config}"),
            admin_socket="/nowhere",
            sources=Sources(lambda n: 0),
        )
        self.queue = self.dataplane.queue
        self.admitted = []  # waiters that hold a slot and a worker, in order of admission

    def arrive(self, model=None, version=None, legs=NO_LEGS):
        waiter = Waiter(self, model, version, legs)
        waiter.start()
        return waiter

    def run_ready_tasks(self):
        loop = self.dataplane.loop
        ready, loop._ready = loop._ready, []
        for task in ready:
            task.step()

    def reconfigure(self, config):
        self.dataplane.configure(parse(f"[server]\n{config}"))

    def close(self):
        self.dataplane.loop._epoll.close()

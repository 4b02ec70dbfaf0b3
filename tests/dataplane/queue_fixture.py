"""A queue over a fleet, with waiters that are tasks without sockets; the event loop is run by hand."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace

from omni_proxy.config.parse import parse
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange.exchange_io import finalize
from omni_proxy.dataplane.loop.io_task import IoTask
from omni_proxy.dataplane.loop.task import ClientDisconnected
from omni_proxy.fleet.worker import CAPABILITY_BITS
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.routes import NO_LEGS
from omni_proxy.wire.errors import HttpError
from tests.fleet.entries import fleet_of


class Waiter(IoTask):
    """Asks for a slot, then for a worker of `model`; holds what it got until `finish`."""

    def __init__(self, room, model=None, version=None, legs=NO_LEGS):
        super().__init__(room.dataplane.loop)
        self.room, self.dataplane, self.model = room, room.dataplane, model
        self.client = SimpleNamespace(peer_closed=False)
        self.exchange = Exchange(self.loop.now, "test")
        self.exchange.requirements = Requirements(
            CAPABILITY_BITS["chat"], model, version_constraint=version, legs=legs
        )
        self.refusal = None
        self.wants = ""  # what it waits for, and since when
        self.joined = 0

    @property
    def granted(self):
        """Let go, though its turn is yet to come."""
        return self.phase == "queue" and self.phase_deadline == inf

    def set_timeout(self, phase, secs):
        self.phase = phase
        self.joined = next(self.room.numbers)
        self.phase_deadline = min(self.loop.now + secs, self.deadline)

    async def serve(self):
        try:
            await self._ask()
        except HttpError as refusal:
            self.refusal = refusal
        except ClientDisconnected:
            pass
        else:
            self.phase = "in"
            self.room.gone_in.append(self)

    async def _ask(self):
        dataplane, exchange = self.dataplane, self.exchange
        self.wants = "slot"
        if not dataplane.inflight.admit(exchange):
            await dataplane.queue.wait_for_slot(self, exchange, unread=False)
        self.phase, self.wants = "pick", (self.model, exchange.requirements.version_constraint)
        try:
            dataplane.balancer.acquire(exchange)
        except HttpError as nobody:
            await dataplane.queue.wait_for_worker(self, exchange, nobody)

    def finish(self):
        if self in self.room.gone_in:
            self.room.gone_in.remove(self)
        finalize(self.dataplane.services, self.exchange, "done")

    def leave(self):
        self.throw(ClientDisconnected())
        self.finish()


class Room:
    def __init__(self, *entries, config="", healthy=True):
        self.fleet = fleet_of(*entries, healthy=healthy)
        self.dataplane = DataPlane(
            self.fleet,
            parse(f"[server]\n{config}"),
            admin_socket="/nowhere",
            sources=Sources(lambda n: 0),
        )
        self.queue = self.dataplane.queue
        self.gone_in = []  # in the order in which they got what they wanted
        self.numbers = iter(range(10**9))

    def come(self, model=None, version=None, legs=NO_LEGS):
        waiter = Waiter(self, model, version, legs)
        waiter.start()
        return waiter

    def turn(self):
        """Everything that was resumed runs."""
        loop = self.dataplane.loop
        again, loop._ready = loop._ready, []
        for task in again:
            task.step()

    def reconfigure(self, config):
        self.dataplane.configure(parse(f"[server]\n{config}"))

    def close(self):
        self.dataplane.loop._epoll.close()

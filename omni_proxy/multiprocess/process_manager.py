"""The doors as control leads them: how many, what they know, what they must have heard.

Invariant: what `await_replicated` waits for is in force at every door that serves: one that does not
acknowledge in time is killed, for a door that can't be told anything must not route. A door that
ends unasked is replaced, and what it had in flight is taken off the counts.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Final

import trio
from msgspec import structs

from omni_proxy.config.schema import Config
from omni_proxy.dataplane.accept.listener import Listener
from omni_proxy.dataplane.dataplane import DataPlane
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.multiprocess import shared_sessions
from omni_proxy.multiprocess.messages import (
    Ack,
    Begin,
    DrainCommand,
    Forget,
    Listen,
    LogLines,
    ProcessStats,
    Shut,
    Tally,
    ToControl,
)
from omni_proxy.multiprocess.process_slot import ProcessHandle, ProcessSlot
from omni_proxy.multiprocess.report_handler import ReportHandler
from omni_proxy.multiprocess.reuseport_group import ReuseportGroup
from omni_proxy.multiprocess.snapshot_publisher import SnapshotPublisher
from omni_proxy.multiprocess.worker_ids import WorkerIds
from omni_proxy.telemetry.instruments import Instruments

_log = logging.getLogger(__name__)

SILENT_SECS: Final = 10.0  # a door that hears nothing for so long answers /ready with 503
TICK_SECS: Final = 1.0
COUNT_SECS: Final = 0.1  # whoever is asked, or waits for all, looks by himself
NEWS_SECS: Final = 0.002  # between two lots of news: a thousand failures a second are no thousand
NEWS_PAUSES: Final = 4  # times what the last lot took: news of thousands of workers take a while
PARTING_SECS: Final = 1.0  # for handshakes under way when connections are steered elsewhere


def processes_of(config: Config) -> int:
    return config.server.processes or len(os.sched_getaffinity(0))


def share(config: Config, doors: int) -> Config:
    """What each of so many doors has to keep to; rounded up, so that none is left without."""
    server = structs.replace(
        config.server,
        queue_size=-(-config.server.queue_size // doors),
        max_held_bytes=-(-config.server.max_held_bytes // doors),
    )
    return structs.replace(config, server=server, workers=(), launch=())


class ProcessManager:
    """All door processes, and control's own door, which serves alone while there is one process."""

    def __init__(
        self, fleet: Fleet, door: DataPlane, instruments: Instruments, front_socket: str
    ) -> None:
        self.door = door
        self.draining = False
        self.seats: dict[int, ProcessSlot] = {}  # by index
        self.roster = WorkerIds(fleet, door)
        self.gone: Counter[str] = Counter()
        self.gone_ended: Counter[str] = Counter()
        self._news = SnapshotPublisher(fleet, self.roster)
        self._hearing = ReportHandler(
            fleet, door, self.roster, instruments, self.gone, self.gone_ended
        )
        self._front_socket = front_socket
        self._sessions: int | None = None  # the descriptor of their memory
        self._port: ReuseportGroup | None = None
        self._wanted = 0
        self._nursery: trio.Nursery | None = None
        self._manned = trio.Event()  # there are seats
        self._emptied = trio.Event()
        self._dirty = trio.Event()
        fleet.watch(lambda: self._dirty.set())
        door.voices.watch(lambda: self._dirty.set())
        door.voices.watch_names(lambda: self._dirty.set())
        fleet.watch_cache_cleared(self._forgotten)

    @property
    def links(self) -> list[ProcessHandle]:
        """Those of the processes that are alive."""
        links = [seat.link for seat in self.seats.values()]
        return [link for link in links if link is not None and not link.over]

    def prepare(self, new: Config) -> Callable[[], None]:
        """As the door's: the result puts `new` in force. Raises OSError, ConfigError."""
        enter = self.door.prepare(new)
        try:
            port = self._port_for(new, enter.public)
        except OSError:
            enter.cancel()
            raise

        def commit() -> None:
            enter()
            self._settle(new, port)

        return commit

    def open(self) -> None:
        """Let them in where the door was held. Raises OSError."""
        self.door.open()
        if self.seats and self._port is not None:
            self._rest(self._port)
        self._seat_all()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start and keep the processes that are wanted; ends them when cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._regularly, COUNT_SECS, self.roster.recount)
                nursery.start_soon(self._regularly, TICK_SECS, self._tick)
                nursery.start_soon(self._regularly, TICK_SECS / 4, self._publish)
                task_status.started()
                await self._publish_changes()
        finally:
            if self._port is not None:
                self._port.end()

    async def _publish_changes(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty = trio.Event()
            began = trio.current_time()
            self._publish()
            spent_secs = trio.current_time() - began
            await trio.sleep(max(NEWS_SECS, NEWS_PAUSES * spent_secs))

    async def await_replicated(self) -> None:
        """Until everything that is so now is so at every door that serves."""
        self._publish()
        for link in [link for link in self.links if link.ready]:
            await link.acknowledged(link.told)
        self.count()

    def count(self) -> None:
        """What all have in flight, now."""
        if self.seats:
            self.roster.recount()

    def begin_drain(self) -> None:
        """No new connection anywhere; each door ends with its last one."""
        self.draining = True
        if self._port is not None:
            self._port.end()
        self.door.begin_drain()
        for seat in self.seats.values():
            seat.retire()
        for link in self.links:
            link.tell(DrainCommand())

    async def drained(self) -> None:
        """Until the last connection has ended; the caller's scope bounds it."""
        while self.seats:
            await self._emptied.wait()
        await self.door.drained()

    async def _regularly(self, secs: float, chore: Callable[[], None]) -> None:
        """Costs nothing while there are no seats."""
        while True:
            await self._manned.wait()
            chore()
            await trio.sleep(secs)

    def _port_for(self, new: Config, listener: Listener | None) -> ReuseportGroup | None:
        """The one that its doors need; None where they have it. Raises OSError."""
        if listener is None or self.draining or not (processes_of(new) > 1 or self.seats):
            return None
        if self._port is not None and self._port.listener is listener:
            return None
        return ReuseportGroup(self.door.loop, listener)

    def _settle(self, new: Config, port: ReuseportGroup | None) -> None:
        """As many seats as `new` wants; `port` is another one than before. Can't fail."""
        accepting = self._wanted == 1
        self._wanted = processes_of(new)
        several = self._wanted > 1
        if self.draining or (not several and not self.seats):
            return
        self._news.config = share(new, self._wanted)
        if port is not None:
            self._move_to(port, accepting=accepting)
        active = self._staying()
        for seat in active[self._wanted if several else 0 :]:
            self._retire(seat)
        for _ in range(self._wanted - len(active) if several else 0):
            self._take_seat()
        self._seat_all()
        self._dirty.set()

    def _end_port(self) -> None:
        """Our own door is alone again, with the listener that it has."""
        if self._port is not None and self._wanted == 1:
            self._port.end()
            self._port = None

    def _move_to(self, port: ReuseportGroup, *, accepting: bool) -> None:
        """`accepting`: our own door goes on until the first of the others can."""
        if self._port is not None:
            self._port.end()
        self._port = port
        if not accepting and self._first_has_seat():
            self._rest(port)
        for link in self.links:
            link.listening = link.waits_for_tick = False

    def _rest(self, port: ReuseportGroup) -> None:
        """The others accept from here on, and get the clients that our own door has."""
        port.rest()
        self.door.close_after_answers(admin=False)

    def _take_seat(self) -> None:
        assert self._nursery is not None
        index = next(free for free in range(1, len(self.seats) + 2) if free not in self.seats)
        seat = self.seats[index] = ProcessSlot(index)
        self.roster.doors = max(self.seats)
        self._manned.set()
        self._nursery.start_soon(self._keep, seat)

    async def _keep(self, seat: ProcessSlot) -> None:
        try:
            await seat.keep(self._begin, self._hear, self._ended)
        finally:
            del self.seats[seat.index]
            self.roster.doors = max(self.seats, default=0)
            if self._port is not None:
                self._seat_all()
                self._port.close(seat.index - 1)
            if not self.seats:
                self.roster.recount()
                self._end_port()
                self._manned = trio.Event()
                self._emptied.set()
                self._emptied = trio.Event()

    def _retire(self, seat: ProcessSlot) -> None:
        assert self._nursery is not None
        seat.retire()
        self._nursery.start_soon(self._see_off, seat)

    async def _see_off(self, seat: ProcessSlot) -> None:
        """New connections go elsewhere; when those under way have come, and have asked, it drains:
        that would close one that has only just been made."""
        config, link = self._news.config, seat.link
        if link is None or config is None:
            return
        if seat.index > 1:  # the first socket is served by others too
            await trio.sleep(PARTING_SECS / 2)
        link.tell(Listen(0))
        await trio.sleep(PARTING_SECS / 2)
        link.tell(DrainCommand())
        await trio.sleep(config.server.drain_timeout_secs)
        link.kill()

    def _begin(self, link: ProcessHandle) -> None:
        if self._sessions is None:
            self._sessions = shared_sessions.made()
        begin = Begin(link.index, self._front_socket, SILENT_SECS, self.door.proxy_id.decode())
        link.tell_begin(begin, self.roster.board.descriptor, self._sessions)
        self._news.tell_all([link])

    def _hear(self, link: ProcessHandle, message: ToControl) -> None:
        self._hearing.hear(link, message)
        if isinstance(message, Shut):
            self._shut_out(link, message.error)
        if link.ready and not (link.listening or link.waits_for_tick):
            self._seat_all()
        if not isinstance(message, Ack | LogLines | ProcessStats | Tally):
            self._dirty.set()

    def _ended(self, seat: ProcessSlot, link: ProcessHandle) -> None:
        self.roster.clear(link.index)
        self._hearing.bury(link)
        self._seat_all()
        self._dirty.set()

    def _seat_all(self) -> None:
        """Who is ready and not leaving gets its socket; new connections go to those who have."""
        port = self._port
        if port is None or self.draining or self.door.listeners.held:
            return
        for link in self.links:
            if link.listening or link.waits_for_tick or not link.ready:
                continue
            if not self.seats[link.index].retiring:
                try:
                    link.tell(Listen(1), port.listen(link.index - 1))
                except OSError as error:
                    self._shut_out(link, error.strerror or str(error))
                    continue
                link.listening = True
        serving = [link.index - 1 for link in self.links if self._serves(link)]
        if self._wanted == 1 or not (port.shared or self._first_has_seat()):
            port.work()  # what waits at the first socket, nobody else would answer
        elif not port.rests and (0 in serving or (port.shared and serving)):
            self._rest(port)
        if self._wanted == 1 or not (serving or port.rests):
            port.steer([0])
        else:
            port.steer(serving or [seat.index - 1 for seat in self._staying()])

    def _shut_out(self, link: ProcessHandle, why: str) -> None:
        """It is told again with the next tick, until it can."""
        if not link.shut_out:
            _log.error("door %d can't listen on its socket for now: %s", link.index, why)
        link.shut_out = why
        link.listening, link.waits_for_tick = False, True

    def _try_again(self, link: ProcessHandle) -> None:
        if link.waits_for_tick:
            link.waits_for_tick = False
            self._seat_all()
        elif link.shut_out and link.listening and link.acked == link.told:
            link.shut_out = ""
            _log.info("door %d listens on its socket now", link.index)

    def _serves(self, link: ProcessHandle) -> bool:
        return link.listening and not self.seats[link.index].retiring

    def _staying(self) -> list[ProcessSlot]:
        return [seat for seat in self.seats.values() if not seat.retiring]

    def _first_has_seat(self) -> bool:
        return any(seat.index == 1 for seat in self._staying())

    def _publish(self) -> None:
        links = self.links
        self._news.turn_leases(links, trio.current_time())
        self._news.tell_all(links)

    def _tick(self) -> None:
        """A beat for those that hear of nothing else, and the end of those that hear nothing."""
        for link in self.links:
            link.silent_ticks += 1
            if link.deaf:
                _log.error("door %d does not listen to us any more; it is killed", link.index)
                link.kill()
            self._try_again(link)
        self._news.tell_all(self.links, beat=True)

    def _forgotten(self, worker: Worker) -> None:
        for link in self.links:
            link.tell(Forget(self.roster.serial(worker)))

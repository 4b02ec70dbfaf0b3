"""The life of a grouped sync: its owner and its members watched, its end brought to everybody.

Invariant: whatever ends it, every member is told to leave its group, whoever may hold something
new is uncertain, and only then may the set of workers change again. Nothing here waits for a turn:
a trainer that is gone is answered for within seconds, whoever else waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import trio

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.telemetry.metrics import SyncMeters
from omni_proxy.weight_sync.operations.state_journal import StateJournal
from omni_proxy.weight_sync.protocol.journal import JournalEntry
from omni_proxy.weight_sync.protocol.rank_layout import RankRange
from omni_proxy.weight_sync.protocol.session import Owner, SyncSession
from omni_proxy.weight_sync.protocol.states import SyncState
from omni_proxy.weight_sync.session import watchdog
from omni_proxy.weight_sync.session.fan_out import FanOut, Patience
from omni_proxy.weight_sync.session.member import Member, WorkerMember
from omni_proxy.weight_sync.session.trainer_link import TrainerLink, reachable
from omni_proxy.weight_sync.session.version_quarantine import VersionQuarantine

UNDO_SECS: Final = 10.0
ALIVE_SECS: Final = 2.0
GONE_SECS: Final = 0.5
# What is the trainer's own doing is for it to mend; a lost member is ours.
STATUS: Final = {
    "owner_dead": 400,
    "owner_unreachable": 400,
    "stall": 400,
    "member_failed": 400,
    "destroyed": 409,
    "forced": 409,
}
_log = logging.getLogger(__name__)


class SessionLifecycle:
    """One sync at a time; `begin` opens it, and `interrupt` or `wind_up` ends it."""

    def __init__(self, fleet: Fleet, config_store: ConfigStore, book: StateJournal) -> None:
        self.fleet, self.config_store, self.book = fleet, config_store, book
        self.session = SyncSession()
        self.doubt = VersionQuarantine(fleet)
        self.members: dict[str, Member] = {}
        self.workers: list[Worker] = []  # that are members
        self.recipients: list[Worker] = []  # that get from us what our own rank receives
        self.left: list[WorkerResult] = []  # what the members of the last one said to its end
        self.meters = SyncMeters()
        self.announced_bytes = 0  # that the next call which applies something brings each member
        self.ending = ""  # why the present one has to end, once the step that runs is over
        self.ending_status = 0  # of the answer of that step
        self.spoiled: dict[
            str, frozenset[str]
        ] = {}  # names of tensors, by whom they made uncertain
        self.nursery: trio.Nursery | None = None
        self.busy = trio.Lock()  # held by whoever moves the session
        self.after: Callable[[Iterable[str]], None] = lambda _: None  # gets who it left in doubt
        self.leaving: set[str] = set()  # URLs that are being told to leave the group of before
        self._lost: dict[str, str] = {}  # member to the group that it may still be in
        self._lost_now = ""  # the member for whom the present one ends
        self._undoing = False
        self._step_at = 0.0
        self._fan: FanOut | None = None
        self._link: TrainerLink | None = None
        self._watching = trio.CancelScope()
        self._idle = trio.Event()
        self._idle.set()
        self._told = trio.Event()  # whoever was left in a group by our last end
        self._told.set()
        fleet.watch_health(self._follow_health)

    def start(self, nursery: trio.Nursery) -> None:
        """Where our own task failed in the middle of one, that one ends now."""
        self.nursery, self._undoing = nursery, False
        if self.session.state is not SyncState.IDLE:
            self.ending = self.ending or "the proxy's own task for it has failed"
            self.wind_up()

    def stop(self) -> None:
        """Nothing runs any more that could watch over it."""
        self.nursery = None
        if self._link is not None:
            self._link.close()

    def describe(self) -> str:
        """The present one, for somebody who waits for it."""
        owner = self.session.owner
        return owner.in_words(trio.current_time(), self.session.state) if owner else ""

    def begin(self, owner: Owner, place: tuple[str, int], seats: Iterable[RankRange],
              members: Sequence[Member]) -> None:  # fmt: skip
        """Raises OutOfPlace while another one is there."""
        assert self.nursery is not None
        self.session.begin(owner, seats)
        self.members = {member.name: member for member in members}
        self.workers = [m.worker for m in members if isinstance(m, WorkerMember)]
        self.ending, self.left, self.recipients = "", [], []
        self._idle = trio.Event()
        if self.workers:
            # Whoever gets its version from us may come and go: the group does not count on it.
            self.config_store.membership_lock.acquire(self.describe)
        self._link = TrainerLink(*place)
        self._watching = trio.CancelScope()
        self.nursery.start_soon(self._watch, self._watching, self._link)

    async def record(self, path: str) -> None:
        """At the begin of each step. Raises OSError: then nothing may be sent."""
        assert self.session.owner is not None
        self._step_at = trio.current_time()
        await self.book.begin_sync(
            JournalEntry(
                operation=self.session.owner.group_name,
                path=path,
                targets=tuple(worker.url for worker in self._in_question),
                begun_at=datetime.now(UTC).isoformat(),
                step=self.session.state.value,
            )
        )

    async def record_what_was(self) -> None:
        """After the calls: a disk that fails is told of, and stops nothing that has begun."""
        try:
            await self.record("weights update")
        except OSError as error:
            self.book.note(error)

    @property
    def _in_question(self) -> list[Worker]:
        """Whose weights may be about to change."""
        giving = self.session.state is SyncState.VERIFYING
        return [*self.workers, *(self.recipients if giving else ())]

    async def fan_out(self, fan: FanOut, patience: Patience) -> list[WorkerResult]:
        """Whatever ends the sync meanwhile ends this, too."""
        self._fan = fan
        if self.ending:
            fan.fail(self.ending)
        try:
            return await fan.run(patience)
        finally:
            self._fan = None

    async def linked(self, within_secs: float) -> None:
        """Give the connection to the owner a moment to come up."""
        with trio.move_on_after(within_secs):
            while self._link is not None and not self._link.is_open:  # noqa: ASYNC110  # a thread
                await trio.sleep(0.02)

    async def owner_lives(self) -> bool:
        link, owner = self._link, self.session.owner
        if link is None or owner is None:
            return False
        if link.is_open:
            return await link.answers(ALIVE_SECS)
        if self.session.state is SyncState.JOINING:
            return True  # its store may still be coming up
        host, _, port = owner.address.rpartition(":")
        return await reachable(host.strip("[]"), int(port), ALIVE_SECS)

    async def owner_has_hung_up(self) -> bool:
        """What is known at once, before anybody has looked."""
        with trio.move_on_after(GONE_SECS):
            return self._link is not None and await self._link.has_ended()
        return False

    def interrupt(self, cause: str, why: str, name: str = "") -> None:
        """End it from outside; `why` is one word for the metrics."""
        if self.session.state in (SyncState.IDLE, SyncState.ABORTING) or self.ending:
            return
        self.ending, self.ending_status, self._lost_now = cause, STATUS.get(why, 502), name
        self.meters.aborts[why] += 1
        _log.warning("the weight sync of %s ends: %s", self.describe(), cause)
        if self._fan is not None:
            # Where only a member is lost the others may do well, given time.
            self._fan.fail(cause, hurry=not name)
        elif not self.busy.locked():
            self.wind_up()

    def wind_up(self) -> None:
        """No step runs any more: where the sync is over, everybody is told."""
        session = self.session
        if self.ending and session.state not in (SyncState.IDLE, SyncState.ABORTING):
            session.fail(self.ending, self._lost_now)
        if session.state is SyncState.ABORTING and self.nursery is not None and not self._undoing:
            self._undoing = True
            self._watching.cancel()
            self.nursery.start_soon(self._undo)

    async def until_idle(self) -> None:
        await self._idle.wait()

    async def until_settled(self) -> None:
        """Until the end of the last one is behind everybody, and of one that our end cut short."""
        while self._undoing:
            await self._idle.wait()
        await self._told.wait()

    async def clear_left_behind(self) -> None:
        """Members that never answered the end of an earlier one are told again."""
        lost, self._lost = self._lost, {}
        for member in self.members.values():
            if member.name in lost:
                with trio.move_on_after(ALIVE_SECS):
                    await member.destroy(msgspec.json.encode({"group_name": lost[member.name]}))

    def end_of_before(self, nursery: trio.Nursery, urls: Sequence[str], group_name: str) -> None:
        """A group that our own end left behind is taken down, before there is another one."""
        self.leaving, self._told = set(urls), trio.Event()
        nursery.start_soon(self._tell_left_in_group, urls, group_name)

    async def _tell_left_in_group(self, urls: Sequence[str], group_name: str) -> None:
        """They may not be there yet, or no more."""
        body = msgspec.json.encode({"group_name": group_name})

        async def leave(worker: Worker) -> None:
            answer = await self._destroy(WorkerMember(worker, 1), body)
            self.leaving.discard(worker.url)
            if answer.success or answer.refused or worker.url not in self.book.reasons:
                self.after([worker.url])

        try:
            async with trio.open_nursery() as nursery:
                for url in urls:
                    if (worker := self.fleet.find(url)) is not None:
                        nursery.start_soon(leave, worker)
        finally:
            self.leaving.clear()
            self._told.set()

    def spoil(self, doubted: Mapping[str, str], names: Iterable[str]) -> None:
        """These are uncertain for a sync of just those tensors, and healed by one that has them."""
        for url in doubted:
            if url not in self.book.reasons:
                self.spoiled[url] = frozenset(names)
            elif url in self.spoiled:
                self.spoiled[url] |= frozenset(names)
        self.book.mark({u: why for u, why in doubted.items() if self.fleet.find(u)})

    async def _undo(self) -> None:
        session, names = self.session, set(self.session.round.names)
        assert session.owner is not None
        group_name = session.owner.group_name
        body = msgspec.json.encode({"group_name": group_name})
        answers: dict[str, WorkerResult] = {}

        async def leave(member: Member) -> None:
            answers[member.name] = answer = await self._destroy(member, body)
            gone = answer.success or answer.refused
            session.disarm(member.name, ok=gone)
            if not gone:
                self._lost[member.name] = group_name

        async with trio.open_nursery() as nursery:
            for member in self.members.values():
                nursery.start_soon(leave, member)
        self.left = [answers[name] for name in self.members]
        doubted = session.end()
        self.spoil(doubted, names)
        await self.book.settle_sync()
        self.doubt.let_go(doubted)
        if self._link is not None:
            self._link.close()
        await self.config_store.release_membership()
        self.ending, self._undoing = "", False
        self._idle.set()
        self.after([url for url in doubted if url not in self._lost])

    async def _destroy(self, member: Member, body: bytes) -> WorkerResult:
        with trio.move_on_after(UNDO_SECS):
            return await member.destroy(body)
        return WorkerResult(member.name, None, error=f"no answer within {UNDO_SECS:g} s")

    async def _watch(self, scope: trio.CancelScope, link: TrainerLink) -> None:
        with scope:
            await watchdog.watch(self, link)

    def member_lost(self, worker: Worker, why: str) -> None:
        self.interrupt(f"{worker.url} is lost: {why}", "member_lost", worker.url)

    def _follow_health(self, worker: Worker, _: Health) -> None:
        if worker in self.workers and worker.health.state is Health.DEAD:
            self.member_lost(worker, worker.health.last_error or "its health probes fail")

    def status(self) -> dict[str, Any]:
        """JSON-ready: the state, its owner, and how each member stands."""
        session, now = self.session, trio.current_time()
        owner = session.owner if session.state is not SyncState.IDLE else None
        return {
            "state": session.state.value,
            "owner": owner.told(now) if owner else None,
            "step_secs": round(now - self._step_at, 3) if owner else 0.0,
            "open": session.open,
            "buckets": session.round.buckets,
            "members": [self._row(name) for name in session.parts] if owner else [],
            "last_cause": session.cause or None,
        }

    def _row(self, name: str) -> dict[str, Any]:
        seat = self.session.parts[name].seat
        asked, answers = self._fan is not None, self._fan.answers if self._fan else {}
        answer = answers.get(name)
        said = "done" if answer and answer.success else "failed" if answer else "asked"
        progress = getattr(self.members.get(name), "status", None)
        return {
            "member": name,
            "rank_offset": seat.offset,
            "ranks": seat.ranks,
            "standing": self.session.standings()[name],
            "progress": said if asked else "idle",
            **({"receive": progress()} if callable(progress) else {}),
        }

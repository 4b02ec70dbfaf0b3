"""Lifecycle of a weight sync with a trainer's group: begin, record, interrupt, tear down.

Invariant: when a sync ends for any reason, every participant is called to leave its group, every
worker that may hold new weights is marked uncertain, and only then may the set of workers change
again. A new group begins only after the participants of an interrupted one (in the journal), and
participants that did not answer when an earlier one ended, were called to leave it. Nothing here
waits for the operation lock, so the loss of a trainer is handled within seconds, whatever is
queued.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import trio

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.telemetry.metrics import SyncMetrics
from omni_proxy.weight_sync.protocol.journal import JournalEntry
from omni_proxy.weight_sync.protocol.requests import TRANSFER_GROUP, RankRange
from omni_proxy.weight_sync.protocol.trainer_group import GroupOwner, SyncState, WeightSync
from omni_proxy.weight_sync.state_journal import OperationContext, StateJournal
from omni_proxy.weight_sync.sync import watchdog
from omni_proxy.weight_sync.sync.engine_pauses import OwnPauses
from omni_proxy.weight_sync.sync.participant import (
    FanOutTimeouts,
    GroupFanOut,
    Participant,
    TransferParticipant,
    WorkerParticipant,
)
from omni_proxy.weight_sync.sync.verification import ChangingVersions
from omni_proxy.weight_sync.sync.watchdog import TrainerLink, is_store_reachable


def sync_status(
    sync: WeightSync,
    participants: Mapping[str, Participant],
    fan_out: GroupFanOut | None,
    now: float,
    step_at: float,
) -> dict[str, Any]:
    """The state, the owner, and a row per participant.

    `step_at`: start time of the current step.
    """
    owner = sync.owner if sync.state is not SyncState.IDLE else None
    return {
        "state": sync.state.value,
        "owner": owner.to_dict(now) if owner else None,
        "step_secs": round(now - step_at, 3) if owner else 0.0,
        "open": sync.has_unpublished,
        "buckets": sync.round.buckets,
        "members": [_participant_row(sync, participants.get(name), fan_out, name)
                    for name in sync.participant_states] if owner else [],
        "last_cause": sync.cause or None,
    }  # fmt: skip


def _participant_row(
    sync: WeightSync, participant: Participant | None, fan_out: GroupFanOut | None, name: str
) -> dict[str, Any]:
    rank_range = sync.participant_states[name].rank_range
    result = fan_out.results.get(name) if fan_out is not None else None
    answered = "done" if result and result.success else "failed" if result else "asked"
    progress = getattr(participant, "status", None)
    return {
        "member": name,
        "rank_offset": rank_range.offset,
        "ranks": rank_range.rank_count,
        "standing": sync.participant_statuses()[name],
        "progress": answered if fan_out is not None else "idle",
        **({"receive": progress()} if callable(progress) else {}),
    }


DESTROY_TIMEOUT_SECS: Final = 10.0
RETRY_TIMEOUT_SECS: Final = 2.0


def destroy_body(group_name: str) -> bytes:
    return msgspec.json.encode({"group_name": group_name})


async def destroy_group(participant: Participant, body: bytes) -> WorkerResult:
    """Call a participant to leave its group; without an answer in time the result is an error."""
    with trio.move_on_after(DESTROY_TIMEOUT_SECS):
        return await participant.destroy(body)
    return WorkerResult(
        participant.name, None, error=f"no answer within {DESTROY_TIMEOUT_SECS:g} s"
    )


class LeftoverGroups:
    """Takes down groups that ended without an orderly destroy.

    `leaving`: URLs of workers that are being called to leave an interrupted group.
    `unanswered`: participant name to the group that it may still be in.
    """

    def __init__(self, fleet: Fleet, journal: StateJournal) -> None:
        self.leaving: set[str] = set()
        self.unanswered: dict[str, str] = {}
        self.own_pauses = OwnPauses(fleet, journal)
        self._fleet = fleet
        self._journal = journal
        self._cleaned = trio.Event()
        self._cleaned.set()

    async def wait_cleaned(self) -> None:
        """Wait until the participants of an interrupted group were called to leave it."""
        await self._cleaned.wait()

    async def leave_unanswered(self, participants: Iterable[Participant]) -> None:
        """Call participants again that did not answer when an earlier group ended."""
        unanswered, self.unanswered = self.unanswered, {}
        for participant in participants:
            if participant.name in unanswered:
                with trio.move_on_after(RETRY_TIMEOUT_SECS):
                    await participant.destroy(destroy_body(unanswered[participant.name]))

    def start_cleanup(
        self,
        nursery: trio.Nursery,
        urls: Sequence[str],
        group_name: str,
        on_left: Callable[[Iterable[str]], None],
    ) -> None:
        """Call participants of an interrupted group to leave it; `on_left` gets URLs to probe."""
        self.leaving, self._cleaned = set(urls), trio.Event()
        nursery.start_soon(self._clean_up, urls, group_name, on_left)

    async def _clean_up(
        self, urls: Sequence[str], group_name: str, on_left: Callable[[Iterable[str]], None]
    ) -> None:
        """Call each worker that is still in the fleet; it may not be up yet."""
        body = destroy_body(group_name)

        def participant_of(worker: Worker) -> Participant:
            if group_name != TRANSFER_GROUP:
                return WorkerParticipant(worker, 1)
            participant = TransferParticipant(worker, 1)
            participant.may_have_open_update = worker.url in self._journal.uncertain
            return participant

        async def leave(worker: Worker) -> None:
            result = await destroy_group(participant_of(worker), body)
            await self.own_pauses.end([worker], {})
            self.leaving.discard(worker.url)
            if result.success or result.refused or worker.url not in self._journal.uncertain:
                on_left([worker.url])

        try:
            async with trio.open_nursery() as nursery:
                for url in urls:
                    if (worker := self._fleet.find(url)) is not None:
                        nursery.start_soon(leave, worker)
        finally:
            self.leaving.clear()
            self._cleaned.set()


PING_TIMEOUT_SECS: Final = 2.0
DISCONNECT_TIMEOUT_SECS: Final = 0.5
LINK_POLL_SECS: Final = 0.02
# Response status by the reason of an interrupt: 400 if the trainer or a participant failed, 409 if
# a call ended the sync. Other reasons are 502.
STATUS: Final = {
    "owner_dead": 400,
    "owner_unreachable": 400,
    "stall": 400,
    "member_failed": 400,
    "destroyed": 409,
    "aborted": 409,
    "forced": 409,
    "resumed": 409,
}
_log = logging.getLogger(__name__)


class SyncLifecycle:
    """The sync, one at a time: `begin` opens it; `interrupt` or `end_if_over` ends it."""

    def __init__(self, context: OperationContext) -> None:
        self.fleet, self.config_store = context.fleet, context.config_store
        self.journal = context.journal
        self.sync = WeightSync()
        self.changing_versions = ChangingVersions(context.fleet)
        self.leftovers = LeftoverGroups(context.fleet, context.journal)
        self.participants: dict[str, Participant] = {}
        self.workers: list[Worker] = []  # workers that are participants
        self.recipients: list[Worker] = []  # workers that get what the proxy's rank receives
        self.leave_results: list[
            WorkerResult
        ] = []  # participants' answers when the last sync ended
        self.meters = SyncMetrics()
        self.announced_bytes = 0  # size for each participant of the next call that applies weights
        self.chosen: frozenset[str] | None = None  # URLs that the init's selector chose; None: all
        self.end_cause = ""  # why the sync has to end after the current step
        self.end_status = 0  # HTTP status of the response to that step
        # For workers that a sync made uncertain: names of tensors that may be partly updated.
        self.uncertain_tensors: dict[str, frozenset[str]] = {}
        self.nursery: trio.Nursery | None = None
        self.busy = trio.Lock()  # held while a step changes the sync
        # Called with URLs of workers to probe, because the sync left them uncertain.
        self.on_left: Callable[[Iterable[str]], None] = lambda _: None
        self._lost_participant = ""  # the participant whose loss ends the sync
        self._tearing_down = False
        self._step_at = 0.0
        self._fan_out: GroupFanOut | None = None
        self._link: TrainerLink | None = None
        self._watching = trio.CancelScope()
        self._idle = trio.Event()
        self._idle.set()
        context.fleet.watch_health(self._on_health_change)

    def start(self, nursery: trio.Nursery) -> None:
        """Start in `nursery`. A sync that was running when the service restarted ends now."""
        self.nursery, self._tearing_down = nursery, False
        if self.sync.state is not SyncState.IDLE:
            self.end_cause = self.end_cause or "the proxy's task for the sync has failed"
            self.end_if_over()

    def stop(self) -> None:
        """Stop watching the trainer, because the service ends."""
        self.nursery = None
        if self._link is not None:
            self._link.close()

    def describe(self) -> str:
        """Description of the current sync for error messages; "" if there is none."""
        owner = self.sync.owner
        return owner.describe(trio.current_time(), self.sync.state) if owner else ""

    @property
    def leaving(self) -> set[str]:
        """URLs of workers that are being called to leave a group of an earlier run."""
        return self.leftovers.leaving

    def begin(self, owner: GroupOwner, address: tuple[str, int] | None,
              ranges: Iterable[RankRange], participants: Sequence[Participant], *,
              fixed_ranks: bool = True) -> None:  # fmt: skip
        """Open a sync. Raises InvalidTransition while there is another one.

        `address`: the trainer's store, which is watched; None if the trainer has none.
        `fixed_ranks`: the participants have ranks, so no worker may join or leave the fleet during
        the sync.
        """
        assert self.nursery is not None
        self.sync.begin(owner, ranges)
        self.participants = {participant.name: participant for participant in participants}
        self.workers = [m.worker for m in participants if isinstance(m, WorkerParticipant)]
        self.end_cause, self.leave_results, self.recipients = "", [], []
        self._idle = trio.Event()
        if self.workers and fixed_ranks:
            # Workers that only receive from the proxy may join and leave: they have no ranks.
            self.config_store.membership_lock.acquire(self.describe)
        self._link = TrainerLink(*address) if address is not None else None
        self._watching = trio.CancelScope()
        self.nursery.start_soon(self._watch, self._watching, self._link)

    async def record(self, path: str) -> None:
        """Write the step to the journal before its calls. Raises OSError: then send no call."""
        assert self.sync.owner is not None
        self._step_at = trio.current_time()
        await self.journal.begin_sync(
            JournalEntry(
                operation=self.sync.owner.group_name,
                path=path,
                targets=tuple(worker.url for worker in self._affected_workers),
                begun_at=datetime.now(UTC).isoformat(),
                step=self._recorded_step,
            )
        )

    async def record_after_step(self) -> None:
        """Write the state after the calls. A disk error is reported but does not fail the step."""
        try:
            await self.record("weights update")
        except OSError as error:
            self.journal.record_error(error)

    @property
    def _recorded_step(self) -> str:
        """The state's name, or "open" between the calls of a round that is not published."""
        state = self.sync.state
        grouped = state is SyncState.GROUPED and self.sync.has_unpublished
        return "open" if grouped else state.value

    @property
    def own_pauses(self) -> OwnPauses:
        return self.leftovers.own_pauses

    @property
    def _affected_workers(self) -> list[Worker]:
        """Workers whose weights the next calls may change."""
        delivers = self.sync.state is SyncState.VERIFYING
        return [*self.workers, *(self.recipients if delivers else ())]

    async def fan_out(self, fan_out: GroupFanOut, timeouts: FanOutTimeouts) -> list[WorkerResult]:
        """Run `fan_out`; an interrupt of the sync fails it."""
        self._fan_out = fan_out
        if self.end_cause:
            fan_out.fail(self.end_cause)
        try:
            return await fan_out.run(timeouts)
        finally:
            self._fan_out = None

    async def wait_linked(self, timeout_secs: float) -> None:
        """Wait up to `timeout_secs` until the connection to the trainer's store is open."""
        with trio.move_on_after(timeout_secs):
            while self._link is not None and not self._link.is_open:  # noqa: ASYNC110  # a thread
                await trio.sleep(LINK_POLL_SECS)

    def leave_idle_group(self) -> bool:
        """Take down a vLLM weight-transfer group without an open update. Returns whether it did."""
        sync = self.sync
        idle = sync.state is SyncState.GROUPED and not sync.has_unpublished
        owner = sync.owner
        if not idle or self.busy.locked() or not owner or owner.group_name != TRANSFER_GROUP:
            return False
        sync.leave()
        self.end_if_over()
        return True

    async def is_owner_alive(self) -> bool:
        link, owner = self._link, self.sync.owner
        if owner is None:
            return False
        if link is None:
            return True  # no connection to watch
        if link.is_open:
            return await link.ping(PING_TIMEOUT_SECS)
        if self.sync.state is SyncState.JOINING:
            return True  # its store may still be starting
        host, _, port = owner.address.rpartition(":")
        return await is_store_reachable(host.strip("[]"), int(port), PING_TIMEOUT_SECS)

    async def has_owner_disconnected(self) -> bool:
        """Check the connection now, since the watchdog may not have polled it yet."""
        with trio.move_on_after(DISCONNECT_TIMEOUT_SECS):
            return self._link is not None and await self._link.has_ended()
        return False

    def interrupt(self, cause: str, reason: str, name: str = "") -> None:
        """End the sync.

        `reason`: one word for the metrics; `name`: the lost participant, if one is.
        """
        if self.sync.state in (SyncState.IDLE, SyncState.ABORTING) or self.end_cause:
            return
        self.end_cause, self.end_status, self._lost_participant = (
            cause,
            STATUS.get(reason, 502),
            name,
        )
        self.meters.aborts[reason] += 1
        _log.warning(
            "weight_sync_aborted reason=%s sync=%s cause=%s", reason, self.describe(), cause
        )
        if self._fan_out is not None:
            # If only one participant is lost, the others may still succeed.
            self._fan_out.fail(cause, all_fail=not name)
        elif not self.busy.locked():
            self.end_if_over()

    def end_if_over(self) -> None:
        """If the sync has to end, call all participants to leave.

        Call it only while no step runs.
        """
        sync = self.sync
        if self.end_cause and sync.state not in (SyncState.IDLE, SyncState.ABORTING):
            sync.fail(self.end_cause, self._lost_participant)
        is_over = sync.state is SyncState.ABORTING
        if is_over and self.nursery is not None and not self._tearing_down:
            self._tearing_down = True
            self._watching.cancel()
            self.nursery.start_soon(self._tear_down)

    async def wait_idle(self) -> None:
        await self._idle.wait()

    async def wait_settled(self) -> None:
        """Wait until the last sync, and one of an earlier run of the proxy, are taken down."""
        while self._tearing_down:
            await self._idle.wait()
        await self.leftovers.wait_cleaned()

    def start_leftover_cleanup(
        self, nursery: trio.Nursery, urls: Sequence[str], group_name: str
    ) -> None:
        """Take down the group of an earlier run of the proxy before a new one begins."""
        self.leftovers.start_cleanup(
            nursery, urls, group_name, lambda leftovers: self.on_left(leftovers)
        )

    def mark_uncertain(self, reasons: Mapping[str, str], names: Iterable[str]) -> None:
        """Mark workers uncertain; `reasons` by URL.

        `names`: tensors that may be partly updated. A later sync with all of them repairs a worker.
        """
        for url in reasons:
            if url not in self.journal.uncertain:
                self.uncertain_tensors[url] = frozenset(names)
            elif url in self.uncertain_tensors:
                self.uncertain_tensors[url] |= frozenset(names)
        self.journal.mark_uncertain(
            {u: reason for u, reason in reasons.items() if self.fleet.find(u)}
        )

    async def _tear_down(self) -> None:
        sync, names = self.sync, set(self.sync.round.names)
        assert sync.owner is not None
        group_name = sync.owner.group_name
        body = destroy_body(group_name)
        results: dict[str, WorkerResult] = {}

        async def leave(participant: Participant) -> None:
            results[participant.name] = result = await destroy_group(participant, body)
            has_left = result.success or result.refused
            sync.on_left(participant.name, ok=has_left)
            if not has_left:
                self.leftovers.unanswered[participant.name] = group_name

        async with trio.open_nursery() as nursery:
            for participant in self.participants.values():
                nursery.start_soon(leave, participant)
        self.leave_results = [results[name] for name in self.participants]
        uncertain = sync.end()
        self.mark_uncertain(uncertain, names)
        await self.own_pauses.end(self.workers, {})
        await self.journal.finish_sync()
        self.changing_versions.release(uncertain)
        if self._link is not None:
            self._link.close()
        await self.config_store.release_membership()
        self.end_cause, self._tearing_down = "", False
        self._idle.set()
        self.on_left([url for url in uncertain if url not in self.leftovers.unanswered])

    async def _watch(self, scope: trio.CancelScope, link: TrainerLink | None) -> None:
        with scope:
            await watchdog.watch(self, link)

    def on_participant_lost(self, worker: Worker, reason: str) -> None:
        self.interrupt(f"{worker.url} is lost: {reason}", "member_lost", worker.url)

    def _on_health_change(self, worker: Worker, _: Health) -> None:
        if worker in self.workers and worker.health.state is Health.DEAD:
            self.on_participant_lost(worker, worker.health.last_error or "its health probes fail")

    def status(self) -> dict[str, Any]:
        """JSON-ready."""
        now = trio.current_time()
        return sync_status(self.sync, self.participants, self._fan_out, now, self._step_at)

"""The steps of a weight update in vLLM's dialect: init, start, update any number of times, finish.

They extend the steps of steps.py by a start and a finish. The group is of trainer and engines; the
proxy does not join it. Invariant: no participant serves between the start and a successful finish,
because vLLM's engines have no complete weights then, even if no bytes arrived. After a failed round
its changed participants stay out of rotation until a complete one succeeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import trio

from omni_proxy.admin_ops.engine_dialects import (
    START_DRAFT_UPDATE,
    TRANSFER_INIT,
    UPDATE_WEIGHTS,
    WORLD_SIZE,
)
from omni_proxy.admin_ops.results import AdminResponse, WorkerResult
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import Call
from omni_proxy.weight_sync.protocol.requests import (
    TRANSFER_GROUP,
    RankRange,
    TransferInit,
    UpdateFlags,
    assign_ranks,
    parse_finish,
    parse_object,
    parse_transfer_init,
    parse_transfer_update,
)
from omni_proxy.weight_sync.protocol.trainer_group import (
    GroupOwner,
    InvalidTransition,
    SyncEvent,
    SyncState,
)
from omni_proxy.weight_sync.sync.participant import (
    ACTIVE,
    FanOutTimeouts,
    Participant,
    TransferParticipant,
)
from omni_proxy.weight_sync.sync.steps import GRACE_SECS, SyncSteps, parse_in_thread
from omni_proxy.weight_sync.worker_calls import AdminCall, call_all, limit_secs
from omni_proxy.wire.errors import HttpError

NO_TRANSFER: Final = f"there is no weight transfer: call {TRANSFER_INIT} first"
NOT_STARTED: Final = "no weight update is open: call /start_weight_update first"
STILL_OPEN: Final = (
    "a weight update is open: finish it first, or let another init take it over with force"
)


class TransferSteps(SyncSteps):
    """One method per step of vLLM's dialect. The caller holds `SyncLifecycle.busy`."""

    async def init_transfer(self, call: AdminCall, workers: Sequence[Worker]) -> AdminResponse:
        lifecycle = self._lifecycle
        body = await parse_in_thread(call.body, parse_object, call.body)
        request = parse_transfer_init(body)
        lifecycle.sync.check(SyncEvent.INIT)
        participants = await self._transfer_participants(workers, call.credentials)
        ranges = _layout(request, participants)
        now = trio.current_time()
        owner = GroupOwner(TRANSFER_GROUP, request.shown_address, now, call.caller)
        offset_from_trainer = request.rank_offset is not None
        lifecycle.begin(
            owner, request.address, ranges, participants, fixed_ranks=offset_from_trainer
        )
        range_of = {rank_range.name: rank_range for rank_range in ranges}
        return await self._join(
            call,
            ranges,
            lambda participant: _transfer(participant).join(request, range_of[participant.name]),
        )

    async def start(self, call: AdminCall) -> AdminResponse:
        lifecycle = self._lifecycle
        self._require_transfer()
        lifecycle.sync.start(whole=call.route.path != START_DRAFT_UPDATE)
        await self._record(call)
        await self._commit.quiesce(lifecycle.workers, call.route.name)
        await lifecycle.own_pauses.begin(lifecycle.workers, call.credentials)
        secs = limit_secs(lifecycle.config_store.config.admin.worker_timeout_secs)
        return await self._fan_out_apply(
            call,
            lambda participant: _transfer(participant).call(call.route.path, call.body),
            FanOutTimeouts(secs, GRACE_SECS),
            _touched_by_start,
        )

    async def update_transfer(self, call: AdminCall) -> AdminResponse:
        """Forward one chunk of weights; return when all participants have received it."""
        lifecycle, config = self._lifecycle, self._lifecycle.config_store.config.weight_sync
        self._require_open()
        body = await parse_in_thread(call.body, parse_object, call.body)
        rank_count = sum(participant.rank_count for participant in lifecycle.participants.values())
        request = parse_transfer_update(call.body, body, rank_count)
        lifecycle.announced_bytes = request.nbytes
        lifecycle.sync.update(UpdateFlags(), request.names)
        await self._record(call)
        states = lifecycle.sync.participant_states.values()
        first_rank = min(state.rank_range.offset for state in states)
        return await self._fan_out_apply(
            call,
            lambda participant: _transfer(participant).receive(UPDATE_WEIGHTS, request, first_rank),
            FanOutTimeouts(limit_secs(config.receive_timeout_secs), GRACE_SECS),
        )

    async def finish(self, call: AdminCall) -> AdminResponse:
        """Finish the update on all participants, then prove and publish it."""
        self._require_open()
        body = await parse_in_thread(call.body, parse_object, call.body)
        flags = UpdateFlags(weight_version=parse_finish(body))
        self._lifecycle.sync.commit_end(flags)
        self._commit.on_call(flags, flushes=False)
        return await self._end(call)

    async def shut_down(self, call: AdminCall) -> AdminResponse:
        """Destroy the group. As in vLLM, this is refused while an update is open."""
        self._require_transfer()
        if self._lifecycle.sync.has_unpublished:
            raise InvalidTransition(409, STILL_OPEN)
        return await self._leave(call)

    async def _transfer_participants(
        self, workers: Sequence[Worker], headers: Mapping[str, str]
    ) -> list[Participant]:
        """Participants with their current rank counts. Raises HttpError 422, 502."""
        secs = self._lifecycle.config_store.config.health.timeout_secs
        call = Call("GET", WORLD_SIZE, headers=headers, timeout_secs=secs)
        results = await call_all(workers, call)
        other_engines = [result.worker for result in results if result.sent_to]
        if other_engines:
            message = (
                f"nothing was forwarded: {', '.join(other_engines)} cannot be ranks of a "
                "vLLM weight-transfer group. Name the vLLM workers in "
                "?selector=, and update the others from disk"
            )
            raise HttpError(422, message, "mixed_engines", detail=message)
        participants: list[Participant] = []
        for worker, result in zip(workers, results, strict=True):
            size = result.body.get("world_size") if isinstance(result.body, dict) else None
            if not result.success or type(size) is not int or size < 1:
                reason = result.reason if not result.success else f"world_size is {size!r}"
                message = f"nothing was forwarded: {worker.url} does not report its ranks: {reason}"
                raise HttpError(502, message, "ranks_unknown")
            participant = TransferParticipant(worker, size)
            participant.headers = dict(headers)
            participant.may_have_open_update = worker.url in self._lifecycle.journal.uncertain
            participants.append(participant)
        return participants

    def _require_transfer(self) -> None:
        sync = self._lifecycle.sync
        owner = sync.owner
        if sync.state in (SyncState.IDLE, SyncState.ABORTING) or owner is None:
            cause = f"; the last one ended: {sync.cause}" if sync.cause else ""
            raise InvalidTransition(400, NO_TRANSFER + cause)
        if owner.group_name != TRANSFER_GROUP:
            now = trio.current_time()
            raise InvalidTransition(409, f"there is {owner.describe(now, sync.state)}")

    def _require_open(self) -> None:
        self._require_transfer()
        if not self._lifecycle.sync.has_unpublished:
            raise InvalidTransition(400, NOT_STARTED)


def _layout(request: TransferInit, participants: Sequence[Participant]) -> tuple[RankRange, ...]:
    """Assign ranks in the participants' order, from the trainer's offset on, by default from 0."""
    counts = {participant.name: participant.rank_count for participant in participants}
    if request.rank_offset is not None and request.world_size is not None:
        return assign_ranks(request.rank_offset, request.world_size, counts)
    ranges, offset = [], 0
    for name, count in counts.items():
        ranges.append(RankRange(name, count, offset))
        offset += count
    return tuple(ranges)


def _transfer(participant: Participant) -> TransferParticipant:
    assert isinstance(participant, TransferParticipant)
    return participant


def _touched_by_start(results: Sequence[WorkerResult]) -> set[str]:
    """Workers that may have opened the update, and so no longer have complete weights.

    If every participant refused with a complete response, none has: a common setting is the cause.
    """
    all_refused = all(not result.success and result.status is not None for result in results)
    open_before = [r for r in results if not r.success and not _is_plain_refusal(r)]
    if all_refused and not open_before:
        return set()
    return {result.worker for result in results}


def _is_plain_refusal(result: WorkerResult) -> bool:
    """Whether a refusal changed nothing; "already active" means that an update is open."""
    return result.status is not None and ACTIVE not in result.reason

"""The steps of a weight sync: each call of the trainer is sent to all participants concurrently.

Invariant: a step is validated and recorded before its first call is sent. A step that fails at one
participant fails as a whole, and is undone at the others. Steps have no timeouts except those of
the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import trio

from omni_proxy.admin_ops.engine_dialects import SERVER_INFO_PATHS
from omni_proxy.admin_ops.results import AdminResponse, WorkerResult, as_one
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import ROUTE_ABSENT, Call, broadcast
from omni_proxy.weight_sync.delivery.service import VersionService
from omni_proxy.weight_sync.protocol.participant_reports import (
    StepFailure,
    merge_results,
    received_bytes,
    with_bucket_count,
    with_ready_status,
)
from omni_proxy.weight_sync.protocol.requests import (
    LARGE_BYTES,
    RankRange,
    assign_ranks,
    count_ranks,
    parse_flags,
    parse_group_name,
    parse_init,
    parse_object,
    parse_prepare,
)
from omni_proxy.weight_sync.protocol.trainer_group import (
    GroupOwner,
    InvalidTransition,
    SyncEvent,
    SyncState,
)
from omni_proxy.weight_sync.sync.commit import JsonObject, RoundCommit, is_unchanged
from omni_proxy.weight_sync.sync.lifecycle import SyncLifecycle
from omni_proxy.weight_sync.sync.participant import (
    FanOutTimeouts,
    GroupFanOut,
    Participant,
    ParticipantCall,
    WorkerParticipant,
)
from omni_proxy.weight_sync.worker_calls import AdminCall, limit_secs
from omni_proxy.wire.errors import HttpError

Changed = Callable[[Sequence[WorkerResult]], set[str]]
GRACE_SECS: Final = 3.0  # time for the other participants' results after one participant failed
LINK_SECS: Final = 1.0
V = TypeVar("V")
T = TypeVar("T")


class SyncSteps:
    """One method per step. The caller holds `SyncLifecycle.busy`."""

    def __init__(
        self, lifecycle: SyncLifecycle, commit: RoundCommit, version_service: VersionService
    ) -> None:
        self._lifecycle = lifecycle
        self._commit = commit
        self._version_service = version_service

    async def init(self, call: AdminCall, workers: Sequence[Worker]) -> AdminResponse:
        lifecycle, config = self._lifecycle, self._lifecycle.config_store.config.weight_sync
        body = await parse_in_thread(call.body, parse_object, call.body)
        request = parse_init(body)
        lifecycle.sync.check(SyncEvent.INIT)
        participants = await self._build_participants(workers, call.credentials)
        counts = {participant.name: participant.rank_count for participant in participants}
        ranges = assign_ranks(request.rank_offset, request.world_size, counts)
        body["master_port"] = request.port
        if config.backend != "auto":
            body["backend"] = config.backend
        owner = GroupOwner(request.group_name, request.address, trio.current_time(), call.caller)
        lifecycle.begin(owner, (request.host, request.port), ranges, participants)
        offsets = {rank_range.name: rank_range.offset for rank_range in ranges}
        return await self._join(
            call,
            ranges,
            lambda participant: participant.init(
                body, offsets[participant.name], request.world_size
            ),
        )

    async def _join(
        self, call: AdminCall, ranges: Sequence[RankRange], participant_call: ParticipantCall
    ) -> AdminResponse:
        """Call all participants to join the group, after `SyncLifecycle.begin`."""
        lifecycle, config = self._lifecycle, self._lifecycle.config_store.config.weight_sync
        lifecycle.chosen = call.chosen
        await self._record(call)
        await lifecycle.leftovers.leave_unanswered(lifecycle.participants.values())
        timeouts = FanOutTimeouts(limit_secs(config.init_timeout_secs))
        results, cause = await self._fan_out(participant_call, timeouts)
        if not cause:
            await lifecycle.wait_linked(LINK_SECS)
            await lifecycle.record_after_step()
        layout: JsonObject = {"layout": [_layout_row(rank_range) for rank_range in ranges]}
        return self._response(call, results, cause, layout)

    async def prepare(self, call: AdminCall) -> AdminResponse:
        lifecycle, config = self._lifecycle, self._lifecycle.config_store.config.weight_sync
        lifecycle.sync.check(SyncEvent.PREPARE)
        body = await parse_in_thread(call.body, parse_object, call.body)
        self._require_group(body)
        request = await parse_in_thread(body, parse_prepare, call.body)
        lifecycle.announced_bytes = request.nbytes
        lifecycle.sync.arm(batched=request.batched, buckets=request.buckets, names=request.names)
        await self._record(call)
        results, cause = await self._fan_out(
            lambda participant: participant.prepare(call.body),
            FanOutTimeouts(limit_secs(config.ready_timeout_secs)),
        )
        if request.batched and not cause:  # otherwise the version has several files, or none
            self._version_service.start_prefetch(lifecycle.fleet.workers, call.credentials)
        return with_ready_status(self._response(call, results, cause, {}))

    async def complete(self, call: AdminCall) -> AdminResponse:
        lifecycle = self._lifecycle
        lifecycle.sync.check(SyncEvent.COMPLETE)
        body = await parse_in_thread(call.body, parse_object, call.body)
        self._require_group(body)
        flags = parse_flags(body)
        lifecycle.sync.commit(flags)
        self._commit.on_call(flags, flushes=flags.flush_cache is True)
        return await self._apply(call, lambda participant: participant.complete(call.body))

    async def update(self, call: AdminCall) -> AdminResponse:
        """Prepare and complete in one call. Engines flush their caches unless disabled."""
        lifecycle = self._lifecycle
        lifecycle.sync.check(SyncEvent.UPDATE)
        body = await parse_in_thread(call.body, parse_object, call.body)
        self._require_group(body)
        request = await parse_in_thread(body, parse_prepare, call.body)
        flags = parse_flags(body)
        lifecycle.announced_bytes = request.nbytes
        lifecycle.sync.update(flags, request.names)
        self._commit.on_call(flags, flushes=flags.flush_cache is not False)
        return await self._apply(call, lambda participant: participant.update(call.body))

    async def end(self, call: AdminCall) -> AdminResponse:
        """End the round: the call is forwarded to the workers, then the round is committed."""
        self._lifecycle.sync.commit_end()
        return await self._end(call)

    async def _end(self, call: AdminCall) -> AdminResponse:
        lifecycle = self._lifecycle
        await self._record(call)

        async def end(participant: Participant) -> WorkerResult:
            if isinstance(participant, WorkerParticipant):
                return await participant.call(call.route.path, call.body)
            return WorkerResult(participant.name, 200, {"success": True})

        secs = limit_secs(lifecycle.config_store.config.admin.worker_timeout_secs)
        return await self._fan_out_apply(call, end, FanOutTimeouts(secs, GRACE_SECS))

    async def destroy(self, call: AdminCall) -> AdminResponse:
        lifecycle = self._lifecycle
        lifecycle.sync.check(SyncEvent.DESTROY)
        body = await parse_in_thread(call.body, parse_object, call.body)
        self._require_group(body)
        return await self._leave(call)

    async def _leave(self, call: AdminCall) -> AdminResponse:
        """Destroy the group; a round that all participants have applied is published first."""
        lifecycle = self._lifecycle
        more: JsonObject = {}
        if lifecycle.sync.has_unpublished and lifecycle.sync.state is SyncState.GROUPED:
            more = await self._commit.close(call.credentials)
        if lifecycle.sync.state is not SyncState.ABORTING:
            lifecycle.sync.leave()
        lifecycle.end_if_over()
        await lifecycle.wait_idle()
        response = self.destroyed_response(call)
        if more.get("uncertain") or (more and self._commit.cause):
            reason = self._commit.cause or "not all workers agree"
            return _failed(response, f"the group is destroyed, but {reason}", more)
        return AdminResponse(response.status, {**response.body, **more})

    def destroyed_response(self, call: AdminCall) -> AdminResponse:
        """The participants' answers to the teardown that served this call.

        A refusal is a success: after an earlier failure a participant may have left the group
        already.
        """
        results = self._lifecycle.leave_results
        response = merge_results(call.route.path, results, self._lifecycle.sync)
        if response.ok or not all(result.success or result.refused for result in results):
            return response
        message = "the group is destroyed; some participants had already left it"
        return AdminResponse(
            200, {**response.body, "success": True, "status": "ok", "message": message}
        )

    async def _apply(self, call: AdminCall, participant_call: ParticipantCall) -> AdminResponse:
        lifecycle, config = self._lifecycle, self._lifecycle.config_store.config.weight_sync
        await self._record(call)
        await self._commit.quiesce(lifecycle.workers, call.route.name)
        timeouts = FanOutTimeouts(
            limit_secs(config.receive_timeout_secs),
            GRACE_SECS,
            lambda participant: participant.destroy(call.body),
        )
        return await self._fan_out_apply(call, participant_call, timeouts)

    async def _fan_out_apply(
        self,
        call: AdminCall,
        participant_call: ParticipantCall,
        timeouts: FanOutTimeouts,
        changed: Changed | None = None,
    ) -> AdminResponse:
        """Send an applying call to all participants; commit the round if it was the last one.

        `changed`: returns the workers whose weights may have changed; by default each result's
        text decides.
        """
        lifecycle, sync = self._lifecycle, self._lifecycle.sync
        batched = sync.round.batched
        fan_out = GroupFanOut(list(lifecycle.participants.values()), participant_call)
        results = await lifecycle.fan_out(fan_out, timeouts)
        modified = changed(results) if changed is not None else None
        for result in results:
            touched = result.success or not is_unchanged(result, batched=batched)
            if modified is not None:
                touched = result.worker in modified
            sync.on_result(result, modified=touched)
            if result.success:
                lifecycle.meters.nbytes += received_bytes(result) or lifecycle.announced_bytes
        lifecycle.announced_bytes = 0
        failure = sync.cause = "" if sync.all_ok else fan_out.cause
        more: JsonObject = {}
        if sync.finish_step() is SyncState.VERIFYING:
            more = await self._commit.close(call.credentials)
            results = self._commit.with_delivery_results(results)
            failure = self._commit.failure(failure)
        elif sync.state is SyncState.GROUPED:
            await lifecycle.record_after_step()
        response = with_bucket_count(self._response(call, results, failure, more), results)
        if not failure and more.get("uncertain"):
            message = "every participant applied the weights, but their checksums differ"
            return _failed(response, message, more)
        return response

    async def _fan_out(
        self, participant_call: ParticipantCall, timeouts: FanOutTimeouts
    ) -> tuple[list[WorkerResult], str]:
        """Returns the participants' results, and why the step failed, or ""."""
        lifecycle, sync = self._lifecycle, self._lifecycle.sync
        fan_out = GroupFanOut(list(lifecycle.participants.values()), participant_call)
        results = await lifecycle.fan_out(fan_out, timeouts)
        for result in results:
            sync.on_result(result)
        if fan_out.cause and sync.all_ok:
            sync.fail(fan_out.cause)
        else:
            sync.cause = fan_out.cause
            sync.finish_step()
        return results, fan_out.cause

    async def _record(self, call: AdminCall) -> None:
        """Write the step to the journal. On failure ends the sync and raises HttpError 503."""
        try:
            await self._lifecycle.record(call.route.path)
        except OSError as error:
            reason = error.strerror or error
            path = self._lifecycle.journal.path
            message = f"nothing was sent: the journal {path} can't be written: {reason}"
            self._lifecycle.sync.fail(message)
            raise HttpError(503, message, "journal_unwritable") from None

    async def _build_participants(
        self, workers: Sequence[Worker], headers: Mapping[str, str]
    ) -> list[Participant]:
        """Participants with their current rank counts.

        Raises HttpError 502 if a worker reports none.
        """
        versions = self._version_service
        if versions.delivers_to_all:
            return [versions.proxy_rank]
        secs = self._lifecycle.config_store.config.health.timeout_secs
        rank_counts: dict[Worker, int] = {}
        remaining = list(workers)
        for path in SERVER_INFO_PATHS:
            call = Call("GET", path, headers=headers, timeout_secs=secs)
            results = await broadcast(remaining, call)
            for result in results:
                if result.ok:
                    rank_counts[result.worker] = count_ranks(result.json())
                elif result.status not in ROUTE_ABSENT:
                    message = f"{result.worker.url} does not report its ranks: {result.failure}"
                    raise HttpError(502, f"nothing was forwarded: {message}", "ranks_unknown")
            remaining = [worker for worker in remaining if worker not in rank_counts]
        participants: list[Participant] = []
        for worker in workers:
            participant = WorkerParticipant(worker, rank_counts.get(worker, 1))
            participant.headers = dict(headers)
            participants.append(participant)
        return [*participants, versions.proxy_rank] if versions.is_enabled else participants

    def _require_group(self, body: Mapping[str, Any]) -> None:
        owner, name = self._lifecycle.sync.owner, parse_group_name(body)
        if owner is not None and name != owner.group_name:
            now, state = trio.current_time(), self._lifecycle.sync.state
            message = f"there is no group {name!r}; there is {owner.describe(now, state)}"
            raise InvalidTransition(400, message)

    def _response(
        self, call: AdminCall, results: Sequence[WorkerResult], cause: str, more: JsonObject
    ) -> AdminResponse:
        status = self._lifecycle.end_status if cause == self._lifecycle.end_cause else 0
        failure = StepFailure(cause, status)
        response = merge_results(call.route.path, results, self._lifecycle.sync, failure)
        if response.ok and call.route.one_engine:
            response = as_one(call.route.path, response, results)
        return AdminResponse(response.status, {**response.body, **more})


def _failed(response: AdminResponse, message: str, more: JsonObject) -> AdminResponse:
    top = {"success": False, "message": message, "status": "error"}
    return AdminResponse(502, {**response.body, **more, **top})


def _layout_row(rank_range: RankRange) -> dict[str, object]:
    return {
        "member": rank_range.name,
        "rank_offset": rank_range.offset,
        "ranks": rank_range.rank_count,
    }


async def parse_in_thread(value: V, parse: Callable[[V], T], raw: bytes) -> T:
    """Parse `value`; in a thread if `raw`, the whole body, is large. Raises GroupError."""
    if len(raw) < LARGE_BYTES:
        return parse(value)
    return await trio.to_thread.run_sync(parse, value)

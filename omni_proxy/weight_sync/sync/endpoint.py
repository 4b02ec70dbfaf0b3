"""The fleet as one endpoint of a trainer's group: admits calls, and stores responses for repeats.

Contract: `handles` selects the admin routes that belong to the sync; without a sync, only if
[weight_sync] mode enables them. A caller that disconnects cancels nothing; if it repeats the call,
it gets the stored response.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import trio

from omni_proxy.admin_ops.admin_route_table import TRANSFER, AdminRoute, Kind
from omni_proxy.admin_ops.engine_dialects import (
    COMPLETE,
    DESTROY,
    END,
    FINISH_UPDATE,
    FROM_DISTRIBUTED,
    INIT,
    PREPARE,
    START_DRAFT_UPDATE,
    START_UPDATE,
    TRANSFER_INIT,
    TRANSFER_SHUTDOWN,
    UPDATE_WEIGHTS,
)
from omni_proxy.admin_ops.results import AdminResponse
from omni_proxy.fleet.worker import Worker
from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.weight_sync.delivery.service import VersionService
from omni_proxy.weight_sync.protocol.requests import (
    TRANSFER_GROUP,
    RankLayoutError,
    parse_group_name,
    parse_init,
    parse_object,
    parse_transfer_init,
)
from omni_proxy.weight_sync.protocol.trainer_group import GroupOwner, InvalidTransition, SyncState
from omni_proxy.weight_sync.state_journal import OperationContext
from omni_proxy.weight_sync.sync.commit import RoundCommit, RoundDelivery
from omni_proxy.weight_sync.sync.lifecycle import DESTROY_TIMEOUT_SECS, SyncLifecycle
from omni_proxy.weight_sync.sync.participant import WorkerParticipant
from omni_proxy.weight_sync.sync.transfer_steps import TransferSteps
from omni_proxy.weight_sync.worker_calls import AdminCall
from omni_proxy.wire.errors import HttpError

MODES: Final = ("coordinate", "receive", "both")
ROUTES: Final = (INIT, PREPARE, COMPLETE, FROM_DISTRIBUTED, DESTROY, *TRANSFER)
INITS: Final = (INIT, TRANSFER_INIT)
# Names of the steps in the metrics.
PHASES: Final = {
    INIT: "init",
    PREPARE: "arm",
    COMPLETE: "receive",
    FROM_DISTRIBUTED: "receive",
    END: "end",
    DESTROY: "destroy",
    TRANSFER_INIT: "init",
    START_UPDATE: "start",
    START_DRAFT_UPDATE: "start",
    UPDATE_WEIGHTS: "receive",
    FINISH_UPDATE: "end",
    TRANSFER_SHUTDOWN: "destroy",
}
T = TypeVar("T")
TEARDOWN_WAIT_SECS: Final = 1.0  # a response waits this long for the end of a failed sync
_log = logging.getLogger(__name__)


class SyncEndpoint:
    """Runs the calls of a sync, each as a queued operation; the sync's state outlives them."""

    def __init__(self, context: OperationContext, version_service: VersionService) -> None:
        self.lifecycle = SyncLifecycle(context)
        self._config_store = context.config_store
        self._journal = context.journal
        self._commit = RoundCommit(self.lifecycle, RoundDelivery(self.lifecycle, version_service))
        self._steps = TransferSteps(self.lifecycle, self._commit, version_service)
        self._stored: tuple[object, AdminResponse] | None = None
        self._destroy_requested: str | None = None  # the group that a queued destroy interrupted
        self._next_owner: GroupOwner | None = None  # owner of an admitted init that hasn't begun

    async def start(self, nursery: trio.Nursery) -> None:
        """Take down groups that were left when the proxy, or this service, ended."""
        self._next_owner = self._destroy_requested = self._stored = None
        participants, self._journal.leftover_participants = self._journal.leftover_participants, ()
        if participants:
            group = self._journal.leftover_group
            self.lifecycle.start_leftover_cleanup(nursery, participants, group)
        self.lifecycle.start(nursery)

    def stop(self) -> None:
        self.lifecycle.stop()

    def handles(self, route: AdminRoute) -> bool:
        if self._config_store.config.weight_sync.mode not in MODES and not self._is_active:
            return False
        closes = route.path == END and self.lifecycle.sync.has_unpublished
        return route.path in ROUTES or closes

    async def abort(self, caller: str) -> AdminResponse:
        """End the trainer's group, also during a step, and wait for its end.

        Nothing of it is published, and workers that may hold a part of it are marked uncertain.
        Raises HttpError 409 if no trainer has a group.
        """
        lifecycle = self.lifecycle
        if not self._is_active:
            message = "no trainer has a group with this proxy"
            raise HttpError(409, message, "no_sync", detail=message)
        described = lifecycle.describe()
        lifecycle.interrupt(f"{caller or 'an operator'} aborted it", "aborted")
        with trio.move_on_after(DESTROY_TIMEOUT_SECS):
            await lifecycle.wait_idle()
        body = {
            "status": "ok",
            "success": True,
            "message": f"aborted: {described}",
            "ended": not self._is_active,
            "uncertain": dict(self._journal.uncertain),
        }
        return AdminResponse(200, body)

    def stored_response(self, call: AdminCall) -> AdminResponse | None:
        """The stored response to the same call: of a complete, or one that reached no caller."""
        if self._stored is not None and self._stored[0] == call.key:
            return self._stored[1]
        return None

    def store_response(self, key: object, response: AdminResponse) -> None:
        """Keep the response of a call whose callers have all disconnected."""
        if isinstance(key, tuple) and key[1:2] and key[1] in PHASES:
            self._stored = (key, response)

    async def before_step(self, call: AdminCall) -> None:
        """Admit an init, or interrupt the sync for a destroy, without the operation lock.

        Raises HttpError.
        """
        if call.route.path in INITS:
            self._next_owner = await _with_http_errors(self._admit_owner(call))
        elif call.route.path == DESTROY and self.lifecycle.busy.locked():
            owner = self.lifecycle.sync.owner
            if owner is not None and _names_group(call, owner.group_name):
                self._destroy_requested = owner.group_name
                self.lifecycle.interrupt("its destroy was requested", "destroyed")

    def after_step(self, call: AdminCall) -> None:
        """Call this after `before_step`, also if the step fails."""
        if call.route.path in INITS:
            self._next_owner = None

    async def perform(self, call: AdminCall, workers: Sequence[Worker]) -> AdminResponse:
        """Run one step. Raises HttpError before anything was sent."""
        if (stored := self.stored_response(call)) is not None:
            return stored  # two callers sent the same call
        lifecycle, ok = self.lifecycle, False
        await lifecycle.wait_settled()
        async with lifecycle.busy:
            self._stored, started_at = None, trio.current_time()
            for participant in lifecycle.participants.values():
                if isinstance(participant, WorkerParticipant):
                    participant.headers = call.credentials
            try:
                response = await _with_http_errors(self._step(call, workers))
                ok = response.ok
            finally:
                secs = trio.current_time() - started_at
                lifecycle.meters.note(PHASES[call.route.path], secs, ok=ok)
                lifecycle.end_if_over()
        if lifecycle.sync.state is SyncState.ABORTING:
            with trio.move_on_after(TEARDOWN_WAIT_SECS):
                await lifecycle.wait_idle()
        if call.route.path in (COMPLETE, FINISH_UPDATE):
            self._stored = (call.key, response)
        return response

    async def before_continue(self, headers: Mapping[str, str]) -> dict[str, object]:
        """End an open round before generation continues. Returns keys for the response."""
        more = await self._end_round(headers)
        out = {"uncertain": dict(self._journal.uncertain)} if self._journal.uncertain else {}
        return {**out, **more}

    async def _end_round(self, headers: Mapping[str, str]) -> dict[str, object]:
        """Close a complete round; abandon one that is not complete."""
        lifecycle = self.lifecycle
        if lifecycle.sync.round.started:
            return await self._end_started_round()
        if (
            not lifecycle.sync.has_unpublished
            or lifecycle.sync.state is not SyncState.GROUPED
            or lifecycle.busy.locked()
        ):
            return {}
        async with lifecycle.busy:
            try:
                if await lifecycle.has_owner_disconnected():
                    # Whether it had sent all weights is unknown.
                    cause = "the trainer is gone: its connection has ended"
                    lifecycle.interrupt(cause, "owner_dead")
                    return {}
                if lifecycle.sync.round.is_complete:
                    return await self._commit.close(headers)
                return {"uncertain": await self._commit.abandon()}
            finally:
                lifecycle.end_if_over()

    async def _end_started_round(self) -> dict[str, object]:
        """End an update of vLLM engines: they have no complete weights before the finish."""
        lifecycle = self.lifecycle
        if not lifecycle.sync.round.batched:
            cause = "generation was resumed before the update was finished"
            lifecycle.interrupt(cause, "resumed")
            await lifecycle.wait_idle()
        return {}

    async def verify_deferred(
        self, resumed: Sequence[Worker], headers: Mapping[str, str]
    ) -> dict[str, object]:
        """Compare checksums that could not be read before generation continued."""
        return await self._commit.verify_deferred(resumed, headers)

    def check_conflict(self, route: AdminRoute) -> None:
        """Raises HttpError 409 for another update while the sync changes weights."""
        sync = self.lifecycle.sync
        grouped_or_idle = sync.state in (SyncState.IDLE, SyncState.GROUPED)
        is_quiet = grouped_or_idle and not sync.has_unpublished
        if route.kind is Kind.UPDATE and not is_quiet and route.path != END:
            message = f"a weight sync is under way: {self.lifecycle.describe()}"
            raise HttpError(409, message, "sync_in_progress", detail=message)

    def status(self) -> dict[str, Any]:
        return self.lifecycle.status()

    @property
    def _is_active(self) -> bool:
        return self.lifecycle.sync.state is not SyncState.IDLE

    async def _step(self, call: AdminCall, workers: Sequence[Worker]) -> AdminResponse:
        steps, path = self._steps, call.route.path
        if path == INIT:
            return await steps.init(call, workers)
        if path == TRANSFER_INIT:
            return await steps.init_transfer(call, workers)
        if path == DESTROY:
            requested, self._destroy_requested = self._destroy_requested, None
            if requested is not None and not self._is_active:
                return steps.destroyed_response(call)
        handlers: dict[str, Callable[[AdminCall], Awaitable[AdminResponse]]] = {
            PREPARE: steps.prepare,
            COMPLETE: steps.complete,
            FROM_DISTRIBUTED: steps.update,
            DESTROY: steps.destroy,
            END: steps.end,
            START_UPDATE: steps.start,
            START_DRAFT_UPDATE: steps.start,
            UPDATE_WEIGHTS: steps.update_transfer,
            FINISH_UPDATE: steps.finish,
            TRANSFER_SHUTDOWN: steps.shut_down,
        }
        return await handlers[path](call)

    async def _admit_owner(self, call: AdminCall) -> GroupOwner:
        """Return the caller as owner. Raises HttpError 409 if the present owner is alive."""
        claim = _parse_claim(call)
        lifecycle = self.lifecycle
        await lifecycle.wait_settled()
        while self._is_active:
            if lifecycle.sync.state is not SyncState.ABORTING:
                await self._replace_owner(claim)
            await lifecycle.wait_idle()
        now = trio.current_time()
        if (owner := self._next_owner) is not None:
            raise _owned_error(owner, owner.describe(now, SyncState.JOINING), SyncState.JOINING)
        return GroupOwner(claim.group_name, claim.address, now, call.caller)

    async def _replace_owner(self, claim: _Claim) -> None:
        lifecycle = self.lifecycle
        if claim.force:
            lifecycle.interrupt(f"{claim.address} took it over", "forced")
        elif lifecycle.end_cause:
            return
        elif claim.group_name == TRANSFER_GROUP and lifecycle.leave_idle_group():
            # vLLM's calls don't identify the trainer, and its trainers rejoin without leaving.
            _log.info("weight_transfer_rejoined trainer=%s", claim.address)
        elif await lifecycle.is_owner_alive():
            owner = lifecycle.sync.owner
            assert owner is not None
            raise _owned_error(owner, lifecycle.describe(), lifecycle.sync.state)
        else:
            _log.warning("stale_group_replaced sync=%s", lifecycle.describe())
            lifecycle.interrupt("its trainer is gone, and another one took over", "owner_dead")


@dataclass(frozen=True, slots=True)
class _Claim:
    """The caller that requests the sync. `force`: take it over even from an owner that is alive."""

    group_name: str
    address: str
    force: bool


def _parse_claim(call: AdminCall) -> _Claim:
    """Raises GroupError."""
    body = parse_object(call.body)
    if call.route.path == TRANSFER_INIT:
        transfer = parse_transfer_init(body)
        return _Claim(TRANSFER_GROUP, transfer.shown_address, transfer.force)
    request = parse_init(body)
    return _Claim(request.group_name, request.address, request.force)


def _owned_error(owner: GroupOwner, description: str, state: SyncState) -> HttpError:
    message = f"another trainer owns the weight sync: {description}"
    holder = {**owner.to_dict(trio.current_time()), "state": state.value}
    return HttpError(409, message, "sync_owned", detail=message, owner=holder)


async def _with_http_errors(step: Awaitable[T]) -> T:
    """Turn errors of the protocol into HttpError."""
    try:
        return await step
    except InvalidTransition as error:
        message = str(error)
        raise HttpError(error.status, message, "sync_out_of_place", detail=message) from None
    except (GroupError, RankLayoutError) as error:
        message = str(error)
        raise HttpError(400, message, "sync_malformed", detail=message) from None


def _names_group(call: AdminCall, group_name: str) -> bool:
    try:
        return parse_group_name(parse_object(call.body)) == group_name
    except GroupError:
        return False

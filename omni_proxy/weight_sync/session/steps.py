"""What a trainer asks of its group, step by step, of every member at once.

Invariant: everything is judged before the first call leaves, and written down before it; a step
that fails at one member fails, and is undone at the others. No clock but [weight_sync]'s ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import trio

from omni_proxy.admin_ops.results import AdminResponse, WorkerResult
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import ROUTE_ABSENT, Call, broadcast
from omni_proxy.weight_sync.delivery.service import VersionService
from omni_proxy.weight_sync.operations.runner import AdminCall
from omni_proxy.weight_sync.operations.worker_calls import limit_secs
from omni_proxy.weight_sync.protocol.rank_layout import RankRange, ranks_in, seats_of
from omni_proxy.weight_sync.protocol.replies import (
    SyncFailed,
    as_ready,
    bytes_in,
    merged,
    with_counts,
)
from omni_proxy.weight_sync.protocol.requests import (
    LARGE_BYTES,
    group_name_of,
    init_of,
    marks_of,
    object_of,
    prepare_of,
)
from omni_proxy.weight_sync.protocol.session import Owner
from omni_proxy.weight_sync.protocol.states import OutOfPlace, SyncEvent, SyncState
from omni_proxy.weight_sync.session.commit import RoundCommit, Told, certain
from omni_proxy.weight_sync.session.fan_out import Ask, FanOut, Patience
from omni_proxy.weight_sync.session.lifecycle import SessionLifecycle
from omni_proxy.weight_sync.session.member import Member, WorkerMember
from omni_proxy.wire.errors import HttpError

GRACE_SECS: Final = 3.0  # for the others, after one member failed to apply
LINK_SECS: Final = 1.0
V = TypeVar("V")
T = TypeVar("T")


class SessionSteps:
    """Each takes the call and the ear that hears what members answer; `busy` is held around it."""

    def __init__(
        self, life: SessionLifecycle, closing: RoundCommit, holding: VersionService
    ) -> None:
        self._life = life
        self._closing = closing
        self._holding = holding

    async def init(self, call: AdminCall, workers: Sequence[Worker]) -> AdminResponse:
        life = self._life
        body = await read(call.body, object_of, call.body)
        asked = init_of(body)
        life.session.place(SyncEvent.INIT)
        members = await self._members(workers, call.credentials)
        seats = seats_of(asked.rank_offset, asked.world_size, {m.name: m.ranks for m in members})
        body["master_port"] = asked.port
        backend = life.config_store.config.weight_sync.backend
        if backend != "auto":
            body["backend"] = backend
        owner = Owner(asked.group_name, asked.address, trio.current_time(), call.caller)
        life.begin(owner, (asked.host, asked.port), seats, members)
        await self._record(call)
        await life.clear_left_behind()
        offsets = {seat.name: seat.offset for seat in seats}
        answers, cause = await self._ask(
            lambda member: member.init(body, offsets[member.name], asked.world_size),
            Patience(limit_secs(life.config_store.config.weight_sync.init_timeout_secs)),
        )
        if not cause:
            await life.linked(LINK_SECS)
            await life.record_what_was()
        return self._told(call, answers, cause, {"layout": [_seat(seat) for seat in seats]})

    async def prepare(self, call: AdminCall) -> AdminResponse:
        life = self._life
        life.session.place(SyncEvent.PREPARE)
        body = await read(call.body, object_of, call.body)
        self._require_group(body)
        asked = await read(body, prepare_of, call.body)
        life.announced_bytes = asked.nbytes
        life.session.arm(batched=asked.batched, buckets=asked.buckets, names=asked.names)
        await self._record(call)
        answers, cause = await self._ask(
            lambda member: member.prepare(call.body),
            Patience(limit_secs(life.config_store.config.weight_sync.ready_timeout_secs)),
        )
        if asked.batched and not cause:  # else it is one of several files, or none
            self._holding.read_ahead(life.fleet.workers, call.credentials)
        return as_ready(self._told(call, answers, cause, {}))

    async def complete(self, call: AdminCall) -> AdminResponse:
        life = self._life
        life.session.place(SyncEvent.COMPLETE)
        body = await read(call.body, object_of, call.body)
        self._require_group(body)
        marks = marks_of(body)
        life.session.commit(marks)
        self._closing.heard(marks, flushes=marks.flush_cache is True)
        return await self._apply(call, lambda member: member.complete(call.body))

    async def update(self, call: AdminCall) -> AdminResponse:
        """Arm and complete in one; engines flush their caches here unless they are told not to."""
        life = self._life
        life.session.place(SyncEvent.UPDATE)
        body = await read(call.body, object_of, call.body)
        self._require_group(body)
        asked, marks = await read(body, prepare_of, call.body), marks_of(body)
        life.announced_bytes = asked.nbytes
        life.session.update(marks, asked.names)
        self._closing.heard(marks, flushes=marks.flush_cache is not False)
        return await self._apply(call, lambda member: member.update(call.body))

    async def end(self, call: AdminCall) -> AdminResponse:
        """The round is over, says the trainer; the workers close theirs first."""
        life = self._life
        life.session.commit_end()
        await self._record(call)

        async def end(member: Member) -> WorkerResult:
            if isinstance(member, WorkerMember):
                return await member.call(call.route.path, call.body)
            return WorkerResult(member.name, 200, {"success": True})

        secs = limit_secs(life.config_store.config.admin.worker_timeout_secs)
        return await self._applied(call, end, Patience(secs, GRACE_SECS))

    async def destroy(self, call: AdminCall) -> AdminResponse:
        life = self._life
        life.session.place(SyncEvent.DESTROY)
        body = await read(call.body, object_of, call.body)
        self._require_group(body)
        told: Told = {}
        if life.session.open and life.session.state is SyncState.GROUPED:
            told = await self._closing.close(call.credentials)
        if life.session.state is not SyncState.ABORTING:
            life.session.leave()
        life.wind_up()
        await life.until_idle()
        answer = self.left_already(call)
        if told.get("uncertain") or (told and self._closing.cause):
            why = self._closing.cause or "not all workers agree"
            return _failed(answer, f"the group is destroyed, but {why}", told)
        return AdminResponse(answer.status, {**answer.body, **told})

    def left(self, call: AdminCall) -> AdminResponse:
        """What its members said when the group was taken down for this very call."""
        return merged(call.route.path, self._life.left, self._life.session)

    def left_already(self, call: AdminCall) -> AdminResponse:
        """As `left`; a failure before has made some leave, and they know of no group any more."""
        answer = self.left(call)
        if answer.ok or not all(each.success or each.refused for each in self._life.left):
            return answer
        message = "the group is destroyed; some members had left it by themselves"
        return AdminResponse(
            200, {**answer.body, "success": True, "status": "ok", "message": message}
        )

    async def _apply(self, call: AdminCall, ask: Ask) -> AdminResponse:
        life, sync = self._life, self._life.config_store.config.weight_sync
        await self._record(call)
        await self._closing.hold(life.workers, call.route.name)
        patience = Patience(
            limit_secs(sync.receive_timeout_secs), GRACE_SECS, lambda m: m.destroy(call.body)
        )
        return await self._applied(call, ask, patience)

    async def _applied(self, call: AdminCall, ask: Ask, patience: Patience) -> AdminResponse:
        life, session = self._life, self._life.session
        batched = session.round.batched
        fan = FanOut(list(life.members.values()), ask)
        answers = await life.fan_out(fan, patience)
        for each in answers:
            touched = each.success or not certain(each, batched=batched)
            session.hear(each, touched=touched)
            if each.success:
                life.meters.nbytes += bytes_in(each) or life.announced_bytes
        life.announced_bytes = 0
        failed = session.cause = "" if session.whole else fan.cause
        told: Told = {}
        if session.settle() is SyncState.VERIFYING:
            told = await self._closing.close(call.credentials)
            answers, failed = self._closing.retold(answers), self._closing.judged(failed)
        elif session.state is SyncState.GROUPED:
            await life.record_what_was()
        answer = self._answer(call, answers, failed, told)
        if not failed and told.get("uncertain"):
            message = "every member took the weights, but their checksums differ"
            return _failed(answer, message, told)
        return answer

    async def _ask(self, ask: Ask, patience: Patience) -> tuple[list[WorkerResult], str]:
        """Every member's answer, and why the step failed, "" where it did not."""
        life, session = self._life, self._life.session
        fan = FanOut(list(life.members.values()), ask)
        answers = await life.fan_out(fan, patience)
        for answer in answers:
            session.hear(answer)
        if fan.cause and session.whole:
            session.fail(fan.cause)
        else:
            session.cause = fan.cause
            session.settle()
        return answers, fan.cause

    async def _record(self, call: AdminCall) -> None:
        """Raises HttpError 503; then nothing was sent, and the sync is over."""
        try:
            await self._life.record(call.route.path)
        except OSError as error:
            reason = error.strerror or error
            where = self._life.book.where
            message = f"nothing was sent: the journal {where} can't be written: {reason}"
            self._life.session.fail(message)
            raise HttpError(503, message, "journal_unwritable") from None

    async def _members(self, workers: Sequence[Worker], headers: Mapping[str, str]) -> list[Member]:
        """With the ranks that each has now. Raises HttpError 502 where one does not tell."""
        if self._holding.relays:
            return [self._holding.own]
        secs = self._life.config_store.config.health.timeout_secs
        found: dict[Worker, int] = {}
        left = list(workers)
        for path in ("/server_info", "/get_server_info"):
            call = Call("GET", path, headers=headers, timeout_secs=secs)
            outcomes = await broadcast(left, call)
            for outcome in outcomes:
                if outcome.ok:
                    found[outcome.worker] = ranks_in(outcome.json())
                elif outcome.status not in ROUTE_ABSENT:
                    message = f"{outcome.worker.url} does not tell its ranks: {outcome.failure}"
                    raise HttpError(502, f"nothing was forwarded: {message}", "ranks_unknown")
            left = [worker for worker in left if worker not in found]
        members: list[Member] = []
        for worker in workers:
            member = WorkerMember(worker, found.get(worker, 1))
            member.headers = dict(headers)
            members.append(member)
        return [*members, self._holding.own] if self._holding.on else members

    def _require_group(self, body: Mapping[str, Any]) -> None:
        owner, name = self._life.session.owner, group_name_of(body)
        if owner is not None and name != owner.group_name:
            now, state = trio.current_time(), self._life.session.state
            message = f"there is no group {name!r}; there is {owner.in_words(now, state)}"
            raise OutOfPlace(400, message)

    def _told(
        self, call: AdminCall, answers: Sequence[WorkerResult], cause: str, more: Told
    ) -> AdminResponse:
        failed = SyncFailed(cause, self._life.ending_status if cause == self._life.ending else 0)
        answer = merged(call.route.path, answers, self._life.session, failed)
        return AdminResponse(answer.status, {**answer.body, **more})

    def _answer(
        self, call: AdminCall, answers: Sequence[WorkerResult], failed: str, told: Told
    ) -> AdminResponse:
        answer = self._told(call, answers, failed, told)
        return with_counts(answer, answers)


def _failed(answer: AdminResponse, message: str, told: Told) -> AdminResponse:
    top = {"success": False, "message": message, "status": "error"}
    return AdminResponse(502, {**answer.body, **told, **top})


def _seat(seat: RankRange) -> dict[str, object]:
    return {"member": seat.name, "rank_offset": seat.offset, "ranks": seat.ranks}


async def read(value: V, parse: Callable[[V], T], raw: bytes) -> T:
    """Parse it, in a thread where `raw`, all of it, is large. Raises GroupError."""
    if len(raw) < LARGE_BYTES:
        return parse(value)
    return await trio.to_thread.run_sync(parse, value)

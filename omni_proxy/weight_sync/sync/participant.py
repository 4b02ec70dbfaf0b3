"""Participants of a trainer's group: workers of both dialects, and the proxy's rank.

Contract: a call ends with a result, never with a transport error, and has no timeout of its own.
After a cancelled call the state of the participant is unknown; the caller undoes it with `destroy`.
A vLLM participant that leaves with an open update starts and finishes one first: vLLM 0.32.0
otherwise keeps the tensors of a partly received layer, and every later update fails (both were
run). `GroupFanOut` calls all participants concurrently. No participant waits for the result of
another one; the first cause of failure is kept: a participant's result, a timeout, or a report that
the group is lost.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, Protocol

import trio

from omni_proxy.admin_ops.engine_dialects import (
    COMPLETE,
    DESTROY,
    FINISH_UPDATE,
    FROM_DISTRIBUTED,
    INIT,
    PREPARE,
    SERVER_INFO,
    START_DRAFT_UPDATE,
    START_UPDATE,
    TRANSFER_INIT,
    TRANSFER_SHUTDOWN,
)
from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import ROUTE_ABSENT, Call, call_worker
from omni_proxy.weight_sync.protocol.participant_reports import (
    NOT_AWAITED,
    ReceiveProgress,
    parse_progress,
)
from omni_proxy.weight_sync.protocol.requests import RankRange, TransferInit, TransferUpdate
from omni_proxy.weight_sync.worker_calls import OnResult, post_json

PROGRESS_TIMEOUT_SECS: Final = 2.0


class Participant(Protocol):
    """A participant of a group, with `rank_count` consecutive ranks from its `rank_offset` on.

    Bodies are forwarded as the trainer sent them, except that `init` sets the participant's ranks.
    """

    @property
    def name(self) -> str:
        """A worker's URL, or "proxy"."""

    @property
    def rank_count(self) -> int: ...

    async def init(
        self, body: Mapping[str, Any], rank_offset: int, world_size: int
    ) -> WorkerResult: ...

    async def prepare(self, body: bytes) -> WorkerResult: ...

    async def complete(self, body: bytes) -> WorkerResult: ...

    async def update(self, body: bytes) -> WorkerResult: ...

    async def destroy(self, body: bytes) -> WorkerResult: ...

    async def read_progress(self) -> ReceiveProgress | None:
        """How much the participant has received; None if it does not report that."""


class WorkerParticipant:
    """A worker, called on its admin routes. `headers`: credentials of the current caller."""

    def __init__(self, worker: Worker, rank_count: int) -> None:
        self.worker = worker
        self.rank_count = rank_count
        self.headers: dict[str, str] = {}

    @property
    def name(self) -> str:
        return self.worker.url

    async def init(
        self, body: Mapping[str, Any], rank_offset: int, world_size: int
    ) -> WorkerResult:
        body = {**body, "rank_offset": rank_offset, "world_size": world_size}
        return await self.call(INIT, json.dumps(body).encode())

    async def prepare(self, body: bytes) -> WorkerResult:
        return await self.call(PREPARE, body)

    async def complete(self, body: bytes) -> WorkerResult:
        return await self.call(COMPLETE, body)

    async def update(self, body: bytes) -> WorkerResult:
        return await self.call(FROM_DISTRIBUTED, body)

    async def destroy(self, body: bytes) -> WorkerResult:
        return await self.call(DESTROY, body)

    async def call(self, path: str, body: bytes) -> WorkerResult:
        return await post_json(self.worker, path, body, self.headers, inf)

    async def read_progress(self) -> ReceiveProgress | None:
        call = Call("GET", SERVER_INFO, headers=self.headers, timeout_secs=PROGRESS_TIMEOUT_SECS)
        result = await call_worker(self.worker, call)
        return parse_progress(result.json()) if result.ok else None


LATE_SECS: Final = 2.0
SHORT_GRACE_SECS: Final = 1.0

ParticipantCall = Callable[[Participant], Awaitable[WorkerResult]]


@dataclass(frozen=True, slots=True)
class FanOutTimeouts:
    """Timeouts of a fan-out, in seconds.

    All results have to arrive within `timeout_secs`. After a failure the other participants get
    `grace_secs`; those without a result then get the call `undo`.
    """

    timeout_secs: float
    grace_secs: float = 0.0
    undo: ParticipantCall | None = None


class GroupFanOut:
    """Calls all participants concurrently. Call `run` once. `cause`: the first failure, or ""."""

    def __init__(
        self,
        participants: Sequence[Participant],
        call: ParticipantCall,
        on_result: OnResult = lambda _: None,
    ) -> None:
        self.cause = ""
        self.results: dict[str, WorkerResult] = {}
        self._participants = participants
        self._call = call
        self._on_result = on_result
        self._all_fail = False
        self._decided = trio.Event()
        self._all_done = trio.Event()

    def fail(self, cause: str, *, all_fail: bool = False) -> None:
        """Record a failure. `all_fail`: the remaining participants can't succeed either."""
        self.cause = self.cause or cause
        self._all_fail = self._all_fail or all_fail
        self._decided.set()

    async def run(self, timeouts: FanOutTimeouts) -> list[WorkerResult]:
        """Returns results in the order of the participants; for one without an answer, an error."""
        async with trio.open_nursery() as nursery:
            for participant in self._participants:
                nursery.start_soon(self._call_participant, participant)
            with trio.move_on_after(timeouts.timeout_secs) as scope:
                await self._decided.wait()
            if scope.cancelled_caught:
                waiting = ", ".join(participant.name for participant in self._waiting())
                self.fail(f"no answer within {timeouts.timeout_secs:g} s: {waiting}")
            if timeouts.grace_secs and not self._all_done.is_set():
                shortened = min(timeouts.grace_secs, SHORT_GRACE_SECS)
                with trio.move_on_after(shortened if self._all_fail else timeouts.grace_secs):
                    await self._all_done.wait()
            if timeouts.undo is not None and not self._all_done.is_set():
                for participant in self._waiting():
                    nursery.start_soon(timeouts.undo, participant)
                with trio.move_on_after(LATE_SECS):
                    await self._all_done.wait()
            nursery.cancel_scope.cancel()
        return [self._result(participant) for participant in self._participants]

    def _waiting(self) -> list[Participant]:
        return [
            participant
            for participant in self._participants
            if participant.name not in self.results
        ]

    def _result(self, participant: Participant) -> WorkerResult:
        result = self.results.get(participant.name)
        return result or WorkerResult(participant.name, None, error=NOT_AWAITED)

    async def _call_participant(self, participant: Participant) -> None:
        result = await self._call(participant)
        self.results[participant.name] = result
        self._on_result(result)
        if len(self.results) == len(self._participants):
            self._all_done.set()
            self._decided.set()
        if not result.success:
            self.fail(f"{participant.name}: {result.reason}")


ACTIVE: Final = "already active"  # in vLLM's error if an update is already open
STARTS: Final = (START_UPDATE, START_DRAFT_UPDATE)


class TransferParticipant(WorkerParticipant):
    """A vLLM worker. `rank_range`: its ranks once assigned.

    `may_have_open_update`: an update may have been started and not finished.
    """

    rank_range: RankRange | None = None
    may_have_open_update = False

    async def join(self, request: TransferInit, rank_range: RankRange) -> WorkerResult:
        self.rank_range = rank_range
        return await self.call(TRANSFER_INIT, request.body_for(rank_range.offset))

    async def receive(self, path: str, request: TransferUpdate, first_rank: int) -> WorkerResult:
        assert self.rank_range is not None
        return await self.call(path, request.body_for(self.rank_range, first_rank))

    async def call(self, path: str, body: bytes) -> WorkerResult:
        result = await super().call(path, body)
        if path in STARTS:
            self.may_have_open_update = (
                result.success or result.status is None or ACTIVE in result.reason
            )
        elif path == FINISH_UPDATE and result.success:
            self.may_have_open_update = False
        return result

    async def destroy(self, body: bytes) -> WorkerResult:
        """Leave the group; a missing route is a success, since older engines have no such group."""
        if self.may_have_open_update:
            await self.call(START_UPDATE, b"")  # refused if the update is still open
            await self.call(FINISH_UPDATE, b"")
        result = await self.call(TRANSFER_SHUTDOWN, b"")
        if result.status in ROUTE_ABSENT:
            return WorkerResult(self.name, 200, {"success": True, "message": "no such route"})
        return result

    async def init(
        self, body: Mapping[str, Any], rank_offset: int, world_size: int
    ) -> WorkerResult:
        return self._wrong_group()

    async def prepare(self, body: bytes) -> WorkerResult:
        return self._wrong_group()

    async def complete(self, body: bytes) -> WorkerResult:
        return self._wrong_group()

    async def update(self, body: bytes) -> WorkerResult:
        return self._wrong_group()

    async def read_progress(self) -> ReceiveProgress | None:
        return None

    def _wrong_group(self) -> WorkerResult:
        return WorkerResult(self.name, None, error="it is in a vLLM weight-transfer group")

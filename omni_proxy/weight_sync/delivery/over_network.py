"""A version brought over the network: a group of our own with one worker, in which we are rank 0.

Each worker has a group to itself, so that one that is slow, or ends, costs nobody else. The bytes
leave a child process straight out of the version's file; nothing here imports torch. Invariant: no
group, child or store outlives its delivery, however that ended.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final
from uuid import uuid4

import trio

from omni_proxy.admin_ops.results import WorkerResult, parsed
from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.process_group.rendezvous import GLOO, HostedRendezvous
from omni_proxy.process_group.sender import FileRegion, Sender
from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan, parse_plans
from omni_proxy.upstream_http.client import ROUTE_ABSENT, Call, call_worker
from omni_proxy.weight_sync.operations.blocking_calls import BlockingCalls
from omni_proxy.weight_sync.operations.worker_calls import ANSWER_BYTES
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.store.recovery import rows_of
from omni_proxy.weight_sync.store.safetensors_header import SafetensorsError

INIT: Final = "/init_weights_update_group"
UPDATE: Final = "/update_weights_from_distributed"
DESTROY: Final = "/destroy_weights_update_group"
BEGIN: Final = "/begin_weight_update"
END: Final = "/end_weight_update"
ASK_SECS: Final = 10.0
# For the other side to say why, once our own part of a step has failed.
REASON_SECS: Final = 2.0
NO_LIMIT_SECS: Final = 86400.0

Open = Callable[[HostedRendezvous], Awaitable[Sender]]
Ours = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """One file of a version: what is announced of it, and where its bytes are."""

    announced: Mapping[str, Any]
    plans: tuple[TensorPlan, ...]
    place: FileRegion


class GroupSends:
    """`settings` are those of the moment; `open_one` raises GroupError."""

    def __init__(self, settings: Callable[[], WeightSyncConfig], open_one: Open) -> None:
        self._settings = settings
        self._open = open_one
        self._threads = BlockingCalls("relay", 64, ends=64)

    async def send(
        self,
        version: StoredVersion,
        worker: Worker,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> WorkerResult:
        """What the worker said in the end, or the first thing that went wrong."""
        settings = self._settings()
        meet_secs = settings.ready_timeout_secs or NO_LIMIT_SECS
        move_secs = settings.receive_timeout_secs or NO_LIMIT_SECS
        asked = _Asked(worker, headers, max(meet_secs, move_secs) + REASON_SECS)
        ranks = await asked.ranks()
        if isinstance(ranks, WorkerResult):
            return ranks
        meeting = HostedRendezvous(
            host=our_address(worker.address),
            world_size=1 + ranks,
            group_name=f"relay-{uuid4().hex}",
            backend=GLOO,
            timeout_s=meet_secs,
        )
        try:
            buckets = await self._threads.run("look", _buckets_of, version)
            sender = await self._open(meeting)
        except (GroupError, SafetensorsError, OSError) as error:
            return asked.failed(str(error))
        try:
            answer = await self._meet(asked, sender, meeting)
            return (
                await self._move(asked, sender, meeting, buckets, body)
                if answer.success
                else answer
            )
        finally:
            # Even where we are cancelled: a worker in a group without us would wait for us.
            with trio.move_on_after(ASK_SECS, shield=True):
                await self._threads.end("close", sender.close)
                await asked.post(DESTROY, {"group_name": meeting.group_name})

    async def _meet(self, asked: _Asked, sender: Sender, meeting: HostedRendezvous) -> WorkerResult:
        told = {
            "master_address": meeting.host,
            "master_port": sender.port,
            "rank_offset": 1,
            "world_size": meeting.world_size,
            "group_name": meeting.group_name,
            "backend": meeting.backend,
        }
        return await _both(
            asked, INIT, told, lambda: self._threads.run("meet", sender.wait_for_ranks)
        )

    async def _move(
        self,
        asked: _Asked,
        sender: Sender,
        meeting: HostedRendezvous,
        buckets: Sequence[_Bucket],
        body: Mapping[str, Any],
    ) -> WorkerResult:
        """Every file; where there are several they become the worker's weights together."""
        secs = self._settings().receive_timeout_secs or NO_LIMIT_SECS
        answer = await asked.post(BEGIN, {"selector": "all"}) if len(buckets) > 1 else None
        together = answer is not None and answer.success
        for count, bucket in enumerate(buckets, start=1):
            order = {**bucket.announced, "group_name": meeting.group_name, "flush_cache": False}
            if count == len(buckets):
                order |= body

            async def ours(bucket: _Bucket = bucket) -> None:
                sending = await self._threads.run("post", sender.send, bucket.plans, bucket.place)
                await self._threads.run("send", sending.wait, secs)

            answer = await _both(asked, UPDATE, order, ours)
            if not answer.success:
                return answer
        assert answer is not None
        return await asked.post(END, {}) if together else answer


@dataclass(frozen=True, slots=True)
class _Asked:
    """One worker's control routes. `limit_secs` is what it may take for any answer."""

    worker: Worker
    headers: Mapping[str, str]
    limit_secs: float

    async def post(self, path: str, body: Mapping[str, Any]) -> WorkerResult:
        headers = {**self.headers, "content-type": "application/json"}
        raw = json.dumps(body).encode()
        secs = self.limit_secs
        call = Call("POST", path, raw, headers, timeout_secs=secs, max_bytes=ANSWER_BYTES)
        return await self._ask(call)

    async def ranks(self) -> int | WorkerResult:
        """How many it takes in a group; its answer where it does not say."""
        answer = await self._ask(Call("GET", "/server_info", b"", self.headers, ASK_SECS))
        told = answer.body.get("tp_size") if isinstance(answer.body, dict) else None
        if answer.status in ROUTE_ABSENT or (answer.success and told is None):
            return 1
        if not answer.success:
            return answer
        return told if isinstance(told, int) and told > 0 else 1

    def failed(self, why: str) -> WorkerResult:
        return WorkerResult(self.worker.url, None, error=why)

    async def _ask(self, call: Call) -> WorkerResult:
        outcome = await call_worker(self.worker, call)
        body = parsed(outcome.body)
        return WorkerResult(self.worker.url, outcome.status, body, outcome.error, outcome.secs)


async def _both(asked: _Asked, path: str, body: Mapping[str, Any], ours: Ours) -> WorkerResult:
    """The worker's answer, and our own part meanwhile; who fails ends the wait for the other."""
    answers: list[WorkerResult] = []
    heard, fault = trio.Event(), ""

    async def hear() -> None:
        answers.append(await asked.post(path, body))
        heard.set()
        if not answers[0].success:
            part.cancel()

    async with trio.open_nursery() as nursery:
        part = trio.CancelScope()
        nursery.start_soon(hear)
        try:
            with part:
                await ours()
        except GroupError as error:
            fault = str(error)
        with trio.move_on_after(REASON_SECS if fault else inf):
            await heard.wait()
        nursery.cancel_scope.cancel()
    if fault and (not answers or answers[0].success):
        return asked.failed(fault)
    return answers[0]


def _buckets_of(version: StoredVersion) -> list[_Bucket]:
    """A bucket for each file. Raises SafetensorsError, OSError, GroupError."""
    found = []
    for file, nbytes in version.record.files.items():
        rows = rows_of(version.folder / file, nbytes)
        announced = {
            "names": list(rows),
            "dtypes": [row.dtype for row in rows.values()],
            "shapes": [list(row.shape) for row in rows.values()],
        }
        start = min(row.offset for row in rows.values())
        place = FileRegion(str(version.folder / file), (start,))
        found.append(_Bucket(announced, parse_plans(announced, dense=True), place))
    return found


def our_address(address: tuple[str, int] | str) -> str:
    """Ours, as that worker reaches us: of the way that packets to it take. Raises OSError."""
    if isinstance(address, str):
        return "127.0.0.1"
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        trial.connect((host, port))  # sends nothing
        found: str = trial.getsockname()[0]
        return found

"""Delivers a version from the store to workers that were not in the trainer's group.

A worker that can read the version's files gets their path. Any other worker gets the version
through a separate process group with the proxy as rank 0: a child process sends the bytes from the
version's file, and nothing here imports torch. The worker is paused for the delivery, and resumed
unless a caller had paused it. Invariant: a success means that the worker reported success and, if
digests can be compared, that its tensors match; no group, child process or TCPStore outlives its
delivery.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any, Final, Protocol, TypeVar
from uuid import uuid4

import trio

from omni_proxy.admin_ops.engine_dialects import (
    BEGIN,
    CHECKSUM,
    CONTINUE_GENERATION,
    DESTROY,
    END,
    FROM_DISK,
    FROM_DISTRIBUTED,
    INIT,
    PAUSE_GENERATION,
    SERVER_INFO,
    WEIGHTS_CHECKER,
)
from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.process_group.rendezvous import GLOO, HostedRendezvous
from omni_proxy.process_group.sender import FileRegion, Sender
from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan, parse_plans
from omni_proxy.upstream_http.client import ROUTE_ABSENT, Call, call_each
from omni_proxy.weight_sync.store.manifest import (
    SafetensorsError,
    StoredVersion,
    WorkerProof,
    prove_version,
)
from omni_proxy.weight_sync.store.recovery import read_header_rows
from omni_proxy.weight_sync.store.service import StoreService
from omni_proxy.weight_sync.worker_calls import limit_secs, post_json, request_worker

NO_LIMIT_SECS: Final = 86400.0  # for a timeout that is off: torch requires a number

T = TypeVar("T")


class BlockingCalls:
    """Runs blocking calls in threads: `max_calls` at a time, and `max_ends` calls that end others.

    `name` is a part of the threads' names.
    """

    def __init__(self, name: str, max_calls: int, *, max_ends: int) -> None:
        self._name = name
        self._call_limiter = trio.CapacityLimiter(max_calls)
        self._end_limiter = trio.CapacityLimiter(max_ends)

    async def run(self, what: str, call: Callable[..., T], *arguments: object) -> T:
        return await self._run(self._call_limiter, what, partial(call, *arguments))

    async def end(self, what: str, call: Callable[..., T], *arguments: object) -> T:
        return await self._run(self._end_limiter, what, partial(call, *arguments))

    async def _run(self, limiter: trio.CapacityLimiter, what: str, call: Callable[[], T]) -> T:
        name = f"weights-{self._name}-{what}"
        return await trio.to_thread.run_sync(
            call, thread_name=name, limiter=limiter, abandon_on_cancel=True
        )


# Parts of errors of workers that can't read a path, or that don't load weights from disk.
UNSEEN_MESSAGES: Final = (
    "does not exist",
    "no such file",
    "not found",
    "permission denied",
    "--weights-root",
    "reads no weights from disk",
)
MISMATCH_STATUS: Final = 502


class NetworkSender(Protocol):
    """Sends a version to one worker through a separate process group."""

    async def send(
        self,
        version: StoredVersion,
        worker: Worker,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> WorkerResult: ...


@dataclass(frozen=True, slots=True)
class DeliveryOptions:
    """Options of a delivery. `paused`: URLs that stay paused. `prove`: compare digests after it.

    `label`: sent instead of the version's own label. `headers`: the caller's credentials. `limit`:
    timeout of each call to a worker in seconds, 0 for none.
    """

    label: str | None = None
    paused: frozenset[str] = frozenset()
    prove: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    limit: float = 0.0


class VersionDeliverer:
    def __init__(self, store_service: StoreService, sender: NetworkSender) -> None:
        self._store_service = store_service
        self._sender = sender

    async def deliver(
        self,
        version: StoredVersion,
        workers: Sequence[Worker],
        options: DeliveryOptions = DeliveryOptions(),
    ) -> list[WorkerResult]:
        """Deliver to all workers concurrently. Raises UnknownVersion, OSError.

        Results are in the order of the workers. The `status` of one is 4xx only if the worker's
        weights are unchanged.
        """
        async with self._store_service.lease(version) as leased:
            return await call_each(
                workers,
                lambda worker: _WorkerDelivery(self._sender, leased, options).deliver_to(worker),
            )

    async def prove(
        self, version: StoredVersion, worker: Worker, headers: Mapping[str, str], limit: float = 0.0
    ) -> WorkerProof:
        """Compare the worker's digests with the version's, as far as they are comparable."""
        options = DeliveryOptions(headers=headers, limit=limit)
        return await _WorkerDelivery(self._sender, version, options).prove(worker)


@dataclass(frozen=True, slots=True)
class _WorkerDelivery:
    """One delivery to one worker."""

    sender: NetworkSender
    version: StoredVersion
    options: DeliveryOptions

    async def deliver_to(self, worker: Worker) -> WorkerResult:
        pause = await self._call(worker, PAUSE_GENERATION, {"mode": "retract"})
        if not pause.success and pause.status not in ROUTE_ABSENT:
            return replace(pause, error=pause.error or f"it could not be paused: {pause.reason}")
        result = await self._update(worker)
        if worker.url not in self.options.paused and pause.success:
            resumed = await self._call(worker, CONTINUE_GENERATION, {})
            if result.success and not resumed.success:
                return replace(resumed, error=f"it stays paused: {resumed.reason}")
        return result

    async def prove(self, worker: Worker) -> WorkerProof:
        return prove_version(await self._post(worker, WEIGHTS_CHECKER, CHECKSUM), self.version)

    async def _update(self, worker: Worker) -> WorkerResult:
        body = self._body()
        method, result = "disk", None
        if is_local_address(worker.address):
            result = await self._call(worker, FROM_DISK, self._disk_body(body))
        if result is None or _cannot_see_files(result):
            method = "group"
            result = await self.sender.send(self.version, worker, body, self.options.headers)
        more = {"delivered_by": method, "version": self.version.number}
        if not result.success or not self.options.prove:
            return _with_fields(result, more)
        proof = await self.prove(worker)
        result = _with_fields(result, {**more, **proof.to_dict()})
        if proof.differs:
            message = f"it took {self.version.name}, but {proof.differs}"
            failure = {"success": False, "status": "error", "message": message}
            return replace(_with_fields(result, failure), status=MISMATCH_STATUS)
        return result

    def _body(self) -> dict[str, Any]:
        label = self.version.label if self.options.label is None else self.options.label
        label_field = {} if label is None else {"weight_version": label}
        return {**label_field, "flush_cache": True}

    def _disk_body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        # Only the files in the manifest are loaded: as with a broadcast, tensors that the trainer
        # did not send stay unchanged.
        manifest = {"files": list(self.version.manifest.files)}
        return {"model_path": str(self.version.folder), "manifest": manifest, **body}

    async def _call(self, worker: Worker, path: str, body: Mapping[str, Any]) -> WorkerResult:
        return await self._post(worker, path, json.dumps(body).encode())

    async def _post(self, worker: Worker, path: str, body: bytes) -> WorkerResult:
        secs = limit_secs(self.options.limit)
        return await post_json(worker, path, body, self.options.headers, secs)


def is_local_address(address: tuple[str, int] | str) -> bool:
    """Whether the address belongs to this machine."""
    if isinstance(address, str):
        return True
    try:
        ip = ipaddress.ip_address(address[0])
    except ValueError:  # a host name, not resolved here
        return address[0] == "localhost"
    if ip.is_loopback:
        return True
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address[0], 0))
        except OSError:
            return False
    return True


def _cannot_see_files(result: WorkerResult) -> bool:
    """Whether the worker failed only because it can't read the proxy's files: it is unchanged."""
    if result.status in ROUTE_ABSENT and result.error == "":
        return True
    message = result.reason.lower()
    failed = not result.success and not result.error
    return failed and any(unseen in message for unseen in UNSEEN_MESSAGES)


def _with_fields(result: WorkerResult, more: Mapping[str, object]) -> WorkerResult:
    text = result.body
    # Clients of older versions read "said", the former name of "response".
    body = text if isinstance(text, dict) else {"response": text, "said": text}
    return replace(result, body={**body, **more})


CALL_TIMEOUT_SECS: Final = 10.0
# Time for the worker to report its error after the proxy's part of a step failed.
REASON_SECS: Final = 2.0

OpenSender = Callable[[HostedRendezvous], Awaitable[Sender]]
ProxyPart = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """One file of a version: its announcement to the worker, and the location of its bytes."""

    announcement: Mapping[str, Any]
    plans: tuple[TensorPlan, ...]
    region: FileRegion


class ProcessGroupSender:
    """Sends versions through process groups with the proxy as rank 0.

    `settings()`: the current configuration. `open_sender` raises GroupError.
    """

    def __init__(self, settings: Callable[[], WeightSyncConfig], open_sender: OpenSender) -> None:
        self._settings = settings
        self._open_sender = open_sender
        self._threads = BlockingCalls("relay", 64, max_ends=64)

    async def send(
        self,
        version: StoredVersion,
        worker: Worker,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> WorkerResult:
        """Send the version. Returns the worker's last result, or the first failure."""
        settings = self._settings()
        join_secs = settings.ready_timeout_secs or NO_LIMIT_SECS
        receive_secs = settings.receive_timeout_secs or NO_LIMIT_SECS
        receiver = _Receiver(worker, headers, max(join_secs, receive_secs) + REASON_SECS)
        ranks = await receiver.read_ranks()
        if isinstance(ranks, WorkerResult):
            return ranks
        hosted = HostedRendezvous(
            host=local_address_towards(worker.address),
            world_size=1 + ranks,
            group_name=f"relay-{uuid4().hex}",
            backend=GLOO,
            timeout_s=join_secs,
        )
        try:
            buckets = await self._threads.run("look", _read_buckets, version)
            sender = await self._open_sender(hosted)
        except (GroupError, SafetensorsError, OSError) as error:
            return receiver.failed(str(error))
        try:
            result = await self._join(receiver, sender, hosted)
            if not result.success:
                return result
            return await self._transfer(receiver, sender, hosted, buckets, body)
        finally:
            # Shielded from cancellation: a worker left in the group would wait for the proxy.
            with trio.move_on_after(CALL_TIMEOUT_SECS, shield=True):
                await self._threads.end("close", sender.close)
                await receiver.post(DESTROY, {"group_name": hosted.group_name})

    async def _join(
        self, receiver: _Receiver, sender: Sender, hosted: HostedRendezvous
    ) -> WorkerResult:
        body = {
            "master_address": hosted.host,
            "master_port": sender.port,
            "rank_offset": 1,
            "world_size": hosted.world_size,
            "group_name": hosted.group_name,
            "backend": hosted.backend,
        }
        return await _run_both(
            receiver, INIT, body, lambda: self._threads.run("meet", sender.wait_for_ranks)
        )

    async def _transfer(
        self,
        receiver: _Receiver,
        sender: Sender,
        hosted: HostedRendezvous,
        buckets: Sequence[_Bucket],
        body: Mapping[str, Any],
    ) -> WorkerResult:
        """Send every file; several files are applied together if the worker supports that."""
        secs = self._settings().receive_timeout_secs or NO_LIMIT_SECS
        result = await receiver.post(BEGIN, {"selector": "all"}) if len(buckets) > 1 else None
        together = result is not None and result.success
        for count, bucket in enumerate(buckets, start=1):
            order = {**bucket.announcement, "group_name": hosted.group_name, "flush_cache": False}
            if count == len(buckets):
                order |= body

            async def send_bucket(bucket: _Bucket = bucket) -> None:
                sending = await self._threads.run("post", sender.send, bucket.plans, bucket.region)
                await self._threads.run("send", sending.wait, secs)

            result = await _run_both(receiver, FROM_DISTRIBUTED, order, send_bucket)
            if not result.success:
                return result
        assert result is not None
        return await receiver.post(END, {}) if together else result


@dataclass(frozen=True, slots=True)
class _Receiver:
    """One worker's admin routes. `limit_secs`: the timeout of each call."""

    worker: Worker
    headers: Mapping[str, str]
    limit_secs: float

    async def post(self, path: str, body: Mapping[str, Any]) -> WorkerResult:
        raw = json.dumps(body).encode()
        return await post_json(self.worker, path, raw, self.headers, self.limit_secs)

    async def read_ranks(self) -> int | WorkerResult:
        """The worker's rank count in a group, or the failed result of the request for it."""
        call = Call("GET", SERVER_INFO, b"", self.headers, CALL_TIMEOUT_SECS)
        result = await request_worker(self.worker, call)
        ranks = result.body.get("tp_size") if isinstance(result.body, dict) else None
        if result.status in ROUTE_ABSENT or (result.success and ranks is None):
            return 1
        if not result.success:
            return result
        return ranks if isinstance(ranks, int) and ranks > 0 else 1

    def failed(self, reason: str) -> WorkerResult:
        return WorkerResult(self.worker.url, None, error=reason)


async def _run_both(
    receiver: _Receiver, path: str, body: Mapping[str, Any], proxy_part: ProxyPart
) -> WorkerResult:
    """Call the worker and run the proxy's part concurrently; a failure of one ends the other."""
    results: list[WorkerResult] = []
    answered, fault = trio.Event(), ""

    async def call_worker() -> None:
        results.append(await receiver.post(path, body))
        answered.set()
        if not results[0].success:
            part_scope.cancel()

    async with trio.open_nursery() as nursery:
        part_scope = trio.CancelScope()
        nursery.start_soon(call_worker)
        try:
            with part_scope:
                await proxy_part()
        except GroupError as error:
            fault = str(error)
        with trio.move_on_after(REASON_SECS if fault else inf):
            await answered.wait()
        nursery.cancel_scope.cancel()
    if fault and (not results or results[0].success):
        return receiver.failed(fault)
    return results[0]


def _read_buckets(version: StoredVersion) -> list[_Bucket]:
    """Read a bucket for each file. Raises SafetensorsError, OSError, GroupError."""
    buckets = []
    for file, nbytes in version.manifest.files.items():
        rows = read_header_rows(version.folder / file, nbytes)
        announcement = {
            "names": list(rows),
            "dtypes": [row.dtype for row in rows.values()],
            "shapes": [list(row.shape) for row in rows.values()],
        }
        start = min(row.offset for row in rows.values())
        region = FileRegion(str(version.folder / file), (start,))
        buckets.append(_Bucket(announcement, parse_plans(announcement, dense=True), region))
    return buckets


def local_address_towards(address: tuple[str, int] | str) -> str:
    """The local address from which this machine reaches the worker. Raises OSError."""
    if isinstance(address, str):
        return "127.0.0.1"
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        local: str = probe.getsockname()[0]
        return local

"""Delivers a version from the store to workers that were not in the trainer's group.

A worker that reads the same files is told the path; any other worker gets the version through a
process group of its own, with the proxy as rank 0. The worker is paused meanwhile, so that nothing
is computed with mixed versions, and continues unless a caller had paused it. Invariant: a success
means that the worker reported success and, if digests can be compared, that its tensors match.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import trio

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import ROUTE_ABSENT
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.store.service import StoreService
from omni_proxy.weight_sync.store.worker_proof import WorkerProof, compare_checksums
from omni_proxy.weight_sync.worker_calls import CHECKSUM, limit_secs, post_json

DISK: Final = "/update_weights_from_disk"
# Messages of workers that cannot see a path, or that read no weights from disk.
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
    """NetworkSender a version to one worker through a process group of its own."""

    async def send(
        self,
        version: StoredVersion,
        worker: Worker,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> WorkerResult: ...


@dataclass(frozen=True, slots=True)
class DeliveryOptions:
    """`paused`: URLs that stay paused afterwards. `prove`: compare digests.

    `label`: for a version that has no label yet. `headers`: the caller's credentials; `limit`: the
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
        """To all workers at once; results in their order. Raises UnknownVersion, OSError.

        `status` of a result is 4xx only if the worker certainly has what it had before.
        """
        results: dict[Worker, WorkerResult] = {}

        async def deliver_one(leased: StoredVersion, worker: Worker) -> None:
            delivery = _WorkerDelivery(self._sender, leased, options)
            results[worker] = await delivery.deliver_to(worker)

        async with self._store_service.lease(version) as leased, trio.open_nursery() as nursery:
            for worker in workers:
                nursery.start_soon(deliver_one, leased, worker)
        return [results[worker] for worker in workers]

    async def prove(
        self, version: StoredVersion, worker: Worker, headers: Mapping[str, str], limit: float = 0.0
    ) -> WorkerProof:
        """Whether the worker holds exactly this version, as far as digests can be compared."""
        options = DeliveryOptions(headers=headers, limit=limit)
        return await _WorkerDelivery(self._sender, version, options).prove(worker)


@dataclass(frozen=True, slots=True)
class _WorkerDelivery:
    """One delivery to one worker."""

    sender: NetworkSender
    version: StoredVersion
    options: DeliveryOptions

    async def deliver_to(self, worker: Worker) -> WorkerResult:
        pause = await self._call(worker, "/pause_generation", {"mode": "retract"})
        if not pause.success and pause.status not in ROUTE_ABSENT:
            return replace(pause, error=pause.error or f"it could not be paused: {pause.why}")
        result = await self._update(worker)
        if worker.url not in self.options.paused and pause.success:
            resumed = await self._call(worker, "/continue_generation", {})
            if result.success and not resumed.success:
                return replace(resumed, error=f"it stays paused: {resumed.why}")
        return result

    async def prove(self, worker: Worker) -> WorkerProof:
        return compare_checksums(
            await self._post(worker, "/weights_checker", CHECKSUM), self.version
        )

    async def _update(self, worker: Worker) -> WorkerResult:
        body = self._body()
        method, result = "disk", None
        if is_local_address(worker.address):
            result = await self._call(worker, DISK, self._disk_body(body))
        if result is None or _cannot_see_files(result):
            method = "group"
            result = await self.sender.send(self.version, worker, body, self.options.headers)
        more = {"delivered_by": method, "version": self.version.number}
        if not result.success or not self.options.prove:
            return _with_fields(result, more)
        proof = await self.prove(worker)
        result = _with_fields(result, {**more, **proof.told()})
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
        # As with a broadcast, tensors that the trainer did not send stay unchanged.
        manifest = {"files": list(self.version.manifest.files)}
        return {"model_path": str(self.version.folder), "manifest": manifest, **body}

    async def _call(self, worker: Worker, path: str, body: Mapping[str, Any]) -> WorkerResult:
        return await self._post(worker, path, json.dumps(body).encode())

    async def _post(self, worker: Worker, path: str, body: bytes) -> WorkerResult:
        secs = limit_secs(self.options.limit)
        return await post_json(worker, path, body, self.options.headers, secs)


def is_local_address(address: tuple[str, int] | str) -> bool:
    """Whether the address is one of this machine."""
    if isinstance(address, str):
        return True
    try:
        ip = ipaddress.ip_address(address[0])
    except ValueError:  # a name that is not resolved yet
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
    """Whether the worker only lacks the proxy's files; it changed nothing then."""
    if result.status in ROUTE_ABSENT and result.error == "":
        return True
    message = result.why.lower()
    failed = not result.success and not result.error
    return failed and any(unseen in message for unseen in UNSEEN_MESSAGES)


def _with_fields(result: WorkerResult, more: Mapping[str, object]) -> WorkerResult:
    text = result.body
    # "said" is the former name of "response".
    body = text if isinstance(text, dict) else {"response": text, "said": text}
    return replace(result, body={**body, **more})

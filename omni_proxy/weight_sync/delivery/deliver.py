"""A version that we hold, brought to workers that were not in the trainer's group.

Who reads the same files as we do is told the path; everybody else gets it through a group of our
own in which we are rank 0. A worker is stopped by our own pause meanwhile, so that nothing is
computed with both versions, and goes on unless somebody else had paused it. Invariant: a success
means that the worker said so and, where digests can be compared, that its tensors are ours.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import trio

from omni_proxy.admin_ops.results import WorkerResult, parsed
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import ROUTE_ABSENT, Call, call_worker
from omni_proxy.weight_sync.operations.worker_calls import ANSWER_BYTES, CHECKSUM, limit_secs
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.store.service import StoreService
from omni_proxy.weight_sync.store.worker_proof import WorkerProof, proof_of

DISK: Final = "/update_weights_from_disk"
# What workers say of a path that they can't see, or of a disk that they do not read.
UNSEEN: Final = (
    "does not exist",
    "no such file",
    "not found",
    "permission denied",
    "--weights-root",
    "reads no weights from disk",
)
DIFFERS: Final = 502


class Sends(Protocol):
    """Brings a version to one worker through a group of our own."""

    async def send(
        self,
        version: StoredVersion,
        worker: Worker,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> WorkerResult: ...


@dataclass(frozen=True, slots=True)
class VersionDelivery:
    """How a version is brought. `paused`: URLs that stay paused afterwards.

    `label`: what it is to be called, where the version itself has no label yet. `prove`: compare
    digests. `headers` are those of who asked for it; `limit` ends each call to a worker.
    """

    label: str | None = None
    paused: frozenset[str] = frozenset()
    prove: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    limit: float = 0.0


class VersionRelay:
    def __init__(self, shelf: StoreService, sends: Sends) -> None:
        self._shelf = shelf
        self._sends = sends

    async def deliver(
        self,
        version: StoredVersion,
        workers: Sequence[Worker],
        how: VersionDelivery = VersionDelivery(),
    ) -> list[WorkerResult]:
        """In the order of the workers; all at once. Raises UnknownVersion where it is gone.

        `status` is 4xx only where the worker plainly has what it had before.
        """
        answers: dict[Worker, WorkerResult] = {}

        async def one(leased: StoredVersion, worker: Worker) -> None:
            answers[worker] = await _Handing(self._sends, leased, how).to(worker)

        async with self._shelf.lease(version) as leased, trio.open_nursery() as nursery:
            for worker in workers:
                nursery.start_soon(one, leased, worker)
        return [answers[worker] for worker in workers]

    async def prove(
        self, version: StoredVersion, worker: Worker, headers: Mapping[str, str], limit: float = 0.0
    ) -> WorkerProof:
        """Whether it holds just that, as far as digests can be compared."""
        handing = _Handing(self._sends, version, VersionDelivery(headers=headers, limit=limit))
        return await handing.proof(worker)


@dataclass(frozen=True, slots=True)
class _Handing:
    """One delivery to one worker."""

    sends: Sends
    version: StoredVersion
    how: VersionDelivery

    async def to(self, worker: Worker) -> WorkerResult:
        pause = await self._call(worker, "/pause_generation", {"mode": "retract"})
        if not pause.success and pause.status not in ROUTE_ABSENT:
            return replace(pause, error=pause.error or f"it could not be paused: {pause.why}")
        answer = await self._hand(worker)
        if worker.url not in self.how.paused and pause.success:
            goes_on = await self._call(worker, "/continue_generation", {})
            if answer.success and not goes_on.success:
                return replace(goes_on, error=f"it stays paused: {goes_on.why}")
        return answer

    async def proof(self, worker: Worker) -> WorkerProof:
        return proof_of(await self._post(worker, "/weights_checker", CHECKSUM), self.version)

    async def _hand(self, worker: Worker) -> WorkerResult:
        body = self._body()
        way, answer = "disk", None
        if here(worker.address):
            answer = await self._call(worker, DISK, self._disk_body(body))
        if answer is None or _unseen(answer):
            way = "group"
            answer = await self.sends.send(self.version, worker, body, self.how.headers)
        told = {"delivered_by": way, "version": self.version.number}
        if not answer.success:
            return _telling(answer, told)
        if not self.how.prove:
            return _telling(answer, told)
        proof = await self.proof(worker)
        answer = _telling(answer, {**told, **proof.told()})
        if proof.differs:
            message = f"it took {self.version.name}, but {proof.differs}"
            said = {"success": False, "status": "error", "message": message}
            return replace(_telling(answer, said), status=DIFFERS)
        return answer

    def _body(self) -> dict[str, Any]:
        label = self.version.label if self.how.label is None else self.how.label
        named = {} if label is None else {"weight_version": label}
        return {**named, "flush_cache": True}

    def _disk_body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        # As of a broadcast: what a trainer does not send stays as it is.
        manifest = {"files": list(self.version.record.files)}
        return {"model_path": str(self.version.folder), "manifest": manifest, **body}

    async def _call(self, worker: Worker, path: str, body: Mapping[str, Any]) -> WorkerResult:
        return await self._post(worker, path, json.dumps(body).encode())

    async def _post(self, worker: Worker, path: str, body: bytes) -> WorkerResult:
        headers = {**self.how.headers, "content-type": "application/json"}
        secs = limit_secs(self.how.limit)
        call = Call("POST", path, body, headers, timeout_secs=secs, max_bytes=ANSWER_BYTES)
        outcome = await call_worker(worker, call)
        told = parsed(outcome.body)
        return WorkerResult(worker.url, outcome.status, told, outcome.error, outcome.secs)


def here(address: tuple[str, int] | str) -> bool:
    """Whether that is this machine, as far as its address tells."""
    if isinstance(address, str):
        return True
    try:
        ip = ipaddress.ip_address(address[0])
    except ValueError:  # a name that nobody has looked up yet
        return address[0] == "localhost"
    if ip.is_loopback:
        return True
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((address[0], 0))
        except OSError:
            return False
    return True


def _unseen(answer: WorkerResult) -> bool:
    """Whether it just has not our files; then nothing was changed."""
    if answer.status in ROUTE_ABSENT and answer.error == "":
        return True
    told = answer.why.lower()
    return not answer.success and not answer.error and any(words in told for words in UNSEEN)


def _telling(answer: WorkerResult, more: Mapping[str, object]) -> WorkerResult:
    body = answer.body if isinstance(answer.body, dict) else {"said": answer.body}
    return replace(answer, body={**body, **more})

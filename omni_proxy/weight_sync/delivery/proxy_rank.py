"""The proxy as one rank of a trainer's group: broadcast weights become a version in the store.

The proxy has one receiver, whatever the number of workers. A child process receives (see
process_group/receiver.py), so nothing here imports torch. Invariant: after a failure no version, no
file and no armed receive is left; a version exists only after all its announced bytes were
received.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import trio

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.process_group.blocking_call import CancelToken
from omni_proxy.process_group.receiver import (
    FileRegion,
    GroupError,
    GroupLimits,
    PendingReceive,
    Received,
    Receiver,
    Rendezvous,
    open_receiver,
)
from omni_proxy.process_group.rendezvous import GLOO, HostedRendezvous
from omni_proxy.process_group.sender import Sender
from omni_proxy.process_group.tensor_plan import TensorPlan, parse_plans
from omni_proxy.weight_sync.delivery.deliver import NO_LIMIT_SECS, BlockingCalls
from omni_proxy.weight_sync.delivery.prefetch import IncomingVersion
from omni_proxy.weight_sync.protocol.participant_reports import FAILED, RECEIVING, ReceiveProgress
from omni_proxy.weight_sync.protocol.requests import parse_group_name, parse_object
from omni_proxy.weight_sync.store.draft import Draft
from omni_proxy.weight_sync.store.manifest import SafetensorsError, StoredVersion
from omni_proxy.weight_sync.store.service import StoreService
from omni_proxy.weight_sync.store.version_store import InsufficientSpace

NAME: Final = "proxy"
UNUSED_POLL_SECS: Final = 1.0  # interval of checks whether the receiver is still used
HEADER_BYTES: Final = 512  # upper bound of a tensor's row in a file header
_REFUSALS: Final = (GroupError, InsufficientSpace, SafetensorsError, OSError)
_log = logging.getLogger(__name__)


class ProxyRank:
    """The proxy as a Participant of a sync (sync/participant.py).

    `settings()`: current configuration.
    """

    name = NAME
    rank_count = 1

    def __init__(
        self, store_service: StoreService, settings: Callable[[], WeightSyncConfig]
    ) -> None:
        self._store_service = store_service
        self._settings = settings
        self._threads = BlockingCalls("rank", 16, max_ends=4)
        self._opening = trio.Lock()
        self._receiver: Receiver | None = None
        self._pending: PendingReceive | None = None
        self.incoming: IncomingVersion | None = None  # the receive armed last
        self._draft: Draft | None = None
        self._in_group = False
        self._join_cancel = CancelToken()  # cancels the last `init`
        self._senders_opening = 0
        self._receiver_settings: tuple[object, ...] = ()  # settings of the open receiver

    async def warm_up(self) -> None:
        """Import torch in the child before the first `init`; log a warning if that fails."""
        try:
            (await self._open()).warm()
        except GroupError as error:
            _log.warning("weight_sync_unavailable error=%s", str(error))
        await self.close_when_unused()  # in case the mode has changed during the import

    async def close_when_unused(self) -> None:
        """If versions are no longer kept, end the child process as soon as it is idle."""
        while self._receiver is not None and not self._store_service.enabled:
            async with self._opening:
                if not self._senders_opening and not await self._busy():
                    await self.close()
                    return
            await trio.sleep(UNUSED_POLL_SECS)

    async def init(
        self, body: Mapping[str, Any], rank_offset: int, world_size: int
    ) -> WorkerResult:
        """Join the group as rank `rank_offset`."""

        async def join() -> dict[str, object]:
            await self._store_service.open()
            receiver = await self._open()
            settings = self._settings()
            backend = body.get("backend") if settings.backend == "auto" else settings.backend
            rendezvous = Rendezvous(
                master_address=body.get("master_address", ""),
                master_port=body.get("master_port", 0),
                rank=rank_offset,
                world_size=world_size,
                group_name=parse_group_name(body),
                backend=str(backend or GLOO),
                timeout_s=settings.init_timeout_secs or NO_LIMIT_SECS,
            )
            self._in_group, self._join_cancel = True, CancelToken()
            await self._threads.run("init", receiver.init, rendezvous, self._join_cancel)
            return {"status": "ok", "message": f"joined as rank {rank_offset} of {world_size}"}

        return await self._as_result(join)

    async def prepare(self, body: bytes) -> WorkerResult:
        """Reserve space for the announced buckets, and start to receive."""

        async def arm() -> dict[str, object]:
            plans = await self._arm(body)
            return {"status": "ready", "message": f"ready for {len(plans)} buckets"}

        return await self._as_result(arm)

    async def complete(self, body: bytes) -> WorkerResult:
        """Wait until all announced buckets are received."""
        return await self._as_result(self._receive)

    async def update(self, body: bytes) -> WorkerResult:
        """Prepare and complete in one call."""

        async def respond_and_receive() -> dict[str, object]:
            await self._arm(body)
            return await self._receive()

        return await self._as_result(respond_and_receive)

    async def destroy(self, body: bytes) -> WorkerResult:
        """Leave the group: end a receive in progress, and discard data that is not sealed."""

        async def leave() -> dict[str, object]:
            self._pending = None
            try:
                if self._receiver is not None:
                    name = parse_group_name(parse_object(body))
                    await self._threads.end("destroy", self._receiver.destroy, name)
            finally:
                # A cancelled `init` may not have reached the receiver yet.
                self._join_cancel.cancel("the group was destroyed")
                self._in_group = False
                await self.discard()
            return {"status": "ok", "message": "left the group"}

        return await self._as_result(leave)

    async def open_sender(self, hosted: HostedRendezvous) -> Sender:
        """Open rank 0 of a delivery group, also in a child process. Raises GroupError."""
        self._senders_opening += 1
        try:
            receiver = await self._open()
            return await self._threads.run("lead", receiver.sender, hosted)
        finally:
            self._senders_opening -= 1

    async def seal(self, label: str | None) -> StoredVersion:
        """Make a version of the received data. Raises OSError; LookupError if there is none."""
        draft, self._draft, self.incoming = self._draft, None, None
        if draft is None:
            raise LookupError("nothing was received that could become a version")
        store = await self._store_service.open()
        return await self._store_service.run_in_thread(store.seal, draft, label)

    async def discard(self) -> None:
        """Discard the received data of a version that will not be sealed."""
        draft, self._draft, self.incoming = self._draft, None, None
        if draft is not None and self._store_service.store is not None:
            await self._store_service.run_in_thread(self._store_service.store.discard, draft)

    async def close(self) -> None:
        """End the child process."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            with trio.CancelScope(shield=True):
                await self._threads.end("close", receiver.close)

    async def read_progress(self) -> ReceiveProgress | None:
        """Progress of the current receive, None if there is none. Never blocks."""
        if (pending := self._pending) is None:
            return None
        fault, progress = pending.fault(), pending.progress()
        received = (progress.buckets_done, progress.bytes_received)
        state = RECEIVING if progress.bytes_received < progress.bytes_expected else "received"
        return ReceiveProgress(
            FAILED if fault else state, received, trio.current_time(), str(fault or "")
        )

    def status(self) -> dict[str, object]:
        """JSON-ready progress of the current receive."""
        pending = self._pending
        if pending is None:
            return {"armed": False}
        progress = pending.progress()
        return {
            "armed": True,
            "buckets_done": progress.buckets_done,
            "bytes_received": progress.bytes_received,
            "bytes_come": progress.bytes_received,  # the old name, for one release
            "bytes_expected": progress.bytes_expected,
        }

    async def _open(self) -> Receiver:
        """Return the receiver, opened if necessary. Raises GroupError if torch is missing."""
        # Under a lock, since a second receiver would replace the one that has the group.
        async with self._opening:
            settings = self._settings()
            expected = (
                settings.isolation,
                settings.stall_timeout_secs,
                settings.ready_timeout_secs,
            )
            if (
                self._receiver is not None
                and self._receiver_settings != expected
                and not await self._busy()
            ):
                await self.close()
            if self._receiver is None:
                self._receiver_settings = expected
                open_one = partial(open_receiver, settings.isolation, _limits(settings), name=NAME)
                self._receiver = await self._threads.run("open", open_one)
            return self._receiver

    async def _busy(self) -> bool:
        """Whether closing the receiver would interrupt something."""
        receiver = self._receiver
        assert receiver is not None
        return self._in_group or await self._threads.run("look", receiver.busy)

    async def _arm(self, body: bytes) -> tuple[TensorPlan, ...]:
        """Arm the receiver. If it raises one of _REFUSALS, earlier buckets are discarded."""
        name, plans = await self._threads.run("read", _parse_announcement, body)
        settings, receiver = self._settings(), self._receiver
        if receiver is None:
            raise GroupError("there is no group: call init_weights_update_group first")
        try:
            region = await self._reserve(plans)
            call = partial(
                receiver.arm,
                name,
                plans,
                ready_secs=settings.ready_timeout_secs or NO_LIMIT_SECS,
                into=region,
                digests=settings.verify == "checksum",
            )
            self._pending = await self._threads.run("arm", call)
            self.incoming = IncomingVersion(self._pending, region, plans)
        except _REFUSALS:
            # The draft has tensors that were not received, so it must never be sealed.
            await self.discard()
            raise
        return plans

    async def _reserve(self, plans: tuple[TensorPlan, ...]) -> FileRegion:
        store = await self._store_service.open()
        count = sum(len(plan.tensors) for plan in plans)
        nbytes = sum(plan.block_bytes for plan in plans) + count * HEADER_BYTES
        if self._draft is None:
            self._draft = await self._store_service.run_in_thread(store.begin, nbytes)
        else:
            await self._store_service.run_in_thread(store.require_room, self._draft, nbytes)
        buckets = [plan.tensors for plan in plans]
        block = await self._store_service.run_in_thread(self._draft.add, buckets)
        return FileRegion(str(block.path), block.starts)

    async def _receive(self) -> dict[str, object]:
        pending, secs = self._pending, self._settings().receive_timeout_secs or NO_LIMIT_SECS
        draft = self._draft
        if pending is None or draft is None:
            raise GroupError("complete without prepare: nothing is armed")
        try:
            received: Received = await self._threads.run("receive", pending.wait, secs)
        except GroupError as error:
            await self.discard()
            message = str(error).rstrip(".")
            raise GroupError(
                f"{message}. Nothing was changed: the proxy keeps no part of the version"
            ) from error
        finally:
            self._pending = None
        if self._draft is not draft:
            received.close()
            raise GroupError("the group was destroyed right after everything was received")
        draft.set_digests(received.digests)
        result = {
            "status": "ok",
            "num_buckets_received": received.buckets,
            "message": f"received {received.buckets} buckets, {received.nbytes} bytes",
            "bytes": received.nbytes,
            "seconds": round(received.secs, 6),
        }
        received.close()
        return result

    async def _as_result(self, step: Callable[[], Any]) -> WorkerResult:
        started_at = trio.current_time()
        try:
            status, body = 200, {"success": True, **await step()}
        except _REFUSALS as error:
            message = str(error) or type(error).__name__
            status, body = 400, {"success": False, "status": "error", "message": message}
        return WorkerResult(NAME, status, body, secs=round(trio.current_time() - started_at, 6))


def _limits(settings: WeightSyncConfig) -> GroupLimits:
    """Limits of the receiver; a configured 0 is no timeout."""
    stall_secs = settings.stall_timeout_secs or NO_LIMIT_SECS
    # The trainer sends nothing before the slowest of its receivers is armed.
    first_byte_secs = max(stall_secs, settings.ready_timeout_secs or NO_LIMIT_SECS)
    return GroupLimits(
        stall_secs=stall_secs, first_byte_secs=first_byte_secs, receive_secs=NO_LIMIT_SECS
    )


def _parse_announcement(body: bytes) -> tuple[str, tuple[TensorPlan, ...]]:
    """The group name and the buckets. Slow for a large model. Raises GroupError."""
    fields = parse_object(body)
    return parse_group_name(fields), parse_plans(fields, dense=True)

"""The proxy as one rank of a trainer's group: what is broadcast lands in a version of the store.

One trainer, one receiver, however many workers are behind us. The receive itself is a child's (see
collective/receiver.py): nothing here imports torch. Invariant: whatever fails leaves no version, no
file and nothing armed; a version exists only once every announced byte of it has come.
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
from omni_proxy.weight_sync.delivery.prefetch import Coming
from omni_proxy.weight_sync.operations.blocking_calls import BlockingCalls
from omni_proxy.weight_sync.protocol.receive_progress import COMING, FAILED, ReceiveProgress
from omni_proxy.weight_sync.protocol.requests import group_name_of, object_of
from omni_proxy.weight_sync.store.draft import Draft
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.store.safetensors_header import SafetensorsError
from omni_proxy.weight_sync.store.service import StoreService
from omni_proxy.weight_sync.store.version_store import NoRoom

NAME: Final = "proxy"
NO_LIMIT_SECS: Final = 86400.0  # a clock that is off: torch wants a number
REST_SECS: Final = 1.0  # between looks whether all that was under way has ended
HEADER_BYTES: Final = 512  # of a file's header for each tensor, more than it takes
_REFUSALS: Final = (GroupError, NoRoom, SafetensorsError, OSError)
_log = logging.getLogger(__name__)


class ProxyRank:
    """A Member of the session (see members.py). `settings` are those of the moment."""

    name = NAME
    ranks = 1

    def __init__(self, shelf: StoreService, settings: Callable[[], WeightSyncConfig]) -> None:
        self._shelf = shelf
        self._settings = settings
        self._threads = BlockingCalls("own", 16, ends=4)
        self._opening = trio.Lock()
        self._receiver: Receiver | None = None
        self._armed: PendingReceive | None = None
        self.coming: Coming | None = None  # the receive that was armed last
        self._draft: Draft | None = None
        self._in_group = False
        self._joining = CancelToken()  # for the `init` that was begun last
        self._leading = 0  # groups of our own that are just being opened
        self._made_for: tuple[object, ...] = ()  # what the receiver was opened with

    async def warm(self) -> None:
        """So that the first `init` waits for no import. Quiet where there is no torch."""
        try:
            (await self._open()).warm()
        except GroupError as error:
            _log.warning("weight_sync.mode needs more than is installed: %s", error)
        await self.rest()  # where the mode was left again meanwhile

    async def rest(self) -> None:
        """No version is wanted any more: the idle child ends, as soon as it is idle."""
        while self._receiver is not None and not self._shelf.wanted:
            async with self._opening:
                if not self._leading and not await self._busy():
                    await self.close()
                    return
            await trio.sleep(REST_SECS)

    async def init(
        self, body: Mapping[str, Any], rank_offset: int, world_size: int
    ) -> WorkerResult:
        """Joins as rank `rank_offset`."""

        async def join() -> dict[str, object]:
            await self._shelf.open()
            receiver = await self._open()
            settings = self._settings()
            backend = body.get("backend") if settings.backend == "auto" else settings.backend
            rendezvous = Rendezvous(
                master_address=body.get("master_address", ""),
                master_port=body.get("master_port", 0),
                rank=rank_offset,
                world_size=world_size,
                group_name=group_name_of(body),
                backend=str(backend or GLOO),
                timeout_s=settings.init_timeout_secs or NO_LIMIT_SECS,
            )
            self._in_group, self._joining = True, CancelToken()
            await self._threads.run("init", receiver.init, rendezvous, self._joining)
            return {"status": "ok", "message": f"joined as rank {rank_offset} of {world_size}"}

        return await self._answered(join)

    async def prepare(self, body: bytes) -> WorkerResult:
        """Takes room for what is announced and waits for its first byte."""

        async def arm() -> dict[str, object]:
            plans = await self._arm(body)
            return {"status": "ready", "message": f"ready for {len(plans)} buckets"}

        return await self._answered(arm)

    async def complete(self, body: bytes) -> WorkerResult:
        """Waits until all that was announced has come."""
        return await self._answered(self._receive)

    async def update(self, body: bytes) -> WorkerResult:
        """Both in one call."""

        async def both() -> dict[str, object]:
            await self._arm(body)
            return await self._receive()

        return await self._answered(both)

    async def destroy(self, body: bytes) -> WorkerResult:
        """Ends whatever is under way; what came of a version that is not sealed is thrown away."""

        async def leave() -> dict[str, object]:
            self._armed = None
            try:
                if self._receiver is not None:
                    name = group_name_of(object_of(body))
                    await self._threads.end("destroy", self._receiver.destroy, name)
            finally:
                # One that nobody waits for any more may not be known to the receiver yet.
                self._joining.cancel("the group was destroyed")
                self._in_group = False
                await self.discard()
            return {"status": "ok", "message": "left the group"}

        return await self._answered(leave)

    async def sender(self, meeting: HostedRendezvous) -> Sender:
        """Rank 0 of a group of our own, in a child as well. Raises GroupError."""
        self._leading += 1
        try:
            receiver = await self._open()
            return await self._threads.run("lead", receiver.sender, meeting)
        finally:
            self._leading -= 1

    async def seal(self, label: str | None) -> StoredVersion:
        """What came since the last one is a version. Raises OSError, LookupError if nothing did."""
        draft, self._draft, self.coming = self._draft, None, None
        if draft is None:
            raise LookupError("nothing was received that could become a version")
        store = await self._shelf.open()
        return await self._shelf.in_thread(store.seal, draft, label)

    async def discard(self) -> None:
        """Throw away what came of a version that will not be ended."""
        draft, self._draft, self.coming = self._draft, None, None
        if draft is not None and self._shelf.store is not None:
            await self._shelf.in_thread(self._shelf.store.discard, draft)

    async def close(self) -> None:
        """Ends the child."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            with trio.CancelScope(shield=True):
                await self._threads.end("close", receiver.close)

    async def look(self) -> ReceiveProgress | None:
        """Waits for nothing."""
        if (armed := self._armed) is None:
            return None
        fault, progress = armed.fault(), armed.progress()
        come = (progress.buckets_done, progress.bytes_come)
        state = COMING if progress.bytes_come < progress.bytes_expected else "received"
        return ReceiveProgress(
            FAILED if fault else state, come, trio.current_time(), str(fault or "")
        )

    def status(self) -> dict[str, object]:
        """JSON-ready: how far the present receive has come."""
        armed = self._armed
        if armed is None:
            return {"armed": False}
        progress = armed.progress()
        return {
            "armed": True,
            "buckets_done": progress.buckets_done,
            "bytes_come": progress.bytes_come,
            "bytes_expected": progress.bytes_expected,
        }

    async def _open(self) -> Receiver:
        """Raises GroupError where torch is not installed."""
        # One at a time: the later of two would take the place of the one that has the group.
        async with self._opening:
            settings = self._settings()
            wanted = (
                settings.isolation,
                settings.stall_timeout_secs,
                settings.ready_timeout_secs,
            )
            if self._receiver is not None and self._made_for != wanted and not await self._busy():
                await self.close()
            if self._receiver is None:
                self._made_for = wanted
                open_one = partial(open_receiver, settings.isolation, _limits(settings), name=NAME)
                self._receiver = await self._threads.run("open", open_one)
            return self._receiver

    async def _busy(self) -> bool:
        """Whether the receiver's end would end something else."""
        receiver = self._receiver
        assert receiver is not None
        return self._in_group or await self._threads.run("look", receiver.busy)

    async def _arm(self, body: bytes) -> tuple[TensorPlan, ...]:
        """Raises one of _REFUSALS: then nothing is armed, and what came before is thrown away."""
        name, plans = await self._threads.run("read", _announced, body)
        settings, receiver = self._settings(), self._receiver
        if receiver is None:
            raise GroupError("there is no group: call init_weights_update_group first")
        try:
            place = await self._room(plans)
            call = partial(
                receiver.arm,
                name,
                plans,
                ready_secs=settings.ready_timeout_secs or NO_LIMIT_SECS,
                into=place,
                digests=settings.verify == "checksum",
            )
            self._armed = await self._threads.run("arm", call)
            self.coming = Coming(self._armed, place, plans)
        except _REFUSALS:
            # It names tensors now that did not come: such a version must never be sealed.
            await self.discard()
            raise
        return plans

    async def _room(self, plans: tuple[TensorPlan, ...]) -> FileRegion:
        store = await self._shelf.open()
        count = sum(len(plan.tensors) for plan in plans)
        nbytes = sum(plan.block_bytes for plan in plans) + count * HEADER_BYTES
        if self._draft is None:
            self._draft = await self._shelf.in_thread(store.begin, nbytes)
        else:
            await self._shelf.in_thread(store.require_room, self._draft, nbytes)
        buckets = [plan.tensors for plan in plans]
        block = await self._shelf.in_thread(self._draft.add, buckets)
        return FileRegion(str(block.path), block.starts)

    async def _receive(self) -> dict[str, object]:
        armed, secs = self._armed, self._settings().receive_timeout_secs or NO_LIMIT_SECS
        draft = self._draft
        if armed is None or draft is None:
            raise GroupError("complete without prepare: nothing is armed")
        try:
            received: Received = await self._threads.run("receive", armed.wait, secs)
        except GroupError:
            await self.discard()
            raise
        finally:
            self._armed = None
        if self._draft is not draft:
            received.close()
            raise GroupError("the group was destroyed when everything had just come")
        draft.digested(received.digests)
        told = {
            "status": "ok",
            "num_buckets_received": received.buckets,
            "message": f"received {received.buckets} buckets, {received.nbytes} bytes",
            "bytes": received.nbytes,
            "seconds": round(received.secs, 6),
        }
        received.close()
        return told

    async def _answered(self, step: Callable[[], Any]) -> WorkerResult:
        began = trio.current_time()
        try:
            status, body = 200, {"success": True, **await step()}
        except _REFUSALS as error:
            message = str(error) or type(error).__name__
            status, body = 400, {"success": False, "status": "error", "message": message}
        return WorkerResult(NAME, status, body, secs=round(trio.current_time() - began, 6))


def _limits(settings: WeightSyncConfig) -> GroupLimits:
    """0 = a clock that is off."""
    stall_secs = settings.stall_timeout_secs or NO_LIMIT_SECS
    # Nothing comes before the slowest of all the trainer's receivers is armed as well.
    first_byte_secs = max(stall_secs, settings.ready_timeout_secs or NO_LIMIT_SECS)
    return GroupLimits(
        stall_secs=stall_secs, first_byte_secs=first_byte_secs, receive_secs=NO_LIMIT_SECS
    )


def _announced(body: bytes) -> tuple[str, tuple[TensorPlan, ...]]:
    """The group's name, and the buckets; of a large model that takes long. Raises GroupError."""
    told = object_of(body)
    return group_name_of(told), parse_plans(told, dense=True)

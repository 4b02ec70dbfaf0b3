"""One receive: it returns the announced tensors, complete and in time, or raises GroupError.

It has no HTTP and no model. Backends do not report a peer that sends less than it announced. A
known pattern (sentinel) at the end of each message, and at intervals within it, detects that
(note:weight-sync 6.5b), and shows how many bytes have arrived. If a peer sends more, gloo aborts
the process; a caller that must survive that has to receive in a child process.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from omni_proxy.process_group.blocking_call import AbandonedThreads, BlockingCall
from omni_proxy.process_group.broadcast.backend import Backend, error_summary
from omni_proxy.process_group.broadcast.tensor_hashing import TensorHasher
from omni_proxy.process_group.rendezvous import NCCL
from omni_proxy.process_group.tensor_plan import (
    ITEM_BYTES,
    BroadcastMessage,
    GroupError,
    TensorPlan,
)

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

# Called in the receiving thread with (complete messages, received bytes) when they increase.
ProgressCallback = Callable[[int, int], None]

# Slowest link speed that does not count as a stall while a message's bytes can't be observed.
MIN_BYTES_PER_SEC: Final = 10e6
# Slower than any usable link: bounds how long an abandoned thread stays in the backend.
CRAWLING_BYTES_PER_SEC: Final = 1e6
SENTINEL_BYTES: Final = 8
# Shorter messages are not checked: their data may equal the sentinel by chance (1 in 4 billion at
# this length).
MIN_CHECKED_BYTES: Final = 4
SENTINEL_EVERY_BYTES: Final = 4 << 20
# The last bytes of a trainer that sends and exits may arrive after the end of its store connection.
# Also, the backend has to time out after the monitor, whose error has the cause.
GRACE_SECS: Final = 1.0
OWNER_GONE: Final = "the trainer has gone: the connection to its store was closed"


def sentinel_for(group_name: str, world_size: int) -> bytes:
    """The sentinel bytes of a group. All ranks use the same, because ranks relay to each other.

    A relaying rank forwards its whole buffer, with its sentinels if fewer bytes arrived there.
    """
    return hashlib.sha256(f"{world_size} {group_name}".encode()).digest()[:SENTINEL_BYTES]


class Sentinels:
    """The sentinel bytes in a receive block; an overwritten sentinel means received up to there."""

    def __init__(
        self, block: torch.Tensor, messages: tuple[BroadcastMessage, ...], sentinel: bytes
    ) -> None:
        import torch

        self._pattern = torch.frombuffer(bytearray(sentinel), dtype=torch.uint8).to(block.device)
        self._block = block
        self._messages = messages
        for message in messages:
            for index in range(_sentinel_count(message)):
                self._bytes_at(message, _sentinel_end(message, index)).copy_(
                    self._pattern_of(message)
                )

    def is_intact(self, message: BroadcastMessage, end: int) -> bool:
        """Whether the message's bytes just before `end` have not arrived."""
        import torch

        return torch.equal(self._bytes_at(message, end), self._pattern_of(message))

    def first_incomplete(self) -> BroadcastMessage | None:
        """The first message whose end did not arrive; valid only after all messages completed."""
        for message in self._messages:
            long_enough = message.nbytes >= MIN_CHECKED_BYTES
            if long_enough and self.is_intact(message, message.nbytes):
                return message
        return None

    def _bytes_at(self, message: BroadcastMessage, end: int) -> torch.Tensor:
        stop = message.offset + end
        return self._block[stop - min(SENTINEL_BYTES, message.nbytes) : stop]

    def _pattern_of(self, message: BroadcastMessage) -> torch.Tensor:
        return self._pattern[: min(SENTINEL_BYTES, message.nbytes)]


def _sentinel_end(message: BroadcastMessage, index: int) -> int:
    """End offset of sentinel `index`: sentinels are every SENTINEL_EVERY_BYTES and at the end."""
    return min((index + 1) * SENTINEL_EVERY_BYTES, message.nbytes)


def _sentinel_count(message: BroadcastMessage) -> int:
    return max(1, -(-message.nbytes // SENTINEL_EVERY_BYTES))


class ReceiveMonitor:
    """Counts the bytes of a plan that have arrived, and the time of the last progress."""

    def __init__(self, plan: TensorPlan, sentinels: Sentinels | None) -> None:
        self.messages_done = 0
        self.bytes_received = 0
        self.changed_at = time.monotonic()
        self._messages = plan.messages
        self._sentinels = sentinels
        self._bytes_done = 0
        self._sentinels_passed = 0

    def update(self, messages_done: int) -> bool:
        """Whether anything arrived since the last call."""
        before = self.messages_done, self.bytes_received
        if messages_done > self.messages_done:
            completed = self._messages[self.messages_done : messages_done]
            self._bytes_done += sum(message.nbytes for message in completed)
            self.messages_done, self._sentinels_passed = messages_done, 0
        self.bytes_received = self._bytes_done + self._bytes_of_current()
        changed = before != (self.messages_done, self.bytes_received)
        if changed:
            self.changed_at = time.monotonic()
        return changed

    def final_bytes_of_current(self) -> int:
        """How many bytes of the current message are final: all before the last passed sentinel."""
        if not self._sentinels_passed:
            return 0
        return max(0, self.bytes_received - self._bytes_done - SENTINEL_BYTES)

    def unobservable_bytes(self) -> int:
        """How many bytes may arrive before the monitor detects progress."""
        if self._sentinels is not None or self.messages_done == len(self._messages):
            return 0
        return self._messages[self.messages_done].nbytes

    def position(self) -> str:
        """The position in the plan, for error texts."""
        total = len(self._messages)
        if self.messages_done == total:
            return f"after all {total} messages"
        what = self._messages[self.messages_done].what
        return f"at {what}, message {self.messages_done + 1} of {total}"

    def _bytes_of_current(self) -> int:
        if self._sentinels is None or self.messages_done == len(self._messages):
            return 0
        message = self._messages[self.messages_done]
        count = _sentinel_count(message)
        while self._sentinels_passed < count and not self._sentinels.is_intact(
            message, _sentinel_end(message, self._sentinels_passed)
        ):
            self._sentinels_passed += 1
        return _sentinel_end(message, self._sentinels_passed - 1) if self._sentinels_passed else 0


@dataclass(frozen=True, slots=True)
class ReceiveContext:
    """Limits and end conditions of a receive, and the counter of its thread.

    `stop_reason` returns why the receive has to end, or None. `owner_gone` returns whether the
    trainer has closed its store.
    """

    group_name: str
    timeout_secs: float
    stall_secs: float
    first_byte_secs: float
    stop_reason: Callable[[], str | None]
    owner_gone: Callable[[], bool]
    threads: AbandonedThreads


@dataclass(frozen=True, slots=True)
class ReceiveResult:
    """The result of a receive: the plan's bytes in `block`; `digests` only if requested."""

    plan: TensorPlan
    block: torch.Tensor
    secs: float
    digests: dict[str, str] = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        return tensor_views(self.plan, self.block)


class BlockReceive:
    """One receive of a plan into a block, which is flat uint8 memory of at least its size."""

    def __init__(
        self,
        backend: Backend,
        plan: TensorPlan,
        block: torch.Tensor,
        sentinel: bytes,
        *,
        digests: bool = False,
    ) -> None:
        self._plan = plan
        self._digests = digests
        self._backend: Backend | None = backend
        self._block: torch.Tensor | None = block
        self._sentinels = Sentinels(block, plan.messages, sentinel)
        # Reading GPU memory would wait for the monitored receive itself, and bytes that are
        # received through a GPU are copied to the host only when their message is complete.
        observable = block.device.type == "cpu" and backend.backend != NCCL
        self.monitor = ReceiveMonitor(plan, self._sentinels if observable else None)

    def run(
        self,
        context: ReceiveContext,
        on_progress: ProgressCallback | None = None,
        posted: Callable[[], None] = lambda: None,
    ) -> ReceiveResult:
        """Blocks until all bytes arrived. If it raises GroupError, the group is unusable.

        May be called once. `posted` is called as soon as the backend waits for the first message.
        """
        backend, block, self._backend, self._block = self._backend, self._block, None, None
        assert backend is not None
        assert block is not None
        started = time.monotonic()
        hasher = None
        if self._digests:
            hasher = TensorHasher(self._plan, _block_reader(block), context.group_name)
        parts = [
            block[message.offset : message.offset + message.nbytes]
            for message in self._plan.messages
        ]
        call = _start_receive(context, backend, parts, posted)
        # From here on only the call's thread has references to the group: this thread must not free
        # it if it abandons the call.
        del backend, parts
        try:
            self._wait(call, context, on_progress, hasher)
            self._require_complete()
        except GroupError as error:
            if hasher is not None:
                hasher.cancel()
            del block
            raise GroupError(f"group {context.group_name!r}: {error}", group_dropped=True) from None
        secs = time.monotonic() - started
        return ReceiveResult(
            self._plan, block, secs, hasher.digests() if hasher is not None else {}
        )

    def _wait(
        self,
        call: BlockingCall[None],
        context: ReceiveContext,
        on_progress: ProgressCallback | None,
        hasher: TensorHasher | None,
    ) -> None:
        self.monitor.changed_at = time.monotonic()
        conditions = _EndConditions(context, self.monitor)

        def update() -> None:
            if not self.monitor.update(call.done):
                return
            if hasher is not None:
                hasher.update(self.monitor.messages_done, self.monitor.final_bytes_of_current())
            if on_progress is not None:
                on_progress(self.monitor.messages_done, self.monitor.bytes_received)

        def stop_reason() -> str | None:
            update()
            return conditions.reason(time.monotonic())

        try:
            context.threads.wait_for(call, stop_reason)
        except GroupError as error:
            # After a cancel, the peer's exit may be detected first: report the cancel.
            reason = context.stop_reason() or error
            raise GroupError(f"the receive failed {self.monitor.position()}: {reason}") from None
        update()

    def _require_complete(self) -> None:
        if (message := self._sentinels.first_incomplete()) is not None:
            raise GroupError(
                f"{message.what} was announced with {message.nbytes} bytes, but the trainer sent "
                "fewer"
            )


class _EndConditions:
    """Decides whether a receive has to end: cancel, trainer disconnected, stall, deadline."""

    def __init__(self, context: ReceiveContext, monitor: ReceiveMonitor) -> None:
        self._context = context
        self._monitor = monitor
        self._deadline = time.monotonic() + context.timeout_secs
        self._owner_gone_at: float | None = None

    def reason(self, now: float) -> str | None:
        context, changed_at = self._context, self._monitor.changed_at
        if self._owner_gone_at is None and context.owner_gone():
            self._owner_gone_at = now
        if (reason := context.stop_reason()) is not None:
            return reason
        if self._owner_gone_at is not None and (
            now - max(self._owner_gone_at, changed_at) > GRACE_SECS
        ):
            return OWNER_GONE
        if now - changed_at > self._stall_limit_secs():
            if self._owner_gone_at is not None:
                return OWNER_GONE
            return f"nothing was received for {self._stall_limit_secs():g} s"
        return f"not complete within {context.timeout_secs:g} s" if now > self._deadline else None

    def _stall_limit_secs(self) -> float:
        context, monitor = self._context, self._monitor
        started = monitor.messages_done or monitor.bytes_received
        secs = context.stall_secs if started else context.first_byte_secs
        return secs + monitor.unobservable_bytes() / MIN_BYTES_PER_SEC


def _start_receive(
    context: ReceiveContext,
    backend: Backend,
    parts: list[torch.Tensor],
    posted: Callable[[], None],
) -> BlockingCall[None]:
    timeout_secs = context.timeout_secs
    # NCCL's clock starts when all broadcasts are posted, and an abandoned NCCL receive is aborted.
    if backend.backend != NCCL:
        timeout_secs = min(timeout_secs, _backend_timeout_secs(context, parts)) + GRACE_SECS

    def receive(call: BlockingCall[None]) -> None:
        def on_complete(count: int) -> None:
            call.done = count

        try:
            backend.receive(parts, on_complete, posted, timeout_secs)
        except RuntimeError as error:
            raise GroupError(error_summary(error)) from None

    return BlockingCall(f"weights-receive-{context.group_name}", receive)


def _backend_timeout_secs(context: ReceiveContext, parts: list[torch.Tensor]) -> float:
    """The backend's timeout for one broadcast, well after the monitor would have ended it.

    It bounds how long an abandoned thread stays. The timeout of a broadcast already runs while the
    previous one still arrives.
    """
    largest_bytes = max((part.numel() for part in parts), default=0)
    stall_secs = context.first_byte_secs + context.stall_secs
    return stall_secs + 2 * largest_bytes / CRAWLING_BYTES_PER_SEC


def _block_reader(block: torch.Tensor) -> Callable[[int, int], Buffer]:
    """Returns a function that reads bytes of the block; GPU memory is copied."""

    def read(offset: int, nbytes: int) -> Buffer:
        array: Any = block[offset : offset + nbytes].cpu().numpy()
        return memoryview(array)

    return read


def tensor_views(plan: TensorPlan, block: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plan's tensors by name, as views of the block; a misaligned one is a copy."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    for tensor, offset in zip(plan.tensors, plan.offsets, strict=True):
        part = block[offset : offset + tensor.nbytes]
        if (block.storage_offset() + offset) % ITEM_BYTES[tensor.dtype]:
            part = part.clone()
        tensors[tensor.name] = part.view(getattr(torch, tensor.dtype)).reshape(tensor.shape)
    return tensors

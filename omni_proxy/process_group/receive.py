"""One receive: announced tensors come in, whole and on time, or a GroupError says what was wrong.

Knows no HTTP and no model. A peer that sends less than it announced would go unnoticed: known
bytes at the end of each message tell (weight-sync.md 6.5b), and tell how far the bytes have come.
A peer that sends more ends the process inside gloo: who must survive that runs this in a child.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from omni_proxy.process_group.backend import Backend, told
from omni_proxy.process_group.blocking_call import AbandonedThreads, BlockingCall
from omni_proxy.process_group.rendezvous import NCCL
from omni_proxy.process_group.tensor_hashing import Hashing
from omni_proxy.process_group.tensor_plan import ITEM_BYTES, GroupError, Message, TensorPlan

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

# Called in the receiving thread with (complete messages, bytes that have come), as they grow.
Moved = Callable[[int, int], None]

# So slow may a link be, where the bytes of a message cannot be watched, before it counts as dead.
SLOWEST_BYTES_PER_SEC: Final = 10e6
# Slower than any that works: what is left to such a link may hold a thread of the backend for long.
CRAWLING_BYTES_PER_SEC: Final = 1e6
MARK_BYTES: Final = 8
# In a shorter message the marks could by chance be what the trainer sends: 1 in 4 billion here.
SHORTEST_MARKED_BYTES: Final = 4
MARK_EVERY_BYTES: Final = 4 << 20
# The last bytes of a trainer that sends and exits come after the end of its store; and the backend
# is to give up after us, who say why.
GRACE_SECS: Final = 1.0
OWNER_GONE: Final = "the trainer has gone: the connection to its store was closed"


def mark_of(group_name: str, world_size: int) -> bytes:
    """What is marked with; the same at all ranks, as some get their bytes from another of them.

    Such a one passes on all that was announced, whatever came: its mark must be known here too.
    """
    return hashlib.sha256(f"{world_size} {group_name}".encode()).digest()[:MARK_BYTES]


class Marks:
    """The mark in a block that is still to be received into: overwritten = it came so far."""

    def __init__(self, block: torch.Tensor, messages: tuple[Message, ...], mark: bytes) -> None:
        import torch

        self._pattern = torch.frombuffer(bytearray(mark), dtype=torch.uint8).to(block.device)
        self._block = block
        self._messages = messages
        for message in messages:
            for index in range(_mark_count(message)):
                self._at(message, _end_of(message, index)).copy_(self._of(message))

    def intact(self, message: Message, end: int) -> bool:
        """Whether nothing has come for the bytes before `end` of this message."""
        import torch

        return torch.equal(self._at(message, end), self._of(message))

    def short(self) -> Message | None:
        """The first message whose end never came; only to be asked when all are complete."""
        for message in self._messages:
            if message.nbytes >= SHORTEST_MARKED_BYTES and self.intact(message, message.nbytes):
                return message
        return None

    def _at(self, message: Message, end: int) -> torch.Tensor:
        stop = message.offset + end
        return self._block[stop - min(MARK_BYTES, message.nbytes) : stop]

    def _of(self, message: Message) -> torch.Tensor:
        return self._pattern[: min(MARK_BYTES, message.nbytes)]


def _end_of(message: Message, index: int) -> int:
    """Where the mark `index` of a message ends: every 4 MiB, and at its end."""
    return min((index + 1) * MARK_EVERY_BYTES, message.nbytes)


def _mark_count(message: Message) -> int:
    return max(1, -(-message.nbytes // MARK_EVERY_BYTES))


class Watch:
    """How far the bytes of a plan have come, and when they last moved."""

    def __init__(self, plan: TensorPlan, marks: Marks | None) -> None:
        self.messages_done = 0
        self.bytes_come = 0
        self.moved_at = time.monotonic()
        self._messages = plan.messages
        self._marks = marks
        self._bytes_done = 0
        self._marks_passed = 0

    def look(self, messages_done: int) -> bool:
        """Whether anything moved since the last look."""
        before = self.messages_done, self.bytes_come
        if messages_done > self.messages_done:
            newly = self._messages[self.messages_done : messages_done]
            self._bytes_done += sum(message.nbytes for message in newly)
            self.messages_done, self._marks_passed = messages_done, 0
        self.bytes_come = self._bytes_done + self._bytes_of_current()
        moved = before != (self.messages_done, self.bytes_come)
        if moved:
            self.moved_at = time.monotonic()
        return moved

    def settled_of_current(self) -> int:
        """How many bytes of the message that is coming are final: all before the last mark gone."""
        if not self._marks_passed:
            return 0
        return max(0, self.bytes_come - self._bytes_done - MARK_BYTES)

    def unseen_bytes(self) -> int:
        """How many bytes may come now without being noticed before the last of them has."""
        if self._marks is not None or self.messages_done == len(self._messages):
            return 0
        return self._messages[self.messages_done].nbytes

    def where(self) -> str:
        total = len(self._messages)
        if self.messages_done == total:
            return f"after all {total} messages"
        what = self._messages[self.messages_done].what
        return f"at {what}, message {self.messages_done + 1} of {total}"

    def _bytes_of_current(self) -> int:
        if self._marks is None or self.messages_done == len(self._messages):
            return 0
        message = self._messages[self.messages_done]
        count = _mark_count(message)
        while self._marks_passed < count and not self._marks.intact(
            message, _end_of(message, self._marks_passed)
        ):
            self._marks_passed += 1
        return _end_of(message, self._marks_passed - 1) if self._marks_passed else 0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What ends a receive from outside, and where its thread goes when it is given up.

    `stopped` returns the reason why somebody wants it ended, `owner_gone` whether the trainer has.
    """

    group_name: str
    timeout_secs: float
    stall_secs: float
    first_byte_secs: float
    stopped: Callable[[], str | None]
    owner_gone: Callable[[], bool]
    threads: AbandonedThreads


@dataclass(frozen=True, slots=True)
class ReceiveResult:
    """What one receive brought: all of its plan, in `block`; `digests` only where asked for."""

    plan: TensorPlan
    block: torch.Tensor
    secs: float
    digests: dict[str, str] = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        return views(self.plan, self.block)


class Reception:
    """The one receive of a plan into a block, which is flat uint8 memory of at least its size."""

    def __init__(
        self,
        transport: Backend,
        plan: TensorPlan,
        block: torch.Tensor,
        mark: bytes,
        *,
        digests: bool = False,
    ) -> None:
        self._plan = plan
        self._digests = digests
        self._transport: Backend | None = transport
        self._block: torch.Tensor | None = block
        self._marks = Marks(block, plan.messages, mark)
        # Reading the memory of a GPU would wait for the very receive that it is to watch, and what
        # comes by way of one is copied from there when all of a message is there.
        visible = block.device.type == "cpu" and transport.backend != NCCL
        self.watch = Watch(plan, self._marks if visible else None)

    def run(
        self,
        around: Surroundings,
        moved: Moved | None = None,
        posted: Callable[[], None] = lambda: None,
    ) -> ReceiveResult:
        """Blocks until all has come. Raises GroupError; the group is then unusable.

        May be called once. `posted` is called as soon as the backend waits for the first message.
        """
        transport, block, self._transport, self._block = self._transport, self._block, None, None
        assert transport is not None
        assert block is not None
        began = time.monotonic()
        hashing = None
        if self._digests:
            hashing = Hashing(self._plan, _reading(block), around.group_name)
        parts = [block[each.offset : each.offset + each.nbytes] for each in self._plan.messages]
        errand = _start(around, transport, parts, posted)
        # From here on only its thread may hold the group: whoever gives up must not free it.
        del transport, parts
        try:
            self._wait(errand, around, moved, hashing)
            self._require_whole()
        except GroupError as error:
            if hashing is not None:
                hashing.give_up()
            del block
            raise GroupError(f"group {around.group_name!r}: {error}", group_dropped=True) from None
        came = time.monotonic() - began
        return ReceiveResult(
            self._plan, block, came, hashing.digests() if hashing is not None else {}
        )

    def _wait(
        self,
        errand: BlockingCall[None],
        around: Surroundings,
        moved: Moved | None,
        hashing: Hashing | None,
    ) -> None:
        self.watch.moved_at = time.monotonic()
        ends = _Ends(around, self.watch)

        def look() -> None:
            if not self.watch.look(errand.done):
                return
            if hashing is not None:
                hashing.come(self.watch.messages_done, self.watch.settled_of_current())
            if moved is not None:
                moved(self.watch.messages_done, self.watch.bytes_come)

        def why_stop() -> str | None:
            look()
            return ends.reason(time.monotonic())

        try:
            around.threads.wait_for(errand, why_stop)
        except GroupError as error:
            # Where somebody wanted it ended, the peer may have gone before we looked.
            why = around.stopped() or error
            raise GroupError(f"the receive failed {self.watch.where()}: {why}") from None
        look()

    def _require_whole(self) -> None:
        if (short := self._marks.short()) is not None:
            raise GroupError(
                f"{short.what} was announced with {short.nbytes} bytes, but the trainer sent fewer"
            )


class _Ends:
    """Whether a receive that has not ended by itself should be."""

    def __init__(self, around: Surroundings, watch: Watch) -> None:
        self._around = around
        self._watch = watch
        self._until = time.monotonic() + around.timeout_secs
        self._gone_since: float | None = None

    def reason(self, now: float) -> str | None:
        around, moved_at = self._around, self._watch.moved_at
        if self._gone_since is None and around.owner_gone():
            self._gone_since = now
        if (reason := around.stopped()) is not None:
            return reason
        if self._gone_since is not None and now - max(self._gone_since, moved_at) > GRACE_SECS:
            return OWNER_GONE
        if now - moved_at > self._patience():
            if self._gone_since is not None:
                return OWNER_GONE
            return f"nothing has come for {self._patience():g} s"
        return f"not complete within {around.timeout_secs:g} s" if now > self._until else None

    def _patience(self) -> float:
        around, watch = self._around, self._watch
        begun = watch.messages_done or watch.bytes_come
        secs = around.stall_secs if begun else around.first_byte_secs
        return secs + watch.unseen_bytes() / SLOWEST_BYTES_PER_SEC


def _start(
    around: Surroundings,
    transport: Backend,
    parts: list[torch.Tensor],
    posted: Callable[[], None],
) -> BlockingCall[None]:
    timeout_secs = around.timeout_secs
    # NCCL's clock runs from the posting of all; and there a receive that is given up is aborted.
    if transport.backend != NCCL:
        timeout_secs = min(timeout_secs, _backend_secs(around, parts)) + GRACE_SECS

    def receive(errand: BlockingCall[None]) -> None:
        def landed(count: int) -> None:
            errand.done = count

        try:
            transport.receive(parts, landed, posted, timeout_secs)
        except RuntimeError as error:
            raise GroupError(told(error)) from None

    return BlockingCall(f"weights-receive-{around.group_name}", receive)


def _backend_secs(around: Surroundings, parts: list[torch.Tensor]) -> float:
    """When the backend itself gives one broadcast up: after the watch would have, with room.

    It matters to a thread that was given up, which stays that long. The clock of a broadcast runs
    while the one before it still comes.
    """
    largest_bytes = max((part.numel() for part in parts), default=0)
    patience = around.first_byte_secs + around.stall_secs
    return patience + 2 * largest_bytes / CRAWLING_BYTES_PER_SEC


def _reading(block: torch.Tensor) -> Callable[[int, int], Buffer]:
    """Reads bytes of the block, of a GPU's by way of a copy."""

    def read(offset: int, nbytes: int) -> Buffer:
        array: Any = block[offset : offset + nbytes].cpu().numpy()
        return memoryview(array)

    return read


def views(plan: TensorPlan, block: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plan's tensors by name, in their places; what no view may start at is a copy."""
    import torch

    found: dict[str, torch.Tensor] = {}
    for tensor, offset in zip(plan.tensors, plan.offsets, strict=True):
        part = block[offset : offset + tensor.nbytes]
        if (block.storage_offset() + offset) % ITEM_BYTES[tensor.dtype]:
            part = part.clone()
        found[tensor.name] = part.view(getattr(torch, tensor.dtype)).reshape(tensor.shape)
    return found

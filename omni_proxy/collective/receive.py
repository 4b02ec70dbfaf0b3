"""One receive: announced tensors come in, whole and on time, or a GroupError says what was wrong.

Knows no HTTP and no model. A peer that sends less than it announced would go unnoticed: random
bytes at the end of each message tell (weight-sync.md 6.5b), and tell how far the bytes have come.
A peer that sends more ends the process inside gloo: who must survive that runs this in a child.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from omni_proxy.collective.buffers import Buffers
from omni_proxy.collective.errand import Abandoned, Errand
from omni_proxy.collective.specs import GroupError, Message, Plan
from omni_proxy.collective.transport import Transport, told

if TYPE_CHECKING:
    import torch

# Called in the receiving thread with (complete messages, bytes that have come), as they grow.
Progress = Callable[[int, int], None]

MARK_BYTES: Final = 8
# In a shorter message the marks could by chance be what the trainer sends: 1 in 4 billion here.
SHORTEST_MARKED_BYTES: Final = 4
MARK_EVERY_BYTES: Final = 4 << 20
# The last bytes of a trainer that sends and exits come after the end of its store.
GRACE_SECS: Final = 1.0


class Marks:
    """Random bytes in a block that is still to be received into: overwritten = it came so far."""

    def __init__(self, block: torch.Tensor, messages: tuple[Message, ...]) -> None:
        import torch

        pattern = torch.frombuffer(bytearray(os.urandom(MARK_BYTES)), dtype=torch.uint8)
        self._pattern = pattern.to(block.device)
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

    def __init__(self, plan: Plan, marks: Marks | None) -> None:
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
    stopped: Callable[[], str | None]
    owner_gone: Callable[[], bool]
    threads: Abandoned


class Reception:
    """Memory for a plan, and the one receive into it. The constructor touches no group.

    Raises GroupError where there is no memory for the plan.
    """

    def __init__(self, transport: Transport, plan: Plan, kept: Buffers) -> None:
        block = transport.block(plan.block_bytes, kept)
        self._plan = plan
        self._transport: Transport | None = transport
        self._block: torch.Tensor | None = block
        self._marks = Marks(block, plan.messages)
        # Reading the memory of a GPU would wait for the very receive that it is to watch.
        self.watch = Watch(plan, self._marks if block.device.type == "cpu" else None)

    def run(
        self, around: Surroundings, progress: Progress | None = None
    ) -> dict[str, torch.Tensor]:
        """The tensors by name, views of one block. Raises GroupError; the group is then unusable.

        May be called once.
        """
        transport, block, self._transport, self._block = self._transport, self._block, None, None
        assert transport is not None
        assert block is not None
        parts = [block[each.offset : each.offset + each.nbytes] for each in self._plan.messages]
        errand = _start(around, transport, parts)
        # From here on only its thread may hold the group: whoever gives up must not free it.
        del transport, parts
        try:
            self._wait(errand, around, progress)
        except GroupError as error:
            del block
            raise GroupError(
                f"group {around.group_name!r}: the receive failed {self.watch.where()}: {error}",
                group_dropped=True,
            ) from None
        if (short := self._marks.short()) is not None:
            raise GroupError(
                f"group {around.group_name!r}: {short.what} was announced with {short.nbytes} "
                "bytes, but the trainer sent fewer",
                group_dropped=True,
            )
        return _views(self._plan, block)

    def _wait(self, errand: Errand[None], around: Surroundings, progress: Progress | None) -> None:
        until = time.monotonic() + around.timeout_secs
        gone_since: float | None = None

        def why_stop() -> str | None:
            nonlocal gone_since
            if self.watch.look(errand.done) and progress is not None:
                progress(self.watch.messages_done, self.watch.bytes_come)
            now = time.monotonic()
            if gone_since is None and around.owner_gone():
                gone_since = now
            if (reason := around.stopped()) is not None:
                return reason
            if gone_since is not None and now - max(gone_since, self.watch.moved_at) > GRACE_SECS:
                return "the trainer has gone: the connection to its store was closed"
            if now - self.watch.moved_at > around.stall_secs:
                return f"nothing has come for {around.stall_secs:g} s"
            return f"not complete within {around.timeout_secs:g} s" if now > until else None

        self.watch.moved_at = time.monotonic()
        around.threads.wait_for(errand, why_stop)
        if self.watch.look(errand.done) and progress is not None:
            progress(self.watch.messages_done, self.watch.bytes_come)


def _start(around: Surroundings, transport: Transport, parts: list[torch.Tensor]) -> Errand[None]:
    timeout_secs = around.timeout_secs

    def receive(errand: Errand[None]) -> None:
        def landed(count: int) -> None:
            errand.done = count

        try:
            transport.receive(parts, landed, timeout_secs)
        except RuntimeError as error:
            raise GroupError(told(error)) from None

    return Errand(f"weights-receive-{around.group_name}", receive)


def _views(plan: Plan, block: torch.Tensor) -> dict[str, torch.Tensor]:
    import torch

    return {
        tensor.name: block[offset : offset + tensor.nbytes]
        .view(getattr(torch, tensor.dtype))
        .reshape(tensor.shape)
        for tensor, offset in zip(plan.tensors, plan.offsets, strict=True)
    }

"""SHA-256 of each tensor while the others still come, never in the thread that receives.

Invariant: a digest depends on a tensor's name, dtype, shape and bytes alone, byte for byte as
api-server.md 3 has it (a test holds it to the checksum that replicas answer with).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from omni_proxy.process_group.tensor_plan import Message, TensorPlan, TensorSpec

if TYPE_CHECKING:
    from typing_extensions import Buffer

# One core hashes more slowly than the loopback carries; a third thread would take the sender's.
THREADS: Final = 2
PIECE_BYTES: Final = 8 << 20


class Hashing:
    """Follows a plan's messages as they come. `read(offset, nbytes)` gives bytes of the block."""

    def __init__(self, plan: TensorPlan, read: Callable[[int, int], Buffer], name: str) -> None:
        self._plan = plan
        self._read = read
        self._places = _places(plan)
        self._more = threading.Condition()
        self._messages_done = 0
        self._settled_bytes = 0
        self._next = 0
        self._given_up = False
        self._digests: dict[str, str] = {}
        self._threads = [
            threading.Thread(target=self._run, name=f"weights-digest-{name}", daemon=True)
            for _ in range(min(THREADS, len(plan.tensors)))
        ]
        for thread in self._threads:
            thread.start()

    def come(self, messages_done: int, settled_bytes: int) -> None:
        """So many messages are complete, and so many bytes of the next one are final."""
        with self._more:
            if (messages_done, settled_bytes) > (self._messages_done, self._settled_bytes):
                self._messages_done, self._settled_bytes = messages_done, settled_bytes
                self._more.notify_all()

    def give_up(self) -> None:
        with self._more:
            self._given_up = True
            self._more.notify_all()

    def digests(self) -> dict[str, str]:
        """By name, in the plan's order; blocks until the last is there. All must have come."""
        for thread in self._threads:
            thread.join()
        return {tensor.name: self._digests[tensor.name] for tensor in self._plan.tensors}

    def _run(self) -> None:
        while (index := self._claimed()) is not None:
            tensor, offset = self._plan.tensors[index], self._plan.offsets[index]
            digest = begun(tensor)
            done = 0
            while done < tensor.nbytes:
                upto = self._wait_past(index, done)
                if upto is None:
                    return
                while done < upto:
                    size = min(PIECE_BYTES, upto - done)
                    digest.update(self._read(offset + done, size))
                    done += size
            self._digests[tensor.name] = digest.hexdigest()

    def _claimed(self) -> int | None:
        with self._more:
            index, self._next = self._next, self._next + 1
            return index if index < len(self._plan.tensors) and not self._given_up else None

    def _wait_past(self, index: int, done: int) -> int | None:
        """How much of the tensor has come, once that is more than `done`; None = given up."""
        with self._more:
            while (upto := self._come_of(index)) <= done and not self._given_up:
                self._more.wait()
            return None if self._given_up else upto

    def _come_of(self, index: int) -> int:
        message, start = self._places[index]
        nbytes = self._plan.tensors[index].nbytes
        if self._messages_done != message:
            return nbytes if self._messages_done > message else 0
        return max(0, min(nbytes, self._settled_bytes - start))


def begun(tensor: TensorSpec) -> hashlib._Hash:
    """A digest that wants the tensor's bytes in C order."""
    digest = hashlib.sha256(tensor.name.encode())
    digest.update(f"torch.{tensor.dtype}".encode())
    digest.update(str(tensor.shape).encode())
    return digest


def _places(plan: TensorPlan) -> list[tuple[int, int]]:
    """For each tensor the message that brings it, and where in that message it starts."""
    places: list[tuple[int, int]] = []
    current = 0
    for tensor, offset in zip(plan.tensors, plan.offsets, strict=True):
        if not tensor.nbytes:
            places.append((0, 0))
            continue
        while not _holds(plan.messages[current], offset, tensor.nbytes):
            current += 1
        places.append((current, offset - plan.messages[current].offset))
    return places


def _holds(message: Message, offset: int, nbytes: int) -> bool:
    return message.offset <= offset and offset + nbytes <= message.offset + message.nbytes

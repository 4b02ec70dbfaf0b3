"""Digests of weights, the same at replicas and the proxy, computed also while bytes still arrive.

Invariant: a digest depends only on a tensor's name, type, shape and bytes, as note:api-server 3
specifies (a test compares it with the checksum that replicas return). The type is hashed by its
name, so names of another library give other digests. `TensorHasher` computes the SHA-256 of each
tensor in separate threads while later tensors arrive. Torch is not imported.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from omni_proxy.process_group.tensor_plan import BroadcastMessage, TensorPlan, TensorSpec

if TYPE_CHECKING:
    from typing_extensions import Buffer

# One core hashes more slowly than loopback transfers; a third thread would slow down the sender.
THREADS: Final = 2
READ_BYTES: Final = 8 << 20


def tensor_digest(name: str, dtype: str, shape: Sequence[int], data: Buffer) -> str:
    """Return the SHA-256 of one tensor, 64 lower-case hexadecimal digits.

    `dtype` is the library's name of the type, such as "torch.bfloat16"; `data` holds the elements
    in C order, little-endian, without gaps. Large data is hashed with the GIL released.
    """
    digest = hashlib.sha256(name.encode())
    digest.update(dtype.encode())
    digest.update(str(tuple(map(int, shape))).encode())
    digest.update(data)
    return digest.hexdigest()


def start_tensor_digest(tensor: TensorSpec) -> hashlib._Hash:
    """A digest of the tensor's name, dtype and shape; update it with its bytes in C order."""
    digest = hashlib.sha256(tensor.name.encode())
    digest.update(f"torch.{tensor.dtype}".encode())
    digest.update(str(tensor.shape).encode())
    return digest


def roll_up(digests: Mapping[str, str]) -> str:
    """Return one SHA-256 over the digests of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(digests):
        digest.update(name.encode())
        digest.update(digests[name].encode("ascii"))
    return digest.hexdigest()


class TensorHasher:
    """Hashes a plan's tensors as they arrive. `read(offset, nbytes)` returns bytes of the block."""

    def __init__(self, plan: TensorPlan, read: Callable[[int, int], Buffer], name: str) -> None:
        self._plan = plan
        self._read = read
        self._locations = _locations(plan)
        self._changed = threading.Condition()
        self._messages_done = 0
        self._final_bytes = 0
        self._next = 0
        self._cancelled = False
        self._digests: dict[str, str] = {}
        self._threads = [
            threading.Thread(target=self._run, name=f"weights-digest-{name}", daemon=True)
            for _ in range(min(THREADS, len(plan.tensors)))
        ]
        for thread in self._threads:
            thread.start()

    def update(self, messages_done: int, final_bytes: int) -> None:
        """Reports that `messages_done` messages and `final_bytes` of the next one are complete."""
        with self._changed:
            if (messages_done, final_bytes) > (self._messages_done, self._final_bytes):
                self._messages_done, self._final_bytes = messages_done, final_bytes
                self._changed.notify_all()

    def cancel(self) -> None:
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def digests(self) -> dict[str, str]:
        """Digests by name, in the plan's order; blocks until the last one is computed.

        Call it only after all messages are complete.
        """
        for thread in self._threads:
            thread.join()
        return {tensor.name: self._digests[tensor.name] for tensor in self._plan.tensors}

    def _run(self) -> None:
        while (index := self._next_index()) is not None:
            tensor, offset = self._plan.tensors[index], self._plan.offsets[index]
            digest = start_tensor_digest(tensor)
            done = 0
            while done < tensor.nbytes:
                available = self._wait_past(index, done)
                if available is None:
                    return
                while done < available:
                    size = min(READ_BYTES, available - done)
                    digest.update(self._read(offset + done, size))
                    done += size
            self._digests[tensor.name] = digest.hexdigest()

    def _next_index(self) -> int | None:
        with self._changed:
            index, self._next = self._next, self._next + 1
            return index if index < len(self._plan.tensors) and not self._cancelled else None

    def _wait_past(self, index: int, done: int) -> int | None:
        """Waits until more than `done` bytes of the tensor are final; returns their number.

        None if cancelled.
        """
        with self._changed:
            while (available := self._available_bytes(index)) <= done and not self._cancelled:
                self._changed.wait()
            return None if self._cancelled else available

    def _available_bytes(self, index: int) -> int:
        message, start = self._locations[index]
        nbytes = self._plan.tensors[index].nbytes
        if self._messages_done != message:
            return nbytes if self._messages_done > message else 0
        return max(0, min(nbytes, self._final_bytes - start))


def _locations(plan: TensorPlan) -> list[tuple[int, int]]:
    """For each tensor the index of the message that carries it, and its offset in that message."""
    locations: list[tuple[int, int]] = []
    current = 0
    for tensor, offset in zip(plan.tensors, plan.offsets, strict=True):
        if not tensor.nbytes:
            locations.append((0, 0))
            continue
        while not _contains(plan.messages[current], offset, tensor.nbytes):
            current += 1
        locations.append((current, offset - plan.messages[current].offset))
    return locations


def _contains(message: BroadcastMessage, offset: int, nbytes: int) -> bool:
    return message.offset <= offset and offset + nbytes <= message.offset + message.nbytes

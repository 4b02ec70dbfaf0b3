"""Changes of a worker's cached blocks: made by `publisher_state`, applied by `block_index`, and
packed to be sent between processes.

Invariant: changes of one holder are applied in their order. Must not be saved: keys are valid only
within one build.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias


class ChangeOp(IntEnum):
    """The kind of a `HeldChange`."""

    RESET = 0
    STORE = 1
    REMOVE = 2
    EXACT = 3
    INEXACT = 4
    BLOCK_SIZE = 5
    FORGET = 6  # the worker is no longer followed
    HOLES = 7  # some block is held without the block before it
    NO_HOLES = 8


class HeldChange(NamedTuple):
    """`values`: keys of blocks for STORE and REMOVE, the size for BLOCK_SIZE, else nothing."""

    op: ChangeOp
    values: list[int]


PackedChanges: TypeAlias = list[tuple[int, bytes]]  # between processes of one machine
MAX_PACKED: Final = 1024  # values of one change, so that applying one never takes long


def pack_changes(changes: Iterable[HeldChange]) -> Iterator[tuple[int, bytes]]:
    """Long changes are split."""
    for op, values in changes:
        for start in range(0, max(1, len(values)), MAX_PACKED):
            yield int(op), array("Q", values[start : start + MAX_PACKED]).tobytes()


def unpack_changes(packed: Iterable[tuple[int, bytes]]) -> Iterator[HeldChange]:
    for op, values in packed:
        numbers = array("Q")
        numbers.frombytes(values)
        yield HeldChange(ChangeOp(op), numbers.tolist())

"""Descriptors that are sent with bytes over Unix sockets (SCM_RIGHTS). Source: unix(7).

Contract: a receiver owns the descriptors that it gets, and closes them; a sender keeps its own.
Must not know the messages that the descriptors belong to.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Final

MAX_DESCRIPTORS: Final = 250  # of one message; the kernel takes 253
ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)

Ancillary = list[tuple[int, int, "array.array[int]"]]


def ancillary_for(descriptors: Sequence[int]) -> Ancillary:
    """The ancillary data of a `sendmsg` that sends the descriptors; empty without any."""
    if not descriptors:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]


def descriptors_in(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors in the ancillary data of a `recvmsg`."""
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return descriptors.tolist()


def receive(connection: socket.socket, max_bytes: int) -> tuple[bytes, list[int], bool]:
    """Receive bytes and descriptors, which no child process inherits. Raises OSError.

    The last value: whether the kernel dropped descriptors, because too many files were open.
    """
    data, ancillary, flags, _ = connection.recvmsg(
        max_bytes, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
    )
    return data, descriptors_in(ancillary), bool(flags & socket.MSG_CTRUNC)


def duplicate_all(descriptors: Iterable[int]) -> list[int]:
    """Duplicates of all descriptors. Raises OSError, leaving none open."""
    duplicates: list[int] = []
    try:
        duplicates.extend(map(os.dup, descriptors))
    except OSError:
        close_all(duplicates)
        raise
    return duplicates


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

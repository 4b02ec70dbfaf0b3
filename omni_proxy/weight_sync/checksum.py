"""Digests of weights, the same for whoever holds them: a replica, or a proxy that compares. Pure.

Invariant: a digest depends on a tensor's name, type, shape and bytes alone, byte for byte as
api-server.md 3 has it. Equal digests in other libraries' names for types are never equal here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


def tensor_digest(name: str, dtype: str, shape: Sequence[int], data: Buffer) -> str:
    """Return the SHA-256 of one tensor, 64 lower-case hexadecimal digits.

    `dtype` is the library's own word, such as "torch.bfloat16"; `data` holds the elements in C
    order and little-endian, with no gaps. Large data is hashed without holding Python up.
    """
    digest = hashlib.sha256(name.encode())
    digest.update(dtype.encode())
    digest.update(str(tuple(map(int, shape))).encode())
    digest.update(data)
    return digest.hexdigest()


def roll_up(digests: Mapping[str, str]) -> str:
    """Return one SHA-256 over all tensors' digests, in the order of their names."""
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(name.encode())
        whole.update(digests[name].encode("ascii"))
    return whole.hexdigest()

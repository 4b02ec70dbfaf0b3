"""Digests of weights, computed identically by replicas and by the proxy. Pure.

Invariant: a digest depends only on a tensor's name, type, shape and bytes, as note:api-server 3
specifies. The type is hashed by its name, so names of another library give other digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


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


def roll_up(digests: Mapping[str, str]) -> str:
    """Return one SHA-256 over the digests of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(digests):
        digest.update(name.encode())
        digest.update(digests[name].encode("ascii"))
    return digest.hexdigest()

"""Capabilities as bit masks: whether a worker has all that a request requires is one `&`.

Invariant: a mask has only bits of the names in `config.schema.CAPABILITIES`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from omni_proxy.config.schema import CAPABILITIES

CAPABILITY_BITS: dict[str, int] = {
    name: 1 << position for position, name in enumerate(CAPABILITIES)
}
ALL_CAPABILITIES = (1 << len(CAPABILITIES)) - 1


def capability_mask(names: Iterable[str]) -> int:
    """Raises KeyError for a name that is no capability."""
    mask = 0
    for name in names:
        mask |= CAPABILITY_BITS[name]
    return mask


def capability_names(mask: int) -> list[str]:
    """The names of a mask, sorted."""
    return list(_sorted_names(mask))


@lru_cache
def _sorted_names(mask: int) -> tuple[str, ...]:
    return tuple(sorted(name for name, bit in CAPABILITY_BITS.items() if mask & bit))

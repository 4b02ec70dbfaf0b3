"""Traffic classes, and where a worker counts the tries of each.

Invariant: a class has one place for as long as the program runs, the same in every worker. The
counts of a worker lie in one flat array: of a dict with an object for each class a request touched
seven cache lines, which with hundreds of workers are in no cache.
"""

from __future__ import annotations

from typing import Final

CLASSES: Final = 16  # at most
ROUTED, SUCCEEDED, FAILED = range(3)  # tries begun, and what those came to that are over
_KINDS: Final = 3

_places: dict[str, int] = {}


def place_of(traffic: str) -> int:
    """Where the counts of a class begin; ROUTED and its kin are added to it."""
    place = _places.setdefault(traffic, _KINDS * len(_places))
    assert place < _KINDS * CLASSES, f"no place is left for the traffic class {traffic}"
    return place


def none_yet() -> list[int]:
    return [0] * (_KINDS * CLASSES)


def told(counts: list[int], kind: int) -> dict[str, int]:
    """By class, where there is any."""
    return {
        traffic: counts[place + kind] for traffic, place in _places.items() if counts[place + kind]
    }

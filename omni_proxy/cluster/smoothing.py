"""What a policy that looks for the least load takes for the load elsewhere. Pure.

Counts of other proxies are a moment old, and each proxy follows them: all fill the worker that
looked emptiest, and overshoot together. Ordinary fluctuation therefore passes by a low-pass filter,
so that proxies correct what lasts, each by its own exact counts at once. A difference beyond
fluctuation, as of a burst or of a proxy that died, is followed fast.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

FAST_SHARE: Final = 0.5
FLUCTUATIONS: Final = 2.0  # a difference of so many times the square root is no fluctuation
SAME: Final = 0.05
FIRST: Final = 0.1  # where nothing was: enough to prefer a worker that is idle


def first_seen(before: float, total: int) -> float:
    """The value at the moment in which a total comes, before the next look."""
    return before or min(FIRST, total)


def smoothed(before: float, total: int, share: float) -> float:
    """The value after one more look. `share`: of the difference that an ordinary look makes up."""
    difference = total - before
    if abs(difference) > FLUCTUATIONS * sqrt(max(total, before) + 1):
        share = max(share, FAST_SHARE)
    value = before + min(1.0, share) * difference
    return float(total) if abs(total - value) < SAME else value

"""Exponential back-off: the delays before retries of a failed step.

Pure: times are arguments. Must use only the standard library, because every process of the program
may import it.
"""

from __future__ import annotations

import math
from typing import Final

_MAX_DOUBLINGS: Final = 64  # keeps the power finite


def exponential_delay(failures: int, first_secs: float, max_secs: float) -> float:
    """The delay after `failures` earlier delays: `first_secs`, doubled each time, at most
    `max_secs`."""
    return min(max_secs, first_secs * 2.0 ** min(failures, _MAX_DOUBLINGS))


class Backoff:
    """The delays of one restarted or retried service or step.

    A run of at least `reset_after_secs` counts as a success: the next delay is `first_secs` again.
    """

    def __init__(
        self, first_secs: float, max_secs: float, reset_after_secs: float = math.inf
    ) -> None:
        self._first_secs = first_secs
        self._max_secs = max_secs
        self._reset_after_secs = reset_after_secs
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def next_delay(self, ran_secs: float = 0.0) -> float:
        """The delay in seconds after a run of `ran_secs` that failed."""
        if ran_secs >= self._reset_after_secs:
            self.reset()
        delay_secs = exponential_delay(self._failures, self._first_secs, self._max_secs)
        self._failures += 1
        return delay_secs

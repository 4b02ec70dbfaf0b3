"""Log lines about requests with a missing or wrong API key, and their number in the last minute.

Pure. Invariant: at most one line per `PAUSE_SECS`, for any number of refused requests and
addresses; each refused request is counted in exactly one line.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final

PAUSE_SECS: Final = 60.0
RECENT_SECS: Final = 60.0


class WrongKeyReport:
    def __init__(self) -> None:
        self._reported = 0
        self._due_at = -inf

    def due(self, refused: int, now: float) -> int:
        """Number of refused requests since the last line; 0 if no line is due. `refused`: total so
        far; `now`: of any clock, in seconds."""
        more = refused - self._reported
        if more <= 0 or now < self._due_at:
            return 0
        self._reported, self._due_at = refused, now + PAUSE_SECS
        return more


class RecentRefusals:
    """Number of refused requests in the last minute; as precise as the interval of `note` calls."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()
        self._before = 0  # refused before the last minute

    def note(self, refused: int, now: float) -> None:
        """`refused`: total so far; `now`: of any clock, in seconds."""
        self._marks.append((now, refused))
        while self._marks[0][0] <= now - RECENT_SECS:
            self._before = self._marks.popleft()[1]

    def count(self, refused: int) -> int:
        """Refused requests in the last minute. `refused`: total so far."""
        return refused - self._before

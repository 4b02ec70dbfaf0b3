"""When requests without a right API key are worth a log line, and how many came lately. Pure.

Invariant: at most one line in `PAUSE_SECS`, however many are refused and from however many
addresses; each refused request is in exactly one of the lines.
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
        """How many were refused since the last line; 0 where no line is due. `refused`: of all
        time; `now`: of any clock, in seconds."""
        more = refused - self._reported
        if more <= 0 or now < self._due_at:
            return 0
        self._reported, self._due_at = refused, now + PAUSE_SECS
        return more


class RecentRefusals:
    """How many were refused in the last minute; exact to the time between two `note`s."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()
        self._before = 0  # refused before the last minute

    def note(self, refused: int, now: float) -> None:
        """`refused`: of all time; `now`: of any clock, in seconds."""
        self._marks.append((now, refused))
        while self._marks[0][0] <= now - RECENT_SECS:
            self._before = self._marks.popleft()[1]

    def count(self, refused: int) -> int:
        """Of `refused` of all time, those in the last minute."""
        return refused - self._before

"""When requests without a right API key are worth a log line. Pure.

Invariant: at most one line in `PAUSE_SECS`, however many are refused and from however many
addresses; each refused request is in exactly one of the lines.
"""

from __future__ import annotations

from math import inf
from typing import Final

PAUSE_SECS: Final = 60.0


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

"""A word from outside that ends a blocking call, whether it comes before the call or in its middle.

Invariant: once said it stays said; whoever listens hears it once, in the thread that says it or, if
it came first, in its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class CancelToken:
    """One word for one call. `why` may be read at any time, from any thread."""

    def __init__(self) -> None:
        self.why: str | None = None
        self._lock = threading.Lock()
        self._ends: Callable[[str], None] | None = None

    def say(self, why: str) -> None:
        with self._lock:
            if self.why is not None:
                return
            self.why = why
            ends = self._ends
        if ends is not None:
            ends(why)

    def hear(self, ends: Callable[[str], None] | None) -> None:
        """Has `ends` called with the reason; None: nobody listens any more."""
        with self._lock:
            self._ends, why = ends, self.why
        if why is not None and ends is not None:
            ends(why)

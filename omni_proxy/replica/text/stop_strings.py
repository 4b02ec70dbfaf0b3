"""Stop strings: the text of a response is cut at the first one.

Invariant: the first complete stop string ends the text, regardless of chunk boundaries; of several
that end at the same position, the first in request order counts. Neither the stop string nor text
after it is released. Text is held back only while it may begin a stop string.
"""

from __future__ import annotations

from collections.abc import Collection


class StopStrings:
    """Cuts one text at its first stop string (note:api-server 1.3).

    After a match, `hit` is the stop string and nothing more is released.
    """

    __slots__ = ("_held_back", "_stops", "hit")

    def __init__(self, stops: Collection[str] = ()) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty: it would end every text immediately")
        self._stops = tuple(stops)
        self._held_back = ""
        self.hit: str | None = None

    def feed(self, chunk: str) -> str:
        """Return the text that can be released now that `chunk` has arrived."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return chunk
        text = self._held_back + chunk
        matches = (
            (start + len(stop), order, start)
            for order, stop in enumerate(self._stops)
            if (start := text.find(stop)) >= 0
        )
        first = min(matches, default=None)
        if first is not None:
            _, order, start = first
            self.hit, self._held_back = self._stops[order], ""
            return text[:start]
        released = len(text) - self._partial_match_length(text)
        self._held_back = text[released:]
        return text[:released]

    def flush(self) -> str:
        """The text has ended: return the text that could have begun a stop string."""
        rest, self._held_back = self._held_back, ""
        return rest

    def _partial_match_length(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0

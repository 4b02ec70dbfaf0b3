"""Stop strings, found in text that arrives in pieces. Pure.

Invariant: how a text is cut into pieces never changes what comes out of it. The stop string that is
complete first ends the text; of those that end at the same place, the first in request order does.
Neither it nor anything behind it is ever released, and nothing is held longer than needed.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts one text at its first stop string (api-server.md 1.3).

    After a match `hit` names it and nothing more comes out.
    """

    __slots__ = ("_held", "_stops", "hit")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty: it would end every text at once")
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def feed(self, piece: str) -> str:
        """Return what may be shown now that `piece` has arrived."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        matches = (
            (start + len(stop), order, start)
            for order, stop in enumerate(self._stops)
            if (start := text.find(stop)) >= 0
        )
        first = min(matches, default=None)
        if first is not None:
            _, order, start = first
            self.hit, self._held = self._stops[order], ""
            return text[:start]
        shown = len(text) - self._beginning_at_end_of(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text has ended: return what was held back as a possible beginning."""
        held, self._held = self._held, ""
        return held

    def _beginning_at_end_of(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0

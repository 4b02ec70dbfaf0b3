"""What grouped weight syncs came to: their steps, the time of these, aborts, and bytes.

Invariant: every label is a word of this program; nothing that a trainer says becomes one.
"""

from __future__ import annotations

from collections import Counter


class SyncMeters:
    """`ended`: phase and "ok" or "failed"; `secs`: by phase; `aborts`: by what ended a sync.

    `nbytes`: what members received, by what they say of it, else by what was announced.
    """

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, str]] = Counter()
        self.secs: dict[str, float] = {}
        self.aborts: Counter[str] = Counter()
        self.nbytes = 0

    def note(self, phase: str, secs: float, *, ok: bool) -> None:
        self.ended[phase, "ok" if ok else "failed"] += 1
        self.secs[phase] = self.secs.get(phase, 0.0) + secs

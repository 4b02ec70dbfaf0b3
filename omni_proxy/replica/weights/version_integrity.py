"""Are the live weights those of one version, as far as a replica can know? Pure.

An update that names all it changes (many buckets, a session, a file) is whole when it is applied.
A bucket alone is not known to be the last one unless it says so, by a version or a wish to flush
(two-phase.md 7, S7): until then the weights are `open`. They are `uncertain` once such a sync
cannot go on any more: a failure, a new group, generation that continues; and once a swap has broken
off half-way. Nothing is refused for it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class IntegrityState(StrEnum):
    WHOLE = "whole"
    OPEN = "open"
    UNCERTAIN = "uncertain"


class VersionIntegrity:
    """`buckets`: how many were applied one by one since the weights were whole."""

    def __init__(self) -> None:
        self.standing = IntegrityState.WHOLE
        self.buckets = 0

    def bucket(self, *, last: bool) -> None:
        """One bucket of a sync was applied; `last`: it says so."""
        if last:
            self.whole()
            return
        self.buckets += 1
        if self.standing is IntegrityState.WHOLE:
            self.standing = IntegrityState.OPEN

    def whole(self) -> None:
        self.standing, self.buckets = IntegrityState.WHOLE, 0

    def left(self) -> None:
        """Its trainer closed the group in good order."""
        if self.standing is IntegrityState.OPEN:
            self.whole()

    def broken(self) -> None:
        """What was open will not be finished."""
        if self.standing is IntegrityState.OPEN:
            self.standing = IntegrityState.UNCERTAIN

    def damaged(self) -> None:
        """A swap broke off half-way: what is live is of both versions."""
        self.standing = IntegrityState.UNCERTAIN

    def facts(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"weights": self.standing.value, "buckets_applied": self.buckets}

    def told(self, version: str) -> str:
        """What weights there are after something failed."""
        if self.standing is IntegrityState.WHOLE:
            return f"the weights of version {version!r} are whole"
        if not self.buckets:
            return (
                f"the weights are only in part those of version {version!r}: update all of them "
                "before you rely on them"
            )
        return (
            f"the weights are those of version {version!r} with {self.buckets} buckets of a sync "
            "that was not finished: sync all of them before you rely on them"
        )

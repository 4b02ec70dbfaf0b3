"""Whether the live weights belong to a single version, as far as a replica can know. Pure.

An update that names everything it changes (several buckets, a session, a file) is whole when it is
applied. A single bucket is the last one only if it says so, by a version or a request to flush
(two-phase.md 7, S7): until then the weights are `open`. They become `uncertain` if such a sync can
no longer finish (a failure, a new group, generation that continues), or if a swap failed halfway.
No request is refused because of that.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class IntegrityState(StrEnum):
    WHOLE = "whole"
    OPEN = "open"
    UNCERTAIN = "uncertain"


class VersionIntegrity:
    """`buckets`: how many single buckets were applied since the weights were whole."""

    def __init__(self) -> None:
        self.standing = IntegrityState.WHOLE
        self.buckets = 0

    def bucket(self, *, last: bool) -> None:
        """A bucket of a sync was applied; `last`: it is declared the last one."""
        if last:
            self.whole()
            return
        self.buckets += 1
        if self.standing is IntegrityState.WHOLE:
            self.standing = IntegrityState.OPEN

    def whole(self) -> None:
        self.standing, self.buckets = IntegrityState.WHOLE, 0

    def left(self) -> None:
        """The trainer closed its group in an orderly way."""
        if self.standing is IntegrityState.OPEN:
            self.whole()

    def broken(self) -> None:
        """An open sync will not be finished."""
        if self.standing is IntegrityState.OPEN:
            self.standing = IntegrityState.UNCERTAIN

    def damaged(self) -> None:
        """A swap failed halfway: the live tensors are a mix of two versions."""
        self.standing = IntegrityState.UNCERTAIN

    def facts(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"weights": self.standing.value, "buckets_applied": self.buckets}

    def told(self, version: str) -> str:
        """The state of the weights in words, for error texts."""
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

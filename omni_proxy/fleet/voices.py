"""The voice registry: which worker keeps the uploaded voices, and how they are called.

Invariant: while the names are unknown (`names` is None) every named voice counts as uploaded, so a
request never reaches a worker that lacks its voice. A list that was asked for before the last
change is never taken. Source: omni-router.md 13. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class VoiceRegistry:
    """`owner` is a worker's URL, "" while there is none; `names` are lower-case."""

    def __init__(self) -> None:
        self.owner = ""
        self.names: frozenset[str] | None = None
        self.refresh_error = ""  # why the newest reading of the list failed
        self.generation = 0  # rises with each change; a list read under an older one is stale
        self.current = False  # the names were read from the owner since the last change
        self._configured = ""
        self._present = False  # the owner was seen in the fleet
        self._watchers: list[Callable[[], None]] = []
        self._learned: list[Callable[[], None]] = []

    def watch(self, callback: Callable[[], None]) -> None:
        """`callback()` after each change that asks for another reading of the list."""
        self._watchers.append(callback)

    def watch_names(self, callback: Callable[[], None]) -> None:
        """`callback()` after the names were read and are not what they were."""
        self._learned.append(callback)

    def configure(self, owner: str) -> None:
        """`[routing] voice_owner`; "" leaves whatever owner there is."""
        if owner == self._configured:
            return
        self._configured = owner
        if owner and owner != self.owner:
            self._set_owner(owner)

    def restore(self, owner: str, names: Iterable[str] | None) -> None:
        """What was known when the program ended; the configured owner wins."""
        if not owner or self.owner not in ("", owner):
            return
        self.owner = owner
        self.names = None if names is None else frozenset(names)

    def voices_changed(self, owner: str) -> None:
        """This worker took an upload or a deletion."""
        if owner != self.owner:
            self._set_owner(owner)
        else:
            self._invalidate()

    def set_names(self, generation: int, names: Iterable[str]) -> bool:
        """The list as its owner told it. False where a change came in between."""
        if generation != self.generation:
            return False
        found = frozenset(name.lower() for name in names)
        self.refresh_error = ""
        self.current = True
        if found != self.names:
            self.names = found
            for callback in self._learned:
                callback()
        return True

    def fail(self, generation: int, error: str) -> None:
        """The list could not be read: what was known stays."""
        if generation == self.generation:
            self.refresh_error = error
            self.current = False

    def follow(self, owner: str, names: Iterable[str] | None) -> None:
        """As the main process has it."""
        self.owner = owner
        self.names = None if names is None else frozenset(names)

    def update_presence(self, urls: Iterable[str]) -> str:
        """The URL of an owner that has just left the fleet, "" where none did.

        A configured owner stays the owner. One that was restored and has not come yet is waited
        for: a launched replica is registered later than the state is read.
        """
        if not self.owner:
            return ""
        was_present, self._present = self._present, self.owner in urls
        if self._present or not was_present or self.owner == self._configured:
            return ""
        gone, self.owner = self.owner, ""
        self.names = None
        self._changed()
        return gone

    def requires_owner(self, voices: Iterable[str]) -> bool:
        """Whether a request that names these voices (lower-case) must go to the owner."""
        if not self.owner:
            return False
        names = self.names
        return any(names is None or voice in names for voice in voices)

    @property
    def state(self) -> str:
        """A word of `registry_state` in GET /health (omni-router.md 4)."""
        if not self.owner:
            return "unassigned"
        if self.current:
            return "ready"
        if self.refresh_error:
            return "degraded"
        return "pending" if self.names is None else "stale"

    def _set_owner(self, owner: str) -> None:
        self.owner = owner
        self._present = False
        self._invalidate()

    def _invalidate(self) -> None:
        self.names = None
        self._changed()

    def _changed(self) -> None:
        self.generation += 1
        self.current = False
        self.refresh_error = ""
        self._tell()

    def _tell(self) -> None:
        for callback in self._watchers:
            callback()

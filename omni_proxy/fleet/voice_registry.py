"""The voice registry: which worker stores the uploaded voices, and their names.

Invariant: while the names are unknown (`names` is None) every named voice counts as uploaded, so no
request reaches a worker that lacks its voice. A list that was requested before the last change is
never applied. Pure. Source: note:omni-router 13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class VoiceRegistry:
    """`owner` is a worker's URL, "" while there is none; `names` are lower-case."""

    def __init__(self) -> None:
        self.owner = ""
        self.names: frozenset[str] | None = None
        self.refresh_error = ""  # why the last refresh failed
        self.generation = 0  # rises with each change; a list of an older one is stale
        self.current = False  # the names were refreshed since the last change
        self._configured = ""
        self._present = False  # the owner was seen in the fleet
        self._watchers: list[Callable[[], None]] = []
        self._name_watchers: list[Callable[[], None]] = []

    def watch(self, callback: Callable[[], None]) -> None:
        """`callback()` after each change that requires a refresh of the names."""
        self._watchers.append(callback)

    def watch_names(self, callback: Callable[[], None]) -> None:
        """`callback()` after a refresh that changed the names."""
        self._name_watchers.append(callback)

    def configure(self, owner: str) -> None:
        """Apply `[routing] voice_owner`; "" keeps the current owner."""
        if owner == self._configured:
            return
        self._configured = owner
        if owner and owner != self.owner:
            self._set_owner(owner)

    def restore(self, owner: str, names: Iterable[str] | None) -> None:
        """Restore the saved state; a configured owner takes precedence."""
        if not owner or self.owner not in ("", owner):
            return
        self.owner = owner
        self.names = None if names is None else frozenset(names)

    def voices_changed(self, owner: str) -> None:
        """This worker accepted an upload or a deletion: it is the owner, and its names changed."""
        if owner != self.owner:
            self._set_owner(owner)
        else:
            self._invalidate()

    def set_names(self, generation: int, names: Iterable[str]) -> bool:
        """Apply the owner's list. False, without applying it, if a change came in between."""
        if generation != self.generation:
            return False
        listed = frozenset(name.lower() for name in names)
        self.refresh_error = ""
        self.current = True
        if listed != self.names:
            self.names = listed
            for callback in self._name_watchers:
                callback()
        return True

    def refresh_failed(self, generation: int, error: str) -> None:
        """Record a failed refresh; the known names stay."""
        if generation == self.generation:
            self.refresh_error = error
            self.current = False

    def follow(self, owner: str, names: Iterable[str] | None) -> None:
        """Copy the state of the main process."""
        self.owner = owner
        self.names = None if names is None else frozenset(names)

    def update_presence(self, urls: Iterable[str]) -> str:
        """Drop an owner that left the fleet; returns its URL, "" if none did.

        A configured owner stays. A restored owner that has not registered yet stays too: a launched
        replica registers after the state was read.
        """
        if not self.owner:
            return ""
        was_present, self._present = self._present, self.owner in urls
        if self._present or not was_present or self.owner == self._configured:
            return ""
        previous, self.owner = self.owner, ""
        self.names = None
        self._changed()
        return previous

    def requires_owner(self, voices: Iterable[str]) -> bool:
        """Whether a request with these voices (lower-case) must go to the owner."""
        if not self.owner:
            return False
        names = self.names
        return any(names is None or voice in names for voice in voices)

    @property
    def state(self) -> str:
        """`registry_state` in GET /health (note:omni-router 4)."""
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
        self._notify()

    def _notify(self) -> None:
        for callback in self._watchers:
            callback()

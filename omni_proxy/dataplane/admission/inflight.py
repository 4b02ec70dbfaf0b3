"""How many exchanges are in flight, and how many bytes of their requests are held in memory.

Invariant: `in_flight` is never above `[server] max_inflight`, where that is set; an exchange is
counted once, and `admitted` says whether it is.
"""

from __future__ import annotations

from typing import NoReturn

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.settings import Settings
from omni_proxy.wire.errors import HttpError


class InFlight:
    """The accounts of admission. `draining`: no new connections, each ends with its response."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.draining = False
        self.in_flight = 0
        self.peak_in_flight = 0
        self.rejected = 0
        self.held_bytes = 0  # of requests

    def has_slot(self) -> bool:
        bound = self._settings.config.server.max_inflight
        return not bound or self.in_flight < bound

    def admit(self, exchange: Exchange) -> bool:
        """Count it; False where the bound is reached, then it is not counted."""
        bound, before = self._settings.config.server.max_inflight, self.in_flight
        if bound and before >= bound:
            return False
        self.in_flight = before + 1
        if bound and self.is_over_limit():
            self.in_flight -= 1
            return False
        exchange.admitted = True
        if before >= self.peak_in_flight:
            self.peak_in_flight = before + 1
        return True

    def is_over_limit(self) -> bool:
        """Whether another process has been quicker to the last slot: there is none."""
        return False

    def dismiss(self, exchange: Exchange) -> None:
        """Count it no more."""
        if exchange.admitted:
            exchange.admitted = False
            self.in_flight -= 1

    def check_room(self, size: int) -> None:
        """Raises HttpError 503 where so many bytes more of requests may not be held."""
        if self.held_bytes + size > self._settings.limits.held:
            self.reject_bytes()

    def reject_bytes(self) -> NoReturn:
        """Raises HttpError 503."""
        self.rejected += 1
        raise _too_many_bytes()


def _too_many_bytes() -> HttpError:
    """Source: omni-router.md 10."""
    return HttpError(
        503, "router overloaded: too many bytes of request bodies are held", 503,
        close=True, type="overloaded_error", reason="max_held_bytes",
    ).with_headers(("retry-after", "1"))  # fmt: skip

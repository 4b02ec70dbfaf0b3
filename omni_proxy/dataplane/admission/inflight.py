"""How many exchanges are in flight, and how many bytes of their requests are held in memory.

Invariant: `in_flight` is never above `[server] max_inflight`, where that is set, and `held_bytes`
grows only up to `[server] max_held_bytes`. An exchange is counted once: its `admitted` and
`held_bytes` say what of these counts is its own; only this file writes them, and
`exchange_io.finalize`, which gives both up.
"""

from __future__ import annotations

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.settings import Settings
from omni_proxy.wire.errors import HttpError


class InFlight:
    """The accounts of admission. `draining`: no new connections, each ends with its response.
    `closes_idle`: connections without a request end, too."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.draining = self.closes_idle = False
        self.in_flight = 0
        self.elsewhere = 0  # at other proxies of the cluster, which the bound is for as well
        self.peak_in_flight = 0
        self.rejected = 0
        self.held_bytes = 0  # of requests

    def has_slot(self) -> bool:
        bound = self._settings.limits.in_flight
        return not bound or self.in_flight + self.elsewhere < bound

    def admit(self, exchange: Exchange, held: int = 0) -> bool:
        """Count it, and `held` bytes of its request; False where one of the bounds is reached, then
        neither is counted."""
        limits, held_bytes = self._settings.limits, self.held_bytes + held
        if held and held_bytes > limits.held:
            return False
        bound, before = limits.in_flight, self.in_flight
        if bound and before + self.elsewhere >= bound:
            return False
        self.in_flight = before + 1
        if bound and self.is_over_limit():
            self.in_flight -= 1
            return False
        exchange.admitted = True
        exchange.held_bytes += held
        self.held_bytes = held_bytes
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

    def hold(self, exchange: Exchange, size: int) -> None:
        """So many bytes more of its request stay in memory. Raises HttpError 503."""
        self.check_room(size)
        exchange.held_bytes += size
        self.held_bytes += size

    def release_bytes(self, exchange: Exchange) -> None:
        """The bytes of its request are needed no more."""
        self.held_bytes -= exchange.held_bytes
        exchange.held_bytes = 0

    def try_to_hold(self, exchange: Exchange, size: int) -> bool:
        """As `hold`; False where it would raise."""
        if self.held_bytes + size > self._settings.limits.held:
            return False
        exchange.held_bytes += size
        self.held_bytes += size
        return True

    def check_room(self, size: int) -> None:
        """Raises HttpError 503 where so many bytes more of requests may not be held."""
        if self.held_bytes + size > self._settings.limits.held:
            self.rejected += 1
            raise _too_many_bytes()


def _too_many_bytes() -> HttpError:
    """Source: omni-router.md 10."""
    return HttpError(
        503, "router overloaded: too many bytes of request bodies are held", 503,
        close=True, type="overloaded_error", reason="max_held_bytes",
    ).with_headers(("retry-after", "1"))  # fmt: skip

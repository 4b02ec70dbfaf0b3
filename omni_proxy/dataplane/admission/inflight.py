"""Counts of exchanges in flight, and of bytes of their requests held in memory.

Invariant: `in_flight` is never above `[server] max_inflight`, if that is set, and `held_bytes`
grows only up to `[server] max_held_bytes`. An exchange is counted once: its share of the counts is
in its `admitted` and `held_bytes`, which only this file writes; `finalize` has
both released.
"""

from __future__ import annotations

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.settings import Settings
from omni_proxy.wire.errors import HttpError


class InFlight:
    """The counters of admission. `draining`: no new connections; each ends after its response.
    `closes_idle`: connections without a request are closed, too."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.draining = self.closes_idle = False
        self.in_flight = 0
        self.elsewhere = 0  # in flight at other proxies of the cluster, which share the bound
        self.peak_in_flight = 0
        self.rejected = 0
        self.held_bytes = 0

    def has_slot(self) -> bool:
        bound = self._settings.limits.in_flight
        return not bound or self.in_flight + self.elsewhere < bound

    def admit(self, exchange: Exchange, request_bytes: int = 0) -> bool:
        """Count the exchange, and `request_bytes` of its request. False, counting neither, if one
        of the bounds is reached."""
        limits, held_bytes = self._settings.limits, self.held_bytes + request_bytes
        if held_bytes > limits.held and request_bytes:
            return False
        before = self.in_flight
        if not limits.in_flight:
            self.in_flight = before + 1
        elif not self._take_slot():
            return False
        exchange.admitted = True
        exchange.held_bytes += request_bytes
        self.held_bytes = held_bytes
        if before >= self.peak_in_flight:
            self.peak_in_flight = before + 1
        return True

    def _take_slot(self) -> bool:
        """Count one more in flight, if the bound allows it."""
        if self.in_flight + self.elsewhere >= self._settings.limits.in_flight:
            return False
        self.in_flight += 1
        if self.is_over_limit():
            self.in_flight -= 1
            return False
        return True

    def is_over_limit(self) -> bool:
        """Whether another process took the last slot. Never with one process."""
        return False

    def dismiss(self, exchange: Exchange, *, holds_bytes: bool = False) -> None:
        """Stop counting the exchange as in flight, and the bytes of its request unless it still
        holds them."""
        if exchange.admitted:
            exchange.admitted = False
            self.in_flight -= 1
        held_bytes = exchange.held_bytes
        if held_bytes and not holds_bytes:  # inlined: release_bytes
            self.held_bytes -= held_bytes
            exchange.held_bytes = 0

    def hold(self, exchange: Exchange, size: int) -> None:
        """Count `size` more bytes of its request as held in memory. Raises HttpError 503."""
        self.check_room(size)
        exchange.held_bytes += size
        self.held_bytes += size

    def release_body(self, exchange: Exchange) -> None:
        """Release the body of its request, which is not sent again."""
        exchange.body = b""
        if exchange.requirements is not None:
            exchange.requirements.body_fields = None  # it refers to the body
        if exchange.held_bytes:
            self.release_bytes(exchange)

    def release_bytes(self, exchange: Exchange) -> None:
        """Stop counting the bytes of its request."""
        self.held_bytes -= exchange.held_bytes
        exchange.held_bytes = 0

    def try_to_hold(self, exchange: Exchange, size: int) -> bool:
        """As `hold`, but returns False instead of raising."""
        if self.held_bytes + size > self._settings.limits.held:
            return False
        exchange.held_bytes += size
        self.held_bytes += size
        return True

    def check_room(self, size: int) -> None:
        """Raises HttpError 503 if `size` more bytes would exceed the bound."""
        if self.held_bytes + size > self._settings.limits.held:
            self.rejected += 1
            raise _too_many_bytes()


def _too_many_bytes() -> HttpError:
    """As SGLang-Omni's router refuses a request (note:omni-router 10)."""
    return HttpError(
        503, "router overloaded: too many bytes of request bodies are held", 503,
        close=True, type="overloaded_error", reason="max_held_bytes",
    ).with_headers(("retry-after", "1"))  # fmt: skip

"""One caller: the owner of a key of `[[keys]]`, its limits, and what it has taken of them.

An `ApiCaller` lives as long as its name is configured: a reload loses no count. Its counts are
cells of one slot, which data-plane processes share (see `rate_window`): each process writes its
own, and counts before it looks. Invariant: over all processes no more requests are in flight than
the key allows, no more begin in any 60 s, and each that was admitted is ended once. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, Protocol

from omni_proxy.api_keys.rate_window import WINDOW_CELLS, Cells, RateWindow, no_fence
from omni_proxy.config.api_keys import CallerKey

Reason = Literal["max_inflight", "requests_per_minute", "tokens_per_minute", "model"]
REASONS: Final[tuple[Reason, ...]] = (
    "max_inflight", "requests_per_minute", "tokens_per_minute", "model",
)  # fmt: skip

# The cells of a slot.
IN_FLIGHT, REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS, REFUSED = 0, 1, 2, 3, 4
REQUEST_WINDOW: Final = REFUSED + len(REASONS)
TOKEN_WINDOW: Final = REQUEST_WINDOW + WINDOW_CELLS
SLOT_CELLS: Final = TOKEN_WINDOW + WINDOW_CELLS


class SlotRows(Protocol):
    """Where the cells of slots are; see `LocalRows`."""

    fence: Callable[[], None]

    @property
    def tries(self) -> int:
        """See `RateWindow.share_with`."""

    def own(self, slot: int) -> Cells: ...

    def others(self, slot: int) -> Sequence[Cells]:
        """Of other processes."""


class LocalRows:
    """Cells of one process alone."""

    fence = staticmethod(no_fence)
    tries = 1

    def __init__(self) -> None:
        self._slots: dict[int, list[int]] = {}

    def own(self, slot: int) -> Cells:
        return self._slots.setdefault(slot, [0] * SLOT_CELLS)

    def others(self, slot: int) -> Sequence[Cells]:
        return ()


class ApiCaller:
    """`slot`: of its cells. All times are of the event loop's clock in seconds."""

    __slots__ = (
        "_cells", "_fence", "_others", "_request_lines", "_token_lines", "_tries", "entry",
        "has_rates", "is_limited", "models", "name", "priority", "requests", "slot", "tokens",
    )  # fmt: skip

    def __init__(self, entry: CallerKey, slot: int, rows: SlotRows) -> None:
        self.name = entry.name
        self.slot = slot
        self._cells = cells = rows.own(slot)
        self.requests = RateWindow(cells, REQUEST_WINDOW)
        self.tokens = RateWindow(cells, TOKEN_WINDOW)
        self.configure(entry, rows)

    def configure(self, entry: CallerKey, rows: SlotRows) -> None:
        """Other limits, or other processes; the counts stay."""
        self.entry = entry
        self.models = frozenset(entry.models)  # empty: all
        self.priority = entry.priority
        self.has_rates = bool(entry.requests_per_minute or entry.tokens_per_minute)
        self.is_limited = bool(entry.max_inflight or entry.requests_per_minute)
        self._request_lines = _rate_lines("requests", entry.requests_per_minute)
        self._token_lines = _rate_lines("tokens", entry.tokens_per_minute)
        self._others = rows.others(self.slot)
        self._fence, self._tries = rows.fence, rows.tries
        for window in (self.requests, self.tokens):
            window.share_with(self._others, rows.fence, rows.tries)

    @property
    def in_flight(self) -> int:
        """Over all processes."""
        return self._cells[IN_FLIGHT] + sum([cells[IN_FLIGHT] for cells in self._others])

    def begin(self, now: float) -> Reason | None:
        """Count a request as in flight and as one of this minute; else why that may not be, and
        nothing is counted."""
        entry, cells = self.entry, self._cells
        if not self.is_limited:
            cells[IN_FLIGHT] += 1
            cells[REQUESTS] += 1
            return None
        most = entry.max_inflight
        if most and not self._enter(most):
            return "max_inflight"
        if not most:
            cells[IN_FLIGHT] += 1
        rate = entry.requests_per_minute
        if rate and not self.requests.take(1, rate, now):
            cells[IN_FLIGHT] -= 1
            return "requests_per_minute"
        cells[REQUESTS] += 1
        return None

    def _enter(self, most: int) -> bool:
        cells = self._cells
        if not self._others:
            if cells[IN_FLIGHT] >= most:
                return False
            cells[IN_FLIGHT] += 1
            return True
        for _ in range(self._tries):
            if self.in_flight >= most:
                return False
            cells[IN_FLIGHT] += 1
            self._fence()
            if self.in_flight <= most:
                return True
            cells[IN_FLIGHT] -= 1
        return False

    def cancel(self, bucket: int, now: float) -> None:
        """What `begin` counted in this bucket of `requests` counts no more: the request did not
        begin after all."""
        self._cells[IN_FLIGHT] -= 1
        self._cells[REQUESTS] -= 1
        if self.entry.requests_per_minute:
            self.requests.settle(1, bucket, 0, now)

    def reserve(self, tokens: int, now: float) -> int | None:
        """How many tokens are reserved, None where they may not be. An estimate above the limit
        takes all of it: whether so many come is not known yet."""
        limit = self.entry.tokens_per_minute
        if not limit:
            return 0
        tokens = min(tokens, limit)
        return tokens if self.tokens.take(tokens, limit, now) else None

    def is_in_debt(self, now: float) -> bool:
        """Whether not one token is left."""
        limit = self.entry.tokens_per_minute
        return bool(limit) and self.tokens.used(now) >= limit

    def end(self, reserved: int, bucket: int, used: tuple[int, int], now: float) -> None:
        """It is in flight no more: the last call for a request. `used`: tokens of the prompt and of
        the completion, in place of those that were reserved in this bucket of `tokens`."""
        cells = self._cells
        cells[INPUT_TOKENS] += used[0]
        cells[OUTPUT_TOKENS] += used[1]
        if self.entry.tokens_per_minute:
            self.tokens.settle(reserved, bucket, used[0] + used[1], now)
        cells[IN_FLIGHT] -= 1

    def count_refused(self, reason: Reason) -> None:
        self._cells[REFUSED + REASONS.index(reason)] += 1

    def rate_lines(self, now: float) -> bytes:
        """Header lines that tell of its rates, b"" without any. Resets are in whole seconds."""
        lines, entry = b"", self.entry
        if entry.requests_per_minute:
            lines = self._request_lines % self.requests.state(entry.requests_per_minute, now)
        if entry.tokens_per_minute:
            lines += self._token_lines % self.tokens.state(entry.tokens_per_minute, now)
        return lines

    def retry_after(self, reason: Reason, tokens: int, now: float) -> int:
        """Whole seconds until a refused request may fit."""
        entry = self.entry
        match reason:
            case "requests_per_minute":
                return self.requests.wait_secs(1, entry.requests_per_minute, now)
            case "tokens_per_minute":
                limit = entry.tokens_per_minute
                return self.tokens.wait_secs(min(max(tokens, 1), limit), limit, now)
        return 1


def _rate_lines(noun: str, limit: int) -> bytes:
    """What is left and when all of it is are to be filled in."""
    return (
        f"x-ratelimit-limit-{noun}: {limit}\r\n"
        f"x-ratelimit-remaining-{noun}: %d\r\nx-ratelimit-reset-{noun}: %d\r\n"
    ).encode()


def slot_totals(rows: Iterable[Cells]) -> dict[str, int]:
    """What a slot's cells of all processes add up to, by the names of GET /keys."""
    cells = list(rows)

    def total(at: int) -> int:
        return sum(row[at] for row in cells)

    return {
        "in_flight": total(IN_FLIGHT),
        "requests": total(REQUESTS),
        "input_tokens": total(INPUT_TOKENS),
        "output_tokens": total(OUTPUT_TOKENS),
        **{f"refused_{reason}": total(REFUSED + at) for at, reason in enumerate(REASONS)},
    }

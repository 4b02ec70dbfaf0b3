"""One caller: the owner of a key of `[[keys]]`, its limits, and what it has taken of them.

An `ApiCaller` lives as long as its name is configured: a reload loses no count. Its counts are
cells of one slot, which data-plane processes share (see `rate_window`): each process writes its
own, and counts before it looks. What no other process decides by is counted in attributes, and
stands in the cells after `publish`. Invariant: over all processes no more requests are in flight
than the key allows, no more begin in any 60 s, and each that was admitted is ended once. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Final, Literal, Protocol, TypeAlias

from omni_proxy.api_keys.rate_window import WINDOW_CELLS, Cells, RateWindow, no_fence
from omni_proxy.config.api_keys import CallerKey

Reason = Literal["max_inflight", "requests_per_minute", "tokens_per_minute", "model"]
REASONS: Final[tuple[Reason, ...]] = (
    "max_inflight", "requests_per_minute", "tokens_per_minute", "model",
)  # fmt: skip

RateRows: TypeAlias = tuple[tuple[int, int], ...]  # see `RateWindow.rows`

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


class TokenCounts(Protocol):
    """As a response reports them."""

    prompt_tokens: int
    completion_tokens: int


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
        "_at_once", "_cells", "_fence", "_lines", "_lines_until", "_most", "_others",
        "_published", "_request_rate", "_tries", "bound", "counts_later", "ended", "entry",
        "has_rates", "input_tokens", "models", "name", "output_tokens", "priority", "requests",
        "running", "slot", "token_rate", "tokens", "unsorted",
    )  # fmt: skip

    def __init__(self, entry: CallerKey, slot: int, rows: SlotRows) -> None:
        self.name = entry.name
        self.slot = slot
        # In flight here, those of `unsorted` included, and what of it is in the cells.
        self.running = self._published = 0
        # The tokens of requests that have ended and are not counted yet, where it `counts_later`.
        self.unsorted: list[TokenCounts] = []
        self.ended = self.input_tokens = self.output_tokens = 0  # not in the cells yet
        self._cells = cells = rows.own(slot)
        self.requests = RateWindow(cells, REQUEST_WINDOW)
        self.tokens = RateWindow(cells, TOKEN_WINDOW)
        self.configure(entry, rows)

    def configure(self, entry: CallerKey, rows: SlotRows) -> None:
        """Other limits, or other processes; the counts stay."""
        self.entry = entry
        self.models = frozenset(entry.models)  # empty: all
        self.priority = entry.priority
        # Of `entry`; 0: none.
        self._most, self._request_rate = entry.max_inflight, entry.requests_per_minute
        self.token_rate = entry.tokens_per_minute
        self.has_rates = bool(self._request_rate or self.token_rate)
        self._lines, self._lines_until = b"", -inf
        self._others = rows.others(self.slot)
        self._fence, self._tries = rows.fence, rows.tries
        for window in (self.requests, self.tokens):
            window.share_with(self._others, rows.fence, rows.tries)
        self._at_once = bool(self._most and self._others)
        # That a request has ended decides nothing but whether there is room: see `unsorted`.
        self.counts_later = not self._at_once
        # Below so many in flight nothing is refused; 0: more is to be looked at.
        is_simple = self.counts_later and not (self.has_rates or self.models)
        self.bound = (self._most or inf) if is_simple else 0
        self.publish()

    def retire(self) -> None:
        """Its name is configured no more: what is in flight still ends in the cells."""
        self._at_once, self.counts_later, self.bound = True, False, 0
        self.publish()

    def publish(self) -> None:
        """Bring the cells up to date."""
        if self.unsorted:
            self._sort()
        cells = self._cells
        if self.running != self._published:
            cells[IN_FLIGHT] += self.running - self._published
            self._published = self.running
        if self.ended:
            cells[REQUESTS] += self.ended
            self.ended = 0
        if self.input_tokens or self.output_tokens:
            cells[INPUT_TOKENS] += self.input_tokens
            cells[OUTPUT_TOKENS] += self.output_tokens
            self.input_tokens = self.output_tokens = 0

    def _sort(self) -> None:
        ended, self.unsorted = self.unsorted, []
        self.running -= len(ended)
        self.ended += len(ended)
        self.input_tokens += sum([each.prompt_tokens for each in ended])
        self.output_tokens += sum([each.completion_tokens for each in ended])

    def _has_room(self) -> bool:
        self._sort()
        return self.running < self._most

    @property
    def in_flight(self) -> int:
        """Over all processes."""
        return self.running - len(self.unsorted) + sum([cells[IN_FLIGHT] for cells in self._others])

    def begin(self, now: float) -> Reason | None:
        """Count a request as in flight and as one of this minute; else why that may not be, and
        nothing is counted. Below `bound` that is one more `running`."""
        most = self._most
        if most and self._others:
            if not self._enter(most):
                return "max_inflight"
        elif most and self.running >= most and not self._has_room():
            return "max_inflight"
        else:
            self.running += 1
        if self._request_rate and not self.requests.take(1, self._request_rate, now):
            self._leave()
            return "requests_per_minute"
        return None

    def _enter(self, most: int) -> bool:
        """In flight beside those of other processes."""
        for _ in range(self._tries):
            if self.in_flight >= most:
                return False
            self.running += 1
            self.publish()
            self._fence()
            if self.in_flight <= most:
                return True
            self._leave()
        return False

    def _leave(self) -> None:
        self.running -= 1
        if self._at_once:
            self.publish()

    def cancel(self, bucket: int, now: float) -> None:
        """What `begin` counted in this bucket of `requests` counts no more: the request did not
        begin after all."""
        self._leave()
        self._lines_until = -inf
        if self._request_rate:
            self.requests.settle(1, bucket, 0, now)

    def reserve(self, tokens: int, now: float) -> int | None:
        """How many tokens are reserved, None where they may not be. An estimate above the limit
        takes all of it: whether so many come is not known yet."""
        limit = self.token_rate
        if not limit:
            return 0
        if tokens > limit:
            tokens = limit
        return tokens if self.tokens.take(tokens, limit, now) else None

    def is_in_debt(self, now: float) -> bool:
        """Whether not one token is left."""
        limit = self.token_rate
        return bool(limit) and self.tokens.used(now) >= limit

    def end(self, reserved: int, bucket: int, prompt: int, completion: int, now: float) -> None:
        """It is in flight no more: the last call for a request. Tokens of the prompt and of the
        completion replace those that were reserved in this bucket of `tokens`."""
        self.running -= 1
        self.ended += 1
        self.input_tokens += prompt
        self.output_tokens += completion
        if self.token_rate:
            self.settle(reserved, bucket, prompt + completion, now)
        if self._at_once:
            self.publish()

    def settle(self, reserved: int, bucket: int, used: int, now: float) -> None:
        """What `end` does for the tokens, where the rest of it is to be counted later."""
        self.tokens.settle(reserved, bucket, used, now)
        if not used:  # so its bucket may be empty again
            self._lines_until = -inf

    def count_refused(self, reason: Reason) -> None:
        self._cells[REFUSED + REASONS.index(reason)] += 1

    def rate_lines(self, now: float) -> bytes:
        """Header lines that tell of its rates, b"" without any. Resets are in whole seconds, so the
        lines are the same for a while but for what is left."""
        if now >= self._lines_until:
            self._lines, self._lines_until = self._lines_at(now)
        rate, limit = self._request_rate, self.token_rate
        requests, tokens = self.requests.total, self.tokens.total  # up to date: see `_lines_at`
        if self._others:
            requests, tokens = self.requests.used(now), self.tokens.used(now)
        # No `max`: with it this takes half as long again.
        requests = rate - requests if requests < rate else 0
        tokens = limit - tokens if tokens < limit else 0
        if rate and limit:
            return self._lines % (requests, tokens)
        return self._lines % (requests if rate else tokens) if self.has_rates else b""

    def _lines_at(self, now: float) -> tuple[bytes, float]:
        """With places for what is left, and until when they hold; so long both windows are in the
        same bucket."""
        lines, until = b"", inf
        for noun, limit, window in (
            ("requests", self._request_rate, self.requests),
            ("tokens", self.token_rate, self.tokens),
        ):
            if limit:
                reset, holds_until = window.reset_state(now)
                lines += _rate_lines(noun, limit, reset)
                until = min(until, holds_until)
        return lines, until

    def restore(self, requests: RateRows, tokens: RateRows, now: float) -> None:
        """What it has taken of its rates in another program counts here."""
        self.requests.restore(requests, now)
        self.tokens.restore(tokens, now)
        self._lines_until = -inf

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


def _rate_lines(noun: str, limit: int, reset: int) -> bytes:
    """What is left is to be filled in."""
    return (
        f"x-ratelimit-limit-{noun}: {limit}\r\n"
        f"x-ratelimit-remaining-{noun}: %d\r\nx-ratelimit-reset-{noun}: {reset}\r\n"
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

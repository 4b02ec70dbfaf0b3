"""One caller: the owner of a key of `[[keys]]`, with its limits and their current use.

An `ApiCaller` lives as long as its name is configured: a reload loses no counts. Its counts are
cells of one slot, shared between data-plane processes (see `rate_window`): each process writes only
its own cells, and adds to them before it reads those of others. Counts that don't matter to other
processes' decisions are kept in attributes, and written to the cells by `publish`. Invariant: over
all processes at most as many requests are in flight, and begin in any 60 s, as the key allows; each
admitted request is ended exactly once. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from operator import attrgetter
from typing import Final, Literal, Protocol, TypeAlias

from omni_proxy.api_keys.rate_window import WINDOW_CELLS, Cells, RateWindow, no_fence
from omni_proxy.config.tables.keys import CallerKey

Reason = Literal["max_inflight", "requests_per_minute", "tokens_per_minute", "model"]
REASONS: Final[tuple[Reason, ...]] = (
    "max_inflight", "requests_per_minute", "tokens_per_minute", "model",
)  # fmt: skip

RateRows: TypeAlias = tuple[tuple[int, int], ...]  # see `RateWindow.rows`

# The cells of a slot.
IN_FLIGHT, REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS, REFUSED_REQUESTS = 0, 1, 2, 3, 4
REQUEST_WINDOW: Final = REFUSED_REQUESTS + len(REASONS)
TOKEN_WINDOW: Final = REQUEST_WINDOW + WINDOW_CELLS
SLOT_CELLS: Final = TOKEN_WINDOW + WINDOW_CELLS

MAX_UNCOUNTED: Final = 64  # responses that are kept until their tokens are counted


class SlotRows(Protocol):
    """Access to the cells of slots; see `LocalRows`."""

    fence: Callable[[], None]

    @property
    def tries(self) -> int:
        """See `RateWindow.share_with`."""

    def own(self, slot: int) -> Cells: ...

    def others(self, slot: int) -> Sequence[Cells]:
        """The cells of other processes."""


# A request that has ended: its response (if complete), the size of its body in bytes, the status.
Ended: TypeAlias = tuple[bytes, int, int]
# Returns the prompt tokens and the completion tokens of such requests, in total.
CountTokens: TypeAlias = Callable[[Sequence[Ended]], tuple[int, int]]


class TokenCounts(Protocol):
    """Token counts reported by a response."""

    prompt_tokens: int
    completion_tokens: int


_prompt_tokens: Final = attrgetter("prompt_tokens")
_completion_tokens: Final = attrgetter("completion_tokens")


class LocalRows:
    """Cells of a single process."""

    fence = staticmethod(no_fence)
    tries = 1

    def __init__(self) -> None:
        self._slots: dict[int, list[int]] = {}

    def own(self, slot: int) -> Cells:
        return self._slots.setdefault(slot, [0] * SLOT_CELLS)

    def others(self, slot: int) -> Sequence[Cells]:
        return ()


class ApiCaller:
    """`slot`: index of its cells. All times are of the event loop's clock, in seconds.

    A check evaluates all limits. Until the next one, that is while `begun < begun_at_next_check`
    and the time is before `until`, a request is admitted by just incrementing `begun`.
    `fast_path_bound` is `begun_at_next_check` if neither models nor tokens have to be checked, else
    0. Requests begun since the last check are added to the windows at the next one, in the bucket
    in which they began: `until` is no later than the end of that bucket.
    """

    __slots__ = (
        "_begun_at_check",
        "_begun_at_rate_limit",
        "_cells",
        "_count_tokens",
        "_fence",
        "_finished",
        "_is_shared",
        "_lines",
        "_max_inflight",
        "_others",
        "_published",
        "_rate",
        "_tokens_seen",
        "_tries",
        "begun",
        "begun_at_next_check",
        "counts_immediately",
        "defers_counts",
        "entry",
        "fast_path_bound",
        "has_rates",
        "input_tokens",
        "models",
        "name",
        "output_tokens",
        "priority",
        "request_window",
        "settled",
        "slot",
        "token_rate",
        "token_window",
        "tokens_left",
        "uncounted",
        "unpublished_ended",
        "until",
    )  # fmt: skip

    def __init__(
        self, entry: CallerKey, slot: int, rows: SlotRows, count_tokens: CountTokens
    ) -> None:
        self.name = entry.name
        self.slot = slot
        self._count_tokens = count_tokens
        # Totals of this process: requests begun; requests ended, without `uncounted` and `settled`;
        # and the part of their difference that is in the cells.
        self.begun = self._finished = self._published = 0
        self.uncounted: list[Ended] = []  # ended, not counted yet (if `defers_counts`)
        self.settled: list[TokenCounts] = []  # the same, if token limits apply
        self.unpublished_ended = self.input_tokens = self.output_tokens = 0  # not in the cells yet
        self._cells = cells = rows.own(slot)
        self.request_window = RateWindow(cells, REQUEST_WINDOW)
        self.token_window = RateWindow(cells, TOKEN_WINDOW)
        # `begun` at the last check; and what it will be when the rate limit is reached.
        self._begun_at_check = self._begun_at_rate_limit = 0
        self.tokens_left = self._tokens_seen = 0  # tokens left of the rate: now; at the last check
        self._is_shared = False
        self._rate = self.token_rate = 0
        self.configure(entry, rows)

    def configure(self, entry: CallerKey, rows: SlotRows) -> None:
        """Apply other limits, or other processes; the counts are kept."""
        self._add_to_windows()
        self.entry = entry
        self.models = frozenset(entry.models)  # empty: all
        self.priority = entry.priority
        # Limits of `entry`; 0: no limit.
        self._max_inflight, self._rate = entry.max_inflight, entry.requests_per_minute
        self.token_rate = entry.tokens_per_minute
        self.has_rates = bool(self._rate or self.token_rate)
        self._others = rows.others(self.slot)
        self._fence, self._tries = rows.fence, rows.tries
        for window in (self.request_window, self.token_window):
            window.share_with(self._others, rows.fence, rows.tries)
        self.counts_immediately = bool(self._max_inflight and self._others)
        # The counts of other processes have to be read for each request.
        self._is_shared = bool(self._others and (self._max_inflight or self.has_rates))
        # The end of a request and its tokens affect no decision before the next check.
        self.defers_counts = not (self.counts_immediately or self.token_rate)
        self._lines, self.begun_at_next_check, self.until = b"", 0, -inf
        self.fast_path_bound = 0
        self._begun_at_check = self.begun
        self.publish()

    def retire(self) -> None:
        """The name is no longer configured: requests in flight are still counted in the cells when
        they end."""
        self._add_to_windows()
        self.counts_immediately, self.defers_counts, self.fast_path_bound = True, False, 0
        self.begun_at_next_check = 0
        self.publish()

    def publish(self) -> None:
        """Update the cells, except for the rates."""
        if self.uncounted or self.settled:
            self._count_ended()
        cells = self._cells
        in_flight = self.begun - self._finished
        if in_flight != self._published:
            cells[IN_FLIGHT] += in_flight - self._published
            self._published = in_flight
        if self.unpublished_ended:
            cells[REQUESTS] += self.unpublished_ended
            self.unpublished_ended = 0
        if self.input_tokens or self.output_tokens:
            cells[INPUT_TOKENS] += self.input_tokens
            cells[OUTPUT_TOKENS] += self.output_tokens
            self.input_tokens = self.output_tokens = 0

    def _count_ended(self) -> None:
        ended, self.uncounted = self.uncounted, []
        settled, self.settled = self.settled, []
        count = len(ended) + len(settled)
        self._finished += count
        self.unpublished_ended += count
        prompts, completions = self._count_tokens(ended)
        self.input_tokens += prompts + sum(map(_prompt_tokens, settled))
        self.output_tokens += completions + sum(map(_completion_tokens, settled))

    def _add_to_windows(self) -> None:
        """Add use of the rates since the last check to the windows, in the buckets of that time."""
        if self._is_shared:
            return  # counted immediately
        if self._rate:
            self.request_window.add(self.begun - self._begun_at_check)
        if self.token_rate:
            self.token_window.add(self._tokens_seen - self.tokens_left)
        self._begun_at_check, self._tokens_seen = self.begun, self.tokens_left

    def _check_limits(self, now: float) -> None:
        """Evaluate all limits: how many requests may begin before the next time, and until when."""
        if self.uncounted or self.settled:
            self._count_ended()
        self._add_to_windows()
        room = 0 if self._is_shared else MAX_UNCOUNTED
        if self._max_inflight:
            room = min(room, self._max_inflight - self.in_flight)
        until = inf
        if self.has_rates:
            used = self.request_window.used(now)
            self.tokens_left = self._tokens_seen = self.token_rate - self.token_window.used(now)
            if self._rate:
                remaining = max(0, self._rate - used)
                room, self._begun_at_rate_limit = min(room, remaining), self.begun + remaining
            self._lines, until = self._lines_at(now)
        self.until = -inf if self._is_shared else until
        self.begun_at_next_check = self.begun + room
        self.fast_path_bound = 0 if self.token_rate or self.models else self.begun_at_next_check

    @property
    def in_flight(self) -> int:
        """Requests in flight, over all processes."""
        own_count = self.begun - self._finished - len(self.uncounted) - len(self.settled)
        return own_count + sum([cells[IN_FLIGHT] for cells in self._others])

    def begin(self, now: float) -> Reason | None:
        """Count a request as in flight and in this minute's rate. If a limit is reached, returns
        the limit and counts nothing."""
        if self.begun >= self.begun_at_next_check or now >= self.until:
            if self._is_shared:
                return self._begin_shared(now)
            self._check_limits(now)
            if self.begun >= self.begun_at_next_check:
                if self._max_inflight and self.in_flight >= self._max_inflight:
                    return "max_inflight"
                return "requests_per_minute"
        self.begun += 1
        return None

    def _begin_shared(self, now: float) -> Reason | None:
        if self._max_inflight:
            if not self._enter(self._max_inflight):
                return "max_inflight"
        else:
            self.begun += 1
        if self._rate and not self.request_window.take(1, self._rate, now):
            self._leave()
            return "requests_per_minute"
        return None

    def _enter(self, limit: int) -> bool:
        """Count a request as in flight if the limit over all processes permits."""
        for _ in range(self._tries):
            if self.in_flight >= limit:
                return False
            self.begun += 1
            self.publish()
            self._fence()
            if self.in_flight <= limit:
                return True
            self._leave()
        return False

    def _leave(self) -> None:
        self._finished += 1
        if self.counts_immediately:
            self.publish()

    def cancel(self, bucket: int, now: float) -> None:
        """Undo `begin`, which counted in this bucket of `request_window`: the request does not
        start."""
        self._leave()
        self._add_to_windows()
        if self._rate:
            self.request_window.settle(1, bucket, 0, now)
        self.until = -inf

    def reserve(self, tokens: int, now: float) -> int | None:
        """Reserve tokens of the rate; returns how many, or None if they are not available. An
        estimate above the limit reserves all of it, because the actual number may be lower."""
        limit = self.token_rate
        if not limit:
            return 0
        if tokens > limit:
            tokens = limit
        if self._is_shared:
            return tokens if self.token_window.take(tokens, limit, now) else None
        if now >= self.until:
            self._check_limits(now)
        remaining = self.tokens_left - tokens
        if remaining < 0:
            return None
        self.tokens_left = remaining
        return tokens

    def has_no_tokens_left(self, now: float) -> bool:
        """Whether no tokens of the rate are left."""
        return bool(self.token_rate) and self.tokens_used(now) >= self.token_rate

    def end(self, reserved: int, bucket: int, prompt: int, completion: int, now: float) -> None:
        """The request has ended; the last call for a request. Prompt and completion tokens replace
        those that were reserved in this bucket of `token_window`."""
        self._finished += 1
        self.unpublished_ended += 1
        self.input_tokens += prompt
        self.output_tokens += completion
        if self.token_rate:
            self.settle(reserved, bucket, prompt + completion, now)
        if self.counts_immediately:
            self.publish()

    def settle(self, reserved: int, bucket: int, used: int, now: float) -> None:
        """Used tokens replace those that were reserved in this bucket."""
        if not self._is_shared and now >= self.until:
            self._check_limits(now)
        more = used - reserved
        if self._is_shared or (more < 0 and bucket != self.token_window.bucket):
            before = self.token_window.total
            self.token_window.settle(reserved, bucket, used, now)
            freed = before - self.token_window.total
            self.tokens_left += freed
            self._tokens_seen += freed
        else:
            self.tokens_left -= more
        if not used:  # the bucket may be empty again, so the reset time may have changed
            self.until = -inf

    def count_refused(self, reason: Reason) -> None:
        self._cells[REFUSED_REQUESTS + REASONS.index(reason)] += 1

    def rate_lines(self, now: float) -> bytes:
        """Header lines with the state of its rates; it must have at least one. Resets are in whole
        seconds, so for a while only the remaining numbers change."""
        if now >= self.until:
            self._check_limits(now)
        if self.token_rate:
            tokens_left = self.tokens_left
            tokens_left = tokens_left if tokens_left > 0 else 0  # noqa: FURB136 - each request
            return self._lines % ((self._requests_left, tokens_left) if self._rate else tokens_left)
        return self._lines % self._requests_left

    @property
    def _requests_left(self) -> int:
        """Requests left of the rate since the last check."""
        return self._begun_at_rate_limit - self.begun

    def _lines_at(self, now: float) -> tuple[bytes, float]:
        """The lines, with placeholders for the remaining numbers, and until when they are valid,
        which is within the present bucket of both windows."""
        lines, until = b"", inf
        for noun, limit, window in (
            ("requests", self._rate, self.request_window),
            ("tokens", self.token_rate, self.token_window),
        ):
            if limit:
                reset, holds_until = window.reset_state(now)
                lines += _rate_lines(noun, limit, reset)
                until = min(until, holds_until)
        return lines, until

    def tokens_used(self, now: float) -> int:
        """Use of `tokens_per_minute`, over all processes."""
        if not self._is_shared and now < self.until:
            return self.token_rate - self.tokens_left
        self._add_to_windows()
        self.until = -inf
        return self.token_window.used(now)

    def rate_rows(self, now: float) -> tuple[RateRows, RateRows]:
        """The present use of its rates, for `restore` in a new program after an upgrade."""
        self._add_to_windows()
        self.until = -inf
        return self.request_window.rows(now), self.token_window.rows(now)

    def restore(self, requests: RateRows, tokens: RateRows, now: float) -> None:
        """Add the use of its rates in the old program."""
        self._add_to_windows()
        self.request_window.restore(requests, now)
        self.token_window.restore(tokens, now)
        self.until = -inf

    def retry_after(self, reason: Reason, tokens: int, now: float) -> int:
        """Whole seconds until a refused request may fit."""
        entry = self.entry
        self._add_to_windows()
        self.until = -inf
        match reason:
            case "requests_per_minute":
                return self.request_window.wait_secs(1, entry.requests_per_minute, now)
            case "tokens_per_minute":
                limit = entry.tokens_per_minute
                return self.token_window.wait_secs(min(max(tokens, 1), limit), limit, now)
        return 1


def _rate_lines(noun: str, limit: int, reset: int) -> bytes:
    """Header lines with a placeholder for the remaining number."""
    return (
        f"x-ratelimit-limit-{noun}: {limit}\r\n"
        f"x-ratelimit-remaining-{noun}: %d\r\nx-ratelimit-reset-{noun}: {reset}\r\n"
    ).encode()


def slot_totals(rows: Iterable[Cells]) -> dict[str, int]:
    """The sums of a slot's cells over all processes, named as in GET /keys."""
    cells = list(rows)

    def total(index: int) -> int:
        return sum(row[index] for row in cells)

    return {
        "in_flight": total(IN_FLIGHT),
        "requests": total(REQUESTS),
        "input_tokens": total(INPUT_TOKENS),
        "output_tokens": total(OUTPUT_TOKENS),
        **{
            f"refused_{reason}": total(REFUSED_REQUESTS + index)
            for index, reason in enumerate(REASONS)
        },
    }

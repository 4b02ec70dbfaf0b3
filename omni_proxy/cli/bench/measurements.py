"""Timings of requests, the figures computed from them, and their report as a table and a chart.

Only rich does I/O: it prints. Times are arguments, in seconds of one clock. Invariant: a failed
request counts as an error and in the denominator of the goodput, and in no statistic of times.
Percentiles are nearest-rank. Text from the server is printed without control characters.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

from omni_proxy.cli.terminal_text import NOTHING, printable
from omni_proxy.simulate.report import Bar, bars, spread_ms
from omni_proxy.upstream_http.event_stream import AnswerChunk, TokenUsage


class RequestTimes:
    """Timings of one request, updated while its answer arrives."""

    __slots__ = ("ended_at", "finished", "first_at", "gaps", "last_at", "sent_at", "text", "usage")

    def __init__(self, sent_at: float) -> None:
        self.sent_at = sent_at
        self.first_at: float | None = None  # arrival of the first generated output
        self.last_at = sent_at
        self.ended_at = sent_at
        self.gaps = array("d")  # between events with generated output
        self.finished = False
        self.usage: TokenUsage | None = None
        self.text: list[str] = []

    def add(self, chunk: AnswerChunk, now: float) -> None:
        """`now`: when the bytes that completed the event arrived."""
        if chunk.generated:
            if self.first_at is None:
                self.first_at = now
            else:
                self.gaps.append(now - self.last_at)
            self.last_at = now
            self.text.append(chunk.text)
        self.finished = self.finished or chunk.finished
        self.usage = chunk.usage or self.usage


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests whose first token arrived within the deadline; `share` is of all that ended."""

    deadline_ms: float
    share: float
    requests_per_sec: float


@dataclass(frozen=True, slots=True)
class BenchFigures:
    """Rates are per second of `duration_secs`; a statistic is None without a measurement."""

    requests: int  # that ended
    completed: int
    failed: int
    unfinished: int  # in flight when it was interrupted
    errors: Mapping[str, int]  # by kind
    error_examples: Mapping[str, str]  # the first of each kind
    duration_secs: float
    requests_per_sec: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None  # None: no response reported it
    without_usage: int  # completed, but without token counts
    input_tokens_per_sec: float
    output_tokens_per_sec: float
    first_token_ms: Mapping[str, float] | None
    between_tokens_ms: Mapping[str, float] | None
    between_events_ms: Mapping[str, float] | None
    total_ms: Mapping[str, float] | None
    sent_late_ms: Mapping[str, float] | None
    goodput: Goodput | None


@dataclass(slots=True)
class LoadMeasurements:
    """All requests of a run."""

    started_at: float
    started: int = 0
    completed: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    error_examples: dict[str, str] = field(default_factory=dict)
    usage: TokenUsage = field(default_factory=lambda: TokenUsage(0, 0))
    without_usage: int = 0
    _ended_at: float = 0.0
    _first: array[float] = field(default_factory=lambda: array("d"))
    _per_token: array[float] = field(default_factory=lambda: array("d"))
    _gaps: array[float] = field(default_factory=lambda: array("d"))
    _total: array[float] = field(default_factory=lambda: array("d"))
    _late: array[float] = field(default_factory=lambda: array("d"))

    @property
    def ended(self) -> int:
        return self.completed + self.errors.total()

    def begin(self, late_secs: float) -> None:
        """Count a request that is sent `late_secs` after its scheduled time."""
        self.started += 1
        self._late.append(max(0.0, late_secs))

    def fail(self, kind: str, example: str, now: float) -> None:
        self.errors[kind] += 1
        self.error_examples.setdefault(kind, example)
        self._ended_at = max(self._ended_at, now)

    def complete(self, times: RequestTimes) -> None:
        self.completed += 1
        self._ended_at = max(self._ended_at, times.ended_at)
        self._total.append(times.ended_at - times.sent_at)
        self._gaps.extend(times.gaps)
        if times.first_at is not None:
            self._first.append(times.first_at - times.sent_at)
        if times.usage is None:
            self.without_usage += 1
            return
        self.usage = _sum(self.usage, times.usage)
        # Events may hold several tokens each: the mean over the answer is per token.
        if times.first_at is not None and times.usage.output > 1:
            secs = times.last_at - times.first_at
            self._per_token.append(secs / (times.usage.output - 1))

    def figures(
        self, deadline_ms: float | None, interrupted_at: float | None = None
    ) -> BenchFigures:
        """The figures of all requests that ended. The run's duration ends with the last of them, or
        when it was interrupted."""
        end = interrupted_at if interrupted_at is not None else self._ended_at
        secs = max(end - self.started_at, 0.0)
        goodput = None
        if deadline_ms is not None:
            good = sum(first * 1000 <= deadline_ms for first in self._first)
            share = round(good / self.ended, 6) if self.ended else 0.0
            goodput = Goodput(deadline_ms, share, _rate(good, secs))
        return BenchFigures(
            requests=self.ended,
            completed=self.completed,
            failed=self.errors.total(),
            unfinished=self.started - self.ended,
            errors=dict(self.errors.most_common()),
            error_examples=self.error_examples,
            duration_secs=round(secs, 6),
            requests_per_sec=_rate(self.completed, secs),
            input_tokens=self.usage.input,
            output_tokens=self.usage.output,
            cached_tokens=self.usage.cached,
            without_usage=self.without_usage,
            input_tokens_per_sec=_rate(self.usage.input, secs),
            output_tokens_per_sec=_rate(self.usage.output, secs),
            first_token_ms=_spread(self._first),
            between_tokens_ms=_spread(self._per_token),
            between_events_ms=_spread(self._gaps),
            total_ms=_spread(self._total),
            sent_late_ms=_spread(self._late),
            goodput=goodput,
        )


def _sum(one: TokenUsage, other: TokenUsage) -> TokenUsage:
    cached = None
    if one.cached is not None or other.cached is not None:
        cached = (one.cached or 0) + (other.cached or 0)
    return TokenUsage(one.input + other.input, one.output + other.output, cached)


def _rate(number: int, secs: float) -> float:
    return round(number / secs, 6) if secs else 0.0


def _spread(secs: array[float]) -> dict[str, float] | None:
    return spread_ms(secs) if secs else None


_COLUMNS = ("mean", "p50", "p90", "p99")


def _spreads(figures: BenchFigures) -> Iterator[tuple[str, Mapping[str, float] | None]]:
    yield "time to first token", figures.first_token_ms
    yield "time between tokens", figures.between_tokens_ms
    yield "time between events", figures.between_events_ms
    yield "total time", figures.total_ms
    yield "sent late", figures.sent_late_ms


def print_figures(console: Console, heading: str, figures: BenchFigures) -> None:
    console.print(Text(printable(heading)))
    for line in summary_lines(figures):
        console.print(Text(line))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ms")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for name, spread in _spreads(figures):
        table.add_row(name, *(NOTHING if spread is None else _ms(spread[c]) for c in _COLUMNS))
    console.print(table)
    for kind, count in figures.errors.items():
        example = printable(figures.error_examples[kind])
        console.print(Text(f"{count} failed: {printable(kind)}: {example}", style="red"))


def summary_lines(figures: BenchFigures) -> Iterator[str]:
    """One fact a line."""
    unfinished = f", {figures.unfinished} unfinished" if figures.unfinished else ""
    yield (
        f"{figures.completed} of {figures.requests} requests completed{unfinished}, in "
        f"{figures.duration_secs:.1f} s: {figures.requests_per_sec:.2f} per second"
    )
    yield (
        f"tokens per second: {figures.input_tokens_per_sec:,.0f} in, "
        f"{figures.output_tokens_per_sec:,.0f} out ({figures.input_tokens:,} in, "
        f"{figures.output_tokens:,} out)"
    )
    if figures.without_usage:
        yield f"{figures.without_usage} responses had no usage: their tokens are not counted"
    if figures.cached_tokens is not None and figures.input_tokens:
        share = figures.cached_tokens / figures.input_tokens * 100
        yield f"prompt tokens found in caches: {figures.cached_tokens:,} ({share:.1f} %)"
    if figures.goodput is not None:
        good = figures.goodput
        yield (
            f"goodput: {good.share * 100:.1f} % had the first token within {good.deadline_ms:g} "
            f"ms, {good.requests_per_sec:.2f} per second"
        )


def draw(heading: str, figures: BenchFigures) -> str:
    """The text of an SVG file."""
    parts: list[tuple[str, list[Bar]]] = []
    for name, spread in _spreads(figures):
        if spread is not None:
            rows = [(column, spread[column], _ms(spread[column])) for column in _COLUMNS]
            parts.append((f"{name.capitalize()}, ms", rows))
    tokens = (
        ("in", figures.input_tokens_per_sec, f"{figures.input_tokens_per_sec:,.0f}"),
        ("out", figures.output_tokens_per_sec, f"{figures.output_tokens_per_sec:,.0f}"),
    )
    parts.append(("Tokens per second", list(tokens)))
    return bars(printable(heading), next(summary_lines(figures)), parts)


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"

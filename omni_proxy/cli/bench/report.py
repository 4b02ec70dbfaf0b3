"""Prints the figures of a load run as a table and draws them as a chart.

PURE except that rich prints. Text from the server is printed without control characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from omni_proxy.cli.bench.measurements import BenchFigures
from omni_proxy.cli.screen.text_table import NOTHING, printable
from omni_proxy.simulate.report import Bar, bars

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

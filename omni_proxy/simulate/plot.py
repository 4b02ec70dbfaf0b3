"""Figures as one SVG: bars with names and values as text, for example of several policies. Pure.

No scripts or embedded fonts; readable on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Final, TypeAlias

from omni_proxy.simulate.report import Run

Bar: TypeAlias = tuple[str, float, str]  # name, value, and the value as text

WIDTH: Final = 900
NAME_WIDTH: Final = 260
BAR_WIDTH: Final = 460
ROW: Final = 22
TOP: Final = 70
GAP: Final = 34
STYLE: Final = """\
  text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2933 }
  .title { font-size: 17px; font-weight: 600 }
  .part { font-weight: 600 }
  .name { text-anchor: end }
  rect { fill: #12817a }
  @media (prefers-color-scheme: dark) { text { fill: #e4e9ee } rect { fill: #35b3a6 } }"""

_PARTS: Final[tuple[tuple[str, Callable[[Run], float], str], ...]] = (
    ("Cache hit rate, %", lambda run: run.hit_rate * 100, "{:.1f}"),
    ("First token p50, ms", lambda run: run.ttft_ms["p50"], "{:,.0f}"),
    ("First token p99, ms", lambda run: run.ttft_ms["p99"], "{:,.0f}"),
    ("Total p99, ms", lambda run: run.total_ms["p99"], "{:,.0f}"),
    ("Requests of the busiest worker by the mean", lambda run: run.imbalance, "{:.2f}"),
)


def svg(title: str, note: str, runs: Sequence[Run]) -> str:
    """The figures of the runs: each part has one bar per run."""
    parts = []
    for name, read, form in _PARTS:
        values = [read(run) for run in runs]
        rows = [
            (name_of(run), value, form.format(value))
            for run, value in zip(runs, values, strict=True)
        ]
        parts.append((name, rows))
    return bars(title, note, parts)


def bars(title: str, note: str, parts: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """A complete SVG file. The longest bar of each part has the full width."""
    lines, y = [], TOP
    for part, rows in parts:
        longest = max((value for _, value, _ in rows), default=0.0) or 1.0
        lines.append(f'<text class="part" x="20" y="{y}">{escape(part)}</text>')
        for name, value, shown in rows:
            y += ROW
            length = max(1.0, BAR_WIDTH * value / longest)
            lines.append(
                f'<text class="name" x="{NAME_WIDTH}" y="{y}">{escape(name)}</text>'
                f'<rect x="{NAME_WIDTH + 12}" y="{y - 12}" width="{length:.1f}" height="15"/>'
                f'<text x="{NAME_WIDTH + 20 + length:.1f}" y="{y}">{escape(shown)}</text>'
            )
        y += GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{STYLE}\n</style>",
            f'<text class="title" x="20" y="28">{escape(title)}</text>',
            f'<text x="20" y="48">{escape(note)}</text>',
            *lines,
            "</svg>\n",
        ]
    )


def name_of(run: Run) -> str:
    """The policy with its swept values."""
    values = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in run.settings.items())
    return f"{run.policy} {values}".strip()

"""Results of simulations as figures: for a table, for JSON and for a picture. Pure.

Times are in milliseconds, rates are from 0 to 1. Percentiles use the nearest rank. The picture is
an SVG of bars with names and values as text, readable on light and dark pages, without a script or
a font.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from math import ceil
from typing import Final, TypeAlias

from omni_proxy.simulate.simulation import Simulation
from omni_proxy.simulate.workload import Facts

PERCENTILES: Final = (50, 90, 99)
MAX_FAILURES: Final = 5  # reasons that are shown


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one policy with one set of swept values. `ttft_ms`, `total_ms`: mean, p50, p90
    and p99."""

    policy: str
    settings: Mapping[str, object]
    requests: int
    completed: int
    failed: int
    retries: int
    hit_rate: float
    imbalance: float
    goodput_rps: float | None  # None without a deadline
    ttft_ms: Mapping[str, float]
    total_ms: Mapping[str, float]
    failures: Mapping[str, int] = field(default_factory=dict)  # count by reason


def summarize(
    policy: str,
    settings: Mapping[str, object],
    simulation: Simulation,
    deadline_ms: float | None,
) -> Run:
    """The figures of a finished simulation."""
    outcomes, engines = simulation.outcomes, list(simulation.engines.values())
    duration_secs = simulation.time.now
    seen = sum(engine.seen_blocks for engine in engines)
    sent = [engine.requests for engine in engines]
    goodput = None
    if deadline_ms is not None:
        in_time = sum(secs * 1000 <= deadline_ms for secs in outcomes.total_secs)
        goodput = round(in_time / duration_secs, 6) if duration_secs else 0.0
    return Run(
        policy=policy,
        settings=settings,
        requests=outcomes.completed + outcomes.failed,
        completed=outcomes.completed,
        failed=outcomes.failed,
        retries=outcomes.retries,
        hit_rate=round(sum(engine.found_blocks for engine in engines) / seen, 6) if seen else 0.0,
        imbalance=round(max(sent) * len(sent) / sum(sent), 4) if any(sent) else 1.0,
        goodput_rps=goodput,
        ttft_ms=spread_ms(outcomes.first_token_secs),
        total_ms=spread_ms(outcomes.total_secs),
        failures=dict(outcomes.failures),
    )


def spread_ms(secs: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles of times in seconds, in milliseconds; 0 without any."""
    ordered = sorted(secs)
    mean = sum(ordered) / len(ordered) if ordered else 0.0
    spread = {"mean": round(mean * 1000, 3)}
    for percent in PERCENTILES:
        spread[f"p{percent}"] = round(percentile(ordered, percent) * 1000, 3)
    return spread


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value such that `percent` of all values are at or below it; 0 without any."""
    if not ordered:
        return 0.0
    return ordered[max(0, ceil(len(ordered) * percent / 100) - 1)]


def as_json(seed: int, workers: int, facts: Facts, runs: Sequence[Run]) -> dict[str, object]:
    """One object; its keys are stable between releases."""
    return {
        "seed": seed,
        "workers": workers,
        "workload": {
            "requests": facts.requests,
            "mean_input_tokens": round(facts.mean_input_tokens, 3),
            "mean_output_tokens": round(facts.mean_output_tokens, 3),
            "duration_secs": round(facts.duration_secs, 3),
            "best_possible_hit_rate": round(facts.best_possible_hit_rate, 6),
        },
        "runs": [_without_failures(asdict(run)) for run in runs],
    }


def _without_failures(run: dict[str, object]) -> dict[str, object]:
    del run["failures"]
    return run


def notes(runs: Sequence[Run]) -> list[str]:
    """Lines below the table: why requests failed, and swept keys that had no effect."""
    failures: Counter[str] = Counter()
    for run in runs:
        failures.update(run.failures)
    lines = [f"failed: {count} {failure}" for failure, count in failures.most_common(MAX_FAILURES)]
    for key in runs[0].settings if runs else ():
        figures: dict[str, set[str]] = {}
        for run in runs:
            others = {name: value for name, value in run.settings.items() if name != key}
            figures.setdefault(f"{run.policy} {others}", set()).add(
                str(asdict(replace(run, settings={})))
            )
        if len({str(run.settings[key]) for run in runs}) > 1 and all(
            len(variants) == 1 for variants in figures.values()
        ):
            lines.append(f"no figure depends on {key} here")
    return lines


def table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of a table: one row for each run."""
    keys = list(runs[0].settings) if runs else []
    with_goodput = any(run.goodput_rps is not None for run in runs)
    head = [
        "POLICY", *(key.upper() for key in keys), "OK", "FAILED", "RETRIES", "HIT %", "BUSIEST",
        "TTFT p50", "p90", "p99", "TOTAL p50", "p90", "p99",
    ]  # fmt: skip
    rows = []
    for run in runs:
        row = [run.policy, *(_shown(run.settings[key]) for key in keys)]
        row += [f"{run.completed}", f"{run.failed}", f"{run.retries}", f"{run.hit_rate * 100:.1f}"]
        row.append(f"{run.imbalance:.2f}")
        for spread in (run.ttft_ms, run.total_ms):
            row += [_ms(spread[f"p{percent}"]) if run.completed else "-" for percent in PERCENTILES]
        if with_goodput:
            row.append(f"{run.goodput_rps or 0:.2f}")
        rows.append(row)
    return head + ["GOODPUT/s"] * with_goodput, rows


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


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

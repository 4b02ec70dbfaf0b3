"""Reports from event files: each request's time by stage and by hop between stages.

`omni-proxy replica profile SOURCE` prints a report as a table, JSON or a self-contained HTML page
(no script, no network; all text from events is escaped). Contract (note:api-server 4.3): tools
depend on names, order and rounding of the rows; a line that is not an event is reported on stderr
and skipped. Exit status: 0, also with skipped lines; 1 if the output cannot be written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Row = dict[str, Any]

# Intervals of a stage: opening event, closing event. Intervals close in the order in which they
# were opened; one event may open several intervals.
PAIRS = (
    ("stage_input_received", "stage_complete"),
    ("encoder_start", "encoder_end"),
    ("preprocess_start", "preprocess_end"),
    ("scheduler_request_build_start", "scheduler_request_build_end"),
    ("scheduler_request_build_end", "scheduler_queue_enter"),
    ("scheduler_queue_enter", "scheduler_prefill_start"),
    ("scheduler_prefill_start", "scheduler_prefill_end"),
    ("scheduler_prefill_end", "stage_complete"),
    ("scheduler_prefill_start", "stage_first_stream_chunk_sent"),
    ("scheduler_prefill_start", "scheduler_first_emit"),
    ("scheduler_first_emit", "stage_complete"),
)
_KEYS = ("request_id", "stage", "event_name", "timestamp_ns")
NS_PER_MS = 1_000_000


def read_events(source: Path, warn: Callable[[str], None]) -> list[Event]:
    """Read all events of one file, or of every `events_*.jsonl` of a folder, sorted by time."""
    events = []
    for path in _files(source, warn):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            warn(f"{path}: {error.strerror}")
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            event = _event(line)
            if event is None:
                warn(f"{path}:{number}: not an event, skipped")
            else:
                events.append(event)
    return sorted(events, key=lambda event: event["timestamp_ns"])


def build_report(events: Sequence[Event]) -> dict[str, Any]:
    """The whole report; times in ms."""
    return {
        "timelines": timelines(events),
        "stage_breakdown": stage_rows(events),
        "hop_breakdown": hop_rows(events),
        "request_count": len({event["request_id"] for event in events}),
    }


def timelines(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Each request's events, with the time since its first one."""
    by_request: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_request[event["request_id"]].append(event)
    return {
        request_id: [
            {**event, "t_rel_ms": _ms(event["timestamp_ns"] - request_events[0]["timestamp_ns"])}
            for event in request_events
        ]
        for request_id, request_events in by_request.items()
    }


def intervals(events: Sequence[Event]) -> Iterator[tuple[str, str, str, int, int]]:
    """Yield (request, stage, "open->close", opened, closed), times in ns."""
    waiting: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for event in events:
        where = (event["request_id"], event["stage"])
        for index, (opens, closes) in enumerate(PAIRS):
            if event["event_name"] == closes and waiting[*where, index]:
                opened = waiting[*where, index].pop(0)
                yield *where, f"{opens}->{closes}", opened, event["timestamp_ns"]
            if event["event_name"] == opens:
                waiting[*where, index].append(event["timestamp_ns"])


def stage_rows(events: Sequence[Event]) -> list[Row]:
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _, stage, interval, opened, closed in intervals(events):
        durations[stage, interval].append((closed - opened) / NS_PER_MS)
    rows = [
        {"stage": stage, "interval": interval, **_statistics(values)}
        for (stage, interval), values in durations.items()
    ]
    return sorted(rows, key=lambda row: (-row["total_ms"], row["stage"]))


def hop_rows(events: Sequence[Event]) -> list[Row]:
    durations: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for src, dst, kind, ms in hops(events):
        durations[src, dst, kind].append(ms)
    rows = [
        {"src": src, "dst": dst, "kind": kind, **_statistics(values)}
        for (src, dst, kind), values in durations.items()
    ]
    return sorted(rows, key=lambda row: (-row["total_ms"], row["src"], row["dst"]))


def hops(events: Sequence[Event]) -> Iterator[tuple[str, str, str, float]]:
    """Yield (from, to, kind, ms) of each message that one stage sent and another received."""
    payloads: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    chunks: dict[tuple[str, str, str, Any], int] = {}
    for event in events:
        name, request_id, stage = event["event_name"], event["request_id"], event["stage"]
        meta, timestamp_ns = event["metadata"], event["timestamp_ns"]
        from_stage = str(meta.get("from_stage", ""))
        match name:
            case "stage_hop_sent":
                payloads[request_id, stage, str(meta.get("to_stage"))].append(timestamp_ns)
            case "stage_input_received" if from_stage != "coordinator":
                if sent := payloads[request_id, from_stage, stage]:
                    yield from_stage, stage, "payload", (timestamp_ns - sent.pop(0)) / NS_PER_MS
            case "stage_stream_chunk_sent":
                to = str(meta.get("to_stage"))
                chunks[request_id, stage, to, meta.get("chunk_id")] = timestamp_ns
            case "stage_stream_chunk_received" | "coordinator_stream_received":
                to = stage if name.startswith("stage") else "coordinator"
                sent_at = chunks.pop((request_id, from_stage, to, meta.get("chunk_id")), None)
                if sent_at is not None:
                    yield from_stage, to, "stream_chunk", (timestamp_ns - sent_at) / NS_PER_MS


def render_table(summary: Mapping[str, Any]) -> str:
    stage = ("stage", "interval", "count", "total_ms", "avg_ms", "p95_ms")
    hop = ("src", "dst", "kind", "count", "total_ms", "avg_ms", "p95_ms")
    return "\n".join(
        (
            f"# Requests: {summary['request_count']}",
            "",
            "## Stage breakdown",
            *_lines(stage, summary["stage_breakdown"]),
            "",
            "## Hop breakdown",
            *_lines(hop, summary["hop_breakdown"]),
        )
    )


def _lines(columns: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        yield "(empty)"
        return
    cells = [columns, *([str(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for number, line in enumerate(cells):
        yield " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        if number == 0:
            yield "-+-".join("-" * width for width in widths)


def _statistics(values: Sequence[float]) -> Row:
    ordered = sorted(values)
    total = sum(ordered)
    return {
        "count": len(ordered),
        "total_ms": round(total, 3),
        "avg_ms": round(total / len(ordered), 3),
        "p50_ms": round(_percentile(ordered, 0.5), 3),
        "p95_ms": round(_percentile(ordered, 0.95), 3),
        "max_ms": round(ordered[-1], 3),
    }


def _percentile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the two ranks around (n-1)q."""
    rank = (len(ordered) - 1) * q
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def _ms(ns: int) -> float:
    return round(ns / NS_PER_MS, 3)


def _files(source: Path, warn: Callable[[str], None]) -> Iterable[Path]:
    if source.is_dir():
        return sorted(source.glob("events_*.jsonl"))
    if not source.exists():
        warn(f"{source}: no such file or folder")
        return ()
    return (source,)


def _event(line: str) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or any(key not in event for key in _KEYS):
        return None
    if not isinstance(event["timestamp_ns"], int) or isinstance(event["timestamp_ns"], bool):
        return None
    if not all(isinstance(event[key], str) for key in _KEYS[:3]):
        return None
    if not isinstance(event.setdefault("metadata", {}), dict):
        return None
    return event


SHOWN_REQUESTS = 200
HUES = (210, 150, 30, 280, 350, 180, 60, 240)

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --paper: #fff; --line: #d8dde6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --paper: #14171d; --line: #333a47; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 2rem auto; max-width: 1200px; padding: 0 1rem; }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin-top: 2rem }
.stage-row { position: relative; height: 18px; border-bottom: 1px solid var(--line); }
.stage-row b { position: absolute; top: 2px; height: 14px; min-width: 2px; border-radius: 2px; }
.request { margin: 1rem 0 } .request code { font-size: .85rem }
.name { display: inline-block; width: 9rem; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; vertical-align: top; font-size: .85rem }
.track { display: inline-block; width: calc(100% - 9.5rem); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line) }
td.n, th.n { text-align: right }
.scroll { overflow-x: auto }
"""


def render_page(summary: Mapping[str, Any], title: str) -> str:
    requests: Mapping[str, Sequence[Event]] = summary["timelines"]
    shown = list(requests.items())[:SHOWN_REQUESTS]
    more = len(requests) - len(shown)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Profile of {escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{summary['request_count']} requests</h1><p>{escape(title)}</p>",
        "<h2>Timelines</h2><p>Hover over a bar for its interval and its duration.</p>",
        *(_request(request_id, events) for request_id, events in shown),
        f"<p>{more} more requests are not shown.</p>" if more > 0 else "",
        "<h2>Stages</h2>",
        _table(summary["stage_breakdown"]),
        "<h2>Hops</h2>",
        _table(summary["hop_breakdown"]),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part)


def _request(request_id: str, events: Sequence[Event]) -> str:
    start, end = events[0]["timestamp_ns"], events[-1]["timestamp_ns"]
    span = max(1, end - start)
    stages = list(dict.fromkeys(event["stage"] for event in events))
    lanes = [
        f'<div class="stage-row"><span class="name">{escape(stage)}</span>'
        f'<span class="track">{"".join(_bars(events, stage, start, span))}</span></div>'
        for stage in stages
    ]
    heading = f"<code>{escape(request_id)}</code> {span / NS_PER_MS:.1f} ms"
    return f'<section class="request"><div>{heading}</div>{"".join(lanes)}</section>'


def _bars(events: Sequence[Event], stage: str, start: int, span: int) -> Iterator[str]:
    for _, interval_stage, interval, opened, closed in intervals(events):
        if interval_stage == stage:
            left, width = (opened - start) * 100 / span, (closed - opened) * 100 / span
            label = escape(f"{interval}: {(closed - opened) / NS_PER_MS:.3f} ms", quote=True)
            yield _bar(f"left:calc(9.5rem + (100% - 9.5rem) * {left / 100:.5f})", width, label)


def _bar(left: str, width: float, label: str) -> str:
    hue = HUES[sum(label.partition(":")[0].encode()) % len(HUES)]
    size = f"width:calc((100% - 9.5rem) * {width / 100:.5f})"
    style = f"{left};{size};background:hsl({hue} 60% 50% / .55)"
    return f'<b style="{style}" title="{label}"></b>'


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "<p>none</p>"
    names = list(rows[0])
    numeric = {name for name in names if isinstance(rows[0][name], int | float)}
    head = "".join(f'<th class="{"n" if n in numeric else ""}">{escape(n)}</th>' for n in names)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{"n" if n in numeric else ""}">{escape(_cell_text(row[n]))}</td>'
            for n in names
        )
        + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _cell_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    events = read_events(arguments.source, _print_error)
    summary = build_report(events)
    if arguments.format == "json":
        text = json.dumps(summary, indent=2)
    elif arguments.format == "html":
        text = render_page(summary, str(arguments.source))
    else:
        text = render_table(summary)
    if arguments.out == "-":
        sys.stdout.write(text + "\n")
        return 0
    try:
        Path(arguments.out).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        _print_error(f"cannot write {arguments.out}: {error.strerror}")
        return 1
    _print_error(f"{summary['request_count']} requests written to {arguments.out}")
    return 0


def _print_error(text: str) -> None:
    sys.stderr.write(f"omni-proxy replica profile: {text}\n")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-proxy replica profile",
        description="Report the time of recorded requests by stage and by hop between stages.",
        epilog="Events are recorded between POST /start_request_profile and /stop_request_profile "
        "of a replica.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", metavar="SOURCE", type=Path, help="a file of events, or a folder of such files"
    )
    parser.add_argument("--format", choices=["table", "json", "html"], default="table")
    parser.add_argument("--out", metavar="PATH", default="-", help="a file; - is stdout (default)")
    return parser

"""Reports from event files: where each request's time went, by stage and by hop between stages.

Pure but for `read_events`. Contract (api-server.md 4.3): names, order and rounding of the rows are
what tools read; a line that is not an event is reported and skipped.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Row = dict[str, Any]

# Intervals of a stage: opening event, closing event. First opened, first closed; one event may open
# several intervals.
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
    """Yield (from, to, kind, ms) of everything that one stage sent and another received."""
    payloads: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    chunks: dict[tuple[str, str, str, Any], int] = {}
    for event in events:
        name, request_id, stage = event["event_name"], event["request_id"], event["stage"]
        meta, at = event["metadata"], event["timestamp_ns"]
        from_stage = str(meta.get("from_stage", ""))
        match name:
            case "stage_hop_sent":
                payloads[request_id, stage, str(meta.get("to_stage"))].append(at)
            case "stage_input_received" if from_stage != "coordinator":
                if sent := payloads[request_id, from_stage, stage]:
                    yield from_stage, stage, "payload", (at - sent.pop(0)) / NS_PER_MS
            case "stage_stream_chunk_sent":
                to = str(meta.get("to_stage"))
                chunks[request_id, stage, to, meta.get("chunk_id")] = at
            case "stage_stream_chunk_received" | "coordinator_stream_received":
                to = stage if name.startswith("stage") else "coordinator"
                sent_at = chunks.pop((request_id, from_stage, to, meta.get("chunk_id")), None)
                if sent_at is not None:
                    yield from_stage, to, "stream_chunk", (at - sent_at) / NS_PER_MS


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

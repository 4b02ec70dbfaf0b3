"""Reports out of event files: where each request's time went, stage by stage and hop by hop.

Pure but for `read_events`. Contract (api-server.md 4.3): names, order and rounding of the rows are
what tools read; a line that is no event is told about and skipped.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Row = dict[str, Any]

# An interval of a stage: what opens it, what closes it. First opened, first closed; one opener may
# open several.
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
    """All events of one file, or of every `events_*.jsonl` of a folder, by time."""
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
    found: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        found[event["request_id"]].append(event)
    return {
        request_id: [
            {**event, "t_rel_ms": _ms(event["timestamp_ns"] - each[0]["timestamp_ns"])}
            for event in each
        ]
        for request_id, each in found.items()
    }


def intervals(events: Sequence[Event]) -> Iterator[tuple[str, str, str, int, int]]:
    """(request, stage, "open->close", opened, closed), times in ns."""
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
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _, stage, interval, opened, closed in intervals(events):
        found[stage, interval].append((closed - opened) / NS_PER_MS)
    rows = [
        {"stage": stage, "interval": interval, **_figures(each)}
        for (stage, interval), each in found.items()
    ]
    return sorted(rows, key=lambda row: (-row["total_ms"], row["stage"]))


def hop_rows(events: Sequence[Event]) -> list[Row]:
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for src, dst, kind, ms in hops(events):
        found[src, dst, kind].append(ms)
    rows = [
        {"src": src, "dst": dst, "kind": kind, **_figures(each)}
        for (src, dst, kind), each in found.items()
    ]
    return sorted(rows, key=lambda row: (-row["total_ms"], row["src"], row["dst"]))


def hops(events: Sequence[Event]) -> Iterator[tuple[str, str, str, float]]:
    """(from, to, kind, ms) of everything that one stage sent and another received."""
    payloads: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    chunks: dict[tuple[str, str, str, Any], int] = {}
    for event in events:
        name, request_id, stage = event["event_name"], event["request_id"], event["stage"]
        meta, at = event["metadata"], event["timestamp_ns"]
        came_from = str(meta.get("from_stage", ""))
        match name:
            case "stage_hop_sent":
                payloads[request_id, stage, str(meta.get("to_stage"))].append(at)
            case "stage_input_received" if came_from != "coordinator":
                if sent := payloads[request_id, came_from, stage]:
                    yield came_from, stage, "payload", (at - sent.pop(0)) / NS_PER_MS
            case "stage_stream_chunk_sent":
                to = str(meta.get("to_stage"))
                chunks[request_id, stage, to, meta.get("chunk_id")] = at
            case "stage_stream_chunk_received" | "coordinator_stream_received":
                to = stage if name.startswith("stage") else "coordinator"
                begun = chunks.pop((request_id, came_from, to, meta.get("chunk_id")), None)
                if begun is not None:
                    yield came_from, to, "stream_chunk", (at - begun) / NS_PER_MS


def render_table(made: Mapping[str, Any]) -> str:
    stage = ("stage", "interval", "count", "total_ms", "avg_ms", "p95_ms")
    hop = ("src", "dst", "kind", "count", "total_ms", "avg_ms", "p95_ms")
    return "\n".join(
        (
            f"# Requests: {made['request_count']}",
            "",
            "## Stage breakdown",
            *_lines(stage, made["stage_breakdown"]),
            "",
            "## Hop breakdown",
            *_lines(hop, made["hop_breakdown"]),
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


def _figures(each: Sequence[float]) -> Row:
    ordered = sorted(each)
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
    """Linear between the two ranks that (n-1)q lies between."""
    place = (len(ordered) - 1) * q
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


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

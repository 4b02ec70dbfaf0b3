"""The report as one HTML page: a bar per interval, a row per request.

Self-contained: no script and no network. Everything from events is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from omni_proxy.replica.profiling.report import NS_PER_MS, Event, intervals

SHOWN_REQUESTS = 200
HUES = (210, 150, 30, 280, 350, 180, 60, 240)

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --paper: #fff; --line: #d8dde6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --paper: #14171d; --line: #333a47; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 2rem auto; max-width: 1200px; padding: 0 1rem; }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin-top: 2rem }
.lane { position: relative; height: 18px; border-bottom: 1px solid var(--line); }
.lane b { position: absolute; top: 2px; height: 14px; min-width: 2px; border-radius: 2px; }
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
        "<h2>Timelines</h2><p>Point at a bar for its interval and its length.</p>",
        *(_request(request_id, events) for request_id, events in shown),
        f"<p>{more} more requests are not drawn.</p>" if more > 0 else "",
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
        f'<div class="lane"><span class="name">{escape(stage)}</span>'
        f'<span class="track">{"".join(_bars(events, stage, start, span))}</span></div>'
        for stage in stages
    ]
    heading = f"<code>{escape(request_id)}</code> {span / NS_PER_MS:.1f} ms"
    return f'<section class="request"><div>{heading}</div>{"".join(lanes)}</section>'


def _bars(events: Sequence[Event], stage: str, start: int, span: int) -> Iterator[str]:
    for _, at, interval, opened, closed in intervals(events):
        if at == stage:
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

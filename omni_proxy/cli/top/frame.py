"""One frame of `omni-proxy top` as lines of styled text.

PURE. Invariant: exactly `height` lines of at most `width` columns where a height is given; colour
repeats what a word says already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from textwrap import wrap
from typing import Final

from rich.text import Text

from omni_proxy.cli.screen.diagnosis import (
    FAILING,
    LEAVING,
    OUT,
    SLOW,
    WELL,
    Diagnosis,
    describe_reload,
    describe_weights,
)
from omni_proxy.cli.screen.feed_model import FeedModel, FinishedRequest, FleetRow, HistoryPoint
from omni_proxy.cli.screen.fleet_table import fleet_table
from omni_proxy.cli.screen.text_table import (
    NOTHING,
    display_width,
    format_age,
    format_millis,
    parse_time,
    printable,
    truncate,
)
from omni_proxy.cli.status import (
    describe_fleet,
    describe_requests,
    describe_versions,
    headline,
    paused_lines,
)
from omni_proxy.cli.top.follower import FeedStatus
from omni_proxy.cli.top.view import ORDERS, TopView

STYLES: Final = {OUT: "bold red", FAILING: "red", SLOW: "yellow", LEAVING: "cyan", WELL: ""}
KEYS: Final = "q quit  ↑↓ row  ←→ sort  r reverse  o trouble  d/e off/on  D drain  v revive"
_LEAST_WHY: Final = 12  # columns; less of a reason tells nothing
FEW_ROWS: Final = 4  # are worth more than what stands below them
_ABOUT_LINES: Final = 4  # on the chosen worker, what is said, the keys
_BARS: Final = "▁▂▃▄▅▆▇█"
_SPARK_LABEL: Final = 28  # columns beside a spark line
_GOOD_ENDS: Final = frozenset(("completed", "client_disconnected", "stream_cancelled"))

Line = tuple[str, str]  # text and its style


def render_frame(
    view: TopView, heard: FeedStatus, url: str, width: int, height: int | None = None
) -> Text:
    """Without a height: every row, and nothing about keys."""
    if view.feed is None:
        lines: list[Line] = [(f"omni-proxy at {printable(url)}", "bold")]
        lines += [(line, "bold red") for line in wrap(_link(heard), max(1, width))]
        return _joined([*lines, ("q quit", "dim")], width, height)
    head = list(_head(view.feed, heard, url, width))
    tail = [] if height is None else list(_tail(view, height, len(head)))
    if height is not None:
        few = min(FEW_ROWS, max(1, len(view.rows)))
        _make_room(head, tail, height - 1 - few)
        view.fit(height - len(head) - len(tail) - 1)
    else:
        view.fit(len(view.rows))
    body = list(_body(view, width))
    if height is not None:
        body += [("", "")] * (height - len(head) - len(body) - len(tail))
    return _joined([*head, *body, *tail], width, height)


def _make_room(head: list[Line], tail: list[Line], lines: int) -> None:
    """So many are left for both: what matters least goes first, at last the keys."""
    for above, below in ((len(head), 2), (2, 2), (2, 1), (1, 1)):
        while len(tail) > below and len(head) + len(tail) > lines:
            tail.pop(0)
        while len(head) > above and len(head) + len(tail) > lines:
            head.pop()


def _joined(lines: Sequence[Line], width: int, height: int | None) -> Text:
    lines = lines if height is None else list(lines)[:height]
    joined = Text(no_wrap=True, overflow="crop", end="")
    for at, (text, style) in enumerate(lines):
        text = truncate(text, width)
        if "reverse" in style:  # a bar from edge to edge
            text += " " * (width - display_width(text))
        joined.append(text + ("" if at == len(lines) - 1 else "\n"), style or None)
    return joined


def _link(heard: FeedStatus) -> str:
    return f"NO CONNECTION, trying again: {printable(heard.lost)}"


def _head(feed: FeedModel, heard: FeedStatus, url: str, width: int) -> Iterator[Line]:
    now = parse_time(feed.at)
    clock = now.astimezone().strftime("%H:%M:%S") if now else ""
    first = headline(feed, url, width)
    gap = " " * (width - display_width(first) - len(clock))
    yield (
        f"{first}{gap}{clock}" if len(gap) > 1 else first,
        "bold green" if feed.ready and not feed.leaving else "bold red",
    )
    if heard.lost:
        yield f"OLD PICTURE, {format_age(heard.secs_ago)}. {_link(heard)}", "bold red reverse"
    if versions := describe_versions(feed):
        yield f"version   {versions}", "yellow"
    for line in paused_lines(feed):
        lines = wrap(f"PAUSED    {line}", max(20, width), subsequent_indent=" " * 10)
        yield from ((part, "bold red reverse") for part in lines[:2])  # the second says by whom
    yield f"workers   {describe_fleet(feed.fleet)}", ""
    yield f"requests  {describe_requests(feed, heard.history)}", ""
    if feed.metrics:
        yield _sparks(heard.history, width), ""
    reload = feed.last_reload or {}
    policy = printable(feed.policy.get("name", NOTHING))
    up = f"up {format_age(feed.uptime_secs)}, revision {feed.revision}, policy {policy}"
    yield f"process   {up}, {printable(feed.config_file or 'no file')}", ""
    yield f"reload    {describe_reload(reload, now)}", "red" if reload.get("error") else ""
    if weights := describe_weights(feed):
        yield f"weights   {weights}", ""


def _sparks(history: Sequence[HistoryPoint], width: int) -> str:
    """Requests per second and the slowest first chunks, the newest second at the right."""
    room = max(5, (width - 10 - _SPARK_LABEL) // 2)
    points = history[-room:]
    rates = sparkline([float(point.requests) for point in points])
    slowest = sparkline([point.first_p99_ms for point in points])
    last = points[-1] if points else HistoryPoint(at=0)
    worst = next((p.first_p99_ms for p in reversed(points) if p.first_p99_ms is not None), None)
    return f"          {rates} {last.requests}/s   {slowest} p99 {format_millis(worst)}"


def sparkline(values: Sequence[float | None]) -> str:
    """One bar per value between 0 and the greatest; a dot where there is none."""
    greatest = max((value for value in values if value is not None), default=0.0)
    bars = []
    for value in values:
        if value is None:
            bars.append("·")
        else:
            share = max(0.0, value / greatest) if greatest > 0 else 0.0
            # The lowest bar is nothing at all: a little is to be seen beside it.
            bars.append(_BARS[ceil(share * (len(_BARS) - 1))])
    return "".join(bars)


def _body(view: TopView, width: int) -> Iterator[Line]:
    name, _, greatest_first = ORDERS[view.order]
    mark = "▼" if greatest_first is not view.turned else "▲"
    # All rows, not only those on the screen: columns must not jump while one scrolls.
    table = fleet_table(view.rows, view.verdicts, width, name, mark)
    title, *lines = _with_reasons(table, [view.verdicts[row.id] for row in view.rows], width)
    yield title, "bold reverse"
    if not view.rows:
        none = "no worker is in trouble (o shows all)" if view.trouble_only else "no workers"
        yield none, "dim"
    shown = zip(view.rows, lines, strict=True)
    for at, (row, line) in enumerate(shown):
        if view.first <= at < view.first + view.room:
            style = STYLES[view.verdicts[row.id].kind]
            yield line, f"{style} reverse".strip() if row.id == view.chosen else style


def _with_reasons(table: list[str], verdicts: Sequence[Diagnosis], width: int) -> list[str]:
    """Beside each row what is the matter with it, as far as there is room."""
    edge = max(map(display_width, table)) + 2
    if width - edge < _LEAST_WHY or not any(verdict.said for verdict in verdicts):
        return table
    reasons = ["WHY", *(_reason(verdict) for verdict in verdicts)]
    return [
        f"{line}{' ' * (edge - display_width(line))}{reason}".rstrip()
        for line, reason in zip(table, reasons, strict=True)
    ]


def _reason(verdict: Diagnosis) -> str:
    """Without what its state says already."""
    return verdict.said.removeprefix("is ").removeprefix(f"{verdict.state}: ")


def _tail(view: TopView, height: int, above: int) -> Iterator[Line]:
    """From what matters least to what matters most: the first lines go where there is no room."""
    assert view.feed is not None
    bad = [end for end in view.feed.recent_ends if end.end not in _GOOD_ENDS or end.status >= 500]
    spare = height - above - len(view.rows) - _ABOUT_LINES - 3
    for end in reversed(bad[: max(1, height // 8, spare)]):
        yield _end_words(end), "dim"
    if view.row is not None:
        yield from _about(view.row, view)
    place = f"{view.at + 1}/{len(view.rows)}" if view.rows else ""
    yield f"{KEYS}  {place}", "dim"
    if view.asking is not None:
        wish = view.asking
        yield (
            f"{wish.name} {printable(wish.called)}?  y: yes, any other key: no",
            "bold yellow reverse",
        )
    else:
        yield printable(view.said), "bold"


def _about(row: FleetRow, view: TopView) -> Iterator[Line]:
    verdict = view.verdicts[row.id]
    said = verdict.said or "takes requests"
    yield f"> {printable(row.name)} {said}", STYLES[verdict.kind]
    model = f"model {printable(row.model)}, " if row.model else ""
    served = f"{row.routed} sent, {row.failed} failed"
    weights = f"weights {printable(row.weight_version or NOTHING)} (epoch {row.weight_epoch})"
    launch = row.launch or {}
    process = f" as process {launch.get('pid')}, {launch.get('restarts', 0)} restarts"
    place = f"from {printable(row.origin)}{process if launch else ''}"
    yield f"  {model}{served}, {weights}, {place}", ""


def _end_words(end: FinishedRequest) -> str:
    at = parse_time(end.at)
    clock = at.astimezone().strftime("%H:%M:%S") if at else ""
    worker = printable((end.worker or NOTHING).partition("://")[2] or NOTHING)
    error = f" {printable(end.error)}" if end.error else ""
    model = f" {printable(end.model)}" if end.model else ""
    words = (
        f"{end.status or '---'} {printable(end.route)}{model} {worker} {printable(end.end)}{error}"
    )
    return f"{clock} {words} after {format_millis(end.total_ms)}"

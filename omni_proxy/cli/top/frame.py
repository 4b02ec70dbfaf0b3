"""One frame of `omni-proxy top` as lines of styled text.

Pure. Invariant: exactly `height` lines of at most `width` columns if a height is given; colour only
repeats what a word states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from textwrap import wrap
from typing import Final

from rich.text import Text

from omni_proxy.cli.client.feed_model import FeedModel, FinishedRequest, FleetRow, HistoryPoint
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
from omni_proxy.cli.screen.fleet_table import fleet_table
from omni_proxy.cli.status import (
    describe_fleet,
    describe_requests,
    describe_versions,
    headline,
    paused_lines,
)
from omni_proxy.cli.terminal_text import (
    NOTHING,
    display_width,
    format_age,
    format_millis,
    parse_time,
    printable,
    truncate,
)
from omni_proxy.cli.top.follower import FeedStatus
from omni_proxy.cli.top.view import ORDERS, TopView

STYLES: Final = {OUT: "bold red", FAILING: "red", SLOW: "yellow", LEAVING: "cyan", WELL: ""}
# A narrow screen shows only the first ones.
KEYS: Final = (
    "q quit", "? help", "/ search", "d/e off/on", "D drain", "v revive", "o trouble",
    "←→ sort", "r reverse", "↑↓ row",
)  # fmt: skip
HELP: Final = (
    ("q, Ctrl-C", "quit"),
    ("↑ ↓ k j", "select a worker; also PgUp, PgDn, Home, End, and the wheel"),
    ("← →", "sort by another column; also a click on its title"),
    ("r", "reverse the order"),
    ("/", "search in name, URL, model, role, state, weights; Esc ends it"),
    ("o", "only workers with problems"),
    ("d e", "disable, enable the selected worker"),
    ("D", "drain it: no new requests, running ones complete"),
    ("v", "revive it: a dead worker is probed again"),
    ("y", "confirm; any other key cancels"),
)
UNLIMITED: Final = 1 << 16  # columns; no line is wider
_WHY_WIDTH: Final = 30  # columns that a wide table leaves for the WHY column
_MIN_WHY_WIDTH: Final = 12  # columns; a shorter reason is useless
FEW_ROWS: Final = 4  # rows that have priority over the lines below the table
_ABOUT_LINES: Final = 4  # the selected worker, the message, the keys
_BARS: Final = "▁▂▃▄▅▆▇█"
_SPARK_LABEL: Final = 36  # columns next to the spark lines
_GOOD_ENDS: Final = frozenset(("completed", "client_disconnected", "stream_cancelled"))

Line = tuple[str, str]  # text and its style


def render_frame(
    view: TopView, feed_status: FeedStatus, url: str, width: int, height: int | None = None
) -> Text:
    """The frame; without a height all rows, and no line of keys."""
    if view.feed is None:
        lines: list[Line] = [(f"omni-proxy at {printable(url)}", "bold")]
        lines += [(line, "bold red") for line in wrap(_link(feed_status), max(1, width))]
        return _joined([*lines, ("q quit", "dim")], width, height)
    if view.help_open and height is not None:
        return _joined(_help(view, feed_status, url, width, height), width, height)
    head = list(_head(view.feed, feed_status, url, width))
    tail = [] if height is None else list(_tail(view, width, height, len(head)))
    if height is not None:
        few = min(FEW_ROWS, max(1, len(view.rows)))
        _fit_height(head, tail, height - 1 - few)
        view.set_page_rows(height - len(head) - len(tail) - 1)
    else:
        view.set_page_rows(len(view.rows))
    widest = UNLIMITED if view.unlimited_width else width
    body = list(_body(view, widest))
    view.title, view.title_line = body[0][0], len(head)
    if height is not None:
        body += [("", "")] * (height - len(head) - len(body) - len(tail))
    if view.unlimited_width:
        widest = max(width, *(display_width(text) for text, _ in (*head, *body, *tail)))
    return _joined([*head, *body, *tail], widest, height)


def _fit_height(head: list[Line], tail: list[Line], lines: int) -> None:
    """Shorten both to `lines` together: the least important lines first, the keys last."""
    for above, below in ((len(head), 2), (2, 2), (2, 1), (1, 1)):
        while len(tail) > below and len(head) + len(tail) > lines:
            tail.pop(0)
        while len(head) > above and len(head) + len(tail) > lines:
            head.pop()


def _joined(lines: Sequence[Line], width: int, height: int | None) -> Text:
    lines = lines if height is None else list(lines)[:height]
    joined = Text(no_wrap=True, overflow="crop", end="")
    for index, (text, style) in enumerate(lines):
        text = truncate(text, width)
        if "reverse" in style:  # a bar from edge to edge
            text += " " * (width - display_width(text))
        joined.append(text + ("" if index == len(lines) - 1 else "\n"), style or None)
    return joined


def _help(view: TopView, feed_status: FeedStatus, url: str, width: int, height: int) -> list[Line]:
    assert view.feed is not None
    lines = [next(_head(view.feed, feed_status, url, width)), ("", "")]
    for keys, meaning in HELP:
        wrapped = wrap(meaning, max(10, width - 12))
        lines.append((f"  {keys:9} {wrapped[0]}", ""))
        lines += [(f"{' ' * 12}{more}", "") for more in wrapped[1:]]
    lines += [("", ""), ("any key goes back", "dim")]
    blank = [("", "")] * (height - len(lines))
    return [*lines, *blank] if height >= len(lines) else [*lines[: height - 1], lines[-1]]


def _key_line(width: int, position: str) -> str:
    """The line of keys: as many as fit next to the position."""
    shown: list[str] = []
    for key in KEYS:
        if display_width("  ".join((*shown, key, position))) > width and shown:
            break
        shown.append(key)
    return "  ".join((*shown, position))


def _link(feed_status: FeedStatus) -> str:
    return f"NOT CONNECTED, retrying: {printable(feed_status.lost)}"


def _head(feed: FeedModel, feed_status: FeedStatus, url: str, width: int) -> Iterator[Line]:
    now = parse_time(feed.at)
    clock = now.astimezone().strftime("%H:%M:%S") if now else ""
    first = headline(feed, url, width)
    gap = " " * (width - display_width(first) - len(clock))
    yield (
        f"{first}{gap}{clock}" if len(gap) > 1 else first,
        "bold green" if feed.ready and not feed.leaving else "bold red",
    )
    if feed_status.lost:
        yield f"STALE, {format_age(feed_status.secs_ago)}. {_link(feed_status)}", "bold red reverse"
    if versions := describe_versions(feed):
        yield f"version   {versions}", "yellow"
    for line in paused_lines(feed):
        lines = wrap(f"PAUSED    {line}", max(20, width), subsequent_indent=" " * 10)
        yield from ((part, "bold red reverse") for part in lines[:2])  # the second names the caller
    yield f"workers   {describe_fleet(feed.fleet)}", ""
    yield f"requests  {describe_requests(feed, feed_status.history)}", ""
    if feed.metrics:
        yield _sparks(feed_status.history, width), ""
    reload = feed.last_reload or {}
    policy = printable(feed.policy.get("name", NOTHING))
    up = f"up {format_age(feed.uptime_secs)}, revision {feed.revision}, policy {policy}"
    yield f"process   {up}, {printable(feed.config_file or 'no file')}", ""
    yield f"reload    {describe_reload(reload, now)}", "red" if reload.get("error") else ""
    if weights := describe_weights(feed):
        yield f"weights   {weights}", ""


def _sparks(history: Sequence[HistoryPoint], width: int) -> str:
    """Requests per second and the slowest first chunks, the newest second at the right."""
    bars = max(5, (width - 10 - _SPARK_LABEL) // 2)
    points = history[-bars:]
    rates = sparkline([float(point.requests) for point in points])
    slowest = sparkline([point.first_p99_ms for point in points])
    last = points[-1] if points else HistoryPoint(at=0)
    worst = next((p.first_p99_ms for p in reversed(points) if p.first_p99_ms is not None), None)
    return f"          {rates} {last.requests}/s   {slowest} p99 of 1 s: {format_millis(worst)}"


def sparkline(values: Sequence[float | None]) -> str:
    """One bar per value between 0 and the greatest; a dot for a missing value."""
    greatest = max((value for value in values if value is not None), default=0.0)
    bars = []
    for value in values:
        if value is None:
            bars.append("·")
        else:
            share = max(0.0, value / greatest) if greatest > 0 else 0.0
            # The lowest bar means 0: any other value gets a higher one.
            bars.append(_BARS[ceil(share * (len(_BARS) - 1))])
    return "".join(bars)


def _body(view: TopView, width: int) -> Iterator[Line]:
    name, _, greatest_first = ORDERS[view.order]
    sort_mark = "▼" if greatest_first is not view.reversed else "▲"
    # All rows, not only the visible ones: columns must not jump while scrolling.
    table = fleet_table(view.rows, view.verdicts, width, (name, sort_mark), _WHY_WIDTH)
    title, *lines = _with_reasons(table, [view.verdicts[row.id] for row in view.rows], width)
    yield title, "bold reverse"
    if not view.rows:
        none = "no worker has problems (o shows all)" if view.problems_only else "no workers"
        if view.search:
            none = f"no worker matches {printable(view.search)} (Esc shows all)"
        yield none, "dim"
    pairs = zip(view.rows, lines, strict=True)
    for index, (row, line) in enumerate(pairs):
        if view.first <= index < view.first + view.page_rows:
            style = STYLES[view.verdicts[row.id].kind]
            yield line, f"{style} reverse".strip() if row.id == view.selected else style


def _with_reasons(table: list[str], verdicts: Sequence[Diagnosis], width: int) -> list[str]:
    """The table with each row's problem appended, if there is enough width."""
    edge = max(map(display_width, table)) + 2
    if width - edge < _MIN_WHY_WIDTH or not any(verdict.problem for verdict in verdicts):
        return table
    reasons = ["WHY", *(_reason(verdict) for verdict in verdicts)]
    return [
        f"{line}{' ' * (edge - display_width(line))}{reason}".rstrip()
        for line, reason in zip(table, reasons, strict=True)
    ]


def _reason(verdict: Diagnosis) -> str:
    """The problem without its state, which has a column."""
    return verdict.problem.removeprefix("is ").removeprefix(f"{verdict.state}: ")


def _tail(view: TopView, width: int, height: int, above: int) -> Iterator[Line]:
    """Lines by increasing importance: the first ones are dropped on a low screen."""
    assert view.feed is not None
    failed = [
        end for end in view.feed.recent_ends if end.end not in _GOOD_ENDS or end.status >= 500
    ]
    spare = height - above - len(view.rows) - _ABOUT_LINES - 3
    for end in reversed(failed[: max(1, height // 8, spare)]):
        yield _describe_end(end), "dim"
    if view.row is not None:
        yield from _about(view.row, view)
    position = f"{view.index + 1}/{len(view.rows)}" if view.rows else ""
    hidden = len(view.feed.fleet) - len(view.rows)
    yield _key_line(width, f"{position} of {len(view.feed.fleet)}" if hidden else position), "dim"
    if view.pending is not None:
        pending = view.pending
        yield (
            f"{pending.action} {printable(pending.worker_name)}?  y: yes, any other key: no",
            "bold yellow reverse",
        )
    elif view.typing:
        yield f"/{printable(view.search)}▏ Enter: keep, Esc: all", "bold"
    elif view.search and not view.message:
        yield f"search: {printable(view.search)} (Esc: all)", "bold"
    else:
        yield printable(view.message), "bold"


def _about(row: FleetRow, view: TopView) -> Iterator[Line]:
    verdict = view.verdicts[row.id]
    text = verdict.problem or "takes requests"
    yield f"> {printable(row.name)} {text}", STYLES[verdict.kind]
    model = f"model {printable(row.model)}, " if row.model else ""
    served = f"{row.routed} sent, {row.failed} failed"
    weights = f"weights {printable(row.weight_version or NOTHING)} (epoch {row.weight_epoch})"
    launch = row.launch or {}
    process = f" as process {launch.get('pid')}, {launch.get('restarts', 0)} restarts"
    origin = f"from {printable(row.origin)}{process if launch else ''}"
    ranks = ""
    if row.ranks_in_flight:
        ranks = f"ranks {' '.join(map(str, row.ranks_in_flight))} in flight, "
    events = ""
    if row.kv_mode != "off":
        why = f" ({printable(row.kv_reason)})" if row.kv_mode != "exact" and row.kv_reason else ""
        events = f"KV events {printable(row.kv_mode)}{why}, "
    yield f"  {model}{ranks}{events}{served}, {weights}, {origin}", ""


def _describe_end(end: FinishedRequest) -> str:
    ended_at = parse_time(end.at)
    clock = ended_at.astimezone().strftime("%H:%M:%S") if ended_at else ""
    worker = printable((end.worker or NOTHING).partition("://")[2] or NOTHING)
    if end.prefill:
        worker = f"{printable(end.prefill.partition('://')[2])} > {worker}"
    error = f" {printable(end.error)}" if end.error else ""
    model = f" {printable(end.model)}" if end.model else ""
    text = (
        f"{end.status or '---'} {printable(end.route)}{model} {worker} {printable(end.end)}{error}"
    )
    return f"{clock} {text} after {format_millis(end.total_ms)}"

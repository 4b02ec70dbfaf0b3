"""`omni-proxy status`: one screen that says how the running proxy is, and what needs a look.

Exit status 0: ready; 1: not ready; 2: nobody could be asked.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from textwrap import wrap
from typing import Final

from omni_proxy import __version__
from omni_proxy.cli.client.admin_client import (
    NO_SUCH_PLACE,
    AdminClient,
    AdminClientError,
    AdminTarget,
    JsonObject,
    add_target_arguments,
    admin_target_of,
)
from omni_proxy.cli.screen.diagnosis import (
    LEAVING,
    WELL,
    Diagnosis,
    describe_reload,
    describe_weights,
    diagnose,
    last_minute,
    pause_lines,
    sort_by_urgency,
)
from omni_proxy.cli.screen.feed_model import (
    PATH,
    FeedModel,
    FleetRow,
    HistoryPoint,
    WatchdogStatus,
    feed_of,
)
from omni_proxy.cli.screen.fleet_table import fleet_table
from omni_proxy.cli.screen.text_table import (
    NOTHING,
    display_width,
    format_age,
    parse_time,
    printable,
    truncate,
)

NOT_READY: Final = 1
WIDTH: Final = 80  # where nobody looks, and the least that is laid out for
ROWS: Final = 12
REMARKS: Final = 8
_LABEL_WIDTH: Final = 10
_LEGEND: Final = "P50, P99: from sending to the first chunk; they, REQ/S and ERR: last minute"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="omni-proxy status",
        description="How the running proxy is: who is slow, who is out and why, what the last "
        "reload did. Exit status 0: ready; 1: not ready; 2: not reachable.",
        allow_abbrev=False,
    )
    add_target_arguments(made)
    made.add_argument("--json", action="store_true", help="the feed's picture as it is")
    made.add_argument("--all", action="store_true", help=f"every worker, not only {ROWS}")
    return made


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        place = admin_target_of(arguments)
        told = fetch_feed(place)
        feed = feed_of(told)
    except AdminClientError as why:
        print(f"omni-proxy status: {why}", file=sys.stderr)
        return NO_SUCH_PLACE
    if arguments.json:
        print(json.dumps(told, indent=2))
    else:
        width = shutil.get_terminal_size((WIDTH, 24)).columns
        rows = len(feed.fleet) if arguments.all else ROWS
        print("\n".join(render_status(feed, place.url, width, rows)))
    return 0 if feed.ready else NOT_READY


def fetch_feed(place: AdminTarget) -> JsonObject:
    """What GET /feed tells now. Raises AdminClientError, also where the proxy refuses."""
    with AdminClient(place) as proxy:
        answer = proxy.get(PATH, {"once": "true"})
    if answer.refusal:
        raise AdminClientError(f"{place.url}: {printable(answer.refusal)}")
    return answer.told


def render_status(feed: FeedModel, url: str, width: int = WIDTH, rows: int = ROWS) -> list[str]:
    """All lines, none wider than `width` columns."""
    verdicts = diagnose(feed)
    ordered = sort_by_urgency(feed, verdicts)
    remarks = list(_remarks(feed, ordered, verdicts))
    lines = []
    for line in _summary(feed, url, width):
        lines += wrap(line, width, subsequent_indent=" " * _LABEL_WIDTH)
    if ordered:
        lines += ["", *fleet_table(ordered[:rows], verdicts, width), *wrap(_LEGEND, width)]
        if len(ordered) > rows:
            rest = Counter(verdicts[row.id].kind for row in ordered[rows:])
            words = ", ".join(f"{count} {kind}" for kind, count in rest.items())
            lines.append(f"and {len(ordered) - rows} more: {words} (--all shows them)")
    if remarks:
        lines += ["", "Look at"]
        for remark in remarks[:REMARKS]:
            lines += wrap(remark, width, initial_indent="  ", subsequent_indent="    ")
        if len(remarks) > REMARKS:
            lines.append(f"  and {len(remarks) - REMARKS} more (--json has all)")
    return [truncate(line, width) for line in lines]


def headline(feed: FeedModel, url: str, width: int) -> str:
    """Where there is too little room for all of it, the state has what there is."""
    state = "leaving" if feed.leaving else "ready" if feed.ready else "NOT READY"
    if feed.reason == "paused":
        state = "NOT READY: PAUSED"
    whole = f"omni-proxy {printable(feed.version)} at {printable(url)}: {state}"
    return (
        whole
        if display_width(whole) <= width
        else f"{state}: {printable(url.rpartition('://')[2])}"
    )


def _summary(feed: FeedModel, url: str, width: int) -> Iterator[str]:
    now = parse_time(feed.at)
    yield headline(feed, url, width)
    if versions := describe_versions(feed):
        yield f"version   {versions}"
    file = printable(feed.config_file) if feed.config_file else "no file"
    age = format_age(feed.uptime_secs)
    yield f"process   {feed.pid}, up {age}, revision {feed.revision} of {file}"
    yield f"workers   {describe_fleet(feed.fleet)}"
    yield f"requests  {describe_requests(feed, feed.history)}"
    yield f"policy    {printable(feed.policy.get('name', NOTHING))}"
    yield f"reload    {describe_reload(feed.last_reload, now)}"
    if weights := describe_weights(feed):
        yield f"weights   {weights}"
    for line in paused_lines(feed):
        yield f"PAUSED    {line}"


def paused_lines(feed: FeedModel) -> Iterator[str]:
    pauses = (row.paused for row in feed.fleet if row.paused is not None)
    return pause_lines(pauses, len(feed.fleet), parse_time(feed.at))


def describe_stalls(watched: WatchdogStatus, now: datetime | None) -> str:
    many = "once" if watched.stalls == 1 else f"{watched.stalls} times"
    at = parse_time(watched.last_stall_at or "")
    last = f"; last {format_age((now - at).total_seconds())} ago" if now and at else ""
    return f"the proxy was blocked for a second or more {many}{last}: its log has the stacks"


def describe_versions(feed: FeedModel) -> str:
    """A warning where the proxy is not of this command's version; "" where it is."""
    if not feed.version or feed.version == __version__:
        return ""
    running = printable(feed.version)
    return f"WARNING: the proxy runs {running}, this command is {__version__}: use the same version"


def describe_fleet(fleet: Sequence[FleetRow]) -> str:
    if not fleet:
        return "none: add one with omni-proxy workers add URL, or name it in the file"
    out: Counter[str] = Counter()
    for row in fleet:
        if not row.routable or row.paused is not None:
            out["disabled" if row.disabled and row.drain is None else _why_out(row)] += 1
    taking = len(fleet) - out.total()
    words = [f"{taking} of {len(fleet)} take requests"]
    return "; ".join([*words, *(f"{count} {state}" for state, count in sorted(out.items()))])


def _why_out(row: FleetRow) -> str:
    if row.drain is not None:
        return printable(row.drain.state)
    if row.paused is not None:
        return "PAUSED"
    if row.held_by:
        return f"held ({printable(row.held_by[0])})"
    return "on trial" if row.half_open else printable(row.health)


def describe_requests(feed: FeedModel, history: Sequence[HistoryPoint]) -> str:
    admission = feed.admission
    bound = f" of at most {admission.max_inflight}" if admission.max_inflight else ""
    words = f"{admission.inflight} in flight{bound}, {admission.waiting} waiting"
    if not feed.metrics:
        return f"{words}; [server] metrics is off: no rates, no times"
    if feed.last_minute is not None:
        ended, errors = feed.last_minute.requests, feed.last_minute.errors
    else:
        ended, errors = last_minute(history)
    share = f" ({100 * errors / ended:.1f} %)" if errors and ended else ""
    return f"{words}; last minute: {ended} ended, {errors} errors{share}"


def _remarks(
    feed: FeedModel, ordered: Sequence[FleetRow], verdicts: dict[str, Diagnosis]
) -> Iterator[str]:
    if feed.leaving:
        yield "the proxy was told to leave: it finishes what is in flight"
    if feed.last_reload and feed.last_reload.get("error"):
        yield "the newest reading of the file was refused: omni-proxy check says everything"
    if feed.last_reload and feed.last_reload.get("incomplete"):
        yield "a part of the proxy could not take the new configuration: see its log, then reload"
    for each in feed.supervisors:
        if each.state != "running":
            because = f": {printable(each.last_error)}" if each.last_error else ""
            yield f"the proxy's own {printable(each.name)} is {printable(each.state)}{because}"
    if feed.watchdog.stalls:
        yield describe_stalls(feed.watchdog, parse_time(feed.at))
    for row in ordered:
        if _needs_a_look(row, verdicts[row.id]):
            yield f"{printable(row.name)} {verdicts[row.id].said}"
    waiting = feed.admission.waiting
    if waiting and not any(row.routable and row.paused is None for row in feed.fleet):
        yield f"{waiting} requests wait for a worker that takes them"


def _needs_a_look(row: FleetRow, verdict: Diagnosis) -> bool:
    if verdict.state == "PAUSED":  # that stands above, once for all of them
        return False
    return verdict.kind not in (WELL, LEAVING) or (
        verdict.kind == LEAVING and row.drain is not None
    )

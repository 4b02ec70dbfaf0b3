"""`omni-proxy status`: shows the state of the running proxy and what needs attention.

Exit status 0: ready; 1: not ready; 2: no proxy could be reached.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from textwrap import wrap
from typing import Final

from omni_proxy import __version__
from omni_proxy.cli.client.admin_client import (
    EXIT_NOT_REACHABLE,
    AdminClient,
    AdminClientError,
    AdminTarget,
    JsonObject,
    add_target_arguments,
    admin_target_of,
)
from omni_proxy.cli.client.feed_model import (
    PATH,
    ClusterPeer,
    ClusterStatus,
    DiscoverySource,
    FeedModel,
    FleetRow,
    HistoryPoint,
    WatchdogStatus,
    feed_of,
)
from omni_proxy.cli.flags.command_parser import CommandParser
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
from omni_proxy.cli.screen.fleet_table import fleet_table
from omni_proxy.cli.terminal_text import (
    NOTHING,
    display_width,
    format_age,
    format_millis,
    parse_time,
    printable,
    truncate,
)

EXIT_NOT_READY: Final = 1
WIDTH: Final = 80  # without a terminal, and the minimum
ROWS: Final = 12
REMARKS: Final = 8
_LABEL_WIDTH: Final = 10
LEGEND: Final = "P50, P99: time to first chunk; these, REQ/S and ERR: of the last minute"
GAP_LEGEND: Final = "P50, P99: time to first chunk; GAP: between chunks; all of the last minute"


def parser() -> argparse.ArgumentParser:
    result = CommandParser(
        prog="omni-proxy status",
        description="Show the running proxy: slow workers, workers out of rotation and why, "
        "the last reload. Exit status 0: ready; 1: not ready; 2: not reachable.",
    )
    add_target_arguments(result)
    result.add_argument(
        "--json", action="store_true", help="print the snapshot of GET /feed unchanged"
    )
    result.add_argument("--all", action="store_true", help=f"show every worker, not only {ROWS}")
    return result


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        target = admin_target_of(arguments)
        snapshot = fetch_feed(target)
        feed = feed_of(snapshot)
    except AdminClientError as error:
        print(f"omni-proxy status: {error}", file=sys.stderr)
        return EXIT_NOT_REACHABLE
    if arguments.json:
        print(json.dumps(snapshot, indent=2))
    else:
        width = shutil.get_terminal_size((WIDTH, 24)).columns
        rows = len(feed.fleet) if arguments.all else ROWS
        print("\n".join(render_status(feed, target.url, width, rows)))
    return 0 if feed.ready else EXIT_NOT_READY


def fetch_feed(target: AdminTarget) -> JsonObject:
    """The current snapshot of GET /feed. Raises AdminClientError, also if the proxy refuses."""
    with AdminClient(target) as proxy:
        reply = proxy.get(PATH, {"once": "true"})
    if reply.refusal:
        raise AdminClientError(f"{target.url}: {printable(reply.refusal)}")
    return reply.body


def render_status(feed: FeedModel, url: str, width: int = WIDTH, rows: int = ROWS) -> list[str]:
    """All lines, none wider than `width` columns."""
    verdicts = diagnose(feed)
    ordered = sort_by_urgency(feed, verdicts)
    remarks = list(_remarks(feed, ordered, verdicts))
    lines = []
    for line in _summary(feed, url, width):
        lines += wrap(line, width, subsequent_indent=" " * _LABEL_WIDTH)
    if ordered:
        table = fleet_table(ordered[:rows], verdicts, width)
        legend = GAP_LEGEND if " GAP " in table[0] else LEGEND
        lines += ["", *table, *wrap(legend, width)]
        if len(ordered) > rows:
            hidden = Counter(verdicts[row.id].kind for row in ordered[rows:])
            kinds = ", ".join(f"{count} {kind}" for kind, count in hidden.items())
            lines.append(f"and {len(ordered) - rows} more: {kinds} (--all shows them)")
    if remarks:
        lines += ["", "Needs attention"]
        for remark in remarks[:REMARKS]:
            lines += wrap(remark, width, initial_indent="  ", subsequent_indent="    ")
        if len(remarks) > REMARKS:
            lines.append(f"  and {len(remarks) - REMARKS} more (--json has all)")
    return [truncate(line, width) for line in lines]


def headline(feed: FeedModel, url: str, width: int) -> str:
    """Name, URL and state; on a narrow screen the state first."""
    state = "shutting down" if feed.leaving else "ready" if feed.ready else "NOT READY"
    if feed.reason == "paused":
        state = "NOT READY: PAUSED"
    line = f"omni-proxy {printable(feed.version)} at {printable(url)}: {state}"
    return (
        line if display_width(line) <= width else f"{state}: {printable(url.rpartition('://')[2])}"
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
    if tokens := describe_tokens(feed.fleet):
        yield f"tokens    {tokens}"
    yield f"policy    {printable(feed.policy.get('name', NOTHING))}"
    yield f"reload    {describe_reload(feed.last_reload, now)}"
    if weights := describe_weights(feed):
        yield f"weights   {weights}"
    for source in feed.discovery:
        yield f"discovery {describe_source(source)}"
    if feed.cluster is not None:
        yield f"cluster   {describe_cluster(feed.cluster)}"
    for line in paused_lines(feed):
        yield f"PAUSED    {line}"


def describe_tokens(fleet: Iterable[FleetRow]) -> str:
    """Token rates of the last minute; "" while no tokens are counted."""
    minutes = [row.minute for row in fleet]
    out = [
        minute.output_tokens_per_sec
        for minute in minutes
        if minute.output_tokens_per_sec is not None
    ]
    if not out:
        return ""
    prompts = [(minute.input_tokens_per_sec or 0.0, minute.cache_hit_ratio) for minute in minutes]
    cached = [(rate, share) for rate, share in prompts if rate and share is not None]
    gaps = [minute.between_p50_ms for minute in minutes if minute.between_p50_ms is not None]
    parts = [f"{sum(out):.0f}/s out, {sum(rate for rate, _ in prompts):.0f}/s in"]
    if gaps:
        parts.append(f"{format_millis(sorted(gaps)[len(gaps) // 2])} between chunks")
    if cached:
        hits = sum(rate * share for rate, share in cached) / sum(rate for rate, _ in cached)
        parts.append(f"{hits:.0%} of prompts cached")
    return "; ".join(parts)


def describe_source(source: DiscoverySource) -> str:
    """The source's state, and the workers that it found. If it fails, how old its answer is."""
    counts = [f"{count} {printable(kind)}" for kind, count in source.workers.items() if count]
    workers = ", ".join(counts) or "no workers"
    state = printable(source.state)
    if source.error:
        age = f" {format_age(source.age_secs)}" if source.age_secs is not None else ""
        state = f"{state.upper()}{age} ({printable(source.error)})"
    ignored = f"; {len(source.ignored)} ignored" if source.ignored else ""
    return f"{printable(source.name)} {state}: {workers.replace('_', ' ')}{ignored}"


def describe_cluster(cluster: ClusterStatus) -> str:
    """The store, and each peer with the age of its counts."""
    store = (
        "connected" if cluster.connected else f"LOST ({printable(cluster.error or 'connecting')})"
    )
    peers = "; ".join(map(_describe_peer, cluster.peers))
    return f"{printable(cluster.name)}, store {store}; {peers or 'no other proxy'}"


def _describe_peer(peer: ClusterPeer) -> str:
    """The peer's name, version and load, and the age of these figures."""
    version = f" {printable(peer.version)}" if peer.version else ""
    rate = f"{peer.requests_per_sec:g} req/s, " if peer.requests_per_sec is not None else ""
    name = printable(peer.member.rpartition("/")[0])
    return f"{name}{version} {rate}{peer.in_flight} in flight, {peer.age_secs:.1f} s ago"


def paused_lines(feed: FeedModel) -> Iterator[str]:
    pauses = (row.paused for row in feed.fleet if row.paused is not None)
    return pause_lines(pauses, len(feed.fleet), parse_time(feed.at))


def describe_stalls(watched: WatchdogStatus, now: datetime | None) -> str:
    times = "once" if watched.stalls == 1 else f"{watched.stalls} times"
    stalled_at = parse_time(watched.last_stall_at or "")
    last = (
        f"; last {format_age((now - stalled_at).total_seconds())} ago" if now and stalled_at else ""
    )
    return f"the proxy was blocked for a second or more {times}{last}: its log has the stacks"


def _key_refusals(feed: FeedModel) -> Iterator[str]:
    count, total = feed.refused_without_key_last_minute, feed.refused_without_key
    if not count:
        return
    noun = "request" if count == 1 else "requests"
    yield (
        f"{count} {noun} without a valid key refused (401) in the last minute, {total} since the "
        "start: with [[keys]] or [server] api_key every client needs one; give each a key "
        "(omni-proxy keys new --name NAME), or remove these entries to open the model routes; "
        "omni-proxy logs shows who sends them"
    )


def describe_versions(feed: FeedModel) -> str:
    """A warning if the proxy and this command have different versions, else ""."""
    if not feed.version or feed.version == __version__:
        return ""
    running = printable(feed.version)
    return f"WARNING: the proxy runs {running}, this command is {__version__}: use the same version"


def describe_fleet(fleet: Sequence[FleetRow]) -> str:
    if not fleet:
        return "none: add one with omni-proxy workers add URL, or put it into the file"
    out: Counter[str] = Counter()
    for row in fleet:
        if not row.routable or row.paused is not None:
            out[
                "disabled" if row.disabled and row.drain is None else _out_of_rotation_reason(row)
            ] += 1
    taking = len(fleet) - out.total()
    parts = [f"{taking} of {len(fleet)} take requests"]
    return "; ".join([*parts, *(f"{count} {state}" for state, count in sorted(out.items()))])


def _out_of_rotation_reason(row: FleetRow) -> str:
    if row.drain is not None:
        return printable(row.drain.state)
    if row.paused is not None:
        return "PAUSED"
    if row.held_by:
        return f"held ({printable(row.held_by[0])})"
    return "half-open" if row.half_open else printable(row.health)


def describe_requests(feed: FeedModel, history: Sequence[HistoryPoint]) -> str:
    admission = feed.admission
    bound = f" of at most {admission.max_inflight}" if admission.max_inflight else ""
    text = f"{admission.inflight} in flight{bound}, {admission.waiting} waiting"
    if not feed.metrics:
        return f"{text}; [server] metrics is off: no rates, no times"
    if feed.last_minute is not None:
        ended, errors = feed.last_minute.requests, feed.last_minute.errors
    else:
        ended, errors = last_minute(history)
    share = f" ({100 * errors / ended:.1f} %)" if errors and ended else ""
    keyless = feed.refused_without_key_last_minute
    refused = f", {keyless} refused without a valid key" if keyless else ""
    return f"{text}; last minute: {ended} ended, {errors} errors{share}{refused}"


def _remarks(
    feed: FeedModel, ordered: Sequence[FleetRow], verdicts: dict[str, Diagnosis]
) -> Iterator[str]:
    if feed.leaving:
        yield "the proxy is shutting down: it finishes requests in flight"
    if feed.last_reload and feed.last_reload.get("error"):
        yield "the last reload was refused: omni-proxy check lists all problems"
    if feed.last_reload and feed.last_reload.get("incomplete"):
        yield "a part of the proxy could not apply the new configuration: see its log, then reload"
    yield from _key_refusals(feed)
    for supervisor in feed.supervisors:
        if supervisor.state != "running" and not supervisor.same_as:
            because = f": {printable(supervisor.last_error)}" if supervisor.last_error else ""
            state = printable(supervisor.state)
            yield f"the proxy's own {printable(supervisor.name)} is {state}{because}"
    if feed.watchdog.stalls:
        yield describe_stalls(feed.watchdog, parse_time(feed.at))
    for row in ordered:
        if _needs_attention(row, verdicts[row.id]):
            yield f"{printable(row.name)} {verdicts[row.id].problem}"
    waiting = feed.admission.waiting
    if waiting and not any(row.routable and row.paused is None for row in feed.fleet):
        yield f"{waiting} requests wait for an available worker"


def _needs_attention(row: FleetRow, verdict: Diagnosis) -> bool:
    if verdict.state == "PAUSED":  # printed once, above the table
        return False
    return verdict.kind not in (WELL, LEAVING) or (
        verdict.kind == LEAVING and row.drain is not None
    )

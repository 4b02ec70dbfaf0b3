"""Diagnosis: which workers are slow or out of rotation and why, what the last reload did, and the
progress of a weight rollout.

Pure. `omni-proxy status`, `top` and `weights` print the same texts. The proxy determines which
workers are slow (`admin_api.serializers.slow_workers`). Unknown fields, of a newer proxy, are
ignored.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from omni_proxy.cli.client.feed_model import FeedModel, FleetRow, HistoryPoint, PausedWorker
from omni_proxy.cli.terminal_text import (
    NOTHING,
    format_age,
    parse_time,
    printable,
    render_table,
    strip_noise,
)

FAILING_SHARE: Final = 0.05
MINUTE_SECS: Final = 60
# The most urgent first.
OUT, SLOW, FAILING, LEAVING, WELL = "out", "slow", "failing", "leaving", "well"
URGENCY: Final = {name: rank for rank, name in enumerate((OUT, FAILING, SLOW, LEAVING, WELL))}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of one worker; `problem` is "" if there is none."""

    kind: str
    state: str  # one word for a table
    problem: str


def diagnose(feed: FeedModel) -> dict[str, Diagnosis]:
    """Diagnoses by worker id."""
    now = parse_time(feed.at)
    return {row.id: _verdict(row, now) for row in feed.fleet}


def _verdict(row: FleetRow, now: datetime | None) -> Diagnosis:
    state = state_of(row)
    if row.paused is not None and row.drain is None and not row.disabled:
        return Diagnosis(
            OUT, state, f"is {describe_pause(row.paused, now)}; end it with: {RESUME_COMMAND}"
        )
    if not row.routable:
        reason = row.why or (f"{row.health}: {row.last_error}" if row.last_error else row.health)
        reason = printable(strip_noise(reason))
        if row.drain is not None or row.disabled or row.half_open:
            return Diagnosis(LEAVING, state, reason)
        # `since` is the time of the last health transition.
        return Diagnosis(OUT, state, reason if row.held_by else reason + _for_how_long(row, now))
    ended = row.rate * MINUTE_SECS
    if row.errors and row.errors >= max(1.0, FAILING_SHARE * ended):
        return Diagnosis(FAILING, "failing", f"{row.errors} errors in the last minute")
    if row.silent_secs is not None:
        state_text = (
            f"{row.in_flight} in flight, no response data for {format_age(row.silent_secs)}"
        )
        return Diagnosis(SLOW, "silent", f"is silent: {state_text}")
    if row.overloaded is not None:
        return Diagnosis(SLOW, "overloaded", f"is overloaded: {printable(row.overloaded)}")
    if row.slow is not None:
        return Diagnosis(SLOW, "slow", f"is slow: {printable(row.slow.text)}")
    return Diagnosis(WELL, state, "")


def state_of(row: FleetRow) -> str:
    """One word for a table."""
    if row.drain is not None:
        return printable(row.drain.state)
    if row.disabled:
        return "disabled"
    if row.paused is not None or "paused" in row.held_by:
        return "PAUSED"
    if row.held_by == ("launch",) and row.launch:
        return printable(row.launch.get("state", "launch")).replace("_", " ")
    if row.held_by:
        return printable(row.held_by[0])
    if row.half_open:
        return "half-open"
    return printable(row.health) if row.health != "healthy" or not row.routable else "ok"


def _for_how_long(row: FleetRow, now: datetime | None) -> str:
    since = parse_time(row.since)
    if since is None or now is None:
        return ""
    return f" (for {format_age((now - since).total_seconds())})"


def sort_by_urgency(feed: FeedModel, verdicts: dict[str, Diagnosis]) -> list[FleetRow]:
    """The most urgent first; among equals the busiest."""

    def rank(row: FleetRow) -> tuple[int, int, str]:
        return URGENCY[verdicts[row.id].kind], -row.in_flight, row.url

    return sorted(feed.fleet, key=rank)


def last_minute(history: Sequence[HistoryPoint]) -> tuple[int, int]:
    """Requests that ended in the last minute, and errors among them."""
    if not history:
        return 0, 0
    begin = history[-1].at - MINUTE_SECS
    points = [point for point in history if point.at > begin]
    return sum(point.requests for point in points), sum(point.errors for point in points)


def describe_reload(reload: dict[str, Any] | None, now: datetime | None) -> str:
    """The result of the last reload, in one line."""
    if not reload:
        return "none yet"
    ended = parse_time(str(reload.get("at") or ""))
    ago = f", {format_age((now - ended).total_seconds())} ago" if ended and now else ""
    text = f"{printable(reload.get('outcome', '?'))} by {printable(reload.get('source', '?'))}{ago}"
    if reload.get("source") == "start":
        text = f"none since the start{ago}"
    if error := reload.get("error"):
        return f"{text}; the previous configuration stays: {printable(_first_problem(error))}"
    if incomplete := reload.get("incomplete"):
        return f"{text}, incompletely; reload again: {printable(incomplete)}"
    changes = list(_changes(reload.get("diff")))
    listed = "; ".join(changes[:3]) + (f"; {len(changes) - 3} more" if len(changes) > 3 else "")
    return f"{text}: {listed}" if listed else text


def _first_problem(error: object) -> str:
    if not isinstance(error, dict):
        return str(error)
    problems = error.get("problems")
    if not isinstance(problems, list) or not problems or not isinstance(problems[0], dict):
        return str(error.get("message") or error)
    first = problems[0]
    line = f" line {first['line']}" if first.get("line") else ""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    file = f"{os.path.basename(str(error['file']))}{line} " if error.get("file") else ""
    hint = f"; {first['hint']}" if first.get("hint") else ""
    return f"{file}{first.get('path')}: {first.get('reason')}{hint}{more}"


def _changes(diff: object) -> Iterable[str]:
    if not isinstance(diff, dict):
        return
    for key, pair in _items(diff.get("changed")):
        if isinstance(pair, list) and len(pair) == 2:
            yield f"{printable(key)} {printable(_short(pair[0]))} -> {printable(_short(pair[1]))}"
    for table in ("workers", "launch"):
        part = diff.get(table)
        if not isinstance(part, dict):
            continue
        for sign, prefix in (("added", "+"), ("removed", "-"), ("changed", "~")):
            names = part.get(sign)
            for name in names if isinstance(names, list | dict) else ():
                yield f"{prefix}{printable(name)}"


def _items(table: object) -> Iterable[tuple[object, object]]:
    return table.items() if isinstance(table, dict) else ()


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:39] + "…"


def describe_sync(sync: object) -> str:
    """The trainer's group, its state and the members it waits for; "" if there is none."""
    if not isinstance(sync, dict) or not isinstance(owner := sync.get("owner"), dict):
        return ""
    name, master = (printable(owner.get(key, "?")) for key in ("group_name", "master"))
    state = printable(sync.get("state", "?"))
    by = f" of {printable(owner['caller'])}" if owner.get("caller") else ""
    rows = [row for row in sync.get("members", ()) if isinstance(row, dict)]
    waiting_for = [
        printable(row.get("member", "?")) for row in rows if row.get("progress") == "asked"
    ]
    waits = f", waiting for {', '.join(waiting_for)}" if waiting_for else f", members: {len(rows)}"
    for_secs = f"{state} for {_secs(sync.get('step_secs'))}"
    return f"{name} at {master}{by}, {for_secs}, begun {_secs(owner.get('age_secs'))} ago{waits}"


def _secs(value: object) -> str:
    return f"{value:.0f} s" if isinstance(value, int | float) else "? s"


def describe_weights(feed: FeedModel) -> str:
    """The served weight versions and the operation in progress; "" if no worker has one."""
    counts: defaultdict[str, int] = defaultdict(int)
    for row in feed.fleet:
        if row.weight_version or row.weight_epoch:
            epoch = f" (epoch {row.weight_epoch})" if row.weight_epoch else ""
            counts[f"{printable(row.weight_version or '?')}{epoch}"] += 1
    parts = [f"{version} on {count}" for version, count in sorted(counts.items())]
    if len(parts) > 1:
        parts = [f"{len(parts)} versions: {', '.join(parts[:4])}" + ("…" if len(parts) > 4 else "")]
    weights = feed.weights or {}
    if isinstance(operation := weights.get("operation"), dict):
        path, step = (printable(operation.get(key, "?")) for key in ("path", "step"))
        parts.append(f"running: {path}, {step}")
    if rollout := describe_rollout(weights.get("rollout")):
        parts.append(f"rollout to {rollout}")
    if sync := describe_sync(weights.get("sync")):
        parts.append(f"sync: {sync}")
    if uncertain := weights.get("uncertain"):
        parts.append(f"uncertain: {len(uncertain)}")
    return "; ".join(parts)


# Paused engines: by which request, since when, and the command that resumes them.

RESUME_COMMAND: Final = "omni-proxy weights continue"


def describe_pause(paused: PausedWorker, now: datetime | None) -> str:
    """`paused for 5 min by NAME (/pause_generation, retract)`."""
    since = parse_time(paused.at)
    lasts = f" for {format_age((now - since).total_seconds())}" if since and now else ""
    by = f" by {printable(paused.by)}" if paused.by else ""
    origin = ", ".join(printable(part) for part in (paused.path, paused.mode) if part)
    return f"paused{lasts}{by}" + (f" ({origin})" if origin else "")


def pause_lines(pauses: Iterable[PausedWorker], total: int, now: datetime | None) -> Iterator[str]:
    """A line for each distinct pause, with the number of its workers out of `total`."""
    for text, count in Counter(describe_pause(paused, now) for paused in pauses).items():
        # The remedy first: a narrow screen truncates the end.
        yield f"{count} of {total} workers, end it with: {RESUME_COMMAND}; {text}"


ENDED: Final = ("none", "succeeded", "failed", "cancelled")
_HEAD: Final = ("WORKER", "STATE", "BEFORE", "REASON")


def has_ended(rollout: dict[str, Any]) -> bool:
    return rollout.get("state") in ENDED


def describe_rollout(rollout: object) -> str:
    """`v2: running, 1 of 3 updated, loading URL`; "" if no rollout is in progress."""
    if not isinstance(rollout, dict) or has_ended(rollout):
        return ""
    return progress_line(rollout)


def progress_line(rollout: dict[str, Any]) -> str:
    """Progress, current steps and what it waits for."""
    label, state = (
        printable(rollout.get("weight_version") or "?"),
        printable(rollout.get("state", "?")),
    )
    parts = [f"{label}: {state}".replace("_", " "), f"{_count(rollout)} updated"]
    rows = [row for row in rollout.get("workers") or () if isinstance(row, dict)]
    parts += [
        f"{printable(row['step'])} {printable(row['worker'])}" for row in rows if row.get("step")
    ]
    if rollout.get("waits_for"):
        parts.append(printable(rollout["waits_for"]))
    if rollout.get("cause"):
        parts.append(printable(rollout["cause"]))
    return ", ".join(parts)


def rollout_lines(rollout: dict[str, Any]) -> list[str]:
    """The progress line, and a table row for each worker."""
    if rollout.get("state") == "none":
        return ["there was no rollout since the proxy started"]
    rows = [
        (
            printable(row.get("worker", "?")),
            printable(row.get("step") or row.get("state", "?")),
            printable(row.get("former_version") or NOTHING),
            printable(row.get("reason") or NOTHING),
        )
        for row in rollout.get("workers") or ()
        if isinstance(row, dict)
    ]
    return [progress_line(rollout), *render_table(_HEAD, rows)]


def _count(rollout: dict[str, Any]) -> str:
    return f"{rollout.get('updated', '?')} of {rollout.get('total', '?')}"

"""What the routes of the weights answer, as lines for a terminal.

PURE, but for the clock where ages are told.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from omni_proxy.cli.feed import Paused
from omni_proxy.cli.finding import Told
from omni_proxy.cli.judging import sync_words
from omni_proxy.cli.pauses import pause_lines
from omni_proxy.cli.tables import plain, table
from omni_proxy.cli.versions import listed
from omni_proxy.control.agreement import compare
from omni_proxy.control.outcomes import WorkerAnswer

HISTORY_SHOWN: Final = 5


def _status(told: Told) -> list[str]:
    running = told["operation"]
    words = "nothing" if running is None else _running(running)
    paused = told.get("paused") or {}
    rows = [
        (row["worker"], row["weight_version"] or "-", str(row["weight_epoch"]),
         "yes" if row["routable"] else "no",
         ", ".join(row["held_by"]) or ("PAUSED" if row["worker"] in paused else "-"))
        for row in told["workers"]
    ]  # fmt: skip
    lines = [
        f"under way: {words}; waiting: {len(told['waiting'])}",
        f"newest: epoch {told['weight_epoch']}, version {told['weight_version'] or '-'}",
        *table(("WORKER", "VERSION", "EPOCH", "ROUTABLE", "HELD BY"), rows),
    ]
    if sync := sync_words(told.get("sync")):
        lines.insert(1, f"sync: {sync}")
    lines += [f"uncertain: {url}: {reason}" for url, reason in told["uncertain"].items()]
    if told["uncertain"]:
        lines.append("bring them back, once their weights are verified: omni-proxy weights resolve")
    pauses = [Paused(**each) for each in paused.values()]
    lines += [f"PAUSED: {each}" for each in pause_lines(pauses, len(rows), datetime.now(UTC))]
    if told["journal"]["error"]:
        lines.append(f"journal: {told['journal']['error']}")
    for past in told["history"][-HISTORY_SHOWN:]:
        said = f"{past['http_status']} {past['message']}"
        lines.append(f"{past['ended_at'][:19]} {past['path']} {past['secs']:.1f} s: {said}")
    return lines


def _running(operation: Mapping[str, Any]) -> str:
    age = f"{operation['age_secs']:.0f} s"
    return f"{operation['path']} for {age}, {operation['step']}, {answered_words(operation)}"


def answered_words(operation: Mapping[str, Any]) -> str:
    rows = operation["workers"]
    done = sum(row["progress"] in ("done", "failed") for row in rows)
    return f"{done} of {len(rows)} answered"


def _broadcast(told: Told) -> list[str]:
    rows = [(each["worker"], _outcome(each), f"{each['seconds']:.2f}") for each in told["results"]]
    return [str(told["message"]), *table(("WORKER", "OUTCOME", "SECONDS"), rows)]


def _outcome(entry: Mapping[str, Any]) -> str:
    if entry["success"]:
        return "ok"
    reason = entry.get("error") or _answer(entry).why
    return f"{reason} ({entry['standing']})" if "standing" in entry else str(reason)


def _checksums(told: Told) -> list[str]:
    verdict = compared(told)
    rows = []
    for each in told["results"]:
        url = each["worker"]
        standing = next(
            (name for name in ("checked", "mismatched", "unverified") if url in verdict[name]), "-"
        )
        found = verdict["checksums"].get(url) or verdict["reasons"].get(url, "-")
        rows.append((url, standing, found))
    words = "no two workers that could be compared differ"
    if verdict["mismatched"]:
        words = "the weights differ"
    elif not verdict["checked"]:
        words = "nothing could be compared"
    return [words, *table(("WORKER", "STANDING", "CHECKSUM"), rows)]


def _resolved(told: Told) -> list[str]:
    back = told.get("resolved_worker_ids", [])
    lines = [f"back: {', '.join(back) or 'nobody was uncertain'}"]
    return lines + [f"still out: {u}: {why}" for u, why in told.get("unresolved", {}).items()]


def _rolled_back(told: Told) -> list[str]:
    labels = told.get("weight_versions") or {}
    now = [f"{plain(label or '-')}" for label in dict.fromkeys(labels.values())]
    lines = _broadcast(told)
    if labels:
        lines.append(f"now: {', '.join(now)} on {len(labels)}, epoch {told.get('weight_epoch')}")
    return lines


def _versions(told: Told) -> list[str]:
    return listed(told, datetime.now(UTC))


def compared(told: Told) -> Told:
    return compare({each["worker"]: _answer(each) for each in told["results"]}).told()


def _answer(entry: Mapping[str, Any]) -> WorkerAnswer:
    status, body = entry.get("status_code"), entry.get("body")
    return WorkerAnswer(entry["worker"], status, body, entry.get("error", ""))


SHOWN: Final = {
    "status": _status,
    "pause": _broadcast,
    "continue": _broadcast,
    "checksum": _checksums,
    "resolve": _resolved,
    "versions": _versions,
    "rollback": _rolled_back,
}

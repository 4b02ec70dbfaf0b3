"""A rollout of weights in words: one line for a status, a table for a terminal. Pure.

Unknown fields, of a newer proxy, are ignored.
"""

from __future__ import annotations

from typing import Any, Final

from omni_proxy.cli.screen.text_table import NOTHING, printable, render_table

ENDED: Final = ("none", "succeeded", "failed", "cancelled")
_HEAD: Final = ("WORKER", "STATE", "BEFORE", "REASON")


def has_ended(rollout: dict[str, Any]) -> bool:
    return rollout.get("state") in ENDED


def describe_rollout(rollout: object) -> str:
    """`v2: running, 1 of 3 updated, loading URL`; "" where there is none that has not ended."""
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
    """The line, and a row for each worker."""
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

"""A rollout of weights in words: one line for a status, a table for a terminal. Pure.

What a newer proxy tells beside this is passed over.
"""

from __future__ import annotations

from typing import Any, Final

from omni_proxy.cli.screen.text_table import NOTHING, printable, render_table

ENDED: Final = ("none", "succeeded", "failed", "cancelled")
_HEAD: Final = ("WORKER", "STATE", "BEFORE", "REASON")


def has_ended(told: dict[str, Any]) -> bool:
    return told.get("state") in ENDED


def describe_rollout(told: object) -> str:
    """`v2: running, 1 of 3 updated, loading at URL`; "" where there is none that has not ended."""
    if not isinstance(told, dict) or has_ended(told):
        return ""
    return progress_line(told)


def progress_line(told: dict[str, Any]) -> str:
    """How far it is, and what is done or waited for now."""
    label, state = printable(told.get("weight_version") or "?"), printable(told.get("state", "?"))
    words = [f"{label}: {state}".replace("_", " "), f"{_count(told)} updated"]
    rows = [row for row in told.get("workers") or () if isinstance(row, dict)]
    words += [
        f"{printable(row['step'])} {printable(row['worker'])}" for row in rows if row.get("step")
    ]
    if told.get("waits_for"):
        words.append(printable(told["waits_for"]))
    if told.get("cause"):
        words.append(printable(told["cause"]))
    return ", ".join(words)


def rollout_lines(told: dict[str, Any]) -> list[str]:
    """The line, and a row for each worker."""
    if told.get("state") == "none":
        return ["there was no rollout since the proxy started"]
    rows = [
        (
            printable(row.get("worker", "?")),
            printable(row.get("step") or row.get("state", "?")),
            printable(row.get("former_version") or NOTHING),
            printable(row.get("reason") or NOTHING),
        )
        for row in told.get("workers") or ()
        if isinstance(row, dict)
    ]
    return [progress_line(told), *render_table(_HEAD, rows)]


def _count(told: dict[str, Any]) -> str:
    return f"{told.get('updated', '?')} of {told.get('total', '?')}"

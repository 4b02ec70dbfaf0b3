"""Plain text for terminals: tables, ages, and untrusted text without control characters.

Pure. Invariant: no text from a client, a worker or a file reaches the terminal as a control
sequence or breaks a line.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from datetime import datetime
from typing import Final

NOTHING: Final = "-"
_NOISE: Final = re.compile(r"\[Errno -?\d+\] (?:Error connecting to \([^()]*\): )?")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def printable(value: object) -> str:
    """One line without control sequences."""
    text = str(value)
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(char) for char in text)


def _visible(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode("ascii")


def strip_noise(reason: str) -> str:
    """An operating system's error text without errno and without the repeated address."""
    return _NOISE.sub("", reason)


def display_width(text: str) -> int:
    """The width in terminal columns, not characters."""
    if text.isascii():
        return len(text)
    return sum(_columns(char) for char in text)


def _columns(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def truncate(text: str, width: int) -> str:
    """At most `width` columns; truncated text ends with an ellipsis."""
    if display_width(text) <= width:
        return text
    if width <= 0:
        return ""
    chars, left_over = [], width - 1
    for char in text:
        left_over -= _columns(char)
        if left_over < 0:
            break
        chars.append(char)
    return "".join(chars) + "…"


def truncate_middle(text: str, width: int) -> str:
    """Like `truncate`, but keeps both ends, which distinguish addresses."""
    if display_width(text) <= width or width < 8:
        return truncate(text, width)
    tail = ""
    for char in reversed(text):
        if display_width(char + tail) > width // 2:
            break
        tail = char + tail
    head = truncate(text, width - display_width(tail))
    return head + tail


def render_table(
    head: Sequence[str], rows: Sequence[Sequence[object]], right_aligned: Sequence[str] = ()
) -> list[str]:
    """Columns two spaces apart; those with a title in `right_aligned` are right-aligned."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [
        max([display_width(name), *(display_width(row[column]) for row in cells)])
        for column, name in enumerate(head)
    ]
    lines = []
    for row in (list(head), *cells):
        parts = []
        for name, cell, width in zip(head, row, widths, strict=True):
            gap = " " * (width - display_width(cell))
            parts.append(gap + cell if name in right_aligned else cell + gap)
        lines.append("  ".join(parts).rstrip())
    return lines


def format_age(secs: float) -> str:
    """`59 s`, `12 min`, `3 h 5 min`, `2 d 4 h`."""
    if not math.isfinite(secs):
        return NOTHING
    seconds = max(0, int(secs))
    if seconds < _MINUTE:
        return f"{seconds} s"
    if seconds < _HOUR:
        return f"{seconds // _MINUTE} min"
    big, small, first, second = (_HOUR, _MINUTE, "h", "min")
    if seconds >= _DAY:
        big, small, first, second = (_DAY, _HOUR, "d", "h")
    remainder = seconds % big // small
    return f"{seconds // big} {first}" + (f" {remainder} {second}" if remainder else "")


def format_millis(value: float | None) -> str:
    """`0.8 ms`, `118 ms`, `4.2 s`, `3 min`; `-` without a measurement."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value < 10:
        return f"{value:.1f} ms"
    if value < 1000:
        return f"{value:.0f} ms"
    return f"{value / 1000:.1f} s" if value < 100_000 else format_age(value / 1000)


def format_size(nbytes: float) -> str:
    """`812 B`, `3.4 MB`, `12 GB`."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        nbytes /= 1000
        if nbytes < 999.5 or unit == "GB":
            break
    return f"{nbytes:.1f} {unit}" if nbytes < 9.95 else f"{nbytes:.0f} {unit}"


def parse_time(text: str | None) -> datetime | None:
    """An ISO 8601 time with a zone; None if it is not one."""
    try:
        result = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return result if result.tzinfo else None

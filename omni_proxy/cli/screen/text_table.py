"""Plain text for terminals: tables, ages, and the words of others made harmless.

PURE. Invariant: nothing that a client, a worker or a file says reaches the terminal as a control
sequence, or breaks a line.
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
    """One line without anything that a terminal would obey."""
    text = str(value)
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(char) for char in text)


def _visible(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode("ascii")


def strip_noise(reason: str) -> str:
    """A system's reason without its number, and without an address that stands beside it."""
    return _NOISE.sub("", reason)


def display_width(text: str) -> int:
    """Columns of a terminal, not characters."""
    if text.isascii():
        return len(text)
    return sum(_columns(char) for char in text)


def _columns(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def truncate(text: str, width: int) -> str:
    """At most `width` columns; what is cut ends with an ellipsis."""
    if display_width(text) <= width:
        return text
    if width <= 0:
        return ""
    kept, room = [], width - 1
    for char in text:
        room -= _columns(char)
        if room < 0:
            break
        kept.append(char)
    return "".join(kept) + "…"


def truncate_middle(text: str, width: int) -> str:
    """As `truncate`; of an address both ends say the most."""
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
    head: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = ()
) -> list[str]:
    """Columns two spaces apart; those whose heads stand in `right` are flush right."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [
        max([display_width(name), *(display_width(row[at]) for row in cells)])
        for at, name in enumerate(head)
    ]
    lines = []
    for row in (list(head), *cells):
        parts = []
        for name, cell, width in zip(head, row, widths, strict=True):
            gap = " " * (width - display_width(cell))
            parts.append(gap + cell if name in right else cell + gap)
        lines.append("  ".join(parts).rstrip())
    return lines


def format_age(secs: float) -> str:
    """`59 s`, `12 min`, `3 h 5 min`, `2 d 4 h`."""
    if not math.isfinite(secs):
        return NOTHING
    whole = max(0, int(secs))
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min"
    big, small, first, second = (_HOUR, _MINUTE, "h", "min")
    if whole >= _DAY:
        big, small, first, second = (_DAY, _HOUR, "d", "h")
    rest = whole % big // small
    return f"{whole // big} {first}" + (f" {rest} {second}" if rest else "")


def format_millis(value: float | None) -> str:
    """`0.8 ms`, `118 ms`, `4.2 s`, `3 min`; nothing where nothing was measured."""
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
    """Of an ISO time; None where it is none."""
    try:
        at = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return at if at.tzinfo else None

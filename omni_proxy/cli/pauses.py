"""Engines that somebody paused, in words: who, since when, and the command that ends it.

PURE. The same words for `status`, `top` and `weights status`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Final

from omni_proxy.cli.feed_model import Paused
from omni_proxy.cli.text_table import age, moment, plain

GO_ON: Final = "omni-proxy weights continue"


def pause_words(paused: Paused, now: datetime | None) -> str:
    """`paused for 5 min by NAME (/pause_generation, retract)`."""
    since = moment(paused.at)
    lasts = f" for {age((now - since).total_seconds())}" if since and now else ""
    by = f" by {plain(paused.by)}" if paused.by else ""
    how = ", ".join(plain(each) for each in (paused.path, paused.mode) if each)
    return f"paused{lasts}{by}" + (f" ({how})" if how else "")


def pause_lines(pauses: Iterable[Paused], total: int, now: datetime | None) -> Iterator[str]:
    """A line for each pause that workers share, of a fleet of `total`."""
    for words, count in Counter(pause_words(paused, now) for paused in pauses).items():
        # What to do comes first: a narrow screen cuts the end off.
        yield f"{count} of {total} workers, end it with: {GO_ON}; {words}"

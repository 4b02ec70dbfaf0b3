"""Listens to the feed in a thread, and keeps the newest picture and the last minutes.

Invariant: memory is bounded however slowly somebody looks; a lost connection is told and tried
again until `stop`, and the last picture stays.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from omni_proxy.cli.client.admin_client import AdminClient, AdminClientError, AdminTarget
from omni_proxy.cli.screen.feed_model import PATH, FeedModel, HistoryPoint, read_feed

SILENCE_SECS: Final = 5.0  # the feed speaks once a second
RETRY_SECS: Final = (0.5, 1.0, 2.0, 5.0)  # the last one again and again
POINTS: Final = 900
_DATA: Final = "data:"


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """`lost` is why nothing comes now, "" while it does; `secs_ago` when the picture came."""

    feed: FeedModel | None
    history: tuple[HistoryPoint, ...]
    lost: str
    secs_ago: float


class FeedFollower:
    """`tell` is called in its thread whenever there is news; it must not wait."""

    def __init__(self, place: AdminTarget, tell: Callable[[], None]) -> None:
        self._place = place
        self._tell = tell
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._feed: FeedModel | None = None
        self._history: deque[HistoryPoint] = deque(maxlen=POINTS)
        self._lost = "not connected yet"
        self._heard_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, wait_secs: float = 0.0) -> None:
        """It ends with the next word of the feed, or its silence; nobody needs to wait for that."""
        self._stopped.set()
        self._thread.join(wait_secs)

    def heard(self) -> FeedStatus:
        with self._lock:
            ago = time.monotonic() - self._heard_at
            return FeedStatus(self._feed, tuple(self._history), self._lost, ago)

    def _run(self) -> None:
        failed = 0
        while not self._stopped.is_set():
            try:
                with AdminClient(self._place, SILENCE_SECS) as proxy, proxy.lines(PATH) as lines:
                    begins = True
                    for line in lines:
                        if self._stopped.is_set():
                            return
                        if line.startswith(_DATA):
                            self._take(read_feed(line.removeprefix(_DATA)), begins=begins)
                            begins, failed = False, 0
                why = f"{self._place.url} has ended the feed"
            except AdminClientError as error:
                why = str(error)
            with self._lock:
                self._lost = why
            self._tell()
            self._stopped.wait(RETRY_SECS[min(failed, len(RETRY_SECS) - 1)])
            failed += 1

    def _take(self, feed: FeedModel, *, begins: bool) -> None:
        with self._lock:
            if begins:
                self._history.clear()
            self._history.extend(feed.history)
            self._feed = feed
            self._lost = ""
            self._heard_at = time.monotonic()
        self._tell()

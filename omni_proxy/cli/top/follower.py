"""Reads the feed in a thread, and keeps the latest snapshot and the history of the last minutes.

Invariant: memory is bounded however slow the reader is; a lost connection is reported and retried
until `stop`, and the last snapshot stays.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from omni_proxy.cli.client.admin_client import AdminClient, AdminClientError, AdminTarget
from omni_proxy.cli.client.feed_model import PATH, FeedModel, HistoryPoint, read_feed

SILENCE_SECS: Final = 5.0  # the feed sends a snapshot each second
RETRY_SECS: Final = (0.5, 1.0, 2.0, 5.0)  # the last one repeats
POINTS: Final = 900
_DATA: Final = "data:"


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """`lost`: why the feed is disconnected, "" while it is connected; `secs_ago`: age of the
    snapshot."""

    feed: FeedModel | None
    history: tuple[HistoryPoint, ...]
    lost: str
    secs_ago: float


class FeedFollower:
    """`on_change` is called in its thread on each change; it must not block."""

    def __init__(self, target: AdminTarget, on_change: Callable[[], None]) -> None:
        self._target = target
        self._on_change = on_change
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._feed: FeedModel | None = None
        self._history: deque[HistoryPoint] = deque(maxlen=POINTS)
        self._lost = "not connected yet"
        self._received_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, wait_secs: float = 0.0) -> None:
        """The thread ends at the next line of the feed or its timeout; no need to wait for it."""
        self._stopped.set()
        self._thread.join(wait_secs)

    def status(self) -> FeedStatus:
        with self._lock:
            ago = time.monotonic() - self._received_at
            return FeedStatus(self._feed, tuple(self._history), self._lost, ago)

    def _run(self) -> None:
        failed = 0
        while not self._stopped.is_set():
            try:
                with AdminClient(self._target, SILENCE_SECS) as proxy, proxy.lines(PATH) as lines:
                    begins = True
                    for line in lines:
                        if self._stopped.is_set():
                            return
                        if line.startswith(_DATA):
                            self._take(read_feed(line.removeprefix(_DATA)), begins=begins)
                            begins, failed = False, 0
                reason = f"{self._target.url} closed the feed"
            except AdminClientError as error:
                reason = str(error)
            with self._lock:
                self._lost = reason
            self._on_change()
            self._stopped.wait(RETRY_SECS[min(failed, len(RETRY_SECS) - 1)])
            failed += 1

    def _take(self, feed: FeedModel, *, begins: bool) -> None:
        with self._lock:
            if begins:
                self._history.clear()
            self._history.extend(feed.history)
            self._feed = feed
            self._lost = ""
            self._received_at = time.monotonic()
        self._on_change()

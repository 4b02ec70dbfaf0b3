"""Prints progress on the terminal while launched replicas become ready.

Contract: one line when a replica is ready or has failed, and no line that repeats the previous one.
A replica that is not restarted (`restart = "never"`) is reported but not waited for. A start that
can't succeed ends with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import trio

GRACE_SECS: Final = 1.0  # the timeout of each replica ends first, and has a better reason
MAX_ATTEMPTS: Final = 5  # of each replica, with about 15 s of delays in total

ReplicaStatus = Mapping[str, object]  # a row of `ReplicaProcess.status`
GetStatus = Callable[[], Sequence[ReplicaStatus]]


async def wait_until_ready(
    status: GetStatus,
    wait_change: Callable[[], Awaitable[None]],
    print_line: Callable[[str], None],
    startup_secs: float = math.inf,
) -> str:
    """Wait until every replica of `status` is ready; returns "".

    `wait_change` returns when a replica has changed. Returns a reason instead if no replica was
    ever ready, and either all have failed (`_has_failed`) or `startup_secs` have passed.
    """
    started_at = trio.current_time()
    reporter = _Reporter(print_line)
    count = len(status())
    print_line(f"starting {count} replica{'' if count == 1 else 's'}")
    while True:
        replicas = status()
        for replica in replicas:
            reporter.report(replica, len(replicas), trio.current_time() - started_at)
        if all(r["state"] == "ready" or _is_given_up(r) for r in replicas):
            return ""
        remaining_secs = startup_secs + GRACE_SECS - (trio.current_time() - started_at)
        if reporter.any_was_ready:
            remaining_secs = math.inf
        elif reporter.failed.issuperset(replica["url"] for replica in replicas):
            return "no replica can be started"
        elif remaining_secs <= 0:
            return f"no replica was ready within {startup_secs:g} s"
        with trio.move_on_after(remaining_secs):
            await wait_change()


class _Reporter:
    """Prints changes of each replica's state."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self.any_was_ready = False
        self.failed: set[object] = set()  # URLs
        self._print_line = print_line
        self._ready: set[object] = set()
        self._reported_errors: dict[object, object] = {}

    def report(self, replica: ReplicaStatus, count: int, secs: float) -> None:
        url, error = replica["url"], replica["last_error"]
        if replica["state"] == "ready":
            if url not in self._ready:
                self._ready.add(url)
                self.failed.discard(url)
                self.any_was_ready = True
                ready = len(self._ready)
                self._print_line(f"replica {ready} of {count} is ready after {secs:.1f} s: {url}")
            return
        self._ready.discard(url)
        if _has_failed(replica):
            self.failed.add(url)
        if error and self._reported_errors.get(url) != error:
            self._reported_errors[url] = error
            may_retry = self.any_was_ready or url not in self.failed
            note = _retry_note(replica, may_retry=may_retry)
            self._print_line(f"replica {url} is not ready: {error}; {note}")


def _has_failed(replica: ReplicaStatus) -> bool:
    """Whether the failure is permanent, or has occurred often enough."""
    if replica["state"] != "backing_off" or not replica["last_error"]:
        return False
    restarts = replica.get("restarts", 0)
    attempts = restarts + 1 if isinstance(restarts, int) else 1
    return bool(replica.get("fatal")) or attempts >= MAX_ATTEMPTS


def _is_given_up(replica: ReplicaStatus) -> bool:
    return replica["state"] == "stopped" and bool(replica["last_error"])


def _retry_note(replica: ReplicaStatus, *, may_retry: bool) -> str:
    retried = may_retry and not _is_given_up(replica)
    return "it is tried again" if retried else "it is not tried again"

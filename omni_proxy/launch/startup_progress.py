"""What a person at a terminal reads while launched replicas become ready.

Contract: one line when a replica is ready or has failed, none that only repeats the one before.
Who was given up for good (`restart = "never"`) is told and not waited for. A start that can't
succeed ends, with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import trio

GRACE_SECS: Final = 1.0  # each replica's own clock ends first, and says more
TRIES: Final = 5  # of each replica, with some 15 s of pauses between them

Place = Mapping[str, object]
Status = Callable[[], Sequence[Place]]


async def wait_until_ready(
    status: Status,
    moved: Callable[[], Awaitable[None]],
    say: Callable[[str], None],
    startup_secs: float = math.inf,
) -> str:
    """Return "" once every replica of `status` is ready; `moved` returns when one has changed.

    Where none was ever ready and none is likely to be (`_is_lost`), or none is within
    `startup_secs`, that is not waited for: then the result says why.
    """
    began = trio.current_time()
    teller = _Teller(say)
    count = len(status())
    say(f"starting {count} replica{'' if count == 1 else 's'}")
    while True:
        places = status()
        for place in places:
            teller.tell(place, len(places), trio.current_time() - began)
        if all(place["state"] == "ready" or _given_up(place) for place in places):
            return ""
        left = startup_secs + GRACE_SECS - (trio.current_time() - began)
        if teller.any_was_ready:
            left = math.inf
        elif teller.lost.issuperset(place["url"] for place in places):
            return "no replica can be started"
        elif left <= 0:
            return f"no replica was ready within {startup_secs:g} s"
        with trio.move_on_after(left):
            await moved()


class _Teller:
    """Says of each replica what has changed."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.any_was_ready = False
        self.lost: set[object] = set()  # their starts fail, and nothing says that one will not
        self._say = say
        self._ready: set[object] = set()
        self._told: dict[object, object] = {}

    def tell(self, place: Place, count: int, secs: float) -> None:
        url, error = place["url"], place["last_error"]
        if place["state"] == "ready":
            if url not in self._ready:
                self._ready.add(url)
                self.lost.discard(url)
                self.any_was_ready = True
                ready = len(self._ready)
                self._say(f"replica {ready} of {count} is ready after {secs:.1f} s: {url}")
            return
        self._ready.discard(url)
        if _is_lost(place):
            self.lost.add(url)
        if error and self._told.get(url) != error:
            self._told[url] = error
            outlook = _outlook(place, may_retry=self.any_was_ready or url not in self.lost)
            self._say(f"replica {url} is not ready: {error}; {outlook}")


def _is_lost(place: Place) -> bool:
    """Whether it failed in a way that no further try will mend, or often enough."""
    if place["state"] != "backing_off" or not place["last_error"]:
        return False
    restarts = place.get("restarts", 0)
    tries = restarts + 1 if isinstance(restarts, int) else 1
    return bool(place.get("fatal")) or tries >= TRIES


def _given_up(place: Place) -> bool:
    return place["state"] == "stopped" and bool(place["last_error"])


def _outlook(place: Place, *, may_retry: bool) -> str:
    return "it is tried again" if may_retry and not _given_up(place) else "it is not tried again"

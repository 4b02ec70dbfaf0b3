"""What a person at a terminal reads while launched replicas become ready.

Contract: one line when a replica is ready or has failed, none that only repeats the one before.
Who was given up for good (`restart = "never"`) is told and not waited for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio

Place = Mapping[str, object]
Status = Callable[[], Sequence[Place]]


async def until_ready(
    status: Status, moved: Callable[[], Awaitable[None]], say: Callable[[str], None]
) -> None:
    """Return once every replica of `status` is ready; `moved` returns when one has changed."""
    began = trio.current_time()
    ready: set[object] = set()
    told: dict[object, object] = {}
    count = len(status())
    say(f"starting {count} replica{'' if count == 1 else 's'}")
    while True:
        places = status()
        for place in places:
            url, error = place["url"], place["last_error"]
            if place["state"] == "ready":
                if url not in ready:
                    ready.add(url)
                    secs = trio.current_time() - began
                    say(f"replica {len(ready)} of {len(places)} is ready after {secs:.1f} s: {url}")
                continue
            ready.discard(url)
            if error and told.get(url) != error:
                told[url] = error
                say(f"replica {url} is not ready: {error}; {_outlook(place)}")
        if all(place["state"] == "ready" or _given_up(place) for place in places):
            return
        await moved()


def _given_up(place: Place) -> bool:
    return place["state"] == "stopped" and bool(place["last_error"])


def _outlook(place: Place) -> str:
    return "it is not tried again" if _given_up(place) else "it is tried again"

"""What a person at a terminal reads while launched replicas become ready.

Contract: one line when a replica is ready or has failed, none that only repeats the one before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio

Status = Callable[[], Sequence[Mapping[str, object]]]


async def until_ready(
    status: Status, moved: Callable[[], Awaitable[None]], say: Callable[[str], None]
) -> None:
    """Return once every replica of `status` is ready; `moved` returns when one has changed."""
    began = trio.current_time()
    count = len(status())
    ready: set[object] = set()
    told: dict[object, object] = {}
    say(f"starting {count} replica{'' if count == 1 else 's'}")
    while True:
        for place in status():
            url, error = place["url"], place["last_error"]
            if place["state"] == "ready" and url not in ready:
                ready.add(url)
                secs = trio.current_time() - began
                say(f"replica {len(ready)} of {count} is ready after {secs:.1f} s: {url}")
            elif place["state"] != "ready":
                ready.discard(url)
                if error and told.get(url) != error:
                    say(f"replica {url} is not ready: {error}; it is tried again")
                    told[url] = error
        if len(ready) >= count:
            return
        await moved()

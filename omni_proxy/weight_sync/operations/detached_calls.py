"""Calls that run in a task of their own, independent of the task of the caller.

Invariant: a caller that is cancelled cancels nothing. If it repeats the call while that still runs,
it gets the result of the running one. Two callers that wait at the same time are two calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from omni_proxy.admin_ops.results import AdminResponse, refused
from omni_proxy.wire.errors import HttpError

Perform = Callable[[], Awaitable[AdminResponse]]


@dataclass(slots=True, eq=False)
class _PendingCall:
    """A call that runs; `callers` tasks wait for it."""

    key: object
    callers: int = 0
    response: AdminResponse | None = None
    done: trio.Event = field(default_factory=trio.Event)


class DetachedCalls:
    """`on_unclaimed(key, response)`: a call ended, and no caller waits for it any more."""

    def __init__(self, on_unclaimed: Callable[[object, AdminResponse], None]) -> None:
        self.nursery: trio.Nursery | None = None
        self._on_unclaimed = on_unclaimed
        self._pending: list[_PendingCall] = []

    async def run(self, key: object, perform: Perform) -> AdminResponse:
        """Wait for the response. Cancellation ends only the wait."""
        if self.nursery is None:
            return refused(_unavailable())
        call = next((c for c in self._pending if c.key == key and not c.callers), None)
        if call is None:
            call = _PendingCall(key)
            self._pending.append(call)
            self.nursery.start_soon(self._perform, call, perform)
        call.callers += 1
        try:
            await call.done.wait()
        finally:
            call.callers -= 1
        return call.response or refused(_unavailable())

    async def _perform(self, call: _PendingCall, perform: Perform) -> None:
        try:
            call.response = await perform()
        except HttpError as error:
            call.response = refused(error)
        finally:
            self._pending.remove(call)
            if not call.callers and call.response is not None:
                self._on_unclaimed(call.key, call.response)
            call.done.set()


def _unavailable() -> HttpError:
    message = "operations on workers are not available now; their service is being restarted"
    return HttpError(503, message, "weights_unavailable").with_headers(("retry-after", "1"))

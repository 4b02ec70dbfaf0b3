"""What was asked for, owned by a task of ours rather than by whoever asks.

Invariant: a caller who leaves stops nothing; when it asks the same again while that runs, it gets
that one's answer. Two who ask the same at once are two.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from omni_proxy.admin_ops.results import AdminResponse, refused
from omni_proxy.wire.errors import HttpError

Perform = Callable[[], Awaitable[AdminResponse]]


@dataclass(slots=True, eq=False)
class _Ticket:
    """One thing that was asked for; `callers` wait for it."""

    key: object
    callers: int = 0
    answer: AdminResponse | None = None
    done: trio.Event = field(default_factory=trio.Event)


class DetachedCalls:
    """`unheard(key, answer)`: nobody waited for it any more."""

    def __init__(self, unheard: Callable[[object, AdminResponse], None]) -> None:
        self.nursery: trio.Nursery | None = None
        self._unheard = unheard
        self._open: list[_Ticket] = []

    async def ask(self, key: object, perform: Perform) -> AdminResponse:
        """Wait for the answer; who is cancelled meanwhile has only left."""
        if self.nursery is None:
            return refused(_not_here())
        ticket = next((t for t in self._open if t.key == key and not t.callers), None)
        if ticket is None:
            ticket = _Ticket(key)
            self._open.append(ticket)
            self.nursery.start_soon(self._serve, ticket, perform)
        ticket.callers += 1
        try:
            await ticket.done.wait()
        finally:
            ticket.callers -= 1
        return ticket.answer or refused(_not_here())

    async def _serve(self, ticket: _Ticket, perform: Perform) -> None:
        try:
            ticket.answer = await perform()
        except HttpError as refusal:
            ticket.answer = refused(refusal)
        finally:
            self._open.remove(ticket)
            if not ticket.callers and ticket.answer is not None:
                self._unheard(ticket.key, ticket.answer)
            ticket.done.set()


def _not_here() -> HttpError:
    message = "operations on workers are not available now; the desk for them is being restarted"
    return HttpError(503, message, "weights_unavailable").with_headers(("retry-after", "1"))

"""One call to all members of a group at once, ended by the first failure rather than by the last.

Invariant: nobody waits for another's answer to be asked. The first cause is kept, whoever names it:
a member's answer, a deadline, or somebody outside who knows that the group is lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.weight_sync.protocol.replies import NOT_AWAITED
from omni_proxy.weight_sync.session.member import Member

LATE_SECS: Final = 2.0
HURRIED_SECS: Final = 1.0

Ask = Callable[[Member], Awaitable[WorkerResult]]
Undo = Callable[[Member], Awaitable[WorkerResult]]
Hear = Callable[[WorkerResult], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """`within_secs` for all answers; after a failure the others get `grace_secs`, then `undo`."""

    within_secs: float
    grace_secs: float = 0.0
    undo: Undo | None = None


class FanOut:
    """`run` once. `cause`: why it failed, "" while it has not."""

    def __init__(self, members: Sequence[Member], ask: Ask, hear: Hear = lambda _: None) -> None:
        self.cause = ""
        self.answers: dict[str, WorkerResult] = {}
        self._members = members
        self._ask = ask
        self._hear = hear
        self._hurry = False
        self._decided = trio.Event()
        self._all = trio.Event()

    def fail(self, cause: str, *, hurry: bool = False) -> None:
        """Somebody knows that it can't succeed any more; `hurry`: for nobody."""
        self.cause = self.cause or cause
        self._hurry = self._hurry or hurry
        self._decided.set()

    async def run(self, patience: Patience) -> list[WorkerResult]:
        """In the order of the members; whoever was given up has an answer with an error."""
        async with trio.open_nursery() as nursery:
            for member in self._members:
                nursery.start_soon(self._one, member)
            with trio.move_on_after(patience.within_secs) as scope:
                await self._decided.wait()
            if scope.cancelled_caught:
                waiting = ", ".join(member.name for member in self._waiting())
                self.fail(f"no answer within {patience.within_secs:g} s: {waiting}")
            if patience.grace_secs and not self._all.is_set():
                hurried = min(patience.grace_secs, HURRIED_SECS)
                with trio.move_on_after(hurried if self._hurry else patience.grace_secs):
                    await self._all.wait()
            if patience.undo is not None and not self._all.is_set():
                for member in self._waiting():
                    nursery.start_soon(patience.undo, member)
                with trio.move_on_after(LATE_SECS):
                    await self._all.wait()
            nursery.cancel_scope.cancel()
        return [self._of(member) for member in self._members]

    def _waiting(self) -> list[Member]:
        return [member for member in self._members if member.name not in self.answers]

    def _of(self, member: Member) -> WorkerResult:
        found = self.answers.get(member.name)
        return found or WorkerResult(member.name, None, error=NOT_AWAITED)

    async def _one(self, member: Member) -> None:
        answer = await self._ask(member)
        self.answers[member.name] = answer
        self._hear(answer)
        if len(self.answers) == len(self._members):
            self._all.set()
            self._decided.set()
        if not answer.success:
            self.fail(f"{member.name}: {answer.why}")

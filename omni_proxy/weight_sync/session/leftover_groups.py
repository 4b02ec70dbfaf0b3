"""Groups of an earlier sync that members may still be in: told to leave before the next sync.

Two kinds: members that never answered the end of their group, and members of a group that the end
of the proxy cut short (named in the journal). Invariant: a new group begins only after the members
of a cut-short one were told to leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec
import trio

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.session.member import Member, WorkerMember
from omni_proxy.weight_sync.state.state_journal import StateJournal

DESTROY_TIMEOUT_SECS: Final = 10.0
RETRY_TIMEOUT_SECS: Final = 2.0


def destroy_body(group_name: str) -> bytes:
    return msgspec.json.encode({"group_name": group_name})


async def destroy_group(member: Member, body: bytes) -> WorkerResult:
    """Tell a member to leave its group; the result is an error if it does not answer in time."""
    with trio.move_on_after(DESTROY_TIMEOUT_SECS):
        return await member.destroy(body)
    return WorkerResult(member.name, None, error=f"no answer within {DESTROY_TIMEOUT_SECS:g} s")


class LeftoverGroups:
    """`leaving`: URLs of workers that are being told to leave a cut-short group.

    `unanswered`: member name to the group that it may still be in.
    """

    def __init__(self, fleet: Fleet, journal: StateJournal) -> None:
        self.leaving: set[str] = set()
        self.unanswered: dict[str, str] = {}
        self._fleet = fleet
        self._journal = journal
        self._cleaned = trio.Event()
        self._cleaned.set()

    async def wait_cleaned(self) -> None:
        """Wait until the members of a cut-short group were told to leave."""
        await self._cleaned.wait()

    async def leave_unanswered(self, members: Iterable[Member]) -> None:
        """Tell members again that never answered the end of an earlier group."""
        unanswered, self.unanswered = self.unanswered, {}
        for member in members:
            if member.name in unanswered:
                with trio.move_on_after(RETRY_TIMEOUT_SECS):
                    await member.destroy(destroy_body(unanswered[member.name]))

    def start_cleanup(
        self,
        nursery: trio.Nursery,
        urls: Sequence[str],
        group_name: str,
        on_left: Callable[[Iterable[str]], None],
    ) -> None:
        """Tell the members of a cut-short group to leave it; `on_left` gets URLs to probe."""
        self.leaving, self._cleaned = set(urls), trio.Event()
        nursery.start_soon(self._clean_up, urls, group_name, on_left)

    async def _clean_up(
        self, urls: Sequence[str], group_name: str, on_left: Callable[[Iterable[str]], None]
    ) -> None:
        """The workers may not be up yet, or gone."""
        body = destroy_body(group_name)

        async def leave(worker: Worker) -> None:
            result = await destroy_group(WorkerMember(worker, 1), body)
            self.leaving.discard(worker.url)
            if result.success or result.refused or worker.url not in self._journal.uncertain:
                on_left([worker.url])

        try:
            async with trio.open_nursery() as nursery:
                for url in urls:
                    if (worker := self._fleet.find(url)) is not None:
                        nursery.start_soon(leave, worker)
        finally:
            self.leaving.clear()
            self._cleaned.set()

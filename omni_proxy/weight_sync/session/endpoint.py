"""The fleet as one endpoint of a trainer's group: who may ask what, and what is answered again.

Contract: `takes` says which admin routes come here, and only where [weight_sync] mode asks for it.
A caller who leaves stops nothing, and hears the stored answer when it asks the same again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import trio

from omni_proxy.admin_ops.results import AdminResponse
from omni_proxy.admin_ops.routes import (
    COMPLETE,
    DESTROY,
    END,
    FROM_DISTRIBUTED,
    INIT,
    PREPARE,
    AdminRoute,
    Kind,
)
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.weight_sync.delivery.round import RoundDelivery
from omni_proxy.weight_sync.delivery.service import VersionService
from omni_proxy.weight_sync.operations.runner import AdminCall
from omni_proxy.weight_sync.operations.state_journal import StateJournal
from omni_proxy.weight_sync.protocol.rank_layout import RankLayoutError
from omni_proxy.weight_sync.protocol.requests import InitAsked, group_name_of, init_of, object_of
from omni_proxy.weight_sync.protocol.session import Owner
from omni_proxy.weight_sync.protocol.states import OutOfPlace, SyncState
from omni_proxy.weight_sync.session.commit import RoundCommit
from omni_proxy.weight_sync.session.lifecycle import SessionLifecycle
from omni_proxy.weight_sync.session.member import WorkerMember
from omni_proxy.weight_sync.session.steps import SessionSteps
from omni_proxy.wire.errors import HttpError

MODES: Final = ("coordinate", "receive", "both")
ROUTES: Final = (INIT, PREPARE, COMPLETE, FROM_DISTRIBUTED, DESTROY)
# What the steps are called where they are counted.
PHASES: Final = {
    INIT: "init",
    PREPARE: "arm",
    COMPLETE: "receive",
    FROM_DISTRIBUTED: "receive",
    END: "end",
    DESTROY: "destroy",
}
T = TypeVar("T")
ANSWER_SECS: Final = 1.0  # of an undo, that an answer waits for
_log = logging.getLogger(__name__)


class SyncEndpoint:
    """Beside the desk: its calls have their turn, and the sync lives on between them."""

    def __init__(
        self, fleet: Fleet, config_store: ConfigStore, book: StateJournal, holding: VersionService
    ) -> None:
        self.life = SessionLifecycle(fleet, config_store, book)
        self._config_store = config_store
        self._book = book
        self._closing = RoundCommit(self.life, RoundDelivery(self.life, holding))
        self._steps = SessionSteps(self.life, self._closing, holding)
        self._stored: tuple[object, AdminResponse] | None = None
        self._left_for: str | None = None  # the group whose owner asked for its end meanwhile
        self._coming: Owner | None = None  # whose init was let in, and has not begun

    async def start(self, nursery: trio.Nursery) -> None:
        """Groups that our own last end left behind are taken down; so is one of our own task."""
        self._coming = self._left_for = self._stored = None
        left, self._book.left_in_group = self._book.left_in_group, ()
        if left:
            self.life.end_of_before(nursery, left, self._book.left_group)
        self.life.start(nursery)

    def stop(self) -> None:
        self.life.stop()

    def takes(self, route: AdminRoute) -> bool:
        if self._config_store.config.weight_sync.mode not in MODES and not self._under_way:
            return False
        closes = route.path == END and self.life.session.open
        return route.path in ROUTES or closes

    def stored(self, call: AdminCall) -> AdminResponse | None:
        """What the same call, asked before, came to: nobody heard it, or it was a complete."""
        if self._stored is not None and self._stored[0] == call.key:
            return self._stored[1]
        return None

    def keep(self, key: object, answer: AdminResponse) -> None:
        """Nobody waited for it any more."""
        if isinstance(key, tuple) and key[1:2] and key[1] in PHASES:
            self._stored = (key, answer)

    async def before_turn(self, call: AdminCall) -> None:
        """What must not wait for whoever has the turn. Raises HttpError."""
        if call.route.path == INIT:
            self._coming = await _judged(self._make_room(call))
        elif call.route.path == DESTROY and self.life.busy.locked():
            owner = self.life.session.owner
            if owner is not None and _names(call, owner.group_name):
                self._left_for = owner.group_name
                self.life.interrupt("its destroy was asked for", "destroyed")

    def has_had_its_turn(self, call: AdminCall) -> None:
        """Whatever came of it."""
        if call.route.path == INIT:
            self._coming = None

    async def perform(self, call: AdminCall, workers: Sequence[Worker]) -> AdminResponse:
        """Raises HttpError: then nothing was sent."""
        if (stored := self.stored(call)) is not None:
            return stored  # it was asked twice at once
        life, ok = self.life, False
        await life.until_settled()
        async with life.busy:
            self._stored, began = None, trio.current_time()
            for member in life.members.values():
                if isinstance(member, WorkerMember):
                    member.headers = call.credentials
            try:
                answer = await _judged(self._step(call, workers))
                ok = answer.ok
            finally:
                secs = trio.current_time() - began
                life.meters.note(PHASES[call.route.path], secs, ok=ok)
                life.wind_up()
        if life.session.state is SyncState.ABORTING:
            with trio.move_on_after(ANSWER_SECS):
                await life.until_idle()
        if call.route.path == COMPLETE:
            self._stored = (call.key, answer)
        return answer

    async def before_continue(self, headers: Mapping[str, str]) -> dict[str, object]:
        """What is to be told of who stays out, and of a round that is open: it ends here."""
        told = await self._end_of_round(headers)
        out = {"uncertain": dict(self._book.reasons)} if self._book.reasons else {}
        return {**out, **told}

    async def _end_of_round(self, headers: Mapping[str, str]) -> dict[str, object]:
        """Well or not."""
        life = self.life
        if (
            not life.session.open
            or life.session.state is not SyncState.GROUPED
            or life.busy.locked()
        ):
            return {}
        async with life.busy:
            try:
                if await life.owner_has_hung_up():
                    # Whatever it had sent: nobody is there any more who could say that it was all.
                    life.interrupt("the trainer is gone: its connection has ended", "owner_dead")
                    return {}
                if life.session.round.ends_itself:
                    return await self._closing.close(headers)
                return {"uncertain": await self._closing.give_up()}
            finally:
                life.wind_up()

    def refuse_beside(self, route: AdminRoute) -> None:
        """Raises HttpError 409 for what would mix with the weights that are on their way."""
        session = self.life.session
        quiet = session.state in (SyncState.IDLE, SyncState.GROUPED) and not session.open
        if route.kind is Kind.UPDATE and not quiet and route.path != END:
            message = f"a weight sync is under way: {self.life.describe()}"
            raise HttpError(409, message, "sync_in_progress", detail=message)

    def status(self) -> dict[str, Any]:
        return self.life.status()

    @property
    def _under_way(self) -> bool:
        return self.life.session.state is not SyncState.IDLE

    async def _step(self, call: AdminCall, workers: Sequence[Worker]) -> AdminResponse:
        steps, path = self._steps, call.route.path
        if path == INIT:
            return await steps.init(call, workers)
        if path == DESTROY:
            left_for, self._left_for = self._left_for, None
            if left_for is not None and not self._under_way:
                return steps.left_already(call)
        each: dict[str, Callable[[AdminCall], Awaitable[AdminResponse]]] = {
            PREPARE: steps.prepare,
            COMPLETE: steps.complete,
            FROM_DISTRIBUTED: steps.update,
            DESTROY: steps.destroy,
            END: steps.end,
        }
        return await each[path](call)

    async def _make_room(self, call: AdminCall) -> Owner:
        """Who asks. Raises HttpError 409 while the owner of the present group lives."""
        asked = init_of(object_of(call.body))
        life = self.life
        await life.until_settled()
        while self._under_way:
            if life.session.state is not SyncState.ABORTING:
                await self._release(asked)
            await life.until_idle()
        now = trio.current_time()
        if self._coming is not None:
            raise _owned(
                self._coming, self._coming.in_words(now, SyncState.JOINING), SyncState.JOINING
            )
        return Owner(asked.group_name, asked.address, now, call.caller)

    async def _release(self, asked: InitAsked) -> None:
        life = self.life
        if asked.force:
            life.interrupt(f"{asked.address} took it over", "forced")
        elif life.ending:
            return
        elif await life.owner_lives():
            owner = life.session.owner
            assert owner is not None
            raise _owned(owner, life.describe(), life.session.state)
        else:
            _log.warning("replaced stale group: %s", life.describe())
            life.interrupt("its trainer is gone, and another one came", "owner_dead")


def _owned(owner: Owner, words: str, state: SyncState) -> HttpError:
    message = f"another trainer owns the weight sync: {words}"
    holder = {**owner.told(trio.current_time()), "state": state.value}
    return HttpError(409, message, "sync_owned", detail=message, owner=holder)


async def _judged(step: Awaitable[T]) -> T:
    """What can't be done, in HTTP's words. Raises HttpError."""
    try:
        return await step
    except OutOfPlace as error:
        message = str(error)
        raise HttpError(error.status, message, "sync_out_of_place", detail=message) from None
    except (GroupError, RankLayoutError) as error:
        message = str(error)
        raise HttpError(400, message, "sync_malformed", detail=message) from None


def _names(call: AdminCall, group_name: str) -> bool:
    try:
        return group_name_of(object_of(call.body)) == group_name
    except GroupError:
        return False

"""One update from its request to its answer, over the scheduler's pause (api-server.md 2.4).

    active requests? ──> stage (thread) ──> drop ──> swap (thread) ──> forget old keys, new version
Invariant: requests are dropped only once the new weights are known to fit. What fails leaves the
old weights whole and says so. Keys and values computed under old weights are never used again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from omni_proxy.collective.specs import GroupError
from omni_proxy.replica.text.admin import Answer
from omni_proxy.replica.text.scheduler import TextScheduler
from omni_proxy.replica.text.slow import PeerFault
from omni_proxy.replica.weights.target import ApplyFault, DamagedFault, Staged, Target, WeightsFault

log = logging.getLogger(__name__)

ACTIVE = (
    "active requests are present; set abort_all_requests=true or pause_generation with "
    "mode=retract before updating weights"
)
ACTIVE_ERROR = "active requests present during weight update"
UPDATED = "Succeeded to update parameter online."
IDS_TOLD = 16

Stage: TypeAlias = Callable[[], Staged]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What an update's caller wants besides the weights. `pause_on_failure`: the route's custom."""

    abort_all_requests: bool = False
    flush_cache: bool = True
    weight_version: str | None = None
    torch_empty_cache: bool = False
    keep_pause: bool = False
    pause_on_failure: bool = False

    @classmethod
    def of(cls, payload: Mapping[str, Any], *, pause_on_failure: bool) -> Wish:
        version = payload.get("weight_version")
        return cls(
            abort_all_requests=bool(payload.get("abort_all_requests", False)),
            flush_cache=bool(payload.get("flush_cache", True)),
            weight_version=None if version is None else str(version),
            torch_empty_cache=bool(payload.get("torch_empty_cache", False)),
            keep_pause=bool(payload.get("keep_pause", False)),
            pause_on_failure=pause_on_failure,
        )


@dataclass(slots=True)
class Session:
    """What came between begin and end of one sync: all of it is swapped in at its end."""

    staged: Staged
    weight_version: str | None = None


class Lifecycle:
    """All but the yielded steps runs in the scheduler's thread."""

    def __init__(self, scheduler: TextScheduler, target: Target) -> None:
        self._scheduler = scheduler
        self._target = target
        self.session: Session | None = None

    def open_session(self) -> None:
        self.session = Session(Staged(self._target))

    def update(
        self, wish: Wish, stage: Stage, told: Mapping[str, Any], *, in_session: bool = True
    ) -> Generator[Callable[[], Any], Any, Answer]:
        """Run one update; `told` is in its answer's data.

        While a session is open it keeps the new weights, but for an update not `in_session`.
        """
        active = self._scheduler.active_ids()
        if active and not (wish.abort_all_requests or self._retracted):
            return self._refuse(wish, active)
        dropped, flushed = 0, None
        try:
            staged = yield stage
            if wish.abort_all_requests:
                dropped = self._scheduler.drop_all()
            if self.session is not None and in_session:
                self._keep(self.session, staged, wish)
            else:
                yield from self.swap(staged, wish)
                flushed = True if wish.flush_cache else None
        except Exception as error:  # whatever it was, the caller must learn what weights there are
            return self._failed(wish, error, {"num_paused_requests": dropped, **told})
        if wish.keep_pause:
            self._hold()
        return True, UPDATED, self._data(wish, dropped, flushed) | dict(told), None

    def swap(self, staged: Staged, wish: Wish) -> Generator[Callable[[], Any], Any, None]:
        """Put new weights in place and forget what was computed with the old ones."""
        scheduler = self._scheduler
        # No request that goes on may mix the keys of two sets of weights.
        scheduler.roster.retract()
        try:
            yield staged.apply
        except PeerFault as fault:
            staged.undo()
            raise ApplyFault(str(fault)) from fault
        # The swap is done at every rank: one that is late with this has it none the less.
        with suppress(PeerFault):
            yield staged.forget
        # Even where the caller wants no flush: what is kept there belongs to the old weights.
        scheduler.cache.flush()
        if wish.weight_version is not None:
            scheduler.weight_version = wish.weight_version
        if wish.torch_empty_cache and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def end_session(self) -> Generator[Callable[[], Any], Any, Answer]:
        """Swap in what the session holds; refused under running requests, else it is over then."""
        session, scheduler = self.session, self._scheduler
        if session is None:
            told = "no weight-update session is open; call begin_weight_update() first"
            return False, told, {}, told
        active = scheduler.active_ids()
        if active and not scheduler.paused:
            return self._refuse(Wish(), active)
        count = len(session.staged)
        wish = Wish(weight_version=session.weight_version, pause_on_failure=True)
        try:
            yield from self.swap(session.staged, wish)
        except Exception as error:  # as in an update
            self.session = None
            return self._failed(wish, error, {"tensors": count})
        self.session = None
        data = {"tensors": count, "weight_version": scheduler.weight_version}
        return True, "Succeeded to end weight update.", data, None

    def name_version(self, version: str) -> None:
        """Call the weights `version`: at once, or those of the open session at its end."""
        if self.session is not None:
            self.session.weight_version = version
        else:
            self._scheduler.weight_version = version

    @property
    def _retracted(self) -> bool:
        return self._scheduler.paused and self._scheduler.pause_mode == "retract"

    def _keep(self, session: Session, staged: Staged, wish: Wish) -> None:
        session.staged.update(staged)
        if wish.weight_version is not None:
            session.weight_version = wish.weight_version

    def _hold(self) -> None:
        """Pause, in place unless it is paused already."""
        if not self._scheduler.paused:
            self._scheduler.pause("in_place")

    def _refuse(self, wish: Wish, active: list[str]) -> Answer:
        if wish.keep_pause or wish.pause_on_failure:
            self._hold()
        data = {
            "active_request_count": len(active),
            "active_request_ids": active[:IDS_TOLD],
            "abort_all_requests": wish.abort_all_requests,
            "pause_mode": self._scheduler.pause_mode,
            "engine_paused": self._scheduler.paused,
        }
        return False, ACTIVE, data, ACTIVE_ERROR

    def _failed(self, wish: Wish, error: Exception, told: dict[str, Any]) -> Answer:
        whole = f"the weights of version {self._scheduler.weight_version!r} are whole"
        match error:
            case WeightsFault() | GroupError() | PeerFault():
                message = f"{str(error).rstrip('.')}. Nothing was changed: {whole}"
            case ApplyFault():
                message = f"The swap failed and was undone: {whole}. {error}"
            case DamagedFault():
                message = f"The weights are damaged: update them before you continue. {error}"
            case _:
                log.error("a weight update failed", exc_info=error)
                message = f"{type(error).__name__}: {error}. Nothing was changed: {whole}"
        if wish.keep_pause or wish.pause_on_failure or isinstance(error, DamagedFault):
            self._hold()
        return False, message, self._data(wish, 0, None) | told, message

    def _data(self, wish: Wish, dropped: int, flushed: bool | None) -> dict[str, Any]:
        return {
            "num_paused_requests": dropped,
            "flush_cache": wish.flush_cache,
            "flush_success": flushed,
            "keep_pause": wish.keep_pause,
            "engine_paused": self._scheduler.paused,
        }

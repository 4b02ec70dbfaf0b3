"""One weight update from request to result, including the scheduler's pause (note:api-server 2.4).

    active requests? ──> stage (thread) ──> drop ──> swap (thread) ──> flush KVs, set version
Invariant: requests are dropped only after the new weights passed all checks. A failed update leaves
the old weights unchanged and reports it. KVs computed with old weights are never used again: a
request that runs during a swap without a pause is recomputed and continues with the new weights.
Weights are `open` while a single bucket may not be the last one (note:two-phase 7, S7), `uncertain`
if such a sync can no longer finish or a swap failed halfway; requests are accepted in both states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import torch

from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.replica.text.operations import (
    DAMAGED,
    BackgroundStep,
    OperationOutcome,
    PeerError,
    Step,
)
from omni_proxy.replica.text.scheduler import TextScheduler
from omni_proxy.replica.weights.live_tensors import (
    ApplyError,
    DamagedWeightsError,
    LiveTensors,
    StagedTensors,
    WeightsError,
)
from omni_proxy.replica.weights.receive_state import CallOutOfOrder


class IntegrityState(StrEnum):
    WHOLE = "whole"
    OPEN = "open"
    UNCERTAIN = "uncertain"


class VersionIntegrity:
    """Whether the live weights are all of one version.

    `buckets` counts the single buckets applied since they last were.
    """

    def __init__(self) -> None:
        self.standing = IntegrityState.WHOLE
        self.buckets = 0

    def bucket(self, *, last: bool) -> None:
        """A bucket of a sync was applied; `last` if it is declared to be the last one."""
        if last:
            self.whole()
            return
        self.buckets += 1
        if self.standing is IntegrityState.WHOLE:
            self.standing = IntegrityState.OPEN

    def whole(self) -> None:
        self.standing, self.buckets = IntegrityState.WHOLE, 0

    def left(self) -> None:
        """The trainer closed its group in an orderly way."""
        if self.standing is IntegrityState.OPEN:
            self.whole()

    def broken(self) -> None:
        """An open sync will not be finished."""
        if self.standing is IntegrityState.OPEN:
            self.standing = IntegrityState.UNCERTAIN

    def damaged(self) -> None:
        """A swap failed halfway: the live tensors are a mix of two versions."""
        self.standing = IntegrityState.UNCERTAIN

    def facts(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"weights": self.standing.value, "buckets_applied": self.buckets}

    def describe(self, version: str) -> str:
        """The state of the weights as text, for error messages."""
        if self.standing is IntegrityState.WHOLE:
            return f"the weights of version {version!r} are whole"
        if not self.buckets:
            return (
                f"the weights are only in part those of version {version!r}: update all of them "
                "before you rely on them"
            )
        return (
            f"the weights are those of version {version!r} with {self.buckets} buckets of a sync "
            "that was not finished: sync all of them before you rely on them"
        )


log = logging.getLogger(__name__)

ACTIVE = (
    "active requests are present; set abort_all_requests=true or pause_generation with "
    "mode=retract before updating weights"
)
ACTIVE_ERROR = "active requests present during weight update"
UPDATED = "Succeeded to update parameter online."
IDS_SHOWN = 16

# Yields the steps that read or receive new values, and returns them.
StagingSteps: TypeAlias = Generator[Step, Any, StagedTensors]
PayloadFields: TypeAlias = Mapping[str, Any]


def stage_in_background(step: Callable[[], StagedTensors]) -> StagingSteps:
    """Staging in a single step that doesn't halt the stage."""
    staged: StagedTensors = yield step
    return staged


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOptions:
    """Options of an update. `pause_on_failure` is set by the route.

    With `whole`, the tensors are a complete update; else they are one bucket of it.
    """

    abort_all_requests: bool = False
    flush_cache: bool = True
    weight_version: str | None = None
    torch_empty_cache: bool = False
    keep_pause: bool = False
    pause_on_failure: bool = False
    whole: bool = True

    @property
    def last(self) -> bool:
        """Whether the caller declares that this is the last bucket of the sync."""
        return self.whole or self.weight_version is not None or self.flush_cache

    @classmethod
    def of(
        cls,
        payload: PayloadFields,
        *,
        pause_on_failure: bool,
        flush_cache: bool = True,
        whole: bool = True,
    ) -> UpdateOptions:
        """Parse a request's fields; `flush_cache` is the default of its field."""
        version = payload.get("weight_version")
        return cls(
            abort_all_requests=bool(payload.get("abort_all_requests", False)),
            flush_cache=bool(payload.get("flush_cache", flush_cache)),
            weight_version=None if version is None else str(version),
            torch_empty_cache=bool(payload.get("torch_empty_cache", False)),
            keep_pause=bool(payload.get("keep_pause", False)),
            pause_on_failure=pause_on_failure,
            whole=whole,
        )


@dataclass(slots=True)
class OpenUpdate:
    """The tensors received between begin and end of an update, swapped in together at its end."""

    staged: StagedTensors
    weight_version: str | None = None


class Lifecycle:
    """Runs updates. Except for the yielded steps, all code runs in the scheduler's thread."""

    def __init__(self, scheduler: TextScheduler, target: LiveTensors) -> None:
        self._scheduler = scheduler
        self._target = target
        self.open_update: OpenUpdate | None = None
        self.integrity = VersionIntegrity()

    @property
    def version(self) -> str:
        return self._scheduler.weight_version

    def begin_update(self) -> None:
        self.open_update = OpenUpdate(StagedTensors(self._target))

    def discard_update(self) -> Generator[Step, Any, None]:
        """Discard the open update, if there is one."""
        open_update, self.open_update = self.open_update, None
        if open_update is not None:
            with suppress(PeerError):
                yield BackgroundStep(open_update.staged.forget)

    def update_when_idle(
        self,
        options: UpdateOptions,
        staging: StagingSteps,
        details: PayloadFields,
        *,
        into_open_update: bool = True,
    ) -> Generator[Step, Any, OperationOutcome]:
        """Run one update, refused if requests are running; `details` become part of the result.

        An open update collects the new weights until its end; with `into_open_update` False, this
        one takes effect immediately.
        """
        active = self._scheduler.active_ids()
        if active and not (options.abort_all_requests or self._retracted):
            staging.close()
            return self._refuse(options, active)
        outcome = yield from self.apply_update(
            options, staging, details, into_open_update=into_open_update
        )
        return outcome

    def apply_update(
        self,
        options: UpdateOptions,
        staging: StagingSteps,
        details: PayloadFields,
        *,
        into_open_update: bool = True,
    ) -> Generator[Step, Any, OperationOutcome]:
        """Like `update_when_idle`, but not refused if requests are running."""
        dropped, flushed = 0, None
        staged: StagedTensors | None = None
        try:
            staged = yield from staging
            if options.abort_all_requests:
                dropped = self._scheduler.drop_all()
            if self.open_update is not None and into_open_update:
                self._keep(self.open_update, staged, options)
            else:
                yield from self.swap(staged, options)
                flushed = True if options.flush_cache else None
        except Exception as error:  # of any kind: the response must report the state of the weights
            if staged is not None:
                with suppress(PeerError):
                    yield BackgroundStep(staged.forget)
            return self.failed(options, error, {"num_paused_requests": dropped, **details})
        if options.keep_pause:
            self._hold()
        return True, UPDATED, self._data(options, dropped, flushed) | dict(details), None

    def swap(self, staged: StagedTensors, options: UpdateOptions) -> Generator[Step, Any, None]:
        """Swap in new weights and drop everything that was computed with the old ones."""
        scheduler = self._scheduler
        # No running request may mix keys of two sets of weights.
        scheduler.batch_queue.retract()
        try:
            # An undo is needed only if another rank fails.
            yield staged.apply if self._target.split else staged.apply_without_rollback
        except PeerError as error:
            staged.undo()
            raise ApplyError(str(error)) from error
        # The swap is done at every rank, also at one that is late with this step.
        with suppress(PeerError):
            yield staged.forget
        # Even without `flush_cache`: cached prefixes belong to the old weights.
        scheduler.weights_changed()
        self.integrity.bucket(last=options.last)
        if options.weight_version is not None:
            scheduler.weight_version = options.weight_version
        if options.torch_empty_cache and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def end_update(self, *, running: bool = False) -> Generator[Step, Any, OperationOutcome]:
        """Swap in the tensors of the open update and end it.

        Refused if requests are running, unless `running` allows it; they are recomputed then.
        """
        open_update, scheduler = self.open_update, self._scheduler
        if open_update is None:
            # SGLang's text, as trainers may compare it.
            details = "no weight-update session is open; call begin_weight_update() first"
            return False, details, {}, details
        active = scheduler.active_ids()
        if active and not scheduler.paused and not running:
            return self._refuse(UpdateOptions(), active)
        count = len(open_update.staged)
        options = UpdateOptions(weight_version=open_update.weight_version, pause_on_failure=True)
        try:
            yield from self.swap(open_update.staged, options)
        except Exception as error:  # of any kind, as in `apply_update`
            yield from self.discard_update()
            return self.failed(options, error, {"tensors": count})
        self.open_update = None
        data = {"tensors": count, "weight_version": scheduler.weight_version}
        return True, "Succeeded to end weight update.", data, None

    def overwritten(self) -> None:
        """The live weights belong to no version: drop all that was computed with earlier ones."""
        self._scheduler.batch_queue.retract()
        self._scheduler.weights_changed()
        self.integrity.damaged()

    def damaged(self) -> None:
        """Live weights, at this or another rank, are a mix of two versions: pause.

        No batch is computed until they are updated, or generation is continued explicitly.
        """
        self._scheduler.weights_changed()
        self.integrity.damaged()
        self._hold()

    def name_version(self, version: str) -> None:
        """Set the version of the live weights; with an open update, of the weights at its end."""
        if self.open_update is not None:
            self.open_update.weight_version = version
        else:
            self._scheduler.weight_version = version

    @property
    def _retracted(self) -> bool:
        return self._scheduler.paused and self._scheduler.pause_mode == "retract"

    def _keep(self, open_update: OpenUpdate, staged: StagedTensors, options: UpdateOptions) -> None:
        open_update.staged.update(staged)
        if options.weight_version is not None:
            open_update.weight_version = options.weight_version

    def _hold(self) -> None:
        """Pause in place, unless the stage is already paused."""
        if not self._scheduler.paused:
            self._scheduler.pause("in_place")

    def _refuse(self, options: UpdateOptions, active: list[str]) -> OperationOutcome:
        if options.keep_pause or options.pause_on_failure:
            self._hold()
        data = {
            "active_request_count": len(active),
            "active_request_ids": active[:IDS_SHOWN],
            "abort_all_requests": options.abort_all_requests,
            "pause_mode": self._scheduler.pause_mode,
            "engine_paused": self._scheduler.paused,
        }
        return False, ACTIVE, data, ACTIVE_ERROR

    def failed(
        self, options: UpdateOptions, error: Exception, details: PayloadFields
    ) -> OperationOutcome:
        """The result of an update that did not complete."""
        if not isinstance(error, CallOutOfOrder):  # such a call is refused and ends no sync
            self.integrity.broken()
        state = self.integrity.describe(self._scheduler.weight_version)
        match error:
            case WeightsError() | GroupError() | PeerError():
                message = self.with_state(str(error))
            case ApplyError():
                message = f"The swap failed and was undone: {state}. {error}"
            case DamagedWeightsError():
                self.damaged()
                details = {**details, DAMAGED: True}
                message = f"The weights are damaged: update them before you continue. {error}"
            case _:
                log.error("weight_update_failed", exc_info=error)
                message = self.with_state(f"{type(error).__name__}: {error}")
        if options.keep_pause or options.pause_on_failure:
            self._hold()
        status = {"status_code": error.status} if isinstance(error, CallOutOfOrder) else {}
        return False, message, self._data(options, 0, None) | status | dict(details), message

    def with_state(self, error: str) -> str:
        """The error of an update that changed nothing, with the state of the weights."""
        state = self.integrity.describe(self._scheduler.weight_version)
        return f"{error.rstrip('.')}. Nothing was changed: {state}"

    def _data(self, options: UpdateOptions, dropped: int, flushed: bool | None) -> dict[str, Any]:
        return {
            "num_paused_requests": dropped,
            "flush_cache": options.flush_cache,
            "flush_success": flushed,
            "cache_epoch": self._scheduler.cache.epoch,
            "keep_pause": options.keep_pause,
            "engine_paused": self._scheduler.paused,
        }

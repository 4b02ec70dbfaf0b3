"""This rank's membership in trainers' groups: join, arm, wait, leave (note:two-phase 1, 7).

Invariant: blocking calls run in an operation's steps, decisions in the stage's thread. All
announced tensors are validated before a rank is armed. After a failure, no rank is armed, the live
weights are unchanged, and another trainer can join. Methods that yield are parts of operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from omni_proxy.process_group.blocking_call import CancelToken
from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan, parse_plans
from omni_proxy.replica.text.operations import (
    BackgroundStep,
    InterruptibleCall,
    PeerError,
    Step,
)
from omni_proxy.replica.weights.live_tensors import (
    LiveTensors,
    StagedTensors,
    TensorSignature,
    WeightsError,
)
from omni_proxy.replica.weights.receive_state import (
    CONFLICT_STATUS,
    CallOutOfOrder,
    GroupMembership,
    ReceiveEvent,
    ReceivePhase,
    ReceiveState,
    TransferRecord,
)

if TYPE_CHECKING:
    from omni_proxy.process_group.receiver import PendingReceive, Received, Receiver
    from omni_proxy.process_group.rendezvous import Rendezvous

# The longest deadline that a request or a setting may have.
MAX_DEADLINE_SECS = 3600.0

Isolation = Literal["process", "thread"]
T = TypeVar("T")
StepGenerator = Generator[Step, Any, T]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveSettings:
    """How a replica receives weights, and its timeouts.

    `isolation` is where the blocking receive runs. All ranks must join within `join_secs` and be
    armed within `ready_secs`; a receive without progress for `stall_secs` fails; a completion
    waits up to `receive_secs` for tensors that have not been received.
    """

    isolation: Isolation = "process"
    join_secs: float = 300.0
    ready_secs: float = 60.0
    receive_secs: float = 300.0
    stall_secs: float = 30.0


DEFAULT_RECEIVE_SETTINGS = ReceiveSettings()


@dataclass(frozen=True, slots=True)
class ArmRequest:
    """The tensors to receive, armed within `ready_secs`; `whole` if they are a complete update."""

    group_name: str
    plans: tuple[TensorPlan, ...]
    ready_secs: float
    whole: bool = False


@dataclass(slots=True)
class PendingTransfer:
    """One transfer and its receiver; `armed` and `received` are set by the threads of its steps.

    `whole` means a complete update, not one bucket of it. `buckets_received` is set at its end.
    """

    transfer: TransferRecord
    plans: tuple[TensorPlan, ...]
    whole: bool = False
    buckets_received: int = 0
    armed: PendingReceive | None = None
    received: Received | None = None

    def close(self) -> None:
        """Release the memory; idempotent."""
        received, self.received = self.received, None
        armed, self.armed = self.armed, None
        if armed is not None:
            self.buckets_received = armed.progress().buckets_done
        if received is not None:
            received.close()


class TrainerGroups:
    """The groups of one rank; `size` ranks run in lockstep.

    Except for steps, all code runs in the stage's thread.
    """

    def __init__(
        self, name: str, target: LiveTensors, terms: ReceiveSettings, *, size: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.terms = terms
        self.receive_state = ReceiveState()
        self._name = name
        self._target = target
        self._size = size
        self._clock = clock
        self._receiver: Receiver | None = None
        self._current: PendingTransfer | None = None
        self._joining: dict[str, CancelToken] = {}  # of the groups that are still joining

    # Groups

    def join(self, rendezvous: Rendezvous) -> StepGenerator[None]:
        """Raises GroupError, PeerError, and CallOutOfOrder for a name in use by a live trainer."""
        group = GroupMembership(
            rendezvous.group_name,
            f"{rendezvous.master_address}:{rendezvous.master_port}",
            rendezvous.rank,
            rendezvous.world_size,
            rendezvous.backend,
        )
        known, name = self.receive_state.begin_join(group), group.group_name
        stop = self._joining[name] = CancelToken()
        try:
            # All ranks join or none; a rank that cannot join is reported to the others.
            yield BackgroundStep(
                InterruptibleCall(partial(self._join, rendezvous, stop, known), stop.cancel)
            )
        except CallOutOfOrder:
            self.receive_state.keep_existing(group)
            raise
        except GroupError:
            self._not_joined(group)
            raise
        except Exception:
            # A group without all ranks is useless, whatever the error.
            with suppress(PeerError):
                yield BackgroundStep(partial(self._destroy, name))
            self._not_joined(group)
            raise
        finally:
            if self._joining.get(name) is stop:
                del self._joining[name]
        if not self.receive_state.complete_join(group):
            raise GroupError(f"group {name!r} was destroyed")
        self._end_transfer(name)

    def leave(self, name: str) -> StepGenerator[None]:
        """Ends the group and any transfer over it; raises CallOutOfOrder if there is none."""
        self.refresh()
        self.receive_state.require_group(name)
        if name in self._joining:
            # The receiver may not have the group yet; then it has nothing to destroy.
            self._joining[name].cancel(f"group {name!r} was destroyed")
        try:
            with suppress(PeerError):
                yield BackgroundStep(partial(self._destroy, name))
        finally:
            self._end_transfer(name)
            self.receive_state.leave(name)

    def _join(self, rendezvous: Rendezvous, stop: CancelToken, known: bool) -> None:
        receiver = self._opened()
        try:
            receiver.init(rendezvous, stop)
        except GroupError as error:
            groups = receiver.status()["groups"] if known else []
            if any(group["group_name"] == rendezvous.group_name for group in groups):
                raise CallOutOfOrder(
                    f"the group already exists: {error}", CONFLICT_STATUS
                ) from None
            raise

    def _opened(self) -> Receiver:
        # Most replicas never join a group, so its imports are local.
        if self._receiver is None:
            from omni_proxy.process_group.receiver import GroupLimits, open_receiver

            terms = self.terms
            # The trainer sends nothing before its slowest receiver is armed.
            first_byte_secs = max(terms.stall_secs, terms.ready_secs)
            limits = GroupLimits(stall_secs=terms.stall_secs, first_byte_secs=first_byte_secs)
            self._receiver = open_receiver(self.terms.isolation, limits, name=self._name)
        return self._receiver

    def _destroy(self, name: str) -> None:
        if self._receiver is not None:
            with suppress(GroupError):  # it has already ended
                self._receiver.destroy(name)

    def _not_joined(self, group: GroupMembership) -> None:
        if self.receive_state.abort_join(group):
            self._end_transfer(group.group_name)

    def _end_transfer(self, name: str) -> None:
        """End the transfer of an ended group, unless it is being applied."""
        current = self._current
        if current is None or self.receive_state.state is ReceivePhase.APPLYING:
            return
        if current.transfer.group_name == name:
            self._current = None

    # Receiving

    def planned(self, payload: dict[str, Any]) -> tuple[TensorPlan, ...]:
        """Check announced tensors against the model, in a step; raises GroupError, WeightsError."""
        plans = parse_plans(payload)
        staged = StagedTensors(self._target)
        for plan in plans:
            for tensor in plan.tensors:
                staged.check(
                    tensor.name, TensorSignature(getattr(torch, tensor.dtype), tensor.shape)
                )
        return plans

    def arm(self, wanted: ArmRequest, *, halting: bool) -> StepGenerator[PendingTransfer]:
        """Arm every rank.

        Raises GroupError (also CallOutOfOrder) and PeerError; then no rank is armed.
        """
        self.refresh()
        name = wanted.group_name
        transfer = self.receive_state.prepare(name, len(wanted.plans), self._clock())
        current = self._current = PendingTransfer(transfer, wanted.plans, wanted.whole)
        try:
            yield _step(partial(self._arm, current, wanted.ready_secs), halting=halting)
        except Exception as error:  # of any kind: a rank left armed would block later transfers
            yield from self._disarm(current, error)
            raise
        if not self.receive_state.report(transfer, ReceiveEvent.ARMED):
            raise GroupError(f"group {name!r} was ended while it was armed")
        return current

    def completing(self, name: str) -> PendingTransfer:
        """Begin the completion of the prepared transfer and return it; raises CallOutOfOrder."""
        self.receive_state.complete(name)
        assert self._current is not None
        return self._current

    def await_received(
        self, current: PendingTransfer, secs: float, *, halting: bool
    ) -> StepGenerator[None]:
        """Wait until every rank has received all tensors; raises what `arm` raises.

        The group has ended then.
        """
        armed = current.armed
        assert armed is not None
        try:
            wait = InterruptibleCall(partial(self._wait, current, secs), armed.abort)
            yield _step(wait, halting=halting)
        except Exception as error:  # of any kind: a rank left armed would block later transfers
            yield from self._disarm(current, error)
            raise
        self.receive_state.report(current.transfer, ReceiveEvent.RECEIVED)
        if not self.receive_state.report(current.transfer, ReceiveEvent.APPLY):
            current.close()
            raise GroupError(f"group {current.transfer.group_name!r} was ended during the transfer")

    def stage(self, current: PendingTransfer) -> StagedTensors:
        """Stage the received tensors as new values, in a step; raises WeightsError."""
        received = current.received
        assert received is not None
        staged = StagedTensors(self._target, current.close)
        try:
            for name, tensor in received.tensors().items():
                staged.add(name, tensor)
        except WeightsError:
            staged.forget()
            raise
        return staged

    def settle(self, current: PendingTransfer, *, kept: bool) -> StepGenerator[None]:
        """Handle the end of a transfer, with any outcome; `kept` if its tensors are in use."""
        self.receive_state.report(current.transfer, ReceiveEvent.SETTLED)
        if self._current is current:
            self._current = None
        if not kept:
            # If another rank could not stage its part, this rank's is discarded, too.
            with suppress(PeerError):
                yield BackgroundStep(current.close)

    def _arm(self, current: PendingTransfer, ready_secs: float) -> None:
        name = current.transfer.group_name
        current.armed = self._opened().arm(name, current.plans, ready_secs=ready_secs)

    def _wait(self, current: PendingTransfer, secs: float) -> None:
        assert current.armed is not None
        current.received = current.armed.wait(secs)

    def _disarm(self, current: PendingTransfer, error: Exception) -> StepGenerator[None]:
        """Disarm all ranks after one failed: the others cannot use the group any more."""
        transfer, refused = current.transfer, isinstance(error, GroupError)
        dropped = isinstance(error, GroupError) and error.group_dropped
        if dropped or not refused or self._size > 1:
            # A new trainer may be joining under this name: its group is not ended.
            is_current = self.receive_state.is_current(
                transfer
            ) and not self.receive_state.is_joining(transfer.group_name)
            with suppress(PeerError):
                yield BackgroundStep(
                    partial(self._release, current, str(error), destroy=is_current and not dropped)
                )
            self.receive_state.report(transfer, ReceiveEvent.LOST, str(error))
        else:
            self.receive_state.report(transfer, ReceiveEvent.REFUSED)
        if self._current is current:
            self._current = None

    def _release(self, current: PendingTransfer, why: str, *, destroy: bool) -> None:
        if current.armed is not None:
            current.armed.abort(why)
        current.close()
        if destroy:
            self._destroy(current.transfer.group_name)

    # Status

    def refresh(self) -> None:
        """Update the state if the receive has ended on its own."""
        current = self._current
        if (
            current is None
            or current.armed is None
            or self.receive_state.state is not ReceivePhase.RECEIVING
        ):
            return
        if current.transfer.completing:
            return
        if (fault := current.armed.fault()) is not None:
            self.receive_state.report(current.transfer, ReceiveEvent.LOST, str(fault))
            self._current = None
        elif current.armed.progress().buckets_done == len(current.plans):
            self.receive_state.report(current.transfer, ReceiveEvent.RECEIVED)

    def facts(self) -> dict[str, Any]:
        """JSON-ready: state, group, owner and progress for `/model_info`."""
        self.refresh()
        current = self._current
        armed = current.armed if current is not None else None
        progress = armed.progress() if armed is not None else None
        bytes_received = progress.bytes_received if progress is not None else 0
        return self.receive_state.facts(self._clock()) | {
            "isolation": self.terms.isolation,
            "buckets_done": progress.buckets_done if progress is not None else 0,
            "bytes_received": bytes_received,
            "bytes_come": bytes_received,  # the old name, for one release
            "bytes_expected": progress.bytes_expected if progress is not None else 0,
        }

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()


def _step(call: Callable[[], Any], *, halting: bool) -> Step:
    return call if halting else BackgroundStep(call)

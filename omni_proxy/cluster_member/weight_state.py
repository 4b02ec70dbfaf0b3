"""The weight state of a cluster: the holder of the lease publishes it, and others apply it. Pure.

Invariant: a worker that the holder cordons for a weight operation is cordoned at each proxy that
has applied the state, and gets its new version before it returns. If an operation changed a
worker's version, the worker is uncertain only if the state says so; a worker that a proxy itself
has marked uncertain stays uncertain otherwise.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct, field

from omni_proxy.cluster.messages import Ordinal
from omni_proxy.fleet.cordon_reasons import CHANGING_CORDONS, ROLLOUT_BATCH, UPDATING
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.shared.decoding import decode_or_none
from omni_proxy.weight_sync.protocol.journal import PauseRecord
from omni_proxy.weight_sync.protocol.published_version import Epoch, PublishedVersion
from omni_proxy.weight_sync.state_journal import StateJournal


class WeightState(Struct, frozen=True, kw_only=True):
    """A state. `fencing_token` and `number` order all states.

    `busy`: the holder's operation has not ended. `held`: URLs of cordoned workers to cordon
    reasons. `versions`: label and epoch of all workers.
    """

    fencing_token: Ordinal = field(default=0, name="token")
    number: Ordinal = 0
    holder: str = ""
    busy: bool = False
    held: dict[str, tuple[str, ...]] = {}
    versions: dict[str, tuple[str | None, Epoch]] = {}
    published: PublishedVersion = PublishedVersion(0, None)
    uncertain: dict[str, str] = {}
    pauses: dict[str, PauseRecord] = {}
    paused: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[int, int]:
        return self.fencing_token, self.number


_decoder: Final = msgspec.msgpack.Decoder(WeightState)


def encode_state(state: WeightState) -> bytes:
    return msgspec.msgpack.encode(state)


def decode_state(payload: bytes) -> WeightState | None:
    """Decode a state; None if this release can't."""
    return decode_or_none(_decoder, payload)


def collect(fleet: Fleet, journal: StateJournal, *, holder: str, busy: bool) -> WeightState:
    """The current state of this proxy, without fencing token and number."""
    workers = fleet.workers
    cordons = {
        worker.url: tuple(sorted(worker.cordon_reasons & CHANGING_CORDONS)) for worker in workers
    }
    return WeightState(
        holder=holder,
        busy=busy,
        held={url: reasons for url, reasons in cordons.items() if reasons},
        versions={
            worker.url: (worker.weight_version.label, worker.weight_version.epoch)
            for worker in workers
        },
        published=journal.published,
        uncertain=dict(journal.uncertain),
        pauses=journal.pauses(),
        paused=tuple(sorted(journal.cordoned_paused)),
    )


class FollowedWeights:
    """Applies states of other proxies here, and has the last one."""

    def __init__(self, fleet: Fleet, journal: StateJournal) -> None:
        self.state = WeightState()
        self._fleet = fleet
        self._journal = journal
        self._applied: dict[str, frozenset[str]] = {}
        self._uncertain: set[str] = set()  # URLs marked by a state, or for a lost holder
        fleet.watch_members(self._hold)

    def is_held(self, worker: Worker) -> bool:
        return worker.url in self._applied

    def note(self, state: WeightState) -> None:
        """Record a state that this proxy published."""
        self.state = state

    def apply(self, state: WeightState) -> bool:
        """Apply a state if it is newer than the last one. Returns whether it was applied."""
        before = self.state
        if state.order <= before.order:
            return False
        self.state = state
        reasons = {
            url: frozenset(cordons) & {UPDATING, ROLLOUT_BATCH}
            for url, cordons in state.held.items()
        }
        was_held = set(self._applied)
        self._applied = {url: names or frozenset((UPDATING,)) for url, names in reasons.items()}
        self._hold()
        changed = {url for url in state.versions if before.versions.get(url) != state.versions[url]}
        if before.fencing_token:
            changed |= was_held
        self._follow_uncertain(state, changed if before.fencing_token else set())
        self._journal.adopt(state.published, state.pauses, state.paused)
        for url in changed:
            self._follow_version(url, state, is_first=not before.fencing_token)
        self._release(was_held - set(self._applied))
        return True

    def orphan(self, reason: str) -> None:
        """Mark the held workers uncertain: the holder was lost during an operation."""
        reasons = dict.fromkeys(self._applied, reason)
        self._uncertain |= set(reasons)
        self._journal.mark_uncertain(reasons)
        self._applied = {}
        self._release(set(reasons))

    def _hold(self) -> None:
        for url, reasons in self._applied.items():
            worker = self._fleet.find(url)
            for reason in reasons if worker is not None else ():
                if worker is not None and reason not in worker.cordon_reasons:
                    self._fleet.cordon(worker, reason)

    def _release(self, urls: set[str]) -> None:
        for url in urls:
            worker = self._fleet.find(url)
            for reason in (UPDATING, ROLLOUT_BATCH) if worker is not None else ():
                if worker is not None and reason in worker.cordon_reasons:
                    self._fleet.uncordon(worker, reason)

    def _follow_uncertain(self, state: WeightState, changed: set[str]) -> None:
        current = self._journal.uncertain
        known = set(state.uncertain)
        self._journal.mark_uncertain(
            {url: reason for url, reason in state.uncertain.items() if url not in current}
        )
        proven = {url for url in changed if state.versions.get(url, (None, 0))[1]}
        self._journal.clear_uncertain((self._uncertain | proven) - known)
        self._uncertain = known

    def _follow_version(self, url: str, state: WeightState, *, is_first: bool) -> None:
        worker, (label, epoch) = self._fleet.find(url), state.versions.get(url, (None, 0))
        if worker is None:
            return
        # At the start, this proxy's own version probe is newer than the stored state.
        if not is_first or (epoch and worker.weight_version.label in (None, label)):
            self._fleet.set_version(worker, label, epoch)

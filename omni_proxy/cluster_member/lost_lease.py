"""Holds workers while this proxy's lease in the cluster store has ended.

Then another proxy may change weights without informing this one. So, if weights were ever changed,
a worker gets requests only while it reports the version that it had when the store was last
reached; other workers are held (cordon `cut_off`) until it is reached again. Versions are read
before the lease ends, so that a worker with the right version is never held. With
`on_loss = "refuse"` all workers are held. Invariant: no worker is held while the lease is valid, or
if weights were never changed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from omni_proxy.fleet.cordon_reasons import CUT_OFF
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker

_log = logging.getLogger(__name__)

READ_SECS: Final = 1.0  # interval of reads of the workers' versions
CHECKS_PER_LEASE: Final = (
    10  # checks during a lease; it counts as ended one check interval before its end
)

ReadLabels = Callable[[Sequence[Worker]], Awaitable[dict[Worker, str | None]]]


class CutOffHold:
    """`lease_left()`: seconds until the lease ends, negative after that; None to hold nothing.

    `trusts()`: whether workers that report the right version get requests.
    """

    def __init__(
        self,
        fleet: Fleet,
        lease_left: Callable[[], float | None],
        read_labels: ReadLabels,
        trusts: Callable[[], bool],
    ) -> None:
        self._fleet = fleet
        self._lease_left = lease_left
        self._read_labels = read_labels
        self._trusts = trusts
        self._labels: dict[Worker, str | None] = {}  # labels when the store was last reached
        self._seen_at: dict[Worker, float] = {}  # when a worker last reported its label
        self._logged = False

    def note_versions(self) -> None:
        """Accept the present versions, after a call of the proxy that changes weights."""
        now = trio.current_time()
        for worker in self._fleet.workers:
            if self._labels.get(worker) != worker.weight_version.label:
                self._labels[worker] = worker.weight_version.label
                self._seen_at[worker] = now

    async def run(self, lease_secs: float) -> None:
        """Run until cancelled; then release all workers."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, lease_secs)
                while True:
                    self._check(lease_secs)
                    await trio.sleep(lease_secs / CHECKS_PER_LEASE)
        finally:
            self._release()

    def _check(self, lease_secs: float) -> None:
        left = self._lease_left()
        if left is None or left > lease_secs / 2:
            self._labels = {worker: worker.weight_version.label for worker in self._fleet.workers}
            self._seen_at.clear()
        if left is None or left > lease_secs / CHECKS_PER_LEASE:
            self._release()
            return
        now, trusts = trio.current_time(), self._trusts()
        for worker in self._fleet.workers:
            is_proven = trusts and now - self._seen_at.get(worker, float("-inf")) < 2 * READ_SECS
            if not is_proven and CUT_OFF not in worker.cordon_reasons:
                self._fleet.cordon(worker, CUT_OFF)
            elif is_proven and CUT_OFF in worker.cordon_reasons:
                self._fleet.uncordon(worker, CUT_OFF)
        cordoned = [
            worker.url for worker in self._fleet.workers if CUT_OFF in worker.cordon_reasons
        ]
        if not self._logged:
            self._logged = True
            _log.warning("cluster_lease_lost held=%d until=store_is_reached", len(cordoned))

    async def _read(self, lease_secs: float) -> None:
        while True:
            left = self._lease_left()
            if left is not None and left < lease_secs / 2:
                now = trio.current_time()
                for worker, label in (await self._read_labels(self._fleet.workers)).items():
                    expected = self._labels.get(worker, worker.weight_version.label)
                    if label is not None and label == expected:
                        self._seen_at[worker] = now
                    else:
                        self._seen_at.pop(worker, None)
                self._check(lease_secs)
            await trio.sleep(min(READ_SECS, lease_secs / CHECKS_PER_LEASE))

    def _release(self) -> None:
        self._logged = False
        for worker in self._fleet.workers:
            if CUT_OFF in worker.cordon_reasons:
                self._fleet.uncordon(worker, CUT_OFF)

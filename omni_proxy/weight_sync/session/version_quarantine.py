"""Workers between the first call that may change their weights and the proof of what they hold.

Invariant: from `doubt` on none of them tells a version; each is let go with the version that it
proved to have, with the one from before where nothing touched it, or with none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.weight_version import WeightVersion
from omni_proxy.fleet.worker import Worker

UPDATING: Final = "updating"


class VersionQuarantine:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._held: list[Worker] = []
        self._before: dict[Worker, WeightVersion] = {}

    def __contains__(self, worker: object) -> bool:
        """Whether nobody knows for now what it holds."""
        return worker in self._before

    @property
    def labels_before(self) -> list[str | None]:
        return [version.label for version in self._before.values()]

    def hold(self, workers: Sequence[Worker]) -> None:
        """They get no new request."""
        for worker in workers:
            if UPDATING not in worker.cordon_reasons:
                self._fleet.cordon(worker, UPDATING)
                self._held.append(worker)

    def doubt(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            if worker not in self._before:
                self._before[worker] = worker.version
                self._fleet.set_version(worker, None, 0)

    def proven(self, worker: Worker, label: str | None, epoch: int) -> None:
        self._before.pop(worker, None)
        self._fleet.set_version(worker, label, epoch)

    def let_go(self, doubted: Iterable[str] = ()) -> None:
        """`doubted`: URLs of those that may hold something else than before."""
        changed = set(doubted)
        for worker, version in self._before.items():
            if worker.url not in changed and self._fleet.find(worker.url) is worker:
                self._fleet.set_version(worker, version.label, version.epoch)
        for worker in self._held:
            if UPDATING in worker.cordon_reasons:
                self._fleet.uncordon(worker, UPDATING)
        self._before.clear()
        self._held.clear()

"""Workers whose version is unknown: between the first call that may change it and its proof.

Invariant: after `clear_versions` none of them reports a version. Each leaves the quarantine with
the version that it proved to have, with its previous one if nothing touched it, or with none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.weight_version import WeightVersion
from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.state.state_journal import UPDATING


class VersionQuarantine:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._cordoned: list[Worker] = []
        self._previous: dict[Worker, WeightVersion] = {}

    def __contains__(self, worker: object) -> bool:
        """Whether its version is unknown for now."""
        return worker in self._previous

    @property
    def previous_labels(self) -> list[str | None]:
        return [version.label for version in self._previous.values()]

    def cordon(self, workers: Sequence[Worker]) -> None:
        """Keep new requests from them."""
        for worker in workers:
            if UPDATING not in worker.cordon_reasons:
                self._fleet.cordon(worker, UPDATING)
                self._cordoned.append(worker)

    def clear_versions(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            if worker not in self._previous:
                self._previous[worker] = worker.version
                self._fleet.set_version(worker, None, 0)

    def set_proven(self, worker: Worker, label: str | None, epoch: int) -> None:
        self._previous.pop(worker, None)
        self._fleet.set_version(worker, label, epoch)

    def release(self, changed: Iterable[str] = ()) -> None:
        """End it for all. `changed`: URLs of workers that may not have their previous weights."""
        changed = set(changed)
        for worker, version in self._previous.items():
            if worker.url not in changed and self._fleet.find(worker.url) is worker:
                self._fleet.set_version(worker, version.label, version.epoch)
        for worker in self._cordoned:
            if UPDATING in worker.cordon_reasons:
                self._fleet.uncordon(worker, UPDATING)
        self._previous.clear()
        self._cordoned.clear()

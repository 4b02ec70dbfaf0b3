"""Which weights each worker has, as it says itself: asked when it comes up, or was restarted.

Invariant: an epoch is never believed of a worker whose label is not the one we published last; and
of an unknown label nobody says that it is the old one.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from omni_proxy.fleet.health import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.weights.book import Book
from omni_proxy.weights.readback import labels_of


class Labels:
    """`busy(worker)`: an operation is at it, and will read its label back itself."""

    def __init__(self, fleet: Fleet, book: Book, busy: Callable[[Worker], bool]) -> None:
        self._fleet = fleet
        self._book = book
        self._busy = busy
        self.nursery: trio.Nursery | None = None
        fleet.watch_health(lambda worker, _: self.ask_soon(worker))
        fleet.watch_forgotten(self.ask_soon)

    def ask_soon(self, worker: Worker) -> None:
        here = self._fleet.find(worker.url) is worker and worker.machine.state is Health.HEALTHY
        if self.nursery is not None and here and not self._busy(worker):
            self.nursery.start_soon(self._ask, worker)

    def learn(self, worker: Worker, label: str | None) -> None:
        if label == worker.weight_version:
            return
        published = self._book.published
        ours = label is not None and label == published.label
        self._fleet.versioned(worker, label, published.epoch if ours else 0)

    async def _ask(self, worker: Worker) -> None:
        epoch = worker.weight_epoch
        labels = await labels_of([worker], {})
        if not self._busy(worker) and worker.weight_epoch == epoch:
            self.learn(worker, labels[worker])

"""Reports of engines' loads, between the processes: collected, and sent in batches.

Each process learns loads from the responses that it relays, the main process from polling; a pick
in any process needs the newest of all. Invariant: a report goes on at most `SEND_SECS` after it
came, and each target once in a batch; what was received is not sent back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import trio

from omni_proxy.fleet.engine_load import EngineLoads
from omni_proxy.fleet.worker import Worker
from omni_proxy.multiprocess.ipc import LoadRow
from omni_proxy.wire.load_report import EngineLoad, LoadReport

SEND_SECS: Final = 0.1

IdsOf = Callable[[Worker], tuple[int, int] | None]  # serial number and cell


def load_rows(targets: Iterable[Worker], ids_of: IdsOf) -> list[LoadRow]:
    """Of workers and ranks that have a report, and a serial number."""
    return [
        (ids[0], *target.engine_load.report, target.engine_load.at)
        for target in targets
        if target.engine_load is not None and (ids := ids_of(target)) is not None
    ]


def take_rows(
    loads: EngineLoads, rows: Iterable[LoadRow], find: Callable[[int], Worker | None]
) -> list[Worker]:
    """Those of which a row is the newest report."""
    taken = []
    for serial, waiting, kv_usage, at in rows:
        target = find(serial)
        if target is not None and loads.take(target, EngineLoad(LoadReport(waiting, kv_usage), at)):
            taken.append(target)
    return taken


class LoadCollector:
    """Sends what `loads` is told. `send` gets the rows."""

    def __init__(
        self, loads: EngineLoads, ids_of: IdsOf, send: Callable[[list[LoadRow]], object]
    ) -> None:
        self._ids_of = ids_of
        self._send = send
        self._new: set[Worker] = set()
        self._any_new = trio.Event()
        loads.watch(self.add)

    def add(self, target: Worker) -> None:
        self._new.add(target)
        self._any_new.set()

    async def run(self) -> None:
        while True:
            await self._any_new.wait()
            await trio.sleep(SEND_SECS)
            targets, self._new, self._any_new = self._new, set(), trio.Event()
            if rows := load_rows(targets, self._ids_of):
                self._send(rows)

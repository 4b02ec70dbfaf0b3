"""Exchanges load reports of engines between processes, in batches.

A process gets load reports from the responses that it relays, the main process also by polling; a
pick in any process needs the newest report. Invariant: a report is forwarded at most `SEND_SECS`
after its arrival, with one row per target in a batch; received rows are not sent back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import trio

from omni_proxy.fleet.engine_load import EngineLoads
from omni_proxy.fleet.worker import Worker
from omni_proxy.multiprocess.ipc.messages import LoadRow
from omni_proxy.wire.load_report import EngineLoad, LoadReport

SEND_SECS: Final = 0.1

IdsOf = Callable[[Worker], tuple[int, int] | None]  # serial number and cell


def load_rows(targets: Iterable[Worker], ids_of: IdsOf) -> list[LoadRow]:
    """Rows of the workers and ranks that have a report and a serial number."""
    return [
        LoadRow(ids[0], *target.engine_load.report, target.engine_load.at)
        for target in targets
        if target.engine_load is not None and (ids := ids_of(target)) is not None
    ]


def take_rows(
    loads: EngineLoads, rows: Iterable[LoadRow], find: Callable[[int], Worker | None]
) -> list[Worker]:
    """Apply rows that are newer than the known reports; returns their targets."""
    taken = []
    for row in rows:
        target = find(row.serial)
        load = EngineLoad(LoadReport(row.waiting, row.kv_usage), row.at)
        if target is not None and loads.take(target, load):
            taken.append(target)
    return taken


class LoadCollector:
    """Collects new reports from `loads`, and passes them to `send` in batches."""

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

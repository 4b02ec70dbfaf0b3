"""What each door is told of the fleet and the configuration: only what it does not know yet.

Invariant: a door's picture is that of one moment: rows, owner and configuration that belong
together come in one message. Who may begin a worker's trial is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from omni_proxy.config.schema import Config
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker_state import WorkerState
from omni_proxy.multiprocess.half_open_leases import HalfOpenLeases
from omni_proxy.multiprocess.messages import StateSnapshot, VoiceListMessage
from omni_proxy.multiprocess.process_slot import ProcessHandle
from omni_proxy.multiprocess.worker_ids import WorkerIds


class SnapshotPublisher:
    """`config` is what each door has to keep to."""

    def __init__(self, fleet: Fleet, roster: WorkerIds) -> None:
        self.config: Config | None = None
        self._fleet = fleet
        self._roster = roster
        self._leases = HalfOpenLeases()
        self._voices = VoiceListMessage("", None)
        self._names: frozenset[str] | None = None  # that `_voices` was made of
        self._revision = 0

    def tell_all(self, links: Sequence[ProcessHandle], *, beat: bool = False) -> None:
        """Each what is new for it; those who know all of it only on a `beat`."""
        rows = self._roster.rows() if links else ()
        for link in links:
            self._tell(link, rows, beat=beat)

    def _tell(self, link: ProcessHandle, all_rows: tuple[WorkerState, ...], *, beat: bool) -> None:
        rows = self._rows_for(link, all_rows)
        known = link.news
        news = StateSnapshot(
            revision=self._revision + 1,
            rows=None if known and rows == known.rows else rows,
            config=None if known and self.config is known.config else self.config,
            voices=self._voice_list(),
            voice_changes=link.voice_changes,
            doors=self._roster.doors,
        )
        moved = known is None or _beside_rows(known) != _beside_rows(news)
        if moved or news.rows is not None or news.config is not None or beat:
            self._revision += 1
            link.news = structs.replace(news, rows=rows, config=self.config)
            link.tell(news)

    def turn_leases(self, links: Sequence[ProcessHandle], now: float) -> None:
        owed = [
            self._roster.serial(worker)
            for worker in self._fleet.workers
            if worker.health.is_half_open and not worker.health.half_open_id
        ]
        by_index = {link.index: link for link in links if link.listening}
        acked = {index: link.acked for index, link in by_index.items()}
        losing = self._leases.turn(owed, sorted(by_index), now, lambda index: acked[index])
        for index in losing:
            link = by_index[index]
            self._leases.taken(index, link.told + 1)
            self.tell_all([link], beat=True)

    def _voice_list(self) -> VoiceListMessage:
        registry, known = self._roster.voices, self._voices
        if registry.owner != known.owner or registry.names is not self._names:
            names = registry.names
            self._names = names
            known = VoiceListMessage(
                registry.owner, None if names is None else tuple(sorted(names))
            )
            self._voices = known
        return known

    def _rows_for(
        self, link: ProcessHandle, rows: tuple[WorkerState, ...]
    ) -> tuple[WorkerState, ...]:
        """A trial that nobody runs is blocked for all but the one that may begin it."""
        if not any(row.breaker_tripped for row in rows):
            return rows
        return tuple(
            structs.replace(row, half_open_taken=True)
            if row.breaker_tripped and row.state is Health.HEALTHY and not self._may(link, row)
            else row
            for row in rows
        )

    def _may(self, link: ProcessHandle, row: WorkerState) -> bool:
        return self._leases.holder(row.serial) == link.index


def _beside_rows(news: StateSnapshot) -> tuple[object, ...]:
    return news.voices, news.voice_changes, news.doors

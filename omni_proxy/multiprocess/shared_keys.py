"""The keys of callers in all processes, and their usage, which is counted in shared memory.

Invariant: new keys apply in the main process immediately, and in the others with their next
snapshot. The memory is created when it is first needed: for a key, or for a data-plane process.
"""

from __future__ import annotations

from collections.abc import Callable

from omni_proxy.api_keys.callers import UNKNOWN_SLOT
from omni_proxy.config.schema import Config
from omni_proxy.config.tables.keys import CallerKey
from omni_proxy.dataplane.dataplane import DataPlane
from omni_proxy.multiprocess.ipc.messages import CallersMessage
from omni_proxy.multiprocess.shared_memory.key_counters import (
    KeyCounters,
    KeySlots,
    report_wrong_keys,
)
from omni_proxy.runtime_config.key_sources import KeySources


class SharedKeys:
    """`publish`: sends the keys to the data-plane processes."""

    def __init__(
        self,
        dataplane: DataPlane,
        sources: KeySources[CallerKey],
        publish: Callable[[CallersMessage], None],
    ) -> None:
        self._dataplane = dataplane
        self._sources = sources
        self._publish = publish
        self._counters: KeyCounters | None = None
        self._slots = KeySlots()
        sources.watch(self.apply)

    @property
    def counters(self) -> KeyCounters:
        """The shared memory, which the first access creates. Raises OSError."""
        if self._counters is None:
            self._counters = KeyCounters.create()
        return self._counters

    def prepare(self, new: Config) -> None:
        """Create what the keys of `new` need. Raises OSError."""
        if new.keys or new.server.api_key:
            _ = self.counters

    def apply(self) -> None:
        """Apply the newest keys: in this process immediately, in the others by a snapshot."""
        table = self._sources.table
        if self._counters is None and not self._dataplane.settings.callers.guarded:
            return
        counters = self.counters
        slots = self._slots.assign([entry.name for entry in table.entries], counters)
        self._dataplane.follow_keys(table, slots, counters)
        self._publish(
            CallersMessage(
                table.entries, tuple(slots[entry.name] for entry in table.entries), counters.highest
            )
        )

    def extend(self, index: int) -> None:
        """Add the row of a new process. Raises OSError."""
        self.counters.extend(index)
        self.apply()

    def drop_in_flight(self, index: int) -> None:
        """Clear the in-flight counts of a process that exited."""
        self.counters.drop_in_flight(index, range(self._slots.highest + 1))

    def usage(self) -> dict[str, dict[str, int]]:
        """The usage of each caller, by its name; "" is for requests without a valid key."""
        if self._counters is None:
            return {}
        self._dataplane.settings.callers.publish()
        slots = {"": UNKNOWN_SLOT, **self._slots.by_name}
        return {name: self._counters.totals(slot) for name, slot in slots.items()}

    async def report_wrong_keys(self) -> None:
        """Log requests without a valid key, until cancelled."""
        await report_wrong_keys(lambda: self._counters)

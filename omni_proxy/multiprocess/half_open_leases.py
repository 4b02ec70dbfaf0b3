"""Which data-plane process may send a half-open worker its one request: one at a time.

Invariant: a process gets the lease only after the one before it has acknowledged its loss, so two
never hold it. A lease moves on after `LEASE_SECS`, so a process without requests does not keep a
worker waiting. Pure: the time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

LEASE_SECS: Final = 0.5


@dataclass(slots=True)
class _Lease:
    process: int
    since: float
    over: bool = False
    revoked_by: int = 0  # the number of the message that says so; 0 while it holds the lease


class HalfOpenLeases:
    """Workers are given by serial number, processes by index."""

    def __init__(self) -> None:
        self._leases: dict[int, _Lease] = {}

    def holder(self, worker: int) -> int | None:
        lease = self._leases.get(worker)
        return lease.process if lease is not None and not lease.over else None

    def rotate(
        self,
        half_open: Collection[int],
        processes: Sequence[int],
        now: float,
        acked: Callable[[int], int],
    ) -> set[int]:
        """Give every worker in `half_open` a lease, and move on those that are too old.

        `acked`: how many messages a process has acknowledged. Returns the processes that lose a
        lease; the caller tells them, and calls `revoke` with the number of that message.
        """
        revoked = self._drop_unneeded(half_open, processes, acked)
        for worker in half_open if processes else ():
            lease = self._leases.get(worker)
            if lease is None:
                self._leases[worker] = _Lease(processes[0], now)
            elif lease.process not in processes:
                self._leases[worker] = _Lease(_after(lease.process, processes), now)
            elif lease.revoked_by:
                if acked(lease.process) >= lease.revoked_by:
                    self._leases[worker] = _Lease(_after(lease.process, processes), now)
            elif len(processes) > 1 and now - lease.since >= LEASE_SECS:
                lease.over = True
                revoked.add(lease.process)
        return revoked

    def _drop_unneeded(
        self, half_open: Collection[int], processes: Sequence[int], acked: Callable[[int], int]
    ) -> set[int]:
        """Leases of workers that are not half-open any more go once their process knows."""
        revoked: set[int] = set()
        for worker, lease in list(self._leases.items()):
            if worker in half_open:
                continue
            if not lease.revoked_by and lease.process in processes:
                lease.over = True
                revoked.add(lease.process)
            elif lease.process not in processes or acked(lease.process) >= lease.revoked_by:
                del self._leases[worker]
        return revoked

    def revoke(self, process: int, message: int) -> None:
        """Its leases that are over are revoked by message number `message`."""
        for lease in self._leases.values():
            if lease.process == process and lease.over and not lease.revoked_by:
                lease.revoked_by = message


def _after(process: int, processes: Sequence[int]) -> int:
    """The next in the ring."""
    later = [other for other in sorted(processes) if other > process]
    return later[0] if later else min(processes)

"""Endpoints of workers as Envoy uses them, `ip:port`, with a cache of resolved host names.

Invariant: an entry older than `FRESH_SECS` is resolved again before it is used; if that fails, it
is used for another `FRESH_SECS`. The cache has at most one entry for each worker, if the owner
calls `forget_all_but` after changes of the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from ipaddress import ip_address
from typing import Final

from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.resolver import RefusedAddress, addresses
from omni_proxy.wire.errors import HttpError

FRESH_SECS: Final = 10.0
Address = tuple[str, int]


class Endpoints:
    """The cache. `clock`: in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: dict[Address, tuple[float, tuple[str, ...]]] = {}

    def known(self, worker: Worker) -> tuple[str, ...] | None:
        """The worker's endpoints; None if its name must be resolved first, () for a Unix socket."""
        address = worker.worker.address
        if isinstance(address, str):  # a Unix socket
            return ()
        found = self._found.get(address)
        if found is not None:
            return found[1] if self._clock() < found[0] else None
        try:
            ip_address(address[0])
        except ValueError:
            return None
        endpoints = (_text(*address),)
        self._found[address] = (float("inf"), endpoints)
        return endpoints

    def newest(self, worker: Worker) -> tuple[str, ...]:
        """The worker's last resolved endpoints, of any age; () if there are none."""
        address = worker.worker.address
        found = None if isinstance(address, str) else self._found.get(address)
        return found[1] if found is not None else ()

    async def resolve(self, worker: Worker) -> tuple[str, ...]:
        """The worker's endpoints, resolved by DNS if needed. Raises HttpError 503."""
        known = self.known(worker)
        address = worker.worker.address
        if known is not None or isinstance(address, str):
            return known or ()
        try:
            resolved = await addresses(*address)
        except (OSError, RefusedAddress) as error:
            before = self._found.get(address)
            if before is None:
                raise HttpError(
                    503, f"the worker's name can't be resolved: {error}", "worker_unresolved"
                ) from None
            self._found[address] = (self._clock() + FRESH_SECS, before[1])
            return before[1]
        endpoints = tuple(_text(*each) for each in resolved)
        self._found[address] = (self._clock() + FRESH_SECS, endpoints)
        return endpoints

    def outside(self, workers: Iterable[Worker], subset: Collection[str]) -> set[Worker]:
        """The workers without an endpoint in `subset`."""
        return {worker for worker in workers if not set(self.known(worker) or ()) & set(subset)}

    def __len__(self) -> int:
        return len(self._found)

    def forget_all_but(self, workers: Iterable[Worker]) -> None:
        kept = {worker.address for worker in workers}
        for address in [each for each in self._found if each not in kept]:
            del self._found[address]


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

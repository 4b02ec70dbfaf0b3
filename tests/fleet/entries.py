"""Workers for tests: a specification by a short name, with defaults, and fleets of them."""

from collections.abc import Callable
from datetime import UTC, datetime

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker

NOW = datetime(2026, 11, 21, 5, 44, 28, tzinfo=UTC)


def entry(name: str, **fields: object) -> WorkerSpec:
    defaults: dict[str, object] = {
        "model": None,
        "capabilities": frozenset(CAPABILITIES),
        "disabled": False,
        "weight": 1,
        "max_inflight": 0,
        "origin": "file",
    }
    return WorkerSpec(url=f"http://{name}:1", **(defaults | fields))  # type: ignore[arg-type]


def heal(fleet: Fleet, worker: Worker) -> None:
    for _ in range(fleet.thresholds.rise):
        fleet.observe_probe(worker, status=200, error=None, at=NOW, epoch=worker.health.epoch)


def fleet_of(
    *entries: WorkerSpec, healthy: bool = True, kind: Callable[[], Fleet] = Fleet
) -> Fleet:
    fleet = kind()
    fleet.apply(entries, NOW)
    for worker in fleet.workers if healthy else ():
        heal(fleet, worker)
    return fleet

"""A data plane on a real port inside the test, with workers that are healthy from the start.

The admin API, the prober and files are missing; tests of those run the whole program.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime

import msgspec
import trio

from omni_proxy.config.overlay import desired_workers
from omni_proxy.config.parse import parse
from omni_proxy.config.schema import Config
from omni_proxy.config.state import SavedState
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.fleet.health_state import thresholds_of
from omni_proxy.fleet.registry import Fleet
from omni_proxy.routing.policies import RandomBelow
from tests.promises.support.clients import Client, client_of
from tests.promises.support.fakes import FakeWorker, Script, fake_workers


class Lines:
    """A log sink that a test can read."""

    def __init__(self) -> None:
        self.records: list[dict] = []

    def write(self, record: bytes) -> None:
        self.records.append(json.loads(record))


class RunningDataPlane:
    def __init__(self, fleet: Fleet, dataplane: DataPlane) -> None:
        self.fleet = fleet
        self.dataplane = dataplane
        self.workers: list[FakeWorker] = []
        self.urls: list[str] = []
        self.log = Lines()
        dataplane.recorders.access_log, dataplane.settings.access_log_is_json = self.log, True

    @property
    def address(self) -> str:
        return self.dataplane.addresses()[0]

    def client(self) -> AbstractAsyncContextManager[Client]:
        return client_of(self.address)

    def reload(self, text: str) -> None:
        self.dataplane.prepare(configured(text, self.urls))()
        self.dataplane.settings.access_log_is_json = True

    @property
    def last(self) -> dict:
        """The latest line of the access log."""
        return self.log.records[-1]

    def apply_workers(self, text: str) -> None:
        """Changes the workers to those of the configuration `text`."""
        apply_workers(self.fleet, configured(text, self.urls))

    def failures(self) -> list[int]:
        """Returns the consecutive failures of each worker."""
        return [worker.health.consecutive_failures for worker in self.fleet.workers]

    def is_idle(self) -> bool:
        return not self.dataplane.in_flight and not any(w.in_flight for w in self.fleet.workers)


def configured(text: str, urls: list[str]) -> Config:
    entries = "".join(f'[[workers]]\nurl = "{url}"\n' for url in urls)
    config = parse(f"{text}\n{entries}" if "[[workers]]" not in text else text)
    return msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, port=0))


def apply_workers(fleet: Fleet, config: Config) -> None:
    """Makes the fleet follow `config`; all its workers are healthy."""
    now = datetime.now(UTC)
    fleet.apply(desired_workers(config, (), SavedState()), now)
    for worker in fleet.workers:
        for _ in range(fleet.thresholds.rise):
            fleet.observe_probe(worker, status=200, error=None, at=now, epoch=worker.health.epoch)


@asynccontextmanager
async def run_dataplane(
    *workers: FakeWorker | str, config: str = "", random_below: RandomBelow = lambda bound: 0
) -> AsyncIterator[RunningDataPlane]:
    """Runs a data plane with these fakes or URLs as workers, and with `config`."""
    urls = [worker if isinstance(worker, str) else worker.url for worker in workers]
    parsed = configured(config, urls)
    fleet = Fleet()
    fleet.thresholds = thresholds_of(parsed)
    apply_workers(fleet, parsed)
    async with trio.open_nursery() as nursery:
        dataplane = DataPlane(fleet, parsed, admin_socket="/nowhere", sources=Sources(random_below))
        await nursery.start(dataplane.run)
        dataplane.prepare(parsed)()
        opened = RunningDataPlane(fleet, dataplane)
        opened.urls = urls
        yield opened
        nursery.cancel_scope.cancel()
    assert dataplane.loop.failures == 0, "a connection of the proxy broke on an unexpected error"
    assert opened.is_idle()


@asynccontextmanager
async def dataplane_and_client(
    *scripts: Script, config: str = ""
) -> AsyncIterator[tuple[RunningDataPlane, Client]]:
    """Runs a data plane with a fake worker for each script, and connects a client to it."""
    async with (
        fake_workers(*scripts) as workers,
        run_dataplane(*workers, config=config) as opened,
        opened.client() as client,
    ):
        opened.workers = workers
        yield opened, client

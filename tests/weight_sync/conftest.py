"""Fixtures for weight sync: scripted workers, WeightOperations over them, trainers."""

import pytest
import trio

from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.upstream_http import client
from omni_proxy.weight_sync.sync import participant, steps, transfer_steps, watchdog
from tests.admin_api.api_fixture import A, B
from tests.process_group.trainer_pool import pool
from tests.weight_sync.operation_fixture import GatedEngines, api_with
from tests.weight_sync.trainer_fixture import Trainer, open_trainer_store, sync_api
from tests.weight_sync.version_holders import ReceiveHarness

__all__ = ["pool"]


@pytest.fixture
def engines(request, monkeypatch):
    """Engines of the class that the module sets as `ENGINES`, `GatedEngines` by default."""
    return getattr(request.module, "ENGINES", GatedEngines)().install(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "proxy.weights"


@pytest.fixture
async def api(engines, folder, nursery):
    """Two healthy workers and a running service."""
    assert client.open_client.__name__ == "open_client"
    api = api_with(folder)
    await nursery.start(api.operations.run)
    return api


@pytest.fixture
async def plain(engines, folder, nursery):
    """Like `api`, in mode "off": group calls are forwarded unchanged."""
    api = api_with(folder, weight_sync=WeightSyncConfig(mode="off"))
    await nursery.start(api.operations.run)
    return api


@pytest.fixture
def listening(monkeypatch):
    """Events by URL: a worker listens until the test sets its event."""
    gone = {A: trio.Event(), B: trio.Event()}

    async def wait_until_refused(worker, endpoint):
        await gone[worker.url].wait()
        return "nothing listens at its address any more"

    monkeypatch.setattr(watchdog, "wait_until_refused", wait_until_refused)
    return gone


@pytest.fixture
async def store():
    async with open_trainer_store() as trainer_store:
        with trio.fail_after(60):
            yield trainer_store


@pytest.fixture
def trainer_with(engines, folder, nursery, store, listening, monkeypatch):
    """A function that starts a proxy with the given settings, and a trainer.

    After a failed step the other participants are awaited for tenths of a second, not for seconds.
    """
    for module in (steps, transfer_steps):
        monkeypatch.setattr(module, "GRACE_SECS", 0.3)
    monkeypatch.setattr(participant, "LATE_SECS", 0.2)

    async def begin(**settings):
        api = sync_api(folder, **settings)
        await nursery.start(api.operations.run)
        return Trainer(api, store)

    return begin


@pytest.fixture
async def trainer(trainer_with):
    return await trainer_with()


@pytest.fixture
def policy():
    """The `on_failure` setting of the fixture `running`."""
    return "quarantine"


@pytest.fixture
async def running(engines, folder, pool, policy):
    """A service in mode "receive" over two workers, with a trainer from the pool."""
    harness = ReceiveHarness(engines, folder, pool, on_failure=policy)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await harness.start(nursery)
            yield harness
            nursery.cancel_scope.cancel()
    harness.close()

"""What tests of weights share: workers that answer from a table, desks over them, trainers."""

import pytest
import trio

from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.upstream_http import client
from omni_proxy.weight_sync.session import watchdog
from tests.admin_api.house import A, B
from tests.process_group.trainer_pool import pool
from tests.weight_sync.operation_fixture import Gated, house_with
from tests.weight_sync.trainer_fixture import Trainer, store_of_a_trainer, sync_house
from tests.weight_sync.version_holders import Running

__all__ = ["pool"]


@pytest.fixture
def engines(request, monkeypatch):
    """Those that the test's module names in `ENGINES`, or the plain ones."""
    return getattr(request.module, "ENGINES", Gated)().install(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "proxy.weights"


@pytest.fixture
async def house(engines, folder, nursery):
    """Two healthy workers and a running desk."""
    assert client.open_client.__name__ == "open_client"
    made = house_with(folder)
    await nursery.start(made.desk.run)
    return made


@pytest.fixture
async def plain(engines, folder, nursery):
    """As `house`, and group calls go to its workers as they are."""
    made = house_with(folder, weight_sync=WeightSyncConfig(mode="off"))
    await nursery.start(made.desk.run)
    return made


@pytest.fixture
def listening(monkeypatch):
    """Everybody listens at its address until the test says otherwise: URL -> an event."""
    gone = {A: trio.Event(), B: trio.Event()}

    async def wait_until_refused(worker, endpoint):
        await gone[worker.url].wait()
        return "nothing listens at its address any more"

    monkeypatch.setattr(watchdog, "wait_until_refused", wait_until_refused)
    return gone


@pytest.fixture
async def store():
    async with store_of_a_trainer() as found:
        with trio.fail_after(60):
            yield found


@pytest.fixture
def trainer_with(engines, folder, nursery, store, listening):
    """Starts a proxy with these settings; the trainer before it."""

    async def begin(**settings):
        house = sync_house(folder, **settings)
        await nursery.start(house.desk.run)
        return Trainer(house, store)

    return begin


@pytest.fixture
async def trainer(trainer_with):
    return await trainer_with()


@pytest.fixture
def policy():
    """`on_failure` of the desk that is `running`."""
    return "quarantine"


@pytest.fixture
async def running(engines, folder, pool, policy):
    """A desk in mode "receive" over its workers, and the group of a trainer of the pool."""
    made = Running(engines, folder, pool, on_failure=policy)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await made.start(nursery)
            yield made
            nursery.cancel_scope.cancel()
    made.close()

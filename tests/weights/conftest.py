import pytest
import trio

from omni_proxy.config.schema import WeightSync
from omni_proxy.watch import broadcast
from omni_proxy.weights import sync_watch
from tests.front.house import A, B
from tests.weights.desks import Gated, house_with
from tests.weights.syncs import Trainer, store_of_a_trainer, sync_house


@pytest.fixture
def engines(monkeypatch):
    return Gated().install(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "proxy.weights"


@pytest.fixture
async def house(engines, folder, nursery):
    """Two healthy workers and a running desk."""
    assert broadcast.open_client.__name__ == "open_client"
    made = house_with(folder)
    await nursery.start(made.desk.run)
    return made


@pytest.fixture
async def plain(engines, folder, nursery):
    """As `house`, and group calls go to its workers as they are."""
    made = house_with(folder, weight_sync=WeightSync(mode="off"))
    await nursery.start(made.desk.run)
    return made


@pytest.fixture
def listening(monkeypatch):
    """Everybody listens at its address until the test says otherwise: URL -> an event."""
    gone = {A: trio.Event(), B: trio.Event()}

    async def until_refused(worker, endpoint):
        await gone[worker.url].wait()
        return "nobody listens at its address any more"

    monkeypatch.setattr(sync_watch, "until_refused", until_refused)
    return gone


@pytest.fixture
async def store():
    async with store_of_a_trainer() as found:
        with trio.fail_after(60):
            yield found


@pytest.fixture
async def trainer(engines, folder, nursery, store, listening):
    house = sync_house(folder)
    await nursery.start(house.desk.run)
    return Trainer(house, store)

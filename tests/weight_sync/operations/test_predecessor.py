"""Operations on weights after an upgrade: the program before must have served its last request."""

from types import SimpleNamespace

import pytest
import trio

from omni_proxy.admin_ops.operation import Operation
from omni_proxy.admin_ops.results import AdminResponse
from omni_proxy.admin_ops.routes import AdminRoute, Kind
from omni_proxy.fleet.registry import Fleet
from omni_proxy.weight_sync.operations.operation_queue import OperationQueue
from omni_proxy.wire.errors import HttpError
from tests.admin_api.api_fixture import FakeConfigStore


class Before:
    """The program before the upgrade."""

    def __init__(self) -> None:
        self.closed_idle = 0
        self.gone = trio.Event()

    def close_idle_connections(self) -> None:
        self.closed_idle += 1

    async def wait_gone(self) -> None:
        await self.gone.wait()


class Store(FakeConfigStore):
    """Waits as the real one does."""

    async def wait_predecessor_gone(self):
        if self.predecessor is not None:
            self.predecessor.close_idle_connections()
            await self.predecessor.wait_gone()
            self.predecessor = None


@pytest.fixture
def queue():
    admin = SimpleNamespace(lock_timeout_secs=5)
    store = Store.__new__(Store)
    store.config, store.fleet = SimpleNamespace(admin=admin), Fleet()
    store.operation_lock, store.predecessor = trio.Lock(), Before()
    made = OperationQueue(store, lambda *_: None, lambda _: None)
    made.store = store
    return made


async def run(queue) -> AdminResponse:
    async def perform() -> AdminResponse:
        return AdminResponse(200, {})

    operation = Operation("1", AdminRoute("/x", Kind.GROUP), "", trio.current_time())
    return await queue.run(operation, perform)


async def test_an_operation_waits_and_has_idle_connections_closed(queue, nursery, autojump_clock):
    before, done = queue.store.predecessor, []

    async def run_it():
        done.append((await run(queue)).status)

    nursery.start_soon(run_it)
    await trio.sleep(4)
    assert (before.closed_idle, done) == (1, [])
    before.gone.set()
    await trio.sleep(0.1)
    assert done == [200]
    assert queue.store.predecessor is None


async def test_an_operation_is_refused_with_the_reason_after_its_time(queue, autojump_clock):
    with pytest.raises(HttpError) as refused:
        await run(queue)
    assert refused.value.status == 503
    assert "before the upgrade" in refused.value.message
    assert queue.waiting == []

"""After an upgrade, operations wait until the previous program has served its last request."""

from types import SimpleNamespace

import pytest
import trio

from omni_proxy.admin_ops.admin_route_table import AdminRoute, Kind
from omni_proxy.admin_ops.operation import Operation
from omni_proxy.admin_ops.results import AdminResponse
from omni_proxy.fleet.registry import Fleet
from omni_proxy.weight_sync.operations.operation_queue import OperationQueue
from omni_proxy.wire.errors import HttpError
from tests.admin_api.api_fixture import FakeConfigStore


class Predecessor:
    """The program before the upgrade."""

    def __init__(self) -> None:
        self.closed_idle = 0
        self.gone = trio.Event()

    def close_idle_connections(self) -> None:
        self.closed_idle += 1

    async def wait_gone(self) -> None:
        await self.gone.wait()


class Store(FakeConfigStore):
    """Waits like the real configuration store."""

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
    store.operation_lock, store.predecessor = trio.Lock(), Predecessor()
    operation_queue = OperationQueue(store, lambda *_: None, lambda _: None)
    operation_queue.store = store
    return operation_queue


async def run(queue) -> AdminResponse:
    async def perform() -> AdminResponse:
        return AdminResponse(200, {})

    operation = Operation("1", AdminRoute("/x", Kind.GROUP), "", trio.current_time())
    return await queue.run(operation, perform)


async def test_an_operation_has_idle_connections_closed_and_waits(queue, nursery, autojump_clock):
    predecessor, statuses = queue.store.predecessor, []

    async def run_operation():
        statuses.append((await run(queue)).status)

    nursery.start_soon(run_operation)
    await trio.sleep(4)
    assert (predecessor.closed_idle, statuses) == (1, [])
    predecessor.gone.set()
    await trio.sleep(0.1)
    assert statuses == [200]
    assert queue.store.predecessor is None


async def test_an_operation_is_refused_with_the_reason_after_the_lock_timeout(
    queue, autojump_clock
):
    with pytest.raises(HttpError) as refused:
        await run(queue)
    assert refused.value.status == 503
    assert "before the upgrade" in refused.value.message
    assert queue.waiting == []

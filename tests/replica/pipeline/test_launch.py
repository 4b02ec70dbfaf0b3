import gc
import socket
import threading
from types import SimpleNamespace

import pytest
import trio

from omni_proxy.replica.pipeline.launch import _ServerLifecycle


def watchdogs():
    return [thread for thread in threading.enumerate() if thread.name == "watchdog"]


@pytest.fixture(autouse=True)
def _unfrozen():
    yield
    gc.unfreeze()


async def test_a_replica_watches_its_loop_once_it_is_ready(nursery):
    ready = trio.Event()
    life = _ServerLifecycle(1.0, runtime=SimpleNamespace(ready=ready))
    before = len(watchdogs())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nursery.start_soon(life._on_ready, listener, {"model_name": "m"})
        await trio.testing.wait_all_tasks_blocked()
        assert len(watchdogs()) == before
        ready.set()
        await trio.testing.wait_all_tasks_blocked()
        assert len(watchdogs()) == before + 1
        nursery.cancel_scope.cancel()

import threading

import pytest
import trio

from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.weight_sync.delivery.deliver import INIT, ProcessGroupSender
from omni_proxy.weight_sync.store.version_store import VersionStore
from tests.admin_api.api_fixture import A
from tests.weight_sync.operation_fixture import api_with
from tests.weight_sync.store.drafts import delete_store, store_version

PATIENCE_SECS = 60


class Sender:
    """A sender whose group never completes."""

    port = 1

    def __init__(self):
        self.closed = threading.Event()

    def wait_for_ranks(self):
        self.closed.wait(PATIENCE_SECS)

    def close(self):
        self.closed.set()


@pytest.fixture
def version(tmp_path):
    store = VersionStore(tmp_path / "versions")
    yield store_version(store)
    delete_store(store)


async def test_a_group_can_be_ended_while_all_threads_are_busy(engines, folder, version):
    senders = []

    async def open_one(_):
        senders.append(Sender())
        return senders[-1]

    engines.set_reply(A, INIT, {"success": False, "message": "no such group"}, status=400)
    sends = ProcessGroupSender(WeightSyncConfig, open_one)
    sends._threads._call_limiter.total_tokens = 1
    with trio.fail_after(PATIENCE_SECS):
        answer = await sends.send(version, api_with(folder).worker(A), {}, {})
    assert (answer.status, answer.why) == (400, "status 400: no such group")
    assert [each.closed.is_set() for each in senders] == [True]

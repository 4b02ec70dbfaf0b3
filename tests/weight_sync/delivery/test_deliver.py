import socket
import threading

import pytest
import trio

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.weight_sync.delivery.deliver import (
    INIT,
    BlockingCalls,
    ProcessGroupSender,
    _with_fields,
    is_local_address,
    local_address_towards,
)
from omni_proxy.weight_sync.store.manifest import (
    HeaderRow,
    Manifest,
    StoredVersion,
    prove_version,
)
from omni_proxy.weight_sync.store.version_store import VersionStore
from tests.admin_api.api_fixture import A
from tests.weight_sync.operation_fixture import api_with
from tests.weight_sync.store.drafts import delete_store, store_version


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("/run/worker.sock", True),
        (("127.0.0.1", 80), True),
        (("127.9.9.9", 80), True),
        (("::1", 80), True),
        (("localhost", 80), True),
        (("192.0.2.7", 80), False),
        (("2001:db8::7", 80), False),
        (("worker.example", 80), False),
    ],
)
def test_an_address_of_this_machine_is_local(address, is_local):
    assert is_local_address(address) is is_local


def test_the_local_address_is_that_of_the_route_to_the_worker():
    assert (
        local_address_towards("/run/worker.sock")
        == local_address_towards(("127.0.0.1", 9))
        == "127.0.0.1"
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp_socket:
        udp_socket.bind((local_address_towards(("127.0.0.1", 9)), 0))


def version_of(tmp_path, **digests):
    rows = {n: HeaderRow("float32", (1,), "f", 0, 4, sha256) for n, sha256 in digests.items()}
    record = Manifest(number=1, created_at="", complete=True, tensors=rows)
    return StoredVersion(record, tmp_path, in_memory=True, on_disk=False)


def checker_result(*, size=1, types=None, whole="", **sums):
    data = {"checksums": sums, "full_checksum": whole, "layout": {"tp_size": size}}
    data["tensor_metadata"] = {n: {"dtype": f"torch.{t}"} for n, t in (types or {}).items()}
    return WorkerResult("w", 200, {"results": [{"stage": "t", "data": data}]})


def test_equal_digests_prove_a_version_and_different_ones_disprove_it(tmp_path):
    version = version_of(tmp_path, a="1", b="2")
    assert prove_version(checker_result(a="1", b="2"), version).proven
    assert (
        "tensor 'b' and 0 more differ"
        in prove_version(checker_result(a="1", b="3"), version).differs
    )
    assert (
        "full_checksum is x"
        in prove_version(checker_result(a="1", b="2", whole="x"), version).differs
    )


def test_a_tensor_that_was_not_sent_is_not_compared(tmp_path):
    assert prove_version(
        checker_result(a="1", more="9", whole="x"), version_of(tmp_path, a="1")
    ).proven


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (WorkerResult("w", 404, {}), "its checker failed: status 404"),
        (WorkerResult("w", 200, {"results": []}), "reports no checksum"),
        (checker_result(other="1"), "none of the tensors as they were sent"),
        (checker_result(a="9", types={"a": "bfloat16"}), "none of the tensors as they were sent"),
        (checker_result(a="9", more="9", size=2), "no digest over whole tensors"),
    ],
)
def test_digests_that_cannot_be_compared_prove_nothing(tmp_path, result, reason):
    proof = prove_version(result, version_of(tmp_path, a="1"))
    assert (proof.proven, proof.differs) == (False, "")
    assert reason in proof.to_dict()["unverified"]


def test_a_version_without_digests_proves_nothing(tmp_path):
    assert (
        "not computed yet"
        in prove_version(checker_result(a="1"), version_of(tmp_path, a="")).reason
    )


def test_a_text_response_is_kept_under_its_new_and_its_former_key():
    result = _with_fields(WorkerResult("w", 200, "done"), {"version": 1})
    assert result.body == {"response": "done", "said": "done", "version": 1}


async def test_a_call_that_ends_another_does_not_wait_for_a_free_thread():
    threads, released = BlockingCalls("test", 1, max_ends=1), threading.Event()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(threads.run, "wait", released.wait, 30)
            nursery.start_soon(threads.run, "wait too", released.wait, 30)
            await threads.end("stop", released.set)


async def test_a_cancelled_call_continues_in_its_thread():
    threads, released = BlockingCalls("test", 1, max_ends=1), threading.Event()
    with trio.fail_after(30):
        with trio.move_on_after(0.01) as scope:
            await threads.run("wait", released.wait, 30)
        assert scope.cancelled_caught
        assert await threads.end("name", lambda: threading.current_thread().name) == (
            "weights-test-name"
        )
    released.set()


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

    async def open_sender(_):
        senders.append(Sender())
        return senders[-1]

    engines.set_reply(A, INIT, {"success": False, "message": "no such group"}, status=400)
    group_sender = ProcessGroupSender(WeightSyncConfig, open_sender)
    group_sender._threads._call_limiter.total_tokens = 1
    with trio.fail_after(PATIENCE_SECS):
        result = await group_sender.send(version, api_with(folder).worker(A), {}, {})
    assert (result.status, result.reason) == (400, "status 400: no such group")
    assert [sender.closed.is_set() for sender in senders] == [True]

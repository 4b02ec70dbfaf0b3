import socket

import pytest

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.weight_sync.delivery.deliver import here
from omni_proxy.weight_sync.delivery.over_network import our_address
from omni_proxy.weight_sync.store.manifest import Manifest, StoredVersion
from omni_proxy.weight_sync.store.safetensors_header import HeaderRow
from omni_proxy.weight_sync.store.worker_proof import proof_of


@pytest.mark.parametrize(
    ("address", "is_here"),
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
def test_a_worker_is_here_by_its_address(address, is_here):
    assert here(address) is is_here


def test_we_are_reached_at_the_address_that_the_way_to_a_worker_has():
    assert our_address("/run/worker.sock") == our_address(("127.0.0.1", 9)) == "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        trial.bind((our_address(("127.0.0.1", 9)), 0))


def version_of(tmp_path, **digests):
    rows = {n: HeaderRow("float32", (1,), "f", 0, 4, sha256) for n, sha256 in digests.items()}
    record = Manifest(number=1, created_at="", complete=True, tensors=rows)
    return StoredVersion(record, tmp_path, in_memory=True, on_disk=False)


def checker(*, size=1, types=None, whole="", **sums):
    data = {"checksums": sums, "full_checksum": whole, "layout": {"tp_size": size}}
    data["tensor_metadata"] = {n: {"dtype": f"torch.{t}"} for n, t in (types or {}).items()}
    return WorkerResult("w", 200, {"results": [{"stage": "t", "data": data}]})


def test_digests_that_are_alike_prove_it_and_others_disprove_it(tmp_path):
    version = version_of(tmp_path, a="1", b="2")
    assert proof_of(checker(a="1", b="2"), version).proven
    assert "tensor 'b' and 0 more differ" in proof_of(checker(a="1", b="3"), version).differs
    assert "full_checksum is x" in proof_of(checker(a="1", b="2", whole="x"), version).differs


def test_a_tensor_that_was_not_sent_is_not_compared(tmp_path):
    assert proof_of(checker(a="1", more="9", whole="x"), version_of(tmp_path, a="1")).proven


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (WorkerResult("w", 404, {}), "its checker failed: status 404"),
        (WorkerResult("w", 200, {"results": []}), "names no checksum"),
        (checker(other="1"), "none of the tensors as they were sent"),
        (checker(a="9", types={"a": "bfloat16"}), "none of the tensors as they were sent"),
        (checker(a="9", more="9", size=2), "no digest over whole tensors"),
    ],
)
def test_what_can_not_be_compared_proves_nothing_and_disproves_nothing(tmp_path, answer, reason):
    proof = proof_of(answer, version_of(tmp_path, a="1"))
    assert (proof.proven, proof.differs) == (False, "")
    assert reason in proof.told()["unverified"]


def test_without_digests_of_ours_there_is_nothing_to_compare_with(tmp_path):
    assert "not known yet" in proof_of(checker(a="1"), version_of(tmp_path, a="")).reason

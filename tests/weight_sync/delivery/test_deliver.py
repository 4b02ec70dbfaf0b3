import socket

import pytest

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.weight_sync.delivery.deliver import (
    _with_fields,
    is_local_address,
    local_address_towards,
)
from omni_proxy.weight_sync.store.manifest import Manifest, StoredVersion
from omni_proxy.weight_sync.store.safetensors_header import HeaderRow
from omni_proxy.weight_sync.store.worker_proof import compare_checksums


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
def test_an_address_of_this_machine_is_local(address, is_here):
    assert is_local_address(address) is is_here


def test_the_local_address_is_that_of_the_route_to_the_worker():
    assert (
        local_address_towards("/run/worker.sock")
        == local_address_towards(("127.0.0.1", 9))
        == "127.0.0.1"
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        trial.bind((local_address_towards(("127.0.0.1", 9)), 0))


def version_of(tmp_path, **digests):
    rows = {n: HeaderRow("float32", (1,), "f", 0, 4, sha256) for n, sha256 in digests.items()}
    record = Manifest(number=1, created_at="", complete=True, tensors=rows)
    return StoredVersion(record, tmp_path, in_memory=True, on_disk=False)


def checker(*, size=1, types=None, whole="", **sums):
    data = {"checksums": sums, "full_checksum": whole, "layout": {"tp_size": size}}
    data["tensor_metadata"] = {n: {"dtype": f"torch.{t}"} for n, t in (types or {}).items()}
    return WorkerResult("w", 200, {"results": [{"stage": "t", "data": data}]})


def test_equal_digests_prove_a_version_and_others_disprove_it(tmp_path):
    version = version_of(tmp_path, a="1", b="2")
    assert compare_checksums(checker(a="1", b="2"), version).proven
    assert (
        "tensor 'b' and 0 more differ" in compare_checksums(checker(a="1", b="3"), version).differs
    )
    assert (
        "full_checksum is x" in compare_checksums(checker(a="1", b="2", whole="x"), version).differs
    )


def test_a_tensor_that_was_not_sent_is_not_compared(tmp_path):
    assert compare_checksums(
        checker(a="1", more="9", whole="x"), version_of(tmp_path, a="1")
    ).proven


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
def test_digests_that_cannot_be_compared_prove_nothing(tmp_path, answer, reason):
    proof = compare_checksums(answer, version_of(tmp_path, a="1"))
    assert (proof.proven, proof.differs) == (False, "")
    assert reason in proof.to_dict()["unverified"]


def test_a_version_without_digests_proves_nothing(tmp_path):
    assert "not known yet" in compare_checksums(checker(a="1"), version_of(tmp_path, a="")).reason


def test_a_text_response_is_kept_under_its_new_and_its_former_key():
    result = _with_fields(WorkerResult("w", 200, "done"), {"version": 1})
    assert result.body == {"response": "done", "said": "done", "version": 1}

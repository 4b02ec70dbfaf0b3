"""A worker whose weights were proven by their delivery does not hash them again."""

import pytest

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.process_group.broadcast.tensor_hashing import roll_up
from omni_proxy.weight_sync.store.manifest import HeaderRow, Manifest, StoredVersion
from omni_proxy.weight_sync.sync.verification import cached_proof
from tests.admin_api.api_fixture import A, B
from tests.weight_sync.version_holders import CHECKER, DISK, VersionEngines

pytest.importorskip("torch")
DIGESTS = {"a": "1", "b": "2"}
CONTINUE = "/continue_generation"


class ReportingEngines(VersionEngines):
    """Engines that report their process and stages.

    `on_continue` runs when B continues, which is the last call of a delivery.
    """

    def __init__(self):
        super().__init__()
        self.instances = {A: "first", B: "first"}
        self.stages = {A: 1, B: 1}
        self.on_continue = lambda: None

    def default_response(self, url, path):
        if path == "/server_info":
            return {"tp_size": 1, "instance_id": self.instances[url]}
        if path == DISK:
            skipped = {"stage": "x", "data": {"skipped": True}}
            stages = [{"stage": str(at), "data": {}} for at in range(self.stages[url])]
            return {"success": True, "results": [skipped, *stages]}
        if path == CONTINUE and url == B:
            self.on_continue()
        return super().default_response(url, path)

    def checker_calls(self):
        return [self.paths(url).count(CHECKER) for url in (A, B)]


ENGINES = ReportingEngines


async def test_a_proof_from_the_delivery_is_reused(running, engines):
    completed = await running.sync(1)
    assert completed.ok, completed.body
    assert engines.checker_calls() == [1, 1]
    assert completed.body["verification"]["checked"] == [A, B]
    checksum = roll_up(running.store.current.digests)
    assert completed.body["verification"]["checksums"] == {A: checksum, B: checksum}
    assert running.operations.journal.published.targets["*"].digest == checksum
    assert running.versions() == [("v1", 1), ("v1", 1)]


async def test_weights_are_hashed_again_if_the_process_has_restarted(running, engines):
    def restart_b():
        engines.restart(B)
        engines.labels[B] = "v1"  # a label proves nothing
        engines.instances[B] = "second"

    engines.on_continue = restart_b
    completed = await running.sync(1)
    assert (completed.status, engines.checker_calls()) == (502, [2, 2])
    assert B in completed.body["uncertain"]


async def test_weights_are_hashed_again_if_the_label_differs(running, engines):
    engines.on_continue = lambda: engines.restart(B)  # one stage restarts: the process is the same
    completed = await running.sync(1)
    assert (completed.status, engines.checker_calls()) == (502, [2, 2])
    assert B in completed.body["uncertain"]


async def test_weights_are_hashed_again_if_a_worker_has_more_stages_than_proven(running, engines):
    engines.stages[B] = 2
    completed = await running.sync(1)
    assert (completed.ok, engines.checker_calls()) == (True, [2, 2])
    assert completed.body["verification"]["checked"] == [A, B]


def version_of(tmp_path, label="v1", **digests):
    rows = {n: HeaderRow("float32", (1,), "f", 0, 4, sha256) for n, sha256 in digests.items()}
    record = Manifest(number=1, created_at="", complete=True, label=label, tensors=rows)
    return StoredVersion(record, tmp_path, in_memory=True, on_disk=False)


def delivery_result(status=200, **fields):
    body = {
        "success": True,
        "checksum": roll_up(DIGESTS),
        "results": [{"stage": "t", "data": {}}],
        **fields,
    }
    return WorkerResult("w", status, body)


def test_a_digest_over_exactly_all_tensors_is_a_proof(tmp_path):
    proof = cached_proof(delivery_result(), version_of(tmp_path, **DIGESTS), "x")
    assert (proof.names, proof.digest.whole) == ({"a", "b"}, roll_up(DIGESTS))
    assert proof.is_valid("x", "v1")
    assert not proof.is_valid("y", "v1")
    assert not proof.is_valid("x", None)


@pytest.mark.parametrize(
    ("fields", "instance"),
    [
        ({}, ""),
        ({"checksum": roll_up({"a": "1"})}, "x"),
        ({"checksum": None}, "x"),
        ({"results": []}, "x"),
        ({"results": None}, "x"),
        ({"success": False}, "x"),
    ],
)
def test_an_incomplete_delivery_report_is_no_proof(tmp_path, fields, instance):
    assert (
        cached_proof(delivery_result(**fields), version_of(tmp_path, **DIGESTS), instance) is None
    )


def test_there_is_no_proof_for_a_version_without_label_or_digests(tmp_path):
    assert cached_proof(delivery_result(), version_of(tmp_path, label=None, **DIGESTS), "x") is None
    without_digests = version_of(tmp_path, a="", b="")
    assert cached_proof(delivery_result(checksum=roll_up({})), without_digests, "x") is None

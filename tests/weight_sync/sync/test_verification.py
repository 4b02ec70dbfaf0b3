"""A worker whose weights a delivery has just proven is not asked to hash them again."""

import pytest

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.weight_sync.checksum import roll_up
from omni_proxy.weight_sync.store.manifest import HeaderRow, Manifest, StoredVersion
from omni_proxy.weight_sync.sync.verification import cached_proof
from tests.admin_api.api_fixture import A, B
from tests.weight_sync.version_holders import CHECKER, DISK, VersionEngines

pytest.importorskip("torch")
DIGESTS = {"a": "1", "b": "2"}
GO_ON = "/continue_generation"


class Telling(VersionEngines):
    """They report their process and stages; `at_go_on` runs when B continues, which is the last
    call of a delivery."""

    def __init__(self):
        super().__init__()
        self.instances = {A: "first", B: "first"}
        self.stages = {A: 1, B: 1}
        self.at_go_on = lambda: None

    def default_response(self, url, path):
        if path == "/server_info":
            return {"tp_size": 1, "instance_id": self.instances[url]}
        if path == DISK:
            skipped = {"stage": "x", "data": {"skipped": True}}
            stages = [{"stage": str(at), "data": {}} for at in range(self.stages[url])]
            return {"success": True, "results": [skipped, *stages]}
        if path == GO_ON and url == B:
            self.at_go_on()
        return super().default_response(url, path)

    def hashed(self):
        return [self.paths(url).count(CHECKER) for url in (A, B)]


ENGINES = Telling


async def test_a_proof_from_the_delivery_is_reused(running, engines):
    done = await running.sync(1)
    assert done.ok, done.body
    assert engines.hashed() == [1, 1]
    assert done.body["verification"]["checked"] == [A, B]
    whole = roll_up(running.store.current.digests)
    assert done.body["verification"]["checksums"] == {A: whole, B: whole}
    assert running.operations.journal.published.targets["*"].digest == whole
    assert running.versions() == [("v1", 1), ("v1", 1)]


async def test_another_process_than_the_proven_one_is_hashed_again(running, engines):
    def begin_anew():
        engines.restart(B)
        engines.labels[B] = "v1"  # the label alone proves nothing
        engines.instances[B] = "second"

    engines.at_go_on = begin_anew
    done = await running.sync(1)
    assert (done.status, engines.hashed()) == (502, [2, 2])
    assert B in done.body["uncertain"]


async def test_weights_with_another_label_are_hashed_again(running, engines):
    engines.at_go_on = lambda: engines.restart(B)  # only a stage: the process is the same
    done = await running.sync(1)
    assert (done.status, engines.hashed()) == (502, [2, 2])
    assert B in done.body["uncertain"]


async def test_a_worker_with_more_stages_than_were_proven_is_hashed_with_all_others(
    running, engines
):
    engines.stages[B] = 2
    done = await running.sync(1)
    assert (done.ok, engines.hashed()) == (True, [2, 2])
    assert done.body["verification"]["checked"] == [A, B]


def version_of(tmp_path, label="v1", **digests):
    rows = {n: HeaderRow("float32", (1,), "f", 0, 4, sha256) for n, sha256 in digests.items()}
    record = Manifest(number=1, created_at="", complete=True, label=label, tensors=rows)
    return StoredVersion(record, tmp_path, in_memory=True, on_disk=False)


def delivered(status=200, **fields):
    body = {
        "success": True,
        "checksum": roll_up(DIGESTS),
        "results": [{"stage": "t", "data": {}}],
        **fields,
    }
    return WorkerResult("w", status, body)


def test_a_digest_over_exactly_all_tensors_is_a_proof(tmp_path):
    proof = cached_proof(delivered(), version_of(tmp_path, **DIGESTS), "x")
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
def test_a_delivery_that_proves_less_gives_no_proof(tmp_path, fields, instance):
    assert cached_proof(delivered(**fields), version_of(tmp_path, **DIGESTS), instance) is None


def test_a_version_without_label_or_digests_gives_no_proof(tmp_path):
    assert cached_proof(delivered(), version_of(tmp_path, label=None, **DIGESTS), "x") is None
    undigested = version_of(tmp_path, a="", b="")
    assert cached_proof(delivered(checksum=roll_up({})), undigested, "x") is None

"""A worker that has just proven what it holds is not asked to hash all of it again."""

import pytest

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.weight_sync.checksum import roll_up
from omni_proxy.weight_sync.session.verification import known_by
from omni_proxy.weight_sync.store.manifest import Manifest, StoredVersion
from omni_proxy.weight_sync.store.safetensors_header import HeaderRow
from tests.admin_api.house import A, B
from tests.weight_sync.holders import CHECKER, DISK, Holders

pytest.importorskip("torch")
DIGESTS = {"a": "1", "b": "2"}
GO_ON = "/continue_generation"


class Telling(Holders):
    """They tell which process answers, and of which stage; `at_go_on` happens to B when it goes on,
    which is the last thing of a delivery."""

    def __init__(self):
        super().__init__()
        self.instances = {A: "first", B: "first"}
        self.stages = {A: 1, B: 1}
        self.at_go_on = lambda: None

    def well(self, url, path):
        if path == "/server_info":
            return {"tp_size": 1, "instance_id": self.instances[url]}
        if path == DISK:
            skipped = {"stage": "x", "data": {"skipped": True}}
            stages = [{"stage": str(at), "data": {}} for at in range(self.stages[url])]
            return {"success": True, "results": [skipped, *stages]}
        if path == GO_ON and url == B:
            self.at_go_on()
        return super().well(url, path)

    def hashed(self):
        return [self.paths(url).count(CHECKER) for url in (A, B)]


ENGINES = Telling


async def test_what_the_delivery_has_proven_is_not_hashed_again(running, engines):
    done = await running.sync(1)
    assert done.ok, done.body
    assert engines.hashed() == [1, 1]
    assert done.body["verification"]["checked"] == [A, B]
    whole = roll_up(running.store.current.digests)
    assert done.body["verification"]["checksums"] == {A: whole, B: whole}
    assert running.desk.book.published.due["*"].digest == whole
    assert running.versions() == [("v1", 1), ("v1", 1)]


async def test_another_process_than_the_one_that_proved_it_is_asked_again(running, engines):
    def begin_anew():
        engines.restart(B)
        engines.labels[B] = "v1"  # the label alone would not tell
        engines.instances[B] = "second"

    engines.at_go_on = begin_anew
    done = await running.sync(1)
    assert (done.status, engines.hashed()) == (502, [2, 2])
    assert B in done.body["uncertain"]


async def test_weights_of_another_name_are_hashed_again(running, engines):
    engines.at_go_on = lambda: engines.restart(B)  # a stage of it only: the process is the same
    done = await running.sync(1)
    assert (done.status, engines.hashed()) == (502, [2, 2])
    assert B in done.body["uncertain"]


async def test_who_may_hold_more_than_was_proven_is_asked_with_all_others(running, engines):
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


def test_the_digest_over_all_tensors_and_no_others_is_known(tmp_path):
    known = known_by(delivered(), version_of(tmp_path, **DIGESTS), "x")
    assert (known.names, known.digest.whole) == ({"a", "b"}, roll_up(DIGESTS))
    assert known.counts("x", "v1")
    assert not known.counts("y", "v1")
    assert not known.counts("x", None)


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
def test_anything_less_is_not(tmp_path, fields, instance):
    assert known_by(delivered(**fields), version_of(tmp_path, **DIGESTS), instance) is None


def test_a_version_without_a_name_or_digests_can_not_be_told_from_another(tmp_path):
    assert known_by(delivered(), version_of(tmp_path, label=None, **DIGESTS), "x") is None
    undigested = version_of(tmp_path, a="", b="")
    assert known_by(delivered(checksum=roll_up({})), undigested, "x") is None

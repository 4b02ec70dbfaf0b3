import msgspec
import pytest

from omni_proxy.weight_sync.protocol.published_version import (
    ALL_WORKERS,
    PublishedVersion,
    TargetVersion,
)

A, B = "http://a", "http://b"


def target(label="v2", **fields):
    return TargetVersion(label=label, **{"is_new_label": True, "models": ("m",), **fields})


def test_a_version_that_an_older_release_wrote_can_be_read():
    raw = b'{"epoch":4,"label":"v2","due":{"http://a":{"label":"v2","epoch":4,"named":true}}}'
    published = msgspec.json.decode(raw, type=PublishedVersion)
    assert published.target_for(A, "m").is_new_label
    assert msgspec.to_builtins(published)["due"][A]["named"]


def test_an_update_of_all_workers_is_the_target_of_its_models():
    published = PublishedVersion(4, None, {A: target("old")}).after(target(), None)
    assert (published.epoch, published.label, list(published.targets)) == (5, "v2", [ALL_WORKERS])
    assert published.target_for(A, "m").epoch == published.target_for("http://new", "m").epoch == 5
    assert published.target_for(B, "another") is None
    assert published.target_for(B, None) is None


def test_an_update_of_some_workers_replaces_their_target():
    published = PublishedVersion(0, None).after(target("v1"), None).after(target("v2"), [A])
    assert [published.target_for(url, "m").label for url in (A, B)] == ["v2", "v1"]
    assert [published.target_for(url, "m").epoch for url in (A, B)] == [2, 1]


@pytest.mark.parametrize(
    ("row", "label", "proven", "missed", "needs_digest"),
    [
        (target(), "v2", True, False, False),
        (target(), "v1", False, True, False),
        (target(), None, False, False, False),
        (target(None), "v1", False, False, False),
        (target(waived=True), "v1", False, False, False),
        (target("default", is_new_label=False), "default", False, False, False),
        (target("default", is_new_label=False, digest="d"), "default", False, False, True),
        (
            target("default", is_new_label=False, digest="d", waived=True),
            "default",
            False,
            False,
            False,
        ),
        (target(None, is_new_label=False, digest="d"), None, False, False, True),
    ],
)
def test_a_label_proves_or_disproves_a_target(row, label, proven, missed, needs_digest):
    verdict = (row.is_proven_by(label), row.is_missed_by(label), row.needs_digest(label))
    assert verdict == (proven, missed, needs_digest)


def test_a_waived_worker_has_no_target_until_the_next_update():
    published = PublishedVersion(0, None).after(target(), None).waive({A: "m", B: "another"})
    assert not published.target_for(A, "m").is_missed_by("v1")
    assert published.target_for(A, "m").is_proven_by("v2")
    assert published.target_for("http://c", "m").is_missed_by("v1")
    assert B not in published.targets
    assert published.after(target("v3"), None).target_for(A, "m").is_missed_by("v2")


def test_a_published_version_survives_encoding():
    published = PublishedVersion(0, None).after(target(models=("m", None)), None).waive({A: "m"})
    assert msgspec.json.decode(msgspec.json.encode(published), type=PublishedVersion) == published


def test_further_workers_get_the_published_epoch():
    first = PublishedVersion(3, "v1").after(TargetVersion(label="v2"), ["a"])
    both = first.extended(first.targets["a"], ["b"])
    assert (both.epoch, both.label) == (4, "v2")
    assert both.targets["b"] == both.targets["a"]
    assert list(both.extended(both.targets["a"], [ALL_WORKERS], only=True).targets) == [ALL_WORKERS]


def test_withdrawing_a_version_restores_the_former_one_and_reuses_no_epoch():
    before = PublishedVersion(3, "v1", {ALL_WORKERS: TargetVersion(label="v1", epoch=3)})
    tried = before.after(TargetVersion(label="v2"), ["a"])
    former = tried.withdrawn({"a": None}).withdrawn({}, (3, "v1"))
    assert (former.epoch, former.label, former.targets) == (3, "v1", before.targets)
    assert former.after(TargetVersion(label="v3"), None).epoch == 5
    stored = msgspec.json.decode(msgspec.json.encode(former), type=PublishedVersion)
    assert stored.after(TargetVersion(label="v3"), None).epoch == 5
    assert b"highest" not in msgspec.json.encode(before)


def test_withdrawing_a_version_restores_the_own_target_of_a_worker():
    own_target = TargetVersion(label="v0", epoch=2)
    tried = PublishedVersion(3, "v1", {"a": own_target}).after(TargetVersion(label="v2"), ["a"])
    assert tried.withdrawn({"a": own_target}).targets == {"a": own_target}

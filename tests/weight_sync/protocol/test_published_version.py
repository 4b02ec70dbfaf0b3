import msgspec
import pytest

from omni_proxy.weight_sync.protocol.published_version import (
    EVERYBODY,
    PublishedVersion,
    TargetVersion,
)

A, B = "http://a", "http://b"


def due(label="v2", **fields):
    return TargetVersion(label=label, **{"named": True, "models": ("m",), **fields})


def test_an_update_for_all_is_due_from_all_of_its_models():
    told = PublishedVersion(4, None, {A: due("old")}).after(due(), None)
    assert (told.epoch, told.label, list(told.due)) == (5, "v2", [EVERYBODY])
    assert told.due_of(A, "m").epoch == told.due_of("http://new", "m").epoch == 5
    assert told.due_of(B, "another") is None
    assert told.due_of(B, None) is None


def test_an_update_for_some_is_due_from_them_whatever_came_before():
    told = PublishedVersion(0, None).after(due("v1"), None).after(due("v2"), [A])
    assert [told.due_of(url, "m").label for url in (A, B)] == ["v2", "v1"]
    assert [told.due_of(url, "m").epoch for url in (A, B)] == [2, 1]


@pytest.mark.parametrize(
    ("row", "label", "proven", "missed", "unclear"),
    [
        (due(), "v2", True, False, False),
        (due(), "v1", False, True, False),
        (due(), None, False, False, False),
        (due(None), "v1", False, False, False),
        (due(waived=True), "v1", False, False, False),
        (due("default", named=False), "default", False, False, False),
        (due("default", named=False, digest="d"), "default", False, False, True),
        (due("default", named=False, digest="d", waived=True), "default", False, False, False),
        (due(None, named=False, digest="d"), None, False, False, True),
    ],
)
def test_what_a_label_tells(row, label, proven, missed, unclear):
    found = (row.proven_by(label), row.missed_with(label), row.open_with(label))
    assert found == (proven, missed, unclear)


def test_who_is_vouched_for_is_due_nothing_until_the_next_update():
    told = PublishedVersion(0, None).after(due(), None).waive({A: "m", B: "another"})
    assert not told.due_of(A, "m").missed_with("v1")
    assert told.due_of(A, "m").proven_by("v2")
    assert told.due_of("http://c", "m").missed_with("v1")
    assert B not in told.due
    assert told.after(due("v3"), None).due_of(A, "m").missed_with("v2")


def test_it_is_kept_whole():
    told = PublishedVersion(0, None).after(due(models=("m", None)), None).waive({A: "m"})
    assert msgspec.json.decode(msgspec.json.encode(told), type=PublishedVersion) == told

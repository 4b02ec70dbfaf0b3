import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.fleet.weight_version import LABEL_BYTES, UNKNOWN_VERSION, WeightVersion
from tests.fleet.entries import NOW, entry, fleet_of

NAMES = {b"x-omni-weight-version", b"x-omni-weight-epoch"}
ENDS = {b"x-omni-weight-version-end", b"x-omni-weight-epoch-end"}
LABELS = st.none() | st.text(st.characters(), max_size=400) | st.text("a%0\r\n é~", max_size=300)
VERSIONS = st.builds(WeightVersion, LABELS, st.integers(0, 3))


def fields(lines):
    """The header fields as h11 parses them."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "h")]))
    client.receive_data(b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n")
    return dict(client.next_event().headers)


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("step-12", "step-12"),
        ("a b/c:d=100%", "a b/c:d=100%"),
        (" v1", "%20v1"),
        ("a\r\nx-evil: 1", "a%0D%0Ax-evil%3A%201"),
        ("é", "%C3%A9"),
        ("x" * LABEL_BYTES, "x" * LABEL_BYTES),
        ("", ""),
        (None, ""),
    ],
)
def test_labels_are_encoded_for_header_fields(label, shown):
    version = WeightVersion(label, 3)
    assert version.shown == shown
    expected = {b"x-omni-weight-version": shown.encode()} if shown else {}
    assert fields(version.lines) == {**expected, b"x-omni-weight-epoch": b"3"}


def test_unknown_parts_of_a_version_have_no_field():
    assert UNKNOWN_VERSION.lines == b""
    assert WeightVersion("v1").lines == b"x-omni-weight-version: v1\r\n"


def test_long_labels_with_the_same_beginning_stay_different():
    one, other = WeightVersion("x" * 300 + "1"), WeightVersion("x" * 300 + "2")
    assert one.shown != other.shown
    assert len(one.shown) == len(other.shown) == LABEL_BYTES


@given(VERSIONS, VERSIONS)
def test_any_label_makes_only_the_fields_of_versions(start, end):
    version_fields = fields(end.lines)
    assert set(version_fields) <= NAMES
    assert all(len(value) <= LABEL_BYTES for value in version_fields.values())
    changed = fields(end.end_header_lines(start))
    assert set(changed) <= ENDS
    first_known = start == UNKNOWN_VERSION and end.epoch == 0
    assert (b"x-omni-weight-version-end" in changed) == (start != end and not first_known)


def test_the_end_fields_have_the_changed_version():
    before = WeightVersion("v1", 4)
    assert fields(WeightVersion("v2", 5).end_header_lines(before)) == {
        b"x-omni-weight-version-end": b"v2",
        b"x-omni-weight-epoch-end": b"5",
    }
    assert fields(WeightVersion("v1", 5).end_header_lines(before)) == {
        b"x-omni-weight-version-end": b"v1",
        b"x-omni-weight-epoch-end": b"5",
    }
    assert fields(UNKNOWN_VERSION.end_header_lines(before)) == {b"x-omni-weight-version-end": b""}
    assert WeightVersion("v1", 4).end_header_lines(before) == b""


def test_setting_the_same_version_again_is_no_change():
    fleet = fleet_of(entry("a"))
    (worker,) = fleet.workers
    versions = []
    fleet.watch(lambda: versions.append(worker.weight_version))
    fleet.set_version(worker, "v1", 1)
    version = worker.weight_version
    fleet.set_version(worker, "v1", 1)
    assert worker.weight_version is version
    assert (worker.weight_label, worker.weight_epoch, len(versions)) == ("v1", 1, 1)


def test_the_version_is_unknown_after_the_process_exits():
    fleet = fleet_of(entry("a"))
    (worker,) = fleet.workers
    fleet.set_version(worker, "v1", 1)
    fleet.process_exited(worker, "SIGKILL", NOW)
    assert worker.weight_version == UNKNOWN_VERSION


def test_a_label_read_from_the_engine_is_no_change_of_version():
    assert WeightVersion("v1").end_header_lines(UNKNOWN_VERSION) == b""
    assert (
        fields(WeightVersion("v1", 1).end_header_lines(UNKNOWN_VERSION))[
            b"x-omni-weight-version-end"
        ]
        == b"v1"
    )
    assert (
        fields(WeightVersion("v2").end_header_lines(WeightVersion("v1")))[
            b"x-omni-weight-version-end"
        ]
        == b"v2"
    )

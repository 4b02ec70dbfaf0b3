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
    """As an independent reader of HTTP has them."""
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
def test_a_label_is_shown_as_a_head_can_hold_it(label, shown):
    version = WeightVersion(label, 3)
    assert version.shown == shown
    wanted = {b"x-omni-weight-version": shown.encode()} if shown else {}
    assert fields(version.lines) == {**wanted, b"x-omni-weight-epoch": b"3"}


def test_what_is_not_known_is_not_reported():
    assert UNKNOWN_VERSION.lines == b""
    assert WeightVersion("v1").lines == b"x-omni-weight-version: v1\r\n"


def test_long_labels_that_begin_alike_stay_apart():
    one, other = WeightVersion("x" * 300 + "1"), WeightVersion("x" * 300 + "2")
    assert one.shown != other.shown
    assert len(one.shown) == len(other.shown) == LABEL_BYTES


@given(VERSIONS, VERSIONS)
def test_whatever_the_label_the_lines_are_fields_of_ours_and_nothing_else(start, end):
    reported = fields(end.lines)
    assert set(reported) <= NAMES
    assert all(len(value) <= LABEL_BYTES for value in reported.values())
    changed = fields(end.end_header_lines(start))
    assert set(changed) <= ENDS
    learnt = start == UNKNOWN_VERSION and end.epoch == 0
    assert (b"x-omni-weight-version-end" in changed) == (start != end and not learnt)


def test_the_end_names_what_has_changed():
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


def test_a_new_version_is_a_change_of_the_fleet_and_the_same_again_is_none():
    fleet = fleet_of(entry("a"))
    (worker,) = fleet.workers
    heard = []
    fleet.watch(lambda: heard.append(worker.version))
    fleet.set_version(worker, "v1", 1)
    kept = worker.version
    fleet.set_version(worker, "v1", 1)
    assert worker.version is kept
    assert (worker.weight_version, worker.weight_epoch, len(heard)) == ("v1", 1, 1)


def test_of_a_process_that_is_gone_the_weights_are_not_known():
    fleet = fleet_of(entry("a"))
    (worker,) = fleet.workers
    fleet.set_version(worker, "v1", 1)
    fleet.process_exited(worker, "SIGKILL", NOW)
    assert worker.version == UNKNOWN_VERSION


def test_a_label_that_is_learnt_is_no_change_and_one_that_we_put_there_is():
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

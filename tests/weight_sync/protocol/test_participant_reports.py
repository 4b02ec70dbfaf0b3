import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.weight_sync.protocol.participant_reports import (
    ReceiveProgress,
    StallDetector,
    parse_progress,
)

OK = ("", "")


def progress(nbytes, age, state="receiving", error=""):
    return ReceiveProgress(state, (0, nbytes), age, error)


def test_progress_is_parsed_from_server_info_only():
    report = {
        "state": "receiving",
        "buckets_done": 1,
        "bytes_received": 7,
        "secs": 2,
        "error": None,
    }
    assert parse_progress({"weight_sync": report}) == ReceiveProgress("receiving", (1, 7), 2.0)
    for info in (None, [], {}, {"weight_sync": None}, {"weight_sync": {"state": 3}}):
        assert parse_progress(info) is None


def test_progress_of_a_replica_of_the_previous_release_has_the_old_name():
    info = {"weight_sync": {"state": "receiving", "bytes_come": 7}}
    assert parse_progress(info).received == (0, 7)


def test_a_failed_receive_is_reported_with_the_name_of_the_participant():
    detector = StallDetector(0.0)
    reports = {"a": progress(1, 1.0), "b": progress(0, 1.0, "failed", "the trainer is gone")}
    assert detector.update(1.0, reports, 30.0, 60.0) == (
        "b: its receive ended: the trainer is gone",
        "b",
    )


@pytest.mark.parametrize(("nbytes", "limit"), [(0, 8.0), (5, 3.0)])
def test_no_progress_until_the_limit_is_a_stall_and_the_first_byte_has_longer(nbytes, limit):
    detector = StallDetector(0.0)
    now, reason = 0.0, ""
    while not reason and now < 20:
        now += 0.5
        reason, _ = detector.update(now, {"a": progress(nbytes, now)}, 3.0, 8.0)
    assert reason == f"nothing was received for {limit:g} s: a"
    assert now == limit + (0.5 if nbytes else 0.0)


@pytest.mark.parametrize("state", ["received", "applying", "grouped"])
def test_a_participant_that_received_everything_never_stalls(state):
    detector = StallDetector(0.0)
    for now in range(1, 50):
        assert detector.update(now, {"a": progress(9, float(now), state)}, 3.0, 8.0) == OK


def test_a_repeated_report_is_no_stall():
    detector = StallDetector(0.0)
    report = progress(9, 1.0)
    for now in range(1, 50):
        assert detector.update(now, {"a": report}, 3.0, 8.0) == OK
        assert detector.update(now, {}, 3.0, 8.0) == OK


@given(st.lists(st.integers(1, 5), min_size=1, max_size=40))
def test_regular_progress_is_never_a_stall(gaps):
    detector, now = StallDetector(0.0), 0.0
    for nbytes, gap in enumerate(gaps):
        for _ in range(gap):
            now += 0.5
            assert detector.update(now, {"a": progress(nbytes, now)}, 3.0, 3.0) == OK

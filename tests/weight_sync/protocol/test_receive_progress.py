import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.weight_sync.protocol.receive_progress import (
    ReceiveProgress,
    StallDetector,
    receiving_of,
)

WELL = ("", "")


def coming(nbytes, age, state="receiving", error=""):
    return ReceiveProgress(state, (0, nbytes), age, error)


def test_it_is_read_out_of_what_a_server_tells_and_of_nothing_else():
    told = {"state": "receiving", "buckets_done": 1, "bytes_come": 7, "secs": 2, "error": None}
    assert receiving_of({"weight_sync": told}) == ReceiveProgress("receiving", (1, 7), 2.0)
    for strange in (None, [], {}, {"weight_sync": None}, {"weight_sync": {"state": 3}}):
        assert receiving_of(strange) is None


def test_a_member_whose_receive_has_failed_ends_it_by_name():
    clock = StallDetector(0.0)
    told = {"a": coming(1, 1.0), "b": coming(0, 1.0, "failed", "the trainer is gone")}
    assert clock.hear(1.0, told, 30.0, 60.0) == ("b: its receive ended: the trainer is gone", "b")


@pytest.mark.parametrize(("nbytes", "limit"), [(0, 8.0), (5, 3.0)])
def test_nothing_new_for_too_long_ends_it_and_the_first_byte_has_longer(nbytes, limit):
    clock = StallDetector(0.0)
    now, why = 0.0, ""
    while not why and now < 20:
        now += 0.5
        why, _ = clock.hear(now, {"a": coming(nbytes, now)}, 3.0, 8.0)
    assert why == f"nothing has come for {limit:g} s: a"
    assert now == limit + (0.5 if nbytes else 0.0)


@pytest.mark.parametrize("state", ["received", "applying", "grouped"])
def test_who_has_everything_waits_for_nothing(state):
    clock = StallDetector(0.0)
    for now in range(1, 50):
        assert clock.hear(now, {"a": coming(9, float(now), state)}, 3.0, 8.0) == WELL


def test_what_is_only_repeated_says_nothing_of_now():
    clock = StallDetector(0.0)
    old = coming(9, 1.0)
    for now in range(1, 50):
        assert clock.hear(now, {"a": old}, 3.0, 8.0) == WELL
        assert clock.hear(now, {}, 3.0, 8.0) == WELL


@given(st.lists(st.integers(1, 5), min_size=1, max_size=40))
def test_while_bytes_come_within_the_limit_it_never_ends(gaps):
    clock, now = StallDetector(0.0), 0.0
    for nbytes, gap in enumerate(gaps):
        for _ in range(gap):
            now += 0.5
            assert clock.hear(now, {"a": coming(nbytes, now)}, 3.0, 3.0) == WELL

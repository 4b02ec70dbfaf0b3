"""Counts of peers against a model that keeps every message, and what a proxy publishes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.cluster.messages import CountsMessage, decode, encode, target_key
from omni_proxy.cluster.peer_counts import (
    MOST_IN_FLIGHT,
    OwnCounts,
    PeerCounts,
    first_seen,
    smoothed,
)

MEMBERS = ("a", "b", "c")
TARGETS = st.integers(0, 4)
LEASE = 5.0
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("publish"),
            st.sampled_from(MEMBERS),
            st.dictionaries(TARGETS, st.integers(1, 9)),
            st.booleans(),  # whole
            st.booleans(),  # lost on the way
        ),
        st.tuples(st.just("wait"), st.sampled_from([0.1, 2.0, 6.0])),
        st.tuples(st.just("leave"), st.sampled_from(MEMBERS)),
    ),
    max_size=30,
)


@given(STEPS)
def test_totals_are_the_sum_of_what_each_live_peer_published_last(steps):
    heard = PeerCounts("me")
    senders = {name: OwnCounts(name) for name in MEMBERS}
    seen: dict[
        str, tuple[float, dict[int, int]]
    ] = {}  # when heard, counts as of the last whole run
    unbroken = dict.fromkeys(MEMBERS, False)
    now = 0.0
    for step in steps:
        match step:
            case ("wait", secs):
                now += secs
                heard.expire(now, LEASE)
                for name in [name for name, (at, _) in seen.items() if now - at > LEASE]:
                    del seen[name]
                    unbroken[name] = False
            case ("leave", name):
                heard.leave(name)
                seen.pop(name, None)
                unbroken[name] = False
            case ("publish", name, counts, whole, lost):
                message = senders[name].message(
                    counts, sum(counts.values()), waits=False, whole=whole
                )
                if message is None:
                    continue
                if lost:
                    unbroken[name] = False
                    continue
                heard.take(message, now)
                unbroken[name] |= whole
                before = seen.get(name, (now, {}))[1]
                seen[name] = (now, counts if unbroken[name] else before)
    expected: dict[int, int] = {}
    for _, counts in seen.values():
        for target, count in counts.items():
            expected[target] = expected.get(target, 0) + count
    assert heard.totals == expected
    assert set(heard.peers) == set(seen)


def test_only_changes_are_published():
    own = OwnCounts("me")
    first = own.message({1: 2, 2: 1}, 3, waits=False, whole=False)
    assert first is not None
    assert first.in_flight == {1: 2, 2: 1}
    assert own.message({1: 2, 2: 1}, 3, waits=False, whole=False) is None
    changed = own.message({1: 3}, 3, waits=False, whole=False)
    assert changed is not None
    assert (changed.number, changed.in_flight) == (2, {1: 3, 2: 0})
    whole = own.message({1: 3}, 3, waits=False, whole=True)
    assert whole is not None
    assert whole.in_flight == {1: 3}


def test_a_proxy_does_not_count_its_own_messages():
    heard = PeerCounts("me")
    heard.take(CountsMessage("me", 1, True, 4, False, {1: 4}), 0.0)
    assert heard.totals == {}


@pytest.mark.parametrize(
    ("published", "count"), [(-5, 0), (-(2**63), 0), (2**64 - 1, MOST_IN_FLIGHT)]
)
def test_what_no_proxy_can_have_in_flight_is_bounded(published, count):
    counts = PeerCounts("own")
    counts.take(CountsMessage("peer", 1, True, published, False, {7: published}), now=0.0)
    assert counts.totals.get(7, 0) == count
    assert counts.peers["peer"].total == count


def test_a_message_that_cannot_be_read_is_none():
    message = CountsMessage("a", 1, True, 4, False, {target_key("http://w:80"): 4})
    assert decode(encode(message)) == message
    assert decode(b"\x93\xa5other\x01\x02") is None
    assert decode(encode(message)[:-3]) is None


SHARE = 0.05


def after(looks, before, total):
    for _ in range(looks):
        before = smoothed(before, total, SHARE)
    return before


@given(st.floats(0, 100), st.integers(0, 100), st.floats(0.001, 5))
def test_it_lies_between_before_and_now(before, total, share):
    value = smoothed(before, total, share)
    assert min(before, total) <= value <= max(before, total)


@given(st.integers(0, 100), st.integers(0, 100))
def test_it_reaches_what_lasts_exactly(before, total):
    assert after(200, before, total) == total


def test_fluctuation_passes_slowly_and_a_burst_fast():
    assert smoothed(10.0, 13, SHARE) == 10.15
    assert smoothed(10.0, 30, SHARE) == 20.0
    assert smoothed(30.0, 0, SHARE) == 15.0


def test_one_request_where_none_was_is_seen_at_once():
    assert smoothed(0.0, 1, SHARE) > 0


def test_a_request_elsewhere_counts_from_the_moment_that_it_is_heard_of():
    assert 0 < first_seen(0.0, 1) < 1
    assert first_seen(3.0, 5) == 3.0
    assert first_seen(0.0, 0) == 0

"""Counts of peers against a model that keeps every message, and what a proxy publishes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.cluster.messages import CountsMessage, decode, encode, target_key
from omni_proxy.cluster.peer_counts import (
    MOST_IN_FLIGHT,
    OwnCounts,
    PeerCounts,
    Sharing,
    Use,
    first_seen,
    own_limit,
    share_of,
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


@st.composite
def fleets(draw):
    """In flight by proxy, which of them wait, and what all of them know alike."""
    count = draw(st.integers(2, 6))
    own = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    waits = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return draw(st.integers(1, 9)), own, waits, draw(st.integers(0, 50)), draw(st.integers(0, 99))


def sharings(own, waits, turn):
    takers = [rank for rank, waiting in enumerate(waits) if waiting] or list(range(len(own)))
    for rank in range(len(own)):
        yield Sharing(
            members=len(own),
            rank=rank,
            takers=len(takers),
            taker_rank=takers.index(rank) if rank in takers else None,
            turn=turn,
            others_wait=any(waiting for other, waiting in enumerate(waits) if other != rank),
        )


def limits(bound, own, waits, turn, target):
    found, members = [], len(own)
    for sharing in sharings(own, waits, turn):
        reserved = sum(
            max(0, share_of(bound, members, rank, target) - own[rank])
            for rank in range(members)
            if waits[rank] and rank != sharing.rank
        )
        have = own[sharing.rank]
        use = Use(bound, have, sum(own) - have, reserved)
        found.append(own_limit(use, sharing, target))
    return found


@given(fleets())
def test_shares_add_up_to_the_bound(fleet):
    bound, own, _, _, target = fleet
    shares = [share_of(bound, len(own), rank, target) for rank in range(len(own))]
    assert sum(shares) == bound
    assert max(shares) - min(shares) <= 1


@given(fleets())
def test_no_proxy_exceeds_the_bound_and_all_together_not_twice_of_it(fleet):
    bound, own, waits, turn, target = fleet
    free = max(0, bound - sum(own))
    found = limits(bound, own, waits, turn, target)
    grown = [max(0, limit - have) for limit, have in zip(found, own, strict=True)]
    assert max(grown) <= free
    if sum(own) <= bound:
        assert sum(own) + sum(grown) <= 2 * bound


@given(fleets())
def test_where_all_wait_only_what_some_have_above_their_shares_is_above_the_bound(fleet):
    bound, own, _, turn, target = fleet
    shares = [share_of(bound, len(own), rank, target) for rank in range(len(own))]
    above = sum(max(0, have - share) for have, share in zip(own, shares, strict=True))
    found = limits(bound, own, [True] * len(own), turn, target)
    grown = sum(max(0, limit - have) for limit, have in zip(found, own, strict=True))
    assert sum(own) + grown <= max(bound + above, sum(own))


@given(fleets())
def test_who_has_more_than_its_share_gives_it_up_while_another_waits(fleet):
    bound, own, waits, turn, target = fleet
    own[0] = bound + 1
    waits[-1] = True
    share = share_of(bound, len(own), 0, target)
    assert limits(bound, own, waits, turn, target)[0] <= share


@given(fleets())
def test_a_free_place_is_given_to_a_proxy_that_waits_in_some_turn(fleet):
    bound, own, waits, _, target = fleet
    if sum(own) >= bound or not any(waits):
        return
    takers = [rank for rank, waiting in enumerate(waits) if waiting]
    assert any(
        limits(bound, own, waits, turn, target)[rank] > own[rank]
        for turn in range(len(own))
        for rank in takers
    )


def test_a_proxy_that_waits_alone_gets_all_free_places():
    assert limits(4, [0, 0, 0], [True, False, False], 7, 3)[0] == 4
    assert limits(4, [1, 0, 2], [True, False, False], 7, 3)[0] == 2


def test_alone_the_bound_is_its_own():
    assert own_limit(Use(3, 1, 0), Sharing(1, 0, 1, 0, 5, others_wait=False), 9) == 3

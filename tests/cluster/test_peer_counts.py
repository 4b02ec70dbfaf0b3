"""Counts of peers, compared with a model that keeps every message; published counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.cluster.messages import (
    AckMessage,
    CountsMessage,
    WorkerMessage,
    decode,
    encode,
    target_key,
)
from omni_proxy.cluster.peer_counts import (
    MAX_IN_FLIGHT,
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
            st.booleans(),  # lost
        ),
        st.tuples(st.just("wait"), st.sampled_from([0.1, 2.0, 6.0])),
        st.tuples(st.just("leave"), st.sampled_from(MEMBERS)),
    ),
    max_size=30,
)


@given(STEPS)
def test_totals_are_the_sum_of_the_latest_counts_of_live_peers(steps):
    peer_counts = PeerCounts("me")
    senders = {name: OwnCounts(name) for name in MEMBERS}
    latest: dict[
        str, tuple[float, dict[int, int]]
    ] = {}  # time of receipt, and counts since the last whole message
    in_sequence = dict.fromkeys(MEMBERS, False)
    now = 0.0
    for step in steps:
        match step:
            case ("wait", secs):
                now += secs
                peer_counts.expire(now, LEASE)
                for name in [
                    name for name, (received_at, _) in latest.items() if now - received_at > LEASE
                ]:
                    del latest[name]
                    in_sequence[name] = False
            case ("leave", name):
                peer_counts.leave(name)
                latest.pop(name, None)
                in_sequence[name] = False
            case ("publish", name, counts, whole, lost):
                message = senders[name].message(
                    counts, sum(counts.values()), waits=False, whole=whole
                )
                if message is None:
                    continue
                if lost:
                    in_sequence[name] = False
                    continue
                peer_counts.take(message, now)
                in_sequence[name] |= whole
                before = latest.get(name, (now, {}))[1]
                latest[name] = (now, counts if in_sequence[name] else before)
    expected: dict[int, int] = {}
    for _, counts in latest.values():
        for target, count in counts.items():
            expected[target] = expected.get(target, 0) + count
    assert peer_counts.totals == expected
    assert set(peer_counts.peers) == set(latest)


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
    peer_counts = PeerCounts("me")
    peer_counts.take(CountsMessage("me", 1, True, 4, False, {1: 4}), 0.0)
    assert peer_counts.totals == {}


@pytest.mark.parametrize(
    ("published", "count"), [(-5, 0), (-(2**63), 0), (2**64 - 1, MAX_IN_FLIGHT)]
)
def test_published_counts_are_bounded(published, count):
    counts = PeerCounts("own")
    counts.take(CountsMessage("peer", 1, True, published, False, {7: published}), now=0.0)
    assert counts.totals.get(7, 0) == count
    assert counts.peers["peer"].total == count


def test_an_invalid_message_is_none():
    message = CountsMessage("a", 1, True, 4, False, {target_key("http://w:80"): 4})
    assert decode(encode(message)) == message
    assert decode(b"\x93\xa5other\x01\x02") is None
    assert decode(encode(message)[:-3]) is None


@pytest.mark.parametrize("number", [-1, 2**62 + 1])
def test_a_message_with_a_number_that_no_proxy_reaches_is_invalid(number):
    """Each later one would count as an older one."""
    for message in (
        CountsMessage("a", number, True, 0, False, {}),
        AckMessage("a", number, 1),
        AckMessage("a", 1, number),
        WorkerMessage("a", number, b""),
    ):
        assert decode(encode(message)) is None


SHARE = 0.05


def smoothed_repeatedly(times, value, total):
    for _ in range(times):
        value = smoothed(value, total, SHARE)
    return value


@given(st.floats(0, 100), st.integers(0, 100), st.floats(0.001, 5))
def test_a_smoothed_value_lies_between_the_old_and_the_new(before, total, share):
    value = smoothed(before, total, share)
    assert min(before, total) <= value <= max(before, total)


@given(st.integers(0, 100), st.integers(0, 100))
def test_a_smoothed_value_reaches_a_constant_exactly(before, total):
    assert smoothed_repeatedly(200, before, total) == total


def test_small_changes_are_followed_slowly_and_bursts_fast():
    assert smoothed(10.0, 13, SHARE) == 10.15
    assert smoothed(10.0, 30, SHARE) == 20.0
    assert smoothed(30.0, 0, SHARE) == 15.0


def test_the_first_request_is_seen_at_once():
    assert smoothed(0.0, 1, SHARE) > 0


def test_a_first_request_at_a_peer_counts_from_its_message_on():
    assert 0 < first_seen(0.0, 1) < 1
    assert first_seen(3.0, 5) == 3.0
    assert first_seen(0.0, 0) == 0


@st.composite
def fleets(draw):
    """A limit, counts in flight by proxy, which proxies wait, and the turn and target."""
    count = draw(st.integers(2, 6))
    own = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    waits = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return draw(st.integers(1, 9)), own, waits, draw(st.integers(0, 50)), draw(st.integers(0, 99))


def sharings(own, waits, turn):
    candidates = [rank for rank, waiting in enumerate(waits) if waiting] or list(range(len(own)))
    for rank in range(len(own)):
        yield Sharing(
            members=len(own),
            rank=rank,
            takers=len(candidates),
            taker_rank=candidates.index(rank) if rank in candidates else None,
            turn=turn,
            others_wait=any(waiting for other, waiting in enumerate(waits) if other != rank),
        )


def limits(bound, own, waits, turn, target):
    own_limits, members = [], len(own)
    for sharing in sharings(own, waits, turn):
        reserved = sum(
            max(0, share_of(bound, members, rank, target) - own[rank])
            for rank in range(members)
            if waits[rank] and rank != sharing.rank
        )
        held = own[sharing.rank]
        use = Use(bound, held, sum(own) - held, reserved)
        own_limits.append(own_limit(use, sharing, target))
    return own_limits


@given(fleets())
def test_shares_add_up_to_the_limit(fleet):
    bound, own, _, _, target = fleet
    shares = [share_of(bound, len(own), rank, target) for rank in range(len(own))]
    assert sum(shares) == bound
    assert max(shares) - min(shares) <= 1


@given(fleets())
def test_one_proxy_never_exceeds_the_limit_nor_all_together_twice_the_limit(fleet):
    bound, own, waits, turn, target = fleet
    free = max(0, bound - sum(own))
    own_limits = limits(bound, own, waits, turn, target)
    growth = [max(0, limit - held) for limit, held in zip(own_limits, own, strict=True)]
    assert max(growth) <= free
    if sum(own) <= bound:
        assert sum(own) + sum(growth) <= 2 * bound


@given(fleets())
def test_if_all_wait_the_limit_is_exceeded_by_at_most_what_exceeds_shares(fleet):
    bound, own, _, turn, target = fleet
    shares = [share_of(bound, len(own), rank, target) for rank in range(len(own))]
    above = sum(max(0, held - share) for held, share in zip(own, shares, strict=True))
    own_limits = limits(bound, own, [True] * len(own), turn, target)
    growth = sum(max(0, limit - held) for limit, held in zip(own_limits, own, strict=True))
    assert sum(own) + growth <= max(bound + above, sum(own))


@given(fleets())
def test_a_proxy_above_its_share_shrinks_to_it_while_another_waits(fleet):
    bound, own, waits, turn, target = fleet
    own[0] = bound + 1
    waits[-1] = True
    share = share_of(bound, len(own), 0, target)
    assert limits(bound, own, waits, turn, target)[0] <= share


@given(fleets())
def test_a_waiting_proxy_gets_a_free_place_in_some_turn(fleet):
    bound, own, waits, _, target = fleet
    if sum(own) >= bound or not any(waits):
        return
    candidates = [rank for rank, waiting in enumerate(waits) if waiting]
    assert any(
        limits(bound, own, waits, turn, target)[rank] > own[rank]
        for turn in range(len(own))
        for rank in candidates
    )


def test_the_only_waiting_proxy_gets_all_free_places():
    assert limits(4, [0, 0, 0], [True, False, False], 7, 3)[0] == 4
    assert limits(4, [1, 0, 2], [True, False, False], 7, 3)[0] == 2


def test_a_single_member_has_the_whole_limit():
    assert own_limit(Use(3, 1, 0), Sharing(1, 0, 1, 0, 5, others_wait=False), 9) == 3

"""What each of several proxies may have of a worker's bound."""

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.cluster.slot_share import Sharing, Use, own_limit, share_of


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
